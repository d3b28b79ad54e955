"""Weight gradients of convolutions of stride 1 that keep the image's size, with Hopper's own instructions."""

from __future__ import annotations

import functools
import itertools
import math
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from cudiff.backend import Array, float32, is_low
from cudiff.cuda.deferred import LaunchType, enqueue
from cudiff.cuda.device import multiprocessors
from cudiff.cuda.kernels.convolution.problem import WGRAD, Fusion, Operands, Problem
from cudiff.cuda.kernels.convolution.sm90 import (
    BARRIER_BYTES,
    CHANNELS,
    CLUSTERS,
    ROW_BYTES,
    SHARED_BYTES,
    at_once,
    full_tiles,
    of_one_size,
    takes_second_source,
)
from cudiff.cuda.kernels.shape import padded
from cudiff.cuda.launch import Launch, blocks, empty, launch
from cudiff.cuda.select import Offer
from cudiff.cuda.sums import add_parts
from cudiff.cuda.tensor_map import tensor_map
from cudiff.cuda.tiles import Planner

MAX_BATCH = 16  # gradients in a launch: they take 7 of the 32 KiB that its arguments may have
PENDING_BYTES = 128 << 20  # of images kept pending: with 144 MiB the U-Net's step at batch 32 takes 96 MiB more
WAVES = 4  # of blocks, at most
COLUMNS = 128  # of an image in a step, at most
TF32_COLUMNS = 112  # three steps of it fit in shared memory


def supports(p: Problem) -> bool:
    """Whether `run` serves the problem, with any number of channels, apart from fused ops."""
    if p.direction != WGRAD or not of_one_size(p):
        return False
    return is_low(p.x.dtype) or p.kernel[0] == p.kernel[1]


def offer(p: Problem) -> Offer | None:
    if not supports(p):
        return None
    if Fusion.SECOND_SOURCE in p.wanted and (Fusion.UPSAMPLE in p.wanted or not takes_second_source(p)):
        return None
    upsampled = Fusion.UPSAMPLE in p.wanted and _takes_upsampled(p)
    fused = p.wanted & ({Fusion.SECOND_SOURCE, Fusion.UPSAMPLE} if upsampled else {Fusion.SECOND_SOURCE})
    return Offer(fused, Prepared(p))


def _takes_upsampled(p: Problem) -> bool:
    """Whether it can read x as the forward did, upsampled to twice the height and width."""
    size = p.out.shape[1], width_of(p.out.shape[2])
    return is_low(p.x.dtype) and fit(size, p.x.shape[3], p.kernel, 1, 1, upsample=True) is not None


@functools.cache
def width_of(columns: int, most: int = COLUMNS) -> int:
    """Pixels of an image's row in a step: a multiple of 8, the pixels of a swizzled block. A row of more than `most`
    columns is read in parts. Their width is the multiple of 16 that pads the row least, the largest if several do."""
    if columns <= most:
        return blocks(columns, 8) * 8
    return min(range(16, most + 1, 16), key=lambda width: (blocks(columns, width) * width, -width))


class Plan(NamedTuple):
    """A launch configuration. taps: horizontal taps of a block. across: 64-channel columns of a block. cluster: blocks
    of a cluster. splits: parts of the depth (split K). The rest follows from these. rows: of an image in a step.
    stages: steps in flight. shared: bytes of shared memory."""

    taps: int
    across: int
    cluster: int
    splits: int
    rows: int
    stages: int
    shared: int

    @property
    def choice(self) -> list[int]:
        return [self.taps, self.across, self.cluster, self.splits]


class Prepared:
    """What the gradients of one problem have in common, made once for it: a row's offer holds it. chosen: None, or a
    plan in place of the planner's, by which the gradient is computed at once."""

    def __init__(self, p: Problem, chosen: Plan | None = None):
        self.p, self.chosen = p, chosen
        self.read, self.images = p.x.shape[:3], p.out.shape[:3]
        if p.kernel == (1, 1) and chosen is None and self.read == self.images:
            self.read = self.images = full_tiles(self.images, apart=False)
        # TMA reads rows of a multiple of 16 bytes: `run` pads others.
        self.x, self.out = (image._replace(shape=(*image.shape[:3], blocks(image.shape[3], 8) * 8))
                            for image in (p.x, p.out))
        self.pads = (self.x, self.out) != (p.x, p.out)
        self.held = sum([image.size * image.dtype.itemsize for image in (self.x, self.out, p.x2) if image is not None])
        self.group = p.x.dtype, self.read, self.images, p.kernel


def run(given: Operands, offer: Offer, p: Problem) -> None:
    """Write the gradient of the weight, whose rows may be slices of longer rows. An x half as high and wide as dout is
    read as upsampled. The offer's plan is `Prepared`. The gradient of 16-bit images may be deferred (see
    cudiff.cuda.deferred)."""
    ready: Prepared = offer.plan
    if p.x.dtype == float32:
        wgrad_tf32(given.x, given.out, given.weight, given.add)
        return
    if ready.pads:
        given = given._replace(x=_whole(given.x), out=_whole(given.out))
    if ready.chosen is not None:
        _configured(ready.chosen, ready)([given])
    else:
        reads = [given.x, given.out] if given.x2 is None else [given.x, given.x2, given.out]
        enqueue(_WGRADS, (ready, given), given.weight, reads, ready.held, ready.group)


def _launch(batch: list[tuple[Prepared, Operands]]) -> None:
    """Weight gradients from images of one size, in one launch."""
    all_ready, all_given = zip(*batch, strict=True)
    ready = all_ready[0]
    problem = ready.images, tuple([ready.p.weight.shape for ready in all_ready]), ready.read != ready.images
    plan.run(problem, lambda chosen: _configured(chosen, *all_ready)(all_given),
             [given.weight for given in all_given if given.add])


class Configured:
    """The launch, by one plan, of gradients of these problems: made once for them."""

    def __init__(self, chosen: Plan, *all_ready: Prepared):
        taps, across, cluster, splits, rows, stages, shared = chosen
        dtype, read, images, kernel = all_ready[0].group
        (n, height, columns), upsample = images, read != images
        width, self.sums = width_of(columns), splits // cluster
        box: tuple[int, ...] = (1, rows + kernel[0] - 1, width + taps - 1, CHANNELS)
        if upsample:
            box = (1, 1, (width + taps + 1) // 2, 2, CHANNELS)
        self.rows, first = [], 0
        for ready in all_ready:
            outputs, _, _, channels = ready.p.weight.shape
            x, x2 = [source.form(box, read, twice=upsample) for source in (ready.x, ready.p.x2 or ready.x)]
            out = ready.out.form((1, rows, width, CHANNELS), images)
            self.rows.append((x, x2, out, first, channels, outputs, ready.x.shape[3]))
            first += _blocks(ready.p.weight.shape, taps, across)
        count = 1 if len(all_ready) == 1 else MAX_BATCH
        self.rest = _NO_ROW * (count - len(all_ready))
        self.numbers = n, height, columns, kernel[1], rows, width, stages
        self.launch = Launch(
            "conv2d_wgrad_sm90", "conv2d_wgrad_sm90", (first, 1, splits), (160 if taps == 1 else 512,), shared,
            T=dtype, R=kernel[0], TAPS=taps, COLUMNS=across, PIXELS=rows * width, CLUSTER=cluster, JOBS=count,
            UPSAMPLE=int(upsample),
        )

    def __call__(self, batch: Sequence[Operands]) -> None:
        table, outs = b"", []
        for one, (x, x2, dout, first, channels, outputs, split) in zip(batch, self.rows, strict=True):
            out, pitch = _sums(one.weight, self.sums)
            table += ROW.pack(
                x.at(one.x.data.ptr), x2.at((one.x if one.x2 is None else one.x2).data.ptr),
                dout.at(one.out.data.ptr), out.data.ptr, pitch, first, one.add and self.sums == 1, channels, outputs,
                split,
            )
            outs.append(out)
        self.launch(table + self.rest, *self.numbers)
        if self.sums > 1:
            for one, out in zip(batch, outs, strict=True):
                add_parts(out, one.weight, one.add)


_configured = functools.lru_cache(maxsize=4096)(Configured)
_WGRADS = LaunchType(_launch, MAX_BATCH, PENDING_BYTES, rank=0)
ROW = struct.Struct("=128s128s128sQq5i28x")
"""x, x2, dout, out, pitch, first block, add, channels, outputs, split: Job of conv2d_wgrad_sm90.cu."""
_NO_ROW = ROW.pack(b"", b"", b"", 0, 0, 2**31 - 1, 0, 0, 0, 0)


@functools.cache
def _blocks(weight: tuple[int, ...], taps: int, across: int) -> int:
    """Blocks for each part of the depth of a weight (K, R, S, C)."""
    outputs, _, kernel_columns, channels = weight
    return blocks(outputs, CHANNELS) * blocks(channels, CHANNELS * across) * (kernel_columns // taps)


def _steps(images: tuple[int, ...], rows: int, most: int = COLUMNS) -> int:
    """Steps of `rows` rows, or parts of rows, that images (N, H, W) have."""
    n, height, columns = images
    return n * blocks(height, rows) * blocks(columns, width_of(columns, most))


def plans(images: tuple[int, ...], weights: tuple[tuple[int, ...], ...], upsample: bool) -> Iterator[Plan]:
    """All plans for a dout of this (N, H, W) and weights of these (K, R, S, C).

    The splits' blocks run in up to WAVES waves: if one wave leaves multiprocessors idle, several leave fewer idle.
    """
    _, height, columns = images
    kernel, channels = weights[0][1:3], max(weight[3] for weight in weights)
    for (taps, across), cluster in itertools.product(((3, 1), (1, 1), (1, 2), (1, 3)), CLUSTERS):
        fitted = fit((height, width_of(columns)), channels, kernel, taps, across, upsample)
        if fitted is None:
            continue
        tiles = sum(_blocks(weight, taps, across) for weight in weights)
        most = min(_steps(images, fitted[0]), cluster * max(1, WAVES * at_once(cluster) // tiles))
        for splits in range(cluster, most + 1, cluster):
            yield Plan(taps, across, cluster, splits, *fitted)


def time(chosen: Plan, images: tuple[int, ...], weights: tuple[tuple[int, ...], ...], upsample: bool) -> float:
    """Estimated microseconds, as measured on an H200."""
    kernel_rows, width = weights[0][1], width_of(images[2])
    taps, across, cluster, splits, rows = chosen[:5]
    tiles = sum(_blocks(weight, taps, across) for weight in weights)
    waves = blocks(tiles * splits, at_once(cluster) * cluster)
    pixels, product = rows * width, 64 * kernel_rows * across * taps
    halo_bytes = (pixels + across * (rows + kernel_rows - 1) * (width + taps - 1)) * ROW_BYTES
    step = ((halo_bytes / 92e3) ** 4 + (pixels * product / 57e3) ** 4) ** 0.25  # the longer, or more if similar
    if upsample and taps == 1:  # the halo tile is loaded row by row; three taps have time for that
        step = max(1.15 * step, 0.067 * (rows + kernel_rows))
    share = product * 256 / cluster  # bytes of the product that a block writes
    exchange = 1.1 + share * (cluster - 1) / 20e3 if cluster > 1 else 0.0
    estimate = waves * (2.9 + blocks(_steps(images, rows), splits) * step + share / 29e3 + exchange)
    if splits > cluster:  # the sums over splits, whose launch a batch shares
        estimate += 1.5 + splits // cluster * sum(math.prod(weight) for weight in weights) * 4 / 2.2e6
    return estimate


plan = Planner("conv2d_wgrad_sm90", plans, time)


def fit(size: tuple[int, int], channels: int, kernel: tuple[int, ...], taps: int, across: int,
        upsample: bool = False) -> tuple[int, int, int] | None:
    """Rows of an image in a step, steps in flight, bytes of shared memory. None if the kernel does not support it, or
    two steps do not fit.

    size: an image's rows, and the pixels of a row in shared memory (`width_of`).
    """
    height, width = size
    step = 1 if width % 16 == 0 else 2  # a step's pixels are a multiple of 16
    rows = min(max(1, 128 // width // step), blocks(height, step)) * step
    pitch = width + taps - 1 + (2 if upsample else 0)
    halo = blocks((rows + kernel[0] - 1) * pitch * ROW_BYTES, 1024) * 1024
    stage = rows * width * ROW_BYTES + across * halo
    stages = min(6, (SHARED_BYTES - 1024 - BARRIER_BYTES) // stage)
    if stages < 2 or across > (blocks(channels, CHANNELS) if kernel[0] == 1 else 1):
        return None
    if taps > 1 and kernel != (3, taps):
        return None
    if (taps > 1 or upsample) and width % 16 and width != 8:
        return None
    return rows, stages, max(stages * stage, 256 * CHANNELS * kernel[0] * across * taps) + BARRIER_BYTES


def wgrad_tf32(x: Array, dout: Array, dweight: Array, add: bool, splits: int = 0) -> None:
    """`run` of float32 images, rounded to tf32. splits: parts of the depth; 0 for as many as run at once."""
    x, dout = _whole(x), _whole(dout)
    n, height, columns, _ = x.shape
    outputs, taps, _, channels = dweight.shape
    rows, across, stages, shared = fit_tf32(height, columns, channels, taps)
    width = width_of(columns, TF32_COLUMNS)
    pitch_x = _pitch(width, taps)
    grid = blocks(outputs, 64) * blocks(channels, 32 * across)
    splits = min(_steps(x.shape[:3], rows, TF32_COLUMNS), splits or max(1, multiprocessors() // grid))
    out, pitch = _sums(dweight, splits)
    launch(
        "conv2d_wgrad_tf32_sm90", "conv2d_wgrad_tf32_sm90", (grid, splits), 256,
        (
            tensor_map(x, (1, rows + taps - 1, pitch_x, 32)), tensor_map(dout, (1, rows, width, 32)),
            out, np.int64(pitch), add and splits == 1, n, height, columns, channels, outputs, rows, width, pitch_x,
            stages,
        ),
        shared, R=taps, COLUMNS=across, PIXELS=rows * width,
    )
    if splits > 1:
        add_parts(out, dweight, add)


def fit_tf32(height: int, columns: int, channels: int, taps: int) -> tuple[int, int, int, int]:
    """Rows of an image a step, 32-channel columns a block, steps in flight (at least 3), bytes of shared memory."""
    width = width_of(columns, TF32_COLUMNS)
    pitch_x = _pitch(width, taps)
    rows = min(max(1, 64 // width), height)
    room = SHARED_BYTES - 1024 - BARRIER_BYTES
    across = 1 if taps > 1 else min(4, blocks(channels, 32), room // (3 * rows * width * ROW_BYTES) - 2)
    stage = (2 * rows * width + across * (rows + taps - 1) * pitch_x) * ROW_BYTES
    stages = min(6, room // stage)
    return rows, across, stages, max(stages * stage, taps**2 * across * 16 * 128 * 4) + BARRIER_BYTES


def _pitch(width: int, taps: int) -> int:
    """Pixels from one row of a halo tile to the next: a multiple of eight."""
    return blocks(width + taps - 1, 8) * 8


def _sums(dweight: Array, count: int) -> tuple[Array, int]:
    """The array for `count` partial sums, dweight itself for one, and the pitch of its rows in floats."""
    if count == 1:
        return dweight, dweight.strides[0] // 4
    size = dweight.size // len(dweight)
    return empty((count, len(dweight), size), float32), size


def _whole(x: Array) -> Array:
    """x with its channels padded by zeros to a multiple of 8, so that TMA can read its rows."""
    rest = -x.shape[3] % 8
    return padded(x, ((0, 0), (0, 0), (0, 0), (0, rest))) if rest else x
