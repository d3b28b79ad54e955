"""Convolutions whose patches do not overlap: matrix products of the images' rows, which run as linear layers."""

from __future__ import annotations

from cudiff.backend import array_module
from cudiff.cuda.kernels.convolution import portable
from cudiff.cuda.kernels.convolution.problem import DGRAD, EPILOGUE, Fusion, Operands, Problem
from cudiff.cuda.kernels.gemm.product import Epilogue
from cudiff.cuda.kernels.gemm.table import linear
from cudiff.cuda.kernels.shape import contiguous, move
from cudiff.cuda.launch import empty
from cudiff.cuda.select import Offer


def offer_pixels(p: Problem) -> Offer | None:
    """Serves 1×1 convolutions of one source, unless statistics are wanted that conv2d.cu can write."""
    if p.kernel != (1, 1) or p.stride != (1, 1) or p.padding != (0, 0):
        return None
    if p.wanted & {Fusion.UPSAMPLE, Fusion.SECOND_SOURCE}:
        return None
    leaves_sums = portable.offer(p).fused & {Fusion.STATISTICS, Fusion.NORM_BACKWARD}
    return None if leaves_sums else Offer(p.wanted & EPILOGUE)


def run_pixels(given: Operands, offer: Offer, p: Problem) -> None:
    epilogue = given.epilogue._replace(rows_per_image=p.out.shape[1] * p.out.shape[2])
    linear(p.direction, given._replace(epilogue=epilogue, norm=None))


def offer_windows(p: Problem) -> Offer | None:
    """Serves dgrad if the windows of its result do not overlap and cover it."""
    if p.direction != DGRAD or p.stride != p.kernel or p.stride == (1, 1) or p.padding != (0, 0):
        return None
    covered = p.x.shape[1] * p.kernel[0], p.x.shape[2] * p.kernel[1]
    if p.out.shape[1:3] != covered or p.wanted & {Fusion.ADDEND, Fusion.EMB}:
        return None
    return Offer(p.wanted & {Fusion.BIAS})


def run_windows(given: Operands, offer: Offer, p: Problem) -> None:
    """Compute a product whose rows are windows, then copy the windows to the image."""
    (n, height, width, _), (k, rows, columns, c) = p.x.shape, p.weight.shape
    windows, bias = empty((n, height, width, rows * columns * c), given.out.dtype), given.epilogue.bias
    if bias is not None:
        bias = contiguous(array_module("cuda").broadcast_to(bias, (rows * columns, c)))
    linear(DGRAD, given._replace(weight=given.weight.reshape(k, -1), out=windows, epilogue=Epilogue(bias)))
    move(
        given.out.reshape(n, height, rows, width, columns, c),
        windows.reshape(n, height, width, rows, columns, c).transpose(0, 1, 3, 2, 4, 5),
    )
