"""Mean squared error, with a weight for each sample."""

from __future__ import annotations

import numpy as np

from cudiff.backend import compute_dtype
from cudiff.ops.cast import astype, result_dtype
from cudiff.ops.elementwise import narrow, widen
from cudiff.tensor import Context, Function, Tensor


class MSE(Function):
    """See `mse`. The squared errors of each sample are kept for the weight's gradient."""

    @staticmethod
    def forward_numpy(ctx: Context, pred, target, weight):
        difference = (widen(pred) - widen(target)).reshape(len(pred), -1)
        errors = np.einsum("nk,nk->n", difference, difference) / compute_dtype(pred.dtype).type(difference.size)
        ctx.shape, ctx.dtype = pred.shape, pred.dtype
        ctx.save(difference, weight, errors)
        return errors.sum() if weight is None else np.dot(errors, weight)

    @staticmethod
    def backward_numpy(ctx: Context, dout, needs, into):
        difference, weight, errors = ctx.saved
        factor = 2 * dout / difference.dtype.type(difference.size)
        difference *= factor if weight is None else (factor * weight)[:, None]
        dpred = narrow(difference, ctx.dtype).reshape(ctx.shape)
        return dpred, -dpred if needs[1] else None, dout * errors if needs[2] else None


def mse(pred: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
    """Mean over all elements of weight·(pred - target)²: a float32 scalar (float64 for float64 inputs).

    pred and target (N, ...) of one shape, weight float32 (N,) or None for ones. Sums run in float32 and in a fixed
    order. Raises ValueError where shapes do not agree.
    """
    if pred.shape != target.shape or pred.ndim == 0:
        raise ValueError(f"mse: pred of shape {pred.shape} and target of shape {target.shape} must be equal, (N, ...)")
    if weight is not None and weight.shape != pred.shape[:1]:
        raise ValueError(f"mse: the weight has shape {weight.shape}, not {pred.shape[:1]}")
    dtype = result_dtype(pred, target)
    return MSE.apply(astype(pred, dtype), astype(target, dtype), weight)
