"""The command line where several processes work on one command: `--gpus N` starts them, or any launcher does."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from contextlib import suppress

from rich.console import Console

from cudiff.backend import default_device, get_cupy
from cudiff.distributed import Group, join, joined
from cudiff.distributed.launch import LAUNCHER, place, start
from cudiff.errors import CudiffError
from cudiff.values import real, whole


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --gpus and --timeout, which `joined_by` reads."""
    group = parser.add_argument_group("several GPUs")
    group.add_argument("--gpus", type=int, metavar="N",
                       help="GPUs of this machine; of several machines: a process for each by torchrun or srun")
    group.add_argument("--timeout", type=float, metavar="X", default=10.0,
                       help="minutes for a step, or for a batch of samples, after which all end (default 10)")


class Ended(Exception):
    """Processes that were started for the command have done it. code: what to leave with."""

    def __init__(self, code: int):
        super().__init__(code)
        self.code = code


def run(options: argparse.Namespace) -> None:
    """Run the command that `options` names.

    Where it fails before it has met other processes on CPUs, as over a file that this machine alone lacks, it meets
    them now, so that `end_all` ends them: they would wait for it in MPI for ever.
    """
    try:
        options.run(options)
    except Exception:
        if "gpus" in options and "mpi4py.MPI" not in sys.modules:
            with suppress(CudiffError):
                if place().size > 1 and "cpu" in (getattr(options, "device", None), default_device()):
                    join("cpu")
        raise


def joined_by(options: argparse.Namespace, device: str, console: Console) -> Group:
    """The processes that work on the command, once all have met; `console` is silent in all but one.

    Raises Ended where this process only started those for `--gpus`, and CudiffError where that cannot be.
    """
    real("timeout", options.timeout, above=0)
    if _is_launcher(options):
        _start(options, device)
    group = join(device, 60 * options.timeout)
    console.quiet = not group.leads
    return group


def needed(options: argparse.Namespace, parts: tuple[str, ...]) -> tuple[str, ...]:
    """The parts of a checkpoint that this process needs: none where it only starts others."""
    return () if _is_launcher(options) and options.gpus > 1 else parts


def _is_launcher(options: argparse.Namespace) -> bool:
    return options.gpus is not None and LAUNCHER not in os.environ


def _start(options: argparse.Namespace, device: str) -> None:
    """Run the command as a process for each of `--gpus` GPUs, if they are several."""
    count = whole("gpus", options.gpus)
    if place().size > 1:
        raise CudiffError(f"--gpus starts processes, and {place().size} were started already: leave it out")
    if count == 1:
        return
    if device == "cpu":
        raise CudiffError(f"--gpus is for GPUs: mpiexec -n {count} cudiff {options.command} ... takes {count} cores")
    there = get_cupy().cuda.runtime.getDeviceCount()
    if count > there:
        raise CudiffError(f"--gpus {count}, and {there} can be seen here: cudiff info says which")
    raise Ended(start(count, [sys.executable, "-m", "cudiff", *options.arguments]))


def end_all(code: int, text: str = "", debug: bool = False) -> None:
    """Where other processes work on the command, end them and this one; the text is told once, with `debug` the
    traceback in its place. Else do nothing."""
    if joined().size > 1:
        joined().fail(code, traceback.format_exc().rstrip() if debug else text)
