"""What the driver says of each GPU. Nothing else asks it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
from collections.abc import Iterator
from typing import NamedTuple

from cudiff.backend import cuda_status, get_cupy


@functools.cache
def library() -> ctypes.CDLL:
    """The driver's own functions."""
    driver = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    driver.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4
    return driver


@functools.cache
def driver_version() -> int:
    """The newest CUDA that the driver supports, as 1000 · major + 10 · minor."""
    return get_cupy().cuda.runtime.driverGetVersion()


class Device(NamedTuple):
    """A GPU's name, such as "NVIDIA H200", and its compute capability, 10 · major + minor; its multiprocessors; what
    each has room for: blocks, threads, bytes of shared memory; the bytes that a block may ask for; and those that it
    takes besides."""

    name: str
    capability: int
    multiprocessors: int
    blocks: int
    threads: int
    shared: int
    of_block: int
    reserved: int

    @property
    def architecture(self) -> str:
        """NVRTC's name for it; Hopper's own instructions need the `a`."""
        return f"sm_{self.capability}a" if self.capability == 90 else f"sm_{self.capability}"


@functools.cache
def device(ordinal: int) -> Device:
    """The GPU of this number."""
    cuda = get_cupy().cuda
    found = cuda.Device(ordinal)
    facts = found.attributes
    return Device(
        cuda.runtime.getDeviceProperties(ordinal)["name"].decode(), int(found.compute_capability),
        facts["MultiProcessorCount"], facts["MaxBlocksPerMultiprocessor"], facts["MaxThreadsPerMultiProcessor"],
        facts["MaxSharedMemoryPerMultiprocessor"], facts["MaxSharedMemoryPerBlockOptin"],
        facts["ReservedSharedMemoryPerBlock"],
    )


def current_device() -> Device:
    """The one that the current thread launches on."""
    return device(get_cupy().cuda.runtime.getDevice())


_MULTIPROCESSORS = {"sm_80": 108, "sm_86": 82, "sm_89": 128, "sm_90a": 132, "sm_100": 148, "sm_120": 170}
"""Of an A100, RTX 3090, RTX 4090, H200, B200 and RTX 5090, for which `asked_about` plans."""


class _Asked(threading.local):
    architecture: str | None = None


asked = _Asked()


@contextlib.contextmanager
def asked_about(architecture: str) -> Iterator[None]:
    """Inside the block, launches are planned for a GPU of this architecture, such as "sm_80", here or not."""
    before, asked.architecture = asked.architecture, architecture
    try:
        yield
    finally:
        asked.architecture = before


def multiprocessors() -> int:
    """Those of the GPU that launches are planned for: the current device; where there is none an H200, 132."""
    if asked.architecture is not None:
        return _MULTIPROCESSORS.get(asked.architecture, 132)
    return current_device().multiprocessors if cuda_status()[0] else 132


_CUDA_OF_DRIVER_530 = 12010


class Target(NamedTuple):
    """What kernels and their plans are chosen for: a GPU's name and its architecture, such as "sm_90a"."""

    gpu: str
    architecture: str


def current_target() -> Target:
    """That of the current device; its architecture is "sm_90a" where the kernels in files named _sm90 run.

    CUDIFF_PORTABLE=1 in the environment switches these off: the kernels for any GPU run instead. So does a driver older
    than 530, which does not give some of them their more than 4 KiB of arguments.
    """
    return _target(get_cupy().cuda.runtime.getDevice(), os.environ.get("CUDIFF_PORTABLE") == "1")


@functools.cache
def _target(ordinal: int, portable: bool) -> Target:
    found = device(ordinal)
    portable = portable or driver_version() < _CUDA_OF_DRIVER_530
    return Target(found.name, found.architecture.removesuffix("a" if portable else ""))


def describe() -> dict[str, str]:
    """Versions and the current device, for `cudiff info`."""
    cupy, gpu, newest = get_cupy(), current_device(), driver_version()
    free, total = cupy.cuda.runtime.memGetInfo()
    return {
        "CuPy": cupy.__version__,
        "driver supports": f"CUDA {newest // 1000}.{newest % 1000 // 10}",
        "GPU": f"{gpu.name}, {gpu.multiprocessors} multiprocessors",
        "GPU memory": f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free",
        "kernels compiled for": gpu.architecture,
    }
