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
    Raises CudiffError where the file is damaged or the arrays are not these, before anything large is read.
    """
    try:
        with _Bounded(file) as opened:
            try:
                archive = zipfile.ZipFile(opened)
            except zipfile.BadZipFile as error:
                raise CudiffError(
                    f"{file} is truncated or not an .npz ({reason(error)}): write it again with numpy.savez"
                ) from None
            return _read(file, archive)
    except _ERRORS as error:
        raise CudiffError(f"cannot read {file} ({reason(error)}): write it again with numpy.savez") from None


class _Bounded(io.FileIO):
    """A file of which no more is read at once than an honest zip needs: its directory is read whole."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or size > MOST_ENTRIES:
            raise zipfile.BadZipFile("its directory is too long")
        return super().read(size)


def _read(file: Path, archive: zipfile.ZipFile) -> Dataset:
    members: dict[str, zipfile.ZipInfo] = {}
    for info in archive.infolist():
        name = info.filename.removesuffix(".npy")
        if name in members:
            raise ValueError(f"two arrays are called {name}")
        members[name] = info
    images_name = next((name for name in ("images", "arr_0") if name in members), None)
    if images_name is None:
        found = ", ".join(list(members)[:10])[:200] or "nothing"
        raise CudiffError(f"{file} has no array 'images' or 'arr_0' (it holds {found}): rename the array")
    labels_name = "labels" if images_name == "images" else "arr_1"
    images = _Array(file, archive, members[images_name])
    shape = images.header.shape
    if images.header.dtype != np.uint8:
        raise CudiffError(f"{file}: images are {images.header.dtype}, not uint8: {_conversion(images)}")
    if len(shape) == 4 and shape[3] not in (1, 3) and shape[1] in (1, 3):
        raise CudiffError(f"{file}: images {shape} have channels first: save images.transpose(0, 2, 3, 1)")
    if len(shape) != 3 and (len(shape) != 4 or shape[3] not in (1, 3)):
        raise CudiffError(f"{file}: images have shape {shape}: save them as (N, H, W, C) with 1 or 3 channels")
    if math.prod(shape) == 0:
        raise CudiffError(f"{file} holds no images: name another file")
    labels, num_classes = None, 0
    if labels_name in members:
        labels = _labels(file, _Array(file, archive, members[labels_name]), shape[0])
        num_classes = int(labels.max()) + 1
    values = images.read()
    return Dataset(values[..., None] if values.ndim == 3 else values, labels, num_classes, name=printable(file.stem))


def _labels(file: Path, array: _Array, n: int) -> np.ndarray:
    dtype, shape = array.header.dtype, array.header.shape
    if shape != (n,) or dtype.kind not in "iu":
        raise CudiffError(f"{file}: labels are {dtype} {shape}; give one integer for each of the {n} images")
    labels = array.read()
    if labels.max() >= MOST_CLASSES:
        raise CudiffError(f"{file}: labels run to {labels.max()}: number the classes from 0, fewer than {MOST_CLASSES}")
    return labels


class _Array:
    """A .npy in a zip: its header is read and checked at once, its values when asked for."""

    def __init__(self, file: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo):
        self.archive, self.info = archive, info
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or info.flag_bits & 1:
            raise ValueError(f"{info.filename} is encrypted, or compressed otherwise than by deflate")
        with archive.open(info) as stream:
            self.header = header = _header(stream)
        size = header.dtype.itemsize * math.prod(header.shape)
        if header.size + size != info.file_size:
            raise ValueError(f"{info.filename} of shape {header.shape} is not as long as its header says")
        if not inflates(info.file_size, os.path.getsize(file)):
            raise ValueError(f"{info.filename} would inflate to {size:,} bytes, as no images do")
        check_memory(f"{file}", size, "save fewer images in one file")

    def read(self, count: int | None = None) -> np.ndarray:
        """The array, or its first `count` values as a vector. Its checksum is verified where it is read whole."""
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
        raise ValueError("an array of objects, or of a kind that is not read")
    try:
        dtype = np.dtype(descr[1])
    except TypeError:
        raise ValueError(f"an array of {descr[1]}") from None
    shape = tuple(int(number) for number in re.findall("[0-9]+", lengths[1]))
    if len(shape) > 8:
        raise ValueError(f"an array of {len(shape)} dimensions")
    return Header(dtype, order[1] == "True", shape, 8 + width + length)


def _conversion(images: _Array) -> str:
    """How to turn images of another type into bytes, as their first values tell."""
    if images.header.dtype.kind != "f":
        return "save them as bytes from 0 to 255 (images.astype(numpy.uint8))"
    values = images.read(CHUNK)
    if values.size and -1 <= values.min() < 0 and values.max() <= 1:
        return "if they span [-1, 1], save numpy.round((images + 1) * 127.5).astype(numpy.uint8)"
    if values.size and values.min() >= 0 and values.max() <= 1:
        return "if they span [0, 1], save numpy.round(images * 255).astype(numpy.uint8)"
    return "scale them to 0..255 and save numpy.round(images).astype(numpy.uint8)"
