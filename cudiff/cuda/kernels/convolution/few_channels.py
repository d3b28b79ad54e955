"""3x3 and 1x1 convolutions between an image of few channels and one of many: a U-Net's first and last.

A tile of the matrix product would be nearly empty along the few channels. Here one axis has the few channels of all
taps. The image of many channels is 16-bit. The image of few is 16-bit, or float32 as a U-Net's input and output are: a
cast would cost a launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from cudiff.backend import Array, float32, is_low
from cudiff.cuda.device import multiprocessors, shared_memory
from cudiff.cuda.kernels.convolution.problem import DGRAD, EPILOGUE, WGRAD, Fusion, Image, Operands, Problem
from cudiff.cuda.launch import blocks, empty, launch
from cudiff.cuda.select import Offer
from cudiff.cuda.sums import add_parts, empty_statistics
from cudiff.statistics import ChannelStatistics, Kind

AnyImage = TypeVar("AnyImage", Array, Image)

CONTRACTED = 128  # channels of the image of many, at most, whose weights a thread of `contract` holds all at once
MOST = 7  # channels of the image of few, at most: a product's depth is up to nine times as many
THREADS = 256


def shared_bytes(alone: bool = False) -> int:
    """The most bytes of dynamic shared memory for a block. Two blocks fit on a multiprocessor of an A100 or of Hopper,
    at least one on any GPU, and with `alone` one is enough. The kernels' static arrays take up to 16 KiB more."""
    most = shared_memory() - (16 << 10)
    return most if alone else min(80 << 10, most)


def offer(p: Problem) -> Offer | None:
    if not _supports(p):
        return None
    if p.direction == WGRAD:
        return Offer(p.wanted & {Fusion.CAST})
    fused = {Fusion.BIAS, Fusion.CAST}
    if p.out.shape[3] > MOST:
        fused |= {Fusion.EMB, Fusion.RELU, Fusion.STATISTICS, Fusion.SUMS}
        if p.silu and len(p.norm) == 1 and p.norm[0].aligned and not p.wanted & EPILOGUE:
            fused.add(Fusion.NORM_BACKWARD)
    return Offer(p.wanted & fused)


def _supports(p: Problem) -> bool:
    few, many = sides(p.x, p.out)
    kernel = p.kernel
    return (
        is_low(many.dtype)
        and few.dtype in (many.dtype, float32)
        and kernel in ((3, 3), (1, 1))
        and p.stride == (1, 1)
        and p.padding == (kernel[0] // 2, kernel[0] // 2)
        and not p.wanted & {Fusion.ADDEND, Fusion.SKIP, Fusion.SECOND_SOURCE, Fusion.UPSAMPLE}
        and (Fusion.EMB not in p.wanted or many is p.out)
        and 0 < few.shape[3] <= MOST
        and many.shape[3] % 32 == 0
        and many.aligned
        and p.weight.contiguous
        and _row_bytes(p, few, many) <= shared_bytes(alone=True)
        and 0 < many.size < 2**31
    )


def _row_bytes(p: Problem, few: Image, many: Image) -> int:
    """Bytes for a tile of one row. With a cast in the pass that needs most: then all three must choose this kernel."""
    sizes, contracts = (few.shape[3], p.kernel[0]), few is p.out and p.direction != WGRAD
    weights = weights_bytes(many.shape[3], *sizes) if contracts or Fusion.CAST in p.wanted else 0
    return products_bytes(1, many.shape[2], *sizes) + weights


def sides(x: AnyImage, out: AnyImage) -> tuple[AnyImage, AnyImage]:
    """(image of few channels, image of many)."""
    return (x, out) if x.shape[3] < out.shape[3] else (out, x)


def copies_bytes(rows: int, width: int, few: int, taps: int) -> int:
    """Bytes of the rows of the image of few channels that a tile of `rows` rows reads in `expand`, in pairs of 16-bit
    numbers. There are two copies if `few` is odd. taps: R."""
    return 4 * (rows + taps - 1) * blocks((width + taps - 1) * few, 2) * (1 + few % 2)


def patches_pitch(width: int) -> int:
    """Elements from one row of wgrad's transposed patches to the next. Rows begin 8 of the 32 banks apart."""
    return 2 * (32 * (blocks(blocks(width, 4) * 2 + 24, 32) - 1) + 8)


def patches_bytes(rows: int, width: int, few: int, taps: int) -> int:
    """Bytes of wgrad's transposed patches for a tile of `rows` rows."""
    return 2 * (rows + taps - 1) * taps * few * patches_pitch(width)


def products_bytes(rows: int, width: int, few: int, taps: int) -> int:
    """Bytes of the products of all taps with a tile of `rows` rows and the rows around it."""
    return 4 * (rows + taps - 1) * width * (taps**2 * few | 1)


def weights_bytes(channels: int, few: int, taps: int) -> int:
    """Bytes behind the products for the weights of so many channels, and for their alignment; 0 for `contract`."""
    if channels <= CONTRACTED:
        return 0
    return 2 * blocks(taps**2 * few, 8) * 8 * (channels + 4) + 4


def sums_bytes(few: int, columns: int, taps: int) -> int:
    """Bytes of wgrad's sums: those of half of the warps, or the total of all warps if it is larger."""
    depth = taps**2 * few
    return 4 * max(THREADS // 64 * blocks(depth, 16) * 16 * 32, depth * (columns + 1))


def run(given: Operands, offer: Offer, p: Problem) -> ChannelStatistics | None:
    """Returns what `table.fprop` and `table.dgrad` return."""
    taps, (few, many) = p.kernel[0], sides(given.x, given.out)
    constants = {"T": many.dtype, "FEW_T": few.dtype, "R": taps, "FEW": few.shape[3]}
    if p.direction == WGRAD:
        _wgrad(given, few, many, p.weight.shape, constants)
        return None
    weight = given.weight.astype(many.dtype, copy=False)
    backward = p.direction == DGRAD
    at = _weight(p.weight.shape, few_last=(few is given.x) != backward, flipped=backward)
    if many is given.out:
        return _expand(given._replace(weight=weight), at, offer.fused, constants)
    x, out = given.x, given.out
    n, height, width, channels = x.shape
    weights = weights_bytes(channels, out.shape[3], taps)
    rows, shared = _rows(n, height, lambda rows: products_bytes(rows, width, out.shape[3], taps) + weights)
    sizes: tuple[int, ...] = height, width
    name, columns = "contract", channels
    if channels > CONTRACTED:
        name, columns, sizes = "contract_many", _columns(channels), (height, width, channels)
    launch(
        "conv2d_few_channels", name, n * blocks(height, rows), THREADS,
        (x, weight, given.epilogue.bias, out, at, *sizes, rows), shared, **constants, BN=columns, SUMS=0, NORM=0,
    )
    return None


def _expand(given: Operands, at: np.ndarray, fused: frozenset[str],
            constants: dict[str, Any]) -> ChannelStatistics | None:
    """`run` if the result is the image of many channels. at: as `_weight` returns it."""
    x, out, epilogue, outputs = given.x, given.out, given.epilogue, given.out.shape[3]
    n, height, width, fewer = x.shape
    columns = _columns(outputs)
    rows, shared = _rows(
        n, height, lambda rows: copies_bytes(rows, width, fewer, constants["R"]), width, outputs // columns
    )
    kinds = {Fusion.STATISTICS: Kind.MOMENTS, Fusion.NORM_BACKWARD: Kind.PRODUCTS, Fusion.SUMS: Kind.SUMS}
    wanted = next((kind for fusion, kind in kinds.items() if fusion in fused), None)
    statistics = None if wanted is None else empty_statistics(wanted, n, blocks(height, rows), outputs)
    norm = given.norm if Fusion.NORM_BACKWARD in fused else None
    source, affine, groups = (None, (None,) * 6, 1) if norm is None else (norm.x, norm[3:], norm.mean.shape[1])
    launch(
        "conv2d_few_channels", "expand", (n * blocks(height, rows), outputs // columns), THREADS,
        (x, given.weight, epilogue.bias, epilogue.emb, Fusion.RELU in fused, out,
         None if statistics is None else statistics.sums, source, *affine, at, height, width, outputs, rows, groups),
        shared, **constants, BN=columns, SUMS=0 if wanted is None else wanted.numbers,
        NORM=int(norm is not None),
    )
    return statistics


def _wgrad(given: Operands, few: Array, many: Array, weight: tuple[int, ...], constants: dict[str, Any]) -> None:
    dweight, taps = given.weight, weight[1]
    n, height, width, channels = many.shape
    rows, shared = _rows(n, height, lambda rows: patches_bytes(rows, width, few.shape[3], taps))
    columns = _columns(channels)
    tiles = n * blocks(height, rows)
    parts = empty((tiles, weight[0], dweight.size // weight[0]), float32)
    shared = max(shared, sums_bytes(few.shape[3], columns, taps))
    at = _weight(weight, few_last=few is given.x, flipped=few is given.out)
    launch(
        "conv2d_few_channels", "wgrad", (tiles, channels // columns), THREADS,
        (few, many, parts, at, height, width, channels, rows, patches_pitch(width)), shared,
        **constants, BN=columns, SUMS=0, NORM=0,
    )
    add_parts(parts, dweight, given.add)


def _rows(n: int, height: int, bytes_of: Callable[[int], int], width: int = 1, chunks: int = 1) -> tuple[int, int]:
    """Rows of an image that a block takes, and their bytes of shared memory.

    There are two blocks for each multiprocessor, or more if shared memory has no room for so many rows. Two run at once
    on a multiprocessor, except wgrad's of 6 and 7 channels, which run one after the other. chunks: how many blocks take
    the same rows of `width` pixels. Of a few images they are counted too, unless that makes more than 512 pixels a
    block: before its first product a block loads its weights, which takes as long as some rows.
    """
    most = blocks(height, max(1, 2 * multiprocessors() // n))
    if n * chunks < multiprocessors():
        most = max(most, min(blocks(height, 2 * multiprocessors() // (n * chunks)), 512 // width))
    rows = next(rows for rows in range(most, 0, -1) if rows == 1 or bytes_of(rows) <= shared_bytes())
    return rows, bytes_of(rows)


def _columns(channels: int) -> int:
    return 64 if channels % 64 == 0 else 32


_WEIGHT = np.dtype([(name, np.int32) for name in ("first", "tap", "few", "many")])


def _weight(shape: tuple[int, ...], few_last: bool, flipped: bool) -> np.ndarray:
    """Where a weight (K, R, R, C) lies, for the kernel: the first tap, and the strides of taps, few and many channels.
    few_last: whether the few channels are C, else K. flipped: whether taps are read in reverse order."""
    _, taps, _, channels = shape
    first, tap = ((taps**2 - 1) * channels, -channels) if flipped else (0, channels)
    few, many = (1, taps**2 * channels) if few_last else (taps**2 * channels, 1)
    return np.array((first, tap, few, many), _WEIGHT)
