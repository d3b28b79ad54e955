"""How much of the host's memory is left, asked before something large is made: the system kills who takes too much."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

from cudiff.errors import CudiffError

GROUPS = Path("/sys/fs/cgroup")
# Of a control group: its limit, what it uses, and which part of that is cached files, which make room.
_FILES = {
    "": (GROUPS, "memory.max", "memory.current", "inactive_file"),
    "memory": (GROUPS / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def memory_available() -> int:
    """Bytes of host memory that can still be taken; sys.maxsize where the system does not tell.

    The least of what Linux calls available and of what the process's control groups (versions 1 and 2) leave.
    """
    free = [sys.maxsize]
    with contextlib.suppress(OSError):
        facts = (line.split() for line in _lines("/proc/meminfo"))
        free += [1024 * int(words[1]) for words in facts if words[0] == "MemAvailable:"]
        for line in _lines("/proc/self/cgroup"):
            _, controllers, path = line.split(":", 2)
            if controllers in _FILES:
                free.append(_left_in(path.strip("/"), *_FILES[controllers]))
    return max(min(free), 0)


def check_memory(what: str, size: int, advice: str) -> None:
    """Raise CudiffError where `what` needs more bytes than the machine has left."""
    free = memory_available()
    if size > free:
        raise CudiffError(
            f"{what} would take {size / 2**30:,.1f} GiB of memory, and {free / 2**30:,.1f} GiB are free: {advice}"
        )


def resident() -> int | None:
    """Bytes of memory that the process has now; None where the system does not tell."""
    return _status("VmRSS:")


def peak_of(run: Callable[[], object]) -> int | None:
    """Call `run`; returns the most bytes of memory that the process had meanwhile, None where the system does not
    tell."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew (proc(5))
        run()
        return _status("VmHWM:")
    return None


def _status(name: str) -> int | None:
    with contextlib.suppress(OSError):
        for line in _lines("/proc/self/status"):
            if line.startswith(name):
                return 1024 * int(line.split()[1])
    return None


def _left_in(path: str, root: Path, limit: str, used: str, cached: str) -> int:
    for folder in (root / path, root):  # in a container the group's own folder is the root
        with contextlib.suppress(OSError, ValueError, KeyError):  # "max" is no limit
            most = int((folder / limit).read_text())
            statistics = dict(line.split() for line in _lines(folder / "memory.stat"))
            return most - int((folder / used).read_text()) + int(statistics[cached])
    return sys.maxsize


def _lines(path: str | os.PathLike) -> list[str]:
    return Path(path).read_text().splitlines()
