"""Convolutions over channels-last images.

A convolution has three passes: `fprop` (out from x and weight), `dgrad` (dx from dout and weight) and `wgrad` (dweight
from x and dout). The forward of a transposed convolution is dgrad, its dx is fprop.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from cudiff.backend import Array, float32
from cudiff.cuda.accumulate import gradient_target
from cudiff.cuda.kernels.convolution import table
from cudiff.cuda.kernels.convolution.problem import LONGEST, Operands, Pair
from cudiff.cuda.kernels.gemm.product import Epilogue, as_float32
from cudiff.cuda.launch import empty
from cudiff.function import Function
from cudiff.ops import depthwise
from cudiff.ops.cast import require_floats, upcast_like_first
from cudiff.ops.pad import pad
from cudiff.ops.reduce import sum_array, sum_rows_cuda
from cudiff.ops.shape import concatenate, squeeze
from cudiff.tensor import Tensor
from cudiff.threads import cut, parallel_map, unflagged
from cudiff.values import pair

__all__ = ["conv1d", "conv2d", "conv_transpose2d"]

_PARTIAL_SUMS = 8  # of the weight's gradient: more cost more additions, fewer leave cores without work
_thread = threading.local()


def _workspace(count: int, dtype: np.dtype) -> np.ndarray:
    """`count` elements of scratch memory that this thread reuses: fresh pages would cost as much as the copy."""
    held = getattr(_thread, "workspace", None)
    if held is None or held.nbytes < count * dtype.itemsize:
        held = _thread.workspace = np.empty(count * dtype.itemsize, np.uint8)
    return held[: count * dtype.itemsize].view(dtype)


def _canvas(x: np.ndarray, size: Pair, offset: Pair) -> np.ndarray:
    """Zeros (N, *size, C) with x's pixel (i, j) at offset + (i, j), where that lies inside."""
    if x.shape[1:3] == size and offset == (0, 0):
        return x
    canvas = np.zeros((x.shape[0], *size, x.shape[3]), x.dtype)
    source, target = _inside(x.shape[1:3], size, offset)
    canvas[target] = x[source]
    return canvas


@functools.lru_cache(1024)
def _inside(lengths: Pair, size: Pair, offset: Pair) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Which pixels of an image of these lengths lie inside a canvas (see `_canvas`), and where there."""
    source, target = [slice(None)], [slice(None)]
    for length, room, start in zip(lengths, size, offset, strict=True):
        first = max(0, -start)
        last = max(first, min(length, room - start))
        source.append(slice(first, last))
        target.append(slice(start + first, start + last))
    return tuple(source), tuple(target)


def _blocks(images: int, size: Pair, pixel_bytes: int) -> list[tuple[slice, slice]]:
    """The output (images, *size, K) in blocks (images, rows), parts of `cut` by the bytes of their patches.

    Only blocks of a single image are cut into rows too: the same rows of several images are not contiguous.
    """
    height, width = size
    parts = cut(images, height * width * pixel_bytes)
    rows = cut(height, width * pixel_bytes) if len(parts) == images else [slice(0, height)]
    return [(part, row) for part in parts for row in rows]


def _patches(x: np.ndarray, block: tuple[slice, slice], kernel: Pair, width: int, stride: Pair,
             offset: Pair) -> np.ndarray:
    """The patch matrix of a block, a row (R·S·C) for each output pixel. This thread's next call overwrites it.

    x's pixel (i, j) lies at offset + (i, j), zeros elsewhere.
    """
    images, rows = block
    height, channels = rows.stop - rows.start, x.shape[3]
    room = ((height - 1) * stride[0] + kernel[0], (width - 1) * stride[1] + kernel[1])
    canvas = _canvas(x[images], room, (offset[0] - rows.start * stride[0], offset[1]))
    if kernel == stride == (1, 1):
        return canvas.reshape(-1, channels)
    canvas = np.ascontiguousarray(canvas)
    n, i, j, c = canvas.strides
    shape = (canvas.shape[0], height, width, kernel[0], kernel[1] * channels)
    # np.lib.stride_tricks.as_strided takes 2.5 µs, this 0.3.
    patches = np.ndarray(shape, x.dtype, canvas, 0, (n, i * stride[0], j * stride[1], i, c))
    matrix = _workspace(patches.size, x.dtype).reshape(shape)
    np.copyto(matrix, patches)
    return matrix.reshape(-1, kernel[0] * kernel[1] * channels)


@unflagged
def fprop_numpy(x: np.ndarray, weight: np.ndarray, stride: Pair, padding: Pair, dilation: Pair = (1, 1),
                groups: int = 1) -> np.ndarray:
    """Convolution: x (N, H, W, C), weight (K, R, S, C / groups) → (N, Ho, Wo, K)."""
    size = out_size(x.shape[1:3], weight.shape[1:3], stride, padding, dilation)
    if 1 < groups == x.shape[3] == len(weight):
        return depthwise.fprop(x, weight, size, stride, padding, dilation)
    if (dilation, groups) != ((1, 1), 1):
        matrices = _matrices(weight, groups)
        taps = depthwise.taps(_by_group(x, groups, padding), weight.shape[1:3], size, stride, dilation)
        return _from_groups(sum(tap @ matrices[r, s][:, None] for r, s, tap in taps))
    return _correlate(x, weight, size, stride, padding)


def _correlate(x: np.ndarray, weight: np.ndarray, size: Pair, stride: Pair, offset: Pair) -> np.ndarray:
    """`size` sums of products, `stride` apart, of the weight and x, whose pixels lie from `offset` on."""
    outputs, kernel = weight.shape[0], weight.shape[1:3]
    matrix = weight.reshape(outputs, -1).T
    out = np.empty((x.shape[0], *size, outputs), x.dtype)

    def multiply(block: tuple[slice, slice]) -> None:
        patches = _patches(x, block, kernel, size[1], stride, offset)
        np.matmul(patches, matrix, out=out[block].reshape(-1, outputs))

    parallel_map(multiply, _blocks(x.shape[0], size, matrix.shape[0] * x.itemsize))
    return out


@unflagged
def dgrad_numpy(dout: np.ndarray, weight: np.ndarray, size: Pair, stride: Pair, padding: Pair,
                dilation: Pair = (1, 1), groups: int = 1) -> np.ndarray:
    """Gradient of the input (N, *size, C): of stride 1 dout convolved with the flipped weight."""
    if 1 < groups == dout.shape[3] and weight.shape[3] == 1:
        return depthwise.dgrad(dout, weight, size, stride, padding, dilation)
    if groups == 1 and (stride, dilation) != ((1, 1), (1, 1)):
        return _scatter(dout, weight, size, stride, padding, dilation)
    if groups > 1:
        matrices, grouped = _matrices(weight, groups), _by_group(dout, groups, (0, 0))
        (top, left), (height, width) = padding, size
        room = groups, len(dout), height + 2 * top, width + 2 * left, weight.shape[3]
        dx = np.zeros(room, dout.dtype)
        for r, s, tap in depthwise.taps(dx, weight.shape[1:3], dout.shape[1:3], stride, dilation):
            tap += grouped @ matrices[r, s][:, None].swapaxes(-1, -2)
        return _from_groups(dx[:, :, top : top + height, left : left + width])
    offset = (weight.shape[1] - 1 - padding[0], weight.shape[2] - 1 - padding[1])
    flipped = np.ascontiguousarray(weight[:, ::-1, ::-1].transpose(3, 1, 2, 0))
    return _correlate(dout, flipped, size, (1, 1), offset)


def _scatter(dout: np.ndarray, weight: np.ndarray, size: Pair, stride: Pair, padding: Pair,
             dilation: Pair) -> np.ndarray:
    """The same with a stride or a dilation: each pixel of dout adds its product with the weight to its window."""
    (outputs, *kernel, channels), (top, left), (height, width) = weight.shape, padding, size
    dx = np.zeros((len(dout), height + 2 * top, width + 2 * left, channels), dout.dtype)
    rows = [np.ascontiguousarray(weight[:, r]).reshape(outputs, -1) for r in range(kernel[0])]

    def images(part: slice) -> None:
        products = dout[part].reshape(-1, outputs)
        for r, s, tap in depthwise.taps(dx[part], (kernel[0], kernel[1]), dout.shape[1:3], stride, dilation):
            if s == 0:
                of_row = (products @ rows[r]).reshape(*tap.shape[:3], kernel[1], channels)
            tap += of_row[..., s, :]

    parallel_map(images, cut(len(dout), dx[:1].nbytes))
    return np.ascontiguousarray(dx[:, top : top + height, left : left + width])


@unflagged
def wgrad_numpy(x: np.ndarray, dout: np.ndarray, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair = (1, 1),
                groups: int = 1) -> np.ndarray:
    """Gradient of the weight (K, R, S, C / groups): sum over pixels of dout times the patch of x under the kernel."""
    if 1 < groups == x.shape[3] == dout.shape[3]:
        return depthwise.wgrad(x, dout, kernel, stride, padding, dilation)
    if (dilation, groups) != ((1, 1), 1):
        channels, size = x.shape[3] // groups, dout.shape[1:3]
        columns = _by_group(dout, groups, (0, 0)).reshape(groups, -1, dout.shape[3] // groups).swapaxes(1, 2)
        dweight = np.empty((dout.shape[3], *kernel, channels), x.dtype)
        for r, s, tap in depthwise.taps(_by_group(x, groups, padding), kernel, size, stride, dilation):
            dweight[:, r, s] = (columns @ tap.reshape(groups, -1, channels)).reshape(-1, channels)
        return dweight
    outputs, length = dout.shape[3], kernel[0] * kernel[1] * x.shape[3]
    blocks = _blocks(dout.shape[0], dout.shape[1:3], length * x.itemsize)

    def product(block: tuple[slice, slice]) -> Array:
        patches = _patches(x, block, kernel, dout.shape[2], stride, padding)
        return dout[block].reshape(-1, outputs).T @ patches

    return _sum_over(blocks, product).reshape(outputs, *kernel, x.shape[3])


def _sum_over(blocks: list[tuple[slice, slice]], product: Callable[[tuple[slice, slice]], Array | None]) -> Any:
    """The sum of product(block) over all blocks, in a fixed order, on all cores; None where `product` returns None."""
    def add(total: Any, term: Any) -> Any:
        return term if total is None else np.add(total, term, out=total)

    def add_up(start: int) -> Any:
        return functools.reduce(add, map(product, blocks[start::_PARTIAL_SUMS]))

    return functools.reduce(add, parallel_map(add_up, range(min(len(blocks), _PARTIAL_SUMS))))


@unflagged
def gradients_numpy(x: np.ndarray, weight: np.ndarray, dout: np.ndarray, padding: Pair,
                    needs: Sequence[bool]) -> tuple[np.ndarray | None, np.ndarray | None]:
    """dx (None unless needs[0]) and dweight (None unless needs[1]) of a convolution of stride 1.

    Both read the patches of dout under the flipped kernel: dx is their product with the weight, dweight that with x.
    The patches are copied once. `dgrad_numpy` and `wgrad_numpy` together would copy patches twice.
    """
    (outputs, *kernel, channels), width = weight.shape, x.shape[2]
    offset = kernel[0] - 1 - padding[0], kernel[1] - 1 - padding[1]
    matrix = weight[:, ::-1, ::-1].transpose(1, 2, 0, 3).reshape(-1, channels)
    blocks = _blocks(len(x), x.shape[1:3], matrix.shape[0] * x.itemsize)
    dx = np.empty(x.shape, x.dtype) if needs[0] else None

    def product(block: tuple[slice, slice]) -> Array | None:
        patches = _patches(dout, block, (kernel[0], kernel[1]), width, (1, 1), offset)
        if dx is not None:
            np.matmul(patches, matrix, out=dx[block].reshape(-1, channels))
        return patches.T @ x[block].reshape(-1, channels) if needs[1] else None

    dweight = _sum_over(blocks, product)
    if dweight is None:
        return dx, None
    dweight = dweight.reshape(*kernel, outputs, channels)[::-1, ::-1]
    return dx, np.ascontiguousarray(dweight.transpose(2, 0, 1, 3))


def _by_group(image: np.ndarray, groups: int, padding: Pair) -> np.ndarray:
    """An image (N, H, W, C) with zeros around it as (groups, N, height, width, C / groups)."""
    padded = depthwise.padded(image, padding)
    return np.ascontiguousarray(np.moveaxis(padded.reshape(*padded.shape[:3], groups, padded.shape[3] // groups), 3, 0))


def _from_groups(image: np.ndarray) -> np.ndarray:
    """(groups, N, height, width, C) as (N, height, width, groups · C)."""
    return np.ascontiguousarray(np.moveaxis(image, 0, 3)).reshape(*image.shape[1:4], len(image) * image.shape[4])


def _matrices(weight: np.ndarray, groups: int) -> np.ndarray:
    """A weight (K, R, S, C) as a matrix for each tap and group: (R, S, groups, 1, C, K / groups)."""
    k, *taps, channels = weight.shape
    return weight.reshape(groups, 1, k // groups, *taps, channels).transpose(3, 4, 0, 1, 5, 2)


@functools.cache
def out_size(size: tuple[int, ...], kernel: tuple[int, ...], stride: Pair, padding: Pair,
             dilation: Pair = (1, 1)) -> Pair:
    """(Ho, Wo) of a convolution."""
    height, width = (
        (length + 2 * p - (r - 1) * gap - 1) // step + 1
        for length, r, step, p, gap in zip(size, kernel, stride, padding, dilation, strict=True)
    )
    return height, width


class Steps(NamedTuple):
    """A convolution's attributes besides its arrays; pairs are (vertical, horizontal)."""

    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int


class Conv2d(Function):
    """out[n, i, j, k] = bias[k] + sum of x[n, i·stride + r·dilation − padding, likewise of j and s, c] ·
    weight[k, r, s, c] over r, s and the channels c of k's group."""

    @staticmethod
    def forward_numpy(ctx, x, weight, bias, steps):
        ctx.save(x, weight)
        ctx.steps = steps
        wide_x, wide_weight = upcast_like_first(x, weight)
        out = fprop_numpy(wide_x, wide_weight, *steps)
        if bias is not None:
            out += bias
        return out.astype(x.dtype, copy=False)

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        x, weight = ctx.saved
        wide_dout, wide_x, wide_weight = upcast_like_first(dout, x, weight)
        dx = dweight = dbias = None
        stride, padding, dilation, groups = ctx.steps
        plain = stride == dilation == (1, 1) and groups == 1
        # Not for a first layer: patches of its few input channels are less to copy than dout's.
        if plain and dout.shape[3] <= 2 * x.shape[3] and (needs[0] or needs[1]):
            dx, dweight = gradients_numpy(wide_x, wide_weight, wide_dout, padding, needs)
        else:
            if needs[0]:
                dx = dgrad_numpy(wide_dout, wide_weight, x.shape[1:3], *ctx.steps)
            if needs[1]:
                dweight = wgrad_numpy(wide_x, wide_dout, weight.shape[1:3], *ctx.steps)
        if needs[2]:
            dbias = sum_array(wide_dout, (0, 1, 2))
        return None if dx is None else dx.astype(x.dtype, copy=False), dweight, dbias

    @staticmethod
    def forward_cuda(ctx, x, weight, bias, steps):
        ctx.save(x, weight)
        ctx.steps = steps
        size = out_size(x.shape[1:3], weight.shape[1:3], *steps[:3])
        out = empty((x.shape[0], *size, weight.shape[0]), x.dtype)
        given = Operands(x, weight, out, Epilogue(as_float32(bias)))
        ctx.out_statistics = table.fprop(given, *steps, statistics=True)
        return out

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        x, weight = ctx.saved
        dx = dweight = dbias = None
        if needs[0]:
            dx, add = gradient_target(into[0], x.shape, x.dtype)
            given = Operands(dout, weight, dx, Epilogue(addend=dx if add else None))
            ctx.din_statistics[0] = table.dgrad(given, *ctx.steps, sums=True)
        if needs[1]:
            dweight, add = gradient_target(into[1], weight.shape, float32)
            table.wgrad(Operands(x, dweight, dout, add=add), *ctx.steps)
        if needs[2]:
            dbias = sum_rows_cuda(dout, into[2], ctx.dout_sums)
        return dx, dweight, dbias


class ConvTranspose2d(Function):
    """The transpose of the convolution with the same weight: forward is its dgrad, dx is its fprop."""

    @staticmethod
    def forward_numpy(ctx, x, weight, bias, size, stride, padding):
        ctx.save(x, weight)
        ctx.stride, ctx.padding = stride, padding
        wide_x, wide_weight = upcast_like_first(x, weight)
        out = dgrad_numpy(wide_x, wide_weight, size, stride, padding)
        if bias is not None:
            out += bias
        return out.astype(x.dtype, copy=False)

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        x, weight = ctx.saved
        wide_dout, wide_x, wide_weight = upcast_like_first(dout, x, weight)
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
        table.dgrad(Operands(x, weight, out, Epilogue(as_float32(bias))), stride, padding)
        return out

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        x, weight = ctx.saved
        dx = dweight = dbias = None
        if needs[0]:
            dx, add = gradient_target(into[0], x.shape, x.dtype)
            given = Operands(dout, weight, dx, Epilogue(addend=dx if add else None))
            table.fprop(given, ctx.stride, ctx.padding)
        if needs[1]:
            dweight, add = gradient_target(into[1], weight.shape, float32)
            table.wgrad(Operands(dout, dweight, x, add=add), ctx.stride, ctx.padding)
        if needs[2]:
            dbias = sum_rows_cuda(dout, into[2], ctx.dout_sums)
        return dx, dweight, dbias


def conv2d(x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: int | Pair = 1, padding: int | Pair = 0,
           dilation: int | Pair = 1, groups: int = 1) -> Tensor:
    """Convolution of x (N, H, W, C) with weight (K, R, S, C / groups), plus bias (K,) → (N, Ho, Wo, K), in x's dtype.

    Ho = (H + 2·padding − dilation·(R − 1) − 1) // stride + 1. stride, padding, dilation: a number, or a tuple for rows
    and columns. groups: an output channel depends only on the input channels of its group. Sums, dweight and dbias are
    float32 (float64 for float64); see `allow_tf32`. On a GPU what is not finite in one group may make others' results
    NaN, and with a stride what is not finite in a pixel those beside its windows. Raises ValueError where shapes do not
    agree, for a stride or a dilation below 1, for a padding below 0, and on a GPU for an image of more than 32,000
    pixels a side that its fastest kernels do not take.
    """
    return _conv2d("conv2d", x, weight, bias, stride, padding, dilation, groups)


def _conv2d(name: str, x: Tensor, weight: Tensor, bias: Tensor | None, stride: int | Pair, padding: int | Pair,
            dilation: int | Pair, groups: int) -> Tensor:
    steps = Steps(*_steps(name, stride, padding), pair(f"{name}: dilation", dilation, 1), groups)
    if not isinstance(groups, int | np.integer) or groups < 1:
        raise ValueError(f"{name}: groups {groups} must be a whole number of at least 1")
    if x.ndim != 4 or weight.ndim != 4 or x.shape[3] != weight.shape[3] * groups:
        image, kernel = ("N, H, W, C", "K, R, S, C") if name == "conv2d" else ("N, L, C", "K, S, C")
        channels = "" if groups == 1 else f" / {groups}"
        raise ValueError(
            f"{name}: x of shape {_given(name, x.shape)} ({image}) does not fit weight {_given(name, weight.shape)} "
            f"({kernel}{channels})"
        )
    if 0 in weight.shape:
        raise ValueError(f"{name}: the weight of shape {_given(name, weight.shape)} has an axis of size 0")
    if weight.shape[0] % groups:
        raise ValueError(f"{name}: the weight's {weight.shape[0]} output channels do not divide into {groups} groups")
    if min(out_size(x.shape[1:3], weight.shape[1:3], *steps[:3])) < 1:
        pairs = steps.padding, steps.dilation
        padding, dilation = pairs if name == "conv2d" else (pairs[0][1], pairs[1][1])
        dilated = "" if steps.dilation == (1, 1) else f" dilated by {dilation}"
        raise ValueError(
            f"{name}: x of shape {_given(name, x.shape)} padded by {padding} is smaller than the kernel "
            f"{_given(name, weight.shape)}{dilated}"
        )
    check_bias(name, None if bias is None else bias.shape, weight.shape[0])
    require_floats(name, x, weight, bias)
    return Conv2d.apply(x, weight, bias, steps=steps)


def _given(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that a caller gave: without the axis of rows that `conv1d` adds."""
    return shape if name == "conv2d" else (shape[0], *shape[2:])


def conv1d(x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: int = 1, padding: int = 0, dilation: int = 1,
           groups: int = 1) -> Tensor:
    """Convolution of x (N, L, C) with weight (K, S, C / groups), plus bias (K,) → (N, Lo, K), in x's dtype.

    Lo = (L + 2·padding − dilation·(S − 1) − 1) // stride + 1. It is `conv2d` of images one row high. On a
    GPU a signal of 32,768 samples or more is computed in parts.
    """
    if x.ndim != 3 or weight.ndim != 3:
        raise ValueError(f"conv1d: x has shape {x.shape}, not (N, L, C), or weight {weight.shape}, not (K, S, C)")
    for what, value, least in (("stride", stride, 1), ("padding", padding, 0), ("dilation", dilation, 1)):
        if not isinstance(value, int | np.integer) or value < least:
            raise ValueError(f"conv1d: {what} {value} must be a whole number of at least {least}")
    reach = dilation * (weight.shape[1] - 1) + 1
    if isinstance(x, Tensor) and x.device == "cuda" and x.shape[1] + 2 * padding > LONGEST >= reach and \
            x.shape[2] == weight.shape[2] * groups:
        x = pad(x, ((0, 0), (padding, padding), (0, 0)))
        count, each = (x.shape[1] - reach) // stride + 1, (LONGEST - reach) // stride + 1  # outputs, and of a part
        ends = [(first * stride, (min(first + each, count) - 1) * stride + reach) for first in range(0, count, each)]
        parts = [conv1d(x[:, start:stop], weight, bias, stride, 0, dilation, groups) for start, stop in ends]
        return concatenate(parts, 1)
    rows: tuple[Any, Any] = np.expand_dims(x, 1), np.expand_dims(weight, 1)  # arrays become tensors later
    return squeeze(_conv2d("conv1d", *rows, bias, (1, stride), (0, padding), (1, dilation), groups), 1)


def conv_transpose2d(x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: int | Pair = 1,
                     padding: int | Pair = 0) -> Tensor:
    """Transposed convolution of x (N, H, W, C) with weight (C, R, S, K), plus bias (K,) → (N, Ho, Wo, K).

    Ho = (H − 1)·stride − 2·padding + R. This is the input gradient of the convolution from K to C channels with
    the same weight. Otherwise as `conv2d`.
    """
    stride, padding = _steps("conv_transpose2d", stride, padding)
    if x.ndim != 4 or weight.ndim != 4 or x.shape[3] != weight.shape[0]:
        raise ValueError(f"conv_transpose2d: x of shape {x.shape} does not fit weight {weight.shape} (C, R, S, K)")
    if 0 in weight.shape:
        raise ValueError(f"conv_transpose2d: the weight of shape {weight.shape} has an axis of size 0")
    size = tuple(
        (length - 1) * step - 2 * p + r
        for length, step, p, r in zip(x.shape[1:3], stride, padding, weight.shape[1:3], strict=True)
    )
    if min(size) < 1:
        raise ValueError(f"conv_transpose2d: x of shape {x.shape} leaves nothing inside the padding {padding}")
    check_bias("conv_transpose2d", None if bias is None else bias.shape, weight.shape[3])
    require_floats("conv_transpose2d", x, weight, bias)
    return ConvTranspose2d.apply(x, weight, bias, size=size, stride=stride, padding=padding)


def _steps(name: str, stride: int | Pair, padding: int | Pair) -> tuple[Pair, Pair]:
    """Both as pairs. Raises ValueError for anything but a number or a pair in range."""
    return pair(f"{name}: stride", stride, 1), pair(f"{name}: padding", padding, 0)


def check_bias(name: str, shape: tuple[int, ...] | None, channels: int) -> None:
    if shape is not None and shape != (channels,):
        raise ValueError(f"{name}: the bias has shape {shape}, not {(channels,)}")
