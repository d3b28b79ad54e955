"""The first principal component of a cloud of points, by the power method and by gradient ascent.

Prints the cosine between each and the one of NumPy's singular value decomposition.
"""

from typing import Any

import numpy as np

import cudiff

rng = np.random.default_rng(0)
x = rng.standard_normal((500, 10)) @ rng.standard_normal((10, 10))
x -= x.mean(axis=0)
expected = np.linalg.svd(x, full_matrices=False)[2][0]

points = cudiff.Tensor(x)
direction = cudiff.Tensor(rng.standard_normal(10))
for _ in range(200):
    direction = points.T @ (points @ direction)
    direction = direction / cudiff.sqrt((direction**2).sum())
by_power = abs(direction.numpy() @ expected)


def log_variance(direction: Any) -> Any:
    """The logarithm of the points' variance along a direction of any length."""
    return np.log(np.mean((x @ direction) ** 2) / np.sum(direction**2))


climbing, slope = np.ones(10), cudiff.grad(log_variance)
for _ in range(500):
    climbing = climbing + 0.2 * slope(climbing)
    climbing = climbing / np.linalg.norm(climbing)
by_gradient = abs(climbing @ expected)
print(f"cosine by the power method {by_power:.6f}, by gradient ascent {by_gradient:.6f}")
