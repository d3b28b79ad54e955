"""The recipe of `examples/speedrun.py` in PyTorch: the model, its first weights, loss, schedule, average and sampler.

Channels-last, under bf16 autocast, with fused AdamW. The training step, with its batch, clipping and average, is one
CUDA graph, and so is a sampler's step. Random numbers are PyTorch's own. Weight decay, where there is some,
takes norms, biases and embeddings too, which cudiff leaves out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from cudiff.config import Config
from cudiff.data import Dataset
from cudiff.diffusion.dpm_solver import DPMSolver
from cudiff.errors import CudiffError
from cudiff.models import build
from cudiff.ops.optim import lr_factor
from cudiff.pipeline import Pipeline
from examples.benchmark import baselines
from examples.benchmark.baselines import EDM
from examples.benchmark.fresh import mark

RAMP = 0.05  # of `cudiff.optim.EMA`
SAMPLERS = "euler", "dpmpp-2m", "dpmpp-2m-sde"


class Training(baselines.Training):
    """`baselines.Training` with labels, cudiff's schedule and its average; all changes on the GPU, as a graph needs."""

    def __init__(self, model: EDM, images: Tensor, labels: Tensor):
        super().__init__(model, images, labels)
        config, device = self.config, baselines.DEVICE
        warmup, end, final = min(config.warmup, config.steps // 2), config.steps, 0.0
        if config.lr_schedule == "constant":
            end, final = 0, 1.0
        steps = range(config.steps)
        rates = [config.lr * lr_factor(step, warmup, end, final) for step in steps]
        lives = [max(1e-8, min(config.ema_half_life, RAMP * step)) for step in steps]
        self.rates = torch.tensor(rates, dtype=torch.float32, device=device)
        self.weights = torch.tensor([1 - 0.5 ** (1 / life) for life in lives], dtype=torch.float32, device=device)
        self.number = torch.zeros(1, dtype=torch.int64, device=device)
        self.rate = torch.zeros((), device=device)
        self.optimizer.param_groups[0]["lr"] = self.rate

    def step(self, loss: Callable[[], Tensor], averaged: bool = True) -> Tensor:
        self.rate.copy_(self.rates[self.number][0])
        value = super().step(loss, averaged)
        self.number.add_(1)
        return value

    def add_to_average(self) -> None:
        change = torch._foreach_sub(self.parameters, self.average)
        torch._foreach_mul_(change, self.weights[self.number][0])
        torch._foreach_add_(self.average, change)

    def averaged(self) -> EDM:
        """The model to sample: the averaged weights. Those of convolutions and linear layers are in bf16 where it
        computes so, as autocast would round them at each call; all others stay float32, as in training."""
        net = copy.deepcopy(self.model.net).eval()
        with torch.no_grad():
            torch._foreach_copy_([value for value in net.parameters() if value.requires_grad], self.average)
        if self.config.precision == "bf16":
            for module in net.modules():
                if isinstance(module, nn.Conv1d | nn.Conv2d | nn.ConvTranspose2d | nn.Linear):
                    module.bfloat16()
        return EDM(self.config, net)


def train_and_sample(config: Config, data: Dataset, labels: np.ndarray, batch_size: int, compiled: bool,
                     weaker: tuple[float, float] | None = None) -> np.ndarray:
    """uint8 (N, H, W, C), of the classes `labels`, so many at once. compiled: by torch.compile, on a GPU. weaker: the
    share of the steps after which the average is kept, and the factor of autoguidance by it.

    Raises CudiffError for a sampler that this side lacks, for PyTorch without CUDA where a GPU is asked for, and for 3
    steps or fewer there, as a graph is recorded after three.
    """
    baselines.DEVICE = config.device
    torch.backends.cudnn.benchmark_limit = 10  # PyTorch's default: to try all would take longer
    if config.sampler not in SAMPLERS:
        raise CudiffError(f"PyTorch's side samples by {', '.join(SAMPLERS)}, not by {config.sampler}")
    if config.device == "cuda" and not torch.cuda.is_available():
        raise CudiffError("this PyTorch has no CUDA: see https://pytorch.org/get-started/locally")
    torch.manual_seed(config.seed)
    compiled, warmup = compiled and config.device == "cuda", 3 if config.device == "cuda" else 0
    if config.steps <= warmup:
        raise CudiffError(f"PyTorch's side records its step after {warmup} of them: train for more")
    config = config.for_data(data.images.shape, data.num_classes, data.class_names)
    net = build(config)
    training = Training(EDM(config, baselines.torch_model(config, net)), torch.from_numpy(data.images),
                        torch.from_numpy(data.labels).long())
    mark("start")
    loss = baselines.compile_alone(training.loss) if compiled else training.loss
    step = baselines.captured(lambda: training.step(loss))
    worse = None
    for done in range(warmup, config.steps):
        step()
        if weaker and done == max(warmup, int(weaker[0] * config.steps)):
            worse = training.averaged(), weaker[1]
        if done == warmup:
            _wait()
            mark("first step")
    _wait()
    mark("training")
    sigmas = Pipeline(config, net).sigmas(config.sampler, config.sample_steps)
    noise = torch.randn(len(labels), *data.images.shape[3:], *data.images.shape[1:3], device=config.device)
    return sample(training.averaged(), noise, torch.from_numpy(labels).long(), sigmas, batch_size, compiled, worse)


@torch.no_grad()
def sample(model: EDM, noise: Tensor, labels: Tensor, sigmas: np.ndarray, batch_size: int,
           compiled: bool = False, worse: tuple[EDM, float] | None = None,
           draw: Callable[[Tensor], Tensor] = torch.randn_like) -> np.ndarray:
    """Images from noise (N, C, H, W), uint8 (N, H, W, C), by the configuration's sampler and guidance. worse: a model
    to be guided away from, and the factor. draw: the noise of a step."""
    config, size, device = model.config, min(batch_size, len(noise)), noise.device
    chosen, none = (torch.full((size,), -1, device=device) for _ in range(2))

    def estimate(x: Tensor, sigma: Tensor, labels: Tensor) -> Tensor:
        if worse is None:
            return model.denoise(x, sigma, labels)
        other = worse[0].denoise(x, sigma, labels)
        return other + (model.denoise(x, sigma, labels) - other) * worse[1]

    def denoise(x: Tensor, sigma: Tensor) -> Tensor:
        if config.guidance == 1:
            return estimate(x, sigma, chosen)
        both = estimate(torch.cat([x, x]), torch.cat([sigma, sigma]), torch.cat([chosen, none]))
        conditional, unconditional = both.chunk(2)
        return unconditional + (conditional - unconditional) * config.guidance

    begin = torch.zeros_like(noise[:size]).contiguous(memory_format=torch.channels_last)
    plan = None
    if config.sampler != "euler":
        plan = [step.numbers for step in DPMSolver(None, config.sampler == "dpmpp-2m-sde").plan(sigmas)]
    run, x = baselines.euler(baselines.compile_alone(denoise) if compiled else denoise, begin, sigmas, plan, draw)
    parts = []
    for start in range(0, len(noise), size):
        rows = torch.arange(start, start + size).clamp(max=len(noise) - 1)
        begin.copy_(noise[rows.to(device)])
        chosen.copy_(labels[rows])
        run()
        parts.append((x * 127.5 + 127.5).round().clamp(0, 255).byte().permute(0, 2, 3, 1).cpu().numpy())
    return np.ascontiguousarray(np.concatenate(parts)[: len(noise)])


def _wait() -> None:
    if baselines.DEVICE == "cuda":
        torch.cuda.synchronize()
