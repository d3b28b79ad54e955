"""Attention's backward on Hopper for long sequences: one pass computes all three gradients."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cudiff.backend import float32
from cudiff.cuda.device import multiprocessors
from cudiff.cuda.kernels.attention.problem import SUMS, Backward, Problem
from cudiff.cuda.kernels.attention.sm90 import TOKENS, padded_dim, sums_of, supports, tile_map, time_of_backward
from cudiff.cuda.launch import blocks, empty, launch
from cudiff.cuda.select import Offer

KEYS = 128  # of a block
QUERIES = 2 * TOKENS  # of a step
STAGES = 2  # of two tiles of queries
BARRIER_BYTES = 512
LONG = 256  # keys, at least


def offer_backward(p: Problem) -> Offer | None:
    """It declines where two passes are estimated to be as fast: they need no sums of dq in float32."""
    served = supports(p, backward=True) and p.dim > 32 and not p.masked
    if not served or p.keys < LONG or blocks(p.keys, KEYS) > multiprocessors() or 1.02 * time(p) > time_of_backward(p):
        return None
    return Offer(p.wanted & {SUMS})


def time(p: Problem) -> float:
    """Estimated microseconds, fitted with `time_of_backward`: 3 to 6 % off.

    A tile of queries has a turn for each block of its head, one after the other. A turn is taken to last a step.
    """
    width, heads = padded_dim(p.dim), p.images * p.heads
    of_head = blocks(p.keys, KEYS)
    rounds, steps = blocks(heads, multiprocessors() // of_head), max(blocks(p.queries, QUERIES), of_head)
    begin, step, sums = _TIMES[width]
    return 3 + rounds * (begin + steps * step) + sums * 1e-6 * heads * p.queries * width


# By the width of a head: microseconds of a block and of each of its steps, of 128 queries and 128 keys; picoseconds of
# an element of dq
_TIMES = {64: (2.81, 2.76, 2.85), 80: (3.9, 3.42, 3.27), 96: (3.2, 3.72, 4.19), 128: (3.59, 4.34, 4.87)}


def backward(given: Backward, plan: None, p: Problem) -> None:
    width, scale = padded_dim(p.dim), 1 / math.sqrt(p.dim)
    tiles, of_head = 2 * blocks(p.queries, QUERIES), blocks(p.keys, KEYS)
    at_once = min(p.images * p.heads, multiprocessors() // of_head)  # heads
    sums = empty((p.images, p.heads, tiles, TOKENS * width), float32)
    rows = empty((p.images, p.heads, tiles, 2 * TOKENS), float32)
    turns = empty((p.images, p.heads, tiles), np.uint32)
    sums_q, sums_k, sums_v, *strides = sums_of(given, blocks(p.queries, TOKENS))
    tile, key_stages = TOKENS * 2 * width, 2 if width < 128 else 1  # bytes; as in attention_backward_sm90.cu
    constants: dict[str, Any] = {"T": p.dtype, "DP": width}
    launch(
        "attention_backward_sm90", "delta", (tiles, p.heads, p.images), 128,
        (rows, turns, given.lse, given.out, given.dout, p.queries, p.dim), **constants,
    )
    launch(
        "attention_backward_sm90", "backward", at_once * of_head, 384,
        (tile_map(given.q), tile_map(given.k, KEYS), tile_map(given.v, KEYS), tile_map(given.dout), tile_map(given.dk),
         tile_map(given.dv), sums, turns, rows, p.images, p.heads, p.queries, p.keys, of_head, p.dim, scale, sums_k,
         sums_v, *strides),
        (4 * key_stages + 2 * STAGES + 4) * tile + STAGES * 1024 + 2 * KEYS * 128 + BARRIER_BYTES,
        cooperative=True, **constants,
    )
    launch(
        "attention_backward_sm90", "finish", (blocks(p.queries, TOKENS), p.heads, p.images), 128,
        (tile_map(given.dq), sums, tiles, p.queries, p.dim, scale, sums_q, *strides), tile, **constants,
    )
