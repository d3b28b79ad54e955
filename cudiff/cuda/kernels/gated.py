"""The launches of gated.cu."""

from __future__ import annotations

from typing import Any

import numpy as np

from cudiff.backend import Array, float32
from cudiff.cuda.device import multiprocessors
from cudiff.cuda.launch import address, blocks, empty, launch
from cudiff.cuda.sums import empty_statistics
from cudiff.statistics import ChannelStatistics, Kind

ROWS = 64  # of a tile at least


def add_gated(residual: Array, y: Array, gate: Array, rows: int, out: Array) -> None:
    """out (..., C), which may be y, = residual + gate · y, with gate (images, C) float32 for so many rows each."""
    grid, constants = _sizes(gate, rows, residual, y, out)
    launch("gated", "forward", grid, (32, 8), (out, residual, y, gate, rows, gate.shape[1]), **constants)


def gradients(dgate: tuple[Array, bool], dy: tuple[Array, bool], dout: Array, y: Array, gate: Array,
              rows: int) -> ChannelStatistics:
    """dgate and dy, each with whether it is added to. Returns the sums of what dy gets."""
    images, channels = gate.shape
    grid, constants = _sizes(gate, rows, dy[0], dout, y)
    at_once = grid[1] == 1 and not dgate[1] and address(dgate[0]) % 16 == 0
    partials = dgate[0] if at_once else empty((images, grid[1], channels), float32)
    statistics = empty_statistics(Kind.SUMS, images, grid[1], channels)
    args = (*dy, partials, statistics.sums, dout, y, gate, rows, channels)
    launch("gated", "backward", grid, (32, 8), args, **constants)
    if not at_once:
        launch("gated", "sum_tiles", blocks(gate.size, 256), 256,
               (*dgate, partials, grid[1], channels, np.int64(gate.size)), T=y.dtype, VEC=0)
    return statistics


def _sizes(gate: Array, rows: int, *arrays: Array) -> tuple[tuple[int, int], dict[str, Any]]:
    """The grid, with as many tiles of rows as give each multiprocessor a block, and the constants."""
    (images, channels), pack = gate.shape, 16 // arrays[0].itemsize
    whole = channels % pack == 0 and all(address(array) % 16 == 0 for array in (gate, *arrays))
    columns = images * blocks(channels, 32 * (pack if whole else 1))
    tiles = min(blocks(rows, ROWS), blocks(multiprocessors(), columns))
    return (columns, tiles), {"T": arrays[0].dtype, "VEC": int(whole)}
