"""How parameters start, drawn from NumPy's generator: the same on every device."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import numpy as np

from cudiff.backend import float32

_rng = np.random.default_rng(0)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw the parameters of models built inside the block from `seed`."""
    global _rng
    before, _rng = _rng, np.random.default_rng(seed)
    try:
        yield
    finally:
        _rng = before


def uniform_fan_in(shape: tuple[int, ...], fan_in: int) -> np.ndarray:
    """U(−1/√fan_in, 1/√fan_in): PyTorch's default for weights and biases of linear and convolution layers."""
    bound = 1 / math.sqrt(fan_in)
    return _rng.uniform(-bound, bound, shape).astype(float32)


def normal(shape: tuple[int, ...], std: float = 1.0) -> np.ndarray:
    """N(0, std²)."""
    return (_rng.standard_normal(shape) * std).astype(float32)


def zeros(shape: tuple[int, ...]) -> np.ndarray:
    return np.zeros(shape, float32)


def ones(shape: tuple[int, ...]) -> np.ndarray:
    return np.ones(shape, float32)
