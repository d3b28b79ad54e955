"""Folders of pictures, cropped and resized to one size."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from cudiff.data.dataset import Dataset
from cudiff.data.folder import SUFFIXES, Listing, list_folder, some
from cudiff.errors import CudiffError, printable
from cudiff.memory import check_memory

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""What may be decoded, told by a file's content: Pillow knows others, and runs Ghostscript for one of them."""
MOST_PIXELS = 2**26
"""Of one picture, 8,192 x 8,192: what a few bytes can announce takes a quarter GiB at most."""
GRAY_MODES = {"1", "L", "LA", "La", "I", "I;16", "I;16B", "I;16L", "I;16N"}
STRIP = 2**20  # pixels converted at once
MOST_SCANS = 100  # of a progressive JPEG, which encoders write in ten: each one passes over all pixels
LONGEST_REASON = 300  # characters; zipfile repeats names of any length
SMALLER = "give a smaller image size (image_size=64, --image-size 64) or fewer images"


def image_folder(
    folder: Path, image_size: int | None = None, channels: int | None = None, skip_bad: bool = False
) -> Dataset:
    """Every picture below `folder`, in sorted order, cropped to its central square and resized (Lanczos).

    Where all pictures lie in sub-folders, the sub-folders are the classes, numbered in sorted order; otherwise there
    are no labels. Without image_size the pictures must already be squares of one size; without channels they stay
    gray (1) if all are gray, else they become RGB (3). EXIF rotation is applied, transparency laid over white, and of
    animations the first frame is taken. What is left out, and why there are no labels, is in the data set's `notes`.
    Raises CudiffError for an empty folder, for sizes that differ, for more than memory holds, and, unless skip_bad,
    for the first picture that does not decode; with skip_bad their names are in the data set's `skipped`.
    """
    listing = list_folder(folder)
    files = listing.pictures
    if not files:
        left_out = "".join(f"; {note}" for note in listing.notes())
        raise CudiffError(f"{folder} holds no images ({', '.join(sorted(SUFFIXES))}): name another folder{left_out}")
    if image_size is not None:
        check_memory(f"{len(files):,} images of {image_size}x{image_size}", 3 * len(files) * image_size**2, SMALLER)
    images = None
    kept: list[Path] = []
    skipped: list[str] = []
    all_gray = True
    for file in files:
        try:
            with warnings.catch_warnings(action="ignore"):  # of metadata that make no sense; damaged pixels are errors
                picture, gray = _read_picture(folder / file, image_size)
        except Exception as error:  # Pillow's decoders raise many types for damaged files
            if not skip_bad:
                raise CudiffError(
                    f"cannot read image {folder / file} ({reason(error)}): repair it, move it elsewhere, or "
                    "leave such files out with skip_bad (--skip-bad)"
                ) from None
            skipped.append(str(folder / file))
            continue
        width, height = picture.size
        if images is None:
            what = f"{len(files):,} images of {width}x{height}, as {file} is the first,"
            check_memory(what, 3 * len(files) * height * width, SMALLER)
            images = np.empty((len(files), height, width, 3), dtype=np.uint8)
        if (height, width) != images.shape[1:3] or height != width:
            raise CudiffError(
                f"images in {folder} are not squares of one size ({file}: {width}x{height}): "
                "give an image size (image_size=64, --image-size 64) to crop and resize them"
            )
        images[len(kept)] = np.asarray(picture)
        kept.append(file)
        all_gray = all_gray and gray
    if images is None:
        raise CudiffError(f"none of the {len(files)} images in {folder} can be read: name another folder")
    images = images[: len(kept)]
    if channels is None and all_gray:
        images = images[..., :1]
    notes = tuple(printable(note) for note in listing.notes() + _notes_on_classes(listing, kept))
    data = Dataset(images, name=printable(folder.resolve().name), skipped=tuple(skipped), notes=notes)
    if all(len(file.parts) > 1 for file in files):
        classes = sorted({file.parts[0] for file in files})
        number = {name: i for i, name in enumerate(classes)}
        labels = np.array([number[file.parts[0]] for file in kept])
        names = tuple(printable(name) for name in classes)
        data = replace(data, labels=labels, num_classes=len(classes), class_names=names)
    return fit(data, image_size, channels)


def _notes_on_classes(listing: Listing, kept: Sequence[Path]) -> list[str]:
    """What keeps the folders from being classes, and which of them hold nothing to train on."""
    classes = {file.parts[0] for file in listing.pictures if len(file.parts) > 1}
    stray = [file for file in listing.pictures if len(file.parts) == 1]
    empty = [name for name in listing.folders if name not in classes]
    if not classes:
        return []
    if stray:
        return [
            f"pictures lie beside the {len(classes):,} class folders, so no image has a label: {some(stray)}; "
            "move them into a class folder or elsewhere to have classes"
        ]
    notes = []
    if empty:
        notes.append(f"folders without a picture are no classes: {some(empty)}")
    unreadable = sorted(classes - {file.parts[0] for file in kept})
    if unreadable:
        notes.append(
            f"classes of which no picture can be read: {some(unreadable)}; repair the pictures, or move the folders "
            "elsewhere"
        )
    return notes


def fit(data: Dataset, image_size: int | None = None, channels: int | None = None) -> Dataset:
    """`data` with square images of `image_size` and 1 or 3 `channels`, each left as it is where None.

    Crops to the central square and resizes (Lanczos); gray is ITU-R 601 luma. Raises CudiffError for images that are
    not square where no image_size is given, and for more than memory holds.
    """
    n, height, width, depth = data.images.shape
    if height != width and image_size is None:
        raise CudiffError(
            f"{data.name}: images are {width}x{height}, not square: give an image size (image_size=64, "
            "--image-size 64) to crop and resize them"
        )
    side, depth_out = image_size or height, channels or depth
    if (height, width, depth) == (side, side, depth_out):
        return data
    check_memory(f"{n:,} images of {side}x{side}", n * side**2 * depth_out, SMALLER)
    images = np.empty((n, side, side, depth_out), dtype=np.uint8)
    for i, image in enumerate(data.images):
        picture = Image.fromarray(image[..., 0] if depth == 1 else image)
        if depth_out != depth:
            picture = picture.convert("L" if depth_out == 1 else "RGB")
        picture = picture.crop(_central_square(picture.size)).resize((side, side), Image.Resampling.LANCZOS)
        images[i] = np.asarray(picture).reshape(side, side, depth_out)
    return replace(data, images=images)


def _read_picture(file: Path, image_size: int | None) -> tuple[Image.Image, bool]:
    """One picture as RGB, square where image_size is given, and whether the file holds gray only."""
    with Image.open(file, formats=FORMATS) as picture:
        width, height = picture.size
        if width * height > MOST_PIXELS:
            raise ValueError(f"{width}x{height} pixels are more than {MOST_PIXELS:,}: make it smaller")
        if "progressive" in picture.info and file.read_bytes().count(b"\xff\xda") > MOST_SCANS:
            raise ValueError(f"a progressive JPEG of more than {MOST_SCANS} scans")
        if image_size is not None:
            picture.draft(None, (2 * image_size, 2 * image_size))  # JPEG decodes at a fraction where that suffices
        ImageOps.exif_transpose(picture, in_place=True)
        picture.load()
        gray = picture.mode in GRAY_MODES
        if picture.mode == "F":
            raise ValueError("floating-point pixels")
        if image_size is None:
            return _rgb(picture, (0, 0, *picture.size)), gray
        square = _rgb(picture, _central_square(picture.size))
    return square.resize((image_size, image_size), Image.Resampling.LANCZOS), gray


def _central_square(size: tuple[int, int]) -> tuple[int, int, int, int]:
    """Left, top, right and bottom of the largest square in the middle; of an odd rest the smaller half is before it."""
    width, height = size
    short = min(width, height)
    left, top = (width - short) // 2, (height - short) // 2
    return left, top, left + short, top + short


def _rgb(picture: Image.Image, box: tuple[int, int, int, int]) -> Image.Image:
    """What lies in `box` of a picture of any mode, as RGB over white; some rows at a time, as each takes copies."""
    left, top, right, bottom = box
    result = Image.new("RGB", (right - left, bottom - top))
    rows = max(1, STRIP // (right - left))
    for first in range(top, bottom, rows):
        strip = picture.crop((left, first, right, min(first + rows, bottom)))
        if strip.mode.startswith("I"):
            pixels = np.asarray(strip)
            if pixels.min() < 0 or pixels.max() > 65535:
                raise ValueError("pixels of more than 16 bits")
            strip = Image.fromarray((pixels >> 8).astype(np.uint8))
        if strip.has_transparency_data:
            strip = strip.convert("RGBA")
            strip = Image.alpha_composite(Image.new("RGBA", strip.size, "white"), strip)
        result.paste(strip.convert("RGB"), (0, first - top))
    return result


def reason(error: Exception) -> str:
    """Why a file cannot be read, in one line."""
    if isinstance(error, UnidentifiedImageError):
        return "not an image"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).splitlines() or [type(error).__name__])[0][:LONGEST_REASON]
