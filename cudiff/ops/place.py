"""A tensor placed among zeros: the gradient of a slice, as an operation that has one itself."""

from __future__ import annotations

from typing import Any

import numpy as np

from cudiff.cuda.accumulate import gradient_target
from cudiff.cuda.kernels.shape import move, zeros
from cudiff.function import Function
from cudiff.tensor import Tensor


class Place(Function):
    """out[index] = x among zeros of `shape`; dx = dout[index]. The index is one of Slice's."""

    @staticmethod
    def forward_numpy(ctx, x, shape, index):
        ctx.index = index
        out = np.zeros(shape, x.dtype)
        out[index] = x
        return out

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        return (np.array(dout[ctx.index]),)

    @staticmethod
    def forward_cuda(ctx, x, shape, index):
        ctx.index = index
        out = zeros(shape, x.dtype)
        move(out[index], x)
        return out

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        view = dout[ctx.index]
        dx, accumulate = gradient_target(into[0], view.shape, dout.dtype)
        move(dx, view, accumulate)
        return (dx,)


def place(x: Tensor, shape: tuple[int, ...], index: Any) -> Tensor:
    """Zeros of `shape`, but for [index], which is x."""
    return Place.apply(x, shape=shape, index=index)
