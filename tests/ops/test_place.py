import numpy as np
import pytest

from cudiff import Tensor
from cudiff.ops.place import place, place_rows
from tests.check import check_op

SHAPE = (3, 5, 16)


@pytest.mark.parametrize("index", [np.s_[1], np.s_[:, 1:3], np.s_[::-1, ::2], np.s_[..., None, 4:12], np.s_[0, 0, 0],
                                   np.s_[3:]], ids=str)
def test_place(index, device, rng):
    x = np.asarray(rng.standard_normal(SHAPE)[index])
    expected = np.zeros(SHAPE)
    expected[index] = x
    np.testing.assert_array_equal(place(Tensor(x), SHAPE, index).numpy(), expected)
    twice = lambda x: place(x * 1.0, SHAPE, index) + place(x, SHAPE, index) * 2.0  # noqa: E731
    check_op(twice, x, device=device)


def test_on_a_gpu_a_slice_is_filled(host_of):
    host = host_of(True)
    x = Tensor(host.zeros((3, 16), np.float32), requires_grad=True)
    out = place(x, SHAPE, np.s_[:, 2])
    out.backward(host.zeros(SHAPE, np.float32))
    assert host.launches == [("shape", "copy_packed")] * 2 and x.grad.shape == x.shape


@pytest.mark.parametrize("index", [[0, 2, 0], [-1], [[1, 1], [2, 0]], []], ids=str)
def test_rows(index, device, rng):
    rows = np.asarray(index, np.int32)
    x = rng.standard_normal((*rows.shape, 5))
    expected = np.zeros((3, 5))
    np.add.at(expected, rows, x)
    np.testing.assert_allclose(place_rows(Tensor(x), (3, 5), Tensor(rows)).numpy(), expected)

    def twice(x):
        there = Tensor(rows, device=x.device)
        return place_rows(x * 1.0, (3, 5), there) + place_rows(x, (3, 5), there) * 2.0

    check_op(twice, x, device=device)


def test_on_a_gpu_rows_are_those_of_take(host_of):
    host = host_of(True)
    x, index = Tensor(host.zeros((2, 5), np.float32), requires_grad=True), Tensor(host.zeros(2, np.int32))
    place_rows(x, (3, 5), index).backward(host.zeros((3, 5), np.float32))
    assert host.launches == [("shape", "scan_sums"), ("shape", "take")] and x.grad.shape == (2, 5)
