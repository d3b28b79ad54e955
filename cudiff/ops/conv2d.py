"""Convolutions over channels-last images.

The three passes of one convolution serve both directions: `fprop` (out from x and weight), `dgrad` (dx from dout and
weight) and `wgrad` (dweight from x and dout). A transposed convolution is dgrad run forward.
"""

from __future__ import annotations

import threading

import numpy as np

from cudiff.backend import Array, array_module, compute_dtype, float32
from cudiff.cuda.accumulate import gradient_target
from cudiff.cuda.device import hopper
from cudiff.cuda.kernels.convolution import few_channels, sm90, wgrad_sm90
from cudiff.cuda.kernels.convolution.sm90 import Norm
from cudiff.cuda.kernels.elementwise import relu_forward
from cudiff.cuda.kernels.gemm.product import Epilogue, Plan, plan, problem_of, product_as
from cudiff.cuda.kernels.pool import TWICE, spread_windows
from cudiff.cuda.kernels.shape import contiguous, move
from cudiff.cuda.launch import aligned, empty
from cudiff.cuda.sums import empty_partials
from cudiff.function import Function
from cudiff.ops.cast import require_floats
from cudiff.ops.matmul import as_float32, linear_cuda, linear_dweight_cuda, linear_dx_cuda
from cudiff.ops.reduce import sum_array, sum_rows_cuda
from cudiff.tensor import Tensor
from cudiff.threads import cut, parallel_map

Pair = tuple[int, int]

_LONGEST = 2**15 - 1  # side of an image and its padding for conv2d.cu, which has two coordinates in a word
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


def fprop_cuda(x: Array, weight: Array, out: Array, stride: Pair, padding: Pair, epilogue: Epilogue, tf32: bool,
               statistics: bool = False, relu: bool = False, x2: Array | None = None,
               skip: sm90.Skip | None = None, upsample: bool = False) -> Array | None:
    """Convolution, written to out (N, Ho, Wo, K), and what the epilogue adds; then ReLU, if `relu`.

    x2 holds the channels after x's. The result of `skip` is added too, where `sm90.suits_skip` and there is no
    x2. `upsample`: of x twice as high and wide, each pixel four times. Returns out's `Tensor.partials`, if `statistics`
    and the kernel makes them.
    """
    epilogue = epilogue._replace(rows_per_image=out.shape[1] * out.shape[2])
    if x2 is None and not upsample and few_channels.suits(x, weight, out, stride, padding, epilogue):
        return few_channels.fprop(x, weight, out, epilogue, moments=2 * statistics, relu=relu)
    assert x.dtype == out.dtype
    takes_sources = x2 is None or (not upsample and wgrad_sm90.suits_pair(x, x2, weight))
    if takes_sources and sm90.suits(x, weight, out, stride, padding, tf32):
        return sm90.fprop(
            x, weight, out, epilogue, statistics=statistics, relu=relu, x2=x2, skip=skip, upsample=upsample
        )
    assert skip is None
    needless = hopper() and out.dtype == float32 and not tf32  # group norm's one pass is a little faster without
    wants_sums = statistics and not relu and not needless and max(out.shape[1:3]) <= _LONGEST
    linear = _is_linear(weight.shape[1:3], stride, padding) and not upsample and x2 is None
    if linear and not (wants_sums and _linear_makes_sums(x, weight, out, tf32)):
        linear_cuda(x, weight.reshape(weight.shape[0], -1), epilogue, tf32, out.reshape(1, -1, out.shape[3]))
        sums = None
    else:
        sums = _launch("FPROP", x, weight, out, (x.shape, weight.shape, out.shape), stride, padding, epilogue, tf32,
                       upsample, x2, wants_sums)
    if relu:
        relu_forward(out, out)
    return sums


def dgrad_cuda(dout: Array, weight: Array, dx: Array, stride: Pair, padding: Pair, epilogue: Epilogue, tf32: bool,
               sums: bool = False, norm: Norm | None = None) -> Array | None:
    """Gradient of the input, written to dx (N, H, W, C), and what the epilogue adds.

    Returns dx's sums, float32 (N, tiles, C), if `sums` and the kernel makes them. Where the input is what `norm` made,
    and the epilogue empty, dx may become the gradient dz of its output before SiLU: then this returns dz's sums and
    those of dz·x, x the norm's input, in float32 of dz·(x - mean): float32 (N, tiles, C, 2), else None.
    """
    norm = norm if all(term is None for term in epilogue[:3]) else None
    epilogue = epilogue._replace(rows_per_image=dx.shape[1] * dx.shape[2])
    if few_channels.suits(dout, weight, dx, stride, padding, epilogue):
        norm = norm if norm is not None and few_channels.suits_norm(dx, norm) else None
        moments = int(sums) if norm is None else 2
        return few_channels.fprop(dout, weight, dx, epilogue, moments, transposed=True, norm=norm)
    assert dout.dtype == dx.dtype
    if sm90.suits(dout, weight, dx, stride, padding, tf32):
        norm = norm if norm is not None and sm90.suits_norm(norm) else None
        return sm90.fprop(dout, weight, dx, epilogue, transposed=True, norm=norm)
    norm = norm if norm is not None and _suits_norm(norm, dx) else None
    if _is_linear(weight.shape[1:3], stride, padding):
        norm = norm if _linear_makes_sums(dout, weight, dx, tf32) else None
        if norm is None:
            linear_dx_cuda(dout, weight.reshape(weight.shape[0], -1), dx.reshape(1, -1, dx.shape[3]), epilogue, tf32)
            return None
    elif _tiles(weight.shape[1:3], stride, padding, dout, dx) and epilogue.addend is None and epilogue.emb is None:
        _dgrad_of_tiles(dout, weight, dx, epilogue.bias, tf32)
        return None
    shapes = dx.shape, weight.shape, dout.shape
    return _launch("DGRAD", dout, weight, dx, shapes, stride, padding, epilogue, tf32, norm=norm)


def wgrad_cuda(x: Array, dout: Array, dweight: Array, stride: Pair, padding: Pair, add: bool, tf32: bool,
               x2: Array | None = None, upsample: bool = False) -> None:
    """Gradient of the weight, written or added to dweight (K, R, S, C), float32. The others as in `fprop_cuda`."""
    on_hopper = wgrad_sm90.suits(x, dweight, dout, stride, padding, tf32)
    if x2 is not None:
        on_hopper = on_hopper and not upsample and wgrad_sm90.suits_pair(x, x2, dweight)
    if upsample and on_hopper and not wgrad_sm90.suits_upsampled(x, dweight, dout):
        x, upsample = spread_windows(x, dout.shape[1:3], TWICE, 1.0, moments=0)[0], False
    if x2 is None and not upsample and few_channels.suits(x, dweight, dout, stride, padding):
        return few_channels.wgrad(x, dout, dweight, add)
    assert x.dtype == dout.dtype
    if on_hopper:
        wgrad_sm90.wgrad(x, dout, dweight, add, x2=x2)
    elif _is_linear(dweight.shape[1:3], stride, padding) and not upsample and x2 is None:
        linear_dweight_cuda(x, dout, dweight.reshape(dweight.shape[0], -1), add, tf32)
    else:
        shapes, epilogue = (x.shape, dweight.shape, dout.shape), Epilogue(addend=dweight if add else None)
        _launch("WGRAD", dout, x, dweight, shapes, stride, padding, epilogue, tf32, upsample, x2)


def _is_linear(kernel: Pair, stride: Pair, padding: Pair) -> bool:
    return kernel == stride == (1, 1) and padding == (0, 0)


def _makes_sums(chosen: Plan, pixels: int) -> bool:
    """Whether conv2d.cu leaves sums, of strips of one image of so many pixels each."""
    return chosen.splits == 1 and pixels % (chosen.tile.rows // chosen.tile.warps_m) == 0


def _linear_makes_sums(a: Array, weight: Array, out: Array, tf32: bool) -> bool:
    """The same of a 1×1 convolution from a to out, forward or backward: without sums matmul.cu is faster."""
    size = out.size // out.shape[3], out.shape[3], a.shape[3], 1
    chosen = plan(*problem_of(a.dtype, size, tf32, aligned(a, a.shape[3], weight.shape[3])))
    return _makes_sums(chosen, out.shape[1] * out.shape[2])


def _suits_norm(norm: Norm, dx: Array) -> bool:
    """Whether conv2d.cu may make dx the gradient of that norm's output before SiLU."""
    arrays = [array for array in (norm.x, norm.x2, dx) if array is not None]
    return max(dx.shape[1:3]) <= _LONGEST and all(
        array.dtype == dx.dtype and array.flags.c_contiguous and aligned(array, array.shape[3]) for array in arrays
    )


def _tiles(kernel: Pair, stride: Pair, padding: Pair, dout: Array, dx: Array) -> bool:
    """Whether the windows of dx lie side by side and cover it."""
    covered = dout.shape[1] * kernel[0], dout.shape[2] * kernel[1]
    return kernel == stride and padding == (0, 0) and dx.shape[1:3] == covered


def _dgrad_of_tiles(dout: Array, weight: Array, dx: Array, bias: Array | None, tf32: bool) -> None:
    """dx where each of its pixels is in one window: a product whose rows are windows, then their pixels' places."""
    (n, height, width, _), (k, rows, columns, c) = dout.shape, weight.shape
    windows = empty((n, height, width, rows * columns * c), dx.dtype)
    if bias is not None:
        bias = contiguous(array_module("cuda").broadcast_to(bias, (rows * columns, c)))
    linear_dx_cuda(dout, weight.reshape(k, -1), windows, Epilogue(bias), tf32)
    move(
        dx.reshape(n, height, rows, width, columns, c),
        windows.reshape(n, height, width, rows, columns, c).transpose(0, 1, 3, 2, 4, 5),
    )


def _launch(direction: str, a: Array, b: Array, out: Array, shapes: tuple, stride: Pair, padding: Pair,
            epilogue: Epilogue, tf32: bool, upsample: bool = False, x2: Array | None = None,
            statistics: bool = False, norm: Norm | None = None) -> Array | None:
    """One pass of kernels/conv2d.cu; shapes = those of x, weight and out. Returns what `fprop_cuda` does under
    `statistics` and `dgrad_cuda` with a `norm`."""
    (n, height, width, c1), (k, *kernel, c), (_, *size, _) = shapes
    b = b if b.dtype == a.dtype else b.astype(a.dtype)
    b = b if b.flags.c_contiguous else contiguous(b)  # a weight of one of two sources
    longest = _LONGEST - max(padding)
    if max(height * (1 + upsample), width * (1 + upsample), *size) > longest:
        raise ValueError(
            f"conv2d on CUDA: an image of {height} x {width} pixels to {size[0]} x {size[1]}: cut it into parts of at "
            f"most {longest} a side"
        )
    taps, out_pixels = kernel[0] * kernel[1], size[0] * size[1]
    pixels = height * width if direction == "DGRAD" else out_pixels
    rows, columns, depth, chunk_a, chunk_b = {
        "FPROP": (n * pixels, k, taps * c, c1, taps * c),
        "DGRAD": (n * pixels, c, taps * k, k, c),
        "WGRAD": (k, taps * c, n * out_pixels, k, c1),
    }[direction]
    extent = rows, columns, depth, 1
    a_vec, b_vec = aligned(a, chunk_a), aligned(b, chunk_b)
    if x2 is not None and not aligned(x2, c - c1):
        a_vec, b_vec = a_vec and direction != "FPROP", b_vec and direction != "WGRAD"

    def makes_sums(chosen: Plan) -> bool:
        return (statistics or norm is not None) and _makes_sums(chosen, pixels)

    def run(chosen: Plan) -> Array | None:
        sums, sources, normed, mode = None, (x2, c1), (None,) * 7 + (1,), 0
        if makes_sums(chosen):
            strips = pixels * chosen.tile.warps_m // chosen.tile.rows
            if norm is None:
                sums = empty_partials(n, strips, columns, out.dtype)
            else:
                sums = empty((n, strips, columns, 2), float32)
                sources = norm.x2, norm.x.shape[3]
                normed, mode = (norm.x, *norm[3:], norm.mean.shape[1]), 1 if norm.silu else 2
        product_as(
            chosen, "conv2d", a, b, out, columns,
            (n, height, width, c, *size, k, *kernel, *stride, *padding, *sources, sums, *normed), extent, epilogue,
            tf32, PASS=direction, A_VEC=a_vec, B_VEC=b_vec, DILATED=direction == "DGRAD" and stride != (1, 1),
            UPSAMPLE=upsample, PAIR=x2 is not None, NORM=mode,
        )
        return sums

    problem = problem_of(a.dtype, extent, tf32, a_vec and b_vec)
    return plan.run(problem, run, [out] if epilogue.addend is out else [], makes_sums)


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
            dbias = sum_array(wide_dout, (0, 1, 2))
        return dx, dweight, dbias

    @staticmethod
    def forward_cuda(ctx, x, weight, bias, stride, padding, tf32):
        ctx.save(x, weight)
        ctx.stride, ctx.padding, ctx.tf32 = stride, padding, tf32
        size = out_size(x.shape[1:3], weight.shape[1:3], stride, padding)
        out = empty((x.shape[0], *size, weight.shape[0]), x.dtype)
        ctx.out_partials = fprop_cuda(
            x, weight, out, stride, padding, Epilogue(bias=as_float32(bias)), tf32, statistics=True
        )
        return out

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        x, weight = ctx.saved
        dx = dweight = dbias = None
        if needs[0]:
            dx, add = gradient_target(into[0], x.shape, x.dtype)
            epilogue = Epilogue(addend=dx if add else None)
            sums = dgrad_cuda(dout, weight, dx, ctx.stride, ctx.padding, epilogue, ctx.tf32, sums=True)
            ctx.din_partials = {} if sums is None else {0: sums}
        if needs[1]:
            dweight, add = gradient_target(into[1], weight.shape, float32)
            wgrad_cuda(x, dout, dweight, ctx.stride, ctx.padding, add, ctx.tf32)
        if needs[2]:
            dbias = sum_rows_cuda(dout, into[2], ctx.dout_partials)
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
            dbias = sum_array(wide_dout, (0, 1, 2))
        return dx, dweight, dbias

    @staticmethod
    def forward_cuda(ctx, x, weight, bias, size, stride, padding, tf32):
        ctx.save(x, weight)
        ctx.stride, ctx.padding, ctx.tf32 = stride, padding, tf32
        out = empty((x.shape[0], *size, weight.shape[3]), x.dtype)
        dgrad_cuda(x, weight, out, stride, padding, Epilogue(bias=as_float32(bias)), tf32)
        return out

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
            dbias = sum_rows_cuda(dout, into[2], ctx.dout_partials)
        return dx, dweight, dbias


def conv2d(x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: int | Pair = 1, padding: int | Pair = 0,
           tf32: bool = False) -> Tensor:
    """Convolution of x (N, H, W, C) with weight (K, R, S, C), plus bias (K,) → (N, Ho, Wo, K), in x's dtype.

    Ho = (H + 2·padding − R) // stride + 1. Sums are in float32 (float64 for float64); dweight and dbias too. `tf32`
    lets float32 operands be rounded to 10 bits of mantissa on a GPU. Raises ValueError where shapes do not agree, for a
    stride below 1 or a padding below 0, and on a GPU for an image of more than 32,000 pixels a side that its fastest
    kernels do not take.
    """
    stride, padding = _steps("conv2d", stride, padding)
    if x.ndim != 4 or weight.ndim != 4 or x.shape[3] != weight.shape[3]:
        raise ValueError(f"conv2d: x of shape {x.shape} (N, H, W, C) does not fit weight {weight.shape} (K, R, S, C)")
    if min(out_size(x.shape[1:3], weight.shape[1:3], stride, padding)) < 1:
        raise ValueError(f"conv2d: x of shape {x.shape} padded by {padding} is smaller than the kernel {weight.shape}")
    check_bias("conv2d", bias, weight.shape[0])
    require_floats("conv2d", x, weight, bias)
    return Conv2d.apply(x, weight, bias, stride=stride, padding=padding, tf32=tf32)


def conv_transpose2d(x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: int | Pair = 1,
                     padding: int | Pair = 0, tf32: bool = False) -> Tensor:
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
    check_bias("conv_transpose2d", bias, weight.shape[3])
    require_floats("conv_transpose2d", x, weight, bias)
    return ConvTranspose2d.apply(x, weight, bias, size=size, stride=stride, padding=padding, tf32=tf32)


def pair(value: int | Pair) -> Pair:
    return (value, value) if isinstance(value, int) else value


def _steps(name: str, stride: int | Pair, padding: int | Pair) -> tuple[Pair, Pair]:
    """Both as pairs. Raises ValueError for what is none."""
    pairs = pair(stride), pair(padding)
    for what, value, least in zip(("stride", "padding"), pairs, (1, 0), strict=True):
        if not (isinstance(value, tuple) and len(value) == 2 and all(isinstance(e, int) and e >= least for e in value)):
            raise ValueError(f"{name}: {what} {value} must be a whole number of at least {least}, or a tuple of two")
    return pairs


def check_bias(name: str, bias: Tensor | None, channels: int) -> None:
    if bias is not None and bias.shape != (channels,):
        raise ValueError(f"{name}: the bias has shape {bias.shape}, not {(channels,)}")
