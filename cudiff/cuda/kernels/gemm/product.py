"""What the tensor-core kernels share: which tile and split a product takes, and its launch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from cudiff.backend import Array, float32
from cudiff.cuda.device import multiprocessors, shared_memory
from cudiff.cuda.launch import address, blocks, empty, launch
from cudiff.cuda.tiles import Planner
from cudiff.precision import tf32_allowed

ROW_BYTES = 128  # a tile's extent along k


class Tile(NamedTuple):
    """A block's share of the result, BM × BN, its warps, and the share of full speed it reaches."""

    rows: int
    columns: int
    warps_m: int
    warps_n: int
    efficiency: float


TILES = (
    Tile(128, 128, 2, 2, 1.0),
    Tile(128, 64, 2, 2, 0.85),
    Tile(64, 128, 2, 2, 0.85),
    Tile(64, 64, 2, 2, 0.7),
    Tile(128, 16, 4, 1, 0.35),
)


def stages() -> int:
    """How many tiles of each operand shared memory holds: three of the largest where it has room, two on Turing."""
    largest = max(tile.rows + tile.columns for tile in TILES) * ROW_BYTES
    return 3 if 3 * largest <= shared_memory() else 2


class Plan(NamedTuple):
    """How a product is cut: a tile, and into how many splits of `k_tiles` tiles the depth goes."""

    tile: Tile
    splits: int
    k_tiles: int

    @property
    def choice(self) -> list[int]:
        return [self.tile.rows, self.tile.columns, self.splits]


def plans(rows: int, columns: int, depth: int, batches: int, itemsize: int, products: int,
          aligned: bool) -> Iterator[Plan]:
    """All for a product of (rows, depth) and (depth, columns).

    The largest tile spills registers where operands are split in two or read one by one.
    """
    k_total = blocks(depth, ROW_BYTES // itemsize)
    for tile in TILES:
        large = tile.rows * tile.columns
        if (large > 128 * 64 and products == 3) or (large > 64 * 64 and not aligned):
            continue
        for target in (1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32):
            k_tiles = blocks(k_total, target)
            splits = blocks(k_total, k_tiles)
            if splits > 1 and k_tiles < 4:
                break
            yield Plan(tile, splits, k_tiles)


def time(chosen: Plan, rows: int, columns: int, depth: int, batches: int, itemsize: int, products: int,
         aligned: bool) -> float:
    """Estimated microseconds, at 1755 clocks each.

    A multiprocessor does 1024/efficiency multiply-adds a clock and holds two blocks at least, so that a lone one
    wastes a third; a split costs a launch (4000 clocks) and the traffic of its float32 partials (2400 bytes a clock).
    """
    tile, splits, k_tiles = chosen
    tiles = batches * blocks(rows, tile.rows) * blocks(columns, tile.columns)
    waves = max(1.5, blocks(tiles * splits, multiprocessors()))
    clocks = waves * k_tiles * (ROW_BYTES // itemsize) * tile.rows * tile.columns / (1024 * tile.efficiency)
    if splits > 1:
        clocks += 4000 + 8 * splits * batches * rows * columns / 2400
    return clocks / 1755


plan = Planner("gemm", plans, time)


def problem_of(dtype: np.dtype, size: tuple[int, int, int, int], products: int, aligned: bool) -> tuple:
    """What `plan` is asked for operands of this dtype, and (rows, columns, depth, batches)."""
    return *size, dtype.itemsize, products, aligned


def products(dtype: np.dtype) -> int:
    """Products of tensor cores that one takes: three make one of float32, unless that may be rounded to tf32."""
    return 1 if dtype.itemsize == 2 or tf32_allowed() else 3


class Epilogue(NamedTuple):
    """What is done to a product before it is rounded. bias (columns,), emb (images, columns), both float32, and
    `addend`, of the result's dtype and shape, which may be the result itself, are added. Of linear layers then:

    gate (images, columns), float32: the result is addend + gate · what else there is.
    activation: a name of ACTIVATIONS, applied to what there is.
    slope: likewise; the result, a gradient, is multiplied by the activation's slope at `aux`.
    aux: cuBLASLt's auxiliary output: beside a gate or an activation, what that is applied to is left there.
    """

    bias: Array | None = None
    emb: Array | None = None
    addend: Array | None = None
    rows_per_image: int = 1
    gate: Array | None = None
    activation: str | None = None
    slope: str | None = None
    aux: Array | None = None


ACTIVATIONS = {None: 0, "silu": 1, "gelu": 2, "gelu_tanh": 3}  # as activation.cuh numbers them


def as_float32(bias: Array | None) -> Array | None:
    return bias if bias is None or bias.dtype == float32 else bias.astype(float32)


def product(stem: str, a: Array, b: Array, out: Array, pitch: int, dims: tuple, size: tuple[int, int, int, int],
            epilogue: Epilogue, products: int, **flags: Any) -> Array:
    """Launch `<stem>.cu` with the plan for its problem, and the sum of its splits where that has any. Returns
    `out`.

    a and b have one dtype; out has rows of `pitch` elements; size = (rows, columns, depth, batches); `dims` are the
    kernel's own arguments, `flags` its own constants.
    """
    def run(chosen: Plan) -> Array:
        return product_as(chosen, stem, a, b, out, pitch, dims, size, epilogue, products, **flags)

    problem = problem_of(a.dtype, size, products, flags["A_VEC"] and flags["B_VEC"])
    return plan.run(problem, run, [out] if epilogue.addend is out else [])


def product_as(chosen: Plan, stem: str, a: Array, b: Array, out: Array, pitch: int, dims: tuple,
               size: tuple[int, int, int, int], epilogue: Epilogue, products: int, **flags: Any) -> Array:
    """`product` with a chosen plan."""
    rows, columns, _, batches = size
    tile = chosen.tile
    grid = (batches * blocks(rows, tile.rows) * blocks(columns, tile.columns), chosen.splits)
    count = stages()
    shared = count * (tile.rows + tile.columns) * ROW_BYTES
    constants = dict(
        T=a.dtype, TF32_PRODUCTS=products, BM=tile.rows, BN=tile.columns, BK=ROW_BYTES // a.itemsize,
        WM=tile.warps_m, WN=tile.warps_n, STAGES=count,
        **{name: int(v) if isinstance(v, bool) else v for name, v in flags.items()},
    )
    threads = tile.warps_m * tile.warps_n * 32
    extra = (epilogue.bias, epilogue.emb, epilogue.addend)
    if chosen.splits == 1:
        args = (a, b, *extra, out, np.int64(pitch), epilogue.rows_per_image, chosen.k_tiles, *dims)
        launch(stem, stem, grid, threads, args, shared, OUT=out.dtype, **constants)
        return out
    partials = empty((chosen.splits, batches * rows, columns), float32)
    args = (a, b, None, None, None, partials, np.int64(columns), 1, chosen.k_tiles, *dims)
    launch(stem, stem, grid, threads, args, shared, OUT=float32, **constants)
    sum_splits(partials, out, epilogue, pitch)
    return out


def sum_splits(partials: Array, out: Array, epilogue: Epilogue, pitch: int) -> None:
    """out = the sum of partials (splits, rows, columns) in their order, and what the epilogue adds; `pitch` elements a
    row of out."""
    splits, rows, columns = partials.shape
    places = [address(array) % (4 * out.itemsize) for array in (out, epilogue.addend) if array is not None]
    whole = columns % 4 == pitch % 4 == max(places) == 0
    lanes = 1 << min(4, splits.bit_length() - 1)
    launch(
        "gemm", "sum_splits", blocks(rows * columns, (1024 if whole else 256) // lanes), (256 // lanes, lanes),
        (partials, epilogue.bias, epilogue.emb, epilogue.addend, out, splits, np.int64(rows), columns, np.int64(pitch),
         epilogue.rows_per_image),
        OUT=out.dtype, VEC=int(whole),
    )
