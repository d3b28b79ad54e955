"""Grouped convolutions on Hopper, by its kernels without groups: a launch for each bundle of neighbouring groups.

Those kernels compute 64 channels at a time, and a group may have 8. The weight of a bundle is zero between its groups:
products with these zeros take less time on tensor cores than conv2d_grouped.cu takes without them on FMA units. The
images of a bundle are views of some of their channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from cudiff.backend import Array, float32, is_low
from cudiff.cuda.deferred import deferred
from cudiff.cuda.kernels.convolution import grouped, sm90, wgrad_sm90, windows_sm90
from cudiff.cuda.kernels.convolution.problem import WGRAD, Fusion, Image, Operands, Problem
from cudiff.cuda.kernels.shape import extended_microseconds, move, zeros
from cudiff.cuda.launch import empty
from cudiff.cuda.select import Offer


class Bundles(NamedTuple):
    """A way to run a grouped convolution. groups: of a bundle. problem: a bundle's. run, offer: of the kernel that
    serves that. microseconds: estimated, of all bundles."""

    groups: int
    problem: Problem
    run: Callable[[Operands, Offer, Problem], Any]
    offer: Offer
    microseconds: float


def offer(p: Problem) -> Offer | None:
    """Serves 16-bit convolutions without dilation, pixels at multiples of 16 bytes, where bundles of some number of
    groups are estimated to take less time than conv2d_grouped.cu."""
    if p.groups == 1 or p.dilation != (1, 1) or not (is_low(p.x.dtype) and p.x.rows_aligned and p.out.rows_aligned):
        return None
    found = [_bundles(p, groups) for groups in range(1, p.groups + 1) if p.groups % groups == 0]
    best = min([one for one in found if one is not None], key=lambda one: one.microseconds, default=None)
    weight = extended_microseconds(p.weight.shape, p.x.dtype)
    if best is None or best.microseconds + weight >= grouped.microseconds(p):
        return None
    return Offer(best.problem.wanted, best)


def _bundles(p: Problem, groups: int) -> Bundles | None:
    """Bundles of so many groups, None where no kernel serves one."""
    k, rows, columns, c = p.weight.shape
    count = p.groups // groups

    def part(image: Image) -> Image:
        return image._replace(shape=(*image.shape[:3], image.shape[3] // count))

    weight = p.weight._replace(shape=(k // count, rows, columns, c * groups), rows_aligned=True, contiguous=True)
    one = p._replace(x=part(p.x), out=part(p.out), weight=weight, wanted=p.wanted & {Fusion.BIAS, Fusion.ADDEND},
                     norm=(), groups=1)
    if not (one.x.rows_aligned and one.out.rows_aligned):
        return None
    if p.direction == WGRAD:
        found = wgrad_sm90.offer(one)
        if found is None:
            return None
        time = wgrad_sm90.plan.estimate(one.out.shape[:3], (one.weight.shape,) * count, False)
        return Bundles(groups, one, wgrad_sm90.run, found, time)
    for kernel in (windows_sm90, sm90):
        found = kernel.offer(one)
        if found is not None:
            return Bundles(groups, one, kernel.run, found, count * windows_sm90.otherwise(one))
    return None


def run(given: Operands, offer: Offer, p: Problem) -> None:
    bundles: Bundles = offer.plan
    count, weight = p.groups // bundles.groups, given.weight
    shape = (count, *bundles.problem.weight.shape)
    if p.direction == WGRAD:
        dense = empty(shape, float32)
        with deferred():  # one launch for all
            for one in _parts(given, dense):
                bundles.run(one, bundles.offer, bundles.problem)
        own = _blocks(dense, bundles.groups)
        move(weight.reshape(own.shape), own, given.add)
        return
    dense = zeros(shape, given.x.dtype)
    own = _blocks(dense, bundles.groups)
    move(own, (weight if weight.dtype == dense.dtype else weight.astype(dense.dtype)).reshape(own.shape))
    for one in _parts(given, dense):
        bundles.run(one, bundles.offer, bundles.problem)


def _parts(given: Operands, weights: Array) -> list[Operands]:
    """The operands of each bundle, whose weights (bundles, K, R, S, C) are given."""
    count, parts = len(weights), []
    bias, addend = given.epilogue.bias, given.epilogue.addend

    def part(array: Array | None, i: int) -> Array | None:
        if array is None:
            return None
        width = array.shape[-1] // count
        return array[..., i * width : (i + 1) * width]

    for i, weight in enumerate(weights):
        epilogue = given.epilogue._replace(bias=part(bias, i), addend=part(addend, i))
        parts.append(Operands(part(given.x, i), weight, part(given.out, i), epilogue))
    return parts


def _blocks(dense: Array, groups: int) -> Array:
    """The view (bundles, groups, K / groups, R, S, C / groups) of weights (bundles, K, R, S, C): what is not zero."""
    count, k, rows, columns, c = dense.shape
    pairs = dense.reshape(count, groups, k // groups, rows, columns, groups, c // groups)
    return pairs.diagonal(axis1=1, axis2=5).transpose(0, 5, 1, 2, 3, 4)
