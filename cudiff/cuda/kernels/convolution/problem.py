"""The problem of a convolution or a linear layer, by which a kernel is chosen, and the kernels' operands."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from cudiff.backend import Array
from cudiff.cuda.kernels.gemm.product import Epilogue, products
from cudiff.cuda.tensor_map import Form, form_of

Pair = tuple[int, int]

LONGEST = 2**15 - 1
"""Pixels of a side with its padding, at most, in the portable kernels, which pack two coordinates into a word."""

FPROP, DGRAD, WGRAD = "FPROP", "DGRAD", "WGRAD"  # also the kernels' PASS


class Fusion:
    """The fused ops that may be wanted together with a pass."""

    BIAS, EMB, ADDEND = "bias", "emb", "addend"  # the epilogue's
    RELU = "relu"  # after all that is added
    STATISTICS = "statistics"  # of fprop's result, for a norm: see `Tensor.statistics`
    SKIP = "skip"  # the result of a skip path is added to fprop's
    SECOND_SOURCE = "second source"  # the input's channels lie in two images
    UPSAMPLE = "upsample"  # the input is read as if upsampled: twice as high and wide, each pixel four times
    CAST = "cast"  # input and result are of two dtypes
    SUMS = "sums"  # Kind.SUMS of dgrad's result, for the bias gradient of the layer before
    NORM_BACKWARD = "norm backward"  # dgrad is multiplied by the slope of the SiLU before; PRODUCTS for the norm
    GATE, ACTIVATION, FACTOR = "gate", "activation", "factor"  # a linear layer's: see `Epilogue`


EPILOGUE = frozenset({Fusion.BIAS, Fusion.EMB, Fusion.ADDEND})
AFTERWARDS = frozenset({Fusion.GATE, Fusion.ACTIVATION, Fusion.FACTOR})  # each may be a launch of its own instead


class Image(NamedTuple):
    """shape (N, H, W, C). aligned: whether it is contiguous and starts at a multiple of 16 bytes. pitch: None, or if
    it has some channels of a contiguous image, how many that has; `aligned` is then said of that."""

    shape: tuple[int, ...]
    dtype: np.dtype
    aligned: bool = True
    pitch: int | None = None

    @property
    def rows_aligned(self) -> bool:
        """Whether every pixel starts at a multiple of 16 bytes."""
        return self.aligned and self.shape[-1] * self.dtype.itemsize % 16 == 0

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def form(self, box: tuple[int, ...], images: tuple[int, ...], **options: bool) -> Form:
        """That of its tensor map, if it is viewed as `images`, (N, H, W). box, options: see `form_of`."""
        pixel = (self.pitch or self.shape[3]) * self.dtype.itemsize
        strides = images[1] * images[2] * pixel, images[2] * pixel, pixel, self.dtype.itemsize
        return form_of((*images, self.shape[3]), self.dtype, box, strides=strides, **options)


class Weight(NamedTuple):
    """A weight or its gradient. shape: (K, R, S, C). rows_aligned: whether the channels of every tap start at a
    multiple of 16 bytes."""

    shape: tuple[int, ...]
    rows_aligned: bool = True
    contiguous: bool = True


class Problem(NamedTuple):
    """Everything that the choice of a kernel depends on.

    direction: FPROP, DGRAD or WGRAD. x and out: the input and the output; in dgrad the gradients of the output and of
    the input; in wgrad the input and the gradient of the output. weight: (K, R, S, C / groups). products: tensor-core
    products for one; 3 for exact float32. wanted: the fused ops. x2: the second source, the channels after x's; in
    dgrad its gradient, the channels after out's. skip: the one or two sources of a skip path. norm: the one or two
    sources of the norm before the input. silu: whether SiLU followed that norm.
    """

    direction: str
    x: Image
    weight: Weight
    out: Image
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    products: int = 1
    wanted: frozenset[str] = frozenset()
    x2: Image | None = None
    skip: tuple[Image, ...] = ()
    skip_weight: Weight | None = None
    norm: tuple[Image, ...] = ()
    silu: bool = True
    dilation: Pair = (1, 1)
    groups: int = 1

    @property
    def kernel(self) -> tuple[int, ...]:
        return self.weight.shape[1:3]


class Norm(NamedTuple):
    """The group norm before a convolution. silu: whether SiLU followed it. x, x2: its input, (N, H, W, C1) and None or
    (N, H, W, C2). weight, bias: (C,). scale, shift: (N, C) or None. mean, rstd: (N, G)."""

    silu: bool
    x: Array
    x2: Array | None
    weight: Array
    bias: Array
    scale: Array | None
    shift: Array | None
    mean: Array
    rstd: Array


class Skip(NamedTuple):
    """A skip path: a 1×1 convolution of x (N, H, W, C1) and x2, None or (N, H, W, C2). weight: (K, 1, 1, C1 + C2).
    bias: (K,), float32, or None."""

    x: Array
    x2: Array | None
    weight: Array
    bias: Array | None


class Operands(NamedTuple):
    """The arrays of a problem, named as there. wgrad overwrites `weight` or, with `add`, adds to it. A weight of one
    tap may be (K, C)."""

    x: Array
    weight: Array
    out: Array
    epilogue: Epilogue = Epilogue()
    x2: Array | None = None
    skip: Skip | None = None
    norm: Norm | None = None
    add: bool = False


def fields_of(direction: str, given: Operands, stride: Pair = (1, 1), padding: Pair = (0, 0), *wanted: str | bool,
              dilation: Pair = (1, 1), groups: int = 1) -> tuple:
    """The arguments of `problem_of` for these operands. wanted: fused ops besides those that the operands imply, or
    False in place of one."""
    x, weight, out, (bias, emb, addend, _, gate, activation, factor, _), x2, skip, norm, _ = given
    images = []
    for image in (x, out, x2, *(skip[:2] if skip else ()), *(norm[1:3] if norm else ())):
        if image is not None:  # a Tensor of what is no view is contiguous; flags take longer
            aligned = image.data.ptr % 16 == 0 and (image.base is None or image.flags.c_contiguous)
            image = image.shape, image.dtype, aligned
        images.append(image)
    return (
        direction, tuple(images), _weight(weight), stride, padding, products(x.dtype), wanted,
        (bias is not None, emb is not None, addend is not None, gate is not None, activation is not None,
         factor is not None),
        None if skip is None else _weight(skip.weight), None if norm is None else norm.silu, dilation, groups,
    )


def _weight(array: Array) -> tuple[tuple[int, ...], int, np.dtype, bool]:
    """What `weight_of` makes a Weight of. The channels of each tap are contiguous. Rows may be slices of longer ones.
    The stride of a single row may be anything, as DLPack gives it."""
    shape, pitch = array.shape, array.strides[0]
    if shape[0] == 1 and array.flags.c_contiguous:
        pitch = array.nbytes
    return shape, pitch, array.dtype, array.data.ptr % 16 == 0


def weight_of(shape: tuple[int, ...], pitch: int, dtype: np.dtype, aligned: bool) -> Weight:
    """A weight of this shape. pitch: bytes from one row to the next. aligned: whether it starts at a multiple of 16."""
    k, *taps, c = shape
    whole = pitch == math.prod(shape[1:]) * dtype.itemsize
    rows_aligned = aligned and c * dtype.itemsize % 16 == pitch % 16 == 0
    return Weight((k, *(taps or (1, 1)), c), rows_aligned, whole)


def problem_of(direction: str, images: tuple, weight: tuple, stride: Pair, padding: Pair, products: int,
               wanted: tuple[str | bool, ...], added: tuple[bool, ...], skip: tuple | None, silu: bool | None,
               dilation: Pair, groups: int) -> Problem:
    """The problem of operands with these `fields_of`."""
    x, out, x2, *sources = [one and Image(*one) for one in images]
    bias, emb, addend, gate, activation, factor = added
    implied = {
        Fusion.BIAS: bias, Fusion.EMB: emb, Fusion.ADDEND: addend, Fusion.GATE: gate, Fusion.ACTIVATION: activation,
        Fusion.FACTOR: factor, Fusion.SECOND_SOURCE: x2, Fusion.SKIP: skip, Fusion.NORM_BACKWARD: silu is not None,
        Fusion.CAST: x.dtype != out.dtype,
    }
    fusions = frozenset([name for name in (*wanted, *filter(implied.get, implied)) if isinstance(name, str)])
    skips = 2 if skip else 0  # sources of the skip path, then those of the norm
    return Problem(
        direction, x, weight_of(*weight), out, stride, padding, products, fusions, x2,
        tuple(filter(None, sources[:skips])), weight_of(*skip) if skip else None, tuple(filter(None, sources[skips:])),
        silu is None or silu, dilation, groups,
    )


def linear_problem_of(direction: str, images: tuple, *fields: Any) -> Problem:
    """The same of a linear layer, whose matrices (..., C) are described as images: see `image_shape`."""
    return problem_of(direction, tuple([one and (image_shape(one[0]), *one[1:]) for one in images]), *fields)


def image_shape(matrix: tuple[int, ...]) -> tuple[int, ...]:
    """The shape (1, H, 8, C) of the image of which a 1×1 convolution is the product of a matrix (..., C). It is
    (rows, C) where 8 does not divide the rows."""
    rows, channels = math.prod(matrix[:-1]), matrix[-1]
    return (1, rows // 8, 8, channels) if rows % 8 == 0 else (rows, channels)
