"""Derivatives of operations stated in operations, by which a gradient can be differentiated again.

`DERIVATIVES[Function]` takes the gradient of the output and the inputs of a call, tensors all, with the call's
attributes. It returns the gradient of each input, or None. Broadcasting is undone afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from cudiff.function import Function
from cudiff.ops.arithmetic import (
    Add,
    Arctan2,
    Divide,
    FloorDivide,
    Hypot,
    Maximum,
    Minimum,
    Multiply,
    Power,
    Remainder,
    Subtract,
    Where,
    floor_divide,
    hypot,
    maximum,
    where,
)
from cudiff.ops.cast import Cast, astype
from cudiff.ops.clip import Clip
from cudiff.ops.create import zeros, zeros_like
from cudiff.ops.elementwise import (
    Abs,
    Cbrt,
    Ceil,
    Exp,
    Exp2,
    Expm1,
    Floor,
    Log,
    Log1p,
    Log2,
    Log10,
    Negative,
    Relu,
    Round,
    Sigmoid,
    Sign,
    Silu,
    Softplus,
    Sqrt,
    Square,
    cbrt,
    exp,
    exp2,
    sigmoid,
    sqrt,
    square,
)
from cudiff.ops.embedding import Embedding
from cudiff.ops.gelu import Gelu_Tanh
from cudiff.ops.index import Pick, Slice, Take
from cudiff.ops.layer_norm import LayerNorm
from cudiff.ops.matmul import GatedLinear, Linear, MatMul, linear, matmul
from cudiff.ops.mse import MSE
from cudiff.ops.order import CumSum, cumsum, one_hot
from cudiff.ops.place import Place, PlaceRows, place, place_rows
from cudiff.ops.rearrange import Roll, flip, roll
from cudiff.ops.reduce import Extreme, Sum, Variance, left, mean, spread_axes, sum
from cudiff.ops.shape import (
    BroadcastTo,
    Concatenate,
    Reshape,
    Split,
    Transpose,
    broadcast_to,
    concatenate,
    reshape,
    split,
    transpose,
)
from cudiff.ops.softmax import CrossEntropy, Softmax, softmax
from cudiff.ops.trigonometry import (
    Arccos,
    Arccosh,
    Arcsin,
    Arcsinh,
    Arctan,
    Arctanh,
    Cos,
    Cosh,
    Sin,
    Sinh,
    Tan,
    Tanh,
    cos,
    cosh,
    sin,
    sinh,
    tan,
    tanh,
)
from cudiff.tensor import Tensor

Derivative = Callable[..., tuple[Tensor | None, ...]]


def _of_two(derivative: Callable) -> Derivative:
    """Of an operation of two operands, one of which may be the number `scalar`."""
    def of_operands(dout: Tensor, a: Tensor | None, b: Tensor | None, scalar: Any = None) -> tuple[Tensor | None, ...]:
        return derivative(dout, scalar if a is None else a, scalar if b is None else b)

    return of_operands


def _of_power(dout: Tensor, a: Any, b: Any) -> tuple[Any, ...]:
    if not isinstance(b, Tensor):
        return dout * b * a ** (b - 1 if b else 1), None  # of x**0 it is 0 at 0 too
    of_base = dout * b * a ** where((b == 0) & (a == 0), 1.0, b - 1)
    return of_base, dout * a**b * _log(a)


def _log(a: Any) -> Any:
    """Of a tensor or a number; as `Power` has it 0 at 0, and NaN below."""
    if isinstance(a, Tensor):
        return np.log(where(a == 0, 1.0, a))
    return math.log(a) if a > 0 else math.nan if a else 0.0


def _of_arctan2(dout: Tensor, a: Any, b: Any) -> tuple[Tensor, Tensor]:
    length = hypot(a, b)
    length = where(length == 0, 1.0, length)  # both slopes are 0 there
    return dout * (b / length / length), -dout * (a / length / length)


def _of_clip(dout: Tensor, x: Tensor, low: float | None, high: float | None) -> tuple[Tensor]:
    inside = (x >= (-np.inf if low is None else low)) & (x <= (np.inf if high is None else high))
    return (where(inside, dout, 0.0),)


def _of_larger(d: Tensor, a: Any, b: Any) -> Tensor:
    """Where a is larger d, half of it for equals."""
    return where(a > b, d, where(a == b, d * 0.5, 0.0))


def _of_silu(dout: Tensor, x: Tensor) -> tuple[Tensor]:
    s = sigmoid(x)
    return (dout * (s + x * s * (1 - s)),)


def _of_gelu_tanh(dout: Tensor, x: Tensor) -> tuple[Tensor]:
    factor = math.sqrt(8 / math.pi)
    gate = sigmoid((x + x * x * x * 0.044715) * factor)
    return (dout * gate * (1 + x * (1 - gate) * (1 + x * x * (3 * 0.044715)) * factor),)


def _of_sum(dout: Tensor, x: Tensor, axes: Any, keepdims: bool, scale: float = 1.0) -> tuple[Tensor]:
    return (broadcast_to(_with_axes(dout, x, axes), x.shape) * scale,)


def _of_variance(dout: Tensor, x: Tensor, axes: Any, keepdims: bool, ddof: int, wide: bool) -> tuple[Tensor]:
    count = np.prod([x.shape[i] for i in axes])
    return (_with_axes(dout, x, axes) * (x - mean(x, axes, keepdims=True)) * float(2 / (count - ddof)),)


def _of_extreme(dout: Tensor, x: Tensor, axes: Any, keepdims: bool, sign: int) -> tuple[Tensor]:
    share = x == Extreme.apply(x.detach(), axes=axes, keepdims=True, sign=sign)
    ties = maximum(sum(astype(share, x.dtype), axes, keepdims=True), 1)  # of NaN there are none
    return (where(share, _with_axes(dout, x, axes) / ties, 0.0),)


def _of_mse(dout: Tensor, pred: Tensor, target: Tensor, weight: Tensor | None) -> tuple[Tensor | None, ...]:
    difference, each = pred - target, dout * (1 / pred.size)
    if weight is None:
        dpred, dweight = difference * (each * 2), None
    else:
        dpred = difference * (each * 2) * reshape(weight, (len(weight), *[1] * (pred.ndim - 1)))
        dweight = each * sum(square(difference), tuple(range(1, pred.ndim)))
    dpred = astype(dpred, pred.dtype)
    return dpred, -dpred, dweight


def _of_cross_entropy(dout: Tensor, logits: Tensor, labels: Tensor) -> tuple[Tensor, None]:
    error = softmax(logits) - one_hot(labels, logits.shape[1], logits.dtype)
    return astype(error * (dout * (1 / len(logits))), logits.dtype), None


def _of_layer_norm(dout: Tensor, x: Tensor, weight: Tensor, bias: Tensor, eps: float,
                   plus_one: bool) -> tuple[Tensor, ...]:
    centred = x - mean(x, -1, keepdims=True)
    rstd = 1 / sqrt(mean(square(centred), -1, keepdims=True) + eps)
    normal, shared = centred * rstd, tuple(range(weight.ndim - 1, x.ndim - 1))
    weight = weight + 1 if plus_one else weight
    slope = dout * (weight if weight.ndim == 1 else reshape(weight, (len(weight), *[1] * len(shared), x.shape[-1])))
    rest = mean(slope, -1, keepdims=True) + normal * mean(slope * normal, -1, keepdims=True)
    return astype(rstd * (slope - rest), x.dtype), sum(dout * normal, shared), sum(dout, shared)


def _of_embedding(dout: Tensor, indices: Tensor, weight: Tensor) -> tuple[None, Tensor]:
    rows, flat = reshape(dout, (-1, dout.shape[-1])), reshape(indices, (-1,))
    rows = where(reshape(flat >= 0, (-1, 1)), rows, 0.0)  # of -1 there is none
    return None, place_rows(rows, weight.shape, where(flat < 0, 0, flat))


def _with_axes(dout: Tensor, x: Tensor, axes: Any) -> Tensor:
    """The gradient of a reduction, with the axes that it has reduced as 1."""
    return reshape(dout, left(x.shape, axes, True))


def _of_softmax(dout: Tensor, x: Tensor, axis: int, log: bool) -> tuple[Tensor]:
    p = softmax(x, axis)
    total = sum(dout if log else dout * p, axis, keepdims=True)
    return (dout - p * total if log else p * (dout - total),)


def _of_linear(dout: Tensor, x: Tensor, weight: Tensor, bias: Any, residual: Any) -> tuple[Tensor | None, ...]:
    rows = reshape(dout, (-1, dout.shape[-1]))
    return matmul(dout, weight), matmul(_swapped(rows), reshape(x, (-1, x.shape[-1]))), sum(rows, 0), dout


def _of_gated_linear(dout: Tensor, x: Tensor, weight: Tensor, bias: Any, residual: Any,
                     gate: Tensor) -> tuple[Tensor | None, ...]:
    between = tuple(range(1, dout.ndim - 1))
    dy = dout * reshape(gate, (len(gate), *[1] * len(between), gate.shape[1]))
    return *_of_linear(dy, x, weight, bias, None)[:3], dout, sum(dout * linear(x, weight, bias), between)


def _of_concatenate(dout: Tensor, *tensors: Tensor, axis: int) -> tuple[Tensor, ...]:
    return split(dout, [int(end) for end in np.cumsum([x.shape[axis] for x in tensors])[:-1]], axis)


def _of_split(*given: Any, sizes: Any, axis: int) -> tuple[Tensor]:
    *douts, x = given
    shapes = [(*x.shape[:axis], size, *x.shape[axis + 1 :]) for size in sizes]
    parts = [zeros(s, x.dtype, x.device) if d is None else d for d, s in zip(douts, shapes, strict=True)]
    return (concatenate(parts, axis),)


def _swapped(x: Tensor) -> Tensor:
    """x with its last two axes in the other order."""
    return transpose(x, (*range(x.ndim - 2), x.ndim - 1, x.ndim - 2))


DERIVATIVES: dict[type[Function], Derivative] = {
    Negative: lambda d, x: (-d,),
    Exp: lambda d, x: (d * exp(x),),
    Log: lambda d, x: (d / x,),
    Sqrt: lambda d, x: (d * 0.5 / sqrt(x),),
    Cbrt: lambda d, x: (d / (square(cbrt(x)) * 3),),
    Sin: lambda d, x: (d * cos(x),),
    Cos: lambda d, x: (-d * sin(x),),
    Tan: lambda d, x: (d * (1 + square(tan(x))),),
    Arcsin: lambda d, x: (d / sqrt((1 - x) * (1 + x)),),
    Arccos: lambda d, x: (-d / sqrt((1 - x) * (1 + x)),),
    Arctan: lambda d, x: (d / (1 + square(x)),),
    Sinh: lambda d, x: (d * cosh(x),),
    Cosh: lambda d, x: (d * sinh(x),),
    Arcsinh: lambda d, x: (d / sqrt(1 + square(x)),),
    Arccosh: lambda d, x: (d / sqrt((x - 1) * (x + 1)),),
    Arctanh: lambda d, x: (d / ((1 - x) * (1 + x)),),
    Exp2: lambda d, x: (d * exp2(x) * float(np.log(2)),),
    Log2: lambda d, x: (d / (x * float(np.log(2))),),
    Log10: lambda d, x: (d / (x * float(np.log(10))),),
    Log1p: lambda d, x: (d / (1 + x),),
    Expm1: lambda d, x: (d * exp(x),),
    **dict.fromkeys((Sign, Floor, Ceil, Round), lambda d, x: (zeros_like(d),)),
    Tanh: lambda d, x: (d * (1 - square(tanh(x))),),
    Square: lambda d, x: (d * x * 2,),
    Sigmoid: lambda d, x: (d * sigmoid(x) * (1 - sigmoid(x)),),
    Silu: _of_silu,
    Gelu_Tanh: _of_gelu_tanh,
    Softplus: lambda d, x: (d * sigmoid(x),),
    Abs: lambda d, x: (where(x > 0, d, where(x < 0, -d, 0.0)),),
    Relu: lambda d, x: (where(x > 0, d, 0.0),),
    Clip: _of_clip,
    Add: _of_two(lambda d, a, b: (d, d)),
    Subtract: _of_two(lambda d, a, b: (d, -d)),
    Multiply: _of_two(lambda d, a, b: (d * b, d * a)),
    Divide: _of_two(lambda d, a, b: (d / b, -d * (a / b) / b)),
    Power: _of_two(_of_power),
    Arctan2: _of_two(_of_arctan2),
    Hypot: _of_two(lambda d, a, b: (d * a / hypot(a, b), d * b / hypot(a, b))),
    FloorDivide: _of_two(lambda d, a, b: (zeros_like(d), zeros_like(d))),
    Remainder: _of_two(lambda d, a, b: (d, -d * floor_divide(a, b))),
    Maximum: _of_two(lambda d, a, b: (_of_larger(d, a, b), _of_larger(d, b, a))),
    Minimum: _of_two(lambda d, a, b: (_of_larger(d, b, a), _of_larger(d, a, b))),
    Where: lambda d, mask, a, b, scalars: (None, where(mask, d, 0.0), where(mask, 0.0, d)),
    Cast: lambda d, x, dtype: (astype(d, x.dtype),),
    Sum: _of_sum,
    Variance: _of_variance,
    Extreme: _of_extreme,
    MSE: _of_mse,
    CrossEntropy: _of_cross_entropy,
    LayerNorm: _of_layer_norm,
    Embedding: _of_embedding,
    Softmax: _of_softmax,
    MatMul: lambda d, a, b: (matmul(d, _swapped(b)), matmul(_swapped(a), d)),
    Linear: _of_linear,
    GatedLinear: _of_gated_linear,
    Roll: lambda d, x, shift, axis: (roll(d, -shift, axis),),
    CumSum: lambda d, x, axis: (flip(cumsum(flip(d, axis), axis), axis),),
    Reshape: lambda d, x, shape: (reshape(d, x.shape),),
    Transpose: lambda d, x, axes: (transpose(d, [axes.index(i) for i in range(x.ndim)]),),
    BroadcastTo: lambda d, x, shape: (d,),
    Concatenate: _of_concatenate,
    Split: _of_split,
    Slice: lambda d, x, index: (place(d, x.shape, index),),
    Place: lambda d, x, shape, index, value: (d[index],),
    Pick: lambda d, x, index, inverse: (Pick.apply(d, inverse, index), None, None),
    Take: lambda d, x, index, axis=0, along=False: (place_rows(d, x.shape, index, axis, along), None),
    PlaceRows: lambda d, x, index, shape, axis, along: (Take.apply(d, index, axis=axis, along=along), None),
}


def like(gradient: Tensor, x: Tensor) -> Tensor:
    """`gradient` summed over the axes along which x was broadcast, in x's dtype."""
    axes = spread_axes(x.shape, gradient.shape)
    return astype(reshape(sum(gradient, axes), x.shape) if axes else gradient, x.dtype)
