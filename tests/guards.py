"""Bytes around each of a test's arrays on the GPU, which no kernel may change.

CuPy's allocators round sizes up and cut arrays out of one large piece, so that what a kernel writes outside of an array
lands in memory that nobody looks at. These bytes are read when the test has ended, and nothing is waited for before.
Arrays that a captured function makes lie in its arena and are not guarded: their kernels are those of other tests.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from typing import Any, NamedTuple

import numpy as np

SIDE = 512  # bytes before and behind an array: CuPy's alignment, so that arrays start where they would
HELD = 1 << 29  # bytes of freed arrays that wait for the test's end; beyond them the oldest are given back unread
POISON = 0xFF  # floats of these bytes are NaN


class Allocation(NamedTuple):
    """`size` bytes, between guards of `byte`."""

    memory: Any  # a pointer to the guard before them
    size: int
    byte: int

    def fill(self) -> None:
        for start in (0, SIDE + self.size):
            (self.memory + start).memset_async(self.byte, SIDE)


class _Use:
    """Ends where the last array in these bytes does."""

    def __init__(self, allocation: Allocation, freed: deque[Allocation]):
        self.allocation, self.freed = allocation, freed

    def __del__(self) -> None:
        self.freed.append(self.allocation)  # no more: any thread may run this, while a stream is captured too


class Guards:
    """An allocator for CuPy, `cuda` being cupy.cuda. Its arrays start as NaN bytes, so that an element a kernel does
    not write is seen, and lie between guards, which `broken` looks at."""

    def __init__(self, cuda: Any):
        self.cuda, self.pool = cuda, cuda.MemoryPool()
        # Two arrays made one after the other have other guards: a copy from behind one to behind the other is seen.
        self.bytes = itertools.cycle(range(1, POISON))
        self.freed: deque[Allocation] = deque()
        self.waiting: deque[Allocation] = deque()  # of the freed, `held` bytes
        self.held = 0
        self.lock = threading.RLock()
        self.used = weakref.WeakSet[_Use]()
        self.is_new = False  # whether something was allocated since the last look

    def allocate(self, size: int) -> Any:
        """Memory for a CuPy array, as CuPy's allocators give it."""
        if not size:
            return self.pool.malloc(0)
        with self.lock:
            self._collect()
            while self.held > HELD:
                self.held -= self.waiting.popleft().size
            byte = next(self.bytes)
        allocation = Allocation(self.pool.malloc(size + 2 * SIDE), size, byte)
        allocation.fill()
        start = allocation.memory + SIDE
        start.memset_async(POISON, size)
        use = _Use(allocation, self.freed)
        self.used.add(use)
        self.is_new = True
        return self.cuda.MemoryPointer(self.cuda.UnownedMemory(start.ptr, size, use, self.cuda.runtime.getDevice()), 0)

    def broken(self) -> list[str]:
        """A line for each guard that was written to, which is whole again then. Waits for the GPU."""
        if not self.is_new:
            return []
        self.is_new = False
        self.cuda.runtime.deviceSynchronize()
        with self.lock:
            allocations = [use.allocation for use in self.used]
            self._collect()
            allocations += self.waiting
            self.waiting.clear()
            self.held = 0
        return [line for allocation in allocations for line in self._look(allocation)]

    def _collect(self) -> None:
        while self.freed:
            self.waiting.append(self.freed.popleft())
            self.held += self.waiting[-1].size

    def _look(self, allocation: Allocation) -> list[str]:
        guards = np.empty((2, SIDE), np.uint8)
        runtime = self.cuda.runtime
        for guard, start in zip(guards, (0, SIDE + allocation.size), strict=True):
            runtime.memcpy(guard.ctypes.data, allocation.memory.ptr + start, SIDE, runtime.memcpyDeviceToHost)
        before, behind = (np.flatnonzero(guard != allocation.byte) for guard in guards)
        if len(before) or len(behind):
            allocation.fill()
        array = f"an array of {allocation.size} bytes was written to"
        return [f"{array}, {SIDE - before[-1]} bytes before it" for _ in before[:1]] + [
            f"{array}, {behind[0] + 1} bytes behind it" for _ in behind[:1]]
