"""The host's side of the CUDA path on a machine without a GPU: arrays without contents, launches noted and not made."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from cudiff.cuda import module, tensor_map
from cudiff.cuda.memory import Places


class Array(np.ndarray):
    """Stands for CuPy's array. What a kernel would have written is undefined."""

    place: Any = None

    @property
    def data(self) -> Any:  # type: ignore[override]
        return SimpleNamespace(ptr=self.__array_interface__["data"][0])

    def get(self) -> np.ndarray:
        return np.array(self)

    def set(self, array: np.ndarray, stream: Any) -> None:
        self[...] = array


class Memory(Places):
    """Where a captured function's arrays would lie, and the bytes that it would take from the driver."""

    taken = 0

    def _reach(self, end: int) -> None:
        self.taken = max(self.taken, end)


class Host(ModuleType):
    """Stands for the module `cupy`: notes (stem, name) of each launch, and gives arrays places in `memory`, if set."""

    ndarray = Array

    def __init__(self) -> None:
        super().__init__("cupy")
        self.launches: list[tuple[str, str]] = []
        self.memory: Memory | None = None
        stream = SimpleNamespace(ptr=0, is_capturing=lambda: False)
        self.cuda = SimpleNamespace(
            get_current_stream=lambda: stream, Stream=lambda **options: stream, Event=lambda **options: None,
            Device=lambda: SimpleNamespace(id=0, compute_capability="90"),
            runtime=SimpleNamespace(getDevice=lambda: 0, memGetInfo=lambda: (1 << 36, 1 << 36)),
        )

    def empty(self, shape: Any, dtype: Any = np.float64) -> Array:
        array = np.ndarray.__new__(Array, shape, dtype)
        if self.memory is not None:
            array.place = self.memory.take(array.nbytes)
        return array

    def empty_like(self, array: Any) -> Array:
        return self.empty(array.shape, array.dtype)

    def __getattr__(self, name: str) -> Any:
        function = getattr(np, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            if not isinstance(result, np.ndarray) or isinstance(result, Array):
                return result
            array = self.empty(result.shape, result.dtype)
            array[...] = result
            return array

        return call if callable(function) and not isinstance(function, type) else function

    def kernel(self, stem: str, name: str, **constants: Any) -> Any:
        return lambda *args, **kwargs: self.launches.append((stem, name))


def loaded_modules() -> list[ModuleType]:
    return [loaded for name, loaded in list(sys.modules.items()) if name.startswith("cudiff")]


def forget() -> None:
    """Empty all caches: some hold what was chosen for a GPU."""
    for loaded in loaded_modules():
        for value in vars(loaded).values():
            getattr(value, "cache_clear", lambda: None)()


def pretend(monkeypatch: Any, hopper: bool) -> Host:
    """Have all of cudiff take this host for one with a GPU, of Hopper or older. To be followed by `forget`."""
    forget()
    host = Host()
    stand_ins = {
        "get_cupy": lambda: host, "cuda_status": lambda: (True, "host"), "hopper": lambda: hopper,
        "device_of": lambda array: "cuda" if isinstance(array, Array) else "cpu",
        "array_module": lambda device: host if device == "cuda" else np,
    }
    for loaded in loaded_modules():
        for attribute, stand_in in stand_ins.items():
            if hasattr(loaded, attribute):
                monkeypatch.setattr(loaded, attribute, stand_in)
    monkeypatch.setattr(module, "kernel", host.kernel)
    words = np.zeros(1, np.dtype([("words", np.uint64, 16)]))
    monkeypatch.setattr(tensor_map, "_encode", lambda *args: words)
    return host
