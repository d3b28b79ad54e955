"""Integers wrap around, divide and shift as NumPy's do, on a GPU too."""

import operator

import numpy as np
import pytest

import cudiff
from cudiff import Tensor

DTYPES = [np.int32, np.int64, np.uint8]
ARITHMETIC = ["add", "subtract", "multiply", "floor_divide", "remainder", "maximum", "minimum"]
BITS = ["bitwise_and", "bitwise_or", "bitwise_xor"]
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of a division by 0


def _same(out, expected, device):
    assert isinstance(out, Tensor) and out.device == device and not out.requires_grad
    assert out.dtype == expected.dtype
    np.testing.assert_array_equal(out.numpy(), expected)


def _values(dtype, rng, shape):
    """Small and large ones, 0 and both ends."""
    ends = np.iinfo(dtype)
    chosen = np.array([ends.min, ends.min + 1, 0, 1, 2, 7, ends.max - 1, ends.max, *([-1, -2, -7] if ends.min else [])])
    values = np.where(rng.uniform(size=shape) < 0.5, rng.choice(chosen, shape), rng.integers(0, 20, shape))
    return np.asarray(values).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shapes", [
    ((33, 7), (33, 7)), ((5, 1, 8), (3, 1)), ((), (9,)), ((0, 3), (3,)), ((1031,), (1,)),
], ids=str)
@pytest.mark.parametrize("name", ARITHMETIC + BITS)
def test_two_tensors(name, shapes, dtype, device, rng):
    a, b = (_values(dtype, rng, shape) for shape in shapes)
    out = getattr(cudiff, name)(Tensor(a, device=device), Tensor(b, device=device))
    _same(out, getattr(np, name)(a, b), device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", [
    operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.and_, operator.or_,
    operator.xor,
])
def test_operators_with_numbers(op, dtype, device, rng):
    values = _values(dtype, rng, 50)
    x = Tensor(values, device=device)
    for number in (0, 1, 7, *([] if dtype is np.uint8 else [-1, -3])):
        _same(op(x, number), op(values, dtype(number)), device)
        _same(op(number, x), op(dtype(number), values), device)
    for number in (np.int64(3), np.array(3)):  # of NumPy's integers the dtype counts
        _same(op(x, number), op(values.astype(np.int64), np.int64(3)), device)
        _same(op(number, x), op(np.int64(3), values.astype(np.int64)), device)
    x = Tensor(np.array([3], dtype), device=device)
    for number in (2**70, -1 if dtype is np.uint8 else -(2**70)):
        with pytest.raises(OverflowError, match=f" is no {np.dtype(dtype)}: use .astype"):
            op(x, number)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_tensor(dtype, device, rng):
    values = _values(dtype, rng, (3, 41))
    x = Tensor(values, device=device)
    for name in ("negative", "abs", "sign", "square", "invert"):
        _same(getattr(cudiff, name)(x), getattr(np, name)(values), device)
    for same in (np.floor(x), np.ceil(x), x.round(), np.round(x, 2)):
        _same(same, values, device)
    assert x.max().dtype == dtype and x.max().item() == values.max() and x.min().item() == values.min()
    _same(x.max(0), values.max(0), device)
    _same(x.min(1), values.min(1), device)


@pytest.mark.parametrize("dtype", DTYPES)
def test_powers(dtype, device):
    values = np.array([0, 1, 2, 3, 7, 15] + ([] if dtype is np.uint8 else [-1, -2, -7]), dtype)
    x = Tensor(values, device=device)
    for exponent in (0, 1, 2, 3, 10, 31):
        _same(x**exponent, np.power(values, dtype(exponent)), device)
    exponents = np.arange(len(values)).astype(dtype)
    _same(x ** Tensor(exponents, device=device), values**exponents, device)
    _same(np.power(2, x.clip(0, 7)), np.power(dtype(2), values.clip(0, 7)), device)
    assert (x**0.5).dtype == (x**2.0).dtype == np.float32
    with pytest.raises(ValueError, match="integers to a negative power are no integers"):
        x**-1


@pytest.mark.parametrize("dtype", DTYPES)
def test_shifts(dtype, device):
    values = np.array([0, 1, 5, 100, np.iinfo(dtype).max, np.iinfo(dtype).min], dtype)
    x = Tensor(values, device=device)
    for places in (0, 1, 5, 7, 31, 32, 63, 64, 100):
        _same(x << places, np.left_shift(values, dtype(places)), device)
        _same(np.right_shift(x, places), np.right_shift(values, dtype(places)), device)
    _same(3 << x.clip(0, 5), 3 << values.clip(0, 5), device)
    if dtype is not np.uint8:
        _same(x >> Tensor(np.full(6, -1, dtype), device=device), np.where(values < 0, -1, 0).astype(dtype), device)


def test_dtypes_meet_as_in_numpy(device):
    given = [np.array([1, 2, 200], dtype) for dtype in (*DTYPES, np.bool_)]
    for a in given:
        for b in given:
            x, y = Tensor(a, device=device), Tensor(b, device=device)
            _same(x + y, a + b, device)
            _same(x & y, a & b, device)
            _same(cudiff.maximum(x, y), np.maximum(a, b), device)
            assert (x / y).dtype == (x * 0.5).dtype == np.float32
    assert (Tensor(given[0], device=device) + Tensor(np.float32([1]), device=device)).dtype == np.float32


def test_bools(device):
    a, b = np.array([True, True, False, False]), np.array([True, False, True, False])
    x, y = Tensor(a, device=device), Tensor(b, device=device)
    for name in ("add", "multiply", "maximum", "minimum", *BITS):
        _same(getattr(cudiff, name)(x, y), getattr(np, name)(a, b), device)
    _same(~x, ~a, device)
    _same(abs(x), a, device)
    _same(x.max(), np.asarray(True), device)
    for refused in (lambda: x - y, lambda: -x, lambda: x // y, lambda: x << y, lambda: np.sign(x), lambda: x**y):
        with pytest.raises(TypeError, match=r"takes integers, not bools: use .astype\('int32'\)"):
            refused()


@pytest.mark.parametrize("refused", [
    lambda x: x & 1, lambda x: ~x, lambda x: 1.5 ^ (x > 0), lambda x: x.astype("int32") | x,
])
def test_floats_have_no_bits(refused, device):
    with pytest.raises(TypeError, match=r"takes bools and integers, not float\d\d: compare first"):
        refused(Tensor(np.float32([1, 2]), device=device))


@pytest.mark.parametrize("refused", [lambda x: x << 1, lambda x: 3 >> x])
def test_floats_are_not_shifted(refused, device):
    with pytest.raises(TypeError, match=r"takes integers, not float32: use .astype\('int32'\)"):
        refused(Tensor(np.float32([1, 2]), device=device))


def test_an_exact_number_beside_integers_in_where(device):
    x = Tensor(np.array([1, 2]), device=device)
    _same(cudiff.where(x > 1, x, 2**53 + 1), np.array([2**53 + 1, 2]), device)
    _same(cudiff.where(x > 1, 2**24 + 1, x.astype("int32")), np.array([1, 2**24 + 1], np.int32), device)
    with pytest.raises(OverflowError, match="where: 4294967296 is no int32"):
        cudiff.where(x > 1, x.astype("int32"), 2**32)


def test_clusters_are_counted_and_their_centres_found(device, rng):
    """The steps of k-means that are integers'."""
    points = rng.standard_normal((200, 2)).astype(np.float32)
    x, centres = Tensor(points, device=device), Tensor(points[:3], device=device)
    nearest = ((x[:, None] - centres) ** 2).sum(-1).argmin(1)
    counts = cudiff.zeros(3, np.int64, device).at[nearest].add(1)
    labels, number = nearest.numpy(), np.bincount(nearest.numpy(), minlength=3)
    assert counts.numpy().tolist() == number.tolist() and counts.max().item() == number.max()
    assert ((nearest + 1) % 3).numpy().tolist() == ((labels + 1) % 3).tolist()
    counts += 1
    assert (counts // 2 - 1).numpy().tolist() == ((number + 1) // 2 - 1).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_to_tens(dtype, device):
    values = np.array([0, 4, 5, 15, 25, 26, 99, *([] if dtype is np.uint8 else [123456789, -5, -15, -26])], dtype)
    _same(np.round(Tensor(values, device=device), -1), np.round(values, -1), device)
