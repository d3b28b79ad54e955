"""Convolutions 3x3 between an image of few channels and one of many, the first and last of a U-Net; `conv2d` chooses.

A tile of the matrix product would be nearly empty along the few channels: here they lie together with the nine taps.
"""

from __future__ import annotations

import numpy as np

from cudiff.backend import Array, float32, is_low
from cudiff.cuda.module import blocks, empty, launch
from cudiff.cuda.sums import add_parts
from cudiff.ops.gemm import MULTIPROCESSORS, Epilogue, aligned

MOST = 7  # channels of the thin image: nine times as many are the depth of a product
SHARED_BYTES = 80 << 10  # of a block: two fit on a multiprocessor of an A100 or of Hopper, one on any
THREADS = 256


def suits(x: Array, weight: Array, out: Array, stride: tuple[int, int], padding: tuple[int, int],
          epilogue: Epilogue | None = None) -> bool:
    """Whether the convolution of x (N, H, W, C) with weight (K, 3, 3, C) to out (N, H, W, K) is one of these.

    The same for gradients in the place of x, weight and out.
    """
    thin, wide = _sides(x, out)
    return (
        is_low(thin.dtype)
        and thin.dtype == wide.dtype
        and weight.shape[1:3] == (3, 3)
        and stride == padding == (1, 1)
        and thin.shape[3] <= MOST
        and wide.shape[3] % 32 == 0
        and wide.shape[3] <= 128
        and products_bytes(1, x.shape[2], thin.shape[3]) <= SHARED_BYTES
        and aligned(wide)
        and 0 < wide.size < 2**31
        and weight.flags.c_contiguous
        and (epilogue is None or epilogue.emb is epilogue.addend is None)
    )


def _sides(x: Array, out: Array) -> tuple[Array, Array]:
    """The thin image and the wide one."""
    return (x, out) if x.shape[3] < out.shape[3] else (out, x)


def rows_bytes(rows: int, width: int, thin: int) -> int:
    """Thin's rows under a tile of so many."""
    return 2 * (rows + 2) * (width + 2) * thin


def products_bytes(rows: int, width: int, thin: int) -> int:
    """Products of a tile of so many rows, and of the two around it, with all taps."""
    return 4 * (rows + 2) * width * (9 * thin | 1)


def sums_bytes(thin: int, columns: int) -> int:
    """Sums of the weight's gradient, those of half of the warps."""
    return THREADS // 64 * blocks(9 * thin, 16) * 16 * columns * 4


def fprop(x: Array, weight: Array, out: Array, epilogue: Epilogue, statistics: bool = False,
          transposed: bool = False) -> Array | None:
    """Convolution of x, written to out; or under `transposed`, gradient x of an output, that of the input to out.

    Returns the sums and sums of squares of out, float32 (N, tiles, K, 2), where `statistics` asks for those of a wide
    one.
    """
    n, height, width, channels = x.shape
    outputs = out.shape[3]
    thin = min(channels, outputs)
    weight = weight if weight.dtype == x.dtype else weight.astype(x.dtype)
    at = _weight(weight.shape[3], thin_last=(thin == channels) != transposed, flipped=transposed)
    if thin == outputs:
        rows = max(r for r in range(1, _rows(n, height) + 1) if products_bytes(r, width, thin) <= SHARED_BYTES)
        launch(
            "conv2d_thin", "gather", n * blocks(height, rows), THREADS,
            (x, weight, epilogue.bias, out, at, height, width, rows), products_bytes(rows, width, thin),
            T=x.dtype, THIN=thin, BN=channels, STATISTICS=0,
        )
        return None
    rows, columns = _rows(n, height), _columns(outputs)
    partials = empty((n, blocks(height, rows), outputs, 2), float32) if statistics else None
    launch(
        "conv2d_thin", "spread", (n * blocks(height, rows), outputs // columns), THREADS,
        (x, weight, epilogue.bias, out, partials, at, height, width, outputs, rows), rows_bytes(rows, width, thin),
        T=x.dtype, THIN=thin, BN=columns, STATISTICS=int(statistics),
    )
    return partials


def wgrad(x: Array, dout: Array, dweight: Array, add: bool) -> None:
    """Gradient of the weight, written or added to dweight (K, 3, 3, C), float32."""
    thin, wide = _sides(x, dout)
    n, height, width, channels = wide.shape
    rows, columns = _rows(n, height), _columns(channels)
    tiles = n * blocks(height, rows)
    partials = empty((tiles, dweight.shape[0], dweight.size // dweight.shape[0]), float32)
    shared = max(rows_bytes(rows, width, thin.shape[3]), sums_bytes(thin.shape[3], columns))
    at = _weight(dweight.shape[3], thin_last=thin is x, flipped=thin is dout)
    launch(
        "conv2d_thin", "wgrad", (tiles, channels // columns), THREADS,
        (thin, wide, partials, at, height, width, channels, rows), shared,
        T=x.dtype, THIN=thin.shape[3], BN=columns, STATISTICS=0,
    )
    add_parts(partials, dweight, add)


def _rows(n: int, height: int) -> int:
    """Rows of an image that a block takes: two blocks come to a multiprocessor, which all run at once."""
    return blocks(height, max(1, 2 * MULTIPROCESSORS // n))


def _columns(channels: int) -> int:
    return 64 if channels % 64 == 0 else 32


_WEIGHT = np.dtype([(name, np.int32) for name in ("first", "tap", "thin", "wide")])


def _weight(channels: int, thin_last: bool, flipped: bool) -> np.ndarray:
    """Where the kernel finds a weight (K, 3, 3, C), of which C is thin or K; `flipped` turns the taps around."""
    first, tap = (8 * channels, -channels) if flipped else (0, channels)
    thin, wide = (1, 9 * channels) if thin_last else (9 * channels, 1)
    return np.array((first, tap, thin, wide), _WEIGHT)
