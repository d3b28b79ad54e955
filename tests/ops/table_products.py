"""Rows of tests/ops/table.py of products by NumPy's names: NumPy's function is the meaning."""

from __future__ import annotations

from typing import Any

import numpy as np

from cudiff import ops
from tests.ops.cases import Case, Numbers, row

for _name, _meaning in {"dot": np.dot, "inner": np.inner, "vdot": np.vdot, "tensordot": np.tensordot}.items():
    def _products(n: Numbers, name: str = _name, meaning: Any = _meaning) -> Case:
        m, k, c = n.size(), n.size(1, 7, 33), n.size()
        shapes = {"dot": ((m, k), (k, c)), "inner": ((m, k), (c, k)), "vdot": ((m, k), (m, k)),
                  "tensordot": ((m, 2, k), (2, k, c))}[name]
        return Case(getattr(ops, name), tuple(n.values(*shape) for shape in shapes), meaning, terms=2 * k * m * c,
                    linear=True)

    row(_name)(_products)


@row("outer")
def _outer(n: Numbers) -> Case:
    m, c = n.size(1, 7, 33), n.size()
    return Case(ops.outer, (n.values(m), n.values(c)), np.outer, terms=m * c, linear=True)


@row("einsum")
def _einsum(n: Numbers) -> Case:
    b, q, k, d = n.size(1, 2, 3), n.size(), n.size(), n.size(1, 8, 33)
    return Case(lambda x, y: ops.einsum("bqhd,bkhd->bhqk", x, y), (n.values(b, q, 2, d), n.values(b, k, 2, d)),
                lambda x, y: np.einsum("bqhd,bkhd->bhqk", x, y), terms=max(q, k, d), linear=True)


@row("cumsum")
def _cumsum(n: Numbers) -> Case:
    shape = n.shape(2)
    axis = int(n.rng.integers(-2, 2))
    return Case(lambda x: ops.cumsum(x, axis), (n.values(*shape),), lambda x: np.cumsum(x, axis), terms=max(shape),
                linear=True)


@row("mlp")
def _mlp(n: Numbers) -> Case:
    rows, inputs, hidden, outputs = n.size(), n.size(), n.size(), n.size()

    def meaning(x: Any, weight: Any, bias: Any, weight2: Any, bias2: Any, residual: Any) -> Any:
        z = x @ weight.T + bias
        return z * 0.5 * (1 + np.tanh(z / 2)) @ weight2.T + bias2 + residual

    shapes = (rows, inputs), (hidden, inputs), (hidden,), (outputs, hidden), (outputs,), (rows, outputs)
    return Case(lambda *x: ops.mlp(*x, activation="silu"), tuple(n.values(*shape) for shape in shapes), meaning,
                terms=(inputs + 1) * (hidden + 1), steps=3, fp32=(1, 2, 3, 4), low=(1, 3))
