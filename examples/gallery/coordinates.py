"""An image as a function: a network that says the colour at (x, y), which it sees as sinusoids of many frequencies.

Prints how near its image is to the original, in decibels (PSNR), with the sinusoids and without.

    python examples/gallery/coordinates.py [cpu or cuda]
"""

import sys

import numpy as np

import cudiff
from cudiff import Tensor, nn, optim

device = sys.argv[1] if len(sys.argv) > 1 else cudiff.default_device()
rng = np.random.default_rng(0)

SIZE = 32
y, x = np.meshgrid(np.linspace(-1, 1, SIZE), np.linspace(-1, 1, SIZE), indexing="ij")
rings = np.sin(20 * np.hypot(x, y))
checks = np.sign(np.sin(8 * x) * np.sin(8 * y))
image = np.stack([rings, checks, x], axis=-1).reshape(-1, 3) / 2 + 0.5
places = np.stack([x, y], axis=-1).reshape(-1, 2)


def psnr(features: np.ndarray) -> float:
    """Of the image that a network makes of features (pixels, F) of its places."""
    inputs = Tensor(features, dtype="float32", device=device)
    target = Tensor(image, dtype="float32", device=device)
    layers = [nn.Linear(features.shape[1], 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)]
    model = nn.Sequential(*layers, nn.Sigmoid()).to(device)
    optimizer = optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(200):
        optimizer.zero_grad()
        loss = cudiff.mse(model(inputs), target)
        loss.backward()
        optimizer.step()
    return float(-10 * np.log10(loss.item()))


waves = places @ rng.normal(0, 6, (2, 64))  # Tancik et al. 2020, "Fourier features"
sinusoids = np.concatenate([np.sin(waves), np.cos(waves)], axis=1)
print(f"PSNR {psnr(sinusoids):.1f} dB, without sinusoids {psnr(places):.1f} dB")
