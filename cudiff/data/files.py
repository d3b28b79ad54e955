"""Images from the user's own files: folders of pictures, .npz archives, and unet.cu's .bin."""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from cudiff.data.dataset import Dataset
from cudiff.errors import CudiffError

SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
GRAY_MODES = {"1", "L", "LA", "La", "I", "I;16", "I;16B", "I;16L", "I;16N"}
UNETCU_MAGIC = 20240620
UNETCU_HEADER = 256  # int32 words


def _files_below(folder: Path) -> Iterator[Path]:
    """Relative to `folder`, hidden ones left out. Linked folders are entered, but for one that leads back to itself."""
    for name, folders, files in os.walk(folder, followlinks=True):
        place = Path(name)
        above = place.relative_to(folder).parents
        if any(os.path.samefile(place, folder / parent) for parent in above):
            folders.clear()
            continue
        folders[:] = [name for name in folders if not name.startswith(".")]
        for file in files:
            if not file.startswith(".") and (place / file).is_file():
                yield (place / file).relative_to(folder)


def image_folder(
    folder: Path, image_size: int | None = None, channels: int | None = None, skip_bad: bool = False
) -> Dataset:
    """Every picture below `folder`, in sorted order, cropped to its central square and resized (Lanczos).

    Where all pictures lie in sub-folders, the sub-folders are the classes, numbered in sorted order; otherwise there
    are no labels. Without image_size the pictures must already be squares of one size; without channels they stay
    gray (1) if all are gray, else they become RGB (3). EXIF rotation is applied, transparency laid over white.
    Raises CudiffError for an empty folder, for sizes that differ, and, unless skip_bad, for the first picture that
    does not decode; with skip_bad their names are in the data set's `skipped`.
    """
    files = sorted(name for name in _files_below(folder) if name.suffix.lower() in SUFFIXES)
    if not files:
        raise CudiffError(f"{folder} holds no images ({', '.join(sorted(SUFFIXES))}): name another folder")
    images = None
    kept: list[Path] = []
    skipped: list[str] = []
    all_gray = True
    for file in files:
        try:
            picture, gray = _read_picture(folder / file, image_size)
        except Exception as error:  # Pillow's decoders raise many types for damaged files
            if not skip_bad:
                raise CudiffError(
                    f"cannot read image {folder / file} ({_reason(error)}): repair or remove it, or leave such "
                    "files out with skip_bad (--skip-bad)"
                ) from None
            skipped.append(str(folder / file))
            continue
        width, height = picture.size
        if images is None:
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
    data = Dataset(images, name=folder.resolve().name, skipped=tuple(skipped))
    if all(len(file.parts) > 1 for file in files):
        classes = tuple(sorted({file.parts[0] for file in files}))
        labels = np.array([classes.index(file.parts[0]) for file in kept])
        data = replace(data, labels=labels, num_classes=len(classes), class_names=classes)
    return fit(data, image_size, channels)


def npz_file(file: Path) -> Dataset:
    """Arrays `images` and optionally `labels` of an .npz, or `arr_0` and `arr_1`, as guided-diffusion names them.

    images: uint8 (N, H, W, C) or (N, H, W). Other types are refused rather than guessed at: whether floats span
    [0, 1] or [-1, 1] cannot be told for sure. labels: integers (N,), numbered from 0.
    Raises CudiffError where the file is damaged or the arrays are not these.
    """
    if not zipfile.is_zipfile(file):
        raise CudiffError(f"{file} is truncated or not an .npz: write it again with numpy.savez")
    try:
        with np.load(file, allow_pickle=False) as archive:
            images_name = next((name for name in ("images", "arr_0") if name in archive), None)
            if images_name is None:
                found = ", ".join(archive.files) or "nothing"
                raise CudiffError(f"{file} has no array 'images' or 'arr_0' (it holds {found}): rename the array")
            images = archive[images_name]
            labels_name = "labels" if images_name == "images" else "arr_1"
            labels = archive.get(labels_name)
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise CudiffError(f"cannot read {file} ({_reason(error)}): write it again with numpy.savez") from None
    if images.dtype != np.uint8:
        raise CudiffError(f"{file}: images are {images.dtype}, not uint8: {_conversion(images)}")
    if images.ndim == 3:
        images = images[..., None]
    if images.ndim == 4 and images.shape[3] not in (1, 3) and images.shape[1] in (1, 3):
        raise CudiffError(f"{file}: images {images.shape} have channels first: save images.transpose(0, 2, 3, 1)")
    if images.size == 0:
        raise CudiffError(f"{file} holds no images: name another file")
    num_classes = 0
    if labels is not None and labels.size and np.issubdtype(labels.dtype, np.integer):
        num_classes = int(labels.max()) + 1
    return Dataset(images, labels, num_classes, name=file.stem)


def unetcu_file(file: Path) -> Dataset:
    """The training data of unet.cu (github.com/clu0/unet.cu, prepare_data.py), without labels.

    256 little-endian int32: 20240620, N, C, H, W, zeros; then float32 (N, C, H, W) in [-1, 1], which came from bytes
    as x / 127.5 - 1 and becomes bytes again. Raises CudiffError where the file is something else or truncated.
    """
    size = file.stat().st_size
    header = np.fromfile(file, "<i4", UNETCU_HEADER)
    if len(header) < UNETCU_HEADER or header[0] != UNETCU_MAGIC:
        raise CudiffError(f"{file} is not unet.cu's training data (no {UNETCU_MAGIC} at its start): name another file")
    shape = tuple(int(length) for length in header[1:5])
    expected = 4 * UNETCU_HEADER + 4 * int(np.prod(shape, dtype=object))
    if min(shape) < 1 or size != expected:
        raise CudiffError(
            f"{file} is truncated or damaged: {size:,} bytes, but {'x'.join(map(str, shape))} floats and the header "
            f"take {expected:,}: write it again with prepare_data.py"
        )
    stored = np.memmap(file, "<f4", "r", offset=4 * UNETCU_HEADER, shape=shape)
    n, channels, height, width = shape
    images = np.empty((n, height, width, channels), dtype=np.uint8)
    for i, image in enumerate(stored):
        if not np.abs(image).max() <= 1.001:  # also false for NaN
            raise CudiffError(f"{file}: image {i} leaves [-1, 1]: write it again with prepare_data.py")
        images[i] = np.round((image.transpose(1, 2, 0) + 1) * 127.5).clip(0, 255)
    return Dataset(images, name=file.stem)


def fit(data: Dataset, image_size: int | None = None, channels: int | None = None) -> Dataset:
    """`data` with square images of `image_size` and 1 or 3 `channels`, each left as it is where None.

    Crops to the central square and resizes (Lanczos); gray is ITU-R 601 luma. Raises CudiffError for images that are
    not square where no image_size is given.
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
    images = np.empty((n, side, side, depth_out), dtype=np.uint8)
    for i, image in enumerate(data.images):
        picture = Image.fromarray(image[..., 0] if depth == 1 else image)
        if depth_out != depth:
            picture = picture.convert("L" if depth_out == 1 else "RGB")
        images[i] = np.asarray(_square(picture, side)).reshape(side, side, depth_out)
    return replace(data, images=images)


def _read_picture(file: Path, image_size: int | None) -> tuple[Image.Image, bool]:
    """One picture as RGB, square where image_size is given, and whether the file holds gray only."""
    with Image.open(file) as opened:
        if image_size is not None:
            opened.draft(None, (2 * image_size, 2 * image_size))  # JPEG decodes at a fraction where that suffices
        picture = ImageOps.exif_transpose(opened)
    gray = picture.mode in GRAY_MODES
    if picture.mode.startswith("I"):
        pixels = np.asarray(picture)
        if pixels.min() < 0 or pixels.max() > 65535:
            raise ValueError("pixels of more than 16 bits")
        picture = Image.fromarray((pixels >> 8).astype(np.uint8))
    elif picture.mode == "F":
        raise ValueError("floating-point pixels")
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
    picture = picture.convert("RGB")
    return (picture if image_size is None else _square(picture, image_size)), gray


def _square(picture: Image.Image, side: int) -> Image.Image:
    """The central square of `picture`, resized to side x side."""
    width, height = picture.size
    short = min(width, height)
    left, top = (width - short) // 2, (height - short) // 2
    cropped = picture.crop((left, top, left + short, top + short))
    return cropped.resize((side, side), Image.Resampling.LANCZOS)


def _reason(error: Exception) -> str:
    """Why a file cannot be read, in one line."""
    if isinstance(error, UnidentifiedImageError):
        return "not an image"
    return (str(error).splitlines() or [type(error).__name__])[0]


def _conversion(images: np.ndarray) -> str:
    """How to turn images of another type into bytes."""
    if not np.issubdtype(images.dtype, np.floating):
        return "save them as bytes from 0 to 255 (images.astype(numpy.uint8))"
    if images.size and -1 <= images.min() < 0 and images.max() <= 1:
        return "if they span [-1, 1], save numpy.round((images + 1) * 127.5).astype(numpy.uint8)"
    if images.size and images.min() >= 0 and images.max() <= 1:
        return "if they span [0, 1], save numpy.round(images * 255).astype(numpy.uint8)"
    return "scale them to 0..255 and save numpy.round(images).astype(numpy.uint8)"
