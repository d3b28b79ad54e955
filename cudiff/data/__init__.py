"""Data sets as uint8 NumPy arrays on the host, from one specification string; and the order training sees them in."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from cudiff.data.dataset import Dataset
from cudiff.data.draw import digits
from cudiff.data.idx import has_idx, idx_folder
from cudiff.data.imagenet import imagenet_files, load_imagenet
from cudiff.data.npz import npz_file
from cudiff.data.pictures import fit, image_folder
from cudiff.data.published import PUBLISHED, fashion_mnist, load_published, mnist
from cudiff.data.unetcu import unetcu_file
from cudiff.errors import CudiffError
from cudiff.ops.batch import shuffled_index
from cudiff.values import whole

__all__ = ["Dataset", "digits", "fashion_mnist", "has_test_part", "load_dataset", "mnist", "shuffled_index"]

KNOWN = f"digits, {', '.join(PUBLISHED)}, a folder of images, an .npz or a .bin"
"""What a specification may be, in words."""


def load_dataset(
    spec: str | os.PathLike = "digits",
    *,
    part: str = "train",
    image_size: int | None = None,
    channels: int | None = None,
    skip_bad: bool = False,
    only_classes: str | int | Sequence[str | int] = (),
    count: int | None = None,
    seed: int = 0,
    on_disk: bool = False,
) -> Dataset:
    """Load the data set that `spec` names; its images are uint8 (N, S, S, C), or floats where they are latents.

    spec: "digits" (drawn, 16 pixels unless image_size says otherwise), "mnist" or "fashion-mnist" (28 pixels), a folder
    of images, a folder with IDX files named like MNIST's, an .npz with `images` or `latents` and `labels`, unet.cu's
    .bin, or downsampled ImageNet: a folder of its train_data_batch_*.npz, or one of them.
    part: "train" or "test", where the data has both, see `has_test_part`.
    image_size: crop to the central square and resize to this; MNIST at 32 is padded instead. channels: 1 or 3.
    skip_bad: leave out images of a folder that do not decode; the data set's `skipped` names them.
    only_classes: of all classes these, by name or number, in this order; see `Dataset.only` and `load_imagenet`.
    count, seed: how many digits to draw (4,000 for train, 1,000 for test), and which.
    on_disk: have a folder's pictures in a file, also where memory holds them; see `data.pictures.image_folder`. Where
        an earlier call or run has made that file, images are `data.rows.Rows` of it: copy them by `images[:]`.
    Raises CudiffError, one line that says what to do, for anything missing, damaged or contradictory.
    """
    if not isinstance(spec, str | os.PathLike):
        raise CudiffError(f"load_dataset takes a name or a path, not {type(spec).__name__}: of arrays make "
                          "cudiff.data.Dataset(images, labels, num_classes)")
    for name, value in (("image_size", image_size), ("channels", channels), ("count", count)):
        if value is not None:
            whole(name, value, None)
    whole("seed", seed, 0)
    if part not in ("train", "test"):
        raise CudiffError(f"unknown part '{part}': use train or test")
    if channels not in (None, 1, 3) and not str(spec).lower().endswith(".npz"):  # may be latents
        raise CudiffError(f"images cannot have {channels} channels: use 1 (gray) or 3 (RGB)")
    if image_size is not None and image_size < 1:
        raise CudiffError(f"image size {image_size} is too small: use 8 or more")
    only_classes = [only_classes] if isinstance(only_classes, str | int) else only_classes
    if count is not None and spec != "digits":
        raise CudiffError("count says how many digits to draw: leave it out for other data")
    if on_disk and (spec == "digits" or spec in PUBLISHED or not _holds_pictures(_path(spec), part)):
        raise CudiffError(f"{spec} is no folder of pictures, and only these are kept on a disk: use another residency")
    if spec == "digits":
        if count is None:
            count = 4000 if part == "train" else 1000
        data = digits(count, image_size or 16, seed, part)
    elif spec in PUBLISHED:
        data = _pad_mnist(load_published(PUBLISHED[str(spec)], part), image_size)
    else:
        path = _path(spec)
        try:
            return _load_path(path, part, only_classes, image_size, channels, skip_bad, on_disk)
        except OSError as error:
            raise CudiffError(f"cannot read {path} ({error.strerror or error}): check its permissions") from None
    return fit(data.only(only_classes) if only_classes else data, image_size, channels)


def has_test_part(spec: str | os.PathLike) -> bool:
    """Whether `load_dataset(spec, part="test")` finds something: of digits, MNIST's kin, folders of IDX files and
    ImageNet's with their val_data.npz."""
    return spec == "digits" or spec in PUBLISHED or has_idx(_path(spec)) or bool(imagenet_files(_path(spec), "test"))


def _path(spec: str | os.PathLike) -> Path:
    if spec == "":
        raise CudiffError(f"the data has no name: give {KNOWN}")
    try:
        return Path(spec).expanduser()
    except RuntimeError:
        raise CudiffError(f"'{spec}' begins with ~ and names no user: give the whole path") from None


def _holds_pictures(path: Path, part: str) -> bool:
    return not path.exists() or (path.is_dir() and not has_idx(path) and not imagenet_files(path, part))


def _load_path(path: Path, part: str, only_classes: Sequence[str | int], image_size: int | None, channels: int | None,
               skip_bad: bool, on_disk: bool) -> Dataset:
    """What lies at `path`; of ImageNet's files and of folders only the classes asked for are read."""
    if path.is_dir() and has_idx(path):
        data = idx_folder(path, part)
    elif files := imagenet_files(path, part):
        return fit(load_imagenet(files, only_classes), image_size, channels)
    elif not path.exists():
        here = "" if path.is_absolute() else f"; this path is looked for in {Path.cwd()}"
        raise CudiffError(f"no data at '{path}': give {KNOWN}{here}")
    elif part == "test":
        raise CudiffError(f"{path} has no test part: hold some of it out, or name a second data set")
    elif path.is_dir():
        return image_folder(path, image_size, channels, skip_bad, only_classes, on_disk)
    elif not path.is_file():
        raise CudiffError(f"{path} is no regular file: give {KNOWN}")
    elif (read := {".npz": npz_file, ".bin": unetcu_file}.get(path.suffix.lower())) is None:
        raise CudiffError(f"{path} is not a data set: give {KNOWN}")
    else:
        data = read(path)
    return fit(data.only(only_classes) if only_classes else data, image_size, channels)


def _pad_mnist(data: Dataset, image_size: int | None) -> Dataset:
    """MNIST and its kin at 32 pixels have a black border of 2, as in LeNet-5, which keeps its pixels as they are."""
    if image_size != 32:
        return data
    return replace(data, images=np.pad(data.images, ((0, 0), (2, 2), (2, 2), (0, 0))))
