"""Processes that share a GPU: side by side while they compile, one at a time while they measure.

Each locks two files of a folder. It shares the first while it does what is not timed, and has it alone while it
times. Who waits to be alone holds the second, at which all others wait: so nobody goes on to compile before those who
waited have measured.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


class Turns:
    """This process's place among the others; before `join` there are none, and nothing is locked."""

    def __init__(self) -> None:
        self._files: tuple[int, int] | None = None
        self._depth = 0  # of calls of `alone` inside each other

    def join(self, folder: Path) -> None:
        """From now on share the GPU with those that joined in the same folder, until this process ends."""
        gpu, door = (os.open(folder / name, os.O_RDWR | os.O_CREAT) for name in ("gpu", "door"))
        self._files = gpu, door
        self._lock(fcntl.LOCK_SH)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """None of the others uses the GPU meanwhile."""
        if not self._depth:
            self._lock(fcntl.LOCK_EX)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._lock(fcntl.LOCK_SH)

    def _lock(self, kind: int) -> None:
        if self._files:
            gpu, door = self._files
            fcntl.flock(gpu, fcntl.LOCK_UN)
            fcntl.flock(door, fcntl.LOCK_EX)
            fcntl.flock(gpu, kind)
            fcntl.flock(door, fcntl.LOCK_UN)


turns = Turns()
