"""Kernels without a GPU: their C, compiled for the CPU by g++, called for every thread of a launch.

`translate.py` makes C++ of them. `threads.h` has threads, warps and blocks, `cuda.h` what CUDA C has beside C++,
`ptx.h` the instructions that `asm` statements name. CUDIFF_EMULATE=1 runs the tests marked `gpu` so, as on an H200,
with CUDIFF_PORTABLE=1 as on an older GPU, with CUDIFF_COMPUTE=75 as on a T4: `CUDIFF_EMULATE=1 python -m pytest -m gpu
tests/ops`.

What is computed is looked at, not how long it takes. For a time some warps stand still, so that others overtake them.
Bulk stores read shared memory as late as they may, so that a wait for them that is missing shows. All other
asynchronous copies and products are made at once, so that one for them does not. A captured function is called as it
is; several streams are not emulated.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import math
import mmap
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cudiff.backend import cache_folder
from cudiff.cuda import compiler, graph, launch
from tests.emulator.translate import translated
from tests.host import Array, Host, Launch, pretend

HEADERS = [Path(__file__).with_name(name) for name in ("threads.h", "cuda.h", "ptx.h")]
OPTIONS = ("-std=c++20", "-O1", "-march=native", "-ffp-contract=off", "-fno-strict-aliasing", "-fno-stack-protector",
           "-U_FORTIFY_SOURCE", "-w", "-fPIC", "-fvisibility=hidden", "-fno-gnu-unique")
GUARD = 256  # bytes before each array, at least
WORKSPACE = 16 * (1 + 256 * 132)  # bytes of an H200's exchange workspace
POISON, GUARDED = 0xFF, 0xA5  # floats of these bytes are NaN, and -2.9e-16


def _digest(*of: Any) -> str:
    return hashlib.sha256(repr((of, OPTIONS)).encode()).hexdigest()[:24]


@functools.cache
def _headers() -> Path:
    """The folder of the headers, compiled ahead: most of a small kernel's time would go there."""
    texts = {header.name: header.read_text() for header in HEADERS}
    folder = cache_folder("emulator") / _digest(texts)
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=folder.parent))
        for name, text in texts.items():
            (made / name).write_text(text)
        header = made / "ptx.h"
        subprocess.run(["g++", *OPTIONS, "-x", "c++-header", str(header), "-o", f"{header}.gch"], check=True)
        with contextlib.suppress(OSError):  # another process was faster
            made.rename(folder)
    return folder


def compiled(name: str, source: str, constants: dict[str, Any], arch: int) -> ctypes.CDLL:
    """A source of kernels, as `translated` takes it, compiled for the CPU and kept in the user's cache."""
    text = translated(source, constants, arch)
    path = _headers() / f"{name}-{_digest(text)}.so"
    if not path.is_file():
        made = path.with_name(f"{path.stem}-{os.getpid()}.so")
        done = subprocess.run(["g++", *OPTIONS, "-shared", f"-I{path.parent}", "-x", "c++", "-", "-o", str(made)],
                              input=text, capture_output=True, text=True)
        assert done.returncode == 0, f"{name} {constants} does not compile: {done.stderr[:2000]}"
        made.replace(path)
    return ctypes.CDLL(str(path))


@functools.cache
def _library(stem: str, constants: tuple[tuple[str, Any], ...], arch: int) -> ctypes.CDLL:
    return compiled(stem, compiler.source(stem, dict(constants)), dict(constants), arch)


def call(library: ctypes.CDLL, name: str, grid: Sequence[int], block: Sequence[int], args: Sequence[Any],
         shared: int = 0, cooperative: bool = False) -> str | None:
    """Launch a kernel of a compiled file with `args` as `launch.pack` takes them. Returns what went wrong, or None."""
    kinds, values = launch.pack(args)
    formats = launch.formats(kinds)
    packed = struct.pack("".join(formats), *launch.as_float32(values))
    buffer = ctypes.create_string_buffer(len(packed) + 64)
    at, addresses = -(-ctypes.addressof(buffer) // 64) * 64, []  # a tensor map lies at a multiple of 64 bytes
    ctypes.memmove(at, packed, len(packed))
    for format in formats:
        addresses.append(at)
        at += struct.calcsize(format)
    sizes = [(ctypes.c_uint * 3)(*(*of, 1, 1)[:3]) for of in (grid, block)]
    function = library[f"emulate_{name}"]
    function.restype = ctypes.c_char_p
    told = function((ctypes.c_void_p * len(addresses))(*addresses), *sizes, shared, ctypes.c_bool(cooperative))
    return told and told.decode()


def _memory(bytes: int) -> np.ndarray:
    """At least so many bytes, whole pages, before a page that cannot be read."""
    size = -(-bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    area = mmap.mmap(-1, size + mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = np.frombuffer(area, np.uint8)
    status = ctypes.CDLL(None).mprotect(ctypes.c_void_p(whole.ctypes.data + size), ctypes.c_size_t(mmap.PAGESIZE), 0)
    assert status == 0, "the page behind an array stays readable"
    whole[:size] = GUARDED
    return whole[:size]


class Emulated(Array):
    """CuPy's array, with a real address. Of its memory it is no view."""

    @property
    def base(self) -> Any:  # type: ignore[override]
        found = super().base
        return found if isinstance(found, Emulated) else None

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.__array_interface__["data"][0])

    def __setitem__(self, index: Any, value: Any) -> None:
        self.watch("set", self, value)
        np.ndarray.__setitem__(self, index, value)


class Emulator(Host):
    """Stands for the module `cupy`. Its launches are made, and raise AssertionError where they go wrong."""

    def __init__(self, hopper: bool, turing: bool) -> None:
        super().__init__(hopper, turing)
        self.arch = 750 if turing else 900
        self.watch = self.run
        self._guarded: list[tuple[np.ndarray, int, int]] = []

    def empty(self, shape: Any, dtype: Any = np.float64, buffer: Any = None) -> Array:
        """An array of NaN bytes, or one over `buffer`. Before it lie guards, and behind it a page that cannot be
        read: it ends less than 16 bytes before that, which are guards too."""
        if buffer is None:
            bytes = (math.prod(shape) if isinstance(shape, tuple) else int(shape)) * np.dtype(dtype).itemsize
            whole = _memory(bytes + GUARD)
            start = (whole.size - bytes) // 16 * 16
            buffer = whole[start : start + bytes]
            buffer[:] = POISON
            self._guarded.append((whole, start, start + bytes))
        return np.ndarray.__new__(Emulated, shape, dtype, buffer)

    @functools.cached_property
    def _workspace(self) -> Array:
        return self.zeros(WORKSPACE, np.uint8)

    def exchange_workspace(self) -> Array:
        return self._workspace

    def broken(self) -> list[str]:
        """What was written beside the arrays that were made since this was last asked."""
        found = [f"a kernel wrote beside an array of {end - start} bytes" for whole, start, end in self._guarded
                 if (whole[:start] != GUARDED).any() or (whole[end:] != GUARDED).any()]
        self._guarded.clear()
        return found

    def run(self, what: Launch) -> None:
        library = _library(what.stem, tuple(sorted(what.constants.items())), self.arch)
        told = call(library, what.name, what.grid, what.block, what.args, what.shared, what.cooperative)
        assert told is None, f"{what.stem}, {what.name} {what.constants}: {told}"


def begin() -> Emulator:
    """Have all of cudiff, and the tests, take this machine for one with a GPU, to the end of the process."""
    if shutil.which("g++") is None:
        raise RuntimeError("CUDIFF_EMULATE=1 needs g++: install it, or unset the variable")
    patch = pytest.MonkeyPatch()
    turing = os.environ.get("CUDIFF_COMPUTE") == "75"
    made = pretend(patch, not turing and os.environ.get("CUDIFF_PORTABLE") != "1", turing, Emulator)
    patch.setattr(graph.Captured, "__call__", lambda captured, *args: captured.fn(*args))
    sys.modules["cupy"] = made
    return made
