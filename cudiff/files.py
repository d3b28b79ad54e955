"""Opening files that others wrote."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from typing import BinaryIO

from cudiff.errors import CudiffError


@contextlib.contextmanager
def opened(path: str | os.PathLike) -> Iterator[BinaryIO]:
    """A file to read. Raises CudiffError where the system refuses, in the block too, and for what is no plain file: to
    open a pipe would wait for its other end."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise CudiffError(f"{path} is not a file: check the path")
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        raise CudiffError(f"cannot read {path} ({error.strerror or error}): check the path") from None
    except ValueError as error:  # a NUL in the name
        if "null" not in str(error):
            raise
        raise CudiffError(f"cannot read {path} ({error}): check the path") from None
