"""Deferred launches: what nothing needs yet is batched with others of its type.

During a backward the gradients of weights are deferred, and the small sums that larger kernels leave, until something
needs a result, until what they read would be overwritten, until they hold back too much memory, or until the backward
ends.
"""

from __future__ import annotations

import bisect
import contextlib
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, NamedTuple

from cudiff.backend import Array


class LaunchType(NamedTuple):
    """What runs a batch, how many a batch holds at most, and bytes that all pending of this type may hold back.

    Types of a lower rank are launched first: they may enqueue others of a higher one.
    """

    run: Callable[[list[Any]], None]
    max_batch: int
    max_bytes: int
    rank: int


class _Pending(NamedTuple):
    """A launch to come: what it runs with, where its result starts and what it reads; the bytes it holds back."""

    arguments: Any
    writes: int
    reads: tuple[int, ...]
    held: int


_Group = tuple[LaunchType, Hashable]


class Queue:
    """Pending launches, by type and by what those of a batch must have in common."""

    def __init__(self) -> None:
        self._groups: dict[_Group, list[_Pending]] = {}
        self._writes: list[int] = []  # of all that are pending, sorted
        self._reads: list[int] = []

    def enqueue(self, group: _Group, pending: _Pending, out: Array) -> None:
        self.before_read(out)
        batch = self._groups.setdefault(group, [])
        batch.append(pending)
        bisect.insort(self._writes, pending.writes)
        for address in pending.reads:
            bisect.insort(self._reads, address)
        launch_type = group[0]
        if len(batch) == launch_type.max_batch:
            self._launch([group])
        while self._held(launch_type) > launch_type.max_bytes:
            self._launch([next(oldest for oldest in self._groups if oldest[0] is launch_type)])

    def _held(self, launch_type: LaunchType) -> int:
        return sum(pending.held for group, batch in self._groups.items() if group[0] is launch_type
                   for pending in batch)

    def is_read(self, array: Array | None) -> bool:
        """Whether a pending launch reads `array`."""
        return bool(self._reads) and array is not None and _any_in(self._reads, array)

    def before_read(self, array: Array | None) -> None:
        """Flush if a pending launch writes `array`."""
        if self._writes and array is not None and _any_in(self._writes, array):
            self.flush()

    def before_write(self, array: Array | None) -> None:
        """Flush if a pending launch writes `array`; launch the groups that read it."""
        self.before_read(array)
        if self.is_read(array):
            self._launch(group for group, batch in self._groups.items()
                         if any(_any_in(sorted(pending.reads), array) for pending in batch))

    def flush(self) -> None:
        """Launch all that is pending."""
        while self._groups:  # a launch may enqueue others
            self._launch(self._groups)

    def _launch(self, groups: Iterable[_Group]) -> None:
        for group in sorted(groups, key=lambda group: group[0].rank):
            batch = self._groups.pop(group, [])  # none where a launch has flushed all
            for pending in batch:
                self._writes.remove(pending.writes)
                for address in pending.reads:
                    self._reads.remove(address)
            if batch:
                group[0].run([pending.arguments for pending in batch])


def _any_in(addresses: list[int], array: Any) -> bool:
    """Whether one of the sorted addresses lies in `array`."""
    start = array.data.ptr
    first = bisect.bisect_left(addresses, start)
    return first < len(addresses) and addresses[first] < start + array.nbytes


class _Thread(threading.local):
    queue: Queue | None = None  # None where every launch is immediate


_thread = _Thread()


@contextlib.contextmanager
def deferred() -> Iterator[Queue]:
    """Inside the block, launches are deferred: its end flushes the queue, which this gives.

    What was pending before is launched first: it may add to the same.
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
    """Inside the block, launches are deferred to its end; or longer, where they would be anyway."""
    return deferred() if _thread.queue is None else contextlib.nullcontext()


@contextlib.contextmanager
def immediate() -> Iterator[None]:
    """Inside the block, no launch is deferred, and what was pending before is left alone."""
    before, _thread.queue = _thread.queue, None
    try:
        yield
    finally:
        _thread.queue = before


def enqueue(launch_type: LaunchType, arguments: Any, out: Array, reads: tuple[Array | None, ...] = (), held: int = 0,
            group: Hashable = None) -> None:
    """Defer a launch that writes or adds to `out`, to be batched with others of its type and group; or run it now.

    While pending it holds back `held` bytes. Nobody writes to what it reads, but to `reads` after `before_write`.
    """
    if _thread.queue is None:
        launch_type.run([arguments])
        return
    addresses = tuple(array.data.ptr for array in reads if array is not None)
    _thread.queue.enqueue((launch_type, group), _Pending(arguments, out.data.ptr, addresses, held), out)
