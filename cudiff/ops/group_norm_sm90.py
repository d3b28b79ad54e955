"""How blocks share a group norm whose pixels stay in shared memory: the launches of group_norm{,_backward}_sm90.cu."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from cudiff.backend import Array
from cudiff.cuda.launch import blocks
from cudiff.cuda.tensor_map import tensor_map
from cudiff.ops.gemm import MULTIPROCESSORS

THREADS, _BOXES, _SHARED_BYTES = 512, 64, 226 << 10  # of a block, the last two at most: 1 KiB for barriers


class Boxes(NamedTuple):
    """How an image's pixels lie in shared memory: see group_norm_boxes.cuh."""

    chunks: int
    width: int  # channels of a chunk
    across: int  # packs of a chunk
    step: int  # pixels of a box

    def map(self, array: Array) -> np.ndarray:
        images = array.reshape(len(array), -1, array.shape[-1])
        return tensor_map(images, (1, self.step, self.width), operand=False, swizzled=False)

    @property
    def bytes(self) -> int:
        return self.step * 16 * self.across


@functools.cache
def _boxes(channels1: int, channels2: int, groups: int, itemsize: int) -> list[Boxes]:
    """All there are. Chunks of channels have 64 bytes or more, or are all channels, and lie within one source."""
    found, pack, channels = [], 16 // itemsize, channels1 + channels2
    for chunks in range(1, groups + 1):
        width = channels // chunks
        if groups % chunks or width % pack or width > 32 * pack or channels1 % width:
            continue
        if width * itemsize >= 64 or chunks == 1:
            across = width // pack
            lines = 1 << (min(32 // across, 2 * pack).bit_length() - 1)  # pixels that a warp has at once
            found.append(Boxes(chunks, width, across, THREADS // 32 * lines))
    return found


class Cut(NamedTuple):
    """How clusters share a group norm: see group_norm_sm90.cu."""

    boxes: Boxes
    cluster: int
    kept: int  # boxes of a block

    @property
    def constants(self) -> dict[str, Any]:
        return {"CLUSTER": self.cluster, "ACROSS": self.boxes.across}

    @property
    def bytes(self) -> int:
        return self.kept * self.boxes.bytes + 4 * self.boxes.width * (35 + 3 * self.cluster)

    def fits(self) -> bool:
        return self.kept <= _BOXES and self.bytes <= _SHARED_BYTES

    def microseconds(self, images: int, megabytes: float) -> float:
        """As fitted to an H200, of arrays of so many megabytes.

        Clusters of four and more find places together on 120 of 132 multiprocessors only. Rows of less than 128 bytes
        are slow where the cache does not hold the array.
        """
        speed = 16e3 / (1.5 if megabytes > 24 and self.boxes.across < 8 and self.boxes.chunks > 1 else 1)
        rounds = images * self.boxes.chunks * self.cluster / (MULTIPROCESSORS if self.cluster <= 2 else 120)
        if self.cluster > 2 or 2 * self.bytes > _SHARED_BYTES:
            rounds = math.ceil(rounds)
        meeting = 0.15 * self.cluster.bit_length()
        return 0.9 + max(1, rounds) * (1 + meeting + self.kept * self.boxes.bytes / speed)


@functools.cache
def clusters(pixels: int, channels1: int, channels2: int, groups: int, itemsize: int, images: int) -> Cut | None:
    """The launch of group_norm_sm90.cu that takes least time; None where no cluster has room.

    What group_norm.cu took was not less for any of 15 shapes.
    """
    megabytes = images * pixels * (channels1 + channels2) * itemsize / 1e6
    cuts = (Cut(boxes, cluster, blocks(blocks(pixels, boxes.step), cluster))
            for boxes in _boxes(channels1, channels2, groups, itemsize) for cluster in (1, 2, 4, 8))
    timed = {cut: cut.microseconds(images, megabytes) for cut in cuts if cut.fits()}
    return min(timed, key=timed.__getitem__, default=None)


class Shared(NamedTuple):
    """How blocks share a group norm's backward: see group_norm_backward_sm90.cu."""

    boxes: Boxes
    parts: int  # blocks of an image and chunk
    kept: int  # boxes of a block in shared memory
    held: int  # and in registers
    multiprocessors: int

    @property
    def constants(self) -> dict[str, Any]:
        return {"ACROSS": self.boxes.across, "HELD": self.held}

    @property
    def bytes(self) -> int:
        return self.kept * 2 * self.boxes.bytes + 4 * self.boxes.width * 40

    def blocks(self, images: int) -> int:
        return images * self.boxes.chunks * self.parts

    def adding(self, images: int, channels: int) -> int:
        """Blocks that add up the images' sums, on multiprocessors that the others leave."""
        return max(0, min(blocks(channels, 32), self.multiprocessors - self.blocks(images)))

    def fits(self, images: int) -> bool:
        there = self.parts == 1 or self.blocks(images) <= self.multiprocessors
        return 0 < self.kept <= _BOXES and self.bytes <= _SHARED_BYTES and there

    def microseconds(self, images: int, pixels: int, channels: int, itemsize: int) -> float:
        """As fitted to an H200.

        Rows of less than 128 bytes are slow where the cache does not hold x and dy. Where no multiprocessor is left to
        add up the images' sums, another launch does.
        """
        megabytes = 2e-6 * images * pixels * channels * itemsize
        slow = 0.1 * megabytes if megabytes > 24 and self.boxes.across < 8 and self.boxes.chunks > 1 else 0
        meeting = 0.1 * (self.parts + 1) if self.parts > 1 else 0
        own = 33e-6 * (self.kept + self.held) * 2 * self.boxes.bytes + self.boxes.width / 300
        rounds, adding = blocks(self.blocks(images), self.multiprocessors), self.adding(images, channels)
        weights = 1.1 * (blocks(blocks(channels, 32), adding) - 1) if adding else 2
        return 0.2 + rounds * (2.6 + meeting + own) + 0.124 * megabytes + slow + weights


_HELD = 3  # boxes that the registers of a block have room for
_PARTS = 32  # at most: more were never faster


@functools.cache
def sharing(pixels: int, channels1: int, channels2: int, groups: int, itemsize: int, images: int,
            multiprocessors: int) -> Shared | None:
    """The launch of group_norm_backward_sm90.cu that takes least time; None where group_norm.cu's two and a sum do."""
    timed, channels = {}, channels1 + channels2
    for boxes in _boxes(channels1, channels2, groups, itemsize):
        most = blocks(pixels, boxes.step)
        for parts in range(1, min(most, _PARTS, max(1, multiprocessors // (images * boxes.chunks))) + 1):
            for held in (0, _HELD):
                shared = Shared(boxes, parts, blocks(most, parts) - held, held, multiprocessors)
                if shared.fits(images):
                    timed[shared] = shared.microseconds(images, pixels, channels, itemsize)
    best = min(timed, key=timed.__getitem__, default=None)
    launches = 6.5 + 1e-6 * images * pixels * channels * itemsize + images * channels / 4500
    return best if best is not None and timed[best] < launches else None
