import ml_dtypes
import numpy as np
import pytest

import cudiff
from cudiff import Tensor
from tests.check import check_op

DTYPES = [np.float32, ml_dtypes.bfloat16, np.float16, np.int32, np.int64, np.uint8]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("axis", [None, 0, -1, 1])
@pytest.mark.parametrize("name", ["argmax", "argmin", "argsort"])
def test_positions(name, axis, dtype, device, rng):
    """Ties: the first counts."""
    x = rng.integers(0, 9, (5, 7, 33)).astype(dtype)
    tensor, function = Tensor(x, device=device), getattr(np, name)
    options = {"kind": "stable"} if name == "argsort" else {}
    expected = function(x.astype(float), axis, **options)
    for out in (getattr(cudiff, name)(tensor, axis), function(tensor, axis=axis), getattr(tensor, name)(axis)):
        assert isinstance(out, Tensor) and out.dtype == np.int64 and out.device == device
        np.testing.assert_array_equal(out.numpy(), expected)


def test_dimensions_are_kept_and_nan_is_found(device):
    x = Tensor(np.array([[1.0, np.nan, 3.0], [4.0, 2.0, 0.0]], np.float32), device=device, requires_grad=True)
    out = cudiff.argmax(x, 1, keepdims=True)
    assert out.shape == (2, 1) and not out.requires_grad
    np.testing.assert_array_equal(out.numpy(), [[1], [0]])
    np.testing.assert_array_equal(cudiff.argmin(x, 1).numpy(), [1, 2])


def test_what_is_refused(device):
    x = Tensor(np.zeros((2, 0), np.float32), device=device)
    for name in ("argmax", "argmin"):
        with pytest.raises(ValueError, match=name + r": \(2, 0\) has no elements to compare"):
            getattr(cudiff, name)(x, 1)
    for refused in (lambda: x.argmax(2), lambda: x.argsort(-3), lambda: x.cumsum(5)):
        with pytest.raises(ValueError, match="out of range for a tensor of 2 dimensions"):
            refused()
    assert cudiff.argmax(x, 0).shape == (0,) or device == "cuda"


@pytest.mark.parametrize("axis", [None, 0, -1])
def test_cumsum(axis, device, rng):
    x = rng.standard_normal((4, 33))
    check_op(lambda x: cudiff.cumsum(x, axis), x, device=device, dtypes=("float32", "bfloat16"))
    whole = Tensor((x * 9).astype(np.int32), device=device)
    assert cudiff.cumsum(whole, axis).dtype == np.int64
    np.testing.assert_array_equal(np.cumsum(whole, axis=axis).numpy(), np.cumsum(whole.numpy(), axis))


def test_one_hot(device):
    labels = Tensor(np.array([[2, 0], [1, 1]]), device=device)
    out = cudiff.one_hot(labels, 3)
    np.testing.assert_array_equal(out.numpy(), np.eye(3)[labels.numpy()])
    assert out.dtype == np.float32 and out.device == device and cudiff.one_hot([1], 2, "float16").dtype == np.float16


def test_labels_that_one_hot_refuses():
    with pytest.raises(ValueError, match="a label lies outside 0 to 2: -1 to 3"):
        cudiff.one_hot([-1, 3], 3)
    with pytest.raises(TypeError, match="labels and indices are integers"):
        cudiff.one_hot([0.5], 3)
