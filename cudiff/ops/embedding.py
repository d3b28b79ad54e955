"""Rows of a table, looked up by index."""

from __future__ import annotations

from typing import Any

import numpy as np

from cudiff.backend import compute_dtype
from cudiff.cuda.accumulate import gradient_target
from cudiff.cuda.kernels.shape import row_sums
from cudiff.cuda.launch import blocks, empty, launch
from cudiff.function import Function
from cudiff.ops.cast import as_index, downcast, require_float, upcast
from cudiff.tensor import Tensor

__all__ = ["embedding"]


class Embedding(Function):
    @staticmethod
    def forward_numpy(ctx, indices, weight):
        if indices.size and not -1 <= indices.min() <= indices.max() < len(weight):
            raise IndexError(f"an index lies outside [-1, {len(weight)}): {indices.min()} to {indices.max()}")
        ctx.save(indices)
        ctx.num = len(weight)
        out = weight[indices] if len(weight) else np.zeros((*indices.shape, weight.shape[1]), weight.dtype)
        out[indices == -1] = 0
        return out

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        (indices,) = ctx.saved
        dweight = np.zeros((ctx.num, dout.shape[-1]), compute_dtype(dout.dtype))
        np.add.at(dweight, indices[indices >= 0], upcast(dout[indices >= 0]))
        return None, downcast(dweight, dout.dtype)

    @staticmethod
    def forward_cuda(ctx, indices, weight):
        require_float("embedding", weight)
        ctx.save(indices)
        ctx.num, dim = weight.shape
        out = empty((*indices.shape, dim), weight.dtype)
        if out.size:
            launch(
                "embedding", "gather", blocks(out.size, 256), 256,
                (out, indices, weight, np.int64(out.size), ctx.num, dim), T=weight.dtype,
            )
        return out

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        (indices,) = ctx.saved
        dim = dout.shape[-1]
        dweight, accumulate = gradient_target(into[1], (ctx.num, dim), dout.dtype)
        if dweight.size:
            row_sums(dout, indices, dweight, accumulate, from_end=False)
        return None, dweight


def embedding(indices: Any, weight: Tensor) -> Tensor:
    """out[n] = weight[indices[n]]; index -1, the null class of classifier-free guidance, gives a row of zeros.

    indices integers of any shape, weight (num, dim); returns (*indices.shape, dim). Raises IndexError on the CPU for
    another index outside [0, num), on the GPU such a row is NaN; TypeError for an index that is no integer.
    """
    return Embedding.apply(as_index("embedding", indices, weight.device), weight)
