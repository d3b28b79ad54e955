"""A sharded step on the GPUs of one machine. Copy engines bring each GPU the others' gradients of its part, so that the
backward beside them keeps all multiprocessors. Its update adds them, and writes the new weights to all GPUs.

The processes map each other's memory (CUDA IPC). The process that copied sets a flag in the reader's memory. The
reader's stream waits for the flag and clears it. Graphs can capture this.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from cudiff.backend import Array, float32, get_cupy
from cudiff.cuda.compiler import compiles_ahead
from cudiff.cuda.device import library
from cudiff.errors import CudiffError

BUCKETS = 64
"""Buckets of gradients that a step may copy. The flags after theirs are that of sums and that of weights."""

MOST, OPERATIONS = 8, 255
"""Processes, one more than kernels take peers; and operations on memory that the driver takes at once."""

SUMS = 2**13
"""Floats that a process may give to `gather_sums`. NCCL gathers larger arrays."""

_OPERATION = np.dtype({"names": ["kind", "address", "value", "flags"], "formats": ["i4", "u8", "u8", "u4"],
                       "offsets": [0, 8, 16, 24], "itemsize": 48})  # CUstreamBatchMemOpParams
_WAIT, _WRITE = 1, 2  # CU_STREAM_MEM_OP_WAIT_VALUE_32, until there is the value or more, and _WRITE_VALUE_32


class Mapped:
    """The addresses at which other processes' memory is mapped here, and this process's arrays that they mapped.

    Nothing is unmapped when a trainer ends: a graph may be in capture, and others may still use the memory.
    """

    def __init__(self) -> None:
        self.addresses: list[int] = []
        self.arrays: list[Array] = []

    def close(self) -> None:
        """Unmap the others' memory, once no stream uses it."""
        while self.addresses:
            get_cupy().cuda.runtime.ipcCloseMemHandle(self.addresses.pop())
        self.arrays.clear()


class Other(NamedTuple):
    """The addresses here of another process's arrays."""

    weights: int
    received: int
    sums: int
    flags: int


class Peers:
    """What the processes of one machine write to each other's memory in a step.

    Attributes: summed (whether a step's gradients are here, and its update to come).

    No process overwrites what another still reads. A step waits for all others three times:
    - for their gradients;
    - for their `gather_sums`, when they no longer read their weights;
    - for their updates, when they no longer read the gradients and sums that they received.

    gradient, weights: float32 (n,), on the GPU. parts: a slice of them for each process, by rank. exchange(value):
    gathers a value from each process, in the order of ranks. mapped: gets what is mapped. Raises OSError, in every
    process, where one cannot map another's memory or has no part, and where there are more than MOST.

    All elements of a part are added, so those that no process sends are zero.
    """

    def __init__(self, rank: int, gradient: Array, weights: Array, parts: Sequence[slice],
                 exchange: Callable[[Any], list[Any]], mapped: Mapped):
        cupy, size = get_cupy(), len(parts)
        self._rank, self._gradient, self._weights, self._parts = rank, gradient, weights, parts
        self._mapped = mapped
        self._lengths = [part.stop - part.start for part in parts]
        if not all(self._lengths) or size > MOST:
            raise OSError("a process has no part, or there are too many")
        self._received = cupy.zeros((size - 1, self._lengths[rank]), float32)
        self._sums = cupy.empty(size * SUMS, float32)
        self._flags = cupy.zeros((BUCKETS + 2, size), np.uint32)
        mapped.arrays += [weights, self._received, self._sums, self._flags]
        cupy.cuda.Device().synchronize()
        self._others: dict[int, Other] = {}
        handles = exchange(self._handles())
        with contextlib.suppress(OSError):
            self._others = {other: self._open(handles[other]) for other in range(size) if other != rank}
        if not all(exchange(len(self._others) == size - 1)):
            raise OSError("a process cannot map another's memory")
        self._begun, self.summed = 0, False

    def start(self, arrays: Sequence[Array], bucket: int) -> None:
        """Copy slices of the gradient, on the current stream, to the processes whose parts they are. bucket: the number
        of such calls in this step so far."""
        if bucket >= BUCKETS:
            raise CudiffError(f"a gradient is summed in {BUCKETS} buckets at most")
        first = self._gradient.data.ptr
        for rank, other in self._others.items():
            part = self._parts[rank]
            plane = other.received + 4 * self._lengths[rank] * (self._rank - (self._rank > rank))
            for array in arrays:
                begin = (array.data.ptr - first) // 4
                start, stop = max(begin, part.start), min(begin + array.size, part.stop)
                if start < stop:
                    self._copy(plane + 4 * (start - part.start), first + 4 * start, stop - start)
        self._operate(self._setting(bucket))
        self._begun = bucket + 1

    def finish(self) -> None:
        """Make the current stream wait for what the others copy here of the gradients that were begun."""
        self._operate(self._waiting(range(self._begun)))
        self.summed = True

    def addresses(self, array: Array) -> list[tuple[int, int]]:
        """As `Group.peers` says, by rank; empty for another array, and before `finish`."""
        part, at = self._parts[self._rank], (array.data.ptr - self._weights.data.ptr) // 4
        if not self.summed or not part.start <= at <= at + array.size <= part.stop:
            return []
        weights = [other.weights + 4 * at for other in self._others.values()]
        return list(zip(weights, [plane.data.ptr + 4 * (at - part.start) for plane in self._received], strict=True))

    def gather_sums(self, array: Array) -> Array | None:
        """Every process's float32 array, by rank: (size, n), until the next call; None if n is too large, or before
        `finish`."""
        if not self.summed or array.size > SUMS:
            return None
        place = 4 * self._rank * array.size
        for sums in (self._sums.data.ptr, *(other.sums for other in self._others.values())):
            self._copy(sums + place, array.data.ptr, array.size)
        self._meet(BUCKETS)
        return self._sums[: len(self._parts) * array.size].reshape(-1, array.size)

    def wait_for_weights(self) -> None:
        """Make the current stream wait until all processes have updated their parts."""
        self._meet(BUCKETS + 1)
        self.summed = False

    def _handles(self) -> list[tuple[str, int]] | None:
        """The handle of the allocation in which each array lies that others write to, and its offset there in bytes.
        None where the driver has none, or refuses operations of a stream on memory."""
        runtime, handles = get_cupy().cuda.runtime, []
        try:
            self._operate([(_WRITE, self._flags.data.ptr, 0)])
        except (CudiffError, AttributeError):  # AttributeError: the driver is older than CUDA 11.7
            return None
        for array in (self._weights, self._received, self._sums, self._flags):
            base, length = ctypes.c_uint64(), ctypes.c_size_t()
            address = ctypes.c_uint64(array.data.ptr)
            if library().cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(length), address):
                return None
            try:
                handle = runtime.ipcGetMemHandle(base.value)
            except runtime.CUDARuntimeError:
                return None
            handles.append((handle.hex(), array.data.ptr - base.value))
        return handles

    def _open(self, handles: list[tuple[str, int]] | None) -> Other:
        if handles is None:
            raise OSError("another process's memory has no handle")
        runtime, addresses = get_cupy().cuda.runtime, []
        for handle, offset in handles:
            try:
                self._mapped.addresses.append(runtime.ipcOpenMemHandle(bytes.fromhex(handle)))
            except runtime.CUDARuntimeError as error:
                raise OSError(str(error)) from None
            addresses.append(self._mapped.addresses[-1] + offset)
        return Other(*addresses)

    def _copy(self, to: int, source: int, count: int) -> None:
        if not compiles_ahead():
            cuda = get_cupy().cuda
            stream = cuda.get_current_stream().ptr
            cuda.runtime.memcpyAsync(to, source, 4 * count, cuda.runtime.memcpyDefault, stream)

    def _meet(self, number: int) -> None:
        """Have the current stream wait until the others' streams are here too."""
        self._operate(self._setting(number) + self._waiting(range(number, number + 1)))

    def _setting(self, number: int) -> list[tuple[int, int, int]]:
        """Operations that set this process's flag of this number in the others' memory. Each is behind a fence: who has
        waited for it sees all that this stream wrote before."""
        place = self._place(number, self._rank)
        return [(_WRITE, other.flags + place, 1) for other in self._others.values()]

    def _waiting(self, numbers: range) -> list[tuple[int, int, int]]:
        """Operations that wait until the others have set their flags here, and clear them."""
        flags = [self._flags.data.ptr + self._place(number, rank) for number in numbers for rank in self._others]
        return [(_WAIT, flag, 1) for flag in flags] + [(_WRITE, flag, 0) for flag in flags]

    def _place(self, number: int, rank: int) -> int:
        return 4 * (number * len(self._parts) + rank)

    def _operate(self, operations: list[tuple[int, int, int]]) -> None:
        """Have the current stream make operations on its memory, one after the other: (kind, address, value). They are
        one node of a graph."""
        if compiles_ahead():
            return
        stream = ctypes.c_void_p(get_cupy().cuda.get_current_stream().ptr)
        for first in range(0, len(operations), OPERATIONS):
            batch = np.array([(*operation, 0) for operation in operations[first : first + OPERATIONS]], _OPERATION)
            address = ctypes.c_void_p(batch.ctypes.data)
            status = library().cuStreamBatchMemOp_v2(stream, ctypes.c_uint(len(batch)), address, ctypes.c_uint(0))
            if status:
                raise CudiffError(f"the CUDA driver refused cuStreamBatchMemOp (CUresult {status})")
