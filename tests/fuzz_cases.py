"""Readers that break the rule of `tests.fuzz` at their fifth input, and whole pictures that are large."""

import ctypes
import io
import os
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from tests import fuzz_formats
from tests.fuzz_formats import Format

SIDE = 4096


def _at_fifth(break_rule: Callable[[], object]) -> Format:
    def reader(path: Path) -> None:
        if path.read_bytes() == b"fifth":
            break_rule()

    # The first three seeds are also read before any input counts.
    return Format(lambda: [b"first", b"second", b"third", b"fourth", b"fifth", b"sixth"], "a", reader)


def _work() -> None:
    start = time.process_time()
    while time.process_time() - start < 1.2:
        pass


def _large(kind: str) -> Format:
    def seeds() -> list[bytes]:
        stream = io.BytesIO()
        Image.new("P" if kind == "gif" else "RGB", (SIDE, SIDE), 9).save(stream, kind)
        return [stream.getvalue()]

    return fuzz_formats.FORMATS[kind]._replace(seeds=seeds)


FORMATS = {
    "sleeps": _at_fifth(partial(time.sleep, 60)),
    "works": _at_fifth(_work),
    "allocates": _at_fifth(partial(np.ones, 2**24)),
    "asks for all": _at_fifth(partial(np.zeros, 2**40)),
    "starts": _at_fifth(partial(subprocess.run, ["true"], check=True)),
    "starts unseen": _at_fifth(partial(ctypes.CDLL(None).system, b"true")),
    "dies": _at_fifth(lambda: os.kill(os.getpid(), signal.SIGKILL)),
    **{f"large {kind}": _large(kind) for kind in ("bmp", "gif", "jpeg", "png", "ppm", "tiff", "webp")},
}
