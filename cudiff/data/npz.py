"""Arrays of images in NumPy's .npz: a zip of .npy files, read without NumPy's reader, which evaluates and allocates
what a header says.

Formats: numpy.lib.format's documentation; PKWARE's APPNOTE.TXT.
"""

from __future__ import annotations

import io
import math
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from cudiff.data.dataset import Dataset
from cudiff.data.pictures import reason
from cudiff.errors import CudiffError, printable
from cudiff.memory import check_memory

MOST_CLASSES = 2**20
MOST_ENTRIES = 2**20  # bytes of the zip's directory, some 10,000 arrays
LONGEST_HEADER = 10_000  # bytes, NumPy's own limit
CHUNK = 2**20  # bytes read at once

HARMLESS = 2**26  # bytes that anything may inflate to
MOST_INFLATED = 500
"""How much larger than its file data may be: images compress a hundred times at most, a deflate bomb a thousand."""

_ERRORS = (
    OSError, EOFError, ValueError, RuntimeError, OverflowError, zipfile.BadZipFile, zlib.error, struct.error,
)  # fmt: skip


class Readable(Protocol):
    """An opened file, or what unpacks one."""

    def read(self, size: int, /) -> bytes: ...


class Header(NamedTuple):
    """What a .npy says of its array. size: bytes of the header itself."""

    dtype: np.dtype
    fortran: bool
    shape: tuple[int, ...]
    size: int


def npz_file(file: Path) -> Dataset:
    """Arrays `images` and optionally `labels` of an .npz, or `arr_0` and `arr_1`, as guided-diffusion names them.

    images: uint8 (N, H, W, C) or (N, H, W). Other types are refused rather than guessed at: whether floats span
    [0, 1] or [-1, 1] cannot be told for sure. labels: integers (N,), numbered from 0.
    Or `latents` in the place of images: floats (N, S, S, C) of any C, kept in float16 or float32.
    Raises CudiffError where the file is damaged or the arrays are not these, before anything large is read.
    """
    with opened_npz(file) as npz:
        images_name = next((name for name in ("images", "latents", "arr_0") if name in npz.names), None)
        if images_name is None:
            found = ", ".join(npz.names[:10])[:200] or "nothing"
            raise CudiffError(f"{file} has no array 'images' or 'arr_0' (it holds {found}): rename the array")
        images = npz.array(images_name)
        shape = images.header.shape
        (_check_latents if images_name == "latents" else _check_images)(file, images)
        if math.prod(shape) == 0:
            raise CudiffError(f"{file} holds no images: name another file")
        labels, num_classes = None, 0
        labels_name = "arr_1" if images_name == "arr_0" else "labels"
        if labels_name in npz.names:
            labels = _labels(file, npz.array(labels_name), shape[0])
            num_classes = int(labels.max()) + 1
        values = images.read()
        unread = [printable(found) for found in npz.names if found not in (images_name, labels_name)]
    name = printable(file.stem)
    notes = (f"arrays that are not read: {', '.join(unread[:10])}",) if unread else ()
    if labels is not None and len(there := np.unique(labels)) < num_classes:
        first = int(np.argmax(np.append(there, -1) != np.arange(len(there) + 1)))
        notes = (*notes, f"labels count from 0, and of {num_classes:,} classes {num_classes - len(there):,} have no "
                         f"image, the first of them {first}: a model does not learn these")
    if images_name == "latents":
        with np.errstate(over="ignore", invalid="ignore"):  # Dataset says what is not finite
            values = values.astype(np.float16 if values.dtype == np.float16 else np.float32, copy=False)
            notes = (*notes, *_spread(values))
        return Dataset(values, labels, num_classes, name, notes=notes, latents=True)
    return Dataset(values[..., None] if values.ndim == 3 else values, labels, num_classes, name, notes=notes)


def _check_images(file: Path, images: Stored) -> None:
    dtype, _, shape, _ = images.header
    if dtype != np.uint8:
        raise CudiffError(f"{file}: images are {dtype}, not uint8: {_conversion(images)}")
    if len(shape) == 4 and shape[3] not in (1, 3) and shape[1] in (1, 3):
        raise CudiffError(f"{file}: images {shape} have channels first: save images.transpose(0, 2, 3, 1)")
    if len(shape) != 3 and (len(shape) != 4 or shape[3] not in (1, 3)):
        raise CudiffError(f"{file}: images have shape {shape}: save them as (N, H, W, C) with 1 or 3 channels")


def _check_latents(file: Path, latents: Stored) -> None:
    dtype, _, shape, _ = latents.header
    if dtype.kind != "f":
        raise CudiffError(f"{file}: latents are {dtype}, not floats: bytes of pictures are called images")
    if len(shape) == 4 and shape[1] != shape[2] == shape[3]:
        raise CudiffError(f"{file}: latents {shape} have channels first: save latents.transpose(0, 2, 3, 1)")
    if len(shape) != 4 or shape[1] != shape[2]:
        raise CudiffError(f"{file}: latents have shape {shape}: save them as (N, S, S, C), squares of any channels")


def _spread(latents: np.ndarray) -> tuple[str, ...]:
    """A line with the latents' mean and standard deviation, which nothing else shows."""
    def total(power: int) -> float:
        blocks = (latents[first : first + 64].astype(np.float64) for first in range(0, len(latents), 64))
        return sum(float((block**power).sum()) for block in blocks)

    mean = total(1) / latents.size
    std = math.sqrt(max(0.0, total(2) / latents.size - mean**2))
    return (f"the latents' mean is {mean:.3g} and their standard deviation {std:.3g}: times latent_scale it should be "
            "EDM's sigma_data, for DDPM and flow about 1",)


@contextmanager
def opened_npz(file: Path) -> Iterator[Npz]:
    """An .npz to read. Raises CudiffError where it is damaged, in the block too."""
    try:
        with _Bounded(file) as opened:
            try:
                archive = zipfile.ZipFile(opened)
            except zipfile.BadZipFile as error:
                raise CudiffError(
                    f"{file} is truncated or not an .npz ({reason(error)}): write it again with numpy.savez"
                ) from None
            yield Npz(file, archive)
    except _ERRORS as error:
        raise CudiffError(f"cannot read {file} ({reason(error)}): write it again with numpy.savez") from None


class _Bounded(io.FileIO):
    """A file of which no more is read at once than an honest zip needs: its directory is read whole."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or size > MOST_ENTRIES:
            raise zipfile.BadZipFile("its directory is too long")
        return super().read(size)


class Npz:
    """names: of the arrays in the file, in its order. Raises ValueError where two have one name."""

    def __init__(self, file: Path, archive: zipfile.ZipFile):
        self._file, self._archive = file, archive
        self._members: dict[str, zipfile.ZipInfo] = {}
        for info in archive.infolist():
            name = info.filename.removesuffix(".npy")
            if name in self._members:
                raise ValueError(f"two arrays are called {name}")
            self._members[name] = info
        self.names = list(self._members)

    def array(self, name: str) -> Stored:
        return Stored(self._file, self._archive, self._members[name])


def _labels(file: Path, array: Stored, n: int) -> np.ndarray:
    dtype, shape = array.header.dtype, array.header.shape
    if shape != (n,) or dtype.kind not in "iu":
        raise CudiffError(f"{file}: labels are {dtype} {shape}; give one integer for each of the {n} images")
    labels = array.read()
    if labels.min() < 0:
        raise CudiffError(f"{file}: labels begin at {labels.min()}: number the classes from 0, or leave labels out")
    if labels.max() >= MOST_CLASSES:
        raise CudiffError(f"{file}: labels run to {labels.max()}: number the classes from 0, fewer than {MOST_CLASSES}")
    return labels


class Stored:
    """A .npy in a zip: its header is read and checked at once, its values when asked for."""

    def __init__(self, file: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo):
        self.archive, self.info = archive, info
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or info.flag_bits & 1:
            raise ValueError(f"{info.filename} is encrypted, or compressed otherwise than by deflate")
        with archive.open(info) as stream:
            try:
                self.header = header = _header(stream)
            except ValueError as error:
                raise ValueError(f"{info.filename}: {error}") from None
        size = header.dtype.itemsize * math.prod(header.shape)
        if header.size + size != info.file_size:
            raise ValueError(f"{info.filename} of shape {header.shape} is not as long as its header says")
        if not inflates(info.file_size, os.path.getsize(file)):
            raise ValueError(f"{info.filename} would inflate to {size:,} bytes, as no images do")
        self.file, self.size = file, size

    def read(self, count: int | None = None) -> np.ndarray:
        """The array, or its first `count` values as a vector. Its checksum is verified where it is read whole."""
        if count is None:
            check_memory(f"{self.file}", self.size, "save fewer images in one file")
        dtype, fortran, shape, start = self.header
        wanted = math.prod(shape) if count is None else min(count, math.prod(shape))
        values = np.empty(wanted, dtype)
        with self.archive.open(self.info) as stream:
            _exactly(stream, start)
            fill(stream, values.view(np.uint8))
            if count is None and stream.read(1):
                raise ValueError(f"{self.info.filename} is longer than its header says")
        if count is not None:
            return values
        return values.reshape(shape[::-1]).T if fortran else values.reshape(shape)

    def rows(self) -> Iterator[np.ndarray]:
        """The array's rows (N, ...), about a MiB of them at once, in C order. Its checksum is verified at the end."""
        dtype, fortran, shape, start = self.header
        if fortran:
            raise ValueError(f"{self.info.filename} is in Fortran order, which is not read in pieces")
        each = max(1, CHUNK // max(1, dtype.itemsize * math.prod(shape[1:])))
        with self.archive.open(self.info) as stream:
            _exactly(stream, start)
            for first in range(0, shape[0], each):
                piece = np.empty((min(each, shape[0] - first), *shape[1:]), dtype)
                fill(stream, piece.reshape(-1).view(np.uint8))
                yield piece
            if stream.read(1):
                raise ValueError(f"{self.info.filename} is longer than its header says")


def inflates(size: int, compressed: int) -> bool:
    """Whether `compressed` bytes may hold `size` bytes of images."""
    return size <= max(HARMLESS, MOST_INFLATED * compressed)


def fill(stream: Readable, values: np.ndarray) -> None:
    """Fill the bytes `values` from `stream`; raises EOFError where it ends before."""
    for first in range(0, values.size, CHUNK):
        piece = values[first : first + CHUNK]
        piece[:] = np.frombuffer(_exactly(stream, piece.size), np.uint8)


def _exactly(stream: Readable, size: int) -> bytes:
    content = stream.read(size)
    if len(content) != size:
        raise EOFError("it ends too early")
    return content


def _header(stream: Readable) -> Header:
    """What stands before the values of a .npy. Its text is a Python literal, of which only the plain case is read."""
    magic = _exactly(stream, 8)
    if magic[:6] != b"\x93NUMPY" or magic[6] not in (1, 2, 3):
        raise ValueError("it holds something other than arrays")
    width = 2 if magic[6] == 1 else 4
    length = int.from_bytes(_exactly(stream, width), "little")
    if length > LONGEST_HEADER:
        raise ValueError(f"a header of {length:,} bytes")
    text = _exactly(stream, length).decode("latin-1")
    descr = re.search(r"'descr': *'([<>|=][biuf][0-9]{1,2})'", text)
    order = re.search(r"'fortran_order': *(True|False)", text)
    lengths = re.search(r"'shape': *\(((?:[0-9]{1,18}(?:, *|(?=\))))*)\)", text)
    if descr is None or order is None or lengths is None:
        raise ValueError("an array of text, objects or another kind that is not read: give numbers")
    try:
        dtype = np.dtype(descr[1])
    except TypeError:
        raise ValueError(f"an array of {descr[1]}") from None
    shape = tuple(int(number) for number in re.findall("[0-9]+", lengths[1]))
    if len(shape) > 8:
        raise ValueError(f"an array of {len(shape)} dimensions")
    return Header(dtype, order[1] == "True", shape, 8 + width + length)


def _conversion(images: Stored) -> str:
    """How to turn images of another type into bytes, as their first values tell."""
    dtype = images.header.dtype
    if dtype.kind == "b":
        return "save them as bytes, images.astype(numpy.uint8) * 255"
    values = images.read(CHUNK)
    if dtype.kind in "iu" and values.size and values.min() >= 0 and values.max() <= 255:
        return "if all are 0 to 255, save images.astype(numpy.uint8)"
    if dtype == np.uint16:
        return "if they span 0 to 65535, save (images >> 8).astype(numpy.uint8)"
    if values.size and -1 <= values.min() < 0 and values.max() <= 1:
        return "if they span [-1, 1], save numpy.round((images + 1) * 127.5).astype(numpy.uint8)"
    if values.size and values.min() >= 0 and values.max() <= 1:
        return "if they span [0, 1], save numpy.round(images * 255).astype(numpy.uint8)"
    return "scale them to 0..255 and save numpy.round(images).astype(numpy.uint8)"
