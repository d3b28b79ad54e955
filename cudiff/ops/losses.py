"""Losses, activations and the like that are composed of other operations."""

from __future__ import annotations

from typing import Any

import numpy as np

from cudiff.ops.arithmetic import where
from cudiff.ops.cast import as_tensors, as_wide, astype
from cudiff.ops.clip import clip
from cudiff.ops.compare import greater
from cudiff.ops.elementwise import abs, exp, expm1, log, softplus
from cudiff.ops.reduce import Axis, max, mean, sum
from cudiff.tensor import Tensor

__all__ = ["binary_cross_entropy_with_logits", "elu", "huber", "leaky_relu", "logaddexp", "logsumexp", "mae"]


def leaky_relu(x: Any, negative_slope: float = 0.01) -> Tensor:
    """x where it is above 0, else negative_slope * x."""
    (x,) = as_tensors(x, floating=True)
    return where(x > 0, x, x * negative_slope)


def elu(x: Any, alpha: float = 1.0) -> Tensor:
    """x where it is above 0, else alpha * (exp(x) - 1) (Clevert et al. 2015)."""
    (x,) = as_tensors(x, floating=True)
    return where(x > 0, x, expm1(clip(x, max=0.0)) * alpha)


def logsumexp(x: Any, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """log(sum(exp(x))) over `axis`, in x's dtype, float32 for integers; the maximum is subtracted first, so that it
    does not overflow."""
    (x,) = as_tensors(x, floating=True)
    (wide,) = as_wide(x)
    bound = float(np.finfo(wide.dtype).max)  # infinity - infinity is NaN
    largest = clip(max(wide.detach(), axis, keepdims=True), -bound, bound)
    out = log(sum(exp(wide - largest), axis, keepdims=True)) + largest
    return astype(out if keepdims else sum(out, axis), x.dtype)


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


def huber(pred: Any, target: Any, delta: float = 1.0) -> Tensor:
    """Mean of e**2 / 2 where e = |pred - target| is up to delta, of delta * (e - delta / 2) beyond (Huber 1964).

    A float32 scalar (float64 for float64). Raises ValueError where shapes differ, and for a delta that is not above 0.
    """
    if not delta > 0:
        raise ValueError(f"huber: delta is above 0, not {delta}")
    pred, target = _alike("huber", pred, target)
    error = pred - target
    near = clip(error, -float(delta), float(delta))
    return mean(near * (error - 0.5 * near))


def binary_cross_entropy_with_logits(logits: Any, target: Any) -> Tensor:
    """Mean of -target * log(p) - (1 - target) * log(1 - p), p = sigmoid(logits): a float32 scalar.

    target: probabilities, in the shape of the logits. Raises ValueError where shapes differ.
    """
    logits, target = _alike("binary_cross_entropy_with_logits", logits, target)
    return mean((1 - target) * logits + softplus(-logits))


def _alike(name: str, pred: Any, target: Any) -> tuple[Tensor, ...]:
    """Both in float32 or float64. Raises ValueError where shapes differ, which would broadcast."""
    pred, target = as_tensors(pred, target, floating=True)
    if pred.shape != target.shape:
        raise ValueError(f"{name}: shapes {pred.shape} and {target.shape} must be equal")
    return as_wide(pred, target)
