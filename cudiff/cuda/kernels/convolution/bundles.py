"""Grouped convolutions by the kernels without groups: a convolution for each bundle of neighbouring groups.

Those kernels compute 64 channels at a time, and a group may have 8. The weight of a bundle is zero between its groups:
products with these zeros take less time on tensor cores than conv2d_grouped.cu takes without them on FMA units. For
Hopper's kernels the images of a bundle are views of some of the channels; for others they are copied. What is not
finite in one group makes NaN of its bundle's results: an infinity times zero is NaN.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from cudiff.backend import Array, float32, is_low
from cudiff.cuda.deferred import deferred
from cudiff.cuda.kernels.convolution import grouped, portable, sm90, wgrad_sm90, windows_sm90
from cudiff.cuda.kernels.convolution.problem import LONGEST, WGRAD, Fusion, Image, Operands, Problem, Weight
from cudiff.cuda.kernels.shape import copy, move, move_microseconds, zeros
from cudiff.cuda.launch import empty
from cudiff.cuda.select import Offer


class Bundles(NamedTuple):
    """A way to run a grouped convolution: so many bundles of so many groups. problem: a bundle's. microseconds: the
    estimate for all. run, offer: of the kernel that serves views; without `run` images are copied, and the table finds
    the kernel."""

    bundles: int
    groups: int
    problem: Problem
    microseconds: float = 0.0
    run: Callable[[Operands, Offer, Problem], Any] | None = None
    offer: Offer = Offer()


def offer_views(p: Problem) -> Offer | None:
    """Serves 16-bit convolutions without dilation, pixels at multiples of 16 bytes, where bundles of some number of
    groups are estimated to take less time than conv2d_grouped.cu."""
    if p.groups == 1 or p.dilation != (1, 1) or not (is_low(p.x.dtype) and p.x.rows_aligned and p.out.rows_aligned):
        return None
    return _best(p, map(_of_views, _ways(p)), 0.0)


def offer_copies(p: Problem) -> Offer | None:
    """Serves stride 1, and strides without dilation, where copies of the images and conv2d.cu for the bundles are
    estimated to take less time than conv2d_grouped.cu. A faster kernel may run then."""
    dilated = p.dilation != (1, 1)
    if p.groups == 1 or (dilated and p.stride != (1, 1)) or min(p.x.size, p.out.size) == 0:
        return None
    longest = max(*p.x.shape[1:3], *p.out.shape[1:3]) + max(p.padding)
    if longest > LONGEST or max(p.x.size, p.out.size) >= 2**31:
        return None
    ways = [way._replace(microseconds=way.bundles * portable.microseconds(way.problem)) for way in _ways(p)]
    copied = [p.x, p.out, *([p.out] if Fusion.ADDEND in p.wanted else [])] * (3 if dilated else 1)  # see restated.py
    return _best(p, ways, sum(move_microseconds(image.shape, image.dtype) for image in copied))


def _best(p: Problem, ways: Iterable[Bundles | None], copies: float) -> Offer | None:
    best = min([way for way in ways if way is not None], key=lambda way: way.microseconds, default=None)
    weight = 2 * move_microseconds(p.weight.shape, p.x.dtype)
    if best is None or best.microseconds + copies + weight >= grouped.microseconds(p):
        return None
    return Offer(best.problem.wanted, best)


def _ways(p: Problem) -> list[Bundles]:
    """Bundles of each possible number of groups."""
    (k, rows, columns, c), wanted, found = p.weight.shape, p.wanted & {Fusion.BIAS, Fusion.ADDEND}, []
    for groups in range(1, p.groups + 1):
        if p.groups % groups == 0:
            count = p.groups // groups
            x, out = (Image((*image.shape[:3], image.shape[3] // count), image.dtype) for image in (p.x, p.out))
            weight = Weight((k // count, rows, columns, c * groups))
            one = p._replace(x=x, out=out, weight=weight, wanted=wanted, norm=(), groups=1)
            found.append(Bundles(count, groups, one))
    return found


def _of_views(way: Bundles) -> Bundles | None:
    """The way by views of the images, None where no kernel of Hopper serves one."""
    x, out = [image._replace(pitch=image.shape[3] * way.bundles) for image in (way.problem.x, way.problem.out)]
    one = way.problem._replace(x=x, out=out)
    if not (one.x.rows_aligned and one.out.rows_aligned):
        return None
    if one.direction == WGRAD:
        found = wgrad_sm90.offer(one)
        if found is None:
            return None
        time = wgrad_sm90.plan.estimate(one.out.shape[:3], (one.weight.shape,) * way.bundles, False)
        return way._replace(problem=one, microseconds=time, run=wgrad_sm90.run, offer=found)
    for kernel in (windows_sm90, sm90):
        found = kernel.offer(one)
        if found is not None:
            time = way.bundles * windows_sm90.otherwise(one)
            return way._replace(problem=one, microseconds=time, run=kernel.run, offer=found)
    return None


def run(given: Operands, offer: Offer, p: Problem, convolve: Callable[[Operands, Problem], Any]) -> None:
    """convolve(operands, problem) runs the convolution of a bundle of copies."""
    way: Bundles = offer.plan
    is_wgrad, copied, count = p.direction == WGRAD, way.run is None, way.bundles
    weights, own = _dense(given, way, is_wgrad)
    split: Callable[[Array, int], Any] = _copies if copied else _views
    (bias, _, addend), out = given.epilogue[:3], given.out
    addends = [None] * count if addend is None else split(addend, count)
    if is_wgrad or not copied:
        outs = split(out, count)
    else:
        outs = empty((count, *way.problem.out.shape), out.dtype) if addend is None else addends
    parts = zip(split(given.x, count), weights, outs, addends, [None] * count if bias is None else _views(bias, count),
                strict=True)
    with deferred() if is_wgrad else contextlib.nullcontext():  # the gradients of all bundles' weights have one launch
        for x, weight, one_out, one_addend, one_bias in parts:
            epilogue = given.epilogue._replace(bias=one_bias, addend=one_addend)
            one = Operands(x, weight, one_out, epilogue)
            if way.run is None:
                convolve(one, way.problem)
            else:
                way.run(one, way.offer, way.problem)
    if is_wgrad:
        move(given.weight.reshape(own.shape), own, given.add)
    elif copied:
        copy(_apart(out, count), outs)


def _dense(given: Operands, way: Bundles, is_wgrad: bool) -> tuple[Array, Array]:
    """The weights of the bundles, (bundles, K, R, S, C), or room for their gradients; and the view of what is not zero
    in them, (bundles, groups, K / groups, R, S, C / groups)."""
    shape, weight = (way.bundles, *way.problem.weight.shape), given.weight
    dense = empty(shape, float32) if is_wgrad else zeros(shape, given.x.dtype)
    count, k, rows, columns, c = shape
    pairs = dense.reshape(count, way.groups, k // way.groups, rows, columns, way.groups, c // way.groups)
    own = pairs.diagonal(axis1=1, axis2=5).transpose(0, 5, 1, 2, 3, 4)
    if not is_wgrad:
        move(own, weight.astype(dense.dtype, copy=False).reshape(own.shape))
    return dense, own


def _views(array: Array, count: int) -> list[Array]:
    """The channels of each bundle, of an array (..., C)."""
    width = array.shape[-1] // count
    return [array[..., i * width : (i + 1) * width] for i in range(count)]


def _copies(image: Array, count: int) -> Array:
    """A copy (bundles, N, H, W, channels) of an image."""
    view = _apart(image, count)
    out = empty(view.shape, image.dtype)
    copy(out, view)
    return out


def _apart(image: Array, count: int) -> Array:
    """The view (bundles, N, H, W, channels) of an image."""
    n, height, width, c = image.shape
    return image.reshape(n, height, width, count, c // count).transpose(3, 0, 1, 2, 4)
