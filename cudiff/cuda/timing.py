"""How long work on the GPU takes, without the host's time for its launches."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from cudiff.backend import get_cupy
from cudiff.cuda.deferred import immediate


def median_time(run: Callable[[], object], copies: int, repeats: int = 15) -> float:
    """Median microseconds of one copy of some work. `run` launches `copies` of it on the current stream."""
    cuda, times = get_cupy().cuda, []
    for _ in range(repeats):
        start, stop = cuda.Event(), cuda.Event()
        start.record()
        run()
        stop.record()
        stop.synchronize()
        times.append(cuda.get_elapsed_time(start, stop) * 1000 / copies)
    return statistics.median(times)


def graph_time(fn: Callable[[], object], copies: int = 20, repeats: int = 15) -> float:
    """Median microseconds of `fn`, in a CUDA graph of `copies` calls. Each call's result has memory of its own."""
    cuda = get_cupy().cuda
    stream, pool = cuda.Stream(non_blocking=True), cuda.MemoryPool()
    cuda.Device().synchronize()
    with immediate(), cuda.using_allocator(pool.malloc), stream:
        for _ in range(2):
            results = [fn() for _ in range(copies)]
        stream.synchronize()
        stream.begin_capture()
        results = [fn() for _ in range(copies)]
        graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
        assert len(results) == copies  # keeps the results alive, so that no two calls share an output
        return median_time(lambda: graph.launch(stream), copies, repeats)
