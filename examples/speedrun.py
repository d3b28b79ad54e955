"""Time to quality: python examples/speedrun.py [--data NAME] [--seeds 0,1,2] [--against torch] [--recipe FILE]
[--weaker SHARE,FACTOR] [--log FILE]

Of each seed, the seconds from the start of a fresh process, whose compilers' caches are empty, until 10,000 samples of
the model that it trains lie in the host's memory; and how good they are. The rules, and what was reached, stand in
docs/speedrun.md. The exit status is 1 where a target is missed. --data digits is for a try without a GPU.
"""

import argparse
import contextlib
import copy
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cudiff
from cudiff import CudiffError
from cudiff.backend import array_module, cache_folder
from cudiff.config import PRESETS, Config, load_toml
from cudiff.cuda.device import describe
from cudiff.data import Dataset, load_dataset, shuffled_index
from cudiff.diffusion.denoiser import Denoiser
from cudiff.distances import frechet_or_none
from cudiff.evaluate import train_classifier
from cudiff.pipeline import Pipeline
from cudiff.tensor import Tensor
from cudiff.train import Trainer
from examples.benchmark.fresh import CACHES, clocked, mark


class Weaker(NamedTuple):
    """Autoguidance (Karras et al. 2024, arXiv 2406.02507): W + factor * (D - W), where D denoises by the last average
    of the weights, and W by the average as it was after this share of the steps."""

    share: float
    factor: float


# What was tried, and what each change gave, stands in docs/speedrun.md. Both train with labels that are never dropped:
# on MNIST that gave 98.3 % as asked without guidance, and 97.5 with a tenth dropped. One block a level in place of two,
# since more and shorter steps were better. Seconds are estimates for an H100.
RECIPES = {
    # 30 - 1.7 (start) - 3.2 (first step) - 5 (sampling) - 0.5 = 19.6 s of 4.66 ms. Noise in the sampler gave more
    # images as asked. Without convolutions between the levels a step is 15 % shorter, with 9 kernels fewer to compile.
    "mnist": PRESETS["mnist"].replace(
        steps=4200, lr=1e-3, betas=(0.9, 0.99), warmup=100, ema_half_life=100.0, P_mean=-0.8, label_dropout=0.0,
        num_res_blocks=1, use_scale_shift_norm=True, conv_resample=False, sampler="dpmpp-2m-sde", sample_steps=32,
        guidance=1.0,
    ),
    # 60 - 2 - 4 - 5 - 1.5 = 47.5 s of 5.11 ms. P_mean is -0.7 for -1.2, as errors come from noise levels of 0.5 to 10;
    # from 0.25 down real images stay as good as they are.
    "fashion-mnist": PRESETS["fashion-mnist"].replace(
        steps=9200, lr=2e-3, betas=(0.9, 0.99), warmup=100, ema_half_life=250.0, P_mean=-0.7, label_dropout=0.0,
        data_mean=-0.428, data_std=1.412, num_res_blocks=1, use_scale_shift_norm=True, resblock_updown=True,
        attention_resolutions=(7,), sampler="dpmpp-2m", guidance=1.0,
    ),
    "digits": PRESETS["digits"],
}
WEAKER = {"mnist": Weaker(0.03, 1.08), "fashion-mnist": Weaker(0.04, 1.15), "digits": Weaker(0.1, 1.1)}
BATCH_SIZE = 1000  # of sampling


class Target(NamedTuple):
    """seconds, at most; ratio, of the samples' Fréchet distance to the floor, at most; share as asked, at least."""

    seconds: float
    ratio: float
    as_asked: float


TARGETS = {"mnist": Target(30, 1.5, 0.985), "fashion-mnist": Target(60, 1.5, 0.0)}
SAMPLES = 10_000
PARTS = "start", "first step", "training", "sampling"
RIVALS = {"cpu": ("torch",), "cuda": ("torch", "torch.compile")}  # to compile may take longer than it saves


def recipe(options: argparse.Namespace, seed: int) -> Config:
    changes: dict[str, Any] = {"device": options.device, "seed": seed}
    changes |= {"precision": "fp32"} if options.device == "cpu" else {}
    changes |= {"steps": options.steps} if options.steps else {}
    base = RECIPES[options.data]
    return (load_toml(options.recipe, base) if options.recipe else base).replace(**changes)


def weaker_of(options: argparse.Namespace) -> Weaker | None:
    """None for a factor of 1."""
    weaker = options.weaker or WEAKER[options.data]
    return weaker if weaker.factor != 1 else None


def asked(options: argparse.Namespace) -> np.ndarray:
    """The class of each sample, all in turn, int32."""
    return (np.arange(options.samples) % RECIPES[options.data].num_classes).astype(np.int32)


def autoguided(better: Denoiser, worse: Denoiser, factor: float) -> Denoiser:
    """See `Weaker`."""

    def denoise(x: Tensor, sigma: Tensor | float, labels: Tensor | None = None) -> Tensor:
        other = worse(x, sigma, labels)
        return cudiff.lerp(other, better(x, sigma, labels), factor)

    return denoise


def train_and_sample(config: Config, weaker: Weaker | None, data: Dataset, labels: np.ndarray) -> np.ndarray:
    """The recipe by cudiff: samples of the classes `labels`, uint8 (N, H, W, C)."""
    denoiser = None
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(config, data, folder)
        mark("start")
        for step in range(config.steps):
            loss = trainer._step(*trainer.loader.next())
            if step == 0:
                loss.item()  # waits for the device
                mark("first step")
            if weaker and step == int(weaker.share * config.steps):
                worse = Pipeline(trainer.config, copy.deepcopy(trainer.preview.net))
                denoiser = autoguided(trainer.preview.denoiser(), worse.denoiser(), weaker.factor)
        loss.item()
        mark("training")
        return trainer.preview.sample(len(labels), config.seed, labels, batch_size=BATCH_SIZE, denoiser=denoiser)


def run(options: argparse.Namespace) -> None:
    """What the clocked process does: one seed, by one side. Its samples are written when the clock has stopped."""
    config, data, labels = recipe(options, *options.seeds), load_dataset(options.data), asked(options)
    if options.side == "cudiff":
        images = train_and_sample(config, weaker_of(options), data, labels)
    else:
        from examples.benchmark import opponent

        images = opponent.train_and_sample(config, data, labels, BATCH_SIZE, options.side == "torch.compile",
                                           weaker_of(options))
    mark("sampling")
    np.save(options.out, images)


def measure(side: str, seed: int, options: argparse.Namespace) -> tuple[dict[str, float], np.ndarray]:
    """The parts' seconds, and the samples, of a seed in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        home, cache, out = cache_folder(options.data).absolute(), Path(folder, CACHES[0]), Path(folder, "samples.npy")
        if home.is_dir():  # data that was downloaded into cudiff's cache
            cache.mkdir()
            (cache / options.data).symlink_to(home)
        own = ["--seeds", str(seed), "--side", side, "--out", str(out)]
        try:
            return clocked([__file__, *sys.argv[1:], *own], PARTS, folder), np.load(out)
        except RuntimeError as error:
            raise CudiffError(f"{side} with seed {seed}: {error}") from None


def judge_of(options: argparse.Namespace) -> Callable[[np.ndarray], dict[str, Any]]:
    """judge(images): their distance to the test images, the floor, which is that of as many training images, the ratio
    of both, None where there are too few, and the share classified as asked."""
    train, test = load_dataset(options.data), load_dataset(options.data, part="test")
    classifier = train_classifier(train, test, options.device)
    reference = classifier.features(test.images)
    some = train.subset(shuffled_index(np.arange(min(options.samples, len(train))), len(train), 0))
    floor = frechet_or_none(classifier.features(some.images), reference)

    def judge(images: np.ndarray) -> dict[str, Any]:
        frechet = frechet_or_none(classifier.features(images), reference)
        return {"frechet": frechet, "floor": floor, "ratio": frechet / floor if frechet and floor else None,
                "as_asked": float((classifier.predict(images) == asked(options)).mean()),
                "classifier_accuracy": classifier.test_accuracy}

    return judge


def reached(row: dict[str, Any]) -> bool | None:
    """Whether the target is; None where there is none, as for another number of samples."""
    target = TARGETS.get(row["data"]) if row["samples"] == SAMPLES else None
    return target and (row["seconds"] <= target.seconds and row["ratio"] <= target.ratio
                       and row["as_asked"] >= target.as_asked)


def surroundings(options: argparse.Namespace) -> dict[str, Any]:
    """Of a line of the log: device, versions and commit, which ends in -dirty where files were changed since."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    commit = ""
    with contextlib.suppress(OSError):
        commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    versions = {"python": platform.python_version(), "cudiff": cudiff.__version__}
    versions |= {name: version(name) for name in ("numpy", "torch") if find_spec(name)}
    device = describe() if options.device == "cuda" else {"CPU": f"{os.cpu_count()} cores"}
    return {"device": device, "versions": versions, "commit": commit or "unknown"}


def cells(row: dict[str, Any]) -> list[str]:
    """Of the table: side and seed, seconds in all and of each part, distance, floor, ratio, as asked, target."""
    seconds = [f"{value:.1f}" for value in (row["seconds"], *row["parts"].values())]
    quality = ["–" if row[name] is None else f"{row[name]:.2f}" for name in ("frechet", "floor", "ratio")]
    target = {True: "reached", False: "missed", None: "none"}[row["reached"]]
    return [row["side"], str(row["seed"]), *seconds, *quality, f"{row['as_asked']:.2%}", target]


COLUMNS = "side", "seed", "seconds", *PARTS, "distance", "floor", "ratio", "as asked", "target"


def numbers(text: str) -> list[int]:
    if not all(part.isascii() and part.isdigit() for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"give whole numbers such as 0,1,2, not '{text}'")
    return [int(part) for part in text.split(",")]


def weaker_given(text: str) -> Weaker:
    try:
        share, factor = map(float, text.split(","))
    except ValueError:
        share = factor = math.nan
    if not (0 <= share < 1 and math.isfinite(factor)):
        raise argparse.ArgumentTypeError(f"give a share from 0 to 1 and a factor, such as 0.06,1.1, not '{text}'")
    return Weaker(share, factor)


def append(log: str | None, text: str) -> None:
    """To the file, where there is one."""
    try:
        if log is not None:
            with open(log, "a") as file:
                file.write(text)
    except OSError as error:
        raise CudiffError(f"cannot write {log} ({error.strerror})") from None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=tuple(RECIPES), default="mnist", help="(default mnist)")
    parser.add_argument("--seeds", type=numbers, default=[0, 1, 2], metavar="0,1,2", help="a run each (default 0,1,2)")
    parser.add_argument("--against", choices=("torch",), help="run PyTorch too, as it is and compiled")
    parser.add_argument("--log", metavar="FILE", help="append a line of JSON for each run")
    parser.add_argument("--recipe", metavar="FILE", help="TOML of options other than the recipe's, for a try")
    parser.add_argument("--weaker", type=weaker_given, metavar="SHARE,FACTOR",
                        help="after which share of the steps the average to be guided away from is kept, and by which "
                        "factor (the recipe's; a factor of 1: not at all)")
    parser.add_argument("--steps", type=int, metavar="N", help="train for so many instead of the recipe's")
    parser.add_argument("--samples", type=int, default=SAMPLES, metavar="N", help="targets are for the default 10000")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=cudiff.default_device())
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        return run(options)
    if options.samples < 2 or (options.steps is not None and options.steps < 1):
        raise CudiffError("give --samples 2 or more and --steps 1 or more")
    if options.against and not (find_spec("torch") and find_spec("cupy")):
        raise CudiffError("--against torch needs PyTorch and CuPy, one of which is not installed")
    array_module(options.device)  # says what is missing
    recipes = {seed: recipe(options, seed) for seed in options.seeds}
    append(options.log, "")
    judge, around, rows = judge_of(options), surroundings(options), []
    for side in ("cudiff", *(RIVALS[options.device] if options.against else ())):
        for seed in options.seeds:
            parts, images = measure(side, seed, options)
            row = {"data": options.data, "side": side, "seed": seed, "samples": options.samples,
                   "seconds": sum(parts.values()), "parts": parts, **judge(images)}
            rows.append(row | {"reached": reached(row)})
            print(", ".join(map(" ".join, zip(COLUMNS, cells(rows[-1]), strict=True))), flush=True)
            of_run = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "recipe": recipes[seed].to_dict(),
                      "weaker": weaker_of(options)}
            append(options.log, json.dumps(rows[-1] | of_run | around) + "\n")
    table = Table(*COLUMNS, title=f"{options.data}, {options.samples:,} samples")
    for row in rows:
        table.add_row(*cells(row))
    Console(width=130).print(table)
    missed = [str(row["seed"]) for row in rows if row["side"] == "cudiff" and row["reached"] is False]
    if missed:
        raise CudiffError(f"the target is missed with seed {', '.join(missed)}")


if __name__ == "__main__":
    try:
        main()
    except CudiffError as error:
        sys.exit(f"speedrun.py: {error}")
