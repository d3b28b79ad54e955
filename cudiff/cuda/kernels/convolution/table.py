"""Which kernels run convolutions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cudiff.backend import Array, float32
from cudiff.cuda.kernels.convolution import (
    bundles,
    few_channels,
    grouped,
    matrices,
    portable,
    restated,
    sm90,
    wgrad_sm90,
    windows_sm90,
)
from cudiff.cuda.kernels.convolution.problem import (
    DGRAD,
    FPROP,
    WGRAD,
    Fusion,
    Image,
    Operands,
    Pair,
    Problem,
    Weight,
    fields_of,
    problem_of,
)
from cudiff.cuda.kernels.elementwise import activate
from cudiff.cuda.kernels.gemm.product import Epilogue
from cudiff.cuda.kernels.gemm.table import linear
from cudiff.cuda.kernels.pool import TWICE, spread_windows
from cudiff.cuda.launch import empty
from cudiff.cuda.select import ANY, SM90, Offer, Row, Table, current_target
from cudiff.statistics import ChannelStatistics


def _without_statistics(offer: Callable[[Problem], Offer | None]) -> Callable[[Problem], Offer | None]:
    """`offer` for exact fprop of float32 only, which leaves statistics to the norm."""
    def offer_exact(p: Problem) -> Offer | None:
        exact = p.direction == FPROP and p.x.dtype == float32 and p.products == 3
        return offer(p._replace(wanted=p.wanted - {Fusion.STATISTICS})) if exact else None

    return offer_exact


def _restated(restate: Callable[[Operands, Problem], restated.Restated]) -> Callable[[Operands, Offer, Problem], None]:
    """A row's `run` that runs another convolution in place of the problem's, by the row that the table has for it."""
    def run(given: Operands, offer: Offer, p: Problem) -> None:
        again = restate(given, p)
        again.run(_pass_of(p), again.stride, again.padding)

    return run


def _run_bundles(given: Operands, offer: Offer, p: Problem) -> None:
    bundles.run(given, offer, p, lambda one, of: _pass_of(p)(one, of.stride, of.padding, of.dilation))


def _pass_of(p: Problem) -> Callable[..., Any]:
    passes: dict[str, Callable[..., Any]] = {FPROP: fprop, DGRAD: dgrad, WGRAD: wgrad}
    return passes[p.direction]


CONVOLUTION = Table(
    "convolution",
    Row("conv2d_depthwise", ANY, grouped.offer_depthwise, grouped.run_depthwise,
        "a group for each channel, kernels of up to 8 a side; adds a bias and an addend"),
    Row("conv2d_sm90, gemm_sm90, conv2d_wgrad_sm90, of bundles", SM90, bundles.offer_views, _run_bundles,
        "16 bits, groups without dilation, pixels at multiples of 16 bytes, as convolutions of bundles of groups by "
        "weights with zeros between groups; adds a bias and an addend; declines if conv2d_grouped is estimated to take "
        "less time"),
    Row("shape.copy, bundles", ANY, bundles.offer_copies, _run_bundles,
        "groups, with dilation only of stride 1, as such convolutions of copies, by this table; adds a bias and an "
        "addend; declines if conv2d_grouped is estimated to take less time"),
    Row("shape.copy, undilated", ANY, restated.offer_dilated, _restated(restated.undilated),
        "dilation with stride 1 and without groups, as a convolution by this table of the images of every d-th pixel; "
        "adds a bias and an addend; declines if conv2d_grouped is estimated to take less time than copies and conv2d"),
    Row("conv2d_grouped", ANY, grouped.offer, grouped.run,
        "all others with groups or dilation; adds a bias and an addend"),
    Row("conv2d_few_channels", ANY, few_channels.offer, few_channels.run,
        "3x3 and 1x1 that keep the size, between an image of up to 7 channels, 16-bit or float32, and a 16-bit one of "
        "a multiple of 32; adds a bias; for a result of many channels also an embedding, ReLU, statistics or SUMS, and "
        "the backward of a norm of one source; not with an addend, a skip path, two sources or an upsampled input"),
    Row("gemm_sm90", SM90, windows_sm90.offer, windows_sm90.run,
        "16-bit fprop, dgrad if every pixel is under a tap, and wgrad of one source that conv2d_wgrad_sm90 does not "
        "take, strides of up to 8, padding of up to 127, pixels at multiples of 16 bytes; adds bias and addend, and an "
        "embedding unless it is 1x1 of stride 1; takes two sources of a convolution that keeps the size; declines if "
        "conv2d_sm90 or conv2d, with the statistics and the skip path that it fuses, is estimated to take less time; "
        "chosen mostly for strides, 1x1 and many small images"),
    Row("conv2d_sm90", SM90, sm90.offer, sm90.run,
        "fprop and dgrad of stride 1 that keep the size, 16-bit or tf32, 1 or 3 rows of taps, pixels at multiples of "
        "16 bytes; adds bias, embedding and addend; fprop also ReLU, statistics and an upsampled input, dgrad no SUMS; "
        "16-bit also two sources, a norm's backward if nothing is added, and the skip path of a 3x3 that adds only "
        "biases; declines a skip path or an upsampled input if two launches are estimated to take less time"),
    Row("conv2d_wgrad_sm90, conv2d_wgrad_tf32_sm90", SM90, wgrad_sm90.offer, wgrad_sm90.run,
        "wgrad of such convolutions, any number of channels; 16-bit also two sources, or an upsampled input if shared "
        "memory has room; tf32 only of square kernels"),
    Row("matmul, shape.copy", ANY, matrices.offer_windows, matrices.run_windows,
        "dgrad if the windows of its result do not overlap and cover it; adds only a bias"),
    Row("shape.copy, folded", ANY, restated.offer_folded, _restated(restated.folded),
        "strides, from pixels of less than 16 bytes, as a convolution of stride 1 by this table, in which each s x s "
        "pixels are one; adds bias, embedding and addend, in dgrad only an addend; declines if conv2d is estimated to "
        "take less time without copies"),
    Row("matmul, exact", SM90, _without_statistics(matrices.offer_pixels), matrices.run_pixels,
        "1x1 fprop of float32; writes no statistics: without them the norm takes one pass, which is a little faster"),
    Row("conv2d, exact", SM90, _without_statistics(portable.offer), portable.run,
        "fprop of float32; writes no statistics, for the same reason"),
    Row("matmul", ANY, matrices.offer_pixels, matrices.run_pixels,
        "1x1 of stride 1 and one source, by the table of linear layers; not if conv2d writes the wanted statistics"),
    Row("shape.fit, channels, sm90", SM90, restated.offer_channels(portable.microseconds, windows_sm90.otherwise),
        _restated(restated.whole_channels),
        "16-bit images of other channels than multiples of 8, as a convolution by this table with channels of zeros; "
        "adds bias, embedding and addend; not with two sources or an upsampled input; declines where conv2d is "
        "estimated to take less time without copies"),
    Row("shape.fit, channels", ANY, restated.offer_channels(portable.microseconds, portable.microseconds),
        _restated(restated.whole_channels),
        "the same, where conv2d is estimated to gain more by aligned pixels than the copies take"),
    Row("conv2d", ANY, portable.offer, portable.run,
        "all; adds bias, embedding and addend; takes two sources and an upsampled input; fprop writes statistics "
        "unless ReLU follows, dgrad does a norm's backward if nothing is added, both only if each warp's rows are of "
        "one image and the depth is not split"),
)


def fprop(given: Operands, stride: Pair, padding: Pair, dilation: Pair = (1, 1), groups: int = 1, *,
          statistics: bool = False, relu: bool = False, upsample: bool = False) -> ChannelStatistics | None:
    """given.out (N, Ho, Wo, K) = the convolution, plus what the operands add; then ReLU, if `relu`.

    upsample: the input is read as if upsampled: twice as high and wide, each pixel four times. statistics: whether to
    return out's moments; None if the kernel writes none. An empty out launches nothing, here and in `dgrad`.
    """
    if given.out.size == 0:
        return None
    fields = fields_of(FPROP, given, stride, padding, statistics and Fusion.STATISTICS, relu and Fusion.RELU,
                       upsample and Fusion.UPSAMPLE, dilation=dilation, groups=groups)
    problem, (row, offer, left) = CONVOLUTION.selected(problem_of, fields)
    if Fusion.SKIP in left:
        given = given._replace(skip=None, epilogue=given.epilogue._replace(addend=_skipped(given)))
        return fprop(given, stride, padding, statistics=statistics, relu=relu, upsample=upsample)
    if Fusion.UPSAMPLE in left:
        x, _ = spread_windows(given.x, given.out.shape[1:3], TWICE, 1.0, None)
        return fprop(given._replace(x=x), stride, padding, statistics=statistics, relu=relu)
    assert Fusion.CAST not in left
    moments = row.run(given, offer, problem)
    if Fusion.RELU in left:
        activate("relu", given.out, None)
    return moments


def _skipped(given: Operands) -> Array:
    """The result (N, Ho, Wo, K) of the skip path, by a launch of its own."""
    skip = given.skip
    assert skip is not None
    out = empty((1, skip.x.size // skip.x.shape[-1], len(skip.weight)), skip.x.dtype)
    linear(FPROP, Operands(skip.x, skip.weight, out, Epilogue(skip.bias), skip.x2))
    return out.reshape(given.out.shape)


def dgrad(given: Operands, stride: Pair, padding: Pair, dilation: Pair = (1, 1), groups: int = 1, *,
          sums: bool = False) -> ChannelStatistics | None:
    """given.out (N, H, W, C) = the gradient of the input, plus what the epilogue adds.

    sums: whether to return its SUMS; None if the kernel writes none. If a norm made the input (`given.norm`) and the
    epilogue is empty, the kernel may fuse the norm's backward. Then out is d_preact, the gradient of the norm's output
    before SiLU, and PRODUCTS are returned, with the norm's input x, in float32 with x - mean. Else None is returned.
    """
    if given.out.size == 0:
        return None
    fields = fields_of(DGRAD, given, stride, padding, sums and Fusion.SUMS, dilation=dilation, groups=groups)
    problem, (row, offer, left) = CONVOLUTION.selected(problem_of, fields)
    assert Fusion.CAST not in left
    return row.run(given, offer, problem)


def wgrad(given: Operands, stride: Pair, padding: Pair, dilation: Pair = (1, 1), groups: int = 1, *,
          upsample: bool = False) -> None:
    """given.weight (K, R, S, C / groups), float32, = or, with given.add, += the gradient of the weight, which is 0
    without images. `upsample` is as in `fprop`."""
    if given.x.size == 0:
        if not given.add:
            given.weight.fill(0)
        return None
    fields = fields_of(WGRAD, given, stride, padding, upsample and Fusion.UPSAMPLE, dilation=dilation, groups=groups)
    problem, (row, offer, left) = CONVOLUTION.selected(problem_of, fields)
    if Fusion.UPSAMPLE in left:
        x, _ = spread_windows(given.x, given.out.shape[1:3], TWICE, 1.0, None)
        return wgrad(given._replace(x=x), stride, padding)
    assert Fusion.CAST not in left
    return row.run(given, offer, problem)


def casts(x: tuple[int, ...], dtype: np.dtype, weight: tuple[int, ...], out_dtype: np.dtype, emb: bool) -> bool:
    """Whether one kernel can read an image of one dtype and write another, without a separate cast.

    The convolution has stride 1 and keeps the size. x: the image's shape. dtype: its dtype. weight: (K, R, S, C).
    emb: whether an embedding is added.
    """
    padding = weight[1] // 2, weight[1] // 2
    out = Image((*x[:3], weight[0]), out_dtype)
    wanted = frozenset({Fusion.CAST, Fusion.EMB} if emb else {Fusion.CAST})
    problem = Problem(FPROP, Image(x, dtype), Weight(weight), out, padding=padding, wanted=wanted)
    # Nothing is run here. With an architecture named, select does not tell `watched`.
    return Fusion.CAST not in CONVOLUTION.select(problem, current_target().architecture).left
