"""Find, compile and cache the kernels in `kernels/`.

NVRTC compiles a file and its constants (`-D` macros) to a cubin. Cubins are cached for each user, under a digest of
source, constants, architecture, options and NVRTC's version.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from cudiff.backend import bfloat16, cache_folder, float16, float32, get_cupy, int32, int64
from cudiff.cuda.device import current_device
from cudiff.cuda.signature import Source
from cudiff.errors import CudiffError
from cudiff.files import replaced

CTYPES = {
    float32: "float", bfloat16: "bf16", float16: "half", int32: "int", int64: "i64", np.dtype(np.uint8): "u8",
    np.dtype(np.bool_): "u8",
}
_TYPES = frozenset(CTYPES.values())
_OPTIONS = ("-std=c++17",)
_compiling = threading.Lock()


@functools.cache
def kernel_folder() -> Path:
    """The folder of the kernels' folders: the installed package `cudiff.kernels`, or `kernels/` beside `cudiff/`."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "kernels", package.parent / "kernels"):
        if (folder / "common" / "common.cuh").is_file():
            return folder
    raise CudiffError(f"the CUDA kernels are missing beside {package}: reinstall cudiff")


@functools.cache
def kernel_file(name: str) -> Path:
    """The path of the `.cu` file or header of this name. Raises CudiffError unless exactly one folder has it."""
    found = list(kernel_folder().glob(f"*/{name}"))
    if len(found) != 1:
        raise CudiffError(f"{len(found)} files in the folders of {kernel_folder()} are named {name}: there must be one")
    return found[0]


def kernel_path(stem: str) -> str:
    """The path of a kernel file as messages give it, such as kernels/portable/cast.cu."""
    return kernel_file(f"{stem}.cu").relative_to(kernel_folder().parent).as_posix()


def source(stem: str, constants: dict[str, Any], call: str | None = None) -> str:
    """The text of `common.cuh` and of a `.cu` file, with each of our own headers included once.

    call: the one that is kept of the macro calls that define kernels (`Source.call_of`). Each is compiled alone, when a
    kernel of it is needed: all of arithmetic.cu takes 5 s, `add` 0.3.
    Constants that are types become typedefs after `common.cuh`. As macros they would also replace the T of every
    `template <typename T>`, NVRTC's own included.
    """
    common, rest = _expanded(stem)
    return with_types(common, rest if call is None else declarations(stem).with_one_call(rest, call), constants)


def with_types(common: str, rest: str, constants: dict[str, Any]) -> str:
    """An expanded source with the typedefs of those constants that are types."""
    types = [f"typedef {value} {name};\n" for name, value in sorted(constants.items()) if value in _TYPES]
    return common + "".join(types) + rest


@functools.cache
def _expanded(stem: str) -> tuple[str, str]:
    return expanded(kernel_file(f"{stem}.cu").read_text())


def expanded(text: str) -> tuple[str, str]:
    """`common.cuh`, and a source with its `#include`s of our own headers expanded, each once."""
    seen: set[str] = {"common.cuh"}

    def expand(text: str) -> str:
        lines = []
        for line in text.splitlines():
            if line.startswith('#include "'):
                header = line.split('"')[1]
                if header not in seen:
                    seen.add(header)
                    lines.append(expand(kernel_file(header).read_text()))
            elif not line.startswith("#pragma once"):
                lines.append(line)
        return "\n".join(lines) + "\n"

    return expand(kernel_file("common.cuh").read_text()), expand(text)


@functools.cache
def declarations(stem: str) -> Source:
    """The kernels of `<stem>.cu`, and their signatures."""
    return Source(kernel_path(stem), "".join(_expanded(stem)))


def compile_text(file: str, text: str, arch: str, constants: dict[str, Any]) -> tuple[bytes, str]:
    """Compile a source with NVRTC, which needs no GPU. Returns the cubin (the PTX for an `arch` such as compute_75) and
    the compiler's log.

    Raises CudiffError with the start of the log if the source does not compile.
    """
    from cupy_backends.cuda.libs import nvrtc

    options = [*_OPTIONS, f"-arch={arch}", "--ptxas-options=-v"]
    options += [f"-D{name}={value}" for name, value in sorted(constants.items()) if value not in _TYPES]
    program = nvrtc.createProgram(text, Path(file).name, (), ())
    try:
        nvrtc.compileProgram(program, tuple(options))
        if arch.startswith("compute_"):
            return nvrtc.getPTX(program), nvrtc.getProgramLog(program)
        return nvrtc.getCUBIN(program), nvrtc.getProgramLog(program)
    except nvrtc.NVRTCError as error:
        log = " ".join(nvrtc.getProgramLog(program).split())
        raise CudiffError(f"{file} does not compile for {arch}: {log[:2000] or error}") from None
    finally:
        nvrtc.destroyProgram(program)


@functools.cache
def cubin_folder() -> Path:
    """The folder of the cubins: the user's cache, or a temporary folder of this process if that is not writable."""
    folder = cache_folder("kernels")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="cudiff-kernels-"))


@functools.cache
def nvrtc_version() -> str:
    """NVRTC's version, such as 13.0."""
    from cupy_backends.cuda.libs import nvrtc

    return ".".join(map(str, nvrtc.getVersion()))


def _cubin(stem: str, arch: str, constants: dict[str, Any], call: str) -> Path:
    """`cubin_of` one of our files, with only the macro call `call`."""
    return cubin_of(kernel_path(stem), source(stem, constants, call), arch, constants)


def cubin_of(file: str, text: str, arch: str, constants: dict[str, Any]) -> Path:
    """The path of the cached cubin, compiled now if it is not cached. Several processes may do so at the same time."""
    key = repr((text, arch, sorted(constants.items()), _OPTIONS, nvrtc_version()))
    path = cubin_folder() / f"{Path(file).stem}-{hashlib.sha256(key.encode()).hexdigest()[:24]}.cubin"
    if not path.is_file():
        cubin, _ = compile_text(file, text, arch, constants)
        with replaced(path) as temporary:
            temporary.write_bytes(cubin)
    return path


_modules: dict[tuple, Any] = {}


def load(stem: str, constants: dict[str, Any], call: str) -> Any:
    """The current device's cupy.RawModule of the file, compiled with these constants and only this macro call."""
    key = (stem, call, get_cupy().cuda.runtime.getDevice(), *sorted(constants.items()))
    module = _modules.get(key)
    if module is None:
        path = _cubin(stem, current_device().architecture, constants, call)
        module = _modules.setdefault(key, loaded(path))
    return module


def loaded(cubin: Path) -> Any:
    """The current device's cupy.RawModule of a cubin."""
    with _compiling:
        return get_cupy().RawModule(path=str(cubin))


class _Ahead(threading.local):
    """compile: called for each kernel that is not loaded yet; None outside `compiling_ahead`."""

    compile: Callable[[str, dict[str, Any], str], None] | None = None


_ahead = _Ahead()


@contextlib.contextmanager
def compiling_ahead() -> Iterator[None]:
    """Inside the block, kernels that are not loaded are compiled in parallel, not launched; its end waits for them."""
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        begun: dict[tuple, Future] = {}

        def compile(stem: str, constants: dict[str, Any], call: str) -> None:
            variant = (stem, call, *constants.items())
            if variant not in begun:
                begun[variant] = pool.submit(_cubin, stem, current_device().architecture, constants, call)

        _ahead.compile = compile
        try:
            yield
        finally:
            _ahead.compile = None


def compiles_ahead() -> bool:
    """Whether this thread is inside a `compiling_ahead` block."""
    return _ahead.compile is not None


def compile_ahead(stem: str, constants: dict[str, Any], call: str) -> None:
    """Compile in the background. To be called inside a `compiling_ahead` block."""
    assert _ahead.compile is not None
    _ahead.compile(stem, constants, call)


def c_names(file: str, constants: dict[str, Any]) -> dict[str, Any]:
    """The constants, with dtypes and types such as np.float32 replaced by their C names. Raises TypeError, which names
    `file`, for a dtype without a C name."""
    constants = {name: np.dtype(value) if isinstance(value, type) else value for name, value in constants.items()}
    for value in constants.values():
        if isinstance(value, np.dtype) and value not in CTYPES:
            raise TypeError(f"{file} takes {', '.join(map(str, CTYPES))}, not {value}: convert it on the CPU first")
    return {name: CTYPES[value] if isinstance(value, np.dtype) else value for name, value in constants.items()}
