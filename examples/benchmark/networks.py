"""The rows of whole networks: training steps, forwards, the first step of a process, memory."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import cupy
import numpy as np

from cudiff import ops
from cudiff.backend import Staging, float32
from cudiff.config import PRESETS, Config
from cudiff.cuda.graph import capture
from cudiff.cuda.timing import graph_time
from cudiff.data.dataset import Dataset
from cudiff.models import build
from cudiff.models.cnn import CNN
from cudiff.nn import Module, init
from cudiff.optim import SGD
from cudiff.pipeline import Pipeline
from cudiff.tensor import Tensor, no_grad
from cudiff.train import Trainer
from examples.benchmark.measure import Report, random_tensor, step_time

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


def trainer_of(config: Config) -> Trainer:
    """A trainer of `config` on random images; its folder is not used."""
    shape = (IMAGES, config.image_size, config.image_size, config.channels)
    images = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    return Trainer(config, Dataset(images), Path(tempfile.gettempdir()) / "cudiff-bench")


def unet_trainer(precision: str) -> Trainer:
    return trainer_of(unet_config(precision))


def pool_bytes(*captured: Any) -> int:
    """GPU memory taken for arrays: CuPy's pool, and those of captured functions."""
    return cupy.get_default_memory_pool().total_bytes() + sum(function.pool_bytes for function in captured)


def unet_steps(precision: str) -> Callable[[Report], None]:
    def section(report: Report) -> None:
        training(report, f"U-Net 64x64 step, batch 32, {precision}", unet_config(precision), FORWARD_FLOPS, memory=True)

    return section


def training(report: Report, name: str, config: Config, flops: float, memory: bool = False) -> None:
    """A training step: batch and noise drawn, forward, backward, clipping, update, average; and one that neither clips
    nor averages. flops: of an image's forward."""
    trainer = trainer_of(config)
    baseline: Any = None
    if report.torch:
        from examples.benchmark import baselines

        baseline = baselines.training(trainer)
    captured, held = step_time(trainer._step), pool_bytes(trainer._step) / 2**20
    trainer = trainer_of(config)
    trainer.optimizer = type(trainer.optimizer)(trainer.net, config.lr)  # neither clips nor averages
    bare = step_time(trainer._step)
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
        net = build(unet_config("bf16"))
        net.precision = "bf16"
        net.eval().flatten("cuda", trainable=False)
        x, t = random_tensor(batch, 64, 64, 3, dtype=float32), random_tensor(batch, dtype=float32)
        with no_grad():
            time = graph_time(lambda net=net, x=x, t=t: net(x, t).data, 2)
        baseline = None
        if report.torch:
            from examples.benchmark import baselines

            baseline = baselines.forward(net, x, t)
        report.add(f"U-Net 64x64 forward, batch {batch}, bf16", time, baseline, flops=batch * FORWARD_FLOPS)


def cs179(report: Report) -> None:
    """The CS 179 U-Net on 28x28 images of one channel: a training step, and one call of its denoiser."""
    config = cs179_config()
    net, denoise, arguments = cs179_denoiser()
    baseline = None
    if report.torch:
        from examples.benchmark import baselines

        baseline = baselines.denoiser(config, net, *arguments)
    name, images = "CS 179 U-Net denoises, batch 16, bf16", len(arguments[0])
    report.add(name, step_time(lambda: denoise(*arguments)), baseline, flops=images * CS179_FLOPS)
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
    with tempfile.TemporaryDirectory() as cache:
        for state in ("empty", "warm"):
            baseline = None
            if report.torch:
                baseline = _seconds("baselines.first_step()", cache)
            seconds = _seconds("networks.unet_trainer('bf16')._step().item()", cache)
            report.add(f"U-Net 64x64, bf16: first step, {state} cache", seconds, baseline, unit="s")


def _seconds(code: str, cache: str) -> float:
    """Until a fresh process has run `code`, its compilers' caches in the folder `cache`."""
    caches = ("CUDIFF_CACHE_DIR", "CUPY_CACHE_DIR", "CUDA_CACHE_PATH", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    environment = os.environ | {name: str(Path(cache) / name) for name in caches}
    environment["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
    module = code.split(".")[0]
    start = time.perf_counter()
    command = [sys.executable, "-c", f"from examples.benchmark import {module}; {code}; print('done', flush=True)"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        done = any(line.strip() == "done" for line in process.stdout)  # the end of the process is not waited for
        seconds = time.perf_counter() - start
    if not done:
        raise RuntimeError(f"{code} failed in a fresh process")
    return seconds
