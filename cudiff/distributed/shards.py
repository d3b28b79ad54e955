"""Parts of flat buffers, one a process, which holds the optimiser's state of its own alone and updates it: stage 1 of
ZeRO (Rajbhandari et al., 2020, arXiv 1910.02054)."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from cudiff.backend import Array, array_module, device_of, to_device
from cudiff.distributed import ALONE, Group

LEAST, SUMS = 32, 2**13
"""An update's flag is of 32 elements, so parts are multiples of them. A gradient's norm is of at most SUMS sums."""


class Shards:
    """Which of `size` elements each process of a group has; one process has all.

    Attributes
    ----------
    group : Group
    parts : a slice for each process, by rank; the last ones may be shorter, or empty
    own : this process's
    shared : whether there are several
    chunk : elements whose squares are added at a time for the gradient's norm. It does not depend on the number of
        processes, and parts begin at multiples of it, so that all find the norm that one would.
    """

    def __init__(self, size: int, group: Group = ALONE):
        self.chunk = LEAST
        while self.chunk * SUMS < size:
            self.chunk *= 2
        self._chunks = -(-size // (self.chunk * group.size))
        each = self._chunks * self.chunk
        bounds = [min(rank * each, size) for rank in range(group.size + 1)]
        self.group, self.parts = group, [slice(start, stop) for start, stop in pairwise(bounds)]
        self.own, self.shared = self.parts[group.rank], group.size > 1

    def sums(self, own: Array) -> Array:
        """The sums of all processes' chunks, by rank, from those of this process's: float32, one for each chunk. There
        may be zeros at the end. Once a step, before the update."""
        if not self.shared:
            return own
        if own.size < self._chunks:
            part, own = own, array_module(device_of(own)).zeros(self._chunks, own.dtype)
            own[: part.size] = part
        return self.group.gather_sums(own).reshape(-1)

    def finish_update(self, buffer: Array) -> None:
        """`all_gather` of weights that each process has updated, as `Group.peers` says."""
        self.group.finish_update([buffer[part] for part in self.parts])

    def all_gather(self, buffer: Array) -> None:
        """Give all processes each one's part of a buffer of `size` elements, in place; a captured step holds it."""
        self.group.all_gather([buffer[part] for part in self.parts])

    def whole(self, own: Array) -> np.ndarray | None:
        """The parts of all processes, one after the other, on the host of process 0; None on others, which call it too.

        own: this process's part. Beside it a GPU holds one more at a time.
        """
        if not self.shared:
            return to_device(own, "cpu")
        whole = np.empty(self.parts[-1].stop, own.dtype) if self.group.leads else None
        for rank, place in enumerate(self.parts):
            length = place.stop - place.start
            if length == 0:
                continue
            part = own if rank == self.group.rank else array_module(device_of(own)).empty(length, own.dtype)
            self.group.broadcast(part, rank)
            if whole is not None:
                whole[place] = to_device(part, "cpu")
        return whole
