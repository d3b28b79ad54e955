"""Conversion between dtypes, and the common dtype of mixed operands."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from cudiff.backend import (
    FLOATS,
    Array,
    bfloat16,
    compute_dtype,
    device_of,
    float16,
    float32,
    float64,
    int32,
    int64,
    is_float,
    is_low,
)
from cudiff.cuda.accumulate import add_into, gradient_target
from cudiff.cuda.launch import blocks, empty, launch
from cudiff.function import Function
from cudiff.tensor import Tensor

__all__ = ["astype"]


def upcast(array: Array) -> Array:
    """`array` in the dtype that NumPy computes in; None stays None."""
    return None if array is None else array.astype(compute_dtype(array.dtype), copy=False)


def upcast_like_first(*arrays: np.ndarray) -> list[np.ndarray]:
    """The arrays in the dtype that NumPy computes in for the first one's."""
    dtype = compute_dtype(arrays[0].dtype)
    return [array.astype(dtype, copy=False) for array in arrays]


def downcast(array: Any, dtype: np.dtype) -> Array:
    """A result in its storage dtype, as an array (NumPy turns 0-d results into scalars)."""
    return np.asarray(array).astype(dtype, copy=False)


def require_float(name: str, array: Array) -> None:
    """The CUDA kernels do arithmetic in floats. Raises TypeError for integers."""
    if not is_float(array.dtype):
        raise TypeError(f"{name.lower()} on CUDA needs a floating tensor, not {array.dtype}: use .astype('float32')")


def require_floats(name: str, *operands: Tensor | None) -> None:
    """Raises TypeError for integers, on both backends."""
    require_float_dtypes(name, tuple([None if x is None else x.dtype for x in operands]))


@functools.cache
def require_float_dtypes(name: str, dtypes: tuple[np.dtype | None, ...]) -> None:
    """Raises TypeError where one is not floating."""
    for dtype in dtypes:
        if dtype is not None and dtype not in FLOATS:
            raise TypeError(f"{name} needs floating tensors, not {dtype}: use .astype('float32')")


def as_wide(*operands: Any) -> tuple[Any, ...]:
    """Each in float32, as kernels read a norm's parameters; float64 and None stay as they are."""
    return tuple([x if x is None or x.dtype in (float32, float64) else astype(x, float32) for x in operands])


def _cast_cuda(x: Array, dtype: np.dtype, name: str = "cast") -> Array:
    if dtype not in CUDA_DTYPES:
        raise TypeError(f"a CUDA tensor is not converted to {dtype}: use one of {', '.join(map(str, CUDA_DTYPES))}")
    out = empty(x.shape, dtype)
    name = "truth" if dtype.kind == "b" else name
    launch("cast", name, blocks(x.size, 1024), 256, (x, out, np.int64(x.size)), FROM=x.dtype, TO=dtype)
    return out


CUDA_DTYPES = (float32, bfloat16, float16, int32, int64, np.dtype(np.uint8), np.dtype(np.bool_))


class Cast(Function):
    """out = x rounded to `dtype`; dx = dout rounded to x's dtype."""

    takes_wide = True

    @staticmethod
    def forward_numpy(ctx, x, dtype):
        ctx.dtype = x.dtype
        return x.astype(dtype)

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        return (dout.astype(ctx.dtype),)

    @staticmethod
    def forward_cuda(ctx, x, dtype):
        ctx.dtype = x.dtype
        return _cast_cuda(x, dtype)

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        dx, accumulate = gradient_target(into[0], dout.shape, ctx.dtype)
        if not accumulate:
            return (_cast_cuda(dout, ctx.dtype),)
        add_into(dx, dout)
        return (dx,)


class Index(Function):
    """Row numbers as int32. Those beyond 32 bits become the nearest that is within, which no array has."""

    differentiable = False

    @staticmethod
    def forward_numpy(ctx, x):
        return np.clip(x, _INT32.min, _INT32.max).astype(int32)

    @staticmethod
    def forward_cuda(ctx, x):
        return _cast_cuda(x, int32, "index")


def astype(x: Any, dtype: Any) -> Tensor:
    """x in another dtype; x itself where it has it already. Floating to floating is differentiable."""
    x, dtype = as_tensor(x), np.dtype(dtype)
    return x if x.dtype == dtype else Cast.apply(x, dtype=dtype)


def as_index(name: str, index: Any, device: str) -> Tensor:
    """Class labels or row numbers, a tensor, an array or a list of integers, as the int32 tensor that kernels read.

    Arrays and lists are copied to `device`; a tensor stays on its own. Raises TypeError for other dtypes, and
    IndexError for an integer on the host that does not fit in 32 bits.
    """
    array = index.data if isinstance(index, Tensor) else np.asarray(index, None if np.size(index) else int32)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name}: labels and indices are integers, not {array.dtype}: use .astype('int32')")
    if device_of(array) == "cpu" and array.size and not _INT32.min <= array.min() <= array.max() <= _INT32.max:
        raise IndexError(f"{name}: an index lies outside 32 bits: {array.min()} to {array.max()}")
    if not isinstance(index, Tensor):
        return Tensor(array.astype(int32), device=device)  # a copy: a caller may reuse its array before backward
    if array.dtype not in CUDA_DTYPES:
        return Tensor(array.astype(int32))
    return Index.apply(index) if array.dtype == int64 else astype(index, int32)


_INT32 = np.iinfo(int32)


def masked(x: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """x where the mask is True and 0 elsewhere, of what is not finite too; both broadcast.

    Its bits are multiplied as integers: 0 times infinity is NaN, and `np.where` takes ten times as long.
    """
    return (x.view(f"i{x.itemsize}") * mask).view(x.dtype)


def as_tensor(x: Any) -> Tensor:
    """x, a tensor, an array or a nested sequence of numbers, as a tensor.

    Raises TypeError for a tensor of PyTorch's that requires a gradient, which would be lost.
    """
    if isinstance(x, Tensor):
        return x
    if getattr(x, "requires_grad", False):
        raise TypeError("an operation of cudiff records no gradient of PyTorch's: use to_torch_function, or x.detach()")
    return Tensor(x)


def as_floating(x: Any) -> Tensor:
    """`as_tensor`; integers and bools become float32."""
    x = as_tensor(x)
    return x if is_float(x.dtype) else astype(x, float32)


def as_input(x: Any) -> Tensor:
    """`as_tensor`; an array of float64 becomes float32, in which networks compute."""
    found = as_tensor(x)
    return astype(found, float32) if found is not x and found.dtype == float64 else found


def as_tensor_beside(x: Any, weight: Tensor) -> Tensor:
    """`as_tensor`; an array or a sequence of float64 takes the dtype of a floating `weight`."""
    found = as_tensor(x)
    return found if found is x or found.dtype != float64 or not is_float(weight.dtype) else astype(found, weight.dtype)


def is_number(x: Any) -> bool:
    """Whether x is a number of Python's, or a scalar of NumPy's."""
    return isinstance(x, int | float | np.number | np.bool_)


def operands(*given: Any, floating: bool = False, device: str = "cpu") -> list[Any]:
    """`as_tensors`, but numbers become Python numbers, as do NumPy's 0-d arrays beside a tensor. At least one operand
    becomes a tensor. A NumPy number beside integers promotes by its own dtype, as in NumPy."""
    among_tensors = any(isinstance(x, Tensor) for x in given)
    found = [_number(x) if is_number(x) or (among_tensors and _holds_one_number(x)) else as_tensor(x) for x in given]
    if not any(isinstance(x, Tensor) for x in found):
        found[0] = Tensor(found[0])
    strong = [x for x in given if isinstance(x, Tensor) and is_float(x.dtype)]
    typed = [np.asarray(x)[()] if is_number(y) and isinstance(x, np.generic | np.ndarray) else y
             for x, y in zip(given, found, strict=True)]
    return _together(given, found, result_dtype(*(strong or typed), floating=floating), device)


def apply_pair(function: type[Function], a: Any, b: Any, **attrs: Any) -> Tensor:
    """`function` of two `operands`. In place of a number it gets None, and the number as `scalar`."""
    if not isinstance(a, Tensor):
        return function.apply(None, b, scalar=a, **attrs)
    if not isinstance(b, Tensor):
        return function.apply(a, None, scalar=b, **attrs)
    return function.apply(a, b, **attrs)


def _number(x: Any) -> int | float:
    return x.item() if isinstance(x, np.generic | np.ndarray) else x


def _holds_one_number(x: Any) -> bool:
    """Whether x is a 0-d array of a number, which NumPy's functions make of a scalar."""
    return type(x) is np.ndarray and x.ndim == 0 and x.dtype.kind in "biuf"


def as_tensors(*given: Any, floating: bool = False) -> list[Tensor]:
    """Each as a tensor of their common dtype.

    An array, a sequence or a number takes the dtype of a floating tensor beside it. Otherwise `result_dtype` gives the
    dtype. It is copied to the GPU if a tensor beside it is there.
    """
    if not given:
        return []
    strong = [x for x in given if isinstance(x, Tensor) and is_float(x.dtype)]
    found = list(map(as_tensor, given))
    return _together(given, found, result_dtype(*(strong or found), floating=floating))


def _together(given: Sequence[Any], found: list[Any], dtype: np.dtype, device: str = "cpu") -> list[Any]:
    """The tensors of `found` in `dtype`. If a given tensor is on a GPU, or `device` is one, arrays of the host are
    copied there, which a captured function refuses, and float64 becomes float32."""
    if device == "cpu" and not any(isinstance(x, Tensor) and x.device == "cuda" for x in given):
        return [astype(x, dtype) if isinstance(x, Tensor) else x for x in found]
    dtype = float32 if dtype == float64 else dtype
    there = [x if x is own or not isinstance(x, Tensor) else Tensor(x, dtype=dtype, device="cuda")
             for x, own in zip(found, given, strict=True)]
    return [astype(x, dtype) if isinstance(x, Tensor) else x for x in there]


def result_dtype(*operands: Any, floating: bool = False) -> np.dtype:
    """The common dtype of tensors and numbers; float32 for integers if `floating`.

    Two floating dtypes give the wider one, bfloat16 and float16 give float32; integers beside a floating tensor take
    its dtype. Integers promote as in NumPy. Booleans and a Python integer give int64, as in NumPy.
    """
    dtypes = [x.dtype for x in operands if isinstance(x, Tensor | np.integer)]
    floats = [dtype for dtype in dtypes if is_float(dtype)]
    if floats:
        mixed = is_low(floats[0]) and any(dtype != floats[0] for dtype in floats)
        return functools.reduce(np.promote_types, floats, float32) if mixed else np.result_type(*floats)
    if floating or any(isinstance(x, float | np.floating) for x in operands):
        return float32
    if {dtype.kind for dtype in dtypes} == {"b"} and any(type(x) is int for x in operands):
        return np.dtype(np.int64)
    return np.result_type(*dtypes)
