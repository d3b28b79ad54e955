"""16-bit products of matrices whose rows do not start at multiples of 16 bytes, by copies of them that do.

Without copies Hopper's kernel takes no such product, and the portable one loads each element by itself. Lengths are
rounded up to multiples of 8, with zeros: those along the depth add nothing, and of the result the rest is left.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from cudiff.backend import Array, float32, is_low
from cudiff.cuda.kernels.gemm.matmul import microseconds
from cudiff.cuda.kernels.gemm.problem import Matrix, Product
from cudiff.cuda.kernels.shape import fit_microseconds, fitted
from cudiff.cuda.launch import blocks, empty
from cudiff.cuda.select import Offer


def whole_product(p: Product) -> Product:
    """The product of the copies. Rows of a 16-bit result, and of a, stay as many as they are."""
    m, n, k, _ = p.size
    rows, columns, depth = (blocks(length, 8) * 8 for length in (m, n, k))
    kept = rows if p.out.dtype == float32 else m

    def whole(matrix: Matrix, *lengths: int) -> Matrix:
        return Matrix((matrix.shape[0], *lengths), matrix.dtype)

    return p._replace(
        a=whole(p.a, depth, rows) if p.transpose_a else whole(p.a, kept, depth),
        b=whole(p.b, columns, depth) if p.transpose_b else whole(p.b, depth, columns),
        out=whole(p.out, kept, columns),
    )


def offer_copies(estimate: Callable[[Product], float]) -> Callable[[Product], Offer | None]:
    """The `offer` of a row for 16-bit products, whose plan is the product of the copies. estimate: microseconds of that
    by the kernel that runs it. It declines unless these and the copies take less time than matmul.cu without them."""
    def offer(p: Product) -> Offer | None:
        again = whole_product(p)
        largest = max(math.prod(matrix.shape) for matrix in (again.a, again.b, again.out))
        # A tile has 64 rows or more: of fewer, matmul.cu loads each element of b once, as a copy would.
        if not is_low(p.a.dtype) or min(p.out.shape[1:]) <= 64 or 0 in p.size or largest >= 2**31:
            return None
        copied = [own for own, other in ((p.a, again.a), (p.b, again.b), (p.out, again.out)) if own != other]
        copied += [p.out] if p.add and p.out in copied else []
        copies = sum(fit_microseconds(own.shape, own.dtype) for own in copied)
        return Offer(plan=again) if copies > 0 and copies + estimate(again) < microseconds(p) else None

    return offer


def whole(matrix: Array, own: Matrix, other: Matrix, read: bool = True) -> Array:
    """`matrix`, which is `own`, as `other`: a copy with zeros behind it, uninitialised unless `read`."""
    if own == other:
        return matrix
    if not read:
        return empty(other.shape, other.dtype)
    return fitted(matrix, other.shape)
