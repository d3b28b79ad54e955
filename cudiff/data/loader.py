"""Batches in the keyed order: drawn on the device where the data fits there, else streamed from the host or a disk."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from cudiff.backend import Array, Staging, array_module, copy_into, memory_total
from cudiff.config import Config
from cudiff.data.dataset import Dataset
from cudiff.data.rows import Rows
from cudiff.ops.batch import draw_batch
from cudiff.tensor import Tensor

RESIDENT_SHARE = 0.25
"""Data may take this share of the GPU's memory before it is streamed."""
UPLOAD = 2**26  # bytes copied at once to a GPU of images in a file


class Loader:
    """The batches of a training run; which images an update sees depends on (seed, its number) alone.

    Streamed batches are drawn and copied to the GPU ahead, by a thread and a stream of their own.

    Parameters
    ----------
    config : uses batch_size, accumulate, seed, flip, residency, num_classes and latent_scale
    first : number of the first update whose batches `next` streams, where a run is resumed
    share : (i, n): of each batch the i-th of n equal parts

    Attributes
    ----------
    passes : list of range
        The samples of each forward pass, of the batch_size · accumulate of an update.
    """

    def __init__(self, dataset: Dataset, config: Config, device: str, first: int = 0,
                 share: tuple[int, int] = (0, 1)):
        self.config, self.device = config, device
        size = config.batch_size // share[1]
        starts = (index * config.batch_size + share[0] * size for index in range(config.accumulate))
        self.passes = [range(start, start + size) for start in starts]
        images = dataset.images
        in_file = isinstance(images, Rows)
        fits = not in_file if device == "cpu" else images.nbytes < RESIDENT_SHARE * memory_total(device)
        self.resident = config.residency == "device" or (config.residency == "auto" and fits)
        home = device if self.resident else "cpu"
        if in_file and home != "cpu":
            images = _copied(images, home)
        self._images = images if in_file and home == "cpu" else Tensor(images, device=home)
        conditional = config.num_classes > 0 and dataset.labels is not None
        self._labels = Tensor(dataset.labels, device=home) if conditional else None
        self._number = first
        self._pool = None if self.resident else ThreadPoolExecutor(1)
        self._stages = (Staging(device), Staging(device))  # one holds the batches in use, one gets the next
        self._ahead: Future | None = None

    def batch(self, step: Tensor, streamed: Sequence[Tensor], index: int) -> tuple[Tensor, Tensor | None]:
        """Images float32 (N, H, W, C) in [−1, 1], or latents times their scale, and labels int32 (N,) or None.

        step: the update's number, on the device. index: of the forward pass. streamed: what `next` gave.
        """
        if self.resident:
            return self._draw(step, index)
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

    @property
    def on_device(self) -> tuple[Tensor, ...]:
        """The data that lies on the device, or, where it is streamed, arrays as two updates' batches take there."""
        held = (self._images, self._labels) if self.resident else (*self.alike(), *self.alike())
        return tuple(tensor for tensor in held if isinstance(tensor, Tensor))

    def alike(self) -> tuple[Tensor, ...]:
        """Tensors of the shapes and dtypes of what `next` gives, with nothing in them."""
        if self.resident:
            return ()
        empty, size = array_module(self.device).empty, self.passes[0].stop - self.passes[0].start
        labels = () if self._labels is None else (Tensor(empty(size, np.int32)),)
        return (Tensor(empty((size, *self._images.shape[1:]), np.float32)), *labels) * len(self.passes)

    def normalised(self, dataset: Dataset, indices: Sequence[int] | np.ndarray) -> tuple[Tensor, Tensor | None]:
        """Chosen images of any data set as training sees them, without flips."""
        chosen = dataset.subset(np.asarray(indices))
        values = np.asarray(chosen.images).astype(np.float32)
        values = values * np.float32(self.config.latent_scale) if chosen.latents else values / 127.5 - 1
        images = Tensor(values, device=self.device)
        return images, None if self._labels is None else Tensor(chosen.labels, device=self.device)

    def _draw(self, step: Tensor, index: int) -> tuple[Tensor, Tensor | None]:
        config = self.config
        of = config.batch_size * config.accumulate
        images, labels = draw_batch(self._images, self._labels, step, of, config.seed, config.flip, self.passes[index])
        return images * config.latent_scale if config.latent_scale not in (0, 1) else images, labels

    def _draw_on_host(self, stage: Staging) -> None:
        arrays = []
        for index in range(self.config.accumulate):
            batch = self._draw(Tensor(np.array([self._number], np.int32)), index)
            arrays += [value.data for value in batch if value is not None]
        self._number += 1
        stage.fill(arrays)
        stage.upload()


def _copied(images: Rows, device: str) -> Array:
    """All of a file's images on a GPU, copied in parts: the host's memory may not hold them."""
    out = array_module(device).empty(images.shape, images.dtype)
    step = max(1, UPLOAD // images[:1].nbytes)
    for first in range(0, len(images), step):
        copy_into(out[first : first + step], images[first : first + step])
    return out
