import ml_dtypes
import numpy as np
import pytest

import cudiff
from cudiff import Tensor
from tests.check import check_op, torch

SHAPES = [
    ((), ()), ((1,), (7,)), ((8,), (8,)), ((3, 5), (3, 5)), ((2, 33), ()), ((4, 1), (1, 6)), ((2, 3, 4, 8), (8,)),
    ((2, 1, 1, 1), (2, 3, 5, 7)), ((2, 3, 16), (2, 1, 16)), ((5, 1, 4, 1), (1, 3, 1, 2)), ((64, 24), (64, 1)),
    ((2, 1, 3, 1, 2, 1, 2), (1, 2, 1, 3, 1, 2, 1)),
]
FUNCTIONS = [
    ("add", lambda a, b: a + b), ("subtract", lambda a, b: a - b), ("multiply", lambda a, b: a * b),
    ("divide", lambda a, b: a / b), ("maximum", lambda a, b: torch.maximum(a, b)),
    ("minimum", lambda a, b: torch.minimum(a, b)), ("remainder", lambda a, b: a % b),
    ("floor_divide", lambda a, b: torch.div(a, b, rounding_mode="floor")),
    ("arctan2", lambda a, b: torch.atan2(a, b)), ("hypot", lambda a, b: torch.hypot(a, b)),
]


def _operands(rng, shapes):
    """Numbers at least 0.2 from 0 and 0.05 from each other, so that quotients and comparisons are differentiable."""
    a, b = (np.asarray(rng.integers(1, 12, shape) * rng.choice([-0.2, 0.2], shape)) for shape in shapes)
    return a, np.asarray(b + 0.07 * np.sign(b))


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("name, torch_fn", FUNCTIONS, ids=[f[0] for f in FUNCTIONS])
def test_tensors(name, torch_fn, shapes, device, rng):
    if device == "cuda" and len(shapes[0]) > 6:
        pytest.skip("over 6 axes")
    a, b = _operands(rng, shapes)
    dtypes = ("float32", "bfloat16", "float16")
    check_op(getattr(cudiff, name), a, b, device=device, torch_fn=torch_fn, dtypes=dtypes)
    check_op(getattr(cudiff, name), b, a, device=device, torch_fn=torch_fn, dtypes=dtypes)


@pytest.mark.parametrize("shapes", SHAPES[:-1], ids=str)
def test_power(shapes, device, rng):
    a, b = np.asarray(rng.uniform(0.3, 2, shapes[0])), np.asarray(rng.uniform(-2, 2, shapes[1]))
    check_op(cudiff.power, a, b, device=device, torch_fn=lambda a, b: a**b, dtypes=("float32", "bfloat16"))


@pytest.mark.parametrize("number", [2.5, 3, -1])
@pytest.mark.parametrize("shape", [(), (7,), (4, 16)], ids=str)
def test_numbers_on_either_side(shape, number, device, rng):
    x = np.asarray(rng.uniform(0.3, 2, shape))
    for fn in (
        lambda x: x + number, lambda x: number + x, lambda x: x - number, lambda x: number - x, lambda x: x * number,
        lambda x: number * x, lambda x: x / number, lambda x: number / x, lambda x: x**number,
    ):
        check_op(fn, x, device=device, torch_fn=fn)
    if number > 0:
        check_op(lambda x: number**x, x, device=device, torch_fn=lambda x: number**x)


def test_numbers_in_comparisons(device, rng):
    x = rng.integers(-9, 9, (5, 9)) * 0.1 + 0.05
    check_op(lambda x: cudiff.maximum(x, 0.3), x, device=device, torch_fn=lambda x: x.clamp(min=0.3))
    check_op(lambda x: cudiff.minimum(0.3, x), x, device=device, torch_fn=lambda x: x.clamp(max=0.3))


def test_power_at_zero(device):
    x = Tensor(np.float32([0, 0, 2]), requires_grad=True, device=device)
    y = Tensor(np.float32([0, 3, 2]), requires_grad=True, device=device)
    (x**y).sum().backward()
    assert Tensor(x.grad).numpy().tolist() == [0, 0, 4]
    assert np.allclose(Tensor(y.grad).numpy(), [0, 0, 4 * np.log(2)])


def test_a_hypotenuse_does_not_overflow(device):
    x = Tensor(np.float32([3e30, 3]), device=device)
    np.testing.assert_allclose(np.hypot(x, x / 3 * 4).numpy(), np.float32([5e30, 5]), rtol=1e-6)


def test_equals_share_the_gradient(device):
    for fn in (cudiff.maximum, cudiff.minimum):
        a = Tensor(np.float32([1, 2, 3]), requires_grad=True, device=device)
        b = Tensor(np.float32([1, 0, 3]), requires_grad=True, device=device)
        fn(a, b).sum().backward()
        assert (Tensor(a.grad).numpy() + Tensor(b.grad).numpy()).tolist() == [1, 1, 1]
        assert Tensor(a.grad).numpy()[[0, 2]].tolist() == [0.5, 0.5]


def test_nan_wins(device):
    a, b = (Tensor(np.float32(values), device=device) for values in ([np.nan, 1], [1, np.nan]))
    assert np.isnan(cudiff.maximum(a, b).numpy()).all() and np.isnan(cudiff.minimum(a, b).numpy()).all()


def test_gradients_are_added_to_what_is_there(device, rng):
    a, b = rng.uniform(0.5, 2, (6, 8)), rng.uniform(0.5, 2, (6, 8))
    check_op(lambda a, b: a * b + a / b - b * b + (a + b) * a - a**b - b, a, b, device=device, dtypes=("float32",))


def test_numbers_are_weak(device):
    for dtype in (np.float32, ml_dtypes.bfloat16, np.float16):
        x = Tensor(np.ones(3, dtype), device=device)
        for out in (x + 1, 2.5 * x, x / 3, 1 - x, x**2.5, np.float64(2) * x):
            assert out.dtype == dtype


def test_mixed_dtypes_and_their_gradients(device, rng):
    low = Tensor(rng.standard_normal((3, 4)).astype(ml_dtypes.bfloat16), requires_grad=True, device=device)
    full = Tensor(rng.standard_normal(4).astype(np.float32), requires_grad=True, device=device)
    out = low * full
    assert out.dtype == np.float32
    out.sum().backward()
    assert low.grad.dtype == ml_dtypes.bfloat16 and full.grad.dtype == np.float32


def test_integers():
    x = Tensor(np.array([1, 2, 3], np.int32))
    assert (x + 1).dtype == np.int32 and (x / 2).dtype == np.float32 and (x * 0.5).dtype == np.float32
    assert (x * 2 - 1).numpy().tolist() == [1, 3, 5]


def test_arrays_beside_tensors(device):
    x = Tensor(np.ones(3, np.float32), requires_grad=True, device=device)
    left = np.arange(3, dtype=np.float64) * x
    assert isinstance(left, Tensor) and left.numpy().tolist() == [0, 1, 2] and left.dtype == np.float32
    assert (x + [1.0, 2.0, 3.0]).numpy().tolist() == [2, 3, 4]
    assert np.where([True, False, True], x, np.zeros(3)).numpy().tolist() == [1, 0, 1]
    assert cudiff.where(x > 0, np.ones(3), np.zeros(3)).device == device
    left.sum().backward()
    assert Tensor(x.grad).numpy().tolist() == [0, 1, 2]
    whole = Tensor(np.array([1, 2, 3], np.int32), device=device)
    assert (whole + np.array([1, 2, 3], np.int32)).dtype == np.int32 and (whole * [2, 2, 2]).dtype == np.int64
    assert (whole + np.ones(3)).dtype == (np.float32 if device == "cuda" else np.float64)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.int64])
def test_whole_quotients_and_remainders_have_numpys_signs(dtype):
    a, b = (grid.reshape(-1) for grid in np.meshgrid(np.array([-7, -6, 0, 1, 7], dtype), np.array([-3, 2, 3], dtype)))
    x, y = Tensor(a), Tensor(b)
    for out, expected in [(x // y, a // b), (x % y, a % b), (x // 2, a // 2), (7 % y, 7 % b), (np.mod(x, y), a % b)]:
        assert out.dtype == dtype and out.numpy().tolist() == expected.tolist()


def test_a_quotient_just_below_a_whole_number(device):
    """1 / 0.1 is rounded up to 10, and 0.1 is a little more than a tenth."""
    x, by = Tensor(np.float32([1, -1, 5, -5]), device=device), np.float32([0.1, 0.1, np.inf, np.inf])
    y = Tensor(by, device=device)
    assert (x // y).numpy().tolist() == [9, -10, 0, -1]
    np.testing.assert_array_equal((x % y).numpy(), np.float32([1, -1, 5, -5]) % by)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_over_zero():
    x = Tensor(np.float32([1, -1]))
    assert (x // 0.0).numpy().tolist() == [np.inf, -np.inf] and np.isnan((x % 0.0).numpy()).all()
    whole = Tensor(np.array([3, -3]))
    assert (whole // 0).numpy().tolist() == (whole % 0).numpy().tolist() == [0, 0]


def test_shapes_that_do_not_broadcast(device):
    with pytest.raises(ValueError, match="broadcast"):
        Tensor(np.ones((2, 3)), dtype=np.float32, device=device) + Tensor(np.ones(2), dtype=np.float32, device=device)


@pytest.mark.parametrize("shapes", [
    ((3, 5), (3, 5), (3, 5)), ((3, 1), (5,), ()), ((16,), (4, 16), (4, 1)), ((1031,), (1031,), (1031,)),
], ids=str)
def test_where(shapes, device, rng):
    mask = rng.integers(0, 2, shapes[0]).astype(np.uint8)
    a, b = (np.asarray(rng.standard_normal(shape)) for shape in shapes[1:])
    check_op(cudiff.where, mask, a, b, device=device, torch_fn=lambda m, a, b: torch.where(m != 0, a, b))
    check_op(lambda m, a: cudiff.where(m, a, 0.5), mask, a, device=device)
    check_op(lambda m, a, b: cudiff.where(m, -1, a) * a + b, mask, a, b, device=device)


def test_where_keeps_nan_out_of_the_other_side(device):
    x = Tensor(np.float32([np.nan, 2]), requires_grad=True, device=device)
    mask = Tensor(np.array([False, True]), device=device)
    out = cudiff.where(mask, x, 0.0)
    out.sum().backward()
    assert out.numpy().tolist() == [0, 2] and Tensor(x.grad).numpy().tolist() == [0, 1]


def test_where_needs_a_mask(device):
    with pytest.raises(TypeError, match="bool"):
        cudiff.where(Tensor(np.ones(2, np.float32), device=device), 1.0, 2.0)


@pytest.mark.gpu
def test_unaligned_operands(rng):
    a = rng.standard_normal(1001).astype(np.float32)
    memory = Tensor(a, device="cuda").data
    left, right = Tensor(memory[1:]), Tensor(memory[:-1])
    assert np.array_equal((left + right).numpy(), a[1:] + a[:-1])


def test_booleans_and_integers_are_integers():
    x = Tensor(np.array([True, False]))
    np.testing.assert_array_equal((x * 3).numpy(), [3, 0])
    np.testing.assert_array_equal((1 + x).numpy(), [2, 1])
    assert (x * 3).dtype == np.int64


def test_power_at_zero_of_negative_exponents(device):
    """x^c and its slopes where PyTorch's are: by hand, in the order of c = -1, -0.5, 0, 0.5, 1, 2."""
    inf = np.inf
    c = Tensor(np.float32([-1, -0.5, 0, 0.5, 1, 2]), requires_grad=True, device=device)
    x = Tensor(np.zeros(6, np.float32), requires_grad=True, device=device)
    out = cudiff.power(x, c)
    out.sum().backward()
    assert out.numpy().tolist() == [inf, inf, 1, 0, 0, 0]
    assert Tensor(x.grad).numpy().tolist() == [-inf, -inf, 0, inf, 1, 0]
    assert Tensor(c.grad).numpy().tolist() == [-inf, -inf, 0, 0, 0, 0]


def test_power_as_in_torch():
    torch = pytest.importorskip("torch")
    values, exponents = np.float64([-2, -0.0, 0, 0.5, 2]), np.float64([-2, -1, -0.5, 0, 0.5, 1, 2, 3])
    a, b = (grid.reshape(-1) for grid in np.meshgrid(values, exponents))
    x, c = Tensor(a, requires_grad=True), Tensor(b, requires_grad=True)
    out = cudiff.power(x, c)
    out.backward(np.ones(a.shape))
    y, d = torch.tensor(a, requires_grad=True), torch.tensor(b, requires_grad=True)
    expected = y**d
    expected.backward(torch.ones(a.shape, dtype=torch.float64))
    np.testing.assert_allclose(out.numpy(), expected.detach().numpy(), rtol=1e-14)
    np.testing.assert_allclose(x.grad, y.grad.numpy(), rtol=1e-14)
    np.testing.assert_allclose(c.grad, d.grad.numpy(), rtol=1e-14)


@pytest.mark.gpu
def test_numbers_that_float32_does_not_hold_are_infinite():
    x = Tensor(np.float32([1, -2]), device="cuda")
    assert (x * 1e40).numpy().tolist() == [np.inf, -np.inf]
    assert (x < 1e40).numpy().tolist() == (x > -(10**39)).numpy().tolist() == [True, True]
    assert cudiff.clip(x, -1e40, 1e40).numpy().tolist() == [1, -2]
    assert cudiff.huber(x, x + 3, delta=1e40).item() == 4.5


@pytest.mark.parametrize("name, a, b, expected", [
    ("divide", 1e25, 1e20, (1e-20, -1e-15)), ("divide", 1e-25, 1e-24, (1e24, -1e23)),
    ("arctan2", 1e-25, 1e-25, (5e24, -5e24)), ("arctan2", 3e25, 4e25, (1.6e-26, -1.2e-26)),
    ("arctan2", 0.0, 0.0, (0, 0)),
])
def test_gradients_whose_square_float32_does_not_hold(name, a, b, expected, device):
    a, b = (Tensor(np.float32([x]), requires_grad=True, device=device) for x in (a, b))
    getattr(cudiff, name)(a, b).backward()
    np.testing.assert_allclose([Tensor(x.grad).numpy()[0] for x in (a, b)], expected, rtol=1e-5)
