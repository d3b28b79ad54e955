"""Shapes, slices and joins. Arrays stay C-contiguous: reshape shares memory, everything else that moves data copies."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from cudiff.backend import Array, array_module, compute_dtype, int32, is_capturing
from cudiff.cuda.accumulate import gradient_target
from cudiff.cuda.kernels.shape import contiguous, move, zeros
from cudiff.cuda.launch import blocks, empty, launch
from cudiff.errors import CudiffError
from cudiff.function import Function
from cudiff.ops.cast import as_index, as_tensor, as_tensors, downcast, upcast
from cudiff.ops.reduce import normalize_axes, sum_to
from cudiff.tensor import Tensor

__all__ = [
    "broadcast_to", "concatenate", "expand_dims", "flatten", "getitem", "reshape", "split", "squeeze", "stack",
    "transpose",
]


class Reshape(Function):
    """The same memory under another shape, forward and backward."""

    @staticmethod
    def forward_numpy(ctx, x, shape):
        ctx.shape = x.shape
        return x.reshape(shape)

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        return (dout.reshape(ctx.shape),)

    forward_cuda, backward_cuda = forward_numpy, backward_numpy


class Transpose(Function):
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

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        return (sum_to(dout, ctx.shape),)


class Slice(Function):
    """x[index] for a basic index: integers, slices, None and Ellipsis."""

    @staticmethod
    def forward_numpy(ctx, x, index):
        ctx.shape, ctx.index = x.shape, index
        return np.asarray(x[index], order="C")

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        dx = into[0]
        if dx is None:
            dx = np.zeros(ctx.shape, dout.dtype)
        dx[ctx.index] += dout
        return (dx,)

    @staticmethod
    def forward_cuda(ctx, x, index):
        ctx.shape, ctx.index = x.shape, index
        view = x[index]
        whole = view.flags.c_contiguous and view.data.ptr % 16 == 0  # kernels expect aligned arrays
        return view if whole else contiguous(view)

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        dx, accumulate = gradient_target(into[0], ctx.shape, dout.dtype)
        if not accumulate:
            dx = zeros(ctx.shape, dout.dtype)
        move(dx[ctx.index], dout, accumulate)
        return (dx,)


class Take(Function):
    """out[i] = x[index[i]] along the first axis; a row's gradient is summed in the order of i."""

    @staticmethod
    def forward_numpy(ctx, x, index):
        ctx.shape = x.shape
        ctx.save(index)
        return x[index]

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        total = np.zeros(ctx.shape, compute_dtype(dout.dtype))
        np.add.at(total, ctx.saved[0], upcast(dout))
        return downcast(total, dout.dtype), None

    @staticmethod
    def forward_cuda(ctx, x, index):
        ctx.shape = x.shape
        ctx.save(index)
        return _rows(x, index)

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        (index,) = ctx.saved
        dx, accumulate = gradient_target(into[0], ctx.shape, dout.dtype)
        sizes = map(np.int64, (ctx.shape[0], math.prod(ctx.shape[1:]), index.size))
        launch("shape", "take_backward", blocks(dx.size, 256), 256, (dout, index, dx, accumulate, *sizes), T=dx.dtype)
        return dx, None


class Choose(Function):
    """The rows of x where a mask of one axis is true. A row's gradient is read by its rank among them."""

    @staticmethod
    def forward_numpy(ctx, x, mask):
        ctx.save(mask)
        return x[mask]

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        (mask,) = ctx.saved
        dx = np.zeros((len(mask), *dout.shape[1:]), dout.dtype)
        dx[mask] = dout
        return dx, None

    @staticmethod
    def forward_cuda(ctx, x, mask):
        if is_capturing("cuda"):
            raise CudiffError("a mask's result has a size that a captured function does not know: use where()")
        ctx.save(mask)
        return _rows(x, array_module("cuda").flatnonzero(mask))

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        cupy, (mask,) = array_module("cuda"), ctx.saved
        return _rows(dout, cupy.where(mask, cupy.cumsum(mask) - 1, len(dout))), None


def _rows(x: Array, index: Array) -> Array:
    """Rows of a CuPy array; one that it does not have is zeros."""
    out = empty((*index.shape, *x.shape[1:]), x.dtype)
    sizes = map(np.int64, (x.shape[0], math.prod(x.shape[1:]), index.size))
    launch("shape", "take", blocks(out.size, 1024), 256, (x, index.astype(int32, copy=False), out, *sizes), T=x.dtype)
    return out


class Concatenate(Function):
    @staticmethod
    def forward_numpy(ctx, *arrays, axis):
        ctx.axis, ctx.ends = axis, np.cumsum([x.shape[axis] for x in arrays])
        return np.concatenate(arrays, axis)

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        parts = np.split(dout, ctx.ends[:-1], ctx.axis)
        return tuple(part.copy() if needed else None for part, needed in zip(parts, needs, strict=True))

    @staticmethod
    def forward_cuda(ctx, *arrays, axis):
        ctx.axis, ctx.shapes = axis, [x.shape for x in arrays]
        shape = list(arrays[0].shape)
        shape[axis] = sum(x.shape[axis] for x in arrays)
        out = empty(tuple(shape), arrays[0].dtype)
        for view, x in zip(_parts(out, [x.shape[axis] for x in arrays], axis), arrays, strict=True):
            move(view, x)
        return out

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        grads = []
        views = _parts(dout, [shape[ctx.axis] for shape in ctx.shapes], ctx.axis)
        for view, needed, total in zip(views, needs, into, strict=True):
            dx, accumulate = gradient_target(total, view.shape, dout.dtype) if needed else (None, False)
            if needed:
                move(dx, view, accumulate)
            grads.append(dx)
        return tuple(grads)


class Split(Function):
    """Parts of `sizes` along `axis`; a part without gradient counts as zero."""

    @staticmethod
    def forward_numpy(ctx, x, sizes, axis):
        ctx.shape, ctx.axis, ctx.ends = x.shape, axis, np.cumsum(sizes)
        return tuple(part.copy() for part in np.split(x, ctx.ends[:-1], axis))

    @staticmethod
    def backward_numpy(ctx, *douts, needs, into):
        dtype = next(dout.dtype for dout in douts if dout is not None)
        dx = np.zeros(ctx.shape, dtype) if into[0] is None else into[0]
        for part, dout in zip(np.split(dx, ctx.ends[:-1], ctx.axis), douts, strict=True):
            if dout is not None:
                part += dout
        return (dx,)

    @staticmethod
    def forward_cuda(ctx, x, sizes, axis):
        ctx.shape, ctx.axis, ctx.sizes = x.shape, axis, sizes
        return tuple(contiguous(view) for view in _parts(x, sizes, axis))

    @staticmethod
    def backward_cuda(ctx, *douts, needs, into):
        dtype = next(dout.dtype for dout in douts if dout is not None)
        dx, accumulate = gradient_target(into[0], ctx.shape, dtype)
        if not accumulate and any(dout is None for dout in douts):
            dx = zeros(ctx.shape, dtype)
        for view, dout in zip(_parts(dx, ctx.sizes, ctx.axis), douts, strict=True):
            if dout is not None:
                move(view, dout, accumulate)
        return (dx,)


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
    shape = tuple(map(operator.index, shape if isinstance(shape, tuple | list) else (shape,)))
    return Reshape.apply(x, shape=_resolve(shape, x.size))


def flatten(x: Any, start: int = 0) -> Tensor:
    """All axes from `start` on in one."""
    x = as_tensor(x)
    return reshape(x, (*x.shape[:start], math.prod(x.shape[start:])))


def expand_dims(x: Any, axis: int | tuple[int, ...]) -> Tensor:
    """New axes of size 1 at these places of the result."""
    x = as_tensor(x)
    count = len(axis) if isinstance(axis, tuple) else 1
    axes = normalize_axes(axis, x.ndim + count)
    sizes = iter(x.shape)
    return reshape(x, tuple(1 if i in axes else next(sizes) for i in range(x.ndim + count)))


def squeeze(x: Any, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """Without these axes of size 1 (all such axes where None). Raises ValueError for an axis of another size."""
    x = as_tensor(x)
    axes = normalize_axes(axis, x.ndim) if axis is not None else tuple(i for i, n in enumerate(x.shape) if n == 1)
    if any(x.shape[i] != 1 for i in axes):
        raise ValueError(f"squeeze needs axes of size 1, not {axes} of shape {x.shape}")
    return reshape(x, tuple(n for i, n in enumerate(x.shape) if i not in axes))


def transpose(x: Any, axes: Sequence[int] | None = None) -> Tensor:
    """Axes in another order (reversed where None), copied."""
    x = as_tensor(x)
    axes = tuple(range(x.ndim))[::-1] if axes is None else tuple(operator.index(i) for i in axes)
    if len(normalize_axes(axes, x.ndim)) != x.ndim:
        raise ValueError(f"transpose of a tensor of {x.ndim} dimensions got the axes {axes}")
    return Transpose.apply(x, axes=tuple(i % x.ndim for i in axes))


def broadcast_to(x: Any, shape: Sequence[int]) -> Tensor:
    """x repeated along axes of size 1 and new leading axes, copied. Raises ValueError where the shapes do not agree."""
    x = as_tensor(x)
    shape = tuple(shape)
    if shape != x.shape and np.broadcast_shapes(shape, x.shape) != shape:
        raise ValueError(f"shape {x.shape} does not broadcast to {shape}")
    return x if shape == x.shape else BroadcastTo.apply(x, shape=shape)


def getitem(x: Any, index: Any) -> Tensor:
    """x[index]: integers, slices, None and Ellipsis, one integer array or tensor along the first axis, or a mask.

    A mask of x's first axes, x[x > 0], gives the rows where it is true; not within `capture`. Raises IndexError for an
    integer out of range and for a mask of another shape, TypeError for any other index. On CUDA an index array's values
    are not checked: one that is out of range gives a row of zeros and gets no gradient.
    """
    x = as_tensor(x)
    if isinstance(index, list | np.ndarray | Tensor):
        dtype = index.dtype if isinstance(index, Tensor) else np.asarray(index).dtype
        if dtype.kind == "b":
            return _choose(x, index if isinstance(index, Tensor) else Tensor(index, device=x.device))
        return Take.apply(x, as_index("getitem", index, x.device))
    index = index if isinstance(index, tuple) else (index,)
    if not x.shape and any(isinstance(item, int | np.integer | slice) for item in index):
        raise TypeError("a 0-d tensor has no elements to index or go through: .item() is its number")
    for item in index:
        basic = item is None or item is Ellipsis or isinstance(item, int | np.integer | slice)
        if isinstance(item, bool) or not basic:
            raise TypeError(
                f"cannot index with {type(item).__name__}: use integers, slices, None, Ellipsis, or one integer array "
                "alone, along the first axis"
            )
    return Slice.apply(x, index=index)


def positions(mask: Tensor) -> Tensor:
    """Where a mask of one axis is true, int32."""
    return Tensor(array_module(mask.device).flatnonzero(mask.data).astype(int32))


def _choose(x: Tensor, mask: Tensor) -> Tensor:
    if not mask.ndim or mask.shape != x.shape[: mask.ndim]:
        raise IndexError(f"a mask of shape {mask.shape} is not of the first axes of a tensor of shape {x.shape}")
    return Choose.apply(reshape(x, (mask.size, *x.shape[mask.ndim :])), reshape(mask, mask.size))


def concatenate(tensors: Sequence[Any], axis: int = 0) -> Tensor:
    """Tensors joined along an existing axis, in their common dtype; their other sizes must agree."""
    tensors = tuple(tensors)
    if not tensors:
        raise ValueError("concatenate needs at least one tensor")
    tensors = as_tensors(*tensors)
    (axis,) = normalize_axes(axis, tensors[0].ndim)
    shapes = {t.shape[:axis] + t.shape[axis + 1 :] for t in tensors}
    if len(shapes) > 1 or len({t.ndim for t in tensors}) > 1:
        raise ValueError(f"shapes {[t.shape for t in tensors]} do not join along axis {axis}")
    return Concatenate.apply(*tensors, axis=axis)


def stack(tensors: Sequence[Any], axis: int = 0) -> Tensor:
    """Tensors of one shape joined along a new axis."""
    return concatenate([expand_dims(t, axis) for t in as_tensors(*tensors)], axis)


def split(x: Any, sections: int | Sequence[int], axis: int = 0) -> tuple[Tensor, ...]:
    """Parts along `axis`: so many equal ones, or cut before these positions, as in NumPy."""
    x = as_tensor(x)
    (axis,) = normalize_axes(axis, x.ndim)
    size = x.shape[axis]
    if isinstance(sections, int):
        if sections < 1 or size % sections:
            raise ValueError(f"axis {axis} of size {size} does not split into {sections} equal parts")
        cuts = [size // sections * i for i in range(sections + 1)]
    else:
        cuts = [0, *sections, size]
    sizes = tuple(int(stop - start) for start, stop in itertools.pairwise(cuts))
    if any(n < 0 for n in sizes):
        raise ValueError(f"cut positions {sections} do not rise within axis {axis} of size {size}")
    return Split.apply(x, sizes=sizes, axis=axis)
