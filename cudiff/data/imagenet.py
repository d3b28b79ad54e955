"""Downsampled ImageNet (arXiv 1707.08819): train_data_batch_1.npz to _10.npz and val_data.npz, of any size.

Each file holds `data` uint8 (N, 3·S·S), in a row the red plane, then the green, then the blue, `labels` (N,) from 1 to
1000 in map_clsloc's order, and `mean`, which is not read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from cudiff.classes import names_in_words, without_repeats
from cudiff.data.dataset import Dataset
from cudiff.data.npz import opened_npz
from cudiff.data.wnids import WNIDS
from cudiff.errors import CudiffError, printable
from cudiff.memory import check_memory

TRAIN, TEST = "train_data_batch_", "val_data.npz"
FILES = 10  # of training images


def imagenet_files(path: Path, part: str = "train") -> list[Path]:
    """A part's files, by number: those in a folder, or the file itself where it has their arrays; none for others."""
    if path.is_dir():
        names = {int(file.stem.removeprefix(TRAIN)): file for file in path.glob(f"{TRAIN}*.npz")
                 if file.stem.removeprefix(TRAIN).isdecimal()}
        test = path / TEST
        return [names[number] for number in sorted(names)] if part == "train" else [test] if test.is_file() else []
    if part != "train" or path.suffix.lower() != ".npz" or not path.is_file():
        return []
    with opened_npz(path) as npz:
        return [path] if {"data", "labels"} <= set(npz.names) and "images" not in npz.names else []


def load_imagenet(files: Sequence[Path], only_classes: Sequence[str | int] = ()) -> Dataset:
    """The images in `files`, uint8 (N, S, S, 3), with the classes' WordNet ids as names.

    only_classes: WordNet ids, or numbers as in the files, from 1; only these classes are kept, and numbered from 0 in
    this order. Without them the labels are those of the files less 1. What is not kept is read past, a MiB at a time,
    so memory is little more than what is kept.
    Raises CudiffError where a file is damaged or none of these, for an unknown class, and where no image is left.
    """
    chosen = _chosen(only_classes)
    place = np.full(len(WNIDS), -1, np.int32)
    place[chosen] = np.arange(len(chosen))
    sides, labels = zip(*map(_side_and_labels, files), strict=True)
    if len(set(sides)) > 1:
        raise CudiffError(f"{files[0].parent} has images of {min(sides)} and {max(sides)} pixels: keep one size there")
    side, kept = sides[0], [place[own] for own in labels]
    count = sum(int((own >= 0).sum()) for own in kept)
    names = tuple(WNIDS[number] for number in chosen)
    if not count:
        raise CudiffError(f"{files[0].parent}: no image is of {names_in_words(names)}: give other classes or files")
    check_memory(f"{count:,} images of {side}x{side}", 3 * count * side**2, "keep fewer classes (only_classes)")
    images = np.empty((count, side, side, 3), np.uint8)
    at = 0
    for file, own in zip(files, kept, strict=True):
        with opened_npz(file) as npz:
            first = 0
            for rows in npz.array("data").rows():
                planes = rows[own[first : first + len(rows)] >= 0].reshape(-1, 3, side, side)
                images[at : at + len(planes)] = planes.transpose(0, 2, 3, 1)
                first, at = first + len(rows), at + len(planes)
    numbers = np.concatenate([own[own >= 0] for own in kept])
    name = printable(files[0].stem if len(files) == 1 else files[0].resolve().parent.name)
    return Dataset(images, numbers, len(names), name, names, notes=_notes(files, names, numbers))


def _chosen(only_classes: Sequence[str | int]) -> list[int]:
    """The places in `WNIDS` of the classes asked for, of all where none are."""
    if not only_classes:
        return list(range(len(WNIDS)))
    places = {wnid: place for place, wnid in enumerate(WNIDS)}
    chosen = []
    for one in map(str, only_classes):
        number = int(one) - 1 if one.isdecimal() else places.get(one, -1)
        if not 0 <= number < len(WNIDS):
            raise CudiffError(f"ImageNet's files have no class '{one[:80]}': give WordNet ids such as n02504013, or "
                              f"numbers from 1 to {len(WNIDS)} in map_clsloc's order")
        chosen.append(number)
    without_repeats(chosen, only_classes)
    return chosen


def _side_and_labels(file: Path) -> tuple[int, np.ndarray]:
    """Pixels a side, and the labels from 0."""
    with opened_npz(file) as npz:
        missing = [name for name in ("data", "labels") if name not in npz.names]
        if missing:
            raise CudiffError(f"{file} has no array '{missing[0]}', as ImageNet's files have: get it anew")
        data, labels = npz.array("data").header, npz.array("labels").header
        width = data.shape[1] if len(data.shape) == 2 else 0
        side = math.isqrt(width // 3)
        if data.dtype != np.uint8 or not width or 3 * side**2 != width:
            raise CudiffError(f"{file}: data is {data.dtype} {data.shape}, not uint8 (N, 3·S·S) as in ImageNet's files")
        if labels.shape != data.shape[:1] or labels.dtype.kind not in "iu":
            raise CudiffError(f"{file}: labels are {labels.dtype} {labels.shape}; ImageNet's files have one whole "
                              f"number for each of the {data.shape[0]} rows of data")
        values = npz.array("labels").read()
    if not len(values):
        raise CudiffError(f"{file} holds no images: get it anew")
    if values.min() < 1 or values.max() > len(WNIDS):
        raise CudiffError(f"{file}: labels run from {values.min()} to {values.max()}, ImageNet's from 1 to "
                          f"{len(WNIDS)}: name the arrays images and labels in a data set of your own")
    return side, values.astype(np.int32) - 1


def _notes(files: Sequence[Path], names: Sequence[str], numbers: np.ndarray) -> tuple[str, ...]:
    notes = []
    if files[0].stem.startswith(TRAIN) and len(files) < FILES:
        notes.append(f"of ImageNet's {FILES} files of training images {len(files)} are read")
    absent = [names[number] for number, count in enumerate(np.bincount(numbers, minlength=len(names))) if not count]
    if absent:
        notes.append(f"classes without an image in these files: {names_in_words(absent)}")
    return tuple(notes)
