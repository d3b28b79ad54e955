"""A polynomial through points with wild errors, by Newton's method: the Hessian is the gradient of the gradient.

Prints the size of the gradient at each step: its number of zeros doubles.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

import cudiff

rng = np.random.default_rng(0)
x = np.linspace(-1, 1, 50)
powers = np.stack([x**k for k in range(5)], axis=1)
true = np.array([1.0, -2.0, 0.5, 3.0, -1.0])
y = powers @ true + 0.05 * rng.standard_t(2, 50)


def loss(coefficients: Any) -> Any:
    """A smooth |residual|: large errors count no more than in proportion."""
    return np.mean(np.sqrt(0.01 + (powers @ coefficients - y) ** 2))


def hessian(function: Callable[[Any], Any], at: np.ndarray) -> np.ndarray:
    gradient = cudiff.grad(function)
    return np.stack([cudiff.grad(lambda w, i=i: gradient(w)[i])(at) for i in range(len(at))])


coefficients, gradient = np.linalg.lstsq(powers, y)[0], cudiff.grad(loss)  # from least squares
for step in range(6):
    slope = gradient(coefficients)
    print(f"step {step}: loss {loss(coefficients):.6f}, gradient {np.linalg.norm(slope):.1e}")
    coefficients = coefficients - np.linalg.solve(hessian(loss, coefficients), slope)

print(f"coefficients {coefficients.round(2)}, true ones {true}")
print(f"last gradient {np.linalg.norm(gradient(coefficients)):.1e}")
