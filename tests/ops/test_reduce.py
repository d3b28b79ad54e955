import ml_dtypes
import numpy as np
import pytest

import cudiff
from cudiff import Tensor
from cudiff.cuda.deferred import deferred
from cudiff.cuda.sums import add_parts
from cudiff.gradient import Slot
from cudiff.ops.reduce import sum_array, sum_rows_cuda, sum_to
from tests.check import TOLERANCE, check_op, relative_error, torch

CASES = [
    ((), None), ((1,), 0), ((7,), None), ((5, 3), 0), ((5, 3), 1), ((5, 3), ()), ((3, 4, 5), (0, 2)),
    ((3, 4, 5), (0, 1)), ((3, 4, 5), -2), ((2, 3, 1, 5), (1, 3)), ((2, 3, 4, 5), (0, 2)), ((2, 17, 19, 3), (0, 1, 2)),
    ((700, 33), 0), ((3, 5000), 1), ((2, 3000, 2), 1),
    ((3, 6, 16), 1),
]
FUNCTIONS = ["sum", "mean", "max", "min"]


def _torch(name, axis, keepdims):
    function = {"max": "amax", "min": "amin"}.get(name, name)

    def run(x):
        dims = tuple(range(x.ndim)) if axis is None else axis if isinstance(axis, tuple) else (axis,)
        if not dims:
            return x * 1.0
        return getattr(x, function)(dims, keepdim=keepdims)

    return run


@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("shape, axis", CASES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_reduction(name, shape, axis, keepdims, device, rng):
    size = int(np.prod(shape))
    x = np.asarray((rng.permutation(size) / size - 0.3).reshape(shape))  # no ties, so that max has a slope
    check_op(
        lambda x: getattr(cudiff, name)(x, axis, keepdims), x, device=device,
        torch_fn=_torch(name, axis, keepdims) if shape else None,
        dtypes=("float32", "bfloat16", "float16") if name in ("sum", "mean") else ("float32",),
    )


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("shape, axis", [c for c in CASES if c[0] not in ((), (1,)) and c[1] != ()], ids=str)
def test_variance(shape, axis, ddof, device, rng):
    x = rng.standard_normal(shape)
    check_op(
        lambda x: cudiff.var(x, axis, ddof=ddof), x, device=device,
        torch_fn=lambda x: x.var(axis, correction=ddof),
    )
    check_op(lambda x: cudiff.std(x, axis, keepdims=True), x, device=device, dtypes=("float32", "bfloat16", "float16"))


def test_variance_around_a_large_mean(device, rng):
    x = (rng.standard_normal(10000) + 1e4).astype(np.float32)
    assert relative_error(cudiff.var(Tensor(x, device=device)).numpy(), x.astype(np.float64).var()) < 1e-4
    rows = (rng.standard_normal((10**6, 2)) + 300).astype(np.float32)  # NumPy's is a fifth off
    assert relative_error(cudiff.var(Tensor(rows, device=device), 0).numpy(), rows.astype(np.float64).var(0)) < 1e-5


@pytest.mark.parametrize("name", ["max", "min"])
def test_low_precision_extremes_are_exact(name, device, rng):
    x = rng.standard_normal((33, 70)).astype(ml_dtypes.bfloat16)
    out = getattr(cudiff, name)(Tensor(x, device=device), 1).numpy()
    assert np.array_equal(out, getattr(x.astype(np.float32), name)(1).astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("name", ["max", "min"])
def test_equal_extremes_share_the_gradient(name, device):
    x = Tensor(np.float32([[2, 2, 2, 2], [1, 2, 2, 3]]), requires_grad=True, device=device)
    getattr(cudiff, name)(x, 1).sum().backward()
    expected = [[0.25] * 4, [0, 0, 0, 1] if name == "max" else [1, 0, 0, 0]]
    assert Tensor(x.grad).numpy().tolist() == expected


def test_nan_wins(device):
    x = Tensor(np.float32([[1, np.nan, 2], [1, 2, 3]]), device=device)
    assert np.isnan(cudiff.max(x, 1).numpy()).tolist() == [True, False]
    assert np.isnan(cudiff.min(x, 1).numpy()).tolist() == [True, False]


@pytest.mark.parametrize("shape, axis", [((4, 9), 1), ((2, 3, 4), (0, 2)), ((4, 8), 1), ((3, 16), 0)], ids=str)
def test_gradients_are_added_to_what_is_there(shape, axis, device, rng):
    x = rng.standard_normal(shape)

    def fn(x):
        return x.sum(axis) + x.mean(axis) * 2.0 + x.max(axis) + x.var(axis) + (x * x).sum(axis)

    check_op(fn, x, device=device, dtypes=("float32",))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_low_precision_sums_in_float32(dtype, device):
    x = Tensor(np.ones((3000, 2), dtype), device=device)  # a running sum in bfloat16 would stop at 256
    assert cudiff.mean(x, 0).numpy().astype(float).tolist() == [1, 1]
    assert cudiff.sum(x, 0).numpy().astype(float).tolist() == [float(np.asarray(3000, dtype))] * 2


def test_sum_array_and_unbroadcast(device, rng):
    x = rng.standard_normal((4, 3, 5, 6)).astype(np.float32)
    low = x.astype(ml_dtypes.bfloat16)
    for array, wide in ((x, x), (low, low.astype(np.float32))):
        data = Tensor(array, device=device).data
        for axes in (None, 0, -1, (0, 1), (1, 3), (0, 2), ()):
            for keepdims in (False, True):
                out = sum_array(data, axes, keepdims, np.float32)
                expected = wide.sum(axes, keepdims=keepdims, dtype=np.float64)
                assert out.dtype == np.float32
                assert relative_error(Tensor(out).numpy(), expected) < TOLERANCE[np.dtype(np.float32)]
        assert sum_array(data, 0).dtype == array.dtype
        for shape in ((4, 3, 5, 6), (6,), (1, 6), (3, 1, 6), (4, 1, 1, 1), (1, 3, 1, 6), ()):
            assert sum_to(data, shape).shape == shape


def test_integers():
    x = Tensor(np.arange(6, dtype=np.int32).reshape(2, 3))
    assert x.sum().item() == 15 and x.mean().dtype == np.float32 and x.max(0).numpy().tolist() == [3, 4, 5]


def test_same_bits_every_time(device, rng):
    x = Tensor(rng.standard_normal((64, 999)).astype(np.float32), device=device)
    for axis in (None, 0, 1):
        first = cudiff.sum(x, axis).numpy()
        assert all(np.array_equal(first, cudiff.sum(x, axis).numpy()) for _ in range(3))


def test_bad_axes(device):
    x = Tensor(np.ones((2, 3), np.float32), device=device)
    with pytest.raises(np.exceptions.AxisError, match="out of range"):  # an IndexError too, as NumPy's
        x.sum(2)
    with pytest.raises(ValueError, match="twice"):
        x.sum((0, -2))
    with pytest.raises(ValueError, match="no elements"):
        Tensor(np.ones((0, 3), np.float32), device=device).mean(0)
    with pytest.raises(ValueError, match="ddof"):
        x.var(0, ddof=2)


def test_torch_agrees_on_ties():
    if torch is None:
        pytest.skip("PyTorch is not installed")
    values = np.array([[1.0, 3, 3], [2, 2, 2]])
    x, reference = Tensor(values, requires_grad=True), torch.tensor(values, requires_grad=True)
    x.max(1).sum().backward()
    reference.amax(1).sum().backward()
    assert np.array_equal(x.grad, reference.grad.numpy())


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(3, 70, 33), (2, 64, 64, 64), (1, 5), (4, 3, 2, 576)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sums_of_rows_are_deferred_and_made_once(rng, shape, dtype):
    x = Tensor(rng.standard_normal(shape), dtype="float32", device="cuda").astype(dtype)
    expected = x.astype("float32").numpy().astype(np.float64).reshape(-1, shape[-1]).sum(0)
    with deferred() as queue:
        outs = [sum_rows_cuda(x.data, None) for _ in range(70)]  # more than a launch holds
        sum_rows_cuda(x.data, Slot(outs[0]))
        queue.before_read(outs[0])
        assert relative_error(Tensor(outs[0]).numpy(), 2 * expected) < 1e-5
        sum_rows_cuda(x.data, Slot(outs[1]))
        sum_rows_cuda(x.data, Slot(outs[1]))
    now = sum_rows_cuda(x.data, None)
    assert relative_error(Tensor(now).numpy(), expected) < 1e-5
    assert Tensor(outs[69]).numpy().tobytes() == Tensor(now).numpy().tobytes()
    assert relative_error(Tensor(outs[1]).numpy(), 3 * expected) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("count, rows, columns", [
    (43, 64, 576), (2, 130, 64), (5, 33, 27), (128, 64, 64), (1, 3, 5), (1100, 1, 64), (4096, 1, 33),
])  # fmt: skip
def test_sums_of_parts_go_to_parts_of_rows(rng, count, rows, columns):
    """Five of the first shape are more than may be pending."""
    parts = rng.standard_normal((count, rows, columns)).astype(np.float32)
    before = rng.standard_normal((rows, 2 * columns)).astype(np.float32)
    source, outs = Tensor(parts, device="cuda").data, [Tensor(before, device="cuda").data for _ in range(5)]
    with deferred() as queue:
        for out in outs:
            add_parts(source, out[:, :columns], True)
            add_parts(source, out[:, columns:], False)
        queue.before_read(outs[4])
        total = parts.astype(np.float64).sum(0)
        assert relative_error(Tensor(outs[4]).numpy(), np.hstack([before[:, :columns] + total, total])) < 1e-5
    for out in outs:
        assert Tensor(out).numpy().tobytes() == Tensor(outs[4]).numpy().tobytes()


def test_a_broadcast_operands_gradient_is_summed_in_float32():
    narrow = Tensor(np.zeros((1, 3), ml_dtypes.bfloat16), requires_grad=True)
    out = narrow + Tensor(np.zeros((5000, 3), ml_dtypes.bfloat16))
    out.backward(np.ones(out.shape, ml_dtypes.bfloat16))
    np.testing.assert_array_equal(narrow.grad, np.full((1, 3), 5000).astype(ml_dtypes.bfloat16))


def test_sums_of_integers_are_exact(device):
    total = Tensor(np.array([2**40, 1, 2**24]), device=device).sum()
    assert total.dtype == np.int64 and total.item() == 2**40 + 1 + 2**24


@pytest.mark.parametrize("name", ["max", "min", "ptp", "amax", "amin"])
@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_nothing_has_no_largest_element(device, name, dtype):
    empty = Tensor(np.zeros((2, 0), dtype), device=device)
    with pytest.raises(ValueError, match="over no elements"):
        getattr(cudiff, name)(empty, 1)
    assert getattr(cudiff, name)(empty, 0).shape == (0,)


@pytest.mark.parametrize("name", ["sum", "mean", "max", "any", "count_nonzero", "var"])
@pytest.mark.parametrize("shape, axis", [((3, 0), 0), ((2, 0, 3), 0), ((2, 3, 0), (0, 1)), ((0, 3, 2), 1)])
def test_a_result_of_no_elements(device, name, shape, axis):
    expected = getattr(np, name)(np.zeros(shape, np.float32), axis)
    assert getattr(cudiff, name)(Tensor(np.zeros(shape, np.float32), device=device), axis).shape == expected.shape
