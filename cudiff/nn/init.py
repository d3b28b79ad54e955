"""How parameters start, drawn from NumPy's generator: the same on every device."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator

import numpy as np

from cudiff.backend import float32
from cudiff.errors import CudiffError
from cudiff.values import whole


class _Drawn:
    """Arrays of their values."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)

    def uniform(self, shape: tuple[int, ...], bound: float) -> np.ndarray:
        return self.rng.uniform(-bound, bound, shape).astype(float32)

    def normal(self, shape: tuple[int, ...], std: float) -> np.ndarray:
        return (self.rng.standard_normal(shape) * std).astype(float32)

    def full(self, shape: tuple[int, ...], value: float) -> np.ndarray:
        return np.full(shape, value, float32)

    def zero(self, array: np.ndarray) -> None:
        array.fill(0)

    def number(self) -> int:
        return int(self.rng.integers(2**63))


class _Outlined:
    """Arrays without values, whose memory is never touched: at most `arrays` of them, of `numbers` in all."""

    def __init__(self, arrays: int, numbers: int):
        self.arrays, self.numbers = arrays, numbers

    def full(self, shape: tuple[int, ...], value: float) -> np.ndarray:
        self.arrays -= 1
        self.numbers -= math.prod(shape)
        if self.arrays < 0 or self.numbers < 0:
            raise CudiffError("the model is larger")
        return np.empty(shape, float32)

    uniform = normal = full

    def zero(self, array: np.ndarray) -> None: ...

    def number(self) -> int:
        return 0


_default = _Drawn(0)


class _Chosen(threading.local):
    """What this thread draws from inside of a block; None outside."""

    source: _Drawn | _Outlined | None = None


_chosen = _Chosen()


def _source() -> _Drawn | _Outlined:
    return _chosen.source or _default


@contextlib.contextmanager
def _from(source: _Drawn | _Outlined) -> Iterator[None]:
    before, _chosen.source = _chosen.source, source
    try:
        yield
    finally:
        _chosen.source = before


def seed(n: int) -> None:
    """Draw the parameters of models built from now on from `n`, in all threads. Without it they are those of 0 in each
    process. Called while `cudiff.models.build` makes a model, it holds for that model alone.

    Raises CudiffError for an n that is no whole number of at least 0.
    """
    global _default
    source = _Drawn(whole("n", n, least=0))
    if _chosen.source is None:
        _default = source
    else:
        _chosen.source = source


def seeded(seed: int) -> contextlib.AbstractContextManager[None]:
    """Draw the parameters of models that this thread builds inside the block from `seed`."""
    return _from(_Drawn(seed))


def outlined(arrays: int, numbers: int) -> contextlib.AbstractContextManager[None]:
    """Models that this thread builds inside the block have names and shapes, but no values.

    Raises CudiffError in the block once a model asks for more than so many arrays, or numbers in them.
    """
    return _from(_Outlined(arrays, numbers))


def uniform_fan_in(shape: tuple[int, ...], fan_in: int) -> np.ndarray:
    """U(−1/√fan_in, 1/√fan_in): PyTorch's default for weights and biases of linear and convolution layers."""
    return _source().uniform(shape, 1 / math.sqrt(fan_in))


def glorot_uniform(shape: tuple[int, int]) -> np.ndarray:
    """U(−b, b) for a matrix, b = √(6 / (rows + columns)). Glorot and Bengio 2010, equation 16."""
    return _source().uniform(shape, math.sqrt(6 / sum(shape)))


def normal(shape: tuple[int, ...], std: float = 1.0) -> np.ndarray:
    """N(0, std²)."""
    return _source().normal(shape, std)


def number() -> int:
    """The seed of other random numbers, from 0 to 2^63 - 1."""
    return _source().number()


def zeros(shape: tuple[int, ...]) -> np.ndarray:
    return _source().full(shape, 0)


def ones(shape: tuple[int, ...]) -> np.ndarray:
    return _source().full(shape, 1)


def zero(array: np.ndarray) -> None:
    """Set to zeros in place what was drawn before."""
    _source().zero(array)
