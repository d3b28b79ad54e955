"""Classify MNIST by a small CNN and plain SGD: python examples/classify_mnist.py [--data NAME] [--against torch]

Two 5x5 convolutions with ReLU and 2x2 max-pooling, two dense layers. The data lies in the host's memory; each batch is
copied to the GPU while the one before is used. Prints the time of 100 iterations, with their load, and after training
the share of the test images that are right. --data fashion-mnist --flip does the same with photos of clothes.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import cudiff
from cudiff import CudiffError, Tensor, nn, ops
from cudiff.backend import Staging
from cudiff.convert import to_torch
from cudiff.cuda.graph import capture
from cudiff.data import Dataset, load_dataset, shuffled_index
from cudiff.nn import init
from cudiff.optim import SGD, Cosine

TIMED = 100  # iterations
Step = Callable[[Tensor, Tensor], Any]


def network(data: Dataset, options: argparse.Namespace) -> nn.Module:
    """uint8 images, normalised, to a number for each class."""
    height, width, channels = data.images.shape[1:]
    with init.seeded(options.seed):
        net = nn.Sequential(
            nn.Conv2d(channels, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(height // 4 * (width // 4) * 64, 128), nn.ReLU(), nn.Linear(128, data.num_classes),
        )
    net.precision = options.precision
    net.flatten(options.device)
    return net


def logits(net: nn.Module, images: Tensor) -> Tensor:
    return ops.astype(net(ops.normalize_images(images, net.activation_dtype)), "float32")


def batches(data: Dataset, options: argparse.Namespace, epochs: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Images and labels on the device, the next ones on their way: they hold until the next are asked for."""
    ready, stages = None, itertools.cycle((Staging(options.device), Staging(options.device)))
    for arrays, stage in zip(drawn(data, options, epochs), stages, strict=False):
        stage.fill(arrays)
        stage.upload()
        if ready is not None:
            yield tuple(map(Tensor, ready.take()))  # type: ignore[misc]
            ready.release()
        ready = stage
    if ready is not None:
        yield tuple(map(Tensor, ready.take()))  # type: ignore[misc]


def drawn(data: Dataset, options: argparse.Namespace, epochs: int) -> Iterator[list[np.ndarray]]:
    """Batches of an epoch after the other, each in an order of its own; what is left of an epoch is dropped."""
    assert data.labels is not None
    rng, size = np.random.default_rng(options.seed), options.batch_size
    for epoch in range(epochs):
        order = shuffled_index(np.arange(len(data)), len(data), options.seed, epoch)
        for start in range(0, len(data) - size + 1, size):
            chosen = order[start : start + size]
            images = data.images[chosen]
            if options.flip:
                mirrored = rng.random(size) < 0.5
                images[mirrored] = images[mirrored, :, ::-1]
            yield [images, data.labels[chosen]]


def update_of(net: nn.Module, options: argparse.Namespace, schedule: Cosine | None = None) -> Step:
    """One update by a batch, which returns its loss: on a GPU one CUDA graph."""
    optimizer = SGD(net, lr=options.lr, schedule=schedule)

    def update(images: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = ops.cross_entropy(logits(net, images), labels)
        loss.backward()
        optimizer.step()
        return loss

    return capture(update, device=options.device)


def accuracy(net: nn.Module, data: Dataset, options: argparse.Namespace) -> float:
    guesses = []
    with cudiff.no_grad():
        for images in np.array_split(data.images, -(-len(data) // 1000)):
            guesses.append(logits(net, Tensor(images, device=options.device)).numpy().argmax(axis=1))
    return float(np.mean(np.concatenate(guesses) == data.labels))


def milliseconds(update: Step, given: Iterator[Any]) -> tuple[float, float]:
    """Of TIMED iterations with their load, after as many to warm up; and the last one's loss."""
    for _ in range(TIMED):
        loss = update(*next(given))
    loss.item()  # waits for the device
    start = time.perf_counter()
    for _ in range(TIMED):
        loss = update(*next(given))
    last = loss.item()
    return 1000 * (time.perf_counter() - start), last


def in_torch(net: nn.Module, data: Dataset, options: argparse.Namespace) -> tuple[Step, Iterator[Any]]:
    """The same update in PyTorch, from the same weights, compiled in CUDA graphs on a GPU; and the same batches."""
    try:
        import torch
    except ImportError:
        raise CudiffError("PyTorch is not installed: pip install torch, or leave out --against torch") from None
    from torch.nn import functional

    state = to_torch(net.state_dict(), net.layouts())
    weights = {name: torch.tensor(array, device=options.device).requires_grad_() for name, array in state.items()}
    optimizer = torch.optim.SGD(weights.values(), lr=options.lr)
    low = torch.bfloat16 if options.precision == "bf16" else torch.float32

    def loss(images: Any, labels: Any) -> Any:
        with torch.autocast(options.device, low, enabled=low != torch.float32):
            x = images.permute(0, 3, 1, 2) / 127.5 - 1
            for index in (0, 3):
                x = functional.conv2d(x, weights[f"{index}.weight"], weights[f"{index}.bias"], padding=2)
                x = functional.max_pool2d(functional.relu(x), 2)
            x = functional.relu(functional.linear(x.permute(0, 2, 3, 1).flatten(1), weights["7.weight"],
                                                  weights["7.bias"]))
            x = functional.linear(x, weights["9.weight"], weights["9.bias"])
        return functional.cross_entropy(x.float(), labels.long())

    run = torch.compile(loss, mode="reduce-overhead") if options.device == "cuda" else loss

    def update(images: Any, labels: Any) -> Any:
        optimizer.zero_grad()
        value = run(images, labels)
        value.backward()
        optimizer.step()
        return value.detach()

    def on_device() -> Iterator[tuple[Any, ...]]:
        for arrays in drawn(data, options, epochs=2 * TIMED):
            host = map(torch.from_numpy, arrays)
            yield tuple((x.pin_memory() if options.device == "cuda" else x).to(options.device, non_blocking=True)
                        for x in host)

    return update, on_device()


def time_it(data: Dataset, options: argparse.Namespace) -> None:
    """Print how long TIMED iterations take, and PyTorch's from the same weights by the same batches."""
    net = network(data, options)
    rivals = {"PyTorch": in_torch(net, data, options)} if options.against else {}
    found = {}
    ours = update_of(net, options), batches(data, options, epochs=2 * TIMED)
    for name, (update, given) in ({"cudiff": ours} | rivals).items():
        found[name], loss = milliseconds(update, given)
        print(f"{name}: {TIMED} iterations of {options.batch_size} images in {found[name]:.1f} ms, the last loss "
              f"{loss:.4f}", flush=True)
    if rivals:
        print(f"PyTorch takes {found['PyTorch'] / found['cudiff']:.2f} times as long")


def train(data: Dataset, test: Dataset, options: argparse.Namespace) -> None:
    net = network(data, options)
    steps = options.epochs * (len(data) // options.batch_size)
    update = update_of(net, options, Cosine(steps, warmup=steps // 50))
    start = time.perf_counter()
    for step, (images, labels) in enumerate(batches(data, options, options.epochs), 1):
        loss = update(images, labels)
        if step * options.epochs % steps == 0:
            value, seconds = loss.item(), time.perf_counter() - start
            print(f"epoch {step * options.epochs // steps}: loss {value:.4f}, {seconds:.1f} s, "
                  f"{accuracy(net, test, options):.2%} of the test images right", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Classify MNIST by a small CNN and plain SGD.")
    parser.add_argument("--data", default="mnist", metavar="NAME", help="mnist, fashion-mnist, or what has a test part")
    parser.add_argument("--epochs", type=int, default=20, help="of training (default 20); 0 times alone")
    parser.add_argument("--batch-size", type=int, default=64, metavar="N", help="(default 64)")
    parser.add_argument("--lr", type=float, default=0.1, metavar="X", help="learning rate (default 0.1)")
    parser.add_argument("--flip", action="store_true", help="mirror each image with probability 1/2")
    parser.add_argument("--against", choices=("torch",), help="time PyTorch too")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=cudiff.default_device())
    parser.add_argument("--precision", choices=("fp32", "tf32", "bf16"), help="(default bf16 on a GPU, fp32 on a CPU)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and order (default 0)")
    options = parser.parse_args()
    options.precision = options.precision or ("bf16" if options.device == "cuda" else "fp32")
    data = load_dataset(options.data)
    if data.labels is None:
        raise CudiffError(f"{data.name} has no labels: name data with classes")
    if not 1 <= options.batch_size <= len(data) or min(options.epochs, options.seed) < 0 or options.lr <= 0:
        raise CudiffError(f"give --batch-size 1 to {len(data)}, --epochs and --seed 0 or more and --lr above 0")
    test = load_dataset(options.data, part="test")
    time_it(data, options)
    if options.epochs:
        train(data, test, options)


if __name__ == "__main__":
    try:
        main()
    except CudiffError as error:
        sys.exit(f"classify_mnist.py: {error}")
