"""Group norm on every GPU, by group_norm.cu: passes over the images, and launches that add up the tiles' sums."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from cudiff.backend import Array, float32
from cudiff.cuda.deferred import batched
from cudiff.cuda.device import shared_memory
from cudiff.cuda.kernels.norm.problem import Backward, Forward, Problem, kernel_constants
from cudiff.cuda.launch import blocks, empty, launch
from cudiff.cuda.select import Offer
from cudiff.cuda.sums import add_rows, empty_statistics
from cudiff.statistics import Kind

_FEW_TILES, _FEW_CHANNELS = 64, 2048  # at most these: every block of an image adds up its sums itself
_AT_ONCE = 7936  # channels of a block of finish_sums, at most: what fits in Turing's shared memory
_SILU_DONE = 2  # an `activation` of input_gradients: dy is d_preact already


def _stream_bytes() -> int:
    """Bytes that a block of input_gradients streams through shared memory: 16 packs a thread, 8 on Turing."""
    return (16 if shared_memory() > 64 << 10 else 8) * 16 * 256


def offer_forward(p: Problem) -> Offer | None:
    return None if p.backward else Offer()


def forward(given: Forward, plan: None, p: Problem) -> None:
    channels = p.channels
    y, mean, rstd, x, x2, weight, bias, scale, shift, *_ = given
    share = np.float64(p.groups / (p.pixels * channels))
    sums = _statistics_of(given, p)
    shared = 16 * max(256, channels)  # two doubles for each channel or each thread, whichever are more
    statistics: tuple = (None, None)
    found: tuple = (mean, rstd)
    if max(sums[2], sums[5]) > _FEW_TILES or channels > _FEW_CHANNELS:
        few = max(1, 8 * p.groups // channels)  # groups for a block: those of 8 channels, at least one
        of_group, most = channels // p.groups, shared_memory() // 16
        if of_group > most:
            raise ValueError(f"group_norm on CUDA: a group of {of_group} channels, over {most}: use more groups")
        launch("group_norm", "finish_statistics", (p.images, blocks(p.groups, few)), 256,
               (*sums, p.channels1, p.channels2, mean, rstd, p.groups, few, share, given.eps),
               16 * max(256, few * of_group), **p.constants)
        sums, shared, statistics, found = (None, False, 0) * 2, 0, (mean, rstd), (None, None)
    tiles, chunks, across = tiling(p.images, p.pixels, channels, p.pack, p.multiprocessors, arrays=2)
    launch("group_norm", "normalize", (p.images * tiles, chunks), 256,
           (y, x, x2, weight, bias, scale, shift, *statistics, p.groups, p.pixels, p.channels1, p.channels2, tiles,
            across, given.silu, *sums, *found, share, given.eps), shared, **p.constants)


def _statistics_of(given: Forward, p: Problem) -> tuple:
    """For each source: its statistics, whether they are centred, and the number of tiles. A pass makes those that did
    not come with the source."""
    operands: list = []
    for source, statistics in zip((given.x, given.x2), given.statistics, strict=True):
        if source is not None and statistics is None:
            width = source.shape[-1]
            constants = kernel_constants(source)
            pack = 16 // source.dtype.itemsize if constants["VEC"] else 1
            tiles, chunks, across = tiling(p.images, p.pixels, width, pack, p.multiprocessors, arrays=1)
            statistics = empty_statistics(Kind.CENTRED, p.images, tiles, width)
            launch("group_norm", "statistics", (p.images * tiles, chunks), 256,
                   (source, statistics.sums, p.pixels, width, tiles, across), **constants)
        operands += [None, False, 0] if statistics is None else [
            statistics.sums, statistics.kind is Kind.CENTRED, statistics.tiles
        ]
    return tuple(operands)


def offer_backward(p: Problem) -> Offer | None:
    return Offer() if p.backward else None


def backward(given: Backward, plan: None, p: Problem) -> None:
    channels = p.channels
    tiles, chunks, across = tiling(p.images, p.pixels, channels, p.pack, p.multiprocessors, arrays=4)
    own_sums = given.make_sums(p, tiles)
    totals = empty((p.images, channels, 2), float32)
    modulation = (totals, *given.dscale, *given.dshift)
    sizes = (p.pixels, p.channels1, p.channels2, tiles, across)
    statistics = given.statistics
    activation = _SILU_DONE if given.silu and statistics is not None else int(given.silu)
    if statistics is None:
        statistics = empty_statistics(Kind.PRODUCTS, p.images, tiles, channels)
        launch("group_norm", "backward_sums", (p.images * tiles, chunks), 256,
               (statistics.sums, given.dy, given.x, given.x2, *given.affine, *sizes, given.silu), **p.constants)
    means, sums, count = None, statistics.sums, statistics.tiles
    applies = given.needs[0] or given.needs[1] or given.y is not None
    if not applies or count > _FEW_TILES or channels > _FEW_CHANNELS:
        means = empty((p.images, p.groups, 2), float32)
        few = max(1, min(p.groups, _AT_ONCE * p.groups // channels))  # groups for a block
        launch("group_norm", "finish_sums", (p.images, blocks(p.groups, few)), 256,
               (sums, means, *modulation, *given.affine, p.pixels, channels, count, few),
               8 * (256 + few * channels // p.groups), **p.constants)
        sums = None
    if applies:
        launch("group_norm", "input_gradients", (p.images * tiles, chunks), 256,
               (*given.dx, *given.dx2, given.y, *own_sums, means, sums, count, *modulation, given.dy, given.x,
                given.x2, *given.affine, *sizes, activation),
               _stream_bytes() + (8 * (256 + channels) if sums is not None else 0), **p.constants)
    affine_gradients(totals, given.dweight, given.dbias)


def affine_gradients(totals: Array, dweight: Any, dbias: Any) -> None:
    """Sum totals (N, C, 2) over N: those of d_preact into dbias, those of d_preact·xhat into dweight.

    dweight and dbias are (array or None, whether to add).
    """
    with batched():
        for offset, (out, add) in enumerate((dbias, dweight)):
            if out is not None:
                add_rows(totals, out, add, step=2, offset=offset)


@functools.cache
def tiling(n: int, pixels: int, channels: int, pack: int, multiprocessors: int, arrays: int) -> tuple[int, int, int]:
    """How blocks share n images: tiles of an image, chunks of channels, and packs of a chunk.

    pack: channels that are read at once. multiprocessors: those of the GPU, each of which has two blocks at once.
    arrays: how many a pass reads and writes. On an H200 28 shapes were timed with up to ten cuts each. Where the choice
    is one of these, 22 times, it is within 0.3 % of the best in the mean for four arrays, within 0.1 % for two. A pass
    of one or four writes sums of its tiles. Where an image has more than _FEW_TILES, another launch adds them up.
    """
    packs, at_once = channels // pack, 2 * multiprocessors
    least = blocks(packs, 32)
    most = max(least, packs // 8) if pack > 1 else least

    def cut(waves: int, chunks: int) -> tuple[float, int, int, int]:
        """The estimated microseconds, and what is chosen."""
        across = blocks(packs, chunks)
        together = 256 // across  # pixels of a block
        rows = blocks(pixels, together * max(1, waves * at_once // (n * chunks)))  # pixels of a thread
        tiles = blocks(pixels, together * rows)
        filled = n * tiles * chunks / at_once
        read = (1 + 1 / across) * together / 256 * 4 * blocks(across, 4)  # by 64 bytes; long rows are faster
        begin, end = 2.4 + 0.02 * across, 0.05 * arrays * rows  # of a block; and while the last blocks run alone
        adding = 2.4 if arrays != 2 and tiles > _FEW_TILES else 0
        time = max(1.0, filled) * begin + 0.25 * arrays * rows * max(0.8, filled) * read + end + adding
        return time, tiles, chunks, across

    # Rounding up may leave the last of many chunks without channels. Such cuts are left out.
    cuts = [cut(waves, chunks) for waves in range(1, 9) for chunks in range(least, most + 1)
            if (chunks - 1) * blocks(packs, chunks) < packs]
    return min(cuts)[1:]
