"""Rows of tests/ops/table.py of what moves elements by NumPy's names: NumPy's function is the meaning."""

from __future__ import annotations

from typing import Any

import numpy as np

from cudiff import ops
from tests.ops.cases import Case, row


def moves(name: str, fn: Any, meaning: Any, ndim: int = 3) -> None:
    row(name)(lambda n: Case(fn, (n.values(*n.shape(ndim)),), meaning, terms=4))


moves("pad of mode edge", lambda x: ops.pad(x, ((0, 0), (3, 0), (1, 2)), "edge"),
      lambda x: np.pad(x, ((0, 0), (3, 0), (1, 2)), "edge"))
moves("pad of mode reflect", lambda x: ops.pad(x, ((0, 0), (x.shape[1] - 1, 0), (0, x.shape[2] // 2)), "reflect"),
      lambda x: np.pad(x, ((0, 0), (x.shape[1] - 1, 0), (0, x.shape[2] // 2)), "reflect"))
REARRANGED: dict[str, tuple[Any, ...]] = {
    "swapaxes": (0, -1), "moveaxis": ((0, 1), (-1, 0)), "flip": ((0, -1),), "roll": ((1, -3), (0, 2)),
    "tile": ((2, 1, 3),), "repeat": (3, 1), "ravel": (), "diagonal": (1, 2, 0),
    "trace": (-1, 1, 2), "tril": (1,), "triu": (-1,), "atleast_1d": (), "atleast_2d": (),
}
for _name, _args in REARRANGED.items():
    moves(_name, lambda x, name=_name, args=_args: getattr(ops, name)(x, *args),
          lambda x, name=_name, args=_args: getattr(np, name)(x, *args))
moves("repeat by numbers", lambda x: ops.repeat(x, [i % 3 for i in range(x.shape[1])], 1),
      lambda x: np.repeat(x, [i % 3 for i in range(x.shape[1])], 1))
moves("hstack", lambda x: ops.hstack([x, x[:, :1]]), lambda x: np.hstack([x, x[:, :1]]))
moves("vstack", lambda x: ops.vstack([x, x[:1]]), lambda x: np.vstack([x, x[:1]]))
moves("broadcast_arrays", lambda x: ops.broadcast_arrays(x, x[:1], x[0, 0]),
      lambda x: tuple(np.broadcast_arrays(x, x[:1], x[0, 0])))
