"""Training: draw a batch, loss, backward, update; and around it the logging, previews, checkpoints and limits."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from cudiff.backend import default_device, free_memory, memory_in_use, memory_total, out_of_memory_errors
from cudiff.checkpoint import Checkpoint, checkpoint_path, latest, part, prefixed, prune, save_checkpoint
from cudiff.config import Config
from cudiff.cuda.graph import capture
from cudiff.data import Dataset
from cudiff.data.loader import Loader
from cudiff.errors import CudiffError
from cudiff.models import build
from cudiff.nn import Module, set_generator
from cudiff.ops.random import Generator
from cudiff.optim import EMA, SGD, Adam, AdamW, Constant, Cosine, Optimizer
from cudiff.pipeline import Pipeline
from cudiff.plot import save_grid, save_loss_curve
from cudiff.tensor import Tensor, accumulate, no_grad

VALIDATION_IMAGES = 1024
VALIDATION_DRAWS = 8
"""How many noise draws each validation image is judged by: its loss at one noise level says little."""


class Trainer:
    """One training run: a model, its data and its folder.

    Parameters
    ----------
    config : Config
    dataset : the training data; `config.validation` of its images are held out
    folder : for checkpoints, metrics.jsonl, loss.png and sample grids; made if it is not there
    resume : a loaded checkpoint to continue; on the CPU the run goes on bit for bit

    Attributes: pipeline (the raw weights), preview (the EMA's), training, held_out (data), step (updates done).
    Raises CudiffError where the data does not fit the configuration.
    """

    def __init__(self, config: Config, dataset: Dataset, folder: str | Path, resume: Checkpoint | None = None):
        self.device = default_device() if config.device == "auto" else config.device
        self.config = config = config.for_data(dataset.images.shape, dataset.num_classes)
        self.training, self.held_out = dataset.split(config.validation, config.seed)
        if len(self.training) == 0:
            raise CudiffError(f"no image is left to train on: {config.validation} of {len(dataset)} are held out")
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.net = build(config)
        self.net.precision = config.precision
        self.net.flatten(self.device)
        self.ema = EMA(self.net, config.ema_half_life)
        self.optimizer = _optimizer(config, self.net, self.ema)
        self.pipeline, self.preview = Pipeline(config, self.net), Pipeline(config, self.ema.model)
        self.loss = self.pipeline.loss(config.label_dropout)
        self.generator = Generator(config.seed, self.device)
        set_generator(self.net, self.generator)
        self.step, self.seconds = 0, 0.0
        if resume is not None:
            self._restore(resume)
        self.loader = Loader(self.training, config, self.device, first=self.step * config.accumulate)
        self._loss_sum = Tensor(np.zeros((), np.float32), device=self.device)
        captured = self.device == "cuda" and config.capture
        self._step = capture(self.train_step, device=self.device) if captured else self.train_step

    def train_step(self, *streamed: Tensor) -> Tensor:
        """One update. Everything stays on the device, so that it can be captured in a CUDA graph.

        streamed: images and labels of each batch where they come from the host. Returns the mean loss.
        """
        self.net.zero_grad()
        share = 1 / self.config.accumulate
        for index in range(self.config.accumulate):
            images, labels = self.loader.batch(self.generator.step, streamed, index)
            loss = self.loss(self.net, images, labels, self.generator) * share
            loss.backward()
            accumulate(self._loss_sum.data, loss.data)
            self.generator.advance()
        self.optimizer.step()
        return loss

    def run(self, display: Any = None) -> dict[str, Any]:
        """Train until `steps`, `minutes` or Ctrl-C; log, preview and save on the way and at the end.

        display: told by `update(metrics)` and `message(text)`. Returns the last metrics.
        Raises CudiffError where memory runs out (saying what fits) or the loss stays not finite.
        """
        config, metrics = self.config, {}
        limit = config.minutes * 60 if config.minutes else float("inf")
        start = time.perf_counter() - self.seconds
        mark, marked_step = time.perf_counter(), self.step
        with _interruptible() as interrupted:
            while self.seconds < limit and (not config.steps or self.step < config.steps) and not interrupted:
                self._step_or_explain()
                self.step += 1
                self.seconds = time.perf_counter() - start
                if self.step - marked_step == config.log_every:
                    metrics = self._log(display, mark, marked_step)
                if config.sample_every and self.step % config.sample_every == 0:
                    metrics = self._validate(display)
                    self.save_preview()
                if config.save_every and self.step % config.save_every == 0:
                    self.save()
                if self.step - marked_step == config.log_every:
                    mark, marked_step = time.perf_counter(), self.step
            if self.step > marked_step:
                metrics = self._log(display, mark, marked_step)
            metrics |= self._validate(display)
            self.save()
        if config.sample_every:
            self.save_preview()
        self._save_curve(display)
        if interrupted and display is not None:
            display.message(f"stopped at step {self.step} and saved: go on with cudiff train --resume {self.folder}")
        return metrics

    def validation_loss(self, dataset: Dataset) -> float:
        """The EMA's mean loss over the first images of `dataset`, with random numbers of its own, always the same."""
        loss, generator = self.preview.loss(), Generator(self.config.seed + 1, self.device)
        count = min(len(dataset), VALIDATION_IMAGES)
        size = min(count, self.config.batch_size)
        losses = []
        with no_grad():
            for _ in range(VALIDATION_DRAWS):
                for start in range(0, count - size + 1, size):
                    images, labels = self.loader.normalised(dataset, range(start, start + size))
                    losses.append(loss(self.preview.net, images, labels, generator).item())
                    generator.advance()
        return float(np.mean(losses))

    def save(self) -> Path:
        """Write a checkpoint of this step and delete the oldest beyond `keep`; returns its path."""
        tensors = prefixed("model", self.net.state_dict()) | prefixed("ema", self.ema.model.state_dict())
        tensors |= self.optimizer.state_dict()
        counters: dict[str, Any] = {"optimizer": tensors.pop("counters").tolist(), "step": self.step}
        counters |= {"seconds": self.seconds, "generator": self.generator.state()}
        path = checkpoint_path(self.folder, self.step)
        save_checkpoint(path, self.config.to_dict(), tensors, counters)
        prune(self.folder, self.config.keep)
        return path

    def save_preview(self) -> Path:
        """Write a grid of `samples` images from the EMA."""
        images = self.preview.sample(self.config.samples, self.config.seed)
        path = self.folder / f"samples-{self.step:08d}.png"
        save_grid(path, images)
        return path

    def _restore(self, checkpoint: Checkpoint) -> None:
        shapes = {name: value.shape for name, value in self.net.state_dict().items()}
        self.net.load_state_dict(part(checkpoint.tensors, "model", shapes))
        self.ema.model.load_state_dict(part(checkpoint.tensors, "ema", shapes))
        moments = {key: value for key, value in checkpoint.tensors.items() if not key.startswith(("model.", "ema."))}
        self.optimizer.load_state_dict(moments | {"counters": np.array(checkpoint.counters["optimizer"])})
        self.generator.load_state(checkpoint.counters["generator"])
        self.step, self.seconds = checkpoint.counters["step"], checkpoint.counters["seconds"]

    def _step_or_explain(self) -> None:
        try:
            self._step(*self.loader.next())
        except out_of_memory_errors():
            fits = self._batch_that_fits()
            total = memory_total(self.device) / 2**30
            where = f"the GPU's {total:.0f} GiB" if total else "memory"
            advice = f"--batch-size {fits} fits" if fits else "even one image does not fit: use a smaller model"
            raise CudiffError(f"batch size {self.config.batch_size} does not fit into {where}: {advice}") from None

    def _batch_that_fits(self) -> int:
        """The largest halving of the batch size whose forward and backward pass fit into memory; 0 if none does."""
        size = self.config.batch_size // 2
        while size:
            free_memory()
            try:
                images, labels = self.loader.normalised(self.training, np.arange(size) % len(self.training))
                self.loss(self.net, images, labels, self.generator).backward()
                return size
            except out_of_memory_errors():
                size //= 2
        return 0

    def _log(self, display: Any, mark: float, marked_step: int) -> dict[str, Any]:
        steps, config = self.step - marked_step, self.config
        loss = self._loss_sum.item() / steps  # waits for the device
        elapsed = time.perf_counter() - mark
        self._loss_sum.data[...] = 0
        status = self.optimizer.metrics()
        metrics = {
            "step": self.step, "loss": loss, "lr": status["lr"], "grad_norm": status["grad_norm"],
            "skipped": status["skipped"], "step_ms": 1000 * elapsed / steps,
            "images_per_second": steps * config.batch_size * config.accumulate / elapsed,
            "memory_mb": memory_in_use(self.device) / 2**20, "seconds": self.seconds,
        }
        self._record(metrics, display)
        if status["skipped_in_a_row"] >= config.max_bad_steps:
            raise CudiffError(
                f"the gradient was not finite {status['skipped_in_a_row']} times in a row at step {self.step}: lower "
                f"--lr or set --clip, and go on with --resume {self.folder} from the last good checkpoint"
            )
        return metrics

    def _validate(self, display: Any) -> dict[str, Any]:
        """The EMA's loss on held-out images, and on as many training images, so that the two can be compared."""
        if len(self.held_out) == 0:
            return {}
        known = self.training.subset(np.arange(min(len(self.training), len(self.held_out))))
        metrics = {
            "step": self.step, "val_loss": self.validation_loss(self.held_out),
            "train_loss": self.validation_loss(known),
        }
        self._record(metrics, display)
        return metrics

    def _record(self, metrics: dict[str, Any], display: Any) -> None:
        with open(self.folder / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(metrics) + "\n")
        if display is not None:
            display.update(metrics)

    def _save_curve(self, display: Any) -> None:
        lines = (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        if not save_loss_curve(self.folder / "loss.png", [json.loads(line) for line in lines]) and display is not None:
            display.message("no loss curve was drawn: pip install 'cudiff[plots]'")


def checkpoint_to_resume(path: str | Path) -> Path:
    """`path` itself, or the newest checkpoint where it is a run's folder. Raises CudiffError where there is none."""
    path = Path(path)
    found = latest(path) if path.is_dir() else path
    if found is None:
        raise CudiffError(f"{path} holds no checkpoint: give the folder of a run, or a checkpoint")
    return found


def _optimizer(config: Config, net: Module, ema: EMA) -> Optimizer:
    """The optimiser that `config` names, with its schedule, clipping and the EMA in one kernel."""
    warmup = min(config.warmup, config.steps // 2) if config.steps else config.warmup
    schedule = Cosine(config.steps, warmup=warmup) if config.lr_schedule == "cosine" else Constant(warmup)
    common: dict[str, Any] = dict(weight_decay=config.weight_decay, clip=config.clip, schedule=schedule, ema=ema)
    if config.optimizer == "sgd":
        return SGD(net, config.lr, config.momentum, **common)
    betas = (config.betas[0], config.betas[1])
    return (AdamW if config.optimizer == "adamw" else Adam)(net, config.lr, betas, config.eps, **common)


@contextmanager
def _interruptible() -> Iterator[list[int]]:
    """Ctrl-C appends to the list instead of raising; a second one raises as usual."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def note(number: int, frame: Any) -> None:
        received.append(number)
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield received
    finally:
        signal.signal(signal.SIGINT, before)
