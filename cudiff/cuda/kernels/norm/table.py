"""Which kernels run group norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cudiff.backend import Array, float32
from cudiff.cuda.accumulate import gradient_sum, gradient_sums, gradient_target
from cudiff.cuda.kernels.norm import portable, sm90
from cudiff.cuda.kernels.norm.problem import (
    NO_DROPOUT,
    Backward,
    Dropout,
    Forward,
    places_of,
    problem_of,
    require_float32,
)
from cudiff.cuda.launch import empty
from cudiff.cuda.select import ANY, SM90, Row, Table
from cudiff.gradient import Slot
from cudiff.statistics import ChannelStatistics

NORM = Table(
    "group norm",
    Row("group_norm_sm90.forward", SM90, sm90.offer_forward, sm90.ClusterLaunch.run,
        "forward of rows of a multiple of 16 bytes if a cluster of up to 8 blocks has room for an image in shared "
        "memory; not if statistics came with every source"),
    Row("group_norm_backward_sm90.backward", SM90, sm90.offer_backward, sm90.SharedLaunch.run,
        "backward of rows of a multiple of 16 bytes if shared memory has room for a block's part of an image; blocks "
        "that share an image must all run at once; not if PRODUCTS came with dy or two arrays are added to dx; "
        "declines if it is estimated to take longer than group_norm.cu"),
    Row("group_norm.statistics, finish_statistics, normalize", ANY, portable.offer_forward,
        portable.ForwardPasses.run,
        "forward of all images; without the pass for statistics that came with them"),
    Row("group_norm.backward_sums, finish_sums, input_gradients", ANY, portable.offer_backward,
        portable.BackwardPasses.run,
        "backward of all images; without the pass for PRODUCTS that came with dy, or for dx if it is not wanted"),
)


def forward(x: Array, x2: Array | None, weight: Array, bias: Array, num_groups: int, eps: float, silu: bool,
            scale: Array | None = None, shift: Array | None = None,
            statistics: Sequence[ChannelStatistics | None] = (None, None),
            dropout: Dropout = NO_DROPOUT) -> tuple[Array, Array, Array]:
    """Returns y (N, ..., C1 + C2), and mean and rstd (N, G). statistics: those that came with x and x2, or None.
    dropout: of y; its mask is written."""
    shape = x.shape
    y = empty((*shape[:-1], len(weight)), x.dtype)
    mean, rstd = empty((shape[0], num_groups), float32), empty((shape[0], num_groups), float32)
    require_float32(weight, bias, scale, shift)
    first, second = statistics
    summed = first is not None and (x2 is None or second is not None)
    fields = (False, x.dtype, shape, None if x2 is None else x2.shape, num_groups, places_of(x, x2), summed, False,
              dropout.mask is not None)
    _, chosen = NORM.selected(problem_of, fields)
    given = Forward(y, mean, rstd, x, x2, weight, bias, scale, shift, (first, second), eps, silu, dropout)
    chosen.row.run(chosen.offer.plan, given)
    return y, mean, rstd


def backward(dy: Array, x: Array, x2: Array | None, weight: Array, bias: Array, mean: Array, rstd: Array,
             silu: bool, scale: Array | None = None, shift: Array | None = None, *, needs: tuple[bool, ...],
             into: tuple[Slot | None, ...], y: Array | None = None,
             din_statistics: dict[int, ChannelStatistics | None] | None = None,
             statistics: ChannelStatistics | None = None,
             dropout: Dropout = NO_DROPOUT) -> tuple[Array | None, ...]:
    """Returns dx, dx2, dweight, dbias, dscale, dshift, each None if `needs` is False for it.

    They are written where `gradient_target` says; dx and dx2 where `gradient_sum` does, a lone dx where `gradient_sums`
    does. All but dx and dx2 are float32. y: receives the recomputed output, or None. It may be dy.
    din_statistics: receives SUMS of dx at 0 and of dx2 at 1, earlier terms included, or None. statistics: PRODUCTS that
    came with dy, or None; for float32 the second is of d_preact·(x - mean). With them dy is d_preact: see `dgrad` of
    convolutions. dropout: the forward's; not with PRODUCTS.
    """
    if into[0] is into[1]:  # one tensor is both sources: two threads would add to one element at the same time
        into = (into[0], None, *into[2:])
    more = None  # the gradient so far of a lone source may be in two arrays
    if x2 is None and needs[0]:
        out, addend, more = gradient_sums(into[0], x.shape, x.dtype)
        dx, dx2 = (out, addend), (None, more)
    else:
        dx, dx2 = [gradient_sum(slot, source.shape, x.dtype) if need else (None, None)
                   for slot, source, need in zip(into, (x, x2), needs, strict=False)]
    targets: list[Any] = [(None, False)] * 4
    for i, parameter in enumerate((weight, bias, scale, shift)):
        if needs[2 + i]:
            targets[i] = gradient_target(into[2 + i], parameter.shape, float32)
    dweight, dbias, dscale, dshift = targets
    fields = (True, x.dtype, x.shape, None if x2 is None else x2.shape, mean.shape[1],
              places_of(dy, x, x2, *dx, *dx2, y), statistics is not None, more is not None, dropout.mask is not None)
    problem, chosen = NORM.selected(problem_of, fields)
    given = Backward(dy, x, x2, (weight, bias, scale, shift, mean, rstd, problem.groups), silu, dx, dx2, dweight, dbias,
                     dscale, dshift, y, statistics, din_statistics, needs, dropout)
    chosen.row.run(chosen.offer.plan, given)
    return dx[0], dx2[0], dweight[0], dbias[0], dscale[0], dshift[0]
