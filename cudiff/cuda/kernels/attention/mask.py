"""attention's mask, as its kernels read it."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from cudiff.backend import Array
from cudiff.cuda.launch import blocks, empty, launch

TILE = 64


class Mask(NamedTuple):
    """bits: uint64 (N or 1, heads or 1, tiles of 64 keys, queries rounded up to 64), a bit for each key of a tile.
    states: uint8 (N or 1, heads or 1, ...), what each tile of 64 queries and 64 keys has: see attention_mask.cuh."""

    bits: Array
    states: Array

    def of(self, images: slice) -> Mask:
        """That of some of the images."""
        return self if len(self.bits) == 1 else Mask(*(array[images] for array in self))


def pack(mask: Array, queries: int, keys: int) -> Mask:
    """The mask of bools that broadcast to (N, heads, queries, keys), packed by one launch."""
    mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    masks = mask.shape[:2]
    rows, columns = blocks(queries, TILE), blocks(keys, TILE)
    bits = empty((*masks, columns, TILE * rows), np.dtype(np.uint64))
    states = empty((*masks, rows * 8 * blocks(columns, 8) + columns * 8 * blocks(rows, 8)), np.dtype(np.uint8))
    steps = (np.int64(step if size > 1 else 0) for step, size in zip(mask.strides, mask.shape, strict=True))
    args = (bits, states, mask, masks[1], queries, keys, *steps)
    launch("attention_mask", "pack", math.prod(masks) * rows * columns, 32, args)
    return Mask(bits, states)


def arguments(mask: Mask | None) -> tuple[Array | None, Array | None, int, int]:
    """The last arguments of attention's kernels: the mask, and the steps from an image's to the next, and a head's."""
    if mask is None:
        return None, None, 0, 0
    images, heads = mask.bits.shape[:2]
    return *mask, heads if images > 1 else 0, int(heads > 1)
