"""Convolutions of stride 1 that keep the image's size, on Hopper's own instructions; `conv2d` chooses them."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from cudiff.backend import Array, float32, is_low
from cudiff.cuda.module import blocks, empty, hopper, launch
from cudiff.cuda.sums import add_parts
from cudiff.cuda.tensor_map import tensor_map
from cudiff.cuda.waiting import Kind, submit
from cudiff.ops.gemm import MULTIPROCESSORS, Epilogue, address, aligned
from cudiff.ops.shape import pad_cuda, turned_cuda

CHANNELS = 64  # of a tile
LINE_BYTES = 128  # of shared memory
SHARED_BYTES = 228 << 10  # of a multiprocessor, of which each block costs 1 KiB more than it asks for
BARRIER_BYTES = 1024
MAP_BYTES = 1024  # of norms' maps of channels, in fprop
CLUSTERS = {1: MULTIPROCESSORS, 2: 66, 4: 30, 8: 15}  # of so many blocks with a multiprocessor each that run at once
COLUMNS = (1, 3, 5, 7)  # of a weight
WGRADS = 8  # that a launch takes, whose arguments have 4 KiB
SKIP_TAPS = 2  # that take as long as a chunk of a skip path: its one tap and the wait for its slab, an estimate
TF32_COLUMNS = 112  # of an image, of which the weight's gradient keeps three steps


class Tile(NamedTuple):
    """What a warpgroup computes in a turn, 64 channels of a strip of so many pixels; and the microseconds of an H200
    for a turn and for a line of channels of each tap in it."""

    pixels: int
    turn: float
    step: float


TILES = (Tile(256, 1.1, 0.277), Tile(128, 0.65, 0.15), Tile(64, 0.45, 0.11))


def suits(x: Array, weight: Array, out: Array, stride: tuple[int, int] = (1, 1),
          padding: tuple[int, int] = (0, 0), tf32: bool = False) -> bool:
    """Whether `fprop` takes the convolution of x (N, H, W, C) with weight (K, R, S, C) to out (N, H, W, K); dgrad too.

    weight may be part of longer rows. float32 only under `tf32`.
    """
    return (
        _keeps_size(x, weight, out, stride, padding, tf32)
        and aligned(x, x.shape[3])
        and aligned(weight, weight.shape[3], weight.strides[0] // weight.itemsize)
        and aligned(out, out.shape[3])
    )


def suits_wgrad(x: Array, dweight: Array, dout: Array, stride: tuple[int, int] = (1, 1),
                padding: tuple[int, int] = (0, 0), tf32: bool = False) -> bool:
    """Whether `wgrad` takes it: of any number of channels."""
    if not _keeps_size(x, dweight, dout, stride, padding, tf32):
        return False
    if is_low(x.dtype):
        has_kernel = x.shape[2] <= 128
    else:
        has_kernel = x.shape[2] <= TF32_COLUMNS and dweight.shape[1] == dweight.shape[2]
    return has_kernel and aligned(x) and aligned(dout)


def suits_pair(x: Array, x2: Array, weight: Array) -> bool:
    """Whether `fprop` and `wgrad` take x and x2 for their concat, which is never made, and dgrad its gradient so."""
    padding = weight.shape[1] // 2, weight.shape[2] // 2
    return (
        is_low(x.dtype)
        and x.ndim == 4
        and x.shape[3] % CHANNELS == 0
        and suits_wgrad(x, weight, x2, (1, 1), padding)
        and aligned(x2, x2.shape[3], len(weight))
        and x.size // x.shape[3] * len(weight) < 2**31
        and aligned(weight, weight.shape[3])
    )


def _keeps_size(x: Array, weight: Array, out: Array, stride: tuple[int, int], padding: tuple[int, int],
                tf32: bool) -> bool:
    rows, columns = weight.shape[1:3]
    return (
        hopper()
        and (is_low(x.dtype) or (tf32 and x.dtype == float32))
        and x.ndim == out.ndim == 4
        and x.flags.c_contiguous
        and out.flags.c_contiguous
        and stride == (1, 1)
        and rows in (1, 3)
        and columns in COLUMNS
        and padding == (rows // 2, columns // 2)
        and min(x.size, out.size) > 0
        and max(x.size, out.size) < 2**31
    )


def suits_norm(norm: Norm) -> bool:
    """Whether `fprop`, where it `suits`, makes the gradient of that norm's output: in 16 bits, of two sources the first
    of whole tiles of channels."""
    sources = [source for source in (norm.x, norm.x2) if source is not None]
    return (
        is_low(norm.x.dtype)
        and all(source.flags.c_contiguous and aligned(source, source.shape[3]) for source in sources)
        and (norm.x2 is None or norm.x.shape[3] % CHANNELS == 0)
    )


def suits_skip(x: Array, weight: Array, out: Array, skip: Skip) -> bool:
    """Whether `fprop` takes the skip path beside the convolution of x with weight to out: 16-bit images, of two sources
    the first of whole tiles of channels. It adds no emb then and takes no ReLU."""
    sources = [source for source in (skip.x, skip.x2) if source is not None]
    return (
        is_low(x.dtype)
        and weight.shape[1] == 3
        and suits(x, weight, out, padding=(1, weight.shape[2] // 2))
        and aligned(skip.weight, skip.weight.shape[3])
        and all(
            source.dtype == x.dtype
            and source.shape[:3] == out.shape[:3]
            and source.flags.c_contiguous
            and aligned(source, source.shape[3])
            and 0 < source.size < 2**31
            for source in sources
        )
        and (skip.x2 is None or skip.x.shape[3] % CHANNELS == 0)
    )


def width_of(columns: int) -> int:
    """Pixels of a row of an image as `wgrad` lays it in shared memory, where eight make a swizzled block."""
    return blocks(columns, 8) * 8


class Norm(NamedTuple):
    """Whether SiLU followed group norm, and what that had: its input of one or two sources (N, H, W, C1 and C2), its
    parameters, scale and shift (N, C), and its statistics (N, G)."""

    silu: bool
    x: Array
    x2: Array | None
    weight: Array
    bias: Array
    scale: Array | None
    shift: Array | None
    mean: Array
    rstd: Array


class Skip(NamedTuple):
    """A skip path: one source or two (N, H, W, C1 and C2) of a 1×1 convolution, its weight (K, 1, 1, C1 + C2), and its
    bias (K,), float32."""

    x: Array
    x2: Array | None
    weight: Array
    bias: Array | None


class Plan(NamedTuple):
    """A tile as launched: blocks of a cluster, which share the depth; rows of a strip; clusters for each 64 channels;
    slabs and R taps' weights in flight; bytes of shared memory."""

    tile: Tile
    cluster: int
    rows: int
    blocks: int
    slabs: int
    weights: int
    shared: int


@functools.cache
def plan(shape: tuple[int, ...], outputs: int, kernel: tuple[int, int], itemsize: int, skip: int = 0) -> Plan:
    """The plan of the least estimated time for x of this shape, so many channels of the result and of a skip path."""
    plans = [fit(tile, shape, outputs, kernel, itemsize, cluster, skip) for tile in TILES for cluster in CLUSTERS]
    return min((p for p in plans if p is not None), key=lambda p: time(p, shape, kernel, itemsize, skip))


def tiles_of(shape: tuple[int, ...], rows: int) -> int:
    """Strips of 8 columns and so many rows of an image of shape (N, H, W, C)."""
    return blocks(shape[1], rows) * blocks(shape[2], 8)


def steps_of(channels: int, kernel: tuple[int, int], itemsize: int, skip: int) -> tuple[int, int]:
    """Steps of R taps of a chunk of x's channels each, and of a chunk of the skip path's."""
    own, skips = (-(-count * itemsize // LINE_BYTES) for count in (channels, skip))
    return kernel[1] * own, skips


def parts_of(steps: int, cluster: int) -> list[tuple[int, int]]:
    """The first step of each block of a cluster, and the first of the next."""
    return [(steps * rank // cluster, steps * (rank + 1) // cluster) for rank in range(cluster)]


def fit(tile: Tile, shape: tuple[int, ...], outputs: int, kernel: tuple[int, int], itemsize: int,
        cluster: int = 1, skip: int = 0) -> Plan | None:
    """How the tile lies in shared memory; None where two chunks' slabs and two times R taps' weights have no room, and
    where blocks do not share the depth: each must have a part of it, all must run at once, and larger tiles gained
    nothing."""
    rows = min(shape[1], tile.pixels // 8)
    count = shape[0] * tiles_of(shape, rows)
    turns = blocks(count, max(1, CLUSTERS[cluster] // blocks(outputs, CHANNELS)))
    own, skips = steps_of(shape[3], kernel, itemsize, skip)
    if cluster > 1 and (turns > 1 or cluster > own + skips or tile is not TILES[-1]):
        return None
    parts = parts_of(own + skips, cluster)

    def chunk(step: int) -> int:
        return min(step, own) // kernel[1] + max(0, step - own)

    chunks = max(chunk(last - 1) - chunk(first) + 1 for first, last in parts)
    steps = max(last - first for first, last in parts)
    slab = blocks((tile.pixels // 8 + kernel[0] - 1) * (8 + kernel[1] - 1) * LINE_BYTES, 1024) * 1024
    weight = kernel[0] * CHANNELS * LINE_BYTES
    results = min(2, turns) * max(2, tile.pixels // 8 // cluster) * 8 * CHANNELS * itemsize
    if cluster > 1:
        results += tile.pixels * CHANNELS * 4
    room = SHARED_BYTES - 1024 - BARRIER_BYTES - MAP_BYTES - results
    weights = min(steps, 16, (room - min(2, chunks * turns) * slab) // weight)
    if weights < min(steps, 2):
        return None
    slabs = min(4, chunks * turns, (room - weights * weight) // slab)
    shared = results + slabs * slab + weights * weight + BARRIER_BYTES + MAP_BYTES
    return Plan(tile, cluster, rows, blocks(count, turns), slabs, weights, shared)


def time(chosen: Plan, shape: tuple[int, ...], kernel: tuple[int, int], itemsize: int, skip: int = 0) -> float:
    """Estimated microseconds."""
    turns = blocks(shape[0] * tiles_of(shape, chosen.rows), chosen.blocks)
    own, skips = steps_of(shape[3], kernel, itemsize, skip)
    taps = max(
        kernel[0] * (min(last, own) - min(first, own)) + SKIP_TAPS * (max(last, own) - max(first, own))
        for first, last in parts_of(own + skips, chosen.cluster)
    )
    return 3.4 + turns * (chosen.tile.turn + taps * chosen.tile.step) + (0.7 if chosen.cluster > 1 else 0.0)


def full_strips(images: tuple[int, ...], apart: bool) -> tuple[int, int, int]:
    """Images (N, H, W) as a 1×1 convolution takes them, which knows no neighbours: 8 pixels wide where 8 divides an
    image; and all as one image, unless sums or vectors of each keep them `apart`."""
    n, height, columns = images
    if not apart:
        n, height = 1, n * height
    return (n, height * columns // 8, 8) if height * columns % 8 == 0 else (n, height, columns)


def fprop(x: Array, weight: Array, out: Array, epilogue: Epilogue, transposed: bool = False, statistics: bool = False,
          relu: bool = False, x2: Array | None = None, out2: Array | None = None, chosen: Plan | None = None,
          norm: Norm | None = None, skip: Skip | None = None) -> Array | None:
    """Convolution of x (N, H, W, C), written to out (N, H, W, K), and what the epilogue adds; then ReLU, if `relu`.

    The result of `skip` is added too, where `suits_skip`; then the epilogue is a bias alone.

    x2 holds the channels after x's, and out2 receives those after out's, where `suits_pair`.

    weight (K, R, S, C); or under `transposed` (C, R, S, K): then out is the gradient of the input whose output had the
    gradient x; `norm` is as in `conv2d.dgrad_cuda`. `chosen`, where not the best plan, is one for x's shape. Returns
    what `statistics` asks for, the sums and sums of squares of out, or with `norm` those of out and of out times the
    norm's input: float32 (N, tiles, K, 2).
    """
    kernel, (n, height, columns, split) = weight.shape[1:3], x.shape
    if kernel == (1, 1) and chosen is None:
        n, height, columns = full_strips(x.shape[:3], statistics or norm is not None or epilogue.emb is not None)
    channels = split if x2 is None else split + x2.shape[3]
    first_outputs = out.shape[3]
    outputs = first_outputs if out2 is None else first_outputs + out2.shape[3]
    weight = _as_dtype(weight, x.dtype)
    if transposed and x.dtype == float32:  # wgmma takes tf32 only as fprop has it
        weight, transposed = turned_cuda(weight), False
    chunk = LINE_BYTES // x.dtype.itemsize
    shape = n, height, columns, channels
    skip_bias, skip_channels, skip_split = None, 0, 0
    if skip is not None:
        skip = skip._replace(weight=_as_dtype(skip.weight, x.dtype))
        skip_bias, skip_channels, skip_split = skip.bias, skip.weight.shape[3], skip.x.shape[3]
    tile, cluster, rows, each, slabs, weights, shared = chosen or plan(
        shape, outputs, kernel, x.dtype.itemsize, skip_channels
    )
    share = min(rows, tile.pixels // 8 // cluster)
    box, result_box = (1, rows + kernel[0] - 1, 8 + kernel[1] - 1, chunk), (1, share, 8, chunk)
    addend = None if epilogue.addend is None else at_16_bytes(epilogue.addend)
    read, read_box, affine, groups = (addend, None), result_box, (None,) * 6, 1
    if norm is not None:
        read, affine, groups, first_outputs = norm[1:3], norm[3:], norm.mean.shape[1], norm.x.shape[3]
    if skip is not None:
        read, read_box = skip[:2], (1, rows, 8, chunk)

    def image(array: Array) -> Array:
        return array.reshape(n, height, columns, array.shape[-1])

    maps = (
        tensor_map(image(out if array is None else array), array_box, operand=False)
        for array, array_box in ((out, result_box), (out2, result_box), (read[0], read_box), (read[1], read_box))
    )
    weight_map = _weight_map(weight, chunk)
    tiles = tiles_of(shape, rows) * cluster
    partials = empty((n, tiles, outputs, 2), float32) if statistics or norm is not None else None
    launch(
        "conv2d_sm90", "conv2d_sm90", (each, blocks(outputs, CHANNELS), cluster), 384,
        (
            tensor_map(image(x), box), tensor_map(image(x if x2 is None else x2), box), weight_map, *maps,
            weight_map if skip is None else _weight_map(skip.weight, chunk), epilogue.bias, skip_bias, epilogue.emb,
            partials, *affine, n, height, columns, channels, outputs, kernel[1], skip_channels, rows, slabs, weights,
            split, first_outputs, skip_split, groups,
        ),
        shared, T=x.dtype, R=kernel[0], PASS="DGRAD" if transposed else "FPROP", PIXELS=tile.pixels,
        ADDS=int(addend is not None), STATISTICS=int(statistics), NORM=0 if norm is None else 1 if norm.silu else 2,
        RELU=int(relu), SKIP=int(skip is not None), CLUSTER=cluster,
    )
    return partials


class WgradPlan(NamedTuple):
    """How weights' gradients are cut: horizontal taps and 64-channel columns a block, blocks of a cluster, parts of the
    depth; and as launched: rows of an image a step, steps in flight, bytes of shared memory."""

    taps: int
    across: int
    cluster: int
    parts: int
    rows: int
    stages: int
    shared: int


class _Wgrad(NamedTuple):
    """dweight (K, R, S, C) = or += the gradient from x (N, H, W, C), or x and x2, and dout (N, H, W, K)."""

    x: Array
    x2: Array | None
    dout: Array
    dweight: Array
    add: bool


def wgrad(x: Array, dout: Array, dweight: Array, add: bool, chosen: WgradPlan | None = None,
          total: Array | None = None, x2: Array | None = None) -> bool:
    """Gradient of the weight, written or added to dweight (K, R, S, C), float32, whose rows may be parts of longer.

    x2 holds the channels after x's, where `suits_pair`. It may wait for others (see cudiff.cuda.waiting). dout is also
    added to `total`, of its shape, where that is given and TMA can add to it: now; returns whether it was.
    """
    if x.dtype == float32:
        wgrad_tf32(x, dout, dweight, add)
        return False
    passes_on = total is not None and total.dtype == dout.dtype and aligned(total, total.shape[3])
    images = x.shape[:3]
    if dweight.shape[1:3] == (1, 1) and chosen is None:
        images = full_strips(images, apart=False)
    x, x2, dout, total = (None if a is None else a.reshape(*images, a.shape[3]) for a in (x, x2, dout, total))
    job = _Wgrad(_whole(x), x2, _whole(dout), dweight, add)
    if passes_on or chosen is not None:
        _launch_wgrads([job], chosen, total if passes_on else None)
        return passes_on
    held = sum(array.nbytes for array in job[:3] if array is not None)
    submit(_WGRADS, job, dweight, job[:3], held, (x.dtype, images, dweight.shape[1:3]))
    return False


def _launch_wgrads(jobs: list[_Wgrad], chosen: WgradPlan | None = None, total: Array | None = None) -> None:
    """Weights' gradients from images of one size, by one launch; the only job's dout is added to `total`, if given."""
    x, kernel = jobs[0].x, jobs[0].dweight.shape[1:3]
    n, height, columns, _ = x.shape
    chosen = chosen or plan_wgrad(x.shape[:3], tuple(job.dweight.shape for job in jobs))
    taps, across, cluster, parts, rows, stages, shared = chosen
    width, sums = width_of(columns), parts // cluster
    box = (1, rows + kernel[0] - 1, width + taps - 1, CHANNELS)
    dout_box = (1, rows, width, CHANNELS)
    count = 1 if len(jobs) == 1 else WGRADS
    table, first, waiting = np.zeros(1, np.dtype([("jobs", _WGRAD, count)])), 0, []
    table["jobs"]["first"] = np.iinfo(np.int32).max
    for i, (x, x2, dout, dweight, add) in enumerate(jobs):
        out, pitch = _sums(dweight, sums)
        maps = (tensor_map(x, box), tensor_map(x if x2 is None else x2, box), tensor_map(dout, dout_box))
        outputs, _, _, channels = dweight.shape
        table["jobs"][0, i] = (
            *(found["words"] for found in maps), address(out), pitch, first, add and sums == 1, channels, outputs,
            x.shape[3],
        )
        first += _wgrad_blocks(dweight.shape, taps, across)
        waiting.append(out)
    launch(
        "conv2d_wgrad_sm90", "conv2d_wgrad_sm90", (first, 1, parts), 160 if taps == 1 else 512,
        (
            table, tensor_map(jobs[0].dout if total is None else total, dout_box), total is not None,
            n, height, kernel[1], rows, width, stages,
        ),
        shared, T=x.dtype, R=kernel[0], TAPS=taps, COLUMNS=across, PIXELS=rows * width, CLUSTER=cluster, JOBS=count,
    )
    for job, out in zip(jobs, waiting, strict=True):
        if sums > 1:
            add_parts(out, job.dweight, job.add)


WAITING_BYTES = 160 << 20  # of images, for them: the U-Net's step at batch 32 takes 32 MiB more for it
_WGRADS = Kind(_launch_wgrads, WGRADS, WAITING_BYTES, rank=0)
_WGRAD = np.dtype({
    "names": ["x", "x2", "dout", "out", "pitch", "first", "add", "channels", "outputs", "split"],
    "formats": [(np.uint64, 16)] * 3 + ["u8", "i8"] + ["i4"] * 5, "itemsize": 448,
})


def _wgrad_blocks(weight: tuple[int, ...], taps: int, across: int) -> int:
    """Blocks for each part of the depth."""
    outputs, _, kernel_columns, channels = weight
    return blocks(outputs, CHANNELS) * blocks(channels, CHANNELS * across) * (kernel_columns // taps)


@functools.cache
def plan_wgrad(images: tuple[int, ...], weights: tuple[tuple[int, ...], ...]) -> WgradPlan:
    """The plan of the least estimated time for x of this (N, H, W) and weights of these (K, R, S, C)."""
    return min(wgrad_plans(images, weights), key=lambda plan: time_wgrad(plan, images, weights))


def wgrad_plans(images: tuple[int, ...], weights: tuple[tuple[int, ...], ...]) -> Iterator[WgradPlan]:
    """Plans for them: with any number of parts whose blocks run at once, as far as there are any."""
    n, height, columns = images
    kernel, channels = weights[0][1:3], max(weight[3] for weight in weights)
    for (taps, across), (cluster, room) in itertools.product(((3, 1), (1, 1), (1, 2), (1, 3)), CLUSTERS.items()):
        fitted = fit_wgrad((height, width_of(columns)), channels, kernel, taps, across)
        if fitted is None:
            continue
        tiles = sum(_wgrad_blocks(weight, taps, across) for weight in weights)
        most = min(n * blocks(height, fitted[0]), cluster * max(1, room // tiles))
        for parts in range(cluster, most + 1, cluster):
            yield WgradPlan(taps, across, cluster, parts, *fitted)


def time_wgrad(plan: WgradPlan, images: tuple[int, ...], weights: tuple[tuple[int, ...], ...]) -> float:
    """Estimated microseconds, as measured on an H200."""
    n, height, columns = images
    kernel_rows = weights[0][1]
    taps, across, cluster, parts, rows = plan[:5]
    tiles = sum(_wgrad_blocks(weight, taps, across) for weight in weights)
    waves = blocks(tiles * parts, CLUSTERS[cluster] * cluster)
    width = width_of(columns)
    pixels, product = rows * width, 64 * kernel_rows * across * taps
    slab_bytes = (pixels + across * (rows + kernel_rows - 1) * (width + taps - 1)) * LINE_BYTES
    step = ((slab_bytes / 92e3) ** 4 + (pixels * product / 57e3) ** 4) ** 0.25  # the longer, or more if they are alike
    share = product * 256 / cluster  # bytes of the product that a block writes
    estimate = waves * (2.9 + blocks(n * blocks(height, rows), parts) * step + share / 29e3)
    if cluster > 1:
        estimate += 1.1 + share * (cluster - 1) / 20e3
    if parts > cluster:  # a share of a launch that waits for others
        estimate += 1.5 + parts // cluster * sum(math.prod(weight) for weight in weights) * 4 / 2.2e6
    return estimate


def fit_wgrad(size: tuple[int, int], channels: int, kernel: tuple[int, ...], taps: int,
              across: int) -> tuple[int, int, int] | None:
    """Rows of an image a step, steps in flight, bytes of shared memory; None where two steps have no room.

    size: an image's rows, and pixels of one that shared memory has.
    """
    height, width = size
    step = 1 if width % 16 == 0 else 2  # pixels come in 16s
    rows = min(max(1, 128 // width // step), blocks(height, step)) * step
    slab = blocks((rows + kernel[0] - 1) * (width + taps - 1) * LINE_BYTES, 1024) * 1024
    stage = rows * width * LINE_BYTES + across * slab
    stages = min(6, (SHARED_BYTES - 1024 - BARRIER_BYTES) // stage)
    if stages < 2 or across > (blocks(channels, CHANNELS) if kernel[0] == 1 else 1):
        return None
    if taps > 1 and (kernel != (3, taps) or (width % 16 and width != 8)):
        return None
    return rows, stages, max(stages * stage + BARRIER_BYTES, 256 * 64 * kernel[0] * across * taps)


def wgrad_tf32(x: Array, dout: Array, dweight: Array, add: bool, parts: int = 0) -> None:
    """`wgrad` of float32 images, rounded to tf32, its depth cut into so many parts (0: as many as run at once)."""
    x, dout = _whole(x), _whole(dout)
    n, height, columns, _ = x.shape
    outputs, taps, _, channels = dweight.shape
    rows, across, stages, shared = fit_wgrad_tf32(height, columns, channels, taps)
    width = width_of(columns)
    pitch_x = width_of(width + taps - 1)
    grid = blocks(outputs, 64) * blocks(channels, 32 * across)
    parts = min(n * blocks(height, rows), parts or max(1, MULTIPROCESSORS // grid))
    out, pitch = _sums(dweight, parts)
    launch(
        "conv2d_wgrad_tf32_sm90", "conv2d_wgrad_tf32_sm90", (grid, parts), 256,
        (
            tensor_map(x, (1, rows + taps - 1, pitch_x, 32)), tensor_map(dout, (1, rows, width, 32)),
            out, pitch, add and parts == 1, n, height, channels, outputs, rows, width, pitch_x, stages,
        ),
        shared, R=taps, COLUMNS=across, PIXELS=rows * width,
    )
    if parts > 1:
        add_parts(out, dweight, add)


def fit_wgrad_tf32(height: int, columns: int, channels: int, taps: int) -> tuple[int, int, int, int]:
    """Rows of an image a step, 32-channel columns a block, steps in flight (3 at least), bytes of shared memory."""
    width = width_of(columns)
    pitch_x = width_of(width + taps - 1)
    rows = min(max(1, 64 // width), height)
    room = SHARED_BYTES - 1024 - BARRIER_BYTES
    across = 1 if taps > 1 else min(4, blocks(channels, 32), room // (3 * rows * width * LINE_BYTES) - 2)
    stage = (2 * rows * width + across * (rows + taps - 1) * pitch_x) * LINE_BYTES
    stages = min(6, room // stage)
    return rows, across, stages, max(stages * stage + BARRIER_BYTES, taps**2 * across * 16 * 128 * 4)


def _sums(dweight: Array, count: int) -> tuple[Array, np.int64]:
    """Where so many sums over parts of the depth go, a single one to the weight's gradient itself; and their pitch."""
    if count == 1:
        return dweight, np.int64(dweight.strides[0] // 4)
    size = dweight.size // len(dweight)
    return empty((count, len(dweight), size), float32), np.int64(size)


def _weight_map(weight: Array, chunk: int) -> np.ndarray:
    """Of a weight (K, R, S, C): boxes of so many channels of one tap of 64 rows."""
    return tensor_map(weight.reshape(len(weight), -1, weight.shape[3]), (CHANNELS, 1, chunk))


def _as_dtype(array: Array, dtype: np.dtype) -> Array:
    return array if array.dtype == dtype else array.astype(dtype)


def at_16_bytes(array: Array) -> Array:
    """The array, or a copy of one that does not start where TMA can read it."""
    return array if address(array) % 16 == 0 else array.copy()


def _whole(x: Array) -> Array:
    """x with zero channels added to make a multiple of 8, whose rows TMA can read."""
    rest = -x.shape[3] % 8
    return pad_cuda(x, ((0, 0), (0, 0), (0, 0), (0, rest))) if rest else x


def as_image(matrix: Array) -> Array:
    """(..., C) as an image (1, H, 8, C), for which a 1×1 convolution is a matrix product; or (rows, C) where 8 does not
    divide the rows."""
    rows = matrix.size // matrix.shape[-1]
    return matrix.reshape(*((1, rows // 8, 8) if rows % 8 == 0 else (rows,)), matrix.shape[-1])
