"""NumPy's tensor products, which sum over named axes, by transposes, reshapes and the batched matmul."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from cudiff.ops.arithmetic import multiply
from cudiff.ops.cast import as_tensors, astype
from cudiff.ops.matmul import matmul
from cudiff.ops.rearrange import diagonal
from cudiff.ops.reduce import normalize_axes, sum
from cudiff.ops.shape import flatten, reshape, squeeze, transpose
from cudiff.tensor import Tensor

__all__ = ["dot", "einsum", "inner", "outer", "tensordot", "vdot"]

Labels = list[Hashable]


def einsum(subscripts: str, *operands: Any) -> Tensor:
    """The operands' product, summed over all axes that the output does not name: einsum("ij,jk->ik", a, b) is a @ b.

    A letter names an axis of an operand, "..." its remaining axes, which broadcast. A letter twice in one operand takes
    its diagonal. Without "->" the output is "..." and, in alphabetical order, the letters that occur once. Operands are
    multiplied from left to right, two at a time: put those first whose product is small. The dtype is that of
    `a * b`. Raises ValueError for subscripts that do not fit, TypeError for bools.
    """
    if not isinstance(subscripts, str):
        raise TypeError(f"einsum takes its subscripts first, as in 'ij,jk->ik', not {type(subscripts).__name__}")
    text = subscripts.replace(" ", "")
    if not re.fullmatch(r"(?:[A-Za-z]|\.{3}|,)*(?:->(?:[A-Za-z]|\.{3})*)?", text):
        raise ValueError(f"einsum '{subscripts}': subscripts are letters, commas, '...' and one '->'")
    given, arrow, output = text.partition("->")
    terms = given.split(",")
    if len(terms) != len(operands):
        raise ValueError(f"einsum '{subscripts}' names {len(terms)} operands, and got {len(operands)}")
    tensors = _numbers("einsum", *operands)
    labels = [_labels(subscripts, i, term, x.ndim) for i, (term, x) in enumerate(zip(terms, tensors, strict=True))]
    for i, (own, x) in enumerate(zip(labels, tensors, strict=True)):
        for label, size in zip(own, x.shape, strict=True):
            if size != (first := x.shape[own.index(label)]):
                raise ValueError(f"einsum '{subscripts}': operand {i} has '{label}' with the sizes {first} and {size}")
    spread = sorted({label for own in labels for label in own if isinstance(label, int)})
    if arrow:
        parts = re.findall(r"\.{3}|.", output)
        result: Labels = [label for part in parts for label in (spread if part == "..." else part)]
    else:
        counts = Counter(given)
        result = [*spread, *sorted(letter for letter in counts if letter.isalpha() and counts[letter] == 1)]
    for label in result:
        if result.count(label) > 1 or not any(label in own for own in labels):
            raise ValueError(f"einsum '{subscripts}': the output names '{label}' twice, or no operand does")
    if missing := [label for label in spread if label not in result]:
        raise ValueError(f"einsum '{subscripts}': the output has no '...', for {len(missing)} axes")
    return _contract(f"einsum '{subscripts}'", tensors, labels, result)


def _labels(subscripts: str, i: int, term: str, ndim: int) -> Labels:
    """The label of each axis of operand i: its letter, or for axes of "..." the number from the end, below 0."""
    before, dots, after = term.partition("...")
    spread = ndim - len(before) - len(after)
    if spread < 0 or "..." in after or (spread and not dots):
        raise ValueError(f"einsum '{subscripts}': operand {i} has {ndim} axes, which '{term}' does not name")
    return [*before, *range(-spread, 0), *after]


def tensordot(a: Any, b: Any, axes: Any = 2) -> Tensor:
    """The product of a and b, summed over `axes`: a number, of a's last and b's first axes, or (a's axes, b's axes)."""
    a, b = _numbers("tensordot", a, b)
    pair = (range(a.ndim - axes, a.ndim), range(axes)) if isinstance(axes, int | np.integer) else axes
    first, second = (np.atleast_1d(i).tolist() for i in pair)
    if len(first) != len(second) or (pair is not axes and not 0 <= axes <= min(a.ndim, b.ndim)):
        raise ValueError(f"tensordot sums over as many axes of each, which have {a.ndim} and {b.ndim}, not {axes}")
    normalize_axes(tuple(first), a.ndim), normalize_axes(tuple(second), b.ndim)
    if [a.shape[i] for i in first] != [b.shape[i] for i in second]:
        raise ValueError(f"the shapes {a.shape} and {b.shape} do not agree along the axes {first} and {second}")
    left: Labels = list(range(a.ndim))
    right: Labels = list(range(a.ndim, a.ndim + b.ndim))
    for i, j in zip(first, second, strict=True):
        right[j] = left[i]
    return _contract("tensordot", [a, b], [left, right], [i for i in left + right if (i in left) != (i in right)])


def outer(a: Any, b: Any) -> Tensor:
    """out[i, j] = a[i] · b[j], with both flattened."""
    a, b = _numbers("outer", a, b)
    return multiply(reshape(a, (a.size, 1)), reshape(b, (1, b.size)))


def inner(a: Any, b: Any) -> Tensor:
    """The product of a and b, summed over the last axis of each. If one is 0-d, a * b."""
    a, b = _numbers("inner", a, b)
    return tensordot(a, b, (-1, -1)) if a.ndim and b.ndim else multiply(a, b)


def dot(a: Any, b: Any) -> Tensor:
    """The product of a and b, summed over a's last axis and b's last but one, or only one. If one is 0-d, a * b."""
    a, b = _numbers("dot", a, b)
    return tensordot(a, b, (-1, max(b.ndim - 2, 0))) if a.ndim and b.ndim else multiply(a, b)


def vdot(a: Any, b: Any) -> Tensor:
    """The sum of the product of a and b, both flattened."""
    a, b = _numbers("vdot", a, b)
    return dot(flatten(a), flatten(b))


def _numbers(name: str, *given: Any) -> list[Tensor]:
    tensors = as_tensors(*given)
    if tensors[0].dtype == np.bool_:
        raise TypeError(f"{name} takes numbers, not bool: use .astype('int32'), or & and any()")
    return tensors


def _contract(name: str, tensors: Sequence[Tensor], labels: Sequence[Labels], output: Labels) -> Tensor:
    """The product of the tensors over axes of equal labels, summed over labels that `output` does not have."""
    sizes: dict[Hashable, int] = {}
    for x, own in zip(tensors, labels, strict=True):
        for label, size in zip(own, x.shape, strict=True):
            if sizes.setdefault(label, size) == 1:
                sizes[label] = size
            elif size not in (1, sizes[label]):
                raise ValueError(f"{name}: the sizes {sizes[label]} and {size} of '{label}' do not agree")
    full = [_without_ones(x, own, sizes) for x, own in zip(tensors, labels, strict=True)]
    parts = []
    for i, (x, own) in enumerate(full):
        elsewhere = {label for j, (_, other) in enumerate(full) if j != i for label in other} | set(output)
        parts.append(_alone(x, own, elsewhere))
    (out, own), *rest = parts
    for i, (x, other) in enumerate(rest):
        later = {label for _, labels in rest[i + 1 :] for label in labels} | set(output)
        out, own = _product(out, own, x, other, later)
    return astype(_ordered(out, own, output), tensors[0].dtype)


def _without_ones(x: Tensor, labels: Labels, sizes: dict[Hashable, int]) -> tuple[Tensor, Labels]:
    """One operand without its axes of size 1 that broadcast: the product gets these from other operands."""
    spread = tuple(i for i, size in enumerate(x.shape) if size != sizes[labels[i]])
    return squeeze(x, spread) if spread else x, [label for i, label in enumerate(labels) if i not in spread]


def _alone(x: Tensor, labels: Labels, elsewhere: set[Hashable]) -> tuple[Tensor, Labels]:
    """One operand with each label once, by diagonals, and summed over labels that occur nowhere else."""
    for label in dict.fromkeys(labels):
        while labels.count(label) > 1:
            first = labels.index(label)
            second = labels.index(label, first + 1)
            x = diagonal(x, 0, first, second)
            labels = [*(other for i, other in enumerate(labels) if i not in (first, second)), label]
    gone = tuple(i for i, label in enumerate(labels) if label not in elsewhere)
    return sum(x, gone) if gone else x, [label for label in labels if label in elsewhere]


def _product(a: Tensor, left: Labels, b: Tensor, right: Labels, later: set[Hashable]) -> tuple[Tensor, Labels]:
    """a · b summed over the labels of both that are not needed `later`, as (batch, rows, columns)."""
    batch = [label for label in left if label in right and label in later]
    summed = [label for label in left if label in right and label not in later]
    rows, columns = ([label for label in own if label not in batch + summed] for own in (left, right))
    size = dict(zip(left, a.shape, strict=True)) | dict(zip(right, b.shape, strict=True))
    shape = tuple(size[label] for label in batch + rows + columns)
    n, m, k, c = (math.prod(size[label] for label in group) for group in (batch, rows, summed, columns))
    a = reshape(_ordered(a, left, batch + rows + summed), (n, m, k))
    b = reshape(_ordered(b, right, batch + summed + columns), (n, k, c))
    return reshape(matmul(a, b) if summed else multiply(a, b), shape), batch + rows + columns


def _ordered(x: Tensor, labels: Labels, order: Labels) -> Tensor:
    return x if labels == order else transpose(x, [labels.index(label) for label in order])
