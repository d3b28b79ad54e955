"""Sums and copies of arrays between processes on CPUs, by MPI (mpi4py)."""

from __future__ import annotations

import secrets

import numpy as np

from cudiff.backend import Array
from cudiff.distributed.engine import Engine
from cudiff.distributed.launch import Place
from cudiff.errors import CudiffError


class MPI(Engine):
    """The processes that one mpiexec or srun has started.

    Raises CudiffError where mpi4py is not installed or knows of others than `place` does.
    """

    def __init__(self, place: Place):
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:  # RuntimeError: no MPI library
            raise CudiffError(f"processes on the CPU talk by MPI, which is not to be had here ({error}): pip install "
                              "'cudiff[distributed]'") from None
        self._world = MPI.COMM_WORLD
        if (self._world.rank, self._world.size) != (place.rank, place.size):
            raise CudiffError(
                f"process {place.rank} of {place.size} is number {self._world.rank} of {self._world.size} to MPI: on "
                "the CPU start all by mpiexec -n 2 cudiff train ..., with the mpiexec of mpi4py's own MPI"
            )

    def meeting(self, place: Place, port: int) -> Place:
        """`place` with the port at which process 0 listens and a name for the job, which all have from process 0."""
        words = np.array([port - 1, secrets.randbits(62)], np.int64)
        self.broadcast(words, 0)
        return place._replace(port=int(words[0]), job=str(words[1]))

    def all_reduce(self, array: Array) -> None:
        """Sum over the processes, in place, in the order of their numbers: ((a0 + a1) + a2) + ...

        Each process sums one part of the array and gives it to all.
        """
        size = self._world.size
        parts = np.zeros((size, -(-array.size // size)), array.dtype)
        parts.reshape(-1)[: array.size] = array.reshape(-1)
        received = np.empty_like(parts)
        self._world.Alltoall(parts, received)
        total = received[0]
        for part in received[1:]:
            total += part
        self._world.Allgather(total, parts)
        array.reshape(-1)[:] = parts.reshape(-1)[: array.size]

    def broadcast(self, array: Array, root: int) -> None:
        """Copy process `root`'s array, C-contiguous, to all."""
        self._world.Bcast(array.view(np.uint8) if array.ndim else array.reshape(1).view(np.uint8), root)
