"""Launch kernels through the CUDA driver itself: CuPy's launches cannot say that a kernel may start before the one
ahead of it ends.

Programmatic dependent launch (sm_90 and newer): a kernel's blocks take their places and prepare their barriers while
the last blocks of the kernel before are still at work, and wait in `wait_for_previous` (common.cuh), which
every kernel calls. Each waits for the end of the one before, which has waited itself: nothing is read or overwritten
too early. CuPy's own launches, copies and events wait for whole kernels, as ever. At commit 916a6e2 this brought
a captured training step of the U-Net on an H200 from 7.47 ms to 7.06, a forward of one image from 1.16 to 1.02.
"""

from __future__ import annotations

import ctypes
import functools
import math
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cudiff.backend import Array, get_cupy
from cudiff.cuda import compiler
from cudiff.cuda.device import Device, device, library
from cudiff.cuda.signature import Kind, Signature

_CONFIG = struct.Struct("7IPPI4x")  # CUlaunchConfig: grid, block, shared memory, stream, attributes, their number
# CUlaunchAttribute, its value in a union of 64 bytes: CU_LAUNCH_ATTRIBUTE_COOPERATIVE = 1, and
# CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 1
_ATTRIBUTE = struct.Struct("I4xI60x")
_COOPERATIVE, _OVERLAP = _ATTRIBUTE.pack(2, 1), _ATTRIBUTE.pack(6, 1)
_PARAMETER_BYTES = 1 << 15  # no kernel takes more

# How `struct` packs each type; None is a null pointer. Every argument fills whole words of 8 bytes.
_PACKED: dict[type, str] = {
    type(None): "Q", bool: "i4x", int: "i4x", float: "f4x", np.int32: "i4x", np.uint32: "I4x", np.int64: "q",
    np.uint64: "Q", np.float32: "f4x", np.float64: "d",
}


class _Places(threading.local):
    """Where the driver finds this thread's launch: configuration, attributes, arguments and their addresses."""

    def __init__(self) -> None:
        get_cupy().cuda.runtime.free(0)  # the driver needs the thread to have a context; the runtime makes it one
        self.config = ctypes.create_string_buffer(_CONFIG.size)
        self.attributes = ctypes.create_string_buffer(_COOPERATIVE + _OVERLAP, 2 * _ATTRIBUTE.size)
        self.arguments = ctypes.create_string_buffer(_PARAMETER_BYTES)
        self.config_at, self.cooperative_at = ctypes.addressof(self.config), ctypes.addressof(self.attributes)
        self.overlap_at = self.cooperative_at + _ATTRIBUTE.size
        self.layouts: dict[tuple, tuple[struct.Struct, ctypes.Array]] = {}  # of a kernel and its arguments' kinds

    def layout(self, kernel: Kernel, kinds: list[Kind]) -> tuple[struct.Struct, ctypes.Array]:
        """How a kernel's arguments of these kinds are packed, and the address of each. Raises TypeError for others than
        it takes."""
        kernel.signature.check(kinds)
        at, addresses = ctypes.addressof(self.arguments), []
        for format in formats(kinds):
            addresses.append(at)
            at += struct.calcsize(f"={format}")
        packed = struct.Struct("=" + "".join(formats(kinds)))
        found = self.layouts[kernel, *kinds] = packed, (ctypes.c_void_p * len(kinds))(*addresses)
        return found


@functools.cache
def _places() -> _Places:
    return _Places()


def pack(args: Sequence[Any]) -> tuple[list[Kind], list[Any]]:
    """The kind and the value that a kernel gets for each argument.

    Python ints are int32, floats float32, None a null pointer, NumPy scalars what they are; CuPy arrays pass their
    address, NumPy arrays (tables, tensor maps) all their bytes.
    """
    kinds, values = [], []
    for arg in args:
        kind: Kind = type(arg)
        if kind not in _PACKED:
            if type(arg) is np.ndarray:
                arg = arg.tobytes()
                kind = len(arg)
            else:
                kind, arg = arg.dtype, arg.data.ptr
        elif arg is None:
            arg = 0
        kinds.append(kind)
        values.append(arg)
    return kinds, values


def formats(kinds: Sequence[Kind]) -> list[str]:
    """How `struct` packs arguments of these kinds."""
    return [f"{kind}s{-kind % 8}x" if type(kind) is int else _PACKED.get(kind, "Q") for kind in kinds]


def room(blocks: int, threads: int, limits: Device) -> int:
    """Bytes of shared memory for each of `blocks` that could all run at once, so that they spread evenly.

    With more room, those that start early crowd where the kernel before leaves some. 0 for blocks that take turns.
    """
    each = -(-blocks // limits.multiprocessors)
    if each > min(limits.blocks, limits.threads // threads):
        return 0
    return limits.shared // (each + 1) - limits.reserved + 1  # each + 1 blocks do not fit


class Kernel:
    """A function of a loaded cubin, called as kernel(grid, block, args, shared_mem=bytes); see `pack` for `args`.

    `cooperative`: the launch begins only where all of its blocks have places at once, so that they may wait for each
    other; one of more blocks than the GPU has places for raises CUDADriverError.
    Of the first launch with arguments of other types, these are checked against the signature. `overlaps`: it
    may begin while the one before still runs, as it calls `wait_for_previous`.
    """

    def __init__(self, function: Any, signature: Signature, overlaps: bool = True):
        self.signature = signature
        self._limits = device(get_cupy().cuda.runtime.getDevice())
        self._static = function.shared_size_bytes
        # All that there is, once: raised launch by launch, threads could lower it for each other.
        function.max_dynamic_shared_size_bytes = self._limits.of_block - self._static
        self._function = function  # keeps the cubin loaded
        self._address = function.kernel.ptr
        self._overlaps = int(overlaps and self._limits.capability >= 90)
        self._shapes: dict[tuple, tuple[int, ...]] = {}

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any], shared_mem: int = 0,
                 cooperative: bool = False) -> None:
        places = _places()
        kinds, values = pack(args)
        layout, addresses = places.layouts.get((self, *kinds)) or places.layout(self, kinds)
        try:
            layout.pack_into(places.arguments, 0, *values)
        except struct.error:
            raise self.signature.out_of_range(values) from None
        shape = self._shapes.get((grid, block, shared_mem))
        if shape is None:
            shape = self._shapes[grid, block, shared_mem] = self._shape(grid, block, shared_mem)
        stream = get_cupy().cuda.get_current_stream().ptr
        first = places.cooperative_at if cooperative else places.overlap_at
        _CONFIG.pack_into(places.config, 0, *shape, stream, first, cooperative + self._overlaps)
        status = library().cuLaunchKernelEx(places.config_at, self._address, addresses, None)
        if status:
            raise get_cupy().cuda.driver.CUDADriverError(status)

    def _shape(self, grid: tuple[int, ...], block: tuple[int, ...], shared: int) -> tuple[int, ...]:
        """The launch's seven sizes: grid, block, shared memory."""
        blocks, threads = ((tuple(max(1, n) for n in sizes) + (1, 1))[:3] for sizes in (grid, block))
        if self._overlaps:
            shared = max(shared, room(math.prod(blocks), math.prod(threads), self._limits) - self._static)
        return (*blocks, *threads, shared)


_kernels: dict[tuple, Kernel] = {}


class _Made(threading.local):
    launches = 0


_made = _Made()


def launches() -> int:
    """How many kernels this thread has launched, for a difference; what CuPy launches by itself is not counted."""
    return _made.launches


def kernel(stem: str, name: str, **constants: Any) -> Callable[..., None]:
    """The compiled function `name` of `<stem>.cu`, ready to be called; a dtype becomes its C name."""
    key = (get_cupy().cuda.runtime.getDevice(), stem, name, *constants.items())
    found = _kernels.get(key)
    if found is None:
        named, call = compiler.c_names(compiler.kernel_path(stem), constants), compiler.call_of(stem, name)
        if compiler.compiles_ahead():
            compiler.compile_ahead(stem, named, call)
            return lambda *args, **kwargs: None
        function = compiler.load(stem, named, call).get_function(name)
        found = _kernels[key] = Kernel(function, compiler.signature(stem, name, named))
    return found


def launch(stem: str, name: str, grid: Any, block: Any, args: Sequence[Any], shared: int = 0, cooperative: bool = False,
           **constants: Any) -> None:
    """Launch `name` of `<stem>.cu` on the current stream, with `args` as `pack` says.

    grid, block: a number or a tuple; shared: bytes of dynamic shared memory; cooperative: its blocks wait for each
    other, so that all must run at once; `constants` are `-D` macros.
    """
    grid = grid if isinstance(grid, tuple) else (grid,)
    block = block if isinstance(block, tuple) else (block,)
    _made.launches += 1
    kernel(stem, name, **constants)(grid, block, args, shared_mem=shared, cooperative=cooperative)


def blocks(count: int, per_block: int) -> int:
    """How many blocks cover `count` items: the ceiling of the quotient, at least 1."""
    return max(1, -(-count // per_block))


def empty(shape: Any, dtype: Any) -> Array:
    """An uninitialised CuPy array."""
    return get_cupy().empty(shape, dtype)


def aligned(array: Array, *lengths: int) -> bool:
    """Whether 16-byte copies may be used: `array` starts at a multiple, and `lengths` elements make multiples."""
    return math.gcd(array.data.ptr, math.gcd(*lengths) * array.itemsize) % 16 == 0


def address(array: Array) -> int:
    """Where a CUDA array starts."""
    return array.data.ptr
