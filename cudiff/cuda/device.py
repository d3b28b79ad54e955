"""The properties of each GPU, from the CUDA driver. No other module asks for them."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import packages_distributions
from itertools import combinations
from typing import NamedTuple

from cudiff.backend import cuda_status, get_cupy
from cudiff.errors import CudiffError


@functools.cache
def library() -> ctypes.CDLL:
    """The CUDA driver's library."""
    return ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")


@functools.cache
def driver_version() -> int:
    """The newest CUDA that the driver supports, as 1000 · major + 10 · minor."""
    return get_cupy().cuda.runtime.driverGetVersion()


_PLANNED = {
    "sm_75": (40, 64), "sm_80": (108, 163), "sm_86": (82, 99), "sm_89": (128, 99), "sm_90a": (132, 227),
    "sm_100": (148, 227), "sm_120": (170, 99),
}
"""The multiprocessors, and the KiB of shared memory that a block may ask for, for which `asked_about` plans: those of a
T4, A100, RTX 3090, RTX 4090, H200, B200 and RTX 5090."""


class Device(NamedTuple):
    """name: such as "NVIDIA H200". capability: compute capability, 10 · major + minor. blocks, threads, shared: limits
    of a multiprocessor, shared memory in bytes. of_block: bytes that a block may ask for. reserved: bytes that CUDA
    adds for each block. ptx: whether it is used as an older GPU, with that one's kernels as PTX."""

    name: str
    capability: int
    multiprocessors: int
    blocks: int
    threads: int
    shared: int
    of_block: int
    reserved: int
    ptx: bool = False

    @property
    def architecture(self) -> str:
        """NVRTC's name of the architecture. Hopper's own instructions need the suffix `a`."""
        if self.ptx:
            return f"compute_{self.capability}"
        return f"sm_{self.capability}a" if self.capability == 90 else f"sm_{self.capability}"


@functools.cache
def device(ordinal: int) -> Device:
    """The GPU of this number. CUDIFF_COMPUTE=75 in the environment has it used as one of compute capability 7.5."""
    cuda = get_cupy().cuda
    found = cuda.Device(ordinal)
    facts = found.attributes
    gpu = Device(
        cuda.runtime.getDeviceProperties(ordinal)["name"].decode(), int(found.compute_capability),
        facts["MultiProcessorCount"], facts["MaxBlocksPerMultiprocessor"], facts["MaxThreadsPerMultiProcessor"],
        facts["MaxSharedMemoryPerMultiprocessor"], facts["MaxSharedMemoryPerBlockOptin"],
        facts["ReservedSharedMemoryPerBlock"],
    )
    capability = os.environ.get("CUDIFF_COMPUTE")
    return gpu if capability is None else _older(gpu, capability)


def _older(gpu: Device, capability: str) -> Device:
    """`gpu` as one of an older compute capability, such as "75", whose blocks have less shared memory. Raises
    CudiffError for a capability without kernels or above the GPU's."""
    name = f"sm_{capability}"
    if capability not in ("75", "80", "86", "89") or int(capability) > gpu.capability:
        raise CudiffError(f"CUDIFF_COMPUTE={capability} is none of 75, 80, 86, 89 that {gpu.name} runs: leave it out")
    of_block = min(gpu.of_block, _PLANNED[name][1] << 10)
    return gpu._replace(name=f"{gpu.name} as {name}", capability=int(capability), of_block=of_block, ptx=True)


def current_device() -> Device:
    """The GPU that the current thread launches on."""
    return device(get_cupy().cuda.runtime.getDevice())


def precision_on(device: str, name: str) -> str:
    """The precision that `name` selects on a device. "auto" is bf16 on a GPU and fp32 on the CPU. A GPU older than
    sm_80 has no bf16: there it is fp16."""
    name = ("bf16" if device == "cuda" else "fp32") if name == "auto" else name
    return "fp16" if name == "bf16" and device == "cuda" and current_device().capability < 80 else name


class _Asked(threading.local):
    architecture: str | None = None


asked = _Asked()


@contextlib.contextmanager
def asked_about(architecture: str) -> Iterator[None]:
    """Inside the block, launches are planned for a GPU of this architecture, such as "sm_80", present or not."""
    before, asked.architecture = asked.architecture, architecture
    try:
        yield
    finally:
        asked.architecture = before


def multiprocessors() -> int:
    """The number in the GPU that launches are planned for: the current device, without one an H200 (132)."""
    return _planned()[0]


def shared_memory() -> int:
    """Bytes of shared memory that a block may ask for, of the same GPU."""
    return _planned()[1]


def _planned() -> tuple[int, int]:
    if asked.architecture is None and cuda_status()[0]:
        gpu = current_device()
        return gpu.multiprocessors, gpu.of_block
    count, kib = _PLANNED.get(asked.architecture or "sm_90a", _PLANNED["sm_90a"])
    return count, kib << 10


def bus_address() -> str:
    """The current device's PCI bus address, which no other device of this machine has."""
    return get_cupy().cuda.Device().pci_bus_id


def describe() -> dict[str, str]:
    """Versions and the current device, for `cudiff info`."""
    cupy, gpu, newest = get_cupy(), current_device(), driver_version()
    free, total = cupy.cuda.runtime.memGetInfo()
    count = cupy.cuda.runtime.getDeviceCount()
    return {
        "CuPy": f"{cupy.__version__} {wheels(packages_distributions().get('cupy', []))}",
        "driver supports": f"CUDA {newest // 1000}.{newest % 1000 // 10}",
        "GPU": f"{gpu.name}, {gpu.multiprocessors} multiprocessors",
        "GPUs": f"{count} to be seen",
        **({"links": links(count, cupy.cuda.runtime.deviceCanAccessPeer)} if count > 1 else {}),
        "GPU memory": f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free",
        "kernels compiled for": gpu.architecture,
    }


def wheels(names: Sequence[str]) -> str:
    """Which of CuPy's packages is installed, or that several are, which do not work together."""
    if len(names) > 1:
        return f"from {' and '.join(names)}, which overwrite each other: uninstall all, then install one"
    return f"from {names[0]}" if names else "built here"


def links(count: int, reaches: Callable[[int, int], object]) -> str:
    """Which of `count` GPUs read each other's memory, in words. reaches(a, b): whether a reads b's memory."""
    apart = [f"{a} and {b}" for a, b in combinations(range(count), 2) if not (reaches(a, b) and reaches(b, a))]
    if not apart:
        return "each reads the others' memory"
    return (f"not direct between {', '.join(apart)}: what they share goes by the host's memory, slower; "
            "nvidia-smi topo -m shows how they are plugged in")
