"""What the portable tensor-core kernels share: the plans of a matrix product, and its launch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from cudiff.backend import Array, float32
from cudiff.cuda.device import multiprocessors, shared_memory
from cudiff.cuda.launch import blocks, empty, launch
from cudiff.cuda.tiles import Planner
from cudiff.mode import mode

ROW_BYTES = 128  # of a tile along K


class Tile(NamedTuple):
    """A block's part of the result, rows × columns; its warps along each; the part of full speed that it reaches."""

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
    """How many tiles of each operand a block keeps in shared memory: three where the largest fit, else two, as on
    Turing."""
    largest = max(tile.rows + tile.columns for tile in TILES) * ROW_BYTES
    return 3 if 3 * largest <= shared_memory() else 2


class Plan(NamedTuple):
    """How a product is cut: its tile, and split K: `splits` parts of the depth, of `k_tiles` tiles each."""

    tile: Tile
    splits: int
    k_tiles: int

    @property
    def choice(self) -> list[int]:
        return [self.tile.rows, self.tile.columns, self.splits]


def plans(rows: int, columns: int, depth: int, batches: int, itemsize: int, products: int,
          aligned: bool) -> Iterator[Plan]:
    """All plans for a product of (rows, depth) and (depth, columns).

    Left out are tiles that would spill registers: the largest where operands are split in two (3 products), all but the
    smaller ones where elements are read one by one (not aligned).
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
    """Estimated microseconds, of 1755 clocks each.

    A multiprocessor does 1024 · efficiency multiply-adds a clock. It holds at least two blocks, so that a lone one
    wastes a third. Split K costs one more launch (4000 clocks) and the traffic of float32 partials (2400 bytes a
    clock).
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
    """The arguments of `plan` for operands of this dtype. size: (rows, columns, depth, batches)."""
    return *size, dtype.itemsize, products, aligned


def estimate(dtype: np.dtype, size: tuple[int, int, int, int], products: int, *aligned: bool) -> float:
    """Estimated microseconds of all tensor-core products. aligned: whether rows of each operand are. Of 16-bit ones
    that are not each element is a load and a store: 4095 x 4097 x 4095 took 2750 µs, for 410 that `time` gives."""
    slower = 1 + 2 * aligned.count(False) * (dtype.itemsize == 2)
    return products * slower * plan.estimate(*problem_of(dtype, size, products, all(aligned)))


def products(dtype: np.dtype) -> int:
    """Tensor-core products for one product in this dtype: 3 for float32 unless it may be rounded to tf32, else 1."""
    return 1 if dtype.itemsize == 2 or mode.tf32 else 3


class Epilogue(NamedTuple):
    """The epilogue: what is done to a product before it is rounded.

    bias (columns,) and emb (images, columns), both float32, and addend are added. The addend has the result's dtype and
    shape, and may be the result itself. rows_per_image: rows that share a row of emb or gate. The rest is for linear
    layers:

    gate (images, columns), float32: the result is addend + gate · (product + bias + emb).
    activation: a name in ACTIVATIONS; it is applied to the sum.
    factor: of the result's dtype and shape; the result is multiplied by it.
    aux: as cuBLASLt's auxiliary output, receives what a gate is applied to, or the activation's slope, which is the
    backward's factor.
    """

    bias: Array | None = None
    emb: Array | None = None
    addend: Array | None = None
    rows_per_image: int = 1
    gate: Array | None = None
    activation: str | None = None
    factor: Array | None = None
    aux: Array | None = None


ACTIVATIONS = {None: 0, "silu": 1, "gelu": 2, "gelu_tanh": 3}  # as activation.cuh numbers them


def as_float32(bias: Array | None) -> Array | None:
    return bias if bias is None or bias.dtype == float32 else bias.astype(float32)


def launch_product(chosen: Plan, stem: str, a: Array, b: Array, out: Array, pitch: int, dims: tuple,
                   size: tuple[int, int, int, int], epilogue: Epilogue, products: int, **flags: Any) -> None:
    """Launch `<stem>.cu` with this plan, and with split K the sum of its partials.

    a and b have one dtype. out: rows are `pitch` elements apart. dims: the kernel's own arguments. size: (rows,
    columns, depth, batches). flags: the kernel's own constants.
    """
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
        return
    partials = empty((chosen.splits, batches * rows, columns), float32)
    args = (a, b, None, None, None, partials, np.int64(columns), 1, chosen.k_tiles, *dims)
    launch(stem, stem, grid, threads, args, shared, OUT=float32, **constants)
    sum_splits(partials, out, epilogue, pitch)


def sum_splits(partials: Array, out: Array, epilogue: Epilogue, pitch: int) -> None:
    """out = the sum of partials (splits, rows, columns), in order, plus what the epilogue adds. out's rows are `pitch`
    elements apart."""
    splits, rows, columns = partials.shape
    places = [array.data.ptr % (4 * out.itemsize) for array in (out, epilogue.addend) if array is not None]
    whole = columns % 4 == pitch % 4 == max(places) == 0
    lanes = 1 << min(4, splits.bit_length() - 1)
    launch(
        "gemm", "sum_splits", blocks(rows * columns, (1024 if whole else 256) // lanes), (256 // lanes, lanes),
        (partials, epilogue.bias, epilogue.emb, epilogue.addend, out, splits, np.int64(rows), columns, np.int64(pitch),
         epilogue.rows_per_image),
        OUT=out.dtype, VEC=int(whole),
    )
