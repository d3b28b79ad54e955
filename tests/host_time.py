"""How long the host takes for an eager training step, and where: `python -m tests.host_time [preset]`, on a GPU.

The GPU is not waited for within a step. The least of 30 steps is printed, then the lines of cudiff in which a signal
finds the step, every millisecond of 100 steps: with what they call outside of cudiff.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from types import FrameType

import numpy as np

import cudiff
from cudiff.config import PRESETS
from cudiff.data import Dataset
from cudiff.train import Trainer

PACKAGE = Path(cudiff.__file__).parent
STEPS, SAMPLED, SHOWN = 30, 100, 40


def trainer(preset: str, folder: str) -> Trainer:
    """Of the preset, on noise, without a graph."""
    config = PRESETS[preset].replace(device="cuda", validation=0, capture=False)
    size, classes = config.image_size or 32, max(0, config.num_classes)
    images = np.random.default_rng(0).integers(0, 256, (256, size, size, config.channels or 3), np.uint8)
    return Trainer(config, Dataset(images, np.arange(256) % classes, classes) if classes else Dataset(images), folder)


def main() -> None:
    found: Counter[str] = Counter()

    def note(number: int, frame: FrameType | None) -> None:
        while frame is not None and not frame.f_code.co_filename.startswith(str(PACKAGE)):
            frame = frame.f_back
        if frame is not None:
            path = Path(frame.f_code.co_filename).relative_to(PACKAGE)
            found[f"{path}:{frame.f_lineno} {frame.f_code.co_name}"] += 1

    with tempfile.TemporaryDirectory() as folder:
        run = trainer(sys.argv[1] if len(sys.argv) > 1 else "elephants", folder)
        times = []
        for _ in range(STEPS):
            loss = run.train_step().item()  # waits for the GPU
            start = time.perf_counter()
            run.train_step()
            times.append(time.perf_counter() - start)
        print(f"{1e3 * min(times):.1f} ms of the host for a step, loss {loss:.3f}")
        signal.signal(signal.SIGPROF, note)
        signal.setitimer(signal.ITIMER_PROF, 1e-3, 1e-3)
        for _ in range(SAMPLED):
            run.train_step().item()
        signal.setitimer(signal.ITIMER_PROF, 0)
    for place, count in found.most_common(SHOWN):
        print(f"{100 * count / found.total():5.1f} %  {place}")


if __name__ == "__main__":
    main()
