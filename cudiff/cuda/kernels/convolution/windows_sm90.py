"""Convolutions of any stride and padding as matrix products (implicit GEMM) on Hopper, by gemm_sm90.cu.

The product's rows are the windows of all images. Its depth is the channels of all taps. A tile of rows may span
several images, so that many small images fill it. conv2d_sm90.cu is slower with these and with one tap: it cuts each
image into tiles of its own, and its warpgroups share no operand.

With stride s, dgrad is s² convolutions of stride 1. Each computes the pixels that lie s apart: the same taps contribute
to all of them, and these taps lie s apart too. With a 3x3 kernel of stride 2, one of four pixels gets four taps, two
get two, and one gets one.

wgrad is a product whose depth is the windows: dout times the channels of each tap. conv2d_wgrad_sm90.cu, which reads a
pixel once for several taps, has all that it serves.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

from cudiff.backend import is_low
from cudiff.cuda.kernels.convolution import plans_sm90, portable, sm90, wgrad_sm90
from cudiff.cuda.kernels.convolution.problem import DGRAD, EPILOGUE, WGRAD, Fusion, Operands, Problem
from cudiff.cuda.kernels.gemm.matmul import rows_of
from cudiff.cuda.kernels.gemm.plans_sm90 import DEPTH, Plan, plan
from cudiff.cuda.kernels.gemm.product import Epilogue
from cudiff.cuda.kernels.gemm.sm90 import ONE_TAP_FLOPS, multiply, whole_channels
from cudiff.cuda.launch import blocks
from cudiff.cuda.select import Offer
from cudiff.cuda.tensor_map import Windows

NORM_SHARE = 1.1  # factor on conv2d_sm90's estimate if it fuses the norm's backward
WGRAD_SHARE = 0.55  # factor on conv2d's estimate of wgrad: 10 problems with a stride took 0.48 to 0.58 of it with sums
# Bytes of windows read in a microsecond, and more for each tap; they are read for each tap and each column of tiles.
# 5x5 and 7x7 of 64 channels, which the cache serves better, reached 5.2e6 and 6.2e6.
WINDOW_BYTES, TAP_BYTES = 4.3e6, 35e3
PASS, PASS_BYTES = 2.0, 3.5e6  # of an extra pass for statistics: fixed microseconds, and bytes read in a microsecond


class Part(NamedTuple):
    """One of dgrad's convolutions of stride 1, or all of another pass: its windows, the weight's taps that it uses, and
    the pixels of the result that it writes, each (vertical, horizontal)."""

    windows: Windows
    taps: tuple[slice, slice]
    pixels: tuple[slice, slice]


def _along(backward: bool, length: int, taps: int, stride: int, padding: int) -> list[tuple]:
    """The parts along one axis, for a result of this length. Each is the four fields of `Windows`, then the slices of
    the weight's taps and of the result's pixels."""
    if not backward:
        return [(taps, length, -padding, stride, slice(None), slice(None))]
    parts = []
    for pixel in range(min(stride, length)):
        tap = (pixel + padding) % stride  # the first that contributes to pixels pixel, pixel + stride, ...
        seen = len(range(tap, taps, stride))
        first = (pixel + padding - tap) // stride - (seen - 1)
        parts.append((seen, -(-(length - pixel) // stride), first, 1, slice(tap, None, stride),
                      slice(pixel, None, stride)))
    return parts


def parts_of(p: Problem) -> list[Part]:
    axes = [_along(p.direction == DGRAD, *axis)
            for axis in zip(p.out.shape[1:3], p.kernel, p.stride, p.padding, strict=True)]
    parts = [tuple(zip(*pair, strict=True)) for pair in itertools.product(*axes)]
    return [Part(Windows(*windows), taps, pixels) for *windows, taps, pixels in parts]


def offer(p: Problem) -> Offer | None:
    """Fuses the epilogue and a second source. It declines unless it is estimated to take less time than the table's
    next rows. The estimate includes the launches for what those rows fuse and this one does not: a norm's statistics or
    PRODUCTS, for which the norm reads the result once more, and a skip path."""
    if not _supports(p):
        return None
    parts = parts_of(p)
    fused = p.wanted & (EPILOGUE | {Fusion.SECOND_SOURCE})
    if sum(_estimate(p, part) for part in parts) + _left(p, fused) >= otherwise(p):
        return None
    return Offer(fused, [(part, asked := _product(p, part), plan(*asked)) for part in parts])


def _supports(p: Problem) -> bool:
    pair = Fusion.SECOND_SOURCE in p.wanted
    if p.direction == WGRAD and (pair or not p.weight.contiguous or wgrad_sm90.supports(p)):
        return False
    return (
        is_low(p.x.dtype)
        and not p.wanted & {Fusion.CAST, Fusion.RELU, Fusion.UPSAMPLE}
        and p.groups == 1
        and p.dilation == (1, 1)
        and len(p.x.shape) == len(p.out.shape) == 4
        and p.x.rows_aligned
        and p.weight.rows_aligned
        and p.out.rows_aligned
        and min(p.x.size, p.out.size) > 0
        and max(p.x.size, p.out.size) < 2**31
        and sm90.takes_sources(p)
        and not (pair and p.direction == DGRAD and p.wanted & EPILOGUE)
        and not (_is_matrix(p) and Fusion.EMB in p.wanted)
        and all(min(part.windows.taps) > 0 and part.windows.mappable(p.x.shape[1:3]) for part in parts_of(p))
    )


def _is_matrix(p: Problem) -> bool:
    """Whether it is a linear layer: each window is one pixel."""
    return p.kernel == p.stride == (1, 1) and p.padding == (0, 0)


def _product(p: Problem, part: Part) -> tuple:
    """The arguments of `plan`: rows, columns, depth, whether the result is rounded, and in wgrad two more."""
    rows, inputs = p.x.shape[0] * math.prod(part.windows.size), p.x.shape[3]
    if p.direction == WGRAD:
        return p.weight.shape[0], whole_channels(part.windows.taps, inputs), rows, False, 1, p.x.size
    depth = inputs if _is_matrix(p) else math.prod(part.windows.taps) * blocks(inputs, DEPTH) * DEPTH
    return rows, _columns(p), depth, True


def _estimate(p: Problem, part: Part) -> float:
    """Estimated microseconds of the plan by the rule. A tuned plan is no slower, and tuning must not change which
    kernel runs."""
    asked = rows, columns, depth, *_ = _product(p, part)
    chosen, = plan.by_rule(*asked)
    of_windows, others = (columns, rows) if p.direction == WGRAD else (rows, columns)
    brought = of_windows * depth * p.x.dtype.itemsize * blocks(others, chosen.columns)
    return max(plan.time(chosen, *asked), brought / (WINDOW_BYTES + TAP_BYTES * math.prod(part.windows.taps)))


def _columns(p: Problem) -> int:
    """Channels of the result; in dgrad those of both sources."""
    return p.weight.shape[3 if p.direction == DGRAD else 0]


def _left(p: Problem, fused: frozenset[str]) -> float:
    """Estimated microseconds of the wanted fusions that a kernel with these leaves to other launches."""
    rows, columns = math.prod(p.out.shape[:3]), _columns(p)
    size, total = rows * columns * p.x.dtype.itemsize, 0.0
    wanted = p.wanted - fused
    if Fusion.STATISTICS in wanted:
        total += PASS + size / PASS_BYTES
    if Fusion.NORM_BACKWARD in wanted:
        total += PASS + 2 * size / PASS_BYTES
    if p.skip_weight is not None and Fusion.SKIP in wanted:
        total += plan.estimate(rows, columns, p.skip_weight.shape[3], True)
    return total


def otherwise(p: Problem) -> float:
    """Estimated microseconds of conv2d_sm90, or of conv2d where conv2d_sm90 does not serve the problem. What conv2d
    fuses is said of its chosen plan, which tuning may change."""
    found = sm90.offer(p)
    if found is None:
        share = WGRAD_SHARE if p.direction == WGRAD else 1
        return share * portable.microseconds(p) + _left(p, portable.offer(p).fused)
    rows, columns, depth, _ = _product(p, *parts_of(p))
    images, one_tap = p.x.shape[:3], p.kernel == (1, 1)
    if one_tap:
        images = sm90.full_tiles(images, apart=bool(p.wanted & {Fusion.STATISTICS, Fusion.NORM_BACKWARD, Fusion.EMB}))
    skip = 0 if p.skip_weight is None else p.skip_weight.shape[3]
    fused = skip if Fusion.SKIP in found.fused else 0
    channels, itemsize = depth // math.prod(p.kernel), p.x.dtype.itemsize
    total = plans_sm90.plan.estimate((*images, channels), columns, p.kernel, itemsize, fused, False)
    if one_tap:
        total = max(total, 2 * rows * columns * depth / ONE_TAP_FLOPS)
    if Fusion.NORM_BACKWARD in found.fused:
        total *= NORM_SHARE
    if skip and not fused:
        total += plan.estimate(rows, columns, skip, True)
    return total


def run(given: Operands, offer: Offer, p: Problem) -> None:
    """Launch each part with its product and plan from `offer`."""
    if p.direction != WGRAD and given.weight.dtype != given.x.dtype:
        given = given._replace(weight=given.weight.astype(given.x.dtype))
    for part, asked, chosen in offer.plan:
        (_run_wgrad if p.direction == WGRAD else _run)(given, part, asked, chosen, p)


def _run_wgrad(given: Operands, part: Part, asked: tuple, chosen: Plan, p: Problem) -> None:
    weight = given.weight.reshape(1, len(given.weight), -1)

    def launch_as(chosen: Plan) -> None:
        multiply(rows_of(given.out), given.x, weight, Epilogue(), True, True, given.add, chosen, windows=part.windows)

    plan.run(asked, launch_as, [given.weight] if given.add else [], chosen=chosen)


def _run(given: Operands, part: Part, asked: tuple, chosen: Plan, p: Problem) -> None:
    backward, matrix = p.direction == DGRAD, _is_matrix(p)
    x, weight = given.x, given.weight
    own = rows_of if matrix else lambda images: images[:, *part.pixels]
    out, addend = own(given.out), None if given.epilogue.addend is None else own(given.epilogue.addend)
    epilogue = Epilogue(*given.epilogue[:2], addend, math.prod(part.windows.size))
    more_in, more_out = (None, given.x2) if backward else (given.x2, None)
    more_out = None if more_out is None else own(more_out)
    if matrix:
        x, weight = rows_of(x), weight.reshape(1, len(weight), -1)
        more_in = None if more_in is None else rows_of(more_in)
    else:
        weight = weight.transpose(1, 2, 0, 3)[part.taps]

    def launch_as(chosen: Plan) -> None:
        multiply(x, weight, out, epilogue, False, backward, False, chosen, more_in, more_out,
                 None if matrix else part.windows)

    plan.run(asked, launch_as, [given.out] if given.epilogue.addend is given.out else [], chosen=chosen)
