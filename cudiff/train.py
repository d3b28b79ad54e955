"""Training: draw a batch, loss, backward, update; and around it the logging, previews, checkpoints and limits."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cudiff.autograd import accumulate
from cudiff.backend import array_module, default_device, memory_in_use, out_of_memory, out_of_memory_errors
from cudiff.checkpoint import Checkpoint, checkpoint_path, latest, part, prefixed, prune, save_checkpoint
from cudiff.config import Config
from cudiff.cuda.graph import capture
from cudiff.data import Dataset
from cudiff.data.dataset import differences
from cudiff.data.loader import Loader
from cudiff.diffusion.samplers import decreasing
from cudiff.errors import CudiffError
from cudiff.folder import Metrics, alone_in, check_newest, check_no_run, check_unused, holds, quoted, set_aside
from cudiff.memory import memory_available, peak_of, resident
from cudiff.models import build
from cudiff.nn import Module, set_generator
from cudiff.ops.random import Generator
from cudiff.optim import EMA, SGD, Adam, AdamW, Constant, Cosine, Optimizer
from cudiff.pipeline import Pipeline
from cudiff.plot import save_grid, save_loss_curve
from cudiff.signals import noted
from cudiff.tensor import Tensor, no_grad

TELL_EVERY = 60
"""Seconds after which a run says how far it is, where no line of metrics came meanwhile."""

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
    data_changed : a resumed run goes on though `dataset` is not what its checkpoint was trained on

    Attributes: pipeline (the raw weights), preview (the EMA's), training, held_out (data), step (updates done),
    stopped_by (the number of the signal that ended `run`, or None).
    Raises CudiffError where data, configuration and checkpoint do not fit, and where `folder` holds a run to be lost.
    """

    def __init__(
        self, config: Config, dataset: Dataset, folder: str | Path, resume: Checkpoint | None = None, *,
        data_changed: bool = False,
    ):
        if not isinstance(dataset, Dataset) or not isinstance(resume, Checkpoint | None):
            raise CudiffError("a Trainer takes what cudiff.load_dataset returns, and to resume what "
                              f"load_checkpoint does, not {type(dataset).__name__} and {type(resume).__name__}")
        self.config, self.device = config, default_device() if config.device == "auto" else config.device
        array_module(self.device)  # says what is missing before anything else is done
        self.folder, self.metrics, self.data = Path(folder), Metrics(Path(folder)), dataset.fingerprint()
        self.step, self.seconds, self._started, self._alone = 0, 0.0, False, False
        self._resumed = None if resume is None else resume.counters
        if resume is not None and "optimizer" in resume.counters:  # converted weights: training begins with them
            self.step, self.seconds = resume.counters["step"], resume.counters["seconds"]
        check_unused(self.folder)
        self._check_folder()
        notice = None if resume is None else self._check_data(resume, data_changed)
        self._notices = [] if notice is None else [notice]
        self.config = config = config.for_data(dataset.images.shape, dataset.num_classes)
        if resume is not None:
            _check_resumed(config, resume.config)
        self.training, self.held_out = dataset.split(config.validation, config.seed)
        if len(self.training) == 0:
            raise CudiffError(f"no image is left to train on: {config.validation} of {len(dataset)} are held out")
        self.net = build(config)
        self.net.precision = config.precision
        self.net.flatten(self.device)
        self.ema = EMA(self.net, config.ema_half_life)
        self.optimizer = _optimizer(config, self.net, self.ema)
        self.pipeline, self.preview = Pipeline(config, self.net), Pipeline(config, self.ema.model)
        if config.sample_every:
            self._check_preview()
        self.loss = self.pipeline.loss(config.label_dropout)
        self.generator = Generator(config.seed, self.device)
        set_generator(self.net, self.generator)
        self.stopped_by: int | None = None
        self._loss_sum = Tensor(np.zeros((), np.float32), device=self.device)
        self._loss_steps = 0
        if resume is not None:
            self._restore(resume)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.loader = Loader(self.training, config, self.device, first=int(self.generator.step))
        captured = self.device == "cuda" and config.capture
        self._step: Any = capture(self.train_step, device=self.device, precompile=True) if captured else self.train_step
        self._timed_from, self._timed_steps = time.perf_counter(), 0
        self._saved_at = self._previewed_at = -1

    def train_step(self, *streamed: Tensor) -> Tensor:
        """One update, which `run` counts. Everything stays on the device, so that a CUDA graph can hold it.

        streamed: images and labels of each batch where they come from the host. Returns the sum of the mean losses
        since the last line of metrics.
        """
        self.optimizer.zero_grad()
        share = 1 / self.config.accumulate
        for index in range(self.config.accumulate):
            images, labels = self.loader.batch(self.generator.step, streamed, index)
            loss = self.loss(self.net, images, labels, self.generator)
            loss = loss * share if share < 1 else loss
            loss.backward()
            accumulate(self._loss_sum.data, loss.data)
            self.generator.advance()
        self.optimizer.step()
        return self._loss_sum

    def run(self, display: Any = None) -> dict[str, Any]:
        """Train until `steps`, `minutes`, Ctrl-C, SIGTERM or SIGHUP; log, preview and save on the way and at the end.

        display: told by `update(metrics)` and `message(text)`. Returns the last metrics.
        Raises CudiffError where nothing is left to do, where another process trains in the folder or another Trainer
        has, where memory runs out (saying what fits) and where the gradient or the weights stop being finite.
        """
        config = self.config
        metrics: dict[str, Any] = {}
        self._check_unfinished()
        if self.optimizer.model is not self.net:
            raise CudiffError("the net was replaced, which the optimiser does not train: register_model has a Trainer "
                              "build it, load_state_dict gives it other weights")
        start = time.perf_counter() - self.seconds
        first, before, told = self.step, self.seconds, -math.inf
        self._timed_from, self._timed_steps = time.perf_counter(), 0
        # What is not finite is dealt with below.
        with self._alone_in_folder() as useless, noted() as interrupted, np.errstate(all="ignore"):
            self._prepare_folder(useless, display)
            self._check_fits()
            while not interrupted and not self._finished():
                self._step_or_explain()
                self.step += 1
                self._loss_steps += 1
                self._timed_steps += 1
                if self.step == first + 1:
                    self._loss_sum.item()  # waits for the device
                self.seconds = time.perf_counter() - start
                if display is not None and time.perf_counter() - told > TELL_EVERY:
                    display.message(self._pace(self.step - first, self.seconds - before))
                    told = time.perf_counter()
                if self.step % config.log_every == 0:
                    metrics |= self._log(display)
                    told = time.perf_counter()
                    self._loss_sum.data[...] = 0
                    self._loss_steps = 0
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
        self._save_curve(display)
        self.stopped_by = interrupted[0] if interrupted else None
        if interrupted and display is not None:
            again = f"cudiff train --resume {quoted(self.folder)}"
            display.message(f"stopped at step {self.step} and saved: go on with {again}")
        return metrics

    @contextmanager
    def _alone_in_folder(self) -> Iterator[list[tuple[Path, str]]]:
        """Lock the folder and check it; nothing within a block that has, as where `run`'s display calls `save`.

        Gives what `_check_folder` does.
        """
        if self._alone:
            yield []
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with alone_in(self.folder):
            useless = self._check_folder()
            self._alone = True
            try:
                yield useless
            finally:
                self._alone = False

    def _check_folder(self) -> list[tuple[Path, str]]:
        """What `latest` would find before this run's own, and why. Raises CudiffError where a run would be lost.

        `run` asks again, as another Trainer may have run there since this one was made.
        """
        sampler = self.config.sampler
        useless = [] if self._resumed is None and not self._started else check_newest(self.folder, self.step, sampler)
        if not self._started and (self._resumed is None or not holds(self.folder, self._resumed, sampler)):
            check_no_run(self.folder)
        return useless

    def _prepare_folder(self, useless: list[tuple[Path, str]], display: Any) -> None:
        """Take the folder for this run: drop what it does again, and rename checkpoints of no use."""
        self._started = True
        notices, self._notices = self._notices, []
        for path, why in useless:
            notices.append(f"{path.name} is {why} and named {set_aside(path, why).name} from now on")
        self.metrics.drop_after(self.step)
        # Of a kill while a checkpoint was written; the second is safetensors' own.
        for leftover in (*self.folder.glob(".step-*.tmp"), *self.folder.glob(".tmp??????")):
            leftover.unlink()
        if display is not None:
            for notice in notices:
                display.message(notice)

    def validation_loss(self, dataset: Dataset) -> float:
        """The EMA's mean loss over the first images of `dataset`, with random numbers of its own, always the same."""
        loss, generator = self.preview.loss(), Generator(self.config.seed + 1, self.device)
        count = min(len(dataset), VALIDATION_IMAGES)
        total = 0.0
        with no_grad():
            for _ in range(VALIDATION_DRAWS):
                for start in range(0, count, self.config.batch_size):
                    chosen = range(start, min(count, start + self.config.batch_size))
                    images, labels = self.loader.normalised(dataset, chosen)
                    total += loss(self.preview.net, images, labels, generator).item() * len(chosen)
                    generator.advance()
        return total / (VALIDATION_DRAWS * count)

    def save(self) -> Path:
        """Write a checkpoint of this step and delete the oldest beyond `keep`; returns its path.

        Raises CudiffError, and writes and deletes nothing, where a value is not finite, where another process trains in
        the folder and where it holds another run.
        """
        with self._alone_in_folder():
            path = self._write_checkpoint()
            self._started = True
            return path

    def _write_checkpoint(self) -> Path:
        tensors = prefixed("model", self.net.state_dict()) | prefixed("ema", self.ema.model.state_dict())
        tensors |= self.optimizer.state_dict()
        counters: dict[str, Any] = {"optimizer": tensors.pop("counters").tolist(), "step": self.step}
        counters |= {"seconds": self.seconds, "generator": self.generator.state(), "data": self.data}
        counters |= {"loss_sum": self._loss_sum.item(), "loss_steps": self._loss_steps}
        counters["frozen"] = [name for name, value in self.net.named_parameters() if not value.requires_grad]
        if not math.isfinite(counters["loss_sum"]):  # of a skipped update
            counters |= {"loss_sum": 0.0, "loss_steps": 0}
        for name, array in tensors.items():
            if not np.isfinite(array).all():
                raise CudiffError(f"{name} is not finite at step {self.step}, which is not saved: {self._advice()}")
        path = self.save_path
        save_checkpoint(path, self.config, tensors, counters)
        prune(self.folder, self.config.keep)
        self._saved_at = self.step
        return path

    @property
    def save_path(self) -> Path:
        """Where `save` writes the checkpoint of this step."""
        return checkpoint_path(self.folder, self.step)

    def save_preview(self) -> Path:
        """Write a grid of `samples` images from the EMA."""
        path = self.folder / f"samples-{self.step:08d}.png"
        save_grid(path, self.preview.sample(self.config.samples, self.config.seed, batch_size=self.config.batch_size))
        return path

    def _repr_png_(self) -> bytes | None:
        return self.metrics._repr_png_()  # what a notebook shows

    def _restore(self, checkpoint: Checkpoint) -> None:
        self.net.load_state_dict(part(checkpoint.tensors, "model"))
        self.ema.model.load_state_dict(part(checkpoint.tensors, "ema"))
        counters = checkpoint.counters
        if "optimizer" not in counters:
            return
        moments = {key: value for key, value in checkpoint.tensors.items() if not key.startswith(("model.", "ema."))}
        self.optimizer.load_state_dict(moments | {"counters": np.array(counters["optimizer"])})
        self.generator.load_state(counters["generator"])
        self._loss_sum.data[...], self._loss_steps = counters["loss_sum"], counters["loss_steps"]
        frozen = [value for name, value in self.net.named_parameters() if name in (counters.get("frozen") or ())]
        for parameter in frozen:
            parameter.requires_grad = False
        if frozen:
            self._notices.append(f"{len(frozen)} parameters stay frozen, as they were when the run was saved")

    def _check_preview(self) -> None:
        config = self.config
        try:
            decreasing(self.preview.sigmas(config.sampler, config.sample_steps))
        except (CudiffError, ArithmeticError) as error:
            raise CudiffError(
                f"no preview can be drawn ({error}): change --sample-steps, --sigma-min, --sigma-max or --rho, or "
                "leave previews out with --sample-every 0"
            ) from None

    def _finished(self) -> bool:
        steps, seconds = self.config.steps or math.inf, 60 * self.config.minutes or math.inf
        return self.step >= steps or self.seconds >= seconds

    def _check_unfinished(self) -> None:
        if self._finished():
            done = f"{self.step} steps in {self.seconds / 60:.1f} minutes"
            raise CudiffError(f"the run is at its end after {done}: give more --steps or --minutes")

    def _check_fits(self) -> None:
        """Raise CudiffError where a batch would take more of the CPU's memory than is free: the system kills for that.

        Steps of 1, 2, 4, … images show what one image takes; nothing is updated by them.
        """
        config, free, start = self.config, memory_available(), resident()
        if self.device != "cpu" or config.batch_size < 4 or start is None:
            return
        state, size, peaks = self.generator.state(), 1, [0]
        statistics = [(buffer, buffer.data.copy()) for _, buffer in self.net.named_buffers()]
        try:
            while (peak := peak_of(partial(self._try, size))) is not None:
                peaks.append(peak - start)
                if peaks[-1] * config.batch_size < free * size:
                    return
                each = (peaks[-1] - peaks[-2]) / (size - size // 2)
                need = peaks[-1] + each * (config.batch_size - size)
                hopeless = size >= 32 and need > 4 * free  # an error of the measurement does not explain that
                if size > config.batch_size // 4 or (size >= 8 and (hopeless or peaks[-1] > free / 16)):
                    break
                size *= 2
            else:
                return
        except out_of_memory_errors():
            return  # the step itself will say what fits
        finally:
            self.generator.load_state(state)
            for buffer, values in statistics:  # running means of batch norms
                buffer.data[...] = values
        if need > free:
            fits = max(1, int(config.batch_size - (need - free) / each))
            raise CudiffError(
                f"batch size {config.batch_size} would take about {need / 2**30:.1f} GiB of memory, and "
                f"{free / 2**30:.1f} GiB are free: --batch-size {2 ** (fits.bit_length() - 1)} fits"
            )

    def _try(self, size: int) -> None:
        """Loss and backward of so many images, without an update."""
        images, labels = self.loader.normalised(self.training, np.arange(size) % len(self.training))
        self.loss(self.net, images, labels, self.generator).backward()

    def _step_or_explain(self) -> None:
        try:
            self._step(*self.loader.next())
            return
        except out_of_memory_errors():
            pass  # the exception holds the memory of the step: it has to be gone before anything smaller is tried
        self._step = None
        raise out_of_memory(self.config.batch_size, self._try, self.device)

    @contextmanager
    def _untimed(self) -> Iterator[None]:
        """Leave the time of the block out of the time of a step."""
        self._loss_sum.item()  # waits for the steps before
        begin = time.perf_counter()
        yield
        self._timed_from += time.perf_counter() - begin

    def _pace(self, steps: int, seconds: float) -> str:
        """How long a step took, of so many in so many seconds, and about how long all that are left will take."""
        each = seconds / steps
        what = "first step" if steps == 1 else f"step {self.step:,}, each"
        if steps == 1 and self.device == "cuda":
            return f"{what} {duration(each)}, with the compiling of its kernels"
        left = each * (self.config.steps - self.step) if self.config.steps else math.inf
        if not left:
            return f"{what} {duration(each)}"
        left = min(left, 60 * self.config.minutes - self.seconds if self.config.minutes else math.inf)
        return f"{what} {duration(each)}; about {duration(max(0.0, left))} left"

    @contextmanager
    def _saving_first(self) -> Iterator[None]:
        """What the block raises, as where metrics cannot be written, ends the run after a checkpoint of this step."""
        try:
            yield
        except Exception:
            if self._saved_at != self.step:
                with suppress(CudiffError):  # not finite, or no room for it either: the block's own error is told
                    self.save()
            raise

    def _log(self, display: Any) -> dict[str, Any]:
        config, steps = self.config, max(1, self._timed_steps)
        loss = self._loss_sum.item() / max(1, self._loss_steps)  # waits for the device
        elapsed = max(1e-9, time.perf_counter() - self._timed_from)
        self._timed_from, self._timed_steps = time.perf_counter(), 0
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
                f"the gradient was not finite {status['skipped_in_a_row']} times in a row, until step {self.step}: "
                f"{self._advice()}"
            )
        return metrics

    def _advice(self) -> str:
        last = latest(self.folder)
        return f"lower --lr or set --clip, and {f'go on with --resume {quoted(last)}' if last else 'start again'}"

    def _look(self, display: Any) -> dict[str, Any]:
        """A preview, and the EMA's loss on held-out images and on as many training images, to be compared."""
        with self._untimed():
            metrics: dict[str, Any] = {}
            if len(self.held_out):
                known = self.training.subset(np.arange(min(len(self.training), len(self.held_out))))
                metrics = {
                    "step": self.step, "val_loss": self.validation_loss(self.held_out),
                    "train_loss": self.validation_loss(known),
                }
                self._record(metrics, display)
            if self.config.sample_every:
                try:
                    self.save_preview()
                except CudiffError as error:
                    if not all(np.isfinite(array).all() for array in self.ema.model.state_dict().values()):
                        raise CudiffError(f"the EMA is not finite at step {self.step}: {self._advice()}") from None
                    if display is not None:
                        display.message(f"no preview of step {self.step}: {error}")
            self._previewed_at = self.step
        return metrics

    def _record(self, metrics: dict[str, Any], display: Any) -> None:
        with self._saving_first():
            self.metrics.append(metrics)
        if display is not None:
            display.update(metrics)

    def _check_data(self, checkpoint: Checkpoint, accepted: bool) -> str | None:
        """What to tell of a resumed run's data. Raises CudiffError where it is another and that is not accepted."""
        if "optimizer" not in checkpoint.counters:  # weights alone: training begins with them
            return None
        before = checkpoint.counters.get("data")
        if not isinstance(before, dict):
            return "the checkpoint does not say which data it was trained on: whether this is the same is not checked"
        found = "; ".join(differences(before, self.data))
        if found and not accepted:
            raise CudiffError(
                f"this is not the data that the run was trained on ({found}): name that with --data, or resume in "
                "Python with its Dataset; --data-changed (data_changed=True) accepts this"
            )
        return f"the data has changed: {found}" if found else None

    def _save_curve(self, display: Any) -> None:
        problem = None
        try:
            if not save_loss_curve(self.folder / "loss.png", self.metrics.lines()):
                problem = "pip install 'cudiff[plots]'"
        except Exception as error:  # whatever a picture fails by, the run is saved
            problem = str(error)
        if problem is not None and display is not None:
            display.message(f"no loss curve was drawn: {problem}")


def _check_resumed(config: Config, was: Config) -> None:
    """Raise CudiffError where a resumed run would be of another kind than it was."""
    values = config.to_dict()
    for name, before in was.fixed().items():
        if before != values.get(name):
            raise CudiffError(
                f"a resumed run cannot change {name} from {before} to {values.get(name)}: leave it out, or start anew"
            )


def _optimizer(config: Config, net: Module, ema: EMA) -> Optimizer:
    """The optimiser that `config` names, with its schedule, clipping and the EMA in one kernel."""
    warmup = min(config.warmup, config.steps // 2) if config.steps else config.warmup
    schedule = Cosine(config.steps, warmup=warmup) if config.lr_schedule == "cosine" else Constant(warmup)
    common: dict[str, Any] = dict(weight_decay=config.weight_decay, clip=config.clip, schedule=schedule, ema=ema)
    if config.optimizer == "sgd":
        return SGD(net, config.lr, config.momentum, **common)
    betas = (config.betas[0], config.betas[1])
    return (AdamW if config.optimizer == "adamw" else Adam)(net, config.lr, betas, config.eps, **common)


def duration(seconds: float) -> str:
    """A time as people say it: 4.1 ms, 29 s, 3.5 min, 4.0 h."""
    for unit, size in (("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if seconds >= 1.5 * size or (unit == "s" and seconds >= 1):
            return f"{seconds / size:.{0 if unit == 's' and seconds >= 10 else 1}f} {unit}"
    return f"{1000 * seconds:.1f} ms"
