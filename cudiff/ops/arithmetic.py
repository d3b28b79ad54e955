"""Arithmetic on two operands and `where`, with NumPy's broadcasting.

Numbers and arrays take the dtype of a floating tensor beside them. Numbers are not converted to arrays. Tensors of
different dtypes are converted first: two floating types to the wider one (bfloat16 with float16 gives float32),
integers beside a floating tensor to that tensor's dtype. 16-bit types are computed in float32.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from cudiff.backend import Array, float32, is_float
from cudiff.cuda.accumulate import gradient_target
from cudiff.cuda.kernels.elementwise import broadcast_layout, grid
from cudiff.cuda.launch import empty, launch
from cudiff.function import Function
from cudiff.ops.cast import apply_pair, as_tensor, downcast, is_number, masked, operands, upcast
from cudiff.ops.elementwise import square
from cudiff.ops.integer import check_numbers, integer
from cudiff.ops.reduce import sum_to
from cudiff.ops.shape import broadcast_to
from cudiff.tensor import Tensor

__all__ = [
    "add", "arctan2", "divide", "floor_divide", "hypot", "maximum", "minimum", "multiply", "power", "reciprocal",
    "remainder", "subtract", "where",
]


class Binary(Function):
    """out = value(a, b) over broadcast operands of one dtype. An operand given as None is the number `scalar`.

    A subclass gives `gradient_a(dout, a, b)` and `gradient_b`, before the sum over broadcast axes.
    """

    value: ClassVar[Any]
    gradient_a: ClassVar[Any]
    gradient_b: ClassVar[Any]

    @staticmethod
    def keep(a, b, needs):
        """The operands that the gradients read."""
        return a, b

    @classmethod
    def forward_numpy(cls, ctx, a, b, scalar=None):
        ctx.shapes = tuple(None if x is None else x.shape for x in (a, b))
        ctx.scalar = scalar
        if any(ctx.needs):
            ctx.save(*cls.keep(a, b, ctx.needs))
        x = scalar if a is None else upcast(a)
        y = scalar if b is None else upcast(b)
        return downcast(cls.value(x, y), (b if a is None else a).dtype)

    @classmethod
    def backward_numpy(cls, ctx, dout, needs, into):
        a, b = (ctx.scalar if shape is None else upcast(x) for x, shape in zip(ctx.saved, ctx.shapes, strict=True))
        grads = []
        for needed, shape, gradient in zip(needs, ctx.shapes, (cls.gradient_a, cls.gradient_b), strict=True):
            grads.append(downcast(sum_to(gradient(upcast(dout), a, b), shape), dout.dtype) if needed else None)
        return tuple(grads)

    @classmethod
    def forward_cuda(cls, ctx, a, b, scalar=None):
        first = b if a is None else a
        ctx.shapes = tuple(None if x is None else x.shape for x in (a, b))
        ctx.scalar = float(scalar or 0)
        if any(ctx.needs):
            ctx.save(*cls.keep(a, b, ctx.needs))
        shape = first.shape if a is None or b is None else np.broadcast_shapes(a.shape, b.shape)
        out = empty(shape, first.dtype)
        args = (a, b, ctx.scalar, out, np.int64(out.size), broadcast_layout(shape, a, b))
        launch("arithmetic", f"{cls.__name__.lower()}_forward", grid(out), 256, args, T=out.dtype)
        return out

    @classmethod
    def backward_cuda(cls, ctx, dout, needs, into):
        grads: list[Array | None] = [None, None]
        for i, name in enumerate(("da", "db")):
            if not needs[i]:
                continue
            if ctx.shapes[i] == dout.shape:
                target, accumulate = gradient_target(into[i], dout.shape, dout.dtype)
                where = (target, None, accumulate)
            else:
                target = empty(dout.shape, float32)
                where = (None, target, False)
            args = (dout, *ctx.saved, ctx.scalar, *where, np.int64(dout.size), broadcast_layout(dout.shape, *ctx.saved))
            launch("arithmetic", f"{cls.__name__.lower()}_{name}", grid(dout), 256, args, T=dout.dtype)
            grads[i] = sum_to(target, ctx.shapes[i], dout.dtype)
        return tuple(grads)


class Add(Binary):
    """The gradient of both operands is dout, summed over axes along which they were broadcast."""

    keep = staticmethod(lambda a, b, needs: (None, None))
    value = staticmethod(np.add)
    gradient_a = gradient_b = staticmethod(lambda dout, a, b: dout)

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        return tuple(sum_to(dout, shape) if needed else None for shape, needed in zip(ctx.shapes, needs, strict=True))


class Subtract(Add):
    value = staticmethod(np.subtract)
    gradient_b = staticmethod(lambda dout, a, b: np.negative(dout))

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        da = sum_to(dout, ctx.shapes[0]) if needs[0] else None
        if not needs[1]:
            return da, None
        term = sum_to(dout, ctx.shapes[1])
        db, accumulate = gradient_target(into[1], term.shape, term.dtype)
        args = (term, None, db, accumulate, np.int64(db.size))
        launch("elementwise", "negative_backward", grid(db), 256, args, T=db.dtype)
        return da, db


class Multiply(Binary):
    keep = staticmethod(lambda a, b, needs: (a if needs[1] else None, b if needs[0] else None))
    value = staticmethod(np.multiply)
    gradient_a = staticmethod(lambda dout, a, b: dout * b)
    gradient_b = staticmethod(lambda dout, a, b: dout * a)


class Divide(Binary):
    keep = staticmethod(lambda a, b, needs: (a if needs[1] else None, b))
    value = staticmethod(np.divide)
    gradient_a = staticmethod(lambda dout, a, b: dout / b)
    gradient_b = staticmethod(lambda dout, a, b: -dout * (a / b) / b)  # b * b may overflow


class Power(Binary):
    """a ** b. At b = 0 the gradient of a is 0, at a = 0 and b >= 0 the gradient of b is 0, as in PyTorch."""

    @staticmethod
    def value(a, b):
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            return np.power(a, b)

    @staticmethod
    def gradient_a(dout, a, b):
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            return np.where(np.equal(b, 0), 0, dout * (b * np.power(a, b - 1)))

    @staticmethod
    def gradient_b(dout, a, b):
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            return np.where(np.equal(a, 0) & np.greater_equal(b, 0), 0, dout * (np.power(a, b) * np.log(a)))


def _over_square(x: np.ndarray, length: np.ndarray) -> np.ndarray:
    """x / length², 0 where both are 0. It divides twice, because the square may overflow."""
    length = np.where(length == 0, 1, length)
    return x / length / length


class Arctan2(Binary):
    """At the origin its gradients are 0, as in PyTorch."""

    value = staticmethod(np.arctan2)
    gradient_a = staticmethod(lambda dout, a, b: dout * _over_square(b, np.hypot(a, b)))
    gradient_b = staticmethod(lambda dout, a, b: -dout * _over_square(a, np.hypot(a, b)))


class Hypot(Binary):
    value = staticmethod(np.hypot)
    gradient_a = staticmethod(lambda dout, a, b: dout * a / np.hypot(a, b))
    gradient_b = staticmethod(lambda dout, a, b: dout * b / np.hypot(a, b))


class FloorDivide(Binary):
    """Its gradients are 0, at the steps too."""

    value = staticmethod(np.floor_divide)
    gradient_a = gradient_b = staticmethod(lambda dout, a, b: np.zeros_like(dout))


class Remainder(Binary):
    value = staticmethod(np.remainder)
    gradient_a = staticmethod(lambda dout, a, b: dout)
    gradient_b = staticmethod(lambda dout, a, b: -dout * np.floor_divide(a, b))


class Maximum(Binary):
    """Where a == b each gets half of the gradient, as in PyTorch."""

    value = staticmethod(np.maximum)
    gradient_a = staticmethod(lambda dout, a, b: masked(dout, a > b) + masked(0.5 * dout, a == b))
    gradient_b = staticmethod(lambda dout, a, b: Maximum.gradient_a(dout, b, a))


class Minimum(Maximum):
    value = staticmethod(np.minimum)
    gradient_a = staticmethod(Maximum.gradient_b)
    gradient_b = staticmethod(Maximum.gradient_a)


def _binary(function: type[Binary], a: Any, b: Any, of_integers: str = "") -> Tensor:
    """Apply `function`. Integers go to the NumPy function named `of_integers`, or without one become float32."""
    a, b = operands(a, b, floating=not of_integers)
    if of_integers and not is_float((a if isinstance(a, Tensor) else b).dtype):
        return integer(of_integers, a, b)
    return apply_pair(function, a, b)


def add(a: Any, b: Any) -> Tensor:
    """a + b."""
    return _binary(Add, a, b, "add")


def subtract(a: Any, b: Any) -> Tensor:
    """a - b."""
    return _binary(Subtract, a, b, "subtract")


def multiply(a: Any, b: Any) -> Tensor:
    """a * b."""
    return _binary(Multiply, a, b, "multiply")


def divide(a: Any, b: Any) -> Tensor:
    """a / b; integers give float32."""
    return _binary(Divide, a, b)


def power(a: Any, b: Any) -> Tensor:
    """a ** b; `a ** 2` of a floating tensor is `square(a)`.

    Integers to a negative power raise ValueError. On a GPU a tensor of powers is not checked, and the result of a
    negative one is truncated to an integer.
    """
    a, b = operands(a, b)
    if is_number(b) and is_float(a.dtype) and b == 2:
        return square(a)
    if is_number(b) and not is_float(a.dtype) and b < 0:
        raise ValueError("integers to a negative power are no integers: use .astype('float32')")
    return _binary(Power, a, b, "power")


def reciprocal(x: Any) -> Tensor:
    """1 / x; integers give float32."""
    return divide(1, as_tensor(x))


def floor_divide(a: Any, b: Any) -> Tensor:
    """a // b, rounded down, with gradient 0. A float over 0 is ±inf or NaN, an integer over 0 is 0 as in NumPy."""
    return _binary(FloorDivide, a, b, "floor_divide")


def remainder(a: Any, b: Any) -> Tensor:
    """a % b, with the sign of b. A float % 0 is NaN, an integer % 0 is 0 as in NumPy."""
    return _binary(Remainder, a, b, "mod")


def arctan2(a: Any, b: Any) -> Tensor:
    """The angle of the point (b, a) in radians, from -pi to pi."""
    return _binary(Arctan2, a, b)


def hypot(a: Any, b: Any) -> Tensor:
    """sqrt(a**2 + b**2), without overflow; the gradient is NaN where both are 0."""
    return _binary(Hypot, a, b)


def maximum(a: Any, b: Any) -> Tensor:
    """The larger of a and b, NaN where either is; the gradient is halved where they are equal."""
    return _binary(Maximum, a, b, "maximum")


def minimum(a: Any, b: Any) -> Tensor:
    """The smaller of a and b, NaN where either is; the gradient is halved where they are equal."""
    return _binary(Minimum, a, b, "minimum")


class Where(Function):
    """out = mask ? a : b, all of one shape; an operand given as None is the number `scalars[i]`."""

    @staticmethod
    def forward_numpy(ctx, mask, a, b, scalars):
        ctx.save(mask)
        dtype = (b if a is None else a).dtype
        first, second = (np.asarray(s, dtype) if x is None else x for x, s in zip((a, b), scalars, strict=True))
        return np.where(mask, first, second)

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        (mask,) = ctx.saved
        zero = np.zeros((), dout.dtype)
        return None, np.where(mask, dout, zero) if needs[1] else None, np.where(mask, zero, dout) if needs[2] else None

    @staticmethod
    def forward_cuda(ctx, mask, a, b, scalars):
        dtype = (b if a is None else a).dtype
        out = empty(mask.shape, dtype)
        floats = ("arithmetic", "where_forward", float)
        stem, name, number = floats if is_float(dtype) else ("integer", "where", np.int64)
        args = (mask, a, b, *(number(scalar or 0) for scalar in scalars), out, np.int64(out.size))
        launch(stem, name, grid(out), 256, args, T=dtype)
        ctx.save(mask)
        return out

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        grads = [None, None, None]
        for i in (1, 2):
            if needs[i]:
                grads[i], accumulate = gradient_target(into[i], dout.shape, dout.dtype)
                args = (ctx.saved[0], dout, grads[i], i == 1, accumulate, np.int64(dout.size))
                launch("arithmetic", "where_backward", grid(dout), 256, args, T=dout.dtype)
        return tuple(grads)


def where(condition: Any, a: Any, b: Any) -> Tensor:
    """a where the condition (bool or uint8 tensor or array) is not 0, else b; all broadcast, a or b may be a number."""
    device = "cuda" if any(isinstance(x, Tensor) and x.device == "cuda" for x in (condition, a, b)) else "cpu"
    condition = condition if isinstance(condition, Tensor) else Tensor(np.asarray(condition, bool), device=device)
    if condition.dtype.itemsize != 1:
        raise TypeError(f"where() needs a bool or uint8 condition, not {condition.dtype}")
    if is_number(a) and is_number(b):
        a = Tensor(a, device=condition.device)
    a, b = operands(a, b, device=device)
    check_numbers("where", a, b)
    shape = np.broadcast_shapes(*(x.shape for x in (condition, a, b) if isinstance(x, Tensor)))
    tensors = [broadcast_to(x, shape) if isinstance(x, Tensor) else None for x in (a, b)]
    scalars = tuple(None if isinstance(x, Tensor) else x for x in (a, b))
    return Where.apply(broadcast_to(condition, shape), *tensors, scalars=scalars)
