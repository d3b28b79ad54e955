"""The host's side of the CUDA path on a machine without a GPU: arrays without contents, launches noted and not made."""

from __future__ import annotations

import functools
import itertools
import math
import os
import struct
import sys
import weakref
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import numpy as np

from cudiff.cuda import compiler, launch, select, tensor_map, tiles
from cudiff.cuda.memory import Allocator
from tests.compile_kernels import VARIANTS

ADDRESS, MAP = 0x5A, 0x3A  # the upper 8 bits of an address, and of a tensor map's first word
LARGE = 1 << 16
_numbers = itertools.count(1)
owners: weakref.WeakValueDictionary[int, Array] = weakref.WeakValueDictionary()
"""The arrays that own their memory, by the number in their addresses."""


class Array(np.ndarray):
    """Stands for CuPy's array. What a kernel would have written is 0 in little memory and in what may be an index, else
    undefined.

    Its address is of no real memory: 8 bits say that it is one, 24 whose memory it is, 32 how far in.
    """

    place: Any = None
    number = 0
    watch: ClassVar[Callable[..., None]] = staticmethod(lambda *what: None)
    """Told what CuPy would do by itself, and with which arrays."""

    @property
    def owner(self) -> Array:
        """The array that it is a part of, which owns its memory."""
        owner = self
        while isinstance(owner.base, Array):
            owner = owner.base
        return owner

    @property
    def data(self) -> Any:  # type: ignore[override]
        owner = self.owner
        if not owner.number:
            owner.number = next(_numbers)
            owners[owner.number] = owner
        start, own = (array.__array_interface__["data"][0] for array in (owner, self))
        return SimpleNamespace(ptr=ADDRESS << 56 | owner.number << 32 | own - start)

    def copy(self, order: Any = "C") -> Array:
        result = super().copy(order)
        self.watch("copy", result, self)
        return result

    def astype(self, dtype: Any, *args: Any, **options: Any) -> Array:  # type: ignore[override]
        with np.errstate(invalid="ignore", over="ignore"):
            result = super().astype(dtype, *args, **options)
        if result is not self:
            self.watch("astype", result, self)
        return result

    def fill(self, value: Any) -> None:
        self.watch("fill", self)
        super().fill(value)

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        if isinstance(found, np.generic):  # CuPy's elements are views without axes
            return super().__getitem__((*(index if isinstance(index, tuple) else (index,)), ...))
        return found

    def __setitem__(self, index: Any, value: Any) -> None:
        """In memory of more than LARGE bytes nothing is written, and the shapes alone are looked at: to fill the pages
        of a model took most of the time of the tests that have one."""
        self.watch("set", self, value)
        if self.owner.nbytes <= LARGE:
            super().__setitem__(index, value)
            return
        place = np.ndarray.__getitem__(self, index)
        if math.prod(np.broadcast_shapes(place.shape, np.shape(value))) != place.size:
            raise ValueError(f"{np.shape(value)} does not fit into {place.shape}")

    def get(self) -> np.ndarray:
        return np.array(self)

    def set(self, array: np.ndarray, stream: Any) -> None:
        self[...] = array


class Memory(Allocator):
    """Where a captured function's arrays would lie, and the bytes that it would take from the driver."""

    taken = 0

    def _reach(self, end: int) -> None:
        self.taken = max(self.taken, end)


H200 = {
    "MultiProcessorCount": 132, "MaxBlocksPerMultiprocessor": 32, "MaxThreadsPerMultiProcessor": 2048,
    "MaxSharedMemoryPerMultiprocessor": 233472, "MaxSharedMemoryPerBlockOptin": 232448,
    "ReservedSharedMemoryPerBlock": 1024,
}
T4 = {
    "MultiProcessorCount": 40, "MaxBlocksPerMultiprocessor": 16, "MaxThreadsPerMultiProcessor": 1024,
    "MaxSharedMemoryPerMultiprocessor": 65536, "MaxSharedMemoryPerBlockOptin": 65536,
    "ReservedSharedMemoryPerBlock": 0,
}


# Kernels that take views, whose strides are further arguments.
STRIDED = {
    *(("attention", name) for name in ("forward", "backward_q", "backward_kv")), ("attention_short_sm90", "backward"),
    ("attention_sm90", "backward_q"), ("attention_sm90", "backward_kv"),
    ("attention_backward_sm90", "backward"), ("attention_backward_sm90", "finish"),
    *(("shape", name) for name in (
        "copy", "add", "copy_packed", "add_packed", "copy_turned", "add_turned", "turn", "fit")),
    ("matmul", "matmul"), ("gemm", "sum_splits"), ("gemm", "few_rows"), ("gemm_sm90", "gemm_sm90"),
    ("conv2d_wgrad_tf32_sm90", "conv2d_wgrad_tf32_sm90"),
}


@functools.cache
def declared(stem: str) -> dict[str, set[str]]:
    """The constants of a kernel file in tests/variants.txt, with their values."""
    found: dict[str, set[str]] = {}
    for row in VARIANTS[stem]:
        for name, values in row.items():
            found.setdefault(name, set()).update(values)
    return found


class Launch(NamedTuple):
    """What a kernel gets; constants by their C names, `args` as `launch.pack` takes them."""

    stem: str
    name: str
    constants: dict[str, Any]
    grid: tuple[int, ...]
    block: tuple[int, ...]
    args: Sequence[Any]
    shared: int
    cooperative: bool


class Host(ModuleType):
    """Stands for the module `cupy`: notes (stem, name) of each launch, and gives arrays places in `memory`, if set.
    `watch` is told all of each launch.

    A launch or a tensor map that a GPU would refuse fails, and so does a launch with constants that tests/variants.txt
    does not have, with arguments that the kernel does not take, or with a view where it takes whole arrays.
    """

    def __init__(self, hopper: bool, turing: bool) -> None:
        super().__init__("cupy")
        self.shared_bytes = (227 if hopper else 64 if turing else 99) << 10  # of a block, at most
        facts = T4 if turing else H200
        self.launches: list[tuple[str, str]] = []
        self._kernels: dict[tuple, Any] = {}
        self.watch: Callable[[Launch], None] = lambda launch: None
        self.memory: Memory | None = None
        stream = SimpleNamespace(ptr=0, is_capturing=lambda: False)
        self.cuda = SimpleNamespace(
            get_current_stream=lambda: stream, Stream=lambda **options: stream, Event=lambda **options: None,
            Device=lambda device=0: SimpleNamespace(id=device, compute_capability="75" if turing else "90",
                                                    attributes=facts),
            memory=SimpleNamespace(OutOfMemoryError=MemoryError),
            runtime=SimpleNamespace(
                getDevice=lambda: 0, memGetInfo=lambda: (1 << 36, 1 << 36),
                getDeviceProperties=lambda device: {"name": b"NVIDIA H200"},
            ),
        )

    def empty(self, shape: Any, dtype: Any = np.float64, buffer: Any = None) -> Array:
        array = np.ndarray.__new__(Array, shape, dtype, buffer)
        if buffer is None and (array.nbytes <= LARGE or array.dtype.kind == "i"):
            np.ndarray.fill(array, 0)
        if self.memory is not None:
            array.place = self.memory.take(array.nbytes)
        return array

    def ndarray(self, shape: Any, dtype: Any) -> Array:
        return self.empty(shape, dtype)

    def zeros(self, shape: Any, dtype: Any = np.float64) -> Array:
        """Takes no memory until it is written to."""
        size = math.prod(shape) if isinstance(shape, tuple) else shape
        array = self.empty(shape, dtype, np.zeros(size * np.dtype(dtype).itemsize, np.uint8))
        array.watch("zeros", array)
        return array

    def empty_like(self, array: Any) -> Array:
        return self.empty(array.shape, array.dtype)

    def exchange_workspace(self) -> Array:
        return self.empty(16, np.uint8)

    def __getattr__(self, name: str) -> Any:
        function = getattr(np, name)

        def here(result: Any) -> Any:
            if isinstance(result, tuple):
                return tuple(map(here, result))
            if isinstance(result, np.generic):  # CuPy's are arrays without axes
                result = np.asarray(result)
            if not isinstance(result, np.ndarray) or isinstance(result, Array):
                return result
            array = self.empty(result.shape, result.dtype)
            array[...] = result
            return array

        def call(*args: Any, **kwargs: Any) -> Any:
            return here(function(*args, **kwargs))

        return call if callable(function) and not isinstance(function, type) else function

    def kernel(self, stem: str, name: str, **constants: Any) -> Any:
        key = (stem, name, *constants.items())
        if key not in self._kernels:
            self._kernels[key] = self._kernel(stem, name, constants)
        return self._kernels[key]

    def _kernel(self, stem: str, name: str, constants: dict[str, Any]) -> Any:
        known, named = declared(stem), compiler.c_names(compiler.kernel_path(stem), constants)
        assert named.keys() == known.keys(), f"{stem} has not the constants {list(named)} but {list(known)}"
        for constant, value in named.items():
            assert isinstance(value, int) or value in known[constant], f"{stem} has no {constant}={value}: {known}"
        takes = compiler.declarations(stem).signature(name, named)

        def run(grid: tuple[int, ...], block: tuple[int, ...], args: tuple, shared_mem: int = 0,
                cooperative: bool = False) -> None:
            sizes = zip(grid, (2**31 - 1, 65535, 65535), strict=False)
            assert all(1 <= size <= most for size, most in sizes), f"{stem}, {name}: a grid of {grid}"
            fits = all(1 <= size <= most for size, most in zip(block, (1024, 1024, 64), strict=False))
            assert fits and math.prod(block) <= 1024, f"{stem}, {name}: a block of {block}"
            assert shared_mem <= self.shared_bytes, f"{stem}, {name}: {shared_mem} bytes of shared memory"
            assert not cooperative or math.prod(grid) <= H200["MultiProcessorCount"], f"{stem}, {name}: {grid} at once"
            kinds, values = launch.pack(args)
            takes.check(kinds)
            try:
                struct.pack("".join(launch.formats(kinds)), *launch.as_float32(values))
            except struct.error:
                raise takes.out_of_range(values) from None
            for parameter, arg in zip(takes.parameters, args, strict=True):
                whole = not isinstance(arg, Array) or arg.flags.c_contiguous or (stem, name) in STRIDED
                assert whole, f"{takes} got a view for '{parameter.name}': strides {arg.strides}, shape {arg.shape}"
            self.launches.append((stem, name))
            self.watch(Launch(stem, name, named, grid, block, args, shared_mem, cooperative))

        return run


def encode(pointer: int, kind: int, shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...],
           swizzle: int, windows: tensor_map.Windows | None = None) -> bytes:
    """Stands for the driver's making of a tensor map: in its words is what it was asked for, see `decode`."""
    assert pointer % 16 == 0 and len(shape) == (4 if windows else len(box)) == len(strides) + 1 <= 5
    assert all(0 < size < 2**32 for size in shape) and all(stride % 16 == 0 for stride in strides), (shape, strides)
    assert all(1 <= size <= 256 for size in box), box
    sizes = box
    if windows is not None:
        corners = *windows.first, *windows.beyond(shape[1:3])
        assert all(-128 <= corner < 128 for corner in corners) and all(1 <= step <= 8 for step in windows.step), windows
        sizes = *box, *(corner + 128 for corner in corners), *windows.step
    words = [MAP << 56 | len(sizes) << 20 | len(shape) << 16 | kind << 8 | swizzle, pointer, *shape, *strides]
    words += [sum(size << 10 * axis for axis, size in enumerate(part)) for part in (sizes[:6], sizes[6:])]
    return struct.pack("=16Q", *words, *[0] * (16 - len(words)))


class Map(NamedTuple):
    """What `encode` was asked for; behind the box, of windows, the two corners, 128 added, and the steps."""

    pointer: int
    kind: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int


def decode(words: Sequence[int]) -> Map:
    """The tensor map in 16 words."""
    rank = words[0] >> 16 & 15
    shape, strides, box = words[2 : 2 + rank], words[2 + rank : 1 + 2 * rank], words[1 + 2 * rank :]
    sizes = tuple(box[axis // 6] >> 10 * (axis % 6) & 1023 for axis in range(words[0] >> 20 & 15))
    return Map(words[1], words[0] >> 8 & 255, tuple(shape), tuple(strides), sizes, words[0] & 255)


def loaded_modules() -> list[ModuleType]:
    return [loaded for name, loaded in list(sys.modules.items()) if name.startswith("cudiff")]


def forget() -> None:
    """Empty all caches: some hold what was chosen for a GPU."""
    for loaded in loaded_modules():
        for value in vars(loaded).values():
            getattr(value, "cache_clear", lambda: None)()
    tiles.forget()
    for table in select.FAMILIES.values():
        table.forget()


def pretend(monkeypatch: Any, hopper: bool, turing: bool = False, kind: type[Host] = Host) -> Any:
    """Have all of cudiff take a host of this kind for one with a GPU, of Hopper, or older with its size, or a T4. To be
    followed by `forget`."""
    forget()
    host = kind(hopper, turing)

    def current_target() -> select.Target:
        portable = not hopper or os.environ.get("CUDIFF_PORTABLE") == "1"
        return select.Target(*("Tesla T4", "sm_75") if turing else ("NVIDIA H200", "sm_90" if portable else "sm_90a"))

    stand_ins = {
        "get_cupy": functools.cache(lambda: host), "cuda_status": lambda: (True, "host"),
        "current_target": current_target,
        "exchange_workspace": host.exchange_workspace,
        "device_of_type": functools.cache(lambda kind: "cuda" if issubclass(kind, Array) else "cpu"),
        "array_module": lambda device: host if device == "cuda" else np,
        "map_at": functools.cache(encode),
    }
    for loaded in loaded_modules():
        for attribute, stand_in in stand_ins.items():
            if hasattr(loaded, attribute):
                monkeypatch.setattr(loaded, attribute, stand_in)
    monkeypatch.setattr(launch, "kernel", host.kernel)
    return host
