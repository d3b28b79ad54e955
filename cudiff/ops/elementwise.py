"""Functions of one tensor, element by element. 16-bit types are computed in float32."""

from __future__ import annotations

import functools
import math
from typing import Any, ClassVar

import numpy as np

from cudiff.backend import Array
from cudiff.cuda.accumulate import gradient_target
from cudiff.cuda.kernels.elementwise import grid
from cudiff.cuda.launch import aligned, blocks, empty, launch
from cudiff.cuda.sums import empty_statistics
from cudiff.function import Function
from cudiff.gradient import Slot
from cudiff.ops.cast import as_tensor, as_wide, astype, downcast, is_number, require_float, result_dtype, upcast
from cudiff.statistics import ChannelStatistics, Kind
from cudiff.tensor import Tensor

__all__ = [
    "abs", "ceil", "clip", "cos", "exp", "expm1", "floor", "gelu", "log", "log1p", "negative", "relu", "round",
    "sigmoid", "sign", "silu", "sin", "softplus", "sqrt", "square", "tan", "tanh",
]


class Unary(Function):
    """out[i] = value(x[i]); dx = gradient(dout, saved), where saved is x, or out if `saves_out` (on CUDA, what the
    third argument of UNARY in elementwise.cu says).
    """

    saves_out: ClassVar[bool] = False
    value: ClassVar[Any]
    gradient: ClassVar[Any]

    @classmethod
    def forward_numpy(cls, ctx, x):
        out = downcast(cls.value(upcast(x)), x.dtype)
        if ctx.needs[0]:
            ctx.save(out if cls.saves_out else x)
        return out

    @classmethod
    def backward_numpy(cls, ctx, dout, needs, into):
        return (downcast(cls.gradient(upcast(dout), upcast(ctx.saved[0])), dout.dtype),)

    @classmethod
    def forward_cuda(cls, ctx, x):
        require_float(cls.__name__, x)
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
    value = staticmethod(lambda x: np.negative(x))
    gradient = staticmethod(lambda dout, x: np.negative(dout))


class Exp(Unary):
    saves_out = True
    value = staticmethod(lambda x: np.exp(x))
    gradient = staticmethod(lambda dout, out: dout * out)


class Log(Unary):
    value = staticmethod(lambda x: np.log(x))
    gradient = staticmethod(lambda dout, x: dout / x)


class Sqrt(Unary):
    saves_out = True
    value = staticmethod(lambda x: np.sqrt(x))
    gradient = staticmethod(lambda dout, out: 0.5 * dout / out)


class Sin(Unary):
    value = staticmethod(lambda x: np.sin(x))
    gradient = staticmethod(lambda dout, x: dout * np.cos(x))


class Cos(Unary):
    value = staticmethod(lambda x: np.cos(x))
    gradient = staticmethod(lambda dout, x: -dout * np.sin(x))


class Tanh(Unary):
    """The slope is taken from x: from an out rounded to bfloat16, 1 - out² would lose most digits near ±1."""

    @staticmethod
    def value(x):
        return np.tanh(x)

    @staticmethod
    def gradient(dout, x):
        dx = np.asarray(np.tanh(x))
        dx *= dx
        np.subtract(1, dx, out=dx)
        dx *= dout
        return dx


class Abs(Unary):
    value = staticmethod(lambda x: np.abs(x))
    gradient = staticmethod(lambda dout, x: dout * np.sign(x))


class Square(Unary):
    value = staticmethod(lambda x: x * x)
    gradient = staticmethod(lambda dout, x: 2 * dout * x)


class Step(Unary):
    """Its slope is 0, at its steps too, as in PyTorch."""

    gradient = staticmethod(lambda dout, x: np.zeros_like(dout))


class Sign(Step):
    value = staticmethod(lambda x: np.sign(x))


class Floor(Step):
    value = staticmethod(lambda x: np.floor(x))


class Ceil(Step):
    value = staticmethod(lambda x: np.ceil(x))


class Round(Step):
    value = staticmethod(lambda x: np.rint(x))


class Log1p(Unary):
    value = staticmethod(lambda x: np.log1p(x))
    gradient = staticmethod(lambda dout, x: dout / (1 + x))


class Expm1(Unary):
    value = staticmethod(lambda x: np.expm1(x))
    gradient = staticmethod(lambda dout, x: dout * np.exp(x))


class Tan(Unary):
    value = staticmethod(lambda x: np.tan(x))
    gradient = staticmethod(lambda dout, x: dout * (1 + np.tan(x) ** 2))


class Relu(Unary):
    saves_out = True

    @staticmethod
    def value(x):
        return np.maximum(x, 0)

    @staticmethod
    def gradient(dout, out):
        return dout * (out > 0)

    @classmethod
    def backward_cuda(cls, ctx, dout, needs, into):
        if into[0] is not None:
            return super().backward_cuda(ctx, dout, needs, into)
        dx, ctx.din_statistics[0] = relu_backward_cuda(dout, ctx.saved[0])
        return (dx,)


def relu_backward_cuda(dout: Array, out: Array) -> tuple[Array, ChannelStatistics | None]:
    """dout where out > 0, else 0; and of images the SUMS of that, in a tile each.

    A convolution stands before most ReLUs: they are what its bias and its embedding need.
    """
    dx = empty(dout.shape, dout.dtype)
    if dout.ndim != 4 or dout.size == 0 or not (aligned(dout, dout.shape[3]) and aligned(out)):
        launch("elementwise", "relu_backward", grid(dx), 256, (dout, out, dx, 0, np.int64(dx.size)), T=dx.dtype)
        return dx, None
    n, height, width, channels = dout.shape
    packs, pixels = channels * dout.itemsize // 16, height * width
    statistics = empty_statistics(Kind.SUMS, n, 1, channels)
    across = 1  # packs of a block; of small images many, so that a thread has more than a pixel to add
    while across < min(packs, max(4, 512 // pixels), 256):
        across *= 2
    launch(
        "elementwise", "relu_backward_sums", (n, blocks(packs, across)), 256,
        (dout, out, dx, statistics.sums, pixels, channels, 256 // across), T=dout.dtype,
    )
    return dx, statistics


def _sigmoid(x):
    """1 / (1 + exp(-x)) in one array; exp overflows to infinity for very negative x, which gives the right 0."""
    out = np.asarray(np.negative(x))
    with np.errstate(over="ignore"):
        np.exp(out, out=out)
    out += 1
    return np.reciprocal(out, out=out)


class Sigmoid(Unary):
    """The slope is taken from x, as in Tanh."""

    @staticmethod
    def value(x):
        return _sigmoid(x)

    @staticmethod
    def gradient(dout, x):
        out = _sigmoid(x)
        dx = np.asarray(1 - out)
        dx *= out
        dx *= dout
        return dx


class Softplus(Unary):
    value = staticmethod(lambda x: np.logaddexp(0, x))
    gradient = staticmethod(lambda dout, x: dout * _sigmoid(x))


class Silu(Unary):
    """x * sigmoid(x), with slope sigmoid + out * (1 - sigmoid). NumPy keeps the sigmoid, as exp costs most; CUDA x."""

    @staticmethod
    def forward_numpy(ctx, x):
        gate, out = silu_numpy(upcast(x))
        if ctx.needs[0]:
            ctx.save(gate, out)
        return downcast(out, x.dtype)

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        return (downcast(silu_backward_numpy(upcast(dout), *ctx.saved), dout.dtype),)


def silu_numpy(x: Array) -> tuple[Array, Array]:
    """The sigmoid of x, and its product with x."""
    gate = _sigmoid(x)
    return gate, np.asarray(x * gate)


def silu_backward_numpy(dout: Array, gate: Array, out: Array) -> Array:
    """dx of what `silu_numpy` gave."""
    dx = np.asarray(1 - gate)
    dx *= out
    dx += gate
    dx *= dout
    return dx


@functools.cache
def _erfc_coefficients() -> list[float]:
    """Chebyshev coefficients of log(erfc(z) / t) + z² over t = 2 / (2 + z) for z in [0, 6]; 24 terms give 1e-15."""
    nodes = np.cos(np.pi * (np.arange(24) + 0.5) / 24)
    z = 2 / (0.625 + 0.375 * nodes) - 2
    values = [math.log(math.erfc(v) * (1 + v / 2)) + v * v for v in z]
    return np.polynomial.chebyshev.chebfit(nodes, values, 23).tolist()


def erf(x: np.ndarray) -> np.ndarray:
    """The error function of a NumPy array, which NumPy itself lacks; within 1e-15 in float64, 1e-7 in float32."""
    flat = np.ravel(x)
    out = np.empty_like(flat)
    for start in range(0, flat.size, 16384):  # blocks that stay in the cache: 5 times as fast
        out[start : start + 16384] = _erf(flat[start : start + 16384])
    return out.reshape(x.shape)


def _erf(x: np.ndarray) -> np.ndarray:
    z = np.minimum(np.abs(x), 6)  # from here on erf is 1 in float64
    t = 2 / (2 + z)
    twice = (t - 0.625) * (2 / 0.375)
    now, before, after = np.zeros_like(t), np.zeros_like(t), np.empty_like(t)
    for coefficient in reversed(_erfc_coefficients()[: 12 if x.dtype == np.float32 else 24]):  # Clenshaw's recurrence
        np.multiply(twice, now, out=after)
        after -= before
        after += coefficient
        now, before, after = after, now, before
    return np.copysign(1 - t * np.exp(now - 0.5 * twice * before - z * z), x)


class Gelu(Unary):
    """x * Phi(x) with the exact normal distribution function (PyTorch's default), not the tanh approximation."""

    @staticmethod
    def value(x):
        out = np.asarray(erf(x * math.sqrt(0.5)))
        out += 1
        out *= 0.5 * x
        return out

    @staticmethod
    def gradient(dout, x):
        dx = np.asarray(-0.5 * x * x)
        np.exp(dx, out=dx)
        dx *= x
        dx *= math.sqrt(0.5 / math.pi)
        dx += 0.5 * (1 + erf(x * math.sqrt(0.5)))
        dx *= dout
        return dx


class Clip(Function):
    """The gradient passes where low <= x <= high, as in PyTorch."""

    @staticmethod
    def forward_numpy(ctx, x, low, high):
        if ctx.needs[0]:
            ctx.save(x)
        ctx.low, ctx.high = _ends(low, high)
        return downcast(np.clip(upcast(x), low, high), x.dtype)

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        x = upcast(ctx.saved[0])
        return (downcast(upcast(dout) * ((x >= ctx.low) & (x <= ctx.high)), dout.dtype),)

    @staticmethod
    def forward_cuda(ctx, x, low, high):
        require_float("clip", x)
        out = empty(x.shape, x.dtype)
        ctx.low, ctx.high = _ends(low, high)
        args = (x, out, ctx.low, ctx.high, np.int64(x.size))
        launch("elementwise", "clip_forward", grid(x), 256, args, T=x.dtype)
        if ctx.needs[0]:
            ctx.save(x)
        return out

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        dx, accumulate = gradient_target(into[0], dout.shape, dout.dtype)
        args = (dout, ctx.saved[0], dx, ctx.low, ctx.high, accumulate, np.int64(dx.size))
        launch("elementwise", "clip_backward", grid(dx), 256, args, T=dx.dtype)
        return (dx,)


def _ends(low: float | None, high: float | None) -> tuple[float, float]:
    return -math.inf if low is None else float(low), math.inf if high is None else float(high)


def _unary(function: type[Function], x: Any, floating: bool = True, **attrs: Any) -> Tensor:
    x = as_tensor(x)
    return function.apply(astype(x, result_dtype(x, floating=floating)), **attrs)


def negative(x: Any) -> Tensor:
    """-x."""
    return _unary(Negative, x, floating=False)


def abs(x: Any) -> Tensor:
    """|x|, with gradient 0 at 0."""
    return _unary(Abs, x, floating=False)


def square(x: Any) -> Tensor:
    """x * x."""
    return _unary(Square, x, floating=False)


def clip(x: Any, a_min: Any = None, a_max: Any = None, *, min: Any = None, max: Any = None) -> Tensor:
    """x limited to [a_min, a_max], numbers or None for no limit; the gradient passes inside, the ends included.

    `min` and `max` are NumPy's other names of the two. Raises ValueError where both are given, TypeError for
    bounds that are no numbers.
    """
    if (a_min is not None and min is not None) or (a_max is not None and max is not None):
        raise ValueError("clip: a_min is min and a_max is max: give each by one of its names")
    x, low, high = as_tensor(x), min if a_min is None else a_min, max if a_max is None else a_max
    bounds = [bound for bound in (low, high) if bound is not None]
    if not all(is_number(bound) for bound in bounds):
        raise TypeError("clip: bounds are numbers: of tensors take maximum(x, a_min) and minimum(x, a_max)")
    return Clip.apply(astype(x, result_dtype(x, *bounds)), low=low, high=high) if bounds else x


def sign(x: Any) -> Tensor:
    """-1, 0 or 1, as x is below, at or above 0; the gradient is 0."""
    return _unary(Sign, x, floating=False)


def floor(x: Any) -> Tensor:
    """The largest whole number up to x; the gradient is 0."""
    return _unary(Floor, x, floating=False)


def ceil(x: Any) -> Tensor:
    """The smallest whole number from x on; the gradient is 0."""
    return _unary(Ceil, x, floating=False)


def round(x: Any, decimals: int = 0) -> Tensor:
    """The nearest number of so many decimals, of two the even one; the gradient is 0."""
    if decimals == 0:
        return _unary(Round, x, floating=False)
    scale = 10.0**decimals
    return _unary(Round, as_tensor(x) * scale) / scale


def exp(x: Any) -> Tensor:
    """e ** x."""
    return _unary(Exp, x)


def log(x: Any) -> Tensor:
    """Natural logarithm."""
    return _unary(Log, x)


def log1p(x: Any) -> Tensor:
    """log(1 + x), exact near 0."""
    return _unary(Log1p, x)


def expm1(x: Any) -> Tensor:
    """e ** x - 1, exact near 0."""
    return _unary(Expm1, x)


def sqrt(x: Any) -> Tensor:
    """Square root."""
    return _unary(Sqrt, x)


def sin(x: Any) -> Tensor:
    """Sine of x in radians."""
    return _unary(Sin, x)


def cos(x: Any) -> Tensor:
    """Cosine of x in radians."""
    return _unary(Cos, x)


def tan(x: Any) -> Tensor:
    """Tangent of x in radians."""
    return _unary(Tan, x)


def tanh(x: Any) -> Tensor:
    """Hyperbolic tangent."""
    return _unary(Tanh, x)


def sigmoid(x: Any) -> Tensor:
    """1 / (1 + exp(-x))."""
    return _unary(Sigmoid, x)


def relu(x: Any) -> Tensor:
    """max(x, 0), with gradient 0 at 0."""
    return _unary(Relu, x)


def softplus(x: Any, beta: float = 1.0) -> Tensor:
    """log(1 + exp(beta x)) / beta, beta above 0 (Dugas et al. 2001). Raises ValueError for another beta."""
    if not beta > 0:
        raise ValueError(f"softplus: beta is above 0, not {beta}")
    return _unary(Softplus, x) if beta == 1 else _unary(Softplus, as_tensor(x) * float(beta)) / float(beta)


def silu(x: Any) -> Tensor:
    """x * sigmoid(x) (swish; Elfwing et al. 2018)."""
    return _unary(Silu, x)


def gelu(x: Any, approximate: str = "none") -> Tensor:
    """x * Phi(x) (Hendrycks and Gimpel 2016): with the exact error function, or by tanh if `approximate` is "tanh".

    Both are PyTorch's. Raises ValueError for another `approximate`.
    """
    if approximate == "none":
        return _unary(Gelu, x)
    if approximate != "tanh":
        raise ValueError(f'gelu: approximate is "none" or "tanh", not {approximate!r}')
    x = as_tensor(x)
    (wide,) = as_wide(x)
    double = (wide + 0.044715 * wide * square(wide)) * (2 * math.sqrt(2 / math.pi))  # (1 + tanh u) / 2 is sigmoid(2u)
    return astype(wide * sigmoid(double), result_dtype(x, floating=True))
