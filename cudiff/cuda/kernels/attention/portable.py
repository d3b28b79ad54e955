"""Attention with mma.sync, on every GPU: heads of up to 128 channels, 16-bit or float32."""

from __future__ import annotations

import math
from typing import Any

from cudiff.backend import Array, float32
from cudiff.cuda.device import shared_memory
from cudiff.cuda.kernels.attention.mask import arguments
from cudiff.cuda.kernels.attention.problem import Backward, Forward, Problem
from cudiff.cuda.launch import blocks, empty, launch
from cudiff.cuda.select import Offer

Tile = dict[str, Any]
"""A kernel's constants."""


def offer_forward(p: Problem) -> Offer | None:
    """The offer's plan is the tile of queries."""
    return None if p.backward else Offer(plan=_tile(p, p.queries))


def forward(given: Forward, tile: Tile, p: Problem) -> None:
    *arrays, mask = given
    _launch("forward", p, p.queries, tile, (*arrays, *_sizes(given.q, p), *arguments(mask)))


def offer_backward(p: Problem) -> Offer | None:
    """The offer's plan is two tiles, of queries and of keys."""
    return Offer(plan=(_tile(p, p.queries), _tile(p, p.keys))) if p.backward else None


def backward(given: Backward, tiles: tuple[Tile, Tile], p: Problem) -> None:
    dq, dk, dv, dout, q, k, v, out, lse, _, mask = given
    delta, sizes = empty(lse.shape, float32), (*_sizes(q, p), *arguments(mask))
    _launch("backward_q", p, p.queries, tiles[0], (dq, delta, lse, q, k, v, out, dout, *sizes))
    _launch("backward_kv", p, p.keys, tiles[1], (dk, dv, delta, lse, q, k, v, dout, *sizes))


def _tile(p: Problem, rows: int) -> Tile:
    """rows: the queries or keys that are divided among blocks."""
    wide = p.dtype == float32
    padded = 16 * blocks(p.dim, 16)
    turing = shared_memory() <= 64 << 10
    most = 0 if wide or turing or p.masked else 32 if p.backward else 64  # more would spill registers
    if wide:
        columns, stages = (32, 2) if padded <= 64 else (16, 1)  # 99 KB of shared memory hold it
    else:
        columns, stages = (64, 2) if padded <= 64 else (32, 2)
    tile = {"T": p.dtype, "DP": padded, "MT": 2 if rows >= 128 and padded <= most else 1, "WARPS": 4, "BN": columns,
            "STAGES": stages, "MASKED": int(p.masked), "TF32_PRODUCTS": p.products}
    if turing and _shared_bytes(p, tile) > shared_memory():
        tile |= {"BN": min(columns, 32), "STAGES": 1}
        if _shared_bytes(p, tile) > shared_memory():  # float32 above 80 channels
            tile |= {"WARPS": 2}
    return tile


def _shared_bytes(p: Problem, tile: Tile) -> int:
    line, operands = (tile["DP"] + 8) * p.dtype.itemsize, 1 + p.backward  # operands whose rows stay
    return operands * _rows(tile) * line + tile["STAGES"] * tile["BN"] * (2 * line + 8)


def _rows(tile: Tile) -> int:
    """Tokens of a block."""
    return 16 * tile["WARPS"] * tile["MT"]


def _launch(name: str, p: Problem, rows: int, tile: Tile, args: tuple) -> None:
    grid = (blocks(rows, _rows(tile)), p.heads, p.images)
    launch("attention", name, grid, 32 * tile["WARPS"], args, shared=_shared_bytes(p, tile), **tile)


def _sizes(q: Array, p: Problem) -> tuple[int, int, int, int, int, float]:
    """The arguments of every kernel after its arrays: queries, keys, channels, strides in elements, the scale."""
    token, head = (stride // p.dtype.itemsize for stride in q.strides[1:3])
    return p.queries, p.keys, p.dim, token, head, 1 / math.sqrt(p.dim)
