"""The problem of attention, by which a kernel is chosen, and the kernels' operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from cudiff.backend import Array
from cudiff.cuda.kernels.attention.mask import Mask

SUMS = "sums"
"""The fused op of backward: sums of the gradients over tiles of tokens. The linear layer before computes its
bias's gradient from them."""


class Problem(NamedTuple):
    """backward: whether it is the backward pass. images, heads; queries, keys: tokens of an image; dim: channels of a
    head. aligned: whether every row of channels starts at a multiple of 16 bytes. products: see `gemm.product`.
    wanted: SUMS or nothing. masked: whether some pairs of a query and a key do not attend."""

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
    masked: bool = False


class Heads:
    """A part (N, T, heads, D) of an array, which it keeps: what kernels ask an array for, by the same names. A view of
    CuPy's takes ten times as long. ptr: the address of its first element."""

    __slots__ = ("array", "dtype", "ptr", "shape", "strides")

    def __init__(self, array: Array, ptr: int, shape: tuple[int, ...], strides: tuple[int, ...]):
        self.array, self.dtype, self.ptr, self.shape, self.strides = array, array.dtype, ptr, shape, strides

    @property
    def data(self) -> Heads:
        return self

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, images: slice) -> Heads:
        first, last, _ = images.indices(len(self))
        return Heads(self.array, self.ptr + first * self.strides[0], (last - first, *self.shape[1:]), self.strides)


class Forward(NamedTuple):
    """out and q are (N, Tq, heads, D), k and v (N, Tk, heads, D). lse is float32 (N, heads, Tq rounded up to a multiple
    of 64), as attention.cu defines it. out is contiguous; q, k and v may be `Heads`."""

    out: Array
    lse: Array
    q: Array
    k: Array
    v: Array
    mask: Mask | None = None


class Backward(NamedTuple):
    """As `Forward`, with the gradients; dout and out are contiguous. sums(tiles), called by a kernel that fuses SUMS:
    returns three parts (N, tiles, heads, D) of a float32 array for it to write."""

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
    mask: Mask | None = None
