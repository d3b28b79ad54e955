"""Functions of one tensor, element by element. 16-bit types are computed in float32."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from cudiff.backend import Array, float64, is_float
from cudiff.cuda.accumulate import gradient_target
from cudiff.cuda.kernels.elementwise import grid
from cudiff.cuda.launch import aligned, blocks, empty, launch
from cudiff.cuda.sums import empty_statistics
from cudiff.function import Function
from cudiff.gradient import Slot
from cudiff.ops.cast import as_floating, as_tensor, as_wide, astype, downcast, masked, upcast
from cudiff.ops.integer import integer
from cudiff.statistics import ChannelStatistics, Kind
from cudiff.tensor import Tensor
from cudiff.threads import cut, parallel_map

__all__ = [
    "abs", "cbrt", "ceil", "exp", "exp2", "expm1", "floor", "log", "log1p", "log2", "log10", "negative", "relu",
    "round", "sigmoid", "sign", "silu", "softplus", "sqrt", "square",
]


BLOCK = 1 << 18
"""Elements of large arrays that a thread computes at once, so that what lies between stays in its cache. On two cores
the gradient of GELU by tanh of 4.8 million took 6 ms, by 2^14 13, by 2^20 8, and 23 on one thread without blocks."""


def _by_parts(function: Callable[..., np.ndarray], dtype: np.dtype, *arrays: np.ndarray) -> np.ndarray:
    """function(*arrays) of arrays of one shape, element by element, in `dtype`, on all cores. 16-bit ones are computed
    in float32."""
    shape, size = arrays[0].shape, arrays[0].size
    if size <= BLOCK:
        return downcast(function(*map(upcast, arrays)), dtype)
    flat, out = [np.ravel(array) for array in arrays], np.empty(size, dtype)

    def compute(part: slice) -> None:
        for start in range(part.start, part.stop, BLOCK):
            block = slice(start, min(start + BLOCK, part.stop))
            out[block] = function(*[upcast(array[block]) for array in flat])

    parallel_map(compute, cut(size, out.itemsize))
    return out.reshape(shape)


class Unary(Function):
    """out[i] = value(x[i]); dx = gradient(dout, saved), where saved is x, or out if `saves_out` (on CUDA, what the
    third argument of UNARY in elementwise.cu says).
    """

    saves_out: ClassVar[bool] = False
    value: ClassVar[Any]
    gradient: ClassVar[Any]

    @classmethod
    def forward_numpy(cls, ctx, x):
        out = _by_parts(cls.value, x.dtype, x)
        if ctx.needs[0]:
            ctx.save(out if cls.saves_out else x)
        return out

    @classmethod
    def backward_numpy(cls, ctx, dout, needs, into):
        return (_by_parts(cls.gradient, dout.dtype, dout, ctx.saved[0]),)

    @classmethod
    def forward_cuda(cls, ctx, x):
        out = empty(x.shape, x.dtype)
        launch("elementwise", f"{cls.__name__.lower()}_forward", grid(x), 256, (x, out, np.int64(x.size)), T=x.dtype)
        if ctx.needs[0]:
            ctx.save(out if cls.saves_out else x)
        return out

    @classmethod
    def backward_cuda(cls, ctx, dout, needs, into):
        return (cls.dx_cuda(dout, ctx.saved[0], into[0]),)

    @classmethod
    def dx_cuda(cls, dout: Array, saved: Array, into: Slot | None = None) -> Array:
        dx, accumulate = gradient_target(into, dout.shape, dout.dtype)
        args = (dout, saved, dx, accumulate, np.int64(dx.size))
        launch("elementwise", f"{cls.__name__.lower()}_backward", grid(dx), 256, args, T=dx.dtype)
        return dx


class Negative(Unary):
    value = staticmethod(np.negative)
    gradient = staticmethod(lambda dout, x: np.negative(dout))


class Exp(Unary):
    saves_out = True
    value = staticmethod(np.exp)
    gradient = staticmethod(lambda dout, out: dout * out)


class Log(Unary):
    value = staticmethod(np.log)
    gradient = staticmethod(lambda dout, x: dout / x)


class Exp2(Unary):
    saves_out = True
    value = staticmethod(np.exp2)
    gradient = staticmethod(lambda dout, out: dout * out * math.log(2))


class Log2(Unary):
    value = staticmethod(np.log2)
    gradient = staticmethod(lambda dout, x: dout / (x * math.log(2)))


class Log10(Unary):
    value = staticmethod(np.log10)
    gradient = staticmethod(lambda dout, x: dout / (x * math.log(10)))


class Sqrt(Unary):
    saves_out = True
    value = staticmethod(np.sqrt)
    gradient = staticmethod(lambda dout, out: 0.5 * dout / out)


class Cbrt(Unary):
    saves_out = True
    value = staticmethod(np.cbrt)
    gradient = staticmethod(lambda dout, out: dout / (3 * out * out))


class Abs(Unary):
    value = staticmethod(np.abs)
    gradient = staticmethod(lambda dout, x: masked(dout, x > 0) - masked(dout, x < 0))


class Square(Unary):
    value = staticmethod(lambda x: x * x)
    gradient = staticmethod(lambda dout, x: 2 * dout * x)


class Step(Unary):
    """A step function. Its gradient is 0, at the steps too, as in PyTorch."""

    gradient = staticmethod(lambda dout, x: np.zeros_like(dout))


class Sign(Step):
    value = staticmethod(np.sign)


class Floor(Step):
    value = staticmethod(np.floor)


class Ceil(Step):
    value = staticmethod(np.ceil)


class Round(Step):
    value = staticmethod(np.rint)


class Log1p(Unary):
    value = staticmethod(np.log1p)
    gradient = staticmethod(lambda dout, x: dout / (1 + x))


class Expm1(Unary):
    value = staticmethod(np.expm1)
    gradient = staticmethod(lambda dout, x: dout * np.exp(x))


class Relu(Unary):
    saves_out = True

    value = staticmethod(lambda x: np.maximum(x, 0))
    gradient = staticmethod(lambda dout, out: masked(dout, out > 0))

    @classmethod
    def backward_cuda(cls, ctx, dout, needs, into):
        if into[0] is not None:
            return super().backward_cuda(ctx, dout, needs, into)
        dx, ctx.din_statistics[0] = relu_backward_cuda(dout, ctx.saved[0])
        return (dx,)


def relu_backward_cuda(dout: Array, out: Array) -> tuple[Array, ChannelStatistics | None]:
    """dx = dout where out > 0, else 0, and for images its SUMS, with one tile for each image.

    Most ReLUs follow a convolution: the gradients of its bias and of its embedding are made of these sums.
    """
    if dout.ndim != 4 or dout.size == 0 or not (aligned(dout, dout.shape[3]) and aligned(out)):
        return Relu.dx_cuda(dout, out), None
    dx = empty(dout.shape, dout.dtype)
    n, height, width, channels = dout.shape
    packs, pixels = channels * dout.itemsize // 16, height * width
    statistics = empty_statistics(Kind.SUMS, n, 1, channels)
    across = 1  # packs of a block: many for small images, so that a thread adds more than one pixel
    while across < min(packs, max(4, 512 // pixels), 256):
        across *= 2
    launch(
        "elementwise", "relu_backward_sums", (n, blocks(packs, across)), 256,
        (dout, out, dx, statistics.sums, pixels, channels, 256 // across), T=dout.dtype,
    )
    return dx, statistics


def sigmoid_numpy(x, out=None):
    """1 / (1 + exp(-x)), in `out` or a new array. For very negative x exp overflows to infinity: the right 0."""
    out = np.asarray(np.negative(x, out=out))
    with np.errstate(over="ignore"):
        np.exp(out, out=out)
    out += 1
    return np.reciprocal(out, out=out)


class Sigmoid(Unary):
    """The gradient is computed from x, as in Tanh."""

    value = staticmethod(sigmoid_numpy)

    @staticmethod
    def gradient(dout, x):
        out = sigmoid_numpy(x)
        dx = np.asarray(1 - out)
        dx *= out
        dx *= dout
        return dx


class Softplus(Unary):
    value = staticmethod(lambda x: np.logaddexp(0, x))
    gradient = staticmethod(lambda dout, x: dout * sigmoid_numpy(x))


class Silu(Unary):
    """x * sigmoid(x), with slope sigmoid + out * (1 - sigmoid). NumPy saves sigmoid, as exp costs most; CUDA x."""

    @staticmethod
    def forward_numpy(ctx, x):
        wide = upcast(x)
        gate = sigmoid_numpy(wide)
        out = np.asarray(wide * gate)
        if ctx.needs[0]:
            ctx.save(gate, out)
        return downcast(out, x.dtype)

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        return (downcast(silu_backward_numpy(upcast(dout), *ctx.saved), dout.dtype),)


def silu_backward_numpy(dout: Array, gate: Array, out: Array) -> Array:
    """dx of out = x · gate, where gate is the sigmoid of x."""
    dx = np.asarray(1 - gate)
    dx *= out
    dx += gate
    dx *= dout
    return dx


def unary(function: type[Function], x: Any, of_integers: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Apply `function`. Integers are passed to `of_integers`, or without one converted to float32."""
    x = as_tensor(x)
    if of_integers and not is_float(x.dtype):
        return of_integers(x)
    return function.apply(as_floating(x))


def negative(x: Any) -> Tensor:
    """-x."""
    return unary(Negative, x, lambda x: integer("subtract", 0, x))


def abs(x: Any) -> Tensor:
    """|x|, with gradient 0 at 0."""
    return unary(Abs, x, lambda x: x if x.dtype == np.bool_ else integer("absolute", x))


def square(x: Any) -> Tensor:
    """x * x."""
    return unary(Square, x, lambda x: integer("multiply", x, x))


def sign(x: Any) -> Tensor:
    """-1, 0 or 1, as x is below, at or above 0; the gradient is 0."""
    return unary(Sign, x, lambda x: integer("sign", x))


def floor(x: Any) -> Tensor:
    """The largest whole number <= x; the gradient is 0."""
    return unary(Floor, x, lambda x: x)


def ceil(x: Any) -> Tensor:
    """The smallest whole number >= x; the gradient is 0."""
    return unary(Ceil, x, lambda x: x)


def round(x: Any, decimals: int = 0) -> Tensor:
    """x rounded to `decimals` decimals, halves to the even number; the gradient is 0. Raises ValueError where x's dtype
    does not hold 10**decimals."""
    x, decimals = as_tensor(x), operator.index(decimals)
    most = 38 if is_float(x.dtype) and x.dtype != float64 else 300
    if not -most <= decimals <= most:
        raise ValueError(f"round: {x.dtype} takes -{most} to {most} decimals, not {decimals}")
    if decimals == 0 or (decimals > 0 and not is_float(x.dtype)):
        return unary(Round, x, lambda x: x)
    if not is_float(x.dtype):
        return _round_whole(x, 10**-decimals)
    (wide,), scale = as_wide(x), 10.0**decimals
    return astype(unary(Round, wide * scale) / scale, x.dtype)


def _round_whole(x: Tensor, unit: int) -> Tensor:
    """Integers rounded to a multiple of `unit`, halves to the even multiple; 0 where the dtype does not hold `unit`."""
    if x.dtype != bool and unit > np.iinfo(x.dtype).max:
        return x * 0
    below = x // unit
    rest = x - below * unit
    up = (rest > unit - rest) | ((rest == unit - rest) & (below % 2 == 1))
    return (below + astype(up, x.dtype)) * unit


def exp(x: Any) -> Tensor:
    """e ** x."""
    return unary(Exp, x)


def exp2(x: Any) -> Tensor:
    """2 ** x."""
    return unary(Exp2, x)


def log(x: Any) -> Tensor:
    """Natural logarithm."""
    return unary(Log, x)


def log2(x: Any) -> Tensor:
    """Logarithm to base 2."""
    return unary(Log2, x)


def log10(x: Any) -> Tensor:
    """Logarithm to base 10."""
    return unary(Log10, x)


def log1p(x: Any) -> Tensor:
    """log(1 + x), exact near 0."""
    return unary(Log1p, x)


def expm1(x: Any) -> Tensor:
    """e ** x - 1, exact near 0."""
    return unary(Expm1, x)


def sqrt(x: Any) -> Tensor:
    """Square root."""
    return unary(Sqrt, x)


def cbrt(x: Any) -> Tensor:
    """Cube root, of numbers below 0 too."""
    return unary(Cbrt, x)


def sigmoid(x: Any) -> Tensor:
    """1 / (1 + exp(-x))."""
    return unary(Sigmoid, x)


def relu(x: Any) -> Tensor:
    """max(x, 0), with gradient 0 at 0."""
    return unary(Relu, x)


def softplus(x: Any, beta: float = 1.0) -> Tensor:
    """log(1 + exp(beta x)) / beta, beta above 0 (Dugas et al. 2001). Raises ValueError for another beta."""
    if not beta > 0:
        raise ValueError(f"softplus: beta is above 0, not {beta}")
    if beta == 1:
        return unary(Softplus, x)
    x = as_floating(x)
    (wide,) = as_wide(x)
    return astype(unary(Softplus, wide * float(beta)) / float(beta), x.dtype)


def silu(x: Any) -> Tensor:
    """x * sigmoid(x) (swish; Elfwing et al. 2018)."""
    return unary(Silu, x)
