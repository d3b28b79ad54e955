"""Which kernels linear layers run by: for some a linear layer is a 1×1 convolution of an image 8 pixels wide."""

from __future__ import annotations

from cudiff.backend import Array
from cudiff.cuda.kernels.convolution import sm90, wgrad_sm90
from cudiff.cuda.kernels.convolution.problem import (
    DGRAD,
    FPROP,
    WGRAD,
    Fusion,
    Image,
    Operands,
    Problem,
    image_of,
    wanted_by,
    weight_of,
)
from cudiff.cuda.kernels.gemm import matmul
from cudiff.cuda.kernels.gemm.product import Epilogue
from cudiff.cuda.launch import empty
from cudiff.cuda.select import ANY, SM90, Choice, Offer, Row, Table


def _as_convolution(given: Operands, offer: Offer, p: Problem) -> None:
    images = given._replace(
        x=as_image(given.x), weight=given.weight[:, None, None], out=as_image(given.out),
        x2=None if given.x2 is None else as_image(given.x2),
    )
    (wgrad_sm90 if p.direction == WGRAD else sm90).run(images, offer, p)


LINEAR = Table(
    "linear layers",
    Row("conv2d_sm90", SM90, sm90.offer, _as_convolution,
        "output and input gradient of 16 bits or tf32 where 8 divides the rows, as a convolution; two sources too of "
        "16 bits, the first of whole 64 channels"),
    Row("conv2d_wgrad_sm90, conv2d_wgrad_tf32_sm90", SM90, wgrad_sm90.offer, _as_convolution,
        "weight gradient of the same, of any number of channels"),
    Row("matmul", ANY, matmul.offer, matmul.run, "all; two sources by a launch for each"),
)


def linear(x: Array, weight: Array, epilogue: Epilogue, tf32: bool, out: Array | None = None,
           x2: Array | None = None) -> Array:
    """concat(x, x2) (..., C) · weight (K, C) transposed, plus the epilogue → (1, rows, K)."""
    if out is None:
        out = empty((1, x.size // x.shape[-1], weight.shape[0]), x.dtype)
    given = Operands(x, weight, out, epilogue, x2)
    problem, chosen = _select(FPROP, given, tf32)
    if x2 is not None and Fusion.SECOND_SOURCE in chosen.left:
        linear(x, weight[:, : x.shape[-1]], epilogue, tf32, out)
        return linear(x2, weight[:, x.shape[-1] :], Epilogue(addend=out), tf32, out)
    chosen.row.run(given, chosen.offer, problem)
    return out


def linear_dx(dout: Array, weight: Array, dx: Array, epilogue: Epilogue, tf32: bool, dx2: Array | None = None) -> None:
    """concat(dx, dx2) (..., C) = dout (..., K) · weight (K, C), plus the epilogue."""
    given = Operands(dout, weight, dx, epilogue, dx2)
    problem, chosen = _select(DGRAD, given, tf32)
    if dx2 is not None and Fusion.SECOND_SOURCE in chosen.left:
        linear_dx(dout, weight[:, : dx.shape[-1]], dx, epilogue, tf32)
        linear_dx(dout, weight[:, dx.shape[-1] :], dx2, epilogue, tf32)
    else:
        chosen.row.run(given, chosen.offer, problem)


def linear_dweight(x: Array, dout: Array, dweight: Array, add: bool, tf32: bool, x2: Array | None = None) -> None:
    """dweight (K, C) float32 = or += dout (..., K) transposed · concat(x, x2) (..., C)."""
    given = Operands(x, dweight, dout, x2=x2, add=add)
    problem, chosen = _select(WGRAD, given, tf32)
    if x2 is not None and Fusion.SECOND_SOURCE in chosen.left:
        linear_dweight(x, dout, dweight[:, : x.shape[-1]], add, tf32)
        linear_dweight(x2, dout, dweight[:, x.shape[-1] :], add, tf32)
    else:
        chosen.row.run(given, chosen.offer, problem)


def _select(direction: str, given: Operands, tf32: bool) -> tuple[Problem, Choice]:
    outputs, channels = given.weight.shape
    problem = Problem(
        direction, _image(given.x), weight_of(given.weight, (outputs, 1, 1, channels)), _image(given.out), tf32=tf32,
        wanted=frozenset(wanted_by(given)), x2=None if given.x2 is None else _image(given.x2),
    )
    return problem, LINEAR.select(problem)


def _image(matrix: Array) -> Image:
    return image_of(matrix, _image_shape(matrix))


def as_image(matrix: Array) -> Array:
    """(..., C) as an image (1, H, 8, C), for which a 1×1 convolution is a matrix product; or (rows, C) where 8 does not
    divide the rows."""
    return matrix.reshape(_image_shape(matrix))


def _image_shape(matrix: Array) -> tuple[int, ...]:
    channels = matrix.shape[-1]
    rows = matrix.size // channels
    return (1, rows // 8, 8, channels) if rows % 8 == 0 else (rows, channels)
