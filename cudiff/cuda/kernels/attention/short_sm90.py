"""Attention's backward in one launch with Hopper's own instructions: few tokens of narrow 16-bit heads."""

from __future__ import annotations

import functools
import math

from cudiff.cuda.kernels.attention.problem import SUMS, Backward, Problem
from cudiff.cuda.kernels.attention.sm90 import (
    BARRIER_BYTES,
    NO_SUMS,
    TOKENS,
    Warpgroups,
    sums_of,
    supports,
    time_in_waves,
    time_of_backward,
)
from cudiff.cuda.launch import Launch, blocks
from cudiff.cuda.select import Offer
from cudiff.cuda.tensor_map import tensor_map
from cudiff.cuda.tiles import Planner

MOST = 256  # tokens
_DIM = 32  # channels of a tile
_TILE, _SCORES, _SO_FAR = TOKENS * _DIM * 2, TOKENS * TOKENS * 2, TOKENS * _DIM * 4  # bytes: of q, of ds, of dq


def plans(heads: int, queries: int, keys: int) -> list[Warpgroups]:
    """The plans that are worth a choice: one or two warpgroups, or one for each tile."""
    tiles = _tiles(queries, keys)
    return [Warpgroups(groups) for groups in sorted({1, 2, tiles}) if (tiles, groups) in _TIMES]


def time(plan: Warpgroups, heads: int, queries: int, keys: int) -> float:
    """Estimated microseconds. Of 124 problems on an H200 the choice takes 0.2 % more than the best plan in the mean.

    heads: of all images. A head is a block.
    """
    tiles = _tiles(queries, keys)
    most = {1: 4 if tiles < 3 else 3, 2: 2}.get(plan.groups, 1)  # that a multiprocessor has room for
    return time_in_waves(heads, most, *_TIMES[tiles, plan.groups])


# Microseconds of a block alone, and of each further one on its multiprocessor, by tiles and warpgroups
_TIMES = {
    (1, 1): (2.4, 0.85), (2, 1): (5.82, 1.81), (2, 2): (3.96, 2.47), (3, 1): (9.85, 3.15), (3, 2): (7.71, 3.72),
    (3, 3): (5.95, 0), (4, 2): (11.24, 7.39), (4, 4): (9.97, 0),
}
BACKWARD = Planner("attention_short_sm90", plans, time)


def offer_backward(p: Problem) -> Offer | None:
    """It declines where it would fuse nothing and two passes are estimated to be a tenth faster."""
    if not supports(p, backward=True) or p.dim > _DIM or max(p.queries, p.keys) > MOST or p.masked:
        return None
    fused = p.wanted & {SUMS} if _writes_sums(p) else frozenset()
    if not fused and BACKWARD.estimate(*_key(p)) > 1.1 * time_of_backward(p):
        return None
    return Offer(fused, BACKWARD(*_key(p)))


def backward(given: Backward, plan: Warpgroups, p: Problem) -> None:
    arrays = given.q, given.k, given.v, given.dout, given.dq, given.dk, given.dv
    maps = [tensor_map(array, (1, TOKENS, 1, _DIM)) for array in arrays]
    sums = sums_of(given, 4 * _tiles(p.queries, p.keys)) if _writes_sums(p) else NO_SUMS

    def launch_as(plan: Warpgroups) -> None:
        sizes = p.queries, p.keys, p.dim, 1 / math.sqrt(p.dim)
        _backward(plan, p).run((*maps, given.out, given.lse, *sizes, *sums))

    BACKWARD.run(_key(p), launch_as, chosen=plan)


@functools.cache
def _backward(plan: Warpgroups, p: Problem) -> Launch:
    tiles, groups = _tiles(p.queries, p.keys), plan.groups
    scores, so_far = (tiles, 0) if groups == tiles else (1, _SO_FAR)
    return Launch(
        "attention_short_sm90", "backward", (p.heads, p.images), (128 * groups,),
        tiles * (2 * _TILE + 512 + so_far) + groups * (2 * _TILE + scores * _SCORES) + BARRIER_BYTES,
        T=p.dtype, DP=_DIM, TILES=tiles, GROUPS=groups,
    )


def _key(p: Problem) -> tuple[int, ...]:
    """The arguments of `BACKWARD` for a problem."""
    return p.images * p.heads, p.queries, p.keys


def _writes_sums(p: Problem) -> bool:
    """It finds them where it reads tiles of queries, so there must be as many of these as it writes parts for."""
    return blocks(p.queries, TOKENS) == _tiles(p.queries, p.keys)


def _tiles(queries: int, keys: int) -> int:
    return blocks(max(queries, keys), TOKENS)
