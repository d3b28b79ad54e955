"""Angles and hyperbolic functions of one tensor, element by element; each is a `Unary` of elementwise.py and .cu."""

from __future__ import annotations

from typing import Any

import numpy as np

from cudiff.ops.elementwise import Unary, unary
from cudiff.tensor import Tensor

__all__ = [
    "arccos", "arccosh", "arcsin", "arcsinh", "arctan", "arctanh", "cos", "cosh", "sin", "sinh", "tan", "tanh",
]


class Sin(Unary):
    value = staticmethod(np.sin)
    gradient = staticmethod(lambda dout, x: dout * np.cos(x))


class Cos(Unary):
    value = staticmethod(np.cos)
    gradient = staticmethod(lambda dout, x: -dout * np.sin(x))


class Tan(Unary):
    value = staticmethod(np.tan)
    gradient = staticmethod(lambda dout, x: dout * (1 + np.tan(x) ** 2))


class Tanh(Unary):
    """The gradient is computed from x: from an out rounded to bfloat16, 1 - out² would lose most digits near ±1."""

    value = staticmethod(np.tanh)

    @staticmethod
    def gradient(dout, x):
        dx = np.asarray(np.tanh(x))
        dx *= dx
        np.subtract(1, dx, out=dx)
        dx *= dout
        return dx


class Arcsin(Unary):
    value = staticmethod(np.arcsin)
    gradient = staticmethod(lambda dout, x: dout / np.sqrt((1 - x) * (1 + x)))


class Arccos(Unary):
    value = staticmethod(np.arccos)
    gradient = staticmethod(lambda dout, x: -dout / np.sqrt((1 - x) * (1 + x)))


class Arctan(Unary):
    value = staticmethod(np.arctan)
    gradient = staticmethod(lambda dout, x: dout / (1 + x * x))


class Sinh(Unary):
    value = staticmethod(np.sinh)
    gradient = staticmethod(lambda dout, x: dout * np.cosh(x))


class Cosh(Unary):
    value = staticmethod(np.cosh)
    gradient = staticmethod(lambda dout, x: dout * np.sinh(x))


class Arcsinh(Unary):
    value = staticmethod(np.arcsinh)
    gradient = staticmethod(lambda dout, x: dout / np.sqrt(1 + x * x))


class Arccosh(Unary):
    value = staticmethod(np.arccosh)
    gradient = staticmethod(lambda dout, x: dout / np.sqrt((x - 1) * (x + 1)))


class Arctanh(Unary):
    value = staticmethod(np.arctanh)
    gradient = staticmethod(lambda dout, x: dout / ((1 - x) * (1 + x)))


def sin(x: Any) -> Tensor:
    """Sine of x in radians."""
    return unary(Sin, x)


def cos(x: Any) -> Tensor:
    """Cosine of x in radians."""
    return unary(Cos, x)


def tan(x: Any) -> Tensor:
    """Tangent of x in radians."""
    return unary(Tan, x)


def arcsin(x: Any) -> Tensor:
    """The angle from -pi / 2 to pi / 2 whose sine is x; NaN beyond -1 and 1."""
    return unary(Arcsin, x)


def arccos(x: Any) -> Tensor:
    """The angle from 0 to pi whose cosine is x; NaN beyond -1 and 1."""
    return unary(Arccos, x)


def arctan(x: Any) -> Tensor:
    """The angle from -pi / 2 to pi / 2 whose tangent is x."""
    return unary(Arctan, x)


def sinh(x: Any) -> Tensor:
    """Hyperbolic sine."""
    return unary(Sinh, x)


def cosh(x: Any) -> Tensor:
    """Hyperbolic cosine."""
    return unary(Cosh, x)


def tanh(x: Any) -> Tensor:
    """Hyperbolic tangent."""
    return unary(Tanh, x)


def arcsinh(x: Any) -> Tensor:
    """The number whose hyperbolic sine is x."""
    return unary(Arcsinh, x)


def arccosh(x: Any) -> Tensor:
    """The number >= 0 whose hyperbolic cosine is x; NaN below 1."""
    return unary(Arccosh, x)


def arctanh(x: Any) -> Tensor:
    """The number whose hyperbolic tangent is x; NaN beyond -1 and 1."""
    return unary(Arctanh, x)
