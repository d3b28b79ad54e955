"""Reductions over axes, in a fixed order and with float32 accumulation for the 16-bit types."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np

from cudiff.backend import Array, compute_dtype, float32, is_float
from cudiff.ops.cast import astype
from cudiff.tensor import Context, Function, Tensor


def normalize_axes(axis: int | tuple[int, ...] | None, ndim: int) -> tuple[int, ...]:
    """The axes as sorted non-negative numbers. Raises ValueError for one out of range or named twice."""
    axes = range(ndim) if axis is None else axis if isinstance(axis, tuple | list) else (axis,)
    found = set()
    for item in map(operator.index, axes):
        if not -ndim <= item < ndim:
            raise ValueError(f"axis {item} is out of range for a tensor of {ndim} dimensions")
        if item % ndim in found:
            raise ValueError(f"axis {item} is named twice")
        found.add(item % ndim)
    return tuple(sorted(found))


def _kept(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...]:
    """`shape` with the reduced axes as 1."""
    return tuple(1 if i in axes else size for i, size in enumerate(shape))


def _left(shape: tuple[int, ...], axes: tuple[int, ...], keepdims: bool) -> tuple[int, ...]:
    return _kept(shape, axes) if keepdims else tuple(size for i, size in enumerate(shape) if i not in axes)


def _count(shape: tuple[int, ...], axes: tuple[int, ...]) -> int:
    return math.prod(shape[i] for i in axes)


def _sum_numpy(array: np.ndarray, axes: tuple[int, ...], keepdims: bool, dtype: Any = None) -> np.ndarray:
    if not is_float(array.dtype):
        return np.asarray(np.sum(array, axis=axes, keepdims=keepdims, dtype=dtype))
    total = np.sum(array, axis=axes, keepdims=keepdims, dtype=compute_dtype(array.dtype))
    return np.asarray(total).astype(dtype or array.dtype, copy=False)


def sum_array(array: Array, axes: Any, keepdims: bool = False, dtype: Any = None) -> Array:
    """Sum of a plain array over `axes` (int, tuple or None) on either backend; `dtype` is the result's."""
    axes = normalize_axes(axes, array.ndim)
    return _sum_numpy(array, axes, keepdims, dtype)


def sum_to(array: Array, shape: tuple[int, ...]) -> Array:
    """Undo broadcasting: sum `array` over the axes along which `shape` was broadcast; `array` itself if none was."""
    if array.shape == shape:
        return array
    lead = array.ndim - len(shape)
    axes = tuple(i for i in range(array.ndim) if i < lead or (shape[i - lead] == 1 and array.shape[i] != 1))
    return sum_array(array, axes).reshape(shape)


class Sum(Function):
    """out = scale * sum of x over `axes`; scale is 1, or 1 / count for the mean."""

    @staticmethod
    def forward_numpy(ctx: Context, x, axes, keepdims, scale=1.0):
        ctx.shape, ctx.axes, ctx.scale = x.shape, axes, scale
        dtype = compute_dtype(x.dtype) if is_float(x.dtype) else None
        out = np.asarray(np.sum(x, axis=axes, keepdims=keepdims, dtype=dtype))
        if scale != 1:
            out = out * scale
        return np.asarray(out).astype(x.dtype, copy=False) if is_float(x.dtype) else out

    @staticmethod
    def backward_numpy(ctx: Context, dout, needs, into):
        dout = dout.reshape(_kept(ctx.shape, ctx.axes))
        if ctx.scale != 1:
            dout = (dout.astype(compute_dtype(dout.dtype)) * ctx.scale).astype(dout.dtype)
        return (_spread(dout, ctx.shape, into[0]),)


def _spread(dout: np.ndarray, shape: tuple[int, ...], into: np.ndarray | None) -> np.ndarray:
    """`dout` repeated to `shape`, added to `into` if there is one."""
    if into is None:
        into = np.empty(shape, dout.dtype)
        into[...] = dout
    else:
        into += dout
    return into


class Extreme(Function):
    """Maximum (sign 1) or minimum (sign -1). Equal extremes share the gradient equally, as in PyTorch's amax."""

    @staticmethod
    def forward_numpy(ctx: Context, x, axes, keepdims, sign):
        out = (np.max if sign > 0 else np.min)(x, axis=axes, keepdims=True)
        ctx.axes = axes
        ctx.save(x, out)
        return out.reshape(_left(x.shape, axes, keepdims))

    @staticmethod
    def backward_numpy(ctx: Context, dout, needs, into):
        x, out = ctx.saved
        share = x == out
        wide = dout.astype(compute_dtype(dout.dtype), copy=False).reshape(out.shape)
        dx = share * (wide / np.sum(share, axis=ctx.axes, keepdims=True, dtype=wide.dtype))
        return (dx.astype(x.dtype, copy=False),)


class Variance(Function):
    """Mean square deviation from the mean (two passes, so a large mean costs no digits), divided by count - ddof."""

    @staticmethod
    def forward_numpy(ctx: Context, x, axes, keepdims, ddof):
        wide = x.astype(compute_dtype(x.dtype), copy=False)
        deviation = wide - np.mean(wide, axis=axes, keepdims=True)
        ctx.axes, ctx.scale = axes, 1 / (_count(x.shape, axes) - ddof)
        ctx.save(deviation)
        total = np.asarray(np.sum(np.square(deviation), axis=axes, keepdims=keepdims)) * ctx.scale
        return np.asarray(total).astype(x.dtype, copy=False)

    @staticmethod
    def backward_numpy(ctx: Context, dout, needs, into):
        (deviation,) = ctx.saved
        wide = dout.astype(deviation.dtype, copy=False).reshape(_kept(deviation.shape, ctx.axes))
        return ((deviation * (2 * ctx.scale * wide)).astype(dout.dtype, copy=False),)


Axis = int | tuple[int, ...] | None


def _floating(x: Tensor) -> Tensor:
    return x if is_float(x.dtype) else astype(x, float32)


def sum(x: Tensor, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Sum over `axis` (all axes where None), in x's dtype; integers as in NumPy."""
    return Sum.apply(x, axes=normalize_axes(axis, x.ndim), keepdims=keepdims)


def mean(x: Tensor, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Arithmetic mean over `axis`; integers give float32."""
    x, axes = _floating(x), normalize_axes(axis, x.ndim)
    return Sum.apply(x, axes=axes, keepdims=keepdims, scale=1 / _count(x.shape, axes))


def max(x: Tensor, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Largest element over `axis`, NaN if one is NaN; equal largest elements share the gradient equally."""
    return Extreme.apply(x, axes=normalize_axes(axis, x.ndim), keepdims=keepdims, sign=1)


def min(x: Tensor, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Smallest element over `axis`, NaN if one is NaN; equal smallest elements share the gradient equally."""
    return Extreme.apply(x, axes=normalize_axes(axis, x.ndim), keepdims=keepdims, sign=-1)


def var(x: Tensor, axis: Axis = None, keepdims: bool = False, ddof: int = 0) -> Tensor:
    """Variance over `axis`, divided by count - ddof (NumPy's default 0; PyTorch's default is 1)."""
    x = _floating(x)
    return Variance.apply(x, axes=normalize_axes(axis, x.ndim), keepdims=keepdims, ddof=ddof)


def std(x: Tensor, axis: Axis = None, keepdims: bool = False, ddof: int = 0) -> Tensor:
    """Square root of `var`; its gradient is infinite where the variance is 0."""
    return var(x, axis, keepdims, ddof) ** 0.5
