"""Attention on Hopper's own instructions; `attention` chooses it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from cudiff.backend import Array, is_low
from cudiff.cuda.device import hopper
from cudiff.cuda.launch import blocks, empty, launch
from cudiff.cuda.tensor_map import tensor_map
from cudiff.ops.gemm import aligned

TOKENS = 64  # of a tile
STAGES = 3
BARRIER_BYTES = 128
SHORT = 256  # tokens of narrow heads up to which one launch computes all gradients


def suits(*arrays: Array) -> bool:
    """Whether the kernels take these arrays (N, T, heads, D), parts of longer rows perhaps."""
    return (
        hopper()
        and is_low(arrays[0].dtype)
        and arrays[0].shape[3] <= 64
        and all(aligned(a, a.shape[3], *(stride // a.itemsize for stride in a.strides[:3])) for a in arrays)
    )


def forward(out: Array, lse: Array, q: Array, k: Array, v: Array) -> None:
    """out, contiguous (N, Tq, heads, D), and lse as kernels/attention.cu defines it."""
    n, queries, heads, dim = q.shape
    groups = 1 if queries <= TOKENS else 2
    launch(
        "attention_sm90", "forward", (blocks(queries, groups * TOKENS), heads, n), groups * 128,
        (*map(_map, (q, k, v, out)), lse, queries, k.shape[1], 1 / math.sqrt(dim)),
        (groups + 2 * STAGES) * _tile_bytes(dim) + BARRIER_BYTES,
        T=q.dtype, DP=_padded(dim), STAGES=STAGES, GROUPS=groups,
    )  # fmt: skip


def backward(
    dq: Array, dk: Array, dv: Array, dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array,
    sums: Callable[[int], Sequence[Array]] | None = None,
) -> None:  # fmt: skip
    """The gradients dq, dk and dv; dout and out are contiguous (N, Tq, heads, D).

    `sums` tells a kernel that leaves the sums of the gradients over tiles of tokens where: given the number of tiles,
    three float32 arrays (N, tiles, heads, D), equal parts of one row.
    """
    n, queries, heads, dim = q.shape
    keys, scale, tile = k.shape[1], 1 / math.sqrt(dim), _tile_bytes(dim)
    maps = tuple(map(_map, (q, k, v, dout)))
    if dim <= 32 and max(queries, keys) <= SHORT:
        tiles = next(tiles for tiles in (1, 2, 4) if max(queries, keys) <= tiles * TOKENS)
        own = min(tiles, 2)  # tiles of keys of a block
        places: tuple = (None, None, None, 0, 0)
        if sums is not None:
            given = sums(4 * tiles // own)
            places = (*given, *(stride // 4 for stride in given[0].strides[1:3]))
        launch(
            "attention_short_sm90", "backward", (tiles // own, heads, n), 128,
            (*maps, *map(_map, (dq, dk, dv)), out, lse, queries, keys, dim, scale, *places),
            tiles * (2 * tile + 512) + own * (2 * tile + 8192) + BARRIER_BYTES, T=q.dtype, DP=32, TILES=tiles,
        )  # fmt: skip
        return
    delta = empty(lse.shape, lse.dtype)
    constants = {"T": q.dtype, "DP": _padded(dim), "STAGES": STAGES, "GROUPS": 1}
    shared = (2 + 2 * STAGES) * tile + BARRIER_BYTES
    launch(
        "attention_sm90", "backward_q", (blocks(queries, TOKENS), heads, n), 128,
        (*maps, _map(dq), delta, lse, out, dout, queries, keys, dim, scale), shared, **constants,
    )  # fmt: skip
    launch(
        "attention_sm90", "backward_kv", (blocks(keys, TOKENS), heads, n), 128,
        (*maps, _map(dk), _map(dv), delta, lse, queries, keys, scale), shared + STAGES * 1024, **constants,
    )  # fmt: skip


def _padded(dim: int) -> int:
    return 32 if dim <= 32 else 64


def _tile_bytes(dim: int) -> int:
    return TOKENS * _padded(dim) * 2


def _map(array: Array) -> Any:
    return tensor_map(array, (1, TOKENS, 1, _padded(array.shape[3])))
