"""Linear interpolation between two tensors."""

from __future__ import annotations

from typing import Any

import numpy as np

from cudiff.backend import Array, float32
from cudiff.cuda.accumulate import gradient_target
from cudiff.cuda.kernels.elementwise import broadcast_layout, grid
from cudiff.cuda.launch import empty, launch
from cudiff.function import Function
from cudiff.ops.cast import as_wide, astype, operands
from cudiff.ops.create import full
from cudiff.ops.reduce import sum_to
from cudiff.ops.shape import broadcast_to
from cudiff.tensor import Tensor

__all__ = ["lerp"]


class Lerp(Function):
    """See `lerp`; a and b of one shape, and the number `scalar` if the weight is None. One launch on CUDA."""

    @staticmethod
    def compose(a, b, weight, scalar):
        first, second, share = as_wide(a, b, weight)
        return astype(first + (second - first) * (scalar if weight is None else share), a.dtype)

    @staticmethod
    def forward_cuda(ctx, a, b, weight, scalar):
        ctx.scalar = float(scalar or 0)
        ctx.save(*((a, b) if ctx.needs[2] else (None, None)), weight)
        out = empty(a.shape, a.dtype)
        args = (a, b, weight, ctx.scalar, out, np.int64(out.size), broadcast_layout(a.shape, b, weight))
        launch("arithmetic", "lerp_forward", grid(out), 256, args, T=out.dtype)
        return out

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        a, b, weight = ctx.saved
        grads = [None, None, None]
        for i, name in enumerate(("lerp_da", "lerp_db")):
            if needs[i]:
                grads[i], add = gradient_target(into[i], dout.shape, dout.dtype)
                _gradient(name, dout, None, weight, ctx.scalar, grads[i], None, add)
        if needs[2]:
            wide = empty(dout.shape, float32)
            _gradient("lerp_dweight", dout, a, b, 0.0, None, wide, False)
            grads[2] = sum_to(wide, weight.shape, dout.dtype)
        return tuple(grads)


def _gradient(name: str, dout: Array, first: Array | None, second: Array | None, scalar: float, *where: Any) -> None:
    """`where`: the gradient, or its float32 terms before a sum, and whether it is added to."""
    args = (dout, first, second, scalar, *where, np.int64(dout.size), broadcast_layout(dout.shape, first, second))
    launch("arithmetic", name, grid(dout), 256, args, T=dout.dtype)


def lerp(a: Any, b: Any, weight: Any) -> Tensor:
    """a + (b - a) · weight: a at weight 0, b at 1 but for rounding, and beyond b above 1. All three broadcast.

    In the dtype of arithmetic with all three; integers give float32. PyTorch's torch.lerp.
    """
    a, b, weight = operands(a, b, weight, floating=True)
    given = [x for x in (a, b, weight) if isinstance(x, Tensor)]
    shape = np.broadcast_shapes(*(x.shape for x in given))
    a, b = (x if isinstance(x, Tensor) else full(shape, x, given[0].dtype, given[0].device) for x in (a, b))
    scalar = None if isinstance(weight, Tensor) else weight
    return Lerp.apply(broadcast_to(a, shape), broadcast_to(b, shape), weight if scalar is None else None, scalar=scalar)
