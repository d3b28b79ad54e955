"""Channel statistics: sums that travel with images, or with their gradient, for whoever reads them next."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import numpy as np

from cudiff.backend import Array, float32


class Kind(Enum):
    """What is summed over the pixels of a tile, for each channel; the numbers that this takes."""

    SUMS = "of a gradient", 1
    MOMENTS = "of images and of their squares", 2
    CENTRED = "pixels, a centre, and the sums of differences from it and of their squares", 4
    PRODUCTS = "of d_preact, the gradient of a norm's output before SiLU, and of d_preact times the norm's input", 2

    def __init__(self, of: str, numbers: int) -> None:
        self.of, self.numbers = of, numbers


class ChannelStatistics(NamedTuple):
    """sums: float32 (N, tiles, C, numbers) of a `kind`, (N, tiles, C) of SUMS; N is 1 where tiles are of all images."""

    kind: Kind
    sums: Array

    @property
    def tiles(self) -> int:
        return self.sums.shape[1]


def moments(dtype: np.dtype) -> Kind:
    """What a norm is left of images of this dtype: around a centre those of float32, whose mean may be far from 0."""
    return Kind.CENTRED if dtype == float32 else Kind.MOMENTS
