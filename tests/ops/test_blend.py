import numpy as np
import pytest

from cudiff import Tensor, blend_to_uint8
from cudiff.backend import bfloat16
from cudiff.plot import to_uint8


@pytest.mark.parametrize("dtype", [np.float32, np.float16, bfloat16])
@pytest.mark.parametrize("shape", [(1,), (2, 5, 3, 1), (3, 16, 16, 3)])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_it_is_the_mixture_rounded_once(device, rng, dtype, shape, share):
    x, last = (1.5 * rng.standard_normal(shape)).astype(dtype), rng.integers(0, 256, shape).astype(np.uint8)
    arrays = Tensor(x, device=device), Tensor(last, device=device)
    out = blend_to_uint8(*arrays, share)
    assert out.device == device and out.dtype == np.uint8
    given = Tensor(np.array([share], np.float32), device=device)
    np.testing.assert_array_equal(blend_to_uint8(*arrays, given).numpy(), out.numpy())
    exact = np.clip((1 - share) * (x.astype(np.float64) * 127.5 + 127.5) + share * last.astype(np.float64), 0, 255)
    assert np.abs(out.numpy() - exact).max() <= 0.5 + 1e-4


def test_without_a_share_it_is_to_uint8(device, rng):
    x = (2 * rng.standard_normal((2, 8, 8, 3))).astype(np.float32)
    last = Tensor(rng.integers(0, 256, x.shape).astype(np.uint8), device=device)
    np.testing.assert_array_equal(blend_to_uint8(Tensor(x, device=device), last).numpy(), to_uint8(x))


def test_what_is_not_finite(device):
    x, last = Tensor(np.float32([np.nan, np.inf, -np.inf]), device=device), Tensor(np.uint8([9, 9, 9]), device=device)
    np.testing.assert_array_equal(blend_to_uint8(x, last, 0.5).numpy(), [0, 255, 0])


def test_what_it_does_not_take():
    x, last = Tensor(np.zeros((2, 3), np.float32)), Tensor(np.zeros((2, 3), np.uint8))
    for share in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match="share is 0 to 1"):
            blend_to_uint8(x, last, share)
    for given in (Tensor(np.zeros(2, np.float32)), Tensor(np.zeros(1, np.int32)), np.zeros(1, np.float32), "0"):
        with pytest.raises(TypeError, match=r"share is a number or a float32 Tensor \(1,\)"):
            blend_to_uint8(x, last, given)
    with pytest.raises(TypeError, match="last must be uint8"):
        blend_to_uint8(x, x)
    with pytest.raises(TypeError, match="floating"):
        blend_to_uint8(last, last)
    with pytest.raises(ValueError, match="differ in shape"):
        blend_to_uint8(x, Tensor(np.zeros((3,), np.uint8)))
