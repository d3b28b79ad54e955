"""PyTorch at its best, doing the same work: channels-last, bf16 or TF32, fused optimisers, SDPA, torch.compile.

Every baseline of a network starts from cudiff's weights, and is timed only after both gave the same loss and gradient
(a forward the same output, the classifier the same loss) on the same images and noise. A step is timed twice, compiled
and captured by hand as one CUDA graph, batch, clipping, optimiser and average included, and compiled with
mode="reduce-overhead"; the better one counts.
"""

from __future__ import annotations

import copy
import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import cudiff
from cudiff.backend import free_memory
from cudiff.config import Config
from cudiff.convert import to_torch
from cudiff.cuda.timing import median_time
from cudiff.models.cnn import CNN
from cudiff.nn import Module
from cudiff.ops.random import Purpose
from cudiff.registry import MODELS
from cudiff.train import Trainer
from examples.benchmark import networks
from examples.benchmark.measure import step_time
from examples.benchmark.torch_networks import cs179, dit, unet
from examples.benchmark.turns import turns

TOLERANCE = {"bf16": 1e-2, "tf32": 2e-3, "fp32": 1e-4}  # of losses and of the norms of outputs, relative
CHECKED = 64  # images of a batch, at most: PyTorch runs them uncompiled, and DiT-XL/2's 128 do not fit in 80 GB
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CHANNELS_LAST: Any = dict(memory_format=torch.channels_last)

torch.backends.cudnn.benchmark = True
torch.backends.cudnn.benchmark_limit = 0  # all of cuDNN's candidates are tried
torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
torch.set_float32_matmul_precision("high")


def torch_model(config: Config, net: Module) -> nn.Module:
    """PyTorch's network of `config` with the weights of `net`, on the GPU, channels last."""
    other = {"cs179": cs179, "dit": dit, "unet": unet}[config.model](config)
    state = to_torch(net.state_dict(), net.layouts())
    other.load_state_dict({name: torch.from_numpy(array) for name, array in state.items()})
    return other.to(DEVICE).to(**CHANNELS_LAST)


class EDM:
    """EDM's loss and denoiser (see `cudiff.diffusion`) of a PyTorch network."""

    def __init__(self, config: Config, net: nn.Module):
        self.config, self.net = config, net
        self.c_noise_scale = MODELS[config.model].c_noise_scale

    def draw(self, images: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """A batch of uint8 (N, H, W, C) images, flipped at random, in [-1, 1], or of latents; log sigma; noise; their
        labels, of which the configuration's share is -1, or None."""
        size = self.config.batch_size
        index = torch.randint(0, len(images), (size,), device=images.device)
        x = images[index].permute(0, 3, 1, 2)
        if labels is not None:
            kept = torch.rand(size, device=x.device) >= self.config.label_dropout
            labels = torch.where(kept, labels[index], -1)
        if self.config.flip:
            x = torch.where(torch.rand(size, device=x.device)[:, None, None, None] < 0.5, x.flip(3), x)
        x = x.float() / 127.5 - 1 if x.dtype == torch.uint8 else x.float() * self.config.latent_scale
        log_sigma = torch.randn(size, device=x.device) * self.config.P_std + self.config.P_mean
        return x, log_sigma, torch.randn_like(x), labels

    def loss(self, x: Tensor, log_sigma: Tensor, noise: Tensor, labels: Tensor | None = None) -> Tensor:
        config = self.config
        x = (x - config.data_mean) / config.data_std
        sigma = log_sigma.exp()[:, None, None, None]
        c_in = (sigma**2 + config.sigma_data**2).rsqrt()
        target = (x * (sigma / config.sigma_data) - noise * config.sigma_data) * c_in
        return F.mse_loss(self.output((x + noise * sigma) * c_in, log_sigma, labels), target)

    def denoise(self, x: Tensor, sigma: Tensor, labels: Tensor | None = None) -> Tensor:
        config = self.config
        x, sigma = (x - config.data_mean) / config.data_std, sigma[:, None, None, None] / config.data_std
        c_in = (sigma**2 + config.sigma_data**2).rsqrt()
        c_skip, c_out = config.sigma_data**2 * c_in**2, sigma * c_in * config.sigma_data
        out = self.output(x * c_in, sigma.reshape(-1).log(), labels)
        return (x * c_skip + out * c_out) * config.data_std + config.data_mean

    def output(self, x: Tensor, log_sigma: Tensor, labels: Tensor | None) -> Tensor:
        """Of the network, float32."""
        given = () if labels is None else (labels,)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=self.config.precision == "bf16"):
            return self.net(x, log_sigma * self.c_noise_scale, *given).float()


def check(name: str, ours: Any, theirs: Tensor, tolerance: float) -> None:
    """Refuse to time two that do not do the same: RuntimeError where they differ."""
    ours, theirs = np.asarray(ours, np.float64), theirs.detach().double().cpu().numpy()
    difference = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
    print(f"{name}: both agree to {difference:.1e}", flush=True)
    if not difference <= tolerance:
        raise RuntimeError(f"{name}: cudiff and PyTorch differ by {difference:.1e}, more than {tolerance}: not timed")


def check_losses(trainer: Trainer, model: EDM) -> None:
    """The loss and its whole gradient from the trainer's weights, on CHECKED of its next batch and noise.

    Meant for a net's first weights: there bf16 changes 2 % of the gradient at most. What rounding does stays when the
    gradient itself gets small: after 75 steps of CS 179's U-Net it is a tenth of some batches' gradients.
    """
    images, labels = (drawn if drawn is None else drawn[:CHECKED]
                      for drawn in trainer.loader.batch(trainer.generator.step, (), 0))
    trainer.net.zero_grad()
    loss = trainer.loss(trainer.net, images, labels, trainer.generator)
    loss.backward()
    free_memory()  # for PyTorch
    log_sigma = trainer.generator.normal((len(images),), stream=Purpose.SIGMA)
    log_sigma = log_sigma * model.config.P_std + model.config.P_mean
    noise = trainer.generator.normal(images.shape, stream=Purpose.NOISE)
    x, log_sigma, noise = (torch.from_numpy(value.numpy()).to(DEVICE) for value in (images, log_sigma, noise))
    model.net.zero_grad()
    other = model.loss(x.permute(0, 3, 1, 2), log_sigma, noise.permute(0, 3, 1, 2))
    other.backward()
    tolerance = TOLERANCE[model.config.precision]
    check("loss", loss.numpy(), other, tolerance)
    flat = trainer.net.flat
    own = to_torch(flat.views(cudiff.Tensor(flat.grad).numpy()), trainer.net.layouts())
    parameters = {name: value for name, value in model.net.named_parameters() if value.requires_grad}
    check("gradient", np.concatenate([own[name].ravel() for name in parameters]),
          torch.cat([parameter.grad.flatten() for parameter in parameters.values()]), 5 * tolerance)


def training(trainer: Trainer) -> Training:
    """The trainer's step in PyTorch, from its weights. Raises RuntimeError where loss or gradient are not the same."""
    model = EDM(trainer.config, torch_model(trainer.config, trainer.net))
    check_losses(trainer, model)
    free_memory()  # cudiff's is measured without that of this eager step
    return Training(model, torch.from_numpy(trainer.training.images))


class Training:
    """A training step: loss of a drawn batch, backward, clipping, fused Adam or AdamW, moving average."""

    def __init__(self, model: EDM, images: Tensor, labels: Tensor | None = None):
        self.model, self.config, self.images = model, model.config, images.to(DEVICE)
        self.labels = None if labels is None else labels.to(DEVICE)
        self.parameters = [parameter for parameter in self.model.net.parameters() if parameter.requires_grad]
        self.average = [parameter.detach().clone() for parameter in self.parameters]
        rule = torch.optim.AdamW if self.config.optimizer == "adamw" else torch.optim.Adam
        self.optimizer = rule(self.parameters, self.config.lr, self.config.betas, self.config.eps,
                              self.config.weight_decay, fused=True, capturable=True)

    def loss(self) -> Tensor:
        return self.model.loss(*self.model.draw(self.images, self.labels))

    def times(self) -> Iterator[dict[str, float]]:
        """Microseconds of a step, `whole` and `bare` (no average, no clipping), and its `memory` in MiB: compiled and
        captured by hand, then the better of that and of mode="reduce-overhead"."""
        # A copy, as the gradients' places remember the streams of the steps before.
        fresh = Training(EDM(self.config, copy.deepcopy(self.model.net)), self.images, self.labels)
        by_hand = fresh._times(compile_alone(fresh.loss), captured)
        yield by_hand
        del fresh
        gc.collect()
        by_mode = self._times(compile_alone(self.loss, mode="reduce-overhead"), lambda step: step)
        for kind, time in by_hand.items():
            print(f"{kind}: {time:.1f} captured by hand, {by_mode[kind]:.1f} by reduce-overhead", flush=True)
        yield {kind: min(time, by_mode[kind]) for kind, time in by_hand.items()}

    def _times(self, loss: Callable[[], Tensor], run_of: Callable[[Callable], Callable]) -> dict[str, float]:
        """`whole`, `bare` and `memory` of steps by this compiled loss, each as `run_of` makes it run."""
        self.optimizer.zero_grad(set_to_none=True)
        torch.cuda.reset_peak_memory_stats()
        run_of(lambda: self.step(loss, True))()  # compiles, and tries cuDNN's candidates
        memory = torch.cuda.max_memory_allocated() / 2**20
        with turns.alone():
            whole = step_time(run_of(lambda: self.step(loss, True)))
            bare = step_time(run_of(lambda: self.step(loss, False)))
        return {"whole": whole, "bare": bare, "memory": memory}

    def step(self, loss: Callable[[], Tensor], averaged: bool) -> Tensor:
        """`averaged`: with the moving average and with clipping."""
        self.optimizer.zero_grad(set_to_none=True)
        value = loss()
        value.backward()
        if averaged and self.config.clip:
            nn.utils.clip_grad_norm_(self.parameters, self.config.clip, foreach=True)
        self.optimizer.step()
        if averaged:
            self.add_to_average()
        return value

    def add_to_average(self) -> None:
        torch._foreach_lerp_(self.average, self.parameters, 0.01)


def first_step() -> None:
    """The first bf16 step of the U-Net in a fresh process."""
    torch.backends.cudnn.benchmark_limit = 10  # PyTorch's default: to try all would take longer
    config = networks.unet_config("bf16")
    images = np.random.default_rng(0).integers(0, 256, (networks.IMAGES, 64, 64, 3), np.uint8)
    step = Training(EDM(config, unet(config).to(DEVICE).to(**CHANNELS_LAST)), torch.from_numpy(images))
    step.step(torch.compile(step.loss, mode="reduce-overhead"), True).item()


def compile_alone(fn: Callable, **options: Any) -> Callable:
    """`fn` compiled for its own sizes: beside the same code at other sizes, PyTorch would take them for variables."""
    torch._dynamo.reset()
    return torch.compile(fn, **options)


def captured(fn: Callable[[], Any]) -> Callable[[], Any]:
    """`fn` as one CUDA graph, captured by hand, after three calls; on the CPU `fn` itself."""
    if DEVICE == "cpu":
        return fn
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            fn()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fn()
    return graph.replay


def theirs(fn: Callable[[], object], copies: int = 20) -> float:
    """Microseconds of `fn` inside a CUDA graph."""
    replay = captured(lambda: [fn() for _ in range(copies)])
    replay()
    with turns.alone():
        return median_time(replay, copies)


def forward(config: Config, net: Module, x: cudiff.Tensor, t: cudiff.Tensor) -> float:
    """Microseconds of the forward of the network of `config` with bf16 weights."""
    other = torch_model(config, net).bfloat16().eval()
    tx = torch.from_numpy(x.numpy()).to(DEVICE, torch.bfloat16).permute(0, 3, 1, 2)
    tt = torch.from_numpy(t.numpy()).to(DEVICE)
    with torch.no_grad():
        check("output", net(x, t).numpy(), other(tx, tt).permute(0, 2, 3, 1), 3 * TOLERANCE["bf16"])
        compiled = compile_alone(other)
        return theirs(lambda: compiled(tx, tt), 2)


def denoiser(config: Config, net: Module, x: cudiff.Tensor, sigma: cudiff.Tensor,
             sigmas: np.ndarray) -> tuple[float, float]:
    """Microseconds of a call of the denoiser with bf16 weights, and of Euler's method along `sigmas` with it."""
    model = EDM(config, torch_model(config, net).bfloat16().eval())
    tx = torch.from_numpy(x.numpy()).to(DEVICE).permute(0, 3, 1, 2)
    ts = torch.from_numpy(sigma.numpy()).to(DEVICE)
    with torch.no_grad():
        ours = networks.Pipeline(config, net).denoiser()(x, sigma).numpy()
        check("image", ours, model.denoise(tx, ts).permute(0, 2, 3, 1), TOLERANCE["bf16"])
        with_graphs = compile_alone(model.denoise, mode="reduce-overhead")
        time = step_time(lambda: with_graphs(tx, ts))
        compiled = compile_alone(model.denoise)
        draw, _ = euler(compiled, tx, sigmas)
        return min(time, step_time(captured(lambda: compiled(tx, ts)))), step_time(draw, copies=1, warmup=2)


def euler(denoise: Callable[..., Tensor], noise: Tensor, sigmas: np.ndarray,
          plan: Sequence[Sequence[float]] | None = None,
          draw: Callable[[Tensor], Tensor] = torch.randn_like) -> tuple[Callable[[], None], Tensor]:
    """Euler's method from what `noise` holds, each step the same CUDA graph, which counts on the GPU; and where its
    images lie. With `plan`, the numbers of `cudiff.diffusion.dpm_solver.DPMSolver.plan`, DPM-Solver++(2M), which may
    add draw(x)."""
    numbers = plan or [[sigma, following / sigma, 0.0, 0.0] for sigma, following in pairwise(map(float, sigmas))]
    _, _, added, onward = zip(*numbers, strict=True)
    is_noisy, extrapolates = any(added), any(onward)
    rows = torch.tensor(numbers, dtype=torch.float32, device=DEVICE)
    x, before, number = noise.clone(), torch.zeros_like(noise), torch.zeros(1, dtype=torch.int64, device=DEVICE)

    def step() -> None:
        sigma, ratio, added, onward = rows[number][0]
        image = denoised = denoise(x, sigma.repeat(len(x)))
        if extrapolates:
            image = denoised + (denoised - before) * onward
            before.copy_(denoised)
        x.copy_(image + (x - image) * ratio)
        if is_noisy:
            x.add_(draw(x) * added)
        number.add_(1)

    replay = captured(step)

    def run() -> None:
        x.copy_(noise * float(sigmas[0]))
        number.zero_()
        for _ in numbers:
            replay()

    return run, x


def cnn_twin(net: CNN) -> nn.Sequential:
    """PyTorch's classifier with the weights of `net`; its linear layer reads channels first."""
    other = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64 * 49, 128), nn.ReLU(),
        nn.Linear(128, 10),
    )
    state = to_torch(net.state_dict(), net.layouts())
    state["fc1.weight"] = state["fc1.weight"].reshape(128, 7, 7, 64).transpose(0, 3, 1, 2).reshape(128, -1)
    for name, index in (("conv1", 0), ("norm1", 1), ("conv2", 4), ("norm2", 5), ("fc1", 9), ("fc2", 11)):
        own = {key.partition(".")[2]: torch.tensor(value) for key, value in state.items() if key.startswith(name + ".")}
        other[index].load_state_dict(own, strict=False)
    return other.to(DEVICE).to(**CHANNELS_LAST)


def cnn(net: CNN, batch: int) -> float:
    """Microseconds of the classifier's step with its load."""
    other = cnn_twin(net)

    def output(images: Tensor) -> Tensor:
        with torch.autocast(DEVICE, torch.bfloat16):
            return other(images.permute(0, 3, 1, 2).float() / 127.5 - 1)

    def loss(images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(output(images).float(), labels.long())

    host = [[torch.from_numpy(array).pin_memory() for array in arrays] for arrays in networks.host_batches(batch)]
    images, labels = (value.to(DEVICE) for value in host[0])
    ours, own_labels = (cudiff.Tensor(value, device=DEVICE) for value in networks.host_batches(batch)[0])
    check("output", networks.cnn_output(net, ours).numpy(), output(images), 3 * TOLERANCE["bf16"])
    check("loss", networks.cnn_loss(net, ours, own_labels).numpy(), loss(images, labels), TOLERANCE["bf16"])
    optimizer = torch.optim.SGD(other.parameters(), 0.01, momentum=0.9, fused=True)

    def update(loss: Callable[..., Tensor]) -> None:
        optimizer.zero_grad(set_to_none=True)
        loss(images, labels).backward()
        optimizer.step()

    times = []
    for options, run_of in (({"mode": "reduce-overhead"}, lambda run: run), ({}, captured)):
        compiled = compile_alone(loss, **options)
        run = run_of(lambda compiled=compiled: update(compiled))
        times += [step_time(load((images, labels), host, run)) for load in (loading, loading_ahead)]
    return min(times)


def loading(targets: Sequence[Tensor], host: Sequence[Sequence[Tensor]],
            run: Callable[[], object]) -> Callable[[], None]:
    """A step that copies the next batch of `host` to `targets`, then runs."""
    batches = itertools.cycle(host)

    def step() -> None:
        for target, source in zip(targets, next(batches), strict=True):
            target.copy_(source, non_blocking=True)
        run()

    return step


def loading_ahead(targets: Sequence[Tensor], host: Sequence[Sequence[Tensor]],
                  run: Callable[[], object]) -> Callable[[], None]:
    """As `loading`, but the next batch is copied to the GPU, on a stream of its own, while this one is computed."""
    staged, batches = [torch.empty_like(target) for target in targets], itertools.cycle(host)
    stream, taken = torch.cuda.Stream(), torch.cuda.Event()

    def upload() -> None:
        taken.record()
        with torch.cuda.stream(stream):
            stream.wait_event(taken)
            for target, source in zip(staged, next(batches), strict=True):
                target.copy_(source, non_blocking=True)

    def step() -> None:
        torch.cuda.current_stream().wait_stream(stream)
        for target, source in zip(targets, staged, strict=True):
            target.copy_(source)
        upload()
        run()

    upload()
    return step


def matmul(precision: str, size: int) -> float:
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    a, b = (torch.randn(size, size, device=DEVICE, dtype=dtype) for _ in range(2))
    return theirs(lambda: a @ b, 3)


def convolution(c: int, k: int, size: int) -> tuple[float, float, float]:
    """Microseconds of cuDNN's fprop, dgrad and wgrad, without bias, at batch 32."""
    x, weight, dout = (
        torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16).to(**CHANNELS_LAST)
        for shape in ((32, c, size, size), (k, c, 3, 3), (32, k, size, size))
    )

    def backward(mask: list[bool]) -> Any:
        arguments = (dout, x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, mask)
        return torch.ops.aten.convolution_backward(*arguments)

    return (theirs(lambda: F.conv2d(x, weight, padding=1)), theirs(lambda: backward([True, False, False])),
            theirs(lambda: backward([False, True, False])))


def group_norm_silu(c: int, size: int) -> tuple[float, float]:
    """Microseconds of forward and backward at batch 32, compiled, so that norm and SiLU are one."""
    x = torch.randn(32, c, size, size, device=DEVICE, dtype=torch.bfloat16).to(**CHANNELS_LAST).requires_grad_()
    weight = torch.ones(c, device=DEVICE, requires_grad=True)
    bias = torch.zeros(c, device=DEVICE, requires_grad=True)
    norm = compile_alone(lambda x: F.silu(F.group_norm(x, 32, weight, bias)))
    with torch.no_grad():
        forward = theirs(lambda: norm(x))
    dout = torch.randn_like(x)

    def both() -> Any:
        return torch.autograd.grad(norm(x), (x, weight, bias), dout)

    return forward, theirs(both) - forward


def attention(n: int, heads: int, tokens: int, dim: int) -> tuple[float, float]:
    """Microseconds of attention, forward and backward: the better of flash attention and cuDNN's, for each."""
    q, k, v = (
        torch.randn(n, heads, tokens, dim, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    )
    dout, times = torch.randn_like(q), []
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        with sdpa_kernel(backend):
            forward = theirs(lambda: F.scaled_dot_product_attention(q, k, v), 10)
            both = theirs(lambda: torch.autograd.grad(F.scaled_dot_product_attention(q, k, v), (q, k, v), dout), 10)
        print(f"{backend.name}: forward {forward:.1f}, backward {both - forward:.1f} us", flush=True)
        times.append((forward, both - forward))
    return min(time[0] for time in times), min(time[1] for time in times)
