"""Tensors of other libraries' arrays."""

import ml_dtypes
import numpy as np
import pytest

import cudiff
from cudiff import Tensor
from tests.check import torch

needs_torch = pytest.mark.skipif(torch is None, reason="PyTorch is not installed")


class Other:
    """An array of another library, of which NumPy makes one."""

    def __init__(self, make):
        self.make = make

    def __array__(self, dtype=None, copy=None):
        return self.make()


def test_what_has_an_array_keeps_its_dtype_and_memory():
    array = np.arange(3.0)
    tensor = Tensor(Other(lambda: array))
    assert tensor.dtype == np.float64 and np.shares_memory(tensor.data, array)
    assert Tensor(Other(lambda: array), dtype=np.int32).numpy().tolist() == [0, 1, 2]


def test_what_gives_no_array_is_told_in_one_line():
    def fails():
        raise RuntimeError("it lies elsewhere\nas this long story tells")

    with pytest.raises(TypeError, match=r"^this Other gives no array: it lies elsewhere$"):
        Tensor(Other(fails))
    with pytest.raises(TypeError, match="a tensor holds real numbers"):
        Tensor(Other(lambda: np.ones(2, np.complex64)))


@pytest.mark.parametrize("dtype", [None, "float32", "int32", "bool"])
def test_a_list_of_words_is_refused_whatever_its_dtype(dtype):
    for words in (["1", "2"], [["1"]]):
        with pytest.raises(TypeError, match="a tensor holds real numbers"):
            Tensor(words, dtype=dtype)


def test_what_lies_on_a_gpu_comes_by_dlpack(host_of):
    host, given = host_of(True), Other(lambda: 1 / 0)
    given.__dlpack_device__ = lambda: (2, 0)
    array = host.zeros((2, 3), np.float32)
    host.from_dlpack = lambda data: array if data is given else None
    assert Tensor(given).data is array


@needs_torch
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool"])
def test_pytorchs_tensors(dtype):
    given = torch.arange(6).reshape(2, 3).to(getattr(torch, dtype))
    tensor = Tensor(given)
    assert tensor.dtype == np.dtype(getattr(ml_dtypes, dtype, None) or dtype) and not tensor.requires_grad
    np.testing.assert_array_equal(tensor.numpy().astype(float), given.double().numpy())
    given[0, 1] = 0
    assert tensor.numpy()[0, 1] == 0  # they share their memory
    turned = Tensor(given.T)
    assert turned.data.flags.c_contiguous
    np.testing.assert_array_equal(turned.numpy().astype(float), given.double().numpy().T)


@needs_torch
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_pytorch_tensor_is_detached(dtype):
    given = torch.ones(2, dtype=getattr(torch, dtype), requires_grad=True)
    for tensor in (Tensor(given), Tensor(given * 1), Tensor(torch.nn.Parameter(given))):
        assert tensor.numpy().tolist() == [1, 1] and not tensor.requires_grad
    assert Tensor(given, requires_grad=True, dtype=np.float32).requires_grad


@needs_torch
def test_pytorchs_tensors_that_hold_no_array():
    for given in (torch.ones(2, 2).to_sparse(), torch.ones(2, device="meta"), torch.ones(2).to(torch.float8_e5m2)):
        with pytest.raises(TypeError, match=r"^this Tensor gives no array: [^\n]*$"):
            Tensor(given)
    with pytest.raises(TypeError, match="a tensor holds real numbers"):
        Tensor(torch.ones(2, dtype=torch.complex64))


@needs_torch
def test_operations_take_pytorchs_tensors_and_lose_no_gradient():
    x, given = Tensor(np.float32([1, 2])), torch.ones(2)
    assert (x * given).numpy().tolist() == cudiff.multiply(given, x).numpy().tolist() == [1, 2]
    assert cudiff.exp(given).shape == (2,)
    for call in (cudiff.exp, cudiff.sum, lambda t: x * t, lambda t: cudiff.concatenate([x, t])):
        with pytest.raises(TypeError, match="records no gradient of PyTorch's: use to_torch_function"):
            call(torch.ones(2, requires_grad=True))
