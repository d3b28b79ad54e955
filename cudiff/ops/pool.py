"""Pooling over windows and nearest upsampling, channels-last.

Two sums that are each other's gradient carry all but max pooling: `sum_windows` (average pooling; upsampling
backward) and `spread_windows` (upsampling; average pooling backward).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from cudiff.backend import Array
from cudiff.cuda.accumulate import gradient_target
from cudiff.cuda.kernels.pool import Window, launch_windows, out_size, spread_windows, sum_windows
from cudiff.cuda.launch import empty
from cudiff.function import Function
from cudiff.ops.cast import downcast, require_float, upcast
from cudiff.statistics import Kind, moments
from cudiff.tensor import Tensor

__all__ = ["avg_pool2d", "max_pool2d", "upsample_nearest"]

NOWHERE = 255  # no place in a window of up to 15 x 15


def _taps(padded: Array, window: Window, size: tuple[int, int]) -> Iterator[Array]:
    """For each place in the window, row by row: the elements (a view) there of all `size` windows of `padded`."""
    length, stride, _ = window
    height, width = size
    for r in range(length):
        for s in range(length):
            yield padded[:, r : r + stride * (height - 1) + 1 : stride, s : s + stride * (width - 1) + 1 : stride]


def _padded(x: Array, padding: int, value: float = 0) -> Array:
    edges = ((0, 0), (padding, padding), (padding, padding), (0, 0))
    return np.pad(x, edges, constant_values=value) if padding else x


def sum_windows_numpy(x: Array, window: Window, factor: float) -> Array:
    """out[n, ho, wo, c] = factor · sum of x in the window whose corner is (ho, wo)·stride - padding."""
    taps = _taps(_padded(x, window[2]), window, out_size(x.shape[1:3], window))
    out = next(taps).copy()
    for tap in taps:
        out += tap
    if factor != 1:
        out *= factor
    return out


def spread_windows_numpy(x: Array, size: tuple[int, int], window: Window, factor: float) -> Array:
    """The transpose: each element of x times factor, added to its window of an output of height and width `size`."""
    padding = window[2]
    out = np.zeros((x.shape[0], size[0] + 2 * padding, size[1] + 2 * padding, x.shape[3]), x.dtype)
    scaled = x if factor == 1 else x * factor
    for tap in _taps(out, window, x.shape[1:3]):
        tap += scaled
    return _cropped(out, padding)


def _cropped(padded: Array, padding: int) -> Array:
    return np.ascontiguousarray(padded[:, padding:-padding, padding:-padding]) if padding else padded


class AveragePool2d(Function):
    """See `avg_pool2d`."""

    @staticmethod
    def forward_numpy(ctx, x, window):
        ctx.size, ctx.window = x.shape[1:3], window
        return downcast(sum_windows_numpy(upcast(x), window, 1 / window[0] ** 2), x.dtype)

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        dx = spread_windows_numpy(upcast(dout), ctx.size, ctx.window, 1 / ctx.window[0] ** 2)
        return (downcast(dx, dout.dtype),)

    @staticmethod
    def forward_cuda(ctx, x, window):
        require_float("avg_pool2d", x)
        ctx.size, ctx.window = x.shape[1:3], window
        out, ctx.out_statistics = sum_windows(x, window, 1 / window[0] ** 2, moments(x.dtype))
        return out

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        factor = 1 / ctx.window[0] ** 2
        dx, ctx.din_statistics[0] = spread_windows(dout, ctx.size, ctx.window, factor, Kind.SUMS, into[0])
        return (dx,)


class UpsampleNearest(Function):
    """See `upsample_nearest`."""

    @staticmethod
    def forward_numpy(ctx, x, factor):
        ctx.window = (factor, factor, 0)
        n, height, width, channels = x.shape
        repeated = np.broadcast_to(x[:, :, None, :, None], (n, height, factor, width, factor, channels))
        return repeated.reshape(n, height * factor, width * factor, channels)

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        return (downcast(sum_windows_numpy(upcast(dout), ctx.window, 1), dout.dtype),)

    @staticmethod
    def forward_cuda(ctx, x, factor):
        require_float("upsample_nearest", x)
        ctx.window = (factor, factor, 0)
        size = x.shape[1] * factor, x.shape[2] * factor
        out, ctx.out_statistics = spread_windows(x, size, ctx.window, 1.0, moments(x.dtype))
        return out

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        dx, ctx.din_statistics[0] = sum_windows(dout, ctx.window, 1.0, Kind.SUMS, into[0])
        return (dx,)


class MaxPool2d(Function):
    """See `max_pool2d`. Each maximum's place in its window is kept, one byte an output; NOWHERE where ReLU cut it."""

    @staticmethod
    def forward_numpy(ctx, x, window, relu):
        size = out_size(x.shape[1:3], window)
        taps = _taps(_padded(upcast(x), window[2], -np.inf), window, size)
        out = next(taps).copy()
        place = np.zeros(out.shape, np.uint8)
        for index, tap in enumerate(taps, 1):
            place[tap > out] = index
            np.maximum(out, tap, out=out)
        if relu:
            place[out <= 0] = NOWHERE
            np.maximum(out, 0, out=out)
        ctx.window, ctx.size = window, x.shape[1:3]
        ctx.save(place)
        return downcast(out, x.dtype)

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        (place,), padding, wide = ctx.saved, ctx.window[2], upcast(dout)
        height, width = ctx.size
        dx = np.zeros((len(dout), height + 2 * padding, width + 2 * padding, dout.shape[3]), wide.dtype)
        for index, tap in enumerate(_taps(dx, ctx.window, dout.shape[1:3])):
            tap += np.where(place == index, wide, 0)
        return (downcast(_cropped(dx, padding), dout.dtype),)

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


def _window(name: str, x: Tensor, size: int, stride: int | None, padding: int) -> Window:
    stride = size if stride is None else stride
    if x.ndim != 4:
        raise ValueError(f"{name}: x has shape {x.shape}, not (N, H, W, C)")
    if not 1 <= size <= 16 or stride < 1 or not 0 <= padding <= size // 2:
        raise ValueError(f"{name}: size {size} must be 1 to 16, stride {stride} positive, padding {padding} <= size/2")
    if min(x.shape[1:3]) + 2 * padding < size:
        raise ValueError(f"{name}: x of shape {x.shape} is smaller than the window of {size}")
    return size, stride, padding


def max_pool2d(x: Tensor, size: int = 2, stride: int | None = None, padding: int = 0, relu: bool = False) -> Tensor:
    """Maximum over square windows of x (N, H, W, C) → (N, Ho, Wo, C), Ho = (H + 2·padding - size) // stride + 1.

    The stride is the size unless given. Padding never wins; of equal elements the first, row by row, gets the
    gradient. `relu`: ReLU before or after, which comes to the same. Raises ValueError for a size above 16, or 15
    with ReLU, a padding above half of it or an x smaller than the window.
    """
    if relu and size > 15:
        raise ValueError(f"max_pool2d: with ReLU windows are of 1 to 15, not {size}")
    return MaxPool2d.apply(x, window=_window("max_pool2d", x, size, stride, padding), relu=relu)


def avg_pool2d(x: Tensor, size: int = 2, stride: int | None = None, padding: int = 0) -> Tensor:
    """Mean over square windows of x (N, H, W, C); padding counts as zeros. Shapes and errors as `max_pool2d`."""
    return AveragePool2d.apply(x, window=_window("avg_pool2d", x, size, stride, padding))


def upsample_nearest(x: Tensor, factor: int = 2) -> Tensor:
    """Each pixel of x (N, H, W, C) repeated factor x factor times → (N, H·factor, W·factor, C)."""
    if x.ndim != 4 or factor < 1:
        raise ValueError(f"upsample_nearest: x of shape {x.shape} must be (N, H, W, C), the factor {factor} positive")
    return x if factor == 1 else UpsampleNearest.apply(x, factor=factor)
