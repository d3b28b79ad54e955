"""Convolutions of stride 1 that keep the image's size, with Hopper's own instructions."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from cudiff.backend import Array, float32, is_low
from cudiff.cuda import tiles
from cudiff.cuda.exchange import exchange_workspace
from cudiff.cuda.kernels.convolution.plans_sm90 import (
    CHANNELS,
    ROW_BYTES,
    Plan,
    pitch_of,
    plan,
    spared_k_steps,
    tiles_of,
)
from cudiff.cuda.kernels.convolution.problem import AFTERWARDS, DGRAD, EPILOGUE, WGRAD, Fusion, Image, Operands, Problem
from cudiff.cuda.kernels.gemm.plans_sm90 import plan as product_plan
from cudiff.cuda.kernels.shape import turned
from cudiff.cuda.launch import Launch, blocks, empty
from cudiff.cuda.select import Offer
from cudiff.cuda.tensor_map import form_of
from cudiff.statistics import ChannelStatistics, Kind, moments

COLUMNS = (1, 3, 5, 7)  # of taps


def supports(p: Problem) -> bool:
    """Whether `run` serves the problem apart from fused ops. The weight's rows may be slices of longer rows."""
    return of_one_size(p) and p.x.rows_aligned and p.weight.rows_aligned and p.out.rows_aligned


def of_one_size(p: Problem) -> bool:
    """Whether Hopper's kernels serve the problem, apart from the alignment of rows. float32 only as tf32."""
    rows, columns = p.kernel
    x, out = p.x, p.out
    return (
        p.products == 1
        and len(x.shape) == len(out.shape) == 4
        and x.aligned
        and out.aligned
        and p.stride == (1, 1)
        and rows in (1, 3)
        and columns in COLUMNS
        and p.padding == (rows // 2, columns // 2)
        and min(x.size, out.size) > 0
        and max(x.size, out.size) < 2**31
    )


def takes_sources(p: Problem) -> bool:
    """Whether there is one source, or these kernels read, or in dgrad write, two images in place of their
    concatenation. The images must be 16-bit and not upsampled, and the first one's channels a multiple of 64."""
    first, other = (p.out, p.x) if p.direction == DGRAD else (p.x, p.out)
    return p.x2 is None or (
        is_low(first.dtype)
        and Fusion.UPSAMPLE not in p.wanted
        and len(p.x2.shape) == 4
        and p.kernel[0] == p.kernel[1]
        and first.shape[3] % CHANNELS == 0
        and p.x2.rows_aligned
        and other.rows_aligned
        and p.weight.rows_aligned
        and 0 < p.x2.size < 2**31
    )


def offer(p: Problem) -> Offer | None:
    """Fuses all but casts, SUMS and AFTERWARDS; a skip path if `_takes_skip`, a norm's backward if `_takes_norm`, an
    upsampled input unless `_upsampling_gains`."""
    if p.direction == WGRAD or not (supports(p) and takes_sources(p)):
        return None
    left = {Fusion.CAST, Fusion.SUMS} | AFTERWARDS
    if Fusion.SKIP in p.wanted and not _takes_skip(p):
        left.add(Fusion.SKIP)
    if Fusion.NORM_BACKWARD in p.wanted and not _takes_norm(p):
        left.add(Fusion.NORM_BACKWARD)
    if Fusion.UPSAMPLE in p.wanted and _upsampling_gains(p):
        left.add(Fusion.UPSAMPLE)
    fused = p.wanted - left
    return Offer(fused, Prepared(p, fused))


def _upsampling_gains(p: Problem) -> bool:
    """Whether upsampling by a launch of its own is estimated to take less time, by enough to pay for the memory."""
    shape, outputs, itemsize = (*p.out.shape[:3], p.x.shape[3]), p.out.shape[3], p.x.dtype.itemsize
    copy = 1.5 + 1.25 * math.prod(shape) * itemsize / 3.4e6
    fused, apart = (plan.estimate(shape, outputs, p.kernel, itemsize, 0, upsample) for upsample in (True, False))
    return 1.05 * (apart + copy) < fused


def _takes_norm(p: Problem) -> bool:
    """Whether it fuses the norm's backward. The norm's sources must be 16-bit, the first of two must have a multiple of
    64 channels, and nothing may be added to the result."""
    return (
        not p.wanted & EPILOGUE
        and is_low(p.norm[0].dtype)
        and all(source.rows_aligned for source in p.norm)
        and (len(p.norm) == 1 or p.norm[0].shape[3] % CHANNELS == 0)
    )


def _takes_skip(p: Problem) -> bool:
    """Whether it fuses the skip path of a 3×3 convolution. Images must be 16-bit, and the first of two sources must
    have a multiple of 64 channels. Biases may be wanted too, but no embedding, addend, ReLU or second source. It does
    not if two launches are estimated to take less time."""
    return (
        not p.wanted & {Fusion.EMB, Fusion.ADDEND, Fusion.RELU, Fusion.SECOND_SOURCE}
        and is_low(p.x.dtype)
        and p.kernel == (3, 3)
        and p.skip_weight is not None
        and p.skip_weight.rows_aligned
        and all(
            source.dtype == p.x.dtype
            and source.shape[:3] == p.out.shape[:3]
            and source.rows_aligned
            and 0 < source.size < 2**31
            for source in p.skip
        )
        and (len(p.skip) == 1 or p.skip[0].shape[3] % CHANNELS == 0)
        and _skip_gains(p, p.skip_weight.shape[3])
    )


def _skip_gains(p: Problem, skip: int) -> bool:
    """Whether one launch is estimated to take no longer than two, the second of which reads the first one's result."""
    images, outputs, itemsize = p.out.shape[:3], p.out.shape[3], p.x.dtype.itemsize
    rows, upsample = math.prod(images), Fusion.UPSAMPLE in p.wanted
    together, alone = (plan.estimate((*images, p.x.shape[3]), outputs, p.kernel, itemsize, more, upsample)
                       for more in (skip, 0))
    path = min(plan.estimate((*full_tiles(images, apart=False), skip), outputs, (1, 1), itemsize, 0, False),
               product_plan.estimate(rows, outputs, skip, True))
    return together <= alone + path + rows * outputs * itemsize / 9e6


def full_tiles(images: tuple[int, ...], apart: bool) -> tuple[int, int, int]:
    """The shape (N, H, W) as which a 1×1 convolution, which needs no neighbours, views its images.

    It is 8 pixels wide if 8 divides an image's pixels. All images are viewed as one, unless `apart`, which
    statistics, norms and embeddings require.
    """
    n, height, columns = images
    if not apart:
        n, height = 1, n * height
    return (n, height * columns // 8, 8) if height * columns % 8 == 0 else (n, height, columns)


class Prepared:
    """What the launches of one problem have in common, made once for it: a row's offer holds it.

    chosen: None, or a plan in place of the planner's. It is one for the images as they are, after upsampling.
    """

    def __init__(self, p: Problem, fused: frozenset[str], chosen: Plan | None = None):
        self.p, self.fused, self._chosen = p, fused, chosen
        self.moments, self.norm = Fusion.STATISTICS in fused, Fusion.NORM_BACKWARD in fused
        self.upsample, self.skip, self.adds = Fusion.UPSAMPLE in fused, Fusion.SKIP in fused, Fusion.ADDEND in p.wanted
        self.turns = p.direction == DGRAD and p.x.dtype == float32  # wgmma takes tf32 operands only in fprop's layout
        self.read = p.x.shape[:3]
        n, height, columns = self.read
        if self.upsample:
            height, columns = 2 * height, 2 * columns
        elif p.kernel == (1, 1) and chosen is None:
            apart = self.moments or self.norm or Fusion.EMB in p.wanted
            n, height, columns = self.read = full_tiles(p.x.shape[:3], apart)
        self.images = n, height, columns
        more = 0 if p.x2 is None else p.x2.shape[3]
        ins, outs = (0, more) if p.direction == DGRAD else (more, 0)
        self.channels, self.outputs = p.x.shape[3] + ins, p.out.shape[3] + outs
        self.skip_channels = p.skip_weight.shape[3] if self.skip and p.skip_weight is not None else 0
        shape = *self.images, self.channels
        self.problem = shape, self.outputs, p.kernel, p.x.dtype.itemsize, self.skip_channels, self.upsample

    @functools.cached_property
    def planned(self) -> Configured:
        return Configured(self, plan(*self.problem) if self._chosen is None else self._chosen)


class Configured:
    """The same with a plan."""

    def __init__(self, ready: Prepared, chosen: Plan):
        pixels, cluster, rows, each, halos, weights, shared, together, images, whole_rows = chosen
        p, kernel, upsample, (n, height, columns) = ready.p, ready.p.kernel, ready.upsample, ready.images
        dtype, chunk, first = p.x.dtype, ROW_BYTES // p.x.dtype.itemsize, p.norm if ready.norm else (p.out,)
        self.ready, self.plan = ready, chosen
        pitch = pitch_of(kernel[1], upsample, columns if whole_rows else 0)
        width = pitch if whole_rows else 8
        result_box = 1, min(rows, pixels // 8 // cluster), width, chunk
        halo_box = (1, 1, pitch // 2, 2, chunk) if upsample else (1, rows + kernel[0] - 1, pitch, chunk)

        def form(image: Image | None, box: tuple[int, ...], images: tuple[int, ...] = ready.images,
                 **options: bool) -> Any:
            return None if image is None else image.form(box, images, **options)

        self.x, self.x2 = (form(image, halo_box, ready.read, twice=upsample) for image in (p.x, p.x2))
        self.out, self.out2 = (form(image, result_box, operand=False) for image in (p.out, p.x2))
        read, box = (p.skip, (1, rows, width, chunk)) if ready.skip else (p.norm if ready.norm else (), result_box)
        self.sources = [form(image, box, operand=False) for image in (*read, p.out, p.out)[:2]]
        kind = moments(dtype) if ready.moments else Kind.PRODUCTS if ready.norm else None
        tiles = tiles_of((*ready.images, 0), rows, whole_rows) * cluster
        self.statistics = None if kind is None else (kind, (n, tiles, ready.outputs, kind.numbers))
        self.parts, self.together = (each, pixels // 8, 128, 4) if together else None, max(1, together)
        fprop, spared = p.direction != DGRAD or ready.turns, spared_k_steps(ready.channels, dtype.itemsize)
        last = ready.outputs % CHANNELS or CHANNELS if fprop else CHANNELS - 16 * spared  # rows of last weights
        outputs, *taps, channels = p.weight.shape
        self.weight = _weight_maps((channels, *taps, outputs) if ready.turns else p.weight.shape, dtype, last)
        self.skip_weight = _weight_maps((p.skip_weight or p.weight).shape, dtype, last)
        self.numbers = (
            n, height, columns, ready.channels, ready.outputs, kernel[1], ready.skip_channels, rows, halos, weights,
            p.x.shape[3], first[0].shape[3], p.skip[0].shape[3] if ready.skip else 0,
        )
        self.launch = Launch(
            "conv2d_sm90", "conv2d_sm90", (each, 1 if together else blocks(ready.outputs, CHANNELS), cluster), (384,),
            shared, together > 0, T=dtype, R=kernel[0],
            PASS="FPROP" if fprop else "DGRAD", PIXELS=pixels,
            ADDS=int(ready.adds), STATISTICS=int(ready.moments), NORM=(1 if p.silu else 2) if ready.norm else 0,
            RELU=int(Fusion.RELU in ready.fused), SKIP=int(ready.skip), CLUSTER=cluster, UPSAMPLE=int(upsample),
            SPARED=spared, STREAM_K=int(together > 0), IMAGES=images, WHOLE_ROWS=int(whole_rows),
        )

    def run(self, given: Operands, weight: Array, addend: Array | None) -> ChannelStatistics | None:
        ready, (x, _, out, (bias, emb, *_), x2, skip, norm, _) = self.ready, given
        x_map = x2_map = self.x.at(x.data.ptr)
        weight_maps = skip_maps = self.weight(weight.data.ptr, weight.strides)
        first_map = second_map = out_map = out2_map = self.out.at(out.data.ptr)
        if x2 is not None and ready.p.direction == DGRAD:
            out2_map = self.out2.at(x2.data.ptr)
        elif x2 is not None:
            x2_map = self.x2.at(x2.data.ptr)
        skip_bias, affine, groups, read = None, _NO_NORM, 1, None
        if skip is not None and ready.skip:
            skip_bias, read = skip.bias, skip[:2]
            skip_maps = self.skip_weight(skip.weight.data.ptr, skip.weight.strides)
        elif norm is not None and ready.norm:
            affine, groups, read = norm[3:], norm.mean.shape[1], norm[1:3]
        elif addend is not None:
            first_map = self.out.at(addend.data.ptr)
        if read is not None:
            first_map = self.sources[0].at(read[0].data.ptr)
            second_map = self.sources[1].at((out if read[1] is None else read[1]).data.ptr)
        statistics = parts = workspace = None
        if self.statistics is not None:
            kind, shape = self.statistics
            statistics = ChannelStatistics(kind, empty(shape, float32))
        if self.parts is not None:
            parts, workspace = empty(self.parts, float32), exchange_workspace()
        self.launch.run((
            x_map, x2_map, *weight_maps, out_map, out2_map, first_map, second_map, *skip_maps, bias, skip_bias, emb,
            None if statistics is None else statistics.sums, *affine, *self.numbers, groups, parts, workspace,
            self.together,
        ))
        return statistics


def _weight_maps(shape: tuple[int, ...], dtype: np.dtype, last: int) -> Callable[[int, tuple[int, ...]], list[bytes]]:
    """A function of a weight's address and strides that returns its two maps, in boxes of 64 rows and of `last`, by one
    tap by a chunk of channels."""
    k, rows, columns, c = shape

    @functools.lru_cache(maxsize=256)
    def maps(pointer: int, strides: tuple[int, ...]) -> list[bytes]:
        steps = strides[0], strides[2 if columns > 1 else 1] if rows * columns > 1 else c * dtype.itemsize, 0
        forms = (form_of((k, rows * columns, c), dtype, (box, 1, ROW_BYTES // dtype.itemsize), strides=steps)
                 for box in (CHANNELS, last))
        return [form.at(pointer) for form in forms]

    return maps


_NO_NORM = (None,) * 6


def run(given: Operands, offer: Offer, p: Problem) -> ChannelStatistics | None:
    """Returns what `table.fprop` and `table.dgrad` return. The offer's plan is `Prepared`."""
    ready: Prepared = offer.plan
    planned, weight, addend, dtype = ready.planned, given.weight, given.epilogue.addend, given.x.dtype
    if weight.dtype != dtype:
        weight = weight.astype(dtype)
    if ready.turns:
        weight = turned(weight)
    if given.skip is not None and given.skip.weight.dtype != dtype:
        given = given._replace(skip=given.skip._replace(weight=given.skip.weight.astype(dtype)))
    if addend is not None and addend.data.ptr % 16:  # TMA reads it
        given.out[...] = addend.reshape(given.out.shape)
        addend = given.out
    if tiles.watch is None:
        return planned.run(given, weight, addend)
    return plan.run(ready.problem, lambda chosen: Configured(ready, chosen).run(given, weight, addend),
                    [addend] if addend is given.out else [], chosen=planned.plan)
