"""Sums over windows of images, and what spreads each element over its window."""

from __future__ import annotations

from cudiff.backend import Array
from cudiff.cuda.accumulate import gradient_target
from cudiff.cuda.launch import blocks, launch
from cudiff.cuda.sums import empty_statistics
from cudiff.gradient import Slot
from cudiff.statistics import ChannelStatistics, Kind

Window = tuple[int, int, int]  # size, stride, padding
TWICE = (2, 2, 0)  # the windows of an image twice as high and wide, one for each pixel


def out_size(size: tuple[int, int], window: Window) -> tuple[int, int]:
    """Height and width after pooling: (H + 2·padding - size) // stride + 1."""
    length, stride, padding = window
    return tuple((extent + 2 * padding - length) // stride + 1 for extent in size)  # type: ignore[return-value]


def sum_windows(x: Array, window: Window, factor: float, wanted: Kind | None,
                into: Slot | None = None) -> tuple[Array, ChannelStatistics | None]:
    """`sum_windows_numpy` on the GPU, to where `gradient_target` says; and the statistics that are wanted of it."""
    shape = (x.shape[0], *out_size(x.shape[1:3], window), x.shape[3])
    out, add = gradient_target(into, shape, x.dtype)
    return out, launch_windows("sum_windows", (out, add), (x, factor), x, out, out, window, wanted)


def spread_windows(x: Array, size: tuple[int, int], window: Window, factor: float, wanted: Kind | None,
                   into: Slot | None = None) -> tuple[Array, ChannelStatistics | None]:
    """`spread_windows_numpy` on the GPU, to where `gradient_target` says; and the statistics that are wanted of it."""
    out, add = gradient_target(into, (x.shape[0], *size, x.shape[3]), x.dtype)
    return out, launch_windows("spread_windows", (out, add), (x, factor), out, x, out, window, wanted)


def launch_windows(name: str, outputs: tuple, inputs: tuple, large: Array, small: Array, out: Array, window: Window,
                   wanted: Kind | None = None) -> ChannelStatistics | None:
    """One block a row of windows, or where `out` is `large` the rows from one window's corner to the next.

    Returns the statistics that are wanted of what it stores, a tile for each block; max_windows makes none. Without
    images nothing is launched.
    """
    n, height, width, channels = large.shape
    if n == 0:
        return None
    size, (length, stride, padding) = 16 // large.itemsize, window
    packs = channels % size == 0 and large.data.ptr % 16 == 0 and small.data.ptr % 16 == 0
    rows, columns = small.shape[1:3] if out is small else (blocks(e + padding, stride) for e in (height, width))
    lanes = min(256, channels // (size if packs else 1))
    statistics = None if wanted is None else empty_statistics(wanted, n, rows, channels)
    sums = () if name == "max_windows" else (None if statistics is None else statistics.sums,)
    launch(
        "pool", name, (n * rows, blocks(channels, lanes * (size if packs else 1))),
        (lanes, min(256 // lanes, columns)),
        (*outputs, *sums, *inputs, height, width, *small.shape[1:3], channels),
        T=large.dtype, VEC=int(packs), SUMS=0 if wanted is None else min(2, wanted.numbers),
        WINDOW=length, STRIDE=stride, PADDING=padding,
    )
    return statistics
