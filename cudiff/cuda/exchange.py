"""Workspace in which the blocks of one launch exchange partial results."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from cudiff.backend import Array, free_memory, get_cupy
from cudiff.cuda.device import current_device

_SLOTS, _BYTES = 256, 16  # slots of a block, one for each channel it may have; bytes of a slot, and of the header

_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation

_workspaces: dict[tuple[int, int, int], Array] = {}
_making = threading.Lock()


def exchange_workspace() -> Array:
    """The current stream's workspace: slots for as many blocks as the device has multiprocessors, zeroed when made.

    A slot is tagged with the number of the launch that published it. Launches on one stream follow each other, so none
    takes a slot of an earlier one for its own. A graph uses the workspace of the stream that it was recorded on:
    launched on another stream, it may not run at the same time as work on that one. `release_workspace` frees it. If
    that is not called, a new stream may get the handle of a deleted one, and with it the workspace: it may not run
    before that one's work is done.

    Blocks that wait for each other stay on their multiprocessors. They are launched cooperatively (`launch.launch`):
    all begin together or none does, so none waits for a block that other work on the GPU keeps from starting.
    """
    cupy = get_cupy()
    device, stream = cupy.cuda.runtime.getDevice(), cupy.cuda.get_current_stream().ptr
    # The threads' own default streams have one handle.
    key = device, stream, threading.get_ident() if stream == cupy.cuda.runtime.streamPerThread else 0
    with _making:
        if key not in _workspaces:
            memory = _allocate(_BYTES * (1 + _SLOTS * current_device().multiprocessors))
            own = cupy.cuda.Stream(non_blocking=True)
            memory.memset_async(0, memory.mem.size, own)  # the current stream may be recording
            own.synchronize()
            _workspaces[key] = cupy.ndarray(memory.mem.size, np.uint8, memory)
    return _workspaces[key]


def release_workspace(device: int, stream: int) -> None:
    """Free the workspace of a device's stream, given by its handle, once all of the GPU's work is done.

    Garbage collection may call it in any thread at any moment, so it takes no lock.
    """
    _workspaces.pop((device, stream, 0), None)


def _allocate(size: int) -> Any:
    """Memory without a pool. Pending kernels may write to memory that a pool takes back; cudaFree waits for them."""
    cuda = get_cupy().cuda
    for _ in range(2):
        try:
            return cuda.MemoryPointer(cuda.Memory(size), 0)
        except cuda.runtime.CUDARuntimeError as error:
            if error.status != _OUT_OF_MEMORY:
                raise
        free_memory()  # CuPy's pool may hold unused blocks
    raise cuda.memory.OutOfMemoryError(size, 0)
