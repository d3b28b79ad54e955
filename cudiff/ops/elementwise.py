"""Elementwise arithmetic and activations, with NumPy's broadcasting.

Python numbers are weak: they take the tensor's dtype and no array is made of them. Tensors of different dtypes are
converted first: two floating types to the wider one (bfloat16 with float16 gives float32), integers beside a floating
tensor to that tensor's dtype. 16-bit types are computed in float32.
"""

from __future__ import annotations

import functools
import math
from typing import Any, ClassVar

import numpy as np

from cudiff.backend import Array, compute_dtype
from cudiff.ops.cast import astype, result_dtype
from cudiff.ops.reduce import sum_to
from cudiff.ops.shape import broadcast_to
from cudiff.tensor import Context, Function, Tensor


def widen(array: Array | None) -> Array | None:
    """`array` in the dtype that NumPy computes in; None stays None."""
    return None if array is None else array.astype(compute_dtype(array.dtype), copy=False)


def narrow(array: Any, dtype: np.dtype) -> Array:
    """A result in its storage dtype, as an array (NumPy turns 0-d results into scalars)."""
    return np.asarray(array).astype(dtype, copy=False)


class Unary(Function):
    """out[i] = value(x[i]); dx = gradient(dout, saved), where saved is x, or out if `saves_out`."""

    saves_out: ClassVar[bool] = False

    @classmethod
    def forward_numpy(cls, ctx: Context, x):
        out = narrow(cls.value(widen(x)), x.dtype)
        if ctx.needs[0]:
            ctx.save(out if cls.saves_out else x)
        return out

    @classmethod
    def backward_numpy(cls, ctx: Context, dout, needs, into):
        return (narrow(cls.gradient(widen(dout), widen(ctx.saved[0])), dout.dtype),)


class Negative(Unary):
    @staticmethod
    def value(x):
        return np.negative(x)

    @staticmethod
    def gradient(dout, x):
        return np.negative(dout)


class Exp(Unary):
    saves_out = True

    @staticmethod
    def value(x):
        return np.exp(x)

    @staticmethod
    def gradient(dout, out):
        return dout * out


class Log(Unary):
    @staticmethod
    def value(x):
        return np.log(x)

    @staticmethod
    def gradient(dout, x):
        return dout / x


class Sqrt(Unary):
    saves_out = True

    @staticmethod
    def value(x):
        return np.sqrt(x)

    @staticmethod
    def gradient(dout, out):
        return 0.5 * dout / out


class Sin(Unary):
    @staticmethod
    def value(x):
        return np.sin(x)

    @staticmethod
    def gradient(dout, x):
        return dout * np.cos(x)


class Cos(Unary):
    @staticmethod
    def value(x):
        return np.cos(x)

    @staticmethod
    def gradient(dout, x):
        return -dout * np.sin(x)


class Tanh(Unary):
    saves_out = True

    @staticmethod
    def value(x):
        return np.tanh(x)

    @staticmethod
    def gradient(dout, out):
        return dout * (1 - out * out)


class Abs(Unary):
    @staticmethod
    def value(x):
        return np.abs(x)

    @staticmethod
    def gradient(dout, x):
        return dout * np.sign(x)


class Square(Unary):
    @staticmethod
    def value(x):
        return x * x

    @staticmethod
    def gradient(dout, x):
        return 2 * dout * x


class Relu(Unary):
    saves_out = True

    @staticmethod
    def value(x):
        return np.maximum(x, 0)

    @staticmethod
    def gradient(dout, out):
        return dout * (out > 0)


def _sigmoid(x):
    """1 / (1 + exp(-x)) in one array; exp overflows to infinity for very negative x, which gives the right 0."""
    out = np.asarray(np.negative(x))
    with np.errstate(over="ignore"):
        np.exp(out, out=out)
    out += 1
    return np.reciprocal(out, out=out)


class Sigmoid(Unary):
    saves_out = True

    @staticmethod
    def value(x):
        return _sigmoid(x)

    @staticmethod
    def gradient(dout, out):
        dx = np.asarray(1 - out)
        dx *= out
        dx *= dout
        return dx


class Silu(Unary):
    """x * sigmoid(x), with slope sigmoid + out * (1 - sigmoid). On the CPU the sigmoid is kept: exp costs most."""

    @staticmethod
    def forward_numpy(ctx, x):
        wide = widen(x)
        gate = _sigmoid(wide)
        out = np.asarray(wide * gate)
        if ctx.needs[0]:
            ctx.save(gate, out)
        return narrow(out, x.dtype)

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        gate, out = ctx.saved
        dx = np.asarray(1 - gate)
        dx *= out
        dx += gate
        dx *= widen(dout)
        return (narrow(dx, dout.dtype),)


@functools.cache
def _erfc_coefficients() -> np.ndarray:
    """Chebyshev coefficients of log(erfc(z) / t) + z² over t = 2 / (2 + z) for z in [0, 6]; 1e-15 with 24 terms."""
    nodes = np.cos(np.pi * (np.arange(24) + 0.5) / 24)
    z = 2 / (0.625 + 0.375 * nodes) - 2
    values = [math.log(math.erfc(v) * (1 + v / 2)) + v * v for v in z]
    return np.polynomial.chebyshev.chebfit(nodes, values, 23)


def erf(x: np.ndarray) -> np.ndarray:
    """The error function of a NumPy array, which NumPy itself lacks; within 1e-15 in float64."""
    z = np.minimum(np.abs(x), 6)  # from here on erf is 1 in float64
    t = 2 / (2 + z)
    series = np.polynomial.chebyshev.chebval((t - 0.625) / 0.375, _erfc_coefficients().astype(x.dtype))
    return np.copysign(1 - t * np.exp(series - z * z), x)


class Gelu(Unary):
    """x * Phi(x) with the exact normal distribution function (PyTorch's default), not the tanh approximation."""

    @staticmethod
    def value(x):
        return 0.5 * x * (1 + erf(x * math.sqrt(0.5)))

    @staticmethod
    def gradient(dout, x):
        return dout * (0.5 * (1 + erf(x * math.sqrt(0.5))) + x * np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi))


class Clip(Function):
    """The gradient passes where low <= x <= high, as in PyTorch."""

    @staticmethod
    def forward_numpy(ctx, x, low, high):
        ctx.save(x)
        ctx.low, ctx.high = low, high
        return narrow(np.clip(widen(x), low, high), x.dtype)

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        x = widen(ctx.saved[0])
        return (narrow(widen(dout) * ((x >= ctx.low) & (x <= ctx.high)), dout.dtype),)


class Binary(Function):
    """out = value(a, b) over broadcast operands of one dtype. An operand given as None is the number `scalar`.

    A subclass gives `gradient_a(dout, a, b)` and `gradient_b`, before the sum over broadcast axes.
    """

    @staticmethod
    def keep(a, b, needs):
        """What the gradients read."""
        return a, b

    @classmethod
    def forward_numpy(cls, ctx: Context, a, b, scalar=None):
        ctx.shapes = tuple(None if x is None else x.shape for x in (a, b))
        ctx.scalar = scalar
        if any(ctx.needs):
            ctx.save(*cls.keep(a, b, ctx.needs))
        x = scalar if a is None else widen(a)
        y = scalar if b is None else widen(b)
        return narrow(cls.value(x, y), (b if a is None else a).dtype)

    @classmethod
    def backward_numpy(cls, ctx: Context, dout, needs, into):
        a, b = (ctx.scalar if shape is None else widen(x) for x, shape in zip(ctx.saved, ctx.shapes, strict=True))
        grads = []
        for needed, shape, gradient in zip(needs, ctx.shapes, (cls.gradient_a, cls.gradient_b), strict=True):
            grads.append(narrow(sum_to(gradient(widen(dout), a, b), shape), dout.dtype) if needed else None)
        return tuple(grads)


class Add(Binary):
    @staticmethod
    def keep(a, b, needs):
        return None, None

    @staticmethod
    def value(a, b):
        return np.add(a, b)

    @staticmethod
    def gradient_a(dout, a, b):
        return dout

    @staticmethod
    def gradient_b(dout, a, b):
        return dout


class Subtract(Add):
    @staticmethod
    def value(a, b):
        return np.subtract(a, b)

    @staticmethod
    def gradient_b(dout, a, b):
        return np.negative(dout)


class Multiply(Binary):
    @staticmethod
    def keep(a, b, needs):
        return a if needs[1] else None, b if needs[0] else None

    @staticmethod
    def value(a, b):
        return np.multiply(a, b)

    @staticmethod
    def gradient_a(dout, a, b):
        return dout * b

    @staticmethod
    def gradient_b(dout, a, b):
        return dout * a


class Divide(Binary):
    @staticmethod
    def keep(a, b, needs):
        return a if needs[1] else None, b

    @staticmethod
    def value(a, b):
        return np.divide(a, b)

    @staticmethod
    def gradient_a(dout, a, b):
        return dout / b

    @staticmethod
    def gradient_b(dout, a, b):
        return -dout * a / (b * b)


class Power(Binary):
    """a ** b; at b = 0 the slope along a is 0, at a = 0 the slope along b is 0, as in PyTorch."""

    @staticmethod
    def value(a, b):
        return np.power(a, b)

    @staticmethod
    def gradient_a(dout, a, b):
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(np.equal(b, 0), 0, dout * (b * np.power(a, b - 1)))

    @staticmethod
    def gradient_b(dout, a, b):
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(np.equal(a, 0), 0, dout * np.power(a, b) * np.log(a))


class Maximum(Binary):
    """Where a == b each gets half of the gradient, as in PyTorch."""

    @staticmethod
    def value(a, b):
        return np.maximum(a, b)

    @staticmethod
    def gradient_a(dout, a, b):
        return dout * (0.5 * np.add(a > b, a >= b, dtype=dout.dtype))

    @staticmethod
    def gradient_b(dout, a, b):
        return Maximum.gradient_a(dout, b, a)


class Minimum(Maximum):
    @staticmethod
    def value(a, b):
        return np.minimum(a, b)

    @staticmethod
    def gradient_a(dout, a, b):
        return Maximum.gradient_a(dout, b, a)

    @staticmethod
    def gradient_b(dout, a, b):
        return Maximum.gradient_a(dout, a, b)


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float | np.number | np.bool_)


def _operand(x: Any) -> Tensor | int | float:
    if _is_number(x):
        return x.item() if isinstance(x, np.generic) else x
    return x if isinstance(x, Tensor) else Tensor(x)


def _unary(function: type[Function], x: Any, floating: bool = True, **attrs: Any) -> Tensor:
    x = x if isinstance(x, Tensor) else Tensor(x)
    return function.apply(astype(x, result_dtype(x, floating=floating)), **attrs)


def _binary(function: type[Binary], a: Any, b: Any, floating: bool = False) -> Tensor:
    a, b = _operand(a), _operand(b)
    if not isinstance(a, Tensor) and not isinstance(b, Tensor):
        a = Tensor(a)
    dtype = result_dtype(a, b, floating=floating)
    if not isinstance(a, Tensor):
        return function.apply(None, astype(b, dtype), scalar=a)
    if not isinstance(b, Tensor):
        return function.apply(astype(a, dtype), None, scalar=b)
    return function.apply(astype(a, dtype), astype(b, dtype))


def add(a: Any, b: Any) -> Tensor:
    """a + b."""
    return _binary(Add, a, b)


def subtract(a: Any, b: Any) -> Tensor:
    """a - b."""
    return _binary(Subtract, a, b)


def multiply(a: Any, b: Any) -> Tensor:
    """a * b."""
    return _binary(Multiply, a, b)


def divide(a: Any, b: Any) -> Tensor:
    """a / b; integers give float32."""
    return _binary(Divide, a, b, floating=True)


def power(a: Any, b: Any) -> Tensor:
    """a ** b; `a ** 2` of a tensor is `square(a)`."""
    return square(a) if _is_number(b) and b == 2 else _binary(Power, a, b)


def maximum(a: Any, b: Any) -> Tensor:
    """The larger of a and b, NaN where either is; the gradient is halved where they are equal."""
    return _binary(Maximum, a, b)


def minimum(a: Any, b: Any) -> Tensor:
    """The smaller of a and b, NaN where either is; the gradient is halved where they are equal."""
    return _binary(Minimum, a, b)


def negative(x: Any) -> Tensor:
    """-x."""
    return _unary(Negative, x, floating=False)


def abs(x: Any) -> Tensor:
    """|x|, with gradient 0 at 0."""
    return _unary(Abs, x, floating=False)


def square(x: Any) -> Tensor:
    """x * x."""
    return _unary(Square, x, floating=False)


def clip(x: Any, low: float, high: float) -> Tensor:
    """x limited to [low, high]; the gradient passes inside, the ends included."""
    return _unary(Clip, x, floating=False, low=low, high=high)


def exp(x: Any) -> Tensor:
    """e ** x."""
    return _unary(Exp, x)


def log(x: Any) -> Tensor:
    """Natural logarithm."""
    return _unary(Log, x)


def sqrt(x: Any) -> Tensor:
    """Square root."""
    return _unary(Sqrt, x)


def sin(x: Any) -> Tensor:
    """Sine of x in radians."""
    return _unary(Sin, x)


def cos(x: Any) -> Tensor:
    """Cosine of x in radians."""
    return _unary(Cos, x)


def tanh(x: Any) -> Tensor:
    """Hyperbolic tangent."""
    return _unary(Tanh, x)


def sigmoid(x: Any) -> Tensor:
    """1 / (1 + exp(-x))."""
    return _unary(Sigmoid, x)


def relu(x: Any) -> Tensor:
    """max(x, 0), with gradient 0 at 0."""
    return _unary(Relu, x)


def silu(x: Any) -> Tensor:
    """x * sigmoid(x) (swish; Elfwing et al. 2018)."""
    return _unary(Silu, x)


def gelu(x: Any) -> Tensor:
    """x * Phi(x) with the exact error function, as PyTorch's default (Hendrycks and Gimpel 2016)."""
    return _unary(Gelu, x)


class Where(Function):
    """out = mask ? a : b, all of one shape; an operand given as None is the number `scalars[i]`."""

    @staticmethod
    def forward_numpy(ctx: Context, mask, a, b, scalars):
        ctx.save(mask)
        dtype = (b if a is None else a).dtype
        first, second = (np.asarray(s, dtype) if x is None else x for x, s in zip((a, b), scalars, strict=True))
        return np.where(mask, first, second)

    @staticmethod
    def backward_numpy(ctx: Context, dout, needs, into):
        (mask,) = ctx.saved
        zero = np.zeros((), dout.dtype)
        return None, np.where(mask, dout, zero) if needs[1] else None, np.where(mask, zero, dout) if needs[2] else None


def where(condition: Any, a: Any, b: Any) -> Tensor:
    """a where the condition (bool or uint8 tensor or array) is not 0, else b; all broadcast, a or b may be a number."""
    condition = condition if isinstance(condition, Tensor) else Tensor(np.asarray(condition, bool))
    a, b = _operand(a), _operand(b)
    if not isinstance(a, Tensor) and not isinstance(b, Tensor):
        a = Tensor(a, device=condition.device)
    dtype = result_dtype(a, b)
    shape = np.broadcast_shapes(*(x.shape for x in (condition, a, b) if isinstance(x, Tensor)))
    operands = [broadcast_to(astype(x, dtype), shape) if isinstance(x, Tensor) else None for x in (a, b)]
    scalars = tuple(None if isinstance(x, Tensor) else x for x in (a, b))
    return Where.apply(broadcast_to(condition, shape), *operands, scalars=scalars)
