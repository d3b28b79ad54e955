"""What the ways to sum and copy arrays between processes on CPUs have in common."""

from __future__ import annotations

from collections.abc import Sequence

from cudiff.backend import Array


class Engine:
    """A subclass has `all_reduce(array)` and `broadcast(array, root)`, as `Group` says."""

    def all_reduce(self, array: Array) -> None:
        raise NotImplementedError

    def broadcast(self, array: Array, root: int) -> None:
        raise NotImplementedError

    def register(self, gradient: Array, weights: Array, parts: Sequence[slice]) -> None:
        """None: they are summed and copied as all arrays are."""

    def peers(self, array: Array) -> list[tuple[int, int]]:
        """None: sums are whole, and `all_gather` copies."""
        return []

    def gather_sums(self, array: Array) -> Array | None:
        """None: as all arrays are."""
        return None

    def start_sums(self, arrays: list[Array], number: int, registered: None) -> None:
        """Sum them, one after the other, at once."""
        for array in arrays:
            self.all_reduce(array)

    def finish_sums(self) -> None:
        """Nothing: all are summed."""

    def all_gather(self, parts: list[Array]) -> None:
        """Copy each process's part to all, one after the other."""
        for rank, part in enumerate(parts):
            if part.size:
                self.broadcast(part, rank)

    def finish_update(self, parts: list[Array]) -> None:
        """`all_gather`."""
        self.all_gather(parts)

    def close(self) -> None:
        """Nothing: shared memory goes with its object, MPI as the interpreter ends."""
