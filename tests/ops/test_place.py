import numpy as np
import pytest

from cudiff import Tensor
from cudiff.ops.place import place
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
