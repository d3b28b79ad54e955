"""Convolutions over channels-last images.

The three passes of one convolution serve both directions: `fprop` (out from x and weight), `dgrad` (dx from dout and
weight) and `wgrad` (dweight from x and dout). A transposed convolution is dgrad run forward.
"""

from __future__ import annotations

import threading

import numpy as np

from cudiff.backend import compute_dtype, float32
from cudiff.cuda.accumulate import gradient_target
from cudiff.cuda.kernels.convolution import table
from cudiff.cuda.kernels.convolution.problem import Operands, Pair
from cudiff.cuda.kernels.gemm.product import Epilogue, as_float32
from cudiff.cuda.launch import empty
from cudiff.function import Function
from cudiff.ops.cast import require_floats
from cudiff.ops.reduce import sum_array, sum_rows_cuda
from cudiff.tensor import Tensor
from cudiff.threads import cut, parallel_map

__all__ = ["conv2d", "conv_transpose2d"]

_PARTIAL_SUMS = 8  # of the weight's gradient: more would be more to add, fewer would leave cores without work
_thread = threading.local()


def _workspace(count: int, dtype: np.dtype) -> np.ndarray:
    """`count` elements of scratch memory that this thread reuses: fresh pages would cost as much as the copy."""
    held = getattr(_thread, "workspace", None)
    if held is None or held.nbytes < count * dtype.itemsize:
        held = _thread.workspace = np.empty(count * dtype.itemsize, np.uint8)
    return held[: count * dtype.itemsize].view(dtype)


def _canvas(x: np.ndarray, size: Pair, offset: Pair, step: Pair) -> np.ndarray:
    """Zeros (N, *size, C) with x's pixel (i, j) at offset + step·(i, j), where that lies inside."""
    if x.shape[1:3] == size and offset == (0, 0) and step == (1, 1):
        return x
    canvas = np.zeros((x.shape[0], *size, x.shape[3]), x.dtype)
    source, target = [slice(None)], [slice(None)]
    for length, room, start, pace in zip(x.shape[1:3], size, offset, step, strict=True):
        first = max(0, -(start // pace))
        last = min(length, (room - 1 - start) // pace + 1)
        source.append(slice(first, max(first, last)))
        target.append(slice(start + first * pace, start + max(first, last) * pace, pace))
    canvas[tuple(target)] = x[tuple(source)]
    return canvas


def _blocks(images: int, size: Pair, pixel_bytes: int) -> list[tuple[slice, slice]]:
    """The output (images, *size, K) as (images, rows), for which `cut` is given the bytes of the patches.

    Only parts of one image each are cut into rows too: an output's rows of several images do not lie side by side.
    """
    height, width = size
    parts = cut(images, height * width * pixel_bytes)
    rows = cut(height, width * pixel_bytes) if len(parts) == images else [slice(0, height)]
    return [(part, row) for part in parts for row in rows]


def _patches(x: np.ndarray, block: tuple[slice, slice], kernel: Pair, width: int, stride: Pair, offset: Pair,
             step: Pair) -> np.ndarray:
    """What lies under the kernel at each pixel of a block, one row (R·S·C) each; this thread's next overwrites it.

    x's pixel (i, j) lies at offset + step·(i, j), zeros elsewhere.
    """
    images, rows = block
    height, channels = rows.stop - rows.start, x.shape[3]
    room = ((height - 1) * stride[0] + kernel[0], (width - 1) * stride[1] + kernel[1])
    canvas = _canvas(x[images], room, (offset[0] - rows.start * stride[0], offset[1]), step)
    if kernel == stride == (1, 1):
        return canvas.reshape(-1, channels)
    n, i, j, c = canvas.strides
    shape = (canvas.shape[0], height, width, kernel[0], kernel[1] * channels)
    patches = np.lib.stride_tricks.as_strided(canvas, shape, (n, i * stride[0], j * stride[1], i, c), writeable=False)
    matrix = _workspace(patches.size, x.dtype).reshape(shape)
    np.copyto(matrix, patches)
    return matrix.reshape(-1, kernel[0] * kernel[1] * channels)


def fprop_numpy(x: np.ndarray, weight: np.ndarray, stride: Pair, padding: Pair) -> np.ndarray:
    """Convolution: x (N, H, W, C), weight (K, R, S, C) → (N, Ho, Wo, K)."""
    size = out_size(x.shape[1:3], weight.shape[1:3], stride, padding)
    return _correlate(x, weight, size, stride, padding, (1, 1))


def _correlate(x: np.ndarray, weight: np.ndarray, size: Pair, stride: Pair, offset: Pair, step: Pair) -> np.ndarray:
    """`size` products, `stride` apart, of the weight and x spread out by `offset` and `step`."""
    outputs, kernel = weight.shape[0], weight.shape[1:3]
    matrix = weight.reshape(outputs, -1).T
    out = np.empty((x.shape[0], *size, outputs), x.dtype)

    def multiply(block: tuple[slice, slice]) -> None:
        patches = _patches(x, block, kernel, size[1], stride, offset, step)
        np.matmul(patches, matrix, out=out[block].reshape(-1, outputs))

    parallel_map(multiply, _blocks(x.shape[0], size, matrix.shape[0] * x.itemsize))
    return out


def dgrad_numpy(dout: np.ndarray, weight: np.ndarray, size: Pair, stride: Pair, padding: Pair) -> np.ndarray:
    """Gradient of the input (N, *size, C): dout spread out by the stride, convolved with the flipped weight."""
    offset = (weight.shape[1] - 1 - padding[0], weight.shape[2] - 1 - padding[1])
    flipped = np.ascontiguousarray(weight[:, ::-1, ::-1].transpose(3, 1, 2, 0))
    return _correlate(dout, flipped, size, (1, 1), offset, stride)


def wgrad_numpy(x: np.ndarray, dout: np.ndarray, kernel: Pair, stride: Pair, padding: Pair) -> np.ndarray:
    """Gradient of the weight (K, R, S, C): sum over pixels of dout times the patch of x under the kernel."""
    outputs, length = dout.shape[3], kernel[0] * kernel[1] * x.shape[3]
    blocks = _blocks(dout.shape[0], dout.shape[1:3], length * x.itemsize)

    def products(start: int) -> np.ndarray:
        total = np.zeros((outputs, length), x.dtype)
        for block in blocks[start::_PARTIAL_SUMS]:
            patches = _patches(x, block, kernel, dout.shape[2], stride, padding, (1, 1))
            total += dout[block].reshape(-1, outputs).T @ patches
        return total

    partial = parallel_map(products, range(min(len(blocks), _PARTIAL_SUMS)))
    return np.sum(partial, axis=0).reshape(outputs, *kernel, x.shape[3])


def out_size(size: tuple[int, ...], kernel: tuple[int, ...], stride: Pair, padding: Pair) -> Pair:
    """(Ho, Wo) of a convolution."""
    height, width = (
        (length + 2 * p - r) // step + 1 for length, r, step, p in zip(size, kernel, stride, padding, strict=True)
    )
    return height, width


def _wide(*arrays: np.ndarray) -> list[np.ndarray]:
    """The arrays in the dtype that NumPy computes in, which the first one decides."""
    dtype = compute_dtype(arrays[0].dtype)
    return [array.astype(dtype, copy=False) for array in arrays]


class Conv2d(Function):
    """out[n,i,j,k] = bias[k] + sum of x[n, i·stride + r − padding, j·stride + s − padding, c] · weight[k, r, s, c]."""

    @staticmethod
    def forward_numpy(ctx, x, weight, bias, stride, padding):
        ctx.save(x, weight)
        ctx.stride, ctx.padding = stride, padding
        wide_x, wide_weight = _wide(x, weight)
        out = fprop_numpy(wide_x, wide_weight, stride, padding)
        if bias is not None:
            out += bias
        return out.astype(x.dtype, copy=False)

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        x, weight = ctx.saved
        wide_dout, wide_x, wide_weight = _wide(dout, x, weight)
        dx = dweight = dbias = None
        if needs[0]:
            dx = dgrad_numpy(wide_dout, wide_weight, x.shape[1:3], ctx.stride, ctx.padding).astype(x.dtype, copy=False)
        if needs[1]:
            dweight = wgrad_numpy(wide_x, wide_dout, weight.shape[1:3], ctx.stride, ctx.padding)
        if needs[2]:
            dbias = sum_array(wide_dout, (0, 1, 2))
        return dx, dweight, dbias

    @staticmethod
    def forward_cuda(ctx, x, weight, bias, stride, padding):
        ctx.save(x, weight)
        ctx.stride, ctx.padding = stride, padding
        size = out_size(x.shape[1:3], weight.shape[1:3], stride, padding)
        out = empty((x.shape[0], *size, weight.shape[0]), x.dtype)
        epilogue = Epilogue(bias=as_float32(bias))
        ctx.out_statistics = table.fprop(
            Operands(x, weight, out, epilogue, tf32=ctx.tf32), stride, padding, statistics=True
        )
        return out

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        x, weight = ctx.saved
        dx = dweight = dbias = None
        if needs[0]:
            dx, add = gradient_target(into[0], x.shape, x.dtype)
            epilogue = Epilogue(addend=dx if add else None)
            given = Operands(dout, weight, dx, epilogue, tf32=ctx.tf32)
            ctx.din_statistics[0] = table.dgrad(given, ctx.stride, ctx.padding, sums=True)
        if needs[1]:
            dweight, add = gradient_target(into[1], weight.shape, float32)
            table.wgrad(Operands(x, dweight, dout, add=add, tf32=ctx.tf32), ctx.stride, ctx.padding)
        if needs[2]:
            dbias = sum_rows_cuda(dout, into[2], ctx.dout_sums)
        return dx, dweight, dbias


class ConvTranspose2d(Function):
    """The transpose of the convolution whose weight this is: forward is its dgrad, dx is its fprop."""

    @staticmethod
    def forward_numpy(ctx, x, weight, bias, size, stride, padding):
        ctx.save(x, weight)
        ctx.stride, ctx.padding = stride, padding
        wide_x, wide_weight = _wide(x, weight)
        out = dgrad_numpy(wide_x, wide_weight, size, stride, padding)
        if bias is not None:
            out += bias
        return out.astype(x.dtype, copy=False)

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        x, weight = ctx.saved
        wide_dout, wide_x, wide_weight = _wide(dout, x, weight)
        dx = dweight = dbias = None
        if needs[0]:
            dx = fprop_numpy(wide_dout, wide_weight, ctx.stride, ctx.padding).astype(x.dtype, copy=False)
        if needs[1]:
            dweight = wgrad_numpy(wide_dout, wide_x, weight.shape[1:3], ctx.stride, ctx.padding)
        if needs[2]:
            dbias = sum_array(wide_dout, (0, 1, 2))
        return dx, dweight, dbias

    @staticmethod
    def forward_cuda(ctx, x, weight, bias, size, stride, padding):
        ctx.save(x, weight)
        ctx.stride, ctx.padding = stride, padding
        out = empty((x.shape[0], *size, weight.shape[3]), x.dtype)
        table.dgrad(Operands(x, weight, out, Epilogue(bias=as_float32(bias)), tf32=ctx.tf32), stride, padding)
        return out

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        x, weight = ctx.saved
        dx = dweight = dbias = None
        if needs[0]:
            dx, add = gradient_target(into[0], x.shape, x.dtype)
            epilogue = Epilogue(addend=dx if add else None)
            table.fprop(Operands(dout, weight, dx, epilogue, tf32=ctx.tf32), ctx.stride, ctx.padding)
        if needs[1]:
            dweight, add = gradient_target(into[1], weight.shape, float32)
            table.wgrad(Operands(dout, dweight, x, add=add, tf32=ctx.tf32), ctx.stride, ctx.padding)
        if needs[2]:
            dbias = sum_rows_cuda(dout, into[2], ctx.dout_sums)
        return dx, dweight, dbias


def conv2d(x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: int | Pair = 1,
           padding: int | Pair = 0) -> Tensor:
    """Convolution of x (N, H, W, C) with weight (K, R, S, C), plus bias (K,) → (N, Ho, Wo, K), in x's dtype.

    Ho = (H + 2·padding − R) // stride + 1. Sums are in float32 (float64 for float64); dweight and dbias too; see
    `allow_tf32`. Raises ValueError where shapes do not agree, for a stride below 1 or a padding below 0, and on a GPU
    for an image of more than 32,000 pixels a side that its fastest kernels do not take.
    """
    stride, padding = _steps("conv2d", stride, padding)
    if x.ndim != 4 or weight.ndim != 4 or x.shape[3] != weight.shape[3]:
        raise ValueError(f"conv2d: x of shape {x.shape} (N, H, W, C) does not fit weight {weight.shape} (K, R, S, C)")
    if min(out_size(x.shape[1:3], weight.shape[1:3], stride, padding)) < 1:
        raise ValueError(f"conv2d: x of shape {x.shape} padded by {padding} is smaller than the kernel {weight.shape}")
    check_bias("conv2d", None if bias is None else bias.shape, weight.shape[0])
    require_floats("conv2d", x, weight, bias)
    return Conv2d.apply(x, weight, bias, stride=stride, padding=padding)


def conv_transpose2d(x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: int | Pair = 1,
                     padding: int | Pair = 0) -> Tensor:
    """Transposed convolution of x (N, H, W, C) with weight (C, R, S, K), plus bias (K,) → (N, Ho, Wo, K).

    Ho = (H − 1)·stride − 2·padding + R. The weight is that of the convolution from K to C channels whose input
    gradient this is. Otherwise as `conv2d`.
    """
    stride, padding = _steps("conv_transpose2d", stride, padding)
    if x.ndim != 4 or weight.ndim != 4 or x.shape[3] != weight.shape[0]:
        raise ValueError(f"conv_transpose2d: x of shape {x.shape} does not fit weight {weight.shape} (C, R, S, K)")
    size = tuple(
        (length - 1) * step - 2 * p + r
        for length, step, p, r in zip(x.shape[1:3], stride, padding, weight.shape[1:3], strict=True)
    )
    if min(size) < 1:
        raise ValueError(f"conv_transpose2d: x of shape {x.shape} leaves nothing inside the padding {padding}")
    check_bias("conv_transpose2d", None if bias is None else bias.shape, weight.shape[3])
    require_floats("conv_transpose2d", x, weight, bias)
    return ConvTranspose2d.apply(x, weight, bias, size=size, stride=stride, padding=padding)


def pair(value: int | Pair) -> Pair:
    return (value, value) if isinstance(value, int) else value


def _steps(name: str, stride: int | Pair, padding: int | Pair) -> tuple[Pair, Pair]:
    """Both as pairs. Raises ValueError for what is none."""
    pairs = pair(stride), pair(padding)
    for what, value, least in zip(("stride", "padding"), pairs, (1, 0), strict=True):
        if not (isinstance(value, tuple) and len(value) == 2 and all(isinstance(e, int) and e >= least for e in value)):
            raise ValueError(f"{name}: {what} {value} must be a whole number of at least {least}, or a tuple of two")
    return pairs


def check_bias(name: str, shape: tuple[int, ...] | None, channels: int) -> None:
    if shape is not None and shape != (channels,):
        raise ValueError(f"{name}: the bias has shape {shape}, not {(channels,)}")
