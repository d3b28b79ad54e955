"""`cudiff tune`: measure the plans of the kernels that a model needs, list the fastest in the user's tiles.toml."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from cudiff.backend import Array, cuda_available, get_cupy, is_capturing
from cudiff.config import Config
from cudiff.cuda.compiler import compiles_ahead
from cudiff.cuda.deferred import deferred
from cudiff.cuda.device import current_device
from cudiff.cuda.graph import capture
from cudiff.cuda.tiles import Lines, Planner, forget, name_of, read, user_file, watched
from cudiff.cuda.timing import graph_time
from cudiff.data import Dataset
from cudiff.errors import CudiffError
from cudiff.tensorfile import replacing
from cudiff.train import Trainer

STEPS = 20  # of training before anything is measured: at first most gradients are 0, on which a GPU is faster
PLANS, MARGIN = 12, 1.5  # of a problem that are measured: so many, and estimates up to so many times the least
GAIN = 0.98  # another plan is listed only if it takes less than this share of the time of the one used before

Progress = Callable[[str, int], None]


@dataclass
class Tuned:
    """A problem's launches in a training step and in the sampling; the plan used before and the fastest: microseconds
    of all launches together, and what the file says."""

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

    def __call__(self, planner: Planner, problem: tuple, launch: Callable[[Any], Any], added_to: Sequence[Array],
                 leaves: Callable[[Any], Any]) -> None:
        current = planner(*problem)
        near = planner.by_rule(*problem, count=PLANS, margin=MARGIN)
        plans = [current, *(plan for plan in near if plan != current and leaves(plan) == leaves(current))]
        if compiles_ahead():
            for plan in plans:
                launch(plan)
            return
        if cuda_available() and is_capturing("cuda"):  # a graph of sampling, whose warm-up has been measured
            return
        before = [array.copy() for array in added_to]
        times = {plan: graph_time(functools.partial(_with_sums, launch, plan), copies=10, repeats=5) for plan in plans}
        for array, values in zip(added_to, before, strict=True):
            array[...] = values
        self.times.setdefault((planner, problem), []).append(times)
        self.progress(planner.kernel, sum(map(len, self.times.values())))

    def tuned(self) -> list[Tuned]:
        found = []
        for (planner, problem), launches in self.times.items():
            of_all = [plan for plan in launches[0] if all(plan in times for times in launches)]
            totals = {plan: sum(times[plan] for times in launches) for plan in of_all}
            before = planner(*problem)
            least = min(totals, key=totals.__getitem__)
            best = least if totals[least] < GAIN * totals[before] else before
            found.append(Tuned(
                planner.kernel, name_of(problem), len(launches), (totals[before], before.choice),
                (totals[best], best.choice),
            ))
        return found


def _with_sums(launch: Callable[[Any], Any], plan: Any) -> Any:
    """launch(plan), and the sums that it enqueues in one launch, as in a backward."""
    with deferred():
        return launch(plan)


def tune(config: Config, dataset: Dataset, images: Sequence[int] = (64,),
         progress: Progress = lambda kernel, launches: None) -> list[Tuned]:
    """Measure every planned launch of a training step and of sampling so many `images` at once, on this GPU.

    The choices go to `user_file()`, beside what it says of other problems and GPUs; this process takes them too. They
    change the order in which sums are made, so that results differ in their last bits. `progress(kernel, launches)` is
    told of each launch. Raises CudiffError where there is no GPU, for images that are no whole numbers from 1 on, and
    where the file cannot be read or written.
    """
    get_cupy()
    if any(not isinstance(count, int) or count < 1 for count in images):
        raise CudiffError(f"images are sampled 1 or more at once: give whole numbers, not {list(images)}")
    _write(read(user_file()))  # whatever stands in the way is said before anything is measured
    watch = _Watch(progress)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(config.replace(device="cuda", validation=0, capture=True), dataset, Path(folder) / "run")
        step = capture(trainer.train_step, device="cuda", precompile=True)
        for _ in range(STEPS):
            step(*trainer.loader.next())
        step = capture(trainer.train_step, warmup=1, device="cuda", precompile=True)
        with watched(watch):
            step(*trainer.loader.next())
            for count in images:
                trainer.preview.sample(count, steps=1, batch_size=count)
    tuned = watch.tuned()
    tables = read(user_file())
    for row in tuned:
        tables.setdefault(current_device().name, {}).setdefault(row.kernel, {})[row.problem] = row.fastest[1]
    _write(tables)
    forget()
    return tuned


def _write(tables: dict[str, dict[str, Lines]]) -> None:
    text = "# Which plan a kernel takes for a problem (see cudiff/cuda/tiles.py), as cudiff tune has measured it.\n"
    for gpu in sorted(tables):
        for kernel, lines in sorted(tables[gpu].items()):
            text += f"\n[{json.dumps(gpu)}.{kernel}]\n"
            text += "".join(f"{json.dumps(name)} = {lines[name]}\n" for name in sorted(lines))
    try:
        with replacing(user_file()) as file:
            file.write(text.encode())
    except CudiffError as error:
        raise CudiffError(f"{error} by the environment's CUDIFF_CACHE_DIR") from None


def table(tuned: Sequence[Tuned]) -> Table:
    """A rich table of the problems that have a faster plan now, and of the time of all."""
    shown = Table(caption=f"µs of all launches together, each alone in a graph; choices in {user_file()}")
    for column in ("kernel", "problem", "launches", "before", "µs", "now", "µs"):
        number = column in ("launches", "µs")
        shown.add_column(column, justify="right" if number else "left", no_wrap=number or column == "kernel")
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
