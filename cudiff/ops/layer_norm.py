"""Layer norm (Ba et al. 2016): each row of channels to mean 0 and variance 1, then weight and bias."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from cudiff.backend import Array, float32
from cudiff.cuda.accumulate import gradient_target
from cudiff.cuda.deferred import batched
from cudiff.cuda.device import multiprocessors
from cudiff.cuda.kernels.norm.problem import kernel_constants
from cudiff.cuda.launch import blocks, empty, launch
from cudiff.cuda.sums import add_rows
from cudiff.function import Function
from cudiff.ops.cast import as_wide, downcast, require_floats, upcast
from cudiff.tensor import Tensor

__all__ = ["layer_norm"]

HELD = 40  # numbers of a row for each thread, at most
LONGEST = 8 * 32 * HELD
"""Channels of the longest rows that a block holds. Longer ones are read for their means, then by tiles of columns."""
AT_ONCE = {"normalize": (10, 6, 4, 3), "backward": (7, 5, 4, 3)}
"""How many blocks of four warps a multiprocessor has registers for where a thread holds up to 8, 16, 24 or more numbers
of 16 bits."""


class LayerNorm(Function):
    """See `layer_norm`."""

    @staticmethod
    def forward_numpy(ctx, x, weight, bias, eps, plus_one):
        wide = upcast(x)
        mean = wide.mean(-1, keepdims=True)
        normal = wide - mean
        rstd = 1 / np.sqrt(np.square(normal).mean(-1, keepdims=True) + eps)
        normal *= rstd
        spread = _spread(weight + 1 if plus_one else weight, x.ndim)
        if any(ctx.needs):
            ctx.save(normal, spread, rstd)
            ctx.axes = tuple(range(weight.ndim - 1, x.ndim - 1))  # what shares a weight
        return downcast(normal * spread + _spread(bias, x.ndim), x.dtype)

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        normal, weight, rstd = ctx.saved
        wide = upcast(dout)
        dbias, dweight = wide.sum(ctx.axes), (wide * normal).sum(ctx.axes)
        dnormal = wide * weight
        second = (dnormal * normal).mean(-1, keepdims=True)
        dnormal -= dnormal.mean(-1, keepdims=True)
        dnormal -= normal * second
        dnormal *= rstd
        return downcast(dnormal, dout.dtype), dweight, dbias

    @staticmethod
    def forward_cuda(ctx, x, weight, bias, eps, plus_one):
        rows, channels = x.size // x.shape[-1], x.shape[-1]
        y, mean, rstd = empty(x.shape, x.dtype), empty(rows, float32), empty(rows, float32)
        threads, constants = _threads(x, y, weight, bias)
        constants["PLUS_ONE"] = ctx.plus_one = int(plus_one)
        shared, groups, tiles = _tiles(x, weight, "normalize")
        if groups and channels <= LONGEST:
            launch("layer_norm", "normalize", groups * tiles, threads,
                   (y, mean, rstd, x, weight, bias, shared, tiles, channels, eps), **constants)
        elif rows:
            launch("layer_norm", "moments", rows, 1024, (mean, rstd, x, channels, eps), **constants)
            launch("layer_norm", "columns", (groups * tiles, _column_tiles(channels, constants)), 256,
                   (y, mean, rstd, x, weight, bias, shared, tiles, channels), **constants)
        ctx.save(x, weight, mean, rstd)
        return y

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        x, weight, mean, rstd = ctx.saved
        channels, (shared, groups, tiles) = weight.shape[-1], _tiles(x, weight, "backward")
        dx = gradient_target(into[0], x.shape, x.dtype) if needs[0] else (None, False)
        dweight, dbias = (
            gradient_target(target, weight.shape, float32) if need else (None, False)
            for need, target in zip(needs[1:], into[1:], strict=True)
        )
        threads, constants = _threads(x, dout, dx[0], weight)
        constants["PLUS_ONE"] = ctx.plus_one
        sums = empty((2, groups, tiles, channels), float32) if needs[1] or needs[2] else (None, None)
        if groups and channels <= LONGEST:
            launch("layer_norm", "backward", groups * tiles, threads,
                   (*dx, *sums, dout, x, mean, rstd, weight, shared, tiles, channels), **constants)
        elif groups:
            means = empty((mean.size, 2), float32)
            if needs[0] and mean.size:
                launch("layer_norm", "products", mean.size, 1024,
                       (means, dout, x, mean, rstd, weight, shared, channels), **constants)
            launch("layer_norm", "backward_columns", (groups * tiles, _column_tiles(channels, constants)), 256,
                   (*dx, *sums, dout, x, mean, rstd, means, weight, shared, tiles, channels), **constants)
        if groups:
            with batched():
                for part, (gradient, add) in zip(sums, (dbias, dweight), strict=True):
                    if gradient is not None:
                        add_rows(part, gradient, add)
        return dx[0], dweight[0], dbias[0]


def _spread(parameter: np.ndarray, ndim: int) -> np.ndarray:
    """(C,) as it is, (N, C) as (N, 1, ..., 1, C)."""
    return parameter.reshape(*parameter.shape[:-1], *(1,) * (ndim - parameter.ndim), parameter.shape[-1])


def _tiles(x: Array, weight: Array, kernel: str) -> tuple[int, int, int]:
    """How many rows share a row of the weight, how many such groups there are, and into how many tiles a group is
    divided, of a block each. Raises ValueError for more than 2**31 - 2048 rows."""
    shared, groups = math.prod(x.shape[weight.ndim - 1 : -1]), weight.size // weight.shape[-1]
    if shared * groups > 2**31 - 2048:  # the kernels add up to that many in 32 bits
        raise ValueError(f"layer_norm on CUDA takes up to 2**31 - 2048 rows, not {shared * groups}: call it on parts")
    if x.shape[-1] > LONGEST:
        at_once = 8 * multiprocessors() // max(1, groups * _column_tiles(x.shape[-1], kernel_constants(x)))
        return shared, groups, max(1, min(at_once, blocks(shared, 8)))
    (threads, rows), constants = _threads(x)  # where another array is not aligned, the launch has more PACKS
    held = constants["PACKS"] * (16 // x.itemsize if constants["VEC"] else 1)
    fits = AT_ONCE[kernel][min(3, (held - 1) // 8)]
    if x.itemsize == 4 and held > 8:
        fits -= 1  # its numbers take twice the registers
    return shared, groups, _cut(shared, groups, rows, max(1, fits * 128 // (threads * rows)) * multiprocessors())


@functools.cache
def _cut(shared: int, groups: int, rows: int, at_once: int) -> int:
    """How many tiles take the least time, if a block has `rows` rows at once, and the GPU `at_once` blocks.

    The unit of time is a step of `rows` rows. A wave of blocks takes a tile's steps, and one more for its start and its
    sums. A tenth of the last wave is added, because blocks do not end together. On an H200 the backward of 128 · 256
    rows of 1152 took 90, 111 and 88 us with 3, 4 and 6 tiles."""
    def time(tiles: int) -> float:
        steps = blocks(blocks(shared, tiles), rows)
        return blocks(groups * tiles, at_once) * (steps + 1) + 0.1 * steps

    choices = [max(1, min(waves * at_once // max(1, groups), blocks(shared, 8))) for waves in (1, 2, 3, 4)]
    return min(choices, key=time)


def _column_tiles(channels: int, constants: dict[str, Any]) -> int:
    """Into how many tiles of columns rows longer than LONGEST are divided."""
    return blocks(channels, 256 * (16 // constants["T"].itemsize if constants["VEC"] else 1))


def _threads(x: Array, *others: Array | None) -> tuple[tuple[int, int], dict[str, Any]]:
    """Threads and constants of the kernels in which warps share a row of x: one warp, or up to eight where each of its
    threads would hold over HELD numbers. Of one warp a row, four rows are in a block. For rows longer than LONGEST the
    constants alone count."""
    constants, channels = kernel_constants(x, *others), x.shape[-1]
    if channels > LONGEST:
        return (256, 1), constants | {"WARPS": 8, "PACKS": 3}
    warps = next((n for n in (1, 2, 4) if channels <= 32 * HELD * n), 8)
    packs = blocks(channels, 32 * warps * (16 // x.itemsize if constants["VEC"] else 1))
    return (32 * warps, 4 if warps == 1 else 1), constants | {"WARPS": warps, "PACKS": packs}


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5, plus_one: bool = False) -> Tensor:
    """(x - mean) / sqrt(var + eps)·weight + bias over the last axis of x (..., C), in x's dtype.

    weight and bias (C,), or those of each image of x (N, ..., C), (N, C). plus_one: 1 + weight takes weight's place, as
    in DiT's modulation (arXiv 2212.09748), `layer_norm(x, scale, shift, plus_one=True)`. They are read as float32 where
    x is float32 or shorter. Raises ValueError where shapes do not agree, TypeError for integers. Source: Ba, Kiros and
    Hinton, Layer Normalization, 2016, eq. 4.
    """
    shapes = x.shape[-1:], (*x.shape[:1], *x.shape[-1:])
    if weight.shape != bias.shape or x.ndim == 0 or weight.shape not in (shapes if x.ndim > 1 else shapes[:1]):
        raise ValueError(f"layer_norm: weight {weight.shape} and bias {bias.shape} do not fit x {x.shape}")
    if not x.shape[-1]:
        raise ValueError(f"layer_norm: x of shape {x.shape} has no channels to normalise")
    require_floats("layer_norm", x, weight, bias)
    return LayerNorm.apply(x, *as_wide(weight, bias), eps=eps, plus_one=bool(plus_one))
