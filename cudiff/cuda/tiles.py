"""Which of a kernel's plans a problem takes: the one listed for this GPU, else that of the least estimated time.

A problem is the sizes that a kernel is launched for, a plan a tile and how blocks share the work. `kernels/tiles.toml`
comes with cudiff; `cudiff tune` writes the user's own file, which goes before it. Both hold lines for a GPU, by its
name, and a kernel:

    ["NVIDIA H200".conv2d_sm90]
    "(32, 64, 64, 64), 64, (3, 3), 2, 0, False" = [256, 1]

A line that names no plan of its problem is passed over: another version of the kernel may have had it.
"""

from __future__ import annotations

import contextlib
import functools
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from cudiff.backend import Array, cache_folder, cuda_status
from cudiff.cuda.module import gpu_name, kernel_folder
from cudiff.errors import CudiffError


class Plan(Protocol):
    @property
    def choice(self) -> list[int]:
        """What tells it from the other plans of a problem."""


P = TypeVar("P", bound=Plan)
R = TypeVar("R")
Lines = dict[str, list[int]]
Watch = Callable[["Planner", tuple, Callable[[Any], Any], Array | None], None]

_watch: Watch | None = None
_planners: list[Planner] = []


class Planner(Generic[P]):
    """planner(*problem) -> the plan of a kernel that a problem takes.

    plans(*problem): all there are, one at least. time(plan, *problem): the rule, estimated microseconds.
    """

    def __init__(self, kernel: str, plans: Callable[..., Iterable[P]], time: Callable[..., float]):
        self.kernel, self.plans, self.time = kernel, plans, time
        self._chosen: dict[tuple, P] = {}
        _planners.append(self)

    def __call__(self, *problem: Any) -> P:
        chosen = self._chosen.get(problem)
        if chosen is None:
            line = _listed().get(self.kernel, {}).get(named(problem))
            matching = [plan for plan in self.plans(*problem) if plan.choice == line] if line else []
            chosen = self._chosen[problem] = matching[0] if matching else self.by_rule(problem)[0]
        return chosen

    def by_rule(self, problem: tuple, count: int = 1, margin: float = 1.0) -> list[P]:
        """At most so many plans, the least estimate first, none longer than that by more than this factor."""
        times = {plan: self.time(plan, *problem) for plan in self.plans(*problem)}
        order = sorted(times, key=times.__getitem__)[:count]
        return [plan for plan in order if times[plan] <= margin * times[order[0]]]

    def estimate(self, *problem: Any) -> float:
        """Microseconds of the plan that the rule takes."""
        return self.time(self.by_rule(problem)[0], *problem)

    def run(self, problem: tuple, launch: Callable[[P], R], added_to: Array | None = None) -> R:
        """launch(plan) with the problem's plan. added_to: what it does not overwrite, but adds to."""
        if _watch is not None:
            _watch(self, problem, launch, added_to)
        return launch(self(*problem))

    def forget(self) -> None:
        self._chosen.clear()


def forget() -> None:
    """Have files read anew."""
    _listed.cache_clear()
    for planner in _planners:
        planner.forget()


def named(problem: tuple) -> str:
    """A problem as tiles.toml has it."""
    return repr(problem)[1:-1]


@contextlib.contextmanager
def watched(watch: Watch) -> Iterator[None]:
    """Inside the block, watch(planner, problem, launch, added_to) is called before each planned launch."""
    global _watch
    _watch = watch
    try:
        yield
    finally:
        _watch = None


def user_file() -> Path:
    """Where `cudiff tune` writes."""
    return cache_folder("tiles.toml")


@functools.cache
def _listed() -> dict[str, Lines]:
    """The lines of the current GPU, by kernel."""
    if not cuda_status()[0]:
        return {}
    found: dict[str, Lines] = {}
    for path in (kernel_folder() / "tiles.toml", user_file()):
        for kernel, lines in read(path).get(gpu_name(), {}).items():
            found.setdefault(kernel, {}).update(lines)
    return found


def listed() -> str:
    """What the lists say of the current GPU, for `cudiff info`."""
    count = sum(map(len, _listed().values()))
    return f"{count} measured for this GPU" if count else "none measured for this GPU: cudiff tune does it"


def read(path: Path) -> dict[str, dict[str, Lines]]:
    """A file's lines, by GPU and kernel; none where there is no file. Raises CudiffError where it is damaged."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
        for kernels in tables.values():
            for lines in kernels.values():
                if not all(isinstance(choice, list) for choice in lines.values()):
                    raise ValueError("a choice is a list of numbers")
        return tables
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError) as error:
        raise CudiffError(f"cannot read {path} ({error}): delete it, and run cudiff tune again") from None
