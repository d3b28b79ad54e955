"""Rows of tests/ops/table.py of what indexes, assigns, orders and multiplies: NumPy's own is the meaning."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cudiff import ops
from tests.ops.cases import ORDINARY, Case, Numbers, row
from tests.ops.table_rearrange import moves

moves("getitem", lambda x: x[::-1, ..., -1] + x[0, 0, :1], lambda x: x[::-1, ..., -1] + x[0, 0, :1])


@row("getitem by arrays and masks")
def _arrays(n: Numbers) -> Case:
    shape = n.shape(3)
    rows, last = (n.rng.integers(-shape[i], shape[i], n.size()) for i in (0, 2))
    mask = n.rng.random(shape[1]) < 0.5

    def fn(x: Any) -> Any:
        return x[rows[:, None], :, last[:1]], x[:, mask], x[rows, 0, 1:], x[..., last]

    return Case(fn, (n.values(*shape),), fn, terms=64 * 16)


@row("take")
def _take(n: Numbers) -> Case:
    shape = n.shape(2)
    index = n.rng.integers(-shape[0], shape[0], n.size()).astype(np.int32)
    return Case(lambda x: ops.take(x, index, 0), (n.values(*shape),), lambda x: np.stack([x[int(i)] for i in index]),
                terms=16)


@row("take of many")
def _take_of_many(n: Numbers) -> Case:
    """Of a long index, which is sorted for the gradient."""
    shape = n.size(1, 3, 33), n.size(1, 3, 8)
    index = n.rng.integers(-shape[0], shape[0], 4099).astype(np.int32)
    return Case(lambda x: ops.take(x, index, 0), (n.values(*shape),), lambda x: np.take(x, index, 0), terms=4099)


@row("embedding of many")
def _embedding_of_many(n: Numbers) -> Case:
    classes, width = n.size(2, 33), n.size(1, 3, 8)
    index = n.rng.integers(-1, classes, 4099).astype(np.int32)
    return Case(ops.embedding, (index, n.values(classes, width)),
                lambda i, w: np.stack([w[j] if j >= 0 else 0 * w[0] for j in i]), terms=4099)


@row("take_along_axis")
def _take_along_axis(n: Numbers) -> Case:
    shape, axis = n.shape(2), n.size(0, 1)
    sizes = list(shape)
    sizes[axis] = n.size()
    index = n.rng.integers(-shape[axis], shape[axis], sizes)
    return Case(lambda x: ops.take_along_axis(x, index, axis), (n.values(*shape),),
                lambda x: np.take_along_axis(x, index, axis), terms=16)


@row("at")
def _at(n: Numbers) -> Case:
    shape = n.shape(2)
    index = n.rng.integers(-shape[0], shape[0], n.size())
    x, v = n.values(*shape), n.values(len(index), shape[1])

    def set_and_add(x: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, ...]:
        changed, summed, part = x.copy(), x.copy(), x.copy()
        changed[index] = v
        np.add.at(summed, index, v)
        part[:1, ::2] = v[0, 0]
        return changed, summed, part

    return Case(lambda x, v: (ops.at(x)[index].set(v), x.at[index].add(v), x.at[:1, ::2].set(v[0, 0])), (x, v),
                set_and_add, terms=16 + shape[1], steps=2)


for _name in ("diff", "sort", "prod", "median", "quantile", "percentile"):
    def _ordered(n: Numbers, name: str = _name) -> Case:
        shape, axis = n.shape(2), n.size(0, 1)
        x = n.values(*shape)
        if name == "sort":
            return Case(lambda x: ops.sort(x, axis), (x,), lambda x: np.sort(x, axis))
        if name == "diff":
            x = np.concatenate([x, x[:1]])[:, [0, *range(shape[1])]]
            return Case(lambda x: ops.diff(x, 1, axis), (x,), lambda x: np.diff(x, 1, axis), terms=2)
        if name == "prod":
            x = x[:37, :37]  # of more the product leaves float16
            return Case(lambda x: ops.prod(x, axis), (x,), lambda x: np.prod(x, axis), terms=64, steps=2)
        share = {"quantile": 1, "percentile": 100}.get(name)
        args = ((share * n.rng.uniform(size=3)).tolist(),) if share else ()
        return Case(lambda x: getattr(ops, name)(x, *args, axis), (x,), lambda x: getattr(np, name)(x, *args, axis),
                    terms=math.prod(shape), steps=2)

    row(_name, ORDINARY)(_ordered)
