"""Softmax, its logarithm, and the cross-entropy of integer labels; in float32, with the maximum subtracted first."""

from __future__ import annotations

from typing import Any

import numpy as np

from cudiff.backend import Array, compute_dtype, float32
from cudiff.cuda.accumulate import gradient_target
from cudiff.cuda.device import multiprocessors
from cudiff.cuda.launch import blocks, empty, launch
from cudiff.function import Function
from cudiff.ops.arithmetic import where
from cudiff.ops.cast import as_floating, as_index, as_wide, astype, downcast, is_number, upcast
from cudiff.ops.compare import equal, not_equal
from cudiff.ops.order import OneHot
from cudiff.ops.reduce import normalize_axis, power_of_two, reduced, span, sum
from cudiff.ops.shape import expand_dims
from cudiff.tensor import Tensor

__all__ = ["cross_entropy", "log_softmax", "nll_loss", "softmax"]


def log_softmax_numpy(x: np.ndarray, axis: int = -1) -> np.ndarray:
    """x - log(sum(exp(x))) over `axis`."""
    out = x - reduced(np.maximum, x, axis)
    out -= np.log(reduced(np.add, np.exp(out), axis))
    return out


class Softmax(Function):
    """Softmax over `axis`, or its logarithm."""

    @staticmethod
    def forward_numpy(ctx, x, axis, log):
        log_p = log_softmax_numpy(upcast(x), axis)
        p = np.exp(log_p)
        ctx.axis, ctx.log = axis, log
        ctx.save(p)
        return downcast(log_p if log else p, x.dtype)

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        (p,), wide = ctx.saved, upcast(dout)
        total = reduced(np.add, wide if ctx.log else p * wide, ctx.axis)
        return (downcast(wide - p * total if ctx.log else p * (wide - total), dout.dtype),)

    @staticmethod
    def forward_cuda(ctx, x, axis, log):
        ctx.spans, ctx.log = span(x.shape, (axis,)), log
        out, stats = empty(x.shape, x.dtype), empty((x.size // x.shape[axis], 2), float32)
        launch_over_axis("softmax", ctx.spans, x, (out, stats, x), log)
        ctx.save(x, stats)
        return out

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        x, stats = ctx.saved
        dx, add = gradient_target(into[0], x.shape, x.dtype)
        launch_over_axis("softmax_backward", ctx.spans, x, (dx, add, dout, x, stats), ctx.log)
        return (dx,)


class CrossEntropy(Function):
    """See `cross_entropy`."""

    @staticmethod
    def forward_numpy(ctx, logits, labels):
        if labels.min() < 0 or labels.max() >= logits.shape[1]:
            raise ValueError(f"cross_entropy: a label lies outside 0 to {logits.shape[1] - 1}")
        log_p = log_softmax_numpy(upcast(logits))
        ctx.dtype = logits.dtype
        ctx.save(log_p, labels)
        return -log_p[np.arange(len(labels)), labels].mean()

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        log_p, labels = ctx.saved
        dlogits = np.exp(log_p)
        dlogits[np.arange(len(labels)), labels] -= 1
        dlogits *= dout / compute_dtype(ctx.dtype).type(len(labels))
        return downcast(dlogits, ctx.dtype), None

    @staticmethod
    def forward_cuda(ctx, logits, labels):
        rows, size = logits.shape
        losses, stats, loss = empty(rows, float32), empty((rows, 2), float32), empty((), float32)
        grid, block, shares = softmax_grid(rows, size, 1, logits.itemsize)
        args = (losses, stats, logits, labels, rows, size, *shares)
        launch("softmax", "cross_entropy", grid, block, args, T=logits.dtype)
        launch("softmax", "mean", 1, 256, (loss, losses, rows), T=logits.dtype)
        ctx.save(logits, labels, stats)
        return loss

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        logits, labels, stats = ctx.saved
        rows, size = logits.shape
        dlogits, add = gradient_target(into[0], logits.shape, logits.dtype)
        grid, block, shares = softmax_grid(rows, size, 1, logits.itemsize)
        args = (dlogits, add, dout, logits, stats, labels, rows, size, *shares)
        launch("softmax", "cross_entropy_backward", grid, block, args, T=logits.dtype)
        return dlogits, None


def softmax_grid(outer: int, size: int, inner: int, itemsize: int) -> tuple[int, tuple[int, int], tuple[int, int]]:
    """The blocks, a block's threads (columns, rows at once * lanes), and of a block the lanes of a row and the rows.

    A block of short rows has as many as fit its shared memory, if there are blocks enough for the GPU. A lane has up to
    8 elements of a row, of a long one up to 32, and more where a block has too few threads. Where they are not
    adjacent, adjacent threads have adjacent rows.
    """
    columns = min(32, power_of_two(inner))
    few, many = (power_of_two(blocks(size, each)) for each in (8, 32))
    staged = 16384 // itemsize
    short = inner == 1 and size <= staged // 8
    lanes = min(few, 32) if short else min(max(min(few, 256), many), 512 // columns)
    rows = at_once = max(1, 256 // (columns * lanes))
    most = staged // size // at_once * at_once
    if short and blocks(outer, most) >= 4 * multiprocessors():
        rows = most
    return blocks(outer, rows) * blocks(inner, columns), (columns, at_once * lanes), (lanes, rows)


def launch_over_axis(name: str, spans: tuple[int, int, int], x: Array, args: tuple, *last: bool) -> None:
    """Launch a kernel of softmax.cu. spans: x's sizes as `span` gives them, which the kernel gets between `args` and
    `last`."""
    outer, size, inner = spans
    grid, block, shares = softmax_grid(outer, size, inner, x.itemsize)
    launch("softmax", name, grid, block, (*args, np.int64(outer), size, np.int64(inner), *shares, *last), T=x.dtype)


def softmax(x: Any, axis: int = -1) -> Tensor:
    """exp(x) / sum(exp(x)) over `axis`, in x's shape and dtype, float32 for integers."""
    return _over_axis(x, axis, log=False)


def log_softmax(x: Any, axis: int = -1) -> Tensor:
    """x - log(sum(exp(x))) over `axis`, in x's shape and dtype, float32 for integers."""
    return _over_axis(x, axis, log=True)


def _over_axis(x: Any, axis: int, log: bool) -> Tensor:
    x = as_floating(x)
    axis = normalize_axis(axis, x.ndim)
    if not x.size:
        return x
    return Softmax.apply(x, axis=axis, log=log)


def cross_entropy(logits: Any, labels: Any, label_smoothing: float = 0.0, ignore_index: int | None = None) -> Tensor:
    """Mean over the batch of -log softmax(logits)[label]: a float32 scalar (float64 for float64 logits).

    logits (N, K), labels integers (N,) in 0 to K - 1. label_smoothing: this fraction of a label's weight is divided
    evenly among all K (Szegedy et al. 2016). Rows of the label `ignore_index` are left out of the mean, which is NaN if
    there are no others. A label out of range raises ValueError on the CPU; a GPU does not check it, and the loss is
    NaN. Raises ValueError where shapes do not agree and for a smoothing outside of 0 to 1, TypeError for labels
    that are no integers.
    """
    logits, labels = _checked("cross_entropy", logits, labels)
    if not is_number(label_smoothing) or not 0 <= label_smoothing <= 1:  # PyTorch's third argument is weights
        raise ValueError(f"cross_entropy: label_smoothing is a share from 0 to 1, not {label_smoothing}")
    if label_smoothing == 0 and ignore_index is None:
        return CrossEntropy.apply(logits, labels)
    (logits,) = as_wide(logits)
    return _of_targets(log_softmax(logits), labels, label_smoothing, ignore_index)


def nll_loss(log_probs: Any, labels: Any, ignore_index: int | None = None) -> Tensor:
    """Mean over the batch of -log_probs[label], for a result of `log_softmax`: a float32 scalar (float64 for float64).

    log_probs (N, K); labels and `ignore_index` as in `cross_entropy`, which is this of log_softmax(logits). Raises as
    it does.
    """
    log_probs, labels = _checked("nll_loss", log_probs, labels)
    (log_probs,) = as_wide(log_probs)
    return _of_targets(log_probs, labels, 0.0, ignore_index)


def _checked(name: str, rows: Any, labels: Any) -> tuple[Tensor, Tensor]:
    """Rows (N, K) of floats, and labels (N,) beside them."""
    rows = as_floating(rows)
    labels = as_index(name, labels, rows.device)
    if rows.ndim != 2 or labels.shape != rows.shape[:1]:
        raise ValueError(f"{name}: rows {rows.shape} must be (N, K) and labels {labels.shape} (N,)")
    if 0 in rows.shape:
        raise ValueError(f"{name}: mean over no elements of shape {rows.shape}")
    return rows, labels


def _of_targets(log_p: Tensor, labels: Tensor, smoothing: float, ignored: int | None) -> Tensor:
    """The cross entropy of smooth targets, of the rows that are not ignored."""
    count = log_p.shape[1]
    hot = astype(OneHot.apply(labels, count=count, ignored=ignored), log_p.dtype)
    kept = astype(equal(labels, labels) if ignored is None else not_equal(labels, ignored), log_p.dtype)
    targets = hot * (1 - smoothing) + expand_dims(kept, 1) * (smoothing / count)
    rows = sum(kept)
    valid = equal(sum(hot), rows) & (rows > 0)  # on a GPU the row of a label out of range is 0
    terms = where(not_equal(targets, 0), log_p, 0.0) * targets  # a target of 0 gives 0, also times log(0)
    return -sum(terms) / where(valid, rows, np.nan)
