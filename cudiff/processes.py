"""The command line where several processes work on one command: `--gpus N` or `--processes N` starts them, or any
launcher does."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from contextlib import suppress

from rich.console import Console

from cudiff.backend import default_device, get_cupy
from cudiff.distributed import Group, join, joined
from cudiff.distributed.launch import LAUNCHER, place, shares_memory, start
from cudiff.errors import CudiffError
from cudiff.values import real, whole


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --gpus, --processes and --timeout, which `joined_by` reads."""
    group = parser.add_argument_group("several GPUs, or processes on a CPU")
    group.add_argument("--gpus", type=int, metavar="N",
                       help="GPUs of this machine; of several machines: a process for each by torchrun or srun")
    group.add_argument("--processes", type=int, metavar="N",
                       help="processes on this machine's CPU, each with its part of the cores and of a batch")
    group.add_argument("--timeout", type=float, metavar="X", default=10.0,
                       help="minutes for a step, or for a batch of samples, after which all end (default 10)")


class Ended(Exception):
    """Processes that were started for the command have done it. code: what to leave with."""

    def __init__(self, code: int):
        super().__init__(code)
        self.code = code


def run(options: argparse.Namespace) -> None:
    """Run the command that `options` names.

    Where it fails before it has met others over MPI, as over a file that this machine alone lacks, it meets them now,
    so that `end_all` ends them: they would wait for it for ever.
    """
    try:
        options.run(options)
    except Exception:
        if "gpus" in options and "mpi4py.MPI" not in sys.modules:
            with suppress(CudiffError):
                own = place()
                cpu = "cpu" in (getattr(options, "device", None), default_device())
                if own.size > 1 and cpu and not shares_memory(own):
                    join("cpu")
        raise


def joined_by(options: argparse.Namespace, device: str, console: Console) -> Group:
    """The processes that work on the command, once all have met; `console` is silent in all but one.

    Raises Ended where this process only started those for `--gpus` or `--processes`, and CudiffError where that cannot
    be.
    """
    real("timeout", options.timeout, above=0)
    if _is_launcher(options):
        _start(options, device)
    group = join(device, 60 * options.timeout)
    console.quiet = not group.leads
    return group


def on_cpu(device: str) -> bool:
    """Whether `--device` is or becomes the CPU."""
    return (default_device() if device == "auto" else device) == "cpu"


def needed(options: argparse.Namespace, parts: tuple[str, ...]) -> tuple[str, ...]:
    """The parts of a checkpoint that this process needs: none where it only starts others."""
    return () if _is_launcher(options) and max(options.gpus or 0, options.processes or 0) > 1 else parts


def _is_launcher(options: argparse.Namespace) -> bool:
    return (options.gpus, options.processes) != (None, None) and LAUNCHER not in os.environ


def _start(options: argparse.Namespace, device: str) -> None:
    """Run the command as a process for each of `--gpus` GPUs, or as `--processes` of a CPU, if they are several."""
    if options.gpus is not None and options.processes is not None:
        raise CudiffError("--gpus is for GPUs and --processes for a CPU: give one of them")
    name = "gpus" if options.gpus is not None else "processes"
    count = whole(name, getattr(options, name))
    if place().size > 1:
        raise CudiffError(f"--{name} starts processes, and {place().size} were started already: leave it out")
    if name == "gpus" and device == "cpu":
        raise CudiffError(f"--gpus is for GPUs: --processes {count} are so many on this machine's CPU")
    if name == "gpus" and count > (there := get_cupy().cuda.runtime.getDeviceCount()):
        raise CudiffError(f"--gpus {count}, and {there} can be seen here: cudiff info says which")
    if count == 1:
        return
    if name == "processes" and not on_cpu(device):
        raise CudiffError("--processes share a CPU: give --device cpu with it, or --gpus for GPUs")
    raise Ended(start(count, [sys.executable, "-m", "cudiff", *options.arguments]))


def end_all(code: int, text: str = "", debug: bool = False) -> None:
    """Where other processes work on the command, end them and this one; the text is told once, with `debug` the
    traceback in its place. Else do nothing."""
    if joined().size > 1:
        joined().fail(code, traceback.format_exc().rstrip() if debug else text)
