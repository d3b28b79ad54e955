"""Data sets as uint8 NumPy arrays on the host, from one specification string; and the order training sees them in."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np

from cudiff.data.dataset import Dataset
from cudiff.data.draw import digits
from cudiff.data.idx import has_idx, idx_folder, mnist
from cudiff.data.npz import npz_file
from cudiff.data.pictures import fit, image_folder
from cudiff.data.unetcu import unetcu_file
from cudiff.errors import CudiffError
from cudiff.ops.batch import shuffled_index

__all__ = ["Dataset", "digits", "load_dataset", "mnist", "shuffled_index"]


def load_dataset(
    spec: str | os.PathLike = "digits",
    *,
    part: str = "train",
    image_size: int | None = None,
    channels: int | None = None,
    skip_bad: bool = False,
    count: int | None = None,
    seed: int = 0,
) -> Dataset:
    """Load the data set that `spec` names; its images are uint8 (N, S, S, C).

    spec: "digits" (drawn, 16 pixels unless image_size says otherwise), "mnist" (28 pixels), a folder of images, a
    folder with IDX files named like MNIST's, an .npz with `images` and `labels`, or unet.cu's .bin.
    part: "train" or "test", where the data has both (digits, MNIST, IDX folders).
    image_size: crop to the central square and resize to this; MNIST at 32 is padded instead. channels: 1 or 3.
    skip_bad: leave out images of a folder that do not decode; the data set's `skipped` names them.
    count, seed: how many digits to draw (4,000 for train, 1,000 for test), and which.
    Raises CudiffError, one line that says what to do, for anything missing, damaged or contradictory.
    """
    if part not in ("train", "test"):
        raise CudiffError(f"unknown part '{part}': use train or test")
    if channels not in (None, 1, 3):
        raise CudiffError(f"images cannot have {channels} channels: use 1 (gray) or 3 (RGB)")
    if image_size is not None and image_size < 1:
        raise CudiffError(f"image size {image_size} is too small: use 8 or more")
    if spec == "digits":
        if count is None:
            count = 4000 if part == "train" else 1000
        return fit(digits(count, image_size or 16, seed, part), channels=channels)
    if count is not None:
        raise CudiffError("count says how many digits to draw: leave it out for other data")
    if spec == "mnist":
        return fit(_pad_mnist(mnist(part), image_size), image_size, channels)

    try:
        path = Path(spec).expanduser()
    except RuntimeError:
        raise CudiffError(f"'{spec}' begins with ~ and names no user: give the whole path") from None
    try:
        return _load_path(path, part, image_size, channels, skip_bad)
    except OSError as error:
        raise CudiffError(f"cannot read {path} ({error.strerror or error}): check its permissions") from None


def _load_path(path: Path, part: str, image_size: int | None, channels: int | None, skip_bad: bool) -> Dataset:
    if path.is_dir() and has_idx(path):
        return fit(idx_folder(path, part), image_size, channels)
    if not path.exists():
        raise CudiffError(f"no data at '{path}': give digits, mnist, a folder of images, an .npz or a .bin")
    if part == "test":
        raise CudiffError(f"{path} has no test part: hold some of it out, or name a second data set")
    if path.is_dir():
        return image_folder(path, image_size, channels, skip_bad)
    if not path.is_file():
        raise CudiffError(f"{path} is no regular file: give digits, mnist, a folder of images, an .npz or a .bin")
    readers = {".npz": npz_file, ".bin": unetcu_file}
    if path.suffix.lower() not in readers:
        raise CudiffError(f"{path} is not a data set: give digits, mnist, a folder of images, an .npz or a .bin")
    return fit(readers[path.suffix.lower()](path), image_size, channels)


def _pad_mnist(data: Dataset, image_size: int | None) -> Dataset:
    """MNIST at 32 pixels has a black border of 2, as in LeNet-5, which keeps its pixels as they are."""
    if image_size != 32:
        return data
    return replace(data, images=np.pad(data.images, ((0, 0), (2, 2), (2, 2), (0, 0))))
