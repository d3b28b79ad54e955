"""Memory in which the blocks of one kernel leave each other letters while all of them are there."""

from __future__ import annotations

import threading

import numpy as np

from cudiff.backend import Array, get_cupy
from cudiff.cuda.driver import multiprocessors

_LETTERS, _BYTES = 256, 16  # of a block, one for each channel that it may have; of a letter, and of the head

_mails: dict[tuple[int, int, int], Array] = {}
_making = threading.Lock()


def stream_mail() -> Array:
    """The current stream's: letters for as many blocks as the device has multiprocessors, zeroed when it was made.

    Launches on one stream follow each other, and each knows its own letters from those of before by their number. A
    graph holds the mail of the stream that it was recorded on: launched on another, it may not run beside work there.

    Blocks that wait for each other hold their places. On streams of one priority a GPU places all blocks of a launch
    before any of the next (Amert et al., GPU Scheduling on the NVIDIA TX2, RTSS 2017), so of two such launches one has
    all of its own. Of streams of different priorities that is not known: such launches may not run side by side.
    """
    cupy = get_cupy()
    device, stream = cupy.cuda.runtime.getDevice(), cupy.cuda.get_current_stream().ptr
    # All threads' own default streams have one number.
    key = device, stream, threading.get_ident() if stream == cupy.cuda.runtime.streamPerThread else 0
    with _making:
        if key not in _mails:
            # Not from a graph's memory, which may end with it, nor zeroed on this stream, which may be recording.
            memory = cupy.get_default_memory_pool().malloc(_BYTES * (1 + _LETTERS * multiprocessors()))
            own = cupy.cuda.Stream(non_blocking=True)
            memory.memset_async(0, memory.mem.size, own)
            own.synchronize()
            _mails[key] = cupy.ndarray(memory.mem.size, np.uint8, memory)
    return _mails[key]
