"""Losses, activations and the like that are composed of other operations; on a GPU huber has kernels in
mse.cu and logsumexp in softmax.cu."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cudiff.backend import float32
from cudiff.cuda.accumulate import gradient_target
from cudiff.cuda.launch import empty, launch
from cudiff.function import Function
from cudiff.ops.arithmetic import where
from cudiff.ops.cast import as_floating, as_tensors, as_wide, astype
from cudiff.ops.clip import clip
from cudiff.ops.compare import greater
from cudiff.ops.elementwise import abs, exp, expm1, log, softplus
from cudiff.ops.mse import tiling
from cudiff.ops.reduce import Axis, left, max, mean, normalize_axes, over_axes, span, sum
from cudiff.ops.softmax import launch_over_axis
from cudiff.tensor import Tensor
from cudiff.values import flag

__all__ = ["binary_cross_entropy_with_logits", "elu", "huber", "leaky_relu", "logaddexp", "logsumexp", "mae"]


def leaky_relu(x: Any, negative_slope: float = 0.01) -> Tensor:
    """x where it is above 0, else negative_slope * x."""
    x = as_floating(x)
    return where(x > 0, x, x * negative_slope)


def elu(x: Any, alpha: float = 1.0) -> Tensor:
    """x where it is above 0, else alpha * (exp(x) - 1) (Clevert et al. 2015)."""
    x = as_floating(x)
    return where(x > 0, x, expm1(clip(x, max=0.0)) * alpha)


class LogSumExp(Function):
    """See `logsumexp`."""

    @staticmethod
    def compose(x, axes, keepdims):
        (wide,) = as_wide(x)
        bound = float(np.finfo(wide.dtype).max)  # infinity - infinity is NaN
        largest = clip(max(wide.detach(), axes, keepdims=True), -bound, bound)
        out = log(sum(exp(wide - largest), axes, keepdims=True)) + largest
        return astype(out if keepdims else sum(out, axes), x.dtype)

    @staticmethod
    def forward_cuda(ctx, x, axes, keepdims):
        ctx.spans = span(x.shape, axes)
        out = empty(left(x.shape, axes, keepdims), x.dtype)
        stats = empty((out.size, 2), float32)
        launch_over_axis("logsumexp", ctx.spans, x, (out, stats, x))
        ctx.save(x, stats)
        return out

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        x, stats = ctx.saved
        dx, add = gradient_target(into[0], x.shape, x.dtype)
        launch_over_axis("logsumexp_backward", ctx.spans, x, (dx, add, dout, x, stats))
        return (dx,)


def logsumexp(x: Any, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """log(sum(exp(x))) over `axis`, in x's dtype, float32 for integers; the maximum is subtracted first, so that it
    does not overflow. -infinity where there are no elements."""
    x = as_floating(x)
    axes = normalize_axes(axis, x.ndim)
    if not x.size:
        return sum(x, axes, flag("keepdims", keepdims)) - math.inf
    if math.prod(x.shape[i] for i in axes) > _LONGEST_ROW:
        return LogSumExp.compose(x, axes, flag("keepdims", keepdims))
    return over_axes(LogSumExp, x, axis, keepdims)


_LONGEST_ROW = 1 << 16  # of which a block makes the logsumexp


def logaddexp(a: Any, b: Any) -> Tensor:
    """log(exp(a) + exp(b)) of broadcast operands, without overflow; integers give float32."""
    a, b = as_tensors(a, b, floating=True)
    first, second = as_wide(a, b)
    above = greater(first, second)
    larger, smaller = where(above, first, second), where(above, second, first)
    bound = float(np.finfo(larger.dtype).max)  # infinity - infinity is NaN
    return astype(larger + softplus(smaller - clip(larger, -bound, bound)), a.dtype)


def mae(pred: Any, target: Any) -> Tensor:
    """Mean of |pred - target|: a float32 scalar (float64 for float64). Raises ValueError where shapes differ."""
    pred, target = _alike("mae", pred, target)
    return mean(abs(pred - target))


class Huber(Function):
    """See `huber`."""

    @staticmethod
    def compose(pred, target, delta):
        pred, target = as_wide(pred, target)
        error = pred - target
        near = clip(error, -delta, delta)
        return mean(near * (error - 0.5 * near))

    @staticmethod
    def forward_cuda(ctx, pred, target, delta):
        size = pred.size
        chunk, tiles, constants = tiling(pred, target, size)
        partials, loss = empty((1, tiles), float32), empty((), float32)
        args = (partials, pred, target, delta, np.int64(size), chunk, tiles)
        launch("mse", "huber", tiles, 256, args, **constants)
        launch("mse", "loss", 1, 1024, (loss, partials, None, 1, tiles, 1 / size), **constants)
        ctx.numbers, ctx.constants = (delta, np.int64(size), chunk, tiles, 1 / size), constants
        ctx.save(pred, target)
        return loss

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        pred, target = ctx.saved
        (dpred, add), (dtarget, add_target) = (
            gradient_target(there, pred.shape, pred.dtype) if need else (None, False)
            for need, there in zip(needs, into, strict=True)
        )
        args = (dpred, add, dtarget, add_target, dout, pred, target, *ctx.numbers)
        launch("mse", "huber_gradients", ctx.numbers[3], 256, args, **ctx.constants)
        return dpred, dtarget


def huber(pred: Any, target: Any, delta: float = 1.0) -> Tensor:
    """Mean of e**2 / 2 where e = |pred - target| is up to delta, of delta * (e - delta / 2) beyond (Huber 1964).

    A float32 scalar (float64 for float64). Raises ValueError where shapes differ or there are no elements, and for a
    delta that is not above 0.
    """
    if not delta > 0:
        raise ValueError(f"huber: delta is above 0, not {delta}")
    pred, target = _of_one_shape("huber", pred, target)
    if not pred.size:
        raise ValueError(f"huber: mean over no elements of shape {pred.shape}")
    return Huber.apply(pred, target, delta=float(delta))


def binary_cross_entropy_with_logits(logits: Any, target: Any) -> Tensor:
    """Mean of -target * log(p) - (1 - target) * log(1 - p), p = sigmoid(logits): a float32 scalar.

    target: probabilities, in the shape of the logits. Raises ValueError where shapes differ.
    """
    logits, target = _alike("binary_cross_entropy_with_logits", logits, target)
    return mean((1 - target) * logits + softplus(-logits))


def _alike(name: str, pred: Any, target: Any) -> tuple[Tensor, ...]:
    """Both in float32 or float64. Raises as `_of_one_shape` does."""
    return as_wide(*_of_one_shape(name, pred, target))


def _of_one_shape(name: str, pred: Any, target: Any) -> tuple[Tensor, ...]:
    """Both in one floating dtype. Raises ValueError where shapes differ, which would broadcast."""
    pred, target = as_tensors(pred, target, floating=True)
    if pred.shape != target.shape:
        raise ValueError(f"{name}: shapes {pred.shape} and {target.shape} must be equal")
    return pred, target
