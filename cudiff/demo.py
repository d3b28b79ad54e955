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
from cudiff.evaluate import train_classifier
from cudiff.plot import save_gif, save_grid
from cudiff.train import Trainer

SAMPLES = 256


@dataclass
class DemoResult:
    """share: of the samples that the classifier takes for the class asked for. seconds: all together."""

    share: float
    guidance: float
    classifier_accuracy: float
    seconds: float


def demo(folder: Path, seed: int = 0, device: str = "auto", console: Console | None = None) -> DemoResult:
    """Train a class-conditional U-Net on drawn 16x16 digits, sample it and judge the samples.

    Leaves samples.png (8x8, a class a column), denoising.gif, loss.png and a checkpoint in `folder`, a fresh
    sub-folder of which is used where it holds a run already.
    """
    console = console or Console()
    start = time.perf_counter()
    folder = _fresh(folder)
    config = PRESETS["digits"].replace(seed=seed, device=device, sample_every=0, save_every=0)
    training, test = load_dataset("digits"), load_dataset("digits", part="test")
    trainer = Trainer(config, training, folder)
    console.print(
        f"{len(training):,} drawn digits; a U-Net of {trainer.net.num_parameters():,} parameters on {trainer.device}",
        highlight=False,
    )
    with TrainingDisplay(trainer.config, console) as display:
        trainer.run(display)
    classifier = train_classifier(training, test, trainer.device)
    accuracy = classifier.accuracy(test)
    classes = np.arange(SAMPLES) % config.num_classes
    frames: list[np.ndarray] = []
    images = trainer.preview.sample(SAMPLES, seed, classes, batch_size=64, frames=frames)
    share = float(np.mean(classifier.predict(images) == classes))
    grid_classes = np.arange(64) % 8 + np.arange(64) // 8 % 2 * 2  # rows of 0..7 and of 2..9
    save_grid(folder / "samples.png", trainer.preview.sample(64, seed, grid_classes))
    save_gif(folder / "denoising.gif", frames)
    seconds = time.perf_counter() - start
    console.print(
        f"{share:.1%} of {SAMPLES} samples are taken for the class asked for, at guidance {config.guidance:g}, by a "
        f"classifier that is right on {accuracy:.1%} of fresh digits\n"
        f"pictures in {folder}: samples.png, denoising.gif, loss.png; {seconds:.0f} s in all",
        highlight=False,
    )
    return DemoResult(share, config.guidance, accuracy, seconds)


def _fresh(folder: Path) -> Path:
    """`folder`, or the first of folder-2, folder-3, … that holds no run: what an earlier demo made is kept."""
    candidate, number = folder, 1
    while (candidate / "metrics.jsonl").exists():
        number += 1
        candidate = folder.with_name(f"{folder.name}-{number}")
    return candidate
