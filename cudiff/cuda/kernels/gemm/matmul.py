"""Matrix products, and linear layers as such, by matmul.cu, on every GPU."""

from __future__ import annotations

import numpy as np

from cudiff.backend import Array
from cudiff.cuda.kernels.convolution.problem import DGRAD, EPILOGUE, FPROP, Operands, Problem
from cudiff.cuda.kernels.gemm.problem import Product
from cudiff.cuda.kernels.gemm.product import Epilogue, Plan, estimate, launch_product, plan, problem_of, products
from cudiff.cuda.launch import aligned, blocks, launch
from cudiff.cuda.select import Offer

FEW_ROWS = 8
FEW_ROWS_OF = 1 << 20
"""Elements of a float32 weight from which on its product with up to 8 rows is a pass over it, of float products."""


def few_rows_blocks(rows: int, columns: int) -> int:
    """How many blocks of few_rows.cuh multiply so many columns."""
    return blocks(columns, 8 if rows <= 2 else 16)


def multiply(a: Array, b: Array, out: Array, transpose_a: bool, transpose_b: bool, epilogue: Epilogue) -> None:
    """out (B, m, n) = a·b for batches of CUDA matrices, plus what the epilogue adds.

    a is (B, m, k), or (B, k, m) with transpose_a. b is (B, k, n), or (B, n, k) with transpose_b. A batch of one serves
    the whole batch. Rows may be parts of longer ones. b is cast to a's dtype.
    """
    b = b.astype(a.dtype, copy=False)
    (batches, rows, columns), depth = out.shape, a.shape[1 if transpose_a else 2]
    if out.size == 0:
        return
    bias, emb, addend = epilogue[:3]
    adds = addend is not None and addend.data.ptr == out.data.ptr
    if depth == 0 and bias is emb is None and (addend is None or adds):  # every sum is empty
        if addend is None:
            out.fill(0)
        return
    pitch_a, pitch_b, pitch = (x.strides[1] // x.itemsize for x in (a, b, out))
    batch_a, batch_b = (x.strides[0] // x.itemsize if x.shape[0] > 1 else 0 for x in (a, b))
    dims = (rows, columns, depth, np.int64(pitch_a), np.int64(pitch_b), np.int64(batch_a), np.int64(batch_b))
    size, terms = (rows, columns, depth, batches), products(a.dtype)
    a_vec, b_vec = aligned(a, pitch_a, batch_a, a.shape[2]), aligned(b, pitch_b, batch_b, b.shape[2])

    if transpose_b and not transpose_a and terms == 3 and rows <= FEW_ROWS and batches == 1 and b.size >= FEW_ROWS_OF:
        args = (a, b, bias, emb, addend, out, rows, columns, depth, *map(np.int64, (pitch_a, pitch_b, pitch)),
                epilogue.rows_per_image)
        launch("gemm", "few_rows", few_rows_blocks(rows, columns), 256, args, OUT=out.dtype,
               VEC=int(a_vec and b_vec))
        return

    def launch_as(chosen: Plan) -> None:
        launch_product(chosen, "matmul", a, b, out, pitch, dims, size, epilogue, terms, A_K_MAJOR=not transpose_a,
                       B_K_MAJOR=transpose_b, A_VEC=a_vec, B_VEC=b_vec)

    plan.run(problem_of(a.dtype, size, terms, a_vec and b_vec), launch_as, [out] if adds else [])


def linear_microseconds(p: Problem) -> float:
    """`microseconds` of a linear layer's product, for a weight that starts at a multiple of 16 bytes."""
    rows, (k, _, _, c) = p.x.size // p.x.shape[-1], p.weight.shape
    size = {FPROP: (rows, k, c, 1), DGRAD: (rows, c, k, 1)}.get(p.direction, (k, c, rows, 1))
    adjacent = (c, c) if p.direction == FPROP else (k, c)
    aligned = [length * p.x.dtype.itemsize % 16 == 0 for length in adjacent]
    return 3.5 + estimate(p.x.dtype, size, p.products, *aligned)


def offer(p: Problem) -> Offer:
    """Takes the epilogue's additions. A second source is left to a product of its own."""
    return Offer(p.wanted & EPILOGUE)


def run(given: Operands, offer: Offer, p: Problem) -> None:
    x, out, epilogue = rows_of(given.x), rows_of(given.out), given.epilogue
    weight = given.weight.reshape(len(given.weight), -1)[None]
    if p.direction == FPROP:
        multiply(x, weight, out, False, True, epilogue)
    elif p.direction == DGRAD:
        multiply(x, weight, out, False, False, epilogue)
    else:
        multiply(out, x, weight, True, False, Epilogue(addend=weight if given.add else None))


def microseconds(p: Product) -> float:
    """Estimated microseconds: a launch, and the product."""
    return 3.5 + estimate(p.a.dtype, p.size, p.products, p.a.aligned, p.b.aligned)


def offer_product(p: Product) -> Offer:
    return Offer()


def run_product(a: Array, b: Array, out: Array, offer: Offer, p: Product) -> None:
    multiply(a, b, out, p.transpose_a, p.transpose_b, Epilogue(addend=out if p.add else None))


def rows_of(x: Array) -> Array:
    """x (..., C) as a batch of one matrix (1, rows, C). A matrix whose rows are parts of longer ones stays a view."""
    return x[None] if x.ndim == 2 else x.reshape(1, -1, x.shape[-1])
