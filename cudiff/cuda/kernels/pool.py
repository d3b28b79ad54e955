"""Pooling: sums over windows of images, and the reverse, which spreads each element over its window."""

from __future__ import annotations

from typing import NamedTuple

from cudiff.backend import Array
from cudiff.cuda.accumulate import gradient_target
from cudiff.cuda.device import multiprocessors
from cudiff.cuda.launch import blocks, launch
from cudiff.cuda.sums import empty_statistics
from cudiff.gradient import Slot
from cudiff.statistics import ChannelStatistics, Kind

Pair = tuple[int, int]


class Window(NamedTuple):
    """Pairs are (rows, columns). ceil: whether windows that reach beyond the padding count too."""

    size: Pair
    stride: Pair
    padding: Pair = (0, 0)
    ceil: bool = False


TWICE = Window((2, 2), (2, 2))  # the image is twice as high and wide as the result


def out_size(size: Pair, window: Window) -> Pair:
    """Height and width after pooling: (H + 2·padding - size) // stride + 1; with `ceil` rounded up, but without
    windows that would begin after the image."""
    counts = []
    for extent, length, stride, padding in zip(size, *window[:3], strict=True):
        reach = extent + 2 * padding - length
        count = reach // stride + 1
        if window.ceil and reach % stride and count * stride < extent + padding:
            count += 1
        counts.append(count)
    return counts[0], counts[1]


def sum_windows(x: Array, window: Window, factor: float, wanted: Kind | None,
                into: Slot | None = None) -> tuple[Array, ChannelStatistics | None]:
    """`sum_windows_numpy` on the GPU, written where `gradient_target` says, and its statistics of the kind `wanted`."""
    shape = (x.shape[0], *out_size(x.shape[1:3], window), x.shape[3])
    out, add = gradient_target(into, shape, x.dtype)
    return out, launch_windows("sum_windows", (out, add), (x, factor), x, out, out, window, wanted)


def spread_windows(x: Array, size: tuple[int, int], window: Window, factor: float, wanted: Kind | None,
                   into: Slot | None = None) -> tuple[Array, ChannelStatistics | None]:
    """`spread_windows_numpy` on the GPU, written where `gradient_target` says, and its statistics as `wanted`."""
    out, add = gradient_target(into, (x.shape[0], *size, x.shape[3]), x.dtype)
    return out, launch_windows("spread_windows", (out, add), (x, factor), out, x, out, window, wanted)


def launch_windows(name: str, outputs: tuple, inputs: tuple, large: Array, small: Array, out: Array, window: Window,
                   wanted: Kind | None = None) -> ChannelStatistics | None:
    """Launch a kernel of pool.cu: blocks for each row of windows, or, if `out` is `large`, for the rows from one
    window's corner to the next.

    Returns out's statistics of the kind `wanted`, of which each of these rows is a tile, or None; max_windows writes
    none. Without images it launches nothing and returns None.
    """
    n, height, width, channels = large.shape
    if n == 0:
        return None
    size = 16 // large.itemsize
    bands = (blocks(e + p, step) for e, p, step in zip((height, width), window.padding, window.stride, strict=True))
    packs = channels % size == 0 and large.data.ptr % 16 == 0 and small.data.ptr % 16 == 0
    rows, columns = small.shape[1:3] if out is small else bands
    pack = size if packs else 1
    lanes = _lanes(n * rows, columns, channels // pack, pack * large.itemsize)
    statistics = None if wanted is None else empty_statistics(wanted, n, rows, channels)
    sums = () if name == "max_windows" else (None if statistics is None else statistics.sums,)
    launch(
        "pool", name, (n * rows, blocks(channels, lanes * pack)), (lanes, min(256 // lanes, columns)),
        (*outputs, *sums, *inputs, height, width, *small.shape[1:3], channels),
        T=large.dtype, VEC=int(packs), SUMS=0 if wanted is None else min(2, wanted.numbers),
        WINDOW_H=window.size[0], WINDOW_W=window.size[1], STRIDE_H=window.stride[0], STRIDE_W=window.stride[1],
        PADDING_H=window.padding[0], PADDING_W=window.padding[1],
    )
    return statistics


def _lanes(rows: int, columns: int, packs: int, nbytes: int) -> int:
    """Packs of channels that a block takes of each of `rows` rows of windows: all of them, or 256.

    Fewer, where this makes fewer than three blocks for two multiprocessors: then each thread has one window of a row,
    or as few as leave a block 128 bytes of a pixel: of 8 images of 32 x 32 x 1152 8 µs on an H200, where 144 blocks for
    9 images took 18. nbytes: of a pack.
    """
    lanes = min(256, packs)
    if 2 * rows * blocks(packs, lanes) >= 3 * multiprocessors():
        return lanes
    line = 128 // nbytes
    return min(lanes, max(1, 256 // columns // line) * line)
