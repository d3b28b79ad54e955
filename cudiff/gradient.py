"""States of a gradient that a backward on CUDA may be given beside None and an array to add to."""

from __future__ import annotations

from typing import NamedTuple

from cudiff.backend import Array


class Vacant(NamedTuple):
    """Where a backward on CUDA may put a gradient of this shape that starts from zero: it overwrites the array."""

    array: Array


class Kept:
    """A gradient so far that somebody still reads, or of two terms not added yet, `array` and `more`: a backward on
    CUDA may put the sum with its own term elsewhere, and says so here."""

    __slots__ = ("array", "more", "sum")

    def __init__(self, array: Array, more: Array | None = None):
        self.array, self.more = array, more
        self.sum: Array | None = None
