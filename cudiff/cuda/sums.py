"""Sums over a few rows that wait for each other and share a launch.

The weights, biases and norms of a U-Net have three hundred gradients, each the sum of some dozens of rows of partial
sums that a larger kernel left. During a backward the tape lets the sums wait until something needs one, until the
rows would no longer fit in the GPU's cache, or until the backward ends.
"""

from __future__ import annotations

import bisect
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from cudiff.backend import Array, float32
from cudiff.cuda.module import blocks, launch
from cudiff.tensor import Vacant

JOBS = 64  # in one launch
TERMS = 8  # that a thread adds at a time, as kernels/accumulate.cu has it
LANES = 128  # at most, so that the two threads that share a row read 32 bytes side by side
WAITING_BYTES = 24 << 20  # an H200 caches 50 MB
_ROW_SUM = np.dtype(
    [("source", "u8"), ("out", "u8")]
    + [(name, "i4") for name in ("rows", "count", "width", "step", "columns", "pitch", "add", "lanes", "pack",
                                 "first_block")]
)


class _Job(NamedTuple):
    """out = or += the sum over the rows of source (out.size / width, rows, width, step)[..., offset]."""

    source: Array
    out: Array
    width: int
    step: int
    offset: int
    add: bool


class _Sums:
    """The sums that no launch has done yet."""

    def __init__(self) -> None:
        self.jobs: list[_Job] = []
        self.places: list[int] = []  # where their results start, sorted

    def add(self, job: _Job) -> None:
        self.finish(job.out)
        self.jobs.append(job)
        bisect.insort(self.places, job.out.data.ptr)
        if len(self.jobs) == JOBS or sum(job.source.nbytes for job in self.jobs) > WAITING_BYTES:
            self.launch()

    def finish(self, array: Array | Vacant | None) -> None:
        """Do what waits now if a result of it starts in `array`."""
        if not self.jobs or array is None or isinstance(array, Vacant):
            return
        first = bisect.bisect_left(self.places, array.data.ptr)
        if first < len(self.places) and self.places[first] < array.data.ptr + array.nbytes:
            self.launch()

    def launch(self) -> None:
        jobs, self.jobs, self.places = self.jobs, [], []
        if jobs:
            _launch(jobs)


class _Thread(threading.local):
    waiting: _Sums | None = None  # None where nothing may wait


_thread = _Thread()


@contextlib.contextmanager
def waiting() -> Iterator[Callable[[Array | Vacant | None], None]]:
    """Inside the block, sums wait: `finish`, which it gives, does those needed earlier, the block's end the rest."""
    before, _thread.waiting = _thread.waiting, _Sums()
    try:
        yield _thread.waiting.finish
        _thread.waiting.launch()
    finally:
        _thread.waiting = before


def add_rows(source: Array, out: Array, add: bool, step: int = 1, offset: int = 0) -> None:
    """out (N, C) = or += the sums of source (N, ..., C·step)[..., offset::step] over its rows; or (C,), of all rows.

    Both float32. Until the tape's backward has ended nobody may write to `source`, or use `out` without `finish`.
    """
    _add(_Job(source, out, out.shape[-1], step, offset, add))


def add_parts(parts: Array, out: Array, add: bool) -> None:
    """out (K, ...) = or += the sum of parts (P, K, ...), as `add_rows`; out's K rows may be parts of longer ones."""
    _add(_Job(parts, out, out.size, 1, 0, add))


def _add(job: _Job) -> None:
    if job.out.size == 0:  # of no images
        return
    if _thread.waiting is None:
        _launch([job])
    else:
        _thread.waiting.add(job)


def _launch(jobs: list[_Job]) -> None:
    table, grid = np.zeros(1, np.dtype([("jobs", _ROW_SUM, JOBS)])), 0
    table["jobs"]["first_block"] = np.iinfo(np.int32).max
    for i, (source, out, width, step, offset, add) in enumerate(jobs):
        rows, places = source.size // (out.size * step), (source.data.ptr + 4 * offset, out.data.ptr)
        columns, pitch = (out.size, 0) if out.flags.c_contiguous else (out.size // len(out), out.strides[0] // 4)
        whole = step == 1 and width % 4 == columns % 4 == pitch % 4 == 0 and all(place % 16 == 0 for place in places)
        pack, lanes = 4 if whole else 1, min(LANES, 1 << (blocks(rows, TERMS) - 1).bit_length())
        table["jobs"][0, i] = (*places, rows, out.size, width, step, columns, pitch, add, lanes, pack, grid)
        grid += blocks(out.size, 256 // lanes * pack)
    launch("accumulate", "sum_rows", grid, 256, (table,), TOTAL=float32, TERM=float32)
