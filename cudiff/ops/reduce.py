"""Reductions over axes, in a fixed order and with float32 accumulation for the 16-bit types."""

from __future__ import annotations

import builtins
import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from cudiff.backend import Array, compute_dtype, device_of, float32, int64, is_float
from cudiff.cuda.accumulate import gradient_target
from cudiff.cuda.launch import aligned, blocks, empty, launch
from cudiff.cuda.sums import add_rows
from cudiff.function import Function
from cudiff.gradient import Slot
from cudiff.ops.cast import as_floating, as_tensor, astype, downcast, masked, upcast
from cudiff.tensor import Tensor
from cudiff.threads import cut, parallel_map, unflagged
from cudiff.values import flag

__all__ = ["amax", "amin", "max", "mean", "min", "ptp", "std", "sum", "var"]

MOST_ROWS = 1024  # of a deferred sum: few threads add them up
SHORT = 32  # elements of a row that NumPy takes by columns


def reduced(function: np.ufunc, x: np.ndarray, axes: int | tuple[int, ...]) -> np.ndarray:
    """function.reduce(x) over `axes`, which stay as 1; in float32 and wider. Short rows are taken column by column: the
    maxima of 400,000 rows of 10 take 2 ms on one core, and 16 row by row."""
    last = axes if isinstance(axes, tuple) else (axes,)
    if last not in ((-1,), (x.ndim - 1,)) or not 1 < x.shape[-1] <= SHORT or x.size < 64 * SHORT:
        return function.reduce(x, axis=axes, keepdims=True)
    out = function(x[..., 0], x[..., 1])
    for i in range(2, x.shape[-1]):
        function(out, x[..., i], out=out)
    return out[..., None]


def normalize_axes(axis: int | tuple[int, ...] | None, ndim: int) -> tuple[int, ...]:
    """The axes as sorted non-negative numbers. Raises NumPy's AxisError for one out of range, ValueError for one that
    is named twice."""
    axes = range(ndim) if axis is None else axis if isinstance(axis, tuple | list) else (axis,)
    found = set()
    for item in map(operator.index, axes):
        if not -ndim <= item < ndim:
            raise np.exceptions.AxisError(f"axis {item} is out of range for a tensor of {ndim} dimensions")
        if item % ndim in found:
            raise ValueError(f"axis {item} is named twice")
        found.add(item % ndim)
    return tuple(sorted(found))


def normalize_axis(axis: int, ndim: int) -> int:
    """One axis as a non-negative number. Raises TypeError for several and for None, ValueError as `normalize_axes`."""
    return normalize_axes(operator.index(axis), ndim)[0]


def _kept(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...]:
    """`shape` with the reduced axes as 1."""
    return tuple(1 if i in axes else size for i, size in enumerate(shape))


def left(shape: tuple[int, ...], axes: tuple[int, ...], keepdims: bool) -> tuple[int, ...]:
    return _kept(shape, axes) if keepdims else tuple(size for i, size in enumerate(shape) if i not in axes)


def _count(shape: tuple[int, ...], axes: tuple[int, ...]) -> int:
    return math.prod(shape[i] for i in axes)


def _sum_middle(x: np.ndarray) -> np.ndarray:
    """Sum over the middle axis by products with ones: 3 to 7 times as fast as np.sum; more exact in blocks of 256."""
    outer, count, inner = x.shape
    whole = count // 256 * 256
    if outer > 1 or whole == 0:
        return _column_sums(x)
    return _column_sums(x[0, :whole].reshape(-1, 256, inner)).sum(0) + x[0, whole:].sum(0)


@unflagged
def _column_sums(x: np.ndarray) -> np.ndarray:
    ones = np.ones(x.shape[1], x.dtype)
    sums = parallel_map(lambda part: np.matmul(ones, x[part]), cut(len(x), x[:1].nbytes))
    return sums[0] if len(sums) == 1 else np.concatenate(sums)


def _sum_numpy(array: np.ndarray, axes: tuple[int, ...], keepdims: bool, dtype: Any = None) -> np.ndarray:
    if not is_float(array.dtype):
        return np.asarray(np.sum(array, axis=axes, keepdims=keepdims, dtype=dtype))
    wide = upcast(array)
    outer, count, inner = span(array.shape, axes)
    if inner > 1 and count > 1 and len(_runs(array.shape, axes)) == 1:
        total = _sum_middle(wide.reshape(outer, count, inner)).reshape(left(array.shape, axes, keepdims))
    else:
        total = np.asarray(np.sum(wide, axis=axes, keepdims=keepdims))
    return total.astype(dtype or array.dtype, copy=False)


def sum_array(array: Array, axes: Any, keepdims: bool = False, dtype: Any = None) -> Array:
    """Sum of a plain array over `axes` (int, tuple or None) on either backend; `dtype` is the result's."""
    axes = normalize_axes(axes, array.ndim)
    if device_of(array) == "cpu":
        return _sum_numpy(array, axes, keepdims, dtype)
    shape, total, runs = array.shape, array, _runs(array.shape, axes)
    for run in reversed(runs):
        spans, shape = span(shape, run), _kept(shape, run)
        last = run is runs[0]  # between two runs the sum stays in float32
        total = _reduce_cuda("sum", total, *spans, empty(shape, dtype or array.dtype if last else float32))
    return total.reshape(left(array.shape, axes, keepdims))


def _runs(shape: tuple[int, ...], axes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """`axes` in groups of adjacent ones; axes of size 1 between them are ignored."""
    runs: list[tuple[int, ...]] = [()]
    for axis in axes:
        if runs[-1] and math.prod(shape[runs[-1][-1] + 1 : axis]) != 1:
            runs.append(())
        runs[-1] = (*runs[-1], axis)
    return runs


def span(shape: tuple[int, ...], run: tuple[int, ...]) -> tuple[int, int, int]:
    """The shape as (outer, reduce, inner) around one run of axes."""
    first, stop = (run[0], run[-1] + 1) if run else (len(shape), len(shape))
    return math.prod(shape[:first]), math.prod(shape[first:stop]), math.prod(shape[stop:])


def power_of_two(n: int) -> int:
    """The smallest power of two that is not below n, 1 for 0."""
    return 1 << builtins.max(n - 1, 0).bit_length()


def _reduce_cuda(
    name: str, x: Array, outer: int, count: int, inner: int, out: Array, scale: float = 1.0, accumulate: bool = False,
    operands: tuple = (), combine: str = "sum",
) -> Array:
    """Run a kernel of reduce.cu. A second launch combines the parts of a long middle axis."""
    if not out.size:
        return out
    parts, run = _in_parts(name, x, outer, count, inner, operands)
    if parts == 1:
        run(out, scale, accumulate)
        return out
    partial = empty((outer, parts, inner), float32 if is_float(out.dtype) else out.dtype)
    run(partial, 1.0, False)
    return _reduce_cuda(combine, partial, outer, parts, inner, out, scale, accumulate)


def _in_parts(name: str, x: Array, outer: int, count: int, inner: int, operands: tuple = ()) -> tuple[int, Callable]:
    """The number of parts of the middle axis, and run(out, scale, accumulate), which writes [outer][parts][inner]."""
    vec = is_float(x.dtype) and aligned(x, inner)
    grid, block, chunk = _cut(outer, count, inner, 16 // x.itemsize if vec else 1)
    sizes = tuple(map(np.int64, (outer, count, inner, chunk)))

    def run(out: Array, scale: float, accumulate: bool) -> None:
        args = (x, *operands, out, scale, accumulate, *sizes)
        launch("reduce", name, grid, block, args, T=x.dtype, OUT=out.dtype, VEC=int(vec))

    return grid[1], run


@functools.cache
def _cut(outer: int, count: int, inner: int, pack: int) -> tuple[tuple[int, int], tuple[int, int, int], int]:
    """The grid (blocks, parts), the block (columns, lanes, rows), and the elements of the middle axis in a part.

    pack: the columns that a thread reads at once.
    """
    columns = builtins.min(32, power_of_two(inner // pack))
    lanes = builtins.min(256 // columns, power_of_two(count))
    rows = builtins.min(256 // (columns * lanes), power_of_two(outer), 64)
    grid = blocks(outer, rows) * blocks(inner, columns * pack)
    chunk = blocks(count, builtins.min(blocks(1024, grid), blocks(count, 16 * lanes), 16 * lanes))
    return (grid, blocks(count, chunk)), (columns, lanes, rows), chunk


def sum_rows_cuda(x: Array, into: Slot | None, sums: Array | None = None) -> Array:
    """Sum of x (..., C) over all axes but the last, float32 (C,), in the array of `gradient_target`.

    sums: partial sums of x, float32 (..., C), which are read in its place. The launch may be deferred (see
    cudiff.cuda.sums): nothing may write to `sums` until the backward has ended.
    """
    width = x.shape[-1]
    out, add = gradient_target(into, (width,), float32)
    if sums is None or sums.size > MOST_ROWS * width:
        terms = x if sums is None else sums
        parts, run = _in_parts("sum", terms, 1, terms.size // width, width)
        sums = empty((parts, width), float32)
        run(sums, 1.0, False)
    add_rows(sums, out, add)
    return out


def _spread_cuda(name: str, operands: tuple, dx: Array, numbers: tuple, spans: tuple[int, int, int]) -> Array:
    """Write or add the gradient of x, dx. operands: the result's gradient, then x where the kernel takes it."""
    _, count, inner = spans
    row = count if inner == 1 else inner
    vec = aligned(dx, row) and all(aligned(x, row) for x in operands[1:2])
    args = (*operands, dx, *numbers, *map(np.int64, spans))
    per_block = 256 * (16 // dx.itemsize if vec else 4)
    launch("reduce", name, blocks(dx.size, per_block), 256, args, T=dx.dtype, OUT=operands[0].dtype, VEC=int(vec))
    return dx


def sum_to(array: Array, shape: tuple[int, ...], dtype: Any = None) -> Array:
    """Undo broadcasting: sum `array` over the axes along which `shape` was broadcast; `array` itself if none was."""
    if array.shape == shape:
        return array
    return sum_array(array, spread_axes(shape, array.shape), dtype=dtype).reshape(shape)


def spread_axes(shape: tuple[int, ...], wide: tuple[int, ...]) -> tuple[int, ...]:
    """The axes of `wide`, to which `shape` broadcasts, along which it repeats."""
    lead = len(wide) - len(shape)
    return tuple([i for i, size in enumerate(wide) if i < lead or (shape[i - lead] == 1 and size != 1)])


class Sum(Function):
    """out = scale * sum of x over `axes`; scale is 1, or 1 / count for the mean."""

    @staticmethod
    def forward_numpy(ctx, x, axes, keepdims, scale=1.0):
        ctx.shape, ctx.axes, ctx.scale = x.shape, axes, scale
        if not is_float(x.dtype):
            return _sum_numpy(x, axes, keepdims)
        out = _sum_numpy(x, axes, keepdims, compute_dtype(x.dtype))
        out *= scale
        return out.astype(x.dtype, copy=False)

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        dout = dout.reshape(_kept(ctx.shape, ctx.axes))
        if ctx.scale != 1:
            dout = downcast(upcast(dout) * ctx.scale, dout.dtype)
        if into[0] is None:
            return (np.broadcast_to(dout, ctx.shape).copy(),)
        into[0] += dout
        return (into[0],)

    @staticmethod
    def forward_cuda(ctx, x, axes, keepdims, scale=1.0):
        ctx.shape, ctx.axes, ctx.scale = x.shape, axes, scale
        if not is_float(x.dtype):
            out = empty(left(x.shape, axes, keepdims), int64)
            return _reduce_cuda("sum_whole", x, *span(x.shape, axes), out, combine="sum_whole")
        return _reduce_cuda("sum", x, *span(x.shape, axes), empty(left(x.shape, axes, keepdims), x.dtype), scale)

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        dx, accumulate = gradient_target(into[0], ctx.shape, dout.dtype)
        return (_spread_cuda("sum_backward", (dout,), dx, (ctx.scale, accumulate), span(ctx.shape, ctx.axes)),)


class Extreme(Function):
    """Maximum (sign 1) or minimum (sign -1). Equal extremes share the gradient equally, as in PyTorch's amax."""

    @staticmethod
    def forward_numpy(ctx, x, axes, keepdims, sign):
        out = reduced(np.maximum if sign > 0 else np.minimum, x, axes)
        ctx.axes = axes
        ctx.save(x, out)
        return out.reshape(left(x.shape, axes, keepdims))

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        x, out = ctx.saved
        share = x == out
        wide = upcast(dout).reshape(out.shape)
        ties = np.maximum(np.sum(share, axis=ctx.axes, keepdims=True, dtype=wide.dtype), 1)  # of NaN there are none
        return (downcast(masked(wide / ties, share), x.dtype),)

    @staticmethod
    def forward_cuda(ctx, x, axes, keepdims, sign):
        name = ("maximum" if sign > 0 else "minimum") + ("" if is_float(x.dtype) else "_whole")
        out = empty(left(x.shape, axes, keepdims), x.dtype)
        _reduce_cuda(name, x, *span(x.shape, axes), out, combine=name)
        ctx.axes = axes
        ctx.save(x, out)
        return out

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        x, out = ctx.saved
        spans = span(x.shape, ctx.axes)
        ties = _reduce_cuda("count", x, *spans, empty(out.shape, float32), operands=(out,))
        dx, accumulate = gradient_target(into[0], x.shape, x.dtype)
        return (_spread_cuda("extreme_backward", (dout, x, out, ties), dx, (accumulate,), spans),)


class Product(Function):
    """The product over `axes`, without a gradient."""

    differentiable = False

    @staticmethod
    def forward_numpy(ctx, x, axes, keepdims):
        return downcast(np.prod(upcast(x), axis=axes, keepdims=keepdims), x.dtype)

    @staticmethod
    def forward_cuda(ctx, x, axes, keepdims):
        out = empty(left(x.shape, axes, keepdims), x.dtype)
        return _reduce_cuda("product", x, *span(x.shape, axes), out, combine="product")


class Position(Function):
    """The position, int64, of the first largest of floats over `axes` (sign 1), or of the first smallest (sign -1)."""

    differentiable = False

    @staticmethod
    def forward_numpy(ctx, x, axes, keepdims, sign):
        outer, count, inner = span(x.shape, axes)
        rows = upcast(x).reshape(outer, count, inner)
        return (np.argmax if sign > 0 else np.argmin)(rows, 1).reshape(left(x.shape, axes, keepdims))

    @staticmethod
    def forward_cuda(ctx, x, axes, keepdims, sign):
        spans = span(x.shape, axes)
        out = empty(left(x.shape, axes, keepdims), int64)
        return _reduce_cuda("position", x, *spans, out, operands=(sign > 0,), combine="minimum_whole") & 0xFFFFFFFF


class Variance(Function):
    """Mean square deviation from the mean (two passes, so a large mean costs no digits), divided by count - ddof. In
    float32 for 16-bit numbers where `wide`."""

    @staticmethod
    def forward_numpy(ctx, x, axes, keepdims, ddof, wide):
        deviation, count = upcast(x), _count(x.shape, axes)
        deviation = deviation - _sum_numpy(deviation, axes, True) / count
        ctx.axes, ctx.scale, ctx.dtype = axes, 1 / (count - ddof), x.dtype
        ctx.save(deviation)
        total = _sum_numpy(np.square(deviation), axes, keepdims) * ctx.scale
        return downcast(total, deviation.dtype if wide else x.dtype)

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        (deviation,) = ctx.saved
        wide = dout.astype(deviation.dtype, copy=False).reshape(_kept(deviation.shape, ctx.axes))
        return ((deviation * (2 * ctx.scale * wide)).astype(ctx.dtype, copy=False),)

    @staticmethod
    def forward_cuda(ctx, x, axes, keepdims, ddof, wide):
        spans = outer, count, inner = span(x.shape, axes)
        ctx.axes, ctx.scale = axes, 1 / (count - ddof)
        mean = _reduce_cuda("sum", x, *spans, empty((outer, inner), float32), 1 / count)
        ctx.save(x, mean)
        out = empty(left(x.shape, axes, keepdims), float32 if wide else x.dtype)
        return _reduce_cuda("square_deviation", x, *spans, out, ctx.scale, operands=(mean,))

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        x, mean = ctx.saved
        dx, accumulate = gradient_target(into[0], x.shape, x.dtype)
        numbers = (2 * ctx.scale, accumulate)
        return (_spread_cuda("variance_backward", (dout, x, mean), dx, numbers, span(x.shape, ctx.axes)),)


Axis = int | tuple[int, ...] | None


def over_axes(function: type[Function], x: Tensor, axis: Axis, keepdims: bool, **attrs: Any) -> Tensor:
    """Apply `function` over adjacent axes, as the kernels need. Others are transposed to the end first."""
    axes, keepdims = normalize_axes(axis, x.ndim), flag("keepdims", keepdims)
    if len(_runs(x.shape, axes)) == 1:
        return function.apply(x, axes=axes, keepdims=keepdims, **attrs)
    others = tuple(i for i in range(x.ndim) if i not in axes)
    last = tuple(range(len(others), x.ndim))
    out = function.apply(x.transpose(others + axes), axes=last, keepdims=False, **attrs)
    return out.reshape(left(x.shape, axes, keepdims))


def sum(x: Any, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Sum over `axis` (all axes where None), in x's dtype; integers and bools as in NumPy, on a GPU in int64."""
    return over_axes(Sum, as_tensor(x), axis, keepdims)


def mean(x: Any, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Arithmetic mean over `axis`; integers give float32. Raises ValueError where there are no elements."""
    x = as_floating(x)
    count = _count(x.shape, normalize_axes(axis, x.ndim))
    if count == 0:
        raise ValueError(f"mean over no elements of shape {x.shape}")
    return over_axes(Sum, x, axis, keepdims, scale=1 / count)


def max(x: Any, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Largest element over `axis`, NaN if one is NaN; equal largest elements share the gradient equally."""
    return _extreme("max", x, axis, keepdims, 1)


def min(x: Any, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Smallest element over `axis`, NaN if one is NaN; equal smallest elements share the gradient equally."""
    return _extreme("min", x, axis, keepdims, -1)


amax, amin = max, min  # NumPy's second names


def _extreme(name: str, x: Any, axis: Axis, keepdims: bool, sign: int) -> Tensor:
    """Raises ValueError where there is a result of no elements."""
    x = as_tensor(x)
    axes = normalize_axes(axis, x.ndim)
    if not _count(x.shape, axes) and 0 not in left(x.shape, axes, False):
        raise ValueError(f"{name} over no elements of shape {x.shape}: there is none")
    return over_axes(Extreme, x, axis, keepdims, sign=sign)


def ptp(x: Any, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """The largest element over `axis` less the smallest."""
    return max(x, axis, keepdims) - min(x, axis, keepdims)


def var(x: Any, axis: Axis = None, keepdims: bool = False, *, ddof: int = 0) -> Tensor:
    """Variance over `axis`, divided by count - ddof (NumPy's default 0; PyTorch's is 1).

    Raises ValueError where there are not more than ddof elements.
    """
    return _variance(as_floating(x), axis, keepdims, ddof)


def std(x: Any, axis: Axis = None, keepdims: bool = False, *, ddof: int = 0) -> Tensor:
    """Square root of `var`; its gradient is NaN where the variance is 0."""
    x = as_floating(x)
    return astype(_variance(x, axis, keepdims, ddof, wide=True) ** 0.5, x.dtype)  # float16 holds few squares


def _variance(x: Tensor, axis: Axis, keepdims: bool, ddof: int, wide: bool = False) -> Tensor:
    count = _count(x.shape, normalize_axes(axis, x.ndim))
    if count <= ddof:
        raise ValueError(f"variance with ddof {ddof} over {count} elements of shape {x.shape}")
    return over_axes(Variance, x, axis, keepdims, ddof=ddof, wide=wide)
