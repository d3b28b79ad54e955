"""Processes that compile all they need, and the seconds until each of their parts is done."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

CACHES = ("CUDIFF_CACHE_DIR", "CUPY_CACHE_DIR", "CUDA_CACHE_PATH", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
MARK = "done: "


def mark(part: str) -> None:
    """Tell the process that clocks this one that a part is done."""
    print(f"{MARK}{part}", flush=True)


def clocked(arguments: Sequence[str], parts: Sequence[str], folder: str | Path) -> dict[str, float]:
    """Seconds of each of the `parts` that a Python process has, by this process's clock, which starts before it.

    Its compilers keep their results in `folder`; it imports this cudiff. What else it prints goes to stdout.
    Raises RuntimeError where it fails, or marks other parts.
    """
    caches = {name: str(Path(folder) / name) for name in CACHES}
    environment = os.environ | caches | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    found, last = {}, time.perf_counter()
    with subprocess.Popen([sys.executable, *arguments], env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            now = time.perf_counter()
            if line.startswith(MARK):
                found[line.removeprefix(MARK).strip()], last = now - last, now
            else:
                print(line, end="", flush=True)
    if process.returncode or tuple(found) != tuple(parts):
        raise RuntimeError(f"a fresh process failed after {', '.join(found) or 'nothing'}, see above")
    return found
