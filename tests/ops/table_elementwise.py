"""Rows of tests/ops/table.py of functions of one tensor, element by element."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from cudiff import ops
from tests.ops.cases import MAGNITUDES, ORDINARY, Case, Numbers, row

_erf = np.vectorize(math.erf, otypes=[float])
NOT_ZERO = ("ordinary", "tiny", "large", "mixed")
UP_TO_ONE = ("ordinary", "tiny", "some zeros", "zeros")
_UNARY: dict[str, tuple[Callable[[Any], Any], bool, tuple[str, ...]]] = {
    "negative": (lambda x: -x, False, MAGNITUDES), "abs": (np.abs, False, MAGNITUDES),
    "square": (lambda x: x * x, False, MAGNITUDES), "exp": (np.exp, False, UP_TO_ONE),
    "cbrt": (np.cbrt, False, NOT_ZERO),
    "log": (np.log, True, NOT_ZERO), "sqrt": (np.sqrt, True, NOT_ZERO), "sin": (np.sin, False, UP_TO_ONE),
    "cos": (np.cos, False, UP_TO_ONE), "tanh": (np.tanh, False, UP_TO_ONE),
    "sign": (np.sign, False, MAGNITUDES), "floor": (np.floor, False, MAGNITUDES), "ceil": (np.ceil, False, MAGNITUDES),
    "round": (np.round, False, MAGNITUDES), "log1p": (np.log1p, True, NOT_ZERO), "expm1": (np.expm1, False, UP_TO_ONE),
    "exp2": (np.exp2, False, UP_TO_ONE), "log2": (np.log2, True, NOT_ZERO), "log10": (np.log10, True, NOT_ZERO),
    "sinh": (np.sinh, False, UP_TO_ONE), "cosh": (np.cosh, False, UP_TO_ONE), "arctan": (np.arctan, False, MAGNITUDES),
    "arcsinh": (np.arcsinh, False, MAGNITUDES),
    "tan": (np.tan, False, ("tiny", "some zeros", "zeros")), "reciprocal": (np.reciprocal, False, NOT_ZERO),
    "sigmoid": (lambda x: 1 / (1 + np.exp(-x)), False, UP_TO_ONE),
    "relu": (lambda x: np.where(x > 0, x, 0.0), False, MAGNITUDES),
    "silu": (lambda x: x / (1 + np.exp(-x)), False, UP_TO_ONE),
    "softplus": (lambda x: np.logaddexp(0, x), False, UP_TO_ONE),
    "leaky_relu": (lambda x: np.where(x > 0, x, 0.01 * x), False, MAGNITUDES[:-2]),
    "elu": (lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))), False, ("ordinary", "tiny")),
    "gelu": (lambda x: x * 0.5 * (1 + _erf(x / math.sqrt(2))), False, UP_TO_ONE),
}
for _name, (_meaning, _positive, _magnitudes) in _UNARY.items():
    def _unary(n: Numbers, name: str = _name, meaning: Any = _meaning, positive: bool = _positive) -> Case:
        x = n.values(*n.shape(n.size(0, 1, 2, 3)), positive=positive)
        near_one = name == "gelu"  # where x is below 0 its error function cancels all but the last digits
        return Case(getattr(ops, name), (x,), meaning, terms=1 + near_one, steps=1 + 3 * near_one)

    row(_name, _magnitudes)(_unary)


_LIMITED = {"arcsin": (0, 0.6), "arccos": (0, 0.6), "arctanh": (0, 0.6), "arccosh": (3, 1)}  # start, and scale
for _name, (_start, _scale) in _LIMITED.items():
    def _limited(n: Numbers, name: str = _name, start: float = _start, scale: float = _scale) -> Case:
        x = start + scale * n.values(*n.shape(2))
        return Case(getattr(ops, name), (x,), getattr(np, name), terms=2)  # NumPy's float32 is 2.4 units off at times

    row(_name, ORDINARY if _start else UP_TO_ONE)(_limited)
