"""What a person sees of a training run: a live line in a terminal, plain lines elsewhere."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from cudiff.config import Config


class TrainingDisplay:
    """Shows loss, images/s, step time, memory and the time left; a context manager.

    The bar runs over `steps`, or over `minutes` where there are no steps.
    """

    def __init__(self, config: Config, console: Console | None = None, done: float = 0):
        self.config, self.console = config, console or Console()
        self.values: dict[str, Any] = {}
        columns = (
            TextColumn("[bold]{task.description}"), BarColumn(None), TaskProgressColumn(),
            TextColumn("{task.fields[status]}"), TimeRemainingColumn(compact=True),
        )
        self.progress = Progress(*columns, console=self.console, disable=not self.console.is_terminal, expand=True)
        by_steps = config.steps > 0
        total = config.steps if by_steps else config.minutes * 60
        self.key = "step" if by_steps else "seconds"
        self.task = self.progress.add_task("training", total=total, completed=done, status="")

    def __enter__(self) -> TrainingDisplay:
        self.progress.__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        self.progress.__exit__(*details)

    def update(self, metrics: dict[str, Any]) -> None:
        """Show the metrics that are there; others keep their last value."""
        self.values |= metrics
        status = self.status()
        self.progress.update(self.task, completed=self.values.get(self.key, 0), status=status)
        if not self.console.is_terminal:
            self.console.print(f"step {self.values['step']:>7,}  {status}", highlight=False)

    def message(self, text: str) -> None:
        """One line above the bar."""
        self.progress.console.print(text, highlight=False)

    def status(self) -> str:
        """The metrics in one line."""
        v, parts = self.values, []
        if "loss" in v:
            parts.append(f"loss {v['loss']:.4f}")
        if "val_loss" in v:
            parts.append(f"held out {v['val_loss']:.4f} (training images {v['train_loss']:.4f})")
        if "step_ms" in v:
            parts.append(f"{v['images_per_second']:,.0f} images/s")
            parts.append(f"{v['step_ms']:.1f} ms/step")
            parts.append(f"{v['memory_mb']:,.0f} MB")
        if v.get("skipped"):
            parts.append(f"{v['skipped']} skipped")
        return "  ".join(parts)
