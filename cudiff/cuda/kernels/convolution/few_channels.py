"""Convolutions 3x3 or 1x1 between an image of few channels and one of many, a U-Net's first and last; `conv2d` chooses.

A tile of the matrix product would be nearly empty along the few channels: here they lie together with all taps. The
image of many is of 16 bits; that of few too, or float32, as a U-Net is given and returns it: a cast would be a launch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from cudiff.backend import Array, float32, is_low
from cudiff.cuda.device import MULTIPROCESSORS
from cudiff.cuda.kernels.convolution.sm90 import Norm
from cudiff.cuda.kernels.elementwise import relu_forward
from cudiff.cuda.kernels.gemm.product import Epilogue
from cudiff.cuda.launch import aligned, blocks, empty, launch
from cudiff.cuda.sums import add_parts

MOST = 7  # channels of the thin image: up to nine times as many are the depth of a product
SHARED_BYTES = 80 << 10  # of a block: two fit on a multiprocessor of an A100 or of Hopper, one on any
THREADS = 256


class Image(NamedTuple):
    """Of an image still to be made: what `suits_images` asks."""

    shape: tuple[int, ...]
    dtype: np.dtype


def suits(x: Array, weight: Array, out: Array, stride: tuple[int, int], padding: tuple[int, int],
          epilogue: Epilogue | None = None) -> bool:
    """Whether the convolution of x (N, H, W, C) with weight (K, R, R, C) to out (N, H, W, K) is one of these.

    The same for gradients in the place of x, weight and out.
    """
    _, wide = _sides(x, out)
    return (
        suits_images(x, out, weight.shape[1:3])
        and stride == (1, 1)
        and padding == (weight.shape[1] // 2, weight.shape[1] // 2)
        and aligned(wide)
        and weight.flags.c_contiguous
        and (epilogue is None or (epilogue.addend is None and (epilogue.emb is None or wide is out)))
    )


def suits_images(x: Array | Image, out: Array | Image, kernel: tuple[int, ...]) -> bool:
    """What `suits` asks of the shapes and dtypes of x and out, and of (R, R)."""
    thin, wide = _sides(x, out)
    return (
        is_low(wide.dtype)
        and thin.dtype in (wide.dtype, float32)
        and kernel in ((3, 3), (1, 1))
        and 0 < thin.shape[3] <= MOST
        and wide.shape[3] % 32 == 0
        and wide.shape[3] <= 128
        and products_bytes(1, wide.shape[2], thin.shape[3], kernel[0]) <= SHARED_BYTES
        and 0 < math.prod(wide.shape) < 2**31
    )


def suits_norm(dz: Array, norm: Norm) -> bool:
    """Whether `fprop`, where it `suits`, makes the gradient dz of that norm's output before SiLU: of wide images and of
    one source."""
    return dz.shape[3] > MOST and norm.silu and norm.x2 is None and norm.x.flags.c_contiguous and aligned(norm.x)


def _sides(x: Array | Image, out: Array | Image) -> tuple[Array, Array]:
    """The thin image and the wide one."""
    return (x, out) if x.shape[3] < out.shape[3] else (out, x)


def copies_bytes(rows: int, width: int, thin: int, taps: int) -> int:
    """Thin's rows under a tile of so many, in pairs of 16 bits, as often as spread has them; `taps` is R."""
    return 4 * (rows + taps - 1) * blocks((width + taps - 1) * thin, 2) * (1 + thin % 2)


def line_pitch(width: int) -> int:
    """Numbers from one of wgrad's lines to the next, which begin 8 of the 32 banks apart."""
    return 2 * (32 * (blocks(blocks(width, 4) * 2 + 24, 32) - 1) + 8)


def lines_bytes(rows: int, width: int, thin: int, taps: int) -> int:
    """Lines of all numbers of the patches of a tile of so many rows."""
    return 2 * (rows + taps - 1) * taps * thin * line_pitch(width)


def products_bytes(rows: int, width: int, thin: int, taps: int) -> int:
    """Products of a tile of so many rows, and of those around it, with all taps."""
    return 4 * (rows + taps - 1) * width * (taps**2 * thin | 1)


def sums_bytes(thin: int, columns: int, taps: int) -> int:
    """Sums of the weight's gradient: those of half of the warps, or one in all."""
    depth = taps**2 * thin
    return 4 * max(THREADS // 64 * blocks(depth, 16) * 16 * 32, depth * (columns + 1))


def fprop(x: Array, weight: Array, out: Array, epilogue: Epilogue, moments: int = 0, transposed: bool = False,
          relu: bool = False, norm: Norm | None = None) -> Array | None:
    """Convolution of x, written to out; or under `transposed`, gradient x of an output, that of the input to out.

    Then ReLU, if `relu`. Returns the sums of a wide out, and with 2 moments those of squares: float32
    (N, tiles, K[, 2]). With `norm`, as in `conv2d.dgrad_cuda`, the second moment is of out times the norm's input.
    """
    n, height, width, channels = x.shape
    outputs = out.shape[3]
    thin, taps = min(channels, outputs), weight.shape[1]
    few, many = _sides(x, out)
    weight = weight if weight.dtype == many.dtype else weight.astype(many.dtype)
    constants = {"T": many.dtype, "THIN_T": few.dtype, "R": taps, "THIN": thin}
    at = _weight(weight.shape[3], taps, thin_last=(thin == channels) != transposed, flipped=transposed)
    if thin == outputs:
        rows, shared = _rows(n, height, lambda rows: products_bytes(rows, width, thin, taps))
        launch(
            "conv2d_thin", "gather", n * blocks(height, rows), THREADS,
            (x, weight, epilogue.bias, out, at, height, width, rows), shared,
            **constants, BN=channels, MOMENTS=0, NORM=0,
        )
        if relu:
            relu_forward(out, out)
        return None
    rows, shared = _rows(n, height, lambda rows: copies_bytes(rows, width, thin, taps))
    columns = _columns(outputs)
    partials = empty((n, blocks(height, rows), outputs, 2)[: 2 + moments], float32) if moments else None
    source, affine, groups = (None, (None,) * 6, 1) if norm is None else (norm.x, norm[3:], norm.mean.shape[1])
    launch(
        "conv2d_thin", "spread", (n * blocks(height, rows), outputs // columns), THREADS,
        (x, weight, epilogue.bias, epilogue.emb, relu, out, partials, source, *affine, at, height, width, outputs, rows,
         groups),
        shared, **constants, BN=columns, MOMENTS=moments, NORM=int(norm is not None),
    )
    return partials


def wgrad(x: Array, dout: Array, dweight: Array, add: bool) -> None:
    """Gradient of the weight, written or added to dweight (K, R, R, C), float32."""
    thin, wide = _sides(x, dout)
    taps = dweight.shape[1]
    n, height, width, channels = wide.shape
    rows, shared = _rows(n, height, lambda rows: lines_bytes(rows, width, thin.shape[3], taps))
    columns = _columns(channels)
    tiles = n * blocks(height, rows)
    partials = empty((tiles, dweight.shape[0], dweight.size // dweight.shape[0]), float32)
    shared = max(shared, sums_bytes(thin.shape[3], columns, taps))
    at = _weight(dweight.shape[3], taps, thin_last=thin is x, flipped=thin is dout)
    launch(
        "conv2d_thin", "wgrad", (tiles, channels // columns), THREADS,
        (thin, wide, partials, at, height, width, channels, rows, line_pitch(width)), shared,
        T=wide.dtype, THIN_T=thin.dtype, R=taps, THIN=thin.shape[3], BN=columns, MOMENTS=0, NORM=0,
    )
    add_parts(partials, dweight, add)


def _rows(n: int, height: int, bytes_of: Callable[[int], int]) -> tuple[int, int]:
    """Rows of an image that a block takes, and their bytes of shared memory: two blocks come to a multiprocessor, which
    all run at once (wgrad's of 6 and 7 channels one after the other), but where that would be more rows than memory has
    room for."""
    most = blocks(height, max(1, 2 * MULTIPROCESSORS // n))
    rows = next(rows for rows in range(most, 0, -1) if rows == 1 or bytes_of(rows) <= SHARED_BYTES)
    return rows, bytes_of(rows)


def _columns(channels: int) -> int:
    return 64 if channels % 64 == 0 else 32


_WEIGHT = np.dtype([(name, np.int32) for name in ("first", "tap", "thin", "wide")])


def _weight(channels: int, taps: int, thin_last: bool, flipped: bool) -> np.ndarray:
    """Where the kernel finds a weight (K, R, R, C), of which C is thin or K; `flipped` turns the taps around."""
    first, tap = ((taps**2 - 1) * channels, -channels) if flipped else (0, channels)
    thin, wide = (1, taps**2 * channels) if thin_last else (taps**2 * channels, 1)
    return np.array((first, tap, thin, wide), _WEIGHT)
