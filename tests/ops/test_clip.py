import numpy as np
import pytest

import cudiff
from cudiff import Tensor
from tests.check import check_op


@pytest.mark.parametrize("shape", [(7,), (4, 16)], ids=str)
def test_clip(shape, device, rng):
    x = rng.standard_normal(shape) * 2
    check_op(lambda x: cudiff.clip(x, -1, 0.5), x, device=device, torch_fn=lambda x: x.clamp(-1, 0.5))


def test_clip_takes_numpys_names(device):
    x = Tensor(np.float32([-2, 0, 2]), requires_grad=True, device=device)
    for out, expected in [
        (np.clip(x, -1, 1), [-1, 0, 1]), (np.clip(x, None, 1), [-2, 0, 1]), (x.clip(min=-1), [-1, 0, 2]),
        (np.clip(x, a_min=-1, a_max=None), [-1, 0, 2]), (np.clip(x, min=-1, max=1), [-1, 0, 1]),
        (x.clip(None, None), [-2, 0, 2]),
    ]:
        assert out.numpy().tolist() == expected
    x.clip(max=1).sum().backward()
    assert Tensor(x.grad).numpy().tolist() == [1, 1, 0]
    with pytest.raises(ValueError, match="by one of its names"):
        np.clip(x, 0, 1, min=0)


def test_clip_passes_the_gradient_at_its_ends(device):
    x = Tensor(np.float32([-2, -1, 0, 1, 2]), requires_grad=True, device=device)
    cudiff.clip(x, -1, 1).backward(Tensor(np.ones(5, np.float32), device=device))
    assert Tensor(x.grad).numpy().tolist() == [0, 1, 1, 1, 0]


def test_bounds_beyond_float32_are_none(device):
    x = Tensor(np.array([-2, 1], np.float32), requires_grad=True, device=device)
    out = cudiff.clip(x, -1e60, 1e60)
    out.sum().backward()
    assert out.tolist() == [-2, 1] and Tensor(x.grad).tolist() == [1, 1]


def test_bounds_that_are_tensors_and_arrays(device, rng):
    x, low, high = rng.standard_normal((3, 4)), rng.standard_normal((3, 1)) - 1, rng.standard_normal(4) + 1
    check_op(cudiff.clip, x, low, high, device=device)
    out = Tensor(x.astype(np.float32)).clip(low, 0.5)
    assert out.dtype == np.float32
    np.testing.assert_array_equal(out.numpy(), np.clip(x.astype(np.float32), low.astype(np.float32), np.float32(0.5)))


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8])
def test_integers(dtype, device):
    values = np.array([0, 1, 5, 200], dtype)
    x, largest = Tensor(values, device=device), np.iinfo(dtype).max
    for low, high in [(1, 5), (None, 3), (2, None), (-1, 5), (1, 2**40), (-(2**40), None)]:
        least, most = (bound if bound is None else min(max(bound, 0), largest) for bound in (low, high))
        out = x.clip(low, high)
        assert out.dtype == dtype and out.numpy().tolist() == np.clip(values, least, most).tolist()
    assert x.clip(Tensor(np.array(2, dtype), device=device)).numpy().tolist() == [2, 2, 5, 200]
    assert x.clip(0.5, 2).dtype == np.float32
    if dtype is np.int64:
        assert (x + 2**53).clip(min=2**53 + 1).numpy().tolist() == (values + 2**53).clip(2**53 + 1).tolist()


@pytest.mark.parametrize("low, high", [(3, 2), (None, np.nan), (np.nan, 2), (-1.0, -2.0)])
def test_bounds_in_another_order_and_nan_are_numpys(device, low, high):
    x = np.array([-2.0, 2.5, 3.0], np.float32)
    np.testing.assert_array_equal(cudiff.clip(Tensor(x, device=device), low, high).numpy(), np.clip(x, low, high))
