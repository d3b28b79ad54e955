"""Several processes that train one model, each on a GPU of its own or on a CPU: which they are and how they talk."""

from __future__ import annotations

import gc
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from signal import SIGINT
from typing import Any, NoReturn

from cudiff.backend import Array, array_module, default_device, device_of
from cudiff.errors import CudiffError
from cudiff.signals import EXIT
from cudiff.threads import share

__all__ = ["ALONE", "Group", "join", "joined"]


class Group:
    """The processes of a run; `ALONE` is that of one.

    Attributes: rank (this process's number), size, leads (whether this is process 0, which writes and speaks for all),
    one_machine (whether all are on this one).
    Every process calls the methods in the same order, but for `peers`, `beat` and what ends it.
    """

    def __init__(self, rank: int = 0, size: int = 1, wire: Any = None, engine: Any = None, one_machine: bool = True):
        self.rank, self.size, self.leads, self.one_machine = rank, size, rank == 0, one_machine
        self._wire, self._engine = wire, engine
        self._at_close: list[Callable[[], None]] = []

    def all_reduce(self, array: Array) -> None:
        """Sum a float32 array, C-contiguous, over the processes, in place.

        On the CPU in the order of their numbers; on GPUs in NCCL's, the same each time. All have the same bits. Raises
        TypeError for an array that is not contiguous.
        """
        _require_contiguous("all_reduce", array)
        if self.size > 1:
            self._engine.all_reduce(array)

    def register(self, gradient: Array, weights: Array, parts: Sequence[slice]) -> Any:
        """Say that sums and updates are of these buffers, of which each process updates its part.

        GPUs of one machine may then write to each other's memory: `start_sums` takes the result. All processes call it.
        """
        return self._engine.register(gradient, weights, parts) if self.size > 1 else None

    def start_sums(self, arrays: list[Array], number: int, registered: Any) -> None:
        """Begin to `all_reduce` arrays beside what follows; on a GPU on a stream of its own. number: of such calls in
        this step so far. registered: of a gradient that is, what `register` gave; `peers` may be left to add."""
        self._engine.start_sums(arrays, number, registered)

    def finish_sums(self) -> None:
        """Have what follows on the current stream wait for the sums that were begun."""
        self._engine.finish_sums()

    def peers(self, array: Array) -> list[tuple[int, int]]:
        """For a slice of this process's part of registered weights, of each other process the address where these lie
        in its memory, and where its gradients of them lie in this one's; empty where all is summed.

        From `finish_sums` to `finish_update` the sum is this process's gradient plus these. After a `gather_sums` no
        process reads its weights any more, and an update writes to these too. Raises CudiffError for an array of others
        than the gradient that was summed.
        """
        return self._engine.peers(array) if self.size > 1 else []

    def gather_sums(self, array: Array) -> Array:
        """As `gather`, of one array in a step, between `finish_sums` and its update."""
        gathered = self._engine.gather_sums(array)
        return self.gather(array) if gathered is None else gathered

    def gather(self, array: Array) -> Array:
        """Every process's array, float32, by rank: (size, ...). A captured step holds it."""
        gathered = array_module(device_of(array)).zeros((self.size, *array.shape), array.dtype)
        gathered[self.rank] = array
        self.all_reduce(gathered)
        return gathered

    def broadcast(self, array: Array, root: int = 0) -> None:
        """Copy process `root`'s array, C-contiguous, to all; it may lie on the host. Raises TypeError for another."""
        _require_contiguous("broadcast", array)
        if self.size > 1:
            self._engine.broadcast(array, root)

    def all_gather(self, parts: list[Array]) -> None:
        """Copy parts[rank], C-contiguous, of each process to all, in place. A captured step holds it."""
        if self.size > 1:
            self._engine.all_gather(parts)

    def finish_update(self, parts: list[Array]) -> None:
        """`all_gather` weights that each process has updated, as `peers` says."""
        if self.size > 1:
            self._engine.finish_update(parts)

    def exchange(self, value: Any) -> list[Any]:
        """What every process gave, anything that JSON holds, by rank: of the hosts alone, GPUs go on meanwhile."""
        return [value] if self._wire is None else self._wire.exchange(value)

    def check_same(self, what: str, value: Any) -> None:
        """Raise CudiffError where the processes have different values, as on machines with different files."""
        values = self.exchange(value)
        for rank, other in enumerate(values):
            if other != values[0]:
                raise CudiffError(f"process {rank} of {self.size} has another {what} than process 0: give all the same")

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within the block a process that makes no `beat` within the timeout is stuck, and all end."""
        self._arm(True)
        try:
            yield
        finally:
            self._arm(False)

    def _arm(self, armed: bool) -> None:
        if self._wire is not None:
            self._wire.beat()
            self._wire.armed = armed

    def beat(self) -> None:
        """Say that this process goes on."""
        if self._wire is not None:
            self._wire.beat()

    def before_close(self, act: Callable[[], None]) -> None:
        """Have `close` call something first, as what drops a graph that holds operations of the group."""
        if self._wire is not None:  # one process parts from nobody, and must not hold what it has thrown away
            self._at_close.append(act)

    def __reduce__(self) -> str:
        """A deep copy is the group itself, and `ALONE` can be pickled."""
        return "ALONE"

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """`close`, or after an error its traceback and the end of all: the others would wait for ever.

        `sys.exit(code)` ends all with the code, and `sys.exit()` is no error.
        """
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.close()
        elif isinstance(error, SystemExit) and self._wire is not None:
            code, text = (error.code, "") if isinstance(error.code, int) else (1, str(error.code))
            self.fail(code, text)
        elif self._wire is not None:
            code = EXIT + SIGINT if isinstance(error, KeyboardInterrupt) else 1
            self.fail(code, "".join(traceback.format_exception(kind, error, trace)).rstrip())

    def close(self) -> None:
        """Part from the others, once all have come here."""
        global _joined
        if self._wire is None:
            return
        for act in self._at_close:
            act()
        gc.collect()
        self._engine.close()
        self._wire.close()
        share(1)
        _joined = ALONE

    def fail(self, code: int, text: str) -> NoReturn:
        """End all processes with an exit code; `text` is told, once."""
        self._wire.fail(code, text)
        raise AssertionError("unreachable")


ALONE = Group()
_joined = ALONE


def _require_contiguous(name: str, array: Array) -> None:
    if not array.flags.c_contiguous:  # a copy would be summed, and the array left as it is
        raise TypeError(f"{name} takes a C-contiguous array: give it a copy, then copy the result back")


def joined() -> Group:
    """The group that this process has joined, `ALONE` without."""
    return _joined


def join(device: str = "auto", timeout: float = 600.0) -> Group:
    """Meet the other processes that the launcher has started; `ALONE` where there are none.

        with cudiff.distributed.join() as group:
            Trainer(config, dataset, folder, group=group).run()

    Call it before anything is done on a GPU: of those that are visible a process takes that of its local number.
    timeout: seconds that one may be late here, or take for a step or a batch, before all are ended.
    On a CPU processes of one machine share memory. Those that mpiexec or srun has started, there and on several
    machines, talk by MPI.
    Raises CudiffError where they cannot meet, where NCCL or MPI's mpi4py is needed and not installed, and where a GPU
    is missing.
    """
    from cudiff.distributed import wire
    from cudiff.distributed.launch import place, shares_memory

    global _joined
    own = place()
    if own.size == 1 or _joined.size > 1:
        return _joined
    if device != "cpu":
        _take_gpu(own.local_rank, own.local_size)
    device = default_device() if device == "auto" else device
    engine: Any = None
    if device == "cpu" and not shares_memory(own):
        from cudiff.distributed.mpi import MPI

        engine = MPI(own)
    server = wire.listen(own, None if engine is None else 0) if own.rank == 0 else None
    if engine is not None:
        own = engine.meeting(own, server.getsockname()[1] if server else 0)
    connections = wire.accept(server, own, timeout) if server else wire.call(own, timeout)
    line = wire.Wire(own, connections, timeout)
    one_machine = own.local_size == own.size
    _joined = Group(own.rank, own.size, line, one_machine=one_machine)  # from here on a failure is everybody's
    if engine is None and device == "cpu":
        from cudiff.distributed.shared import SharedMemory

        engine = SharedMemory(own.rank, own.size, line.exchange, line.litter)
        share(own.local_size)
    elif engine is None:
        from cudiff.cuda.device import bus_address
        from cudiff.cuda.nccl import Nccl

        if one_machine:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # NCCL would meet on a network
        _check_apart(line.exchange([os.uname().nodename, bus_address()]))
        engine = Nccl(own.rank, own.size, line.exchange, one_machine)
    _joined._engine = engine
    return _joined


def _take_gpu(number: int, processes: int) -> None:
    """Let this process see one GPU alone. A launcher that has shown it one has chosen already."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(gpu) for gpu in range(processes)] if shown is None else shown.split(",")
    if len(names) == 1:
        return
    if number >= len(names):
        raise CudiffError(f"{processes} processes and {len(names)} GPUs here (CUDA_VISIBLE_DEVICES={shown}): "
                          "start as many as there are GPUs")
    os.environ["CUDA_VISIBLE_DEVICES"] = names[number]


def _check_apart(gpus: list[Any]) -> None:
    for rank, gpu in enumerate(gpus):
        if gpu in gpus[:rank]:
            raise CudiffError(f"processes {gpus.index(gpu)} and {rank} have one GPU: start as many processes on a "
                              "machine as it has GPUs, and let CUDA_VISIBLE_DEVICES name them all")
