"""The gradient so far of an input, as a backward on CUDA gets it."""

from __future__ import annotations

import enum

from cudiff.backend import Array


class State(enum.Enum):
    """What a backward may do with a slot's array.

    EMPTY: overwrite it, whatever it holds. HOLDS: add to it. SHARED: only read it, because a deferred launch still
    reads it or because the slot has a pending term; the sum of all terms goes to another array.
    """

    EMPTY = enum.auto()
    HOLDS = enum.auto()
    SHARED = enum.auto()


EMPTY, HOLDS, SHARED = State  # a name of a module is found sooner than a member of an Enum


class Slot:
    """The array for an input's gradient. If there is no array yet, a backward gets None instead of a slot.

    pending: a term that is not in `array` yet, or None; only if the state is SHARED. A backward asks `gradient_target`,
    `gradient_sum` or `gradient_sums` of `cudiff.cuda.accumulate` where to write. They set `whole` to the array that
    will hold the sum of all terms: if the backward returns it, the tape has nothing to add. If `whole` stays None, the
    backward's result is one more term, which the tape adds.
    """

    __slots__ = ("array", "pending", "state", "whole")

    def __init__(self, array: Array, state: State = State.HOLDS, pending: Array | None = None):
        self.array, self.state, self.pending = array, state, pending
        self.whole: Array | None = None
