"""Dropout whose mask is never stored: backward recomputes it from the same counters."""

from __future__ import annotations

import functools
import math

import numpy as np

from cudiff.cuda.accumulate import gradient_target
from cudiff.cuda.kernels.norm import problem as norm
from cudiff.cuda.launch import MOST_ACROSS, Launch, blocks, empty
from cudiff.function import Function
from cudiff.ops.cast import downcast, require_floats, upcast
from cudiff.ops.random import Generator, random_bits
from cudiff.tensor import Tensor

__all__ = ["dropout"]


class Dropout(Function):
    """Element e of row n is dropped where half e % 2, the low one first, of word e // 2 of sample first + n, `stream`
    and `step` is below p · 2^16, rounded. What remains is scaled so that its mean stays as it was."""

    @staticmethod
    def forward_numpy(ctx, x, step, p, seed, stream, first):
        ctx.p, ctx.key = p, (seed, stream, int(step[0]), first)
        return _mask_numpy(ctx, x)

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        return _mask_numpy(ctx, dout), None

    @staticmethod
    def forward_cuda(ctx, x, step, p, seed, stream, first):
        used_step = empty(1, np.int32)  # the generator may have moved on when backward runs
        ctx.save(used_step)
        ctx.p, ctx.key = p, (seed, stream, first)
        return _launch(ctx, empty(x.shape, x.dtype), x, step, used_step, False)

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        dx, accumulate = gradient_target(into[0], dout.shape, dout.dtype)
        return _launch(ctx, dx, dout, ctx.saved[0], None, accumulate), None


def _mask_numpy(ctx, x):
    rows = x.shape[0] if x.ndim else 1
    size = x.size // max(rows, 1)
    halves = random_bits(rows, blocks(size, 2), *ctx.key).astype("<u4", copy=False).view("<u2")
    kept = halves[:, :size].reshape(x.shape) >= _threshold(ctx.p)
    return downcast(np.where(kept, upcast(x) * _scale(ctx.p), 0), x.dtype)


def _threshold(p):
    return np.uint32(min(max(round(p * 2**16), 1), 2**16 - 1))


def _scale(p):
    return 2**16 / (2**16 - int(_threshold(p)))


def _launch(ctx, out, x, step, used_step, accumulate):
    rows = x.shape[0] if x.ndim else 1
    if x.size:
        launch, words = _prepared(rows, x.size // rows, x.dtype, *ctx.key, ctx.p)
        launch.run((out, x, rows, x.size // rows, step, *words, used_step, _scale(ctx.p), accumulate))
    return out


@functools.lru_cache(maxsize=4096)
def _prepared(rows, size, dtype, seed, stream, first, p):
    """The launch for rows of this size, and what `drawing` gives."""
    launch = Launch("dropout", "dropout", (blocks(size, 2048), min(rows, MOST_ACROSS)), (256,), T=dtype)
    return launch, drawing(p, seed, stream, first)


def dropout_of(shape: tuple[int, ...], p: float, generator: Generator, stream: int) -> norm.Dropout:
    """Dropout of a norm's output of this shape on CUDA, with an array for its mask, which the norm writes. Raises
    ValueError for a generator on the CPU."""
    if generator.device != "cuda":
        raise ValueError(f"dropout of an array on cuda by a generator on {generator.device}: both lie on one device")
    words = drawing(p, generator.seed, stream, generator.first_row(shape[0]))
    mask = empty((shape[0], blocks(math.prod(shape[1:]), 8)), np.uint8)
    return norm.Dropout(mask, _scale(p), generator.step.data, *words)


def drawing(p: float, seed: int, stream: int, first: int) -> tuple[np.uint64, np.uint32, np.uint32, np.uint32]:
    """What a kernel needs to draw a mask, besides the step: seed, stream, first and the threshold of dropout.cuh."""
    return np.uint64(seed & 0xFFFFFFFFFFFFFFFF), np.uint32(stream), np.uint32(first), _threshold(p)


def check_p(p: float) -> None:
    """Raise ValueError unless 0 <= p < 1."""
    if not 0 <= p < 1:
        raise ValueError(f"dropout's p must lie in [0, 1), got {p}")


def dropout(x: Tensor, p: float, generator: Generator, stream: int) -> Tensor:
    """Zero each element with probability p and scale the rest by 1/(1 − p); p = 0 returns x itself. p is rounded to a
    multiple of 2^-16 inside (0, 1).

    x of any shape. The mask of row n of x.shape[0] depends only on the generator's seed and step, the stream, and the
    row's sample (see `Generator.samples`). Give each layer its own stream (`Purpose.DROPOUT` + number). Raises
    ValueError unless 0 <= p < 1, TypeError for integers.
    Srivastava et al. 2014.
    """
    check_p(p)
    if p == 0:
        return x
    require_floats("dropout", x)
    return Dropout.apply(x, generator.step, p=float(p), seed=generator.seed, stream=int(stream),
                         first=generator.first_row(x.shape[0] if x.ndim else 1))
