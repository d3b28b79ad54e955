"""Convolutions of stride 1 that keep the image's size as products of matrices on Hopper, by gemm_sm90.cu.

The product's rows are pixels, of any number of images; its depth is the channels of all taps. So it does well where
images are small, and with one tap, where conv2d_sm90.cu does not: that cuts each image into tiles 8 pixels wide, and
its warpgroups share no operand.
"""

from __future__ import annotations

import numpy as np

from cudiff.backend import is_low
from cudiff.cuda.kernels.convolution import sm90
from cudiff.cuda.kernels.convolution.problem import DGRAD, EPILOGUE, WGRAD, Fusion, Operands, Problem
from cudiff.cuda.kernels.gemm.matmul import rows_of
from cudiff.cuda.kernels.gemm.sm90 import DEPTH, ONE_TAP_FLOPS, Plan, multiply, plan
from cudiff.cuda.launch import blocks
from cudiff.cuda.select import Offer

NORM_SHARE = 1.1  # of conv2d_sm90's estimate, where it takes its result back through a norm
SMALL_SHARE = 1.12  # and where blocks walk over several of its smallest tiles: 46.7 µs for 40.4, 41.4 for 36.9
PASS, PASS_BYTES = 2.0, 3.5e6  # microseconds of a pass for sums that are left, and bytes that it reads in one


def offer(p: Problem) -> Offer | None:
    """All that is added; where this is estimated to take less time than conv2d_sm90, with what that fuses and this
    leaves: sums for a norm, for which the norm reads the result once more, and a skip path, a launch of its own."""
    if not _supports(p):
        return None
    asked = _product(p)
    microseconds = plan.estimate(*asked)  # a measured plan is no slower: tuning changes no kernel
    if microseconds + _left(p) >= _by_tiles(p):
        return None
    return Offer(p.wanted & (EPILOGUE | {Fusion.SECOND_SOURCE}), plan(*asked), microseconds)


def _supports(p: Problem) -> bool:
    pair = Fusion.SECOND_SOURCE in p.wanted
    return (
        p.direction != WGRAD
        and is_low(p.x.dtype)
        and not p.wanted & {Fusion.CAST, Fusion.RELU, Fusion.UPSAMPLE}
        and sm90.supports(p)
        and (not pair or (sm90.takes_second_source(p) and not (p.direction == DGRAD and p.wanted & EPILOGUE)))
        and (p.kernel != (1, 1) or Fusion.EMB not in p.wanted)
    )


def _product(p: Problem) -> tuple[int, int, int, bool]:
    """Rows, columns and depth, as `plan` is asked."""
    outputs, channels = p.weight.shape[0], p.weight.shape[3]
    columns, inputs = (channels, outputs) if p.direction == DGRAD else (outputs, channels)
    taps = p.kernel[0] * p.kernel[1]
    return p.x.size // p.x.shape[3], columns, taps * (blocks(inputs, DEPTH) * DEPTH if taps > 1 else inputs), True


def _left(p: Problem) -> float:
    """Estimated microseconds of what is wanted and left."""
    rows, columns, *_ = _product(p)
    size, total = rows * columns * p.x.dtype.itemsize, 0.0
    if Fusion.STATISTICS in p.wanted:
        total += PASS + size / PASS_BYTES
    if Fusion.NORM_BACKWARD in p.wanted:
        total += PASS + 2 * size / PASS_BYTES
    if p.skip_weight is not None:
        total += plan.estimate(rows, columns, p.skip_weight.shape[3], True)
    return total


def _by_tiles(p: Problem) -> float:
    """Estimated microseconds of conv2d_sm90, infinity where that does not serve the problem."""
    found = sm90.offer(p)
    if found is None:
        return np.inf
    rows, columns, depth, _ = _product(p)
    images, one_tap = p.x.shape[:3], p.kernel == (1, 1)
    if one_tap:
        images = sm90.full_tiles(images, apart=bool(p.wanted & {Fusion.STATISTICS, Fusion.NORM_BACKWARD, Fusion.EMB}))
    skip = 0 if p.skip_weight is None else p.skip_weight.shape[3]
    fused = skip if Fusion.SKIP in found.fused else 0
    channels, itemsize = depth // (p.kernel[0] * p.kernel[1]), p.x.dtype.itemsize
    asked = (*images, channels), columns, p.kernel, itemsize, fused, False
    tiles, = sm90.plan.by_rule(*asked)
    total = sm90.plan.estimate(*asked)
    if tiles.tile is sm90.TILES[-1] and tiles.blocks < images[0] * sm90.tiles_of((*images, channels), tiles.rows):
        total *= SMALL_SHARE
    if one_tap:
        total = max(total, 2 * rows * columns * depth / ONE_TAP_FLOPS)
    if Fusion.NORM_BACKWARD in found.fused:
        total *= NORM_SHARE
    if skip and not fused:
        total += plan.estimate(rows, columns, skip, True)
    return total


def run(given: Operands, offer: Offer, p: Problem) -> None:
    backward, (height, width) = p.direction == DGRAD, p.weight.shape[1:3]
    x, weight, out, x2 = given.x, given.weight, rows_of(given.out), given.x2
    weight = weight if weight.dtype == x.dtype else weight.astype(x.dtype)
    weight = weight.reshape(len(weight), height * width, weight.shape[3]).transpose(1, 0, 2)
    taps = (height, width) if height * width > 1 else None
    more_in, more_out = (None, x2) if backward else (x2, None)
    epilogue = given.epilogue._replace(rows_per_image=p.out.shape[1] * p.out.shape[2])
    if taps is None:
        x, more_in = rows_of(x), None if more_in is None else rows_of(more_in)

    def launch_as(chosen: Plan) -> None:
        multiply(x, weight, out, epilogue, False, backward, False, chosen, more_in,
                 None if more_out is None else rows_of(more_out), taps)

    plan.run(_product(p), launch_as, [given.out] if given.epilogue.addend is given.out else [], chosen=offer.plan)
