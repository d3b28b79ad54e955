"""Several linear layers of one input, all in one launch: alone, each would be too small to fill a GPU."""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from typing import NamedTuple

from cudiff.backend import Array, float32
from cudiff.cuda.accumulate import gradient_target
from cudiff.cuda.device import multiprocessors
from cudiff.cuda.kernels.gemm.matmul import few_rows_blocks
from cudiff.cuda.kernels.gemm.product import Epilogue, products, sum_splits
from cudiff.cuda.launch import blocks, empty, launch
from cudiff.function import Function
from cudiff.ops.cast import as_wide, astype, require_floats
from cudiff.ops.elementwise import Silu, unary
from cudiff.ops.matmul import Linear
from cudiff.ops.shape import split
from cudiff.tensor import Tensor

__all__ = ["grouped_linear"]

GROUPS = 64  # of one launch
FEW_ROWS = 4
"""Rows up to which the weights are read in one pass, in float32. With 22 layers of 1,536 inputs, on an H200, 4 rows
take 52 µs, by tiles 46 in tf32 and 106 without; 8 rows would take 94, by tiles 47 and 107."""
THREADS, STAGES = 128, 3  # of a block; of the depth in shared memory at a time
STAGE = 2048  # elements of each operand in a stage


class Group(NamedTuple):
    """One layer, or a part of its rows: in backward out is d_preact, and weight and bias may be their gradients."""

    weight: Array | None
    bias: Array | None
    out: Array
    z: Array | None = None
    part: int = 0
    add_weight: bool = False
    add_bias: bool = False


_ROW = struct.Struct("4P3i4x")
"""weight, bias, out, z, outputs, add_weight, add_bias: Group of grouped_linear.cu."""


def _batches(groups: list[Group]) -> list[list[Group]]:
    return [groups[first : first + GROUPS] for first in range(0, len(groups), GROUPS)]


def _side(rows: int, columns: int, groups: int) -> int:
    """Rows and columns of a block's tile, for results of (rows, columns): 64 if each multiprocessor gets two such
    tiles, else 32. Of up to 32 rows it is 32, because a tile multiplies all of its rows."""
    large = groups * blocks(rows, 64) * blocks(columns, 64)
    return 64 if rows > 32 and large >= 2 * multiprocessors() else 32


def _launch(name: str, groups: list[Group], rows: int, columns: int, x: Array, *silu: bool) -> None:
    """Launch a kernel of grouped_linear.cu. rows, columns: the largest group's result. x: (N, E), or partials of that
    shape."""
    n, features = x.shape[-2:]
    side = _side(rows, columns, len(groups))
    grid, threads, shared = (blocks(rows, side), blocks(columns, side)), THREADS, 2 * 4 * STAGE * STAGES
    if name == "dweight":
        grid = grid[0], grid[1] + 1
    elif name == "few_rows":
        grid, threads, shared = (few_rows_blocks(rows, columns), 1), 256, 0
    table, unit = b"", x.data.ptr | 4 * features
    for weight, bias, out, z, part, add_weight, add_bias in groups:
        outputs = out.shape[1]
        before = 4 * part * outputs
        places = [0 if array is None else array.data.ptr + offset
                  for array, offset in ((weight, before * features), (bias, before), (out, 0), (z, 0))]
        unit |= 4 * outputs | places[0] | places[1] | places[2] | places[3]
        table += _ROW.pack(*places, outputs, add_weight, add_bias)
    table = table.ljust(GROUPS * _ROW.size, b"\0")
    launch("grouped_linear", name, (*grid, len(groups)), threads, (table, x, n, features, *silu), shared, T=float32,
           OUT=float32, TF32_PRODUCTS=products(float32), BM=side, BN=side, BK=STAGE // side, WM=2, WN=2,
           STAGES=STAGES, ALIGNED=int(unit % 16 == 0))


class GroupedLinear(Function):
    """out[g] = z or silu(z) of z = x·weight[g]ᵀ + bias[g], in `parts`; the inputs are x, all weights, all biases."""

    @staticmethod
    def compose(x, *parameters, silu, parts):
        weights, biases = parameters[: len(parameters) // 2], parameters[len(parameters) // 2 :]
        # The last layer first, so that backward adds up the terms of dx in the order of the layers.
        layers = reversed(list(zip(weights, biases, strict=True)))
        outs = [Linear.apply(x, weight, bias, None) for weight, bias in layers][::-1]
        outs = [unary(Silu, out) for out in outs] if silu else outs
        return tuple(part for out in outs for part in (split(out, parts, axis=1) if parts > 1 else (out,)))

    @staticmethod
    def forward_cuda(ctx, x, *parameters, silu, parts):
        weights, biases = parameters[: len(parameters) // 2], parameters[len(parameters) // 2 :]
        keeps, groups = silu and any(ctx.needs), []
        for weight, bias in zip(weights, biases, strict=True):
            for part in range(parts):
                out = empty((len(x), len(weight) // parts), float32)
                groups.append(Group(weight, bias, out, empty(out.shape, float32) if keeps else None, part))
        ctx.save(x, *weights, *(group.z for group in groups))
        ctx.parts = parts
        rows, outputs = len(x), max(map(len, weights)) // parts
        name = "few_rows" if 0 < rows <= FEW_ROWS else "forward"
        for batch in _batches(groups):
            _launch(name, batch, rows, outputs, x, silu)
        return tuple(group.out for group in groups)

    @staticmethod
    def backward_cuda(ctx, *douts, needs, into):
        count, parts = len(douts) // ctx.parts, ctx.parts
        x, weights, activated = ctx.saved[0], ctx.saved[1 : 1 + count], ctx.saved[1 + count :]
        d_preacts = [
            dout if z is None or dout is None else Silu.dx_cuda(dout, z)
            for dout, z in zip(douts, activated, strict=True)
        ]
        grads: list[Array | None] = [None] * len(needs)

        def target(i: int, shape: tuple[int, ...]) -> tuple[Array | None, bool]:
            """The array for gradient i, None where it is not needed, and whether it is added to."""
            add = False
            if needs[i]:
                grads[i], add = gradient_target(into[i], shape, float32)
            return grads[i], add

        dx, add = target(0, x.shape)
        if dx is not None:
            _sum_products(dx, add, [Group(weights[i // parts], None, d_preact, part=i % parts)
                                    for i, d_preact in enumerate(d_preacts) if d_preact is not None])
        groups = []
        for g in range(count):
            own = d_preacts[g * parts : (g + 1) * parts]
            if all([d_preact is None for d_preact in own]):
                continue
            dweight, add_weight = target(1 + g, weights[g].shape)
            dbias, add_bias = target(1 + count + g, weights[g].shape[:1])
            for part, d_preact in enumerate(own):
                if d_preact is not None:
                    groups.append(Group(dweight, dbias, d_preact, None, part, add_weight, add_bias))
                    continue
                rows = len(weights[g]) // parts
                for array, added in ((dweight, add_weight), (dbias, add_bias)):
                    if array is not None and not added:
                        array[part * rows : (part + 1) * rows].fill(0)
        rows_each = max(group.out.shape[1] for group in groups)
        for batch in _batches(groups) if any(needs[1:]) else []:
            _launch("dweight", batch, rows_each, x.shape[1], x)
        return tuple(grads)


def _sum_products(dx: Array, add: bool, groups: list[Group]) -> None:
    """dx = or, with `add`, += the sum over the groups of d_preact · weight."""
    partials = empty((len(groups), *dx.shape), float32)
    for i, batch in enumerate(_batches(groups)):
        _launch("dx", batch, *dx.shape, partials[i * GROUPS :])
    sum_splits(partials, dx, Epilogue(addend=dx if add else None), dx.shape[1])


def grouped_linear(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor],
                   silu: bool = False, parts: int = 1) -> tuple[Tensor, ...]:
    """x (N, in) · weights[g] (out[g], in) transposed + biases[g] (out[g],), and SiLU of that if `silu` → a tuple of
    (N, out[g]), in x's dtype; or of `parts` tensors (N, out[g] / parts) for each g, its columns in parts.

    16-bit operands are converted to float32, in which sums are; see `allow_tf32`. Meant for small layers, such as a
    time embedding's. Raises ValueError where the sizes do not agree or a parameter occurs twice, TypeError for
    integers.
    """
    if not weights or len(weights) != len(biases):
        raise ValueError(f"grouped_linear: {len(weights)} weights and {len(biases)} biases do not make pairs")
    if len({id(parameter) for parameter in (*weights, *biases)}) < 2 * len(weights):
        raise ValueError("grouped_linear: a weight or a bias stands twice, and their gradients are written at one time")
    for weight, bias in zip(weights, biases, strict=True):
        _check(x.shape, weight.shape, bias.shape, parts)
    require_floats("grouped_linear", x, *weights, *biases)
    outs = GroupedLinear.apply(*as_wide(x, *weights, *biases), silu=silu, parts=parts)
    return outs if outs[0].dtype == x.dtype else tuple(astype(out, x.dtype) for out in outs)


@functools.cache
def _check(x: tuple[int, ...], weight: tuple[int, ...], bias: tuple[int, ...], parts: int) -> None:
    """Raise ValueError where the shapes of a layer do not agree."""
    if len(x) != 2 or len(weight) != 2 or weight[1] != x[1] or bias != weight[:1]:
        raise ValueError(
            f"grouped_linear: x of shape {x}, a weight of shape {weight} (out, in) and its bias of shape {bias} do not "
            f"agree"
        )
    if parts < 1 or weight[0] % parts:
        raise ValueError(f"grouped_linear: {weight[0]} outputs do not make {parts} equal parts")
