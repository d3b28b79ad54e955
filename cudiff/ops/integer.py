"""Arithmetic of integers, and bits of integers and bools. It wraps around as in NumPy, and has no gradients."""

from __future__ import annotations

from typing import Any

import numpy as np

from cudiff.cuda.kernels.elementwise import broadcast_layout
from cudiff.cuda.launch import blocks, empty, launch
from cudiff.function import Function
from cudiff.ops.cast import apply_pair, operands
from cudiff.tensor import Tensor

__all__ = ["bitwise_and", "bitwise_or", "bitwise_xor", "invert", "left_shift", "right_shift"]


class Integer(Function):
    """NumPy's function `name` of a and b of one dtype. An operand given as None is the number `scalar`. For a function
    of one operand b and `scalar` are None."""

    differentiable = False

    @staticmethod
    def forward_numpy(ctx, a, b, name, scalar=None):
        dtype = (b if a is None else a).dtype
        given = [operand for operand in (scalar if a is None else a, scalar if b is None else b) if operand is not None]
        return np.asarray(getattr(np, name)(*(np.asarray(operand, dtype) for operand in given)))

    @staticmethod
    def forward_cuda(ctx, a, b, name, scalar=None):
        first = b if a is None else a
        shape = first.shape if a is None or b is None else np.broadcast_shapes(a.shape, b.shape)
        out = empty(shape, first.dtype)
        args = (out, a, b, np.int64(scalar or 0), np.int64(out.size), broadcast_layout(shape, a, b))
        launch("integer", name, blocks(out.size, 1024), 256, args, T=first.dtype)
        return out


_OF_BOOLS = {"add": "bitwise_or", "maximum": "bitwise_or", "multiply": "bitwise_and", "minimum": "bitwise_and"}


def integer(name: str, a: Any, b: Any = None) -> Tensor:
    """NumPy's function `name` of integers or bools from `operands`: tensors of one dtype, or a tensor and a number.

    Raises TypeError for bools in a function that does not take them, and as `check_numbers` does.
    """
    dtype = (a if isinstance(a, Tensor) else b).dtype
    if dtype == np.bool_:
        name = _OF_BOOLS.get(name, name)
        if not name.startswith("bitwise"):
            raise TypeError(f"{name} takes integers, not bools: use .astype('int32')")
    check_numbers(name, a, b)
    return apply_pair(Integer, a, b, name=name)


def check_numbers(name: str, *found: Any) -> None:
    """Raises OverflowError for a number that does not fit the dtype of the integer tensor beside it."""
    dtype = next(x.dtype for x in found if isinstance(x, Tensor))
    for x in found:
        if isinstance(x, int) and dtype.kind in "iu" and not np.iinfo(dtype).min <= x <= np.iinfo(dtype).max:
            raise OverflowError(f"{name}: {x} is no {dtype}: use .astype('int64') of the tensor")


def bitwise_and(a: Any, b: Any) -> Tensor:
    """a & b of integers, bit by bit, or of bools. Raises TypeError for floats."""
    return _bits("bitwise_and", "&", a, b)


def bitwise_or(a: Any, b: Any) -> Tensor:
    """a | b of integers, bit by bit, or of bools. Raises TypeError for floats."""
    return _bits("bitwise_or", "|", a, b)


def bitwise_xor(a: Any, b: Any) -> Tensor:
    """a ^ b of integers, bit by bit, or of bools. Raises TypeError for floats."""
    return _bits("bitwise_xor", "^", a, b)


def invert(x: Any) -> Tensor:
    """~x of integers, bit by bit, or of bools. Raises TypeError for floats."""
    (x,) = operands(x)
    every = True if x.dtype == np.bool_ else np.iinfo(x.dtype).max if x.dtype.kind == "u" else -1
    return bitwise_xor(x, every)


def left_shift(a: Any, b: Any) -> Tensor:
    """a << b of integers; bits beyond the dtype's are lost. Raises TypeError for floats and bools."""
    return _bits("left_shift", "<<", a, b)


def right_shift(a: Any, b: Any) -> Tensor:
    """a >> b of integers, which keeps the sign. Raises TypeError for floats and bools."""
    return _bits("right_shift", ">>", a, b)


def _bits(name: str, operator: str, *given: Any) -> Tensor:
    found = operands(*given)
    for x in found:
        kind = getattr(x, "dtype", np.dtype(type(x)))
        if kind.kind not in "biu" and name.endswith("shift"):
            raise TypeError(f"{operator} takes integers, not {kind}: use .astype('int32')")
        if kind.kind not in "biu":
            raise TypeError(f"{operator} takes bools and integers, not {kind}: compare first, as in (x > 0) & (x < 1)")
    return integer(name, *found)
