"""Matrix products: batched matmul, and linear with its bias fused."""

from __future__ import annotations

import numpy as np

from cudiff.backend import compute_dtype
from cudiff.ops.reduce import sum_to
from cudiff.ops.shape import reshape
from cudiff.tensor import Context, Function, Tensor


class MatMul(Function):
    """out = a·b; da = dout·bᵀ, db = aᵀ·dout, summed over the batch axes that were broadcast."""

    @staticmethod
    def forward_numpy(ctx: Context, a, b, tf32):
        ctx.save(a, b)
        wide = compute_dtype(a.dtype)
        return np.matmul(a.astype(wide, copy=False), b.astype(wide, copy=False)).astype(a.dtype, copy=False)

    @staticmethod
    def backward_numpy(ctx: Context, dout, needs, into):
        wide = compute_dtype(dout.dtype)
        a, b = (x.astype(wide, copy=False) for x in ctx.saved)
        dout = dout.astype(wide, copy=False)
        da = db = None
        if needs[0]:
            da = sum_to(np.matmul(dout, np.swapaxes(b, -1, -2)), a.shape).astype(ctx.saved[0].dtype, copy=False)
        if needs[1]:
            db = sum_to(np.matmul(np.swapaxes(a, -1, -2), dout), b.shape).astype(ctx.saved[1].dtype, copy=False)
        return da, db


class Linear(Function):
    """out = x·weightᵀ + bias; dx = dout·weight, dweight = doutᵀ·x, dbias = sum of dout's rows."""

    @staticmethod
    def forward_numpy(ctx: Context, x, weight, bias, tf32):
        ctx.save(x, weight)
        wide = compute_dtype(x.dtype)
        out = x.reshape(-1, x.shape[-1]).astype(wide, copy=False) @ weight.astype(wide, copy=False).T
        if bias is not None:
            out += bias
        return out.astype(x.dtype, copy=False).reshape(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward_numpy(ctx: Context, dout, needs, into):
        x, weight = ctx.saved
        wide = compute_dtype(x.dtype)
        dout = dout.reshape(-1, weight.shape[0]).astype(wide, copy=False)
        dx = dweight = dbias = None
        if needs[0]:
            dx = (dout @ weight.astype(wide, copy=False)).astype(x.dtype, copy=False).reshape(x.shape)
        if needs[1]:
            dweight = dout.T @ x.reshape(-1, x.shape[-1]).astype(wide, copy=False)
        if needs[2]:
            dbias = dout.sum(0)
        return dx, dweight, dbias


def matmul(a: Tensor, b: Tensor, tf32: bool = False) -> Tensor:
    """Matrix product as in NumPy: a (..., M, K), b (..., K, N) → (..., M, N); batch axes broadcast, 1-D joins.

    The result has a's dtype; sums are in float32 (float64 for float64). `tf32` lets float32 operands be rounded to
    10 bits of mantissa on a GPU; otherwise they keep all. Raises ValueError where the shapes do not agree.
    """
    if a.ndim == 0 or b.ndim == 0 or a.shape[-1] != b.shape[max(b.ndim - 2, 0)]:
        raise ValueError(f"matmul: the shapes {a.shape} and {b.shape} do not agree")
    if a.ndim == 1:
        out = matmul(reshape(a, (1, a.size)), b, tf32)
        return reshape(out, out.shape[:-2] + out.shape[-1:] if b.ndim > 1 else ())
    if b.ndim == 1:
        out = matmul(a, reshape(b, (b.size, 1)), tf32)
        return reshape(out, out.shape[:-1])
    return MatMul.apply(a, b, tf32=tf32)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, tf32: bool = False) -> Tensor:
    """x (..., in) · weight (out, in) transposed + bias (out,) → (..., out), in x's dtype.

    dweight and dbias are float32 (float64 for float64). Raises ValueError where the sizes do not agree.
    """
    if weight.ndim != 2 or x.ndim == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"linear: x of shape {x.shape} does not fit weight of shape {weight.shape} (out, in)")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"linear: the bias has shape {bias.shape}, not {weight.shape[:1]}")
    return Linear.apply(x, weight, bias, tf32=tf32)
