"""Sums and copies of arrays between GPUs, one for each process, by NCCL through CuPy. Graphs can capture them."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from cudiff.backend import Array, device_of, get_cupy
from cudiff.cuda.compiler import compiles_ahead
from cudiff.cuda.peers import Mapped, Peers
from cudiff.errors import CudiffError


def library() -> Any:
    """CuPy's NCCL module. Raises CudiffError where NCCL is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuPy warns in several lines if NCCL is not installed
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
    """An NCCL communicator. exchange(value): gathers a value from each process, in the order of ranks. one_machine:
    whether all are processes of this one.

    Raises CudiffError if NCCL is not installed or two processes use one GPU.
    """

    def __init__(self, rank: int, size: int, exchange: Callable[[Any], list[Any]], one_machine: bool = False):
        cuda, nccl = get_cupy().cuda, library()
        self._rank, self._exchange, self._one_machine = rank, exchange, one_machine
        self._mapped = Mapped()
        self._stepping: Peers | None = None  # those of the step whose sums have begun
        self._nccl, self._error = nccl, nccl.NcclError
        self._types = {"float32": nccl.NCCL_FLOAT32, "uint8": nccl.NCCL_UINT8}
        number = nccl.get_unique_id().hex() if rank == 0 else ""
        self._beside = cuda.Stream(non_blocking=True)
        self._event = cuda.Event(disable_timing=True)
        self._communicator = self._checked(nccl.NcclCommunicator, size, bytes.fromhex(exchange(number)[0]), rank)

    def all_reduce(self, array: Array) -> None:
        """Sum a float32 array over the processes, in place, on the current stream."""
        if compiles_ahead():  # no launch: the other processes may have compiled everything
            return
        pointer, stream = array.data.ptr, get_cupy().cuda.get_current_stream().ptr
        self._checked(self._communicator.allReduce, pointer, pointer, array.size, self._types[array.dtype.name],
                      self._nccl.NCCL_SUM, stream)

    def register(self, gradient: Array, weights: Array, parts: Sequence[slice]) -> Peers | None:
        """Copies between GPUs of one machine that reach each other's memory: parts of gradients go to the process that
        updates them, and its update writes the weights to all. None where NCCL does it."""
        if self._one_machine:
            with contextlib.suppress(OSError):
                return Peers(self._rank, gradient, weights, parts, self._exchange, self._mapped)
        return None

    def start_sums(self, arrays: list[Array], number: int, registered: Peers | None) -> None:
        """`all_reduce` of arrays by one launch, or copies of them to other GPUs, on a second stream, after the current
        stream's launches so far."""
        self._event.record(get_cupy().cuda.get_current_stream())
        self._beside.wait_event(self._event)
        self._stepping = registered
        with self._beside:
            if self._stepping is not None:
                self._stepping.start(arrays, number)
                return
            self._nccl.groupStart()
            try:
                for array in arrays:
                    self.all_reduce(array)
            finally:
                self._checked(self._nccl.groupEnd)

    def finish_sums(self) -> None:
        """Make the current stream wait for the second one."""
        if self._stepping is not None:
            with self._beside:
                self._stepping.finish()
        self._event.record(self._beside)
        get_cupy().cuda.get_current_stream().wait_event(self._event)

    def peers(self, array: Array) -> list[tuple[int, int]]:
        """As `Group.peers` says; empty where NCCL sums."""
        if self._stepping is None or not self._stepping.summed:
            return []
        addresses = self._stepping.addresses(array)
        if not addresses:
            raise CudiffError("an optimiser steps that is not of the gradient that was summed: step each after its own")
        return addresses

    def gather_sums(self, array: Array) -> Array | None:
        """Every process's array, by copies; None where NCCL does it."""
        return None if self._stepping is None else self._stepping.gather_sums(array)

    def broadcast(self, array: Array, root: int) -> None:
        """Copy the C-contiguous array of process `root` to all. An array on the host is copied by way of the GPU."""
        if device_of(array) == "cpu":
            copy = get_cupy().asarray(array)
            self.broadcast(copy, root)
            array[...] = copy.get()
            return
        stream = get_cupy().cuda.get_current_stream().ptr
        self._checked(self._communicator.bcast, array.data.ptr, array.nbytes, self._types["uint8"], root, stream)

    def finish_update(self, parts: list[Array]) -> None:
        """`all_gather` of weights that were updated, or the wait until all GPUs have updated theirs everywhere."""
        if self._stepping is not None and self._stepping.summed:
            self._stepping.wait_for_weights()
            self._stepping = None
        else:
            self.all_gather(parts)

    def all_gather(self, parts: list[Array]) -> None:
        """Copy each process's part, parts[rank], to all by one launch on the current stream. Sizes may differ."""
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
        """Destroy the communicator. That waits for graphs that hold its operations: they are to be deleted before."""
        get_cupy().cuda.Device().synchronize()
        self._mapped.close()
        self._communicator.destroy()

    def _checked(self, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except self._error as error:
            raise CudiffError(f"NCCL failed ({error}): NCCL_DEBUG=INFO in the environment says more") from None
