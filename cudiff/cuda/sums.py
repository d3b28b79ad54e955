"""Sums over a few rows that wait for each other and share a launch.

The biases and the norms of a U-Net have two hundred gradients, each the sum of some dozens of rows of partial sums that
a larger kernel left. During a backward the tape lets them wait until something needs them, or until its end.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import numpy as np

from cudiff.backend import Array, float32
from cudiff.cuda.module import blocks, launch

JOBS = 64  # in one launch
_ROW_SUM = np.dtype(
    [("source", "u8"), ("out", "u8")]
    + [(name, "i4") for name in ("rows", "columns", "width", "step", "add", "first_block")]
)


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
    """out (N, C) = or += the sums of source (N, ..., C·step)[..., offset::step] over its rows; or (C,), of all rows.

    Both float32. Until the tape's backward has ended nobody may write to `source`, or use `out` without `finish`.
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
        table = np.zeros(1, np.dtype([("jobs", _ROW_SUM, JOBS)]))
        table["jobs"]["first_block"] = np.iinfo(np.int32).max
        grid = 0
        for i, (source, out, step, offset, add) in enumerate(jobs[start : start + JOBS]):
            rows = source.size // (out.size * step)
            place, width = source.data.ptr + 4 * offset, out.shape[-1]
            table["jobs"][0, i] = (place, out.data.ptr, rows, out.size, width, step, add, grid)
            grid += blocks(out.size, 32)
        launch("accumulate", "sum_rows", grid, (32, 8), (table,), TOTAL=float32, TERM=float32)
