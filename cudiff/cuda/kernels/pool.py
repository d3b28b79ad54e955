"""Sums over windows of images, and what spreads each element over its window."""

from __future__ import annotations

from cudiff.backend import Array, float32
from cudiff.cuda.accumulate import gradient_target
from cudiff.cuda.launch import blocks, empty, launch
from cudiff.cuda.sums import empty_partials
from cudiff.gradient import Slot

Window = tuple[int, int, int]  # size, stride, padding
TWICE = (2, 2, 0)  # the windows of an image twice as high and wide, one for each pixel


def out_size(size: tuple[int, int], window: Window) -> tuple[int, int]:
    """Height and width after pooling: (H + 2·padding - size) // stride + 1."""
    length, stride, padding = window
    return tuple((extent + 2 * padding - length) // stride + 1 for extent in size)  # type: ignore[return-value]


def sum_windows(x: Array, window: Window, factor: float,
                into: Slot | None = None, moments: int = 2) -> tuple[Array, Array | None]:
    """`sum_windows_numpy` on the GPU, to where `gradient_target` says; and its sums: see `launch_windows`."""
    shape = (x.shape[0], *out_size(x.shape[1:3], window), x.shape[3])
    out, add = gradient_target(into, shape, x.dtype)
    return out, launch_windows("sum_windows", (out, add), (x, factor), x, out, out, window, moments)


def spread_windows(x: Array, size: tuple[int, int], window: Window, factor: float,
                   into: Slot | None = None, moments: int = 2) -> tuple[Array, Array | None]:
    """`spread_windows_numpy` on the GPU, to where `gradient_target` says; and its sums: see `launch_windows`."""
    out, add = gradient_target(into, (x.shape[0], *size, x.shape[3]), x.dtype)
    return out, launch_windows("spread_windows", (out, add), (x, factor), out, x, out, window, moments)


def launch_windows(name: str, outputs: tuple, inputs: tuple, large: Array, small: Array, out: Array, window: Window,
                   moments: int | None = None) -> Array | None:
    """One block a row of windows, or where `out` is `large` the rows from one window's corner to the next.

    Returns of what each block stores the sums, float32 (N, blocks, C), if one of `moments` is asked for, or with 2 what
    `Tensor.partials` is; None: the kernel makes no sums.
    """
    n, height, width, channels = large.shape
    size, (length, stride, padding) = 16 // large.itemsize, window
    packs = channels % size == 0 and large.data.ptr % 16 == 0 and small.data.ptr % 16 == 0
    rows, columns = small.shape[1:3] if out is small else (blocks(e + padding, stride) for e in (height, width))
    lanes = min(256, channels // (size if packs else 1))
    sums = None
    if moments == 2:
        sums = empty_partials(n, rows, channels, large.dtype)
    elif moments == 1:
        sums = empty((n, rows, channels), float32)
    statistics = () if moments is None else (sums,)
    launch(
        "pool", name, (n * rows, blocks(channels, lanes * (size if packs else 1))),
        (lanes, min(256 // lanes, columns)),
        (*outputs, *statistics, *inputs, height, width, *small.shape[1:3], channels),
        T=large.dtype, VEC=int(packs), SUMS=moments or 0, WINDOW=length, STRIDE=stride, PADDING=padding,
    )
    return sums
