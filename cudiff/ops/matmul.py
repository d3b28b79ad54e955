"""Matrix products: batched matmul, and linear with its bias fused."""

from __future__ import annotations

import math

import numpy as np

from cudiff.backend import Array, array_module, compute_dtype, float32, is_float
from cudiff.cuda.accumulate import gradient_target
from cudiff.cuda.kernels.convolution import sm90, wgrad_sm90
from cudiff.cuda.kernels.gemm.product import Epilogue, product
from cudiff.cuda.kernels.shape import contiguous
from cudiff.cuda.launch import aligned, empty
from cudiff.function import Function
from cudiff.ops.cast import astype, require_float, require_floats
from cudiff.ops.reduce import sum_rows_cuda, sum_to
from cudiff.ops.shape import reshape
from cudiff.tensor import Tensor
from cudiff.threads import PART_BYTES, cut, parallel_map


def multiply(a: Array, b: Array, transpose_a: bool = False, transpose_b: bool = False, out: Array | None = None,
             epilogue: Epilogue | None = None, tf32: bool = False) -> Array:
    """a·b of CUDA matrices, or batches of them, with the epilogue's additions. Returns `out`, new in a's dtype if None.

    a (B, m, k), or (B, k, m) under transpose_a; b (B, k, n), or (B, n, k) under transpose_b; a batch of one serves
    all. Rows may be a part of longer ones. b is rounded to a's dtype.
    """
    b = b if b.dtype == a.dtype else b.astype(a.dtype)
    batches = max(a.shape[0], b.shape[0])
    rows, depth = a.shape[:0:-1] if transpose_a else a.shape[1:]
    columns = b.shape[1] if transpose_b else b.shape[2]
    if out is None:
        out = empty((batches, rows, columns), a.dtype)
    if out.size == 0:
        return out
    pitch_a, pitch_b, pitch = (x.strides[1] // x.itemsize for x in (a, b, out))
    batch_a, batch_b = (x.strides[0] // x.itemsize if x.shape[0] > 1 else 0 for x in (a, b))
    dims = (rows, columns, depth, np.int64(pitch_a), np.int64(pitch_b), np.int64(batch_a), np.int64(batch_b))
    return product(
        "matmul", a, b, out, pitch, dims, (rows, columns, depth, batches), epilogue or Epilogue(), tf32,
        A_K_MAJOR=not transpose_a, B_K_MAJOR=transpose_b,
        A_VEC=aligned(a, pitch_a, batch_a, a.shape[2]), B_VEC=aligned(b, pitch_b, batch_b, b.shape[2]),
    )


def _matrices(x: Array, batch: tuple[int, ...]) -> Array:
    """x (..., r, c) as (B, r, c): B is 1 where one matrix serves the whole batch, else every matrix of it."""
    if math.prod(x.shape[:-2]) == 1:
        return x.reshape(1, *x.shape[-2:])
    if x.shape[:-2] != batch:
        x = contiguous(array_module("cuda").broadcast_to(x, batch + x.shape[-2:]))
    return x.reshape(-1, *x.shape[-2:])


def as_float32(bias: Array | None) -> Array | None:
    return bias if bias is None or bias.dtype == float32 else bias.astype(float32)


def matmul_numpy(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a (..., m, k) · b (..., k, n) on all cores, cut along the first axis of the batch or of a matrix."""
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    out = np.empty((*batch, a.shape[-2], b.shape[-1]), np.result_type(a, b))
    if batch:
        a, b = np.broadcast_to(a, batch + a.shape[-2:]), np.broadcast_to(b, batch + b.shape[-2:])
        parts = cut(batch[0], (a[:1].size + b[:1].size + out[:1].size) * out.itemsize)
    else:  # not so few rows that rearranging b for each part would cost as much as the product
        parts = cut(len(out), min((a.shape[1] + b.shape[1]) * out.itemsize, PART_BYTES // 256))

    def product(part: slice) -> None:
        np.matmul(a[part], b[part] if batch else b, out=out[part])

    parallel_map(product, parts)
    return out


class MatMul(Function):
    """out = a·b; da = dout·bᵀ, db = aᵀ·dout, summed over the batch axes that were broadcast."""

    @staticmethod
    def forward_numpy(ctx, a, b, tf32):
        ctx.save(a, b)
        wide = compute_dtype(a.dtype)
        return matmul_numpy(a.astype(wide, copy=False), b.astype(wide, copy=False)).astype(a.dtype, copy=False)

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        wide = compute_dtype(dout.dtype)
        a, b = (x.astype(wide, copy=False) for x in ctx.saved)
        dout = dout.astype(wide, copy=False)
        da = db = None
        if needs[0]:
            da = sum_to(matmul_numpy(dout, np.swapaxes(b, -1, -2)), a.shape).astype(ctx.saved[0].dtype, copy=False)
        if needs[1]:
            db = sum_to(matmul_numpy(np.swapaxes(a, -1, -2), dout), b.shape).astype(ctx.saved[1].dtype, copy=False)
        return da, db

    @staticmethod
    def forward_cuda(ctx, a, b, tf32):
        require_float("matmul", a)
        ctx.save(a, b)
        ctx.tf32, ctx.batch = tf32, np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        left, right = _folded(a, b, a, ctx.batch)[:2]
        return multiply(left, right, tf32=tf32).reshape(*ctx.batch, a.shape[-2], b.shape[-1])

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        a, b = ctx.saved
        left, right, dout = _folded(a, b, dout, ctx.batch)
        grads: list[Array | None] = [None, None]
        for i, (x, used) in enumerate(((a, left), (b, right))):
            if not needs[i]:
                continue
            pair = (dout, right, False, True) if i == 0 else (left, dout, True, False)
            if used.shape[0] == dout.shape[0] and used.size == x.size:
                out, add = gradient_target(into[i], x.shape, x.dtype)
                flat = out.reshape(used.shape)
                multiply(*pair, flat, Epilogue(addend=flat if add else None), ctx.tf32)
            else:
                every = multiply(*pair, tf32=ctx.tf32).reshape(*ctx.batch, *x.shape[-2:])
                out = sum_to(every, x.shape)
            grads[i] = out
        return grads[0], grads[1]


def _folded(a: Array, b: Array, like_out: Array, batch: tuple[int, ...]) -> tuple[Array, Array, Array]:
    """a, b and an array of rows like the result's as (B, r, c), or one long matrix where one b serves all of a."""
    if math.prod(b.shape[:-2]) == 1 and math.prod(a.shape[:-2]) == math.prod(batch):
        return a.reshape(1, -1, a.shape[-1]), b.reshape(1, *b.shape[-2:]), like_out.reshape(1, -1, like_out.shape[-1])
    return _matrices(a, batch), _matrices(b, batch), like_out.reshape(-1, *like_out.shape[-2:])


class Linear(Function):
    """out = x·weightᵀ + bias + residual; dx = dout·weight, dweight = doutᵀ·x, dbias = sum of dout's rows."""

    @staticmethod
    def forward_numpy(ctx, x, weight, bias, residual, tf32):
        ctx.save(x, weight)
        wide = compute_dtype(x.dtype)
        out = matmul_numpy(x.reshape(-1, x.shape[-1]).astype(wide, copy=False), weight.astype(wide, copy=False).T)
        if bias is not None:
            out += bias
        if residual is not None:
            out += residual.reshape(out.shape)
        return out.astype(x.dtype, copy=False).reshape(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        x, weight = ctx.saved
        wide = compute_dtype(x.dtype)
        dresidual = dout if needs[3] else None
        dout = dout.reshape(-1, weight.shape[0]).astype(wide, copy=False)
        dx = dweight = dbias = None
        if needs[0]:
            dx = matmul_numpy(dout, weight.astype(wide, copy=False)).astype(x.dtype, copy=False).reshape(x.shape)
        if needs[1]:
            dweight = matmul_numpy(dout.T, x.reshape(-1, x.shape[-1]).astype(wide, copy=False))
        if needs[2]:
            dbias = dout.sum(0)
        return dx, dweight, dbias, dresidual

    @staticmethod
    def forward_cuda(ctx, x, weight, bias, residual, tf32):
        ctx.save(x, weight)
        ctx.tf32 = tf32
        addend = None if residual is None else _rows(residual)
        out = linear_cuda(x, weight, Epilogue(as_float32(bias), addend=addend), tf32)
        return out.reshape(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        x, weight = ctx.saved
        dx = dweight = dbias = None
        if needs[0]:
            dx, add = gradient_target(into[0], x.shape, x.dtype)
            linear_dx_cuda(dout, weight, dx, Epilogue(addend=dx if add else None), ctx.tf32)
        if needs[1]:
            dweight, add = gradient_target(into[1], weight.shape, float32)
            linear_dweight_cuda(x, dout, dweight, add, ctx.tf32)
        if needs[2]:
            sums = ctx.dout_partials
            if sums is None and dout.dtype == float32 and len(dout) == dout.size // len(weight) <= 128 and not needs[3]:
                sums = dout  # so few rows that the last kernel adds them up as fast; none but this backward has them
            dbias = sum_rows_cuda(dout, into[2], sums)
        return dx, dweight, dbias, dout if needs[3] else None


def _rows(x: Array) -> Array:
    """x (..., C) as a batch of one matrix (1, rows, C); a part of longer rows stays one."""
    return x[None] if x.ndim == 2 else x.reshape(1, -1, x.shape[-1])


def linear_cuda(x: Array, weight: Array, epilogue: Epilogue, tf32: bool, out: Array | None = None,
                x2: Array | None = None) -> Array:
    """concat(x, x2) (..., C) · weight (K, C) transposed, plus the epilogue → (1, rows, K)."""
    if out is None:
        out = empty((1, x.size // x.shape[-1], weight.shape[0]), x.dtype)
    images = sm90.as_image(x), weight[:, None, None], sm90.as_image(out)
    image2 = None if x2 is None else sm90.as_image(x2)
    if image2 is not None and not wgrad_sm90.suits_pair(images[0], image2, images[1]):
        linear_cuda(x, weight[:, : x.shape[-1]], epilogue, tf32, out)
        return linear_cuda(x2, weight[:, x.shape[-1] :], Epilogue(addend=out), tf32, out)
    if sm90.suits(*images, tf32=tf32):
        sm90.fprop(*images, epilogue, x2=image2)
        return out
    return multiply(_rows(x), weight[None], transpose_b=True, out=out, epilogue=epilogue, tf32=tf32)


def linear_dx_cuda(dout: Array, weight: Array, dx: Array, epilogue: Epilogue, tf32: bool,
                   dx2: Array | None = None) -> None:
    """concat(dx, dx2) (..., C) = dout (..., K) · weight (K, C), plus the epilogue."""
    images = sm90.as_image(dout), weight[:, None, None], sm90.as_image(dx)
    image2 = None if dx2 is None else sm90.as_image(dx2)
    if image2 is not None and not wgrad_sm90.suits_pair(images[2], image2, images[1]):
        linear_dx_cuda(dout, weight[:, : dx.shape[-1]], dx, epilogue, tf32)
        linear_dx_cuda(dout, weight[:, dx.shape[-1] :], dx2, epilogue, tf32)
    elif sm90.suits(*images, tf32=tf32):
        sm90.fprop(*images, epilogue, transposed=True, out2=image2)
    else:
        multiply(_rows(dout), weight[None], out=_rows(dx), epilogue=epilogue, tf32=tf32)


def linear_dweight_cuda(x: Array, dout: Array, dweight: Array, add: bool, tf32: bool, x2: Array | None = None) -> None:
    """dweight (K, C) float32 = or += dout (..., K) transposed · concat(x, x2) (..., C)."""
    images = sm90.as_image(x), dweight[:, None, None], sm90.as_image(dout)
    image2 = None if x2 is None else sm90.as_image(x2)
    if image2 is not None and not wgrad_sm90.suits_pair(images[0], image2, images[1]):
        linear_dweight_cuda(x, dout, dweight[:, : x.shape[-1]], add, tf32)
        return linear_dweight_cuda(x2, dout, dweight[:, x.shape[-1] :], add, tf32)
    if wgrad_sm90.suits(*images, tf32=tf32):
        wgrad_sm90.wgrad(images[0], images[2], images[1], add, x2=image2)
        return None
    dweight = dweight[None]
    epilogue = Epilogue(addend=dweight if add else None)
    multiply(_rows(dout), _rows(x), transpose_a=True, out=dweight, epilogue=epilogue, tf32=tf32)
    return None


def matmul(a: Tensor, b: Tensor, tf32: bool = False) -> Tensor:
    """Matrix product as in NumPy: a (..., M, K), b (..., K, N) → (..., M, N); batch axes broadcast, 1-D joins.

    The result has a's dtype, b's where only that is floating; sums are in float32 (float64 for float64). `tf32` lets
    float32 operands be rounded to 10 bits of mantissa on a GPU; otherwise they keep all. Raises ValueError where the
    shapes do not agree.
    """
    if a.ndim == 0 or b.ndim == 0 or a.shape[-1] != b.shape[max(b.ndim - 2, 0)]:
        raise ValueError(f"matmul: the shapes {a.shape} and {b.shape} do not agree")
    if a.ndim == 1:
        out = matmul(reshape(a, (1, a.size)), b, tf32)
        return reshape(out, out.shape[:-2] + out.shape[-1:] if b.ndim > 1 else ())
    if b.ndim == 1:
        out = matmul(a, reshape(b, (b.size, 1)), tf32)
        return reshape(out, out.shape[:-1])
    if is_float(b.dtype) and not is_float(a.dtype):
        a = astype(a, b.dtype)
    return MatMul.apply(a, b, tf32=tf32)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, tf32: bool = False,
           residual: Tensor | None = None) -> Tensor:
    """x (..., in) · weight (out, in) transposed + bias (out,) + residual (..., out) → (..., out), in x's dtype.

    dweight and dbias are float32 (float64 for float64). Raises ValueError where the sizes do not agree.
    """
    if weight.ndim != 2 or x.ndim == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"linear: x of shape {x.shape} does not fit weight of shape {weight.shape} (out, in)")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"linear: the bias has shape {bias.shape}, not {weight.shape[:1]}")
    if residual is not None and (residual.shape, residual.dtype) != ((*x.shape[:-1], weight.shape[0]), x.dtype):
        raise ValueError(f"linear: the residual {residual.shape} {residual.dtype} is not like the result")
    require_floats("linear", x, weight, bias)
    return Linear.apply(x, weight, bias, residual, tf32=tf32)
