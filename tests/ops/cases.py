"""What a row of tests/ops/table.py is: a case drawn from random shapes and numbers of one magnitude."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

MAGNITUDES = ("ordinary", "tiny", "large", "mixed", "some zeros", "zeros")
ORDINARY = MAGNITUDES[:1]


class Case(NamedTuple):
    """A call of `fn` on tensors of `arrays` (floating ones are float64 and get a gradient), and its meaning in NumPy.

    terms: of the longest sum; linear: in each array by itself, so that `meaning` of absolute values bounds the terms;
    steps: results that are rounded to the storage type on the way; fp32: arrays that stay float32; low: those of them
    that a GPU reads in the storage type, so that they hold its numbers.
    """

    fn: Callable[..., Any]
    arrays: tuple[Any, ...]
    meaning: Callable[..., Any]
    terms: int = 1
    linear: bool = False
    steps: int = 1
    fp32: tuple[int, ...] = ()
    low: tuple[int, ...] = ()


class Numbers:
    """Random shapes and numbers of one magnitude."""

    def __init__(self, rng: np.random.Generator, magnitude: str) -> None:
        self.rng, self.magnitude = rng, magnitude

    def size(self, *choices: int) -> int:
        return int(self.rng.choice(choices or (1, 2, 3, 5, 7, 8, 13, 16)))

    def shape(self, ndim: int) -> tuple[int, ...]:
        """Odd, prime and 1, or a multiple of a pack; at times one axis longer than a block."""
        sizes = [self.size(1, 2, 3, 5, 8) for _ in range(ndim)]
        if ndim:
            sizes[self.size(*range(ndim))] = self.size(1, 7, 31, 64, 257, 1031)
        return tuple(sizes)

    def values(self, *shape: int, positive: bool = False) -> np.ndarray:
        x = self.rng.uniform(0.2, 1.5, shape)
        if not positive:
            x *= self.rng.choice([-1.0, 1.0], shape)
        match self.magnitude:
            case "tiny":
                x *= 1e-6
            case "large":
                x *= 1e4
            case "mixed":
                x *= 10.0 ** self.rng.uniform(-4, 4, shape)
            case "some zeros":
                x *= self.rng.uniform(size=shape) < 0.6
            case "zeros":
                x *= 0
        return np.asarray(x)


ROWS: dict[str, tuple[Callable[[Numbers], Case], tuple[str, ...]]] = {}


def row(name: str, magnitudes: tuple[str, ...] = MAGNITUDES) -> Callable[[Callable[[Numbers], Case]], None]:
    def add(draw: Callable[[Numbers], Case]) -> None:
        ROWS[name] = draw, magnitudes

    return add
