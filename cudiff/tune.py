"""`cudiff tune`: measure the plans of the kernels that a model needs, list the fastest in the user's tiles.toml."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from cudiff.backend import Array, get_cupy
from cudiff.config import Config
from cudiff.cuda.graph import capture
from cudiff.cuda.module import compiles_ahead, gpu_name
from cudiff.cuda.tiles import Planner, forget, named, read, user_file, watched
from cudiff.cuda.timing import graph_time
from cudiff.data import Dataset
from cudiff.errors import CudiffError
from cudiff.tensorfile import replacing
from cudiff.train import Trainer

STEPS = 20  # of training before anything is measured: at first most gradients are 0, on which a GPU is faster
PLANS, MARGIN = 12, 1.5  # of a problem that are measured: so many, and estimates up to so many times the least
GAIN = 0.98  # of the time that the plan takes which was used before: less makes another plan the choice

Progress = Callable[[str, int], None]


@dataclass
class Tuned:
    """A problem's launches in a training step and in the sampling; the plan used before and the fastest: microseconds
    of all launches together, and what tiles.toml says."""

    kernel: str
    problem: str
    launches: int
    before: tuple[float, list[int]]
    fastest: tuple[float, list[int]]


class _Watch:
    """Measures each planned launch with every plan that may be the fastest, on the operands that it has."""

    def __init__(self, progress: Progress):
        self.progress = progress
        self.times: dict[tuple[Planner, tuple], list[dict[Any, float]]] = {}

    def __call__(self, planner: Planner, problem: tuple, launch: Callable[[Any], Any], added_to: Array | None) -> None:
        plans = dict.fromkeys([planner(*problem), *planner.by_rule(problem, PLANS, MARGIN)])
        if compiles_ahead():
            for plan in plans:
                launch(plan)
            return
        before = None if added_to is None else added_to.copy()
        times = {plan: graph_time(functools.partial(launch, plan), copies=10, repeats=5) for plan in plans}
        if added_to is not None:
            added_to[...] = before
        self.times.setdefault((planner, problem), []).append(times)
        self.progress(planner.kernel, sum(map(len, self.times.values())))

    def tuned(self) -> list[Tuned]:
        found = []
        for (planner, problem), launches in self.times.items():
            totals = {plan: sum(times[plan] for times in launches) for plan in launches[0]}
            before = planner(*problem)
            least = min(totals, key=totals.__getitem__)
            best = least if totals[least] < GAIN * totals[before] else before
            found.append(Tuned(
                planner.kernel, named(problem), len(launches), (totals[before], before.choice),
                (totals[best], best.choice),
            ))
        return found


def tune(config: Config, dataset: Dataset, images: Sequence[int] = (64,),
         progress: Progress = lambda kernel, launches: None) -> list[Tuned]:
    """Measure every planned launch of a training step and of sampling so many `images` at once, on this GPU.

    The choices go to `user_file()`, beside what it says of other problems and GPUs; this process takes them too. They
    change the order in which sums are made, so that results differ in their last bits. `progress(kernel, launches)` is
    told of each launch. Raises CudiffError where there is no GPU and where the file cannot be read or written.
    """
    get_cupy()
    if min(images, default=1) < 1:
        raise CudiffError("images to be sampled at once are at least 1")
    tables = read(user_file())
    watch = _Watch(progress)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(config.replace(device="cuda", validation=0, capture=True), dataset, Path(folder) / "run")
        step = capture(trainer.train_step, device="cuda", rehearse=True)
        for _ in range(STEPS):
            step(*trainer.loader.next())
        step = capture(trainer.train_step, warmup=1, device="cuda", rehearse=True)
        with watched(watch):
            step(*trainer.loader.next())
            for count in images:
                trainer.preview.sample(count, steps=1, batch_size=count)
    tuned = watch.tuned()
    for row in tuned:
        tables.setdefault(gpu_name(), {}).setdefault(row.kernel, {})[row.problem] = row.fastest[1]
    with replacing(user_file()) as file:
        file.write(_as_toml(tables).encode())
    forget()
    return tuned


def _as_toml(tables: dict[str, dict[str, dict[str, list[int]]]]) -> str:
    text = "# Which plan a kernel takes for a problem (see cudiff/cuda/tiles.py), as cudiff tune has measured it.\n"
    for gpu in sorted(tables):
        for kernel, lines in sorted(tables[gpu].items()):
            text += f'\n["{gpu}".{kernel}]\n' + "".join(f'"{name}" = {lines[name]}\n' for name in sorted(lines))
    return text


def table(tuned: Sequence[Tuned]) -> Table:
    """A rich table of the problems that have a faster plan now, and of the time of all."""
    shown = Table(caption=f"µs of all launches together, each alone in a graph; choices in {user_file()}")
    for column in ("kernel", "problem", "launches", "before", "µs", "now", "µs"):
        shown.add_column(column, justify="right" if column in ("launches", "µs") else "left")
    for row in tuned:
        (before, old), (now, new) = row.before, row.fastest
        if new != old:
            times = f"{before:,.1f}", f"{now:,.1f}"
            shown.add_row(row.kernel, row.problem, str(row.launches), str(old), times[0], str(new), times[1])
    shown.add_section()
    totals = [sum(times) for times in zip(*((row.before[0], row.fastest[0]) for row in tuned), strict=True)] or [0, 0]
    shown.add_row(
        "all", f"{len(tuned)} problems", str(sum(row.launches for row in tuned)), "", f"{totals[0]:,.1f}", "",
        f"{totals[1]:,.1f}",
    )
    return shown
