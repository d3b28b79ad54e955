"""The problem of group norm, by which a kernel is chosen, and the kernels' operands."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from cudiff.backend import Array, float32
from cudiff.cuda.sums import empty_statistics
from cudiff.statistics import SUMS, ChannelStatistics


class Problem(NamedTuple):
    """backward: whether it is the backward pass. pixels: of an image. channels1, channels2: of the first source and of
    the second, 0 where there is none. packs: whether all channels and addresses allow packs of 16 bytes. summed:
    whether statistics came with every source (forward), or PRODUCTS with dy (backward). two_terms: whether backward
    adds two arrays to dx. drops: whether dropout follows. Arrays are contiguous."""

    backward: bool
    dtype: np.dtype
    images: int
    pixels: int
    channels1: int
    channels2: int
    groups: int
    packs: bool
    summed: bool
    two_terms: bool
    drops: bool = False
    wanted: frozenset[str] = frozenset()

    @property
    def channels(self) -> int:
        return self.channels1 + self.channels2

    @property
    def pack(self) -> int:
        """Channels that are read at once."""
        return 16 // self.dtype.itemsize if self.packs else 1

    @property
    def constants(self) -> dict[str, Any]:
        """The constants of every kernel."""
        return {"T": self.dtype, "VEC": int(self.packs), "DROPS": int(self.drops)}


class Dropout(NamedTuple):
    """Dropout of the norm's output, or none. mask: uint8 (N, ceil(elements of an image / 8)), see dropout.cuh; the
    forward writes it. scale: the factor of what is kept. The others say how the mask is drawn."""

    mask: Array | None = None
    scale: float = 1.0
    step: Array | None = None
    seed: np.uint64 = np.uint64(0)
    stream: np.uint32 = np.uint32(0)
    first: np.uint32 = np.uint32(0)
    threshold: np.uint32 = np.uint32(0)


NO_DROPOUT = Dropout()


class Forward(NamedTuple):
    """Written: y (N, ..., C1 + C2), and mean and rstd (N, G), float32. Read: x (N, ..., C1); x2 (N, ..., C2) or None;
    weight and bias (C,), float32; scale and shift (N, C), float32, or None; statistics: those that came with x and
    with x2, or None."""

    y: Array
    mean: Array
    rstd: Array
    x: Array
    x2: Array | None
    weight: Array
    bias: Array
    scale: Array | None
    shift: Array | None
    statistics: tuple[ChannelStatistics | None, ChannelStatistics | None]
    eps: float
    silu: bool
    dropout: Dropout = NO_DROPOUT


Sum = tuple[Array | None, Array | None]
"""A gradient's array and the addend that the kernel adds to its result, each or None: see `gradient_sum`."""

Target = tuple[Array | None, bool]
"""A gradient's array, or None, and whether the kernel adds to it: see `gradient_target`."""


class Backward(NamedTuple):
    """As `Forward`, with dy and where the gradients go. A second addend of a lone source's gradient stands in dx2. y:
    receives the output again, or None. statistics: PRODUCTS that came with dy, or None; with them dy is d_preact, and
    there is no dropout. din_statistics: receives SUMS of dx at 0 and of dx2 at 1, or None."""

    dy: Array
    x: Array
    x2: Array | None
    affine: tuple[Any, ...]
    silu: bool
    dx: Sum
    dx2: Sum
    dweight: Target
    dbias: Target
    dscale: Target
    dshift: Target
    y: Array | None
    statistics: ChannelStatistics | None
    din_statistics: dict[int, ChannelStatistics | None] | None
    needs: tuple[bool, ...]
    dropout: Dropout = NO_DROPOUT

    def added_to(self) -> list[Array]:
        """The arrays that the kernel reads and changes: the gradients that it adds to, and dy if y is dy."""
        targets = (self.dx, self.dx2, self.dweight, self.dbias, self.dscale, self.dshift, (self.y, self.dy))
        return [out for out, before in targets if out is not None and (before is True or before is out)]

    def make_sums(self, p: Problem, tiles: int) -> tuple[Array | None, Array | None]:
        """Put new SUMS of `tiles` tiles into `din_statistics`. Returns their arrays for dx and dx2, or Nones."""
        if self.din_statistics is None:
            return None, None
        arrays: list[Array | None] = [None, None]
        for i, width in enumerate((p.channels1, p.channels2)):
            if self.needs[i]:
                self.din_statistics[i] = statistics = empty_statistics(SUMS, p.images, tiles, width)
                arrays[i] = statistics.sums
        return arrays[0], arrays[1]


def problem_of(backward: bool, dtype: np.dtype, x: tuple[int, ...], x2: tuple[int, ...] | None, groups: int,
               places: int, summed: bool, two_terms: bool, drops: bool) -> Problem:
    """The problem of sources of these shapes. places: of all arrays' addresses the bits of `places_of`."""
    channels1, channels2 = x[-1], 0 if x2 is None else x2[-1]
    packs = (places | (channels1 | channels2) * dtype.itemsize) % 16 == 0
    pixels = math.prod(x[1:-1])
    return Problem(backward, dtype, x[0], pixels, channels1, channels2, groups, packs, summed, two_terms, drops)


def places_of(*arrays: Array | None) -> int:
    """The bits below 16 of all addresses together."""
    places = 0
    for array in arrays:
        if array is not None:
            places |= array.data.ptr
    return places % 16


def require_float32(*parameters: Array | None) -> None:
    """Raise TypeError for a norm's parameter that is not."""
    for array in parameters:
        if array is not None and array.dtype != float32:
            raise TypeError("norms on CUDA take float32 weight, bias, scale and shift: use .astype('float32')")


def kernel_constants(x: Array, *others: Array | None) -> dict[str, Any]:
    """T, and VEC: whether all channels and addresses allow packs of 16 bytes."""
    widths = [array.shape[-1] * x.dtype.itemsize for array in (x, *others) if array is not None]
    return {"T": x.dtype, "VEC": int(math.gcd(places_of(x, *others), *widths) % 16 == 0)}
