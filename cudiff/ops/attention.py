"""Multi-head attention, whose kernels never hold the matrix of all pairs of tokens in GPU memory."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np

from cudiff.backend import Array, float32
from cudiff.cuda.kernels.attention import table
from cudiff.cuda.kernels.attention.mask import Mask, pack
from cudiff.cuda.kernels.attention.problem import Backward, Forward, Heads
from cudiff.cuda.launch import blocks, empty
from cudiff.cuda.sums import empty_statistics
from cudiff.function import Function
from cudiff.ops.arithmetic import where
from cudiff.ops.cast import as_tensors, as_wide, astype, upcast
from cudiff.ops.matmul import matmul
from cudiff.ops.shape import reshape, split, transpose
from cudiff.ops.softmax import softmax
from cudiff.statistics import Kind
from cudiff.tensor import Tensor, gradient_depth
from cudiff.threads import cut, parallel_map, unflagged

__all__ = ["attention", "attention_qkv"]

MOST_HEAD_CHANNELS = 128  # that the kernels take


class Attention(Function):
    """out = softmax(q·kᵀ/√D)·v for each image and head, of three arrays (N, T, heads, D)."""

    @staticmethod
    def forward_numpy(ctx, q, k, v, mask):
        queries, keys, values = _by_head(q), _by_head(k), _by_head(v)
        weights = np.empty((*queries.shape[:3], k.shape[1]), queries.dtype)
        out = np.empty(q.shape, q.dtype)
        wanted = None if mask is None else np.broadcast_to(mask, weights.shape)

        def attend(images: slice) -> None:
            scores = _product(queries[images], keys[images].swapaxes(-1, -2), weights[images])
            scores /= math.sqrt(q.shape[-1])
            if wanted is not None:
                np.copyto(scores, -np.inf, where=~wanted[images])
            top = scores.max(axis=-1, keepdims=True)
            scores -= np.where(np.isneginf(top), 0, top)
            np.exp(scores, out=scores)
            total = scores.sum(axis=-1, keepdims=True)
            scores /= np.where(total == 0, 1, total)  # 0 of a query that attends to no key
            out[images] = _product(scores, values[images]).transpose(0, 2, 1, 3)

        parallel_map(attend, cut(len(q), weights[:1].nbytes))
        ctx.save(q, k, v, weights)
        return out.reshape(*q.shape[:2], -1)

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        grads = tuple(np.empty(x.shape, x.dtype) for x in ctx.saved[:3])
        _backward_numpy(ctx, dout, *grads)
        return *grads, None

    @staticmethod
    def forward_cuda(ctx, q, k, v, mask):
        n, rows, heads, dim = q.shape
        out = empty((n, rows, heads * dim), q.dtype)
        lse = empty((n, heads, 64 * blocks(rows, 64)), float32)
        packed = None if mask is None else pack(mask, rows, k.shape[1])
        ctx.save(q, k, v, out, lse, *(packed or ()))
        table.forward(Forward(out.reshape(q.shape), lse, q, k, v, packed))
        return out

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        grads = tuple(empty(x.shape, x.dtype) for x in ctx.saved[:3])
        _backward_cuda(ctx, dout, *grads)
        return *grads, None


class AttentionQKV(Function):
    """Attention of q, k and v in one array (N, ..., 3C), read in place. Their gradients are one array too."""

    @staticmethod
    def forward_numpy(ctx, qkv, mask, num_heads, new_order):
        ctx.attrs = num_heads, new_order
        out = Attention.forward_numpy(ctx, *_split(qkv, num_heads, new_order), mask)
        return out.reshape(*qkv.shape[:-1], qkv.shape[-1] // 3)

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        dqkv = np.empty((*dout.shape[:-1], 3 * dout.shape[-1]), dout.dtype)
        _backward_numpy(ctx, dout, *_split(dqkv, *ctx.attrs))
        return dqkv, None

    @staticmethod
    def forward_cuda(ctx, qkv, mask, num_heads, new_order):
        ctx.attrs = num_heads, new_order
        out = Attention.forward_cuda(ctx, *_heads(qkv, num_heads, new_order), mask)
        return out.reshape(*qkv.shape[:-1], qkv.shape[-1] // 3)

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        *images, channels = dout.shape
        dqkv = empty((*images, 3 * channels), dout.dtype)

        def sums(tiles: int) -> tuple[Heads, Heads, Heads]:
            ctx.din_statistics[0] = empty_statistics(Kind.SUMS, images[0], tiles, 3 * channels)
            return _heads(ctx.din_statistics[0].sums, *ctx.attrs)

        _backward_cuda(ctx, dout, *_heads(dqkv, *ctx.attrs), sums)
        return dqkv, None


def _heads(qkv: Array, num_heads: int, new_order: bool) -> tuple[Heads, Heads, Heads]:
    """q, k and v (N, T, heads, D) in their array (N, ..., 3C) on CUDA."""
    n, *tokens, channels = qkv.shape
    t, dim, start, itemsize = math.prod(tokens), channels // (3 * num_heads), qkv.data.ptr, qkv.itemsize
    row, width = channels * itemsize, dim * itemsize  # bytes of a token, and of a head
    step, head = (num_heads * width, width) if new_order else (width, 3 * width)  # from q to k, and from head to head
    shape, strides = (n, t, num_heads, dim), (t * row, row, head, itemsize)
    q, k, v = (Heads(qkv, start + i * step, shape, strides) for i in range(3))
    return q, k, v


def _split(qkv: Array, num_heads: int, new_order: bool) -> tuple[Array, Array, Array]:
    """The same on the CPU, as views."""
    n, *tokens, channels = qkv.shape
    t = math.prod(tokens)
    if new_order:
        qkv = qkv.reshape(n, t, 3, num_heads, channels // (3 * num_heads))
        return qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    qkv = qkv.reshape(n, t, num_heads, 3, channels // (3 * num_heads))
    return qkv[:, :, :, 0], qkv[:, :, :, 1], qkv[:, :, :, 2]


def _by_head(x: np.ndarray) -> np.ndarray:
    """(N, T, heads, D) to (N, heads, T, D) in the dtype of the computation."""
    return upcast(x).transpose(0, 2, 1, 3)


def _backward_numpy(ctx, dout, dq, dk, dv):
    q, k, v, weights = ctx.saved
    q, k, v, dout = (_by_head(x) for x in (q, k, v, dout.reshape(q.shape)))

    def differentiate(images: slice) -> None:
        own, slopes = weights[images], dout[images]
        dscores = _product(slopes, v[images].swapaxes(-1, -2))
        dscores -= (own * dscores).sum(axis=-1, keepdims=True)
        dscores *= own
        dscores /= math.sqrt(q.shape[-1])
        dq[images] = _product(dscores, k[images]).transpose(0, 2, 1, 3)
        dk[images] = _product(dscores.swapaxes(-1, -2), q[images]).transpose(0, 2, 1, 3)
        dv[images] = _product(own.swapaxes(-1, -2), slopes).transpose(0, 2, 1, 3)

    parallel_map(differentiate, cut(len(q), weights[:1].nbytes))


@unflagged
def _product(a: np.ndarray, b: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    return np.matmul(a, b, out=out)


def _backward_cuda(ctx, dout, dq, dk, dv, sums=None):
    q, k, v, out, lse, *packed = ctx.saved
    mask = Mask(*packed) if packed else None
    table.backward(Backward(dq, dk, dv, dout.reshape(q.shape), q, k, v, out, lse, sums, mask))


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Any = None) -> Tensor:
    """softmax(q·kᵀ/√D)·v for each image and head.

    q (N, Tq, heads, D), k and v (N, Tk, heads, D), converted to their common dtype; D best a multiple of 8.
    Returns (N, Tq, heads·D). float32 on the GPU is exact to about 1e-6; see `allow_tf32`.
    mask: bool, broadcast to (N, heads, Tq, Tk), False where a query does not attend to a key: `np.tri(T, dtype=bool)`
    is causal. A query that attends to none gives 0. Kernels skip tiles of 64 queries and 64 keys of which none attend.
    Above 128 channels a head, and where a gradient is to be differentiated, the matrix of all pairs is in memory.
    Raises ValueError where shapes do not agree, TypeError for a mask that is not bool.
    Vaswani et al. 2017; Dao 2023, "FlashAttention-2".
    """
    if k.shape != v.shape or q.ndim != 4 or (q.shape[0], *q.shape[2:]) != (k.shape[0], *k.shape[2:]) or \
            0 in q.shape + k.shape:
        raise ValueError(
            f"attention takes q (N, Tq, heads, D), k and v (N, Tk, heads, D); got {q.shape}, {k.shape}, {v.shape}"
        )
    q, k, v = as_tensors(q, k, v, floating=True)
    mask = _mask(mask, q.device, (q.shape[0], q.shape[2], q.shape[1], k.shape[1]))
    if q.shape[3] > MOST_HEAD_CHANNELS or gradient_depth() > 1:
        return _by_operations(q, k, v, mask)
    return Attention.apply(q, k, v, mask)


def attention_qkv(qkv: Tensor, num_heads: int, new_order: bool = False, mask: Any = None) -> Tensor:
    """Self-attention of all tokens of each image of qkv (N, ..., 3C), read in place; returns (N, ..., C).

    The channels are [head][q, k, v][D], guided-diffusion's legacy order, or, with new_order (its
    `use_new_attention_order`), [q, k, v][head][D]. Otherwise as `attention`.
    """
    shape, num_heads = qkv.shape, operator.index(num_heads)  # kernels take Python's numbers
    if len(shape) < 3 or num_heads < 1 or shape[-1] % (3 * num_heads) != 0 or 0 in shape:
        raise ValueError(f"attention_qkv takes (N, ..., 3C) with C a multiple of {num_heads} heads; got {shape}")
    n, *tokens, channels = shape
    t, dim = math.prod(tokens), channels // (3 * num_heads)
    if dim > MOST_HEAD_CHANNELS or gradient_depth() > 1:
        axis = 2 if new_order else 3
        parts = split(reshape(qkv, (n, t, 3, num_heads, dim) if new_order else (n, t, num_heads, 3, dim)), 3, axis)
        q, k, v = (reshape(part, (n, t, num_heads, dim)) for part in parts)
        return reshape(attention(q, k, v, mask), (n, *tokens, channels // 3))
    mask = _mask(mask, qkv.device, (n, num_heads, t, t))
    return AttentionQKV.apply(qkv, mask, num_heads=num_heads, new_order=new_order)


def _mask(mask: Any, device: str, pairs: tuple[int, int, int, int]) -> Tensor | None:
    """The mask as a tensor. pairs: what it broadcasts to, (N, heads, Tq, Tk)."""
    if mask is None:
        return None
    mask = mask if hasattr(mask, "dtype") else np.asarray(mask)
    if mask.dtype != bool:  # of NumPy's float64 too, which a GPU does not take
        raise TypeError(f"attention: the mask is bool, True where a query sees a key, not {mask.dtype}")
    mask = mask if isinstance(mask, Tensor) else Tensor(mask, device=device)
    if mask.ndim > 4 or any(have not in (1, want) for have, want in zip(mask.shape[::-1], pairs[::-1], strict=False)):
        raise ValueError(f"attention: the mask of shape {mask.shape} does not broadcast to (N, heads, Tq, Tk) {pairs}")
    return mask


def _by_operations(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """`attention` by separate operations. Scores and their softmax are float32 for a 16-bit q."""
    queries, keys, values = (transpose(as_wide(x)[0], (0, 2, 1, 3)) for x in (q, k, v))
    scores = matmul(queries, transpose(keys, (0, 1, 3, 2))) * (1 / math.sqrt(q.shape[3]))
    # -1e30 and not -inf: of a query that attends to no key, the softmax would be NaN
    weights = softmax(scores) if mask is None else where(mask, softmax(where(mask, scores, -1e30)), 0.0)
    out = matmul(weights, values)
    return astype(reshape(transpose(out, (0, 2, 1, 3)), (*q.shape[:2], -1)), q.dtype)
