"""Channel statistics: sums for each channel, which a kernel writes beside images or their gradient for the operation
that reads these next."""

from __future__ import annotations

from enum import Enum

import numpy as np

from cudiff.backend import Array, float32


class Kind(Enum):
    """What is summed over the pixels of a tile, for each channel, and how many numbers that takes."""

    SUMS = "of a gradient", 1
    MOMENTS = "of images and of their squares", 2
    CENTRED = "pixels, a centre, and the sums of differences from it and of their squares", 4
    PRODUCTS = "of d_preact, the gradient of a norm's output before SiLU, and of d_preact times the norm's input", 2

    def __init__(self, of: str, numbers: int) -> None:
        self.numbers = numbers


SUMS, MOMENTS, CENTRED, PRODUCTS = Kind  # found sooner than by Kind, as in `cudiff.gradient`


class ChannelStatistics:
    """Sums over tiles of pixels. sums: float32 (N, tiles, C, kind.numbers), or (N, tiles, C) if the kind is SUMS. N is
    1 if a tile's pixels may be of several images."""

    __slots__ = ("kind", "sums", "tiles")

    def __init__(self, kind: Kind, sums: Array):
        self.kind, self.sums, self.tiles = kind, sums, sums.shape[1]


def moments(dtype: np.dtype) -> Kind:
    """The kind of statistics for a norm of images of this dtype. Those of float32 are sums around a centre, because the
    mean may be far from 0."""
    return Kind.CENTRED if dtype == float32 else Kind.MOMENTS
