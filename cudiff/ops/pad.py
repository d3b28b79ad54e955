"""Borders around a tensor."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from cudiff.backend import is_float
from cudiff.cuda.kernels.shape import region
from cudiff.ops.cast import as_tensor, is_number
from cudiff.ops.index import getitem
from cudiff.ops.place import place
from cudiff.ops.shape import broadcast_to, concatenate
from cudiff.tensor import Tensor

__all__ = ["pad"]


def pad(x: Any, pad_width: int | Sequence[Any], mode: str = "constant", constant_values: float = 0) -> Tensor:
    """x with a border. `pad_width` as in NumPy: one int, (before, after), or a pair for each axis.

    mode: "constant" is the number `constant_values`; "edge" repeats the outermost elements; "reflect" mirrors those
    inside of them, and takes widths below the axis's size. Raises ValueError for other modes and widths, TypeError for
    several constant values.
    """
    x = as_tensor(x)
    try:
        widths = np.broadcast_to(pad_width, (x.ndim, 2))
    except ValueError:
        raise ValueError(f"pad widths are one pair, or one for each of {x.ndim} axes, not {pad_width}") from None
    pairs = tuple((operator.index(before), operator.index(after)) for before, after in widths)
    if any(before < 0 or after < 0 for before, after in pairs):
        raise ValueError(f"pad widths are not negative: {pairs}")
    if not is_number(constant_values):
        raise TypeError(f"pad takes one number for constant_values, not {constant_values}")
    if not is_float(x.dtype) and not math.isfinite(constant_values):
        raise ValueError(f"pad of {x.dtype} takes a finite constant, not {constant_values}")
    if mode == "constant":
        shape = tuple(before + size + after for size, (before, after) in zip(x.shape, pairs, strict=True))
        return place(x, shape, region(x.shape, pairs), constant_values)
    if mode not in ("edge", "reflect"):
        raise ValueError(f"unknown mode '{mode}' of pad: use 'constant', 'edge' or 'reflect'")
    for axis, (before, after) in enumerate(pairs):
        size = x.shape[axis]
        least = 1 if mode == "edge" else max(before, after) + 1
        if (before or after) and size < least:
            raise ValueError(f"pad of mode '{mode}' by {before}, {after} needs an axis of {least}, not of {size}")
        if before or after:
            left, right = (_edges if mode == "edge" else _mirrored)(x, axis, before, after)
            x = concatenate([part for part in (left, x, right) if part.shape[axis]], axis)
    return x


def _edges(x: Tensor, axis: int, before: int, after: int) -> tuple[Tensor, Tensor]:
    shape, first = x.shape[:axis], (slice(None),) * axis
    left, right = (
        broadcast_to(getitem(x, (*first, part)), (*shape, width, *x.shape[axis + 1 :]))
        for part, width in ((slice(1), before), (slice(-1, None), after))
    )
    return left, right


def _mirrored(x: Tensor, axis: int, before: int, after: int) -> tuple[Tensor, Tensor]:
    first, last = (slice(None),) * axis, x.shape[axis] - 2
    stop = last - after if after <= last else None
    return getitem(x, (*first, slice(before, 0, -1))), getitem(x, (*first, slice(last, stop, -1)))
