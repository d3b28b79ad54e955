import ml_dtypes
import numpy as np
import pytest

import cudiff
from cudiff import Tensor, ops, threads
from cudiff.ops import elementwise
from tests.check import check_op, relative_error, torch

# name, PyTorch's function, and how standard normal numbers become inputs of the domain, away from kinks
ANY = lambda x: x  # noqa: E731
POSITIVE = lambda x: np.abs(x) + 0.2  # noqa: E731
NOT_ZERO = lambda x: x + 0.1 * np.sign(x)  # noqa: E731
FUNCTIONS = [
    ("negative", lambda x: -x, ANY),
    ("exp", lambda x: x.exp(), ANY),
    ("log", lambda x: x.log(), POSITIVE),
    ("sqrt", lambda x: x.sqrt(), POSITIVE),
    ("exp2", lambda x: x.exp2(), ANY),
    ("log2", lambda x: x.log2(), POSITIVE),
    ("log10", lambda x: x.log10(), POSITIVE),
    ("cbrt", lambda x: torch.sign(x) * x.abs() ** (1 / 3), NOT_ZERO),
    ("abs", lambda x: x.abs(), NOT_ZERO),
    ("square", lambda x: x.square(), ANY),
    ("sign", lambda x: x.sign(), NOT_ZERO),
    ("floor", lambda x: x.floor(), ANY),
    ("ceil", lambda x: x.ceil(), ANY),
    ("round", lambda x: x.round(), ANY),
    ("log1p", lambda x: x.log1p(), POSITIVE),
    ("expm1", lambda x: x.expm1(), ANY),
    ("relu", lambda x: x.relu(), NOT_ZERO),
    ("sigmoid", lambda x: x.sigmoid(), ANY),
    ("silu", lambda x: torch.nn.functional.silu(x), ANY),
    ("gelu", lambda x: torch.nn.functional.gelu(x), ANY),
]
SHAPES = [(), (1,), (7,), (8,), (3, 5, 2), (2, 33, 17)]


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-6), ("bfloat16", 4e-3)])
def test_an_array_may_begin_at_any_element(device, dtype, tolerance, rng):
    """Packs of 16 bytes are read only where all arrays begin at a multiple of them."""
    longer = Tensor(rng.standard_normal(70), dtype=dtype, device=device)
    x = Tensor(longer.data[3:], requires_grad=True)
    (y := cudiff.exp(x)).backward(longer.data[1:68])
    expected = np.exp(longer.numpy()[3:].astype(np.float64))
    assert relative_error(y.numpy().astype(np.float64), expected) < tolerance
    dx = Tensor(x.grad).numpy().astype(np.float64)
    assert relative_error(dx, expected * longer.numpy()[1:68].astype(np.float64)) < tolerance


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name, torch_fn, domain", FUNCTIONS, ids=[f[0] for f in FUNCTIONS])
def test_function(name, torch_fn, domain, shape, device, rng):
    x = np.asarray(domain(rng.standard_normal(shape) * 2))
    check_op(getattr(cudiff, name), x, device=device, torch_fn=torch_fn, dtypes=("float32", "bfloat16", "float16"))


@pytest.mark.parametrize("name, torch_fn, domain", FUNCTIONS, ids=[f[0] for f in FUNCTIONS])
def test_gradient_is_added_to_what_is_there(name, torch_fn, domain, device, rng):
    x = domain(rng.standard_normal((5, 19)))
    fn = getattr(cudiff, name)
    check_op(lambda x: fn(x) + fn(x * 1.0) * 2.0 + x, x, device=device, dtypes=("float32",))


def test_round_takes_decimals_and_halves_go_to_the_even_number(device):
    x = Tensor(np.float32([0.5, 1.5, -2.5, 2.26]), device=device)
    assert x.round().numpy().tolist() == [0, 2, -2, 2]
    np.testing.assert_array_equal(np.round(x, 1).numpy(), np.round(x.numpy(), 1))
    assert np.floor(Tensor(np.array([1, 4]))).dtype == np.int64


@pytest.mark.parametrize("name", ["sigmoid", "silu", "gelu", "tanh"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_far_inputs_saturate_without_nan(name, dtype, device):
    x = Tensor(np.asarray([-1e4, -200, -90, 0, 90, 200, 1e4], dtype), requires_grad=True, device=device)
    out = getattr(cudiff, name)(x)
    assert out.dtype == dtype
    out.backward(Tensor(np.ones(7, dtype), device=device))
    values, slopes = out.numpy().astype(np.float64), Tensor(x.grad).numpy().astype(np.float64)
    assert np.isfinite(values).all() and np.isfinite(slopes).all()
    assert values[0] == (-1 if name == "tanh" else 0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("shape", [(2, 5, 7, 24), (3, 1, 1, 8), (2, 28, 28, 64), (1, 9, 2, 136)], ids=str)
def test_relus_backward_leaves_its_sums_over_the_pixels(shape, dtype, rng):
    x = Tensor(rng.standard_normal(shape).astype(dtype), requires_grad=True, device="cuda")
    dout = Tensor(rng.standard_normal(shape).astype(dtype), device="cuda")
    node, _ = cudiff.relu(x)._source
    (dx,) = node.function.backward_cuda(node.ctx, dout.data, needs=(True,), into=(None,))
    expected = np.where(x.numpy() > 0, dout.numpy(), 0).astype(dtype)
    np.testing.assert_array_equal(Tensor(dx).numpy(), expected)
    sums = Tensor(node.ctx.din_statistics[0].sums).numpy()
    assert sums.shape == (shape[0], 1, shape[3])
    assert relative_error(sums[:, 0], expected.astype(np.float64).sum((1, 2))) < 1e-6


@pytest.mark.parametrize("pooled", [False, True])
def test_the_bias_below_a_relu(pooled, device, rng):
    """Its gradient is the sum that the ReLU's, or the pooling's, backward leaves."""
    arrays = [rng.standard_normal(shape) for shape in ((2, 6, 8, 8), (16, 3, 3, 8), (16,))]

    def fn(x, weight, bias):
        out = cudiff.conv2d(x, weight, bias, padding=1)
        return cudiff.relu(cudiff.max_pool2d(out, 2) if pooled else out)

    check_op(fn, *arrays, device=device, dtypes=("float32",))


def test_nan_passes_through(device):
    x = Tensor(np.float32([np.nan, 1]), device=device)
    for fn in (cudiff.relu, cudiff.abs, lambda x: cudiff.clip(x, 0, 1)):
        assert np.isnan(fn(x).numpy()[0]) and fn(x).numpy()[1] == 1


def test_unaligned_slice(device, rng):
    x = rng.standard_normal(1000).astype(np.float32)
    for start in (1, 2, 3):
        part = Tensor(x, device=device)[start:]
        assert relative_error(cudiff.exp(part).numpy(), np.exp(x[start:])) < 1e-6


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", ["exp", "square", "gelu", "softplus"])
def test_large_arrays_are_computed_by_blocks(monkeypatch, name, dtype, rng):
    """On all cores, each of them by blocks; of arrays whose axes lie in another order too."""
    values = rng.standard_normal((7, 201, 3)).astype(dtype)
    dout = rng.standard_normal((3, 201, 7)).astype(dtype)

    def run():
        x = Tensor(values.T, requires_grad=True)
        out = getattr(ops, name)(x)
        out.backward(dout)
        return out.numpy(), x.grad

    expected = run()
    monkeypatch.setattr(elementwise, "BLOCK", 64)
    monkeypatch.setattr(threads, "LEAST_BYTES", 1000)
    monkeypatch.setattr(threads, "PART_BYTES", 1000)
    for found, before in zip(run(), expected, strict=True):
        assert found.dtype == before.dtype and found.shape == before.shape
        np.testing.assert_allclose(found.astype(np.float64), before.astype(np.float64), rtol=1e-6)


def test_low_precision_computes_in_float32(rng):
    x = rng.standard_normal(100).astype(ml_dtypes.bfloat16)
    expected = np.exp(x.astype(np.float32)).astype(ml_dtypes.bfloat16)
    assert np.array_equal(cudiff.exp(Tensor(x)).numpy(), expected)


def test_integers_become_float32_where_they_must():
    x = Tensor(np.array([1, 4], np.int32))
    assert cudiff.sqrt(x).dtype == np.float32
    assert cudiff.square(x).dtype == np.int32
    assert (-x).numpy().tolist() == [-1, -4]


MASKING = {
    "relu": (ops.relu, [-1, 0, 2], [0, 0, 1]), "abs": (ops.abs, [-1, 0, 2], [-1, 0, 1]),
    "clip": (lambda x: ops.clip(x, 0, 1), [-1, 0.5, 2], [0, 1, 0]),
    "maximum": (lambda x: ops.maximum(x, Tensor(np.zeros(3, np.float32), device=x.device)), [-1, 0, 2], [0, 0.5, 1]),
    "minimum": (lambda x: ops.minimum(0.0, x), [-1, 0, 2], [1, 0.5, 0]),
    "max": (lambda x: ops.max(x.reshape(1, 3), 1, keepdims=True) + np.zeros((1, 3), np.float32), [-1, 0, 2], [0, 0, 3]),
    "min": (lambda x: ops.min(x.reshape(1, 3), 1, keepdims=True) + np.zeros((1, 3), np.float32), [2, -1, 2], [0, 3, 0]),
    "floor": (ops.floor, [-1.5, 0, 2], [0, 0, 0]), "floor_divide": (lambda x: x // 2.0, [-1, 0, 2], [0, 0, 0]),
    "embedding": (lambda x: ops.embedding(np.array([-1, 2, 2]), x.reshape(3, 1)), [1, 1, 1], [0, 0, 2]),
}


@pytest.mark.parametrize("operation, values, slopes", MASKING.values(), ids=MASKING)
@pytest.mark.parametrize("infinite", [np.inf, -np.inf])
def test_what_has_no_gradient_has_none_of_an_infinite_one_too(device, operation, values, slopes, infinite):
    x = Tensor(np.float32(values), requires_grad=True, device=device)
    out = operation(x)
    with np.errstate(all="ignore"):
        out.backward(Tensor(np.full(out.shape, infinite, np.float32), device=device))
        expected = np.where(np.array(slopes) == 0, 0, np.float32(slopes) * infinite)
    np.testing.assert_array_equal(Tensor(x.grad).numpy(), expected)


@pytest.mark.parametrize("operation, values, slopes", MASKING.values(), ids=MASKING)
def test_nor_does_a_gradient_that_is_recorded(device, operation, values, slopes):
    with np.errstate(all="ignore"):
        infinite = cudiff.grad(lambda x: (operation(x) * np.inf).sum(), create_graph=True)
        found = infinite(Tensor(np.float32(values), requires_grad=True, device=device)).numpy()
        expected = np.where(np.array(slopes) == 0, 0, np.float32(slopes) * np.inf)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", ["relu", "abs", "clip", "maximum", "minimum", "max", "min"])
def test_nan_that_is_masked_has_gradient_0(device, name):
    x = Tensor(np.full(3, np.nan, np.float32), requires_grad=True, device=device)
    MASKING[name][0](x).sum().backward()
    assert Tensor(x.grad).tolist() == [0, 0, 0]
