"""Group norm (Wu and He 2018, eq. 1-6), optionally followed by a scale and shift per image and by SiLU.

One image's pixels are rows: (N, S, C). With centred = x - mean and gain = rstd·weight·(1 + scale) the output is
silu(centred·gain + offset). Batch norm is the same with all pixels as one image and groups of one channel.
"""

from __future__ import annotations

import functools
import math
import operator

import numpy as np

from cudiff.backend import Array
from cudiff.cuda.kernels.norm import table
from cudiff.function import Function
from cudiff.ops.cast import as_wide, downcast, require_float_dtypes, upcast
from cudiff.ops.elementwise import sigmoid_numpy, silu_backward_numpy
from cudiff.tensor import Tensor
from cudiff.threads import cut, parallel_map, unflagged

__all__ = ["group_norm"]

Shape = tuple[int, ...] | None


@unflagged
def statistics_numpy(x: Array, num_groups: int, eps: float) -> tuple[Array, Array]:
    """mean and rstd (N, G) of x (N, S, C); in two passes, so that a large mean costs no digits."""
    count = x.shape[1] * x.shape[2] // num_groups
    mean = _group_sums(_column_sums(x), num_groups) / count
    centred = x - _spread(mean, x.shape[2])
    rest = _group_sums(_column_sums(centred), num_groups) / count
    square = _group_sums(_column_sums(np.square(centred, out=centred)), num_groups) / count
    return mean + rest, 1 / np.sqrt(square - rest * rest + eps)


def normalize_numpy(x: Array, weight: Array, bias: Array, mean: Array, rstd: Array, silu: bool = False,
                    scale: Array | None = None, shift: Array | None = None,
                    out: tuple[Array | None, Array | None] = (None, None)) -> tuple[Array, Array | None]:
    """The output (N, S, C) and, with SiLU, the sigmoid of its argument, which saves the backward an exponential."""
    gain, offset = _affine(weight, bias, scale, shift)
    gain = gain * _spread(rstd, x.shape[2])
    y = np.multiply(x, gain, out=out[0])
    y += offset - _spread(mean, x.shape[2]) * gain
    if not silu:
        return y, None
    gate = sigmoid_numpy(y, out=out[1])
    y *= gate
    return y, gate


@unflagged
def group_norm_backward_numpy(d_preact: Array, x: Array, weight: Array, bias: Array, mean: Array, rstd: Array,
                              scale: Array | None = None, shift: Array | None = None,
                              constant_statistics: bool = False,
                              out: Array | None = None) -> tuple[Array, Array, Array, Array, Array]:
    """dx (in `out`, where given), dweight, dbias, dscale, dshift from d_preact (N, S, C), the gradient before SiLU.

    dx = gain·d_preact - rstd·(mean(gamma·d_preact) + xhat·mean(gamma·d_preact·xhat)), means over the group; its last
    two terms vanish where the statistics are constants.
    """
    channels, num_groups = x.shape[2], mean.shape[1]
    count = x.shape[1] * channels // num_groups
    gamma, _ = _affine(weight, bias, scale, shift)
    rstd_c = _spread(rstd, channels)
    centred = x - _spread(mean, channels)
    sums = _column_sums(d_preact)
    products = _column_sums(d_preact * centred) * rstd_c
    modulation = 1 if scale is None else 1 + scale[:, None]
    dweight, dbias = (modulation * products).sum((0, 1)), (modulation * sums).sum((0, 1))
    dscale, dshift = (weight * products + bias * sums)[:, 0], sums[:, 0]
    dx = np.multiply(d_preact, gamma * rstd_c, out=out)
    if not constant_statistics:
        first = _group_sums(gamma * sums, num_groups) * rstd / count
        second = _group_sums(gamma * products, num_groups) * rstd * rstd / count
        centred *= _spread(second, channels)
        centred += _spread(first, channels)
        dx -= centred
    return dx, dweight, dbias, dscale, dshift


def _column_sums(x: Array) -> Array:
    """(N, S, C) → (N, 1, C); a product with ones is several times faster than np.sum."""
    return np.matmul(np.ones((1, x.shape[1]), x.dtype), x)


def _group_sums(columns: Array, num_groups: int) -> Array:
    return columns.reshape(columns.shape[0], num_groups, -1).sum(2)


def _spread(groups: Array, channels: int) -> Array:
    """(N, G) → (N, 1, C): each channel its group's value."""
    return np.repeat(groups, channels // groups.shape[1], axis=1)[:, None]


def _images(rows: Array) -> list[slice]:
    """Slices of a few images (N, S, C), few enough to stay in the cache for all passes."""
    return cut(len(rows), 4 * math.prod(rows.shape[1:]) * rows.itemsize)


def _of(array: Array | None, part: slice) -> Array | None:
    return None if array is None else array[part]


def _affine(weight: Array, bias: Array, scale: Array | None, shift: Array | None) -> tuple[Array, Array]:
    """gamma and offset of z = gamma·xhat + offset, (N, 1, C) or (C,)."""
    if scale is None:
        return weight, bias if shift is None else bias + shift[:, None]
    factor = 1 + scale[:, None]
    return weight * factor, bias * factor if shift is None else bias * factor + shift[:, None]


class GroupNorm(Function):
    """See `group_norm`. x2's channels follow those of x; a group may hold channels of both."""

    adds_elsewhere = (0, 1)

    @staticmethod
    def forward_numpy(ctx, x, x2, weight, bias, scale, shift, num_groups, eps, silu):
        joined = upcast(x if x2 is None else np.concatenate((x, x2), axis=-1))
        rows = joined.reshape(len(x), -1, joined.shape[-1])
        y, gate = np.empty_like(rows), np.empty_like(rows) if silu else None

        def normalize(part: slice) -> tuple[Array, Array]:
            mean, rstd = statistics_numpy(rows[part], num_groups, eps)
            normalize_numpy(rows[part], weight, bias, mean, rstd, silu, _of(scale, part), _of(shift, part),
                            out=(y[part], _of(gate, part)))
            return mean, rstd

        statistics = parallel_map(normalize, _images(rows))
        mean, rstd = (np.concatenate(arrays) for arrays in zip(*statistics, strict=True))
        if any(ctx.needs):
            ctx.save(x, x2, weight, bias, scale, shift, mean, rstd, y if silu else None, gate)
        return downcast(y.reshape(joined.shape), x.dtype)

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        x, x2, weight, bias, scale, shift, mean, rstd, y, gate = ctx.saved
        joined = upcast(x if x2 is None else np.concatenate((x, x2), axis=-1))
        rows = joined.reshape(len(x), -1, joined.shape[-1])
        wide_dout = upcast(dout).reshape(rows.shape)
        dx = np.empty_like(rows)

        def gradients(part: slice) -> list[Array]:
            d_preact = wide_dout[part]
            if y is not None:
                d_preact = silu_backward_numpy(d_preact, gate[part], y[part])
            _, *rest = group_norm_backward_numpy(
                d_preact, rows[part], weight, bias, mean[part], rstd[part], _of(scale, part), _of(shift, part),
                out=dx[part],
            )
            return rest

        dweight, dbias, dscale, dshift = zip(*parallel_map(gradients, _images(rows)), strict=True)
        rest = sum(dweight), sum(dbias), np.concatenate(dscale), np.concatenate(dshift)
        dx = downcast(dx.reshape(joined.shape), x.dtype)
        if x2 is None:
            return dx, None, *rest
        return np.ascontiguousarray(dx[..., : x.shape[-1]]), np.ascontiguousarray(dx[..., x.shape[-1] :]), *rest

    @staticmethod
    def forward_cuda(ctx, x, x2, weight, bias, scale, shift, num_groups, eps, silu):
        y, mean, rstd = table.forward(x, x2, weight, bias, num_groups, eps, silu, scale, shift, ctx.statistics[:2])
        ctx.silu = silu
        ctx.save(x, x2, weight, bias, scale, shift, mean, rstd)
        return y

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        x, x2, weight, bias, scale, shift, mean, rstd = ctx.saved
        return table.backward(dout, x, x2, weight, bias, mean, rstd, ctx.silu, scale, shift, needs=needs, into=into,
                              din_statistics=ctx.din_statistics)


def group_norm(x: Tensor, weight: Tensor, bias: Tensor, num_groups: int = 32, eps: float = 1e-5, silu: bool = False,
               scale: Tensor | None = None, shift: Tensor | None = None, x2: Tensor | None = None) -> Tensor:
    """Normalise each group of channels of each image, then apply weight and bias, scale and shift, and SiLU.

    out = norm(concat(x, x2))·weight + bias; out·(1 + scale) + shift where given; silu(out) if `silu`. Returns
    (N, ..., C) in x's dtype. On a GPU x and x2 are not concatenated.

    x (N, ..., C1), x2 (N, ..., C2) or None, C = C1 + C2 a multiple of num_groups; weight and bias (C,), scale and
    shift (N, C), read as float32 where x is float32 or 16-bit. Raises ValueError where shapes do not agree, TypeError
    for integers. Source: Wu and He, Group Normalization, 2018.
    """
    given, num_groups = (x, x2, weight, bias, scale, shift), operator.index(num_groups)  # kernels take Python's numbers
    _check(num_groups, *[(None, None) if t is None else (t.shape, t.dtype) for t in given])
    return GroupNorm.apply(x, x2, *as_wide(*given[2:]), num_groups=num_groups, eps=eps, silu=silu)


@functools.cache
def _check(num_groups: int, *given: tuple[Shape, np.dtype | None]) -> None:
    """Raise as `group_norm` for inputs of these shapes and dtypes."""
    (x, x2, *norm), dtypes = zip(*given, strict=True)
    if x2 is not None and (x2[:-1] != x[:-1] or dtypes[1] != dtypes[0]):
        raise ValueError(f"group_norm: x {x} {dtypes[0]} and x2 {x2} {dtypes[1]} differ before the channels")
    if len(x) < 2:
        raise ValueError(f"group_norm: x of shape {x} is not (N, ..., C)")
    check_norm("group_norm", x[0], x[-1] + (0 if x2 is None else x2[-1]), num_groups, *norm)
    for name, shape in (("x", x), ("x2", x2)):
        if shape is not None and not math.prod(shape):
            raise ValueError(f"group_norm: {name} of shape {shape} holds nothing to normalise")
    require_float_dtypes("group_norm", (dtypes[0], *dtypes[2:]))


def check_norm(name: str, images: int, channels: int, num_groups: int, weight: Shape, bias: Shape, scale: Shape,
               shift: Shape) -> None:
    """Raise ValueError where a norm's parameters do not fit (images, ..., channels), or there are no images."""
    if not images:
        raise ValueError(f"{name}: there are no images to normalise: the first axis has size 0")
    if num_groups < 1 or not channels or channels % num_groups:
        raise ValueError(f"{name}: {channels} channels do not divide into {num_groups} groups")
    for which, given, shape in (("weight", weight, (channels,)), ("bias", bias, (channels,)),
                                  ("scale", scale, (images, channels)), ("shift", shift, (images, channels))):
        if given is not None and given != shape:
            raise ValueError(f"{name}: the norm's {which} has shape {given}, not {shape}")
