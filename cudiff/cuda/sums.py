"""Sums over a few rows that wait for each other and share a launch.

The biases and the norms of a U-Net have two hundred gradients, each the sum of some dozens of rows of partial sums that
a larger kernel left. During a backward the tape lets those that go to parameters wait until its end.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import numpy as np

from cudiff.backend import Array, float32
from cudiff.cuda.module import blocks, launch

JOBS = 64  # in one launch
_ROW_SUM = np.dtype([("source", "u8"), ("out", "u8"), ("rows", "i4"), ("columns", "i4"), ("step", "i4"), ("add", "i4")])


_Job = tuple[Array, Array, int, int, bool]  # source, out, step, offset, add


class _Waiting(threading.local):
    """This thread's sums that no launch has done yet."""

    jobs: dict[int, _Job] | None = None  # by the id of `out`; None where nothing may wait


_waiting = _Waiting()


@contextlib.contextmanager
def waiting() -> Iterator[Callable[[Array], None]]:
    """Inside the block sums wait; `finish`, which it gives, does those needed earlier, the block's end the rest."""
    before, _waiting.jobs = _waiting.jobs, {}
    try:
        yield finish
        _launch(list(_waiting.jobs.values()))
    finally:
        _waiting.jobs = before


def add_rows(source: Array, out: Array, add: bool, step: int = 1, offset: int = 0) -> None:
    """out (C,) = or += the sum of source (..., C·step)[..., offset::step] over all its rows; both float32.

    Nobody may write to `source` before the tape's backward has ended.
    """
    finish(out)
    job = source, out, step, offset, add
    if _waiting.jobs is None:
        _launch([job])
    else:
        _waiting.jobs[id(out)] = job


def finish(out: Array) -> None:
    """Do what waits now if `out` is among its results."""
    if _waiting.jobs and id(out) in _waiting.jobs:
        _launch(list(_waiting.jobs.values()))
        _waiting.jobs = {}


def _launch(jobs: list[_Job]) -> None:
    for start in range(0, len(jobs), JOBS):
        part = jobs[start : start + JOBS]
        table = np.zeros(1, np.dtype([("jobs", _ROW_SUM, JOBS)]))
        for i, (source, out, step, offset, add) in enumerate(part):
            rows = source.size // (out.size * step)
            table["jobs"][0, i] = (source.data.ptr + 4 * offset, out.data.ptr, rows, out.size, step, add)
        width = max(out.size for _, out, *_ in part)
        launch("accumulate", "sum_rows", (blocks(width, 32), len(part)), (32, 8), (table,), TOTAL=float32, TERM=float32)
