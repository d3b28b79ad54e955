"""Linear layers of 16 bits on Hopper's own instructions: products of matrices by gemm_sm90.cu."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from cudiff.backend import Array, float32, is_low
from cudiff.cuda.device import multiprocessors
from cudiff.cuda.kernels.convolution import sm90, wgrad_sm90
from cudiff.cuda.kernels.convolution.problem import DGRAD, WGRAD, Fusion, Operands, Problem
from cudiff.cuda.kernels.gemm.matmul import rows_of
from cudiff.cuda.kernels.gemm.product import Epilogue
from cudiff.cuda.kernels.shape import at_16_bytes
from cudiff.cuda.launch import blocks, launch
from cudiff.cuda.select import Offer
from cudiff.cuda.tensor_map import tensor_map
from cudiff.cuda.tiles import Planner

ROWS, DEPTH = 128, 64  # of a tile, and of a step
ROW_BYTES, PANEL_BYTES = 128, 64 * 128
SHARED_BYTES = 227 << 10  # of a block
BARRIER_BYTES = 256
STAGES = 8  # at most
STEPS = {256: 0.65, 192: 0.495, 128: 0.36}  # microseconds of a step, by a tile's columns
CONVOLUTION_FLOPS = 330e6  # in a microsecond, at most, of conv2d_sm90 as a product: its warpgroups share no operand


def offer(p: Problem) -> Offer | None:
    """Of one source, where this is estimated to take less time than the convolutions' kernels."""
    if not _supports(p):
        return None
    asked = _product(p)
    chosen = plan(*asked)
    microseconds = time(chosen, *asked)
    return Offer(p.wanted, chosen, microseconds) if microseconds < _as_convolution(p) else None


def _supports(p: Problem) -> bool:
    rounds = p.direction != WGRAD
    return (
        is_low(p.x.dtype)
        and p.out.dtype == p.x.dtype
        and p.wanted <= ({Fusion.BIAS, Fusion.ADDEND} if rounds else set())
        and p.x.rows_aligned
        and p.out.rows_aligned
        and p.weight.rows_aligned
        and min(p.x.size, p.out.size) > 0
    )


def _product(p: Problem) -> tuple[int, int, int, bool]:
    """Rows, columns and depth, and whether the result is rounded to 16 bits: what the plan is asked."""
    inputs, outputs = p.x.shape[-1], p.out.shape[-1]
    rows = p.x.size // inputs
    return (outputs, inputs, rows, False) if p.direction == WGRAD else (rows, outputs, inputs, True)


def _as_convolution(p: Problem) -> float:
    """Estimated microseconds of the next row, infinity where that does not serve the problem."""
    if p.direction == WGRAD:
        if wgrad_sm90.offer(p) is None:
            return np.inf
        asked = p.out.shape[:3], (p.weight.shape,), False
        return min(wgrad_sm90.time(plan, *asked) for plan in wgrad_sm90.plans(*asked))
    if sm90.offer(p) is None:
        return np.inf
    shape = *sm90.full_tiles(p.x.shape[:3], apart=False), p.x.shape[3]
    estimate = sm90.plan.estimate(shape, p.out.shape[3], p.kernel, p.x.dtype.itemsize, 0, False)
    return max(estimate, 2 * p.x.size * p.out.shape[3] / CONVOLUTION_FLOPS)


def run(given: Operands, offer: Offer, p: Problem) -> None:
    x, weight, out = rows_of(given.x), given.weight[None], rows_of(given.out)
    if p.direction == WGRAD:
        a, b, result, a_mn, b_mn = out, x, weight, True, True
    else:
        weight = weight if weight.dtype == x.dtype else weight.astype(x.dtype)
        a, b, result, a_mn, b_mn = x, weight, out, False, p.direction == DGRAD
    plan.run(_product(p), lambda chosen: multiply(a, b, result, given.epilogue, a_mn, b_mn, given.add, chosen),
             [result] if given.add or given.epilogue.addend is given.out else [], chosen=offer.plan)


class Plan(NamedTuple):
    """Columns of a tile, blocks that share its depth, and whether it is a tile of the transposed result."""

    columns: int
    cluster: int
    turned: int

    @property
    def choice(self) -> list[int]:
        return [*self]


def plans(rows: int, columns: int, depth: int, rounds: bool) -> Iterator[Plan]:
    """All for a result of 16 bits, where it `rounds`, or of floats."""
    for width, cluster, turned in itertools.product(STEPS, (1, 2, 4), (0, 1)):
        plan = Plan(width, cluster, turned)
        if rounds and (turned or width // cluster % 64):
            continue
        one_each = cluster <= blocks(depth, DEPTH) and _tiles(plan, rows, columns) <= sm90.at_once(cluster)
        if cluster == 1 or one_each:
            yield plan


def time(chosen: Plan, rows: int, columns: int, depth: int, rounds: bool) -> float:
    """Estimated microseconds, as measured on an H200: steps, finishing tiles, and the sums that blocks send."""
    width, cluster, turned = chosen
    waves = blocks(_tiles(chosen, rows, columns), sm90.at_once(cluster))
    sent = ROWS * width * 4 * (cluster - 1) / cluster
    finish = (1.6 if rounds else 2.5 if turned and cluster == 1 else 2.7) * width / 256 + sent / 14e3
    return 3 + waves * (blocks(blocks(depth, DEPTH), cluster) * STEPS[width] + finish)


plan = Planner("gemm_sm90", plans, time)


def _tiles(chosen: Plan, rows: int, columns: int) -> int:
    if chosen.turned:
        rows, columns = columns, rows
    return blocks(rows, ROWS) * blocks(columns, chosen.columns)


def multiply(a: Array, b: Array, out: Array, epilogue: Epilogue, a_mn: bool, b_mn: bool, add: bool, plan: Plan) -> None:
    """out (B, M, N) = the products of a (B, M, depth), or (B, depth, M) under `a_mn`, and b (B, N, depth), or
    (B, depth, N) under `b_mn`, with what the epilogue adds; float32 out is added to where `add`."""
    (batches, rows, columns), depth = out.shape, a.shape[1 if a_mn else 2]
    width, cluster, turned = plan
    tiles = _tiles(plan, rows, columns) * batches
    if turned:
        a, b, a_mn, b_mn, rows, columns = b, a, b_mn, a_mn, columns, rows
    rounds = out.dtype != float32
    bias, addend = (None if term is None else at_16_bytes(term) for term in (epilogue.bias, epilogue.addend))
    stages, shared = _fit(plan, b_mn, rounds, addend is not None)
    operands = (
        tensor_map(a, (1, DEPTH, 64) if a_mn else (1, ROWS, DEPTH)),
        tensor_map(b, (1, DEPTH, 64) if b_mn else (1, width, DEPTH)),
    )
    results = [tensor_map(array.reshape(out.shape), (1, 64, 64), operand=False) if rounds else operands[0]
               for array in (out, out if addend is None else addend)]
    floats, pitch = (None, 0) if rounds else (out, out.strides[1] // out.itemsize)
    launch(
        "gemm_sm90", "gemm_sm90", (tiles if cluster > 1 else min(tiles, multiprocessors()), 1, cluster), 384,
        (*operands, *results, bias, floats, np.int64(pitch), int(add), rows, columns, depth, batches),
        shared, T=a.dtype, OUT=out.dtype, A_MN=int(a_mn), B_MN=int(b_mn), BN=width, CLUSTER=cluster,
        STAGES=stages, ADDS=int(addend is not None), TURNED=turned,
    )


def _fit(plan: Plan, b_mn: bool, rounds: bool, adds: bool) -> tuple[int, int]:
    """Stages of operands, and bytes of shared memory for them, the results and biases of a tile, and barriers."""
    width, cluster, _ = plan
    stage, rest = (ROWS + (blocks(width, 64) * 64 if b_mn else width)) * ROW_BYTES, BARRIER_BYTES
    if rounds:
        panels = width // cluster // 64
        rest += 2 * (panels if adds else min(2, panels)) * PANEL_BYTES + 2 * width * 4
    stages = min(STAGES, (SHARED_BYTES - rest) // stage)
    return stages, rest + stages * stage
