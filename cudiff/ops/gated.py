"""residual + gate · y, adaLN-Zero's end of a block (Peebles and Xie, arXiv 2212.09748), where a backward is to come.

Where none is, the linear layer that makes y does it: see `linear`.
"""

from __future__ import annotations

import math

import numpy as np

from cudiff.backend import compute_dtype, float32
from cudiff.cuda.accumulate import gradient_target
from cudiff.cuda.kernels.gated import add_gated, gradients
from cudiff.cuda.launch import empty
from cudiff.function import Function
from cudiff.ops.cast import astype, downcast, upcast
from cudiff.tensor import Tensor

__all__ = ["gated"]


class Gated(Function):
    """See `gated`. dy = gate · dout, dgate = the sums of dout · y over an image."""

    @staticmethod
    def forward_numpy(ctx, residual, gate, y):
        ctx.save(gate, y)
        return downcast(upcast(residual) + _spread(gate, y.ndim) * upcast(y), y.dtype)

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        gate, y = ctx.saved
        wide = upcast(dout)
        dgate = (wide * upcast(y)).sum(tuple(range(1, y.ndim - 1)))
        return dout, dgate, downcast(wide * _spread(gate, y.ndim), y.dtype)

    @staticmethod
    def forward_cuda(ctx, residual, gate, y):
        ctx.save(gate, y)
        out = empty(y.shape, y.dtype)
        add_gated(residual, y, gate, math.prod(y.shape[1:-1]), out)
        return out

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        gate, y = ctx.saved
        dgate, dy = gradient_target(into[1], gate.shape, float32), gradient_target(into[2], y.shape, y.dtype)
        sums = gradients(dgate, dy, dout, y, gate, math.prod(y.shape[1:-1]))
        ctx.din_statistics[2] = None if dy[1] else sums  # for the bias of the layer that made y
        return dout, dgate[0], dy[0]


def _spread(gate: np.ndarray, ndim: int) -> np.ndarray:
    """(N, C) as (N, 1, ..., 1, C)."""
    return gate.reshape(len(gate), *[1] * (ndim - 2), gate.shape[1])


def gated(residual: Tensor, gate: Tensor, y: Tensor) -> Tensor:
    """residual + gate · y of y (N, ..., C), like the residual, with a row of the gate (N, C) for each image; in y's
    dtype. The gate is read as float32 (float64 of float64)."""
    return Gated.apply(residual, astype(gate, compute_dtype(y.dtype)), y)
