"""Attention with Hopper's own instructions: 16-bit heads of up to 128 channels."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

from cudiff.backend import Array, is_low
from cudiff.cuda.device import multiprocessors
from cudiff.cuda.kernels.attention.mask import arguments
from cudiff.cuda.kernels.attention.problem import Backward, Forward, Problem
from cudiff.cuda.launch import Launch, blocks, empty, launch
from cudiff.cuda.select import Offer
from cudiff.cuda.tensor_map import two_maps
from cudiff.cuda.tiles import Planner

TOKENS = 64  # of a tile
BARRIER_BYTES = 128


class Warpgroups(NamedTuple):
    """Warpgroups of a block. In the forward each takes a tile of queries of its own; all read the same keys."""

    groups: int

    @property
    def choice(self) -> list[int]:
        return [self.groups]


def plans(images: int, queries: int, keys: int, heads: int, dim: int) -> list[Warpgroups]:
    """The plans that the kernel is written for.

    Of 96 channels three blocks of one warpgroup fit a multiprocessor, but only one block of two, so that is no plan.
    """
    return [Warpgroups(groups) for width, groups in _TIMES if width == padded_dim(dim)]


def time(plan: Warpgroups, images: int, queries: int, keys: int, heads: int, dim: int) -> float:
    """Estimated microseconds. Of 2,867 problems on an H200, of 49 to 8,192 tokens, the choice among these plans and
    `wide_sm90`'s takes 0.5 % more than the best in the mean."""
    most, begin, step, more, more_of_step, within = _TIMES[padded_dim(dim), plan.groups]
    steps, count = blocks(keys, TOKENS), images * heads * blocks(queries, plan.groups * TOKENS)
    return time_in_waves(
        count, most, begin + step * steps, (more + more_of_step * steps) * (within if dim % 16 else 1))


def time_in_waves(count: int, most: int, alone: float, more: float) -> float:
    """Estimated microseconds of `count` equal blocks, of which a multiprocessor has room for `most`. They take `alone`,
    and `more` for each further one on a multiprocessor.

    After whole waves of blocks a multiprocessor takes two where more are left than half as many as there are
    multiprocessors, because its blocks end together.
    """
    at_once = multiprocessors()
    waves, left = divmod(count, most * at_once)
    together = min(most, 1 + 2 * left // at_once) if waves else blocks(left, at_once)
    return waves * (alone + (most - 1) * more) + (alone + (together - 1) * more if left else 0)


# By the width of a head and warpgroups: the blocks that a multiprocessor has room for; microseconds of a block and of
# each of its steps; of each further block and of its steps, and the factor of these where heads begin within a sector
_TIMES = {
    (32, 1): (6, 1.91, 0.61, 0.21, 0.14, 1.59), (32, 2): (3, 2.08, 0.73, 0.34, 0.22, 1.15),
    (64, 1): (3, 1.91, 0.71, 0.2, 0.12, 2.27), (64, 2): (2, 2.16, 0.81, 0.63, 0.26, 1.16),
    (80, 1): (3, 2.33, 0.83, 0.45, 0.12, 1.69), (80, 2): (2, 2.76, 0.92, 0.92, 0.29, 1.14),
    (96, 1): (3, 2.19, 0.88, 0.77, 0.11, 1), (128, 1): (2, 2.19, 0.94, 0.75, 0.14, 1),
    (128, 2): (1, 2.67, 1.09, 0, 0, 1), (128, 3): (1, 3.3, 1.26, 0, 0, 1),
}
FORWARD = Planner("attention_sm90", plans, time, version=2)  # 1: wider tiles of 72 to 96 channels


def offer_forward(p: Problem) -> Offer | None:
    if not supports(p, backward=False):
        return None
    return Offer(plan=Warpgroups(1) if p.masked else FORWARD(*key(p)))  # of one, tiles without any pair are smallest


def forward(given: Forward, plan: Warpgroups, p: Problem) -> None:
    maps = tile_map(given.q), tile_map(given.k), tile_map(given.v), tile_map(given.out)

    def launch_as(plan: Warpgroups) -> None:
        _forward(plan, p)(*maps, given.lse, p.queries, p.keys, p.dim, 1 / math.sqrt(p.dim), *arguments(given.mask))

    if p.masked:
        launch_as(plan)
    else:
        FORWARD.run(key(p), launch_as, chosen=plan)


@functools.cache
def _forward(plan: Warpgroups, p: Problem) -> Launch:
    # Of 72 channels three take 129 µs for 144, of 96 they take 30 for 27. With a mask two
    # take 72 µs for 79 of 64 channels, 82 for 92 of 80: a multiprocessor has room for four blocks, not three.
    stages = 3 if p.dim <= 80 and not p.masked else 2

    return Launch(
        "attention_sm90", "forward", (blocks(p.queries, plan.groups * TOKENS), p.heads, p.images),
        (plan.groups * 128,), (plan.groups + 2 * stages) * _tile_bytes(p.dim) + BARRIER_BYTES,
        T=p.dtype, DP=padded_dim(p.dim), STAGES=stages, GROUPS=plan.groups, MASKED=int(p.masked),
    )


def key(p: Problem) -> tuple[int, ...]:
    """The arguments of `FORWARD` for a problem."""
    return p.images, p.queries, p.keys, p.heads, p.dim


def sums_of(given: Backward, tiles: int) -> tuple:
    """The arrays for SUMS of `tiles` tiles, or Nones, and their strides in floats between tiles and between heads."""
    if given.sums is None:
        return NO_SUMS
    sums = given.sums(tiles)
    return *sums, *[stride // 4 for stride in sums[0].strides[1:3]]


NO_SUMS = None, None, None, 0, 0


def offer_backward(p: Problem) -> Offer | None:
    return Offer(p.wanted if p.dim > 32 else frozenset()) if supports(p, backward=True) else None


def backward(given: Backward, plan: None, p: Problem) -> None:
    scale, maps = 1 / math.sqrt(p.dim), tuple(map(tile_map, (given.q, given.k, given.v, given.dout)))
    delta = empty(given.lse.shape, given.lse.dtype)
    constants: dict[str, Any] = {"T": p.dtype, "DP": padded_dim(p.dim), "GROUPS": 1, "MASKED": int(p.masked)}
    mask = arguments(given.mask)
    own = 2 * _tile_bytes(p.dim)
    # Two stages, of 64 channels, take 199 µs for 228 at 256 tokens, but 715 for 686 at 4096; of 72, 212 for 231, and
    # 541 for 588. Of 128, fewer blocks fit with two.
    stages_q = 2 if 64 < p.dim <= 96 or (p.dim <= 64 and 2 < blocks(p.keys, TOKENS) <= 32) else 1
    stages_kv = 3 if p.dim <= 64 else 2
    sums_q, sums_k, sums_v, *strides = sums_of(given, blocks(p.queries, TOKENS)) if p.dim > 32 else NO_SUMS
    launch(
        "attention_sm90", "backward_q", (blocks(p.queries, TOKENS), p.heads, p.images), 128,
        (*maps, tile_map(given.dq), delta, given.lse, given.out, p.queries, p.keys, p.dim, scale, sums_q, *strides,
         *mask),
        own + stages_q * own + BARRIER_BYTES, STAGES=stages_q, **constants,
    )
    launch(
        "attention_sm90", "backward_kv", (blocks(p.keys, TOKENS), p.heads, p.images), 128,
        (*maps, tile_map(given.dk), tile_map(given.dv), delta, given.lse, p.queries, p.keys, p.dim, scale, sums_k,
         sums_v, *strides, *mask),
        own + stages_kv * (own + 1024) + BARRIER_BYTES, STAGES=stages_kv, **constants,
    )


def supports(p: Problem, backward: bool) -> bool:
    return p.backward == backward and is_low(p.dtype) and p.dim <= 128 and p.aligned


@functools.cache
def padded_dim(dim: int) -> int:
    """`dim`, the channels of a head, rounded up to a width that the kernels are written for."""
    return next(width for width in (32, 64, 80, 96, 128) if dim <= width)


def _tile_bytes(dim: int) -> int:
    return TOKENS * 2 * padded_dim(dim)


def tile_map(array: Array, tokens: int = TOKENS) -> Any:
    """The two tensor maps of an array (N, tokens, heads, D): boxes of `tokens` by 64 channels, and by those left."""
    width = padded_dim(array.shape[3])
    return two_maps(array, (1, tokens, 1, min(width, 64)), (1, tokens, 1, width % 64 or 64))
