"""Train a network of one's own and sample it with a sampler of one's own, on a CPU: python examples/own_model.py"""

import argparse
from itertools import pairwise

import cudiff
from cudiff import nn
from cudiff.diffusion import Plan, Sampler, per_sample, rows
from cudiff.plot import save_grid


@cudiff.register_model("mlp", "all pixels at once", options={"width": cudiff.Option(256, "hidden units", least=4)})
class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.width, pixels = config.width, config.image_size**2 * config.channels
        self.first, self.last = nn.Linear(pixels, self.width), nn.Linear(self.width, pixels)
        self.time, *hidden = (nn.Linear(self.width, self.width) for _ in range(4))
        self.hidden, self.label = nn.ModuleList(hidden), nn.Embedding(config.num_classes, self.width)

    def forward(self, x, t, labels):
        emb = self.time(cudiff.timestep_embedding(t, self.width)) + self.label(labels)
        h = self.first(cudiff.flatten(x, 1))
        for layer in self.hidden:
            h = h + layer(cudiff.silu(h + emb))
        return cudiff.reshape(self.last(h), x.shape)


@cudiff.register_sampler("midpoint", "along the slope in the middle of each step")
class Midpoint(Sampler):
    def __init__(self, denoiser, config, captured):
        super().__init__(denoiser, captured)

    def plan(self, sigmas):  # from a to b, with m in the middle; to 0 goes Euler's step, which is the denoised image
        steps = [(a, b, (a * b) ** 0.5) for a, b in pairwise(map(float, sigmas))]
        return [Plan([a, m, m / a, (b - a) / m] if b > 0 else [a], noisy=False) for a, b, m in steps]

    def step(self, x, numbers, noise, labels):
        sigma, *rest = rows(numbers)
        x_next = denoised = self.denoiser(x, sigma, labels)
        if rest:
            middle, ratio, width = rest
            half = denoised + (x - denoised) * per_sample(ratio, x)
            x_next = x + (half - self.denoiser(half, middle, labels)) * per_sample(width, x)
        return x_next, denoised


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a small network of one's own on drawn digits and sample it.")
    parser.add_argument("steps", type=int, nargs="?", default=2000, help="of training (default 2000)")
    steps = parser.parse_args().steps
    try:
        config = cudiff.Config(model="mlp", sampler="midpoint", steps=steps, lr=1e-3, P_mean=-0.4)
        cudiff.Trainer(config, cudiff.load_dataset("digits", image_size=8), "runs/own-model").run()
        save_grid("own-model.png", cudiff.load("runs/own-model").sample(64, guidance=2))  # where "mlp" is registered
        print("64 images in own-model.png, the run in runs/own-model")
    except cudiff.CudiffError as error:
        raise SystemExit(f"own_model.py: {error}") from None
