"""Batch norm (Ioffe and Szegedy 2015), alone or with the ReLU and 2×2 max-pooling that follow it in a classifier.

NumPy computes it as a group norm: all pixels are one image, each channel is a group.
"""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from cudiff.backend import Array, float32, is_low
from cudiff.cuda.accumulate import gradient_target
from cudiff.cuda.device import multiprocessors
from cudiff.cuda.kernels.norm.problem import kernel_constants, require_float32
from cudiff.cuda.launch import blocks, empty, launch
from cudiff.cuda.sums import empty_statistics
from cudiff.distributed import ALONE, Group
from cudiff.function import Function
from cudiff.ops.cast import as_wide, downcast, require_floats, upcast
from cudiff.ops.elementwise import relu
from cudiff.ops.group_norm import group_norm_backward_numpy, normalize_numpy, statistics_numpy
from cudiff.ops.pool import max_pool2d
from cudiff.statistics import Kind
from cudiff.tensor import Tensor

__all__ = ["batch_norm", "batch_norm_relu_pool"]

RESIDENT = 3  # blocks that a multiprocessor holds; with 2 or 4 the passes over MNIST's batches of 4096 take 5 % longer


class BatchNorm(Function):
    """See `batch_norm`. The running statistics are inputs without gradient, updated in place."""

    WINDOW: ClassVar[int] = 1  # side of the windows of max-pooling

    @staticmethod
    def forward_numpy(ctx, x, weight, bias, running_mean, running_var, training, momentum, eps, group):
        rows = upcast(x).reshape(1, -1, x.shape[-1])
        if training:
            mean, rstd = statistics_numpy(rows, x.shape[-1], eps)
            if group.size > 1:
                means, variances = np.moveaxis(group.gather(np.stack((mean, 1 / np.square(rstd) - eps))), 1, 0)
                mean = means.mean(0)
                rstd = 1 / np.sqrt((variances + np.square(means - mean)).mean(0) + eps)
            count = rows.shape[1] * group.size
            var = (1 / np.square(rstd[0]) - eps) * (count / (count - 1))
            finite = np.isfinite(mean[0]) & np.isfinite(var)
            running_mean += np.where(finite, momentum * (mean[0] - running_mean), 0)
            running_var += np.where(finite, momentum * (var - running_var), 0)
        else:
            mean, rstd = running_mean[None].copy(), 1 / np.sqrt(running_var[None] + eps)
        ctx.training, ctx.group = training, group
        ctx.save(x, weight, bias, mean, rstd)
        y, _ = normalize_numpy(rows, weight, bias, mean, rstd)
        return downcast(y.reshape(x.shape), x.dtype)

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        x, weight, bias, mean, rstd = ctx.saved
        rows = upcast(x).reshape(1, -1, x.shape[-1])
        together = ctx.training and ctx.group.size > 1
        dx, dweight, dbias, _, _ = group_norm_backward_numpy(
            upcast(dout).reshape(rows.shape), rows, weight, bias, mean, rstd,
            constant_statistics=together or not ctx.training
        )
        if together:
            sums = ctx.group.gather(np.stack((dbias, dweight))).sum(0) / (rows.shape[1] * ctx.group.size)
            dx -= weight * rstd * (sums[0] + (rows - mean) * rstd * sums[1])
        return downcast(dx.reshape(x.shape), x.dtype), dweight, dbias, None, None

    @classmethod
    def forward_cuda(cls, ctx, x, weight, bias, running_mean, running_var, training, momentum, eps, group):
        channels, pixels = x.shape[-1], x.size // x.shape[-1]
        mean, rstd = empty(channels, float32), empty(channels, float32)
        require_float32(weight, bias, running_mean, running_var)
        constants = kernel_constants(x) | {"WINDOW": cls.WINDOW}
        if training:
            statistics = ctx.statistics[0]
            if statistics is None:
                grid, block = _tiles(pixels, channels, constants)
                statistics = empty_statistics(Kind.CENTRED, 1, grid[0], channels)
                launch("batch_norm", "statistics", grid, block, (statistics.sums, x, pixels, channels),
                       **constants)
            sums = statistics.sums if group.size == 1 else group.gather(statistics.sums)
            launch("batch_norm", "finish_statistics", blocks(channels, 4), (4, 256),
                   (mean, rstd, running_mean, running_var, sums, statistics.kind is Kind.CENTRED,
                    math.prod(sums.shape[:-2]), pixels * group.size, channels, momentum, eps), **constants)
        else:
            launch("batch_norm", "read_running", blocks(channels, 128), 128,
                   (mean, rstd, running_mean, running_var, channels, eps), **constants)
        n, height, width = extent = _extent(x, cls.WINDOW)
        size = n, height // cls.WINDOW, width // cls.WINDOW
        y = empty(x.shape if cls.WINDOW == 1 else (*size, channels), x.dtype)
        launch("batch_norm", "normalize", *_tiles(math.prod(size), channels, constants),
               (y, x, weight, bias, mean, rstd, *extent, channels), **constants)
        ctx.training, ctx.group = training, group
        ctx.save(x, weight, bias, mean, rstd)
        return y

    @classmethod
    def backward_cuda(cls, ctx, dout, needs, into):
        x, *affine = ctx.saved
        channels, constants = x.shape[-1], kernel_constants(dout, x) | {"WINDOW": cls.WINDOW}
        n, height, width = extent = _extent(x, cls.WINDOW)
        (dweight, add_weight), (dbias, add_bias) = (
            gradient_target(into[i], (channels,), float32) if needs[i] else (None, False) for i in (1, 2)
        )
        means = None
        if ctx.training or needs[1] or needs[2]:
            windows = n * (height // cls.WINDOW) * (width // cls.WINDOW)
            grid, block = _tiles(windows, channels, constants)
            sums, means = empty((grid[0], channels, 2), float32), empty((channels, 2), float32)
            launch("batch_norm", "backward_sums", grid, block, (sums, dout, x, *affine, *extent, channels),
                   **constants)
            launch("batch_norm", "finish_gradients", blocks(channels, 4), (4, 256),
                   (means, dweight, add_weight, dbias, add_bias, sums, *affine[2:], grid[0],
                    x.size // channels, channels), **constants)
            if ctx.training and ctx.group.size > 1:  # dx depends on the means over all processes
                launch("batch_norm", "finish_gradients", blocks(channels, 4), (4, 256),
                       (means, None, False, None, False, ctx.group.gather(sums), *affine[2:],
                        grid[0] * ctx.group.size, x.size // channels * ctx.group.size, channels), **constants)
        dx = None
        if needs[0]:
            windows = n * blocks(height, cls.WINDOW) * blocks(width, cls.WINDOW)
            grid, block = _tiles(windows, channels, constants)
            dx, statistics = empty(x.shape, x.dtype), empty_statistics(Kind.SUMS, 1, grid[0], channels)
            launch("batch_norm", "input_gradients", grid, block,
                   (dx, statistics.sums, means if ctx.training else None, dout, x, *affine, *extent, channels),
                   **constants)
            ctx.din_statistics[0] = statistics
        return dx, dweight, dbias, None, None


class BatchNormReluPool(BatchNorm):
    """See `batch_norm_relu_pool`."""

    WINDOW = 2

    @staticmethod
    def compose(*inputs, **attrs):
        return relu(max_pool2d(BatchNorm.apply(*inputs, **attrs), 2))


def _extent(x: Array, window: int) -> tuple[int, int, int]:
    """N, H and W of images; without windows 1, 1 and the number of all pixels."""
    return x.shape[:3] if window > 1 else (1, 1, x.size // x.shape[-1])


def _tiles(windows: int, channels: int, constants: dict) -> tuple[tuple[int, int], tuple[int, int]]:
    """Grid and block of a kernel over `windows` windows, with at most as many tiles as run at once."""
    packs = channels // (16 // constants["T"].itemsize if constants["VEC"] else 1)
    chunks = blocks(packs, 32)
    lanes = blocks(packs, chunks)
    rows = 1 << (256 // lanes).bit_length() - 1
    return (min(blocks(windows, rows), max(1, RESIDENT * multiprocessors() // chunks)), chunks), (lanes, rows)


def batch_norm(x: Tensor, weight: Tensor, bias: Tensor, running_mean: Tensor, running_var: Tensor, training: bool,
               momentum: float = 0.1, eps: float = 1e-5, group: Group = ALONE) -> Tensor:
    """Normalise each channel of x (..., C) over all its rows, then apply weight and bias; in x's dtype.

    In training the batch's mean and (biased) variance are used, and running_mean and running_var move towards the
    batch's mean and unbiased variance by the fraction `momentum`, in place on the device; otherwise those two are used.
    They do not move in a channel whose batch mean or variance is not finite: they would never recover.
    group: the processes among which the batch is divided, in equal parts.
    weight, bias, running_mean and running_var (C,), float32 where x is float32 or 16-bit. Raises ValueError where
    shapes do not agree and, in training, for fewer than two values a channel, TypeError for integers and for 16-bit
    running values.
    Source: Ioffe and Szegedy, Batch Normalization, 2015, algorithms 1 and 2.
    """
    operands = _checked("batch_norm", training, group, x, weight, bias, running_mean, running_var)
    return BatchNorm.apply(*operands, training=training, momentum=momentum, eps=eps, group=group)


def batch_norm_relu_pool(x: Tensor, weight: Tensor, bias: Tensor, running_mean: Tensor, running_var: Tensor,
                         training: bool, momentum: float = 0.1, eps: float = 1e-5, group: Group = ALONE) -> Tensor:
    """relu(max_pool2d(batch_norm(x, ...), 2)) as one operation: x (N, H, W, C) → (N, H // 2, W // 2, C).

    Results in between are not rounded: in a 16-bit dtype the gradient goes to the largest element of a window, where
    the separate operations may find several equal ones. Raises ValueError where shapes do not agree.
    """
    operands = _checked("batch_norm_relu_pool", training, group, x, weight, bias, running_mean, running_var)
    if x.ndim != 4 or min(x.shape[1:3]) < 2:
        raise ValueError(f"batch_norm_relu_pool: x has shape {x.shape}, not (N, H, W, C) of 2 pixels a side or more")
    return BatchNormReluPool.apply(*operands, training=training, momentum=momentum, eps=eps, group=group)


def _checked(name: str, training: bool, group: Group, x: Tensor, *operands: Tensor) -> tuple[Tensor, ...]:
    if not any(x.shape[-1:]):
        raise ValueError(f"{name}: x of shape {x.shape} has no channels to normalise")
    if training and 0 in x.shape:
        raise ValueError(f"{name}: a batch of shape {x.shape} has no statistics to train with")
    for what, operand in zip(("weight", "bias", "running_mean", "running_var"), operands, strict=True):
        if operand.shape != x.shape[-1:]:
            raise ValueError(f"{name}: {what} has shape {operand.shape}, not {x.shape[-1:]}")
    if training and x.size * group.size == operands[0].size:  # a value is its own mean: every output would be the bias
        raise ValueError(f"{name}: a batch of shape {x.shape} has one value a channel: give more images, or use eval()")
    require_floats(name, x, *operands)
    weight, bias, *running = operands
    if any(is_low(moment.dtype) for moment in running):
        raise TypeError(f"{name} moves running_mean and running_var in place: float32, not {running[0].dtype}")
    return x, *as_wide(weight, bias), *running
