"""Memory in which the blocks of one kernel leave each other letters while all of them are there."""

from __future__ import annotations

import functools

import numpy as np

from cudiff.backend import Array, get_cupy
from cudiff.cuda.driver import limits

_LETTERS, _BYTES = 256, 16  # of a block, one for each channel that it may have; of a letter, and of the head


def mail() -> Array:
    """The current stream's, zeroed once, with letters for as many blocks as there are multiprocessors.

    Launches on one stream follow each other, and each knows its own letters from those of before by their number. A
    graph holds the mail of the stream that it was recorded on: launched on another, it may not run beside work there.
    """
    cuda = get_cupy().cuda
    return _mail(cuda.runtime.getDevice(), cuda.get_current_stream().ptr)


@functools.cache
def _mail(device: int, stream: int) -> Array:
    # Neither from the pool, which may be that of a graph and end with it, nor on the stream, which may be recording.
    cupy, size = get_cupy(), _BYTES * (1 + _LETTERS * limits(device).multiprocessors)
    memory, own = cupy.cuda.MemoryPointer(cupy.cuda.Memory(size), 0), cupy.cuda.Stream(non_blocking=True)
    memory.memset_async(0, size, own)
    own.synchronize()
    return cupy.ndarray(size, np.uint8, memory)
