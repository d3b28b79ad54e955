"""Shapes and joins. Arrays stay C-contiguous: reshape shares memory, everything else that moves data copies."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from cudiff.backend import Array, array_module
from cudiff.cuda.accumulate import gradient_target
from cudiff.cuda.kernels.shape import contiguous, join, move, zeros
from cudiff.cuda.launch import empty
from cudiff.function import Function
from cudiff.ops.cast import as_tensor, as_tensors
from cudiff.ops.reduce import normalize_axes, normalize_axis, sum_to
from cudiff.tensor import Tensor

__all__ = [
    "broadcast_to", "concatenate", "expand_dims", "flatten", "reshape", "split", "squeeze", "stack", "transpose",
]


class Reshape(Function):
    """The same memory under another shape, forward and backward."""

    takes_wide = True
    shares_memory = True

    @staticmethod
    def forward_numpy(ctx, x, shape):
        ctx.shape = x.shape
        return x.reshape(shape)

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        return (dout.reshape(ctx.shape),)

    forward_cuda, backward_cuda = forward_numpy, backward_numpy


class Transpose(Function):
    takes_wide = True

    @staticmethod
    def forward_numpy(ctx, x, axes):
        ctx.axes = axes
        return x.transpose(axes).copy()

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        return (dout.transpose([ctx.axes.index(i) for i in range(dout.ndim)]).copy(),)

    @staticmethod
    def forward_cuda(ctx, x, axes):
        ctx.axes = axes
        return contiguous(x.transpose(axes))

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        view = dout.transpose([ctx.axes.index(i) for i in range(dout.ndim)])
        dx, accumulate = gradient_target(into[0], view.shape, dout.dtype)
        move(dx, view, accumulate)
        return (dx,)


class BroadcastTo(Function):
    @staticmethod
    def forward_numpy(ctx, x, shape):
        ctx.shape = x.shape
        out = np.empty(shape, x.dtype)
        out[...] = x
        return out

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        return (sum_to(dout, ctx.shape),)

    @staticmethod
    def forward_cuda(ctx, x, shape):
        ctx.shape = x.shape
        return contiguous(array_module("cuda").broadcast_to(x, shape))

    backward_cuda = backward_numpy


class Concatenate(Function):
    @staticmethod
    def forward_numpy(ctx, *arrays, axis):
        ctx.axis, ctx.sizes = axis, [x.shape[axis] for x in arrays]
        return np.concatenate(arrays, axis)

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        parts = _parts(dout, ctx.sizes, ctx.axis)
        return tuple(part.copy() if needed else None for part, needed in zip(parts, needs, strict=True))

    @staticmethod
    def forward_cuda(ctx, *arrays, axis):
        ctx.axis, ctx.sizes = axis, [x.shape[axis] for x in arrays]
        shape = list(arrays[0].shape)
        shape[axis] = sum(ctx.sizes)
        out = empty(tuple(shape), arrays[0].dtype)
        join(out, arrays, axis)
        return out

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        grads: list[Array | None] = [None] * len(needs)
        for i, view in enumerate(_parts(dout, ctx.sizes, ctx.axis)):
            if needs[i]:
                grads[i], accumulate = gradient_target(into[i], view.shape, dout.dtype)
                move(grads[i], view, accumulate)
        return tuple(grads)


class Split(Function):
    """Parts of `sizes` along `axis`; a part without gradient counts as zero."""

    takes_wide = True

    @staticmethod
    def forward_numpy(ctx, x, sizes, axis):
        ctx.shape, ctx.axis, ctx.sizes = x.shape, axis, sizes
        return tuple(part.copy() for part in _parts(x, sizes, axis))

    @staticmethod
    def backward_numpy(ctx, *douts, needs, into):
        dx = np.zeros(ctx.shape, _widest(douts)) if into[0] is None else into[0]
        for part, dout in zip(_parts(dx, ctx.sizes, ctx.axis), douts, strict=True):
            if dout is not None:
                part += dout
        return (dx,)

    @staticmethod
    def forward_cuda(ctx, x, sizes, axis):
        ctx.shape, ctx.axis, ctx.sizes = x.shape, axis, sizes
        if len(set(sizes)) > 1 or x.size >= 2**31:  # too many for one copy
            return tuple(contiguous(view) for view in _parts(x, sizes, axis))
        shape = (*x.shape[:axis], sizes[0], *x.shape[axis + 1 :])  # of equal parts, all made by one copy
        parts = x.reshape(math.prod(x.shape[:axis]), len(sizes), math.prod(shape[axis:])).transpose(1, 0, 2)
        return tuple(part.reshape(shape) for part in contiguous(parts))

    @staticmethod
    def backward_cuda(ctx, *douts, needs, into):
        dtype = _widest(douts)
        douts = tuple([dout if dout is None or dout.dtype == dtype else dout.astype(dtype) for dout in douts])
        dx, accumulate = gradient_target(into[0], ctx.shape, dtype)
        if not accumulate and all(dout is not None for dout in douts):
            join(dx, douts, ctx.axis)
            return (dx,)
        if not accumulate:
            dx = zeros(ctx.shape, dtype)
        for view, dout in zip(_parts(dx, ctx.sizes, ctx.axis), douts, strict=True):
            if dout is not None:
                move(view, dout, accumulate)
        return (dx,)


def _widest(arrays: Sequence[Array | None]) -> np.dtype:
    """The dtype with the most bytes: gradients of one 16-bit tensor's parts may be float32."""
    return max((array.dtype for array in arrays if array is not None), key=lambda dtype: dtype.itemsize)


def _parts(array: Array, sizes: Sequence[int], axis: int) -> list[Array]:
    """Views of `array` cut into `sizes` along `axis`."""
    ends = list(itertools.accumulate(sizes))
    return [array[(slice(None),) * axis + (slice(end - size, end),)] for size, end in zip(sizes, ends, strict=True)]


def _resolve(shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    """`shape` with its -1 filled in. Raises ValueError where the sizes do not agree."""
    if shape.count(-1) == 1:
        rest = math.prod(n for n in shape if n != -1)
        if rest and size % rest == 0:
            shape = tuple(size // rest if n == -1 else n for n in shape)
    if any(n < 0 for n in shape) or math.prod(shape) != size:
        raise ValueError(f"{size} elements do not fill the shape {shape}")
    return shape


def reshape(x: Any, shape: int | Sequence[int]) -> Tensor:
    """The same elements in another shape, sharing memory; one size may be -1."""
    x = as_tensor(x)
    shape = tuple(map(operator.index, shape if isinstance(shape, tuple | list | np.ndarray) else (shape,)))
    return Reshape.apply(x, shape=_resolve(shape, x.size))


def flatten(x: Any, start: int = 0) -> Tensor:
    """x with all axes from `start` on merged to one. Raises ValueError for a start out of range."""
    x = as_tensor(x)
    if not -x.ndim <= start <= x.ndim:
        raise ValueError(f"flatten: start {start} is out of range for a tensor of {x.ndim} dimensions")
    return reshape(x, (*x.shape[:start], math.prod(x.shape[start:])))


def expand_dims(x: Any, axis: int | tuple[int, ...]) -> Tensor:
    """x with new axes of size 1 at these positions of the result."""
    x = as_tensor(x)
    count = len(axis) if isinstance(axis, tuple | list) else 1
    axes = normalize_axes(axis, x.ndim + count)
    sizes = iter(x.shape)
    return reshape(x, tuple(1 if i in axes else next(sizes) for i in range(x.ndim + count)))


def squeeze(x: Any, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """x without these axes of size 1 (all such axes where None). Raises ValueError for an axis of another size."""
    x = as_tensor(x)
    axes = normalize_axes(axis, x.ndim) if axis is not None else tuple(i for i, n in enumerate(x.shape) if n == 1)
    if any(x.shape[i] != 1 for i in axes):
        raise ValueError(f"squeeze needs axes of size 1, not {axes} of shape {x.shape}")
    return reshape(x, tuple(n for i, n in enumerate(x.shape) if i not in axes))


def transpose(x: Any, axes: Sequence[int] | None = None) -> Tensor:
    """A copy of x with its axes in another order (reversed where None)."""
    x = as_tensor(x)
    axes = tuple(range(x.ndim))[::-1] if axes is None else tuple(operator.index(i) for i in axes)
    if len(normalize_axes(axes, x.ndim)) != x.ndim:
        raise ValueError(f"transpose of a tensor of {x.ndim} dimensions got the axes {axes}")
    return Transpose.apply(x, axes=tuple(i % x.ndim for i in axes))


def broadcast_to(x: Any, shape: int | Sequence[int]) -> Tensor:
    """x repeated along axes of size 1 and new leading axes, copied. Raises ValueError where the shapes do not agree."""
    x = as_tensor(x)
    shape = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
    if shape != x.shape and np.broadcast_shapes(shape, x.shape) != shape:
        raise ValueError(f"shape {x.shape} does not broadcast to {shape}")
    return x if shape == x.shape else BroadcastTo.apply(x, shape=shape)


def concatenate(tensors: Sequence[Any], axis: int | None = 0) -> Tensor:
    """Tensors joined along an existing axis, in their common dtype; their other sizes must agree. If axis is None, they
    are flattened first."""
    tensors = tuple(tensors)
    if not tensors:
        raise ValueError("concatenate needs at least one tensor")
    tensors = as_tensors(*tensors) if axis is not None else list(map(flatten, as_tensors(*tensors)))
    axis = normalize_axis(0 if axis is None else axis, tensors[0].ndim)
    shapes = {t.shape[:axis] + t.shape[axis + 1 :] for t in tensors}
    if len(shapes) > 1 or len({t.ndim for t in tensors}) > 1:
        raise ValueError(f"shapes {[t.shape for t in tensors]} do not join along axis {axis}")
    return Concatenate.apply(*tensors, axis=axis)


def stack(tensors: Sequence[Any], axis: int = 0) -> Tensor:
    """Tensors of one shape joined along a new axis. Raises ValueError for no tensors."""
    if not len(tensors):
        raise ValueError("stack: there are no tensors to join")
    tensors = as_tensors(*tensors)
    axis = normalize_axis(axis, tensors[0].ndim + 1)
    return concatenate([expand_dims(t, axis) for t in tensors], axis)


def split(x: Any, sections: int | Sequence[int], axis: int = 0) -> tuple[Tensor, ...]:
    """x in parts along `axis`: this number of equal ones, or cut before these positions.

    Raises ValueError where equal parts leave a rest, and for positions that fall, are below 0 or lie beyond the axis.
    """
    x = as_tensor(x)
    axis = normalize_axis(axis, x.ndim)
    size = x.shape[axis]
    if isinstance(sections, int | np.integer):
        if sections < 1 or size % sections:
            raise ValueError(f"axis {axis} of size {size} does not split into {sections} equal parts")
        cuts = [size // sections * i for i in range(sections + 1)]
    else:
        cuts = [0, *map(operator.index, sections), size]
    sizes = tuple(int(stop - start) for start, stop in itertools.pairwise(cuts))
    if any(n < 0 for n in sizes):
        raise ValueError(f"cut positions {sections} do not rise within axis {axis} of size {size}")
    return Split.apply(x, sizes=sizes, axis=axis)
