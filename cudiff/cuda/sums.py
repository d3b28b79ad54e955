"""Sums over a few rows each, deferred and batched.

A U-Net has three hundred gradients of weights, biases and norms that are computed in this way. Each is the sum of some
dozens of rows of partial sums that a larger kernel wrote.
"""

from __future__ import annotations

import struct

from cudiff.backend import Array, float32
from cudiff.cuda.deferred import LaunchType, enqueue
from cudiff.cuda.launch import empty, launch
from cudiff.statistics import SUMS, ChannelStatistics, Kind

MAX_BATCH = 64  # sums in one launch
TERMS = 8  # rows that a thread adds at a time, the same number as in kernels/portable/accumulate.cu
LANES = 128  # threads for a column, at most: with 128, the two threads of a row read 32 adjacent bytes
PENDING_BYTES = 24 << 20  # of rows that pending sums read, at most: an H200 caches 50 MB
_ROW_SUM = struct.Struct("PP10i")
"""source, out, rows, count, width, step, columns, pitch, add, lanes, pack, first block: RowSum of accumulate.cu."""
_NO_SUM = _ROW_SUM.pack(*[0] * 11, 2**31 - 1)


def empty_statistics(kind: Kind, images: int, tiles: int, channels: int) -> ChannelStatistics:
    """Uninitialised statistics for a kernel to write. MOMENTS and CENTRED are structs of channel_statistics.cuh."""
    shape = images, tiles, channels, kind.numbers
    return ChannelStatistics(kind, empty(shape[:3] if kind is SUMS else shape, float32))


_RowSum = tuple[Array, Array, int, int, int, bool]
"""source, out, width, step, offset, add: out = or, with `add`, += the sum over rows of source (out.size / width, rows,
width, step)[..., offset]. A plain tuple, because a backward makes hundreds."""


def add_rows(source: Array, out: Array, add: bool, step: int = 1, offset: int = 0) -> None:
    """out (N, C) = or, with `add`, += the sums of source (N, ..., C·step)[..., offset::step] over each image's rows.
    out (C,) gets the sums over all rows.

    Both are float32. Until the backward has ended, nothing may write to `source`, and `Queue.before_read(out)` has to
    come before any use of `out`.
    """
    if out.size > 0:  # it is 0 if there are no images
        enqueue(_SUMS, (source, out, out.shape[-1], step, offset, add), out, held=source.nbytes)


def add_parts(parts: Array, out: Array, add: bool) -> None:
    """out (K, ...) = or, with `add`, += the sum of parts (P, K, ...) over P, deferred like `add_rows`. out's rows may
    be slices of longer rows."""
    if out.size > 0:
        enqueue(_SUMS, (parts, out, out.size, 1, 0, add), out, held=parts.nbytes)


def _launch(batch: list[_RowSum]) -> None:
    table, grid = b"", 0
    for source, out, width, step, offset, add in batch:
        size, places = out.size, (source.data.ptr + 4 * offset, out.data.ptr)
        rows, contiguous = source.size // (size * step), out.strides == (4,) or out.flags.c_contiguous
        columns, pitch = (size, 0) if contiguous else (size // len(out), out.strides[0] // 4)
        whole = step == 1 and width % 4 == columns % 4 == pitch % 4 == 0 and (places[0] | places[1]) % 16 == 0
        pack, lanes = 4 if whole else 1, 1 << ((rows - 1) // TERMS).bit_length() if rows < TERMS * LANES else LANES
        table += _ROW_SUM.pack(*places, rows, size, width, step, columns, pitch, add, lanes, pack, grid)
        grid += -(-size // (256 // lanes * pack))
    table += _NO_SUM * (MAX_BATCH - len(batch))
    launch("accumulate", "sum_rows", grid, 256, (table,), TOTAL=float32, TERM=float32)


_SUMS = LaunchType(_launch, MAX_BATCH, PENDING_BYTES, rank=1)
