"""Shape functions by NumPy's names: values, dtypes, gradients of gradients, and what is refused."""

import ml_dtypes
import numpy as np
import pytest

import cudiff
from cudiff import Tensor, check_gradient, grad

X = np.arange(24).reshape(2, 3, 4)

CALLS = {
    "swapaxes": [(0, 2), (-1, 1), (1, 1)], "moveaxis": [(0, -1), ((0, 1), (2, 0)), ((2, 0), (0, 1)), (-1, 0)],
    "flip": [(), (1,), ((0, -1),), (-1,)],
    "roll": [(2,), (-25,), (1, 0), (5, -1), ((1, 2), (0, 1)), (1, (0, 2)), ((1, 2), (1, 1)), (4, 2), ((1, 2), 1),
             ((), ()), (1, ())],
    "tile": [(2,), ((2, 1, 3),), ((2, 1, 1, 2),), ((0, 1),), ((),)],
    "repeat": [(2,), (3, 0), (2, -1), ([2, 0, 1], 1), ([0, 0], 0), (0, 2), ([3], 1)],
    "ravel": [()], "diagonal": [(), (1,), (-1, 1, 2), (0, 2, 0), (9,), (-9,), (2, -1, -2)],
    "trace": [(), (1,), (-1, 1, 2), (5,)], "tril": [(), (1,), (-1,), (9,), (-9,)],
    "triu": [(), (1,), (-1,), (9,), (-9,)], "atleast_1d": [()], "atleast_2d": [()],
}
EVERY = [(name, args) for name, calls in CALLS.items() for args in calls]


@pytest.mark.parametrize("name, args", EVERY, ids=str)
def test_values_and_dtypes_are_numpys(name, args, device):
    for x in (X, X % 2 == 0, X.astype(np.float32), X.astype(np.int32), X.astype(ml_dtypes.bfloat16), X[:, :0]):
        if (x.size == 0 and len(args) and args[0] == [2, 0, 1]) or (name == "trace" and device == "cuda"
                                                                    and x.dtype == ml_dtypes.bfloat16):
            continue
        expected = getattr(np, name)(x, *args)
        for out in (getattr(cudiff, name)(Tensor(x, device=device), *args), getattr(np, name)(Tensor(x), *args)):
            assert isinstance(out, Tensor) and out.data.flags.c_contiguous and out.dtype == expected.dtype
            np.testing.assert_array_equal(out.numpy(), expected)


@pytest.mark.parametrize("name, args", EVERY, ids=str)
def test_gradients_of_gradients(name, args, rng):
    x = rng.standard_normal((2, 3, 4))
    check_gradient(lambda x: getattr(np, name)(x, *args) ** 2, x)
    check_gradient(grad(lambda x: np.sum(getattr(np, name)(x, *args) ** 3)), x)


@pytest.mark.parametrize("name", CALLS)
def test_every_call_launches_on_a_gpu_what_it_may(name, host_of):
    for dtype in (np.float32, ml_dtypes.bfloat16, np.int64, np.bool_):
        x = Tensor(host_of(True).asarray(X.astype(dtype)))
        x.requires_grad = x.dtype.kind in "fV"
        for args in CALLS[name]:
            out = getattr(cudiff, name)(x, *args)
            assert out.device == "cuda" and out.shape == getattr(np, name)(X, *args).shape
            if out.requires_grad:
                out.sum().backward()


def test_repeats_may_be_a_tensor(device):
    x = Tensor([1.0, 2.0, 3.0], device=device)
    for times in ([2, 0, 1], [2], 2):
        assert np.repeat(x, Tensor(times)).numpy().tolist() == np.repeat([1, 2, 3], times).tolist()


def test_of_several(device):
    a, b, c = (Tensor(array, device=device) for array in (X, X[:, :1], X[0, 0]))
    for name, given in (("hstack", (a, b)), ("hstack", (c, c)), ("vstack", (a, a)), ("vstack", (c, c))):
        expected = getattr(np, name)([x.numpy() for x in given])
        np.testing.assert_array_equal(getattr(cudiff, name)(given).numpy(), expected)
    np.testing.assert_array_equal(np.hstack([Tensor(1.0), Tensor([2.0])]).numpy(), [1, 2])
    found = np.broadcast_arrays(a, b, c)
    assert isinstance(found, tuple)
    for out, expected in zip(found, np.broadcast_arrays(X, X[:, :1], X[0, 0]), strict=True):
        np.testing.assert_array_equal(out.numpy(), expected)


def test_numbers():
    x = Tensor(3.0)
    for name, args in (("flip", ()), ("roll", (2,)), ("tile", ((2, 2),)), ("repeat", (2,)), ("ravel", ()),
                       ("atleast_1d", ()), ("atleast_2d", ())):
        np.testing.assert_array_equal(getattr(cudiff, name)(x, *args).numpy(), getattr(np, name)(x.numpy(), *args))


def test_a_causal_mask_is_not_nan(device):
    """What is masked away may be infinite."""
    x = Tensor(np.full((2, 2), np.inf, np.float32), device=device)
    assert cudiff.tril(x).numpy().tolist() == [[np.inf, 0], [np.inf, np.inf]]


def test_methods():
    x = Tensor(X)
    assert x.swapaxes(0, 2).shape == (4, 3, 2) and x.ravel().shape == (24,) and x.repeat(2, 1).shape == (2, 6, 4)
    assert x.diagonal().shape == (4, 2) and x.trace().shape == (4,)


@pytest.mark.parametrize("call, message", [
    (lambda x: cudiff.swapaxes(x, 0, 3), "axis 3 is out of range for a tensor of 3 dimensions"),
    (lambda x: cudiff.moveaxis(x, 0, 3), "axis 3 is out of range"),
    (lambda x: cudiff.moveaxis(x, (0, 0), (1, 2)), "axis 0 is named twice"),
    (lambda x: cudiff.moveaxis(x, (0, 1), 2), "moveaxis got 2 axes and 1 places for them"),
    (lambda x: cudiff.flip(x, 3), "axis 3 is out of range"), (lambda x: cudiff.roll(x, 1, 3), "axis 3 is out of range"),
    (lambda x: cudiff.repeat(x, 1, 3), "axis 3 is out of range"),
    (lambda x: cudiff.repeat(x, [1, 2], 1), "repeat got 2 numbers for an axis of size 3"),
    (lambda x: cudiff.repeat(x, -1), "repeat takes numbers that are not negative: -1"),
    (lambda x: cudiff.tile(x, (1, -1)), "tile takes numbers that are not negative"),
    (lambda x: cudiff.diagonal(x[0, 0]), r"a diagonal needs two axes or more, not the shape \(4,\)"),
    (lambda x: cudiff.diagonal(x, 0, 1, 1), "axis 1 is named twice"),
    (lambda x: cudiff.tril(x[0, 0]), r"tril takes matrices, not the shape \(4,\)"),
    (lambda x: cudiff.triu(x[0, 0]), "triu takes matrices"),
    (lambda x: cudiff.broadcast_arrays(x, x[:, :2]), r"the shapes \(2, 3, 4\), \(2, 2, 4\) do not broadcast"),
    (lambda x: cudiff.hstack([]), "at least one tensor"),
    (lambda x: cudiff.roll(x, (1, 2, 3), (0, 1)), "roll got"),
])
def test_what_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(Tensor(X))
