"""An operation of one's own with a gradient, the logarithm of a determinant, held to finite differences.

With it a Gaussian's precision matrix is fitted to points. Prints how far it is from the inverse of their covariance.
"""

from typing import Any

import numpy as np

import cudiff
from cudiff import Function, Tensor


class LogDet(Function):
    @staticmethod
    def forward_numpy(ctx: Any, x: np.ndarray) -> np.ndarray:
        ctx.save(x)
        return np.asarray(np.linalg.slogdet(x).logabsdet)

    @staticmethod
    def backward_numpy(ctx: Any, dout: np.ndarray, needs: tuple[bool, ...], into: tuple[Any, ...]) -> tuple[np.ndarray]:
        (x,) = ctx.saved
        return (dout * np.linalg.inv(x).T,)


def logdet(x: Tensor) -> Tensor:
    """log |det x| of a matrix."""
    out: Tensor = LogDet.apply(x)
    return out


rng = np.random.default_rng(0)
cudiff.check_gradient(logdet, rng.standard_normal((4, 4)))
print("the gradient is right")

points = rng.standard_normal((1000, 3)) @ [[1.0, 0.5, 0.0], [0.0, 0.8, 0.3], [0.0, 0.0, 0.6]]
covariance = np.cov(points.T, bias=True)


def loss(precision: Any) -> Any:
    """Minus twice the mean log-likelihood of the points, but for a constant."""
    return (precision * covariance).sum() - logdet(precision)


precision, gradient = np.eye(3), cudiff.grad(loss)
for step in range(15):
    precision = precision - 0.5 * precision @ gradient(precision) @ precision  # the natural gradient
    print(f"step {step}: loss {loss(precision):.4f}")
print(f"error {np.abs(precision - np.linalg.inv(covariance)).max():.1e}")
