"""`cudiff demo`: everything once, small enough for a laptop: drawn digits, training, sampling, judging, pictures."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from cudiff.config import PRESETS
from cudiff.data import load_dataset
from cudiff.display import TrainingDisplay
from cudiff.distributed import ALONE, Group
from cudiff.errors import CudiffError
from cudiff.evaluate import train_classifier
from cudiff.folder import check_free
from cudiff.plot import save_gif, save_grid
from cudiff.signals import Stopped
from cudiff.train import Trainer

SAMPLES = 256
GRID = 64


@dataclass
class DemoResult:
    """share: of the samples that the classifier takes for the class asked for. seconds: all together."""

    share: float
    guidance: float
    classifier_accuracy: float
    seconds: float


def demo(folder: Path, seed: int = 0, device: str = "auto", console: Console | None = None,
         group: Group = ALONE) -> DemoResult | None:
    """Train a class-conditional U-Net on drawn 16x16 digits, sample it and judge the samples.

    A group trains together; then its processes part, and all but the first one are done: they return None.

    Leaves samples.png (8x8, counting up from 0 row by row), denoising.gif, a checkpoint and, where matplotlib is
    installed, loss.png in `folder`, or where that holds a run already, in a new folder beside it. Raises Stopped where
    a signal ended the training.
    """
    console = console or Console()

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    start = time.perf_counter()
    folder = Path(group.exchange(str(free_folder(folder)))[0])
    config = PRESETS["digits"].replace(seed=seed, device=device, sample_every=0, save_every=0)
    training, test = load_dataset("digits"), load_dataset("digits", part="test")
    trainer = Trainer(config, training, folder, group=group)
    say(f"{len(training):,} drawn digits; a U-Net of {trainer.net.num_parameters():,} parameters on {trainer.device}")
    with TrainingDisplay(trainer.config, console) as display:
        trainer.run(display)
    group.close()
    if trainer.stopped_by is not None:
        raise Stopped(trainer.stopped_by)
    if not group.leads:
        return None
    classes = np.arange(SAMPLES) % config.num_classes
    frames: list[np.ndarray] = []
    with console.status("training the classifier") as status:
        classifier = train_classifier(training, test, trainer.device)
        images = trainer.preview.sample(
            SAMPLES, seed, classes, frames=frames,
            progress=lambda done, total: status.update(f"sampling: {done} of {total}"),
        )
    share = float(np.mean(classifier.predict(images) == classes))
    save_grid(folder / "samples.png", images[:GRID])
    save_gif(folder / "denoising.gif", frames)
    seconds = time.perf_counter() - start
    accuracy = classifier.test_accuracy
    pictures = [name for name in ("samples.png", "denoising.gif", "loss.png") if (folder / name).exists()]
    say(
        f"{share:.1%} of {SAMPLES} samples are taken for the class asked for, at guidance {config.guidance:g}, by a "
        f"classifier that is right on {accuracy:.1%} of fresh digits\n"
        f"pictures in {folder}: {', '.join(pictures)}; {seconds:.0f} s in all"
    )
    return DemoResult(share, config.guidance, accuracy, seconds)


def free_folder(folder: Path) -> Path:
    """`folder`, or the first of folder-2, folder-3, … that no run has: what an earlier demo made is kept."""
    candidate, number, home = folder, 1, folder.resolve()  # "." has no name to add a number to
    while True:
        try:
            check_free(candidate)
            return candidate
        except CudiffError:
            number += 1
            candidate = home.parent / f"{home.name}-{number}"
