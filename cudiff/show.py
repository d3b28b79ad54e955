"""How arrays are shown, as text and by notebooks; and the tables and pictures that notebooks show of other things."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape

import numpy as np

from cudiff.backend import Array, array_module, device_of, is_float, to_device

MOST_VALUES = 200
"""Of larger arrays text has only the first and last values along each axis."""

MOST_CELLS = 8
"""Rows or columns of a notebook's table; of more there, half of them from either end."""


def values(array: Array, prefix: str = "") -> str:
    """The values as NumPy writes them, indented to go on after `prefix`. Of a large array only those are copied to the
    host that are shown."""
    large = array.size > MOST_VALUES
    shown = ends(array, 7) if large else to_device(array, "cpu")  # of 7 NumPy writes 3, dots and 3
    return np.array2string(shown, separator=", ", prefix=prefix, threshold=0 if large else MOST_VALUES, precision=4)


def ends(array: Array, most: int) -> np.ndarray:
    """On the host, the first and last elements along each axis that is longer than `most`: that many in all."""
    module, last = array_module(device_of(array)), most // 2
    index = [np.r_[: most - last, n - last : n] if n > most else np.arange(n) for n in array.shape]
    return to_device(array[module.ix_(*map(module.asarray, index))], "cpu")


def array_html(title: str, array: Array) -> str:
    """A table of one or two dimensions, others as text."""
    if array.ndim not in (1, 2) or not array.size:
        return f"<div>{escape(title)}</div><pre>{escape(values(array))}</pre>"
    array = array.reshape(-1, array.shape[-1])
    number = "{:.4g}".format if is_float(array.dtype) else str
    cells = np.array([[number(value) for value in row] for row in ends(array, MOST_CELLS).tolist()])
    for axis, n in enumerate(array.shape):
        if n > MOST_CELLS:
            cells = np.insert(cells, MOST_CELLS // 2, "…", axis=axis)
    return table(title, cells.tolist())


def table(title: str, rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    """Rows under a title: numbers, to the right, or texts, to the left, with the names of their columns."""
    cell = f'<td style="text-align: {"left" if head else "right"}">'
    lines = ["".join(f"{cell}{escape(text)}</td>" for text in row) for row in rows]
    if head:
        lines.insert(0, "".join(f"<th>{escape(text)}</th>" for text in head))
    return f"<div>{escape(title)}</div><table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def picture(title: str, png: bytes) -> str:
    """A PNG under a title."""
    return f'<div>{escape(title)}</div><img src="data:image/png;base64,{base64.b64encode(png).decode()}">'
