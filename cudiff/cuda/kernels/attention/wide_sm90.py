"""Attention's forward on Hopper for long sequences of wide heads: persistent blocks overlap softmax with products."""

from __future__ import annotations

import math
from typing import NamedTuple

from cudiff.backend import is_low
from cudiff.cuda.device import multiprocessors
from cudiff.cuda.kernels.attention.problem import Forward, Problem
from cudiff.cuda.kernels.attention.sm90 import TOKENS, padded_dim, tile_map
from cudiff.cuda.launch import blocks, launch
from cudiff.cuda.select import Offer

STAGES = 2
BARRIER_BYTES = 256
LONG = 512  # keys, at least, for which it is preferred to attention_sm90


class Tiles(NamedTuple):
    """groups: warpgroups of a block that multiply, of 64 queries each. keys: those of a tile."""

    groups: int
    keys: int


def offer_forward(p: Problem) -> Offer | None:
    """The offer's plan is a `Tiles`."""
    served = not p.backward and is_low(p.dtype) and 64 < p.dim <= 128 and p.aligned and p.keys >= LONG and not p.masked
    return Offer(plan=Tiles(2, 128)) if served else None


def forward(given: Forward, plan: Tiles, p: Problem) -> None:
    tiles = blocks(p.queries, plan.groups * TOKENS) * p.heads * p.images
    token = padded_dim(p.dim) * p.dtype.itemsize  # bytes in shared memory
    launch(
        "attention_wide_sm90", "forward", min(tiles, multiprocessors()), (plan.groups + 1) * 128,
        (tile_map(given.q), tile_map(given.k, plan.keys), tile_map(given.v, plan.keys), tile_map(given.out), given.lse,
         tiles, p.heads, p.queries, p.keys, p.dim, 1 / math.sqrt(p.dim)),
        (plan.groups * TOKENS + STAGES * 2 * plan.keys) * token + BARRIER_BYTES,
        T=p.dtype, DP=padded_dim(p.dim), KEYS=plan.keys, STAGES=STAGES, GROUPS=plan.groups,
    )
