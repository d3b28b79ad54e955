"""Pooling over windows and nearest upsampling, channels-last.

Two sums, each the gradient of the other, make up all but max pooling: `sum_windows` (average pooling; upsampling
backward) and `spread_windows` (upsampling; average pooling backward).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from cudiff.backend import Array, is_float
from cudiff.cuda.accumulate import gradient_target
from cudiff.cuda.kernels.pool import Pair, Window, launch_windows, out_size, spread_windows, sum_windows
from cudiff.cuda.launch import empty
from cudiff.function import Function
from cudiff.ops import depthwise
from cudiff.ops.cast import downcast, masked, require_float, require_floats, upcast
from cudiff.statistics import Kind, moments
from cudiff.tensor import Tensor
from cudiff.values import flag, pair

__all__ = ["avg_pool2d", "max_pool2d", "upsample_nearest"]

NOWHERE = 255  # no place in a window of up to 255


def _taps(padded: Array, window: Window, size: Pair) -> Iterator[Array]:
    """For each place in the window, row by row: the elements (a view) there of all `size` windows of `padded`."""
    return (tap for _, _, tap in depthwise.taps(padded, window.size, size, window.stride, (1, 1)))


def _edges(size: Pair, window: Window) -> tuple[Pair, Pair]:
    """The padding of an image of this size before and after its rows, then its columns: as far as windows reach."""
    top, left = (
        (before, max(before, (count - 1) * step + length - extent - before))
        for extent, count, length, step, before in zip(size, out_size(size, window), *window[:3], strict=True)
    )
    return top, left


def _padded(x: Array, window: Window, value: float = 0) -> Array:
    edges = _edges(x.shape[1:3], window)
    return np.pad(x, ((0, 0), *edges, (0, 0)), constant_values=value) if any(map(any, edges)) else x


def sum_windows_numpy(x: Array, window: Window, factor: float) -> Array:
    """out[n, ho, wo, c] = factor · sum of x in the window whose corner is (ho, wo)·stride - padding."""
    taps = _taps(_padded(x, window), window, out_size(x.shape[1:3], window))
    out = next(taps).copy()
    for tap in taps:
        out += tap
    if factor != 1:
        out *= factor
    return out


def spread_windows_numpy(x: Array, size: Pair, window: Window, factor: float) -> Array:
    """The transpose: each element of x times factor, added to its window of an output of height and width `size`."""
    out = _zeros_around(x, size, window)
    scaled = x if factor == 1 else x * factor
    for tap in _taps(out, window, x.shape[1:3]):
        tap += scaled
    return _cropped(out, size, window)


def _zeros_around(x: Array, size: Pair, window: Window) -> Array:
    """Zeros of an image of this size and its padding, with x's batch, channels and dtype."""
    height, width = (extent + sum(edge) for extent, edge in zip(size, _edges(size, window), strict=True))
    return np.zeros((x.shape[0], height, width, x.shape[3]), x.dtype)


def _cropped(padded: Array, size: Pair, window: Window) -> Array:
    if padded.shape[1:3] == size:
        return padded
    (top, left), (height, width) = window.padding, size
    return np.ascontiguousarray(padded[:, top : top + height, left : left + width])


class AveragePool2d(Function):
    """See `avg_pool2d`."""

    @staticmethod
    def forward_numpy(ctx, x, window):
        ctx.size, ctx.window = x.shape[1:3], window
        return downcast(sum_windows_numpy(upcast(x), window, 1 / math.prod(window.size)), x.dtype)

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        dx = spread_windows_numpy(upcast(dout), ctx.size, ctx.window, 1 / math.prod(ctx.window.size))
        return (downcast(dx, dout.dtype),)

    @staticmethod
    def forward_cuda(ctx, x, window):
        ctx.size, ctx.window = x.shape[1:3], window
        out, ctx.out_statistics = sum_windows(x, window, 1 / math.prod(window.size), moments(x.dtype))
        return out

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        factor = 1 / math.prod(ctx.window.size)
        dx, ctx.din_statistics[0] = spread_windows(dout, ctx.size, ctx.window, factor, Kind.SUMS, into[0])
        return (dx,)


class UpsampleNearest(Function):
    """See `upsample_nearest`."""

    @staticmethod
    def forward_numpy(ctx, x, factor):
        ctx.window = Window((factor, factor), (factor, factor))
        n, height, width, channels = x.shape
        repeated = np.broadcast_to(x[:, :, None, :, None], (n, height, factor, width, factor, channels))
        return repeated.reshape(n, height * factor, width * factor, channels)

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        return (downcast(sum_windows_numpy(upcast(dout), ctx.window, 1), dout.dtype),)

    @staticmethod
    def forward_cuda(ctx, x, factor):
        require_float("upsample_nearest", x)
        ctx.window = Window((factor, factor), (factor, factor))
        size = x.shape[1] * factor, x.shape[2] * factor
        out, ctx.out_statistics = spread_windows(x, size, ctx.window, 1.0, moments(x.dtype))
        return out

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        dx, ctx.din_statistics[0] = sum_windows(dout, ctx.window, 1.0, Kind.SUMS, into[0])
        return (dx,)


class MaxPool2d(Function):
    """See `max_pool2d`. Each maximum's place in its window is saved in a byte; NOWHERE where ReLU gives 0."""

    @staticmethod
    def forward_numpy(ctx, x, window, relu):
        size = out_size(x.shape[1:3], window)
        lowest = -np.inf if is_float(x.dtype) else 0 if x.dtype.kind in "bu" else np.iinfo(x.dtype).min
        taps = _taps(_padded(upcast(x), window, lowest), window, size)
        out = next(taps).copy()
        place = np.zeros(out.shape, np.uint8)
        for index, tap in enumerate(taps, 1):
            top = np.maximum(out, tap)
            later = (top != out) & (out == out)  # the first NaN keeps its place
            np.maximum(place, later.view(np.uint8) * np.uint8(index), out=place)  # 9 times as fast as place[later]
            out = top
        if relu:
            np.maximum(place, (out <= 0).view(np.uint8) * np.uint8(NOWHERE), out=place)
            np.maximum(out, 0, out=out)
        ctx.window, ctx.size = window, x.shape[1:3]
        ctx.save(place)
        return downcast(out, x.dtype)

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        (place,), wide = ctx.saved, upcast(dout)
        dx = _zeros_around(wide, ctx.size, ctx.window)
        for index, tap in enumerate(_taps(dx, ctx.window, dout.shape[1:3])):
            tap += masked(wide, place == index)
        return (downcast(_cropped(dx, ctx.size, ctx.window), dout.dtype),)

    @staticmethod
    def forward_cuda(ctx, x, window, relu):
        require_float("max_pool2d", x)
        n, height, width, channels = x.shape
        out = empty((n, *out_size((height, width), window), channels), x.dtype)
        place = empty(out.shape, np.uint8)
        launch_windows("max_windows", (out, place, relu), (x,), x, out, out, window)
        ctx.window, ctx.size = window, x.shape[1:3]
        ctx.save(place)
        return out

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        (place,) = ctx.saved
        dx, add = gradient_target(into[0], (len(dout), *ctx.size, dout.shape[3]), dout.dtype)
        ctx.din_statistics[0] = launch_windows(
            "max_windows_backward", (dx, add), (dout, place), dx, dout, dx, ctx.window, Kind.SUMS
        )
        return (dx,)


def _window(name: str, x: Tensor, size: int | Pair, stride: int | Pair | None, padding: int | Pair,
            ceil_mode: bool) -> Window:
    window = Window(
        pair(f"{name}: size", size), pair(f"{name}: stride", size if stride is None else stride),
        pair(f"{name}: padding", padding), flag("ceil_mode", ceil_mode),
    )
    if x.ndim != 4 or not x.shape[3]:
        raise ValueError(f"{name}: x has shape {x.shape}, not (N, H, W, C) with a channel at least")
    for length, step, edge in zip(*window[:3], strict=True):
        if not 1 <= length <= 16 or step < 1 or not 0 <= edge <= length // 2:
            raise ValueError(
                f"{name}: size is 1 to 16, stride 1 or more, padding 0 to half of size; "
                f"not {size}, {size if stride is None else stride}, {padding}"
            )
    if any(e + 2 * edge < length for e, length, edge in zip(x.shape[1:3], window.size, window.padding, strict=True)):
        raise ValueError(f"{name}: x of shape {x.shape} is smaller than the window of {size}")
    return window


def max_pool2d(x: Tensor, size: int | Pair = 2, stride: int | Pair | None = None, padding: int | Pair = 0,
               relu: bool = False, ceil_mode: bool = False) -> Tensor:
    """Maximum over windows of x (N, H, W, C) → (N, Ho, Wo, C), Ho = (H + 2·padding - size) // stride + 1.

    size, stride, padding: a number, or a tuple for rows and columns. The stride is the size unless given. ceil_mode: Ho
    is rounded up, for windows that begin in x or the padding before it. Padding is never the maximum. Of equal elements
    the first, row by row, gets the gradient. relu: apply ReLU, before or after with the same result. Raises ValueError
    for a size above 16, windows of 256 with ReLU, a padding above half of the size or an x smaller than the window.
    """
    window = _window("max_pool2d", x, size, stride, padding, ceil_mode)
    if relu and math.prod(window.size) > NOWHERE:
        raise ValueError(f"max_pool2d: with ReLU windows are of up to {NOWHERE} pixels, not {size}")
    return MaxPool2d.apply(x, window=window, relu=relu)


def avg_pool2d(x: Tensor, size: int | Pair = 2, stride: int | Pair | None = None, padding: int | Pair = 0,
               ceil_mode: bool = False) -> Tensor:
    """Mean over windows of x (N, H, W, C); padding counts as zeros, positions beyond it, with ceil_mode, do not count.
    Shapes and errors as `max_pool2d`."""
    require_floats("avg_pool2d", x)
    window = _window("avg_pool2d", x, size, stride, padding, ceil_mode)
    out = AveragePool2d.apply(x, window=window)
    _, height, width, _ = x.shape
    if out.shape[1:3] == out_size((height, width), window._replace(ceil=False)):
        return out
    rows, columns = (
        length / np.minimum(length, extent + 2 * edge - step * np.arange(count))
        for extent, count, length, step, edge in zip(x.shape[1:3], out.shape[1:3], *window[:3], strict=True)
    )
    return out * Tensor(rows[:, None, None] * columns[:, None], dtype=out.dtype, device=out.device)


def upsample_nearest(x: Tensor, factor: int = 2) -> Tensor:
    """Each pixel of x (N, H, W, C) repeated factor x factor times → (N, H·factor, W·factor, C)."""
    if x.ndim != 4 or 0 in x.shape[1:] or not isinstance(factor, int | np.integer) or factor < 1:
        raise ValueError(f"upsample_nearest: x of shape {x.shape} must be (N, H, W, C), with pixels and channels, the "
                         f"factor {factor} 1, 2, ...")
    return x if factor == 1 else UpsampleNearest.apply(x, factor=factor)
