"""Convolutions 3x3 or 1x1 between an image of few channels and one of many, a U-Net's first and last; `conv2d` chooses.

A tile of the matrix product would be nearly empty along the few channels: here they lie together with all taps.
"""

from __future__ import annotations

import numpy as np

from cudiff.backend import Array, float32, is_low
from cudiff.cuda.module import blocks, empty, launch
from cudiff.cuda.sums import add_parts
from cudiff.ops.conv2d_sm90 import Norm
from cudiff.ops.elementwise import relu_cuda
from cudiff.ops.gemm import MULTIPROCESSORS, Epilogue, aligned

MOST = 7  # channels of the thin image: up to nine times as many are the depth of a product
SHARED_BYTES = 80 << 10  # of a block: two fit on a multiprocessor of an A100 or of Hopper, one on any
THREADS = 256


def suits(x: Array, weight: Array, out: Array, stride: tuple[int, int], padding: tuple[int, int],
          epilogue: Epilogue | None = None) -> bool:
    """Whether the convolution of x (N, H, W, C) with weight (K, R, R, C) to out (N, H, W, K) is one of these.

    The same for gradients in the place of x, weight and out.
    """
    thin, wide = _sides(x, out)
    taps = weight.shape[1]
    return (
        is_low(thin.dtype)
        and thin.dtype == wide.dtype
        and weight.shape[1:3] in ((3, 3), (1, 1))
        and stride == (1, 1)
        and padding == (taps // 2, taps // 2)
        and thin.shape[3] <= MOST
        and wide.shape[3] % 32 == 0
        and wide.shape[3] <= 128
        and products_bytes(1, x.shape[2], thin.shape[3], taps) <= SHARED_BYTES
        and aligned(wide)
        and 0 < wide.size < 2**31
        and weight.flags.c_contiguous
        and (epilogue is None or (epilogue.addend is None and (epilogue.emb is None or wide is out)))
    )


def suits_norm(dz: Array, norm: Norm) -> bool:
    """Whether `fprop`, where it `suits`, makes the gradient dz of that norm's output before SiLU: of wide images and of
    one source."""
    return dz.shape[3] > MOST and norm.silu and norm.x2 is None and norm.x.flags.c_contiguous and aligned(norm.x)


def _sides(x: Array, out: Array) -> tuple[Array, Array]:
    """The thin image and the wide one."""
    return (x, out) if x.shape[3] < out.shape[3] else (out, x)


def rows_bytes(rows: int, width: int, thin: int, taps: int) -> int:
    """Thin's rows under a tile of so many; `taps` is R."""
    return 2 * (rows + taps - 1) * (width + taps - 1) * thin


def products_bytes(rows: int, width: int, thin: int, taps: int) -> int:
    """Products of a tile of so many rows, and of those around it, with all taps."""
    return 4 * (rows + taps - 1) * width * (taps**2 * thin | 1)


def sums_bytes(thin: int, columns: int, taps: int) -> int:
    """Sums of the weight's gradient, those of half of the warps."""
    return THREADS // 64 * blocks(taps**2 * thin, 16) * 16 * columns * 4


def fprop(x: Array, weight: Array, out: Array, epilogue: Epilogue, moments: int = 0, transposed: bool = False,
          relu: bool = False, norm: Norm | None = None) -> Array | None:
    """Convolution of x, written to out; or under `transposed`, gradient x of an output, that of the input to out.

    Then ReLU, if `relu`. Returns the sums of a wide out, and with 2 moments those of squares: float32
    (N, tiles, K[, 2]). With `norm`, as in `conv2d.dgrad_cuda`, the second moment is of out times the norm's input.
    """
    n, height, width, channels = x.shape
    outputs = out.shape[3]
    thin, taps = min(channels, outputs), weight.shape[1]
    weight = weight if weight.dtype == x.dtype else weight.astype(x.dtype)
    at = _weight(weight.shape[3], taps, thin_last=(thin == channels) != transposed, flipped=transposed)
    if thin == outputs:
        rows = max(r for r in range(1, _rows(n, height) + 1) if products_bytes(r, width, thin, taps) <= SHARED_BYTES)
        launch(
            "conv2d_thin", "gather", n * blocks(height, rows), THREADS,
            (x, weight, epilogue.bias, out, at, height, width, rows), products_bytes(rows, width, thin, taps),
            T=x.dtype, R=taps, THIN=thin, BN=channels, MOMENTS=0, NORM=0,
        )
        if relu:
            relu_cuda(out, out)
        return None
    rows, columns = _rows(n, height), _columns(outputs)
    partials = empty((n, blocks(height, rows), outputs, 2)[: 2 + moments], float32) if moments else None
    source, affine, groups = (None, (None,) * 6, 1) if norm is None else (norm.x, norm[3:], norm.mean.shape[1])
    launch(
        "conv2d_thin", "spread", (n * blocks(height, rows), outputs // columns), THREADS,
        (x, weight, epilogue.bias, epilogue.emb, relu, out, partials, source, *affine, at, height, width, outputs, rows,
         groups),
        rows_bytes(rows, width, thin, taps), T=x.dtype, R=taps, THIN=thin, BN=columns, MOMENTS=moments,
        NORM=int(norm is not None),
    )
    return partials


def wgrad(x: Array, dout: Array, dweight: Array, add: bool) -> None:
    """Gradient of the weight, written or added to dweight (K, R, R, C), float32."""
    thin, wide = _sides(x, dout)
    taps = dweight.shape[1]
    n, height, width, channels = wide.shape
    rows, columns = _rows(n, height), _columns(channels)
    tiles = n * blocks(height, rows)
    partials = empty((tiles, dweight.shape[0], dweight.size // dweight.shape[0]), float32)
    shared = max(rows_bytes(rows, width, thin.shape[3], taps), sums_bytes(thin.shape[3], columns, taps))
    at = _weight(dweight.shape[3], taps, thin_last=thin is x, flipped=thin is dout)
    launch(
        "conv2d_thin", "wgrad", (tiles, channels // columns), THREADS,
        (thin, wide, partials, at, height, width, channels, rows), shared,
        T=x.dtype, R=taps, THIN=thin.shape[3], BN=columns, MOMENTS=0, NORM=0,
    )
    add_parts(partials, dweight, add)


def _rows(n: int, height: int) -> int:
    """Rows of an image that a block takes: two blocks come to a multiprocessor, which all run at once."""
    return blocks(height, max(1, 2 * MULTIPROCESSORS // n))


def _columns(channels: int) -> int:
    return 64 if channels % 64 == 0 else 32


_WEIGHT = np.dtype([(name, np.int32) for name in ("first", "tap", "thin", "wide")])


def _weight(channels: int, taps: int, thin_last: bool, flipped: bool) -> np.ndarray:
    """Where the kernel finds a weight (K, R, R, C), of which C is thin or K; `flipped` turns the taps around."""
    first, tap = ((taps**2 - 1) * channels, -channels) if flipped else (0, channels)
    thin, wide = (1, taps**2 * channels) if thin_last else (taps**2 * channels, 1)
    return np.array((first, tap, thin, wide), _WEIGHT)
