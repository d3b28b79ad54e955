"""Work that waits for more of its kind: when it is done, on stand-ins for arrays on a GPU."""

import contextlib
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest

from cudiff import autograd
from cudiff.cuda.waiting import Kind, submit, together, waiting
from cudiff.function import Function
from cudiff.gradient import Kept
from cudiff.tensor import Tensor


def array(start, size=8):
    return SimpleNamespace(data=SimpleNamespace(ptr=start), nbytes=size)


@pytest.fixture
def done():
    return []


@pytest.fixture
def kind(done):
    return Kind(lambda jobs: done.append(jobs), jobs=3, held=100, rank=0)


def test_jobs_of_a_group_share_a_launch(kind, done):
    with waiting():
        for i in range(4):
            submit(kind, i, array(100 * i), group="a")
            submit(kind, -i, array(5000 + 100 * i), group="b")
        assert done == [[0, 1, 2], [0, -1, -2]]
    assert done == [[0, 1, 2], [0, -1, -2], [3], [-3]]


def test_nothing_waits_outside(kind, done):
    submit(kind, 1, array(0))
    assert done == [[1]]
    with together():
        submit(kind, 2, array(0))
        submit(kind, 3, array(100))
        with together():
            submit(kind, 4, array(200), group="other")
        assert done == [[1]]
    assert done == [[1], [2, 3], [4]]


def test_what_holds_too_much_is_done_oldest_first(kind, done):
    with waiting():
        submit(kind, 1, array(0), held=40, group="a")
        submit(kind, 2, array(100), held=40, group="b")
        submit(kind, 3, array(200), held=10, group="a")
        submit(kind, 4, array(300), held=40, group="c")
        assert done == [[1, 3]]
    assert done == [[1, 3], [2], [4]]


def test_a_result_that_is_needed_brings_all_about(kind, done):
    with waiting() as waits:
        submit(kind, 1, array(0), group="a")
        submit(kind, 2, array(100), group="b")
        waits.finish(array(8))
        assert done == []
        waits.finish(array(96))
        assert done == [[1], [2]]
        submit(kind, 3, array(200))
        submit(kind, 4, array(200))  # adds to the same
        assert done == [[1], [2], [3]]


def test_what_is_about_to_be_written_is_read_before(kind, done):
    with waiting() as waits:
        submit(kind, 1, array(0), (array(1000), None), group="a")
        submit(kind, 2, array(100), (array(2000),), group="b")
        assert waits.reads(array(1000)) and not waits.reads(array(1008)) and not waits.reads(None)
        waits.finish(array(1000))
        assert done == []
        waits.finish(array(1000), written=True)
        assert done == [[1]] and not waits.reads(array(1000))


def test_a_launch_may_leave_work_of_a_higher_rank(kind, done):
    sums = Kind(lambda jobs: done.append(jobs), jobs=3, held=100, rank=1)
    parts = Kind(lambda jobs: (done.append(jobs), submit(sums, "sum", array(0))), jobs=3, held=100, rank=0)
    with waiting() as waits:
        submit(sums, "other", array(500))
        submit(parts, "part", array(0))
        waits.finish(array(0))
        assert done == [["part"], ["other", "sum"]]


def test_inner_work_follows_outer(kind, done):
    with waiting():
        submit(kind, "outer", array(0))
        with waiting():
            submit(kind, "inner", array(0))
            assert done == [["outer"]]
    assert done == [["outer"], ["inner"]]


class Reader:
    """Stands for what waits during a backward: all gradients are still read."""

    def reads(self, array):
        return array is not None

    def finish(self, array, written=False): ...


class Sum(Function):
    """3 x + y + z, whose gradients of x are added elsewhere, and of y and z in place."""

    adds_elsewhere, fresh = (0,), True
    kept: ClassVar[list] = []

    @staticmethod
    def forward_numpy(ctx, x, y, z):
        return 3 * x + y + z

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        dx, dy, dz = 3 * dout, into[1], into[2]
        if isinstance(into[0], Kept):
            Sum.kept.append(into[0].array)
            dx = into[0].sum = into[0].array + dx
        elif into[0] is not None:
            into[0] += dx
            dx = into[0]
        results = [dx]
        for place in (dy, dz):
            if place is None:
                results.append(dout.copy())
            else:
                place += dout
                results.append(place)
        return tuple(results)


@pytest.mark.parametrize("reads", [False, True])
def test_gradients_that_are_still_read_are_kept(monkeypatch, reads):
    """x has a gradient already when Sum's backward begins, and stands among its inputs once, twice and three times."""
    if reads:
        monkeypatch.setattr(autograd, "_waiting", lambda device: contextlib.nullcontext(Reader()))
    for inputs, expected in ((lambda x, y: (x, y, y), 4), (lambda x, y: (x, x, y), 5), (lambda x, y: (x, x, x), 6)):
        Sum.kept.clear()
        leaf, other = (Tensor(np.ones(3, np.float32), requires_grad=True) for _ in range(2))
        x = leaf * 1.0
        out = Sum.apply(*inputs(x, other * 1.0)) + x * 1.0
        out.backward(np.ones(3, np.float32))
        assert np.array_equal(leaf.grad, np.full(3, expected, np.float32))
        assert len(Sum.kept) == reads


class Residual(Function):
    """x + y, which passes its dout on to y and reads it later."""

    fresh = True
    read: ClassVar[list] = []

    @staticmethod
    def forward_numpy(ctx, x, y):
        return x + y

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        Residual.read.append(dout)
        return dout.copy(), dout


class Doubling(Function):
    """2 x, by a user: it writes to its dout."""

    @staticmethod
    def forward_numpy(ctx, x):
        return 2 * x

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        dout *= 2
        return (dout,)


def test_what_is_read_later_is_read_before_a_users_backward_writes_to_it(monkeypatch):
    found = []

    class Late(Reader):
        def finish(self, array, written=False):
            if written and any(array is waits for waits in Residual.read):
                found.append(array.tolist())

    monkeypatch.setattr(autograd, "_waiting", lambda device: contextlib.nullcontext(Late()))
    x, y = (Tensor(np.ones(2, np.float32), requires_grad=True) for _ in range(2))
    (Residual.apply(x * 1.0, Doubling.apply(y)) * 3.0).backward(np.ones(2, np.float32))
    assert found == [[3, 3]] and x.grad.tolist() == [3, 3] and y.grad.tolist() == [6, 6]
