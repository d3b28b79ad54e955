"""k-means (Lloyd's algorithm) on four clouds of points.

Prints how far the centres that it finds lie from the true ones.

    python examples/gallery/k_means.py [cpu or cuda]
"""

import sys

import numpy as np

import cudiff

device = sys.argv[1] if len(sys.argv) > 1 else cudiff.default_device()
rng = np.random.default_rng(0)
true = np.array([[0, 0], [4, 0], [0, 4], [4, 4]])
clouds = true[:, None] + rng.normal(0, 0.5, (4, 100, 2))
points = cudiff.Tensor(clouds.reshape(400, 2), dtype="float32", device=device)

centres = points[[0, 100, 200, 300]]  # one of each cloud
for step in range(10):
    distances = cudiff.square(points[:, None] - centres).sum(axis=2)
    nearest = distances.argmin(axis=1)
    sums = cudiff.zeros((4, 2), device=device).at[nearest].add(points)
    counts = cudiff.zeros((4, 1), device=device).at[nearest].add(1)
    before, centres = centres, sums / counts
    print(f"step {step}: mean squared distance {distances.min(axis=1).mean():.4f}")
    if cudiff.abs(centres - before).max() < 1e-6:
        break

error = np.abs(centres.numpy() - true).max()
print(f"largest error of a centre {error:.3f}")
