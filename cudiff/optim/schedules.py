"""What the learning rate is multiplied by, step for step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from cudiff.backend import float32
from cudiff.errors import CudiffError
from cudiff.ops.optim import lr_factor
from cudiff.values import real, whole


@dataclass(frozen=True)
class Constant:
    """The full learning rate, after a linear rise over the first `warmup` steps."""

    warmup: int = 0
    total_steps: ClassVar[int] = 0
    final: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        whole("warmup", self.warmup, 0)

    def factor(self, step: int) -> float:
        """What the learning rate is multiplied by at `step`, counted from 0."""
        return lr_factor(step, self.warmup, self.total_steps, self.final)


@dataclass(frozen=True)
class Cosine:
    """A linear rise over `warmup` steps, then half a cosine down to `final` times the learning rate at `total_steps`.

    Loshchilov and Hutter, "SGDR" (2017), equation 5, without restarts.
    """

    total_steps: int
    final: float = 0.0
    warmup: int = 0

    def __post_init__(self) -> None:
        whole("total_steps", self.total_steps, None)
        whole("warmup", self.warmup, 0)
        real("final", self.final, least=0)
        if self.total_steps <= self.warmup:
            raise CudiffError(f"a cosine schedule needs total_steps ({self.total_steps}) beyond warmup ({self.warmup})")

    def factor(self, step: int) -> float:
        """What the learning rate is multiplied by at `step`, counted from 0."""
        return lr_factor(step, self.warmup, self.total_steps, self.final)


class Tabulated:
    """Any other schedule: the factors that a function gives for the steps 0 to total_steps - 1; the last one remains.

    `Tabulated(lambda step: 0.5 ** (step // 1000), 10_000)` halves the learning rate every 1000 steps. The function is
    called here and never again: the device reads the table (float32), in a captured step too. Raises CudiffError where
    a factor is no number of at least 0.
    """

    warmup, total_steps, final = 0, 0, 1.0  # those of the constant rate that the table multiplies

    def __init__(self, factor: Callable[[int], float], total_steps: int):
        steps = range(whole("total_steps", total_steps))
        self.factors = np.array([real(f"the factor of step {step}", factor(step), least=0) for step in steps], float32)

    def factor(self, step: int) -> float:
        """What the learning rate is multiplied by at `step`, counted from 0."""
        return float(self.factors[min(step, len(self.factors) - 1)])


Schedule = Constant | Cosine | Tabulated
