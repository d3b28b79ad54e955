"""The CPU's cores: the NumPy path cuts its work into parts, and threads take one part after the other.

BLAS brings threads of its own, but they leave the copies and elementwise passes between the products to one core, and
wait for each other in a busy loop: where another program kept one of two cores, a training step of `cudiff demo` took
0.7 s instead of 0.18. Here a product runs on one thread, and a slow core takes fewer parts: 0.25 s and 0.15.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

Part = TypeVar("Part")
Result = TypeVar("Result")

_ALL = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
CORES = _ALL
"""Those that this process takes: all that it may run on, or its `share`."""
PART_BYTES = 4 << 20
"""Parts of 1 MB, which an L2 cache holds, were slower: each call into NumPy may have to wait for the interpreter lock,
and waking a thread costs as much as a few hundred kB of work."""
LEAST_BYTES = PART_BYTES // 2
"""Work of so many bytes is two parts, less is one: `cudiff demo` takes a tenth less than by 4 MB."""

unflagged = np.errstate(invalid="ignore")
"""Decorates functions whose products BLAS computes. OpenBLAS 0.3.31 was seen to flag an invalid number now and then, on
one machine, where all were finite: NumPy would warn of it."""

_one_at_a_time = threading.RLock()  # BLAS has one number of threads for the whole process
if hasattr(os, "register_at_fork"):  # else a child of a fork while another thread computes would wait for that one
    os.register_at_fork(before=_one_at_a_time.acquire, after_in_parent=_one_at_a_time.release,
                        after_in_child=_one_at_a_time.release)


def share(processes: int) -> None:
    """Have this process, and its BLAS, take their part of the cores, where so many processes work together here."""
    global CORES
    CORES = max(1, _ALL // processes)
    for library, count in zip(_blas(), _blas_threads(), strict=True):
        library.set_num_threads(min(count, CORES))


def cut(count: int, item_bytes: int) -> list[slice]:
    """range(count) in equal slices: one of less than LEAST_BYTES in all, else an even number, of PART_BYTES at most.

    It does not depend on CORES, and so neither does the order in which parts are summed.
    """
    size = count * item_bytes
    if size < LEAST_BYTES:
        return [slice(0, count)]
    parts = max(1, min(count, 2 * -(-size // (2 * PART_BYTES))))
    return [slice(i * count // parts, (i + 1) * count // parts) for i in range(parts)]


def parallel_map(function: Callable[[Part], Result], parts: Sequence[Part]) -> list[Result]:
    """[function(part) for part in parts] on all cores, with one BLAS thread each.

    `function` must be free of side effects but writes to memory of each part's own, and must not call this again.
    Raises what it raises.
    """
    with _one_at_a_time:
        # What threadpoolctl's `limit` does, in 1 µs for its 6: a training step asks 150 times.
        many = [(library, count) for library in _blas() if (count := library.get_num_threads()) != 1]
        for library, _ in many:
            library.set_num_threads(1)
        try:
            if CORES == 1 or len(parts) == 1:
                return [function(part) for part in parts]
            return _shared(function, parts)
        finally:
            for library, count in many:
                library.set_num_threads(count)


def _shared(function: Callable[[Part], Result], parts: Sequence[Part]) -> list[Result]:
    """[function(part) for part in parts], by this thread and others that take one part after the other."""
    results: list[Any] = [None] * len(parts)
    tickets = iter(enumerate(parts))

    def work() -> None:
        for index, part in tickets:
            results[index] = function(part)

    def help() -> None:
        with np.errstate(**handling):
            work()

    handling = np.geterr()  # each thread has its own, a new one NumPy's defaults
    helpers = [_pool(os.getpid(), CORES - 1).submit(help) for _ in range(min(CORES, len(parts)) - 1)]
    try:
        work()
    finally:
        errors = [helper.exception() for helper in helpers]  # waits
    for error in filter(None, errors):
        raise error
    return results


@functools.cache
def _pool(process: int, size: int) -> ThreadPoolExecutor:
    """The threads beside the calling one, of two cores or more; after a fork there are none."""
    return ThreadPoolExecutor(size, "cudiff")


@functools.cache
def _blas() -> list[Any]:
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController().select(user_api="blas").lib_controllers


@functools.cache
def _blas_threads() -> list[int]:
    """How many each library had before it was told."""
    return [library.get_num_threads() for library in _blas()]


def keep_freed_memory() -> None:
    """Have glibc keep freed arrays of this process for its next ones: a fresh page costs more than writing it, a fifth
    of a training step on the CPU. It holds for all code in the process; the command line asks for it, `import cudiff`
    does not."""
    trim_threshold, mmap_threshold = -1, -3  # of mallopt(3)
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(trim_threshold, 1 << 30)
        if not mallopt(mmap_threshold, 1 << 30):  # too much for older versions; untold, they would stay at 128 kB
            mallopt(mmap_threshold, 32 << 20)
