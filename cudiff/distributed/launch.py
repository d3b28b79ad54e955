"""Which process of how many this is, as its launcher says in the environment; and a launcher for one machine."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cudiff.errors import CudiffError
from cudiff.signals import EXIT, heeded

LAUNCHER = "CUDIFF_LAUNCHER"
"""A variable that `start` gives its processes: its own process number, and with that the name of the run."""

LOOPBACK = "127.0.0.1"
PORT = 29500
GRACE = 3.0
"""Seconds that processes have to end by themselves after the first one that failed."""


class Place(NamedTuple):
    """A process among those of a run.

    rank: 0 to size - 1. local_rank, local_size: the same among the processes of this machine. address, port: where
    process 0 may be met. job: what tells this run from others that meet there.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    address: str = LOOPBACK
    port: int = PORT
    job: str = ""


# rank, size, local rank and local size, by launcher; the first that has set rank and size counts.
_VARIABLES = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                 "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "SLURM": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
}
_JOBS = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE", LAUNCHER)
"""Variables that together tell a run from others."""


def place(environment: Mapping[str, str] | None = None) -> Place:
    """This process's place, by the variables of torchrun, Open MPI, MPICH or SLURM; `Place()` where none has set its.

    Raises CudiffError for values that are no places, and where several machines have no MASTER_ADDR.
    """
    given = os.environ if environment is None else environment
    for names in _VARIABLES.values():
        if names[0] in given and names[1] in given:
            return _placed(given, *names)
    return Place()


def shares_memory(place: Place) -> bool:
    """Whether the processes, on CPUs, can share memory: all are of this machine, and torchrun or `start` began them."""
    return place.local_size == place.size and all(name in os.environ for name in _VARIABLES["torchrun"][:2])


def _placed(given: Mapping[str, str], *names: str) -> Place:
    rank, size = _number(given, names[0]), _number(given, names[1])
    local_size = _tasks_here(given) if not names[3] else _number(given, names[3], size)
    local_rank = _number(given, names[2], rank if local_size == size else -1)
    if not (0 <= rank < size and 0 <= local_rank < local_size <= size):
        shown = " ".join(f"{name}={given[name]}" for name in names if name in given)
        raise CudiffError(f"the launcher's variables do not fit together: {shown}")
    address = LOOPBACK if local_size == size else given.get("MASTER_ADDR") or _first_host(given)
    if not address:
        raise CudiffError(f"{size} processes on several machines: set MASTER_ADDR to the name of process 0's machine")
    job = ".".join(given[name] for name in _JOBS if name in given)
    port = _number(given, "MASTER_PORT", PORT + int(re.sub(r"\D", "", job) or 0) % 10000)
    if not 0 <= port < 65535:
        raise CudiffError(f"MASTER_PORT={port} is no port before another one: set a number from 1024 to 65000")
    return Place(rank, size, local_rank, local_size, address, port, job)


def _number(given: Mapping[str, str], name: str, otherwise: int | None = None) -> int:
    try:
        return int(given[name]) if name in given or otherwise is None else otherwise
    except ValueError:
        raise CudiffError(f"{name}={given[name]} is no number: let the launcher set it, or take it out") from None


def _tasks_here(given: Mapping[str, str]) -> int:
    """SLURM's tasks on this node: `2(x3),1` are 2 on each of three and 1 on a fourth."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", given.get("SLURM_STEP_TASKS_PER_NODE", "")):
        counts += [int(count)] * int(times or 1)
    node = _number(given, "SLURM_NODEID", 0)
    return counts[node] if 0 <= node < len(counts) else 0


def _first_host(given: Mapping[str, str]) -> str:
    """Of SLURM's `gpu[07-09,12],cpu1` gpu07: process 0 runs there."""
    found = re.match(r"([^\[,]+)(?:\[(\d+))?", given.get("SLURM_STEP_NODELIST", ""))
    return "" if found is None else found[1] + (found[2] or "")


def start(size: int, command: Sequence[str]) -> int:
    """Run `command` as `size` processes of this machine, told by torchrun's variables which each is, and wait for all.

    They inherit the environment. SIGINT, SIGTERM and SIGHUP are passed on to each; those that this process was started
    to ignore, as SIGHUP under nohup, all ignore. Where one fails the others are ended. Returns the exit code: 0, or
    that of the first which failed, 128 + n where signal n ended it.
    """
    own = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": LOOPBACK, "MASTER_PORT": _free_port(),
           LAUNCHER: os.getpid()}
    processes: list[subprocess.Popen] = []

    def forward(number: int, frame: object) -> None:
        for process in processes:
            process.send_signal(number)  # does nothing to one that has ended

    before = {number: signal.signal(number, forward) for number in heeded()}
    try:
        for rank in range(size):
            variables = {name: str(value) for name, value in (own | {"RANK": rank, "LOCAL_RANK": rank}).items()}
            # A session of its own: a terminal's Ctrl-C reaches a process once, from here.
            processes.append(subprocess.Popen(command, env=os.environ | variables, start_new_session=True))
        return _wait(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(processes: list[subprocess.Popen]) -> int:
    """The exit code of the first that failed, 0 where none did; returns when all have ended or should have."""
    failed, until = 0, float("inf")
    while None in (codes := [process.poll() for process in processes]) and time.monotonic() < until:
        if not failed and any(codes):
            failed = next(filter(None, codes))
            until = time.monotonic() + GRACE * (failed > 0)
        time.sleep(0.05)
    failed = failed or next(filter(None, codes), 0)
    if failed >= 0:
        return failed
    rank = codes.index(failed)
    cause = ""
    if failed == -signal.SIGKILL:
        cause = ", as the system does where memory runs out: a smaller --batch-size takes less"
    print(f"cudiff: process {rank} of {len(processes)} was ended by {signal.Signals(-failed).name}{cause}",
          file=sys.stderr)
    return EXIT - failed


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return min(probe.getsockname()[1], 65000)
