"""Conversion between dtypes, and which dtype mixed operands meet in."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from cudiff.backend import float32, is_float, is_low
from cudiff.tensor import Function, Tensor


class Cast(Function):
    """out = x rounded to `dtype`; dx = dout rounded to x's dtype."""

    @staticmethod
    def forward_numpy(ctx, x, dtype):
        ctx.dtype = x.dtype
        return x.astype(dtype)

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        return (dout.astype(ctx.dtype),)


def astype(x: Tensor, dtype: Any) -> Tensor:
    """x in another dtype; x itself where it has it already. Floating to floating is differentiable."""
    dtype = np.dtype(dtype)
    return x if x.dtype == dtype else Cast.apply(x, dtype=dtype)


def result_dtype(*operands: Any, floating: bool = False) -> np.dtype:
    """The dtype that tensors and Python numbers compute in together; float32 for integers if `floating`."""
    dtypes = [x.dtype for x in operands if isinstance(x, Tensor)]
    floats = [dtype for dtype in dtypes if is_float(dtype)]
    if floats:
        mixed = is_low(floats[0]) and any(dtype != floats[0] for dtype in floats)
        return functools.reduce(np.promote_types, floats, float32) if mixed else np.result_type(*floats)
    if floating or any(isinstance(x, float | np.floating) for x in operands):
        return float32
    return np.result_type(*dtypes)
