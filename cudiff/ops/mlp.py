"""The transformer's two linear layers with an activation between them, as one operation."""

from __future__ import annotations

import math
from collections.abc import Callable

from cudiff.backend import float32
from cudiff.cuda.accumulate import gradient_target
from cudiff.cuda.kernels.convolution.problem import DGRAD, FPROP, WGRAD, Operands
from cudiff.cuda.kernels.gated import gate_gradients
from cudiff.cuda.kernels.gemm.matmul import rows_of
from cudiff.cuda.kernels.gemm.product import Epilogue, as_float32
from cudiff.cuda.kernels.gemm.table import linear as linear_cuda
from cudiff.cuda.launch import empty
from cudiff.function import Function
from cudiff.ops.cast import require_floats
from cudiff.ops.elementwise import silu
from cudiff.ops.gelu import gelu
from cudiff.ops.matmul import check_additions, gradients_cuda, linear
from cudiff.ops.reduce import sum_rows_cuda
from cudiff.tensor import Tensor

__all__ = ["mlp"]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": gelu, "gelu_tanh": lambda x: gelu(x, approximate="tanh"), "silu": silu,
}


class Mlp(Function):
    """See `mlp`. On CUDA the first layer's product applies the activation and leaves its slope; the product that makes
    the gradient of its result multiplies that by the slope."""

    @staticmethod
    def compose(x, weight, bias, weight2, bias2, residual, gate, activation):
        return linear(ACTIVATIONS[activation](linear(x, weight, bias)), weight2, bias2, residual, gate)

    @staticmethod
    def forward_cuda(ctx, x, weight, bias, weight2, bias2, residual, gate, activation):
        h = empty((*x.shape[:-1], len(weight)), x.dtype)
        slope = empty(h.shape, h.dtype) if any(ctx.needs[:3]) else None
        out = empty((*x.shape[:-1], len(weight2)), x.dtype)
        first = Epilogue(as_float32(bias), activation=activation, aux=None if slope is None else rows_of(slope))
        y = empty(out.shape, out.dtype) if gate is not None and any(ctx.needs) else None
        second = Epilogue(as_float32(bias2), addend=None if residual is None else rows_of(residual),
                          gate=as_float32(gate), rows_per_image=math.prod(x.shape[1:-1]),
                          aux=None if y is None else rows_of(y))
        linear_cuda(FPROP, Operands(x, weight, rows_of(h), first))
        linear_cuda(FPROP, Operands(h, weight2, rows_of(out), second))
        ctx.save(x, weight, weight2, slope, h, second.gate, y)
        return out

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        x, weight, weight2, slope, h, gate, y = ctx.saved
        grads, dresidual, sums = [None] * 7, dout, ctx.dout_sums
        if gate is not None:
            dout, grads[6], sums = gate_gradients(dout, y, gate, into[6])
        if needs[3]:
            grads[3], add = gradient_target(into[3], weight2.shape, float32)
            linear_cuda(WGRAD, Operands(h, grads[3], dout, add=add))
        if needs[4]:
            grads[4] = sum_rows_cuda(dout, into[4], sums)
        if needs[5]:
            grads[5] = dresidual
        if any(needs[:3]):
            dz = empty(slope.shape, slope.dtype)
            statistics = linear_cuda(DGRAD, Operands(dout, weight2, dz, Epilogue(factor=slope)), sums=needs[2])
            sums = None if statistics is None else statistics.sums
            grads[:3] = gradients_cuda(x, weight, dz, sums, needs, into)
        return tuple(grads)


def mlp(x: Tensor, weight: Tensor, bias: Tensor | None, weight2: Tensor, bias2: Tensor | None,
        residual: Tensor | None = None, activation: str = "gelu", gate: Tensor | None = None) -> Tensor:
    """linear(f(linear(x, weight, bias)), weight2, bias2, residual, gate) → (..., out), in x's dtype.

    x (..., in), weight (hidden, in), bias (hidden,), weight2 (out, hidden), bias2 (out,), residual (..., out) and gate
    (N, out), as in `linear`. activation: f is "gelu", "gelu_tanh" or "silu". Raises ValueError for another and where
    the sizes do not agree.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"mlp: the activation is one of {', '.join(ACTIVATIONS)}, not {activation!r}")
    for name, matrix, vector in (("weight", weight, bias), ("weight2", weight2, bias2)):
        if matrix.ndim != 2 or (vector is not None and vector.shape != matrix.shape[:1]):
            raise ValueError(f"mlp: {name} of shape {matrix.shape} is not (out, in) with a bias (out,)")
    if x.ndim == 0 or x.shape[-1] != weight.shape[1] or len(weight) != weight2.shape[1] or \
            0 in weight.shape + weight2.shape:
        raise ValueError(f"mlp: x {x.shape}, weight {weight.shape} and weight2 {weight2.shape} do not fit each other")
    check_additions("mlp", x, len(weight2), residual, gate)
    require_floats("mlp", x, weight, bias, weight2, bias2)
    return Mlp.apply(x, weight, bias, weight2, bias2, residual, gate, activation=activation)
