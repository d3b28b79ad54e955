"""Sinusoidal embedding of noise levels and timesteps."""

from __future__ import annotations

import math

import numpy as np

from cudiff.backend import Array, float32, float64
from cudiff.cuda.launch import blocks, empty, launch
from cudiff.function import Function
from cudiff.ops.cast import as_floating
from cudiff.ops.create import full
from cudiff.tensor import Tensor

__all__ = ["timestep_embedding"]


class TimestepEmbedding(Function):
    # Both backends compute in float64: at t = 1000 a frequency rounded to float32 is off by 6e-5 in the angle.

    @staticmethod
    def forward_numpy(ctx, t, dim, decay, sin_first):
        half = dim // 2
        frequency = np.exp(-decay * np.arange(half, dtype=float64))
        angle = t.astype(float64)[:, None] * frequency
        ctx.save(angle, frequency)
        ctx.sin_first, ctx.dtype = sin_first, t.dtype
        out = np.zeros((len(t), dim), float64 if t.dtype == float64 else float32)  # an odd dim ends in a zero column
        first, second = out[:, :half], out[:, half : 2 * half]
        sine, cosine = (first, second) if sin_first else (second, first)
        sine[:], cosine[:] = np.sin(angle), np.cos(angle)
        return out

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        angle, frequency = ctx.saved
        half = len(frequency)
        first, second = dout[:, :half], dout[:, half : 2 * half]
        dsine, dcosine = (first, second) if ctx.sin_first else (second, first)
        dangle = dsine * np.cos(angle) - dcosine * np.sin(angle)
        return ((dangle * frequency).sum(axis=1).astype(ctx.dtype),)

    @staticmethod
    def forward_cuda(ctx, t, dim, decay, sin_first):
        ctx.save(t)
        ctx.attrs = dim, np.float64(decay), sin_first
        out = empty((len(t), dim), float32)
        if out.size:
            launch("timestep_embedding", "forward", blocks(out.size, 128), 128, (out, t, len(t), *ctx.attrs), T=t.dtype)
        return out

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        (t,) = ctx.saved
        dt = empty(t.shape, t.dtype)
        if t.size:
            launch("timestep_embedding", "backward", len(t), 128, (dt, dout, t, *ctx.attrs), T=t.dtype)
        return (dt,)


def timestep_embedding(t: Tensor, dim: int, max_period: float = 10000.0, divisor: str = "half",
                       order: str = "cos,sin") -> Tensor:
    """cos and sin of t · max_period^(−i / divisor), i = 0 .. dim/2 − 1: t (N,), of any dtype, to (N, dim) float32.

    Networks differ: guided-diffusion and EDM's DhariwalUNet use the defaults, unet.cu max_period=1000, EDM's SongUNet
    and denoising-diffusion-pytorch divisor="half-1", order="sin,cos". An odd dim ends in a column of zeros. Raises
    ValueError for another divisor or order, where half − 1 is 0 and for a t of other axes.
    Vaswani et al. 2017, section 3.5; Ho et al. 2020, appendix B.
    """
    if divisor not in ("half", "half-1") or order not in ("cos,sin", "sin,cos"):
        raise ValueError(f"divisor is half or half-1 and order cos,sin or sin,cos; got {divisor!r} and {order!r}")
    steps = dim // 2 - (divisor == "half-1")
    if steps < 1:
        raise ValueError(f"dim {dim} is too small for divisor {divisor!r}")
    t = as_floating(t)
    if t.ndim != 1:
        raise ValueError(f"t has shape {t.shape}, not (N,): give one number for each image")
    return TimestepEmbedding.apply(t, dim=dim, decay=math.log(max_period) / steps, sin_first=order == "sin,cos")


def noise_levels(sigma: Tensor | Array | float, x: Tensor) -> Tensor:
    """The noise level, or the timestep, of each image of x (N, ...): a tensor as it is, a number for all images and an
    array as (N,), float32, or float64 for a float64 x, on x's device."""
    if isinstance(sigma, Tensor):
        return sigma
    dtype = float64 if x.dtype == float64 else float32
    if np.ndim(sigma) == 0:
        return full(x.shape[:1], float(sigma), dtype, x.device)
    return Tensor(sigma, dtype=dtype, device=x.device)
