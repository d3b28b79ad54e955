"""The choice of a plan for a problem: the tuned plan listed for this GPU, else the one with the least estimated time.

A problem is the sizes that a kernel is launched with. A plan is a tile and a division of the work among blocks. The
files in `kernels/tuned/`, one for each GPU, come with cudiff. `cudiff tune` writes the user's own file, which has
precedence. A file lists plans by GPU, kernel and problem:

    ["NVIDIA H200".conv2d_sm90-4]
    "(32, 64, 64, 64), 64, (3, 3), 2, 0, False" = [256, 1]

The number after the kernel's name is the version of its plans and problems. Lines of another version are ignored, and
so is a line that gives no plan of its problem.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from cudiff.backend import Array, cache_folder, cuda_status
from cudiff.cuda.compiler import kernel_folder
from cudiff.cuda.device import asked, current_device
from cudiff.cuda.select import FAMILIES
from cudiff.errors import CudiffError


class Plan(Protocol):
    @property
    def choice(self) -> list[int]:
        """The numbers that identify this plan among those of its problem, as in the files."""


P = TypeVar("P", bound=Plan)
R = TypeVar("R")
Lines = dict[str, list[int]]
Watch = Callable[["Planner", tuple, Callable[[Any], Any], Sequence[Array], Callable[[Any], Any]], None]

watch: Watch | None = None  # see `watched`
_planners: list[Planner] = []


class Planner(Generic[P]):
    """planner(*problem) returns a kernel's plan for a problem.

    plans(*problem): all plans, at least one. time(plan, *problem): the estimate, in microseconds. version: to be raised
    if a change of the kernel may make other plans faster than the measured ones, or gives their numbers a new meaning.
    """

    def __init__(self, kernel: str, plans: Callable[..., Iterable[P]], time: Callable[..., float], version: int = 1):
        self.kernel, self.plans, self.time = f"{kernel}-{version}", plans, time
        self._chosen: dict[tuple, P] = {}  # by the GPU's name and the problem
        _planners.append(self)

    def __call__(self, *problem: Any) -> P:
        gpu = _gpu()
        chosen = self._chosen.get((gpu, problem))
        if chosen is None:
            line = _listed(gpu).get(self.kernel, {}).get(name_of(problem))
            matching = [plan for plan in self.plans(*problem) if plan.choice == line] if line else []
            chosen = self._chosen[gpu, problem] = matching[0] if matching else self.by_rule(*problem)[0]
        return chosen

    def by_rule(self, *problem: Any, count: int = 1, margin: float = 1.0) -> list[P]:
        """The `count` plans with the least estimates, least first, without those above `margin` times the least."""
        times = {plan: self.time(plan, *problem) for plan in self.plans(*problem)}
        order = sorted(times, key=times.__getitem__)[:count]
        return [plan for plan in order if times[plan] <= margin * times[order[0]]]

    def estimate(self, *problem: Any) -> float:
        """The least estimate of all plans, in microseconds."""
        return self.time(self.by_rule(*problem)[0], *problem)

    def run(self, problem: tuple, launch: Callable[[P], R], added_to: Sequence[Array] = (),
            leaves: Callable[[P], Any] = lambda plan: None, chosen: P | None = None) -> R:
        """launch(plan) with `chosen`, or the problem's plan if that is None.

        added_to: arrays that the launch adds to, or reads before it overwrites them. leaves(plan): what a plan computes
        beside the result, for which other plans need another launch. Tuning compares only plans that agree in it.
        Where nothing watches, prepared launches run without this: to make the function `launch` takes longer than to
        call it.
        """
        if watch is not None:
            watch(self, problem, launch, added_to, leaves)
        return launch(self(*problem) if chosen is None else chosen)

    def forget(self) -> None:
        """Forget the chosen plans, and the selected kernels, because these may depend on what a plan computes."""
        self._chosen.clear()
        for table in FAMILIES.values():
            table.forget()


def forget() -> None:
    """Forget all chosen plans. The files are read again at the next choice."""
    _listed.cache_clear()
    for planner in _planners:
        planner.forget()


def name_of(problem: tuple) -> str:
    """A problem's name in the files."""
    return repr(problem)[1:-1]


@contextlib.contextmanager
def watched(told: Watch) -> Iterator[None]:
    """Inside the block, told(planner, problem, launch, added_to, leaves) is called before each planned launch."""
    global watch
    watch = told
    try:
        yield
    finally:
        watch = None


def user_file() -> Path:
    """The file that `cudiff tune` writes."""
    return cache_folder("tiles.toml")


def _gpu() -> str:
    """The name of the GPU that launches are planned for: inside `asked_about` the architecture, "" without a GPU."""
    return asked.architecture or (current_device().name if cuda_status()[0] else "")


@functools.cache
def _listed(gpu: str) -> dict[str, Lines]:
    """The lines of a GPU, by kernel."""
    found: dict[str, Lines] = {}
    for path in (*sorted((kernel_folder() / "tuned").glob("*.toml")), user_file()):
        for kernel, lines in read(path).get(gpu, {}).items():
            found.setdefault(kernel, {}).update(lines)
    return found


def summary() -> str:
    """How many plans the files list for the current GPU, for `cudiff info`. Raises CudiffError if one is damaged."""
    count = sum(map(len, _listed(_gpu()).values()))
    return f"{count} measured for this GPU" if count else "none measured for this GPU: cudiff tune does it"


def read(path: Path) -> dict[str, dict[str, Lines]]:
    """A file's lines, by GPU and kernel; {} if none may be read. Raises CudiffError if it is damaged."""
    import tomllib  # here, as it is not needed without a GPU

    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, str(error)) from None
    for gpu, kernels in tables.items():
        for kernel, lines in kernels.items() if isinstance(kernels, dict) else [("", None)]:
            if not isinstance(lines, dict):
                raise _damaged(path, f"under '{gpu}' there are no tables of kernels")
            for name, choice in lines.items():
                if not isinstance(choice, list) or any(type(number) is not int for number in choice):
                    raise _damaged(path, f"{kernel}, '{name}': {choice} is no list of whole numbers")
    return tables


def _damaged(path: Path, what: str) -> CudiffError:
    advice = "move it away, and run cudiff tune again" if path == user_file() else "reinstall cudiff"
    return CudiffError(f"cannot use {path} ({what}): {advice}")
