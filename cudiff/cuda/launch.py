"""Launch kernels through the CUDA driver, because CuPy's launches do not offer programmatic dependent launch: a kernel
may start before the one ahead of it ends (sm_90 and newer).

A kernel's blocks start and prepare their barriers while the last blocks of the kernel before still run. Then they wait
in `wait_for_previous` (common.cuh), which every kernel calls, until the kernel before has ended. That kernel has waited
for its own predecessor, so all earlier kernels have ended too, and nothing is read or overwritten too early. CuPy's own
launches, copies and events wait until the kernel before has ended. At commit 916a6e2 this brought a captured training
step of the U-Net on an H200 from 7.47 ms to 7.06, and a forward of one image from 1.16 to 1.02.
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
# CUlaunchAttribute: its id, and its value in a union of 64 bytes. CU_LAUNCH_ATTRIBUTE_COOPERATIVE (2) and
# CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION (6) are both set to 1.
_ATTRIBUTE = struct.Struct("I4xI60x")
# They are adjacent, so that an address and a count select either, both or none.
_ATTRIBUTES = ctypes.create_string_buffer(_ATTRIBUTE.pack(2, 1) + _ATTRIBUTE.pack(6, 1))
_PARAMETER_BYTES = 1 << 15  # no kernel takes more

# The `struct` format of each type; None is a null pointer. Every argument is padded to a multiple of 8 bytes.
_PACKED: dict[type, str] = {
    type(None): "Q", bool: "i4x", int: "i4x", float: "f4x", np.int32: "i4x", np.uint32: "I4x", np.int64: "q",
    np.uint64: "Q", np.float32: "f4x", np.float64: "d",
}


class _Arguments:
    """A thread's buffer for the arguments of a launch, which the driver reads."""

    def __init__(self) -> None:
        get_cupy().cuda.runtime.free(0)  # creates this thread's context, which the driver needs
        self.buffer = ctypes.create_string_buffer(_PARAMETER_BYTES)
        self.layouts: dict[tuple, tuple[struct.Struct, ctypes.Array]] = {}  # by kernel and arguments' kinds

    def layout(self, kernel: Kernel, kinds: list[Kind]) -> tuple[struct.Struct, ctypes.Array]:
        """How a kernel's arguments of these kinds are packed, and the address of each. Raises TypeError for kinds that
        the kernel does not take."""
        kernel.signature.check(kinds)
        at, addresses = ctypes.addressof(self.buffer), []
        for format in formats(kinds):
            addresses.append(at)
            at += struct.calcsize(f"={format}")
        packed = struct.Struct("=" + "".join(formats(kinds)))
        found = self.layouts[kernel, *kinds] = packed, (ctypes.c_void_p * len(kinds))(*addresses)
        return found


class _Thread(threading.local):
    launches = 0

    @functools.cached_property
    def arguments(self) -> _Arguments:
        return _Arguments()


_thread = _Thread()


def pack(args: Sequence[Any]) -> tuple[list[Kind], list[Any]]:
    """The kind of each argument, and the value that the kernel gets for it.

    A Python int becomes an int32, a float a float32, None a null pointer. NumPy scalars keep their type. A CuPy array
    passes its address, bytes (a tensor map) and a NumPy array (a table) all their bytes.
    """
    kinds: list[Kind] = list(map(type, args))
    values = list(args)
    nones, tables, arrays = _places(*kinds)
    for i in nones:
        values[i] = 0
    for i in tables:
        values[i] = table = args[i] if kinds[i] is bytes else args[i].tobytes()
        kinds[i] = len(table)
    for i in arrays:
        array = args[i]
        kinds[i], values[i] = array.dtype, array.data.ptr
    return kinds, values


@functools.cache
def _places(*kinds: type) -> tuple[list[int], ...]:
    """The places of None, of bytes and tables, and of CuPy arrays, which `struct` does not take as they are."""
    places: tuple[list[int], ...] = [], [], []
    for i, kind in enumerate(kinds):
        if kind not in _PACKED or kind is type(None):
            places[0 if kind is type(None) else 1 if kind in (bytes, np.ndarray) else 2].append(i)
    return places


def as_float32(values: Sequence[Any]) -> list[Any]:
    """The values of `pack`, in which Python floats beyond float32's are infinite: `struct` refuses them."""
    return [ctypes.c_float(value).value if type(value) is float else value for value in values]


def formats(kinds: Sequence[Kind]) -> list[str]:
    """The `struct` format of an argument of each of these kinds."""
    return [f"{kind}s{-kind % 8}x" if type(kind) is int else _PACKED.get(kind, "Q") for kind in kinds]


def padded_shared(blocks: int, threads: int, limits: Device) -> int:
    """Bytes of shared memory that each block should ask for, so that `blocks` spread evenly over the multiprocessors.

    Without this, blocks that start early would all go to the multiprocessors that the kernel before leaves first. The
    padding limits how many of them fit on one multiprocessor. Returns 0 if the blocks cannot all run at once.
    """
    each = -(-blocks // limits.multiprocessors)
    if each > min(limits.blocks, limits.threads // threads):
        return 0
    return limits.shared // (each + 1) - limits.reserved + 1  # each + 1 blocks do not fit


class Kernel:
    """A function of a loaded cubin, called as kernel(grid, block, args, shared_mem=bytes); see `pack` for `args`.

    overlaps: the kernel calls `wait_for_previous`, so it may begin while the one before still runs. cooperative: the
    launch begins only once all of its blocks can run at once, so that they may wait for each other. With more blocks
    than the GPU can run at once it raises CUDADriverError. Argument types are checked against the signature at the
    first launch with them; TypeError names a parameter that does not fit, OverflowError a number.
    """

    def __init__(self, function: Any, signature: Signature, overlaps: bool = True):
        self.signature = signature
        self._limits = device(get_cupy().cuda.runtime.getDevice())
        self._static = function.shared_size_bytes
        # Set once, to the most that a block may have: if each launch set it, one thread could lower it for another.
        function.max_dynamic_shared_size_bytes = self._limits.of_block - self._static
        self._function = function  # keeps the cubin loaded
        self._address = ctypes.c_void_p(function.kernel.ptr)
        self._overlaps = int(overlaps and self._limits.capability >= 90)
        self._configs: dict[tuple, ctypes.Array] = {}  # by all that one depends on

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any], shared_mem: int = 0,
                 cooperative: bool = False) -> None:
        arguments = _thread.arguments
        kinds, values = pack(args)
        layout, addresses = arguments.layouts.get((self, *kinds)) or arguments.layout(self, kinds)
        try:
            layout.pack_into(arguments.buffer, 0, *values)
        except OverflowError:
            layout.pack_into(arguments.buffer, 0, *as_float32(values))
        except struct.error:
            raise self.signature.out_of_range(values) from None
        key = grid, block, shared_mem, cooperative, get_cupy().cuda.get_current_stream().ptr
        config = self._configs.get(key)
        if config is None:
            config = self._configs[key] = self._config(*key)
        status = library().cuLaunchKernelEx(config, self._address, addresses, None)
        if status:
            raise get_cupy().cuda.driver.CUDADriverError(status)

    def _config(self, grid: tuple[int, ...], block: tuple[int, ...], shared: int, cooperative: bool,
                stream: int) -> ctypes.Array:
        """The CUlaunchConfig. Nobody writes to it, so that threads may share it."""
        blocks, threads = ((tuple(max(1, n) for n in sizes) + (1, 1))[:3] for sizes in (grid, block))
        if self._overlaps:
            shared = max(shared, padded_shared(math.prod(blocks), math.prod(threads), self._limits) - self._static)
        first = ctypes.addressof(_ATTRIBUTES) + (0 if cooperative else _ATTRIBUTE.size)
        return ctypes.create_string_buffer(
            _CONFIG.pack(*blocks, *threads, shared, stream, first, cooperative + self._overlaps))


_kernels: dict[tuple, Kernel] = {}


def launches() -> int:
    """How many kernels this thread has launched, CuPy's own not counted. To count a part, subtract two results."""
    return _thread.launches


def kernel(stem: str, name: str, **constants: Any) -> Callable[..., None]:
    """The compiled function `name` of `<stem>.cu`, to be called like a `Kernel`. constants: what it is compiled with; a
    dtype becomes its C name. Inside `compiling_ahead` one that is not loaded yet is compiled, and what is returned does
    nothing."""
    key = (get_cupy().cuda.runtime.getDevice(), stem, name, *constants, *constants.values())
    found = _kernels.get(key)
    if found is None:
        named, declared = compiler.c_names(compiler.kernel_path(stem), constants), compiler.declarations(stem)
        call = declared.call_of(name)
        if compiler.compiles_ahead():
            compiler.compile_ahead(stem, named, call)
            return lambda *args, **kwargs: None
        function = compiler.load(stem, named, call).get_function(name)
        found = _kernels[key] = Kernel(function, declared.signature(name, named))
    return found


class Launch:
    """Launches of `name` of `<stem>.cu` that differ only in their arguments, with all else as in `launch`: made once
    for a problem, then called with the arguments."""

    def __init__(self, stem: str, name: str, grid: tuple[int, ...], block: tuple[int, ...], shared: int = 0,
                 cooperative: bool = False, **constants: Any):
        self._stem, self._name, self._constants = stem, name, constants
        self._grid, self._block, self._shared, self._cooperative = grid, block, shared, cooperative
        self._loaded: dict[tuple, Any] = {}  # by device, and by what finds kernels: a profile puts its own in place

    def __call__(self, *args: Any) -> None:
        place = get_cupy().cuda.runtime.getDevice(), kernel
        found: Any = self._loaded.get(place)
        if found is None:
            found = kernel(self._stem, self._name, **self._constants)
            if isinstance(found, Kernel):  # not where kernels are compiled ahead
                self._loaded[place] = found = found.__call__  # a bound method is called faster
        _thread.launches += 1
        found(self._grid, self._block, args, self._shared, self._cooperative)


def launch(stem: str, name: str, grid: Any, block: Any, args: Sequence[Any], shared: int = 0, cooperative: bool = False,
           **constants: Any) -> None:
    """Launch `name` of `<stem>.cu` on the current stream, with `args` as `pack` says.

    grid, block: a number or a tuple. shared: bytes of dynamic shared memory. cooperative: the blocks wait for each
    other, so all of them must run at once. constants: `-D` macros; dtypes become typedefs.
    """
    grid = grid if isinstance(grid, tuple) else (grid,)
    block = block if isinstance(block, tuple) else (block,)
    _thread.launches += 1
    kernel(stem, name, **constants)(grid, block, args, shared_mem=shared, cooperative=cooperative)


MOST_ACROSS = 65_535
"""Blocks along the second and the third axis of a grid, at most. Along the first there are 2^31 - 1."""


def blocks(count: int, per_block: int) -> int:
    """How many blocks cover `count` items: count / per_block rounded up, at least 1."""
    return max(1, -(-count // per_block))


def empty(shape: Any, dtype: Any) -> Array:
    """An uninitialised CuPy array."""
    return get_cupy().ndarray(shape, dtype)


def aligned(array: Array, *lengths: int) -> bool:
    """Whether 16-byte copies may be used: the start of `array` and each of `lengths`, in elements, are multiples of 16
    bytes."""
    return math.gcd(array.data.ptr, math.gcd(*lengths) * array.itemsize) % 16 == 0


def address(array: Array) -> int:
    """The address of a CUDA array's first element."""
    return array.data.ptr
