"""Group norm on every GPU, by group_norm.cu: passes over the images, and launches that add up the tiles' sums."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from cudiff.backend import Array, float32
from cudiff.cuda.device import multiprocessors, shared_memory
from cudiff.cuda.kernels.norm.problem import Backward, Forward, Problem, kernel_constants
from cudiff.cuda.launch import Launch, blocks, empty, launch
from cudiff.cuda.select import Offer
from cudiff.cuda.sums import add_rows, empty_statistics
from cudiff.statistics import CENTRED, PRODUCTS

_FEW_TILES, _FEW_SUMS = 64, 2048  # of an image and of a group: see `_adds_itself`
_SILU_DONE = 2  # an `activation` of input_gradients: dy is d_preact already


def _stream_bytes() -> int:
    """Bytes that a block of input_gradients streams through shared memory: 16 packs a thread, 8 on Turing."""
    return (16 if shared_memory() > 64 << 10 else 8) * 16 * 256


@functools.cache
def _adds_itself(of_group: int, *of_sources: int) -> bool:
    """Whether every block of a pass adds up the sums of its groups, of so many channels, itself; else a launch before
    does. of_sources: tiles of an image of each source. In the forward that took 0.7 µs more of 2 images of 8 x 8 with
    3,072 channels on an H200, and 1.1 less of 2 images of 64 x 64 with 2,304 channels and 32 tiles."""
    tiles = max(of_sources)
    return tiles <= _FEW_TILES and max(2, tiles) * of_group <= _FEW_SUMS


def _of_groups(channels: int, of_group: int, chunk: int) -> int:
    """Channels of all groups that a chunk of so many channels may have some of, at most. Groups are whole: a chunk of
    256 touches up to 2,000 channels in groups of 1,000. For the 2,254 before rounding a T4 has no room."""
    return min(channels, (chunk + 2 * (of_group - 1)) // of_group * of_group)


class ForwardPasses:
    """The launches of group_norm.cu's forward for a problem: what the row's offer holds."""

    def __init__(self, p: Problem):
        channels, of_group, most = p.channels, p.channels // p.groups, shared_memory() // 16
        if of_group > most:
            raise ValueError(f"group_norm on CUDA: a group of {of_group} channels, over {most}: use more groups")
        few = max(1, 8 * p.groups // channels)  # groups for a block: those of 8 channels, at least one
        tiles, chunks, across = tiling(p.images, p.pixels, channels, p.pack, multiprocessors(), arrays=2)
        self.p, self.of_group, self.few = p, of_group, few
        self.share = np.float64(p.groups / (p.pixels * channels))
        self.sizes = p.groups, p.pixels, p.channels1, p.channels2, tiles, across
        self.finish = Launch("group_norm", "finish_statistics", (p.images, blocks(p.groups, few)), (256,),
                             16 * max(256, few * of_group), **p.constants)
        # Two doubles a channel or a thread where a block adds up its groups' sums.
        self.normalize = [Launch("group_norm", "normalize", (p.images * tiles, chunks), (256,), shared, **p.constants)
                          for shared in (0, 16 * max(256, _of_groups(channels, of_group, across * p.pack)))]

    def run(self, given: Forward) -> None:
        p, (y, mean, rstd, x, x2, weight, bias, scale, shift, _, eps, silu, dropout) = self.p, given
        sums = _statistics_of(given, p)
        statistics: tuple = (None, None)
        found: tuple = (mean, rstd)
        adds = _adds_itself(self.of_group, sums[2], sums[5])
        if not adds:
            self.finish.run((*sums, p.channels1, p.channels2, *found, p.groups, self.few, self.share, eps))
            sums, statistics, found = (None, False, 0) * 2, found, statistics
        self.normalize[adds].run((y, x, x2, weight, bias, scale, shift, *statistics, *self.sizes, silu, *sums, *found,
                                  self.share, eps, *dropout))


def offer_forward(p: Problem) -> Offer | None:
    return None if p.backward else Offer(plan=ForwardPasses(p))


def _statistics_of(given: Forward, p: Problem) -> tuple:
    """For each source: its statistics, whether they are centred, and the number of tiles. A pass makes those that did
    not come with the source."""
    operands: list = []
    for source, statistics in zip((given.x, given.x2), given.statistics, strict=True):
        if source is not None and statistics is None:
            width = source.shape[-1]
            constants = kernel_constants(source) | {"DROPS": 0}
            pack = 16 // source.dtype.itemsize if constants["VEC"] else 1
            tiles, chunks, across = tiling(p.images, p.pixels, width, pack, multiprocessors(), arrays=1)
            statistics = empty_statistics(CENTRED, p.images, tiles, width)
            launch("group_norm", "statistics", (p.images * tiles, chunks), 256,
                   (source, statistics.sums, p.pixels, width, tiles, across), **constants)
        if statistics is None:
            operands += None, False, 0
        else:
            operands += statistics.sums, statistics.kind is CENTRED, statistics.tiles
    return tuple(operands)


class BackwardPasses:
    """The launches of group_norm.cu's backward for a problem: what the row's offer holds."""

    def __init__(self, p: Problem):
        channels, of_group = p.channels, p.channels // p.groups
        tiles, chunks, across = tiling(p.images, p.pixels, channels, p.pack, multiprocessors(), arrays=4)
        self.p, self.of_group, self.tiles = p, of_group, tiles
        self.sizes = p.pixels, p.channels1, p.channels2, tiles, across
        adding = 8 * (256 + _of_groups(channels, of_group, across * p.pack))
        self.sum, *self.input_gradients = [
            Launch("group_norm", name, (p.images * tiles, chunks), (256,), shared, **p.constants)
            for name, shared in (("backward_sums", 0), ("input_gradients", _stream_bytes()),
                                 ("input_gradients", _stream_bytes() + adding))
        ]

    def run(self, given: Backward) -> None:
        p, of_group, affine, sizes, statistics = self.p, self.of_group, given.affine, self.sizes, given.statistics
        mask, kept_scale, *_ = given.dropout
        own_sums = given.make_sums(p, self.tiles)
        totals = empty((p.images, p.channels, 2), float32)
        modulation = (totals, *given.dscale, *given.dshift)
        activation = _SILU_DONE if given.silu and statistics is not None else int(given.silu)
        if statistics is None:
            statistics = empty_statistics(PRODUCTS, p.images, self.tiles, p.channels)
            self.sum.run((statistics.sums, given.dy, given.x, given.x2, *affine, *sizes, given.silu, mask,
                          kept_scale))
        means, sums, count = None, statistics.sums, statistics.tiles
        applies = given.needs[0] or given.needs[1] or given.y is not None
        adds = applies and _adds_itself(of_group, count)
        if not adds:
            means = empty((p.images, p.groups, 2), float32)
            few = max(1, min(p.groups, 256 // (of_group * blocks(count, 16))))  # groups for a block: 16 tiles a thread
            launch("group_norm", "finish_sums", (p.images, blocks(p.groups, few)), 256,
                   (sums, means, *modulation, *affine, p.pixels, p.channels, count, few),
                   8 * (256 + few * of_group), **p.constants)
            sums = None
        if applies:
            self.input_gradients[adds].run((*given.dx, *given.dx2, given.y, *own_sums, means, sums, count, *modulation,
                                            given.dy, given.x, given.x2, *affine, *sizes, activation, mask, kept_scale))
        affine_gradients(totals, given.dweight, given.dbias)


def offer_backward(p: Problem) -> Offer | None:
    return Offer(plan=BackwardPasses(p)) if p.backward else None


def affine_gradients(totals: Array, dweight: Any, dbias: Any) -> None:
    """Sum totals (N, C, 2) over N: those of d_preact into dbias, those of d_preact·xhat into dweight.

    dweight and dbias are (array or None, whether to add).
    """
    for offset, (out, add) in enumerate((dbias, dweight)):
        if out is not None:
            add_rows(totals, out, add, 2, offset)


@functools.cache
def tiling(n: int, pixels: int, channels: int, pack: int, multiprocessors: int, arrays: int) -> tuple[int, int, int]:
    """How blocks share n images: tiles of an image, chunks of channels, and packs of a chunk.

    pack: channels that are read at once. multiprocessors: those of the GPU, each of which has two blocks at once.
    arrays: how many a pass reads and writes. A pass of one or four writes sums of its tiles. Where an image has more
    than _FEW_TILES, another launch adds them up. Fitted on an H200 to 28 shapes of 1 MB and more, with up to ten cuts
    each, and to 62 smaller ones with up to 20: of these the choice takes 2.0 % more than the best cut in the mean.
    """
    packs, at_once = channels // pack, 2 * multiprocessors
    least = blocks(packs, 32)
    most = max(least, packs // 8) if pack > 1 else least

    def cut(wanted: int, chunks: int) -> tuple[float, int, int, int]:
        """The estimated microseconds by about so many blocks, and what is chosen."""
        across = blocks(packs, chunks)
        together = 256 // across  # pixels of a block
        rows = blocks(pixels, together * max(1, wanted // (n * chunks)))  # pixels of a thread
        tiles = blocks(pixels, together * rows)
        filled = n * tiles * chunks / at_once
        read = (1 + 1 / across) * together / 256 * 4 * blocks(across, 4)  # by 64 bytes; long rows are faster
        # Of each wave of blocks, and of the second block on a multiprocessor; and while the last blocks run alone.
        begin, second, end = 2.4 + 0.02 * across, 1.3 if filled > 0.5 else 0, 0.05 * arrays * rows
        adding = 2.4 if arrays != 2 and tiles > _FEW_TILES else 0
        time = math.ceil(filled) * begin + second + 0.25 * arrays * rows * max(0.8, filled) * read + end + adding
        return time, tiles, chunks, across

    # Rounding up may leave the last of many chunks without channels. Such cuts are left out.
    cuts = [cut(wanted, chunks) for wanted in (multiprocessors, *range(at_once, 9 * at_once, at_once))
            for chunks in range(least, most + 1) if (chunks - 1) * blocks(packs, chunks) < packs]
    return min(cuts)[1:]
