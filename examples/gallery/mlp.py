"""A multilayer perceptron that tells three spirals apart. Prints its accuracy on points that it was not shown.

    python examples/gallery/mlp.py [cpu or cuda]
"""

import sys

import numpy as np

import cudiff
from cudiff import Tensor, nn, optim

device = sys.argv[1] if len(sys.argv) > 1 else cudiff.default_device()
rng = np.random.default_rng(0)
cudiff.seed(0)


def spirals(n: int) -> tuple[Tensor, np.ndarray]:
    labels, radius = rng.integers(3, size=n), rng.uniform(0.1, 1, n)
    angle = 2 * np.pi / 3 * labels + 5 * radius + rng.normal(0, 0.15, n)
    points = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    return Tensor(points, dtype="float32", device=device), labels


model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)).to(device)
optimizer = optim.AdamW(model.parameters(), lr=1e-2)
x, labels = spirals(600)
for step in range(301):
    loss = cudiff.cross_entropy(model(x), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(f"step {step}: loss {loss.item():.3f}")

x, labels = spirals(1000)
with cudiff.no_grad():
    guesses = model(x).argmax(axis=1).numpy()
print(f"accuracy {np.mean(guesses == labels):.1%}")
