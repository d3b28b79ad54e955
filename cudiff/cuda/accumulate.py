"""Where a backward on CUDA writes a gradient, and how the tape adds to one."""

from __future__ import annotations

from typing import Any

import numpy as np

from cudiff.backend import Array
from cudiff.cuda.launch import blocks, empty, launch
from cudiff.gradient import HOLDS, SHARED, Slot


def gradient_target(slot: Slot | None, shape: Any, dtype: Any) -> tuple[Array, bool]:
    """The array that a backward writes to, and whether it adds there instead of overwriting.

    This is the slot's array if it has this dtype and may be written to, else a new one of this shape and dtype.
    """
    if slot is None or slot.state is SHARED or slot.array.dtype != dtype:
        return empty(shape, dtype), False
    slot.whole = slot.array
    return slot.array, slot.state is HOLDS


def gradient_sum(slot: Slot | None, shape: Any, dtype: Any) -> tuple[Array, Array | None]:
    """The array that a backward writes to, and the array that it adds to its result, or None. Both may be one array."""
    target, addend, pending = gradient_sums(slot, shape, dtype)
    if addend is not None and pending is not None:
        addend = addend.copy()
        add_into(addend, pending)
    return target, addend


def gradient_sums(slot: Slot | None, shape: Any, dtype: Any) -> tuple[Array, Array | None, Array | None]:
    """`gradient_sum` for a backward that can add two arrays to its result. The second, or None, is returned too."""
    if slot is not None and slot.state is SHARED and slot.array.dtype == dtype:
        slot.whole = empty(shape, dtype)
        return slot.whole, slot.array, slot.pending
    target, add = gradient_target(slot, shape, dtype)
    return target, target if add else None, None


def add_into(total: Array, term: Array) -> None:
    """total += term, elementwise, in place, by a launch of its own. Their dtypes may differ."""
    launch(
        "accumulate", "add_into", blocks(total.size, 1024), 256, (total, term, np.int64(total.size)),
        TOTAL=total.dtype, TERM=term.dtype,
    )
