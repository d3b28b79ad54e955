"""Group norm on Hopper: an image's pixels are read once and stay in shared memory. In the forward a cluster of blocks
shares them (group_norm_sm90.cu), in the backward blocks that wait for each other (group_norm_backward_sm90.cu)."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np

from cudiff.backend import Array, float32
from cudiff.cuda import tiles
from cudiff.cuda.device import multiprocessors
from cudiff.cuda.exchange import exchange_workspace
from cudiff.cuda.kernels.norm.portable import affine_gradients
from cudiff.cuda.kernels.norm.problem import Backward, Forward, Problem
from cudiff.cuda.launch import Launch, blocks, empty
from cudiff.cuda.select import Offer
from cudiff.cuda.tensor_map import Form, form_of
from cudiff.cuda.tiles import Planner

THREADS, _BOXES, _SHARED_BYTES = 512, 64, 226 << 10  # of a block, the last two at most; 1 KiB is for barriers


class Boxes(NamedTuple):
    """How an image's pixels lie in shared memory: see group_norm_boxes.cuh."""

    chunks: int
    width: int  # channels of a chunk
    across: int  # packs of a chunk
    step: int  # pixels of a box

    def form(self, p: Problem, channels: int) -> Form:
        """That of the maps of contiguous images of so many channels."""
        row = channels * p.dtype.itemsize
        return form_of((p.images, p.pixels, channels), p.dtype, (1, self.step, self.width), operand=False,
                       swizzled=False, strides=(p.pixels * row, row, p.dtype.itemsize))

    @property
    def bytes(self) -> int:
        return self.step * 16 * self.across


@functools.cache
def _boxes(channels1: int, channels2: int, groups: int, itemsize: int) -> list[Boxes]:
    """All divisions into chunks. A chunk of channels has 64 bytes or more, or is all channels, and is of one source."""
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


class ClusterPlan(NamedTuple):
    """A launch configuration of group_norm_sm90.cu."""

    boxes: Boxes
    cluster: int
    kept: int  # boxes of a block

    @property
    def choice(self) -> list[int]:
        return [self.boxes.chunks, self.cluster]

    @property
    def bytes(self) -> int:
        return self.kept * self.boxes.bytes + 4 * self.boxes.width * (35 + 3 * self.cluster)

    def fits(self) -> bool:
        return self.kept <= _BOXES and self.bytes <= _SHARED_BYTES

    def microseconds(self, pixels: int, channels1: int, channels2: int, groups: int, itemsize: int, images: int,
                     multiprocessors: int) -> float:
        """Estimated time, fitted to an H200.

        Clusters of four and more blocks fit on only 120 of 132 multiprocessors. Rows of less than 128 bytes are slow
        if the cache does not hold the input.
        """
        megabytes = images * pixels * (channels1 + channels2) * itemsize / 1e6
        speed = 16e3 / (1.5 if megabytes > 24 and self.boxes.across < 8 and self.boxes.chunks > 1 else 1)
        places = multiprocessors if self.cluster <= 2 else multiprocessors * 120 // 132
        rounds = images * self.boxes.chunks * self.cluster / places
        if self.cluster > 2 or 2 * self.bytes > _SHARED_BYTES:
            rounds = math.ceil(rounds)
        meeting = 0.15 * self.cluster.bit_length()
        return 0.9 + max(1, rounds) * (1 + meeting + self.kept * self.boxes.bytes / speed)


def _cluster_plans(pixels: int, channels1: int, channels2: int, groups: int, itemsize: int, images: int,
                   multiprocessors: int) -> list[ClusterPlan]:
    """All plans. multiprocessors: those of the GPU."""
    plans = (ClusterPlan(boxes, cluster, blocks(blocks(pixels, boxes.step), cluster))
             for boxes in _boxes(channels1, channels2, groups, itemsize) for cluster in (1, 2, 4, 8))
    return [plan for plan in plans if plan.fits()]


FORWARD = Planner("group_norm_sm90", _cluster_plans, ClusterPlan.microseconds)


def clusters(*problem: int) -> ClusterPlan | None:
    """The plan of group_norm_sm90.cu; None if no cluster has room for an image.

    No estimate declines it, because group_norm.cu was faster for none of 15 shapes.
    """
    return FORWARD(*problem) if _cluster_plans(*problem) else None


class SharedPlan(NamedTuple):
    """A launch configuration of group_norm_backward_sm90.cu."""

    boxes: Boxes
    parts: int  # blocks of an image and chunk
    kept: int  # boxes of a block in shared memory
    held: int  # boxes of a block in registers
    multiprocessors: int

    @property
    def choice(self) -> list[int]:
        return [self.boxes.chunks, self.parts, self.held]

    @property
    def bytes(self) -> int:
        return self.kept * 2 * self.boxes.bytes + 4 * self.boxes.width * 40

    def blocks(self, images: int) -> int:
        return images * self.boxes.chunks * self.parts

    def adding(self, images: int, channels: int) -> int:
        """Extra blocks that add up the images' sums, on multiprocessors that the other blocks leave free."""
        return max(0, min(blocks(channels, 32), self.multiprocessors - self.blocks(images)))

    def fits(self, images: int) -> bool:
        there = self.parts == 1 or self.blocks(images) <= self.multiprocessors
        return 0 < self.kept <= _BOXES and self.bytes <= _SHARED_BYTES and there

    def microseconds(self, pixels: int, channels1: int, channels2: int, groups: int, itemsize: int, images: int,
                     multiprocessors: int) -> float:
        """Estimated time, fitted to an H200.

        Rows of less than 128 bytes are slow if the cache does not hold x and dy. If no multiprocessor is left to add up
        the images' sums, another launch does it.
        """
        channels = channels1 + channels2
        megabytes = 2e-6 * images * pixels * channels * itemsize
        slow = 0.1 * megabytes if megabytes > 24 and self.boxes.across < 8 and self.boxes.chunks > 1 else 0
        meeting = 0.1 * (self.parts + 1) if self.parts > 1 else 0
        own = 33e-6 * (self.kept + self.held) * 2 * self.boxes.bytes + self.boxes.width / 300
        rounds, adding = blocks(self.blocks(images), self.multiprocessors), self.adding(images, channels)
        weights = 1.1 * (blocks(blocks(channels, 32), adding) - 1) if adding else 2
        return 0.2 + rounds * (2.6 + meeting + own) + 0.124 * megabytes + slow + weights


_HELD = 3  # boxes that the registers of a block have room for
_PARTS = 32  # blocks of an image and chunk, at most: more were never faster


def _shared_plans(pixels: int, channels1: int, channels2: int, groups: int, itemsize: int, images: int,
                  multiprocessors: int) -> list[SharedPlan]:
    """All plans. multiprocessors: those of the GPU."""
    found = []
    for boxes in _boxes(channels1, channels2, groups, itemsize):
        most = blocks(pixels, boxes.step)
        for parts in range(1, min(most, _PARTS, max(1, multiprocessors // (images * boxes.chunks))) + 1):
            for held in (0, _HELD):
                found.append(SharedPlan(boxes, parts, blocks(most, parts) - held, held, multiprocessors))
    return [plan for plan in found if plan.fits(images)]


BACKWARD = Planner("group_norm_backward_sm90", _shared_plans, SharedPlan.microseconds)


def sharing(*problem: int) -> SharedPlan | None:
    """The plan of group_norm_backward_sm90.cu; None if there is none, or if group_norm.cu's two launches and a sum are
    estimated to be faster."""
    if not _shared_plans(*problem):
        return None
    pixels, channels1, channels2, _, itemsize, images, _ = problem
    channels = channels1 + channels2
    launches = 6.5 + 1e-6 * images * pixels * channels * itemsize + images * channels / 4500
    return BACKWARD(*problem) if BACKWARD.estimate(*problem) < launches else None


def _key(p: Problem) -> tuple[int, ...]:
    """The planners' arguments for a problem."""
    return p.pixels, p.channels1, p.channels2, p.groups, p.dtype.itemsize, p.images, multiprocessors()


class ClusterLaunch:
    """The launch of group_norm_sm90.cu for a problem, by a plan: what a row's offer holds."""

    def __init__(self, p: Problem, plan: ClusterPlan):
        self.p, self.plan, self.problem = p, plan, _key(p)
        self.x, self.x2 = [plan.boxes.form(p, channels) for channels in (p.channels1, p.channels2 or p.channels1)]
        self.sizes = p.groups, p.pixels, p.channels1, p.channels2
        self.share = np.float64(p.groups / (p.pixels * p.channels))
        self.launch = Launch("group_norm_sm90", "forward", (p.images, plan.boxes.chunks, plan.cluster), (THREADS,),
                             plan.bytes, **p.constants, CLUSTER=plan.cluster, ACROSS=plan.boxes.across)

    def __call__(self, given: Forward) -> None:
        y, mean, rstd, x, x2, weight, bias, scale, shift, _, eps, silu, dropout = given
        maps = self.x.at(x.data.ptr), self.x2.at((x if x2 is None else x2).data.ptr)
        self.launch.run((*maps, y, mean, rstd, weight, bias, scale, shift, *self.sizes, silu, self.plan.kept,
                         self.share, eps, *dropout))

    def run(self, given: Forward) -> None:
        if tiles.watch is None:
            return self(given)
        return FORWARD.run(self.problem, lambda plan: ClusterLaunch(self.p, plan)(given), chosen=self.plan)


def offer_forward(p: Problem) -> Offer | None:
    """Declines if statistics came with every source: then one pass is left, which the portable kernel does."""
    if p.backward or not p.packs or p.summed:
        return None
    plan = clusters(*_key(p))
    return None if plan is None else Offer(plan=ClusterLaunch(p, plan))


class SharedLaunch:
    """The launches of group_norm_backward_sm90.cu for a problem, by a plan: what a row's offer holds."""

    def __init__(self, p: Problem, plan: SharedPlan):
        self.p, self.plan, self.problem = p, plan, _key(p)
        self.x, self.x2, self.dy = [plan.boxes.form(p, channels)
                                    for channels in (p.channels1, p.channels2 or p.channels1, p.channels)]
        self.adding = plan.adding(p.images, p.channels)
        self.sizes = p.images, p.pixels, p.channels1, p.channels2
        self.launches = [
            Launch("group_norm_backward_sm90", "backward", (plan.blocks(p.images) + adding,), (THREADS,), plan.bytes,
                   adding > 0 or plan.parts > 1, **p.constants, ACROSS=plan.boxes.across, HELD=plan.held)
            for adding in (0, self.adding)  # without gradients of weight and bias, and with them
        ]

    def __call__(self, given: Backward) -> Array | None:
        """Returns the images' sums for the gradients of weight and bias, if the launch itself does not add them up."""
        p, plan, x, x2, dy = self.p, self.plan, given.x, given.x2, given.dy
        weights = given.needs[2] or given.needs[3]
        own_sums = given.make_sums(p, plan.parts)
        totals = empty((p.images, p.channels, 2), float32) if weights and not self.adding else None
        workspace = exchange_workspace() if (weights and self.adding) or plan.parts > 1 else None
        second = self.x2.at((x if x2 is None else x2).data.ptr)
        self.launches[weights].run((
            self.x.at(x.data.ptr), second, self.dy.at(dy.data.ptr), x, x2, dy, *given.dx, *given.dx2,
            given.y, *own_sums, totals, *given.dscale, *given.dshift, *given.dweight, *given.dbias, *given.affine,
            workspace, *self.sizes, given.silu, plan.parts, plan.kept, *given.dropout[:2],
        ))
        return totals

    def run(self, given: Backward) -> None:
        totals = self(given) if tiles.watch is None else BACKWARD.run(
            self.problem, lambda plan: SharedLaunch(self.p, plan)(given), given.added_to(),
            lambda plan: plan.adding(self.p.images, self.p.channels) > 0, self.plan,
        )
        if totals is not None:
            affine_gradients(totals, given.dweight, given.dbias)


def offer_backward(p: Problem) -> Offer | None:
    if not p.backward or not p.packs or p.summed or p.two_terms:
        return None
    plan = sharing(*_key(p))
    return None if plan is None else Offer(plan=SharedLaunch(p, plan))
