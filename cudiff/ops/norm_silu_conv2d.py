"""The unit of the U-Net as one operation: norm, SiLU, convolution, additions to its result, ReLU."""

from __future__ import annotations

import functools
from operator import index
from typing import Any, Final, NamedTuple

import numpy as np

from cudiff.backend import Array, float32, float64, is_float, is_low
from cudiff.cuda.accumulate import gradient_sum, gradient_target
from cudiff.cuda.kernels.convolution import table
from cudiff.cuda.kernels.convolution.problem import DGRAD, WGRAD, Norm, Operands, Skip
from cudiff.cuda.kernels.gemm.product import Epilogue, as_float32
from cudiff.cuda.kernels.gemm.table import linear as linear_cuda
from cudiff.cuda.kernels.norm import table as norms
from cudiff.cuda.kernels.norm.problem import NO_DROPOUT
from cudiff.cuda.kernels.pool import TWICE, sum_windows
from cudiff.cuda.kernels.shape import at_16_bytes
from cudiff.cuda.launch import empty
from cudiff.cuda.sums import add_rows
from cudiff.function import Function
from cudiff.ops import elementwise
from cudiff.ops.cast import as_wide, astype, require_float_dtypes
from cudiff.ops.conv2d import check_bias, conv2d, out_size
from cudiff.ops.dropout import check_p, dropout_of
from cudiff.ops.dropout import dropout as drop
from cudiff.ops.group_norm import check_norm, group_norm
from cudiff.ops.matmul import linear
from cudiff.ops.pool import upsample_nearest
from cudiff.ops.random import Generator
from cudiff.ops.reduce import sum_array, sum_rows_cuda
from cudiff.ops.shape import concatenate, reshape
from cudiff.statistics import Kind
from cudiff.tensor import Tensor

__all__ = ["norm_silu_conv2d"]


def unfused(x, x2, norm_weight, norm_bias, scale, shift, weight, bias, emb, residual, residual2, skip_weight, skip_bias,
            num_groups, eps, silu, upsample, relu, statistics, dtype, dropout):
    """`norm_silu_conv2d` by separate operations."""
    h = x if x2 is None else concatenate([x, x2], axis=3)
    if norm_weight is not None:
        h = group_norm(h, norm_weight, norm_bias, num_groups, eps, silu, scale, shift)
    if dropout is not None:
        h = drop(h, *dropout)
    if upsample:
        h = upsample_nearest(h, 2)
    out = linear(h, weight, bias) if weight.ndim == 2 else conv2d(h, weight, bias, padding=weight.shape[1] // 2)
    if emb is not None:
        out = out + reshape(astype(emb, out.dtype), (emb.shape[0], 1, 1, emb.shape[1]))
    if skip_weight is not None:
        residual = residual if residual2 is None else concatenate([residual, residual2], axis=3)
        residual = conv2d(residual, skip_weight, skip_bias)
    out = out if residual is None else out + residual
    return elementwise.relu(out) if relu else out


class Inputs(NamedTuple):
    """The inputs of `NormSiluConv2d`: arrays, or one thing for each, such as its gradient. The first NORM are the group
    norm's, in its order."""

    x: Any
    x2: Any
    norm_weight: Any
    norm_bias: Any
    scale: Any
    shift: Any
    weight: Any
    bias: Any
    emb: Any
    residual: Any
    residual2: Any
    skip_weight: Any
    skip_bias: Any


NORM: Final = 6
WEIGHT, BIAS, EMB, RESIDUAL, RESIDUAL2, SKIP_WEIGHT, SKIP_BIAS = range(NORM, len(Inputs._fields))  # places among Inputs
WIDE = ("norm_weight", "norm_bias", "scale", "shift", "emb")  # read as float32, or as float64
SOURCES = ("x2", "residual", "residual2")  # read in the dtype of the computation


class NormSiluConv2d(Function):
    """See `norm_silu_conv2d`. `dtype` is x's unless `table.casts`."""

    compose = staticmethod(unfused)
    adds_elsewhere = (0, 1)

    @classmethod
    def operand_dtype(cls, inputs, attrs):
        own, wanted = inputs[0]._data.dtype, attrs["dtype"]
        return own if own.itemsize < wanted.itemsize else wanted

    @staticmethod
    def forward_cuda(ctx, x, x2, norm_weight, norm_bias, scale, shift, weight, bias, emb, residual, residual2,
                     skip_weight, skip_bias, num_groups, eps, silu, upsample, relu, statistics, dtype, dropout):
        h, h2, addend, skip, norm, kernel = x, None, residual, None, None, weight.shape[1:-1] or (1, 1)
        shape = *x.shape[:3], weight.shape[-1]
        ctx.dropout = NO_DROPOUT if dropout is None else dropout_of(shape, *dropout)
        if norm_weight is not None:
            h, mean, rstd = norms.forward(x, x2, norm_weight, norm_bias, num_groups, eps, silu, scale, shift,
                                          ctx.statistics[:2], ctx.dropout)
            norm = Norm(silu, x, x2, norm_weight, norm_bias, scale, shift, mean, rstd)
        elif x2 is not None:
            h2 = x2  # read in place
        elif dtype != h.dtype and is_low(h.dtype):
            h = at_16_bytes(h)  # conv2d_few_channels reads packs of many channels
        ctx.upsample, ctx.dtype, ctx.norm = upsample, x.dtype, norm
        # The norm's backward recomputes h for the weight's gradient, so h is not saved.
        recomputed = norm is not None and True in ctx.needs[:NORM]
        times = 2 if upsample else 1
        ctx.padding = padding = (kernel[0] // 2,) * 2
        n, height, width, channels = h.shape
        ctx.shape = n, height * times, width * times, channels  # of the convolution's input
        out = empty((n, *out_size(ctx.shape[1:3], kernel, (1, 1), padding), len(weight)), dtype)
        if skip_weight is not None:
            skip, addend = Skip(residual, residual2, skip_weight, as_float32(skip_bias)), None
        bias = bias if bias is None or bias.dtype == float32 else bias.astype(float32)
        operands = Operands(h, weight, out, Epilogue(bias, emb, addend), h2, skip)
        ctx.out_statistics = table.fprop(operands, (1, 1), padding, statistics=statistics, relu=relu, upsample=upsample)
        ctx.save(None if recomputed else h, h2, weight, residual, residual2, skip_weight, out if relu else None)
        return out

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        grads = [None] * len(needs)
        h, h2, weight, _, residual2, skip_weight, out = ctx.saved
        sums, mixed = ctx.dout_sums, dout.dtype != ctx.dtype
        if h2 is not None or residual2 is not None or (mixed and is_low(dout.dtype)):
            dout = at_16_bytes(dout)  # pairs are read by TMA, many channels by conv2d_few_channels in packs
        if out is not None:
            dout, statistics = elementwise.relu_backward_cuda(dout, out)
            sums = None if statistics is None else statistics.sums
        _vector_gradients(dout, sums, needs, into, grads)
        if h2 is not None:
            _pair_gradients(ctx, dout, weight, h.shape[3], needs, into, grads)
        elif True in needs[:NORM]:
            _input_gradients(ctx, dout, weight, needs, into, grads)
        if skip_weight is None and needs[RESIDUAL]:
            grads[RESIDUAL] = dout
        if needs[WEIGHT]:
            h = ctx.h_recomputed if h is None else h
            grads[WEIGHT], add = gradient_target(into[WEIGHT], weight.shape, float32)
            given = Operands(h, grads[WEIGHT], dout, x2=h2, add=add)
            table.wgrad(given, (1, 1), ctx.padding, upsample=ctx.upsample)
        if skip_weight is not None:
            _skip_gradients(ctx, dout, needs, into, grads)
        return tuple(grads)


def _vector_gradients(dout: Array, sums: Array | None, needs: tuple, into: tuple, grads: list) -> None:
    """Put the gradients of emb and of both biases, sums of dout, into their places in `grads`, as the functions below
    do with theirs. sums: those over tiles of pixels, or None."""
    if sums is not None and len(sums) != len(dout):  # a batch norm's, of all images together
        sums = None
    if sums is None and (needs[EMB] or (needs[BIAS] and needs[SKIP_BIAS])):
        sums = sum_array(dout, (1, 2), dtype=float32)[:, None]
    if needs[EMB]:
        assert sums is not None
        grads[EMB], add = gradient_target(into[EMB], sums.shape[::2], float32)
        add_rows(sums, grads[EMB], add)
    for bias in (BIAS, SKIP_BIAS):
        if needs[bias]:
            grads[bias] = sum_rows_cuda(dout, into[bias], sums)


def _pair_gradients(ctx: Any, dout: Array, weight: Array, split: int, needs: tuple, into: tuple, grads: list) -> None:
    """The gradients of x, which has `split` channels, and of x2. No norm follows them."""
    for i, columns in enumerate((weight[..., :split], weight[..., split:])):
        if needs[i]:
            shape = *ctx.shape[:3], columns.shape[-1]
            out, addend = gradient_sum(None if ctx.upsample else into[i], shape, dout.dtype)
            table.dgrad(Operands(dout, columns, out, Epilogue(addend=addend)), (1, 1), ctx.padding)
            grads[i] = sum_windows(out, TWICE, 1.0, None, into[i])[0] if ctx.upsample else out


def _input_gradients(ctx: Any, dout: Array, weight: Array, needs: tuple, into: tuple, grads: list) -> None:
    """The gradient of x, or those of a norm's inputs. Then ctx.h_recomputed is its output, for wgrad."""
    slot = into[0] if ctx.norm is None else None
    mixed, sums_wanted = dout.dtype != ctx.dtype, ctx.norm is None and not ctx.upsample
    out, addend = gradient_sum(None if ctx.upsample or mixed else slot, ctx.shape, ctx.dtype)
    given = Operands(dout, weight, out, norm=None if ctx.upsample or ctx.dropout.mask is not None else ctx.norm)
    if addend is not None:
        given = given._replace(epilogue=Epilogue(addend=addend))
    statistics = table.dgrad(given, (1, 1), ctx.padding, sums=sums_wanted)
    if ctx.upsample:
        out, statistics = sum_windows(out, TWICE, 1.0, Kind.SUMS if ctx.norm is None else None, slot)
    if ctx.norm is None:
        ctx.din_statistics[0], grads[0] = statistics, out
        return
    ctx.h_recomputed = out if needs[WEIGHT] else None  # its own array took 2 to 11 % more memory for a step
    silu, x, x2, norm_weight, norm_bias, scale, shift, mean, rstd = ctx.norm
    grads[:NORM] = norms.backward(  # x and x2 are the first inputs of both operations, so their statistics are too
        out, x, x2, norm_weight, norm_bias, mean, rstd, silu, scale, shift, needs=needs[:NORM], into=into[:NORM],
        y=ctx.h_recomputed, din_statistics=ctx.din_statistics, statistics=statistics,
        dropout=ctx.dropout,
    )


def _skip_gradients(ctx: Any, dout: Array, needs: tuple, into: tuple, grads: list) -> None:
    """The gradients of the skip path's weight and of its one or two sources."""
    *_, residual, residual2, skip_weight, _ = ctx.saved
    if needs[SKIP_WEIGHT]:
        grads[SKIP_WEIGHT], add = gradient_target(into[SKIP_WEIGHT], skip_weight.shape, float32)
        linear_cuda(WGRAD, Operands(residual, grads[SKIP_WEIGHT], dout, x2=residual2, add=add))
    split, adds = residual.shape[3], {}
    for i, source in ((RESIDUAL, residual), (RESIDUAL2, residual2)):
        if needs[i]:
            grads[i], adds[i] = gradient_target(into[i], source.shape, source.dtype)
    if len(adds) == 2 and not any(adds.values()):
        linear_cuda(DGRAD, Operands(dout, skip_weight, grads[RESIDUAL], x2=grads[RESIDUAL2]))
        return
    for i, add in adds.items():
        columns = skip_weight[..., :split] if i == RESIDUAL else skip_weight[..., split:]
        linear_cuda(DGRAD, Operands(dout, columns, grads[i], Epilogue(addend=grads[i] if add else None)))


def norm_silu_conv2d(x: Tensor, x2: Tensor | None = None, *, weight: Tensor, bias: Tensor | None = None,
                     norm_weight: Tensor | None = None, norm_bias: Tensor | None = None, scale: Tensor | None = None,
                     shift: Tensor | None = None, emb: Tensor | None = None, residual: Tensor | None = None,
                     residual2: Tensor | None = None, skip_weight: Tensor | None = None,
                     skip_bias: Tensor | None = None, num_groups: int = 32, eps: float = 1e-5, silu: bool = True,
                     upsample: bool = False, relu: bool = False, statistics: bool = True, dtype: Any = None,
                     dropout: tuple[float, Generator, int] | None = None) -> Tensor:
    """The unit of the U-Net: group norm, SiLU and convolution of concat(x, x2), plus an embedding and a skip path.

    h = silu(group_norm(concat(x, x2)) · (1 + scale) + shift) where norm_weight is given, without SiLU unless `silu`;
    else concat(x, x2). Dropout of h where `dropout` is given; twice as high and wide where `upsample`.
    out = conv2d(h, weight, bias, padding=R // 2) + emb[:, None, None, :], plus residual, or
    conv2d(concat(residual, residual2), skip_weight, skip_bias) where skip_weight is given; ReLU if `relu`.

    x (N, H, W, C1), x2 (N, H, W, C2), weight (K, R, S, C1 + C2) or (K, C1 + C2), norm_weight and norm_bias (C1 + C2,),
    scale and shift (N, C1 + C2) and emb (N, K) read as float32, residual like out without skip_weight; x2 and residuals
    of another dtype are converted. dtype: the result's, x's unless given. The narrower of both is that of the
    computation, but a GPU's convolution between few channels and many writes a float32 result without rounding it.
    statistics: whether a norm follows, for which kernels then compute channel statistics. dropout: p, generator and
    stream, as `dropout` takes them, or None. Raises ValueError where shapes do not agree and for dropout without a norm
    or of a p outside [0, 1) or by a generator on another device, TypeError for a conversion that is not between
    floating dtypes.
    """
    given = (x, x2, norm_weight, norm_bias, scale, shift, weight, bias, emb, residual, residual2, skip_weight,
             skip_bias)
    if dropout is not None:
        p, generator, stream = dropout
        check_p(p)
        if norm_weight is None:
            raise ValueError("norm_silu_conv2d: dropout follows a norm: use ops.dropout where there is none")
        dropout = (float(p), generator, stream) if p else None
    kinds = tuple([(None, None) if t is None else (t._data.shape, t._data.dtype) for t in given])
    own = dtype = x._data.dtype if dtype is None else np.dtype(dtype)
    if not _reads_as_they_are(kinds, dtype, num_groups, upsample):
        given, own = _converted(Inputs(*given), dtype, upsample)
    out = NormSiluConv2d.apply(*given, num_groups=index(num_groups), eps=eps, silu=silu, upsample=upsample, relu=relu,
                               statistics=statistics, dtype=own, dropout=dropout)
    return out if own == dtype else astype(out, dtype)


def _converted(given: Inputs, dtype: np.dtype, upsample: bool) -> tuple[Inputs, np.dtype]:
    """The inputs converted for a result of `dtype`, and the dtype of the computation."""
    x, own = given.x, dtype
    if dtype != x.dtype:
        plain = (given.x2 is None and given.residual is None and not upsample
                 and (given.norm_weight is None or is_low(x.dtype)))
        if not (_casts(x, given.weight, dtype, given.emb is not None) and plain):
            own = min(dtype, x.dtype, key=lambda kind: kind.itemsize)
            x = astype(x, own)
    wide = dict(zip(WIDE, as_wide(*[getattr(given, name) for name in WIDE]), strict=True))
    sources = {name: getattr(given, name) for name in SOURCES}
    # A Parameter may offer a copy in this dtype.
    sources = {name: t if t is None or t.operand(own).dtype == own else astype(t, own) for name, t in sources.items()}
    return given._replace(x=x, **wide, **sources), own


def _casts(x: Tensor, weight: Tensor, dtype: np.dtype, emb: bool) -> bool:
    """Whether a kernel reads x's dtype and writes the other one. Raises TypeError where one is not floating."""
    if not (is_float(x.dtype) and is_float(dtype)):
        raise TypeError(f"norm_silu_conv2d: from {x.dtype} to {dtype}: both must be floating; use .astype('float32')")
    taps = weight.shape if weight.ndim == 4 else (weight.shape[0], 1, 1, weight.shape[1])
    return x.device == "cuda" and table.casts(x.shape, x.dtype, taps, dtype, emb)


@functools.cache
def _reads_as_they_are(kinds: tuple, dtype: np.dtype, num_groups: int, upsample: bool) -> bool:
    """Whether inputs of these shapes and dtypes need no conversion for a result of `dtype`. Raises ValueError where
    shapes do not agree, TypeError for integers."""
    shapes, given = map(Inputs._make, zip(*kinds, strict=True))
    _check(shapes, num_groups, upsample)
    wide, sources = ([getattr(given, name) for name in names] for names in (WIDE, SOURCES))
    require_float_dtypes("norm_silu_conv2d", (given.x, given.weight, given.bias, *wide))
    return {given.x, *sources} <= {dtype, None} and {*wide} <= {float32, float64, None}


def _check(shapes: Inputs, num_groups: int, upsample: bool) -> None:
    """Raise ValueError where the inputs' shapes do not agree."""
    x, weight = shapes.x, shapes.weight
    channels = x[-1] + (0 if shapes.x2 is None else shapes.x2[-1])
    if len(x) != 4 or len(weight) not in (2, 4) or weight[-1] != channels:
        raise ValueError(
            f"norm_silu_conv2d: x {x} (N, H, W, C), {channels} channels in all, does not fit weight {weight} "
            f"(K, [R, S,] C)"
        )
    if 0 in weight:
        raise ValueError(f"norm_silu_conv2d: the weight of shape {weight} has an axis of size 0")
    if shapes.x2 is not None and not shapes.x2[-1]:
        raise ValueError(f"norm_silu_conv2d: x2 of shape {shapes.x2} has no channels")
    outputs = weight[0]
    check_bias("norm_silu_conv2d", shapes.bias, outputs)
    sources = [source[-1] for source in (shapes.residual, shapes.residual2) if source is not None]
    if shapes.skip_weight is not None:
        if shapes.residual is None or shapes.skip_weight != (outputs, 1, 1, sum(sources)):
            raise ValueError(
                f"norm_silu_conv2d: skip_weight {shapes.skip_weight} is not (K, 1, 1, C) of weight {weight} and of a "
                f"residual of {sum(sources)} channels"
            )
        check_bias("norm_silu_conv2d", shapes.skip_bias, outputs)
    elif shapes.residual2 is not None:
        raise ValueError("norm_silu_conv2d: residual2 needs a skip_weight; add it to residual without one")
    else:
        sources = [outputs]
    times, kernel = 2 if upsample else 1, weight[1:3] if len(weight) == 4 else (1, 1)
    size = out_size((x[1] * times, x[2] * times), kernel, (1, 1), (kernel[0] // 2,) * 2)
    for name, shape in (
        ("x2", (*x[:3], channels - x[3])), ("emb", (x[0], outputs)), ("residual", (x[0], *size, sources[0])),
        ("residual2", (x[0], *size, sources[-1])),
    ):
        given = getattr(shapes, name)
        if given is not None and given != shape:
            raise ValueError(f"norm_silu_conv2d: {name} has shape {given}, not {shape}")
    if shapes.norm_weight is not None:
        norm = shapes.norm_weight, shapes.norm_bias, shapes.scale, shapes.shift
        check_norm("norm_silu_conv2d", x[0], channels, num_groups, *norm)
        if 0 in x:
            raise ValueError(f"norm_silu_conv2d: x of shape {x} holds nothing to normalise")
