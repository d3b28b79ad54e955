"""A least-recently-used cache of recorded graphs, which is emptied when memory runs out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from cudiff.backend import spare
from cudiff.cuda.graph import recording_state

MOST = 8

T = TypeVar("T")


class GraphCache:
    """At most 8 values by key. The least recently used one is dropped first.

    All are dropped when recordings are invalidated (`record_again`) and when memory runs out (`free_memory`). A caller
    that got a value keeps it. A copy of the cache, a pickled one too, is empty.

    Attributes: lock, reentrant; a thread holds it while it uses a value, because a graph's inputs are shared.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._made: dict[Hashable, Any] = {}  # most recently used last; replaced, as any thread may clear it
        self._state = recording_state()
        spare(self)

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value for this key; if there is none, `make` makes it."""
        made, state = self._made, recording_state()
        if state != self._state:
            self.clear()
            made, self._state = {}, state
        found = made[key] if key in made else make()
        others = [(other, value) for other, value in made.items() if other != key]
        self._made = dict([*others[-(MOST - 1) :], (key, found)])
        return found

    def clear(self) -> None:
        """Drop all values."""
        self._made = {}

    def __len__(self) -> int:
        return len(self._made)

    def __reduce__(self) -> tuple[type[GraphCache], tuple[()]]:
        return GraphCache, ()
