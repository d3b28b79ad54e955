"""A diffusion model of points on a ring: cudiff's EDM loss, denoiser and Heun's sampler around a small network.

Prints the mean radius of the sampled points and how far they scatter: the data has 1 and 0.05.

    python examples/gallery/diffusion.py [cpu or cuda]
"""

import sys

import numpy as np

import cudiff
from cudiff import Tensor, nn, optim
from cudiff.diffusion import EDMDenoiser, EDMLoss, ImageNoise, karras_sigmas, sample_heun

device = sys.argv[1] if len(sys.argv) > 1 else cudiff.default_device()
rng = np.random.default_rng(0)


def ring(n: int) -> Tensor:
    angle, radius = rng.uniform(0, 2 * np.pi, n), rng.normal(1, 0.05, n)
    points = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    return Tensor(points, dtype="float32", device=device)


class Net(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.width, self.first, self.last = width, nn.Linear(2, width), nn.Linear(width, 2)
        self.time, self.hidden = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor, t: Tensor, labels: Tensor | None) -> Tensor:
        time = self.time(cudiff.timestep_embedding(t * 100, self.width))
        h = cudiff.silu(self.first(x) + time)
        return self.last(h + cudiff.silu(self.hidden(h) + time))


model = Net(96).to(device)
loss_of = EDMLoss(sigma_data=0.7)
average = optim.EMA(model, half_life=200)
optimizer = optim.Adam(model, lr=2e-3, ema=average)
generator = cudiff.Generator(0, device)
for step in range(1501):
    optimizer.zero_grad()
    loss = loss_of(model, ring(256), None, generator)
    loss.backward()
    optimizer.step()
    generator.advance()
    if step % 500 == 0:
        print(f"step {step}: loss {loss:.3f}")

sigmas = karras_sigmas(20, 0.01, 20.0)
noise = ImageNoise((1000, 2), seed=0, device=device).start(sigmas[0])
points = sample_heun(EDMDenoiser(average.model, sigma_data=0.7), noise, sigmas)
radius = cudiff.sqrt(cudiff.square(points).sum(axis=1))
print(f"radius {radius.mean():.3f}, scatter {radius.std():.3f}")
