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
from cudiff.cuda.tensor_map import tensor_map
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
    count = images * heads * blocks(queries, plan.groups * TOKENS)
    return _TIMES[padded_dim(dim), plan.groups].of(count, blocks(keys, TOKENS), dim)


class Times(NamedTuple):
    """Microseconds of equal blocks, which walk over steps.

    most: blocks that a multiprocessor has room for. begin, step: of a block and of each step. more, more_of_step: of
    each further block on a multiprocessor and its steps. within: a factor of these where heads begin within a sector.
    """

    most: int
    begin: float
    step: float
    more: float
    more_of_step: float
    within: float

    def of(self, count: int, steps: int, dim: int) -> float:
        more = (self.more + self.more_of_step * steps) * (self.within if dim % 16 else 1)
        return time_in_waves(count, self.most, self.begin + self.step * steps, more)


def time_in_waves(count: int, most: int, alone: float, more: float) -> float:
    """Estimated microseconds of `count` equal blocks, of which a multiprocessor has room for `most`. They take `alone`,
    and `more` for each further one on a multiprocessor.

    A wave after the first takes 1.5 less, because its blocks begin beside others. After whole waves a multiprocessor
    takes two blocks where more are left than half as many as there are multiprocessors.
    """
    waves, left = divmod(count, most * multiprocessors())
    together = min(most, 1 + 2 * left // multiprocessors()) if waves else blocks(left, multiprocessors())
    last = alone + (together - 1) * more if left else 0
    whole = alone + (most - 1) * more
    saved = 1.5 if most > 1 else 0
    return whole + (waves - 1) * (whole - saved) + last * (1 - saved / whole) if waves else last


_TIMES = {  # by the width of a head and warpgroups
    (32, 1): Times(6, 1.9, 0.6, 0.3, 0.15, 1.53), (32, 2): Times(3, 2.06, 0.72, 0.65, 0.23, 1.14),
    (64, 1): Times(3, 1.93, 0.7, 0.52, 0.14, 1.92), (64, 2): Times(2, 2.16, 0.81, 1.3, 0.27, 1.16),
    (80, 1): Times(3, 2.34, 0.82, 0.75, 0.14, 1.5), (80, 2): Times(2, 2.76, 0.92, 1.64, 0.3, 1.12),
    (96, 1): Times(3, 2.18, 0.87, 1.14, 0.12, 1.5), (128, 1): Times(2, 2.17, 0.95, 1.7, 0.14, 1.5),
    (128, 2): Times(1, 2.67, 1.09, 0, 0, 1), (128, 3): Times(1, 3.29, 1.26, 0, 0, 1),
}
FORWARD = Planner("attention_sm90", plans, time, version=3)  # 1: wide tiles of 72 to 96 channels, 2: padded ones


def offer_forward(p: Problem) -> Offer | None:
    if not supports(p, backward=False):
        return None
    return Offer(plan=Warpgroups(1) if p.masked else FORWARD(*key(p)))  # of one, tiles without any pair are smallest


def forward(given: Forward, plan: Warpgroups, p: Problem) -> None:
    maps = tile_map(given.q), tile_map(given.k), tile_map(given.v), tile_map(given.out)

    def launch_as(plan: Warpgroups) -> None:
        sizes = p.queries, p.keys, p.dim, 1 / math.sqrt(p.dim)
        _forward(plan, p).run((*maps, given.lse, *sizes, *arguments(given.mask)))

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


def time_of_backward(p: Problem) -> float:
    """Estimated microseconds of both passes: 5 to 8 % off in the mean square, by the width, for 1,057 problems."""
    times, heads = _BACKWARD_TIMES[padded_dim(p.dim)], p.images * p.heads
    queries, keys = blocks(p.queries, TOKENS), blocks(p.keys, TOKENS)
    return times.of(heads * queries, keys, p.dim) + times.of(heads * keys, queries, p.dim)


_BACKWARD_TIMES = {  # of one of the passes, by the width of a head
    32: Times(4, 1.38, 0.65, 0.48, 0.15, 1.49), 64: Times(3, 1.53, 0.77, 0.93, 0.21, 1.51),
    80: Times(3, 2.03, 1.03, 1.53, 0.26, 1.24), 96: Times(3, 2.02, 1.07, 1.68, 0.36, 1.2),
    128: Times(3, 2.16, 1.26, 2.05, 0.46, 1.12),
}


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
    if width <= 64:
        return 2 * tensor_map(array, (1, tokens, 1, width))
    return tensor_map(array, (1, tokens, 1, 64)) + tensor_map(array, (1, tokens, 1, width % 64 or 64))
