"""Creation by NumPy's names: values, dtypes, devices, and NumPy's own functions with and without tensors."""

import ml_dtypes
import numpy as np
import pytest

import cudiff
from cudiff import CudiffError, Tensor


@pytest.mark.parametrize("shape", [(), 3, (2, 3), [4, 1], (0, 2)], ids=str)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16, np.int32, np.int64, np.bool_])
def test_one_value(shape, dtype, device):
    for name in ("zeros", "ones"):
        out, expected = getattr(cudiff, name)(shape, dtype, device), getattr(np, name)(shape, dtype)
        assert out.device == device and out.dtype == dtype and not out.requires_grad
        np.testing.assert_array_equal(out.numpy(), expected)
    out = cudiff.full(shape, 7, dtype, device)
    assert out.device == device and out.dtype == dtype
    np.testing.assert_array_equal(out.numpy(), np.full(shape, 7, dtype))
    out = cudiff.empty(shape, dtype, device)
    assert (out.shape, out.dtype, out.device) == (np.empty(shape).shape, dtype, device)


def test_dtypes_where_none_is_given():
    for out in (cudiff.zeros(2), cudiff.ones(2), cudiff.empty(2), cudiff.eye(2), cudiff.linspace(0, 1, 3),
                cudiff.full(2, 0.5), cudiff.full(2, np.float32(3)), cudiff.arange(0, 1, 0.25), cudiff.arange(2.0)):
        assert out.dtype == np.float32 and out.device == "cpu"
    for out in (cudiff.zeros(2, None), cudiff.ones(2, dtype=None), cudiff.empty(2, None), cudiff.eye(2, dtype=None)):
        assert out.dtype == np.float32
    assert cudiff.full(2, 3).dtype == cudiff.arange(3).dtype == np.int64
    assert cudiff.full(2, True).dtype == np.bool_


def test_large_integers_are_exact(device):
    assert cudiff.full(3, 2**53 + 1, device=device).numpy().tolist() == [2**53 + 1] * 3


@pytest.mark.parametrize("args", [(5,), (2, 5), (0, 1, 0.3), (5, 0, -2), (0,), (3, 1)], ids=str)
def test_arange(args, device):
    out = cudiff.arange(*args, device=device)
    assert out.device == device
    np.testing.assert_array_equal(out.numpy(), np.arange(*args).astype(out.dtype))
    assert cudiff.arange(*args, dtype=np.int32, device=device).dtype == np.int32


@pytest.mark.parametrize("args, named", [((0, 1), {}), ((-1, 2, 7), {}), ((0, 1, 4), {"endpoint": False}),
                                         ((3, 3, 1), {}), ((0, 1, 0), {}), ((1, 0, 5), {"dtype": "float16"})], ids=str)
def test_linspace(args, named, device):
    out = cudiff.linspace(*args, device=device, **named)
    assert out.device == device
    expected = np.linspace(*args, **({"dtype": "float32"} | named))
    assert out.dtype == expected.dtype
    np.testing.assert_array_equal(out.numpy(), expected)


@pytest.mark.parametrize("args", [(3,), (2, 4), (4, 2, 1), (3, 3, -1), (0,)], ids=str)
def test_eye(args, device):
    out = cudiff.eye(*args, device=device)
    assert out.device == device
    np.testing.assert_array_equal(out.numpy(), np.eye(*args))


@pytest.mark.parametrize("namespace", [np, cudiff], ids=lambda m: m.__name__)
def test_like_another(namespace, device):
    x = Tensor(np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16), device=device, requires_grad=True)
    for out, value in ((namespace.zeros_like(x), 0), (namespace.ones_like(x), 1), (namespace.full_like(x, 2.5), 2.5)):
        assert isinstance(out, Tensor) and (out.dtype, out.device, out.requires_grad) == (x.dtype, device, False)
        np.testing.assert_array_equal(out.numpy(), np.full((2, 3), value, x.dtype))
    out = namespace.empty_like(x, dtype=np.int32)
    assert (out.shape, out.dtype, out.device) == ((2, 3), np.int32, device)
    assert namespace.zeros_like(x, dtype=np.float32, device="cpu").device == "cpu"
    assert namespace.full_like(x, 2.5, dtype=np.int64).numpy().tolist() == [[2] * 3] * 2


def test_numpys_own_stay_numpys():
    for out in (np.zeros(2), np.ones(2), np.full(2, 3), np.arange(3), np.eye(2), np.linspace(0, 1, 2), np.empty(1),
                np.zeros_like(np.ones(2))):
        assert type(out) is np.ndarray
    assert cudiff.zeros_like(np.ones(2)).dtype == np.float64


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16, np.int32, np.int64, np.bool_])
def test_nothing_is_copied_to_the_gpu(host_of, dtype):
    """A captured function may make them."""
    host = host_of(True)
    host.cuda.get_current_stream().is_capturing = lambda: True
    x = Tensor(host.zeros((2, 3), dtype))
    for name in ("zeros_like", "empty_like", "ones_like", "tril"):
        out = getattr(cudiff, name)(x)
        assert (out.device, out.dtype, out.shape) == ("cuda", x.dtype, (2, 3))
    for out in (cudiff.full_like(x, 3), cudiff.arange(3, dtype=dtype, device="cuda"), cudiff.full(2, 1, dtype, "cuda"),
                cudiff.linspace(0, 1, 3, dtype=dtype, device="cuda"), cudiff.eye(3, dtype=dtype, device="cuda")):
        assert (out.device, out.dtype) == ("cuda", dtype)


@pytest.mark.gpu
def test_made_in_a_captured_function():
    def made(x):
        return np.tril(x + cudiff.ones_like(x) * 2 + cudiff.eye(3, device="cuda") + cudiff.arange(3.0, device="cuda")
                + cudiff.linspace(0, 1, 3, device="cuda") + cudiff.full((3, 3), 0.5, device="cuda"))

    captured = cudiff.capture(made)
    for value in range(6):
        out = captured(Tensor(np.full((3, 3), value, np.float32), device="cuda"))
    expected = np.tril(5 + 2 + np.eye(3) + np.arange(3) + np.linspace(0, 1, 3) + 0.5)
    np.testing.assert_allclose(out.numpy(), expected)


@pytest.mark.parametrize("call, message", [
    (lambda: cudiff.zeros((2, -1)), "sizes are not negative"), (lambda: cudiff.full(-2, 1.0), "sizes are not negative"),
    (lambda: cudiff.zeros(2.5), "integer"), (lambda: cudiff.zeros(2, "complex64"), "a tensor holds real numbers"),
    (lambda: cudiff.full(2, Tensor([1.0])), "full fills with one number, not Tensor: broadcast_to"),
    (lambda: cudiff.arange(0, 2, 0), "a step that is not 0"), (lambda: cudiff.ones(2, device="tpu"), "unknown device"),
    (lambda: np.linspace(Tensor(0.0), 1, 3), "linspace takes numbers, not Tensor, int"),
    (lambda: cudiff.arange(Tensor(3)), "arange takes numbers"), (lambda: cudiff.linspace(0, 1, -2), "non-negative"),
    (lambda: cudiff.full(2, 2**40, np.int8), "int8"),
    (lambda: cudiff.zeros(2, 3), r"^dtype is 3: a shape of several axes is one argument, zeros\(\(2, 3\)\)$"),
    (lambda: cudiff.empty(2, 3), "a shape of several axes"), (lambda: cudiff.ones(2, 3), "a shape of several axes"),
])
def test_what_is_refused(call, message):
    with pytest.raises((TypeError, ValueError, OverflowError, CudiffError), match=message):
        call()


def test_float64_stays_on_the_cpu(host_of):
    host_of(True)
    for make in (cudiff.zeros, cudiff.ones, cudiff.empty, cudiff.eye, cudiff.arange):
        assert make(2, dtype=np.float64).dtype == np.float64
        with pytest.raises(CudiffError, match="float64 arrays stay on the CPU"):
            make(2, dtype=np.float64, device="cuda")
