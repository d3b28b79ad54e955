"""Group norm (Wu and He 2018, eq. 1-6), optionally followed by a scale and shift per image and by SiLU.

One image's pixels are rows: (N, S, C). With centred = x - mean and gain = rstd·weight·(1 + scale) the output is
silu(centred·gain + offset). Batch norm is the same with all pixels as one image and groups of one channel.
"""

from __future__ import annotations

import numpy as np

from cudiff.backend import Array
from cudiff.ops.elementwise import narrow, widen
from cudiff.tensor import Context, Function, Tensor


def statistics_numpy(x: Array, num_groups: int, eps: float) -> tuple[Array, Array]:
    """mean and rstd (N, G) of x (N, S, C); in two passes, so that a large mean costs no digits."""
    count = x.shape[1] * x.shape[2] // num_groups
    mean = _group_sums(_column_sums(x), num_groups) / count
    centred = x - _spread(mean, x.shape[2])
    rest = _group_sums(_column_sums(centred), num_groups) / count
    square = _group_sums(np.einsum("nsc,nsc->nc", centred, centred), num_groups) / count
    return mean + rest, 1 / np.sqrt(square - rest * rest + eps)


def normalize_numpy(x: Array, weight: Array, bias: Array, mean: Array, rstd: Array, silu: bool = False,
                    scale: Array | None = None, shift: Array | None = None) -> tuple[Array, Array | None]:
    """The output (N, S, C) and, with SiLU, the sigmoid of its argument, which saves the backward an exponential."""
    gain, offset = _affine(weight, bias, scale, shift)
    gain = gain * _spread(rstd, x.shape[2])
    y = x * gain
    y += offset - _spread(mean, x.shape[2]) * gain
    if not silu:
        return y, None
    gate = np.negative(y)
    with np.errstate(over="ignore"):  # silu(-100) is -100/inf: the right limit
        np.exp(gate, out=gate)
    gate += 1
    np.reciprocal(gate, out=gate)
    y *= gate
    return y, gate


def backward_numpy(dz: Array, x: Array, weight: Array, bias: Array, mean: Array, rstd: Array,
                   scale: Array | None = None, shift: Array | None = None,
                   constant_statistics: bool = False) -> tuple[Array, Array, Array, Array, Array]:
    """dx, dweight, dbias, dscale, dshift from dz (N, S, C), the gradient before SiLU.

    dx = gain·dz - rstd·(mean(gamma·dz) + xhat·mean(gamma·dz·xhat)), means over the group; its last two terms vanish
    where the statistics are constants.
    """
    channels, num_groups = x.shape[2], mean.shape[1]
    count = x.shape[1] * channels // num_groups
    gamma, _ = _affine(weight, bias, scale, shift)
    rstd_c = _spread(rstd, channels)
    centred = x - _spread(mean, channels)
    sums = _column_sums(dz)
    products = np.einsum("nsc,nsc->nc", dz, centred)[:, None] * rstd_c
    modulation = 1 if scale is None else 1 + scale[:, None]
    dweight, dbias = (modulation * products).sum((0, 1)), (modulation * sums).sum((0, 1))
    dscale, dshift = (weight * products + bias * sums)[:, 0], sums[:, 0]
    dx = dz * (gamma * rstd_c)
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


def _affine(weight: Array, bias: Array, scale: Array | None, shift: Array | None) -> tuple[Array, Array]:
    """gamma and offset of z = gamma·xhat + offset, (N, 1, C) or (C,)."""
    if scale is None:
        return weight, bias if shift is None else bias + shift[:, None]
    factor = 1 + scale[:, None]
    return weight * factor, bias * factor if shift is None else bias * factor + shift[:, None]


class GroupNorm(Function):
    """See `group_norm`. x2's channels follow those of x; a group may hold channels of both."""

    @staticmethod
    def forward_numpy(ctx: Context, x, x2, weight, bias, scale, shift, num_groups, eps, silu):
        joined = widen(x if x2 is None else np.concatenate((x, x2), axis=-1))
        rows = joined.reshape(len(x), -1, joined.shape[-1])
        mean, rstd = statistics_numpy(rows, num_groups, eps)
        y, gate = normalize_numpy(rows, weight, bias, mean, rstd, silu, scale, shift)
        if any(ctx.needs):
            ctx.save(x, x2, weight, bias, scale, shift, mean, rstd, y if silu else None, gate)
        return narrow(y.reshape(joined.shape), x.dtype)

    @staticmethod
    def backward_numpy(ctx: Context, dout, needs, into):
        x, x2, weight, bias, scale, shift, mean, rstd, y, gate = ctx.saved
        joined = widen(x if x2 is None else np.concatenate((x, x2), axis=-1))
        rows = joined.reshape(len(x), -1, joined.shape[-1])
        dz = widen(dout).reshape(rows.shape)
        if y is not None:
            slope = 1 - gate
            slope *= y
            slope += gate
            slope *= dz
            dz = slope
        dx, *rest = backward_numpy(dz, rows, weight, bias, mean, rstd, scale, shift)
        dx = narrow(dx.reshape(joined.shape), x.dtype)
        if x2 is None:
            return dx, None, *rest
        return np.ascontiguousarray(dx[..., : x.shape[-1]]), np.ascontiguousarray(dx[..., x.shape[-1] :]), *rest


def group_norm(x: Tensor, weight: Tensor, bias: Tensor, num_groups: int = 32, eps: float = 1e-5, silu: bool = False,
               scale: Tensor | None = None, shift: Tensor | None = None, x2: Tensor | None = None) -> Tensor:
    """Normalise each group of channels of each image, then weight and bias, scale and shift, SiLU.

    out = norm(concat(x, x2))·weight + bias; out·(1 + scale) + shift where given; silu(out) if `silu`. Returns
    (N, ..., C) in x's dtype; the concatenation is never made on a GPU.

    x (N, ..., C1), x2 (N, ..., C2) or None, C = C1 + C2 a multiple of num_groups; weight and bias (C,), scale and
    shift (N, C), float32 where x is float32 or shorter. Raises ValueError where shapes do not agree.
    Source: Wu and He, Group Normalization, 2018.
    """
    channels = x.shape[-1] + (0 if x2 is None else x2.shape[-1])
    if x2 is not None and x2.shape[:-1] != x.shape[:-1]:
        raise ValueError(f"group_norm: x of shape {x.shape} and x2 of shape {x2.shape} differ before the channels")
    if channels % num_groups:
        raise ValueError(f"group_norm: {channels} channels do not divide into {num_groups} groups")
    for name, operand, shape in (("weight", weight, (channels,)), ("bias", bias, (channels,)),
                                 ("scale", scale, (x.shape[0], channels)), ("shift", shift, (x.shape[0], channels))):
        if operand is not None and operand.shape != shape:
            raise ValueError(f"group_norm: {name} has shape {operand.shape}, not {shape}")
    return GroupNorm.apply(x, x2, weight, bias, scale, shift, num_groups=num_groups, eps=eps, silu=silu)
