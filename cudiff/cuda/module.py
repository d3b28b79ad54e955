"""Find, compile, cache and launch the kernels in `kernels/`.

A kernel is named by its file's stem, its function and the constants it is compiled with (`-D` macros). NVRTC turns a
file into a cubin once; cubins are kept in a per-user cache under a digest of everything that went in.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from cudiff.backend import Array, bfloat16, cache_folder, float16, float32, get_cupy, int32, int64
from cudiff.cuda.driver import Kernel, multiprocessors
from cudiff.cuda.signature import Signature, Source
from cudiff.errors import CudiffError
from cudiff.tensor import Kept, Vacant

CTYPES = {
    float32: "float", bfloat16: "bf16", float16: "half", int32: "int", int64: "i64", np.dtype(np.uint8): "u8",
    np.dtype(np.bool_): "u8",
}
_TYPES = frozenset(CTYPES.values())
_OPTIONS = ("-std=c++17",)
_compiling = threading.Lock()


@functools.cache
def kernel_folder() -> Path:
    """Where the `.cu` files are: the installed package `cudiff.kernels`, or `kernels/` beside `cudiff/`."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "kernels", package.parent / "kernels"):
        if (folder / "common.cuh").is_file():
            return folder
    raise CudiffError(f"the CUDA kernels are missing beside {package}: reinstall cudiff")


def _source(stem: str, constants: dict[str, Any]) -> str:
    """A `.cu` file after `common.cuh`, with its `#include`s of our own headers expanded, each once.

    Constants that are types are typedefs behind `common.cuh`: as macros they would also replace the T of every
    `template <typename T>`, NVRTC's own included.
    """
    common, rest = _expanded(stem)
    types = [f"typedef {value} {name};\n" for name, value in sorted(constants.items()) if value in _TYPES]
    return common + "".join(types) + rest


@functools.cache
def _expanded(stem: str) -> tuple[str, str]:
    seen: set[str] = {"common.cuh"}

    def expand(name: str) -> str:
        lines = []
        for line in (kernel_folder() / name).read_text().splitlines():
            if line.startswith('#include "'):
                header = line.split('"')[1]
                if header not in seen:
                    seen.add(header)
                    lines.append(expand(header))
            elif not line.startswith("#pragma once"):
                lines.append(line)
        return "\n".join(lines) + "\n"

    return expand("common.cuh"), expand(f"{stem}.cu")


@functools.cache
def _declarations(stem: str) -> Source:
    return Source(stem, "".join(_expanded(stem)))


def kernels(stem: str) -> list[str]:
    """The names of the kernels of `kernels/<stem>.cu`."""
    return _declarations(stem).kernels


def signature(stem: str, name: str, constants: dict[str, Any]) -> Signature:
    """What a kernel takes that is compiled with `constants`, dtypes by their C names."""
    return _declarations(stem).signature(name, constants)


@functools.cache
def architecture() -> str:
    """NVRTC's name for the current device's architecture; Hopper's own instructions need the `a`."""
    capability = get_cupy().cuda.Device().compute_capability
    return f"sm_{capability}a" if capability == "90" else f"sm_{capability}"


@functools.cache
def gpu_name() -> str:
    """The current device's, such as "NVIDIA H200"."""
    runtime = get_cupy().cuda.runtime
    return runtime.getDeviceProperties(runtime.getDevice())["name"].decode()


_CUDA_OF_DRIVER_530 = 12010


def hopper() -> bool:
    """Whether the kernels of files named _sm90 run on the current device; a driver from 530 on gives some of them their
    more than 4 KiB of arguments.

    CUDIFF_PORTABLE=1 in the environment switches them off: the kernels for any GPU run instead.
    """
    return os.environ.get("CUDIFF_PORTABLE") != "1" and architecture() == "sm_90a" and _driver() >= _CUDA_OF_DRIVER_530


@functools.cache
def _driver() -> int:
    """The newest CUDA that the driver supports, as 1000 · major + 10 · minor."""
    return get_cupy().cuda.runtime.driverGetVersion()


def compile_source(stem: str, arch: str, constants: dict[str, Any]) -> tuple[bytes, str]:
    """Compile one file by NVRTC, which needs no GPU. Returns the cubin and the compiler's log.

    Raises CudiffError with the log's first lines where the source is wrong.
    """
    from cupy_backends.cuda.libs import nvrtc

    options = [*_OPTIONS, f"-arch={arch}", "--ptxas-options=-v"]
    options += [f"-D{name}={value}" for name, value in sorted(constants.items()) if value not in _TYPES]
    program = nvrtc.createProgram(_source(stem, constants), f"{stem}.cu", (), ())
    try:
        nvrtc.compileProgram(program, tuple(options))
        return nvrtc.getCUBIN(program), nvrtc.getProgramLog(program)
    except nvrtc.NVRTCError as error:
        log = " ".join(nvrtc.getProgramLog(program).split())
        raise CudiffError(f"kernels/{stem}.cu does not compile for {arch}: {log[:2000] or error}") from None
    finally:
        nvrtc.destroyProgram(program)


@functools.cache
def cubin_folder() -> Path:
    """Where cubins are kept: the user's cache, or where that cannot be written, a folder of this process alone."""
    folder = cache_folder("kernels")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="cudiff-kernels-"))


@functools.cache
def _nvrtc_version() -> tuple[int, int]:
    from cupy_backends.cuda.libs import nvrtc

    return nvrtc.getVersion()


def _cubin(stem: str, arch: str, constants: dict[str, Any]) -> Path:
    """The cached cubin's path, compiled now if it is not there. Safe with other processes doing the same."""
    key = repr((_source(stem, constants), arch, sorted(constants.items()), _OPTIONS, _nvrtc_version()))
    path = cubin_folder() / f"{stem}-{hashlib.sha256(key.encode()).hexdigest()[:24]}.cubin"
    if not path.is_file():
        cubin, _ = compile_source(stem, arch, constants)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        with os.fdopen(handle, "wb") as file:
            file.write(cubin)
        os.replace(temporary, path)
    return path


_modules: dict[tuple, Any] = {}


def _module(stem: str, constants: dict[str, Any]) -> Any:
    cupy = get_cupy()
    key = (stem, cupy.cuda.runtime.getDevice(), *sorted(constants.items()))
    module = _modules.get(key)
    if module is None:
        path = _cubin(stem, architecture(), constants)
        with _compiling:
            module = _modules.setdefault(key, cupy.RawModule(path=str(path)))
    return module


class _Ahead(threading.local):
    """Where this thread sends what it finds not compiled; None where it compiles itself. See `compiling_ahead`."""

    compile: Callable[[str, dict[str, Any]], None] | None = None


_ahead = _Ahead()


@contextlib.contextmanager
def compiling_ahead() -> Iterator[None]:
    """Inside the block, kernels not loaded yet are compiled side by side, not launched; its end waits for them."""
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        begun: dict[tuple, Future] = {}

        def compile(stem: str, constants: dict[str, Any]) -> None:
            variant = (stem, *constants.items())
            if variant not in begun:
                begun[variant] = pool.submit(_cubin, stem, architecture(), constants)

        _ahead.compile = compile
        try:
            yield
        finally:
            _ahead.compile = None


def compiles_ahead() -> bool:
    """Whether this is inside such a block."""
    return _ahead.compile is not None


def c_names(stem: str, constants: dict[str, Any]) -> dict[str, Any]:
    """The constants with dtypes by their C names. Raises TypeError for a dtype that has none."""
    for value in constants.values():
        if isinstance(value, np.dtype) and value not in CTYPES:
            raise TypeError(f"kernels/{stem}.cu takes {', '.join(map(str, CTYPES))}, not {value}: convert it first")
    return {name: CTYPES[value] if isinstance(value, np.dtype) else value for name, value in constants.items()}


_kernels: dict[tuple, Kernel] = {}


def kernel(stem: str, name: str, **constants: Any) -> Callable[..., None]:
    """The compiled function `name` of `kernels/<stem>.cu`, ready to be called; a dtype becomes its C name."""
    key = (get_cupy().cuda.runtime.getDevice(), stem, name, *constants.items())
    found = _kernels.get(key)
    if found is None:
        named = c_names(stem, constants)
        if _ahead.compile is not None:
            _ahead.compile(stem, named)
            return lambda *args, **kwargs: None
        found = _kernels[key] = Kernel(_module(stem, named).get_function(name), signature(stem, name, named))
    return found


def launch(stem: str, name: str, grid: Any, block: Any, args: Sequence[Any], shared: int = 0, cooperative: bool = False,
           **constants: Any) -> None:
    """Launch `name` of `kernels/<stem>.cu` on the current stream, with `args` as `driver.pack` says.

    grid, block: a number or a tuple; shared: bytes of dynamic shared memory; cooperative: its blocks wait for each
    other, so that all must run at once; `constants` are `-D` macros.
    """
    grid = grid if isinstance(grid, tuple) else (grid,)
    block = block if isinstance(block, tuple) else (block,)
    kernel(stem, name, **constants)(grid, block, args, shared_mem=shared, cooperative=cooperative)


def blocks(count: int, per_block: int) -> int:
    """How many blocks cover `count` items: the ceiling of the quotient, at least 1."""
    return max(1, -(-count // per_block))


def empty(shape: Any, dtype: Any) -> Array:
    """An uninitialised CuPy array."""
    return get_cupy().empty(shape, dtype)


def gradient_target(into: Array | Vacant | Kept | None, shape: Any, dtype: Any) -> tuple[Array, bool]:
    """Where a backward writes, and whether it adds: `into` (over a `Vacant`) if it has this dtype, else a new array."""
    if isinstance(into, Vacant):
        return (into.array if into.array.dtype == dtype else empty(shape, dtype)), False
    if into is not None and not isinstance(into, Kept) and into.dtype == dtype:
        return into, True
    return empty(shape, dtype), False


def gradient_sum(into: Array | Vacant | Kept | None, shape: Any, dtype: Any) -> tuple[Array, Array | None]:
    """Where a backward that can add what lies elsewhere writes, and what it adds, if anything."""
    target, addend, more = gradient_sums(into, shape, dtype)
    if addend is not None and more is not None:
        addend = addend.copy()
        add_into(addend, more)
    return target, addend


def gradient_sums(into: Array | Vacant | Kept | None, shape: Any,
                  dtype: Any) -> tuple[Array, Array | None, Array | None]:
    """The same for one that adds up to two terms."""
    if isinstance(into, Kept) and into.array.dtype == dtype:
        into.sum = empty(shape, dtype)
        return into.sum, into.array, into.more
    target, add = gradient_target(into, shape, dtype)
    return target, target if add else None, None


def add_into(total: Array, term: Array) -> None:
    """total += term, elementwise, in place; the tape's own kernel."""
    launch(
        "accumulate", "add_into", blocks(total.size, 1024), 256, (total, term, np.int64(total.size)),
        TOTAL=total.dtype, TERM=term.dtype,
    )


def describe() -> dict[str, str]:
    """Versions and the device, for `cudiff info`; what CUDA cannot answer here is left out."""
    import cupy

    facts = {"CuPy": cupy.__version__}
    major, minor = _nvrtc_version()
    facts["NVRTC"] = f"{major}.{minor}"
    version = _driver()
    facts["driver supports"] = f"CUDA {version // 1000}.{version % 1000 // 10}"
    free, total = cupy.cuda.runtime.memGetInfo()
    facts["GPU"] = f"{gpu_name()}, {multiprocessors()} multiprocessors"
    facts["GPU memory"] = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    facts["kernels compiled for"] = architecture()
    return facts
