"""Folders of pictures, cropped and resized to one size."""

from __future__ import annotations

import hashlib
import math
import os
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import PIL
from PIL import Image, ImageOps, UnidentifiedImageError

from cudiff.classes import chosen
from cudiff.data.dataset import Dataset
from cudiff.data.decoded import alone_with, decoded_file, open_decoded, write_decoded
from cudiff.data.folder import SUFFIXES, Listing, list_folder, some
from cudiff.data.rows import Rows
from cudiff.errors import CudiffError, printable
from cudiff.files import opened
from cudiff.memory import check_memory, memory_available
from cudiff.threads import CORES

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""What may be decoded, told by a file's content: Pillow knows others, and runs Ghostscript for one of them."""
MOST_PIXELS = 2**26
"""Of one picture, 8,192 x 8,192: what a few bytes can announce takes a quarter GiB at most."""
IN_MEMORY = 0.25
"""Decoded pictures may take this share of the free memory: to hold some out copies the rest, and steps need theirs."""
GRAY_MODES = {"1", "L", "LA", "La", "I", "I;16", "I;16B", "I;16L", "I;16N"}
BITS_PER_SAMPLE, PHOTOMETRIC = 258, 262  # a TIFF's tags
THREADS = min(CORES, 8)  # each may hold a picture of MOST_PIXELS, and twice as many pictures wait
CROP_PIXELS = 2**20  # pixels converted at once
MOST_SCANS = 100  # of a progressive JPEG, which encoders write in ten: each one passes over all pixels
LONGEST_REASON = 300  # characters; zipfile repeats names of any length
SMALLER = "give a smaller image size (image_size=64, --image-size 64) or fewer images"


def image_folder(
    folder: Path, image_size: int | None = None, channels: int | None = None, skip_bad: bool = False,
    only_classes: Sequence[str | int] = (), on_disk: bool = False,
) -> Dataset:
    """Every picture below `folder`, in sorted order, cropped to its central square and resized (Lanczos).

    Where all pictures lie in sub-folders, the sub-folders are the classes, numbered in sorted order, by number where
    all names are numbers; otherwise there are no labels. only_classes: read the pictures of these sub-folders alone,
    numbered in this order. Without image_size the pictures must already be squares of one size; without channels they
    stay gray (1) if all are gray, else they become RGB (3). EXIF rotation is applied, transparency laid over white, and
    of several frames or pages the first is taken. What is left out or cropped, and why there are no labels, is in the
    data set's `notes`.
    Pictures that would take more than `IN_MEMORY` of the free memory, and with on_disk all, are decoded once into a
    file of the user's cache, and images are `Rows` of it. A later call takes them from there, unless the name, size or
    time of a picture has changed.
    Raises CudiffError for an empty folder, for sizes that differ, for more than the disk holds, and, unless skip_bad,
    for the first picture that does not decode; with skip_bad their names are in the data set's `skipped`.
    """
    listing = list_folder(folder)
    files = listing.pictures
    if not files:
        left_out = "".join(f"; {note}" for note in listing.notes())
        raise CudiffError(f"{folder} holds no images ({', '.join(sorted(SUFFIXES))}): name another folder{left_out}")
    classes = _in_order({file.parts[0] for file in files if len(file.parts) > 1})
    if only_classes:
        what = printable(folder.resolve().name)
        if not classes:
            raise CudiffError(f"{what} has no class folders, so only_classes cannot choose: leave it out")
        classes = [classes[number] for number in chosen(only_classes, list(map(printable, classes)), what)]
        files = [file for file in files if len(file.parts) > 1 and file.parts[0] in classes]
        listing = replace(listing, pictures=files, folders=classes)
    read = _Pictures(folder, files, image_size, channels, skip_bad)
    part = sorted(classes) if only_classes else []
    path = decoded_file([os.fspath(folder.resolve()), *read.shape[2:], skip_bad, part])
    images, facts = read.from_file(path, on_disk) or read.into_memory()
    skipped = set(facts["skipped"])
    kept = [file for number, file in enumerate(files) if number not in skipped]
    notes = listing.notes() + _notes_on_classes(listing, kept) + read.notes(facts)
    if isinstance(images, Rows):
        notes.append(f"the pictures lie decoded in {path} ({images.nbytes / 2**30:,.1f} GiB), which training reads")
    data = Dataset(images, name=printable(folder.resolve().name), notes=tuple(map(printable, notes)),
                   skipped=tuple(str(folder / files[number]) for number in facts["skipped"]))
    if all(len(file.parts) > 1 for file in files):
        number = {name: i for i, name in enumerate(classes)}
        labels = np.array([number[file.parts[0]] for file in kept])
        names = tuple(printable(name) for name in classes)
        data = replace(data, labels=labels, num_classes=len(classes), class_names=names)
    return fit(data, image_size, channels)


def _in_order(names: set[str]) -> list[str]:
    """Sorted; by number where each name is one, so that the folders 0 to 11 are the classes 0 to 11."""
    numbers = all(name.isdecimal() for name in names)
    return sorted(names, key=lambda name: (int(name) if numbers else 0, name))


@dataclass(frozen=True)
class _Pictures:
    """The pictures of a folder, by `image_folder`'s options; decoded they are uint8 (S, S, 3), or (S, S, 1) for one
    channel.

    Facts of their decoding, as JSON holds them: "skipped", the numbers of the files that do not decode; "resized", how
    many are no squares of the size; "cropped", how many are not square; "first", the number, width and height of the
    first of these, or None; "several", the numbers of the files of several frames.
    """

    folder: Path
    files: Sequence[Path]
    image_size: int | None
    channels: int | None
    skip_bad: bool

    @cached_property
    def shape(self) -> tuple[int, int, int, int]:
        """That of all images together, by the image size or the first picture that can be opened."""
        side = self.image_size or next(filter(None, map(self._side, self.files)), 1)
        return len(self.files), side, side, 1 if self.channels == 1 else 3

    def from_file(self, path: Path, on_disk: bool) -> tuple[Rows, dict[str, Any]] | None:
        """The images in `path`, decoded into it where they do not lie there yet and memory does not hold them or
        `on_disk` asks for it, else None; and their facts."""
        on_disk = on_disk or math.prod(self.shape) > IN_MEMORY * memory_available()
        if not on_disk and not path.exists():
            return None
        source = self._source()
        found = open_decoded(path, source)
        if found is not None and self.image_size is None and found[1]["resized"]:
            return None  # without a size they are refused
        if found is None and on_disk:
            with alone_with(path) as writer:
                if (found := open_decoded(path, source)) is None:  # another process may have done it meanwhile
                    write_decoded(path, source, self.shape, writer, self.decode)
                    found = open_decoded(path, source)
                if found is None:
                    raise CudiffError(f"{path} cannot be read back as it was written: check the disk")
        return found

    def into_memory(self) -> tuple[np.ndarray, dict[str, Any]]:
        """The images, uint8 (N, S, S, C), and their facts."""
        images, count = np.empty(self.shape, np.uint8), 0

        def keep(pixels: np.ndarray) -> None:
            nonlocal count
            images[count] = pixels
            count += 1

        gray, facts = self.decode(keep)
        return images[:count, ..., :1] if gray else images[:count], facts

    def decode(self, keep: Callable[[np.ndarray], None]) -> tuple[bool, dict[str, Any]]:
        """Give `keep` each picture that decodes, in order. Returns whether one channel suffices for them, and their
        facts."""
        folder, side, all_gray = self.folder, self.shape[1], True
        facts: dict[str, Any] = {"skipped": [], "resized": 0, "cropped": 0, "first": None, "several": []}
        for number, (file, decoded) in enumerate(_decoded(folder, self.files, self.image_size, self.channels)):
            if isinstance(decoded, Exception):  # Pillow's decoders raise many types for damaged files
                if not self.skip_bad:
                    raise CudiffError(
                        f"cannot read image {folder / file} ({reason(decoded)}): repair it, move it elsewhere, or "
                        "leave such files out with skip_bad (--skip-bad)"
                    )
                facts["skipped"].append(number)
                continue
            pixels, gray, width, height, several = decoded
            if pixels.shape[:2] != (side, side):
                raise CudiffError(
                    f"images in {folder} are not squares of one size ({file}: {width}x{height}): "
                    "give an image size (image_size=64, --image-size 64) to crop and resize them"
                )
            keep(pixels)
            all_gray = all_gray and gray
            if several:
                facts["several"].append(number)
            facts["resized"] += (width, height) != (side, side)
            if width != height:
                facts["first"] = facts["first"] or [number, width, height]
                facts["cropped"] += 1
        if len(facts["skipped"]) == len(self.files):
            raise CudiffError(f"none of the {len(self.files)} images in {folder} can be read: name another folder")
        return self.channels is None and all_gray, facts

    def notes(self, facts: Mapping[str, Any]) -> list[str]:
        """A line where pictures were not square, and one where there were more frames than the first."""
        notes = []
        if facts["cropped"]:
            number, width, height = facts["first"]
            count = len(self.files) - len(facts["skipped"])
            notes.append(f"{facts['cropped']:,} of {count:,} pictures are not square and cropped to the square in "
                         f"their middle, first {self.files[number]} ({width}x{height})")
        if facts["several"]:
            names = some([self.files[number] for number in facts["several"]])
            notes.append(f"of several frames or pages only the first is taken: {names}; make files of the others to "
                         "train on them")
        return notes

    def _side(self, file: Path) -> int:
        """A picture's width, by its header; 0 where that is none."""
        with warnings.catch_warnings(action="ignore"), suppress(Exception), Image.open(
            self.folder / file, formats=FORMATS
        ) as picture:
            return picture.width if picture.width * picture.height <= MOST_PIXELS else 0
        return 0

    def _source(self) -> str:
        """SHA-256 of what tells these pictures from what they may be later: names, sizes and times of change, and of
        what decodes them. Archives and copies bring old times of a file's content, but not of the file."""
        digest = hashlib.sha256(f"5 {PIL.__version__}".encode())
        for file in self.files:
            told = ""
            with suppress(OSError):
                status = os.stat(self.folder / file)
                told = f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"
            digest.update(f"{told} {file}\0".encode(errors="surrogateescape"))
        return digest.hexdigest()


def _decoded(
    folder: Path, files: Iterable[Path], image_size: int | None, channels: int | None
) -> Iterator[tuple[Path, tuple[np.ndarray, bool, int, int, bool] | Exception]]:
    """Each file with what `_read_picture` gives or raises, in order, gray (ITU-R 601 luma) for one channel; threads
    read ahead, as Pillow's decoders let go of Python's lock."""

    def read(file: Path) -> tuple[np.ndarray, bool, int, int, bool] | Exception:
        try:
            picture, gray, width, height, several = _read_picture(folder / file, image_size)
            pixels = np.asarray(picture.convert("L") if channels == 1 else picture)
            return pixels.reshape(*pixels.shape[:2], -1), gray, width, height, several
        except Exception as error:
            return error

    waiting: deque[tuple[Path, Future]] = deque()
    # Of metadata that make no sense; damaged pixels are errors. The filter is the process's: not one for each thread.
    with warnings.catch_warnings(action="ignore"), ThreadPoolExecutor(THREADS) as pool:
        try:
            for file in files:
                waiting.append((file, pool.submit(read, file)))
                if len(waiting) >= 2 * THREADS:
                    first, future = waiting.popleft()
                    yield first, future.result()
            while waiting:
                first, future = waiting.popleft()
                yield first, future.result()
        finally:
            pool.shutdown(cancel_futures=True)


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
    not square where no image_size is given, and for more than memory holds. Latents are left as they are, or refused.
    """
    n, height, width, depth = data.images.shape
    if data.latents:
        if (image_size or height, image_size or width, channels or depth) != (height, width, depth):
            raise CudiffError(
                f"{data.name}: latents are {height}x{width}x{depth} and taken as they are: make image_size and "
                "channels these, or 0 (--image-size 0 --channels 0)"
            )
        return data
    if channels not in (None, 1, 3):
        raise CudiffError(f"images cannot have {channels} channels: use 1 (gray) or 3 (RGB)")
    if height != width and image_size is None:
        raise CudiffError(
            f"{data.name}: images are {width}x{height}, not square: give an image size (image_size=64, "
            "--image-size 64) to crop and resize them"
        )
    side, depth_out = image_size or height, channels or depth
    if (height, width, depth) == (side, side, depth_out):
        return data
    check_memory(f"{n:,} images of {side}x{side}", n * side**2 * depth_out, SMALLER)
    crops = (f"all {n:,} images are {width}x{height} and cropped to the square in their middle",)
    images = np.empty((n, side, side, depth_out), dtype=np.uint8)
    for i, image in enumerate(data.images):
        picture = Image.fromarray(image[..., 0] if depth == 1 else image)
        if depth_out != depth:
            picture = picture.convert("L" if depth_out == 1 else "RGB")
        picture = picture.crop(_central_square(picture.size)).resize((side, side), Image.Resampling.LANCZOS)
        images[i] = np.asarray(picture).reshape(side, side, depth_out)
    return replace(data, images=images, notes=data.notes + (crops if height != width else ()))


def read_picture(path: str | os.PathLike, channels: int, behind: str = "white") -> np.ndarray:
    """One picture as uint8 (H, W, channels), gray (1) or RGB (3). behind: what a transparent part shows, "white" or
    "black". Raises CudiffError where the file cannot be read."""
    with opened(path):  # no pipe
        try:
            picture, *_ = _read_picture(Path(path), None, behind)
        except Exception as error:  # whatever a decoder raises for a damaged file
            raise CudiffError(f"cannot read the picture {path}: {reason(error)}") from None
    pixels = np.asarray(picture if channels == 3 else picture.convert("L"))
    return pixels.reshape(*pixels.shape[:2], channels)


def _read_picture(file: Path, image_size: int | None,
                  behind: str = "white") -> tuple[Image.Image, bool, int, int, bool]:
    """One picture as RGB, square where image_size is given, whether the file holds gray only, its width and height,
    and whether more frames or pages follow."""
    with Image.open(file, formats=FORMATS) as picture:
        width, height = picture.size
        if width * height > MOST_PIXELS:
            raise ValueError(f"{width}x{height} pixels are more than {MOST_PIXELS:,}: make it smaller")
        if "progressive" in picture.info and file.read_bytes().count(b"\xff\xda") > MOST_SCANS:
            raise ValueError(f"a progressive JPEG of more than {MOST_SCANS} scans")
        if image_size is not None:
            picture.draft(None, (2 * image_size, 2 * image_size))  # JPEG decodes at a fraction where that suffices
        # Pillow has no mode for 16 bits of gray and alpha, a PNG's: it gives RGBA.
        raw = picture.tile[0][3] if picture.tile else ""
        gray = raw == "LA;16B"
        _scale_clear(picture, raw)
        lying = picture.size
        ImageOps.exif_transpose(picture, in_place=True)
        if picture.size != lying:
            width, height = height, width
        picture.load()
        gray = gray or picture.mode in GRAY_MODES
        if picture.mode == "F":
            raise ValueError("floating-point pixels")
        tags = getattr(picture, "tag_v2", {})  # a TIFF's
        bits = tags.get(BITS_PER_SAMPLE)  # its mode I may be of any range
        if bits == (12,) or (bits and picture.mode == "I"):
            raise ValueError("gray of 12, 32 or signed bits: save it with 8 or 16")
        if tags.get(PHOTOMETRIC) == 0 and picture.mode.startswith("I"):  # Pillow turns over 8 bits alone
            raise ValueError("16 bits of which 0 is white: save it with 0 as black")
        box = (0, 0, *picture.size) if image_size is None else _central_square(picture.size)
        result = as_rgb(picture, box, behind)
        several = _has_several(picture)
    if image_size is not None:
        result = result.resize((image_size, image_size), Image.Resampling.LANCZOS)
    return result, gray, width, height, several


def _scale_clear(picture: Image.Image, raw: Any) -> None:
    """Bring a PNG's transparent gray or color, told in the file's bits, to the 8 bits that Pillow brings pixels to."""
    clear = picture.info.get("transparency")
    if raw in ("L;2", "L;4") and isinstance(clear, int):
        picture.info["transparency"] = clear * (85 if raw == "L;2" else 17)
    elif raw == "RGB;16B" and isinstance(clear, tuple):
        picture.info["transparency"] = tuple(value >> 8 for value in clear)


def _has_several(picture: Image.Image) -> bool:
    """Whether frames or pages follow the first, but for a JPEG's previews. It may unload the picture's pixels."""
    with suppress(Exception):  # what follows may be damaged
        return picture.format != "MPO" and getattr(picture, "is_animated", False)
    return False


def _central_square(size: tuple[int, int]) -> tuple[int, int, int, int]:
    """Left, top, right and bottom of the largest square in the middle; of an odd rest the smaller half is before it."""
    width, height = size
    short = min(width, height)
    left, top = (width - short) // 2, (height - short) // 2
    return left, top, left + short, top + short


def as_rgb(picture: Image.Image, box: tuple[int, int, int, int], behind: str) -> Image.Image:
    """What lies in `box` of a picture of any mode, as RGB over a color; some rows at a time, as each takes copies."""
    left, top, right, bottom = box
    result = Image.new("RGB", (right - left, bottom - top))
    rows = max(1, CROP_PIXELS // (right - left))
    for first in range(top, bottom, rows):
        crop = picture.crop((left, first, right, min(first + rows, bottom)))
        if crop.mode.startswith("I"):
            gray, clear = np.asarray(crop), crop.info.get("transparency")
            crop = Image.fromarray(np.where(gray == clear, 255 * (behind == "white"), gray >> 8).astype(np.uint8))
        if crop.has_transparency_data:
            crop = crop.convert("RGBA")
            crop = Image.alpha_composite(Image.new("RGBA", crop.size, behind), crop)
        result.paste(crop.convert("RGB"), (0, first - top))
    return result


def reason(error: Exception) -> str:
    """Why a file cannot be read, in one line."""
    if isinstance(error, UnidentifiedImageError):
        return "not an image"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).splitlines() or [type(error).__name__])[0][:LONGEST_REASON]
