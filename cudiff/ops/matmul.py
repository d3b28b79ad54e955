"""Matrix products: batched matmul, and linear with its bias fused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from cudiff.backend import Array, array_module, compute_dtype, float32, is_low
from cudiff.cuda.accumulate import gradient_target
from cudiff.cuda.kernels.convolution.problem import DGRAD, FPROP, WGRAD, Operands
from cudiff.cuda.kernels.gated import gate_gradients
from cudiff.cuda.kernels.gemm.matmul import rows_of
from cudiff.cuda.kernels.gemm.product import Epilogue, as_float32
from cudiff.cuda.kernels.gemm.table import linear as linear_cuda
from cudiff.cuda.kernels.gemm.table import matmul as matmul_cuda
from cudiff.cuda.kernels.shape import contiguous, join_as, split_as
from cudiff.cuda.launch import empty
from cudiff.function import Function
from cudiff.gradient import Slot, State
from cudiff.ops.cast import (
    as_tensor_beside,
    as_tensors,
    as_wide,
    astype,
    downcast,
    require_float,
    require_floats,
    result_dtype,
    upcast,
    upcast_like_first,
)
from cudiff.ops.reduce import sum_array, sum_rows_cuda, sum_to
from cudiff.ops.shape import reshape, split
from cudiff.tensor import Tensor
from cudiff.threads import PART_BYTES, cut, parallel_map, unflagged

__all__ = ["linear", "matmul"]


def _matrices(x: Array, batch: tuple[int, ...]) -> Array:
    """x (..., r, c) as (B, r, c). B is 1 if x is one matrix for the whole batch, else the size of the batch."""
    if math.prod(x.shape[:-2]) == 1:
        return x.reshape(1, *x.shape[-2:])
    if x.shape[:-2] != batch:
        x = contiguous(array_module("cuda").broadcast_to(x, batch + x.shape[-2:]))
    return x.reshape(math.prod(batch), *x.shape[-2:])


@unflagged
def matmul_numpy(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a (..., m, k) · b (..., k, n) on all cores, cut along the first axis of the batch or of a matrix."""
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    out = np.empty((*batch, a.shape[-2], b.shape[-1]), np.result_type(a, b))
    if batch:
        a, b = np.broadcast_to(a, batch + a.shape[-2:]), np.broadcast_to(b, batch + b.shape[-2:])
        parts = cut(batch[0], (a[:1].size + b[:1].size + out[:1].size) * out.itemsize)
    else:  # enough rows in a part that its product costs more than rearranging b for it
        parts = cut(len(out), min((a.shape[1] + b.shape[1]) * out.itemsize, PART_BYTES // 256))

    def product(part: slice) -> None:
        np.matmul(a[part], b[part] if batch else b, out=out[part])

    parallel_map(product, parts)
    return out


class MatMul(Function):
    """out = a·b; da = dout·bᵀ, db = aᵀ·dout, summed over the batch axes that were broadcast."""

    @staticmethod
    def forward_numpy(ctx, a, b):
        ctx.save(a, b)
        return downcast(matmul_numpy(*upcast_like_first(a, b)), a.dtype)

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        dout, a, b = upcast_like_first(dout, *ctx.saved)
        da = db = None
        if needs[0]:
            da = downcast(sum_to(matmul_numpy(dout, np.swapaxes(b, -1, -2)), a.shape), ctx.saved[0].dtype)
        if needs[1]:
            db = downcast(sum_to(matmul_numpy(np.swapaxes(a, -1, -2), dout), b.shape), ctx.saved[1].dtype)
        return da, db

    @staticmethod
    def forward_cuda(ctx, a, b):
        require_float("matmul", a)
        ctx.save(a, b)
        ctx.batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        left, right = _folded(a, b, a, ctx.batch)[:2]
        return matmul_cuda(left, right).reshape(*ctx.batch, a.shape[-2], b.shape[-1])

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        a, b = ctx.saved
        left, right, dout = _folded(a, b, dout, ctx.batch)
        grads: list[Any] = [None, None]
        for i, (x, used) in enumerate(((a, left), (b, right))):
            if not needs[i]:
                continue
            pair = (dout, right, False, True) if i == 0 else (left, dout, True, False)
            if used.shape[0] == dout.shape[0] and used.size == x.size:
                grads[i], add = gradient_target(into[i], x.shape, x.dtype)
                matmul_cuda(*pair, grads[i].reshape(used.shape), add)
            else:
                every = matmul_cuda(*pair).reshape(*ctx.batch, *x.shape[-2:])
                grads[i] = sum_to(every, x.shape)
        return tuple(grads)


def _folded(a: Array, b: Array, like_out: Array, batch: tuple[int, ...]) -> tuple[Array, Array, Array]:
    """a, b and an array with the result's rows as (B, r, c). B is 1 if b is one matrix: a's are folded into one."""
    if math.prod(b.shape[:-2]) == 1:
        shape = 1, math.prod(a.shape[:-1])  # -1 is ambiguous where the depth is 0
        return a.reshape(*shape, a.shape[-1]), b.reshape(1, *b.shape[-2:]), like_out.reshape(*shape, like_out.shape[-1])
    count = math.prod(like_out.shape[:-2])
    return _matrices(a, batch), _matrices(b, batch), like_out.reshape(count, *like_out.shape[-2:])


class Linear(Function):
    """out = x·weightᵀ + bias + residual; dx = dout·weight, dweight = doutᵀ·x, dbias = sum of dout's rows."""

    @staticmethod
    def forward_numpy(ctx, x, weight, bias, residual):
        ctx.save(x, weight)
        wide_x, wide_weight = upcast_like_first(x, weight)
        out = matmul_numpy(_rows_numpy(wide_x), wide_weight.T)
        if bias is not None:
            out += bias
        if residual is not None:
            out += residual.reshape(out.shape)
        return out.astype(x.dtype, copy=False).reshape(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        x, weight = ctx.saved
        return *_gradients_numpy(x, weight, dout, needs), dout if needs[3] else None

    @staticmethod
    def forward_cuda(ctx, x, weight, bias, residual):
        ctx.save(x, weight)
        addend = None if residual is None else rows_of(residual)
        out = empty((*x.shape[:-1], weight.shape[0]), x.dtype)
        epilogue = Epilogue(as_float32(bias), addend=addend)
        linear_cuda(FPROP, Operands(x, weight, rows_of(out), epilogue))
        return out

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        x, weight = ctx.saved
        sums = ctx.dout_sums
        if sums is None and dout.dtype == float32 and len(dout) == dout.size // len(weight) <= 128 and not needs[3]:
            sums = dout  # few rows, which the deferred sum adds up as fast; nothing else holds dout
        return *gradients_cuda(x, weight, dout, sums, needs, into), dout if needs[3] else None


class SplitLinear(Function):
    """See `split_linear`. On CUDA one launch casts and splits the result, and another joins and casts the gradients of
    its parts."""

    @staticmethod
    def compose(x, weight, bias, parts):
        (out,) = as_wide(linear(x, weight, bias))
        return split(out, parts, -1)

    @staticmethod
    def forward_cuda(ctx, x, weight, bias, parts):
        return tuple(split_as(float32, Linear.forward_cuda(ctx, x, weight, bias, None), parts))

    @staticmethod
    def backward_cuda(ctx, *douts, needs, into):
        x, weight = ctx.saved
        dx, dweight, _ = gradients_cuda(x, weight, join_as(x.dtype, douts), None, (*needs[:2], False), into)
        if not needs[2]:
            return dx, dweight, None
        dbias, add = gradient_target(into[2], weight.shape[:1], float32)
        for dout, own in zip(douts, dbias.reshape(len(douts), -1), strict=True):
            if dout is not None:
                sum_rows_cuda(dout, Slot(own, State.HOLDS if add else State.EMPTY), dout)
            elif not add:
                own.fill(0)
        return dx, dweight, dbias


class GatedLinear(Function):
    """out = residual + gate · y with y = x·weightᵀ + bias, in one launch: the end of an adaLN-Zero block (Peebles and
    Xie, arXiv 2212.09748). dy = gate · dout, dgate = sum of dout · y over the rows of an image."""

    @staticmethod
    def forward_numpy(ctx, x, weight, bias, residual, gate):
        y = Linear.forward_numpy(ctx, x, weight, bias, None)
        gate = gate.reshape(len(gate), *[1] * (y.ndim - 2), -1).astype(compute_dtype(y.dtype), copy=False)
        ctx.save(x, weight, gate, y)
        return downcast(upcast(residual) + gate * upcast(y), y.dtype)

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        x, weight, gate, y = ctx.saved
        wide = upcast(dout)
        dgate = (wide * upcast(y)).sum(tuple(range(1, y.ndim - 1)))
        return *_gradients_numpy(x, weight, wide * gate, needs), dout, dgate

    @staticmethod
    def forward_cuda(ctx, x, weight, bias, residual, gate):
        out, gate = empty(residual.shape, x.dtype), as_float32(gate)
        y = empty(out.shape, out.dtype) if any(ctx.needs) else None
        epilogue = Epilogue(as_float32(bias), addend=rows_of(residual), gate=gate,
                            rows_per_image=math.prod(x.shape[1:-1]), aux=None if y is None else rows_of(y))
        linear_cuda(FPROP, Operands(x, weight, rows_of(out), epilogue))
        ctx.save(x, weight, gate, y)
        return out

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        x, weight, gate, y = ctx.saved
        dy, dgate, sums = gate_gradients(dout, y, gate, into[4])
        return *gradients_cuda(x, weight, dy, sums, needs, into), dout if needs[3] else None, dgate


def _gradients_numpy(x: np.ndarray, weight: np.ndarray, dout: np.ndarray, needs: Sequence[bool]) -> tuple:
    """dx, dweight and dbias, None where not needed; the rows of dout are those of `x`."""
    wide_x, weight, dout = upcast_like_first(x, weight, _rows_numpy(dout))
    dx = dweight = dbias = None
    if needs[0]:
        dx = downcast(matmul_numpy(dout, weight), x.dtype).reshape(x.shape)
    if needs[1]:
        dweight = matmul_numpy(dout.T, _rows_numpy(wide_x))
    if needs[2]:
        dbias = sum_array(dout, 0)
    return dx, dweight, dbias


def _rows_numpy(x: np.ndarray) -> np.ndarray:
    """x (..., C) as (rows, C). -1 would be ambiguous where C is 0, as in a layer of `grouped_linear`."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def gradients_cuda(x: Array, weight: Array, dout: Array, sums: Array | None, needs: Sequence[bool],
                    into: Sequence[Slot | None]) -> tuple:
    """dx, dweight and dbias of a linear layer, None where not needed. sums: of dout, as for `sum_rows_cuda`."""
    dx = dweight = dbias = None
    if needs[0]:
        dx, add = gradient_target(into[0], x.shape, x.dtype)
        linear_cuda(DGRAD, Operands(dout, weight, dx, Epilogue(addend=dx if add else None)))
    if needs[1]:
        dweight, add = gradient_target(into[1], weight.shape, float32)
        linear_cuda(WGRAD, Operands(x, dweight, dout, add=add))
    if needs[2]:
        dbias = sum_rows_cuda(dout, into[2], sums)
    return dx, dweight, dbias


def matmul(a: Any, b: Any) -> Tensor:
    """Matrix product as in NumPy: a (..., M, K), b (..., K, N) → (..., M, N); batch axes broadcast, a or b may be 1-D.

    Different dtypes are converted as in `a + b`; a 16-bit `a` reads the 16-bit copy of a weight that has one
    (`Parameter.low`). Sums are in float32 (float64 for float64); see `allow_tf32`. Raises ValueError for other shapes.
    """
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        a, b = as_tensors(a, b)
    if a.ndim == 0 or b.ndim == 0 or a.shape[-1] != b.shape[max(b.ndim - 2, 0)]:
        raise ValueError(f"matmul: the shapes {a.shape} and {b.shape} do not agree")
    if a.ndim == 1:
        out = matmul(reshape(a, (1, a.size)), b)
        return reshape(out, out.shape[:-2] + out.shape[-1:] if b.ndim > 1 else ())
    if b.ndim == 1:
        out = matmul(a, reshape(b, (b.size, 1)))
        return reshape(out, out.shape[:-1])
    if a.dtype != b.dtype and not (is_low(a.dtype) and getattr(b, "low", False)):
        dtype = result_dtype(a, b)
        a, b = astype(a, dtype), astype(b, dtype)
    return MatMul.apply(a, b)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None,
           gate: Tensor | None = None) -> Tensor:
    """x (..., in) · weight (out, in) transposed + bias (out,) + residual (..., out) → (..., out), in x's dtype.

    gate (N, out), only with a residual: x is (N, ..., in), and image n's product plus bias is multiplied by gate[n]
    before the residual is added (adaLN-Zero; Peebles and Xie 2022).
    dweight and dbias are float32 (float64 for float64). Raises ValueError where the sizes do not agree.
    """
    x = _fitting(x, weight, bias)
    check_additions("linear", x, len(weight), residual, gate)
    if gate is None:
        return Linear.apply(x, weight, bias, residual)
    return GatedLinear.apply(x, weight, bias, residual, gate)


def check_additions(name: str, x: Tensor, outputs: int, residual: Tensor | None, gate: Tensor | None) -> None:
    """Raise ValueError where a residual or a gate does not fit a result (..., outputs) of x (..., in)."""
    if residual is not None and (residual.shape, residual.dtype) != ((*x.shape[:-1], outputs), x.dtype):
        raise ValueError(f"{name}: the residual {residual.shape} {residual.dtype} is not like the result")
    if gate is not None and not len(x):
        raise ValueError(f"{name}: x of shape {x.shape} has no images to gate")
    if gate is not None and (residual is None or x.ndim < 2 or gate.shape != (len(x), outputs)):
        raise ValueError(f"{name}: the gate {gate.shape} is not {(len(x), outputs)}, beside a residual")


def _fitting(x: Any, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x as a Tensor, checked like the others for `linear`."""
    x = as_tensor_beside(x, weight)
    if weight.ndim != 2 or x.ndim == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"linear: x of shape {x.shape} does not fit weight of shape {weight.shape} (out, in)")
    if not weight.shape[1]:
        raise ValueError(f"linear: x of shape {x.shape} has no features to multiply")
    if not len(weight):
        raise ValueError(f"linear: a weight of shape {weight.shape} has no outputs")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"linear: the bias has shape {bias.shape}, not {weight.shape[:1]}")
    require_floats("linear", x, weight, bias)
    return x


def split_linear(x: Tensor, weight: Tensor, bias: Tensor, parts: int) -> tuple[Tensor, ...]:
    """linear(x, weight, bias) (..., out) as `parts` tensors (..., out / parts) of float32, or of float64 for float64.

    Raises as `linear`, and ValueError for other than 1 to 16 equal parts.
    """
    x = _fitting(x, weight, bias)
    if not 1 <= parts <= 16 or len(weight) % parts:
        raise ValueError(f"split_linear: {len(weight)} outputs do not make {parts} equal parts, of 16 at most")
    return SplitLinear.apply(x, weight, bias, parts=parts)
