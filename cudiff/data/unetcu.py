"""The training data of unet.cu (github.com/clu0/unet.cu, prepare_data.py)."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np

from cudiff.data.dataset import Dataset
from cudiff.errors import CudiffError, printable
from cudiff.tensorfile import replacing

MAGIC = 20240620
HEADER = 256  # int32 words
CHUNK = 2**20  # floats converted at once


def write_unetcu(path: str | os.PathLike, dataset: Dataset) -> None:
    """Write a data set's images as `unetcu_file` reads them and unet.cu's trainer does; labels have no place there.

    Raises CudiffError for latents, and where the system refuses.
    """
    if dataset.latents:
        raise CudiffError(f"{dataset.name} holds latents, and unet.cu's training data are pictures: name a data set of "
                          "pictures")
    n, height, width, channels = dataset.images.shape
    header = np.zeros(HEADER, "<i4")
    header[:5] = MAGIC, n, channels, height, width
    with replacing(path) as file:
        file.write(header.tobytes())
        for image in dataset.images:
            file.write((image.transpose(2, 0, 1).astype("<f4") / np.float32(127.5) - 1).tobytes())


def unetcu_file(file: Path) -> Dataset:
    """The images in a .bin of unet.cu, without labels.

    256 little-endian int32: 20240620, N, C, H, W, zeros; then float32 (N, C, H, W) in [-1, 1], which came from bytes
    as x / 127.5 - 1 and becomes bytes again. Raises CudiffError where the file is something else or truncated.
    """
    size = file.stat().st_size
    header = np.fromfile(file, "<i4", HEADER)
    if len(header) < HEADER or header[0] != MAGIC:
        raise CudiffError(f"{file} is not unet.cu's training data (no {MAGIC} at its start): name another file")
    shape = n, channels, height, width = tuple(int(length) for length in header[1:5])
    expected = 4 * HEADER + 4 * math.prod(shape)
    if min(shape) < 1 or size != expected:
        raise CudiffError(
            f"{file} is truncated or damaged: {size:,} bytes, but {'x'.join(map(str, shape))} floats and the header "
            f"take {expected:,}: write it again with prepare_data.py"
        )
    if channels not in (1, 3):
        raise CudiffError(f"{file} has images of {channels} channels: write it again with 1 (gray) or 3 (RGB)")
    stored = np.memmap(file, "<f4", "r", offset=4 * HEADER, shape=shape)
    images = np.empty((n, height, width, channels), dtype=np.uint8)
    step = max(1, CHUNK // math.prod(shape[1:]))
    for first in range(0, n, step):
        chunk = stored[first : first + step]
        peaks = np.abs(chunk).max(axis=(1, 2, 3))
        wrong = np.flatnonzero(~(peaks <= 1.001))  # also where it is NaN
        if wrong.size:
            raise CudiffError(f"{file}: image {first + wrong[0]} leaves [-1, 1]: write it again with prepare_data.py")
        images[first : first + step] = np.round((chunk.transpose(0, 2, 3, 1) + 1) * 127.5).clip(0, 255)
    return Dataset(images, name=printable(file.stem))
