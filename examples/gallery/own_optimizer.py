"""An optimiser of one's own, momentum in six lines, with a learning rate of one's own that rises and falls.

Prints the loss, and how far the weights are from those of cudiff's SGD with the same schedule.
"""

import copy
from collections.abc import Iterable

import numpy as np

import cudiff
from cudiff import Tensor, nn, optim


def triangle(step: int) -> float:
    """What the learning rate is multiplied by: up to 1 over 50 steps, down to 0 over 150."""
    return max(0.0, min((step + 1) / 50, (200 - step) / 150))


class Momentum:
    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, momentum: float):
        self.parameters, self.lr, self.momentum, self.steps = list(parameters), lr, momentum, 0
        self.velocity = [cudiff.zeros_like(p) for p in self.parameters]

    @cudiff.no_grad()
    def step(self) -> None:
        for i, p in enumerate(self.parameters):
            self.velocity[i] = self.momentum * self.velocity[i] + p.grad
            p -= self.lr * triangle(self.steps) * self.velocity[i]
            p.grad = None
        self.steps += 1


x = Tensor(np.linspace(-2, 2, 100)[:, None], dtype="float32")
y = cudiff.sin(2 * x)
ours = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
theirs = copy.deepcopy(ours)
own = Momentum(ours.parameters(), lr=0.1, momentum=0.9)
sgd = optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9, schedule=optim.Tabulated(triangle, 200))
for step in range(200):
    loss = cudiff.mse(ours(x), y)
    loss.backward()
    own.step()
    sgd.zero_grad()
    cudiff.mse(theirs(x), y).backward()
    sgd.step()
    if step % 50 == 0 or step == 199:
        print(f"step {step}: loss {loss.item():.4f}")

apart = max(float(cudiff.abs(p - q).max()) for p, q in zip(ours.parameters(), theirs.parameters(), strict=True))
print(f"loss {loss.item():.4f}, apart from optim.SGD {apart:.1e}")
