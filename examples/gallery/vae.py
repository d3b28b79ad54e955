"""A variational autoencoder of drawn digits of 8x8 pixels, with 8 latent numbers for each.

Prints the error of a digit that went through the 8 numbers, and that of the mean digit in its place.

    python examples/gallery/vae.py [cpu or cuda]
"""

import sys

import numpy as np

import cudiff
from cudiff import Tensor, nn, optim

device = sys.argv[1] if len(sys.argv) > 1 else cudiff.default_device()
rng = np.random.default_rng(0)


class VAE(nn.Module):
    def __init__(self, pixels: int, latent: int):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(pixels, 128), nn.SiLU(), nn.Linear(128, 2 * latent))
        self.decoder = nn.Sequential(nn.Linear(latent, 128), nn.SiLU(), nn.Linear(128, pixels))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_var = cudiff.split(self.encoder(x), 2, axis=1)
        noise = Tensor(rng.standard_normal(mean.shape), dtype="float32", device=device)
        return self.decoder(mean + cudiff.exp(0.5 * log_var) * noise), mean, log_var


data = cudiff.load_dataset("digits", image_size=8, count=2000).images.reshape(2000, 64) / 255
images, held_out = np.split(data, [1900])
model = VAE(64, 8).to(device)
optimizer = optim.Adam(model.parameters(), lr=2e-3)
for step in range(1001):
    x = Tensor(rng.choice(images, 64), dtype="float32", device=device)
    out, mean, log_var = model(x)
    error = cudiff.square(out - x).sum(axis=1).mean() / (2 * 0.1**2)
    divergence = 0.5 * (mean**2 + cudiff.exp(log_var) - 1 - log_var).sum(axis=1).mean()
    optimizer.zero_grad()
    (error + divergence).backward()
    optimizer.step()
    if step % 250 == 0:
        print(f"step {step}: error {error:.1f}, divergence {divergence:.1f}")

with cudiff.no_grad():
    latent = model.encoder(Tensor(held_out, dtype="float32", device=device))[:, :8]
    found = model.decoder(latent).numpy()
ours, mean_digit = np.square(found - held_out).mean(), np.square(images.mean(axis=0) - held_out).mean()
print(f"error {ours:.4f}, of the mean digit {mean_digit:.4f}")
