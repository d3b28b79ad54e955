"""Which kernels run attention."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from cudiff.backend import Array
from cudiff.cuda.kernels.attention import backward_sm90, portable, short_sm90, sm90, wide_sm90
from cudiff.cuda.kernels.attention.problem import SUMS, Backward, Forward, Problem
from cudiff.cuda.kernels.gemm.product import products
from cudiff.cuda.launch import MOST_ACROSS
from cudiff.cuda.select import ANY, SM90, Row, Table

ATTENTION = Table(
    "attention",
    Row("attention_wide_sm90.forward", SM90, wide_sm90.offer_forward, wide_sm90.forward,
        "forward, without a mask, of 16-bit heads of up to 128 channels whose rows start at multiples of 16 bytes, and "
        "512 keys or more, of over 64 channels 256; declined where the next row is estimated to be as fast"),
    Row("attention_sm90.forward", SM90, sm90.offer_forward, sm90.forward,
        "forward of 16-bit heads of up to 128 channels whose rows start at multiples of 16 bytes"),
    Row("attention_short_sm90.backward", SM90, short_sm90.offer_backward, short_sm90.backward,
        "backward in one launch, without a mask, of such heads of up to 32 channels and up to 256 tokens; writes SUMS; "
        "declined where none are wanted and two passes are estimated to be a tenth faster"),
    Row("attention_backward_sm90.backward", SM90, backward_sm90.offer_backward, backward_sm90.backward,
        "backward in one pass, without a mask, of such heads of 40 to 128 channels and 256 keys or more; declined "
        "where two passes are estimated to be as fast; writes SUMS"),
    Row("attention_sm90.backward_q, backward_kv", SM90, sm90.offer_backward, sm90.backward,
        "backward of 16-bit heads of up to 128 channels whose rows start at multiples of 16 bytes; writes SUMS for "
        "heads of over 32 channels"),
    Row("attention.forward", ANY, portable.offer_forward, portable.forward, "forward of heads of up to 128 channels"),
    Row("attention.backward_q, backward_kv", ANY, portable.offer_backward, portable.backward,
        "backward of heads of up to 128 channels"),
)


def forward(given: Forward) -> None:
    """out = softmax(q·kᵀ/√D)·v, and lse = the logarithms of the softmax's denominators."""
    *arrays, mask = given
    if len(given.q) > MOST_ACROSS:
        for part in _parts(len(given.q)):
            forward(Forward._make([*(array[part] for array in arrays), mask and mask.of(part)]))
        return
    problem = _problem(given, arrays[2:], False)
    chosen = ATTENTION.select(problem)
    chosen.row.run(given, chosen.offer.plan, problem)


def backward(given: Backward) -> None:
    """Write the gradients dq, dk and dv. `sums` is called only if the kernel writes SUMS."""
    if len(given.q) > MOST_ACROSS:
        *arrays, sums, mask = given._replace(sums=given.sums and functools.cache(given.sums))
        for part in _parts(len(given.q)):
            own = sums and functools.partial(lambda part, tiles: [array[part] for array in sums(tiles)], part)
            backward(Backward._make([*(array[part] for array in arrays), own, mask and mask.of(part)]))
        return
    wanted = frozenset() if given.sums is None else frozenset({SUMS})
    problem = _problem(given, given[:7], True, wanted)  # all but out, lse, sums and mask
    chosen = ATTENTION.select(problem)
    chosen.row.run(given, chosen.offer.plan, problem)


def _parts(images: int) -> list[slice]:
    """Images that one launch takes, which has them along the third axis of its grid."""
    return [slice(first, first + MOST_ACROSS) for first in range(0, images, MOST_ACROSS)]


def _problem(given: Forward | Backward, arrays: Sequence[Array], backward: bool,
             wanted: frozenset[str] = frozenset()) -> Problem:
    q, keys = given.q, given.k.shape[1]
    images, queries, heads, dim = q.shape
    places = dim * q.dtype.itemsize
    for array in arrays:
        image, token, head, _ = array.strides
        places |= array.data.ptr | image | token | head
    return Problem(backward, q.dtype, images, queries, keys, heads, dim, places % 16 == 0, products(q.dtype), wanted,
                   given.mask is not None)
