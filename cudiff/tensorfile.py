"""The safetensors format (github.com/huggingface/safetensors), by its own library: tensors by name, text beside them.

What the library does not do is done here: a file is replaced whole or not at all, a header's size is limited before it
is read, a name that occurs twice is refused, and what goes wrong is one line.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from cudiff.backend import bfloat16
from cudiff.errors import CudiffError
from cudiff.files import opened, replaced, temporary_of

DTYPES = {
    "F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": bfloat16,
    "I64": np.dtype("<i8"), "I32": np.dtype("<i4"), "I16": np.dtype("<i2"), "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"), "U32": np.dtype("<u4"), "U16": np.dtype("<u2"), "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
LONGEST_HEADER = 2**22
"""Bytes: some 13,000 tensors. A header takes up to 20 times its size in memory while it is read."""


class Entry(NamedTuple):
    """A tensor's dtype and shape."""

    dtype: np.dtype
    shape: tuple[int, ...]


@contextlib.contextmanager
def replacing_path(path: str | os.PathLike) -> Iterator[Path]:
    """`files.replaced`. Raises CudiffError where the system refuses."""
    with _told(path), replaced(path) as temporary:
        yield temporary


def require_writable(path: str | os.PathLike) -> None:
    """Raise CudiffError where `replacing` could not write at `path`, before the work that makes what it is to hold."""
    path = Path(path)
    with _told(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        temporary = temporary_of(path)
        temporary.touch()
        temporary.unlink(missing_ok=True)  # one on another machine may have asked too


@contextlib.contextmanager
def _told(path: str | os.PathLike) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CudiffError(
            f"cannot write {path} ({reason}), and nothing there was changed: make room or choose another folder"
        ) from error


@contextlib.contextmanager
def replacing(path: str | os.PathLike) -> Iterator[BinaryIO]:
    """`replacing_path`, as a file that is open."""
    with replacing_path(path) as temporary, open(temporary, "wb") as file:
        yield file


def write_tensors(path: str | os.PathLike, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """Write arrays by name, in place of what is at `path`, whole or not at all.

    The arrays' own memory is written: no second copy is made of those that are contiguous. Raises CudiffError for a
    dtype that the format lacks, for more tensors than `read_header` takes and where the system refuses to write.
    """
    for name, array in tensors.items():
        if array.dtype not in DTYPES.values():
            raise CudiffError(f"cannot write {name}: {path} cannot hold {array.dtype}; convert it first")
    # The library takes every array's memory as if it were contiguous.
    whole = {name: np.ascontiguousarray(array).reshape(array.shape) for name, array in tensors.items()}
    with replacing_path(path) as temporary:
        temporary.touch()
        mode = temporary.stat().st_mode
        save_file(whole, temporary, dict(metadata))  # puts a file of its own there, which only its owner may read
        temporary.chmod(mode)
        with opened(temporary) as file:
            if int.from_bytes(file.read(8), "little") > LONGEST_HEADER:
                raise CudiffError(f"cannot write {path}: {len(tensors):,} tensors are too many for one file")


def read_header(path: str | os.PathLike) -> tuple[dict[str, Entry], dict[str, str]]:
    """The entries by name, and the metadata, of a safetensors file, every size and offset checked.

    Raises CudiffError where the file is missing, truncated, damaged or something else, or holds a dtype NumPy lacks.
    """
    with _library(path) as file:
        return _entries(path, file), file.metadata() or {}


def read_tensors(
    path: str | os.PathLike, wanted: Callable[[str], bool] = lambda name: True,
    digests: Mapping[str, str] | None = None,
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The arrays whose name is `wanted`, and the metadata; nothing else is read.

    digests: each tensor's `digest`, compared with what is read. Raises CudiffError as `read_header` does, and where a
    digest is missing or another, naming the tensor.
    """
    tensors = {}
    with _library(path) as file:
        for name in filter(wanted, _entries(path, file)):
            tensors[name] = file.get_tensor(name)
            if digests is not None and digest(tensors[name]) != digests.get(name):
                raise CudiffError(f"{path} is damaged: the values of {name} are not those that were saved; use another")
        return tensors, file.metadata() or {}


def digest(array: np.ndarray) -> str:
    """SHA-256 of an array's bytes in hexadecimal; 1.3 s for 1 GB with a CPU's instructions for it."""
    return hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data).hexdigest()


@contextlib.contextmanager
def _library(path: str | os.PathLike) -> Iterator[Any]:
    """The library's view of a file, its header checked."""
    with opened(path) as file:
        length = int.from_bytes(file.read(8), "little")
        if length > LONGEST_HEADER:
            raise CudiffError(f"{path} is not a safetensors file, or its header is over {LONGEST_HEADER >> 20} MiB")
        text = file.read(length)
    try:
        with safe_open(path, "np", backend="pread") as view:  # by mmap what is read would lie in memory twice
            json.loads(text, object_pairs_hook=_refuse_repeated)
            yield view
    except OSError as error:
        raise CudiffError(f"cannot read {path} ({error.strerror or error}): check the path") from None
    except (SafetensorError, ValueError, RecursionError) as error:
        raise CudiffError(
            f"{path} is no safetensors file, or is truncated or damaged ({str(error)[:200]}): copy it again"
        ) from None


def _entries(path: str | os.PathLike, file: Any) -> dict[str, Entry]:
    entries = {}
    for name in file.keys():  # noqa: SIM118
        view = file.get_slice(name)
        kind, shape = view.get_dtype(), view.get_shape()
        if kind not in DTYPES:
            raise CudiffError(f"{path} holds values of type {kind}, which cudiff does not read")
        if len(shape) > 32:
            raise CudiffError(f"{path} is damaged: {name[:80]} has {len(shape):,} axes; copy it again")
        entries[name] = Entry(DTYPES[kind], tuple(shape))
    return entries


def _refuse_repeated(pairs: list[tuple[str, Any]]) -> None:
    if len({name for name, _ in pairs}) != len(pairs):
        raise ValueError("a name occurs twice")
