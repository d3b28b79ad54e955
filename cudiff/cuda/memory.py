"""Memory of its own for what a captured function makes: an arena that grows, in which freed blocks join.

CuPy's pool asks the driver for segment after segment, which never join, and a graph's serve nobody else: the U-Net's
training step at batch 32 held 741 MiB of them in bf16, for arrays that never take more than 599 MiB at once; here 662.
"""

from __future__ import annotations

import bisect
import collections
import ctypes
import gc
import struct
import threading
import weakref
from typing import Any

from cudiff.backend import free_memory, get_cupy, memory_total
from cudiff.cuda.device import library

ALIGNMENT = 512  # of every array, as CuPy's
PAGE = 2 << 20  # what the driver backs addresses with
_ENDLESS = 1 << 62
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


class Block:
    """Bytes in use, from `start`: given back by the end of this object, which whoever uses them holds."""

    __slots__ = ("allocator", "size", "start")

    def __init__(self, allocator: Allocator, start: int, size: int):
        self.allocator, self.start, self.size = allocator, start, size

    def __del__(self) -> None:
        # Not joined here: any thread may run this at any moment, inside `take` too.
        self.allocator.given_back.append((self.start, self.size))


class Allocator:
    """An endless line of bytes and which of them are free."""

    def __init__(self) -> None:
        self.given_back: collections.deque[tuple[int, int]] = collections.deque()
        self._free = [(0, _ENDLESS)]  # (start, size), sorted; no two touch
        self._lock = threading.Lock()

    def take(self, size: int) -> Block:
        """The smallest free block of `size` bytes; of two the lower."""
        size = max(1, -(-size // ALIGNMENT)) * ALIGNMENT
        with self._lock:
            while self.given_back:
                self._join(*self.given_back.popleft())
            _, index = min((room, index) for index, (_, room) in enumerate(self._free) if room >= size)
            start, room = self._free[index]
            self._reach(start + size)
            self._free[index : index + 1] = [(start + size, room - size)] if room > size else []
        return Block(self, start, size)

    def _reach(self, end: int) -> None:
        """Called before a block that ends there is given; may raise."""

    def _join(self, start: int, size: int) -> None:
        """Free a block, as one with the free ones that it touches."""
        index, end = bisect.bisect(self._free, (start, 0)), start + size
        if self._free[index][0] == end:  # there is always one behind: the line has no end
            end += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == start:
            index -= 1
            start = self._free.pop(index)[0]
        self._free.insert(index, (start, end - start))


class Arena(Allocator):
    """GPU memory for arrays that follow each other on one stream. It grows as they need it, and lives as long as the
    last of them.

    needed: how far its arrays have reached, in bytes. rehearsing: where the GPU has no more memory, what is beyond has
    addresses alone, for launches that are thrown away; `needed` is above `total_bytes()` from then on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.needed, self.rehearsing = 0, False
        runtime = get_cupy().cuda.runtime
        self._device = runtime.getDevice()
        self._reserved = -(-memory_total("cuda") // PAGE) * PAGE  # addresses alone cost nothing
        first = ctypes.c_uint64()
        _call("cuMemAddressReserve", ctypes.byref(first), self._reserved, 0, 0, 0)
        self._first = first.value
        self._pieces: list[tuple[int, int]] = []  # (address, size) of the memory behind the addresses so far
        weakref.finalize(self, _release, runtime.malloc(1), self._first, self._reserved, self._pieces).atexit = False

    def total_bytes(self) -> int:
        """GPU memory taken from the driver."""
        return sum(size for _, size in self._pieces)

    def allocate(self, size: int) -> Any:
        """Memory for a CuPy array, as CuPy's allocators give it. Raises its OutOfMemoryError."""
        cuda, block = get_cupy().cuda, self.take(size)
        memory = cuda.UnownedMemory(self._first + block.start, size, block, self._device)
        return cuda.MemoryPointer(memory, 0)

    def _reach(self, end: int) -> None:
        taken = self.total_bytes()
        known_short = self.rehearsing and self.needed > taken  # to ask again collects garbage each time
        if end > taken and not known_short:
            size = -(-(end - taken) // PAGE) * PAGE
            if not self._back(taken, size) and not self.rehearsing:
                raise get_cupy().cuda.memory.OutOfMemoryError(size, taken)
        self.needed = max(self.needed, end)

    def _back(self, start: int, size: int) -> bool:
        """Put memory behind the addresses from `start` on, if there is so much."""
        address = self._first + start
        handle = self._create(size) if start + size <= self._reserved else None
        if handle is None:
            return False
        _call("cuMemMap", address, size, 0, handle, 0)
        _call("cuMemRelease", handle)  # the mapping holds the memory
        self._pieces.append((address, size))
        # CUmemAccessDesc: CU_MEM_LOCATION_TYPE_DEVICE = 1, CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3
        _call("cuMemSetAccess", address, size, struct.pack("3i", 1, self._device, 3), 1)
        return True

    def _create(self, size: int) -> ctypes.c_uint64 | None:
        """Memory without an address; None where none is left, that of garbage and of CuPy's idle blocks included."""
        # CUmemAllocationProp: CU_MEM_ALLOCATION_TYPE_PINNED = 1, not exported, CU_MEM_LOCATION_TYPE_DEVICE = 1
        handle, kind = ctypes.c_uint64(), struct.pack("4i16x", 1, 0, 1, self._device)
        if _call("cuMemCreate", ctypes.byref(handle), size, kind, 0, expected=_OUT_OF_MEMORY):
            gc.collect()
            free_memory()
            if _call("cuMemCreate", ctypes.byref(handle), size, kind, 0, expected=_OUT_OF_MEMORY):
                return None
        return handle


def _release(last: int, first: int, reserved: int, pieces: list[tuple[int, int]]) -> None:
    # Unmapping does not wait for the kernels that use the memory, cudaFree does: for all of the GPU's work, and unlike
    # cudaDeviceSynchronize without ending a capture, in which garbage may be collected.
    get_cupy().cuda.runtime.free(last)
    for address, size in pieces:
        _call("cuMemUnmap", address, size)
    _call("cuMemAddressFree", first, reserved)


def _call(name: str, *args: Any, expected: int = 0) -> int:
    """The status of a function of the driver, 0 or `expected`. All of its numbers have 64 bits."""
    status = getattr(library(), name)(*(ctypes.c_uint64(arg) if isinstance(arg, int) else arg for arg in args))
    if status not in (0, expected):
        raise get_cupy().cuda.driver.CUDADriverError(status)
    return status
