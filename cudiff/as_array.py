"""What a user gives for a tensor as an array that one holds."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from cudiff.backend import DTYPES, Array, array_module, bfloat16, float32, is_array


def as_array(data: Any, dtype: Any = None) -> Array:
    """`data`, an array or a nested sequence of numbers, as an array of `dtype`, or of its own.

    Arrays of other libraries, such as PyTorch's tensors, share their memory where they can; what they record of a
    gradient stays behind. Python's floats become float32 where no dtype is given. Raises TypeError for what holds no
    real numbers, for masked arrays and for lists of tensors that require a gradient, ValueError for rows of different
    lengths, OverflowError for Python integers that `dtype` does not hold.
    """
    if not is_array(data):
        data = _of_other_library(data) if hasattr(data, "__array__") else _from_sequence(data, dtype)
    if data.dtype not in DTYPES:
        native = data.dtype.newbyteorder("=")  # of a file of the other byte order
        if native not in DTYPES:
            raise TypeError(_holds(data.dtype))
        data = data.astype(native)
    if type(data) is not np.ndarray and isinstance(data, np.ndarray | np.generic):
        data = plain(data)
    if dtype is not None and data.dtype != np.dtype(dtype):
        if np.dtype(dtype) not in DTYPES:
            raise TypeError(_holds(dtype))
        data = data.astype(dtype)
    return data


def _of_other_library(data: Any) -> Array:
    """What PyTorch's tensors, JAX's arrays and others that have `__array__` hold, by DLPack where it lies on a GPU."""
    torch: Any = sys.modules.get("torch")
    try:
        if torch is not None and isinstance(data, torch.Tensor):
            data = data.detach()
            if data.dtype == torch.bfloat16:  # which DLPack and NumPy do not hand on
                return _of_other_library(data.view(torch.int16)).view(bfloat16)
        if getattr(data, "__dlpack_device__", lambda: (1, 0))()[0] == CUDA:
            return array_module("cuda").from_dlpack(data)
        return np.asarray(data)
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        reason, *_ = str(error).split("\n")
        raise TypeError(f"this {type(data).__name__} gives no array: {reason}") from None


CUDA = 2  # DLPack's kDLCUDA


def plain(array: Array) -> Array:
    """A NumPy scalar or matrix, whose `*` is another, as an array; arrays as they are. Raises TypeError for a masked
    array, whose mask would be lost."""
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError("a masked array's mask would be lost: give array.filled(value)")
    return np.asarray(array) if isinstance(array, np.generic | np.matrix) else array


def _holds(dtype: Any) -> str:
    return f"a tensor holds real numbers (bool, integers, float16, bfloat16, float32, float64), not {dtype}"


def _from_sequence(data: Any, dtype: Any) -> np.ndarray:
    """A nested sequence of numbers as an array."""
    if _requires_grad(data):
        raise TypeError("a list of tensors that require a gradient has none: join them with cudiff.stack")
    try:
        array = np.asarray(data)
        if dtype is not None and array.dtype.kind in "iu" and np.dtype(dtype).kind in "iu":
            array = np.asarray(data, dtype)  # which raises OverflowError for integers that it does not hold
    except ValueError:
        raise ValueError("a tensor's rows must be of equal lengths, and this nested sequence's are not") from None
    return array.astype(float32) if array.dtype == np.float64 and dtype is None else array


def _requires_grad(data: Any) -> bool:
    """Whether a tensor in a nested sequence requires a gradient."""
    if isinstance(data, list | tuple):
        return any(map(_requires_grad, data))
    return getattr(data, "requires_grad", False)
