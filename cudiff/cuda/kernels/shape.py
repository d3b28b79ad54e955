"""Copies between views: concatenation, slices, transposes, padding. Rows taken by an index, and their gradients."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from cudiff.backend import Array, array_module, float32, int32, int64, is_capturing, is_float
from cudiff.cuda.launch import blocks, empty, launch


def merge_axes(
    sizes: Sequence[int], strides: Sequence[Sequence[int]]
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """The sizes, and each view's strides, of the fewest axes that visit the same elements in the same order."""
    kept = [i for i, size in enumerate(sizes) if size != 1] or list(range(len(sizes)))[:1]
    merged = [[1, *(0 for _ in strides)]]
    for i in kept:
        axis = [sizes[i], *(view[i] for view in strides)]
        if all(outer == inner * sizes[i] for outer, inner in zip(merged[-1][1:], axis[1:], strict=True)):
            axis[0] *= merged[-1][0]
            merged[-1] = axis
        else:
            merged.append(axis)
    merged = [axis for axis in merged if axis[0] != 1] or merged[-1:]
    columns = tuple(zip(*merged, strict=True))
    return columns[0], columns[1:]


_VIEWS = np.dtype([("dims", "i4"), ("sizes", "i4", 6), ("out", "i8", 6), ("x", "i8", 6)], align=True)

MOVED_BYTES, MOVED_UNITS = 3e6, 0.35e6
"""Bytes that `move` reads and writes in a microsecond, and packs or elements, whose places take divisions to find."""


def move(out: Array, x: Array, accumulate: bool = False) -> None:
    """out[...] = x, or += x, between CuPy views of one shape and any strides. Raises ValueError over 6 merged axes."""
    if out.size == 0:
        return
    dtype = _unit(out)
    sizes, strides = merge_axes(out.shape, (out.strides, x.strides))
    unit = 16 if _in_packs(sizes, strides, out, x) else out.itemsize
    sizes = (*sizes[:-1], sizes[-1] * out.itemsize // unit)
    count = math.prod(sizes)
    if len(sizes) > 6 or count >= 2**32:
        raise ValueError(f"moving shape {out.shape} on CUDA takes at most 6 axes and 2**32 elements")
    turned = _turned(sizes, strides, out.itemsize)
    if turned is not None:
        order = [*(i for i in range(len(sizes) - 1) if i != turned), turned, len(sizes) - 1]
        sizes, strides = tuple(sizes[i] for i in order), tuple(tuple(view[i] for i in order) for view in strides)
    views = np.zeros((), _VIEWS)
    views["dims"] = dims = len(sizes)
    views["sizes"][:dims] = sizes
    for name, view in zip(("out", "x"), strides, strict=True):
        views[name][:dims] = [stride // unit for stride in view[:-1]] + [view[-1] // out.itemsize]
    name = "add" if accumulate else "copy"
    if turned is not None:
        tiles = math.prod(sizes[:-2]) * blocks(sizes[-2], 64) * blocks(sizes[-1], 64)
        launch("shape", f"{name}_turned", tiles, (32, 8), (out, x, views), T=dtype)
        return
    name += "_packed" if unit != out.itemsize else ""
    launch("shape", name, blocks(count, 1024), 256, (out, x, np.uint32(count), views), T=dtype)


def _turned(sizes: tuple[int, ...], strides: Sequence[tuple[int, ...]], itemsize: int) -> int | None:
    """The axis along which x's elements lie together, where out's do along the last; None where there are not two such
    axes of 32 elements or more."""
    last, (of_out, of_x) = len(sizes) - 1, strides
    if of_out[last] != itemsize or of_x[last] == itemsize or sizes[last] < 32:
        return None
    return next((i for i in range(last) if of_x[i] == itemsize and sizes[i] >= 32), None)


def move_microseconds(shape: Sequence[int], dtype: np.dtype) -> float:
    """Estimated microseconds of a `move` of this shape: of its bytes, or of packs or elements if those are slower."""
    size = math.prod(shape) * dtype.itemsize
    unit = math.gcd(16, shape[-1] * dtype.itemsize)
    return 2 + max(2 * size / MOVED_BYTES, size / unit / MOVED_UNITS)


def fit_microseconds(shape: Sequence[int], dtype: np.dtype) -> float:
    """Estimated microseconds of a `fit` of an array of this shape."""
    return 2 + 2 * math.prod(shape) * dtype.itemsize / MOVED_BYTES


def _unit(array: Array) -> np.dtype:
    """The dtype as which kernels move an array's elements. They refuse what is none of theirs, as int16."""
    return np.dtype(np.uint8) if array.dtype == np.bool_ else array.dtype


_MOST_PARTS = 16
COUNTED = 2**32  # packs or elements, which the kernel counts in 32 bits, are fewer
_EACH = np.dtype([("each", "u8", _MOST_PARTS)])
_PARTS = np.dtype([("parts", "u8", _MOST_PARTS), ("first", "u4", _MOST_PARTS + 1), ("count", "i4")])


def join(out: Array, parts: Sequence[Array], axis: int) -> None:
    """out = the parts side by side along `axis`, by one launch for each 16 of them, or for each if `out` is not below
    COUNTED. All are whole CuPy arrays of one dtype."""
    rows = math.prod(out.shape[:axis])
    parts = [part for part in parts if part.size]
    widths = [part.size // rows * part.itemsize for part in parts]  # in bytes
    packed = math.gcd(*widths, *[array.data.ptr for array in (out, *parts)]) % 16 == 0
    unit, name = (16, "join_packed") if packed else (out.itemsize, "join")
    if out.nbytes // unit >= COUNTED:
        ends = itertools.accumulate(part.shape[axis] for part in parts)
        for part, end in zip(parts, ends, strict=True):
            move(out[(slice(None),) * axis + (slice(end - part.shape[axis], end),)], part)
        return
    columns = [0, *itertools.accumulate(width // unit for width in widths)]  # of each part, and their number
    for begin in range(0, len(parts), _MOST_PARTS):
        some = parts[begin : begin + _MOST_PARTS]
        first = np.subtract(columns[begin : begin + len(some) + 1], columns[begin])
        table = np.zeros((), _PARTS)
        table["count"] = len(some)
        table["parts"][: len(some)] = [part.data.ptr for part in some]
        table["first"][: len(some) + 1] = first
        sizes = map(np.uint32, (rows, columns[-1], columns[begin]))
        launch("shape", name, blocks(rows * int(first[-1]), 1024), 256, (out, *sizes, table), T=_unit(out))


def split_as(dtype: np.dtype, x: Array, parts: int) -> Array:
    """The columns of x (..., parts · width) in equal parts, (parts, ..., width), of this dtype."""
    *lengths, columns = x.shape
    width = columns // parts
    out = empty((parts, *lengths, width), dtype)
    _cast_parts("split", x, x.dtype, out, parts, width, out, x)
    return out


def join_as(dtype: np.dtype, parts: Sequence[Array | None]) -> Array:
    """Up to 16 parts (..., width) of one dtype side by side, (..., parts · width), of this dtype. Of None there are
    zeros."""
    given = [part for part in parts if part is not None]
    *lengths, width = given[0].shape
    out, table = empty((*lengths, len(parts) * width), dtype), np.zeros((), _EACH)
    table["each"][: len(parts)] = [0 if part is None else part.data.ptr for part in parts]
    _cast_parts("join", table, given[0].dtype, out, len(parts), width, out, *given)
    return out


def _cast_parts(name: str, x: Any, dtype: np.dtype, out: Array, parts: int, width: int, *arrays: Array) -> None:
    """Launch a kernel of cast.cu that reads x, of this dtype, and writes `out`. arrays: all that it reads or writes."""
    pack = 8 if width % 8 == 0 and math.gcd(*[array.data.ptr for array in arrays]) % 16 == 0 else 1
    if out.size:
        launch("cast", name, out.size // width, 32 * min(8, blocks(width, 32 * pack)), (x, out, parts, width, pack),
               FROM=dtype, TO=out.dtype)


def _in_packs(sizes: tuple[int, ...], strides: Sequence[tuple[int, ...]], out: Array, x: Array) -> bool:
    """Whether both views (strides in bytes) consist of whole, aligned packs of 16 bytes."""
    whole = sizes[-1] * out.itemsize % 16 == 0 and out.itemsize < 16
    return whole and all(
        view[-1] == out.itemsize and array.data.ptr % 16 == 0 and all(stride % 16 == 0 for stride in view[:-1])
        for view, array in zip(strides, (out, x), strict=True)
    )


def copy(out: Array, x: Array) -> None:
    """out[...] = x, between views of one dtype and shape: as `move`, but by elements of 8 or 4 bytes where the views
    consist of these, which are fewer to find. Packs of 16 bytes `move` finds itself."""
    lengths = [out.shape[-1] * out.itemsize, *(n for view in (out, x) for n in (view.data.ptr, *view.strides[:-1]))]
    unit = math.gcd(16, *lengths)
    if unit in (4, 8) and unit > out.itemsize and all(view.strides[-1] == view.itemsize for view in (out, x)):
        wide = int32 if unit == 4 else int64
        out, x = out.view(wide), x.view(wide)
    move(out, x)


def contiguous(view: Array) -> Array:
    """A contiguous copy of a strided CuPy view."""
    out = empty(view.shape, view.dtype)
    move(out, view)
    return out


def turned(weight: Array) -> Array:
    """weight (K, [R, S,] C) copied as (C, R, S, K), with its taps in reverse order. The convolution with it is the
    gradient of a convolution's input."""
    outputs, rows, columns, channels = weight.shape if weight.ndim == 4 else (len(weight), 1, 1, weight.shape[1])
    out = empty((channels, rows, columns, outputs), weight.dtype)
    of_tap = weight.strides[2 if columns > 1 else 1] if rows * columns > 1 else 0
    pitches = [np.int64(stride // weight.itemsize) for stride in (weight.strides[0], of_tap)]
    launch(
        "shape", "turn", (blocks(channels, 32), blocks(outputs, 32), rows * columns), (32, 8),
        (out, weight, *pitches, outputs, rows * columns, channels), T=weight.dtype,
    )
    return out


def zeros(shape: tuple[int, ...], dtype: np.dtype) -> Array:
    return array_module("cuda").zeros(shape, dtype)


def region(shape: tuple[int, ...], widths: Sequence[tuple[int, int]]) -> tuple[slice, ...]:
    """The slices of an array of this shape in one that is padded by `widths`."""
    return tuple(slice(before, before + size) for (before, _), size in zip(widths, shape, strict=True))


def filled(shape: tuple[int, ...], dtype: np.dtype, value: float) -> Array:
    """A new array with `value` everywhere."""
    if not is_float(dtype):
        return array_module("cuda").full(shape, value, dtype)
    out = zeros(shape, dtype)
    if value:
        launch("shape", "fill", blocks(out.size, 1024), 256, (out, float(value), np.int64(out.size)), T=out.dtype)
    return out


def padded(x: Array, widths: Sequence[tuple[int, int]]) -> Array:
    """A copy of x with a border of zeros. widths: (before, after) for each axis."""
    out = zeros(tuple(sum(w) + size for w, size in zip(widths, x.shape, strict=True)), x.dtype)
    move(out[region(x.shape, widths)], x)
    return out


def fitted(x: Array, shape: tuple[int, ...]) -> Array:
    """A copy of x of this shape, as `fit` makes it."""
    out = empty(shape, x.dtype)
    fit(out, x)
    return out


def fit(out: Array, x: Array) -> None:
    """out = x cut, or with zeros behind it, along the last axis, and along the second of three or the first of others.
    Raises ValueError for 2^31 elements."""
    if out.size >= 2**31:
        raise ValueError(f"fitting shape {x.shape} to {out.shape} on CUDA takes fewer than 2**31 elements")
    if not out.flags.c_contiguous or out.data.ptr % 16:
        copy = fitted(x, out.shape)
        move(out, copy)
        return
    into, source = (array if array.ndim == 3 else array.reshape(1, -1, array.shape[-1]) for array in (out, x))
    source = source if source.strides[2] == source.itemsize else contiguous(source)
    sizes = [np.uint32(n) for n in (out.size, *into.shape[1:], *source.shape[1:])]
    pitches = [np.int64(stride // x.itemsize) for stride in (source.strides[1], source.strides[0])]
    dtype = _unit(out)
    launch("shape", "fit", blocks(out.size, 256 * 16 // dtype.itemsize), 256, (out, source, *sizes, *pitches), T=dtype)


def at_16_bytes(array: Array) -> Array:
    """The array, or a copy if it does not start at a multiple of 16 bytes, as TMA needs."""
    return array if array.data.ptr % 16 == 0 else array.copy()


def rows(x: Array, index: Array, axis: int = 0, along: bool = False) -> Array:
    """x[index] along `axis`, or if `along` NumPy's take_along_axis, for an index of the result's shape.

    index: int32; negative ones count from the end. Rows that are not in x are 0.
    """
    out = empty(index.shape if along else (*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]), x.dtype)
    if axis or along:
        args = (x, index, out, along, *_planes(x, axis), np.int64(index.shape[axis] if along else index.size))
        launch("shape", "take_axis", blocks(out.size, 1024), 256, args, T=x.dtype)
        return out
    sizes = map(np.int64, (x.shape[0], math.prod(x.shape[1:]), index.size))
    launch("shape", "take", blocks(out.size, 1024), 256, (x, index, out, *sizes), T=x.dtype)
    return out


def _planes(x: Array, axis: int) -> tuple[np.int64, ...]:
    """The size of x's axes before `axis`, of that axis, and of those behind it."""
    return np.int64(math.prod(x.shape[:axis])), np.int64(x.shape[axis]), np.int64(math.prod(x.shape[axis + 1 :]))


_TILE = 32768


def axis_sums(dout: Array, index: Array, dx: Array, accumulate: bool, axis: int, along: bool) -> None:
    """dx[..., r, ...] = or (accumulate) += the sum of dout[..., i, ...] along `axis` for all i with index[i] == r, in
    order, or if `along` with index[..., i, ...] == r.

    index: int32; negative ones count from the end. Rows that are not in dx are left out. A tile of dx is as many whole
    planes, of `axis` and the axes behind it, as fit in a block's shared memory, or a part of one plane that is 32 bytes
    wide where the plane is. The index is divided where tiles are fewer than two for each multiprocessor of an H200.
    """
    if not dx.size:
        return
    sizes = lead, size, width = tuple(map(int, _planes(dx, axis)))
    count = index.shape[axis] if along else index.size
    total = np.dtype(float32 if is_float(dx.dtype) else int64)
    most, sector = _TILE // total.itemsize, 32 // dx.itemsize
    if size * width <= most:
        leads, tall, wide = max(1, min(most // (size * width), lead // 264)), size, width
    else:
        wide = min(width, max(sector, most // size // sector * sector))
        leads, tall = 1, min(size, most // wide)
    columns = blocks(lead, leads) * blocks(width, wide)
    if leads * wide * count <= 4096:  # a short index is read by more tiles rather than in parts
        tall = min(tall, max(64, blocks(size, max(1, 264 // columns))))
    grid = columns * blocks(size, tall)
    parts = max(1, min(leads * wide * count // 4096, 264 // grid))
    out = empty((parts, dx.size), total) if parts > 1 else dx
    args = (dout, index, out, accumulate, along, *map(np.int64, (*sizes, count)), leads, tall, wide)
    launch("shape", "axis_sums", (grid, parts), 256, args, T=dx.dtype)
    if parts > 1:
        args = (out, dx, accumulate, np.int64(dx.size), parts)
        launch("shape", "sum_parts", blocks(dx.size, 256), 256, args, T=dx.dtype)


def row_sums(dout: Array, index: Array, dx: Array, accumulate: bool, from_end: bool) -> None:
    """dx[r] = or (accumulate) += the sum of dout[i] for all i with index[i] == r, in order.

    index: int32. from_end: whether negative rows count from the end. Other rows that are not in dx are left out.
    """
    sizes = tuple(map(np.int64, (dx.shape[0], math.prod(dx.shape[1:]), index.size)))
    grid, parts, threads = _shares(dx.size, index.size)
    if parts > 1:
        sums = empty((parts, dx.size), float32 if is_float(dx.dtype) else int64)
        launch("shape", "scan_sums", (grid, parts), threads, (dout, index, sums, False, from_end, *sizes), T=dx.dtype)
        args = (sums, dx, accumulate, np.int64(dx.size), parts)
        launch("shape", "sum_parts", blocks(dx.size, 256), 256, args, T=dx.dtype)
        return
    if _scans(grid, index.size):
        args = (dout, index, dx, accumulate, from_end, *sizes)
        launch("shape", "scan_sums", grid, threads, args, T=dx.dtype)
        return
    module, index = array_module("cuda"), index.reshape(-1)
    index = module.where(index < 0, index + np.int32(len(dx)), index) if from_end else index
    order = module.argsort(index, kind="stable")
    args = (dout, order.astype(int32), index[order], dx, accumulate, *sizes)
    launch("shape", "sum_runs", blocks(dx.size, 256), 256, args, T=dx.dtype)


def _shares(size: int, count: int) -> tuple[int, int, int]:
    """The blocks among which the elements of dx are divided, the parts of the index, and the threads of a block.

    Each block looks through a part, and each of its threads at every entry of its rows: of a long index a block has the
    more elements the more there are. Parts are of 1,024 entries at least, and of so many that two blocks run on each
    multiprocessor of an H200.
    """
    if count <= 1024 and size <= 1 << 21:
        return blocks(size, 512), 1, 128
    grid = blocks(size, 256 if size <= 1 << 17 else 1024 if size <= 1 << 21 else 4096)
    return grid, max(1, min(blocks(count, 1024), 264 // grid)), 256


def _scans(grid: int, count: int) -> bool:
    """Whether each of `grid` blocks looks for its rows in all `count` entries of the index, instead of sorting it.

    It does so if they are few, and within `capture`, because CuPy's sort waits for the GPU. On an H200 sorting takes at
    least 180 µs.
    """
    return grid * count <= 1 << 30 or is_capturing("cuda")


def last(index: Array, count: int) -> Array:
    """For each of `count` rows, int32: 1 + the largest i with index[i] == row, or 0 if there is none."""
    out = zeros((count,), int32)
    sizes = map(np.int64, (count, index.size))
    launch("shape", "last", blocks(index.size, 256), 256, (index, out, *sizes), T=int32)
    return out
