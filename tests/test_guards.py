"""The guards around arrays of tests on a GPU, on host memory that stands for its own."""

import ctypes
import types

import numpy as np
import pytest

from tests import guards
from tests.guards import SIDE, Guards


class Pointer:
    """A cupy.cuda.MemoryPointer of host memory."""

    def __init__(self, memory, offset):
        self.memory, self.ptr = memory, memory.ptr + offset

    def __add__(self, offset):
        return Pointer(self.memory, self.ptr - self.memory.ptr + offset)

    def memset_async(self, byte, size):
        ctypes.memset(self.ptr, byte, size)


class Pool:
    def malloc(self, size):
        data = np.zeros(size + 512, np.uint8)
        start = -data.ctypes.data % 512
        return Pointer(types.SimpleNamespace(ptr=data.ctypes.data + start, data=data), 0)


@pytest.fixture
def memory():
    runtime = types.SimpleNamespace(getDevice=lambda: 0, deviceSynchronize=lambda: None, memcpy=lambda to, at, size, _:
                                    ctypes.memmove(to, at, size), memcpyDeviceToHost=2)
    return Guards(types.SimpleNamespace(
        MemoryPool=Pool, MemoryPointer=Pointer, runtime=runtime,
        UnownedMemory=lambda ptr, size, owner, device: types.SimpleNamespace(ptr=ptr, size=size, owner=owner)))


@pytest.mark.parametrize("size", [1, 7, 512, 1000])
def test_a_whole_array_may_be_written_and_starts_as_nan_bytes_where_cupys_would(memory, size):
    array = memory.allocate(size)
    assert array.ptr % 512 == 0 and ctypes.string_at(array.ptr, size) == b"\xff" * size
    array.memset_async(3, size)
    assert memory.broken() == []


@pytest.mark.parametrize("freed", [False, True])
@pytest.mark.parametrize("at, place", [(-1, "1 bytes before it"), (-SIDE, "512 bytes before it"),
                                       (6, "1 bytes behind it"), (5 + SIDE, "512 bytes behind it")])
def test_one_byte_written_outside_is_seen_once(memory, freed, at, place):
    array = memory.allocate(6)
    ctypes.memset(array.ptr + at, 0xFF, 1)
    if freed:
        del array
    assert memory.broken() == [f"an array of 6 bytes was written to, {place}"]
    others = memory.allocate(6)
    assert memory.broken() == [] and others.ptr


def test_a_copy_from_behind_one_array_to_behind_another_is_seen(memory):
    x, out = memory.allocate(4), memory.allocate(4)
    ctypes.memmove(out.ptr, x.ptr, 5)
    assert memory.broken() == ["an array of 4 bytes was written to, 1 bytes behind it"]


def test_what_is_freed_is_held_until_it_was_looked_at_up_to_a_bound(memory, monkeypatch):
    monkeypatch.setattr(guards, "HELD", 250)
    for _ in range(4):
        memory.allocate(100)
    assert memory.held == 200 and len(memory.waiting) + len(memory.freed) == 3
    assert memory.broken() == [] and not memory.waiting and memory.held == 0
