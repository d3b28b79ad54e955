"""What attention's kernels are asked, and what they are given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from cudiff.backend import Array

SUMS = "sums"
"""The fusion of backward: the sums of the gradients over tiles of tokens, of which a linear layer before makes its
bias's gradient."""


class Problem(NamedTuple):
    """backward: else forward. images, queries, keys (tokens), heads, dim (channels of a head). aligned: whether every
    row of channels starts at a multiple of 16 bytes. products: see `gemm.product`. wanted: SUMS or nothing."""

    backward: bool
    dtype: np.dtype
    images: int
    queries: int
    keys: int
    heads: int
    dim: int
    aligned: bool
    products: int
    wanted: frozenset[str] = frozenset()


class Forward(NamedTuple):
    """Arrays: out, contiguous, and q (N, Tq, heads, D); k and v (N, Tk, heads, D); lse as attention.cu defines it,
    float32 (N, heads, Tq rounded up to a multiple of 64). Rows of q, k and v may be parts of longer ones."""

    out: Array
    lse: Array
    q: Array
    k: Array
    v: Array


class Backward(NamedTuple):
    """The same with the gradients; dout and out are contiguous. `sums`, for a kernel that fuses SUMS: given the number
    of tiles, three float32 arrays (N, tiles, heads, D), equal parts of one row, to be written."""

    dq: Array
    dk: Array
    dv: Array
    dout: Array
    q: Array
    k: Array
    v: Array
    out: Array
    lse: Array
    sums: Callable[[int], Sequence[Array]] | None
