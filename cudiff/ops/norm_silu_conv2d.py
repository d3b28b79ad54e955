"""The unit of the U-Net as one operation: norm, SiLU, convolution, what is added to its result, ReLU."""

from __future__ import annotations

from typing import Any

import numpy as np

from cudiff.backend import Array, float32, is_float, is_low
from cudiff.cuda.accumulate import gradient_sum, gradient_target
from cudiff.cuda.kernels.convolution import table
from cudiff.cuda.kernels.convolution.problem import Norm, Skip
from cudiff.cuda.kernels.gemm.product import Epilogue, as_float32
from cudiff.cuda.kernels.gemm.table import linear_dweight, linear_dx
from cudiff.cuda.kernels.pool import TWICE, sum_windows
from cudiff.cuda.kernels.shape import at_16_bytes
from cudiff.cuda.launch import empty
from cudiff.cuda.sums import add_rows
from cudiff.function import Composite, Context
from cudiff.ops import elementwise
from cudiff.ops.cast import as_wide, astype, require_floats
from cudiff.ops.conv2d import check_bias, conv2d, out_size, pair
from cudiff.ops.group_norm import GroupNorm, check_norm, group_norm
from cudiff.ops.pool import upsample_nearest
from cudiff.ops.reduce import sum_array, sum_rows_cuda
from cudiff.ops.shape import concatenate, reshape
from cudiff.tensor import Tensor


def unfused(x, x2, weight, bias, norm_weight, norm_bias, scale, shift, emb, residual, residual2, skip_weight, skip_bias,
            num_groups, eps, silu, upsample, relu, statistics, dtype):
    """What norm_silu_conv2d computes, in plain operations."""
    h = x if x2 is None else concatenate([x, x2], axis=3)
    if norm_weight is not None:
        h = group_norm(h, norm_weight, norm_bias, num_groups, eps, silu, scale, shift)
    if upsample:
        h = upsample_nearest(h, 2)
    if weight.ndim == 2:
        weight = reshape(weight, (len(weight), 1, 1, weight.shape[1]))
    out = conv2d(h, weight, bias, padding=weight.shape[1] // 2)
    if emb is not None:
        out = out + reshape(astype(emb, out.dtype), (emb.shape[0], 1, 1, emb.shape[1]))
    if skip_weight is not None:
        residual = residual if residual2 is None else concatenate([residual, residual2], axis=3)
        residual = conv2d(residual, skip_weight, skip_bias)
    out = out if residual is None else out + residual
    return elementwise.relu(out) if relu else out


class NormSiluConv2d(Composite):
    """See `norm_silu_conv2d`; `dtype` is x's but where `table.casts`."""

    compose = staticmethod(unfused)
    adds_elsewhere = (0, 1)

    @classmethod
    def operand_dtype(cls, inputs, attrs):
        return _narrower(inputs[0].dtype, attrs["dtype"])

    @staticmethod
    def forward_cuda(ctx, x, x2, weight, bias, norm_weight, norm_bias, scale, shift, emb, residual, residual2,
                     skip_weight, skip_bias, num_groups, eps, silu, upsample, relu, statistics, dtype):
        ctx.upsample, ctx.dtype, ctx.step = upsample, x.dtype, (None, None, ())
        ctx.weight_shape, weight = weight.shape, _taps(weight)
        h, h2 = x, None
        if norm_weight is not None:
            h = _step(ctx, GroupNorm, _NORM_INPUTS, x, x2, norm_weight, norm_bias, scale, shift,
                      num_groups=num_groups, eps=eps, silu=silu)
        elif x2 is not None:
            h2 = x2  # read from where they are
        elif dtype != x.dtype and is_low(x.dtype):
            h = at_16_bytes(x)  # conv2d_few_channels reads packs of many channels
        again = norm_weight is not None and any(ctx.needs[i] for i in _NORM_INPUTS)
        if again:  # then the norm's backward makes h once more for the weight's gradient: nothing is kept till then
            ctx.step[1].again = ctx.needs[2]
        padding, times = pair(weight.shape[1] // 2), 2 if upsample else 1
        n, height, width, channels = h.shape
        ctx.shape = n, height * times, width * times, channels  # of what the convolution sees
        out = empty((n, *out_size(ctx.shape[1:3], weight.shape[1:3], (1, 1), padding), len(weight)), dtype)
        skip, addend = None, residual
        if skip_weight is not None:
            skip, addend = Skip(residual, residual2, skip_weight, as_float32(skip_bias)), None
        epilogue = Epilogue(as_float32(bias), as_float32(emb), addend)
        ctx.out_partials = table.fprop(
            h, weight, out, (1, 1), padding, epilogue, ctx.tf32, statistics, relu, h2, skip, upsample
        )
        ctx.save(None if again else h, h2, weight, residual, residual2, skip_weight, out if relu else None)
        return out

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        h, h2, weight, residual, residual2, skip_weight, out = ctx.saved
        padding, tf32 = pair(weight.shape[1] // 2), ctx.tf32
        grads: list[Array | None] = [None] * len(needs)
        sums, mixed = ctx.dout_partials, dout.dtype != ctx.dtype
        if h2 is not None or residual2 is not None or (mixed and is_low(dout.dtype)):
            dout = at_16_bytes(dout)  # pairs are read by TMA, many channels by conv2d_few_channels in packs
        if out is not None:
            dout, sums = elementwise.relu_backward_cuda(dout, out)
        if sums is not None and len(sums) != len(dout):  # a batch norm's, of all images together
            sums = None
        if sums is None and (needs[8] or (needs[3] and needs[12])):
            sums = sum_array(dout, (1, 2), dtype=float32)[:, None]
        if needs[8]:
            grads[8], add = gradient_target(into[8], sums.shape[::2], float32)
            add_rows(sums, grads[8], add)
        for i in (3, 12):
            grads[i] = sum_rows_cuda(dout, into[i], sums) if needs[i] else None
        if h2 is not None:
            for i, part in enumerate((weight[..., : h.shape[3]], weight[..., h.shape[3] :])):
                if needs[i]:
                    place = None if ctx.upsample else into[i]
                    grads[i], addend = gradient_sum(place, (*ctx.shape[:3], part.shape[3]), dout.dtype)
                    table.dgrad(dout, part, grads[i], (1, 1), padding, Epilogue(addend=addend), tf32)
                    if ctx.upsample:
                        grads[i], _ = sum_windows(grads[i], TWICE, 1.0, into[i], moments=0)
        elif any(needs[i] for i in _NORM_INPUTS):
            function, step, inputs = ctx.step
            place = into[0] if step is None else None
            grads[0], addend = gradient_sum(None if ctx.upsample or mixed else place, ctx.shape, ctx.dtype)
            norm = Norm(step.silu, *step.saved) if function is GroupNorm and not ctx.upsample else None
            ctx.din_partials[0] = partials = table.dgrad(
                dout, weight, grads[0], (1, 1), padding, Epilogue(addend=addend), tf32,
                sums=step is None and not ctx.upsample, norm=norm,
            )
            if ctx.upsample:
                moments = 1 if step is None else 0
                grads[0], ctx.din_partials[0] = sum_windows(grads[0], TWICE, 1.0, place, moments)
            if step is not None:
                step.dz_partials = partials
                results = function.backward_cuda(step, grads[0], needs=step.needs, into=tuple(into[i] for i in inputs))
                for i, result in zip(inputs, results, strict=True):
                    grads[i] = result
                ctx.din_partials = {inputs[i]: sums for i, sums in step.din_partials.items()}
        if skip_weight is None and needs[9]:
            grads[9] = dout
        if needs[2]:
            h = ctx.step[1].y if h is None else h
            grads[2], add = gradient_target(into[2], ctx.weight_shape, float32)
            table.wgrad(h, dout, _taps(grads[2]), (1, 1), padding, add, tf32, h2, ctx.upsample)
        if skip_weight is None:
            return tuple(grads)
        if needs[11]:
            grads[11], add_weight = gradient_target(into[11], skip_weight.shape, float32)
            linear_dweight(residual, dout, _matrix(grads[11]), add_weight, tf32, residual2)
        matrix, channels = _matrix(skip_weight), residual.shape[3]
        sources = {9: residual, 10: residual2}
        targets = {i: gradient_target(into[i], x.shape, x.dtype) for i, x in sources.items() if needs[i]}
        grads[9], grads[10] = (targets[i][0] if i in targets else None for i in (9, 10))
        if len(targets) == 2 and not any(add for _, add in targets.values()):
            linear_dx(dout, matrix, grads[9], Epilogue(), tf32, grads[10])
            return tuple(grads)
        for i, (target, add) in targets.items():
            columns = matrix[:, :channels] if i == 9 else matrix[:, channels:]
            linear_dx(dout, columns, target, Epilogue(addend=target if add else None), tf32)
        return tuple(grads)


_NORM_INPUTS = (0, 1, 4, 5, 6, 7)


def _step(ctx, function: Any, inputs: tuple[int, ...], *arrays: Array | None, **attrs) -> Array:
    """Run another Function's forward inside this one; `inputs` says where its gradients go."""
    step = Context(tuple(ctx.needs[i] for i in inputs), tuple(ctx.partials[i] for i in inputs))
    ctx.step = function, step, inputs
    return function.forward_cuda(step, *arrays, **attrs)


def _taps(weight: Array) -> Array:
    """A weight (K, C) as (K, 1, 1, C), any other as it is."""
    return weight[:, None, None] if weight.ndim == 2 else weight


def _matrix(weight: Array) -> Array:
    """A weight (K, 1, 1, C) as (K, C)."""
    return weight.reshape(len(weight), -1)


def _narrower(first: np.dtype, second: np.dtype) -> np.dtype:
    return first if first.itemsize < second.itemsize else second


def norm_silu_conv2d(x: Tensor, x2: Tensor | None = None, *, weight: Tensor, bias: Tensor | None = None,
                     norm_weight: Tensor | None = None, norm_bias: Tensor | None = None, scale: Tensor | None = None,
                     shift: Tensor | None = None, emb: Tensor | None = None, residual: Tensor | None = None,
                     residual2: Tensor | None = None, skip_weight: Tensor | None = None,
                     skip_bias: Tensor | None = None, num_groups: int = 32, eps: float = 1e-5, silu: bool = True,
                     upsample: bool = False, relu: bool = False, statistics: bool = True, dtype: Any = None) -> Tensor:
    """The unit of the U-Net: group norm, SiLU and convolution of concat(x, x2), plus an embedding and a skip path.

    h = silu(group_norm(concat(x, x2)) · (1 + scale) + shift) where norm_weight is given, without SiLU unless `silu`;
    else concat(x, x2). Twice as high and wide where `upsample`. out = conv2d(h, weight, bias, padding=R // 2)
    + emb[:, None, None, :], plus residual, or conv2d(concat(residual, residual2), skip_weight, skip_bias) where
    skip_weight is given; ReLU if `relu`.

    x (N, H, W, C1), x2 (N, H, W, C2), weight (K, R, S, C1 + C2) or (K, C1 + C2), norm_weight and norm_bias (C1 + C2,),
    scale and shift (N, C1 + C2) and emb (N, K) read as float32, residual like out without skip_weight; x2 and residuals
    of another dtype are converted. `dtype` is the result's, x's unless given. The narrower of both is that of the
    computation, but that a GPU's convolution between few channels and many writes a float32 result as it was summed.
    `statistics` says that a norm follows: kernels then leave the sums that it needs. Raises ValueError where shapes do
    not agree, TypeError for a conversion that is not between floating dtypes.
    """
    _check(x, x2, weight, bias, emb, residual, residual2, skip_weight, skip_bias, upsample)
    if norm_weight is not None:
        norm = norm_weight, norm_bias, scale, shift
        check_norm("norm_silu_conv2d", x.shape[0], weight.shape[-1], num_groups, *norm)
    require_floats("norm_silu_conv2d", x, weight, bias, norm_weight, norm_bias, scale, shift, emb)
    norm_weight, norm_bias, scale, shift, emb = map(as_wide, (norm_weight, norm_bias, scale, shift, emb))
    own = dtype = x.dtype if dtype is None else np.dtype(dtype)
    if dtype != x.dtype:
        if not (is_float(x.dtype) and is_float(dtype)):
            raise TypeError(
                f"norm_silu_conv2d: from {x.dtype} to {dtype}: both must be floating; use .astype('float32')"
            )
        plain = x2 is None and residual is None and not upsample and (norm_weight is None or is_low(x.dtype))
        taps = weight.shape if weight.ndim == 4 else (weight.shape[0], 1, 1, weight.shape[1])
        if not (x.device == "cuda" and plain and table.casts(x.shape, x.dtype, taps, dtype, emb is not None)):
            own = _narrower(x.dtype, dtype)
            x = astype(x, own)
    x2, residual, residual2 = (_converted(t, own) for t in (x2, residual, residual2))
    out = NormSiluConv2d.apply(
        x, x2, weight, bias, norm_weight, norm_bias, scale, shift, emb, residual, residual2, skip_weight, skip_bias,
        num_groups=num_groups, eps=eps, silu=silu, upsample=upsample, relu=relu, statistics=statistics, dtype=own,
    )
    return astype(out, dtype)


def _check(x: Tensor, x2: Tensor | None, weight: Tensor, bias: Tensor | None, emb: Tensor | None,
           residual: Tensor | None, residual2: Tensor | None, skip_weight: Tensor | None, skip_bias: Tensor | None,
           upsample: bool) -> None:
    """Raise ValueError where shapes do not agree, but for those of the norm."""
    channels = x.shape[-1] + (0 if x2 is None else x2.shape[-1])
    if x.ndim != 4 or weight.ndim not in (2, 4) or weight.shape[-1] != channels:
        raise ValueError(
            f"norm_silu_conv2d: x {x.shape} (N, H, W, C), {channels} channels in all, does not fit weight "
            f"{weight.shape} (K, [R, S,] C)"
        )
    check_bias("norm_silu_conv2d", bias, weight.shape[0])
    sources = [source.shape[-1] for source in (residual, residual2) if source is not None]
    if skip_weight is not None:
        if residual is None or skip_weight.shape != (weight.shape[0], 1, 1, sum(sources)):
            raise ValueError(
                f"norm_silu_conv2d: skip_weight {skip_weight.shape} is not (K, 1, 1, C) of weight {weight.shape} and "
                f"of a residual of {sum(sources)} channels"
            )
        check_bias("norm_silu_conv2d", skip_bias, weight.shape[0])
    elif residual2 is not None:
        raise ValueError("norm_silu_conv2d: residual2 needs a skip_weight; add it to residual without one")
    else:
        sources = [weight.shape[0]]
    times, kernel = 2 if upsample else 1, weight.shape[1:3] if weight.ndim == 4 else (1, 1)
    size = out_size((x.shape[1] * times, x.shape[2] * times), kernel, (1, 1), pair(kernel[0] // 2))
    for name, operand, shape in (
        ("x2", x2, (*x.shape[:3], channels - x.shape[3])),
        ("emb", emb, (x.shape[0], weight.shape[0])),
        ("residual", residual, (x.shape[0], *size, sources[0])),
        ("residual2", residual2, (x.shape[0], *size, sources[-1])),
    ):
        if operand is not None and operand.shape != shape:
            raise ValueError(f"norm_silu_conv2d: {name} has shape {operand.shape}, not {shape}")


def _converted(x: Tensor | None, dtype: np.dtype) -> Tensor | None:
    """x in this dtype, itself where it offers a copy."""
    return x if x is None or x.operand(dtype).dtype == dtype else astype(x, dtype)
