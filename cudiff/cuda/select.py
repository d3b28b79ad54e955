"""Which kernel serves a problem: the first row of its family's table that makes an offer for it.

A family is an operation that several kernels can compute: convolution, matrix products, attention, norms. Its problem
is a named tuple of everything that the choice depends on: the pass, shapes, dtypes, the alignment of rows, precision,
and the wanted fusions. Only these tables choose a kernel by the architecture.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from cudiff.backend import get_cupy
from cudiff.cuda.device import asked_about, device, driver_version
from cudiff.errors import CudiffError

ANY = None  # every architecture
SM90 = frozenset({"sm_90a"})
_CUDA_OF_DRIVER_530 = 12010


class Target(NamedTuple):
    """What kernels and their plans are chosen for: a GPU's name, its architecture, such as "sm_90a", and its number of
    multiprocessors."""

    gpu: str
    architecture: str
    multiprocessors: int = 0


def current_target() -> Target:
    """The target of the current device. Its architecture is "sm_90a" if the kernels in files named _sm90 may run.

    CUDIFF_PORTABLE=1 in the environment, when the first kernel is chosen, switches these off: the kernels for any GPU
    run instead. So does a driver older than 530, because some of them have more than 4 KiB of arguments, which it does
    not support.
    """
    return _target(get_cupy().cuda.runtime.getDevice())


@functools.cache
def _target(ordinal: int) -> Target:
    found = device(ordinal)
    portable = os.environ.get("CUDIFF_PORTABLE") == "1" or driver_version() < _CUDA_OF_DRIVER_530
    architecture = found.architecture.replace("compute", "sm").removesuffix("a" if portable else "")
    return Target(found.name, architecture, found.multiprocessors)


class Offer(NamedTuple):
    """What a row does for one problem.

    fused: the wanted fusions that it does. plan: the launch configuration, or what else `run` needs, of a type of
    the row's own.
    """

    fused: frozenset[str] = frozenset()
    plan: Any = None


class Row(NamedTuple):
    """One way to serve a family's problems: a host function that launches one kernel or several.

    name: of the kernels, as in `kernels/`. architectures: those that have its instructions, or ANY.
    offer(problem): what the row offers, None if it does not serve the problem. run: the function that launches; each
    family has its own arguments. takes: in words, what the row serves, and what it declines by its estimate.
    """

    name: str
    architectures: frozenset[str] | None
    offer: Callable[[Any], Offer | None]
    run: Callable[..., Any]
    takes: str


class Choice(NamedTuple):
    """The row that serves a problem, its offer, and in `left` the wanted fusions that other launches have to do."""

    row: Row
    offer: Offer
    left: frozenset[str]


FAMILIES: dict[str, Table] = {}

Watch = Callable[[Any, Any, "Choice | None"], None]
watch: Watch | None = None  # see `watched`


@contextlib.contextmanager
def watched(told: Watch) -> Iterator[None]:
    """Inside the block, told(table, problem, choice) is called at each selection, and told(launch type, batch, None)
    before each batch of deferred launches. A batch is a list of the arguments of each launch."""
    global watch
    watch = told
    try:
        yield
    finally:
        watch = None


class Table:
    """A family's rows, the best first. The last one takes everything that the rows before it refuse."""

    def __init__(self, family: str, *rows: Row) -> None:
        self.family, self.rows = family, rows
        self._chosen: dict[tuple[tuple, Target], tuple[Any, Choice]] = {}
        FAMILIES[family] = self

    def select(self, problem: Any, architecture: str | None = None) -> Choice:
        """The first row that makes an offer, on the current device or on an architecture such as "sm_80".

        problem: has the field `wanted`, a frozenset of the names of fusions. architecture: asks what would run on it,
        for which no GPU is needed. Then `watched` is not told, and plans are those of the least estimated time, not
        tuned ones. Raises CudiffError if no row serves the problem.
        """
        return self.selected(lambda problem: problem, (problem,), architecture)[1]

    def selected(self, problem_of: Callable[..., Any], fields: tuple,
                 architecture: str | None = None) -> tuple[Any, Choice]:
        """The problem problem_of(*fields), and what `select` says of it: both are found once for all equal fields."""
        # The GPU's name belongs to the target, because plans are tuned for a GPU, not for an architecture; and its
        # multiprocessors, for which offers prepare grids.
        target = current_target() if architecture is None else Target("", architecture)
        found = self._chosen.get((fields, target))
        if found is None:
            problem = problem_of(*fields)
            with contextlib.nullcontext() if architecture is None else asked_about(architecture):
                found = self._chosen[fields, target] = problem, self._first(problem, target.architecture)
        if watch is not None and architecture is None:
            watch(self, *found)
        return found

    def _first(self, problem: Any, architecture: str) -> Choice:
        for row in self.rows:
            if row.architectures is None or architecture in row.architectures:
                offer = row.offer(problem)
                if offer is not None:
                    return Choice(row, offer, problem.wanted - offer.fused)
        raise CudiffError(
            f"no kernel of {self.family} on {architecture} serves {problem}: use 16 bits, or smaller sizes"
        )

    def forget(self) -> None:
        """Forget all choices, because tuned plans may change them."""
        self._chosen.clear()
