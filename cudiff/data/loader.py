"""Batches in the keyed order: drawn on the device where the data fits there, else streamed from the host."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from cudiff.backend import Staging, memory_total
from cudiff.config import Config
from cudiff.data.dataset import Dataset
from cudiff.ops.batch import draw_batch
from cudiff.tensor import Tensor

RESIDENT_SHARE = 0.25
"""Data may take this share of the GPU's memory before it is streamed."""


class Loader:
    """The batches of a training run; which images a batch holds depends on (seed, batch number) alone.

    Streamed batches are drawn and copied to the GPU ahead, by a thread and a stream of their own.

    Parameters
    ----------
    config : uses batch_size, accumulate, seed, flip, residency, num_classes
    first : number of the first batch `next` streams, where a run is resumed
    """

    def __init__(self, dataset: Dataset, config: Config, device: str, first: int = 0):
        self.config, self.device = config, device
        fits = device == "cpu" or dataset.images.nbytes < RESIDENT_SHARE * memory_total(device)
        self.resident = config.residency == "device" or (config.residency == "auto" and fits)
        home = device if self.resident else "cpu"
        self._images = Tensor(dataset.images, device=home)
        conditional = config.num_classes > 0 and dataset.labels is not None
        self._labels = Tensor(dataset.labels, device=home) if conditional else None
        self._number = first
        self._pool = None if self.resident else ThreadPoolExecutor(1)
        self._stages = (Staging(device), Staging(device))  # one holds the batches in use, one gets the next
        self._ahead: Future | None = None

    def batch(self, step: Tensor, streamed: Sequence[Tensor], index: int) -> tuple[Tensor, Tensor | None]:
        """Images float32 (N, H, W, C) in [−1, 1] and labels int32 (N,) or None.

        step: the batch's number, on the device. streamed: what `next` gave; its `index`-th batch is taken.
        """
        if self.resident:
            return self._draw(step)
        width = 1 if self._labels is None else 2
        images, *labels = streamed[index * width : (index + 1) * width]
        return images, labels[0] if labels else None

    def next(self) -> tuple[Tensor, ...]:
        """The next update's batches on the device, which hold until the next call; empty for resident data."""
        if self._pool is None:
            return ()
        last, stage = self._stages
        last.release()
        (self._ahead or self._pool.submit(self._draw_on_host, stage)).result()
        self._stages = stage, last
        self._ahead = self._pool.submit(self._draw_on_host, last)
        return tuple(Tensor(array) for array in stage.take())

    def normalised(self, dataset: Dataset, indices: Sequence[int] | np.ndarray) -> tuple[Tensor, Tensor | None]:
        """Chosen images of any data set as training sees them, without flips."""
        chosen = dataset.subset(np.asarray(indices))
        images = Tensor(chosen.images.astype(np.float32) / 127.5 - 1, device=self.device)
        return images, None if self._labels is None else Tensor(chosen.labels, device=self.device)

    def _draw(self, step: Tensor) -> tuple[Tensor, Tensor | None]:
        config = self.config
        return draw_batch(self._images, self._labels, step, config.batch_size, config.seed, config.flip)

    def _draw_on_host(self, stage: Staging) -> None:
        arrays = []
        for _ in range(self.config.accumulate):
            batch = self._draw(Tensor(np.array([self._number], np.int32)))
            arrays += [value.data for value in batch if value is not None]
            self._number += 1
        stage.fill(arrays)
        stage.upload()
