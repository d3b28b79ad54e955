"""Workspace in which the blocks of one launch exchange partial results."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from cudiff.backend import Array, free_memory, get_cupy
from cudiff.cuda.device import current_device

_SLOTS, _BYTES = 256, 16  # of a block, one for each channel that it may have; of a slot, and of the head

_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation

_workspaces: dict[tuple[int, int, int], Array] = {}
_making = threading.Lock()


def exchange_workspace() -> Array:
    """The current stream's: slots for as many blocks as the device has multiprocessors, zeroed when it was made.

    A slot is tagged with the number of the launch that published it: launches on one stream follow each other, so none
    takes a slot of an earlier one for its own. A graph uses the workspace of the stream that it was recorded on:
    launched on another stream, it may not run at the same time as work on that one. `release_workspace` ends it. Where
    nobody calls that, a new stream may not run beside the last work of one that was let go, whose name it may be given.

    Blocks that wait for each other hold their places: they are launched cooperatively (`launch.launch`), which begins
    only where all of them have one. So no other launch, stream or process that shares the GPU can hold a place that one
    of them waits for.
    """
    cupy = get_cupy()
    device, stream = cupy.cuda.runtime.getDevice(), cupy.cuda.get_current_stream().ptr
    # All threads' own default streams have one name.
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
    """Let go of what a device's stream had, both by their numbers, once all of the GPU's work is done.

    Any thread may call it at any moment, as its garbage is collected: it takes no lock.
    """
    _workspaces.pop((device, stream, 0), None)


def _allocate(size: int) -> Any:
    """Memory of no pool: kernels that are still to run may write to what a pool takes back. cudaFree waits for them."""
    cuda = get_cupy().cuda
    for _ in range(2):
        try:
            return cuda.MemoryPointer(cuda.Memory(size), 0)
        except cuda.runtime.CUDARuntimeError as error:
            if error.status != _OUT_OF_MEMORY:
                raise
        free_memory()  # CuPy's own pool may have some
    raise cuda.memory.OutOfMemoryError(size, 0)
