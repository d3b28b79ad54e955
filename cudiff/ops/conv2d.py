"""Convolutions over channels-last images.

The three passes of one convolution serve both directions: `fprop` (out from x and weight), `dgrad` (dx from dout and
weight) and `wgrad` (dweight from x and dout). A transposed convolution is dgrad run forward.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np

from cudiff.backend import Array, compute_dtype, float32
from cudiff.cuda.module import empty, gradient_target
from cudiff.ops.gemm import Epilogue, aligned, product
from cudiff.ops.matmul import as_float32, linear_cuda, linear_dweight_cuda, linear_dx_cuda
from cudiff.ops.reduce import sum_array
from cudiff.tensor import Function, Tensor

Pair = tuple[int, int]

_BLOCK_BYTES = 4 << 20
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


def _blocks(canvas: np.ndarray, kernel: Pair, out_size: Pair, stride: Pair) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield (images, matrix): the patches under the kernel of a few images, one row (R·S·C) for each output pixel.

    A block is as large as fits the cache: 130 GFLOP/s on 2 cores (64 channels at 16 px) against 100 for all at once.
    The matrix is overwritten by the next block.
    """
    (height, width), (rows, columns), channels = out_size, kernel, canvas.shape[3]
    n, y, x, c = canvas.strides
    shape = (canvas.shape[0], height, width, rows, columns * channels)
    patches = np.lib.stride_tricks.as_strided(canvas, shape, (n, y * stride[0], x * stride[1], y, c), writeable=False)
    length = rows * columns * channels
    if kernel == stride == (1, 1):
        yield slice(0, canvas.shape[0]), canvas.reshape(-1, channels)
        return
    per_image = height * width * length
    images = max(1, min(canvas.shape[0], _BLOCK_BYTES // (per_image * canvas.itemsize)))
    buffer = _workspace(images * per_image, canvas.dtype)
    for start in range(0, canvas.shape[0], images):
        part = patches[start : start + images]
        block = buffer[: part.size].reshape(part.shape)
        np.copyto(block, part)
        yield slice(start, start + images), block.reshape(-1, length)


def fprop_numpy(x: np.ndarray, weight: np.ndarray, stride: Pair, padding: Pair) -> np.ndarray:
    """Convolution: x (N, H, W, C), weight (K, R, S, C) → (N, Ho, Wo, K)."""
    kernel = weight.shape[1:3]
    size = out_size(x.shape[1:3], kernel, stride, padding)
    room = tuple((o - 1) * step + r for o, step, r in zip(size, stride, kernel, strict=True))
    return _correlate(_canvas(x, room, padding, (1, 1)), weight, size, stride)


def _correlate(canvas: np.ndarray, weight: np.ndarray, size: Pair, stride: Pair) -> np.ndarray:
    out = np.empty((canvas.shape[0], *size, weight.shape[0]), canvas.dtype)
    matrix = weight.reshape(weight.shape[0], -1).T
    for images, patches in _blocks(canvas, weight.shape[1:3], size, stride):
        np.matmul(patches, matrix, out=out[images].reshape(-1, weight.shape[0]))
    return out


def dgrad_numpy(dout: np.ndarray, weight: np.ndarray, size: Pair, stride: Pair, padding: Pair) -> np.ndarray:
    """Gradient of the input (N, *size, C): dout spread out by the stride, convolved with the flipped weight."""
    kernel = weight.shape[1:3]
    room = tuple(length + r - 1 for length, r in zip(size, kernel, strict=True))
    offset = tuple(r - 1 - p for r, p in zip(kernel, padding, strict=True))
    flipped = np.ascontiguousarray(weight[:, ::-1, ::-1].transpose(3, 1, 2, 0))
    return _correlate(_canvas(dout, room, offset, stride), flipped, size, (1, 1))


def wgrad_numpy(x: np.ndarray, dout: np.ndarray, kernel: Pair, stride: Pair, padding: Pair) -> np.ndarray:
    """Gradient of the weight (K, R, S, C): sum over pixels of dout times the patch of x under the kernel."""
    size, outputs = dout.shape[1:3], dout.shape[3]
    room = tuple((o - 1) * step + r for o, step, r in zip(size, stride, kernel, strict=True))
    dweight = np.zeros((outputs, kernel[0] * kernel[1] * x.shape[3]), x.dtype)
    for images, patches in _blocks(_canvas(x, room, padding, (1, 1)), kernel, size, stride):
        dweight += dout[images].reshape(-1, outputs).T @ patches
    return dweight.reshape(outputs, *kernel, x.shape[3])


def out_size(size: tuple[int, ...], kernel: tuple[int, ...], stride: Pair, padding: Pair) -> Pair:
    """(Ho, Wo) of a convolution."""
    height, width = (
        (length + 2 * p - r) // step + 1 for length, r, step, p in zip(size, kernel, stride, padding, strict=True)
    )
    return height, width


def fprop_cuda(x: Array, weight: Array, out: Array, stride: Pair, padding: Pair, epilogue: Epilogue,
               tf32: bool) -> Array:
    """Convolution, written to out (N, Ho, Wo, K), and what the epilogue adds."""
    epilogue = epilogue._replace(rows_per_image=out.shape[1] * out.shape[2])
    if _is_linear(weight.shape[1:3], stride, padding):
        linear_cuda(x, weight.reshape(weight.shape[0], -1), epilogue, tf32, out.reshape(1, -1, out.shape[3]))
    else:
        _launch("FPROP", x, weight, out, (x.shape, weight.shape, out.shape), stride, padding, epilogue, tf32)
    return out


def dgrad_cuda(dout: Array, weight: Array, dx: Array, stride: Pair, padding: Pair, epilogue: Epilogue,
               tf32: bool) -> Array:
    """Gradient of the input, written to dx (N, H, W, C), and what the epilogue adds."""
    epilogue = epilogue._replace(rows_per_image=dx.shape[1] * dx.shape[2])
    if _is_linear(weight.shape[1:3], stride, padding):
        linear_dx_cuda(dout, weight.reshape(weight.shape[0], -1), dx.reshape(1, -1, dx.shape[3]), epilogue, tf32)
    else:
        _launch("DGRAD", dout, weight, dx, (dx.shape, weight.shape, dout.shape), stride, padding, epilogue, tf32)
    return dx


def wgrad_cuda(x: Array, dout: Array, dweight: Array, stride: Pair, padding: Pair, add: bool, tf32: bool) -> Array:
    """Gradient of the weight, written or added to dweight (K, R, S, C), float32."""
    if _is_linear(dweight.shape[1:3], stride, padding):
        linear_dweight_cuda(x, dout, dweight.reshape(dweight.shape[0], -1), add, tf32)
    else:
        epilogue = Epilogue(addend=dweight if add else None)
        _launch("WGRAD", dout, x, dweight, (x.shape, dweight.shape, dout.shape), stride, padding, epilogue, tf32)
    return dweight


def _is_linear(kernel: Pair, stride: Pair, padding: Pair) -> bool:
    return kernel == stride == (1, 1) and padding == (0, 0)


def _launch(direction: str, a: Array, b: Array, out: Array, shapes: tuple, stride: Pair, padding: Pair,
            epilogue: Epilogue, tf32: bool) -> None:
    """One pass of kernels/conv2d.cu; shapes = those of x, weight and out."""
    (n, height, width, c), (k, *kernel, _), (_, *size, _) = shapes
    b = b if b.dtype == a.dtype else b.astype(a.dtype)
    taps, pixels = kernel[0] * kernel[1], size[0] * size[1]
    rows, columns, depth, chunk_a, chunk_b = {
        "FPROP": (n * pixels, k, taps * c, c, taps * c),
        "DGRAD": (n * height * width, c, taps * k, k, c),
        "WGRAD": (k, taps * c, n * pixels, k, c),
    }[direction]
    product(
        "conv2d", a, b, out, columns, (n, height, width, c, *size, k, *kernel, *stride, *padding),
        (rows, columns, depth, 1), epilogue, tf32, PASS=direction, A_VEC=aligned(a, chunk_a),
        B_VEC=aligned(b, chunk_b), DILATED=direction == "DGRAD" and stride != (1, 1),
    )


def _wide(*arrays: np.ndarray) -> list[np.ndarray]:
    """The arrays in the dtype that NumPy computes in, which the first one decides."""
    dtype = compute_dtype(arrays[0].dtype)
    return [array.astype(dtype, copy=False) for array in arrays]


class Conv2d(Function):
    """out[n,i,j,k] = bias[k] + sum of x[n, i·stride + r − padding, j·stride + s − padding, c] · weight[k, r, s, c]."""

    @staticmethod
    def forward_numpy(ctx, x, weight, bias, stride, padding, tf32):
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
            dbias = wide_dout.sum((0, 1, 2))
        return dx, dweight, dbias

    @staticmethod
    def forward_cuda(ctx, x, weight, bias, stride, padding, tf32):
        ctx.save(x, weight)
        ctx.stride, ctx.padding, ctx.tf32 = stride, padding, tf32
        size = out_size(x.shape[1:3], weight.shape[1:3], stride, padding)
        out = empty((x.shape[0], *size, weight.shape[0]), x.dtype)
        return fprop_cuda(x, weight, out, stride, padding, Epilogue(bias=as_float32(bias)), tf32)

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        x, weight = ctx.saved
        dx = dweight = dbias = None
        if needs[0]:
            dx, add = gradient_target(into[0], x.shape, x.dtype)
            dgrad_cuda(dout, weight, dx, ctx.stride, ctx.padding, Epilogue(addend=dx if add else None), ctx.tf32)
        if needs[1]:
            dweight, add = gradient_target(into[1], weight.shape, float32)
            wgrad_cuda(x, dout, dweight, ctx.stride, ctx.padding, add, ctx.tf32)
        if needs[2]:
            dbias = sum_array(dout, (0, 1, 2), dtype=float32)
        return dx, dweight, dbias


class ConvTranspose2d(Function):
    """The transpose of the convolution whose weight this is: forward is its dgrad, dx is its fprop."""

    @staticmethod
    def forward_numpy(ctx, x, weight, bias, size, stride, padding, tf32):
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
            dbias = wide_dout.sum((0, 1, 2))
        return dx, dweight, dbias

    @staticmethod
    def forward_cuda(ctx, x, weight, bias, size, stride, padding, tf32):
        ctx.save(x, weight)
        ctx.stride, ctx.padding, ctx.tf32 = stride, padding, tf32
        out = empty((x.shape[0], *size, weight.shape[3]), x.dtype)
        return dgrad_cuda(x, weight, out, stride, padding, Epilogue(bias=as_float32(bias)), tf32)

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        x, weight = ctx.saved
        dx = dweight = dbias = None
        if needs[0]:
            dx, add = gradient_target(into[0], x.shape, x.dtype)
            fprop_cuda(dout, weight, dx, ctx.stride, ctx.padding, Epilogue(addend=dx if add else None), ctx.tf32)
        if needs[1]:
            dweight, add = gradient_target(into[1], weight.shape, float32)
            wgrad_cuda(dout, x, dweight, ctx.stride, ctx.padding, add, ctx.tf32)
        if needs[2]:
            dbias = sum_array(dout, (0, 1, 2), dtype=float32)
        return dx, dweight, dbias


def conv2d(x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: int | Pair = 1, padding: int | Pair = 0,
           tf32: bool = False) -> Tensor:
    """Convolution of x (N, H, W, C) with weight (K, R, S, C), plus bias (K,) → (N, Ho, Wo, K), in x's dtype.

    Ho = (H + 2·padding − R) // stride + 1. Sums are in float32 (float64 for float64); dweight and dbias too. `tf32`
    lets float32 operands be rounded to 10 bits of mantissa on a GPU. Raises ValueError where shapes do not agree.
    """
    stride, padding = pair(stride), pair(padding)
    if x.ndim != 4 or weight.ndim != 4 or x.shape[3] != weight.shape[3]:
        raise ValueError(f"conv2d: x of shape {x.shape} (N, H, W, C) does not fit weight {weight.shape} (K, R, S, C)")
    if min(out_size(x.shape[1:3], weight.shape[1:3], stride, padding)) < 1:
        raise ValueError(f"conv2d: x of shape {x.shape} padded by {padding} is smaller than the kernel {weight.shape}")
    check_bias("conv2d", bias, weight.shape[0])
    return Conv2d.apply(x, weight, bias, stride=stride, padding=padding, tf32=tf32)


def conv_transpose2d(x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: int | Pair = 1,
                     padding: int | Pair = 0, tf32: bool = False) -> Tensor:
    """Transposed convolution of x (N, H, W, C) with weight (C, R, S, K), plus bias (K,) → (N, Ho, Wo, K).

    Ho = (H − 1)·stride − 2·padding + R. The weight is that of the convolution from K to C channels whose input
    gradient this is. Otherwise as `conv2d`.
    """
    stride, padding = pair(stride), pair(padding)
    if x.ndim != 4 or weight.ndim != 4 or x.shape[3] != weight.shape[0]:
        raise ValueError(f"conv_transpose2d: x of shape {x.shape} does not fit weight {weight.shape} (C, R, S, K)")
    size = tuple(
        (length - 1) * step - 2 * p + r
        for length, step, p, r in zip(x.shape[1:3], stride, padding, weight.shape[1:3], strict=True)
    )
    if min(size) < 1:
        raise ValueError(f"conv_transpose2d: x of shape {x.shape} leaves nothing inside the padding {padding}")
    check_bias("conv_transpose2d", bias, weight.shape[3])
    return ConvTranspose2d.apply(x, weight, bias, size=size, stride=stride, padding=padding, tf32=tf32)


def pair(value: int | Pair) -> Pair:
    return (value, value) if isinstance(value, int) else value


def check_bias(name: str, bias: Tensor | None, channels: int) -> None:
    if bias is not None and bias.shape != (channels,):
        raise ValueError(f"{name}: the bias has shape {bias.shape}, not {(channels,)}")
