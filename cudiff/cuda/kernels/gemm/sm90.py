"""Matrix products and linear layers in 16 bits with Hopper's own instructions, by gemm_sm90.cu."""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np

from cudiff.backend import Array, array_module, float32, is_low
from cudiff.cuda.device import multiprocessors
from cudiff.cuda.kernels.convolution import plans_sm90, sm90, wgrad_sm90
from cudiff.cuda.kernels.convolution.problem import (
    AFTERWARDS,
    DGRAD,
    EPILOGUE,
    WGRAD,
    Fusion,
    Operands,
    Problem,
)
from cudiff.cuda.kernels.gemm.matmul import rows_of
from cudiff.cuda.kernels.gemm.plans_sm90 import DEPTH, ROWS, Plan, plan, tiles_of
from cudiff.cuda.kernels.gemm.problem import Product
from cudiff.cuda.kernels.gemm.product import ACTIVATIONS, Epilogue
from cudiff.cuda.kernels.shape import at_16_bytes
from cudiff.cuda.launch import Launch, blocks, empty
from cudiff.cuda.select import Offer
from cudiff.cuda.sums import add_parts, empty_statistics
from cudiff.cuda.tensor_map import Windows, tensor_map, windows_map
from cudiff.statistics import ChannelStatistics, Kind

ROW_BYTES, PANEL_BYTES = 128, 64 * 128
SHARED_BYTES = 227 << 10  # of a block
BARRIER_BYTES = 256
STAGES = 8  # at most
SUMMED = 64  # rows of the result for each sum that is left
BANDWIDTH = 3e6  # bytes in a microsecond
_PIXELS = Windows()  # each pixel is one
ONE_TAP_FLOPS = 330e6  # of conv2d_sm90 with one tap, in a microsecond, as counted: its warpgroups share no operand


# The fusions that one launch does together. Each reads or writes one more matrix; a gate reads one and writes one.
_FUSED = [
    frozenset(wanted) for wanted in
    ((), (Fusion.ADDEND,), (Fusion.ADDEND, Fusion.GATE), (Fusion.ACTIVATION,), (Fusion.FACTOR,),
     (Fusion.FACTOR, Fusion.SUMS))
]


def offer(p: Problem) -> Offer | None:
    """Serves a linear layer where this is estimated to take less time than the convolutions' kernels."""
    if not _supports(p):
        return None
    asked = _product(p)
    microseconds = plan.estimate(*asked)  # by the rule: a tuned plan is not to change which kernel runs
    otherwise = _time_as_convolution(p)
    if p.wanted & AFTERWARDS:  # the table's next rows need an extra pass: a launch, and three matrices
        otherwise += 3 + 3 * p.out.size * p.out.dtype.itemsize / BANDWIDTH
    return Offer(p.wanted, plan(*asked)) if microseconds < otherwise else None


def _supports(p: Problem) -> bool:
    low_out, pair = p.direction != WGRAD, Fusion.SECOND_SOURCE in p.wanted
    return (
        is_low(p.x.dtype)
        and p.out.dtype == p.x.dtype
        and (p.wanted - {Fusion.BIAS, Fusion.SECOND_SOURCE} in _FUSED if low_out else not p.wanted)
        and sm90.takes_sources(p)
        and not (pair and p.direction == DGRAD and p.wanted & EPILOGUE)
        and p.x.rows_aligned
        and p.out.rows_aligned
        and p.weight.rows_aligned
        and min(p.x.size, p.out.size) > 0
    )


def _product(p: Problem) -> tuple[int, int, int, bool]:
    """The arguments of `plan`: rows, columns, depth, and whether the result is rounded to 16 bits."""
    rows, (outputs, _, _, inputs) = p.x.size // p.x.shape[-1], p.weight.shape
    if p.direction == WGRAD:
        return outputs, inputs, rows, False
    return (rows, inputs, outputs, True) if p.direction == DGRAD else (rows, outputs, inputs, True)


def linear_microseconds(p: Problem) -> float:
    """Estimated microseconds of a linear layer; infinity where `offer` never serves it."""
    return plan.estimate(*_product(p)) if _supports(p) else np.inf


def _time_as_convolution(p: Problem) -> float:
    """Estimated microseconds of the table's next row; infinity where that does not serve the problem."""
    if p.direction == WGRAD:
        if wgrad_sm90.offer(p) is None:
            return np.inf
        asked = p.out.shape[:3], (p.weight.shape,), False
        return min(wgrad_sm90.time(plan, *asked) for plan in wgrad_sm90.plans(*asked))
    if sm90.offer(p) is None:
        return np.inf
    rows, columns, depth, _ = _product(p)
    shape = *sm90.full_tiles(p.x.shape[:3], apart=False), depth
    estimate = plans_sm90.plan.estimate(shape, columns, p.kernel, p.x.dtype.itemsize, 0, False)
    return max(estimate, 2 * rows * columns * depth / ONE_TAP_FLOPS)


def offer_product(p: Product) -> Offer | None:
    """Serves a product where TMA can load and store every row. float32 results are stored in pairs."""
    takes = (
        is_low(p.a.dtype)
        and p.out.dtype in (p.a.dtype, float32)
        and all(matrix.aligned for matrix in (p.a, p.b, p.out))
        and (p.out.dtype != float32 or all(length % 8 == 0 for length in p.out.shape[1:]))
        and min(p.size) > 0
    )
    return Offer(plan=plan(*_of_product(p))) if takes else None


def microseconds(p: Product) -> float:
    """Estimated microseconds of a product that `offer_product` takes."""
    return plan.estimate(*_of_product(p))


def _of_product(p: Product) -> tuple[int, int, int, bool, int]:
    rows, columns, depth, batches = p.size
    return rows, columns, depth, p.out.dtype != float32, batches


def run_product(a: Array, b: Array, out: Array, offer: Offer, p: Product) -> None:
    a, b = (array_module("cuda").broadcast_to(array, (len(out), *array.shape[1:])) for array in (a, b))
    low_out = p.out.dtype != float32
    epilogue = Epilogue(addend=out if p.add and low_out else None)
    plan.run(_of_product(p), lambda chosen: multiply(a, b, out, epilogue, p.transpose_a, not p.transpose_b,
                                                     p.add and not low_out, chosen),
             [out] if p.add else [], chosen=offer.plan)


def run(given: Operands, offer: Offer, p: Problem) -> ChannelStatistics | None:
    """Returns the SUMS of dgrad's result if they are wanted, else None."""
    x, weight, out = rows_of(given.x), given.weight.reshape(len(given.weight), -1)[None], rows_of(given.out)
    if p.direction == WGRAD:
        a, b, result, a_mn, b_mn = out, x, weight, True, True
    else:
        weight = weight if weight.dtype == x.dtype else weight.astype(x.dtype)
        a, b, result, a_mn, b_mn = x, weight, out, False, p.direction == DGRAD
    more = None if given.x2 is None else rows_of(given.x2)
    a2, out2 = (None, more) if p.direction == DGRAD else (more, None)
    statistics = None
    if Fusion.SUMS in p.wanted:
        statistics = empty_statistics(Kind.SUMS, 1, blocks(out.shape[1], SUMMED), out.shape[2])
    sums = None if statistics is None else statistics.sums

    def launch_as(chosen: Plan) -> None:
        multiply(a, b, result, given.epilogue, a_mn, b_mn, given.add, chosen, a2, out2, sums=sums)

    plan.run(_product(p), launch_as, [result] if given.add or given.epilogue.addend is given.out else [],
             chosen=offer.plan)
    return statistics


def multiply(a: Array, b: Array, out: Array, epilogue: Epilogue, a_mn: bool, b_mn: bool, add: bool, plan: Plan,
             a2: Array | None = None, out2: Array | None = None, windows: Windows | None = None,
             sums: Array | None = None, parts: int = 1) -> None:
    """out (B, M, N) = a·bᵀ plus what the epilogue adds. With `add`, the product is added to a float32 out.

    a is (B, M, depth), or (B, depth, M) with `a_mn`. b is (B, N, depth), or (B, depth, N) with `b_mn`.

    a2: the rest of the depth, after a's own, a multiple of 64. out2: the rest of the columns, likewise. A float32 out
    takes neither; out2 takes no addend. sums: float32 (1, tiles, N), receives the sums over each `SUMMED` rows;
    only beside a factor, and for one matrix.

    windows: makes it a convolution of images a (I, H, W, depth). Then out and addend are images of N channels, with a
    pixel for each window. b is (R, S, N, depth), or with `b_mn` (R, S, depth, N) with taps in reverse order, rotated by
    180°. All but a may have any strides. With `a_mn` and a transposed plan it is the gradient of the weights: b is the
    images (I, H, W, C), the depth their windows, and out float32 (1, M, R · S · C).

    parts: of the depth, of one pair of matrices and without clusters. A float32 out (parts, M, N) receives the product
    of each. Where the plan has splits, the sum of the parts is deferred like `add_parts`.
    """
    if plan.splits > 1:
        return _multiply_split(a, b, out, a_mn, b_mn, add, plan, windows)
    (*lengths, rows, first_columns), split = out.shape, a.shape[1 if a_mn else -1]
    columns = across = first_columns if out2 is None else first_columns + out2.shape[-1]
    batches = lengths[0] // parts
    if windows is not None and a_mn:
        across = whole_channels(windows.taps, b.shape[-1])
    elif windows is not None:
        batches, rows = 1, rows * math.prod(lengths)
    depth = split if a2 is None else split + a2.shape[-1]
    width, cluster, transposed, *_ = plan
    tiles = tiles_of(plan, rows, across) * batches * parts
    if transposed:
        a, b, a_mn, b_mn, rows, columns = b, a, b_mn, a_mn, columns, rows
    low_out, (bias, emb, addend, rows_per_image, gate, activation, factor, aux) = out.dtype != float32, epilogue
    other = addend if factor is None else factor
    other = other if other is None else at_16_bytes(other)
    bias, by_image = [term if term is None else at_16_bytes(term) for term in (bias, emb if gate is None else gate)]

    def source(array: Array) -> bytes:
        if windows is not None:
            return windows_map(array, windows, 64 if a_mn else ROWS)
        return tensor_map(array, (1, DEPTH, 64) if a_mn else (1, ROWS, DEPTH))

    def result(array: Array) -> bytes:
        if windows is not None:
            return windows_map(array, Windows(size=windows.size), 64)
        return tensor_map(array, (1, 64, 64), operand=False)

    a_map, b_box, last, before = source(a), (DEPTH, 64) if b_mn else (width, DEPTH), columns % width, [1] * (b.ndim - 2)
    b_map = tensor_map(b, (*before, *b_box))
    last_map = b_map if b_mn or not last else tensor_map(b, (*before, last, DEPTH))
    operands = a_map, a_map if a2 is None else source(a2), b_map, last_map
    own = result(out) if low_out else a_map
    beside = [own if array is None else result(array if windows else array.reshape(-1, rows, array.shape[-1]))
              for array in (out2 if aux is None else aux, other)]
    floats, pitch = (sums, 0) if low_out else (out, out.strides[1] // out.itemsize)
    launch = _launch(plan, tiles if cluster > 1 else min(tiles, multiprocessors()), a.dtype, out.dtype, a_mn, b_mn,
                     windows is not None, addend is not None, activation, factor is not None, gate is not None,
                     aux is not None, sums is not None)
    launch.run((*operands, own, *beside, bias, by_image, rows_per_image, floats, np.int64(pitch), int(add), rows,
                columns, depth, batches, parts, split, columns if out2 is None else first_columns,
                *itertools.chain(*(windows or _PIXELS))))


@functools.lru_cache(maxsize=4096)
def _launch(plan: Plan, count: int, dtype: np.dtype, out: np.dtype, a_mn: bool, b_mn: bool, windows: bool, addend: bool,
            activation: str | None, factor: bool, gate: bool, aux: bool, sums: bool) -> Launch:
    """The launch of so many clusters by this plan, for operands and a result of these dtypes."""
    width, cluster, transposed, *_ = plan
    stages, shared = _fit(plan, b_mn, out != float32, addend or factor, aux)
    return Launch(
        "gemm_sm90", "gemm_sm90", (count, 1, cluster), (384,), shared, T=dtype, OUT=out, A_MN=int(a_mn),
        B_MN=int(b_mn), BN=width, CLUSTER=cluster, STAGES=stages, TRANSPOSED=transposed, WINDOWS=int(windows),
        ADDS=int(addend and not gate), ACTIVATION=ACTIVATIONS[activation], KEEPS=int(aux), MULTIPLIES=int(factor),
        GATES=int(gate), SUMS=int(sums),
    )


def whole_channels(taps: tuple[int, int], channels: int) -> int:
    """Columns of a weight's gradient, with the channels of each tap rounded up to whole columns of 64."""
    return math.prod(taps) * blocks(channels, 64) * 64


def _multiply_split(a: Array, b: Array, out: Array, a_mn: bool, b_mn: bool, add: bool, plan: Plan,
                    windows: Windows | None) -> None:
    """`multiply` of one matrix with splits: first the rows of tiles that are whole, then the parts of the rest. Of
    windows none are whole."""
    first, alone = plan.whole * ROWS, plan._replace(splits=1, whole=0)

    def of_rows(rows: slice) -> tuple[Array, Array, Array]:
        cut, mn = (b, b_mn) if plan.transposed else (a, a_mn)
        cut = cut[..., rows] if mn else cut[:, rows]
        return (a, cut, out[..., rows]) if plan.transposed else (cut, b, out[:, rows])

    if first:
        multiply(*of_rows(slice(first)), Epilogue(), a_mn, b_mn, add, alone)
    a, b, rest = of_rows(slice(first, None))
    parts = empty((plan.splits, *rest.shape[1:]), float32)
    multiply(a, b, parts, Epilogue(), a_mn, b_mn, False, alone, windows=windows, parts=plan.splits)
    add_parts(parts, rest[0], add)


def _fit(plan: Plan, b_mn: bool, low_out: bool, reads: bool, keeps: bool) -> tuple[int, int]:
    """Stages of operands, and bytes of shared memory for them, for a tile's results and biases, and for barriers.

    low_out: the result has 16 bits. reads: an addend or a factor is read beside it. keeps: `aux` is stored beside it.
    """
    width, cluster, *_ = plan
    stage, rest = (ROWS + (blocks(width, 64) * 64 if b_mn else width)) * ROW_BYTES, BARRIER_BYTES
    if low_out:
        panels = width // cluster // 64
        parts = panels * (1 + keeps)
        rest += 2 * (panels + keeps if reads else parts if parts <= 3 else 2) * PANEL_BYTES + 2 * width * 4
    stages = min(STAGES, (SHARED_BYTES - rest) // stage)
    return stages, rest + stages * stage
