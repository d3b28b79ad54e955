"""Which array library and device: NumPy on the CPU, CuPy on an NVIDIA GPU. Only this file and cudiff.cuda know CuPy."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

from cudiff.errors import CudiffError

Array = Any  # numpy.ndarray or cupy.ndarray
NUMPY = (np.ndarray, np.generic)

bfloat16 = np.dtype(ml_dtypes.bfloat16)
float16 = np.dtype(np.float16)
float32 = np.dtype(np.float32)
float64 = np.dtype(np.float64)
int32 = np.dtype(np.int32)
int64 = np.dtype(np.int64)

DTYPES = frozenset(map(np.dtype, "?bhilqBHILQefd")) | {bfloat16}
"""What a Tensor holds: bool, integers, and floats of up to 64 bits."""

FLOATS = frozenset({bfloat16, float16, float32, float64})

PRECISIONS = {"fp32": float32, "tf32": float32, "bf16": bfloat16, "fp16": float16}
"""The storage type of activations for each `precision`; tf32 stores float32 and rounds inside matrix products."""


@functools.cache
def is_float(dtype: Any) -> bool:
    """Whether `dtype` is one of `FLOATS`."""
    return np.dtype(dtype) in FLOATS


@functools.cache
def is_low(dtype: Any) -> bool:
    """Whether `dtype` is a 16-bit storage type, in which no arithmetic is done."""
    return np.dtype(dtype) in (bfloat16, float16)


@functools.cache
def compute_dtype(dtype: Any) -> np.dtype:
    """The dtype the NumPy path computes in: float32 for the 16-bit types, the type itself otherwise."""
    return float32 if is_low(dtype) else np.dtype(dtype)


def cache_folder(name: str) -> Path:
    """The user's cache for `name`: in $CUDIFF_CACHE_DIR, or in `cudiff` in $XDG_CACHE_HOME or ~/.cache."""
    base = folder_named_by("CUDIFF_CACHE_DIR")
    return (base or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cudiff") / name


def folder_named_by(variable: str) -> Path | None:
    """The folder that an environment variable names, None where it is not set or blank; ~ is the user's home."""
    value = os.environ.get(variable, "").strip()
    return Path(value).expanduser() if value else None


@functools.cache
def cuda_status() -> tuple[bool, str]:
    """Whether the GPU can be used, and if not, one line that says why and what to install."""
    try:
        import cupy
    except ImportError as error:
        if getattr(error, "name", "") in ("cupy", None) and "No module named" in str(error):
            return False, "CuPy is not installed: pip install 'cudiff[cuda13]' (or 'cudiff[cuda12]' for older drivers)"
        return False, f"CuPy does not import ({str(error).splitlines()[0]}): reinstall it with pip"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:
        return False, f"CuPy finds no usable NVIDIA driver ({str(error).splitlines()[0]}): install or update the driver"
    if count == 0:
        return False, "the driver reports no NVIDIA GPU"
    major, minor = cupy.cuda.Device().compute_capability[:-1], cupy.cuda.Device().compute_capability[-1]
    if int(major + minor) < 75:
        return False, f"the GPU has compute capability {major}.{minor}: cudiff needs 7.5 (Turing) or newer"
    return True, cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()


def cuda_available() -> bool:
    """Whether CuPy is installed and a GPU of compute capability 7.5 or newer is there."""
    return cuda_status()[0]


@functools.cache
def get_cupy() -> ModuleType:
    """The `cupy` module. Raises CudiffError with the reason where the GPU cannot be used."""
    usable, message = cuda_status()
    if not usable:
        raise CudiffError(f"no CUDA: {message}")
    import cupy

    return cupy


def default_device() -> str:
    """`"cuda"` where a GPU can be used, else `"cpu"`."""
    return "cuda" if cuda_available() else "cpu"


def device_of(array: Array) -> str:
    """`"cpu"` for a NumPy array, `"cuda"` for a CuPy array."""
    return device_of_type(array.__class__)


@functools.cache
def device_of_type(kind: type) -> str:
    """The device of arrays of this type."""
    return "cpu" if issubclass(kind, NUMPY) else "cuda"


def is_array(x: Any) -> bool:
    """Whether `x` is an array of NumPy's or CuPy's, or one of NumPy's scalars."""
    return isinstance(x, NUMPY) or (hasattr(type(x), "flags") and hasattr(type(x), "dtype"))


def array_module(device: str) -> ModuleType:
    """`numpy` or `cupy` for `"cpu"` or `"cuda"`. Raises CudiffError for another name or where CUDA cannot be used."""
    if device == "cpu":
        return np
    if device == "cuda":
        return get_cupy()
    raise CudiffError(f"unknown device '{device}': use 'cpu' or 'cuda'")


def is_capturing(device: str) -> bool:
    """Whether what is done on `device` is only recorded now, for a CUDA graph."""
    return device == "cuda" and get_cupy().cuda.get_current_stream().is_capturing()


def to_device(array: Array, device: str) -> Array:
    """Copy `array` to `device`; the array itself where it is there already."""
    module = array_module(device)
    if device_of(array) == device:
        return array
    if device == "cpu":
        return array.get()
    storable(array.dtype, device)
    _refuse_in_capture()
    return module.asarray(np.asarray(array, order="C"))


def storable(dtype: Any, device: str) -> np.dtype:
    """`dtype`, which an array on `device` may have. Raises CudiffError for float64 on a GPU."""
    if device == "cuda" and dtype == float64:
        raise CudiffError("float64 arrays stay on the CPU: convert with .astype('float32') first")
    return np.dtype(dtype)


def copy_into(out: Array, array: Array) -> None:
    """Write `array`, from either device and of any dtype, into `out` of the same shape, with nothing in between."""
    if device_of(out) == device_of(array):
        out[...] = array
    elif device_of(out) == "cpu":
        out[...] = array.get()
    else:
        _refuse_in_capture()
        out.set(np.asarray(array, out.dtype, order="C"), stream=get_cupy().cuda.get_current_stream())


def _refuse_in_capture() -> None:
    if is_capturing("cuda"):
        raise CudiffError("a captured function copied a host array to the GPU: make it before, and hold it as a Tensor")


class Staging:
    """A batch on its way to a GPU: in page-locked memory of the host, then copied by a stream of its own while others
    compute. On the CPU the arrays themselves.

    fill → upload → take → release, and again; the first two may run ahead, in another thread.
    """

    def __init__(self, device: str):
        self.device = device
        self._host: list[np.ndarray] = []
        self._copies: list[Array] = []
        if device == "cuda":
            cuda = get_cupy().cuda
            self._stream = cuda.Stream(non_blocking=True)
            self._uploaded, self._released = (cuda.Event(disable_timing=True) for _ in range(2))

    def fill(self, arrays: list[np.ndarray]) -> None:
        """Hold `arrays`, of the same shapes and dtypes every time; waits until the last upload has been done."""
        if self.device == "cpu":
            self._copies = arrays
            return
        if not self._host:
            self._host = [_page_locked(array) for array in arrays]
            self._copies = [get_cupy().empty(array.shape, array.dtype) for array in arrays]
            self.release()
        self._uploaded.synchronize()
        for held, array in zip(self._host, arrays, strict=True):
            held[...] = array

    def upload(self) -> None:
        """Begin to copy, once what was released has been done."""
        if self.device == "cpu":
            return
        self._stream.wait_event(self._released)
        for copy, array in zip(self._copies, self._host, strict=True):
            copy.set(array, stream=self._stream)
        self._uploaded.record(self._stream)

    def take(self) -> list[Array]:
        """The copies on the device, for which the current stream waits; the same arrays every time."""
        if self.device == "cuda":
            get_cupy().cuda.get_current_stream().wait_event(self._uploaded)
        return self._copies

    def release(self) -> None:
        """Let the next upload overwrite the copies, once the current stream has done what it was given."""
        if self.device == "cuda":
            self._released.record()


def _page_locked(like: np.ndarray) -> np.ndarray:
    memory = get_cupy().cuda.alloc_pinned_memory(like.nbytes)
    return np.frombuffer(memory, like.dtype, like.size).reshape(like.shape)


def out_of_memory_errors() -> tuple[type[BaseException], ...]:
    """The exceptions that mean the GPU's memory is full; for an `except` clause."""
    return (get_cupy().cuda.memory.OutOfMemoryError, MemoryError) if cuda_available() else (MemoryError,)


def out_of_memory(batch_size: int, attempt: Callable[[int], Any], device: str) -> CudiffError:
    """What to tell a user whose batch did not fit: the largest halving of it with which attempt(size) does.

    Call it outside the `except` clause: while the exception lives, so does the memory of what failed.
    """
    size = batch_size // 2
    while size:
        free_memory()
        try:
            attempt(size)
            break
        except out_of_memory_errors():
            size //= 2
    where = f"the GPU's {memory_total(device) / 2**30:.0f} GiB" if device == "cuda" else "memory"
    advice = f"--batch-size {size} fits" if size else "even one image does not fit: use a smaller model"
    return CudiffError(f"batch size {batch_size} does not fit into {where}: {advice}")


def memory_in_use(device: str) -> int:
    """Bytes of GPU memory taken, by everyone; on the CPU the process's peak resident size."""
    if device == "cuda":
        free, total = get_cupy().cuda.runtime.memGetInfo()
        return total - free
    try:
        import resource
    except ImportError:  # not on Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def memory_total(device: str) -> int:
    """Bytes of memory the GPU has; 0 on the CPU."""
    return get_cupy().cuda.runtime.memGetInfo()[1] if device == "cuda" else 0


_spare: weakref.WeakSet[Any] = weakref.WeakSet()
_changing_spare = threading.Lock()


def spare(holder: Any) -> None:
    """Have `holder.clear()` called where memory runs out: it drops what can be made again."""
    with _changing_spare:
        _spare.add(holder)


def free_memory() -> None:
    """Drop what can be made again (`spare`), and give unused blocks of CuPy's pool back to the driver."""
    with _changing_spare:
        holders = list(_spare)
    for holder in holders:
        holder.clear()
    if cuda_available():
        get_cupy().get_default_memory_pool().free_all_blocks()
