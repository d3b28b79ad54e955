"""Attention's forward on Hopper for long sequences: persistent blocks overlap softmax with products."""

from __future__ import annotations

import math
from typing import NamedTuple

from cudiff.cuda.device import multiprocessors
from cudiff.cuda.kernels.attention.problem import Forward, Problem
from cudiff.cuda.kernels.attention.sm90 import FORWARD, TOKENS, key, padded_dim, supports, tile_map
from cudiff.cuda.launch import blocks, launch
from cudiff.cuda.select import Offer

STAGES = 2
BARRIER_BYTES = 256


class Tiles(NamedTuple):
    """groups: warpgroups of a block that multiply, of 64 queries each. keys: those of a tile."""

    groups: int
    keys: int


def offer_forward(p: Problem) -> Offer | None:
    """It declines where attention_sm90 is estimated to be as fast. The offer's plan is a `Tiles`."""
    if p.masked or not supports(p, backward=False) or p.keys < (256 if p.dim > 64 else 512):
        return None
    plan = Tiles(2, 128) if p.dim > 64 else Tiles(3, 96 if p.dim > 32 else 128)  # 128 of 64 channels spill registers
    return Offer(plan=plan) if time(plan, p) < FORWARD.estimate(*key(p)) else None


def time(plan: Tiles, p: Problem) -> float:
    """Estimated microseconds, fitted with `sm90.time`: 4 to 8 % off in the mean square, by the width."""
    begin, step, piece = _TIMES[padded_dim(p.dim)]
    tiles, whole = _tiles(plan, p)
    rounds = blocks(tiles, multiprocessors()) if whole == tiles else whole // multiprocessors() + piece
    return rounds * (begin + step * blocks(p.keys, plan.keys))


# By the width of a head: microseconds of a tile of queries and of each of its steps, and a piece's share of both
_TIMES = {
    32: (2.73, 1.15, 0.79), 64: (3.22, 1.07, 0.75), 80: (3.36, 1.22, 0.88), 96: (3.61, 1.28, 0.87),
    128: (3.79, 1.4, 0.85),
}


def _tiles(plan: Tiles, p: Problem) -> tuple[int, int]:
    """All tiles of queries, and those that are computed as a whole. In pieces are those left after whole rounds of all
    multiprocessors, if these have one piece each: of 903 problems this took 0.67 to 1.03 of the time, 0.88 in the
    median."""
    tiles, at_once = blocks(p.queries, plan.groups * TOKENS) * p.heads * p.images, multiprocessors()
    left = tiles % at_once
    return tiles, tiles - left if left * plan.groups <= at_once else tiles


def forward(given: Forward, plan: Tiles, p: Problem) -> None:
    groups, keys = plan
    tiles, whole = _tiles(plan, p)
    token = padded_dim(p.dim) * p.dtype.itemsize  # bytes in shared memory
    launch(
        "attention_wide_sm90", "forward", min(whole + (tiles - whole) * groups, multiprocessors()), (groups + 1) * 128,
        (tile_map(given.q), tile_map(given.k, keys), tile_map(given.v, keys), tile_map(given.out), given.lse,
         tiles, whole, p.heads, p.queries, p.keys, p.dim, 1 / math.sqrt(p.dim)),
        (groups * TOKENS + STAGES * 2 * keys) * token + BARRIER_BYTES,
        T=p.dtype, DP=padded_dim(p.dim), KEYS=keys, STAGES=STAGES, GROUPS=groups,
    )
