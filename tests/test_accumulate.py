"""Where a backward on CUDA writes a gradient, on a stand-in for a GPU."""

import numpy as np
import pytest

from cudiff.cuda.accumulate import gradient_sum, gradient_sums, gradient_target
from cudiff.gradient import Slot, State

FLOAT32, FLOAT16 = np.dtype(np.float32), np.dtype(np.float16)


@pytest.mark.parametrize("state", [State.EMPTY, State.HOLDS])
def test_an_array_that_may_be_written_to_is_taken(host_of, state):
    array = host_of(True).zeros((2, 3), FLOAT32)
    held = array if state is State.HOLDS else None
    for ask, answer in ((gradient_target, (array, held is not None)), (gradient_sum, (array, held)),
                        (gradient_sums, (array, held, None))):
        slot = Slot(array, state)
        found = ask(slot, (2, 3), FLOAT32)
        assert len(found) == len(answer) and all(one is other for one, other in zip(found, answer, strict=True))
        assert slot.whole is array


@pytest.mark.parametrize("ask, nothing", [(gradient_target, [False]), (gradient_sum, [None]),
                                          (gradient_sums, [None, None])])
def test_else_a_new_one_is_made(host_of, ask, nothing):
    """Where there is no gradient yet, it has another dtype, or, by `gradient_target`, somebody reads it still."""
    array = host_of(True).zeros((2, 3), FLOAT32)
    slots = [None, *(Slot(array, state) for state in State)]
    for slot in slots:
        out, *rest = ask(slot, (2, 3), FLOAT16)
        assert out is not array and (out.shape, out.dtype) == ((2, 3), FLOAT16) and rest == nothing
        assert slot is None or slot.whole is None
    shared = Slot(array, State.SHARED)
    out, add = gradient_target(shared, (2, 3), FLOAT32)
    assert out is not array and add is False and shared.whole is None


@pytest.mark.parametrize("terms", [1, 2])
def test_a_shared_one_is_added_elsewhere(host_of, terms):
    """A backward that adds one term gets the sum of two as one, by a launch; the shared array stays."""
    host = host_of(True)
    array, pending = host.zeros((2, 3), FLOAT32), host.zeros((2, 3), FLOAT32) if terms == 2 else None
    slot = Slot(array, State.SHARED, pending)
    out, first, second = gradient_sums(slot, (2, 3), FLOAT32)
    assert slot.whole is out and out is not array and first is array and second is pending and not host.launches
    slot = Slot(array, State.SHARED, pending)
    out, addend = gradient_sum(slot, (2, 3), FLOAT32)
    assert slot.whole is out and out is not array and (addend is array) == (terms == 1)
    assert host.launches == [("accumulate", "add_into")] * (terms - 1)
