"""Operators, methods and NumPy's functions on tensors: the names of cudiff/ops/methods.py."""

import inspect

import numpy as np
import pytest

import cudiff
from cudiff import Tensor, ops
from cudiff.ops.methods import METHODS, NUMPY
from tests.stub import STUB, stub


def test_every_method_is_the_operation_of_its_name():
    for name in METHODS:
        assert vars(Tensor)[name] is getattr(ops, name) is getattr(cudiff, name)
    assert {"exp", "mean", "sum", "clip"} <= set(METHODS)


def test_the_stub_holds_the_signatures():
    assert STUB.read_text() == stub(), "run python -m tests.stub"


def test_signatures_are_seen_without_calling():
    assert list(inspect.signature(Tensor.mean).parameters) == ["x", "axis", "keepdims"]
    assert "Square root" in Tensor.sqrt.__doc__
    assert all(inspect.signature(method).parameters for name, method in vars(Tensor).items() if name in METHODS)


@pytest.mark.parametrize("function", NUMPY, ids=lambda f: f.__name__)
def test_the_operation_takes_the_names_of_numpys_arguments(function):
    """What both have by name and place stands in the same order."""
    try:
        names = list(inspect.signature(function).parameters)
    except ValueError:
        pytest.skip("NumPy tells no signature")
    own = [p.name for p in list(inspect.signature(NUMPY[function]).parameters.values())[1:]
           if p.name in names and p.kind is not p.KEYWORD_ONLY]
    assert own == [name for name in names if name in own]


def test_numpys_functions_give_tensors_with_gradients(device):
    x = Tensor(np.float32([[1, 2], [3, 4]]), requires_grad=True, device=device)
    for call, slope in {
        lambda x: np.exp(x): np.exp(x.numpy()), lambda x: np.sum(x, axis=0): np.ones((2, 2)),
        lambda x: np.mean(x, axis=(0, 1)): np.full((2, 2), 0.25), lambda x: np.concatenate([x, x]): np.full((2, 2), 2),
        lambda x: np.reshape(x, 4): np.ones((2, 2)), lambda x: np.amax(x): np.float32([[0, 0], [0, 1]]),
        lambda x: np.add(1.0, x): np.ones((2, 2)), lambda x: np.stack((x, x), axis=1): np.full((2, 2), 2),
    }.items():
        out = call(x)
        assert isinstance(out, Tensor) and out.device == device
        x.grad = None
        out.sum().backward()
        np.testing.assert_allclose(Tensor(x.grad).numpy(), slope, rtol=1e-6)


def test_arrays_and_tensors_mix():
    x, array = Tensor(np.float32([[1, 2], [3, 4]]), requires_grad=True), np.array([[2.0, 0.5], [1.0, 3.0]])
    expected = np.float32([[1, 2], [3, 4]])
    for out, value in [
        (array @ x, array @ expected), (x @ array, expected @ array), (array * x, array * expected),
        (array - x, array - expected), (array / x, array / expected), (array**x, array**expected),
        (np.concatenate([array, x]), np.concatenate([array, expected])), (cudiff.maximum(array, x), [[2, 2], [3, 4]]),
        (cudiff.mse(x, array), np.mean((expected - array) ** 2)),
        (cudiff.mse(array, x), np.mean((expected - array) ** 2)),
        (x + np.array(1.0), expected + 1), (np.float64(1) + x, expected + 1), (x * [2.0, 3.0], expected * [2, 3]),
    ]:
        assert isinstance(out, Tensor) and out.dtype == np.float32 and out.requires_grad
        np.testing.assert_allclose(out.numpy(), value, rtol=1e-6)


def test_arrays_without_axes_are_numbers(device):
    x = Tensor(np.float32([1, 2]), device=device)
    for out, value in [(x + np.array(1.0), [2, 3]), (np.float64(3) - x, [2, 1]), (np.array(2) * x, [2, 4]),
                       (np.multiply(np.float32(2), x), [2, 4]), (np.int64(2) > x, [True, False])]:
        assert out.device == device and out.numpy().tolist() == value


def test_operations_take_arrays_and_lists():
    array = np.array([[1.0, 2.0], [3.0, 5.0]])
    for out, value in [
        (cudiff.sum(array), 11), (cudiff.mean(array, 0), [2, 3.5]), (cudiff.var(array, ddof=1), np.var(array, ddof=1)),
        (cudiff.max(array, axis=1), [2, 5]), (cudiff.transpose(array), array.T),
        (cudiff.reshape(array, -1), array.ravel()), (cudiff.getitem(array, 0), array[0]),
        (cudiff.softmax(array, 0).sum(0), [1, 1]), (cudiff.stack([array, array]), np.stack([array, array])),
        (cudiff.squeeze(array[None]), array), (cudiff.pad(array, 1), np.pad(array, 1)),
        (cudiff.concatenate([array, array], 1), np.hstack([array, array])), (cudiff.astype(array, "float64"), array),
    ]:
        assert isinstance(out, Tensor) and out.dtype == np.float64
        np.testing.assert_allclose(out.numpy(), value)
    assert cudiff.sum([1.0, 2.0]).item() == 3 and cudiff.sum([1.0, 2.0]).dtype == np.float32


def test_what_has_no_gradient_is_refused_or_an_array():
    x = Tensor([3.0, 4.0], requires_grad=True)
    with pytest.raises(TypeError, match=r"^np\.linalg\.norm has no gradient in cudiff: give it x\.numpy\(\)$"):
        np.linalg.norm(x)
    assert np.linalg.norm(x.detach()) == 5
    assert np.shape(x) == (2,) and np.ndim(x) == 1 and np.size(x) == 2 and np.allclose(x, [3, 4])
    with pytest.raises(TypeError, match=r"^np.exp of a tensor is a new tensor and takes no out: write a = a"):
        np.exp(x, out=np.ones(2))
    with pytest.raises(TypeError, match=r"^np.add.reduce does not take tensors: use cudiff's operations, or x.numpy"):
        np.add.reduce(x)
    total = np.zeros(2)
    with pytest.raises(TypeError, match="of a tensor is a new tensor and takes no out"):
        total += x
