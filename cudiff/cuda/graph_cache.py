"""A cache of recorded graphs, least recently used first out, for as long as its memory is not needed elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from cudiff.backend import spare
from cudiff.cuda.graph import recording_state

MOST = 8

T = TypeVar("T")


class GraphCache:
    """At most 8 of what was made, by a key; the one that was not asked for the longest time goes first.

    All of it goes where recordings are made anew (`record_again`), and where memory runs out (`free_memory`). Who has
    got something holds it, whatever is dropped meanwhile. A copy of it, a pickled one too, is empty.

    Attributes: lock, reentrant, for a thread that uses what it holds: a graph's inputs lie in one place.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._made: dict[Hashable, Any] = {}  # the last asked for is the last; replaced, as any thread may clear it
        self._state = recording_state()
        spare(self)

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """What was made for this key, or is now."""
        made, state = self._made, recording_state()
        if state != self._state:
            self.clear()
            made, self._state = {}, state
        found = made[key] if key in made else make()
        others = [(other, value) for other, value in made.items() if other != key]
        self._made = dict([*others[-(MOST - 1) :], (key, found)])
        return found

    def clear(self) -> None:
        """Drop all."""
        self._made = {}

    def __len__(self) -> int:
        return len(self._made)

    def __reduce__(self) -> tuple[type[GraphCache], tuple[()]]:
        return GraphCache, ()
