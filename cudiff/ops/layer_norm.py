"""Layer norm (Ba et al. 2016): each row of channels to mean 0 and variance 1, then weight and bias."""

from __future__ import annotations

import numpy as np

from cudiff.ops.elementwise import narrow, widen
from cudiff.tensor import Context, Function, Tensor


class LayerNorm(Function):
    """See `layer_norm`."""

    @staticmethod
    def forward_numpy(ctx: Context, x, weight, bias, eps):
        wide = widen(x)
        mean = wide.mean(-1, keepdims=True)
        normal = wide - mean
        rstd = 1 / np.sqrt(np.square(normal).mean(-1, keepdims=True) + eps)
        normal *= rstd
        if any(ctx.needs):
            ctx.save(normal, weight, rstd)
        return narrow(normal * weight + bias, x.dtype)

    @staticmethod
    def backward_numpy(ctx: Context, dout, needs, into):
        normal, weight, rstd = ctx.saved
        wide = widen(dout)
        axes = tuple(range(dout.ndim - 1))
        dbias, dweight = wide.sum(axes), (wide * normal).sum(axes)
        dnormal = wide * weight
        second = (dnormal * normal).mean(-1, keepdims=True)
        dnormal -= dnormal.mean(-1, keepdims=True)
        dnormal -= normal * second
        dnormal *= rstd
        return narrow(dnormal, dout.dtype), dweight, dbias


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """(x - mean) / sqrt(var + eps)·weight + bias over the last axis of x (..., C), in x's dtype.

    weight and bias (C,), float32 where x is float32 or shorter. Raises ValueError where shapes do not agree.
    Source: Ba, Kiros and Hinton, Layer Normalization, 2016, eq. 4.
    """
    if weight.shape != x.shape[-1:] or bias.shape != x.shape[-1:]:
        raise ValueError(f"layer_norm: weight {weight.shape} and bias {bias.shape} do not fit x {x.shape}")
    return LayerNorm.apply(x, weight, bias, eps=eps)
