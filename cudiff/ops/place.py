"""Operations that write a tensor into a larger one: for `pad` and `at`, and as derivatives of slices and of taken rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cudiff.cuda.accumulate import gradient_target
from cudiff.cuda.kernels.shape import filled, move
from cudiff.function import Function
from cudiff.ops.index import Take
from cudiff.tensor import Tensor


class Place(Function):
    """out[index] = x among elements that are `value`, of `shape`; dx = dout[index]. The index is one of Slice's."""

    @staticmethod
    def forward_numpy(ctx, x, shape, index, value):
        ctx.index = index
        out = np.full(shape, value, x.dtype)
        out[index] = x
        return out

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        return (np.array(dout[ctx.index]),)

    @staticmethod
    def forward_cuda(ctx, x, shape, index, value):
        ctx.index = index
        out = filled(shape, x.dtype, value)
        move(out[index], x)
        return out

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        view = dout[ctx.index]
        dx, accumulate = gradient_target(into[0], view.shape, dout.dtype)
        move(dx, view, accumulate)
        return (dx,)


class PlaceRows(Function):
    """Zeros of `shape`, to which x is added as Take's backward does; dx is what Take's forward gives of dout."""

    @staticmethod
    def forward_numpy(ctx, x, index, shape, axis, along):
        ctx.shape, ctx.axis, ctx.along = shape, axis, along
        ctx.save(index)
        return Take.backward_numpy(ctx, x, (True, False), (None, None))[0]

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        (index,) = ctx.saved
        return Take.forward_numpy(ctx, dout, index, ctx.axis, ctx.along), None

    @staticmethod
    def forward_cuda(ctx, x, index, shape, axis, along):
        ctx.shape, ctx.axis, ctx.along = shape, axis, along
        ctx.save(index)
        return Take.backward_cuda(ctx, x, (True, False), (None, None))[0]

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        (index,) = ctx.saved
        return Take.forward_cuda(ctx, dout, index, ctx.axis, ctx.along), None


def place(x: Tensor, shape: tuple[int, ...], index: Any, value: float = 0.0) -> Tensor:
    """`value` everywhere in `shape`, but for [index], which is x."""
    return Place.apply(x, shape=shape, index=index, value=value)


def place_rows(x: Tensor, shape: tuple[int, ...], index: Tensor, axis: int = 0, along: bool = False) -> Tensor:
    """Zeros of `shape`, to whose element index[i] along `axis`, or index[..., i, ...] if `along`, x's element i is
    added, in the order of i."""
    return PlaceRows.apply(x, index, shape=shape, axis=axis, along=along)
