"""The launches of gated.cu: out = residual + gate · y, and its gradients."""

from __future__ import annotations

import math
from typing import Any

from cudiff.backend import Array, float32
from cudiff.cuda.accumulate import gradient_target
from cudiff.cuda.device import multiprocessors
from cudiff.cuda.launch import aligned, blocks, empty, launch
from cudiff.cuda.sums import add_rows
from cudiff.gradient import Slot

ROWS = 64  # of a tile, at least


def add_gated(residual: Array, y: Array, gate: Array, rows: int, out: Array) -> None:
    """out (..., C) = residual + gate · y. out may be y. gate: (images, C), float32. rows: of an image."""
    grid, constants = _sizes(gate, rows, residual, y, out)
    launch("gated", "forward", grid, (32, 8), (out, residual, y, gate, rows, gate.shape[1]), **constants)


def gate_gradients(dout: Array, y: Array, gate: Array, into: Slot | None) -> tuple[Array, Array, Array]:
    """The gradients of `add_gated` for y (N, ..., C). Returns dy = gate · dout; dgate = the sums of dout · y over an
    image's rows, written where `gradient_target` says, of several tiles deferred like `add_rows`; and SUMS of dy over
    tiles of rows, float32 (N, tiles, C)."""
    (images, channels), rows, dy = gate.shape, math.prod(y.shape[1:-1]), empty(y.shape, y.dtype)
    dgate, add = gradient_target(into, gate.shape, float32)
    grid, constants = _sizes(gate, rows, dy, dout, y)
    at_once = grid[1] == 1 and not add and dgate.data.ptr % 16 == 0
    gate_sums = dgate if at_once else empty((images, grid[1], channels), float32)
    sums = empty((images, grid[1], channels), float32)
    launch("gated", "backward", grid, (32, 8), (dy, gate_sums, sums, dout, y, gate, rows, channels), **constants)
    if not at_once:
        add_rows(gate_sums, dgate, add)
    return dy, dgate, sums


def _sizes(gate: Array, rows: int, *arrays: Array) -> tuple[tuple[int, int], dict[str, Any]]:
    """The grid and the constants. There are as many tiles of rows as give each multiprocessor a block."""
    (images, channels), pack = gate.shape, 16 // arrays[0].itemsize
    whole = all(aligned(array, channels) for array in (gate, *arrays))
    columns = images * blocks(channels, 32 * (pack if whole else 1))
    tiles = min(blocks(rows, ROWS), blocks(multiprocessors(), columns))
    return (columns, tiles), {"T": arrays[0].dtype, "VEC": int(whole)}
