"""A generative adversarial network, with least squares as in LSGAN, that learns a ring of points.

Prints the mean radius of its points and how far they scatter: the data has 1 and 0.05.

    python examples/gallery/gan.py [cpu or cuda]
"""

import sys

import numpy as np

import cudiff
from cudiff import Tensor, nn, optim

device = sys.argv[1] if len(sys.argv) > 1 else cudiff.default_device()
rng = np.random.default_rng(0)


def ring(n: int) -> Tensor:
    angle, radius = rng.uniform(0, 2 * np.pi, n), rng.normal(1, 0.05, n)
    points = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    return Tensor(points, dtype="float32", device=device)


def noise(n: int) -> Tensor:
    return Tensor(rng.standard_normal((n, 4)), dtype="float32", device=device)


def net(inputs: int, outputs: int) -> nn.Module:
    layers = [nn.Linear(inputs, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, outputs)]
    return nn.Sequential(*layers).to(device)


generator, critic = net(4, 2), net(2, 1)
average, fall = optim.EMA(generator, half_life=100), optim.Cosine(total_steps=1000)
for_generator = optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.9), schedule=fall, ema=average)
for_critic = optim.Adam(critic.parameters(), lr=4e-3, betas=(0.5, 0.9), schedule=fall)
for step in range(1001):
    real, fake = ring(128), generator(noise(128)).detach()
    for_critic.zero_grad()
    critic_loss = cudiff.square(critic(real) - 1).mean() + cudiff.square(critic(fake)).mean()
    critic_loss.backward()
    for_critic.step()

    for_generator.zero_grad()
    generator_loss = cudiff.square(critic(generator(noise(128))) - 1).mean()
    generator_loss.backward()
    for_generator.step()
    if step % 250 == 0:
        print(f"step {step}: critic {critic_loss:.3f}, generator {generator_loss:.3f}")

with cudiff.no_grad():
    radius = cudiff.sqrt((average.model(noise(1000)) ** 2).sum(axis=1))
print(f"radius {radius.mean():.3f}, scatter {radius.std():.3f}")
