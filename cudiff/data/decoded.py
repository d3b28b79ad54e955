"""Pictures that memory does not hold: decoded once, into a file of the user's cache that is memory-mapped from then on.

The file is an .npy of version 1.0, uint8 (N, S, S, C), and behind it JSON, which `numpy.load` passes over, and the
SHA-256 of that and of the header.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import mmap
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from cudiff.backend import cache_folder
from cudiff.data.dataset import pixel_digest
from cudiff.data.rows import Rows
from cudiff.errors import CudiffError
from cudiff.files import replaced

LONGEST_FACTS = 2**26
"""Bytes of the JSON, which lists the pictures that do not decode."""
CHUNK = 2**24  # bytes moved at once


def decoded_file(asked: Any) -> Path:
    """Where the decoded pictures of a folder lie, by what was asked for, as JSON holds it: a folder that has changed
    has the same file, so that the one before is replaced."""
    return cache_folder("pictures") / f"{hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:32]}.npy"


def open_decoded(path: Path, source: str) -> tuple[Rows, dict[str, Any]] | None:
    """The images in `path` and what was said of them; None where it is missing, damaged, or not of `source`.

    The header, the size and the JSON are checked, and of the pixels as much as a fingerprint reads (`pixel_digest`).
    """
    if not path.is_file():
        return None
    with contextlib.suppress(Exception), open(path, "rb") as file:  # whatever is wrong with it, it is made anew
        if np.lib.format.read_magic(file) != (1, 0):
            return None
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
        start = file.tell()
        end = start + math.prod(shape)
        file.seek(end)
        tail = file.read(LONGEST_FACTS)
        text, digest = tail[:-64], tail[-64:]
        if dtype != np.uint8 or fortran or len(shape) != 4 or _digest(shape, text) != digest:
            return None
        facts = json.loads(text)
        if facts["source"] != source:
            return None
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if hasattr(mapping, "madvise"):
            mapping.madvise(mmap.MADV_RANDOM)  # else the system reads far around what is asked for
        images = Rows(mapping, start, shape)
        if pixel_digest(images) == facts["pixels"]:
            return images, facts
    return None


@contextlib.contextmanager
def alone_with(path: Path) -> Iterator[str]:
    """Let one process at a time decode into `path`; the others wait for it.

    Gives what a temporary file's name needs so that it is this process's own: nothing, unless the system has no locks.
    Raises CudiffError where the cache cannot be written to.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise _cannot_keep(path.parent, error) from None
    try:
        try:
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX)
            name = ""
        except (ImportError, OSError):  # Windows, and some network file systems
            name = f".{os.getpid()}"
        yield name
    finally:
        os.close(lock)


def write_decoded(path: Path, source: str, shape: tuple[int, ...], writer: str,
                  decode: Callable[[Callable[[np.ndarray], Any]], tuple[bool, Mapping[str, Any]]]) -> None:
    """Write what `decode` gives the function that it is called with, pictures uint8 (S, S, C), to `path`, whole or not
    at all.

    shape: (N, S, S, C) where all decode. writer: see `alone_with`. `decode` returns whether the first channel says all,
    which is then kept alone, and facts for JSON. Raises CudiffError where the disk has no room and where the system
    refuses.
    """
    size = math.prod(shape)
    try:
        path.unlink(missing_ok=True)  # of what the folder was before: its room is needed
        free = shutil.disk_usage(path.parent).free
        if size > free:
            raise CudiffError(
                f"{shape[0]:,} images of {shape[2]}x{shape[1]} would take {size / 2**30:,.1f} GiB in {path.parent}, "
                f"and {free / 2**30:,.1f} GiB are free there: make room (what lies there can be decoded again), point "
                "CUDIFF_CACHE_DIR to another disk, or give a smaller image size (image_size=64, --image-size 64)"
            )
        with replaced(path, writer) as temporary, open(temporary, "wb+") as file:
            start, count = _write_header(file, shape), 0

            def keep(pixels: np.ndarray) -> None:
                nonlocal count
                file.write(pixels.data)
                count += 1

            gray, facts = decode(keep)
            shape = count, *shape[1:]
            if gray:
                shape = *shape[:3], _keep_first_channel(file, start, shape)
            file.truncate(start + math.prod(shape))
            file.seek(0)
            _write_header(file, shape)
            file.flush()
            pixels = pixel_digest(Rows(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), start, shape))
            text = json.dumps({**facts, "source": source, "pixels": pixels}).encode()
            file.seek(0, os.SEEK_END)
            file.write(text + _digest(shape, text))
    except OSError as error:
        raise _cannot_keep(path.parent, error) from None


def _write_header(file: BinaryIO, shape: tuple[int, ...]) -> int:
    """Returns its length, which leaves room for any number of images."""
    np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return file.tell()


def _keep_first_channel(file: BinaryIO, start: int, shape: tuple[int, ...]) -> int:
    """Move the first channel of all pixels together; returns how many channels there are then."""
    count, channels = math.prod(shape[:3]), shape[3]
    for first in range(0, count, CHUNK):
        file.seek(start + first * channels)
        pixels = np.frombuffer(file.read(min(CHUNK, count - first) * channels), np.uint8)
        file.seek(start + first)
        file.write(pixels[::channels].tobytes())
    return 1


def _digest(shape: tuple[int, ...], text: bytes) -> bytes:
    return hashlib.sha256(repr(tuple(shape)).encode() + text).hexdigest().encode()


def _cannot_keep(folder: Path, error: OSError) -> CudiffError:
    return CudiffError(
        f"cannot keep decoded pictures in {folder} ({error.strerror or error}): make room there, or point "
        "CUDIFF_CACHE_DIR to a folder that can be written"
    )
