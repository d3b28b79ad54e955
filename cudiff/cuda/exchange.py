"""Workspace in which the blocks of one launch exchange partial results."""

from __future__ import annotations

import functools
import threading
from typing import Any

import numpy as np

from cudiff.backend import Array, free_memory, get_cupy
from cudiff.cuda.device import current_device

_SLOTS, _BYTES = 256, 16  # of a block, one for each channel that it may have; of a slot, and of the head

_workspaces: dict[tuple[int, int, int], Array] = {}
_making = threading.Lock()


def exchange_workspace() -> Array:
    """The current stream's: slots for as many blocks as the device has multiprocessors, zeroed when it was made.

    A slot is tagged with the number of the launch that published it: launches on one stream follow each other, so none
    takes a slot of an earlier one for its own. A graph holds the workspace of the stream that it was recorded on:
    launched on another stream, it may not run at the same time as work on that one. Nor may a new stream run beside the
    last work of one that was let go: it may be given the same name.

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


def _allocate(size: int) -> Any:
    """Memory that nobody has used: of what a pool takes back, kernels that are still to run may write to."""
    try:
        return _pool().malloc(size)
    except get_cupy().cuda.memory.OutOfMemoryError:  # but CuPy's own pool may have some
        free_memory()
        return _pool().malloc(size)


@functools.cache
def _pool() -> Any:
    return get_cupy().cuda.MemoryPool()
