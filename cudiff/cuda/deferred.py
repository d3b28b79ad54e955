"""Deferred launches: a launch is enqueued until its result is needed, to be batched with others of its type.

During a backward the gradients of weights are deferred, and the sums of larger kernels' partial results. They are
pending until a result is needed, until what they read would be overwritten, until they keep too much memory from being
freed, or until the backward ends.
"""

from __future__ import annotations

import bisect
import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cudiff.backend import Array, float32
from cudiff.cuda import select


@dataclass(eq=False)
class LaunchType:
    """A type of launches that can be batched.

    run: launches a batch, given the arguments of each. max_batch: launches in a batch, at most. max_bytes: memory that
    all pending launches of this type may keep from being freed. rank: types of a lower rank are launched first, because
    they may enqueue launches of a higher one.
    """

    run: Callable[[list[Any]], None]
    max_batch: int
    max_bytes: int
    rank: int


_Range = tuple[int, int, int, int]
"""An array's memory: its first address, the address after its last byte, and, if its rows are slices of longer rows,
the bytes from one row to the next and of a row, else 0 and 0. A plain tuple, because a backward makes hundreds."""

_Pending = tuple[Any, _Range, tuple[_Range, ...], int]
"""A pending launch: its arguments, what it writes, what it reads, and the bytes that it keeps from being freed."""

_Group = tuple[LaunchType, Hashable]


class Queue:
    """Pending launches, in groups that may share a batch: those of one type with equal group keys."""

    def __init__(self) -> None:
        self._groups: dict[_Group, list[_Pending]] = {}
        self._writes: list[_Range] = []  # of all pending launches, sorted
        self._reads: list[_Range] = []
        self._longest = 0  # bytes of the longest range so far
        self._held: defaultdict[LaunchType, int] = defaultdict(int)

    def enqueue(self, group: _Group, pending: _Pending) -> None:
        launch_type, (_, writes, reads, held) = group[0], pending
        if self._writes and self._overlap(self._writes, writes):
            self.flush()
        batch = self._groups.setdefault(group, [])
        batch.append(pending)
        bisect.insort(self._writes, writes)
        for range in reads:
            bisect.insort(self._reads, range)
        for start, stop, _, _ in (writes, *reads):
            if stop - start > self._longest:
                self._longest = stop - start
        self._held[launch_type] += held
        if len(batch) == launch_type.max_batch:
            self._launch([group])
        while self._held[launch_type] > launch_type.max_bytes:
            self._launch([next(oldest for oldest in self._groups if oldest[0] is launch_type)])

    def is_read(self, array: Array | None) -> bool:
        """Whether a pending launch reads from the memory of `array`."""
        return bool(self._reads) and array is not None and self._overlap(self._reads, _range_of(array))

    def before_read(self, array: Array | None) -> None:
        """Flush if a pending launch writes to the memory of `array`: to float32, as all of them do."""
        writes = self._writes
        if writes and array is not None and array.dtype == float32 and self._overlap(writes, _range_of(array)):
            self.flush()

    def before_write(self, array: Array | None) -> None:
        """Flush if a pending launch writes to the memory of `array`; else launch the groups that read it."""
        if not self._writes or array is None:  # each pending launch is in `_writes`: if it is empty, none is pending
            return
        range = _range_of(array)
        if self._overlap(self._writes, range):
            self.flush()
        elif self._overlap(self._reads, range):
            self._launch(group for group, batch in self._groups.items()
                         if any(_share(read, range) for _, _, reads, _ in batch for read in reads))

    def flush(self) -> None:
        """Launch everything that is pending."""
        while self._groups:  # a launch may enqueue others
            self._launch(self._groups)

    def _overlap(self, ranges: list[_Range], wanted: _Range) -> bool:
        start, stop, _, _ = wanted
        at = bisect.bisect_left(ranges, (start - self._longest,))  # ranges before this one end too early
        while at < len(ranges) and ranges[at][0] < stop:
            if ranges[at][1] > start and _share(ranges[at], wanted):
                return True
            at += 1
        return False

    def _launch(self, groups: Iterable[_Group]) -> None:
        for group in sorted(groups, key=lambda group: group[0].rank):
            batch, freed = self._groups.pop(group, []), 0  # empty where an earlier launch has flushed the queue
            for _, writes, reads, held in batch:
                del self._writes[bisect.bisect_left(self._writes, writes)]
                for range in reads:
                    del self._reads[bisect.bisect_left(self._reads, range)]
                freed += held
            self._held[group[0]] -= freed
            if batch:
                _run(group[0], [pending[0] for pending in batch])


def _run(launch_type: LaunchType, batch: list[Any]) -> None:
    if select.watch is not None:
        select.watch(launch_type, batch, None)
    launch_type.run(batch)


def _share(one: _Range, other: _Range) -> bool:
    """Whether two ranges have a byte in common."""
    (start, stop, pitch, width), (other_start, other_stop, other_pitch, other_width) = one, other
    if start >= other_stop or other_start >= stop:
        return False
    if pitch != other_pitch or pitch == 0:
        return True
    behind = (other_start - start) % pitch  # slices of different columns of a matrix do not overlap
    return behind < width or behind + other_width > pitch


def _range_of(array: Any) -> _Range:
    start, size = array.data.ptr, array.nbytes
    if array.base is None or array.flags.c_contiguous or not size:  # flags take longer
        return start, start + size, 0, 0
    down, *across = ((n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True))
    width = array.itemsize + sum(across)
    return start, start + down + width, array.strides[0], width


class _Thread(threading.local):
    queue: Queue | None = None  # None where launches are not deferred


_thread = _Thread()


@contextlib.contextmanager
def deferred() -> Iterator[Queue]:
    """Inside the block, launches are deferred. Yields their queue, and flushes it at the end.

    What was pending before is launched first, because it may add to the same arrays.
    """
    if _thread.queue is not None:
        _thread.queue.flush()
    before, _thread.queue = _thread.queue, Queue()
    try:
        yield _thread.queue
        _thread.queue.flush()
    finally:
        _thread.queue = before


def batched() -> contextlib.AbstractContextManager:
    """Inside the block, launches are deferred: until its end, or that of a `deferred` block around it."""
    return deferred() if _thread.queue is None else contextlib.nullcontext()


@contextlib.contextmanager
def immediate() -> Iterator[None]:
    """Inside the block, no launch is deferred. What was pending before stays pending."""
    before, _thread.queue = _thread.queue, None
    try:
        yield
    finally:
        _thread.queue = before


def enqueue(launch_type: LaunchType, arguments: Any, out: Array, reads: Sequence[Array] = (), held: int = 0,
            group: Hashable = None) -> None:
    """Defer a launch that writes or adds to `out`, float32, to be batched with others of its type and group. Where
    launches are not deferred, run it now.

    held: bytes that it keeps from being freed while it is pending. reads: arrays that it reads and other code may
    overwrite, after `Queue.before_write`. What else it reads must not change.
    """
    queue = _thread.queue
    if queue is None:
        _run(launch_type, [arguments])
    else:
        assert out.dtype == float32  # see `Queue.before_read`
        ranges = tuple(map(_range_of, reads)) if reads else ()
        queue.enqueue((launch_type, group), (arguments, _range_of(out), ranges, held))
