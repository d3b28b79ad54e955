"""Axes and elements in another order, by NumPy's names: compositions of slices, joins and copies."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from cudiff.backend import Array, array_module
from cudiff.cuda.accumulate import gradient_target
from cudiff.cuda.kernels.shape import move
from cudiff.cuda.launch import empty
from cudiff.function import Function
from cudiff.ops.arithmetic import where
from cudiff.ops.cast import as_input, as_tensor, as_tensors
from cudiff.ops.compare import logical_and
from cudiff.ops.index import getitem
from cudiff.ops.reduce import normalize_axes, normalize_axis, sum
from cudiff.ops.shape import broadcast_to, concatenate, expand_dims, flatten, reshape, transpose
from cudiff.tensor import Tensor

__all__ = [
    "atleast_1d", "atleast_2d", "broadcast_arrays", "diagonal", "flip", "hstack", "moveaxis", "ravel", "repeat", "roll",
    "swapaxes", "tile", "trace", "tril", "triu", "vstack",
]


def swapaxes(x: Any, axis1: int, axis2: int) -> Tensor:
    """A copy of x with two axes swapped."""
    x = as_tensor(x)
    axes = list(range(x.ndim))
    first, second = normalize_axis(axis1, x.ndim), normalize_axis(axis2, x.ndim)
    axes[first], axes[second] = second, first
    return transpose(x, axes)


def moveaxis(x: Any, source: int | Sequence[int], destination: int | Sequence[int]) -> Tensor:
    """A copy of x with the axes `source` at `destination`; the others keep their order."""
    x = as_tensor(x)
    found, places = _axes(source, x.ndim), _axes(destination, x.ndim)
    if len(found) != len(places):
        raise ValueError(f"moveaxis got {len(found)} axes and {len(places)} places for them")
    order = [i for i in range(x.ndim) if i not in found]
    for place, axis in sorted(zip(places, found, strict=True)):
        order.insert(place, axis)
    return transpose(x, order)


def flip(x: Any, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """x with its elements in reversed order along these axes, all where None."""
    x = as_tensor(x)
    axes = normalize_axes(axis, x.ndim)
    return getitem(x, tuple(slice(None, None, -1 if i in axes else 1) for i in range(x.ndim)))


class Roll(Function):
    """x shifted along one axis by `shift` elements, from 0 to the axis's size."""

    takes_wide = True

    @staticmethod
    def forward_numpy(ctx, x, shift, axis):
        ctx.shift, ctx.axis = shift, axis
        return np.roll(x, shift, axis)

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        return (np.roll(dout, -ctx.shift, ctx.axis),)

    @staticmethod
    def forward_cuda(ctx, x, shift, axis):
        ctx.shift, ctx.axis = shift, axis
        out = empty(x.shape, x.dtype)
        _roll_into(out, x, shift, axis)
        return out

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        dx, accumulate = gradient_target(into[0], dout.shape, dout.dtype)
        _roll_into(dx, dout, dout.shape[ctx.axis] - ctx.shift, ctx.axis, accumulate)
        return (dx,)


def _roll_into(out: Array, x: Array, shift: int, axis: int, accumulate: bool = False) -> None:
    rows, cut = (slice(None),) * axis, x.shape[axis] - shift
    for to, start in ((slice(shift), slice(cut, None)), (slice(shift, None), slice(cut))):
        move(out[(*rows, to)], x[(*rows, start)], accumulate)


def roll(x: Any, shift: int | Sequence[int], axis: int | Sequence[int] | None = None) -> Tensor:
    """x shifted by `shift` elements along `axis`; those shifted beyond the end come first.

    Several axes have a shift each, or one for all. If the axis is None, the flattened x is shifted.
    """
    x = as_tensor(x)
    if axis is None:
        return reshape(roll(flatten(x), shift, 0), x.shape)
    shifts, axes = np.atleast_1d(shift).tolist(), np.atleast_1d(axis).tolist()
    if not all(isinstance(step, int) for step in shifts):
        raise TypeError(f"roll moves by whole elements, not by {shift}")
    if len(shifts) != len(axes) and 1 not in (len(shifts), len(axes)):
        raise ValueError(f"roll got {len(shifts)} shifts for {len(axes)} axes")
    if not (shifts and axes):
        return x
    count = max(len(shifts), len(axes))
    for step, i in zip(shifts * (count // len(shifts)), axes * (count // len(axes)), strict=True):
        i = normalize_axis(i, x.ndim)
        if x.size and step % x.shape[i]:
            x = Roll.apply(x, shift=step % x.shape[i], axis=i)
    return x


def tile(x: Any, reps: int | Sequence[int]) -> Tensor:
    """x as a whole repeated `reps` times along each axis; fewer numbers than axes are those of the last axes."""
    x = as_tensor(x)
    times = _counts("tile", reps)
    sizes = (1,) * (len(times) - x.ndim) + x.shape
    times = (1,) * (x.ndim - len(times)) + times
    split = reshape(x, tuple(n for size in sizes for n in (1, size)))
    wide = broadcast_to(split, tuple(n for pair in zip(times, sizes, strict=True) for n in pair))
    return reshape(wide, tuple(a * b for a, b in zip(times, sizes, strict=True)))


def repeat(x: Any, repeats: int | Sequence[int], axis: int | None = None) -> Tensor:
    """Each element along `axis`, or of the flattened x if None, `repeats` times: one number, or one for each."""
    x = as_tensor(x)
    if axis is None:
        return repeat(flatten(x), repeats, 0)
    axis = normalize_axis(axis, x.ndim)
    times, size = _counts("repeat", repeats), x.shape[axis]
    if len(times) == 1:
        before, after = x.shape[: axis + 1], x.shape[axis + 1 :]
        wide = broadcast_to(expand_dims(x, axis + 1), (*before, *times, *after))
        return reshape(wide, (*before[:-1], size * times[0], *after))
    if len(times) != size:
        raise ValueError(f"repeat got {len(times)} numbers for an axis of size {size}")
    return moveaxis(getitem(moveaxis(x, axis, 0), np.repeat(np.arange(size), times)), 0, axis)


def ravel(x: Any) -> Tensor:
    """x with all its axes in one, sharing memory."""
    return flatten(x)


def atleast_1d(x: Any) -> Tensor:
    """x; if it is 0-d, in the shape (1,)."""
    x = as_tensor(x)
    return x if x.ndim else reshape(x, (1,))


def atleast_2d(x: Any) -> Tensor:
    """x; if it has fewer than two axes, as one row."""
    x = atleast_1d(x)
    return x if x.ndim > 1 else reshape(x, (1, x.size))


def hstack(tensors: Sequence[Any]) -> Tensor:
    """Tensors joined along their second axis; 1-d tensors along their only one."""
    found = [atleast_1d(x) for x in as_tensors(*tensors)]
    return concatenate(found, 0 if found and found[0].ndim == 1 else 1)


def vstack(tensors: Sequence[Any]) -> Tensor:
    """Tensors joined along their first axis; 1-d tensors are rows."""
    return concatenate([atleast_2d(x) for x in as_tensors(*tensors)])


def broadcast_arrays(*tensors: Any) -> tuple[Tensor, ...]:
    """Each as `broadcast_to` the shape of all together, in its own dtype. Beside a tensor on a GPU arrays and numbers
    are copied there, float64 as float32. Raises ValueError where the shapes do not agree."""
    there = any(isinstance(x, Tensor) and x.device == "cuda" for x in tensors)
    found = [as_input(x).to("cuda") if there and not isinstance(x, Tensor) else as_tensor(x) for x in tensors]
    try:
        shape = np.broadcast_shapes(*(x.shape for x in found))
    except ValueError:
        raise ValueError(f"the shapes {', '.join(str(x.shape) for x in found)} do not broadcast") from None
    return tuple(broadcast_to(x, shape) for x in found)


def diagonal(x: Any, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Tensor:
    """A copy of the elements whose index of axis2 - that of axis1 is `offset`; a last axis replaces both axes."""
    x = as_tensor(x)
    if x.ndim < 2:
        raise ValueError(f"a diagonal needs two axes or more, not the shape {x.shape}")
    x = moveaxis(x, (axis1, axis2), (-2, -1))
    rows, columns = x.shape[-2:]
    start, count = (offset, columns - offset) if offset >= 0 else (-offset * columns, rows + offset)
    count = max(min(count, rows, columns), 0)
    return getitem(flatten(x, x.ndim - 2), (..., slice(start, start + count * (columns + 1), columns + 1)))


def trace(x: Any, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Tensor:
    """The sum of a `diagonal`."""
    return sum(diagonal(x, offset, axis1, axis2), -1)


def tril(x: Any, k: int = 0) -> Tensor:
    """Matrices x (..., N, M) with zeros where column - row is above k."""
    return _triangle("tril", x, k, below=True)


def triu(x: Any, k: int = 0) -> Tensor:
    """Matrices x (..., N, M) with zeros where column - row is below k."""
    return _triangle("triu", x, k - 1, below=False)


def _triangle(name: str, x: Any, k: int, below: bool) -> Tensor:
    x = as_tensor(x)
    if x.ndim < 2:
        raise ValueError(f"{name} takes matrices, not the shape {x.shape}")
    arange = array_module(x.device).arange
    columns, ends = arange(x.shape[-1]), arange(k, x.shape[-2] + k)[:, None]
    kept = Tensor(columns <= ends if below else columns > ends)
    return logical_and(x, kept) if x.dtype == np.bool_ else where(kept, x, 0)


def _axes(axes: int | Sequence[int], ndim: int) -> list[int]:
    """`axes` counted from 0, in their order. Raises ValueError as `normalize_axes` does."""
    given = [axes] if isinstance(axes, int | np.integer) else list(axes)
    normalize_axes(tuple(given), ndim)
    return [operator.index(i) % ndim for i in given]


def _counts(name: str, given: int | Sequence[int]) -> tuple[int, ...]:
    counts = tuple(map(operator.index, np.atleast_1d(given.numpy() if isinstance(given, Tensor) else given).tolist()))
    if any(n < 0 for n in counts):
        raise ValueError(f"{name} takes numbers that are not negative: {given}")
    return counts
