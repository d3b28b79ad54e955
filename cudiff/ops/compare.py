"""Comparisons and logic, element by element, and `any` and `all`: bool tensors without gradients.

Operands broadcast, and are converted to one dtype as in arithmetic. Only integers beside floats are compared as float64
on the CPU, as in NumPy, and as float32 on a GPU. Numbers other than 0, NaN too, are true.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from cudiff.backend import float32, float64, int64, is_float, is_low
from cudiff.cuda.kernels.elementwise import broadcast_layout
from cudiff.cuda.launch import blocks, empty, launch
from cudiff.function import Function
from cudiff.ops.cast import apply_pair, as_floating, as_tensor, as_tensors, as_wide, astype, operands, upcast
from cudiff.ops.elementwise import abs
from cudiff.ops.reduce import Axis, sum
from cudiff.tensor import Tensor

__all__ = [
    "all", "allclose", "any", "array_equal", "count_nonzero", "equal", "greater", "greater_equal", "isclose",
    "isfinite", "isinf", "isnan", "less", "less_equal", "logical_and", "logical_not", "logical_or", "logical_xor",
    "not_equal",
]

_LONGEST = np.iinfo(np.int64)


class Compare(Function):
    """NumPy's function `name` of a and b of one dtype. An operand given as None is the number `scalar`."""

    differentiable = False

    @staticmethod
    def forward_numpy(ctx, a, b, name, scalar=None):
        x, y = (scalar if operand is None else upcast(operand) for operand in (a, b))
        return np.asarray(getattr(np, name)(x, y))

    @staticmethod
    def forward_cuda(ctx, a, b, name, scalar=0):
        first = b if a is None else a
        shape = first.shape if a is None or b is None else np.broadcast_shapes(a.shape, b.shape)
        out = empty(shape, np.dtype(np.bool_))
        number, whole = (float(scalar), 0) if is_float(first.dtype) else (0.0, int(scalar))
        bounded = np.int64(min(max(whole, _LONGEST.min), _LONGEST.max))
        args = (out, a, b, number, bounded, np.int64(out.size), broadcast_layout(shape, a, b))
        launch("compare", name, blocks(out.size, 1024), 256, args, T=first.dtype)
        return out


def _has_integers(given: Sequence[Any]) -> bool:
    """Whether one of them is a tensor of integers."""
    return builtins.any(isinstance(x, Tensor) and x.dtype.kind in "iu" for x in given)


def _beside_integers(*given: Any) -> tuple[Any, ...]:
    """Floats of 16 bits beside a tensor of integers, which they may not hold, in float32."""
    if not _has_integers(given):
        return given
    return tuple([x.astype(float32) if is_low(getattr(x, "dtype", None)) else x for x in given])


def _compare(name: str, a: Any, b: Any) -> Tensor:
    given = _beside_integers(a, b)
    a, b = operands(*given)
    first = a if isinstance(a, Tensor) else b
    if is_float(first.dtype) and first.device == "cpu" and _has_integers(given):  # float32 may not hold them
        a, b = operands(*(astype(x, float64) if isinstance(x, Tensor) else x for x in given))
    return apply_pair(Compare, a, b, name=name)


def less(a: Any, b: Any) -> Tensor:
    """a < b."""
    return _compare("less", a, b)


def less_equal(a: Any, b: Any) -> Tensor:
    """a <= b."""
    return _compare("less_equal", a, b)


def greater(a: Any, b: Any) -> Tensor:
    """a > b."""
    return _compare("greater", a, b)


def greater_equal(a: Any, b: Any) -> Tensor:
    """a >= b."""
    return _compare("greater_equal", a, b)


def equal(a: Any, b: Any) -> Tensor:
    """a == b."""
    return _compare("equal", a, b)


def not_equal(a: Any, b: Any) -> Tensor:
    """a != b."""
    return _compare("not_equal", a, b)


def logical_and(a: Any, b: Any) -> Tensor:
    """Whether a and b are true."""
    return _compare("logical_and", a, b)


def logical_or(a: Any, b: Any) -> Tensor:
    """Whether a or b is true."""
    return _compare("logical_or", a, b)


def logical_xor(a: Any, b: Any) -> Tensor:
    """Whether one of a and b is true."""
    return _compare("logical_xor", a, b)


def logical_not(x: Any) -> Tensor:
    """Whether x is not true."""
    return equal(as_tensor(x), False)


def isnan(x: Any) -> Tensor:
    """Whether x is NaN."""
    x = as_tensor(x)
    return not_equal(x, x)


def isinf(x: Any) -> Tensor:
    """Whether x is infinite."""
    return equal(_size(x), math.inf)


def isfinite(x: Any) -> Tensor:
    """Whether x is neither NaN nor infinite."""
    return less(_size(x), math.inf)


def _size(x: Any) -> Tensor:
    """|x| in a floating dtype, without gradients."""
    return abs(as_floating(x).detach())


def any(x: Any, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Whether one element over `axis` is true; False for no elements."""
    return greater(count_nonzero(x, axis, keepdims), 0)


def all(x: Any, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Whether every element over `axis` is true; True for no elements."""
    return equal(sum(logical_not(x), axis, keepdims), 0)


def count_nonzero(x: Any, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """How many elements over `axis` are not 0: int64."""
    x = as_tensor(x)
    return sum(x if x.dtype == bool else not_equal(x, 0), axis, keepdims)


def isclose(a: Any, b: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> Tensor:
    """Whether |a - b| <= atol + rtol * |b|, or both are equal. NaN is close to nothing, to NaN where `equal_nan`."""
    a, b = (x.detach() for x in as_tensors(*_beside_integers(a, b)))
    larger, size = greater(a, b), abs(*as_wide(b))
    a, b = as_wide(a, b) if is_float(a.dtype) else (astype(a, int64), astype(b, int64))
    difference = a - b
    distance = abs(difference)
    near = logical_and(less_equal(distance, atol + rtol * size), isfinite(size))
    if not is_float(a.dtype):  # a difference beyond 64 bits has the other sign, or stays negative
        near = logical_and(near, logical_and(equal(greater(difference, 0), larger), greater_equal(distance, 0)))
    found = logical_or(near, equal(a, b))
    return logical_or(found, logical_and(isnan(a), isnan(b))) if equal_nan else found


def allclose(a: Any, b: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> bool:
    """Whether `isclose` of all elements; waits for a GPU."""
    return bool(all(isclose(a, b, rtol, atol, equal_nan)))


def array_equal(a: Any, b: Any) -> bool:
    """Whether a and b have one shape and equal elements; waits for a GPU."""
    return as_tensor(a).shape == as_tensor(b).shape and bool(all(equal(a, b)))
