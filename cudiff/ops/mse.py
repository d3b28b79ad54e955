"""Mean squared error, with a weight for each sample."""

from __future__ import annotations

from typing import Any

import numpy as np

from cudiff.backend import Array, compute_dtype, float32
from cudiff.cuda.accumulate import gradient_target
from cudiff.cuda.launch import aligned, blocks, empty, launch
from cudiff.function import Function
from cudiff.ops.cast import as_tensor, as_tensors, astype, downcast, upcast
from cudiff.tensor import Tensor

__all__ = ["mse"]


class MSE(Function):
    """See `mse`. The squared errors of each sample are kept for the weight's gradient."""

    @staticmethod
    def forward_numpy(ctx, pred, target, weight):
        difference = (upcast(pred) - upcast(target)).reshape(len(pred), -1)
        errors = np.einsum("nk,nk->n", difference, difference) / compute_dtype(pred.dtype).type(difference.size)
        ctx.shape, ctx.dtype = pred.shape, pred.dtype
        ctx.save(difference, weight, errors)
        return errors.sum() if weight is None else np.dot(errors, weight)

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        difference, weight, errors = ctx.saved
        factor = 2 * dout / difference.dtype.type(difference.size)
        difference *= factor if weight is None else (factor * weight)[:, None]
        dpred = downcast(difference, ctx.dtype).reshape(ctx.shape)
        return dpred, -dpred if needs[1] else None, dout * errors if needs[2] else None

    @staticmethod
    def forward_cuda(ctx, pred, target, weight):
        n, size = len(pred), pred.size // len(pred)
        if weight is None and size < 64:  # a block a sample would have little to do
            n, size = 1, pred.size
        chunk, tiles, constants = tiling(pred, target, size)
        partials, loss = empty((n, tiles), float32), empty((), float32)
        launch("mse", "squares", n * tiles, 256, (partials, pred, target, np.int64(size), chunk, tiles), **constants)
        launch("mse", "loss", 1, 1024, (loss, partials, weight, n, tiles, 1 / pred.size), **constants)
        ctx.tiling, ctx.constants = (np.int64(size), chunk, tiles, 1 / pred.size), constants
        ctx.save(pred, target, weight, partials)
        return loss

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        pred, target, weight, partials = ctx.saved
        dpred, dtarget, dweight = (
            gradient_target(there, like.shape, like.dtype) if need else (None, False)
            for need, there, like in zip(needs, into, (pred, target, weight), strict=True)
        )
        n, tiles = partials.shape
        if needs[0] or needs[1]:
            args = (*dpred, *dtarget, dout, pred, target, weight, *ctx.tiling)
            launch("mse", "gradients", n * tiles, 256, args, **ctx.constants)
        if needs[2]:
            args = (*dweight, dout, partials, n, tiles, ctx.tiling[-1])
            launch("mse", "weight_gradient", blocks(n, 128), 128, args, **ctx.constants)
        return dpred[0], dtarget[0], dweight[0]


def tiling(pred: Array, target: Array, size: int) -> tuple[int, int, dict[str, Any]]:
    """Elements in a tile of a sample of `size`, how many tiles it has, and the constants of the kernels in mse.cu."""
    chunk = 4096 * blocks(size, 4096 * 1024)
    return chunk, blocks(size, chunk), {"T": pred.dtype, "VEC": int(aligned(pred, size) and aligned(target))}


def mse(pred: Any, target: Any, weight: Any = None) -> Tensor:
    """Mean over all elements of weight·(pred - target)²: a float32 scalar (float64 for float64 inputs).

    pred and target (N, ...) of one shape, weight (N,), read in the result's dtype, or None for ones. Sums run in that
    dtype and in a fixed order. Raises ValueError where shapes do not agree.
    """
    pred, target = as_tensors(pred, target, floating=True)
    if pred.shape != target.shape or pred.ndim == 0:
        raise ValueError(f"mse: pred of shape {pred.shape} and target of shape {target.shape} must be equal, (N, ...)")
    if 0 in pred.shape:
        raise ValueError(f"mse: mean over no elements of shape {pred.shape}")
    if weight is not None:
        given = as_tensor(weight)
        weight = astype(given if given is weight else Tensor(given, device=pred.device), compute_dtype(pred.dtype))
        if weight.shape != pred.shape[:1]:
            raise ValueError(f"mse: the weight has shape {weight.shape}, not {pred.shape[:1]}")
    return MSE.apply(pred, target, weight)
