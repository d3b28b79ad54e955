"""Opening files that others wrote, and replacing files whole."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from cudiff.errors import CudiffError

SYSTEM = ("/proc", "/sys")
"""File systems whose files are the kernel's: some never end, some wait for ever."""


def system_devices() -> set[int]:
    """The devices of `SYSTEM`, as `os.stat` tells them."""
    return {os.stat(path).st_dev for path in SYSTEM if os.path.ismount(path)}


def locked(place: int) -> bool:
    """Lock an open file or folder until it is closed, as far as the system can. Returns False where another process has
    locked it."""
    try:
        import fcntl

        fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):  # Windows; some network file systems
        pass
    return True


@contextlib.contextmanager
def opened(path: str | os.PathLike) -> Iterator[BinaryIO]:
    """A file to read. Raises CudiffError where the system refuses, in the block too, and for what is no plain file, or
    one of the kernel's: to open a pipe would wait for its other end."""
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode) or status.st_dev in system_devices():
            raise CudiffError(f"{path} is not a file: check the path")
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        raise CudiffError(f"cannot read {path} ({error.strerror or error}): check the path") from None
    except ValueError as error:  # a NUL in the name
        if "null" not in str(error):
            raise
        raise CudiffError(f"cannot read {path} ({error}): check the path") from None


def temporary_of(path: Path, writer: str | None = None) -> Path:
    """Where a file is written that is to replace `path`, beside it. By default the name is this thread's own."""
    own = f"-{os.getpid()}-{threading.get_native_id()}"
    return path.with_name(f".{path.name}{own if writer is None else writer}.tmp")


@contextlib.contextmanager
def replaced(path: str | os.PathLike, writer: str | None = None) -> Iterator[Path]:
    """Where to write a file that takes the place of `path` at the end of the block, or not at all.

    A full disk, an exception or a kill at any moment leaves what was at `path` as it was. Of several that replace it at
    the same time the last one's stays. writer: where there is only one at a time, a name: what a kill leaves is then
    replaced by the next one. Folders are made as needed. Raises OSError where the system refuses.
    """
    path = Path(path)
    temporary = temporary_of(path, writer)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):  # some systems cannot open or sync a folder
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
