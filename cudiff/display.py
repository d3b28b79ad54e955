"""What a person sees of a training run: a live bar and a table of numbers in a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, suppress
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from cudiff.config import Config
from cudiff.data import Dataset
from cudiff.errors import printable
from cudiff.registry import TABLES
from cudiff.train import Trainer


def _unless_closed() -> AbstractContextManager:
    return suppress(OSError, SystemExit)  # rich ends the process where a pipe is closed


def introduction(trainer: Trainer, dataset: Dataset, asked: Config) -> list[str]:
    """What a run says of itself before its first step. asked: the configuration that it was given."""
    config, group = trainer.config, trainer.group
    place = {"cpu": "CPU", "cuda": "GPU"}[trainer.device]
    place = f"the {place}" if group.size == 1 else f"{group.size} {place}s"
    lines = [
        f"{dataset!r}", f"{len(trainer.training):,} images to train on, {len(trainer.held_out):,} held out",
        f"{trainer.net.num_parameters():,} parameters, {config.precision}, on {place}; run in {trainer.folder}",
    ]
    classes = config.num_classes
    if classes and asked.num_classes < 0:
        lines.append(f"the model is conditioned on the data's {classes:,} classes: --num-classes 0 trains without them")
    elif dataset.num_classes and not classes:
        lines.append(f"the data's {dataset.num_classes:,} classes are not used: the model is unconditional")
    elif classes > dataset.num_classes:
        lines.append(f"the model has {classes:,} classes and the data {dataset.num_classes:,}: the others are not "
                     "trained (--num-classes -1 takes those of the data)")
    if classes and config.guidance != 1 and not config.label_dropout:
        lines.append(f"label_dropout is 0, so nothing is learned of images without a class, which guidance "
                     f"{config.guidance:g} takes: --guidance 1 does without")
    if config.guidance_channels > config.channels:
        lines.append(f"guidance_channels {config.guidance_channels} are more than the {config.channels} that there are:"
                     " all are guided")
    chosen = {name for kind, table in TABLES.items() for name in table[getattr(config, kind)].options}
    if unused := [name for name in config.options if name not in chosen]:
        lines.append(f"sampler {config.sampler} does not take {', '.join(unused)}: previews do without, and cudiff "
                     "sample takes them with another --sampler")
    if trainer.step:
        lines.append(f"going on at step {trainer.step:,}")
    if trainer.device == "cpu" and config.precision in ("bf16", "fp16"):
        lines.append(f"{config.precision} is emulated on the CPU, which is slow: --precision fp32 is faster")
    return lines


class TrainingDisplay:
    """Shows loss, images/s, step time, memory and the time left; a context manager.

    Where the output is gone, a closed pipe or terminal, it shows nothing: a run does not end for it.
    The bar runs over `steps`, or over `minutes` where they are given: whichever of both is nearer to its end.
    """

    def __init__(self, config: Config, console: Console | None = None, step: int = 0):
        self.config, self.console = config, console or Console()
        self.values: dict[str, Any] = {"step": step, "seconds": 0.0}
        self.progress = Progress(
            TextColumn("[bold]step {task.fields[step]:,}[/]"), BarColumn(None), TaskProgressColumn(),
            TextColumn("elapsed"), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(compact=True),
            console=self.console, expand=True,
        )
        self.task = self.progress.add_task("", total=1.0, completed=self._share(), step=step)  # type: ignore[arg-type]
        self.live = Live(self._picture(), console=self.console, refresh_per_second=4, transient=False)

    def __enter__(self) -> TrainingDisplay:
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *details: Any) -> None:
        if self.console.is_terminal:
            with _unless_closed():
                self.live.update(self._picture(), refresh=True)
                self.live.stop()

    def update(self, metrics: dict[str, Any]) -> None:
        """Show the metrics that are there; others keep their last value."""
        self.values |= metrics
        self.progress.update(self.task, completed=self._share(), step=self.values["step"])  # type: ignore[arg-type]
        if self.console.is_terminal:
            self.live.update(self._picture())
        else:
            shown = self.losses(metrics) + self.speeds(metrics)
            self.message(f"step {metrics['step']:>7,}  {'  '.join(shown)}")

    def message(self, text: str) -> None:
        """One line, above the bar where there is one."""
        with _unless_closed():
            self.console.print(printable(text), markup=False, highlight=False, soft_wrap=True)

    def _share(self) -> float:
        """How much of the run is done, in [0, 1]."""
        config, values = self.config, self.values
        shares = [values["step"] / config.steps] if config.steps else []
        shares += [values["seconds"] / (60 * config.minutes)] if config.minutes else []
        return min(1.0, max(shares))

    def _picture(self) -> Group:
        lines = [Text("   ".join(line)) for line in (self.losses(self.values), self.speeds(self.values)) if line]
        return Group(self.progress, *lines)

    def losses(self, v: dict[str, Any]) -> list[str]:
        """How good the model is, as far as the metrics say."""
        parts = []
        if "loss" in v:
            parts.append(f"loss {v['loss']:.4f}" if math.isfinite(v["loss"]) else "loss not finite")
        if "val_loss" in v:
            parts.append(f"EMA: held out {v['val_loss']:.4f}, training {v['train_loss']:.4f}")
        return parts

    def speeds(self, v: dict[str, Any]) -> list[str]:
        """How fast it learns, and with what."""
        parts = []
        if "step_ms" in v:
            step = f"{v['step_ms']:.1f} ms" if v["step_ms"] < 1000 else f"{v['step_ms'] / 1000:.2f} s"
            parts += [f"{v['images_per_second']:,.0f} images/s", f"{step}/step", f"{v['memory_mb']:,.0f} MB"]
        if v.get("skipped"):
            parts.append(f"{v['skipped']} skipped")
        return parts
