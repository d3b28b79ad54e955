"""Attention's backward on Hopper for long sequences: one pass computes all three gradients."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cudiff.backend import float32, is_low
from cudiff.cuda.device import multiprocessors
from cudiff.cuda.kernels.attention.problem import SUMS, Backward, Problem
from cudiff.cuda.kernels.attention.sm90 import TOKENS, padded_dim, sums_of, tile_map
from cudiff.cuda.launch import blocks, empty, launch
from cudiff.cuda.select import Offer

KEYS = 128  # of a block
QUERIES = 2 * TOKENS  # of a step
STAGES = 2  # of two tiles of queries
BARRIER_BYTES = 512
LONG = 512  # keys, at least: of 256 it was faster by 2 % at most


def offer_backward(p: Problem) -> Offer | None:
    """It declines where two passes are estimated to be as fast: they need no sums of dq in float32."""
    served = p.backward and is_low(p.dtype) and 32 < p.dim <= 128 and p.aligned and not p.masked
    if not served or p.keys < LONG or blocks(p.keys, KEYS) > multiprocessors():
        return None
    if 1.02 * time(p) > time_of_two_passes(p):
        return None
    return Offer(p.wanted & {SUMS})


def time(p: Problem) -> float:
    """Estimated microseconds, fitted to 45 shapes on an H200, of 64 to 8,192 tokens: 8 % off in the mean square.

    A tile of queries has a turn for each block of its head, one after the other. A turn is taken to last a step.
    """
    width, heads = padded_dim(p.dim), p.images * p.heads
    of_head = blocks(p.keys, KEYS)
    rounds, steps = blocks(heads, multiprocessors() // of_head), max(blocks(p.queries, QUERIES), of_head)
    step, begin = _STEP[width], 3 if width < 128 else 6
    return 3 + rounds * (begin + steps * step) + 2.8e-6 * heads * p.queries * width


def time_of_two_passes(p: Problem) -> float:
    """The same of `attention_sm90.backward`: 9 % off."""
    width, heads = padded_dim(p.dim), p.images * p.heads
    queries, keys = blocks(p.queries, TOKENS), blocks(p.keys, TOKENS)
    waves = heads * (queries + keys) / 2 / (multiprocessors() * (3 if width < 128 else 2))
    work = heads * (queries * keys * _PAIR[width] + (queries + keys) * width / 107) / multiprocessors()
    return 2 + work * (1 + math.ceil(waves) / waves) / 2


_STEP = {64: 2.85, 80: 3.5, 96: 4.2, 128: 4.55}  # µs, by the width of a head: of 128 queries and 128 keys in one pass
_PAIR = {64: 0.83, 80: 1.16, 96: 1.33, 128: 1.65}  # and of 64 queries and 64 keys in two passes


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
