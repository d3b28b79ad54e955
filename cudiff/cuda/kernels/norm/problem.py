"""What group norm's kernels are asked, and what they are given."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from cudiff.backend import Array, float32
from cudiff.cuda.sums import empty_statistics
from cudiff.statistics import ChannelStatistics, Kind


class Problem(NamedTuple):
    """backward: else forward. images; pixels of an image; channels of the first source and of the second, 0 where there
    is one. packs: whether all channels and addresses allow packs of 16 bytes. summed: whether the sums over an image
    came with the inputs, forward with every source, backward with dy. two_terms: backward, whether dx is to be added to
    two terms, one of which lies elsewhere. multiprocessors: of the GPU."""

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
    multiprocessors: int
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
        """Of every kernel."""
        return {"T": self.dtype, "VEC": int(self.packs)}


class Forward(NamedTuple):
    """Arrays: y (N, ..., C1 + C2) and float32 mean and rstd (N, G), to be written; x (N, ..., C1) and x2 (N, ..., C2)
    or None; float32 weight and bias (C,), scale and shift (N, C) or None; `statistics`, those that came with x and
    x2, or None."""

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


Target = list[Any]
"""Where a gradient goes, or None; of dx and dx2 also what is added to it, of the others whether it is added there."""


class Backward(NamedTuple):
    """The same with dy, where y goes once more (or None), and the gradients' targets. `statistics`, or
    None: PRODUCTS that came with dy, which is then d_preact. `leaves` receives at 0 and 1 the SUMS of dx and dx2, where
    they are wanted."""

    dy: Array
    x: Array
    x2: Array | None
    affine: tuple[Any, ...]
    silu: bool
    dx: Target
    dx2: Target
    dweight: Target
    dbias: Target
    dscale: Target
    dshift: Target
    y: Array | None
    statistics: ChannelStatistics | None
    leaves: dict[int, ChannelStatistics | None] | None
    needs: tuple[bool, ...]

    def added_to(self) -> list[Array]:
        """The gradients that are added to those there."""
        targets = (self.dx, self.dx2, self.dweight, self.dbias, self.dscale, self.dshift)
        return [out for out, before in targets if out is not None and (before is True or before is out)]

    def make_sums(self, p: Problem, tiles: int) -> tuple[Array | None, Array | None]:
        """Fill `leaves`, of so many tiles. Returns the arrays for the sums of dx and dx2."""
        if self.leaves is None:
            return None, None
        arrays: list[Array | None] = [None, None]
        for i, width in enumerate((p.channels1, p.channels2)):
            if self.needs[i]:
                self.leaves[i] = statistics = empty_statistics(Kind.SUMS, p.images, tiles, width)
                arrays[i] = statistics.sums
        return arrays[0], arrays[1]


def extent(x: Array, x2: Array | None) -> tuple[int, int, int, int]:
    """Images, pixels an image, and the channels of both sources."""
    return x.shape[0], math.prod(x.shape[1:-1]), x.shape[-1], 0 if x2 is None else x2.shape[-1]


def kernel_constants(x: Array, *others: Array | None, parameters: tuple[Array | None, ...] = ()) -> dict[str, Any]:
    """T and VEC: packs of 16 bytes where all channels and addresses allow them. `parameters` must be float32."""
    for array in parameters:
        if array is not None and array.dtype != float32:
            raise TypeError("norms on CUDA take float32 weight, bias, scale and shift: use .astype('float32')")
    units = [math.gcd(a.data.ptr, a.shape[-1] * x.dtype.itemsize) for a in (x, *others) if a is not None]
    return {"T": x.dtype, "VEC": int(math.gcd(*units) % 16 == 0)}
