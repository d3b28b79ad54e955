"""A line through points of which some are missing and some are wrong, by Huber's loss.

Prints the slope and intercept that Huber's loss finds, and those of least squares; the true ones are 2 and -1.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

import cudiff
from cudiff import Tensor

rng = np.random.default_rng(0)
x = rng.uniform(-1, 1, 200)
y = 2 * x - 1 + rng.normal(0, 0.1, 200)
y[rng.random(200) < 0.2] = 8.0  # wrong
y[rng.random(200) < 0.3] = np.nan  # missing
present = ~np.isnan(y)


def huber(residual: Tensor) -> Tensor:
    size = cudiff.abs(residual)
    return cudiff.where(size < 0.2, residual**2 / 2, 0.2 * (size - 0.1))


def squares(residual: Tensor) -> Tensor:
    return residual**2


def fit(loss: Callable[[Tensor], Tensor]) -> np.ndarray:
    def objective(line: Any) -> Tensor:
        residual = line[0] * x + line[1] - y
        return loss(residual[present]).mean()

    line, gradient = np.zeros(2), cudiff.grad(objective)
    for _ in range(1000):
        line = line - 0.5 * gradient(line)
    return line


for name, loss in (("least squares", squares), ("Huber", huber)):
    slope, intercept = fit(loss)
    print(f"{name}: slope {slope:.2f}, intercept {intercept:.2f}")
