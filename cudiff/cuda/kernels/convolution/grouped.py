"""Convolutions with groups or dilation by conv2d_depthwise.cu and conv2d_grouped.cu, on every GPU."""

from __future__ import annotations

import math

import numpy as np

from cudiff.backend import float32
from cudiff.cuda.device import multiprocessors
from cudiff.cuda.kernels.convolution.problem import DGRAD, FPROP, WGRAD, Fusion, Operands, Problem
from cudiff.cuda.launch import aligned, blocks, empty, launch
from cudiff.cuda.select import Offer
from cudiff.cuda.sums import add_parts

LARGEST = 8  # side of a depthwise kernel, at most: wgrad's threads keep the sums of a row of taps in registers
RUN = 4  # results side by side of a thread of conv2d_depthwise.cu
DEPTH = 16  # of a tile of conv2d_grouped.cu, its BK
FLOPS = {64: 10e6, 16: 3.6e6}
"""Of conv2d_grouped.cu in a microsecond, by a tile's columns. All passes of 3x3 convolutions of 64 images of 32 x 32
took 5.8 ms with 128 channels, dilated, and 4.0 with 32 groups of 8."""
_SIZES = np.dtype([(name, np.int32) for name in (
    "N", "H", "W", "C", "h", "w", "K", "R", "S", "stride_h", "stride_w", "padding_h", "padding_w", "dilation_h",
    "dilation_w", "groups",
)])  # fmt: skip


def offer(p: Problem) -> Offer | None:
    """Serves every problem with groups or dilation."""
    grouped = p.groups > 1 or p.dilation != (1, 1)
    return Offer(p.wanted & {Fusion.BIAS, Fusion.ADDEND}) if grouped else None


def offer_depthwise(p: Problem) -> Offer | None:
    depthwise = p.x.shape[3] == p.out.shape[3] == p.groups and max(p.kernel) <= LARGEST
    return offer(p) if depthwise else None


def run_depthwise(given: Operands, offer: Offer, p: Problem) -> None:
    image, weight, out, epilogue = given.x, given.weight, given.out, given.epilogue
    rows, columns = p.kernel
    pack = 16 // image.itemsize if aligned(image, p.groups) and aligned(out) else 1
    lanes = min(32, p.groups // pack)
    across = blocks(p.groups, lanes * pack)
    side_by_side = RUN if p.stride[1] == p.dilation[1] == 1 else 1
    constants = {"T": image.dtype, "VEC": int(pack > 1), "ROWS": rows, "COLUMNS": columns, "RUN": side_by_side}
    n, height, width, _ = out.shape  # in wgrad out is dout
    block = lanes, min(256 // lanes, blocks(width, side_by_side))
    if p.direction == WGRAD:
        lines = blocks(n * height, blocks(8 * multiprocessors(), across * rows))
        parts = empty((blocks(n * height, lines), *weight.shape), float32)
        launch("conv2d_depthwise", "wgrad", (rows, across, len(parts)), block, (parts, out, image, lines, _sizes(p)),
               **constants)
        add_parts(parts, weight, given.add)
    else:
        launch("conv2d_depthwise", p.direction.lower(), (n * height, across), block,
               (out, image, weight.astype(image.dtype, copy=False), epilogue.bias, epilogue.addend, _sizes(p)),
               rows * columns * lanes * pack * image.itemsize, **constants)


def run(given: Operands, offer: Offer, p: Problem) -> None:
    """Launch conv2d_grouped.cu with a block for each tile of each group, in wgrad for each part of the pixels too."""
    k, taps, c = p.weight.shape[0] // p.groups, p.kernel[0] * p.kernel[1], p.weight.shape[3]
    n, height, width, _ = p.out.shape
    pixels = n * height * width
    columns = {FPROP: k, DGRAD: c, WGRAD: taps * c}[p.direction]
    if p.direction == WGRAD:
        bm, bn = (16, 128) if k <= 16 else (128, 16) if columns <= 16 else (64, 64)
        tiles = p.groups * blocks(k, bm) * blocks(columns, bn)
        share = blocks(blocks(pixels, blocks(4 * multiprocessors(), tiles)), DEPTH) * DEPTH
        parts = empty((blocks(pixels, share), *given.weight.shape), float32)
        _launch(p, (tiles, len(parts)), (bm, bn), (parts, given.out, given.x, None, None, share))
        add_parts(parts, given.weight, given.add)
    else:
        bm, bn = (128, 16) if columns <= 16 else (64, 64)
        tiles = p.groups * blocks(pixels, bm) * blocks(columns, bn)
        weight, (bias, _, addend) = given.weight.astype(given.x.dtype, copy=False), given.epilogue[:3]
        _launch(p, (tiles, 1), (bm, bn), (given.out, given.x, weight, bias, addend, 0))


def microseconds(p: Problem) -> float:
    """Estimated microseconds of conv2d_grouped.cu, of whole tiles. Where they are few, one is taken to be three times
    as fast as where each multiprocessor has one or more. wgrad has parts of the depth enough for all of these."""
    k, c, taps = p.weight.shape[0] // p.groups, p.weight.shape[3], math.prod(p.kernel)
    pixels = math.prod(p.out.shape[:3])
    columns, depth = (c, k) if p.direction == DGRAD else (k, c)
    bm, bn = (128, 16) if columns <= 16 else (64, 64)
    tiles = p.groups * blocks(pixels, bm) * blocks(columns, bn)
    if p.direction != WGRAD:
        tiles = max(tiles, multiprocessors() // 3)
    return 3.5 + 2 * tiles * bm * bn * taps * depth / FLOPS[bn]


def _launch(p: Problem, grid: tuple[int, int], tile: tuple[int, int], args: tuple) -> None:
    launch("conv2d_grouped", "conv2d_grouped", grid, 256, (*args, _sizes(p)), PASS=p.direction, T=p.x.dtype,
           BM=tile[0], BN=tile[1])


def _sizes(p: Problem) -> np.ndarray:
    """The kernels' struct `Convolution`: the sizes of the forward pass."""
    x, out = (p.out.shape, p.x.shape) if p.direction == DGRAD else (p.x.shape, p.out.shape)
    return np.array((*x, *out[1:], *p.kernel, *p.stride, *p.padding, *p.dilation, p.groups), _SIZES)
