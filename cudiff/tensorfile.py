"""The safetensors format: 8 bytes with the header's length, a JSON header, then all values, little-endian.

Read and written here because bfloat16 has to pass, because a reader of a part should not load the whole, and because
a file must be replaced whole or not at all. Format: github.com/huggingface/safetensors.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from cudiff.backend import bfloat16
from cudiff.errors import CudiffError

DTYPES = {
    "F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": bfloat16,
    "I64": np.dtype("<i8"), "I32": np.dtype("<i4"), "I16": np.dtype("<i2"), "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"), "U32": np.dtype("<u4"), "U16": np.dtype("<u2"), "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LONGEST_HEADER = 100_000_000  # bytes; the limit of the format's reference implementation


class Entry(NamedTuple):
    """Where a tensor lies: its dtype and shape, and its bytes [start, stop) in the file."""

    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


@contextlib.contextmanager
def replacing(path: str | os.PathLike) -> Iterator[BinaryIO]:
    """A file to write that takes the place of `path` at the end of the block, or not at all.

    A full disk, an exception or a kill at any moment leaves what was at `path` as it was. Folders are made as needed.
    Raises CudiffError where the system refuses.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise CudiffError(
                f"cannot write {path} ({error.strerror or error}), and nothing there was changed: "
                "make room or choose another folder"
            ) from error
        raise
    with contextlib.suppress(OSError):  # some systems cannot open or sync a folder
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_tensors(path: str | os.PathLike, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """Write arrays by name, in place of what is at `path`, whole or not at all.

    Raises CudiffError for a dtype that the format lacks and where the system refuses to write.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    for name, array in tensors.items():
        if array.dtype not in _NAMES:
            raise CudiffError(f"cannot write {name}: {path} cannot hold {array.dtype}; convert it first")
        header[name] = {"dtype": _NAMES[array.dtype], "shape": list(array.shape)}
    order = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)  # every tensor aligned to its own items
    stop = 0
    for name in order:
        start, stop = stop, stop + tensors[name].nbytes
        header[name]["data_offsets"] = [start, stop]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with replacing(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            file.write(np.ascontiguousarray(tensors[name]).reshape(-1).view(np.uint8).data)


def read_header(path: str | os.PathLike) -> tuple[dict[str, Entry], dict[str, str]]:
    """The entries by name, and the metadata, of a safetensors file, every size and offset checked.

    Raises CudiffError where the file is missing, truncated, damaged or something else.
    """
    with _reading(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 10 or length > _LONGEST_HEADER or file.read(1) != b"{":
            raise CudiffError(f"{path} is not a safetensors file")
        if 8 + length > size:
            raise CudiffError(f"{path} is truncated: it ends inside its header; copy it again")
        file.seek(8)
        text = file.read(length)
    try:
        header = dict(json.loads(text, object_pairs_hook=_unique))
        metadata = header.pop("__metadata__", {})
        entries = {name: _entry(value, 8 + length) for name, value in header.items()}
        if not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("metadata is not text")
    except _UnknownType as error:
        raise CudiffError(f"{path} holds values of type {error}, which cudiff does not read") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CudiffError(f"{path} is damaged: its header makes no sense ({reason}); copy it again") from None
    stop = 8 + length
    for entry in sorted(entries.values(), key=lambda entry: (entry.start, entry.stop)):
        if entry.start != stop:
            raise CudiffError(f"{path} is damaged: its tensors overlap or leave gaps; copy it again")
        stop = entry.stop
    if stop > size:
        raise CudiffError(f"{path} is truncated: it has {size:,} of {stop:,} bytes; copy it again")
    if stop < size:
        raise CudiffError(f"{path} is damaged: {size - stop:,} bytes follow its last tensor; copy it again")
    return entries, metadata


def read_tensors(
    path: str | os.PathLike, wanted: Callable[[str], bool] = lambda name: True
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The arrays whose name is `wanted`, and the metadata; raises CudiffError as `read_header` does."""
    entries, metadata = read_header(path)
    tensors = {}
    with _reading(path) as file:
        for name, entry in entries.items():
            if wanted(name):
                file.seek(entry.start)
                values = np.fromfile(file, np.uint8, entry.stop - entry.start)
                if values.size != entry.stop - entry.start:
                    raise CudiffError(f"{path} became shorter while it was read; copy it again")
                tensors[name] = values.view(entry.dtype).reshape(entry.shape)
    return tensors, metadata


class _UnknownType(Exception):
    """A dtype that NumPy lacks."""


def _entry(value: dict[str, Any], first: int) -> Entry:
    """A checked entry of the header; `first` is where the values begin in the file."""
    if value["dtype"] not in DTYPES:
        raise _UnknownType(value["dtype"])
    dtype, shape, (start, stop) = DTYPES[value["dtype"]], tuple(value["shape"]), value["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, start, stop)):
        raise ValueError(f"sizes {shape}, offsets {start}, {stop}")
    if stop - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{stop - start} bytes for {dtype} of shape {shape}")
    return Entry(dtype, shape, first + start, first + stop)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name occurs twice")
    return result


@contextlib.contextmanager
def _reading(path: str | os.PathLike) -> Iterator[BinaryIO]:
    try:
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        raise CudiffError(f"cannot read {path} ({error.strerror or error}): check the path") from None
