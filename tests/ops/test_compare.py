import operator

import ml_dtypes
import numpy as np
import pytest

import cudiff
from cudiff import Tensor

TWO = [
    "less", "less_equal", "greater", "greater_equal", "equal", "not_equal", "logical_and", "logical_or", "logical_xor",
]
OPERATORS = [operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne]
DTYPES = [np.float32, ml_dtypes.bfloat16, np.float16, np.int32, np.int64, np.uint8, np.bool_]


def _same(out, expected):
    assert isinstance(out, Tensor) and out.dtype == np.bool_ and not out.requires_grad
    np.testing.assert_array_equal(out.numpy(), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("shapes", [((33, 7), (33, 7)), ((5, 1, 8), (3, 1)), ((), (9,)), ((0, 3), (3,))], ids=str)
@pytest.mark.parametrize("name", TWO)
def test_two_tensors(name, shapes, dtype, device, rng):
    a, b = (np.asarray(rng.integers(0, 3, shape)).astype(dtype) for shape in shapes)
    out = getattr(cudiff, name)(Tensor(a, device=device), Tensor(b, device=device))
    assert out.device == device
    _same(out, getattr(np, name)(a.astype(float), b.astype(float)))


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d is not np.bool_], ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("op", OPERATORS)
def test_operators_with_numbers_and_arrays(op, dtype, device):
    values = np.array([0, 1, 2, 3, 250]).astype(dtype)
    x, wide = Tensor(values, device=device), values.astype(float)
    for number in (2, -1, 300, 2.5, 2**40, np.int64(3), True):
        _same(op(x, number), op(wide, number))
        _same(op(number, x), op(number, wide))
    _same(op(values, x), op(wide, wide))
    _same(op(x, [3, 1, 2, 0, 250]), op(wide, [3, 1, 2, 0, 250]))


def test_integers_beyond_a_floats_digits(device):
    x = Tensor(np.array([2**60, 2**60 + 1]), device=device)
    _same(x == 2**60, [True, False])
    _same(x > Tensor(np.array([2**30], np.int32), device=device), [True, True])
    _same(x < 2**70, [True, True])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=lambda d: np.dtype(d).name)
def test_integers_beside_short_floats_are_not_rounded_to_them(dtype, device):
    whole = Tensor(np.array([2048, 2049, 70000]), device=device)
    floats = Tensor(np.array([2048, 2048, np.inf], dtype), device=device)
    _same(whole == floats, [True, False, False])
    _same(whole > floats, [False, True, False])
    _same(cudiff.less(floats, whole), [False, True, False])
    _same(cudiff.isclose(whole, floats), [True, False, False])
    assert not cudiff.array_equal(whole, floats)


def test_integers_and_floats_meet_in_float64():
    x = Tensor(np.array([2**24, 2**24 + 1]))
    for number in (2.0**24, np.float32(2**24), np.array(2.0**24)):
        _same(x == number, [True, False])
        _same(number < x, [False, True])
    for dtype in ("float32", "float64", "bfloat16"):
        same = Tensor([2.0**24, 2.0**24], dtype=dtype)
        for other in (same, same.numpy()):
            _same(x > other, [False, True])
            _same(cudiff.less(other, x), [False, True])
            assert cudiff.array_equal(x[:1], other[:1]) and not cudiff.array_equal(x, other)


def test_none_and_text_equal_no_element(device):
    x = Tensor(np.ones((2, 3), np.float32), device=device)
    for other in (None, "1", object()):
        _same(x == other, np.zeros((2, 3)))
        _same(x != other, np.ones((2, 3)))
    assert x[:1, :1] != None  # noqa: E711
    for refused in (lambda: x < None, lambda: cudiff.equal(x, None)):
        with pytest.raises(TypeError, match="real numbers"):
            refused()
    with pytest.raises(ValueError, match="broadcast"):
        x == Tensor(np.ones(2, np.float32), device=device)  # noqa: B015


def test_what_is_not_a_number(device):
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16, np.int32):
        values = np.array([0, 1, -2], dtype)
        if values.dtype.kind != "i":
            values = np.concatenate([values, np.array([np.nan, np.inf, -np.inf], dtype)])
        x, wide = Tensor(values, device=device), values.astype(float)
        for name in ("isnan", "isinf", "isfinite", "logical_not"):
            _same(getattr(cudiff, name)(x), getattr(np, name)(wide))
        _same(x == x, wide == wide)
        _same(cudiff.logical_and(x, 1), wide != 0)


@pytest.mark.parametrize("axis, keepdims", [(None, False), (0, True), (1, False), ((0, 2), False), ((), False)])
@pytest.mark.parametrize("dtype", [np.bool_, np.float32, np.int64], ids=lambda d: np.dtype(d).name)
def test_any_and_all(axis, keepdims, dtype, device, rng):
    values = (rng.uniform(size=(4, 7, 3)) < 0.7).astype(dtype)
    values[1] = 1
    values[:, 2] = 0
    x = Tensor(values, device=device)
    _same(x.any(axis, keepdims), values.any(axis, keepdims=keepdims))
    _same(x.all(axis, keepdims), values.all(axis, keepdims=keepdims))
    _same(np.any(x, axis=axis), values.any(axis))


def test_any_and_all_of_none():
    x = Tensor(np.zeros((0, 2), np.float32))
    assert not x.any() and x.all() and x.all(0).numpy().tolist() == [True, True]


@pytest.mark.parametrize("axis, keepdims", [(None, False), (0, True), ((0, 1), False)])
def test_elements_that_are_not_zero_are_counted(axis, keepdims, device):
    values = np.float32([[0, 1, np.nan], [0, -2, 0]])
    out = np.count_nonzero(Tensor(values, device=device), axis=axis, keepdims=keepdims)
    np.testing.assert_array_equal(out.numpy(), np.count_nonzero(values, axis=axis, keepdims=keepdims))
    assert out.dtype == np.int64


@pytest.mark.parametrize("equal_nan", [False, True])
def test_what_is_close(equal_nan, device):
    some = np.float32([1, 1 + 5e-6, 1 + 5e-5, 0, 1e-9, np.inf, -np.inf, np.nan, 1e30])
    a, b = (grid.reshape(-1) for grid in np.meshgrid(some, some))
    x, y = Tensor(a, device=device, requires_grad=True), Tensor(b, device=device)
    for options in ({}, {"rtol": 1e-4}, {"atol": 0.1}, {"rtol": 0, "atol": 0}):
        with np.errstate(invalid="ignore"):
            expected = np.isclose(a, b, equal_nan=equal_nan, **options)
            _same(np.isclose(x, y, equal_nan=equal_nan, **options), expected)
            assert cudiff.allclose(x, y, equal_nan=equal_nan, **options) is False
            assert cudiff.allclose(x[expected], b[expected], equal_nan=equal_nan, **options) is True
    _same(cudiff.isclose(Tensor(np.uint8([1, 3]), device=device), [2, 3]), [False, True])


def test_equal_arrays(device):
    x = Tensor(np.float32([1, 2]), device=device)
    assert np.array_equal(x, [1, 2]) is True and cudiff.array_equal(x, x) is True
    assert np.array_equal(x, [1, 3]) is False and np.array_equal(x, [[1, 2], [1, 2]]) is False
    assert np.array_equal(x * np.nan, x * np.nan) is False


@pytest.mark.parametrize("size", [7, 100_003])
def test_sums_and_means_of_truths_and_integers(size, device, rng):
    labels, classes = rng.integers(0, 5, size), rng.integers(0, 5, size)
    right = Tensor(labels, device=device) == Tensor(classes, device=device)
    assert right.sum().dtype == np.int64 and right.sum().item() == (labels == classes).sum()
    assert right.mean().dtype == np.float32
    np.testing.assert_allclose(right.mean().numpy(), (labels == classes).mean(), rtol=1e-6)
    many = Tensor(np.full((2, size), 2**40 + 1), device=device)
    assert many.sum(1).numpy().tolist() == [size * (2**40 + 1)] * 2
    assert many.sum(0).numpy().tolist() == [2**41 + 2] * size


def test_bools_join(device):
    a, b = np.array([True, True, False, False]), np.array([True, False, True, False])
    x, y = Tensor(a, device=device), Tensor(b, device=device)
    for op in (operator.and_, operator.or_, operator.xor):
        _same(op(x, y), op(a, b))
        _same(op(x, True), op(a, True))
        _same(op(False, x), op(a, False))
    _same(~x, ~a)
    _same(np.invert(x), ~a)
    _same(cudiff.where(x & ~y, 1.0, 0.0) > 0, a & ~b)


def test_a_number_is_true_where_it_is_not_0(device):
    x = Tensor(np.float32([0, 0.25, -3, np.nan]), device=device)
    _same(x.astype(bool), [False, True, True, True])
    _same(Tensor(np.array([0, 256, -1]), device=device).astype(bool), [False, True, True])


def test_several_truths_are_not_one(device):
    x = Tensor(np.float32([1, 2]), device=device)
    with pytest.raises(ValueError, match=r"^the truth of a tensor of shape \(2,\) is not one: use x.any\(\)"):
        bool(x == x)
    assert bool(x[:1] == 1) and bool(x[:1] == 2) is False


def test_nothing_is_recorded(device):
    x = Tensor(np.float32([1, 2]), requires_grad=True, device=device)
    for out in (x > 1, x == x, cudiff.isfinite(x), x.any(), ~(x > 1)):
        assert out.is_leaf and not out.requires_grad
    (cudiff.where(x > 1, x, 0.0) * 3).sum().backward()
    assert Tensor(x.grad).numpy().tolist() == [0, 3]


def test_integers_are_close_to_the_last_bit(device):
    a, b = (Tensor(np.array([x, 5], np.int32), device=device) for x in (2**24 + 1, 2**24))
    assert np.isclose(a, b, rtol=0, atol=0).numpy().tolist() == [False, True]
    assert np.isclose(a, b, rtol=0, atol=1).numpy().tolist() == [True, True]
    assert np.isclose(a, b, rtol=1e-7, atol=0).numpy().tolist() == [True, True]
    low = Tensor(np.uint8([3, 250]), device=device)
    assert np.isclose(low, Tensor(np.uint8([5, 249]), device=device), atol=1).numpy().tolist() == [False, True]
