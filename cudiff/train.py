"""Training: draw a batch, loss, backward, update; and around it the logging, previews, checkpoints and limits."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from cudiff.autograd import accumulate
from cudiff.backend import array_module, default_device, memory_in_use, out_of_memory, out_of_memory_errors
from cudiff.beginning import (
    as_numbered,
    begin_alike,
    check_data,
    check_given,
    check_resumed,
    check_shares,
    moments_of,
    optimizer_of,
    saved_bytes,
    slow_widths,
    take_weights,
)
from cudiff.checkpoint import Checkpoint, checkpoint_path, latest, part, prefixed, prune, save_checkpoint
from cudiff.config import Config
from cudiff.cuda.device import precision_on
from cudiff.cuda.graph import capture
from cudiff.data import Dataset
from cudiff.data.loader import Loader
from cudiff.distributed import ALONE, Group
from cudiff.errors import CudiffError
from cudiff.folder import RunFolder, quoted
from cudiff.forecast import Forecast, check_fits, check_model
from cudiff.models import build
from cudiff.nn import set_generator, set_group
from cudiff.ops.random import Generator
from cudiff.optim import EMA, LossScale
from cudiff.optim.reduction import Reduction
from cudiff.pace import Pace
from cudiff.pipeline import Pipeline
from cudiff.plot import save_grid, save_npz
from cudiff.signals import noted
from cudiff.tensor import Tensor, no_grad

AGREE_EVERY = 0.2
"""Seconds after which processes that train together ask each other whether to go on."""

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
    init : a loaded checkpoint whose averaged weights a new run begins with, where names and shapes agree; `run` says
        which do not
    data_changed : a resumed run goes on though `dataset` is not what its checkpoint was trained on
    group : the processes that train together, see `cudiff.distributed.join`. Each takes its part of every batch, and
        process 0 writes.

    Attributes: pipeline (the raw weights), ema, preview (its pipeline), training, held_out (data), step (updates done),
    stopped_by (the number of the signal that ended `run`, or None).
    Raises CudiffError where data, configuration and checkpoint do not fit, and where `folder` holds a run that
    would be overwritten.
    """

    def __init__(
        self, config: Config, dataset: Dataset, folder: str | Path, resume: Checkpoint | None = None, *,
        init: Checkpoint | None = None, data_changed: bool = False, group: Group = ALONE,
    ):
        check_given(config, dataset, resume, init)
        self.config, self.device = config, default_device() if config.device == "auto" else config.device
        array_module(self.device)  # says what is missing before anything else is done
        self.group = group
        if resume is not None:
            dataset, config = as_numbered(resume, dataset, config)
        self.folder, self.data = Path(folder), dataset.fingerprint()
        self.step, self.seconds = 0, 0.0
        if resume is not None and "optimizer" in resume.counters:  # converted weights: training begins with them
            self.step, self.seconds = resume.counters["step"], resume.counters["seconds"]
        self._home = RunFolder(self.folder, resume and resume.counters, config.sampler, group.leads)
        self._home.check(self.step)
        self.metrics = self._home.metrics
        self._notices = [] if resume is None else check_data(resume, self.data, data_changed)
        check_shares(config, group)
        config = config.for_data(dataset.images.shape, dataset.num_classes, dataset.class_names, dataset.latents)
        config = config.replace(precision=precision_on(self.device, given := config.precision))
        self.config = self._built_by = config
        if given not in ("auto", config.precision):
            self._notices.append(f"this GPU has no {given}: the run computes in {config.precision}")
        if resume is not None:
            self._notices += check_resumed(config, resume)
        self.training, self.held_out = dataset.split(config.validation, config.seed)
        if len(self.training) == 0:
            raise CudiffError(f"no image is left to train on: {config.validation} of {len(dataset)} are held out")
        self.net = build(config)
        self.net.precision = config.precision
        if config.recompute:
            if not hasattr(self.net, "recompute"):
                raise CudiffError(f"a {config.model} cannot recompute its blocks: leave --recompute out")
            self.net.recompute = True
        check_model(self.net, config, self.device, group)
        self.net.flatten(self.device)
        if init is not None:
            self._notices += take_weights(init, self.net, config)
        begin_alike(group, config, self.data, resume, self.net)
        if config.shard:
            self.net.flat_parameters().shard(group)
            self._notices += ["shard changes nothing: there is one process, which holds all"] * (group.size == 1)
        self._notices += slow_widths(self.net, self.device)
        self.ema = EMA(self.net, config.ema_half_life)
        self.optimizer = optimizer_of(config, self.net, self.ema)
        self._reduction = Reduction(self.optimizer.flat, self.net, group, config.accumulate)
        if config.precision == "fp16":
            self.optimizer.loss_scale = LossScale()
        self.pipeline = Pipeline(config, self.net)
        with self.ema.whole() as average:
            self._preview = Pipeline(config, average)
        if config.sample_every:
            self._check_preview()
        self.loss = self.pipeline.loss(config.label_dropout)
        self.generator = Generator(config.seed, self.device)
        set_generator(self.net, self.generator)
        set_group(self.net, group)
        self.stopped_by: int | None = None
        self._loss_sum = Tensor(np.zeros((), np.float32), device=self.device)
        self._loss_steps, self._total = 0, (-1, 0.0)
        if resume is not None:
            self._restore(resume)
        self._home.make()
        share = group.rank, group.size
        self.loader = Loader(self.training, config, self.device, int(self.generator.step), share)
        self._step: Any = self.train_step
        if self.device == "cuda" and config.capture:
            prepare = getattr(self.loss, "before_capture", lambda images: None)  # a user's loss may have none
            prepare(Tensor(np.empty(0, np.float32), device=self.device))
            self._step = capture(self.train_step, device=self.device, precompile=True)
            group.before_close(self._step.forget)
        self._timed_from, self._timed_steps = time.perf_counter(), 0
        self._pace = Pace(config, self.device, None, self.step, self.seconds)
        self._saved_at = self._previewed_at = self._agree_at = -1

    @property
    def preview(self) -> Pipeline:
        """The EMA's pipeline. Outside of `ema.whole()` raises CudiffError where the EMA is sharded."""
        _ = self.ema.model  # raises
        return self._preview

    def forecast(self) -> Forecast | None:
        """How much of the GPU's memory training takes; None where steps are no graph (the CPU, `capture` off).

        It is known before the first step, exactly but for what the driver takes; `run` asks for it. All processes of a
        group are to ask. Raises CudiffError where it does not fit, with the batch size and options that do; on the CPU
        too, of one process.
        """
        return check_fits(self)

    def train_step(self, *streamed: Tensor) -> Tensor:
        """One update, which `run` counts. Everything stays on the device, so that a CUDA graph can hold it.

        streamed: images and labels of each batch where they come from the host. Returns the sum of the mean losses
        since the last line of metrics; of a group each process returns its share.
        """
        self.optimizer.zero_grad()
        share = 1 / (self.config.accumulate * self.group.size)
        for index, samples in enumerate(self.loader.passes):
            self._pace.passed(index)
            self.generator.samples = samples
            images, labels = self.loader.batch(self.generator.step, streamed, index)
            loss = self._mean_loss(images, labels)
            loss = loss * share if share < 1 else loss
            with self._reduction.during(last=index + 1 == self.config.accumulate):
                self.optimizer.backward(loss)
            accumulate(self._loss_sum.data, loss.data)
        self.generator.advance()
        self.optimizer.step()
        return self._loss_sum

    def run(self, display: Any = None) -> dict[str, Any]:
        """Train until `steps`, `minutes`, Ctrl-C, SIGTERM or SIGHUP; log, preview and save on the way and at the end.

        display: told by `update(metrics)` and `message(text)`. Returns the last metrics.
        Raises CudiffError where nothing is left to do, where another process trains in the folder or another Trainer
        has trained there since, where memory runs out (saying what fits) and where the gradient or the weights stop
        being finite.
        """
        config = self.config
        metrics: dict[str, Any] = {}
        self._check_unfinished()
        self._check_parts()
        start = time.perf_counter() - self.seconds
        first, self._pace = self.step, Pace(config, self.device, display, self.step, self.seconds)
        self._timed_from, self._timed_steps = time.perf_counter(), 0
        # What is not finite is dealt with below.
        alone, watched = self._home.alone(self.step), self.group.watched()
        with alone as useless, noted(self._pace.stopping) as interrupted, watched, np.errstate(all="ignore"):
            size = saved_bytes(self.net, self.optimizer)
            notices, self._notices = [*self._notices, *self._home.prepare(useless, self.step, size)], []
            for notice in notices if display is not None else ():
                display.message(notice)
            forecast = self.forecast()
            if forecast is not None and display is not None:
                display.message(str(forecast))
            while not self._ends(interrupted):
                self._step_or_explain()
                self.group.beat()
                self.step += 1
                self._loss_steps += 1
                self._timed_steps += 1
                if self.step == first + 1:
                    self._loss_sum.item()  # waits for the device
                self.seconds = time.perf_counter() - start
                self._pace.stepped(self.step)
                if self.step % config.log_every == 0:
                    metrics |= self._log(display)
                    self._pace.logged()
                    self._loss_sum.data[...] = 0
                    self._loss_steps, self._total = 0, (self.step, 0.0)
                if config.save_every and self.step % config.save_every == 0:
                    with self._untimed():
                        self.save()
                if config.sample_every and self.step % config.sample_every == 0:
                    with self._saving_first():
                        metrics |= self._look(display)
            if self.step % config.log_every:
                metrics |= self._log(display)
            if self._saved_at != self.step:
                self.save()
            if not interrupted and self._previewed_at != self.step:
                metrics |= self._look(display)
        problem = self._home.save_curve()
        if problem is not None and display is not None:
            display.message(f"no loss curve was drawn: {problem}")
        self.stopped_by = interrupted[0] if interrupted else None
        if interrupted and display is not None:
            again = f"cudiff train --resume {quoted(self.folder)}"
            display.message(f"stopped at step {self.step} and saved: go on with {again}")
        return metrics

    def validation_loss(self, dataset: Dataset) -> float:
        """The EMA's mean loss over the first images of `dataset`, with an image's random numbers always the same."""
        loss, generator = self.preview.loss(), Generator(self.config.seed + 1, self.device)
        count = min(len(dataset), VALIDATION_IMAGES)
        total = 0.0
        with no_grad():
            for _ in range(VALIDATION_DRAWS):
                for start in range(0, count, self.config.batch_size):
                    generator.samples = chosen = range(start, min(count, start + self.config.batch_size))
                    images, labels = self.loader.normalised(dataset, chosen)
                    total += loss(self.preview.net, images, labels, generator).item() * len(chosen)
                    self.group.beat()
                generator.advance()
        return total / (VALIDATION_DRAWS * count)

    def save(self) -> Path:
        """Write a checkpoint of this step and delete the oldest beyond `keep`; returns its path. All processes call it.

        Raises CudiffError, and writes and deletes nothing, where a value is not finite, where another process trains in
        the folder and where it holds another run.
        """
        with self._home.alone(self.step):
            loss, tensors = self._total_loss(), self._tensors()
            if self.group.leads:
                self._write_checkpoint(loss, tensors)
            self._saved_at = self.step
            self._home.take()
            return self.save_path

    def _tensors(self) -> dict[str, np.ndarray]:
        """What a checkpoint holds, on process 0. All processes give their shards."""
        leads = self.group.leads
        tensors = prefixed("model", self.net.state_dict()) if leads else {}
        with self.ema.whole() as average:
            tensors |= prefixed("ema", average.state_dict()) if leads else {}
        return tensors | (self.optimizer.state_dict() if leads or self.config.shard else {})

    def _write_checkpoint(self, loss_sum: float, tensors: dict[str, np.ndarray]) -> None:
        counters: dict[str, Any] = {"optimizer": tensors.pop("counters").tolist(), "step": self.step}
        if "loss_scale" in tensors:
            counters["loss_scale"] = tensors.pop("loss_scale").tolist()
        counters |= {"seconds": self.seconds, "generator": self.generator.state(), "data": self.data}
        counters |= {"loss_sum": loss_sum, "loss_steps": self._loss_steps}
        counters["frozen"] = [name for name, value in self.net.named_parameters() if not value.requires_grad]
        if not math.isfinite(counters["loss_sum"]):  # of a skipped update
            counters |= {"loss_sum": 0.0, "loss_steps": 0}
        for name, array in tensors.items():
            if not np.isfinite(array).all():
                raise CudiffError(f"{name} is not finite at step {self.step}, which is not saved: {self._advice()}")
        save_checkpoint(self.save_path, self.config, tensors, counters)
        prune(self.folder, self.config.keep)

    @property
    def save_path(self) -> Path:
        """Where `save` writes the checkpoint of this step."""
        return checkpoint_path(self.folder, self.step)

    def save_preview(self, each_step: Callable[[int], None] | None = None) -> Path:
        """Write a grid of `samples` images from the EMA, or an .npz of latents. each_step: as for `Pipeline.sample`."""
        self._home.check_kept()
        latents = self.preview.makes_latents
        path = self.folder / f"samples-{self.step:08d}.{'npz' if latents else 'png'}"
        try:
            images = self.preview.sample(self.config.samples, self.config.seed, batch_size=self.config.batch_size,
                                         each_step=each_step, progress=lambda done, n: self.group.beat())
        finally:
            self.preview.free_graphs()  # training needs the memory
        (save_npz if latents else save_grid)(path, images)
        return path

    def _repr_png_(self) -> bytes | None:
        return self.metrics._repr_png_()  # what a notebook shows

    def _restore(self, checkpoint: Checkpoint) -> None:
        self.net.load_state_dict(part(checkpoint.tensors, "model"))
        with self.ema.whole() as average:
            average.load_state_dict(part(checkpoint.tensors, "ema"))
        counters = checkpoint.counters
        if "optimizer" not in counters:
            return
        self.optimizer.load_state_dict(moments_of(checkpoint))
        self.generator.load_state(counters["generator"] | {"step": self.step})  # older runs counted forward passes
        self._loss_sum.data[...] = counters["loss_sum"] if self.group.leads else 0  # an addend of each process
        self._loss_steps = counters["loss_steps"]
        frozen = [value for name, value in self.net.named_parameters() if name in (counters.get("frozen") or ())]
        for parameter in frozen:
            parameter.requires_grad = False
        if frozen:
            self._notices.append(f"{len(frozen)} parameters stay frozen, as they were when the run was saved")

    def _check_parts(self) -> None:
        """What was replaced since would train apart from what is saved."""
        if self.optimizer.model is not self.net:
            raise CudiffError("the net was replaced, which the optimiser does not train: register_model has a Trainer "
                              "build it, load_state_dict gives it other weights")
        if self.optimizer.ema is not self.ema:
            raise CudiffError("the optimiser or the average was replaced, and it does not update this average: give "
                              "the optimiser ema=trainer.ema, or train in a loop of your own")
        if self.config is not self._built_by:
            raise CudiffError("the configuration was replaced, after the optimiser and the loader were built by it: "
                              "build a Trainer with the new one, "
                              "resume=cudiff.checkpoint.load_checkpoint(trainer.folder)")

    def _check_preview(self) -> None:
        config = self.config
        try:
            self.pipeline.sigmas(config.sampler, config.sample_steps)
        except (CudiffError, ArithmeticError) as error:
            raise CudiffError(
                f"no preview can be drawn ({error}): change --sample-steps, --sigma-min, --sigma-max or --rho, or "
                "leave previews out with --sample-every 0"
            ) from None

    def _finished(self) -> bool:
        steps, seconds = self.config.steps or math.inf, 60 * self.config.minutes or math.inf
        return self.step >= steps or self.seconds >= seconds

    def _ends(self, interrupted: list[int]) -> bool:
        """Whether no step is to follow: the same on every process, which ask each other about five times a second."""
        steps, group = self.config.steps or math.inf, self.group
        if group.size > 1 and self.step < min(self._agree_at, steps):
            return False
        pace = self._timed_steps / max(1e-9, time.perf_counter() - self._timed_from)
        said = group.exchange([interrupted, self._finished(), max(1, int(AGREE_EVERY * pace))])
        interrupted[:] = next((signals for signals, _, _ in said if signals), [])
        self._agree_at = self.step + said[0][2]
        return bool(interrupted) or said[0][1]

    def _total_loss(self) -> float:
        """The sum of the losses since the last line of metrics; waits for the device. All processes call it at the
        same steps. A second call at a step returns the same number."""
        if self.group.size == 1:
            return self._loss_sum.item()
        if self._total[0] != self.step:
            total = self._loss_sum.data.reshape(1).copy()
            self.group.all_reduce(total)
            self._total = self.step, float(total[0])
        return self._total[1]

    def _check_unfinished(self) -> None:
        if self._finished():
            minutes = self.config.minutes and self.seconds >= 60 * self.config.minutes
            reached = f"--minutes than {self.config.minutes:g}" if minutes else f"--steps than {self.config.steps}"
            done = f"{self.step} steps in {self.seconds / 60:.3g} minutes"
            raise CudiffError(f"the run is at its end after {done}: give more {reached}")

    def _try(self, size: int) -> None:
        """Loss and backward of so many images, without an update."""
        images, labels = self.loader.normalised(self.training, np.arange(size) % len(self.training))
        self._mean_loss(images, labels).backward()

    def _mean_loss(self, images: Tensor, labels: Tensor | None) -> Tensor:
        loss = self.loss(self.net, images, labels, self.generator)
        if not isinstance(loss, Tensor) or loss.size != 1:
            what = f"a Tensor of shape {loss.shape}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise CudiffError(f"trainer.loss returned {what}: let it return a Tensor of one number, the mean loss")
        return loss.reshape(()) if loss.ndim else loss

    def _step_or_explain(self) -> None:
        try:
            self._step(*self.loader.next())
            return
        except out_of_memory_errors():
            pass  # the exception holds the memory of the step: it has to be gone before anything smaller is tried
        self._step = None
        if self.group.size > 1:  # the others wait
            raise CudiffError(f"process {self.group.rank} of {self.group.size} is out of memory: use a --batch-size "
                              f"below {self.config.batch_size}, which all share, or more GPUs")
        raise out_of_memory(self.config.batch_size, self._try, self.device)

    @contextmanager
    def _untimed(self) -> Iterator[None]:
        """Leave the time of the block out of the time of a step."""
        self._total_loss()  # waits for the steps before
        begin = time.perf_counter()
        yield
        self._timed_from += time.perf_counter() - begin

    @contextmanager
    def _saving_first(self) -> Iterator[None]:
        """What the block raises, as where metrics cannot be written, ends the run after a checkpoint of this step.

        All processes enter it: where one fails they save together.
        """
        problem = None
        try:
            yield
        except Exception as error:
            problem = error
        if any(self.group.exchange(problem is not None)) and self._saved_at != self.step:
            with suppress(CudiffError):  # not finite, or no room for it either: the block's own error is told
                self.save()
        if problem is not None:
            raise problem

    def _log(self, display: Any) -> dict[str, Any]:
        config, steps = self.config, max(1, self._timed_steps)
        loss = self._total_loss() / max(1, self._loss_steps)  # waits for the device
        elapsed = max(1e-9, time.perf_counter() - self._timed_from)
        self._timed_from, self._timed_steps = time.perf_counter(), 0
        status = self.optimizer.metrics()
        metrics = {
            "step": self.step, "loss": loss, "lr": status["lr"], "grad_norm": status["grad_norm"],
            "skipped": status["skipped"], "step_ms": 1000 * elapsed / steps,
            "images_per_second": steps * config.batch_size * config.accumulate / elapsed,
            "memory_mb": memory_in_use(self.device) / 2**20, "seconds": self.seconds,
        }
        if "loss_scale" in status:
            metrics["loss_scale"] = status["loss_scale"]
        with self._saving_first():
            self._record(metrics, display)
        if status["skipped_in_a_row"] >= min(config.max_bad_steps, config.steps or config.max_bad_steps):
            raise CudiffError(f"the gradient was not finite {status['skipped_in_a_row']} times in a row, until step "
                              f"{self.step}: {self._advice()}")
        return metrics

    def _advice(self) -> str:
        last = latest(self.folder)
        return f"lower --lr or set --clip, and {f'go on with --resume {quoted(last)}' if last else 'start again'}"

    def _look(self, display: Any) -> dict[str, Any]:
        """A preview, and the EMA's loss on held-out images and on as many training images, to be compared."""
        with self._untimed(), self.ema.whole() as average:
            self._previewed_at = self.step
            metrics: dict[str, Any] = {}
            if not self.group.leads:
                return metrics
            if len(self.held_out):
                known = self.training.subset(np.arange(min(len(self.training), len(self.held_out))))
                metrics = {
                    "step": self.step, "val_loss": self.validation_loss(self.held_out),
                    "train_loss": self.validation_loss(known),
                }
                self._record(metrics, display)
            if self.config.sample_every:
                try:
                    self.save_preview(self._pace.previewing(self.group.beat))
                except CudiffError as error:
                    if not all(np.isfinite(array).all() for array in average.state_dict().values()):
                        raise CudiffError(f"the EMA is not finite at step {self.step}: {self._advice()}") from None
                    if display is not None:
                        display.message(f"no preview of step {self.step}: {error}")
        return metrics

    def _record(self, metrics: dict[str, Any], display: Any) -> None:
        if self.group.leads:
            self._home.log(metrics)
        if display is not None:
            display.update(metrics)
