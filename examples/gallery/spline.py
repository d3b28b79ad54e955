"""A smoothing cubic spline (Catmull-Rom) through noisy samples of a curve, by gradient descent on its points.

Prints how far the spline is from the curve, and how far the samples are.
"""

import numpy as np

import cudiff
from cudiff import Tensor, nn, optim

rng = np.random.default_rng(0)
x = np.sort(rng.uniform(0, 1, 300))
curve = np.sin(2 * np.pi * x) + 0.5 * np.sin(6 * np.pi * x)
y = curve + rng.normal(0, 0.2, 300)

PIECES = 16
piece = np.minimum((x * PIECES).astype(int), PIECES - 1)
t = x * PIECES - piece  # the place in the piece, from 0 to 1
basis = np.stack([-t + 2 * t**2 - t**3, 2 - 5 * t**2 + 3 * t**3, t + 4 * t**2 - 3 * t**3, -(t**2) + t**3], axis=1) / 2


def spline(points: Tensor) -> Tensor:
    """Its values at x; each depends on the four points around its piece."""
    return (points[piece[:, None] + np.arange(4)] * basis).sum(axis=1)


points = nn.Parameter(np.zeros(PIECES + 3))
optimizer = optim.Adam([points], lr=0.05)
for step in range(301):
    bend = points[2:] - 2 * points[1:-1] + points[:-2]
    loss = cudiff.square(spline(points) - y).mean() + 0.01 * cudiff.square(bend).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(f"step {step}: loss {loss.item():.4f}")

error = np.sqrt(np.mean((spline(points).numpy() - curve) ** 2))
print(f"error of the spline {error:.3f}, of the samples {np.std(y - curve):.3f}")
