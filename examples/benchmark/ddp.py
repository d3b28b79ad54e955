"""PyTorch's DistributedDataParallel beside `cudiff train --gpus`: images/s of a U-Net's training step in bf16.

    torchrun --nproc-per-node 2 -m examples.benchmark.ddp [elephants | imagenet64]

Each process takes 32 images of the preset's size; the step is that of `baselines.Training`, without classes and
dropout. Three ways are timed, and the fastest counts: the network compiled, the whole loss compiled, and that captured
by hand as one CUDA graph.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from cudiff.config import Config
from examples.benchmark import baselines, networks

REPEATS, COPIES = 7, 20
NETWORKS = {"elephants": networks.unet_config("bf16", num_classes=0),
            "imagenet64": networks.UNETS["imagenet64 64x64"]}


def shared_step(config: Config, images: torch.Tensor) -> baselines.Training:
    """The training step of one process, whose gradients are averaged over all."""
    net = baselines.unet(config).to(baselines.DEVICE).to(**baselines.CHANNELS_LAST)
    shared = DistributedDataParallel(net, gradient_as_bucket_view=True, static_graph=True)
    return baselines.Training(baselines.EDM(config, shared), images)


def ways(config: Config, images: torch.Tensor) -> Iterator[tuple[str, Callable[[], object]]]:
    """Each way's name and a call that makes a step."""
    training = shared_step(config, images)
    training.model.net = baselines.compile_alone(training.model.net)
    yield "network compiled", lambda: training.step(training.loss, True)
    whole = shared_step(config, images)
    compiled = baselines.compile_alone(whole.loss)
    yield "loss compiled", lambda: whole.step(compiled, True)
    # DistributedDataParallel that is captured has to be made and warmed up on a stream beside the default one.
    with torch.cuda.stream(torch.cuda.Stream()):
        graphed = shared_step(config, images)
        inner = baselines.compile_alone(graphed.loss)
        for _ in range(11):
            graphed.step(inner, True)
    torch.cuda.synchronize()
    yield "captured by hand", baselines.captured(lambda: graphed.step(inner, True))


def images_per_second(step: Callable[[], object], images: int) -> float:
    """Of so many images a step, the median of `REPEATS` times `COPIES` steps."""
    for _ in range(20):
        step()
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(COPIES):
            step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begun) / COPIES)
    return images / statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("network", nargs="?", choices=NETWORKS, default="elephants")
    config = NETWORKS[parser.parse_args().network]
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # its watchdog looks at events, which a capture forbids
    distributed.init_process_group("nccl")
    images = np.random.default_rng(0).integers(0, 256, (networks.IMAGES, 64, 64, 3), np.uint8)
    gpus, found = distributed.get_world_size(), []
    for name, step in ways(config, torch.from_numpy(images)):
        found.append(images_per_second(step, gpus * config.batch_size))
        if distributed.get_rank() == 0:
            print(f"{gpus} GPUs, {name}: {found[-1]:,.1f} images/s", flush=True)
    if distributed.get_rank() == 0:
        print(f"DistributedDataParallel on {gpus} GPUs, the fastest way: {max(found):,.1f} images/s", flush=True)
    os._exit(0)  # a graph that holds the group's operations would keep its end waiting


if __name__ == "__main__":
    main()
