"""The output tiles of `gemm_sm90`, how blocks share them, and the times that this takes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from cudiff.cuda.kernels.convolution.plans_sm90 import at_once
from cudiff.cuda.launch import blocks
from cudiff.cuda.tiles import Planner

ROWS, DEPTH = 128, 64  # of a tile, and of a step
NARROW = 64  # columns of the tile for results of no more
STEPS = {256: 0.65, 192: 0.495, 128: 0.36, NARROW: 0.28}  # microseconds of a step, by a tile's columns


class Plan(NamedTuple):
    """columns: of a tile. cluster: blocks that share its depth. transposed: whether the transposed product is computed,
    b·aᵀ, so that a tile's rows are b's. splits: parts of the depth (split K) of all but the first `whole` rows of
    tiles; each part of a tile is a block's work, and a sum of the parts follows."""

    columns: int
    cluster: int
    transposed: int
    splits: int = 1
    whole: int = 0

    @property
    def choice(self) -> list[int]:
        return [*self]


def plans(rows: int, columns: int, depth: int, low_out: bool, batches: int = 1,
          images: int = 0) -> Iterator[Plan]:
    """All plans, for results of 16 bits if `low_out`, else of float32. images: elements of the images of which a
    convolution's weight gradient multiplies windows, with `whole_channels` as its columns; 0 for other products.

    Split K: as many rows of tiles as fill whole waves of blocks stay whole. The other tiles, which would leave
    multiprocessors idle, are split into parts of 8 steps or more, so many that their blocks fill one to four waves.
    """
    for width, cluster, transposed in itertools.product(STEPS, (1, 2, 4), (0, 1)):
        plan = Plan(width, cluster, transposed)
        if low_out and (transposed or width // cluster % 64):
            continue
        across = rows if transposed else columns
        if width == NARROW < across or (images and not transposed):
            continue
        # A cluster computes one tile, with at least a step for each block, and all clusters run at once.
        tiles, together = batches * tiles_of(plan, rows, columns), at_once(cluster)
        if cluster == 1 or (cluster <= blocks(depth, DEPTH) and tiles <= together):
            yield plan
        if cluster == batches == 1 and not low_out:
            across = blocks(across, width)
            whole = tiles // together * together // across
            rest = tiles - whole * across
            most = depth // DEPTH // 8 if rest else 1
            if images and whole:
                continue
            for splits in sorted({min(waves * together // max(1, rest), most) for waves in (1, 2, 3, 4)} - {0, 1}):
                yield plan._replace(splits=splits, whole=whole)


def time(chosen: Plan, rows: int, columns: int, depth: int, low_out: bool, batches: int = 1,
         images: int = 0) -> float:
    """Estimated microseconds, as measured on an H200: of steps, of the epilogue, and of the sums that blocks send or
    leave. A hot GPU takes up to a tenth more, and up to 14 % more with splits."""
    width, cluster, transposed, splits, whole = chosen
    steps, tiles = blocks(depth, DEPTH), batches * tiles_of(chosen, rows, columns)
    sent = ROWS * width * 4 * (cluster - 1) / cluster
    finish = (1.6 if low_out else 2.5 if transposed and cluster == 1 else 2.7) * max(width, 128) / 256 + sent / 14e3

    def waves(tiles: int, steps: int) -> float:
        return math.ceil(tiles / at_once(cluster)) * (steps * STEPS[width] + finish)

    if splits == 1:
        return 3 + waves(tiles, blocks(steps, cluster))
    first = whole * blocks(rows if transposed else columns, width)
    parts = (tiles - first) * splits
    products = waves(first, steps) + waves(parts, blocks(steps, splits))
    loads = 2 * (depth * rows + (images or depth * columns)) / 3.6e6
    # Products and loads overlap: the longer counts, and up to 1.19 times that where they are alike. 5: up to three
    # launches. 3.6e6, 2.2e6: bytes in a microsecond, of operands that are read, and of parts, written and read.
    return 5 + (products**4 + loads**4) ** 0.25 + parts * ROWS * width * 4 / 2.2e6


def tiles_of(chosen: Plan, rows: int, columns: int) -> int:
    """Tiles of a result of so many rows and columns."""
    if chosen.transposed:
        rows, columns = columns, rows
    return blocks(rows, ROWS) * blocks(columns, chosen.columns)


plan = Planner("gemm_sm90", plans, time, version=3)  # 1: no splits, 2: no tiles of 64 columns
