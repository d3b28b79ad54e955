"""Convolutions over channels-last images, and the unit of the U-Net: norm, SiLU, convolution and what is added to it.

The three passes of one convolution serve both directions: `fprop` (out from x and weight), `dgrad` (dx from dout and
weight) and `wgrad` (dweight from x and dout). A transposed convolution is dgrad run forward.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np

from cudiff.backend import compute_dtype
from cudiff.ops.cast import astype
from cudiff.ops.shape import concatenate, reshape
from cudiff.tensor import Context, Function, Tensor

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


def out_size(size: Pair, kernel: Pair, stride: Pair, padding: Pair) -> Pair:
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
    """out[n, i, j, k] = bias[k] + sum of x[n, i·stride + r − padding, j·stride + s − padding, c] · weight[k, r, s, c]."""

    @staticmethod
    def forward_numpy(ctx: Context, x, weight, bias, stride, padding, tf32):
        ctx.save(x, weight)
        ctx.stride, ctx.padding = stride, padding
        out = fprop_numpy(*_wide(x, weight), stride, padding)
        if bias is not None:
            out += bias
        return out.astype(x.dtype, copy=False)

    @staticmethod
    def backward_numpy(ctx: Context, dout, needs, into):
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


class ConvTranspose2d(Function):
    """The transpose of the convolution whose weight this is: forward is its dgrad, dx is its fprop."""

    @staticmethod
    def forward_numpy(ctx: Context, x, weight, bias, size, stride, padding, tf32):
        ctx.save(x, weight)
        ctx.stride, ctx.padding = stride, padding
        out = dgrad_numpy(*_wide(x, weight), size, stride, padding)
        if bias is not None:
            out += bias
        return out.astype(x.dtype, copy=False)

    @staticmethod
    def backward_numpy(ctx: Context, dout, needs, into):
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


class NormSiluConv2d(Function):
    """See `norm_silu_conv2d`. NumPy records `unfused`, the composition that defines it, on a tape of its own."""

    @staticmethod
    def forward_numpy(ctx: Context, *arrays, **attrs):
        inputs = [
            None if array is None else Tensor(array, requires_grad=need)
            for array, need in zip(arrays, ctx.needs, strict=True)
        ]
        out = unfused(*inputs, **attrs)
        ctx.inputs, ctx.out = inputs, out
        return out.data

    @staticmethod
    def backward_numpy(ctx: Context, dout, needs, into):
        ctx.out.backward(dout)
        return tuple(x.grad if need else None for x, need in zip(ctx.inputs, needs, strict=True))


def unfused(x, x2, weight, bias, norm_weight, norm_bias, scale, shift, emb, residual, residual2, skip_weight, skip_bias,
            num_groups, eps, upsample, tf32):
    """What norm_silu_conv2d computes, in plain operations."""
    from cudiff.ops.norm import group_norm
    from cudiff.ops.pool import upsample_nearest

    h = x if x2 is None else concatenate([x, x2], axis=3)
    if norm_weight is not None:
        h = group_norm(h, norm_weight, norm_bias, num_groups, eps, silu=True, scale=scale, shift=shift)
    if upsample:
        h = upsample_nearest(h, 2)
    out = conv2d(h, weight, bias, padding=weight.shape[1] // 2, tf32=tf32)
    if emb is not None:
        out = out + reshape(astype(emb, out.dtype), (emb.shape[0], 1, 1, emb.shape[1]))
    if skip_weight is not None:
        residual = residual if residual2 is None else concatenate([residual, residual2], axis=3)
        residual = conv2d(residual, skip_weight, skip_bias, tf32=tf32)
    return out if residual is None else out + residual


def conv2d(x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: int | Pair = 1, padding: int | Pair = 0,
           tf32: bool = False) -> Tensor:
    """Convolution of x (N, H, W, C) with weight (K, R, S, C), plus bias (K,) → (N, Ho, Wo, K), in x's dtype.

    Ho = (H + 2·padding − R) // stride + 1. Sums are in float32 (float64 for float64); dweight and dbias too. `tf32`
    lets float32 operands be rounded to 10 bits of mantissa on a GPU. Raises ValueError where shapes do not agree.
    """
    stride, padding = _pair(stride), _pair(padding)
    if x.ndim != 4 or weight.ndim != 4 or x.shape[3] != weight.shape[3]:
        raise ValueError(f"conv2d: x of shape {x.shape} (N, H, W, C) does not fit weight {weight.shape} (K, R, S, C)")
    if min(out_size(x.shape[1:3], weight.shape[1:3], stride, padding)) < 1:
        raise ValueError(f"conv2d: x of shape {x.shape} padded by {padding} is smaller than the kernel {weight.shape}")
    _check_bias("conv2d", bias, weight.shape[0])
    return Conv2d.apply(x, weight, bias, stride=stride, padding=padding, tf32=tf32)


def conv_transpose2d(x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: int | Pair = 1,
                     padding: int | Pair = 0, tf32: bool = False) -> Tensor:
    """Transposed convolution of x (N, H, W, C) with weight (C, R, S, K), plus bias (K,) → (N, Ho, Wo, K).

    Ho = (H − 1)·stride − 2·padding + R. The weight is that of the convolution from K to C channels whose input
    gradient this is. Otherwise as `conv2d`.
    """
    stride, padding = _pair(stride), _pair(padding)
    if x.ndim != 4 or weight.ndim != 4 or x.shape[3] != weight.shape[0]:
        raise ValueError(f"conv_transpose2d: x of shape {x.shape} does not fit weight {weight.shape} (C, R, S, K)")
    size = tuple(
        (length - 1) * step - 2 * p + r
        for length, step, p, r in zip(x.shape[1:3], stride, padding, weight.shape[1:3], strict=True)
    )
    if min(size) < 1:
        raise ValueError(f"conv_transpose2d: x of shape {x.shape} leaves nothing inside the padding {padding}")
    _check_bias("conv_transpose2d", bias, weight.shape[3])
    return ConvTranspose2d.apply(x, weight, bias, size=size, stride=stride, padding=padding, tf32=tf32)


def norm_silu_conv2d(x: Tensor, x2: Tensor | None = None, *, weight: Tensor, bias: Tensor | None = None,
                     norm_weight: Tensor | None = None, norm_bias: Tensor | None = None, scale: Tensor | None = None,
                     shift: Tensor | None = None, emb: Tensor | None = None, residual: Tensor | None = None,
                     residual2: Tensor | None = None, skip_weight: Tensor | None = None,
                     skip_bias: Tensor | None = None, num_groups: int = 32, eps: float = 1e-5, upsample: bool = False,
                     tf32: bool = False) -> Tensor:
    """The unit of the U-Net: group norm, SiLU and convolution of concat(x, x2), plus an embedding and a skip path.

    h = silu(group_norm(concat(x, x2)) · (1 + scale) + shift) where norm_weight is given, else concat(x, x2); twice as
    high and wide where `upsample`. out = conv2d(h, weight, bias, padding=R // 2) + emb[:, None, None, :], plus
    residual, or conv2d(concat(residual, residual2), skip_weight, skip_bias) where skip_weight is given.

    x (N, H, W, C1), x2 (N, H, W, C2), weight (K, R, S, C1 + C2), norm_weight and norm_bias (C1 + C2,), scale and
    shift float32 (N, C1 + C2), emb float32 (N, K), residual like out without skip_weight. Returns x's dtype.
    """
    channels = x.shape[3] + (0 if x2 is None else x2.shape[3])
    if weight.shape[3] != channels:
        raise ValueError(f"norm_silu_conv2d: {channels} channels do not fit weight {weight.shape} (K, R, S, C)")
    _check_bias("norm_silu_conv2d", bias, weight.shape[0])
    return NormSiluConv2d.apply(
        x, x2, weight, bias, norm_weight, norm_bias, scale, shift, emb, residual, residual2, skip_weight, skip_bias,
        num_groups=num_groups, eps=eps, upsample=upsample, tf32=tf32,
    )


def _pair(value: int | Pair) -> Pair:
    return (value, value) if isinstance(value, int) else tuple(value)


def _check_bias(name: str, bias: Tensor | None, channels: int) -> None:
    if bias is not None and bias.shape != (channels,):
        raise ValueError(f"{name}: the bias has shape {bias.shape}, not {(channels,)}")
