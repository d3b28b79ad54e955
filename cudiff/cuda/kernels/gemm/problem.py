"""What the kernels of products of matrices are asked; those of linear layers are asked as convolutions are."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from cudiff.backend import Array


class Matrix(NamedTuple):
    """A batch (B, rows, columns), of one where that serves all. aligned: whether every row starts at a multiple of 16
    bytes."""

    shape: tuple[int, ...]
    dtype: np.dtype
    aligned: bool = True


class Product(NamedTuple):
    """out (B, m, n) = or, with `add`, += a (B, m, k) · b (B, k, n), of one dtype; a is (B, k, m) under `transpose_a`, b
    (B, n, k) under `transpose_b`. products: of tensor cores, for one; 3 where float32 is not rounded to tf32."""

    a: Matrix
    b: Matrix
    out: Matrix
    transpose_a: bool = False
    transpose_b: bool = False
    add: bool = False
    products: int = 1
    wanted: frozenset[str] = frozenset()

    @property
    def size(self) -> tuple[int, int, int, int]:
        """Rows, columns, depth and batches."""
        batches, rows, columns = self.out.shape
        return rows, columns, self.a.shape[1 if self.transpose_a else 2], batches


def matrix_of(array: Array) -> Matrix:
    return Matrix(array.shape, array.dtype, math.gcd(array.data.ptr, *array.strides[:2]) % 16 == 0)
