"""Numbers that a constructor is given, checked at once: one line says what is wrong."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cudiff.errors import CudiffError

LARGEST = float(np.finfo(np.float32).max)


def whole(name: str, value: Any, least: int | None = 1, most: int | None = None) -> int:
    """`value` as an int; NumPy's integers pass.

    Raises CudiffError where it is no whole number (a bool is none) and outside `least` to `most`.
    """
    if not isinstance(value, int | np.integer) or isinstance(value, bool):
        raise CudiffError(f"{name} must be a whole number, not {value!r}")
    if (least is not None and value < least) or (most is not None and value > most):
        bounds = f"at least {least}" if most is None else f"{least} to {most}"
        raise CudiffError(f"{name} must be {bounds}, not {value}")
    return int(value)


def flag(name: str, value: Any) -> bool:
    """`value` as a bool, which NumPy's and 0 and 1 are. Raises TypeError for others, such as a dtype in its place."""
    if not isinstance(value, bool | np.bool_ | int) or value not in (0, 1):
        raise TypeError(f"{name} is True or False, not {value!r}: give other arguments by their names")
    return bool(value)


def whole_pair(name: str, value: Any, least: int | None = 1) -> tuple[int, int]:
    """A number, or one for rows and one for columns, as two. Raises CudiffError as `whole`."""
    rows, columns = value if isinstance(value, tuple | list) and len(value) == 2 else (value, value)
    return whole(name, rows, least), whole(name, columns, least)


def pair(name: str, value: Any, least: int | None = None) -> tuple[int, int]:
    """`whole_pair` of an operation, which raises ValueError."""
    try:
        return whole_pair(name, value, least)
    except CudiffError:
        bound = "" if least is None else f" of at least {least}"
        raise ValueError(f"{name} {value!r} must be a whole number{bound}, or a tuple of two") from None


def real(name: str, value: Any, least: float | None = None, most: float | None = None, above: float | None = None,
         below: float | None = None) -> float:
    """`value`, a finite number in the range; its ends are in it (`least`, `most`) or not (`above`, `below`).

    Raises CudiffError where it is no number (a bool is none) and outside the range, as NaN and infinity are. So are
    numbers that float32, which most end in, does not hold, and those that it rounds to an end that is not in the range.
    """
    if not isinstance(value, int | float | np.integer | np.floating) or isinstance(value, bool):
        raise CudiffError(f"{name} must be a number, not {value!r}")
    value = value.item() if isinstance(value, np.generic) else value
    if LARGEST < abs(value) < math.inf:
        raise CudiffError(f"{name} must be at most {LARGEST:.2g} in size, the most that float32 holds")
    bounds = [
        ("at least", least, least is None or value >= least), ("at most", most, most is None or value <= most),
        ("above", above, above is None or value > above), ("below", below, below is None or value < below),
    ]
    range_ = " and ".join(f"{word} {bound:g}" for word, bound, _ in bounds if bound is not None)
    if not math.isfinite(value) or not all(holds for _, _, holds in bounds):
        raise CudiffError(f"{name} must be {range_ or 'a finite number'}, not {value}")
    rounded = float(np.float32(value))
    if rounded in (above, below):
        raise CudiffError(f"{name} must be {range_}, and {value} is {rounded:g} in float32")
    return float(value)
