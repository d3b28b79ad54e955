"""Indexing by NumPy's rules: slices, arrays of integers, masks, and any of them together.

A basic index, without arrays, copies a view. Any other becomes one index of rows: trailing axes with full slices are a
row. A row's number is the sum of the positions along the other axes, each times its stride.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from cudiff.backend import (
    Array,
    array_module,
    compute_dtype,
    device_of,
    int32,
    is_array,
    is_capturing,
    to_device,
)
from cudiff.cuda.accumulate import gradient_target
from cudiff.cuda.kernels.shape import axis_sums, contiguous, move, row_sums, rows, zeros
from cudiff.errors import CudiffError
from cudiff.function import Function
from cudiff.ops.cast import as_index, as_tensor, astype, downcast, upcast
from cudiff.ops.compare import not_equal
from cudiff.ops.reduce import normalize_axis
from cudiff.ops.shape import broadcast_to, flatten, reshape, stack
from cudiff.tensor import Tensor

__all__ = ["argwhere", "getitem", "nonzero", "take", "take_along_axis"]


class Slice(Function):
    """x[index] for a basic index: integers, slices, None and Ellipsis."""

    shares_memory = True

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
    """out[..., i, ...] = x[..., index[i], ...] along `axis`, or x[..., index[..., i, ...], ...] if `along`.

    The gradient of what was taken several times is summed in the order of i.
    """

    @staticmethod
    def forward_numpy(ctx, x, index, axis=0, along=False):
        ctx.shape, ctx.axis, ctx.along = x.shape, axis, along
        ctx.save(index)
        return np.take_along_axis(x, index, axis) if along else x[(slice(None),) * axis + (index,)]

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        (index,) = ctx.saved
        total = np.zeros(ctx.shape, compute_dtype(dout.dtype))
        places = _grid(np, total, index, ctx.axis) if ctx.along else (slice(None),) * ctx.axis + (index,)
        np.add.at(total, places, upcast(dout))
        return downcast(total, dout.dtype), None

    @staticmethod
    def forward_cuda(ctx, x, index, axis=0, along=False):
        ctx.shape, ctx.axis, ctx.along = x.shape, axis, along
        ctx.save(index)
        return rows(x, index, axis, along)

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        (index,) = ctx.saved
        dx, accumulate = gradient_target(into[0], ctx.shape, dout.dtype)
        if ctx.along or math.prod(ctx.shape[: ctx.axis]) != 1:
            axis_sums(dout, index, dx, accumulate, ctx.axis, ctx.along)
        else:
            row_sums(dout, index, dx.reshape(ctx.shape[ctx.axis :]), accumulate, from_end=True)
        return dx, None


class Pick(Function):
    """out[i] = x[index[i]], each row at most once; zeros where index[i] is len(x).

    inverse[r] is the i with index[i] = r, or len(index) without one: dx[r] = dout[inverse[r]] needs no sum.
    """

    @staticmethod
    def forward_numpy(ctx, x, index, inverse):
        ctx.save(inverse)
        return _rows_or_zeros(x, index)

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        return _rows_or_zeros(dout, ctx.saved[0]), None, None

    @staticmethod
    def forward_cuda(ctx, x, index, inverse):
        ctx.save(inverse)
        return rows(x, index)

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        return rows(dout, ctx.saved[0]), None, None


def _rows_or_zeros(x: np.ndarray, index: np.ndarray) -> np.ndarray:
    out = np.zeros((len(index), *x.shape[1:]), x.dtype)
    inside = index < len(x)
    out[inside] = x[index[inside]]
    return out


def getitem(x: Any, index: Any) -> Tensor:
    """x[index] by NumPy's rules: integers, slices, None, Ellipsis, and arrays of integers or bools, several too.

    Arrays may be lists, tensors, or NumPy's or CuPy's; they broadcast. A bool array selects the positions where it is
    true. Raises IndexError for an index out of range, a mask of another shape and too many indices, TypeError for any
    other index, and CudiffError for a mask within `capture`, because the result's size depends on its values. An index
    array on a GPU is not checked: positions out of range give zeros and get no gradient.
    """
    x = as_tensor(x)
    items = parsed(x, index)
    if is_basic(items):
        return Slice.apply(x, index=tuple(items))
    if is_mask(items):
        return _choose(x, items[0])
    table, places, axis = located(x, items, leading=True)
    return Take.apply(table, places, axis=axis)


def parsed(x: Tensor, index: Any) -> list[Any]:
    """The items of an index: None, Ellipsis, slices, integers, and arrays of integers or bools."""
    return [_item(x, item) for item in (index if isinstance(index, tuple) else (index,))]


def is_basic(items: list[Any]) -> bool:
    return not any(map(is_array, items))


def is_mask(items: list[Any]) -> bool:
    """Whether an index is one mask alone."""
    return len(items) == 1 and is_array(items[0]) and items[0].dtype == np.bool_ and items[0].ndim > 0


def _item(x: Tensor, item: Any) -> Any:
    if item is None or item is Ellipsis:
        return item
    if isinstance(item, slice | int | np.integer) and not isinstance(item, bool):
        if not x.ndim:
            raise TypeError("a 0-d tensor has no elements to index or go through: .item() is its number")
        return item if isinstance(item, slice) else int(item)
    if not (isinstance(item, bool | list | tuple | range | Tensor) or is_array(item)):
        raise TypeError(
            f"cannot index with {type(item).__name__}: use integers, slices, None, Ellipsis, and arrays of integers or "
            "bools"
        )
    array = Tensor(item).data
    if not array.size and not hasattr(item, "dtype"):
        array = array.astype(int32)  # of an empty list
    if array.dtype.kind not in "iub":
        raise TypeError(f"cannot index with {array.dtype}: indices are integers or bools, use .astype('int32')")
    if device_of(array) == "cuda" and x.device == "cpu":
        raise ValueError("an index on the GPU of a tensor on the CPU: move one of them with .to('cuda') or .to('cpu')")
    return array


class _Entry(NamedTuple):
    """One item of an index: None, a slice, an integer, or an array of integers, and the axis that it indexes, or -1."""

    item: Any
    axis: int
    number: int  # among the items that were given


def _entries(x: Tensor, items: list[Any]) -> list[_Entry]:
    """`items` with Ellipsis replaced by full slices and masks by positions, in the order of axes."""
    used = sum(_axes_of(item) for item in items)
    if used > x.ndim:
        raise IndexError(f"too many indices: {used} for a tensor of {x.ndim} dimensions")
    dots = [i for i, item in enumerate(items) if item is Ellipsis]
    if len(dots) > 1:
        raise IndexError("an index holds one Ellipsis (...) at most")
    at = dots[0] if dots else len(items)
    entries: list[_Entry] = []
    axis = 0
    numbered = list(enumerate(items))
    for number, item in [*numbered[:at], *[(at, slice(None))] * (x.ndim - used), *numbered[at + 1 :]]:
        if is_array(item) and item.dtype == np.bool_:
            shape = x.shape[axis : axis + item.ndim]
            if item.shape != shape:
                raise IndexError(f"a mask of shape {item.shape} is not of the axes of shape {shape} that it indexes")
            where = range(axis, axis + item.ndim) if item.ndim else [-1]
            entries += [_Entry(places, i, number) for places, i in zip(_true(item), where, strict=True)]
        else:
            entries.append(_Entry(item, -1 if item is None else axis, number))
        axis += _axes_of(item)
    return entries


def _axes_of(item: Any) -> int:
    """How many axes an item indexes."""
    if item is None or item is Ellipsis:
        return 0
    return item.ndim if is_array(item) and item.dtype == np.bool_ else 1


def _true(mask: Array) -> tuple[Array, ...]:
    """The positions where a mask is true, an array for each axis; of a 0-d mask one array of int(mask) zeros."""
    if is_capturing(device_of(mask)):
        raise CudiffError("a mask's result has a size that a captured function does not know: use where()")
    module = array_module(device_of(mask))
    return module.nonzero(mask) if mask.ndim else (module.zeros(int(mask), np.int64),)


def located(x: Tensor, items: list[Any], leading: bool = False) -> tuple[Tensor, Tensor, int]:
    """x as a table, numbers, int32, along one of its axes, and that axis, of an index with arrays.

    x[items] is the table's elements at these numbers along the axis: the first, or if `leading` the one behind the axes
    that full slices lead the index with, where the arrays' axes stay behind these.
    """
    entries = _entries(x, items)
    while isinstance(entries[-1].item, slice) and entries[-1].item == slice(None):
        entries.pop()
    axis = 0
    if leading and _are_beside(entries):
        while isinstance(entries[axis].item, slice) and entries[axis].item == slice(None):
            axis += 1
    entries = entries[axis:]
    stop = axis + sum(entry.axis >= 0 for entry in entries)
    if (count := math.prod(x.shape[axis:stop])) > _MOST:
        raise IndexError(
            f"an index of axes {x.shape[axis:stop]} chooses of {count} rows, over 2^31 - 1: take parts of the tensor"
        )
    table = x if stop == axis + 1 else reshape(x, (*x.shape[:axis], count, *x.shape[stop:]))
    if len(entries) == 1 and entries[0].axis == axis:
        _check(entries[0], x.shape)
        item = entries[0].item
        return table, as_index("getitem", item if device_of(item) == "cpu" else Tensor(item), x.device), axis
    return table, Tensor(_places(entries, x.shape[:stop], count).astype(int32), device=x.device), axis


def _are_beside(entries: list[_Entry]) -> bool:
    """Whether the integers and arrays are adjacent items: their axes then replace them, else come first."""
    numbers = {entry.number for entry in entries if is_array(entry.item) or isinstance(entry.item, int)}
    return max(numbers) - min(numbers) < len(numbers)  # an Ellipsis has its own, even without axes


_MOST = np.iinfo(int32).max


def _places(entries: list[_Entry], lead: tuple[int, ...], count: int) -> Array:
    """The row numbers of an index of the last axes of `lead`, which have `count` rows; `count` for one out of range.
    Integers and arrays broadcast together."""
    arrays = [entry.item for entry in entries if is_array(entry.item)]
    device = "cuda" if any(device_of(array) == "cuda" for array in arrays) else "cpu"
    module = array_module(device)
    advanced = [k for k, entry in enumerate(entries) if is_array(entry.item) or isinstance(entry.item, int)]
    try:
        shape = np.broadcast_shapes(*(array.shape for array in arrays))
    except ValueError:
        raise IndexError(f"index arrays of shapes {[array.shape for array in arrays]} do not broadcast") from None
    kept = [k for k in range(len(entries)) if k not in advanced]
    before = sum(k < advanced[0] for k in kept) if _are_beside(entries) else 0
    views = [(entries[k].item, entries[k].axis) for k in kept]
    sizes = [1 if item is None else len(range(*item.indices(lead[axis]))) for item, axis in views]
    strides = [math.prod(lead[axis + 1 :]) for axis in range(len(lead))]
    total = module.zeros((), np.int64)
    for k, (item, axis, _) in enumerate(entries):
        if k in advanced:
            _check(entries[k], lead)
            after = len(kept) - before
            item = to_device(item, device) if is_array(item) else item
            term = item if axis < 0 else _from_zero(module, item, lead[axis], strides[axis])
        elif item is not None:
            number = kept.index(k)
            after = len(kept) - 1 - number + (len(shape) if number < before else 0)
            term = module.arange(*item.indices(lead[axis])) * strides[axis]
        else:
            continue
        total = total + (term.reshape((*term.shape, *(1,) * after)) if is_array(term) else term)
    total = module.broadcast_to(total, (*sizes[:before], *shape, *sizes[before:]))
    return module.where(total < 0, count, total)


def _check(entry: _Entry, lead: tuple[int, ...]) -> None:
    """Raises IndexError for an index on the host that is out of range."""
    item, axis, _ = entry
    if axis < 0 or (is_array(item) and device_of(item) == "cuda"):
        return
    outside = np.asarray(item)[(np.asarray(item) < -lead[axis]) | (np.asarray(item) >= lead[axis])]
    if outside.size:
        raise IndexError(f"index {outside[0]} is out of bounds for axis {axis} with size {lead[axis]}")


def _from_zero(module: Any, item: Any, size: int, stride: int) -> Any:
    """Positions along an axis, counted from its start, times its stride; far below 0 if out of range."""
    if isinstance(item, int):
        return item % size * stride
    places = item.astype(np.int64)
    places = module.where(places < 0, places + size, places)
    return module.where((places >= 0) & (places < size), places * stride, -(1 << 40))


def _choose(x: Tensor, mask: Array) -> Tensor:
    """The rows of x where a mask of its first axes is true."""
    check_mask(x, mask)
    if mask.size > _MOST:
        raise IndexError(f"a mask of {mask.size} elements, over 2^31 - 1: choose from parts of the tensor")
    module, flat = array_module(device_of(mask)), mask.reshape(-1)
    (chosen,) = _true(flat)
    inverse = module.where(flat, module.cumsum(flat) - 1, chosen.size)
    table = reshape(x, (mask.size, *x.shape[mask.ndim :]))
    return Pick.apply(table, *(Tensor(places.astype(int32), device=x.device) for places in (chosen, inverse)))


def check_mask(x: Tensor, mask: Array) -> None:
    """Raises IndexError for a mask whose shape is not that of x's first axes."""
    if mask.shape != x.shape[: mask.ndim]:
        raise IndexError(f"a mask of shape {mask.shape} is not of the first axes of a tensor of shape {x.shape}")


def take(x: Any, indices: Any, axis: int | None = None) -> Tensor:
    """The elements at these positions along `axis`, or of the flattened x if None: x[:, indices] for axis 1.

    indices: integers of any shape; their axes replace the axis. Raises as `getitem` does.
    """
    x = as_tensor(x)
    if axis is None:
        return take(flatten(x), indices, 0)
    axis = normalize_axis(axis, x.ndim)
    if as_tensor(indices).dtype == bool:
        indices = astype(indices, int32)  # an index of bools would be a mask
    return getitem(x, (slice(None),) * axis + (indices,))


def take_along_axis(x: Any, indices: Any, axis: int | None = -1) -> Tensor:
    """out[..., i, ...] = x[..., indices[..., i, ...], ...] along `axis`, as `argsort` gives positions.

    indices: integers with as many axes as x, which broadcast with x along the others; 1-d, into the flattened x, if the
    axis is None. Raises ValueError for another number of axes, otherwise as `getitem` does.
    """
    x, indices = as_tensor(x), as_tensor(indices)
    if axis is None:
        return take_along_axis(flatten(x), indices, 0)
    axis = normalize_axis(axis, x.ndim)
    if indices.ndim != x.ndim:
        raise ValueError(f"take_along_axis got indices of {indices.ndim} axes for a tensor of {x.ndim}")
    own, others = ((*of.shape[:axis], 1, *of.shape[axis + 1 :]) for of in (x, indices))
    if math.prod(others) == 1:
        return take(x, flatten(indices), axis)
    try:
        shape = list(np.broadcast_shapes(own, others))
    except ValueError:
        raise IndexError(f"indices of shape {indices.shape} do not broadcast with x of {x.shape}") from None
    item = _item(x, indices)
    _check(_Entry(item, axis, 0), x.shape)
    index = as_index("take_along_axis", item if device_of(item) == "cpu" else Tensor(item), x.device)
    shape[axis] = x.shape[axis]
    x = broadcast_to(x, tuple(shape))
    shape[axis] = index.shape[axis]
    return Take.apply(x, broadcast_to(index, tuple(shape)), axis=axis, along=True)


def along(x: Tensor, indices: Tensor, axis: int) -> tuple[Any, ...]:
    """The index of `take_along_axis`, for indices of the result's shape."""
    return _grid(array_module(indices.device), x, indices.data, axis)


def _grid(module: Any, x: Any, indices: Array, axis: int) -> tuple[Array, ...]:
    return tuple(indices if i == axis else module.arange(size).reshape(size, *(1,) * (x.ndim - 1 - i))
                 for i, size in enumerate(x.shape))


def nonzero(x: Any) -> tuple[Tensor, ...]:
    """The positions where x is not 0, in memory order, an int64 tensor for each axis. CudiffError within `capture`."""
    x = as_tensor(x)
    if not x.ndim:
        raise ValueError("nonzero of a 0-d tensor: it has no axis")
    return tuple(Tensor(places) for places in _true(not_equal(x, 0).data))


def argwhere(x: Any) -> Tensor:
    """The positions where x is not 0, a row for each such element: the arrays of `nonzero` as columns."""
    x = as_tensor(x)
    if x.ndim:
        return stack(nonzero(x), -1)
    return stack(nonzero(reshape(x, (1,))), -1)[:, :0]
