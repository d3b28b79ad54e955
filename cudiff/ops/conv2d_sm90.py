"""Convolutions of stride 1 that keep the image's size, on Hopper's own instructions; `conv2d` chooses them."""

from __future__ import annotations

import functools
import os
from typing import NamedTuple

import numpy as np

from cudiff.backend import Array, float32, is_low
from cudiff.cuda.module import architecture, blocks, empty, launch
from cudiff.cuda.tensor_map import tensor_map
from cudiff.ops.gemm import MULTIPROCESSORS, Epilogue, aligned, sum_splits

CHUNK = 64  # channels of a line of shared memory
LINE_BYTES = 128
SHARED_BYTES = 228 << 10  # of a multiprocessor, of which each block costs 1 KiB more than it asks for
BARRIER_BYTES = 512


class Tile(NamedTuple):
    """A block's share of the result: pixels of one image, channels; its warpgroups; blocks on a multiprocessor; and
    the microseconds that it takes on an H200, in any case and for each 64 channels of a tap."""

    pixels: int
    channels: int
    groups: int
    blocks: int
    fixed: float
    step: float


TILES = (
    Tile(256, 128, 2, 1, 8.0, 0.667),
    Tile(256, 96, 2, 1, 6.0, 0.5),
    Tile(256, 64, 2, 1, 4.5, 0.405),
    Tile(128, 128, 2, 1, 5.0, 0.318),
    Tile(128, 96, 2, 1, 5.0, 0.236),
    Tile(64, 128, 1, 1, 4.5, 0.2),
    Tile(64, 64, 1, 1, 3.5, 0.15),
)


def suits(x: Array, weight: Array, out: Array, stride: tuple[int, int] = (1, 1),
          padding: tuple[int, int] = (0, 0)) -> bool:
    """Whether these kernels take the convolution of x (N, H, W, C) with weight (K, R, S, C) to out (N, H, W, K).

    weight may be part of longer rows. CUDIFF_PORTABLE=1 in the environment forces the kernels for any GPU.
    """
    rows, columns = weight.shape[1:3]
    return (
        os.environ.get("CUDIFF_PORTABLE") != "1"
        and architecture() == "sm_90a"
        and is_low(x.dtype)
        and x.ndim == out.ndim == 4
        and x.flags.c_contiguous
        and out.flags.c_contiguous
        and stride == (1, 1)
        and rows in (1, 3)
        and columns % 2 == 1
        and padding == (rows // 2, columns // 2)
        and x.shape[2] <= 128
        and max(x.size, out.size) < 2**31
        and aligned(x, x.shape[3])
        and aligned(weight, weight.shape[3], weight.strides[0] // weight.itemsize)
        and aligned(out, out.shape[3])
    )


def width_of(columns: int) -> int:
    """Pixels of a row of an image as it lies in shared memory, where eight make a swizzled block."""
    return blocks(columns, 8) * 8


@functools.cache
def plan(images: int, height: int, width: int, channels: int, steps: int) -> Tile:
    """The tile of the least estimated time for results of this size, each the sum of so many steps."""

    def time(tile: Tile) -> float:
        rows = min(height, tile.pixels // width)
        count = images * blocks(height, max(1, rows)) * blocks(channels, tile.channels)
        return blocks(count, MULTIPROCESSORS * tile.blocks) * (tile.fixed + steps * tile.step)

    return min((tile for tile in TILES if tile.pixels >= width), key=time)


def fprop(x: Array, weight: Array, out: Array, epilogue: Epilogue, transposed: bool = False, statistics: bool = False,
          tile: Tile | None = None) -> Array | None:
    """Convolution of x (N, H, W, C), written to out (N, H, W, K), and what the epilogue adds.

    weight (K, R, S, C); or under `transposed` (C, R, S, K): then out is the gradient of the input whose output had the
    gradient x. Returns the sums and sums of squares of out, float32 (N, tiles, K, 2), where `statistics` asks for them.
    """
    n, height, columns, channels = x.shape
    outputs, (kernel_rows, kernel_columns) = out.shape[3], weight.shape[1:3]
    weight = weight if weight.dtype == x.dtype else weight.astype(x.dtype)
    width = width_of(columns)
    tile = tile or plan(n, height, width, outputs, kernel_rows * kernel_columns * blocks(channels, CHUNK))
    rows = min(height, tile.pixels // width)
    tiles = blocks(height, rows)
    slab = (rows + kernel_rows - 1) * width * LINE_BYTES
    line_count = blocks(tile.channels, CHUNK) * CHUNK if transposed else tile.channels
    a_stages, b_stages, shared = _stages(slab, line_count * LINE_BYTES, kernel_rows, tile.blocks)
    partials = empty((n, tiles, outputs, 2), float32) if statistics else None
    launch(
        "conv2d_sm90", "conv2d_sm90", (n * tiles, blocks(outputs, tile.channels)), tile.groups * 128 + 128,
        (
            tensor_map(x, (1, rows + kernel_rows - 1, width, CHUNK)),
            tensor_map(weight.reshape(len(weight), -1, weight.shape[3]),
                       (CHUNK if transposed else tile.channels, 1, CHUNK)),
            epilogue.bias, epilogue.emb, epilogue.addend, out, partials, height, columns, channels, outputs,
            kernel_columns, rows, width, a_stages, b_stages,
        ),
        shared, T=x.dtype, R=kernel_rows, PASS="DGRAD" if transposed else "FPROP", BM=tile.pixels, BN=tile.channels,
        GROUPS=tile.groups, BLOCKS=tile.blocks,
    )
    return partials


def _stages(slab: int, weights: int, kernel_rows: int, blocks_held: int) -> tuple[int, int, int]:
    """Slabs and weight tiles in flight, and the bytes of shared memory they take: twice what one slab's steps read."""
    room = SHARED_BYTES // blocks_held - 1024 - BARRIER_BYTES
    a_stages = max(2, min(4, (room - 2 * kernel_rows * weights) // slab))
    b_stages = min(4 * kernel_rows, (room - a_stages * slab) // weights)
    return a_stages, b_stages, a_stages * slab + b_stages * weights + BARRIER_BYTES


def wgrad(x: Array, dout: Array, dweight: Array, add: bool, groups: int = 1, rows: int = 0, splits: int = 0) -> None:
    """Gradient of the weight, written or added to dweight (K, R, S, C), float32, whose rows may be parts of longer."""
    n, height, columns, channels = x.shape
    outputs, kernel_rows, kernel_columns, _ = dweight.shape
    width = width_of(columns)
    across = 1 if kernel_rows > 1 else min(3, blocks(channels, 64))
    rows = rows or min(blocks(height, 2) * 2, 2 * max(1, 64 // width))
    tile = rows * width * LINE_BYTES
    stage = groups * tile + across * (rows + kernel_rows - 1) * width * LINE_BYTES
    stages = max(2, min(6, (SHARED_BYTES - 1024 - BARRIER_BYTES) // stage))
    grid = blocks(outputs, 64 * groups) * blocks(channels, 64 * across)
    steps = n * blocks(height, rows)
    per_split = blocks(steps, splits or max(1, MULTIPROCESSORS // (grid * kernel_columns)))
    splits = blocks(steps, per_split)
    pitch = dweight.strides[0] // 4
    addend = dweight if add else None
    out = dweight if splits == 1 else empty((splits, outputs, dweight.size // outputs), float32)
    launch(
        "conv2d_wgrad_sm90", "conv2d_wgrad_sm90", (grid, kernel_columns, splits), groups * 128 + 128,
        (
            tensor_map(x, (1, rows + kernel_rows - 1, width, CHUNK)), tensor_map(dout, (1, rows, width, CHUNK)),
            addend if splits == 1 else None, out, np.int64(pitch if splits == 1 else out.shape[2]), n, height, channels,
            outputs, kernel_columns, rows, width, per_split, stages,
        ),
        stages * stage + BARRIER_BYTES, T=x.dtype, R=kernel_rows, COLUMNS=across, GROUPS=groups,
    )
    if splits > 1:
        sum_splits(out, dweight, Epilogue(addend=addend), pitch)


def as_image(matrix: Array) -> Array:
    """(..., C) as an image (1, H, 8, C), for which a 1×1 convolution is a matrix product; or (rows, C) where 8 does not
    divide the rows."""
    rows = matrix.size // matrix.shape[-1]
    return matrix.reshape(*((1, rows // 8, 8) if rows % 8 == 0 else (rows,)), matrix.shape[-1])
