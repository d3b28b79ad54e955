"""Deferred launches: when they run, on stand-ins for arrays on a GPU."""

import contextlib
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest

from cudiff import autograd
from cudiff.backend import bfloat16, float32
from cudiff.cuda import sums
from cudiff.cuda.deferred import LaunchType, batched, deferred, enqueue
from cudiff.cuda.kernels.convolution import wgrad_sm90
from cudiff.function import Function
from cudiff.ops.matmul import linear
from cudiff.tensor import Tensor
from tests.test_prepared import units


def array(start, size=8):
    flags = SimpleNamespace(c_contiguous=True)
    return SimpleNamespace(data=SimpleNamespace(ptr=start), nbytes=size, dtype=float32, flags=flags, base="a view")


def rows(start, count, width, pitch):
    """`count` rows of `width` bytes, parts of rows of `pitch` bytes."""
    flags = SimpleNamespace(c_contiguous=False)
    return SimpleNamespace(data=SimpleNamespace(ptr=start), nbytes=count * width, itemsize=1, dtype=float32,
                           shape=(count, width), strides=(pitch, 1), flags=flags, base="a view")


@pytest.fixture
def done():
    return []


@pytest.fixture
def launch_type(done):
    return LaunchType(done.append, max_batch=3, max_bytes=100, rank=0)


def test_launches_of_a_group_are_batched(launch_type, done):
    with deferred():
        for i in range(4):
            enqueue(launch_type, i, array(100 * i), group="a")
            enqueue(launch_type, -i, array(5000 + 100 * i), group="b")
        assert done == [[0, 1, 2], [0, -1, -2]]
    assert done == [[0, 1, 2], [0, -1, -2], [3], [-3]]


def test_nothing_is_deferred_outside(launch_type, done):
    enqueue(launch_type, 1, array(0))
    assert done == [[1]]
    with batched():
        enqueue(launch_type, 2, array(0))
        enqueue(launch_type, 3, array(100))
        with batched():
            enqueue(launch_type, 4, array(200), group="other")
        assert done == [[1]]
    assert done == [[1], [2, 3], [4]]


def test_what_holds_too_much_runs_oldest_first(launch_type, done):
    with deferred():
        enqueue(launch_type, 1, array(0), held=40, group="a")
        enqueue(launch_type, 2, array(100), held=40, group="b")
        enqueue(launch_type, 3, array(200), held=10, group="a")
        enqueue(launch_type, 4, array(300), held=40, group="c")
        assert done == [[1, 3]]
    assert done == [[1, 3], [2], [4]]


def test_what_ran_holds_nothing(launch_type, done):
    with deferred() as queue:
        enqueue(launch_type, 1, array(0), held=60, group="a")
        enqueue(launch_type, 2, array(100), (array(1000),), held=30, group="b")
        queue.before_write(array(1000))
        assert done == [[2]]
        enqueue(launch_type, 3, array(200), held=40, group="c")
        assert done == [[2]]
        enqueue(launch_type, 4, array(300), held=1, group="c")
        assert done == [[2], [1]]


def test_a_result_that_is_needed_flushes(launch_type, done):
    with deferred() as queue:
        enqueue(launch_type, 1, array(0), group="a")
        enqueue(launch_type, 2, array(100), group="b")
        queue.before_read(array(8))
        assert done == []
        queue.before_read(array(96))
        assert done == [[1], [2]]
        enqueue(launch_type, 3, array(200))
        enqueue(launch_type, 4, array(200))  # adds to the same
        assert done == [[1], [2], [3]]


def test_what_is_about_to_be_written_is_read_before(launch_type, done):
    with deferred() as queue:
        enqueue(launch_type, 1, array(0), (array(1000),), group="a")
        enqueue(launch_type, 2, array(100), (array(2000),), group="b")
        assert queue.is_read(array(1000)) and not queue.is_read(array(1008)) and not queue.is_read(None)
        queue.before_read(array(1000))
        assert done == []
        queue.before_write(array(1000))
        assert done == [[1]] and not queue.is_read(array(1000))


@pytest.mark.parametrize("start, size, shared", [
    (992, 8, False), (992, 9, True), (1000, 1, True), (1050, 2, True), (1099, 1, True), (1100, 8, False),
    (0, 4000, True),
])
def test_any_part_of_what_is_pending_counts(launch_type, done, start, size, shared):
    """Also where it begins long before, and others lie between."""
    one, long = array(start, size), array(1000, 100)
    with deferred() as queue:
        enqueue(launch_type, 1, long)
        assert not queue.is_read(one)
        queue.before_read(one)
        assert bool(done) is shared
    del done[:]
    with deferred() as queue:
        enqueue(launch_type, 1, array(5000), (array(1040, 4), long, array(1010, 30), array(9000, 1)))
        queue.before_read(one)
        assert done == [] and queue.is_read(one) is shared
        queue.before_write(one)
        assert bool(done) is shared


@pytest.mark.parametrize("other, shared", [
    (rows(1040, 3, 60, 100), False), (rows(1039, 3, 60, 100), True), (rows(940, 3, 60, 100), False),
    (rows(940, 3, 61, 100), True), (rows(1040, 3, 20, 80), True), (rows(1340, 3, 60, 100), False),
    (array(1039, 2), True), (array(1040, 10), True), (array(1240, 10), False), (array(1239, 1), True),
])
def test_columns_of_a_matrix_lie_side_by_side(launch_type, done, other, shared):
    """Of rows with another pitch, what lies between counts too."""
    with deferred() as queue:
        enqueue(launch_type, 1, rows(1000, 3, 40, 100))
        queue.before_read(other)
        assert bool(done) is shared


def test_a_range_behind_one_that_is_apart_counts(launch_type, done):
    """Columns 0 to 39 of a matrix are pending, and 41 to 44 of its later rows: 41 to 60 are asked for."""
    with deferred() as queue:
        enqueue(launch_type, 1, rows(1000, 3, 40, 100), group="a")
        enqueue(launch_type, 2, rows(1141, 2, 4, 100), group="b")
        assert done == []
        queue.before_read(rows(1041, 3, 20, 100))
        assert len(done) == 2


def test_a_launch_may_enqueue_others_of_a_higher_rank(launch_type, done):
    sums = LaunchType(done.append, max_batch=3, max_bytes=100, rank=1)
    parts = LaunchType(
        lambda batch: (done.append(batch), enqueue(sums, "sum", array(0))), max_batch=3, max_bytes=100, rank=0
    )
    with deferred() as queue:
        enqueue(sums, "other", array(500))
        enqueue(parts, "part", array(0))
        queue.before_read(array(0))
        assert done == [["part"], ["other", "sum"]]


def test_inner_launches_follow_outer(launch_type, done):
    with deferred():
        enqueue(launch_type, "outer", array(0))
        with deferred():
            enqueue(launch_type, "inner", array(0))
            assert done == [["outer"]]
    assert done == [["outer"], ["inner"]]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, bfloat16])
def test_what_is_deferred_writes_float32(host_of, monkeypatch, dtype):
    """`before_read` looks at no other arrays."""
    written = []

    def noted(launch_type, arguments, out, *rest, **options):
        written.append(out.dtype)
        enqueue(launch_type, arguments, out, *rest, **options)

    for module in (sums, wgrad_sm90):
        monkeypatch.setattr(module, "enqueue", noted)
    units(host_of(True), dtype)
    assert len(written) > 4 and {*written} == {float32}


class Reader:
    """Stands for the queue of a backward: pending launches read all gradients."""

    def is_read(self, array):
        return array is not None

    def before_read(self, array): ...
    def before_write(self, array): ...


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
        def before_write(self, array):
            if any(array is pending for pending in Residual.read):
                found.append(array.tolist())

    monkeypatch.setattr(autograd, "deferred", lambda: contextlib.nullcontext(Late()))
    x, y = (Tensor(np.ones(2, np.float32), requires_grad=True) for _ in range(2))
    (Residual.apply(x * 1.0, Doubling.apply(y)) * 3.0).backward(np.ones(2, np.float32))
    assert found == [[3, 3]] and x.grad.tolist() == [3, 3] and y.grad.tolist() == [6, 6]


def test_a_gradient_is_written_before_it_is_cast(monkeypatch):
    pending = np.zeros(2)

    class Wide(Doubling):
        @staticmethod
        def backward_numpy(ctx, dout, needs, into):
            return (pending,)

    class Late(Reader):
        def before_read(self, array):
            if array is pending:
                array.fill(2)

    monkeypatch.setattr(autograd, "deferred", lambda: contextlib.nullcontext(Late()))
    x = Tensor(np.ones(2, np.float32), requires_grad=True)
    Wide.apply(x).backward(np.ones(2, np.float32))
    assert x.grad.dtype == np.float32 and x.grad.tolist() == [2, 2]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_parts_of_low_weights_have_gradients(device, rng, dtype):
    """A weight's gradient is of float32, deferred, and cast for the slice."""
    shapes = (3, 8), (10, 8), (10,), (3, 5)
    x, weight, bias, dout = (Tensor(rng.standard_normal(shape), i in (1, 2), dtype, device)
                             for i, shape in enumerate(shapes))
    linear(x, weight[5:], bias[5:]).backward(dout)
    wide_x, wide_dout = x.numpy().astype(float), dout.numpy().astype(float)
    for leaf, part in (weight, wide_dout.T @ wide_x), (bias, wide_dout.sum(0)):
        expected = np.concatenate([np.zeros_like(part), part])
        np.testing.assert_allclose(Tensor(leaf.grad).numpy().astype(float), expected, rtol=1e-2, atol=1e-2)
