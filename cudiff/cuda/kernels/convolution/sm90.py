"""Convolutions of stride 1 that keep the image's size, on Hopper's own instructions; `conv2d` chooses them."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from cudiff.backend import Array, float32, is_low
from cudiff.cuda.device import MULTIPROCESSORS, hopper
from cudiff.cuda.kernels.gemm.product import Epilogue
from cudiff.cuda.kernels.shape import turned
from cudiff.cuda.launch import address, aligned, blocks, launch
from cudiff.cuda.sums import empty_partials
from cudiff.cuda.tensor_map import tensor_map
from cudiff.cuda.tiles import Planner

CHANNELS = 64  # of a tile
LINE_BYTES = 128  # of shared memory
SHARED_BYTES = 228 << 10  # of a multiprocessor, of which each block costs 1 KiB more than it asks for
BARRIER_BYTES = 1024
MAP_BYTES = 1024  # of norms' maps of channels, in fprop
CLUSTERS = {1: MULTIPROCESSORS, 2: 66, 4: 30, 8: 15}  # of so many blocks with a multiprocessor each that run at once
COLUMNS = (1, 3, 5, 7)  # of a weight


class Tile(NamedTuple):
    """What a warpgroup computes in a turn, 64 channels of a strip of so many pixels; the microseconds of an H200 for a
    turn and for a line of channels of each tap in it; and the taps that take as long as a line of a skip path: its only
    one, and the wait for its slab."""

    pixels: int
    turn: float
    step: float
    skip: float


TILES = (Tile(256, 1.1, 0.277, 3.7), Tile(128, 0.65, 0.15, 1.7), Tile(64, 0.45, 0.11, 1.4))


def suits(x: Array, weight: Array, out: Array, stride: tuple[int, int] = (1, 1),
          padding: tuple[int, int] = (0, 0), tf32: bool = False) -> bool:
    """Whether `fprop` takes the convolution of x (N, H, W, C) with weight (K, R, S, C) to out (N, H, W, K); dgrad too.

    weight may be part of longer rows. float32 only under `tf32`.
    """
    return (
        keeps_size(x, weight, out, stride, padding, tf32)
        and aligned(x, x.shape[3])
        and aligned(weight, weight.shape[3], weight.strides[0] // weight.itemsize)
        and aligned(out, out.shape[3])
    )


def keeps_size(x: Array, weight: Array, out: Array, stride: tuple[int, int], padding: tuple[int, int],
               tf32: bool) -> bool:
    """Whether Hopper's kernels of either file may take it, but for where rows of channels start."""
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
    """Whether `fprop` takes the skip path beside the 3×3 convolution of x with weight to out: 16-bit images, of two
    sources the first of whole tiles of channels, where this is no slower than a launch of its own. It adds no emb then
    and takes no ReLU."""
    sources = [source for source in (skip.x, skip.x2) if source is not None]
    return (
        is_low(x.dtype)
        and weight.shape[1:3] == (3, 3)
        and suits(x, weight, out, padding=(1, 1))
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
        and _skip_gains(
            (*out.shape[:3], x.shape[3]), len(weight), skip.weight.shape[3], x.dtype.itemsize, x.shape[1] < out.shape[1]
        )
    )


@functools.cache
def _skip_gains(shape: tuple[int, ...], outputs: int, skip: int, itemsize: int, upsample: bool) -> bool:
    """Whether one launch is estimated to take no longer than two."""
    path = (*full_strips(shape[:3], apart=False), skip)
    apart = plan.estimate(shape, outputs, (3, 3), itemsize, 0, upsample)
    apart += plan.estimate(path, outputs, (1, 1), itemsize, 0, False)
    return plan.estimate(shape, outputs, (3, 3), itemsize, skip, upsample) <= apart


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

    @property
    def choice(self) -> list[int]:
        return [self.tile.pixels, self.cluster]


def plans(shape: tuple[int, ...], outputs: int, kernel: tuple[int, int], itemsize: int, skip: int,
          upsample: bool) -> list[Plan]:
    """All for x of this shape, which is upsampled already, and so many channels of the result and of a skip path."""
    fitted = (
        fit(tile, shape, outputs, kernel, itemsize, cluster, skip, upsample) for tile in TILES for cluster in CLUSTERS
    )
    return [plan for plan in fitted if plan is not None]


def tiles_of(shape: tuple[int, ...], rows: int) -> int:
    """Strips of 8 columns and so many rows of an image of shape (N, H, W, C)."""
    return blocks(shape[1], rows) * blocks(shape[2], 8)


def pitch_of(columns: int, upsample: bool) -> int:
    """Pixels of a row of a strip's slab, for a weight of so many columns; of an upsampled image whole pairs."""
    return 8 + columns - 1 + (2 * (columns // 2 % 2) if upsample else 0)


def steps_of(channels: int, kernel: tuple[int, int], itemsize: int, skip: int) -> tuple[int, int]:
    """Steps of R taps of a chunk of x's channels each, and of a chunk of the skip path's."""
    own, skips = (-(-count * itemsize // LINE_BYTES) for count in (channels, skip))
    return kernel[1] * own, skips


def parts_of(steps: int, cluster: int) -> list[tuple[int, int]]:
    """The first step of each block of a cluster, and the first of the next."""
    return [(steps * rank // cluster, steps * (rank + 1) // cluster) for rank in range(cluster)]


def fit(tile: Tile, shape: tuple[int, ...], outputs: int, kernel: tuple[int, int], itemsize: int,
        cluster: int = 1, skip: int = 0, upsample: bool = False) -> Plan | None:
    """How the tile lies in shared memory; None where two chunks' slabs and two times R taps' weights have no room, and
    where blocks do not share the depth: each must have a part of it, all must run at once, and larger tiles gained
    nothing. Beside an upsampled image's slabs, which come row by row, three times R taps' weights are needed: with two,
    128 channels at 64 x 64 take 69 µs, by a smaller tile 64."""
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
    slab = blocks((tile.pixels // 8 + kernel[0] - 1) * pitch_of(kernel[1], upsample) * LINE_BYTES, 1024) * 1024
    weight = kernel[0] * CHANNELS * LINE_BYTES
    results = min(2, turns) * max(2, tile.pixels // 8 // cluster) * 8 * CHANNELS * itemsize
    if cluster > 1:
        results += tile.pixels * CHANNELS * 4
    room = SHARED_BYTES - 1024 - BARRIER_BYTES - MAP_BYTES - results
    for slabs in (4 if skip else 2, 2):  # a skip path has a slab for each tap
        weights = min(steps, 16, (room - min(slabs, chunks * turns) * slab) // weight)
        if weights >= min(steps, 4):
            break
    if weights < min(steps, 3 if upsample else 2):
        return None
    slabs = min(4, chunks * turns, (room - weights * weight) // slab)
    shared = results + slabs * slab + weights * weight + BARRIER_BYTES + MAP_BYTES
    return Plan(tile, cluster, rows, blocks(count, turns), slabs, weights, shared)


def time(chosen: Plan, shape: tuple[int, ...], outputs: int, kernel: tuple[int, int], itemsize: int, skip: int,
         upsample: bool) -> float:
    """Estimated microseconds, as measured on an H200."""
    turns = blocks(shape[0] * tiles_of(shape, chosen.rows), chosen.blocks)
    own, skips = steps_of(shape[3], kernel, itemsize, skip)
    taps = max(
        kernel[0] * (min(last, own) - min(first, own)) + chosen.tile.skip * (max(last, own) - max(first, own))
        for first, last in parts_of(own + skips, chosen.cluster)
    )
    return 3.4 + turns * (chosen.tile.turn + taps * chosen.tile.step) + (0.7 if chosen.cluster > 1 else 0.0)


plan = Planner("conv2d_sm90", plans, time)


def full_strips(images: tuple[int, ...], apart: bool) -> tuple[int, int, int]:
    """Images (N, H, W) as a 1×1 convolution takes them, which knows no neighbours: 8 pixels wide where 8 divides an
    image; and all as one image, unless sums or vectors of each keep them `apart`."""
    n, height, columns = images
    if not apart:
        n, height = 1, n * height
    return (n, height * columns // 8, 8) if height * columns % 8 == 0 else (n, height, columns)


def fprop(x: Array, weight: Array, out: Array, epilogue: Epilogue, transposed: bool = False, statistics: bool = False,
          relu: bool = False, x2: Array | None = None, out2: Array | None = None, chosen: Plan | None = None,
          norm: Norm | None = None, skip: Skip | None = None, upsample: bool = False) -> Array | None:
    """Convolution of x (N, H, W, C), written to out (N, H, W, K), and what the epilogue adds; then ReLU, if `relu`.

    The result of `skip` is added too, where `suits_skip`; then the epilogue is a bias alone. `upsample`: out is
    (N, 2H, 2W, K), of an image in which each pixel of x is four.

    x2 holds the channels after x's, and out2 receives those after out's, where `conv2d_wgrad_sm90.suits_pair`.

    weight (K, R, S, C); or under `transposed` (C, R, S, K): then out is the gradient of the input whose output had the
    gradient x; `norm` is as in `conv2d.dgrad_cuda`. `chosen`, taken instead of `plan`'s, is for x's shape, upsampled.
    Returns out's `Tensor.partials`, if `statistics`, or with `norm` the sums of out and of out times the norm's input:
    float32 (N, tiles, K, 2).
    """
    kernel, (n, height, columns, split) = weight.shape[1:3], x.shape
    if upsample:
        height, columns = 2 * height, 2 * columns
    elif kernel == (1, 1) and chosen is None:
        n, height, columns = full_strips(x.shape[:3], statistics or norm is not None or epilogue.emb is not None)
    channels = split if x2 is None else split + x2.shape[3]
    first_outputs = out.shape[3]
    outputs = first_outputs if out2 is None else first_outputs + out2.shape[3]
    weight = _as_dtype(weight, x.dtype)
    if transposed and x.dtype == float32:  # wgmma takes tf32 only as fprop has it
        weight, transposed = turned(weight), False
    chunk = LINE_BYTES // x.dtype.itemsize
    shape = n, height, columns, channels
    skip_bias, skip_channels, skip_split = None, 0, 0
    if skip is not None:
        skip = skip._replace(weight=_as_dtype(skip.weight, x.dtype))
        skip_bias, skip_channels, skip_split = skip.bias, skip.weight.shape[3], skip.x.shape[3]
    addend = None if epilogue.addend is None else at_16_bytes(epilogue.addend)
    added, affine, groups = (addend, None), (None,) * 6, 1
    if norm is not None:
        added, affine, groups, first_outputs = norm[1:3], norm[3:], norm.mean.shape[1], norm.x.shape[3]

    def image(array: Array) -> Array:
        return array.reshape(n, height, columns, array.shape[-1])

    def run(chosen: Plan) -> Array | None:
        tile, cluster, rows, each, slabs, weights, shared = chosen
        pitch, result_box = pitch_of(kernel[1], upsample), (1, min(rows, tile.pixels // 8 // cluster), 8, chunk)
        read, read_box = (added, result_box) if skip is None else (skip[:2], (1, rows, 8, chunk))

        def source(array: Array) -> np.ndarray:
            if upsample:
                return tensor_map(array, (1, 1, pitch // 2, 2, chunk), twice=True)
            return tensor_map(image(array), (1, rows + kernel[0] - 1, pitch, chunk))

        maps = (
            tensor_map(image(out if array is None else array), array_box, operand=False)
            for array, array_box in ((out, result_box), (out2, result_box), (read[0], read_box), (read[1], read_box))
        )
        weight_map = _weight_map(weight, chunk)
        tiles = tiles_of(shape, rows) * cluster
        partials = empty_partials(n, tiles, outputs, x.dtype) if statistics or norm is not None else None
        launch(
            "conv2d_sm90", "conv2d_sm90", (each, blocks(outputs, CHANNELS), cluster), 384,
            (
                source(x), source(x if x2 is None else x2), weight_map, *maps,
                weight_map if skip is None else _weight_map(skip.weight, chunk), epilogue.bias, skip_bias, epilogue.emb,
                partials, *affine, n, height, columns, channels, outputs, kernel[1], skip_channels, rows, slabs,
                weights, split, first_outputs, skip_split, groups,
            ),
            shared, T=x.dtype, R=kernel[0], PASS="DGRAD" if transposed else "FPROP", PIXELS=tile.pixels,
            ADDS=int(addend is not None), STATISTICS=int(statistics), NORM=0 if norm is None else 1 if norm.silu else 2,
            RELU=int(relu), SKIP=int(skip is not None), CLUSTER=cluster, UPSAMPLE=int(upsample),
        )
        return partials

    if chosen is not None:
        return run(chosen)
    problem = shape, outputs, kernel, x.dtype.itemsize, skip_channels, upsample
    return plan.run(problem, run, [out] if addend is out else [])


def _weight_map(weight: Array, chunk: int) -> np.ndarray:
    """Of a weight (K, R, S, C): boxes of so many channels of one tap of 64 rows."""
    return tensor_map(weight.reshape(len(weight), -1, weight.shape[3]), (CHANNELS, 1, chunk))


def _as_dtype(array: Array, dtype: np.dtype) -> Array:
    return array if array.dtype == dtype else array.astype(dtype)


def at_16_bytes(array: Array) -> Array:
    """The array, or a copy of one that does not start where TMA can read it."""
    return array if address(array) % 16 == 0 else array.copy()


def as_image(matrix: Array) -> Array:
    """(..., C) as an image (1, H, 8, C), for which a 1×1 convolution is a matrix product; or (rows, C) where 8 does not
    divide the rows."""
    rows = matrix.size // matrix.shape[-1]
    return matrix.reshape(*((1, rows // 8, 8) if rows % 8 == 0 else (rows,)), matrix.shape[-1])
