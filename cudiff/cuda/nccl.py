"""Sums and copies of arrays between GPUs, one a process, by NCCL through CuPy; a captured step holds them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from cudiff.backend import Array, device_of, get_cupy
from cudiff.cuda.compiler import compiles_ahead
from cudiff.errors import CudiffError


def library() -> Any:
    """CuPy's module of NCCL. Raises CudiffError where NCCL is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuPy's, where it is not installed: several lines
        from cupy.cuda import nccl
    if not nccl.available:
        wheel = f"nvidia-nccl-cu{get_cupy().cuda.runtime.runtimeGetVersion() // 1000}"
        raise CudiffError(f"GPUs talk by NCCL, which is not installed: pip install {wheel}")
    return nccl


def version() -> str:
    """NCCL's version, or why there is none."""
    try:
        number = library().get_version()
    except CudiffError as error:
        return f"not usable: {error}"
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


class Nccl:
    """A communicator of NCCL. exchange(value): every process's value, by rank.

    Raises CudiffError where NCCL is not installed or two processes have one GPU.
    """

    def __init__(self, rank: int, size: int, exchange: Callable[[Any], list[Any]]):
        cuda, nccl = get_cupy().cuda, library()
        self._nccl, self._error = nccl, nccl.NcclError
        self._types = {"float32": nccl.NCCL_FLOAT32, "uint8": nccl.NCCL_UINT8}
        number = nccl.get_unique_id().hex() if rank == 0 else ""
        self._beside = cuda.Stream(non_blocking=True)
        self._event = cuda.Event(disable_timing=True)
        self._communicator = self._checked(nccl.NcclCommunicator, size, bytes.fromhex(exchange(number)[0]), rank)

    def all_reduce(self, array: Array) -> None:
        """Sum of float32 over the processes, in place, on the current stream."""
        if compiles_ahead():  # nothing runs: the others may have everything compiled
            return
        pointer, stream = array.data.ptr, get_cupy().cuda.get_current_stream().ptr
        self._checked(self._communicator.allReduce, pointer, pointer, array.size, self._types[array.dtype.name],
                      self._nccl.NCCL_SUM, stream)

    def start_sums(self, arrays: list[Array]) -> None:
        """Sum them by one launch, on a stream beside the current one, after what this one has been given so far."""
        cuda = get_cupy().cuda
        self._event.record(cuda.get_current_stream())
        self._beside.wait_event(self._event)
        with self._beside:
            self._nccl.groupStart()
            try:
                for array in arrays:
                    self.all_reduce(array)
            finally:
                self._checked(self._nccl.groupEnd)

    def finish_sums(self) -> None:
        """Have the current stream wait for the one beside it."""
        self._event.record(self._beside)
        get_cupy().cuda.get_current_stream().wait_event(self._event)

    def broadcast(self, array: Array, root: int) -> None:
        """Copy process `root`'s array, C-contiguous, to all: one of the GPU, or one of the host by way of the GPU."""
        if device_of(array) == "cpu":
            copy = get_cupy().asarray(array)
            self.broadcast(copy, root)
            array[...] = copy.get()
            return
        stream = get_cupy().cuda.get_current_stream().ptr
        self._checked(self._communicator.bcast, array.data.ptr, array.nbytes, self._types["uint8"], root, stream)

    def all_gather(self, parts: list[Array]) -> None:
        """Copy each process's part to all, by one launch on the current stream, of sizes that may differ."""
        if compiles_ahead():
            return
        self._nccl.groupStart()
        try:
            for rank, part in enumerate(parts):
                if part.size:
                    self.broadcast(part, rank)
        finally:
            self._checked(self._nccl.groupEnd)

    def close(self) -> None:
        """Destroy the communicator. It waits for the graphs that hold its operations: these are to be gone before."""
        get_cupy().cuda.Device().synchronize()
        self._communicator.destroy()

    def _checked(self, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except self._error as error:
            raise CudiffError(f"NCCL failed ({error}): NCCL_DEBUG=INFO in the environment says more") from None
