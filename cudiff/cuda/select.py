"""Which kernel serves a problem: the first row of its family's table that makes an offer for it.

A family is an operation that several kernels can compute: convolution, matrix products, attention, norms. Its problem
is a named tuple of everything that the choice depends on: the pass, shapes, dtypes, the alignment of rows, precision,
and the wanted fusions. Only these tables choose a kernel by the architecture.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from cudiff.cuda.device import Target, asked_about, current_target
from cudiff.errors import CudiffError

ANY = None  # every architecture
SM90 = frozenset({"sm_90a"})


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
        self._chosen: dict[tuple[Any, Target], Choice] = {}
        FAMILIES[family] = self

    def select(self, problem: Any, architecture: str | None = None) -> Choice:
        """The first row that makes an offer, on the current device or on an architecture such as "sm_80".

        problem: has the field `wanted`, a frozenset of the names of fusions. architecture: asks what would run on it,
        for which no GPU is needed. Then `watched` is not told, and plans are those of the least estimated time, not
        tuned ones. Raises CudiffError if no row serves the problem.
        """
        # The GPU's name belongs to the target, because plans are tuned for a GPU, not for an architecture.
        target = current_target() if architecture is None else Target("", architecture)
        found = self._chosen.get((problem, target))
        if found is None:
            with contextlib.nullcontext() if architecture is None else asked_about(architecture):
                found = self._chosen[problem, target] = self._first(problem, target.architecture)
        if watch is not None and architecture is None:
            watch(self, problem, found)
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
