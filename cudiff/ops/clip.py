"""Numbers within bounds."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cudiff.backend import is_float
from cudiff.cuda.accumulate import gradient_target
from cudiff.cuda.kernels.elementwise import grid
from cudiff.cuda.launch import empty, launch
from cudiff.function import Function
from cudiff.ops.arithmetic import maximum, minimum
from cudiff.ops.cast import as_tensor, astype, downcast, is_number, masked, operands, result_dtype, upcast
from cudiff.ops.create import full
from cudiff.tensor import Tensor

__all__ = ["clip"]


class Clip(Function):
    """The gradient passes where low <= x <= high, as in PyTorch."""

    @staticmethod
    def forward_numpy(ctx, x, low, high):
        if ctx.needs[0]:
            ctx.save(x)
        ctx.low, ctx.high = _ends(low, high)
        with np.errstate(over="ignore"):  # a bound beyond the dtype is infinity
            return downcast(np.clip(upcast(x), low, high), x.dtype)

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        x = upcast(ctx.saved[0])
        with np.errstate(over="ignore"):
            inside = (x >= ctx.low) & (x <= ctx.high)
        return (downcast(masked(upcast(dout), inside), dout.dtype),)

    @staticmethod
    def forward_cuda(ctx, x, low, high):
        out = empty(x.shape, x.dtype)
        ctx.low, ctx.high = _ends(low, high)
        args = (x, out, min(ctx.low, ctx.high), ctx.high, np.int64(x.size))  # as NumPy: the upper bound goes last
        launch("elementwise", "clip_forward", grid(x), 256, args, T=x.dtype)
        if ctx.needs[0]:
            ctx.save(x)
        return out

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        dx, accumulate = gradient_target(into[0], dout.shape, dout.dtype)
        args = (dout, ctx.saved[0], dx, ctx.low, ctx.high, accumulate, np.int64(dx.size))
        launch("elementwise", "clip_backward", grid(dx), 256, args, T=dx.dtype)
        return (dx,)


def _ends(low: float | None, high: float | None) -> tuple[float, float]:
    return -math.inf if low is None else float(low), math.inf if high is None else float(high)


def clip(x: Any, a_min: Any = None, a_max: Any = None, *, min: Any = None, max: Any = None) -> Tensor:
    """x limited to [a_min, a_max], each a number, a tensor or an array that broadcasts, or None for no limit.

    With numbers the gradient passes inside, the ends included; with tensors it is that of `maximum` and `minimum`.
    `min` and `max` are NumPy's other names of a_min and a_max. Raises ValueError if one is given by both its names.
    """
    if (a_min is not None and min is not None) or (a_max is not None and max is not None):
        raise ValueError("clip: a_min is min and a_max is max: give each by one of its names")
    low, high = min if a_min is None else a_min, max if a_max is None else a_max
    bounds = [bound for bound in (low, high) if bound is not None]
    if not bounds:
        return as_tensor(x)
    if all(is_number(bound) and not math.isnan(bound) for bound in bounds):
        x = as_tensor(x)
        x = astype(x, result_dtype(x, *bounds))
        if is_float(x.dtype):
            return Clip.apply(x, low=low, high=high)
        least, most = (0, 1) if x.dtype == bool else (np.iinfo(x.dtype).min, np.iinfo(x.dtype).max)
        low, high = low if low is None or low > least else None, high if high is None or high < most else None
    else:
        x, *found = operands(x, *bounds)
        low, high = None if low is None else found[0], None if high is None else found[-1]
        beside = next(each for each in (x, *found) if isinstance(each, Tensor))
        x = x if isinstance(x, Tensor) else full((), x, beside.dtype, beside.device)
    x = x if low is None else maximum(x, low)
    return x if high is None else minimum(x, high)
