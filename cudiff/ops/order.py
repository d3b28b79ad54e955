"""Where the largest and smallest elements lie, the order of all, and running sums; on a GPU by CuPy's own kernels."""

from __future__ import annotations

from typing import Any

import numpy as np

from cudiff.backend import Array, array_module, is_capturing, is_float
from cudiff.errors import CudiffError
from cudiff.function import Function
from cudiff.ops.cast import as_index, as_tensor, as_wide, astype
from cudiff.ops.reduce import normalize_axes
from cudiff.ops.shape import flatten
from cudiff.tensor import Tensor

__all__ = ["argmax", "argmin", "argsort", "cumsum", "one_hot"]


class Positions(Function):
    """The result of NumPy's or CuPy's function `name`, of integers that are positions along an axis."""

    differentiable = False

    @staticmethod
    def forward_numpy(ctx, x, name, **options):
        return np.asarray(getattr(np, name)(x, **options))

    @staticmethod
    def forward_cuda(ctx, x, name, **options):
        return getattr(array_module("cuda"), name)(x, **options)


class CumSum(Function):
    """out[i] = x[0] + ... + x[i] along an axis; dx[i] = dout[i] + ... + dout[-1]."""

    @staticmethod
    def forward_numpy(ctx, x, axis):
        ctx.axis = axis
        return np.cumsum(x, axis)

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        return (_from_the_end(np, dout, ctx.axis),)

    @staticmethod
    def forward_cuda(ctx, x, axis):
        ctx.axis = axis
        return array_module("cuda").cumsum(x, axis)

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        return (_from_the_end(array_module("cuda"), dout, ctx.axis),)


def _from_the_end(module: Any, x: Array, axis: int) -> Array:
    return module.ascontiguousarray(module.flip(module.cumsum(module.flip(x, axis), axis), axis))


class OneHot(Function):
    """See `one_hot`. The row of a label `ignored` is 0."""

    differentiable = False

    @staticmethod
    def forward_numpy(ctx, labels, count, ignored=None):
        outside = (labels < 0) | (labels >= count)
        if (outside if ignored is None else outside & (labels != ignored)).any():
            raise ValueError(f"a label lies outside 0 to {count - 1}: {labels.min()} to {labels.max()}")
        return _ones_at(np, labels, count, ignored)

    @staticmethod
    def forward_cuda(ctx, labels, count, ignored=None):
        return _ones_at(array_module("cuda"), labels, count, ignored)


def _ones_at(module: Any, labels: Array, count: int, ignored: int | None) -> Array:
    at = labels[..., None] == module.arange(count)
    return (at if ignored is None else at & (labels != ignored)[..., None]).astype(np.float32)


def argmax(x: Any, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """The position of the first largest element along `axis`, or in the flattened x: int64; NaN is the largest.

    Raises ValueError for no elements and for an axis out of range.
    """
    return _extreme("argmax", x, axis, keepdims)


def argmin(x: Any, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """The position of the first smallest element, otherwise as `argmax`; NaN is the smallest."""
    return _extreme("argmin", x, axis, keepdims)


def _extreme(name: str, x: Any, axis: int | None, keepdims: bool) -> Tensor:
    x = _comparable(x)
    if axis is not None:
        (axis,) = normalize_axes(axis, x.ndim)
    if x.size == 0 if axis is None else x.shape[axis] == 0:
        raise ValueError(f"{name}: {x.shape} has no elements to compare")
    return Positions.apply(x, name=name, axis=axis, keepdims=keepdims)


def argsort(x: Any, axis: int | None = -1) -> Tensor:
    """The positions along `axis` that put x in ascending order, equal elements in theirs: int64.

    Of the flattened x where the axis is None. Raises ValueError for an axis out of range, CudiffError on a GPU inside
    of `capture`.
    """
    x = _comparable(x)
    x, axis = (flatten(x), 0) if axis is None else (x, *normalize_axes(axis, x.ndim))
    if is_capturing(x.device):
        raise CudiffError("argsort waits for the GPU: call it outside of the captured function")
    return Positions.apply(x, name="argsort", axis=axis, kind="stable")


def cumsum(x: Any, axis: int | None = None) -> Tensor:
    """Sums of all elements up to each along `axis`, of the flattened x where None; integers and bools give int64.

    In x's dtype, 16-bit floats summed in float32. Raises ValueError for an axis out of range.
    """
    x = as_tensor(x)
    x, axis = (flatten(x), 0) if axis is None else (x, *normalize_axes(axis, x.ndim))
    if not is_float(x.dtype):
        return CumSum.apply(astype(x, "int64"), axis=axis)
    return astype(CumSum.apply(*as_wide(x), axis=axis), x.dtype)


def one_hot(labels: Any, num_classes: int, dtype: Any = np.float32) -> Tensor:
    """labels integers (...) → (..., num_classes): 1 at each label, 0 elsewhere.

    A label outside 0 to num_classes - 1 raises ValueError on the CPU and gives zeros on a GPU, which is not waited for.
    """
    labels = as_index("one_hot", labels, labels.device if isinstance(labels, Tensor) else "cpu")
    return astype(OneHot.apply(labels, count=num_classes), dtype)


def _comparable(x: Any) -> Tensor:
    """x.detach() in a dtype that CuPy compares."""
    x = as_tensor(x).detach()
    return as_wide(x)[0] if is_float(x.dtype) else x
