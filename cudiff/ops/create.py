"""Tensors of given values, by NumPy's names. They are made on their device, so a captured function may make them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from cudiff.backend import Array, array_module, bfloat16, float32, float64, storable
from cudiff.cuda.kernels.shape import filled
from cudiff.ops.cast import as_tensor, astype, is_number
from cudiff.tensor import Tensor

__all__ = [
    "arange", "empty", "empty_like", "eye", "full", "full_like", "linspace", "ones", "ones_like", "zeros", "zeros_like",
]

Shape = int | Sequence[int]


def zeros(shape: Shape, dtype: Any = float32, device: str = "cpu") -> Tensor:
    """Zeros."""
    return Tensor(array_module(device).zeros(_sizes(shape), storable(_given(dtype), device)))


def empty(shape: Shape, dtype: Any = float32, device: str = "cpu") -> Tensor:
    """Uninitialised elements."""
    return Tensor(array_module(device).empty(_sizes(shape), storable(_given(dtype), device)))


def ones(shape: Shape, dtype: Any = float32, device: str = "cpu") -> Tensor:
    """Ones."""
    return full(shape, 1, _given(dtype), device)


def full(shape: Shape, fill_value: float, dtype: Any = None, device: str = "cpu") -> Tensor:
    """The number `fill_value` everywhere. Without a dtype its own type decides between float32, int64 and bool."""
    if not is_number(fill_value):
        raise TypeError(f"full fills with one number, not {type(fill_value).__name__}: broadcast_to repeats a tensor")
    module, sizes, value = array_module(device), _sizes(shape), Tensor(fill_value, dtype=dtype)
    dtype = storable(value.dtype, device)
    if device == "cuda":
        return Tensor(filled(sizes, dtype, value.item()))
    return Tensor(module.full(sizes, value.item(), dtype))


def eye(N: int, M: int | None = None, k: int = 0, dtype: Any = float32, device: str = "cpu") -> Tensor:
    """(N, M) of zeros, with ones where column - row is k. M is N where None."""
    module = array_module(device)
    rows, columns = _sizes((N, N if M is None else M))
    ones = module.arange(columns) - module.arange(rows)[:, None] == operator.index(k)
    return astype(Tensor(ones), storable(_given(dtype), device))


def arange(start: float, stop: float | None = None, step: float = 1, dtype: Any = None, device: str = "cpu") -> Tensor:
    """start, start + step, ... below `stop`; from 0 where one number is given. int64 of integers, float32 of others."""
    start, stop = (0, start) if stop is None else (start, stop)
    _numbers("arange", start, stop, step)
    if step == 0:
        raise ValueError("arange needs a step that is not 0")
    return _rounded(array_module(device).arange(start, stop, step), dtype, device)


def linspace(start: float, stop: float, num: int = 50, endpoint: bool = True, dtype: Any = float32,
             device: str = "cpu") -> Tensor:
    """`num` numbers at equal distances from `start` to `stop`, which is left out without `endpoint`; those of an
    integer dtype are rounded down."""
    _numbers("linspace", start, stop)
    module, dtype = array_module(device), storable(_given(dtype), device)
    numbers = module.linspace(start, stop, num, endpoint)
    return _rounded(module.floor(numbers) if dtype.kind in "iu" else numbers, dtype, device)


def zeros_like(x: Any, dtype: Any = None, device: str | None = None) -> Tensor:
    """Zeros of x's shape, in its dtype and on its device where no others are given."""
    return zeros(**_like(x, dtype, device))


def empty_like(x: Any, dtype: Any = None, device: str | None = None) -> Tensor:
    """`empty` of x's shape, in its dtype and on its device where no others are given."""
    return empty(**_like(x, dtype, device))


def ones_like(x: Any, dtype: Any = None, device: str | None = None) -> Tensor:
    """Ones of x's shape, in its dtype and on its device where no others are given."""
    return ones(**_like(x, dtype, device))


def full_like(x: Any, fill_value: Any, dtype: Any = None, device: str | None = None) -> Tensor:
    """`full` of x's shape, in its dtype and on its device where no others are given."""
    return full(fill_value=fill_value, **_like(x, dtype, device))


def _given(dtype: Any) -> Any:
    """float32 for None, which NumPy's functions take for the default dtype. Raises TypeError for a size."""
    if isinstance(dtype, int):
        raise TypeError(f"dtype is {dtype}: a shape of several axes is one argument, zeros((2, 3))")
    return float32 if dtype is None else dtype


def _like(x: Any, dtype: Any, device: str | None) -> dict[str, Any]:
    x = as_tensor(x)
    return {"shape": x.shape, "dtype": dtype or x.dtype, "device": device or x.device}


def _numbers(name: str, *given: Any) -> None:
    if not all(map(is_number, given)):
        raise TypeError(f"{name} takes numbers, not {', '.join(type(x).__name__ for x in given)}: x.item() is one")


def _rounded(array: Array, dtype: Any, device: str) -> Tensor:
    """`array` in `dtype`; float64 is float32 where that is None."""
    dtype = storable(dtype or (float32 if array.dtype == float64 else array.dtype), device)
    if dtype == bfloat16:  # which CuPy does not round to
        return astype(Tensor(array, dtype=float32), dtype)
    return Tensor(array, dtype=dtype)


def _sizes(shape: Shape) -> tuple[int, ...]:
    """A shape as a tuple. Raises ValueError for a negative size."""
    sizes = tuple(map(operator.index, shape if isinstance(shape, tuple | list) else (shape,)))
    if any(n < 0 for n in sizes):
        raise ValueError(f"a shape's sizes are not negative: {shape}")
    return sizes
