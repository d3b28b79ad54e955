"""Work that nothing needs yet waits for more of its kind, to share a launch.

During a backward the tape lets the gradients of weights wait, and the small sums that larger kernels leave, until
something needs a result, until what they read would be overwritten, until they hold back too much memory, or until the
backward ends.
"""

from __future__ import annotations

import bisect
import contextlib
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, NamedTuple

from cudiff.backend import Array
from cudiff.gradient import Vacant


class Kind(NamedTuple):
    """How jobs of one kind are done: by what, how many at most in a launch, and bytes that all of them may hold back.

    Jobs of a lower rank are launched first: they may leave others of a higher one.
    """

    launch: Callable[[list[Any]], None]
    jobs: int
    held: int
    rank: int


class _Entry(NamedTuple):
    """A job that waits; where its result starts, and what it reads that others may overwrite; the bytes it holds."""

    job: Any
    result: int
    reads: tuple[int, ...]
    held: int


_Group = tuple[Kind, Hashable]


class Waiting:
    """The jobs that no launch has done yet, by kind and by what they must have in common."""

    def __init__(self) -> None:
        self.groups: dict[_Group, list[_Entry]] = {}
        self.results: list[int] = []  # of all entries, sorted
        self.sources: list[int] = []

    def add(self, group: _Group, entry: _Entry, out: Array) -> None:
        self.finish(out)
        entries = self.groups.setdefault(group, [])
        entries.append(entry)
        bisect.insort(self.results, entry.result)
        for place in entry.reads:
            bisect.insort(self.sources, place)
        kind = group[0]
        if len(entries) == kind.jobs:
            self.launch([group])
        while self._held(kind) > kind.held:
            self.launch([next(oldest for oldest in self.groups if oldest[0] is kind)])

    def _held(self, kind: Kind) -> int:
        return sum(entry.held for group, entries in self.groups.items() if group[0] is kind for entry in entries)

    def reads(self, array: Array | Vacant | None) -> bool:
        """Whether a job that waits reads `array`."""
        return not (array is None or isinstance(array, Vacant)) and _any_in(self.sources, array)

    def finish(self, array: Array | Vacant | None, written: bool = False) -> None:
        """Before `array` is read, or `written`: do what waits if a result of it starts there, or else what reads it."""
        if not self.groups or array is None or isinstance(array, Vacant):
            return
        if _any_in(self.results, array):
            self.end()
        elif written and self.reads(array):
            self.launch(group for group, entries in self.groups.items()
                        if any(_any_in(sorted(entry.reads), array) for entry in entries))

    def launch(self, groups: Iterable[_Group]) -> None:
        for group in sorted(groups, key=lambda group: group[0].rank):
            entries = self.groups.pop(group, [])  # none where a launch has asked for all
            for entry in entries:
                self.results.remove(entry.result)
                for place in entry.reads:
                    self.sources.remove(place)
            if entries:
                group[0].launch([entry.job for entry in entries])

    def end(self) -> None:
        while self.groups:  # a launch may leave other jobs
            self.launch(self.groups)


def _any_in(places: list[int], array: Array) -> bool:
    if not places:
        return False
    first = bisect.bisect_left(places, array.data.ptr)
    return first < len(places) and places[first] < array.data.ptr + array.nbytes


class _Thread(threading.local):
    waiting: Waiting | None = None  # None where nothing may wait


_thread = _Thread()


@contextlib.contextmanager
def waiting() -> Iterator[Waiting]:
    """Inside the block, work waits: `finish` of what it gives does what is needed earlier, the block's end the rest.

    Work that waited before is done first: it may add to the same.
    """
    if _thread.waiting is not None:
        _thread.waiting.end()
    before, _thread.waiting = _thread.waiting, Waiting()
    try:
        yield _thread.waiting
        _thread.waiting.end()
    finally:
        _thread.waiting = before


def together() -> contextlib.AbstractContextManager:
    """Inside the block, work waits for more of it; or longer, where it would wait anyway."""
    return waiting() if _thread.waiting is None else contextlib.nullcontext()


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Inside the block, nothing waits, and what waited before is left alone."""
    before, _thread.waiting = _thread.waiting, None
    try:
        yield
    finally:
        _thread.waiting = before


def submit(kind: Kind, job: Any, out: Array, reads: tuple[Array | None, ...] = (), held: int = 0,
           group: Hashable = None) -> None:
    """Have the job, which writes or adds to `out`, done with others of its kind and group; now where none may wait.

    Until then it holds back `held` bytes. What it reads stays as it is, but for `reads`: `finish` takes care of those.
    """
    if _thread.waiting is None:
        kind.launch([job])
        return
    places = tuple(array.data.ptr for array in reads if array is not None)
    _thread.waiting.add((kind, group), _Entry(job, out.data.ptr, places, held), out)
