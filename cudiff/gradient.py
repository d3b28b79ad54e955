"""What a backward on CUDA is told of a gradient beyond that there is none yet."""

from __future__ import annotations

import enum

from cudiff.backend import Array


class State(enum.Enum):
    """What a backward may do with a slot's array.

    EMPTY: overwrite it, whatever it holds. HOLDS: add to it. SHARED: read it only, as somebody else still does, or as
    another term of the gradient is pending: the sum of all goes elsewhere.
    """

    EMPTY = enum.auto()
    HOLDS = enum.auto()
    SHARED = enum.auto()


class Slot:
    """Where the gradient of an input lies; None stands for nowhere yet. `pending`: a second term, if SHARED.

    A backward asks `gradient_target`, `gradient_sum` or `gradient_sums` of `cudiff.cuda.accumulate` where to write.
    They leave in `whole` the array that will hold the whole gradient, from which the tape knows that nothing is left
    to add; None where the backward's result is one more term.
    """

    __slots__ = ("array", "pending", "state", "whole")

    def __init__(self, array: Array, state: State = State.HOLDS, pending: Array | None = None):
        self.array, self.state, self.pending = array, state, pending
        self.whole: Array | None = None
