"""The problem of a matrix product. A linear layer's is that of a convolution (convolution/problem.py)."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from cudiff.backend import Array


class Matrix(NamedTuple):
    """A batch of matrices (B, rows, columns); B is 1 where one serves the whole batch. aligned: whether every row
    starts at a multiple of 16 bytes."""

    shape: tuple[int, ...]
    dtype: np.dtype
    aligned: bool = True


class Product(NamedTuple):
    """out (B, m, n) = or, with `add`, += a (B, m, k) · b (B, k, n), where a and b have one dtype.

    With `transpose_a` a is (B, k, m), with `transpose_b` b is (B, n, k). products: tensor-core products for one, 3 for
    exact float32.
    """

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
