"""Convolutions of any stride and padding by conv2d.cu, on every GPU."""

from __future__ import annotations

from cudiff.cuda.kernels.convolution.problem import DGRAD, EPILOGUE, FPROP, LONGEST, WGRAD, Fusion, Operands, Problem
from cudiff.cuda.kernels.gemm.product import Epilogue, Plan, estimate, launch_product, plan, problem_of
from cudiff.cuda.kernels.shape import contiguous
from cudiff.cuda.launch import aligned
from cudiff.cuda.select import Offer
from cudiff.cuda.sums import empty_statistics
from cudiff.statistics import ChannelStatistics, Kind, moments


def offer(p: Problem) -> Offer:
    """The offer's plan says whether statistics are wanted. They are fused only if the chosen tile can write them."""
    # If ReLU follows, another launch makes the moments.
    moments = Fusion.STATISTICS in p.wanted and Fusion.RELU not in p.wanted and max(p.out.shape[1:3]) <= LONGEST
    sums = moments or _takes_norm(p)
    fused = {Fusion.BIAS, Fusion.EMB, Fusion.ADDEND, Fusion.SECOND_SOURCE, Fusion.UPSAMPLE}
    if sums and _makes_sums(plan(*_product(p)), p.out.shape[1] * p.out.shape[2]):
        fused |= {Fusion.STATISTICS, Fusion.NORM_BACKWARD}
    return Offer(p.wanted & fused, plan=sums)


def run(given: Operands, offer: Offer, p: Problem) -> ChannelStatistics | None:
    """Returns what `table.fprop` and `table.dgrad` return. Raises ValueError for an image with too long a side."""
    pixels = p.out.shape[1] * p.out.shape[2]
    a, b, out, epilogue = given.x, given.weight, given.out, given.epilogue._replace(rows_per_image=pixels)
    x, result = p.x.shape, p.out.shape
    if p.direction == DGRAD:
        x, result = result, x
    elif p.direction == WGRAD:
        a, b, out, epilogue = given.out, given.x, given.weight, Epilogue(addend=given.weight if given.add else None)
    (n, height, width, c1), (k, *kernel, c), size = x, p.weight.shape, result[1:3]
    b = b.astype(a.dtype, copy=False)
    b = b if b.flags.c_contiguous else contiguous(b)  # a slice of the weight if the input is two sources
    upsample = Fusion.UPSAMPLE in p.wanted
    longest = LONGEST - max(p.padding)
    if max(height * (1 + upsample), width * (1 + upsample), *size) > longest:
        raise ValueError(
            f"conv2d on CUDA: an image of {height} x {width} pixels to {size[0]} x {size[1]}: cut it into parts of at "
            f"most {longest} a side"
        )
    extent, chunk_a, chunk_b = _extent(p)
    a_vec, b_vec = aligned(a, chunk_a), aligned(b, chunk_b)
    if given.x2 is not None and not aligned(given.x2, c - c1):
        a_vec, b_vec = a_vec and p.direction != FPROP, b_vec and p.direction != WGRAD

    def makes_sums(chosen: Plan) -> bool:
        return offer.plan and _makes_sums(chosen, pixels)

    def launch_as(chosen: Plan) -> ChannelStatistics | None:
        statistics, sources, normed, mode = None, (given.x2, c1), (None,) * 7 + (1,), 0
        if makes_sums(chosen):
            tiles = pixels * chosen.tile.warps_m // chosen.tile.rows
            if p.direction == FPROP:
                statistics = empty_statistics(moments(out.dtype), n, tiles, extent[1])
            elif given.norm is not None:
                norm = given.norm
                statistics = empty_statistics(Kind.PRODUCTS, n, tiles, extent[1])
                sources = norm.x2, norm.x.shape[3]
                normed, mode = (norm.x, *norm[3:], norm.mean.shape[1]), 1 if norm.silu else 2
        launch_product(
            chosen, "conv2d", a, b, out, extent[1],
            (n, height, width, c, *size, k, *kernel, *p.stride, *p.padding, *sources,
             None if statistics is None else statistics.sums, *normed), extent, epilogue,
            p.products, PASS=p.direction, A_VEC=a_vec, B_VEC=b_vec, DILATED=p.direction == DGRAD and p.stride != (1, 1),
            UPSAMPLE=upsample, PAIR=given.x2 is not None, NORM=mode,
        )
        return statistics

    problem = problem_of(a.dtype, extent, p.products, a_vec and b_vec)
    return plan.run(problem, launch_as, [out] if epilogue.addend is out else [], makes_sums)


def _takes_norm(p: Problem) -> bool:
    """Whether it can fuse the norm's backward: only if nothing is added to the result."""
    return (
        Fusion.NORM_BACKWARD in p.wanted
        and not p.wanted & EPILOGUE
        and max(p.out.shape[1:3]) <= LONGEST
        and all(image.dtype == p.out.dtype and image.rows_aligned for image in (*p.norm, p.out))
    )


def _makes_sums(chosen: Plan, pixels: int) -> bool:
    """Whether the plan can write statistics: the depth is not split, and a warp's rows are of one image."""
    return chosen.splits == 1 and pixels % (chosen.tile.rows // chosen.tile.warps_m) == 0


def microseconds(p: Problem) -> float:
    """Estimated microseconds, as measured on an H200 from 1 to 64 images of 8 to 128 pixels a side: more than `plan`
    estimates for the product. dgrad with a stride takes longest: its depth includes taps over no pixel of dout."""
    longer = 1.3 if p.direction == FPROP else 1.6 if p.stride == (1, 1) else 2.3
    return 3.5 + longer * estimate(p.x.dtype, _extent(p)[0], p.products, *_aligned(p))


def _product(p: Problem) -> tuple:
    """The arguments of `plan`, for a weight that starts at a multiple of 16 bytes."""
    vectors = all(_aligned(p)) and p.x.aligned and (p.x2 is None or p.x2.rows_aligned)
    return problem_of(p.x.dtype, _extent(p)[0], p.products, vectors)


def _aligned(p: Problem) -> list[bool]:
    """Whether what is adjacent of each operand has whole chunks of 16 bytes."""
    return [chunk * p.x.dtype.itemsize % 16 == 0 for chunk in _extent(p)[1:]]


def _extent(p: Problem) -> tuple[tuple[int, int, int, int], int, int]:
    """(rows, columns, depth, 1) of the convolution as a matrix product, and how many elements of each operand are
    adjacent in memory."""
    k, rows, columns, c = p.weight.shape
    n, height, width, _ = p.out.shape
    taps, pixels = rows * columns, n * height * width
    if p.direction == FPROP:
        return (pixels, k, taps * c, 1), p.x.shape[3], taps * c
    if p.direction == DGRAD:
        return (pixels, c, taps * k, 1), k, c
    return (k, taps * c, pixels, 1), k, p.x.shape[3]
