"""Group norm (Wu and He 2018, eq. 1-6), optionally followed by a scale and shift per image and by SiLU.

One image's pixels are rows: (N, S, C). With centred = x - mean and gain = rstd·weight·(1 + scale) the output is
silu(centred·gain + offset). Batch norm is the same with all pixels as one image and groups of one channel.
"""

from __future__ import annotations

import math

import numpy as np

from cudiff.backend import Array, float32
from cudiff.cuda.accumulate import gradient_sum, gradient_sums, gradient_target
from cudiff.cuda.device import current_device, hopper
from cudiff.cuda.launch import blocks, empty, launch
from cudiff.cuda.mail import stream_mail
from cudiff.cuda.sums import add_rows, are_centred, empty_partials
from cudiff.cuda.waiting import together
from cudiff.function import Function
from cudiff.gradient import Kept, Vacant
from cudiff.ops.cast import as_wide, narrow, require_floats, widen
from cudiff.ops.gemm import MULTIPROCESSORS
from cudiff.ops.group_norm_sm90 import THREADS, clusters, sharing
from cudiff.tensor import Tensor
from cudiff.threads import cut, parallel_map


def statistics_numpy(x: Array, num_groups: int, eps: float) -> tuple[Array, Array]:
    """mean and rstd (N, G) of x (N, S, C); in two passes, so that a large mean costs no digits."""
    count = x.shape[1] * x.shape[2] // num_groups
    mean = _group_sums(_column_sums(x), num_groups) / count
    centred = x - _spread(mean, x.shape[2])
    rest = _group_sums(_column_sums(centred), num_groups) / count
    square = _group_sums(np.einsum("nsc,nsc->nc", centred, centred), num_groups) / count
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
    gate = np.negative(y, out=out[1])
    with np.errstate(over="ignore"):  # silu(-100) is -100/inf: the right limit
        np.exp(gate, out=gate)
    gate += 1
    np.reciprocal(gate, out=gate)
    y *= gate
    return y, gate


def group_norm_backward_numpy(dz: Array, x: Array, weight: Array, bias: Array, mean: Array, rstd: Array,
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


def _images(rows: Array) -> list[slice]:
    """A few images (N, S, C) each: all passes over them find them in the cache."""
    return cut(len(rows), 4 * math.prod(rows.shape[1:]) * rows.itemsize)


def _of(array: Array | None, part: slice) -> Array | None:
    return None if array is None else array[part]


def _affine(weight: Array, bias: Array, scale: Array | None, shift: Array | None) -> tuple[Array, Array]:
    """gamma and offset of z = gamma·xhat + offset, (N, 1, C) or (C,)."""
    if scale is None:
        return weight, bias if shift is None else bias + shift[:, None]
    factor = 1 + scale[:, None]
    return weight * factor, bias * factor if shift is None else bias * factor + shift[:, None]


def group_norm_forward_cuda(x: Array, x2: Array | None, weight: Array, bias: Array, num_groups: int, eps: float,
                            silu: bool = False, scale: Array | None = None, shift: Array | None = None,
                            partials: tuple[Array | None, Array | None] = (None, None)) -> tuple[Array, Array, Array]:
    """y (N, ..., C1 + C2), mean and rstd (N, G). `partials`: the sums that came with x and x2, where they did."""
    n, pixels, channels1, channels2 = _extent(x, x2)
    channels = channels1 + channels2
    y = empty((*x.shape[:-1], channels), x.dtype)
    mean, rstd = empty((n, num_groups), float32), empty((n, num_groups), float32)
    constants = kernel_constants(x, x2, y, parameters=(weight, bias, scale, shift))
    share = np.float64(num_groups / (pixels * channels))
    cut = None
    if constants["VEC"] and hopper():
        cut = clusters(pixels, channels1, channels2, num_groups, x.dtype.itemsize, n)
    if cut is not None and any(s is not None and p is None for s, p in zip((x, x2), partials, strict=True)):
        launch("group_norm_sm90", "forward", (n, cut.boxes.chunks, cut.cluster), THREADS,
               (cut.boxes.map(x), cut.boxes.map(x if x2 is None else x2), y, mean, rstd, weight, bias, scale, shift,
                num_groups, pixels, channels1, channels2, silu, cut.kept, share, eps),
               cut.bytes, **constants, **cut.constants)
        return y, mean, rstd
    sums = _partials_of(x, x2, partials)
    shared = 16 * max(256, channels)  # two doubles for each channel, or each thread
    given, found = (None, None), (mean, rstd)
    if max(sums[2], sums[5]) > _FEW_TILES or channels > _FEW_CHANNELS:
        few = max(1, 8 * num_groups // channels)  # groups for a block: of 8 channels, or one
        launch("group_norm", "finish_statistics", (n, blocks(num_groups, few)), 256,
               (*sums, channels1, channels2, mean, rstd, num_groups, few, share, eps),
               16 * max(256, few * channels // num_groups), **constants)
        sums, shared, given, found = (None, False, 0) * 2, 0, (mean, rstd), (None, None)
    tiles, chunks, across = _tiling(n, pixels, channels, constants, narrow=True)
    launch("group_norm", "normalize", (n * tiles, chunks), 256,
           (y, x, x2, weight, bias, scale, shift, *given, num_groups, pixels, channels1, channels2, tiles, across, silu,
            *sums, *found, share, eps), shared, **constants)
    return y, mean, rstd


_FEW_TILES, _FEW_CHANNELS = 64, 2048  # that every block of an image may add up anew


def _partials_of(x: Array, x2: Array | None, partials: tuple[Array | None, Array | None]) -> tuple:
    """For both sources: partials, made by a pass where none came; whether they are centred; tiles."""
    n, pixels, _, _ = _extent(x, x2)
    operands: list = []
    for source, sums in zip((x, x2), partials, strict=True):
        if source is not None and sums is None:
            constants, width = kernel_constants(source), source.shape[-1]
            tiles, chunks, across = _tiling(n, pixels, width, constants)
            sums = empty_partials(n, tiles, width, float32)
            launch("group_norm", "statistics", (n * tiles, chunks), 256,
                   (source, sums, pixels, width, tiles, across), **constants)
        operands += [None, False, 0] if sums is None else [sums, are_centred(sums), sums.shape[1]]
    return tuple(operands)


def group_norm_backward_cuda(dy: Array, x: Array, x2: Array | None, weight: Array, bias: Array, mean: Array,
                             rstd: Array, silu: bool = False, scale: Array | None = None, shift: Array | None = None, *,
                             needs: tuple[bool, ...], into: tuple[Array | Vacant | Kept | None, ...],
                             y: Array | None = None, sums: dict[int, Array] | None = None,
                             partials: Array | None = None) -> tuple[Array | None, ...]:
    """dx, dx2, dweight, dbias, dscale, dshift: None where `needs` says so, else where `gradient_target` says, for dx
    and dx2 `gradient_sum`, or `gradient_sums` for dx alone.

    The gradients of parameters, scale and shift are float32. `y`, where given, receives the output once more. `sums`,
    where given, receives at 0 and 1 the sums of dx and dx2, with what they had before, over tiles of pixels: float32
    (N, tiles, C). `partials`, where given, float32 (N, tiles, C, 2): the sums of dz and of dz·x, in float32 of
    dz·(x - mean), that came with dy, which is then dz, the gradient before SiLU (see `conv2d.dgrad_cuda`).
    """
    n, pixels, channels1, channels2 = _extent(x, x2)
    channels, groups = channels1 + channels2, mean.shape[1]
    if into[0] is into[1]:  # one tensor is both sources: two threads would add to an element at one time
        into = (into[0], None, *into[2:])
    affine = (weight, bias, scale, shift, mean, rstd, groups)
    shapes = (x.shape, x2 is not None and x2.shape, (channels,), (channels,), (n, channels), (n, channels))
    more = None  # a lone source's gradient so far may be of two terms
    if x2 is None and needs[0]:
        *dx, more = gradient_sums(into[0], x.shape, x.dtype)
        dx2: list[Array | None] = [None, more]
    else:
        dx, dx2 = ([*gradient_sum(into[i], shapes[i], x.dtype)] if needs[i] else [None, None] for i in (0, 1))
    dweight, dbias, dscale, dshift = (
        gradient_target(into[i], shapes[i], float32) if needs[i] else (None, False) for i in (2, 3, 4, 5)
    )
    results = tuple(target[0] for target in (dx, dx2, dweight, dbias, dscale, dshift))
    constants = kernel_constants(dy, x, x2, *dx, *dx2, y)
    plan = None
    if constants["VEC"] and partials is None and more is None and hopper():
        plan = sharing(pixels, channels1, channels2, groups, x.dtype.itemsize, n, current_device().multiprocessors)
    tiles, chunks, across = (plan.parts, 0, 0) if plan else _tiling(n, pixels, channels, constants, narrow=True)
    if sums is not None:
        sums |= {i: empty((n, tiles, (channels1, channels2)[i]), float32) for i in (0, 1) if needs[i]}
    own_sums = (None, None) if sums is None else (sums.get(0), sums.get(1))
    if plan:
        weights = needs[2] or needs[3]
        adding = plan.adding(n, channels) if weights else 0
        totals = empty((n, channels, 2), float32) if weights and not adding else None
        mail = stream_mail() if adding or plan.parts > 1 else None
        launch("group_norm_backward_sm90", "backward", plan.blocks(n) + adding, THREADS,
               (*map(plan.boxes.map, (x, x if x2 is None else x2, dy)), x, x2, dy, *dx, *dx2, y, *own_sums, totals,
                *dscale, *dshift, *dweight, *dbias, *affine, mail, n, pixels, channels1, channels2, silu, plan.parts,
                plan.kept),
               plan.bytes, cooperative=mail is not None, **constants, **plan.constants)
        if totals is not None:
            affine_gradients_cuda(totals, dweight, dbias)
        return results
    totals = empty((n, channels, 2), float32)
    modulation = (totals, *dscale, *dshift)
    extent = (pixels, channels1, channels2, tiles, across)
    activation = _SILU_DONE if silu and partials is not None else int(silu)
    if partials is None:
        partials = empty((n, tiles, channels, 2), float32)
        launch("group_norm", "backward_sums", (n * tiles, chunks), 256,
               (partials, dy, x, x2, *affine, *extent, silu), **constants)
    means, count, shared = None, partials.shape[1], 8 * (256 + channels)
    applies = needs[0] or needs[1] or y is not None
    if not applies or count > _FEW_TILES or channels > _FEW_CHANNELS:
        means = empty((n, groups, 2), float32)
        launch("group_norm", "finish_sums", n, 256,
               (partials, means, *modulation, *affine, pixels, channels, count), shared, **constants)
        partials, shared = None, 0
    if applies:
        launch("group_norm", "input_gradients", (n * tiles, chunks), 256,
               (*dx, *dx2, y, *own_sums, means, partials, count, *modulation, dy, x, x2, *affine, *extent, activation),
               _STREAM_BYTES + shared, **constants)
    affine_gradients_cuda(totals, dweight, dbias)
    return results


def affine_gradients_cuda(totals: Array, dweight: tuple[Array | None, bool],
                          dbias: tuple[Array | None, bool]) -> None:
    """Sum totals (N, C, 2), of dz and of dz·xhat, over N into dbias and dweight: (array or None, whether to add)."""
    with together():
        for offset, (out, add) in enumerate((dbias, dweight)):
            if out is not None:
                add_rows(totals, out, add, step=2, offset=offset)


_SILU_DONE, _STREAM_BYTES = 2, 16 * 256 * 16  # of input_gradients


def _extent(x: Array, x2: Array | None) -> tuple[int, int, int, int]:
    """Images, pixels an image, and the channels of both sources."""
    return x.shape[0], math.prod(x.shape[1:-1]), x.shape[-1], 0 if x2 is None else x2.shape[-1]


def kernel_constants(*arrays: Array | None, parameters: tuple[Array | None, ...] = ()) -> dict:
    """T and VEC: packs of 16 bytes where all channels and addresses allow them. `parameters` must be float32."""
    for array in parameters:
        if array is not None and array.dtype != float32:
            raise TypeError("norms on CUDA take float32 weight, bias, scale and shift: use .astype('float32')")
    present = [array for array in arrays if array is not None]
    size = 16 // present[0].dtype.itemsize
    whole = all(array.shape[-1] % size == 0 and array.data.ptr % 16 == 0 for array in present)
    return {"T": present[0].dtype, "VEC": int(whole)}


def _tiling(n: int, pixels: int, channels: int, constants: dict, narrow: bool = False) -> tuple[int, int, int]:
    """Tiles an image, chunks of channels, packs a chunk: all blocks, two a multiprocessor, run at once.

    `narrow`: chunks of down to 8 packs, each with fewer channels to prepare, if as many blocks run and a thread has few
    pixels: of many, whole rows are read faster.
    """
    packs = channels // (16 // constants["T"].itemsize if constants["VEC"] else 1)
    at_once, least = 2 * MULTIPROCESSORS, blocks(packs, 32)

    def cut(chunks: int) -> tuple[int, int]:
        """Pixels that a block covers at once, and how often it does."""
        step = 256 // blocks(packs, chunks)
        return step, blocks(pixels, step * max(1, at_once // (n * chunks)))

    def filled(chunks: int) -> tuple[float, int]:
        count = n * chunks * max(1, at_once // (n * chunks))
        return count / blocks(count, at_once), chunks

    most = blocks(packs, 8) if narrow and constants["VEC"] and cut(least)[1] < 32 else least
    # Rounding up may leave the last of many chunks without a channel: such a cut is none.
    chunks = max((c for c in range(least, most + 1) if (c - 1) * blocks(packs, c) < packs), key=filled)
    return blocks(pixels, math.prod(cut(chunks))), chunks, blocks(packs, chunks)


class GroupNorm(Function):
    """See `group_norm`. x2's channels follow those of x; a group may hold channels of both."""

    adds_elsewhere = (0, 1)

    @staticmethod
    def forward_numpy(ctx, x, x2, weight, bias, scale, shift, num_groups, eps, silu):
        joined = widen(x if x2 is None else np.concatenate((x, x2), axis=-1))
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
        return narrow(y.reshape(joined.shape), x.dtype)

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        x, x2, weight, bias, scale, shift, mean, rstd, y, gate = ctx.saved
        joined = widen(x if x2 is None else np.concatenate((x, x2), axis=-1))
        rows = joined.reshape(len(x), -1, joined.shape[-1])
        wide_dout = widen(dout).reshape(rows.shape)
        dx = np.empty_like(rows)

        def gradients(part: slice) -> list[Array]:
            dz = wide_dout[part]
            if y is not None:
                slope = 1 - gate[part]
                slope *= y[part]
                slope += gate[part]
                slope *= dz
                dz = slope
            dx[part], *rest = group_norm_backward_numpy(
                dz, rows[part], weight, bias, mean[part], rstd[part], _of(scale, part), _of(shift, part)
            )
            return rest

        dweight, dbias, dscale, dshift = zip(*parallel_map(gradients, _images(rows)), strict=True)
        rest = sum(dweight), sum(dbias), np.concatenate(dscale), np.concatenate(dshift)
        dx = narrow(dx.reshape(joined.shape), x.dtype)
        if x2 is None:
            return dx, None, *rest
        return np.ascontiguousarray(dx[..., : x.shape[-1]]), np.ascontiguousarray(dx[..., x.shape[-1] :]), *rest

    @staticmethod
    def forward_cuda(ctx, x, x2, weight, bias, scale, shift, num_groups, eps, silu):
        y, mean, rstd = group_norm_forward_cuda(
            x, x2, weight, bias, num_groups, eps, silu, scale, shift, ctx.partials[:2]
        )
        ctx.silu, ctx.again = silu, False  # a caller may want backward to leave the output once more, in ctx.y
        ctx.dz_partials = None  # or give backward dz for dout, and its sums here
        ctx.save(x, x2, weight, bias, scale, shift, mean, rstd)
        return y

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        x, x2, weight, bias, scale, shift, mean, rstd = ctx.saved
        ctx.y = empty(dout.shape, dout.dtype) if ctx.again else None
        return group_norm_backward_cuda(
            dout, x, x2, weight, bias, mean, rstd, ctx.silu, scale, shift, needs=needs, into=into, y=ctx.y,
            sums=ctx.din_partials, partials=ctx.dz_partials,
        )


def group_norm(x: Tensor, weight: Tensor, bias: Tensor, num_groups: int = 32, eps: float = 1e-5, silu: bool = False,
               scale: Tensor | None = None, shift: Tensor | None = None, x2: Tensor | None = None) -> Tensor:
    """Normalise each group of channels of each image, then weight and bias, scale and shift, SiLU.

    out = norm(concat(x, x2))·weight + bias; out·(1 + scale) + shift where given; silu(out) if `silu`. Returns
    (N, ..., C) in x's dtype; the concatenation is never made on a GPU.

    x (N, ..., C1), x2 (N, ..., C2) or None, C = C1 + C2 a multiple of num_groups; weight and bias (C,), scale and
    shift (N, C), read as float32 where x is float32 or shorter. Raises ValueError where shapes do not agree, TypeError
    for integers. Source: Wu and He, Group Normalization, 2018.
    """
    if x2 is not None and (x2.shape[:-1] != x.shape[:-1] or x2.dtype != x.dtype):
        raise ValueError(f"group_norm: x {x.shape} {x.dtype} and x2 {x2.shape} {x2.dtype} differ before the channels")
    channels = x.shape[-1] + (0 if x2 is None else x2.shape[-1])
    norm = weight, bias, scale, shift
    check_norm("group_norm", x.shape[0], channels, num_groups, *norm)
    require_floats("group_norm", x, *norm)
    return GroupNorm.apply(x, x2, *map(as_wide, norm), num_groups=num_groups, eps=eps, silu=silu)


def check_norm(name: str, images: int, channels: int, num_groups: int, weight: Tensor | None, bias: Tensor | None,
               scale: Tensor | None, shift: Tensor | None) -> None:
    """Raise ValueError where what modulates a norm does not fit its (images, ..., channels)."""
    if num_groups < 1 or channels % num_groups:
        raise ValueError(f"{name}: {channels} channels do not divide into {num_groups} groups")
    for which, operand, shape in (("weight", weight, (channels,)), ("bias", bias, (channels,)),
                                  ("scale", scale, (images, channels)), ("shift", shift, (images, channels))):
        if operand is not None and operand.shape != shape:
            raise ValueError(f"{name}: the norm's {which} has shape {operand.shape}, not {shape}")
