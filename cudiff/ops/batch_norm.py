"""Batch norm (Ioffe and Szegedy 2015). Its work is that of a group norm: one image of all pixels, a group a channel."""

from __future__ import annotations

import numpy as np

from cudiff.backend import float32
from cudiff.cuda.module import blocks, empty, launch
from cudiff.ops.cast import narrow, require_float, widen
from cudiff.ops.group_norm import (
    group_norm_backward_cuda,
    group_norm_backward_numpy,
    normalize_cuda,
    normalize_numpy,
    statistics_cuda,
    statistics_numpy,
)
from cudiff.tensor import Function, Tensor


class BatchNorm(Function):
    """See `batch_norm`. The running statistics are inputs without gradient, updated in place."""

    @staticmethod
    def forward_numpy(ctx, x, weight, bias, running_mean, running_var, training, momentum, eps):
        rows = widen(x).reshape(1, -1, x.shape[-1])
        if training:
            mean, rstd = statistics_numpy(rows, x.shape[-1], eps)
            count = rows.shape[1]
            var = (1 / np.square(rstd[0]) - eps) * (count / max(count - 1, 1))
            running_mean += momentum * (mean[0] - running_mean)
            running_var += momentum * (var - running_var)
        else:
            mean, rstd = running_mean[None].copy(), 1 / np.sqrt(running_var[None] + eps)
        ctx.training = training
        ctx.save(x, weight, bias, mean, rstd)
        y, _ = normalize_numpy(rows, weight, bias, mean, rstd)
        return narrow(y.reshape(x.shape), x.dtype)

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        x, weight, bias, mean, rstd = ctx.saved
        rows = widen(x).reshape(1, -1, x.shape[-1])
        dx, dweight, dbias, _, _ = group_norm_backward_numpy(
            widen(dout).reshape(rows.shape), rows, weight, bias, mean, rstd, constant_statistics=not ctx.training
        )
        return narrow(dx.reshape(x.shape), x.dtype), dweight, dbias, None, None

    @staticmethod
    def forward_cuda(ctx, x, weight, bias, running_mean, running_var, training, momentum, eps):
        require_float("batch_norm", x)
        channels = x.shape[-1]
        rows = x.reshape(1, -1, channels)
        if training:
            mean, rstd = statistics_cuda(rows, channels, eps)
            unbias = rows.shape[1] / max(rows.shape[1] - 1, 1)
            launch("batch_norm", "update_running", blocks(channels, 128), 128,
                   (running_mean, running_var, mean, rstd, channels, momentum, unbias, eps))
        else:
            mean, rstd = empty((1, channels), float32), empty((1, channels), float32)
            launch("batch_norm", "read_running", blocks(channels, 128), 128,
                   (mean, rstd, running_mean, running_var, channels, eps))
        ctx.training = training
        ctx.save(x, weight, bias, mean, rstd)
        return normalize_cuda(rows, None, weight, bias, mean, rstd).reshape(x.shape)

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        x, weight, bias, mean, rstd = ctx.saved
        rows = (1, -1, x.shape[-1])
        dx, _, dweight, dbias, _, _ = group_norm_backward_cuda(
            dout.reshape(rows), x.reshape(rows), None, weight, bias, mean, rstd,
            needs=(needs[0], False, *needs[1:3], False, False), into=(None, None, *into[1:3], None, None),
            constant_statistics=not ctx.training, sums=ctx.din_partials,
        )
        return None if dx is None else dx.reshape(x.shape), dweight, dbias, None, None


def batch_norm(x: Tensor, weight: Tensor, bias: Tensor, running_mean: Tensor, running_var: Tensor, training: bool,
               momentum: float = 0.1, eps: float = 1e-5) -> Tensor:
    """Normalise each channel of x (..., C) over all its rows, then weight and bias; in x's dtype.

    In training the batch's mean and (biased) variance are used, and running_mean and running_var move towards the
    batch's mean and unbiased variance by the share `momentum`, in place on the device; otherwise those two are used.
    weight, bias, running_mean and running_var (C,), float32 where x is float32 or shorter. Raises ValueError where
    shapes do not agree. Source: Ioffe and Szegedy, Batch Normalization, 2015, algorithms 1 and 2.
    """
    for name, operand in (("weight", weight), ("bias", bias), ("running_mean", running_mean),
                          ("running_var", running_var)):
        if operand.shape != x.shape[-1:]:
            raise ValueError(f"batch_norm: {name} has shape {operand.shape}, not {x.shape[-1:]}")
    return BatchNorm.apply(
        x, weight, bias, running_mean, running_var, training=training, momentum=momentum, eps=eps
    )
