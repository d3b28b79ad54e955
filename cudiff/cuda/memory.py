"""An arena: GPU memory for the arrays that a captured function makes. It grows, and merges neighbouring free blocks.

CuPy's memory pool allocates separate segments. It never merges them, and only the graph itself can use a graph's pool.
The U-Net's training step at batch 32 in bf16, with dropout, has at most 755 MiB of arrays at once, and the arena holds
756 (at 9660d22). When it had 599, without dropout, the pool held 741 and the arena 662.
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

ALIGNMENT = 512  # of every array, in bytes, as in CuPy's pool
PAGE = 2 << 20  # bytes; the driver maps memory in multiples of it
_ENDLESS = 1 << 62
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


class Block:
    """`size` bytes in use, from offset `start`. They are freed when this object is deleted, so their user keeps it."""

    __slots__ = ("allocator", "size", "start")

    def __init__(self, allocator: Allocator, start: int, size: int):
        self.allocator, self.start, self.size = allocator, start, size

    def __del__(self) -> None:
        # Not merged here: garbage collection may run this in any thread at any moment, inside `take` too.
        self.allocator.given_back.append((self.start, self.size))


class Allocator:
    """A best-fit allocator of blocks in an endless range of bytes."""

    def __init__(self) -> None:
        self.given_back: collections.deque[tuple[int, int]] = collections.deque()
        self._free = [(0, _ENDLESS)]  # (start, size), sorted; no two touch
        self._lock = threading.Lock()

    def take(self, size: int) -> Block:
        """Allocate `size` bytes in the smallest free block that is large enough, of equal ones in the lowest."""
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
        """Called before a block that ends at `end` is taken; may raise."""

    def _join(self, start: int, size: int) -> None:
        """Free a block, and merge it with the free blocks that it touches."""
        index, end = bisect.bisect(self._free, (start, 0)), start + size
        if self._free[index][0] == end:  # a free block always follows: the range is endless
            end += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == start:
            index -= 1
            start = self._free.pop(index)[0]
        self._free.insert(index, (start, end - start))


class Arena(Allocator):
    """GPU memory for arrays that are used on one stream. It grows with them, and is freed after the last of them.

    needed: the highest end of an array so far, in bytes from the arena's start. precompiling: if the GPU's memory runs
    out, further arrays get addresses without memory, for launches that are discarded. From then on `needed` is above
    `total_bytes()`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.needed, self.precompiling = 0, False
        runtime = get_cupy().cuda.runtime
        self._device = runtime.getDevice()
        self._reserved = -(-memory_total("cuda") // PAGE) * PAGE  # addresses without memory cost nothing
        first = ctypes.c_uint64()
        _call("cuMemAddressReserve", ctypes.byref(first), self._reserved, 0, 0, 0)
        self._first = first.value
        self._pieces: list[tuple[int, int]] = []  # (address, size) of the memory mapped so far
        weakref.finalize(self, _release, runtime.malloc(1), self._first, self._reserved, self._pieces).atexit = False

    def total_bytes(self) -> int:
        """Bytes of GPU memory taken from the driver."""
        return sum(size for _, size in self._pieces)

    def allocate(self, size: int) -> Any:
        """Memory of `size` bytes for a CuPy array, as a cupy.cuda.MemoryPointer. Raises CuPy's OutOfMemoryError."""
        cuda, block = get_cupy().cuda, self.take(size)
        memory = cuda.UnownedMemory(self._first + block.start, size, block, self._device)
        return cuda.MemoryPointer(memory, 0)

    def _reach(self, end: int) -> None:
        taken = self.total_bytes()
        known_short = self.precompiling and self.needed > taken  # asking again would collect garbage each time
        if end > taken and not known_short:
            size = -(-(end - taken) // PAGE) * PAGE
            if not self._back(taken, size) and not self.precompiling:
                raise get_cupy().cuda.memory.OutOfMemoryError(size, taken)
        self.needed = max(self.needed, end)

    def _back(self, start: int, size: int) -> bool:
        """Map `size` bytes of memory at `start`. Returns whether the GPU has them."""
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
        """The handle of new memory, not mapped yet. None if there is too little, after garbage and CuPy's idle blocks
        were freed."""
        # CUmemAllocationProp: CU_MEM_ALLOCATION_TYPE_PINNED = 1, not exported, CU_MEM_LOCATION_TYPE_DEVICE = 1
        handle, kind = ctypes.c_uint64(), struct.pack("4i16x", 1, 0, 1, self._device)
        if _call("cuMemCreate", ctypes.byref(handle), size, kind, 0, expected=_OUT_OF_MEMORY):
            gc.collect()
            free_memory()
            if _call("cuMemCreate", ctypes.byref(handle), size, kind, 0, expected=_OUT_OF_MEMORY):
                return None
        return handle


def _release(last: int, first: int, reserved: int, pieces: list[tuple[int, int]]) -> None:
    # Unmapping does not wait for the kernels that use the memory. cudaFree does: it waits for all of the GPU's work.
    # Unlike cudaDeviceSynchronize it does not end a capture, during which garbage may be collected.
    get_cupy().cuda.runtime.free(last)
    for address, size in pieces:
        _call("cuMemUnmap", address, size)
    _call("cuMemAddressFree", first, reserved)


def _call(name: str, *args: Any, expected: int = 0) -> int:
    """Call a function of the driver, with ints passed as 64 bits. Returns its status, 0 or `expected`; raises
    CUDADriverError for any other."""
    status = getattr(library(), name)(*(ctypes.c_uint64(arg) if isinstance(arg, int) else arg for arg in args))
    if status not in (0, expected):
        raise get_cupy().cuda.driver.CUDADriverError(status)
    return status
