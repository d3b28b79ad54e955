"""Corners of NumPy's names, and shapes that hold nothing."""

import numpy as np
import pytest

import cudiff
from cudiff import Tensor, ops


def empty(*shape, device="cpu"):
    return Tensor(np.zeros(shape, np.float32), device=device)


@pytest.mark.parametrize("call, message", [
    (lambda t: ops.linear(t(3, 4), t(0, 4), t(0)), r"linear: a weight of shape \(0, 4\) has no outputs"),
    (lambda t: ops.mlp(t(3, 4), t(5, 4), t(5), t(0, 5), t(0)), "mlp: .* do not fit each other"),
    (lambda t: ops.linear(t(0, 3, 4), t(5, 4), t(5), t(0, 3, 5), t(0, 5)), "has no images to gate"),
    (lambda t: ops.layer_norm(t(2, 0), t(0), t(0)), r"layer_norm: x of shape \(2, 0\) has no channels"),
    (lambda t: ops.group_norm(t(2, 0, 3), t(3), t(3), 1), "holds nothing to normalise"),
    (lambda t: ops.max_pool2d(t(1, 4, 4, 0)), r"max_pool2d: x has shape \(1, 4, 4, 0\)"),
    (lambda t: ops.avg_pool2d(t(1, 4, 4, 0)), r"avg_pool2d: x has shape \(1, 4, 4, 0\)"),
    (lambda t: ops.upsample_nearest(t(1, 0, 4, 3)), "with pixels and channels"),
    (lambda t: ops.attention(t(1, 0, 2, 8), t(1, 3, 2, 8), t(1, 3, 2, 8)), r"got \(1, 0, 2, 8\)"),
    (lambda t: ops.round(t(2), 400), "no number has 400 decimals"),
])
def test_what_holds_nothing_is_refused_alike_on_both_devices(device, call, message):
    with pytest.raises(ValueError, match=message):
        call(lambda *shape: empty(*shape, device=device))


def test_arrays_beside_a_tensor_take_its_dtype_in_every_join(device):
    x, a = Tensor(np.ones((2, 2), np.float32), device=device), np.full((2, 2), 2.0)
    for joined in (np.hstack([x, a]), np.vstack([a, x]), np.concatenate([x, a], axis=None), np.concatenate([a, x])):
        assert joined.dtype == np.float32 and joined.device == device and sorted(joined.numpy().ravel())[-1] == 2
    assert np.clip(a, x, 1.5).dtype == np.float32


def test_names_of_numpys_do_what_numpy_does(device):
    assert cudiff.linspace(-2.5, 2.5, 6, dtype="int64", device=device).tolist() == [-3, -2, -1, 0, 1, 2]
    assert np.expand_dims(empty(3, 1, device=device), [0, 1]).shape == (1, 1, 3, 1)
    x = Tensor(np.arange(6).reshape(2, 3), device=device)
    assert cudiff.take(x, [True, False, True], 1).tolist() == np.take(np.arange(6).reshape(2, 3), [1, 0, 1], 1).tolist()
    bools = Tensor(np.array([True, False]), device=device)
    assert np.clip(bools, True, True).tolist() == [True, True] and np.clip(bools, False, False).tolist() == [False] * 2


@pytest.mark.parametrize("a, b, dtype", [
    (-(2**63), 0, np.int64), (2**63 - 1, -1, np.int64), (2**64 - 1, 0, np.uint64), (0, 2**64 - 1, np.uint64),
])
def test_integers_of_both_ends_are_not_close(a, b, dtype):
    a, b = np.array([a], dtype), np.array([b], dtype)
    assert not cudiff.isclose(a, b, rtol=0, atol=2).item() and cudiff.isclose(a, a, rtol=0, atol=0).item()


def test_bincount_brings_numbers_to_their_weights(device):
    weights = Tensor(np.float32([0.5, 1, 2]), device=device)
    counted = cudiff.bincount(np.array([0, 2, 2]), weights=weights)
    assert counted.device == device and counted.tolist() == [0.5, 0, 3]


def test_the_largest_of_a_window_with_nan_is_nan(device):
    x = Tensor(np.float32([1, np.nan, 2, 0]).reshape(1, 2, 2, 1), requires_grad=True, device=device)
    out = cudiff.max_pool2d(x)
    out.sum().backward()
    assert np.isnan(out.numpy()).all() and Tensor(x.grad).numpy().ravel().tolist() == [0, 1, 0, 0]
