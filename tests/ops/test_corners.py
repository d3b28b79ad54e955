"""Corners of NumPy's names, and shapes that hold nothing."""

import numpy as np
import pytest

import cudiff
from cudiff import Tensor, nn, ops
from cudiff.backend import bfloat16
from cudiff.statistics import ChannelStatistics, Kind


def empty(*shape, device="cpu"):
    return Tensor(np.zeros(shape, np.float32), device=device)


@pytest.mark.parametrize("call, message", [
    (lambda t: ops.linear(t(3, 4), t(0, 4), t(0)), r"linear: a weight of shape \(0, 4\) has no outputs"),
    (lambda t: ops.mlp(t(3, 4), t(5, 4), t(5), t(0, 5), t(0)), "mlp: .* do not fit each other"),
    (lambda t: ops.linear(t(0, 3, 4), t(5, 4), t(5), t(0, 3, 5), t(0, 5)), "has no images to gate"),
    (lambda t: ops.layer_norm(t(2, 0), t(0), t(0)), r"layer_norm: x of shape \(2, 0\) has no channels"),
    (lambda t: ops.group_norm(t(2, 0, 3), t(3), t(3), 1), "holds nothing to normalise"),
    (lambda t: ops.group_norm(t(2, 4, 3), t(3), t(3), 1, x2=t(2, 4, 0)), r"group_norm: x2 of shape \(2, 4, 0\) holds"),
    (lambda t: ops.norm_silu_conv2d(t(1, 2, 2, 3), t(1, 2, 2, 0), weight=t(3, 3), norm_weight=t(3), norm_bias=t(3),
                                    num_groups=1), r"norm_silu_conv2d: x2 of shape \(1, 2, 2, 0\) has no channels"),
    (lambda t: ops.batch_norm(t(2, 0), t(0), t(0), t(0), t(0), False), "batch_norm: .* has no channels"),
    (lambda t: ops.batch_norm_relu_pool(t(2, 4, 4, 0), t(0), t(0), t(0), t(0), False), "_pool: .* has no channels"),
    (lambda t: ops.max_pool2d(t(1, 4, 4, 0)), r"max_pool2d: x has shape \(1, 4, 4, 0\)"),
    (lambda t: ops.avg_pool2d(t(1, 4, 4, 0)), r"avg_pool2d: x has shape \(1, 4, 4, 0\)"),
    (lambda t: ops.upsample_nearest(t(1, 0, 4, 3)), "with pixels and channels"),
    (lambda t: ops.attention(t(1, 0, 2, 8), t(1, 3, 2, 8), t(1, 3, 2, 8)), r"got \(1, 0, 2, 8\)"),
    (lambda t: ops.round(t(2), 39), "round: float32 takes -38 to 38 decimals, not 39"),
    (lambda t: ops.round(t(2).astype("int64"), -301), "round: int64 takes -300 to 300 decimals, not -301"),
])
def test_what_holds_nothing_is_refused_alike_on_both_devices(device, call, message):
    with pytest.raises(ValueError, match=message):
        call(lambda *shape: empty(*shape, device=device))


def test_arrays_beside_a_tensor_take_its_dtype_in_every_join(device):
    x, a = Tensor(np.ones((2, 2), np.float32), device=device), np.full((2, 2), 2.0)
    for joined in (np.hstack([x, a]), np.vstack([a, x]), np.concatenate([x, a], axis=None), np.concatenate([a, x])):
        assert joined.dtype == np.float32 and joined.device == device and sorted(joined.numpy().ravel())[-1] == 2
    assert np.clip(a, x, 1.5).dtype == np.float32


A, B, C = np.array([-1, 0.25, 2, 3]), np.array([0, 0.5, 3, 1]), np.array([0.5, 0.125, 2, 2])


@pytest.mark.parametrize("given", [
    (A, 0.5, C), (A, B, C), (A, B, 1.5), (A, None, C), (A, B, None), (0.5, 0, C), (0.5, B, 1), (0.5, B, C),
    (0.5, None, C), (np.arange(4), 0.5, C), (np.arange(4), 1, np.full(4, 2)),
])
def test_clip_takes_tensors_beside_arrays_and_numbers_in_any_place(device, given):
    expected = np.clip(*given)
    for tensors in [(i,) for i in range(3)] + [(0, 1), (0, 2), (1, 2), (0, 1, 2)]:
        if any(isinstance(given[i], np.ndarray) for i in tensors):
            found = np.clip(*[Tensor(x, dtype=np.float32 if x.dtype == np.float64 else x.dtype, device=device)
                              if isinstance(x, np.ndarray) and i in tensors else x for i, x in enumerate(given)])
            assert found.device == device and found.dtype in (np.float32, expected.dtype)
            assert found.tolist() == expected.tolist()


def test_broadcast_arrays_keep_their_dtypes_on_one_device(device):
    x = Tensor(np.zeros((2, 1), np.float16), device=device)
    found = np.broadcast_arrays(x, np.ones(3, np.float32), np.arange(3), [True], 2, np.ones(1))
    assert {(x.shape, x.device) for x in found} == {((2, 3), device)}
    wide = np.float64 if device == "cpu" else np.float32
    assert [x.dtype for x in found] == [np.float16, np.float32, np.int64, np.bool_, np.int64, wide]
    assert found[2].tolist() == 2 * [[0, 1, 2]]


def test_names_of_numpys_do_what_numpy_does(device):
    assert cudiff.linspace(-2.5, 2.5, 6, dtype="int64", device=device).tolist() == [-3, -2, -1, 0, 1, 2]
    assert cudiff.linspace(0, 1, 3, dtype=bool, device=device).tolist() == [False, True, True]
    assert cudiff.linspace(0, 1, 3, dtype=None, device=device).dtype == np.float32
    assert np.expand_dims(empty(3, 1, device=device), [0, 1]).shape == (1, 1, 3, 1)
    x = Tensor(np.arange(6).reshape(2, 3), device=device)
    for mask in ([True, False, True], Tensor(np.array([True, False, True]), device=device)):
        assert cudiff.take(x, mask, 1).tolist() == np.take(np.arange(6).reshape(2, 3), [True, False, True], 1).tolist()
    bools = Tensor(np.array([True, False]), device=device)
    assert np.clip(bools, True, True).tolist() == [True, True] and np.clip(bools, False, False).tolist() == [False] * 2


@pytest.mark.parametrize("a, b, dtype", [
    (-(2**63), 0, np.int64), (2**63 - 1, -1, np.int64), (2**64 - 1, 0, np.uint64), (0, 2**64 - 1, np.uint64),
])
def test_integers_of_both_ends_are_not_close(a, b, dtype):
    a, b = np.array([a], dtype), np.array([b], dtype)
    assert not cudiff.isclose(a, b, rtol=0, atol=2).item() and cudiff.isclose(a, a, rtol=0, atol=0).item()


@pytest.mark.parametrize("a, b, dtype", [
    (-(2**63) + 2**40, -(2**63), np.int64), (2**64 - 2**40, 2**64 - 1, np.uint64), (-127, -128, np.int8),
])
def test_integers_near_the_ends_are_close(a, b, dtype):
    for x, y in ((a, b), (b, a)):
        x, y = np.array([x], dtype), np.array([y], dtype)
        assert cudiff.isclose(x, y, rtol=0.01).item() and np.isclose(x.astype(float), y.astype(float), rtol=0.01)


@pytest.mark.parametrize("dtype, decimals", [
    (np.int64, -18), (np.int64, -19), (np.int64, -20), (np.int32, -10), (np.uint8, -3),
])
def test_integers_are_rounded_to_what_their_dtype_does_not_hold(device, dtype, decimals):
    x = np.array([0, 5, 100, np.iinfo(dtype).max // 2], dtype)
    found = cudiff.round(Tensor(x, device=device), decimals)
    assert found.dtype == dtype and found.tolist() == np.round(x, decimals).tolist()


def test_new_data_have_no_statistics_of_the_old(device, rng):
    arrays = rng.standard_normal((1, 8, 8, 32)), rng.standard_normal((32, 3, 3, 32)), np.ones(32), np.zeros(32)
    x, weight, ones, zeros = (Tensor(array, dtype=bfloat16, device=device) for array in arrays)
    h = ops.conv2d(x, weight, padding=1)
    assert h.statistics is not None or device == "cpu"
    h.data = x.data
    np.testing.assert_array_equal(ops.group_norm(h, ones, zeros).numpy(), ops.group_norm(x, ones, zeros).numpy())


def test_data_changed_by_an_operator_have_no_statistics_of_the_old():
    x = ops.ones(4)
    x.statistics = ChannelStatistics(Kind.MOMENTS, np.zeros((1, 1, 4, 2), np.float32))
    x.data *= 2
    assert x.statistics is None and x.tolist() == [2, 2, 2, 2]


def test_a_view_of_new_data_is_of_no_parameter():
    parameter = nn.Parameter(np.zeros(4))
    view = parameter.reshape(2, 2)
    assert view.parameter is parameter
    view.data = np.ones((2, 2), np.float32)
    assert view.parameter is None


def test_bincount_brings_numbers_to_their_weights(device):
    weights = Tensor(np.float32([0.5, 1, 2]), device=device)
    counted = cudiff.bincount(np.array([0, 2, 2]), weights=weights)
    assert counted.device == device and counted.tolist() == [0.5, 0, 3]


def test_the_largest_of_a_window_with_nan_is_nan(device):
    x = Tensor(np.float32([1, np.nan, 2, 0]).reshape(1, 2, 2, 1), requires_grad=True, device=device)
    out = cudiff.max_pool2d(x)
    out.sum().backward()
    assert np.isnan(out.numpy()).all() and Tensor(x.grad).numpy().ravel().tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("call, given, expected", [
    (cudiff.std, [300, -300, 200], [262.47]), (cudiff.std, [1e-4, -1e-4], [1e-4]),
    (lambda x: cudiff.round(x, 2), [700.3, 7000], [700.3, 7000]),
    (lambda x: cudiff.softplus(x, 2.0), [60000, -1], [60000, np.log1p(np.exp(-2)) / 2]),
    (lambda x: cudiff.lerp(x, -x, 0.5), [60000, -300], [0, 0]),
], ids=["std", "std of small ones", "round", "softplus", "lerp"])
def test_float16_is_computed_in_float32(device, call, given, expected):
    """Numbers on the way are beyond float16; the results are not."""
    out = call(Tensor(np.float16(given), device=device))
    assert out.dtype == np.float16
    np.testing.assert_allclose(out.numpy(), np.float16(expected), rtol=2e-3)


def test_the_gradient_of_the_std_of_small_float16(device):
    x = Tensor(np.float16([1e-4, -1e-4]), requires_grad=True, device=device)
    cudiff.std(x).backward()
    np.testing.assert_allclose(Tensor(x.grad).numpy(), [0.5, -0.5], rtol=2e-3)
