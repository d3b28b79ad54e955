"""A labelled set of images in host memory."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cudiff import show
from cudiff.as_array import plain
from cudiff.classes import chosen, names_in_words
from cudiff.data.rows import Rows
from cudiff.errors import CudiffError
from cudiff.ops.batch import mix32, order_key
from cudiff.plot import GRID_WIDTH, grid
from cudiff.values import whole

DIGESTED = 2**29
"""Bytes of images that a fingerprint's digest reads at most."""


@dataclass(repr=False)
class Dataset:
    """Images as uint8, or latents, with optional class labels; training normalises images to [-1, 1] on the device.

    images: uint8 (N, H, W, C), C-contiguous, C is 1 or 3; with `latents` float32 or float16 of any C, taken as they
    are. Of a folder that memory does not hold they are `Rows`, which stay in a file and are read as they are indexed.
    labels: int32 (N,) in [0, num_classes), or None, and then num_classes is 0. class_names: one for each class, or
    None. skipped: the files that did not decode and were left out. notes: what a user should know of how the data was
    read, one line each. Raises CudiffError where these do not agree.
    """

    images: Any
    labels: np.ndarray | None = None
    num_classes: int = 0
    name: str = "data"
    class_names: tuple[str, ...] | None = None
    skipped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    latents: bool = False

    def __post_init__(self) -> None:
        self.num_classes = whole("num_classes", self.num_classes, 0)
        if isinstance(self.class_names, str):
            raise CudiffError(f"{self.name}: class_names are one text for each class, not '{self.class_names[:80]}'")
        if self.class_names is not None:
            self.class_names = tuple(map(str, self.class_names))
        if isinstance(self.images, list | tuple):
            raise CudiffError(f"{self.name}: images are a {type(self.images).__name__}: give np.stack(images)")
        if not hasattr(self.images, "ndim"):
            raise CudiffError(f"{self.name}: images are a {type(self.images).__name__}: give an array (N, H, W, C), or "
                              "a name or a path to cudiff.load_dataset")
        channels = self.images.shape[3] if self.images.ndim == 4 else 0
        if self.latents and (self.images.dtype not in (np.float32, np.float16) or not channels):
            raise CudiffError(f"{self.name}: latents are {self.images.dtype} {self.images.shape}; give float32 or "
                              "float16 (N, H, W, C)")
        if not self.latents and (self.images.dtype != np.uint8 or channels not in (1, 3)):
            raise CudiffError(
                f"{self.name}: images are {self.images.dtype} {self.images.shape}; "
                "give uint8 (N, H, W, C) with 1 or 3 channels, or floats with latents=True"
            )
        if not isinstance(self.images, Rows):
            self.images = np.ascontiguousarray(plain(self.images))
        if self.latents and not all(np.isfinite(self.images[i : i + 1024]).all() for i in range(0, len(self), 1024)):
            raise CudiffError(f"{self.name}: latents hold values that are not finite: encode the images anew")
        if self.labels is None:
            self.num_classes = 0
            return
        labels = np.asarray(plain(self.labels))
        if labels.shape != (len(self.images),) or not np.issubdtype(labels.dtype, np.integer):
            raise CudiffError(
                f"{self.name}: labels are {labels.dtype} {labels.shape}; "
                f"give one integer for each of the {len(self.images)} images"
            )
        if labels.size and not self.num_classes:
            raise CudiffError(f"{self.name}: labels need num_classes; give it, one more than the highest label")
        if labels.size and (labels.min() < 0 or labels.max() >= self.num_classes):
            raise CudiffError(
                f"{self.name}: labels run from {labels.min()} to {labels.max()}; "
                f"number the {self.num_classes} classes from 0 to {self.num_classes - 1}"
            )
        if self.class_names is not None and len(self.class_names) != self.num_classes:
            raise CudiffError(
                f"{self.name}: {len(self.class_names)} class names for {self.num_classes} classes; give one for each"
            )
        self.labels = np.ascontiguousarray(labels, dtype=np.int32)

    def __len__(self) -> int:
        return len(self.images)

    def __repr__(self) -> str:
        height, width, channels = self.images.shape[1:]
        classes = f"{self.num_classes} classes" if self.labels is not None else "no labels"
        what = "latents" if self.latents else "images"
        return f"Dataset({self.name}: {len(self):,} {what} {height}x{width}x{channels}, {classes})"

    def _repr_html_(self) -> str:
        """What a notebook shows: as many of the first images as make a square of 8 rows at most."""
        if not len(self) or self.latents:
            return show.table(repr(self), [])
        columns = max(1, min(8, GRID_WIDTH // self.images.shape[2]))
        content = io.BytesIO()
        grid(self.images[: columns**2], columns).save(content, "PNG")
        return show.picture(repr(self), content.getvalue())

    def fingerprint(self) -> dict[str, Any]:
        """What tells this data set from another, as JSON holds it: name, number, size, classes and SHA-256 digests.

        labels: of all of them, None without. class_names: where they have some. pixels: see `pixel_digest`.
        """
        return {
            "name": self.name, "number": len(self), "size": list(self.images.shape[1:]), "classes": self.num_classes,
            "labels": None if self.labels is None else hashlib.sha256(self.labels.data).hexdigest(),
            "pixels": pixel_digest(self.images), "class_names": self.class_names and list(self.class_names),
        }

    def numbered(self, names: Sequence[str]) -> Dataset:
        """The same images, with classes numbered by their names' places in `names`; itself where it has none of these.

        Classes of other names take the places of names that are gone, in order, and then those behind all. A class
        without images is told in `notes`.
        """
        own, all_names = self.class_names or (), list(names)
        if self.labels is None or list(own) == all_names or not set(own) & set(names):
            return self
        gone = (place for place, name in enumerate(names) if name not in own)
        for name in own:
            if name not in names:
                place = next(gone, len(all_names))
                all_names[place : place + 1] = [name]
        labels = np.array([all_names.index(name) for name in own], np.int32)[self.labels]
        missing = [name for name in all_names if name not in own]
        told = (f"the data has no image of {names_in_words(missing)}: not trained any more",) if missing else ()
        return replace(self, labels=labels, num_classes=len(all_names), class_names=tuple(all_names),
                       notes=self.notes + told)

    def subset(self, indices: Sequence[int] | np.ndarray) -> Dataset:
        """Copies of the images at `indices`, in that order, or of those where a mask (N,) of bools is True; `Rows` of
        a file's stay there.

        Raises CudiffError for other indices than whole numbers and for a mask of another length.
        """
        indices = np.asarray(indices)
        if indices.dtype == bool and indices.shape == (len(self),):
            indices = np.flatnonzero(indices)
        if indices.ndim != 1 or (indices.size and not np.issubdtype(indices.dtype, np.integer)):
            raise CudiffError(
                f"{self.name}: indices are {indices.dtype} {indices.shape}; give whole numbers (M,), or a mask of "
                f"{len(self)} bools"
            )
        indices = indices.astype(np.int64)
        images = self.images.only(indices) if isinstance(self.images, Rows) else self.images[indices]
        return replace(self, images=images, labels=None if self.labels is None else self.labels[indices])

    def only(self, classes: str | int | Sequence[str | int]) -> Dataset:
        """The images of some classes, given by name or number, which are numbered in this order from now on.

        Classes without names are called by their numbers. Raises CudiffError for data without labels, for a class that
        it has not, listing those that it has, for one that is given twice, and where no image is left.
        """
        if self.labels is None:
            raise CudiffError(f"{self.name} has no labels, so only_classes cannot choose: leave it out")
        classes = [classes] if isinstance(classes, str | int | np.integer) else classes
        if not len(classes):
            raise CudiffError(f"{self.name}: only() of no class leaves no image: give one at least")
        names = self.class_names or tuple(map(str, range(self.num_classes)))
        numbers = chosen(classes, names, self.name)
        place = np.full(self.num_classes, -1, np.int32)
        place[numbers] = np.arange(len(numbers))
        part = self.subset(place[self.labels] >= 0)
        if not len(part):
            raise CudiffError(f"{self.name} has no image of {names_in_words([names[n] for n in numbers])}: give others")
        kept = tuple(names[number] for number in numbers)
        return replace(part, labels=place[part.labels], num_classes=len(kept), class_names=kept)

    def split(self, validation: int | float, seed: int = 0) -> tuple[Dataset, Dataset]:
        """Part the data into (training, held-out), the same way every time for the same seed.

        validation: how many images to hold out, or, below 1, which share of them. Each image is ranked by a hash of
        (seed, its index) and the lowest are held out; both parts keep the order of the images. Raises CudiffError
        where nothing would be left to train on.
        """
        if not len(self):
            raise CudiffError(f"{self.name}: there are no images")
        count = round(validation * len(self)) if 0 < validation < 1 else validation
        if not 0 <= count < len(self) or count != int(count):
            raise CudiffError(
                f"{self.name}: cannot hold out {validation} of {len(self)} images; hold out at most {len(self) - 1}"
            )
        with np.errstate(over="ignore"):
            rank = mix32(mix32(np.arange(len(self), dtype=np.uint32)) ^ order_key(seed))
        held_out = np.zeros(len(self), dtype=bool)
        held_out[np.argsort(rank, kind="stable")[: int(count)]] = True
        training = self.subset(np.flatnonzero(~held_out)) if count else self  # which needs no copy
        return training, self.subset(np.flatnonzero(held_out))


def pixel_digest(images: np.ndarray | Rows) -> str:
    """SHA-256 of all images up to 512 MiB together, which takes about a second, else of as many as that is, evenly
    spaced."""
    count = max(1, min(len(images), DIGESTED // max(1, images[:1].nbytes)))
    pixels = hashlib.sha256()
    chosen = np.linspace(0, len(images) - 1, count).round().astype(int) if len(images) else np.empty(0, int)
    for first in range(0, len(chosen), 64):
        pixels.update(images[chosen[first : first + 64]].data)
    return pixels.hexdigest()


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """In which ways two fingerprints are those of different data, in words; none where only the name differs."""
    found = []
    if before.get("number") != now["number"]:
        found.append(f"{_count(before.get('number'))} images are now {now['number']:,}")
    if before.get("size") != now["size"]:
        found.append(f"their size {_size(before.get('size'))} is now {_size(now['size'])}")
    if before.get("classes") != now["classes"]:
        found.append(f"{_count(before.get('classes'))} classes are now {now['classes']:,}")
    counts_agree = all(before.get(what) == now[what] for what in ("number", "classes"))
    if counts_agree and before.get("labels") != now["labels"]:
        found.append("the labels differ")
    if renamed := _renamed(before.get("class_names"), now["class_names"]):
        found.append(renamed)
    if not found and before.get("pixels") != now["pixels"]:
        found.append("the pixels differ")
    if found and before.get("name") != now["name"]:
        found.insert(0, f"{before.get('name')} is now {now['name']}")
    return found


def _renamed(before: Any, now: Any) -> str:
    """The classes that have other names, or "": checkpoints of before 2026-11-27 hold no names."""
    if not isinstance(before, list) or not now:
        return ""
    return ", ".join([f"the class {old} is now {new}" for old, new in zip(before, now, strict=False) if old != new][:8])


def _count(number: Any) -> str:
    return f"{number:,}" if isinstance(number, int) else "?"


def _size(size: Any) -> str:
    return "x".join(map(str, size)) if isinstance(size, list) else "?"
