"""Which kernels run matrix products and linear layers. Some run a linear layer as a 1×1 convolution of an image 8
pixels wide."""

from __future__ import annotations

from cudiff.backend import Array
from cudiff.cuda.deferred import immediate
from cudiff.cuda.kernels.convolution import restated, sm90, wgrad_sm90
from cudiff.cuda.kernels.convolution.problem import (
    AFTERWARDS,
    DGRAD,
    FPROP,
    Fusion,
    Operands,
    Problem,
    fields_of,
    linear_problem_of,
)
from cudiff.cuda.kernels.elementwise import activate, multiply
from cudiff.cuda.kernels.gated import add_gated
from cudiff.cuda.kernels.gemm import matmul as portable
from cudiff.cuda.kernels.gemm import sm90 as gemm_sm90
from cudiff.cuda.kernels.gemm.problem import Product, matrix_of
from cudiff.cuda.kernels.gemm.product import Epilogue, products
from cudiff.cuda.kernels.gemm.whole import offer_copies, whole
from cudiff.cuda.kernels.shape import fit
from cudiff.cuda.launch import empty
from cudiff.cuda.select import ANY, SM90, Offer, Row, Table
from cudiff.statistics import ChannelStatistics


def _offer_convolution(p: Problem) -> Offer | None:
    """conv2d_sm90's, but for an embedding: its rows are of images, and all rows of the matrix become one image."""
    return None if Fusion.EMB in p.wanted else sm90.offer(p)


def _run_channels(given: Operands, offer: Offer, p: Problem) -> None:
    restated.whole_channels(given, p).run(lambda given: linear(p.direction, given))


def _run_copies(a: Array, b: Array, out: Array, offer: Offer, p: Product) -> None:
    again = offer.plan
    result = whole(out, p.out, again.out, read=p.add)
    with immediate():  # the result is read here
        matmul(whole(a, p.a, again.a), whole(b, p.b, again.b), p.transpose_a, p.transpose_b, result, p.add)
    if result is not out:
        fit(out, result)


LINEAR = Table(
    "linear layers",
    Row("gemm_sm90", SM90, gemm_sm90.offer, gemm_sm90.run,
        "16 bits, channels a multiple of 8; two sources but in the weight gradient; adds a bias. Then does one "
        "of: add an addend; add a gated product; apply an activation and store its slope; multiply by a factor and "
        "write sums. May split the depth of a weight gradient; declines where the next rows are estimated to take less "
        "time"),
    Row("conv2d_sm90", SM90, _offer_convolution, sm90.run,
        "output and input gradient of 16 bits or tf32 where 8 divides the rows, as a convolution; no embedding; two "
        "sources too of 16 bits, the first of whole 64 channels"),
    Row("conv2d_wgrad_sm90, conv2d_wgrad_tf32_sm90", SM90, wgrad_sm90.offer, wgrad_sm90.run,
        "weight gradient of the same, of any number of channels"),
    Row("shape.fit, channels, gemm_sm90", SM90,
        restated.offer_channels(portable.linear_microseconds, gemm_sm90.linear_microseconds), _run_channels,
        "16 bits, other channels than multiples of 8, by this table with channels of zeros; adds bias, embedding and "
        "addend; declines where matmul is estimated to take less time without copies"),
    Row("shape.fit, channels", ANY,
        restated.offer_channels(portable.linear_microseconds, portable.linear_microseconds), _run_channels,
        "the same, where matmul is estimated to gain more by aligned rows than the copies take"),
    Row("matmul", ANY, portable.offer, portable.run, "all; two sources by a launch for each"),
)

MATMUL = Table(
    "products of matrices",
    Row("gemm_sm90", SM90, gemm_sm90.offer_product, gemm_sm90.run_product,
        "16 bits, rows at multiples of 16 bytes; float32 results of 8 n rows and columns too"),
    Row("shape.fit, gemm_sm90", SM90, offer_copies(gemm_sm90.microseconds), _run_copies,
        "16 bits, rows elsewhere, by copies whose lengths are multiples of 8; declines if matmul is estimated to take "
        "less time without copies"),
    Row("shape.fit, matmul", ANY, offer_copies(portable.microseconds), _run_copies,
        "16 bits, by such copies, where they are estimated to take less time than loads of single elements"),
    Row("matmul", ANY, portable.offer_product, portable.run_product, "all"),
)


def matmul(a: Array, b: Array, transpose_a: bool = False, transpose_b: bool = False, out: Array | None = None,
           add: bool = False) -> Array:
    """out = or, with `add`, += a·b for batches of CUDA matrices. Returns `out` (B, m, n); None makes one in a's dtype.

    a is (B, m, k), or (B, k, m) with transpose_a. b is (B, k, n), or (B, n, k) with transpose_b; it is cast to a's
    dtype. A batch of one serves the whole batch. Inside a `deferred` block a float32 out may be whole only after
    `Queue.before_read(out)`.
    """
    b = b if b.dtype == a.dtype else b.astype(a.dtype)
    if out is None:
        rows, columns = a.shape[2 if transpose_a else 1], b.shape[1 if transpose_b else 2]
        out = empty((len(b) if len(a) == 1 else len(a), rows, columns), a.dtype)
    problem = Product(matrix_of(a), matrix_of(b), matrix_of(out), transpose_a, transpose_b, add,
                      products(a.dtype))
    chosen = MATMUL.select(problem)
    chosen.row.run(a, b, out, chosen.offer, problem)
    return out


def linear(direction: str, given: Operands, sums: bool = False) -> ChannelStatistics | None:
    """A linear layer's matrix product, with weight (K, [1, 1,] C) or its gradient. x2: the second source, or None.

    FPROP: out (..., K) = concat(x, x2) (..., C) · weightᵀ, plus the epilogue. DGRAD: concat(out, x2) (..., C) =
    x (..., K) · weight, plus the epilogue. WGRAD: weight, float32, = or += outᵀ (K, ...) · concat(x, x2) (..., C).
    sums: whether to return the SUMS of a result that is multiplied by a factor; None where the kernel makes none.
    """
    fields = fields_of(direction, given, (1, 1), (0, 0), sums and Fusion.SUMS)
    problem, (row, offer, left) = LINEAR.selected(linear_problem_of, fields)
    if Fusion.SECOND_SOURCE in left:
        for half in _halves(direction, given):
            linear(direction, half)
    elif left & AFTERWARDS:
        _and_then(direction, given)
    else:
        return row.run(given, offer, problem)
    return None


def _and_then(direction: str, given: Operands) -> None:
    """Run the product, then gate, activation or factor by a launch of its own."""
    out, e = given.out, given.epilogue
    plain = Epilogue(e.bias, e.emb, e.addend, e.rows_per_image)
    if e.gate is not None:
        y = out if e.aux is None else e.aux
        linear(direction, given._replace(out=y, epilogue=plain._replace(addend=None)))
        add_gated(e.addend, y, e.gate, e.rows_per_image, out)
        return
    linear(direction, given._replace(epilogue=plain))
    if e.activation is not None:
        activate(e.activation, out, e.aux)
    else:
        multiply(out, e.factor)


def _halves(direction: str, given: Operands) -> tuple[Operands, Operands]:
    """The operands of the first source's product and of the second's. In FPROP the second adds to the first."""
    split = (given.out if direction == DGRAD else given.x).shape[-1]
    first, second = (given._replace(weight=columns, x2=None)
                     for columns in (given.weight[..., :split], given.weight[..., split:]))
    if direction == DGRAD:
        return first, second._replace(out=given.x2)
    second = second._replace(x=given.x2)
    return first, second._replace(epilogue=Epilogue(addend=given.out)) if direction == FPROP else second
