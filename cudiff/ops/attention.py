"""Multi-head attention that never holds the matrix of all pairs of tokens in GPU memory."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cudiff.backend import Array, compute_dtype, float32, is_low
from cudiff.cuda.kernels.attention import table
from cudiff.cuda.kernels.attention.problem import Backward, Forward
from cudiff.cuda.launch import blocks, empty
from cudiff.cuda.sums import empty_statistics
from cudiff.function import Function
from cudiff.ops.arithmetic import where
from cudiff.ops.cast import as_tensors, astype
from cudiff.ops.matmul import matmul, matmul_numpy
from cudiff.ops.shape import reshape, transpose
from cudiff.ops.softmax import softmax
from cudiff.statistics import Kind
from cudiff.tensor import Tensor

__all__ = ["attention", "attention_qkv"]

MOST_HEAD_CHANNELS = 128  # that the kernels take


class Attention(Function):
    """out = softmax(q·kᵀ/√D)·v for each image and head, of three arrays (N, T, heads, D)."""

    @staticmethod
    def forward_numpy(ctx, q, k, v):
        scores = matmul_numpy(_by_head(q), _by_head(k).swapaxes(-1, -2)) / math.sqrt(q.shape[-1])
        scores -= scores.max(axis=-1, keepdims=True)
        weights = np.exp(scores, out=scores)
        weights /= weights.sum(axis=-1, keepdims=True)
        ctx.save(q, k, v, weights)
        out = matmul_numpy(weights, _by_head(v))
        return np.ascontiguousarray(out.transpose(0, 2, 1, 3)).reshape(*q.shape[:2], -1).astype(q.dtype, copy=False)

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        grads = tuple(np.empty(x.shape, x.dtype) for x in ctx.saved[:3])
        _backward_numpy(ctx, dout, *grads)
        return grads

    @staticmethod
    def forward_cuda(ctx, q, k, v):
        n, rows, heads, dim = q.shape
        out = empty((n, rows, heads * dim), q.dtype)
        lse = empty((n, heads, 64 * blocks(rows, 64)), float32)
        ctx.save(q, k, v, out, lse)
        if out.size:
            table.forward(Forward(out.reshape(q.shape), lse, q, k, v))
        return out

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        grads = tuple(empty(x.shape, x.dtype) for x in ctx.saved[:3])
        _backward_cuda(ctx, dout, *grads)
        return grads


class AttentionQKV(Function):
    """Attention of q, k and v in one array (N, ..., 3C), read in place. Their gradients are one array too."""

    @staticmethod
    def forward_numpy(ctx, qkv, num_heads, new_order):
        ctx.attrs = num_heads, new_order
        out = Attention.forward_numpy(ctx, *_split(qkv, num_heads, new_order))
        return out.reshape(*qkv.shape[:-1], qkv.shape[-1] // 3)

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        dqkv = np.empty((*dout.shape[:-1], 3 * dout.shape[-1]), dout.dtype)
        _backward_numpy(ctx, dout, *_split(dqkv, *ctx.attrs))
        return (dqkv,)

    @staticmethod
    def forward_cuda(ctx, qkv, num_heads, new_order):
        ctx.attrs = num_heads, new_order
        out = Attention.forward_cuda(ctx, *_split(qkv, num_heads, new_order))
        return out.reshape(*qkv.shape[:-1], qkv.shape[-1] // 3)

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        *images, channels = dout.shape
        dqkv = empty((*images, 3 * channels), dout.dtype)

        def sums(tiles: int) -> tuple[Array, Array, Array]:
            ctx.din_statistics[0] = empty_statistics(Kind.SUMS, images[0], tiles, 3 * channels)
            return _split(ctx.din_statistics[0].sums, *ctx.attrs)

        _backward_cuda(ctx, dout, *_split(dqkv, *ctx.attrs), sums)
        return (dqkv,)


def _split(qkv: Array, num_heads: int, new_order: bool) -> tuple[Array, Array, Array]:
    """Views (N, T, heads, D) of q, k and v."""
    n, *tokens, channels = qkv.shape
    t = math.prod(tokens)
    if new_order:
        qkv = qkv.reshape(n, t, 3, num_heads, channels // (3 * num_heads))
        return qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    qkv = qkv.reshape(n, t, num_heads, 3, channels // (3 * num_heads))
    return qkv[:, :, :, 0], qkv[:, :, :, 1], qkv[:, :, :, 2]


def _by_head(x: np.ndarray) -> np.ndarray:
    """(N, T, heads, D) to (N, heads, T, D) in the dtype of the computation."""
    return x.astype(compute_dtype(x.dtype), copy=False).transpose(0, 2, 1, 3)


def _backward_numpy(ctx, dout, dq, dk, dv):
    q, k, v, weights = ctx.saved
    q, k, v, dout = (_by_head(x) for x in (q, k, v, dout.reshape(q.shape)))
    dweights = matmul_numpy(dout, v.swapaxes(-1, -2))
    dscores = weights * (dweights - (weights * dweights).sum(axis=-1, keepdims=True)) / math.sqrt(q.shape[-1])
    dq[:] = matmul_numpy(dscores, k).transpose(0, 2, 1, 3)
    dk[:] = matmul_numpy(dscores.swapaxes(-1, -2), q).transpose(0, 2, 1, 3)
    dv[:] = matmul_numpy(weights.swapaxes(-1, -2), dout).transpose(0, 2, 1, 3)


def _backward_cuda(ctx, dout, dq, dk, dv, sums=None):
    q, k, v, out, lse = ctx.saved
    if out.size:
        table.backward(Backward(dq, dk, dv, dout.reshape(q.shape), q, k, v, out, lse, sums))


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Any = None) -> Tensor:
    """softmax(q·kᵀ/√D)·v for each image and head.

    q (N, Tq, heads, D), k and v (N, Tk, heads, D), converted to their common dtype; D up to 128, best a multiple of 8.
    Returns (N, Tq, heads·D). float32 on the GPU is exact to about 1e-6; see `allow_tf32`.
    mask: bool, broadcast to (N, heads, Tq, Tk), False where a query does not attend to a key; a query that attends to
    none gives NaN. With a mask the matrix of all pairs is in memory, and D may be of any size.
    Raises ValueError where shapes do not agree, TypeError for a mask that is not bool.
    Vaswani et al. 2017; Dao 2023, "FlashAttention-2".
    """
    if k.shape != v.shape or q.ndim != 4 or (q.shape[0], *q.shape[2:]) != (k.shape[0], *k.shape[2:]) or \
            0 in q.shape + k.shape:
        raise ValueError(
            f"attention takes q (N, Tq, heads, D), k and v (N, Tk, heads, D); got {q.shape}, {k.shape}, {v.shape}"
        )
    q, k, v = as_tensors(q, k, v, floating=True)
    if mask is not None:
        return _masked(q, k, v, mask)
    _check_head(q.shape[3])
    return Attention.apply(q, k, v)


def _masked(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
    """`attention` by separate operations. Scores and their softmax are float32 for a 16-bit q."""
    mask = mask if isinstance(mask, Tensor) else Tensor(mask, device=q.device)
    if mask.dtype != bool:
        raise TypeError(f"attention: the mask is bool, True where a query sees a key, not {mask.dtype}")
    pairs = q.shape[0], q.shape[2], q.shape[1], k.shape[1]
    if mask.ndim > 4 or any(have not in (1, want) for have, want in zip(mask.shape[::-1], pairs[::-1], strict=False)):
        raise ValueError(f"attention: the mask of shape {mask.shape} does not broadcast to (N, heads, Tq, Tk) {pairs}")
    dtype = float32 if is_low(q.dtype) else q.dtype
    wide = (astype(x, dtype) for x in (q, k, v))
    queries, keys, values = (transpose(x, (0, 2, 1, 3)) for x in wide)
    scores = matmul(queries, transpose(keys, (0, 1, 3, 2))) * (1 / math.sqrt(q.shape[3]))
    out = matmul(softmax(where(mask, scores, -math.inf)), values)
    return astype(reshape(transpose(out, (0, 2, 1, 3)), (*q.shape[:2], -1)), q.dtype)


def attention_qkv(qkv: Tensor, num_heads: int, new_order: bool = False) -> Tensor:
    """Self-attention of all tokens of each image of qkv (N, ..., 3C), read in place; returns (N, ..., C).

    The channels are [head][q, k, v][D], guided-diffusion's legacy order, or, with new_order (its
    `use_new_attention_order`), [q, k, v][head][D]. Otherwise as `attention`.
    """
    if qkv.ndim < 3 or qkv.shape[-1] % (3 * num_heads) != 0 or 0 in qkv.shape:
        raise ValueError(f"attention_qkv takes (N, ..., 3C) with C a multiple of {num_heads} heads; got {qkv.shape}")
    _check_head(qkv.shape[-1] // (3 * num_heads))
    return AttentionQKV.apply(qkv, num_heads=num_heads, new_order=new_order)


def _check_head(dim: int) -> None:
    if not 0 < dim <= MOST_HEAD_CHANNELS:
        raise ValueError(f"attention's heads have 1 to {MOST_HEAD_CHANNELS} channels, not {dim}: use more heads")
