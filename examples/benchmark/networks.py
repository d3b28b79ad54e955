"""The rows of whole networks: training steps, forwards, the first step of a process, memory."""

from __future__ import annotations

import gc
import itertools
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import cupy
import numpy as np

from cudiff import ops
from cudiff.backend import Staging, float32, free_memory
from cudiff.config import PRESETS, Config, load_toml
from cudiff.cuda.graph import capture
from cudiff.cuda.timing import graph_time
from cudiff.data.dataset import Dataset
from cudiff.diffusion import Euler
from cudiff.models import build
from cudiff.models.cnn import CNN
from cudiff.nn import Module, init
from cudiff.optim import SGD
from cudiff.pipeline import Pipeline
from cudiff.tensor import Tensor, no_grad
from cudiff.train import Trainer
from examples.benchmark.fresh import clocked
from examples.benchmark.measure import Report, random_tensor, step_time
from examples.benchmark.turns import turns

EULER_STEPS = 1000
IMAGES = 512  # on the GPU, to draw batches from
HOST_BATCHES = 4  # page-locked, copied to the GPU in turn
FORWARD_FLOPS = 4.13e11 / 32  # of the U-Net, an image
CS179_FLOPS = 2.88e8  # of CS 179's U-Net's forward, an image
CNN_FLOPS = 8.48e6  # of the classifier's forward, an image
STEP = 3  # forwards that a step's products are worth


def unet_config(precision: str, **changes: Any) -> Config:
    """The preset elephants without dropout; all of the images are trained on."""
    return PRESETS["elephants"].replace(precision=precision, validation=0, dropout=0.0, **changes)


def cs179_config() -> Config:
    return PRESETS["cs179"].replace(precision="bf16")


DITS = {
    "DiT-B/4 64x64": PRESETS["dit64"],
    "DiT-XL/2 32x32x4": PRESETS["dit-xl-2"].replace(
        image_size=32, channels=4, latent_scale=1.0, flip=False, diffusion="edm", learn_sigma=False, batch_size=128,
    ),
}
"""Transformers by EDM's loss, without classes: one on pixels, one on latents."""


def dit_flops(config: Config) -> float:
    """Of a forward of an image: products of 12 D² weights with each token, and attention's two with all tokens."""
    tokens, width = (config.image_size // config.patch_size) ** 2, config.hidden_size
    return tokens * config.depth * (24 * width**2 + 4 * tokens * width)


def dit_step(name: str) -> Callable[[Report], None]:
    def section(report: Report) -> None:
        config = DITS[name]
        training(report, f"{name} step, batch {config.batch_size}, bf16", config, dit_flops(config))

    return section


def plain(config: Config, **changes: Any) -> Config:
    """A configuration's network by EDM's loss in bf16, without classes, learned variance and dropout: what a baseline
    has too."""
    without = {"dropout": 0.0} if "dropout" in config.options else {}
    return config.replace(**({"diffusion": "edm", "sampler": "heun", "learn_sigma": False, "num_classes": 0,
                              "validation": 0, "precision": "bf16"} | without | changes))


_CIFAR: dict[str, Any] = dict(image_size=32, model_channels=128, channel_mult=(1, 2, 2, 2), num_res_blocks=4,
                              attention_resolutions=(16,))
UNETS = {
    "imagenet64 64x64": plain(PRESETS["imagenet64"], batch_size=32),
    "guided64 64x64": plain(PRESETS["guided64"], batch_size=64),
    "CIFAR-10's 32x32": plain(PRESETS["elephants"], batch_size=128, **_CIFAR),
    "mnist 28x28": plain(PRESETS["mnist"], batch_size=256),
    "U-Net 64x64, few images": plain(PRESETS["elephants"], batch_size=8),
    "U-Net 64x64, many images": plain(PRESETS["elephants"], batch_size=128),
    "U-Net 128x128": plain(PRESETS["elephants"], batch_size=16, image_size=128, attention_resolutions=(32, 16)),
    "U-Net 40x40 of 48 channels": plain(PRESETS["elephants"], image_size=40, model_channels=48,
                                        attention_resolutions=(10, 5), num_head_channels=16),
}
"""U-Nets beside the one that the other sections time."""

FORWARDS = {
    "imagenet64 64x64": (UNETS["imagenet64 64x64"], 16),
    "736 M, 64x64": (plain(PRESETS["elephants"], model_channels=384, num_head_channels=64), 2),
}
"""A network and a batch: the second is a real-time model's."""


def other_step(name: str) -> Callable[[Report], None]:
    def section(report: Report) -> None:
        config = UNETS[name]
        training(report, f"{name} step, batch {config.batch_size}, bf16", config, memory=True)

    return section


def model_of(name: str) -> Config:
    """A preset, or a TOML file, as `plain`."""
    return plain(PRESETS[name] if name in PRESETS else load_toml(name))


def step_of(name: str) -> Callable[[Report], None]:
    def section(report: Report) -> None:
        config = model_of(name)
        size = "" if not config.image_size else f" {config.image_size}x{config.image_size}"
        training(report, f"{name}{size} step, batch {config.batch_size}, bf16", config, memory=True)

    return section


def trainer_of(config: Config) -> Trainer:
    """A trainer of `config` on random images, or latents; its folder is not used."""
    shape, rng = (IMAGES, config.image_size, config.image_size, config.channels), np.random.default_rng(0)
    if config.latent_scale:
        data = Dataset(rng.standard_normal(shape, np.float32), latents=True)
    else:
        data = Dataset(rng.integers(0, 256, shape, np.uint8))
    trainer = Trainer(config, data, Path(tempfile.gettempdir()) / "cudiff-bench")
    fill_zeros(config, trainer.net)
    return trainer


def fill_zeros(config: Config, net: Module) -> None:
    """Small numbers in place of parameters of zeros, of DiT and of U-Nets whose blocks begin so: with these the output
    and most gradients are 0."""
    if config.model == "dit" or config.options.get("zero_init"):
        rng, state = np.random.default_rng(1), net.state_dict()
        zeros = {name: array for name, array in state.items() if not array.any()}
        net.load_state_dict({name: rng.standard_normal(array.shape, np.float32) * np.float32(0.02)
                             for name, array in zeros.items()}, strict=False)


def unet_trainer(precision: str) -> Trainer:
    return trainer_of(unet_config(precision))


def pool_bytes(*captured: Any) -> int:
    """GPU memory taken for arrays: CuPy's pool, and those of captured functions."""
    return cupy.get_default_memory_pool().total_bytes() + sum(function.pool_bytes for function in captured)


def unet_steps(precision: str) -> Callable[[Report], None]:
    def section(report: Report) -> None:
        training(report, f"U-Net 64x64 step, batch 32, {precision}", unet_config(precision), FORWARD_FLOPS, memory=True)

    return section


def training(report: Report, name: str, config: Config, flops: float = 0.0, memory: bool = False) -> None:
    """A training step: batch and noise drawn, forward, backward, clipping, update, average; and one that neither clips
    nor averages. flops: of an image's forward, 0 where that is not counted."""
    trainer = trainer_of(config)
    baseline: Any = None
    if report.torch:
        from examples.benchmark import baselines

        baseline = baselines.training(trainer)
    captured, held = step_time(trainer._step), pool_bytes(trainer._step) / 2**20
    trainer = trainer_of(config)
    trainer.optimizer = type(trainer.optimizer)(trainer.net, config.lr)  # neither clips nor averages
    bare = step_time(trainer._step)
    del trainer
    gc.collect()
    free_memory()  # PyTorch may need it
    for times in itertools.chain([{}], baseline.times() if baseline else ()):  # ours stand if PyTorch's time is up
        work, limit = STEP * flops * config.batch_size, "tf32" if config.precision == "tf32" else "bf16"
        details: dict[str, Any] = dict(flops=work, limit=limit)
        report.add(name, captured, times.get("whole"), **details)
        report.add(f"{name}, no EMA, no clipping", bare, times.get("bare"), **details)
        if memory:
            report.add(f"{name}: memory", held, times.get("memory"), unit="MiB")


def forwards(report: Report) -> None:
    """The U-Net's forward in bf16."""
    for batch in (1, 16, 64):
        forward(report, "U-Net 64x64", unet_config("bf16"), batch, FORWARD_FLOPS)


def other_forwards(report: Report) -> None:
    for name, (config, batch) in FORWARDS.items():
        forward(report, name, config, batch)


def forward(report: Report, name: str, config: Config, batch: int, flops: float = 0.0) -> None:
    """The forward of a network in bf16. flops: of an image, 0 where it is not counted."""
    size, channels = config.image_size, config.channels
    net = build(config)
    fill_zeros(config, net)
    net.precision = "bf16"
    net.eval().flatten("cuda", trainable=False)
    x, t = random_tensor(batch, size, size, channels, dtype=float32), random_tensor(batch, dtype=float32)
    with no_grad():
        net(x, t)  # compiles its kernels
        with turns.alone():
            time = graph_time(lambda: net(x, t).data, 2)
    baseline = None
    if report.torch:
        from examples.benchmark import baselines

        baseline = baselines.forward(config, net, x, t)
    report.add(f"{name} forward, batch {batch}, bf16", time, baseline, flops=batch * flops)


def sampling(report: Report) -> None:
    """`Pipeline.sample` of an MNIST model, to pictures of the host: its first call, which compiles and records, and the
    median of later ones, each with another seed and guidance."""
    config = PRESETS["mnist"].replace(num_classes=10)
    net = build(config)
    net.precision = "bf16"
    model = Pipeline(config, net.eval().flatten("cuda", trainable=False))
    for n in (1, 256):
        times = []
        with turns.alone():
            for seed in range(12):
                start = time.perf_counter()
                model.sample(n, seed, steps=18, sampler="euler", guidance=1.1 + seed / 10)
                times.append(1e3 * (time.perf_counter() - start))
        name = f"mnist 28x28, Pipeline.sample({n}), 18 Euler steps"
        report.add(f"{name}: first call", times[0], unit="ms")
        report.add(f"{name}: later calls", sorted(times[2:])[5], unit="ms")


def frames(report: Report) -> None:
    """Frames of `Pipeline.stream`, to the host, of a real-time model of 1.0 billion parameters: one evaluation each."""
    config = plain(PRESETS["elephants"], model_channels=448, num_head_channels=64)
    net = build(config)
    fill_zeros(config, net)
    net.precision = "bf16"
    model = Pipeline(config, net.eval().flatten("cuda", trainable=False))
    for n in (2, 1):
        stream, times = model.stream(n), []
        with turns.alone():
            for _ in range(204):
                start = time.perf_counter()
                next(stream)
                times.append(1e3 * (time.perf_counter() - start))
        for part in (50, 99):  # the first four draw a sampling, and record
            name = f"1.0 billion parameters, frames of 64x64, {n} at once, p{part}"
            report.add(name, np.percentile(times[4:], part), unit="ms")


def cs179(report: Report) -> None:
    """The CS 179 U-Net on 28x28 images of one channel: one call of its denoiser, 16 images by as many of Euler's steps
    as its project takes, and a training step."""
    config = cs179_config()
    net, denoise, arguments = cs179_denoiser()
    pipeline, images = Pipeline(config, net), len(arguments[0])
    sigmas = pipeline.sigmas("euler", EULER_STEPS)
    sampler, start = Euler(pipeline.denoiser(), captured=True), arguments[0] * float(sigmas[0])
    call, drawn = None, None
    if report.torch:
        from examples.benchmark import baselines

        call, drawn = baselines.denoiser(config, net, *arguments, sigmas)
    work = images * CS179_FLOPS
    report.add("CS 179 U-Net denoises, batch 16, bf16", step_time(lambda: denoise(*arguments)), call, flops=work)
    name = f"CS 179 U-Net draws 16 images in {EULER_STEPS:,} Euler steps, bf16"
    ours = step_time(lambda: sampler(start, sigmas), copies=1, warmup=2)
    report.add(name, ours, drawn, flops=EULER_STEPS * work)
    rates = [f"{images / time * 1e6:,.0f} images a second by {whose}" for time, whose in ((ours, "cudiff"),
             (drawn, "PyTorch")) if time]
    print(f"{name}: {', '.join(rates)}", flush=True)
    training(report, f"CS 179 U-Net step, batch {config.batch_size}, bf16", config, CS179_FLOPS)


def cs179_denoiser() -> tuple[Module, Callable[..., Tensor], tuple[Tensor, Tensor]]:
    """The net, its D(x, sigma) as one graph, and 16 images with their noise levels."""
    config = cs179_config()
    net = build(config)
    net.precision = config.precision
    net.eval().flatten("cuda", trainable=False)
    denoiser = Pipeline(config, net).denoiser()
    arguments = random_tensor(16, 28, 28, 1, dtype=float32), ops.exp(random_tensor(16, dtype=float32))

    @no_grad()
    def denoise(x: Tensor, sigma: Tensor) -> Tensor:
        return denoiser(x, sigma)

    return net, capture(denoise), arguments


def cnn(report: Report) -> None:
    """The MNIST classifier: a batch copied from page-locked memory, forward, backward, SGD."""
    for batch in (256, 4096):
        net, step, _ = cnn_step(batch)
        baseline = None
        if report.torch:
            from examples.benchmark import baselines

            baseline = baselines.cnn(net, batch)
        name = f"MNIST CNN step with its load, batch {batch}, bf16"
        report.add(name, step_time(step), baseline, flops=STEP * batch * CNN_FLOPS)


def cnn_step(batch: int) -> tuple[CNN, Callable[[], Tensor], Callable[[], Tensor]]:
    """The classifier; its step, which has the next batch copied and launches a graph; and what that does, eagerly."""
    with init.seeded(0):
        net = CNN()
    net.precision = "bf16"
    net.flatten("cuda")
    optimizer = SGD(net, lr=0.01, momentum=0.9)

    def update(images: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = cnn_loss(net, images, labels)
        loss.backward()
        optimizer.step()
        return loss

    stages = []
    for images, labels in host_batches(batch):
        stages.append(Staging("cuda"))
        stages[-1].fill([images, labels])
    run, order = capture(update), itertools.cycle(range(HOST_BATCHES))
    stages[0].upload()

    def step() -> Tensor:
        number = next(order)
        stage = stages[number]
        arrays = stage.take()
        stages[(number + 1) % HOST_BATCHES].upload()  # the next batch, while this one is computed
        loss = run(*map(Tensor, arrays))
        stage.release()
        return loss

    return net, step, partial(update, *map(Tensor, stages[0].take()))


def cnn_loss(net: CNN, images: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of uint8 images; they become [-1, 1] on the GPU."""
    return ops.cross_entropy(cnn_output(net, images), labels)


def cnn_output(net: CNN, images: Tensor) -> Tensor:
    return net(ops.normalize_images(images, net.activation_dtype))


def host_batches(batch: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Random images uint8 (batch, 28, 28, 1) and labels int32 (batch,)."""
    rng = np.random.default_rng(1)
    return [
        (rng.integers(0, 256, (batch, 28, 28, 1), np.uint8), rng.integers(0, 10, batch, np.int32))
        for _ in range(HOST_BATCHES)
    ]


def memory(report: Report) -> None:
    """What training the U-Net in bf16 takes, on paper for a GPU of 8 GB: everything but CUDA itself and the kernels."""
    for batch in (8, 16, 32):
        trainer = trainer_of(unet_config("bf16", batch_size=batch))
        state = cupy.get_default_memory_pool().used_bytes() / 2**20
        for _ in range(5):
            trainer._step()
        name = f"U-Net 64x64 training, batch {batch}, bf16"
        report.add(f"{name}: memory", pool_bytes(trainer._step) / 2**20, unit="MiB")
        report.add(f"{name}: of it parameters, moments, EMA, data", state, unit="MiB")
        del trainer
        gc.collect()
        cupy.get_default_memory_pool().free_all_blocks()


def first_step(report: Report) -> None:
    """Seconds from the start of a Python process until its first training step is done."""
    with tempfile.TemporaryDirectory() as cache, turns.alone():
        for state in ("empty", "warm"):
            baseline = None
            if report.torch:
                baseline = _seconds("baselines.first_step()", cache)
            seconds = _seconds("networks.unet_trainer('bf16')._step().item()", cache)
            report.add(f"U-Net 64x64, bf16: first step, {state} cache", seconds, baseline, unit="s")


def _seconds(code: str, cache: str) -> float:
    """Until a fresh process has run `code`, its compilers' caches in the folder `cache`."""
    program = f"from examples.benchmark import fresh, {code.split('.')[0]}; {code}; fresh.mark('step')"
    return clocked(["-c", program], ["step"], cache)["step"]
