"""Weight gradients of convolutions of stride 1 that keep the image's size, with Hopper's own instructions."""

from __future__ import annotations

import functools
import itertools
import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from cudiff.backend import Array, float32, is_low
from cudiff.cuda.deferred import LaunchType, enqueue
from cudiff.cuda.device import multiprocessors
from cudiff.cuda.kernels.convolution.plans_sm90 import (
    BARRIER_BYTES,
    CHANNELS,
    CLUSTERS,
    ROW_BYTES,
    SHARED_BYTES,
    at_once,
)
from cudiff.cuda.kernels.convolution.problem import WGRAD, Fusion, Operands, Problem
from cudiff.cuda.kernels.convolution.sm90 import full_tiles, of_one_size, takes_sources
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
    if not (supports(p) and takes_sources(p)):
        return None
    fused = {Fusion.SECOND_SOURCE}
    if is_low(p.x.dtype) and cuts(p.out.shape[1:3], p.x.shape[3], p.kernel, 1, 1, upsample=True):
        fused.add(Fusion.UPSAMPLE)
    return Offer(p.wanted & fused, Prepared(p))


def width_of(columns: int, most: int = COLUMNS) -> int:
    """Pixels of an image's row in a step: a multiple of 8, the pixels of a swizzled block. A row of more than `most`
    columns is read in parts. Their width is the multiple of 16 that pads the row least, the largest if several do."""
    if columns <= most:
        return blocks(columns, 8) * 8
    return min(range(16, most + 1, 16), key=lambda width: (blocks(columns, width) * width, -width))


class Cut(NamedTuple):
    """How images are cut into steps. whole_rows: whether a step has whole rows of an image, which follow each other.
    rows: of an image in a step. width: pixels of a row in shared memory. stages: steps in flight. shared: bytes of
    shared memory."""

    whole_rows: bool
    rows: int
    width: int
    stages: int
    shared: int

    @property
    def pixels(self) -> int:
        """Of a step: a multiple of 16."""
        return blocks(self.rows * self.width, 16) * 16

    def steps(self, images: tuple[int, ...]) -> int:
        """Of images (N, H, W)."""
        n, height, columns = images
        return n * blocks(height, self.rows) * blocks(columns, self.width)


class Plan(NamedTuple):
    """A launch configuration. taps: horizontal taps of a block. across: 64-channel columns of a block. cluster: blocks
    of a cluster. splits: parts of the depth (split K)."""

    taps: int
    across: int
    cluster: int
    splits: int
    cut: Cut

    @property
    def choice(self) -> list[int]:
        return [*self[:4], *([self.cut.rows] if self.cut.whole_rows else [])]


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
        wgrad_tf32(given.x.reshape(p.x.shape), given.out.reshape(p.out.shape), given.weight, given.add)
        return
    if ready.pads:
        x, out = _whole(given.x.reshape(p.x.shape)), _whole(given.out.reshape(p.out.shape))
        given = given._replace(x=x, out=out)
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
        taps, across, cluster, splits, cut = chosen
        whole_rows, rows, width, stages, shared = cut
        dtype, read, images, kernel = all_ready[0].group
        (n, height, columns), upsample = images, read != images
        self.sums = splits // cluster
        box: tuple[int, ...] = (1, rows + kernel[0] - 1, width if whole_rows else width + taps - 1, CHANNELS)
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
            T=dtype, R=kernel[0], TAPS=taps, COLUMNS=across, PIXELS=cut.pixels, CLUSTER=cluster, JOBS=count,
            UPSAMPLE=int(upsample), WHOLE_ROWS=int(whole_rows),
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
        self.launch.run((table + self.rest, *self.numbers))
        if self.sums > 1:
            for one, out in zip(batch, outs, strict=True):
                add_parts(out, one.weight, one.add)


_configured = functools.lru_cache(maxsize=4096)(Configured)
_WGRADS = LaunchType(_launch, MAX_BATCH, PENDING_BYTES, rank=0)
ROW = struct.Struct("=128s128s128sQq5i28x")
"""x, x2, dout, out, pitch, first block, add, channels, outputs, split: Job of conv2d_wgrad_sm90.cu."""
_NO_ROW = ROW.pack(b"", b"", b"", 0, 0, 2**31 - 1, 0, 0, 0, 0)


def _blocks(weight: tuple[int, ...], taps: int, across: int) -> int:
    """Blocks for each part of the depth of a weight (K, R, S, C)."""
    outputs, _, kernel_columns, channels = weight
    return blocks(outputs, CHANNELS) * blocks(channels, CHANNELS * across) * (kernel_columns // taps)


def plans(images: tuple[int, ...], weights: tuple[tuple[int, ...], ...], upsample: bool) -> Iterator[Plan]:
    """All plans for a dout of this (N, H, W) and weights of these (K, R, S, C).

    The splits' blocks run in up to WAVES waves: if one wave leaves multiprocessors idle, several leave fewer idle.
    """
    _, height, columns = images
    kernel, channels = weights[0][1:3], max(weight[3] for weight in weights)
    for (taps, across), cluster in itertools.product(((3, 1), (1, 1), (1, 2), (1, 3)), CLUSTERS):
        tiles = sum(_blocks(weight, taps, across) for weight in weights)
        for cut in cuts((height, columns), channels, kernel, taps, across, upsample):
            most = min(cut.steps(images), cluster * max(1, WAVES * at_once(cluster) // tiles))
            for splits in range(cluster, most + 1, cluster):
                yield Plan(taps, across, cluster, splits, cut)


def time(chosen: Plan, images: tuple[int, ...], weights: tuple[tuple[int, ...], ...], upsample: bool) -> float:
    """Estimated microseconds, fitted to 17,303 plans of 2,300 random problems on an H200: the root of the mean squared
    error is 8 %."""
    taps, across, cluster, splits, cut = chosen
    kernel_rows = weights[0][1]
    clusters, resident = sum(_blocks(weight, taps, across) for weight in weights) * splits // cluster, at_once(cluster)
    twice = taps == 1 and 2 * (cut.shared + 1024) <= SHARED_BYTES  # a multiprocessor has room for two blocks
    waves = blocks(clusters, 2 * resident if twice else resident)
    beside = blocks(clusters, resident * waves)  # blocks of a multiprocessor
    step = _step(cut, kernel_rows, taps, across, beside)
    if upsample and taps == 1:  # the halo tile is loaded row by row; three taps have time for that
        step = max(1.15 * step, 0.067 * (cut.rows + kernel_rows))
    product = 64 * kernel_rows * across * taps * 256 // cluster  # bytes of it that a block writes
    size = math.prod(images) * sum(weight[0] + weight[3] for weight in weights) * 2
    reads = size / (4.0e6 if cluster == 1 else 3.42e6)  # of the images from memory
    walk = ((waves * blocks(cut.steps(images), splits) * step) ** 4 + reads**4) ** 0.25
    estimate = walk + waves * (3.2 + beside * product / 22.9e3 + (cluster - 1) * product / 19e3)
    if splits > cluster:  # the sums over splits, whose launch a batch shares
        estimate += 1.7 + splits // cluster * sum(math.prod(weight) for weight in weights) * 4 / 2.97e6
    return estimate


def _step(cut: Cut, kernel_rows: int, taps: int, across: int, beside: int = 1) -> float:
    """Estimated microseconds of a step, of so many blocks of a multiprocessor: the longest of its loads, its products
    and its share of the latency of loads, more if they are similar."""
    halo = (cut.rows + kernel_rows - 1) * (cut.width + taps - 1)
    loads, products = (cut.rows * cut.width + across * halo) * ROW_BYTES, cut.pixels * 64 * kernel_rows * across * taps
    rate = 54.7e3 if taps == 3 else 46.9e3
    return ((beside * loads / 120e3) ** 4 + (beside * products / rate) ** 4 + (1.46 / cut.stages) ** 4) ** 0.25


plan = Planner("conv2d_wgrad_sm90", plans, time, version=2)


@functools.cache
def cuts(size: tuple[int, int], channels: int, kernel: tuple[int, ...], taps: int, across: int,
         upsample: bool = False) -> list[Cut]:
    """The cuts of images of `size`, rows and columns. There is none if the kernel does not support it, or two steps do
    not fit.

    Rows are whole where an image then takes less time than in parts of a multiple of 8 pixels: the number of rows by
    which it takes least, with three steps in flight if they fit, and the best of at most half as many rows, by which
    few images have more steps.
    """
    height, columns = size
    if across > (blocks(channels, CHANNELS) if kernel[0] == 1 else 1) or (taps > 1 and kernel != (3, taps)):
        return []
    parts, whole, width = [], [], width_of(columns)
    if (taps == 1 and not upsample) or width % 16 == 0 or width == 8:
        step = 1 if width % 16 == 0 else 2  # a step's pixels are a multiple of 16
        rows = min(max(1, 128 // width // step), blocks(height, step)) * step
        parts = _fit(False, (rows,), width, kernel[0], taps, across, upsample)
    if not upsample and columns % (16 if taps > 1 else 8) and columns <= COLUMNS:
        width = columns + taps // 2
        most = min(height, 256 // width, 257 - kernel[0])  # a box of TMA has up to 256 rows, the halo's too
        whole = _fit(True, range(1, most + 1), width, kernel[0], taps, across, False)

    def order(cut: Cut) -> tuple[bool, float, int]:
        return cut.stages < 3, cut.steps((1, *size)) * _step(cut, kernel[0], taps, across), -cut.rows

    best = min(whole, key=order, default=None)
    if best is None or (parts and order(parts[0]) <= order(best)):
        return parts
    return [best, *sorted((cut for cut in whole if 2 * cut.rows <= best.rows), key=order)[:1]]


def _fit(whole_rows: bool, counts: Iterable[int], width: int, kernel_rows: int, taps: int, across: int,
         upsample: bool) -> list[Cut]:
    """The cuts of so many rows of so many pixels, where two steps fit."""
    found = []
    for rows in counts:
        cut = Cut(whole_rows, rows, width, 0, 0)
        halo = (rows + kernel_rows - 1) * (width + taps - 1 + (2 if upsample else 0))
        if whole_rows:
            halo = cut.pixels + (kernel_rows - 1) * width + taps - 1
        stage = cut.pixels * ROW_BYTES + across * blocks(halo * ROW_BYTES, 1024) * 1024
        stages = min(6, (SHARED_BYTES - 1024 - BARRIER_BYTES) // stage)
        shared = max(stages * stage, 256 * CHANNELS * kernel_rows * across * taps) + BARRIER_BYTES
        if stages >= 2:
            found.append(cut._replace(stages=stages, shared=shared))
    return found


def wgrad_tf32(x: Array, dout: Array, dweight: Array, add: bool, splits: int = 0) -> None:
    """`run` of float32 images, rounded to tf32. splits: parts of the depth; 0 for as many as run at once."""
    x, dout = _whole(x), _whole(dout)
    (n, height, columns, _), (outputs, *kernel, channels) = x.shape, dweight.shape
    taps = kernel[0] if kernel else 1
    rows, across, stages, shared = fit_tf32(height, columns, channels, taps)
    width = width_of(columns, TF32_COLUMNS)
    pitch_x = _pitch(width, taps)
    grid = blocks(outputs, 64) * blocks(channels, 32 * across)
    steps = n * blocks(height, rows) * blocks(columns, width)
    splits = min(steps, splits or max(1, multiprocessors() // grid))
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
