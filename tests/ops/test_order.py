import ml_dtypes
import numpy as np
import pytest

import cudiff
from cudiff import CudiffError, Tensor
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


@pytest.mark.parametrize("shape, axis", [((5000,), 0), ((3, 2100), 1), ((2100, 3), 0), ((600, 40), 0), ((2, 99, 8), 1)])
def test_the_first_of_equal_extremes(shape, axis, device, rng):
    """Among infinities, zeros of both signs and NaN, also where the axis is in parts."""
    whole = rng.choice([-np.inf, -2.0, -0.0, 0.0, 2.0, np.inf], shape)
    for x in (whole, np.where(rng.random(shape) < 2 / shape[axis], np.nan, whole), np.where(whole > 0, 0.0, whole)):
        for dtype in ("float32", "bfloat16", "float16"):
            tensor = Tensor(x, dtype=dtype, device=device)
            for name in ("argmax", "argmin"):
                np.testing.assert_array_equal(getattr(cudiff, name)(tensor, axis).numpy(), getattr(np, name)(x, axis))


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


@pytest.mark.parametrize("shape, axis", [
    ((1,), 0), ((40_000,), 0), ((3, 129), 1), ((5, 128), 1), ((2, 5000), 1), ((9000, 3), 0), ((300, 40), 0),
    ((2, 600, 65), 1), ((70, 3, 2), 1), ((1000, 7), 1),
], ids=str)
def test_cumulative_sums_by_tiles_and_parts(shape, axis, device, rng):
    """The sums of whole numbers are exact in any order; the gradient's are from the end."""
    x = rng.integers(-9, 9, shape)
    for dtype in ("float32", "int64", "bfloat16"):
        found = cudiff.cumsum(Tensor(x, dtype=dtype, device=device), axis).numpy()
        if dtype == "bfloat16":
            np.testing.assert_allclose(found.astype(np.float64), np.cumsum(x, axis), rtol=1e-2)
        else:
            np.testing.assert_array_equal(found, np.cumsum(x, axis))
    tensor = Tensor(np.zeros(shape, np.float32), device=device, requires_grad=True)
    cudiff.cumsum(tensor, axis).backward(Tensor(x.astype(np.float32), device=device))
    np.testing.assert_array_equal(Tensor(tensor.grad).numpy(), np.flip(np.cumsum(np.flip(x, axis), axis), axis))
    nothing = Tensor(np.zeros((0, 3), np.float32), device=device)
    assert cudiff.cumsum(nothing, 0).shape == cudiff.cumsum(nothing, 1).shape == (0, 3)


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


@pytest.mark.parametrize("shape, axis", [((7,), 0), ((4, 33), 1), ((4, 33), 0), ((3, 4, 5), -2), ((4, 33), None),
                                         ((0, 3), 0), ((2, 0), 1)], ids=str)
def test_sort(shape, axis, device, rng):
    x = rng.standard_normal(shape)
    check_op(lambda x: cudiff.sort(x, axis), x, device=device, dtypes=("float32", "bfloat16"))
    ties = Tensor(rng.integers(0, 3, shape).astype(np.int32), device=device)
    np.testing.assert_array_equal(np.sort(ties, axis=axis).numpy(), np.sort(ties.numpy(), axis))


def test_sorted_nan_comes_last_and_ties_keep_their_gradients(device):
    x = Tensor(np.float32([2, np.nan, 1, 2]), device=device, requires_grad=True)
    out = cudiff.sort(x)
    np.testing.assert_array_equal(out.numpy(), [1, 2, 2, np.nan])
    out.backward(np.float32([1, 2, 3, 4]))
    assert Tensor(x.grad).numpy().tolist() == [2, 4, 1, 3]


@pytest.mark.parametrize("axis", [None, 0, (0, 2), -1])
@pytest.mark.parametrize("keepdims", [False, True])
def test_median_and_quantile(axis, keepdims, device, rng):
    x = rng.standard_normal((3, 4, 5))
    kept = {"axis": axis, "keepdims": keepdims}
    check_op(lambda x: cudiff.median(x, axis, keepdims), x, device=device)
    check_op(lambda x: cudiff.quantile(x, [0.0, 0.3, 1.0], axis, keepdims), x, device=device, dtypes=("float32",))
    tensor = Tensor(x, dtype=np.float32, device=device)
    np.testing.assert_allclose(np.median(tensor, **kept).numpy(), np.median(x, **kept), rtol=1e-5)
    for q in (0.25, [0.9], [[0.1, 0.2], [0.5, 1.0]]):
        out, expected = np.quantile(tensor, q, **kept), np.quantile(x, q, **kept)
        assert out.shape == np.shape(expected)
        np.testing.assert_allclose(out.numpy(), expected, rtol=1e-4, atol=1e-6)


def test_what_a_median_is_of(device):
    x = Tensor(np.float32([[1, np.nan, 3], [4, np.inf, -np.inf]]), device=device)
    np.testing.assert_array_equal(cudiff.median(x, 1).numpy(), [np.nan, 4])
    assert cudiff.median(Tensor([3, 1, 2], device=device)).item() == 2
    assert cudiff.median(Tensor([3, 1], device=device)).dtype == np.float32
    with pytest.raises(ValueError, match=r"quantile takes shares from 0 to 1, not 1\.5"):
        cudiff.quantile(x, 1.5)
    with pytest.raises(ValueError, match=r"quantile over no elements of shape \(0,\)"):
        cudiff.median(x[0, :0])


@pytest.mark.parametrize("shape, axis, keepdims", [((5,), None, False), ((3, 4), 0, True), ((3, 7), -1, False),
                                                   ((2, 3, 5), (0, 2), True), ((2, 1), 1, False), ((), None, False)])
def test_prod(shape, axis, keepdims, device, rng):
    x = np.asarray(rng.standard_normal(shape))
    check_op(lambda x: cudiff.prod(x, axis, keepdims), x, device=device, dtypes=("float32", "bfloat16"))
    out = np.prod(Tensor(x, dtype=np.float32, device=device), axis=axis, keepdims=keepdims)
    np.testing.assert_allclose(out.numpy(), np.prod(x, axis=axis, keepdims=keepdims), rtol=1e-5)


@pytest.mark.parametrize("dtype, rounding", [("float32", 1e-4), ("bfloat16", 1e-2), ("float16", 2e-3)])
def test_a_product_without_a_gradient(dtype, rounding, device, rng):
    """Is one of a kernel's own; also in parts of the axis."""
    x = Tensor(rng.uniform(0.95, 1.05, (2, 2000, 5)) * rng.choice([-1, 1], (2, 2000, 5)), dtype=dtype, device=device)
    for axis in (0, 1, 2, (1, 2), None):
        expected = np.prod(x.numpy().astype(np.float64), axis)
        assert cudiff.prod(x, axis).dtype == x.dtype
        np.testing.assert_allclose(cudiff.prod(x, axis).numpy().astype(np.float64), expected, rtol=rounding, atol=1e-7)


def test_a_products_gradient_at_zeros(device):
    x = Tensor(np.float32([[2, 0, 3, 4], [0, 2, 0, 5], [1, 2, 3, 4]]), device=device, requires_grad=True)
    cudiff.prod(x, 1).sum().backward()
    assert Tensor(x.grad).numpy().tolist() == [[0, 24, 0, 0], [0, 0, 0, 0], [24, 12, 8, 6]]


def test_products_of_integers_and_of_nothing(device):
    for x in (np.int32([[2, 3], [1 << 30, 1 << 30]]), np.array([[True, False]]), np.uint8([[200, 200]])):
        out, expected = cudiff.prod(Tensor(x, device=device), 1), np.prod(x.astype(np.int64), 1)
        assert out.dtype == np.int64 and np.array_equal(out.numpy(), expected)
    nothing = Tensor(np.ones((0, 2), np.float32), requires_grad=True, device=device)
    out = cudiff.prod(nothing, 0)
    out.sum().backward()
    assert out.numpy().tolist() == [1, 1] and nothing.grad.shape == (0, 2)


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.int64, ml_dtypes.bfloat16])
@pytest.mark.parametrize("side", ["left", "right"])
def test_searchsorted(side, dtype, device, rng):
    a, v = np.sort(rng.integers(0, 9, 20)), rng.integers(-2, 12, (3, 5))
    out = cudiff.searchsorted(Tensor(a.astype(dtype), device=device), v.astype(dtype), side)
    assert out.dtype == np.int64 and out.device == device
    np.testing.assert_array_equal(out.numpy(), np.searchsorted(a, v, side))
    assert cudiff.array_equal(out, Tensor(a.astype(dtype), device=device).searchsorted(v.astype(dtype), side=side))


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.uint8, ml_dtypes.bfloat16])
def test_unique(dtype, device, rng):
    values = rng.integers(0, 9, (4, 5)).astype(dtype)
    x, wide = Tensor(values, device=device), values.astype(float)
    assert np.unique(x).dtype == dtype and np.unique(x).numpy().tolist() == np.unique(wide).tolist()
    out = cudiff.unique(x, return_index=True, return_inverse=True, return_counts=True)
    _, index, _, counts = np.unique(wide, return_index=True, return_inverse=True, return_counts=True)
    assert out[1].numpy().tolist() == index.tolist() and out[3].numpy().tolist() == counts.tolist()
    np.testing.assert_array_equal(out[0][out[2]].numpy(), values)
    np.testing.assert_array_equal(cudiff.unique(x, return_inverse=True)[1].numpy(), out[2].numpy())


@pytest.mark.parametrize("minlength", [0, 12])
def test_bincount(minlength, device, rng):
    values, weights = rng.integers(0, 9, 50), rng.standard_normal(50)
    x = Tensor(values, device=device)
    out = np.bincount(x, minlength=minlength)
    assert out.dtype == np.int64 and out.numpy().tolist() == np.bincount(values, minlength=minlength).tolist()
    check_op(lambda w: cudiff.bincount(x if w.device == device else values, w, minlength), weights, device=device)
    np.testing.assert_allclose(cudiff.bincount(x, weights).numpy(), np.bincount(values, weights), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(cudiff.bincount(values, weights).numpy(), np.bincount(values, weights), rtol=1e-6)
    assert cudiff.bincount([], minlength=minlength).numpy().tolist() == [0] * minlength


@pytest.mark.parametrize("n, axis", [(0, -1), (1, 0), (2, 1), (3, -1), (9, 1)])
def test_diff(n, axis, device, rng):
    x = rng.standard_normal((4, 6))
    check_op(lambda x: cudiff.diff(x, n, axis), x, device=device) if n < 9 else None
    for values in (x.astype(np.float32), (x * 9).astype(np.int32), x > 0):
        out = np.diff(Tensor(values, device=device), n=n, axis=axis)
        np.testing.assert_allclose(out.numpy(), np.diff(values, n=n, axis=axis), rtol=1e-4, atol=1e-5)
        assert out.dtype == values.dtype


def test_what_counting_and_differences_refuse(device):
    x = Tensor(np.float32([1, 2]), device=device)
    for refused, message in [
        (lambda: cudiff.searchsorted(x[None], x), "searchsorted takes one axis of ascending numbers"),
        (lambda: cudiff.searchsorted(x, x, "middle"), 'and "left" or "right"'),
        (lambda: cudiff.bincount(Tensor([1, -1], device=device)), "none of them below 0"),
        (lambda: cudiff.bincount(Tensor([[1]], device=device)), "numbers of one axis"),
        (lambda: cudiff.bincount(Tensor([1], device=device), x), r"weights of shape \(2,\) are not those of \(1,\)"),
        (lambda: cudiff.diff(x, -1), "0 times or more, not -1"),
        (lambda: cudiff.percentile(x, 101), r"shares from 0 to 1, not 1\.01"),
    ]:
        with pytest.raises(ValueError, match=message):
            refused()
    with pytest.raises(TypeError, match="unique has no gradient: give it"):
        cudiff.unique(Tensor(x.data, requires_grad=True))


def test_sorting_in_a_captured_function(host_of, monkeypatch):
    host = host_of(True)
    x = Tensor(host.zeros((4, 3), np.float32))
    monkeypatch.setattr(host.cuda.get_current_stream(), "is_capturing", lambda: True)
    for call in (cudiff.sort, cudiff.median):
        with pytest.raises(CudiffError, match="argsort waits for the GPU: call it outside of the captured function"):
            call(x)
    with pytest.raises(CudiffError, match="unique's result has a size that a captured function does not know"):
        cudiff.unique(x)
    with pytest.raises(CudiffError, match="bincount waits for the GPU"):
        cudiff.bincount(Tensor(host.zeros(4, np.int32)))
    assert cudiff.prod(x, 0).shape == (3,)
    with pytest.raises(CudiffError, match="a mask's result has a size"):
        cudiff.nonzero(x)
