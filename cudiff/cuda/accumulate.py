"""Where a backward on CUDA writes a gradient, and how the tape adds to one."""

from __future__ import annotations

from typing import Any

import numpy as np

from cudiff.backend import Array
from cudiff.cuda.launch import blocks, empty, launch
from cudiff.gradient import Kept, Vacant


def gradient_target(into: Array | Vacant | Kept | None, shape: Any, dtype: Any) -> tuple[Array, bool]:
    """Where a backward writes, and whether it adds: `into` (over a `Vacant`) if it has this dtype, else a new array."""
    if isinstance(into, Vacant):
        return (into.array if into.array.dtype == dtype else empty(shape, dtype)), False
    if into is not None and not isinstance(into, Kept) and into.dtype == dtype:
        return into, True
    return empty(shape, dtype), False


def gradient_sum(into: Array | Vacant | Kept | None, shape: Any, dtype: Any) -> tuple[Array, Array | None]:
    """Where a backward that can add what lies elsewhere writes, and what it adds, if anything."""
    target, addend, more = gradient_sums(into, shape, dtype)
    if addend is not None and more is not None:
        addend = addend.copy()
        add_into(addend, more)
    return target, addend


def gradient_sums(into: Array | Vacant | Kept | None, shape: Any,
                  dtype: Any) -> tuple[Array, Array | None, Array | None]:
    """The same for one that adds up to two terms."""
    if isinstance(into, Kept) and into.array.dtype == dtype:
        into.sum = empty(shape, dtype)
        return into.sum, into.array, into.more
    target, add = gradient_target(into, shape, dtype)
    return target, target if add else None, None


def add_into(total: Array, term: Array) -> None:
    """total += term, elementwise, in place; the tape's own kernel."""
    launch(
        "accumulate", "add_into", blocks(total.size, 1024), 256, (total, term, np.int64(total.size)),
        TOTAL=total.dtype, TERM=term.dtype,
    )
