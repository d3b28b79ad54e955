"""Positions of extremes, sorting, quantiles, counts, cumulative sums and products; what sorts, on a GPU by CuPy's own
kernels."""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from cudiff.backend import Array, array_module, float32, int32, int64, is_capturing, is_float
from cudiff.cuda.launch import blocks, empty, launch
from cudiff.errors import CudiffError
from cudiff.function import Function
from cudiff.ops.arithmetic import where
from cudiff.ops.cast import as_floating, as_index, as_tensor, as_tensors, as_wide, astype, downcast, upcast
from cudiff.ops.compare import isnan, not_equal
from cudiff.ops.create import zeros
from cudiff.ops.index import Pick, along, getitem, located
from cudiff.ops.reduce import (
    Axis,
    Position,
    Product,
    left,
    max,
    min,
    normalize_axes,
    normalize_axis,
    over_axes,
    power_of_two,
    span,
)
from cudiff.ops.reduce import sum as total
from cudiff.ops.shape import concatenate, flatten, reshape, stack, transpose
from cudiff.tensor import Tensor, grad_enabled
from cudiff.values import flag

__all__ = [
    "argmax", "argmin", "argsort", "bincount", "cumsum", "diff", "median", "one_hot", "percentile", "prod", "quantile",
    "searchsorted", "sort", "unique",
]


class Whole(Function):
    """The result of NumPy's or CuPy's function `name`: positions along an axis, or products of integers."""

    differentiable = False

    @staticmethod
    def forward_numpy(ctx, *arrays, name, **options):
        found = getattr(np, name)(*arrays, **options)
        return found if isinstance(found, tuple) else np.asarray(found)

    @staticmethod
    def forward_cuda(ctx, *arrays, name, **options):
        return getattr(array_module("cuda"), name)(*arrays, **options)


class CumSum(Function):
    """out[i] = x[0] + ... + x[i] along an axis; dx[i] = dout[i] + ... + dout[-1]."""

    @staticmethod
    def forward_numpy(ctx, x, axis):
        ctx.axis = axis
        return downcast(np.cumsum(upcast(x), axis), x.dtype)

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        sums = np.cumsum(np.flip(upcast(dout), ctx.axis), ctx.axis)
        return (downcast(np.ascontiguousarray(np.flip(sums, ctx.axis)), dout.dtype),)

    @staticmethod
    def forward_cuda(ctx, x, axis):
        ctx.axis = axis
        return _cumulative(x, axis)

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        return (_cumulative(dout, ctx.axis, reverse=True),)


def _cumulative(x: Array, axis: int, reverse: bool = False) -> Array:
    """The cumulative sums of a CuPy array along `axis`, or those from its end."""
    out = empty(x.shape, x.dtype)
    if not x.size:
        return out
    outer, count, inner = span(x.shape, (axis,))
    columns = builtins.min(32, power_of_two(inner))
    most = 128 if inner == 1 and count > 128 else 16
    lanes = builtins.min(most, power_of_two(blocks(count, 8)))
    rows = builtins.min(builtins.max(1, 256 // (columns * lanes)), power_of_two(outer), 64)
    block, tile = (columns, lanes, rows), 8 * lanes
    grid, parts, before = blocks(outer, rows) * blocks(inner, columns), 1, None
    if grid < 132:  # too few blocks: they sum parts of the axis, and then begin with the sums of those before
        parts = builtins.max(1, builtins.min(blocks(count, 4 * tile), (1 << 18) // math.prod(block) // grid))
    sizes = tuple(map(np.int64, (outer, count, inner, blocks(count, parts))))

    def run(out: Array | None, before: Array | None, sums: Array | None) -> None:
        args = (x, out, before, sums, reverse, *sizes)
        launch("reduce", "cumsum", (grid, parts), block, args, T=x.dtype, OUT=x.dtype, VEC=0)

    if parts > 1:
        sums = empty((outer, parts, inner), float32 if is_float(x.dtype) else int64)
        run(None, None, sums)
        before = _cumulative(sums, 1)
    run(out, before, None)
    return out


class OneHot(Function):
    """See `one_hot`. A label equal to `ignored` gets a row of zeros."""

    differentiable = False

    @staticmethod
    def forward_numpy(ctx, labels, count, ignored=None):
        outside = (labels < 0) | (labels >= count)
        if (outside if ignored is None else outside & (labels != ignored)).any():
            raise ValueError(f"a label lies outside 0 to {count - 1}: {labels.min()} to {labels.max()}")
        ones = labels[..., None] == np.arange(count)
        return (ones if ignored is None else ones & (labels != ignored)[..., None]).astype(np.float32)

    @staticmethod
    def forward_cuda(ctx, labels, count, ignored=None):
        out = empty((*labels.shape, count), float32)
        if out.size:
            none = -1 if ignored is None else ignored  # a label below 0 has no column anyway
            args = (out, labels, np.int64(labels.size), count, np.int64(none))
            launch("shape", "one_hot", blocks(out.size, 1024), 256, args, T=float32)
        return out


def argmax(x: Any, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """The position, int64, of the first largest element along `axis`, or in the flattened x; NaN counts as largest.

    Raises ValueError for no elements and for an axis out of range.
    """
    return _extreme("argmax", x, axis, keepdims)


def argmin(x: Any, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """The position of the first smallest element, otherwise as `argmax`; NaN counts as smallest."""
    return _extreme("argmin", x, axis, keepdims)


def _extreme(name: str, x: Any, axis: int | None, keepdims: bool) -> Tensor:
    x = as_tensor(x).detach()
    if axis is not None:
        axis = normalize_axis(axis, x.ndim)
    count = x.size if axis is None else x.shape[axis]
    if not count:
        raise ValueError(f"{name}: {x.shape} has no elements to compare")
    if is_float(x.dtype) and count < 2**32:
        return over_axes(Position, x, axis, keepdims, sign=1 if name == "argmax" else -1)
    x = _comparable(x)
    return Whole.apply(x, name=name, axis=axis, keepdims=flag("keepdims", keepdims))


def argsort(x: Any, axis: int | None = -1) -> Tensor:
    """The positions, int64, that sort x along `axis`, ascending and stable: equal elements keep their order.

    If the axis is None, x is flattened first. Raises ValueError for an axis out of range, CudiffError on a GPU inside
    of `capture`.
    """
    x = _comparable(x)
    x, axis = (flatten(x), 0) if axis is None else (x, normalize_axis(axis, x.ndim))
    if is_capturing(x.device):
        raise CudiffError("argsort waits for the GPU: call it outside of the captured function")
    return Whole.apply(x, name="argsort", axis=axis, kind="stable")


def sort(x: Any, axis: int | None = -1) -> Tensor:
    """x in ascending order along `axis`, NaN last; x is flattened if that is None. Equal elements keep their order, and
    each element gets the gradient of its new position. Raises as `argsort` does."""
    x = as_tensor(x)
    x, axis = (flatten(x), 0) if axis is None else (x, normalize_axis(axis, x.ndim))
    table, places, _ = located(x, list(along(x, argsort(x, axis), axis)))
    places, module = flatten(places), array_module(x.device)
    inverse = module.zeros((places.size,), int32)
    inverse[places.data] = module.arange(places.size).astype(int32)  # each position occurs once
    return reshape(Pick.apply(table, places, Tensor(inverse)), x.shape)


def searchsorted(a: Any, v: Any, side: str = "left") -> Tensor:
    """The position, int64, at which inserting each element of v keeps a, 1-d and ascending, sorted: the first, or for
    side "right" the last. Raises ValueError for an a of more axes and for another side."""
    a, v = (x.detach() for x in as_tensors(a, v))
    if a.ndim != 1 or side not in ("left", "right"):
        raise ValueError(f'searchsorted takes one axis of ascending numbers, not {a.shape}, and "left" or "right"')
    a, v = as_wide(a, v) if is_float(a.dtype) else (a, v)
    return Whole.apply(a, v, name="searchsorted", side=side)


def unique(x: Any, return_index: bool = False, return_inverse: bool = False, return_counts: bool = False) -> Any:
    """The distinct elements of x in ascending order. Each option adds an int64 tensor, in a tuple: the first position
    of each in the flattened x; for each element of x, in x's shape, which of them it is; how often each occurs.

    Raises TypeError if x requires a gradient, because there is none, CudiffError on a GPU inside of `capture`.
    """
    x = as_tensor(x)
    if x.requires_grad:
        raise TypeError("unique has no gradient: give it x.detach()")
    if is_capturing(x.device):
        raise CudiffError("unique's result has a size that a captured function does not know: call it outside")
    options = {"return_index": return_index, "return_inverse": return_inverse, "return_counts": return_counts}
    found = Whole.apply(flatten(_comparable(x)), name="unique", **options)
    if not isinstance(found, tuple):
        return astype(found, x.dtype)
    values, *rest = found
    if return_inverse:
        rest[return_index] = reshape(rest[return_index], x.shape)
    return astype(values, x.dtype), *rest


def bincount(x: Any, weights: Any = None, minlength: int = 0) -> Tensor:
    """How often each number from 0 to x's largest occurs, int64, for at least `minlength` numbers. With weights, of x's
    shape, the sum of each number's weights, which get a gradient.

    x: integers of one axis, none below 0: ValueError otherwise. CudiffError on a GPU inside of `capture`.
    """
    device = next((given.device for given in (x, weights) if isinstance(given, Tensor)), "cpu")
    x = as_index("bincount", x, device)
    if is_capturing(x.device):
        raise CudiffError("bincount waits for the GPU: inside of a captured function add to zeros(n) by .at[x].add(1)")
    if x.ndim != 1 or (x.size and min(x).item() < 0):
        raise ValueError("bincount counts numbers of one axis, none of them below 0")
    if minlength < 0:
        raise ValueError(f"bincount: minlength is not negative, and {minlength} is")
    count = builtins.max(minlength, int(max(x)) + 1 if x.size else 0)
    if weights is None:
        return Whole.apply(x, name="bincount", minlength=count)
    weights, _ = as_tensors(weights, x, floating=True)
    if weights.shape != x.shape:
        raise ValueError(f"bincount: weights of shape {weights.shape} are not those of {x.shape} numbers")
    return zeros(count, weights.dtype, x.device).at[x].add(weights)


def diff(x: Any, n: int = 1, axis: int = -1) -> Tensor:
    """Each element along `axis` less the one before it, `n` times; for bools, whether they differ.

    Raises ValueError for an axis out of range and for an n below 0.
    """
    x = as_tensor(x)
    axis = normalize_axis(axis, x.ndim)
    if n < 0:
        raise ValueError(f"diff is taken 0 times or more, not {n}")
    for _ in range(n):
        rows = (slice(None),) * axis
        after, before = getitem(x, (*rows, slice(1, None))), getitem(x, (*rows, slice(None, -1)))
        x = not_equal(after, before) if x.dtype == np.bool_ else after - before
    return x


def median(x: Any, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """The middle element over `axis`, or the mean of the two middle ones: `quantile(x, 0.5)`."""
    return quantile(x, 0.5, axis, keepdims)


def quantile(x: Any, q: float | Sequence[float], axis: Axis = None, keepdims: bool = False) -> Tensor:
    """The q-quantile over `axis`, q from 0 to 1, interpolated linearly between the two nearest sorted elements. Several
    q give a new first axis. In x's dtype, integers in float32; NaN where an element is NaN.

    The two elements share the gradient. Raises ValueError for a q outside 0 to 1 and for no elements, CudiffError on a
    GPU inside of `capture`.
    """
    x = as_floating(x)
    rows, shape = _in_rows(x, axis, keepdims)
    rows, shares, count = sort(*as_wide(rows)), np.asarray(q, float), rows.shape[-1]
    if not ((shares >= 0) & (shares <= 1)).all():
        raise ValueError(f"quantile takes shares from 0 to 1, not {q}")
    if not count:
        raise ValueError(f"quantile over no elements of shape {x.shape}")
    largest = getitem(rows, (..., -1))
    found = [where(isnan(largest), largest, _between(rows, share * (count - 1))) for share in shares.reshape(-1)]
    out = reshape(stack(found) if shares.ndim else found[0], (*shares.shape, *shape))
    return astype(out, x.dtype)


def percentile(x: Any, q: float | Sequence[float], axis: Axis = None, keepdims: bool = False) -> Tensor:
    """`quantile` with q in percent, from 0 to 100."""
    return quantile(x, (np.asarray(q, float) / 100).tolist(), axis, keepdims)


def _between(rows: Tensor, place: float) -> Tensor:
    """The elements at `place` of the last axis, interpolated linearly if it is not a whole number."""
    first, share = int(place), place % 1
    low = getitem(rows, (..., first))
    return low * (1 - share) + getitem(rows, (..., first + 1)) * share if share else low


def _in_rows(x: Tensor, axis: Axis, keepdims: bool) -> tuple[Tensor, tuple[int, ...]]:
    """x with the reduced axes as one last axis, after the others, and the shape of the result."""
    axes, keepdims = normalize_axes(axis, x.ndim), flag("keepdims", keepdims)
    others = tuple(i for i in range(x.ndim) if i not in axes)
    rows = reshape(transpose(x, others + axes), (*left(x.shape, axes, False), math.prod(x.shape[i] for i in axes)))
    return rows, left(x.shape, axes, keepdims)


def prod(x: Any, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """The product over `axis`, all axes where None, in x's dtype; integers and bools give int64, no elements give 1.

    Where x requires a gradient, halves of the axis are multiplied and nothing is divided, so gradients at zeros are
    right, second ones too.
    """
    x = as_tensor(x)
    if not is_float(x.dtype):
        axes = normalize_axes(axis, x.ndim)
        return Whole.apply(astype(x, "int64"), name="prod", axis=axes, keepdims=flag("keepdims", keepdims))
    if not (grad_enabled() and x.requires_grad):
        return over_axes(Product, x, axis, keepdims)
    rows, shape = _in_rows(as_wide(x)[0], axis, keepdims)
    while (count := rows.shape[-1]) > 1:
        half = count // 2
        first, second = (getitem(rows, (..., slice(start, start + half))) for start in (0, half))
        rest = getitem(rows, (..., slice(2 * half, None)))
        rows = concatenate([first * second, rest], -1) if count % 2 else first * second
    return astype(reshape(rows if count else total(rows, -1) + 1, shape), x.dtype)


def cumsum(x: Any, axis: int | None = None) -> Tensor:
    """Cumulative sums along `axis`, or of the flattened x if None; integers and bools give int64.

    In x's dtype, 16-bit floats summed in float32. Raises ValueError for an axis out of range.
    """
    x = as_tensor(x)
    x, axis = (flatten(x), 0) if axis is None else (x, normalize_axis(axis, x.ndim))
    return CumSum.apply(x if is_float(x.dtype) else astype(x, "int64"), axis=axis)


def one_hot(labels: Any, num_classes: int, dtype: Any = np.float32) -> Tensor:
    """labels integers (...) → (..., num_classes): 1 at each label, 0 elsewhere.

    A label outside 0 to num_classes - 1 raises ValueError on the CPU. On a GPU it is not checked, and gives zeros.
    """
    labels = as_index("one_hot", labels, labels.device if isinstance(labels, Tensor) else "cpu")
    return astype(OneHot.apply(labels, count=operator.index(num_classes)), dtype)


def _comparable(x: Any) -> Tensor:
    """x.detach() in a dtype that CuPy compares."""
    x = as_tensor(x).detach()
    return as_wide(x)[0] if is_float(x.dtype) else x
