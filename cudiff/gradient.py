"""What a backward on CUDA is told about the gradient that an input has so far."""

from __future__ import annotations

import enum

from cudiff.backend import Array


class State(enum.Enum):
    """What a backward may do with a slot's array.

    EMPTY: overwrite it, whatever it holds. HOLDS: add to it. SHARED: only read it, because somebody else still reads it
    or because another term of the gradient is pending; the sum of all terms goes to another array.
    """

    EMPTY = enum.auto()
    HOLDS = enum.auto()
    SHARED = enum.auto()


class Slot:
    """A gradient slot: the array for an input's gradient. Where there is no array yet, a backward gets None instead.

    pending: a second term to be added, or None; only where the state is SHARED. A backward asks `gradient_target`,
    `gradient_sum` or `gradient_sums` of `cudiff.cuda.accumulate` where to write. They set `whole` to the array that
    will hold the whole gradient: by this the tape knows that nothing is left to add. `whole` stays None where the
    backward's result is one more term, which the tape adds.
    """

    __slots__ = ("array", "pending", "state", "whole")

    def __init__(self, array: Array, state: State = State.HOLDS, pending: Array | None = None):
        self.array, self.state, self.pending = array, state, pending
        self.whole: Array | None = None
