"""Sums and copies of arrays between processes on the CPU of one machine, by memory that all of them map."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from collections.abc import Callable
from typing import Any, BinaryIO

import numpy as np

from cudiff.backend import Array
from cudiff.distributed.engine import Engine
from cudiff.errors import CudiffError

CHUNK = 4 << 20
"""Bytes that a process has to say at a time. Of a longer array one chunk follows the other."""


class SharedMemory(Engine):
    """The processes of one machine, with CHUNK bytes of shared memory for each.

    exchange: `Wire.exchange`, which waits for all. It takes 130 to 260 µs between two processes. litter: `Wire.litter`,
    which names a file until all have opened it. Raises CudiffError where no folder for temporary files has room.
    """

    def __init__(self, rank: int, size: int, exchange: Callable[[Any], list[Any]], litter: list[str]):
        self._rank, self._size, self._exchange = rank, size, exchange
        # Two halves in turns: while one process still reads what was said, another may go on and speak.
        length = 2 * size * CHUNK
        if rank == 0:
            litter.append(_file(length))
        path = exchange(litter and litter[0])[0]
        with open(path, "r+b") as file:
            memory = mmap.mmap(file.fileno(), length)
            exchange(None)
            if rank == 0:
                os.unlink(path)  # the memory lasts as long as a process maps it
                litter.clear()
                _fill(file, length)
        exchange(None)
        self._halves = np.frombuffer(memory, np.uint8).reshape(2, size, CHUNK)
        self._turn = 0

    def all_reduce(self, array: Array) -> None:
        """Sum over the processes, in place, in the order of their numbers: ((a0 + a1) + a2) + ...

        Each process sums one part of the array and gives it to all.
        """
        for chunk in self._chunks(array):
            slots = self._next().view(array.dtype)[:, : chunk.size]
            slots[self._rank] = chunk
            self._meet("all_reduce", chunk.size)
            own = slice(self._rank * chunk.size // self._size, (self._rank + 1) * chunk.size // self._size)
            for other in slots[1:, own]:
                slots[0, own] += other
            self._exchange(None)
            chunk[...] = slots[0]

    def broadcast(self, array: Array, root: int) -> None:
        """Copy process `root`'s array, C-contiguous, to all."""
        for chunk in self._chunks(array.reshape(-1).view(np.uint8)):
            said = self._next()[root, : chunk.size]
            if self._rank == root:
                said[...] = chunk
            self._meet("broadcast", chunk.size, root)
            chunk[...] = said

    def _meet(self, *call: Any) -> None:
        """Wait for all. Raises CudiffError where one makes another call, whose numbers would be mixed with these."""
        for rank, other in enumerate(self._exchange(list(call))):
            if other != list(call):
                raise CudiffError(f"process {rank} of {self._size} called {other} where process {self._rank} called "
                                  f"{list(call)}: all make the same calls of their group, on arrays of the same size")

    def _next(self) -> Array:
        """The other half: a chunk for each process."""
        self._turn = 1 - self._turn
        return self._halves[self._turn]

    @staticmethod
    def _chunks(array: Array) -> list[Array]:
        flat = array.reshape(-1)
        most = CHUNK // array.itemsize
        return [flat[start : start + most] for start in range(0, flat.size, most)]


def _file(size: int) -> str:
    """The path of a new file of so many bytes that are not there yet: in memory where there is room, else on the disk.
    """
    room = [folder for folder in ("/dev/shm", tempfile.gettempdir())
            if os.path.isdir(folder) and shutil.disk_usage(folder).free > size]
    if not room:
        raise _no_room(size)
    number, path = tempfile.mkstemp(prefix="cudiff-", dir=room[0])
    os.truncate(number, size)
    os.close(number)
    return path


def _fill(file: BinaryIO, size: int) -> None:
    """Take the room of so many bytes: a write to a page that a full folder has not ends the process."""
    try:
        file.write(bytes(size))
        file.flush()
    except OSError:
        raise _no_room(size) from None


def _no_room(size: int) -> CudiffError:
    return CudiffError(f"no room for {size >> 20} MB in {tempfile.gettempdir()}: let TMPDIR name another folder")
