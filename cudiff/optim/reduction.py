"""The gradient of a batch that several processes share: summed in buckets, while the backward still runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cudiff.autograd import watched
from cudiff.cuda.deferred import Queue
from cudiff.distributed import Group
from cudiff.function import Node
from cudiff.nn import FlatParameters, Module, Parameter
from cudiff.recompute import Recomputed

BUCKETS = 8
"""A gradient is summed in about so many, before each of which deferred launches are flushed."""

LEAST, LAST = 4 * 2**20, 2**18
"""float32 that a bucket may hold where BUCKETS would be smaller, and that the last may, which the update waits for."""


class Reduction:
    """Sums the gradients of flat parameters over a group, which are of so many `passes` that accumulate.

    A bucket holds parameters that are complete at about the same time, wherever they lie in the buffer. Which these are
    the tape says: every process has the same, as it runs the same operations. Deferred launches are flushed at the ends
    of buckets in every pass, in one process too where passes accumulate: which launches are batched decides how sums of
    weights' gradients are split, and so their last bits.
    """

    def __init__(self, flat: FlatParameters, net: Module, group: Group, passes: int = 1):
        self.flat, self.group, self.passes = flat, group, passes
        self._places = {id(parameter): (parameter, flat.slots[name][:2]) for name, parameter in net.named_parameters()}
        self._summed: set[int] = set()
        self._started = 0
        self._last = True
        shards = flat.shards
        self._registered = group.register(flat.buffer, flat.data, shards.parts) if shards.shared else None

    @contextmanager
    def during(self, last: bool) -> Iterator[None]:
        """In the `last` pass sum what the backward within the block leaves; done, for what follows on the current
        stream, at its end."""
        if self.group.size == self.passes == 1:
            yield
            return
        self._summed, self._started, self._last = set(), 0, last and self.group.size > 1
        with watched(self._begin):
            yield
        if not self._last:
            return
        # Of earlier passes that accumulated, and not of this one. Of a registered gradient all else too, as zeros.
        rest = [place for key, (parameter, place) in self._places.items()
                if key not in self._summed and (self._registered is not None or self._has_gradient(parameter))]
        if rest:
            _ = self.flat.grad  # writes zeros where no backward wrote
            self._start(rest)
        self.group.finish_sums()

    @staticmethod
    def _has_gradient(parameter: Parameter) -> bool:
        return parameter.requires_grad and not parameter._grad_empty

    def _begin(self, order: list[Node]) -> Callable[[int, Queue], None]:
        if any(node.function is Recomputed for node in order):  # what their parts take is not known yet: all at the end
            return lambda position, queue: None
        complete: dict[int, int] = {}
        for position, node in enumerate(order):
            complete |= {id(source): position for source in node.inputs if id(source) in self._places}
        at: dict[int, list[tuple[int, int]]] = {}
        for key, position in complete.items():
            parameter, place = self._places[key]
            if parameter.requires_grad:
                at.setdefault(position, []).append(place)
                self._summed.add(key)
        buckets = in_buckets(at, max(LEAST, self.flat.size // BUCKETS))

        def after(position: int, queue: Queue) -> None:
            if position in buckets:
                queue.flush()
                if self._last:
                    self._start(buckets[position])

        return after

    def _start(self, ranges: list[tuple[int, int]]) -> None:
        arrays = [self.flat.buffer[start:stop] for start, stop in _joined(ranges)]
        self.group.start_sums(arrays, self._started, self._registered)
        self._started += 1


def in_buckets(at: dict[int, list[tuple[int, int]]], least: int) -> dict[int, list[tuple[int, int]]]:
    """Ranges of the buffer by the position in the backward after which they are summed, from those by the position
    after which they are complete. The last bucket holds LAST elements at most, the others `least`, unless one position
    has more."""
    buckets: dict[int, list[tuple[int, int]]] = {}
    held, limit, last = 0, 0, 0
    for position in sorted(at, reverse=True):
        size = sum(stop - start for start, stop in at[position])
        if not buckets or held + size > limit:
            held, limit, last = 0, least if buckets else LAST, position
            buckets[last] = []
        buckets[last] += at[position]
        held += size
    return buckets


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges in their order, those that lie side by side as one; between two lie at most the 31 elements of padding."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if joined and start - joined[-1][1] < 32:
            joined[-1] = joined[-1][0], stop
        else:
            joined.append((start, stop))
    return joined
