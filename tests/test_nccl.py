"""NCCL as the group calls it, by a stand-in; with a GPU a communicator of one, captured and destroyed."""

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from cudiff.cuda import nccl, peers
from cudiff.cuda.compiler import compiling_ahead
from cudiff.errors import CudiffError

IDENTITY = bytes(range(128))


class Stream:
    """Notes what it waits for; within `with` it is the current one."""

    def __init__(self, pointer, calls, current=None):
        self.ptr, self.calls, self.current = pointer, calls, current

    def wait_event(self, event):
        self.calls.append(("wait", self.ptr))

    def __enter__(self):
        self.current.append(self)

    def __exit__(self, *details):
        self.current.pop()


@pytest.fixture
def library(monkeypatch):
    """A stand-in for CuPy's NCCL: what it was called with, and what fails."""
    calls = []

    class Communicator:
        def __init__(self, size, identity, rank):
            calls.append(("join", size, identity, rank))

        def __getattr__(self, name):
            def call(*args):
                calls.append((name, *args))
                if module.fails:
                    raise module.NcclError("NCCL_ERROR_SYSTEM_ERROR")

            return call

    module = ModuleType("cupy.cuda.nccl")
    module.available, module.fails, module.calls = True, False, calls
    module.NcclError, module.NcclCommunicator = type("NcclError", (RuntimeError,), {}), Communicator
    module.NCCL_FLOAT32, module.NCCL_UINT8, module.NCCL_SUM = 7, 1, 0
    module.groupStart, module.groupEnd = (lambda name=name: calls.append((name,)) for name in ("start", "end"))
    module.get_unique_id = lambda: IDENTITY
    cuda = ModuleType("cupy.cuda")
    current = [Stream(99, calls)]
    cuda.nccl, cuda.get_current_stream = module, lambda: current[-1]
    cuda.Stream = lambda non_blocking: Stream(77, calls, current)
    cuda.Event = lambda disable_timing: SimpleNamespace(record=lambda stream: calls.append(("record", stream.ptr)))
    cuda.runtime = SimpleNamespace(runtimeGetVersion=lambda: 13000,
                                   ipcCloseMemHandle=lambda pointer: calls.append(("unmap", pointer)))
    cuda.Device = lambda: SimpleNamespace(synchronize=lambda: calls.append(("synchronize",)))
    for name, value in (("cupy", ModuleType("cupy")), ("cupy.cuda", cuda), ("cupy.cuda.nccl", module)):
        monkeypatch.setitem(sys.modules, name, value)
    for user in (nccl, peers):
        monkeypatch.setattr(user, "get_cupy", lambda: SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(nccl, "device_of", lambda array: "cuda")
    return module


ARRAY = SimpleNamespace(data=SimpleNamespace(ptr=1234), size=10, nbytes=40, dtype=np.dtype(np.float32))


def test_all_take_the_identity_of_process_0(library):
    nccl.Nccl(0, 2, lambda value: [value, ""])
    nccl.Nccl(1, 2, lambda value: [IDENTITY[::-1].hex(), value])
    assert library.calls == [("join", 2, IDENTITY, 0), ("join", 2, IDENTITY[::-1], 1)]


def test_sums_and_copies_are_in_place_on_the_current_stream(library):
    engine = nccl.Nccl(0, 2, lambda value: [value, ""])
    library.calls.clear()
    engine.all_reduce(ARRAY)
    engine.broadcast(ARRAY, 1)
    with compiling_ahead():
        engine.all_reduce(ARRAY)  # which other processes may not do now
    engine.close()
    assert library.calls == [("allReduce", 1234, 1234, 10, 7, 0, 99), ("bcast", 1234, 40, 1, 1, 99), ("synchronize",),
                             ("destroy",)]


def test_sums_beside_others_wait_for_what_was_before_and_are_waited_for(library):
    engine = nccl.Nccl(0, 2, lambda value: [value, ""])
    library.calls.clear()
    engine.start_sums([ARRAY, ARRAY], 0, None)
    engine.finish_sums()
    one = ("allReduce", 1234, 1234, 10, 7, 0, 77)
    assert library.calls == [("record", 99), ("wait", 77), ("start",), one, one, ("end",), ("record", 77), ("wait", 99)]


def test_parts_go_from_each_process_to_all_in_one_launch(library):
    """All that have elements; none while everything is compiled, which the others need not do now."""
    engine = nccl.Nccl(1, 3, lambda value: [IDENTITY.hex(), value, ""])
    library.calls.clear()
    engine.all_gather([ARRAY, ARRAY, SimpleNamespace(size=0)])
    with compiling_ahead():
        engine.all_gather([ARRAY])
    assert library.calls == [("start",), ("bcast", 1234, 40, 1, 0, 99), ("bcast", 1234, 40, 1, 1, 99), ("end",)]


class Copies:
    """Stands for `Peers`: notes what it is called for, with the current stream."""

    def __init__(self, *given):
        self.given, self.calls, self.summed = given, [], False

    def addresses(self, array):
        return [(1, 2)] if array is ARRAY else []

    def __getattr__(self, name):
        def call(*given):
            self.calls.append((name, nccl.get_cupy().cuda.get_current_stream().ptr, *given))
            self.summed = name == "finish" or (self.summed and name != "wait_for_weights")

        return call


def test_a_sharded_step_of_one_machine_goes_by_copies(library, monkeypatch):
    """Gradients beside the backward. What is gathered outside of a step, and summed otherwise, goes by NCCL."""
    monkeypatch.setattr(nccl, "Peers", Copies)
    engine = nccl.Nccl(0, 2, lambda value: [value, ""], one_machine=True)
    copies = engine.register("gradient", "weights", ["own", "other"])
    assert copies.given[:4] == (0, "gradient", "weights", ["own", "other"])
    copies.given[5].addresses.append(5)
    library.calls.clear()
    engine.start_sums([ARRAY], 3, copies)
    assert engine.peers(ARRAY) == []
    engine.finish_sums()
    engine.gather_sums(ARRAY)
    assert engine.peers(ARRAY) == [(1, 2)]
    with pytest.raises(CudiffError, match="not of the gradient that was summed"):
        engine.peers("another")
    assert {call[0] for call in library.calls} == {"record", "wait"}
    engine.all_gather([ARRAY, ARRAY])  # the average's, in the middle of a step
    assert [call[0] for call in library.calls[-4:]] == ["start", "bcast", "bcast", "end"]
    engine.finish_update([ARRAY, ARRAY])
    assert copies.calls == [
        ("start", 77, [ARRAY], 3), ("finish", 77), ("gather_sums", 99, ARRAY), ("wait_for_weights", 99)]
    library.calls.clear()
    engine.finish_update([ARRAY, ARRAY])  # of no step
    engine.start_sums([ARRAY], 0, None)  # of a model that is not registered
    engine.finish_sums()
    assert engine.peers(ARRAY) == [] and engine.gather_sums(ARRAY) is None and len(copies.calls) == 4
    assert [call[0] for call in library.calls if call[0] not in ("record", "wait")] == [
        "start", "bcast", "bcast", "end", "start", "allReduce", "end"]
    engine.close()
    assert library.calls[-2:] == [("unmap", 5), ("destroy",)]


@pytest.mark.parametrize("one_machine", [True, False])
def test_without_each_others_memory_all_goes_by_nccl(one_machine, library, monkeypatch):
    def refuse(*given):
        assert one_machine
        raise OSError("a process cannot map another's memory")

    monkeypatch.setattr(nccl, "Peers", refuse)
    engine = nccl.Nccl(0, 2, lambda value: [value, ""], one_machine)
    assert engine.register("gradient", "weights", ["own", "other"]) is None
    library.calls.clear()
    engine.start_sums([ARRAY], 0, None)
    engine.finish_sums()
    assert engine.peers(ARRAY) == [] and engine.gather_sums(ARRAY) is None
    engine.finish_update([ARRAY, ARRAY])
    assert [call[0] for call in library.calls if call[0] not in ("record", "wait")] == [
        "start", "allReduce", "end", "start", "bcast", "bcast", "end"]


def test_what_fails_is_one_line(library):
    engine = nccl.Nccl(0, 2, lambda value: [value, ""])
    library.fails = True
    with pytest.raises(CudiffError, match=r"NCCL failed \(NCCL_ERROR_SYSTEM_ERROR\): NCCL_DEBUG=INFO"):
        engine.all_reduce(ARRAY)
    library.get_version = lambda: 22809
    assert nccl.version() == "2.28.9"
    library.available = False
    assert nccl.version() == "not usable: GPUs talk by NCCL, which is not installed: pip install nvidia-nccl-cu13"
    with pytest.raises(CudiffError, match="pip install nvidia-nccl-cu13"):
        nccl.Nccl(0, 2, lambda value: [value, ""])


@pytest.mark.gpu
def test_a_captured_sum_and_the_end(rng):
    """Of one process the sum is the array. The graph goes before the communicator, which else waits for it."""
    from cudiff import Tensor
    from cudiff.cuda.graph import capture

    pytest.importorskip("cupy.cuda.nccl")
    engine = nccl.Nccl(0, 1, lambda value: [value])
    values = rng.standard_normal(1000).astype(np.float32)
    held, result = Tensor(values, device="cuda"), Tensor(np.zeros(1000, np.float32), device="cuda")

    def step():
        result.data[...] = held.data * 2
        engine.all_reduce(result.data)
        return result

    captured = capture(step, device="cuda", precompile=True)
    for number in range(6):
        held.data[...] = Tensor(values + number, device="cuda").data
        np.testing.assert_array_equal(captured().numpy(), 2 * (values + number))
    on_host = values.copy()
    engine.broadcast(on_host, 0)
    np.testing.assert_array_equal(on_host, values)
    captured.forget()
    engine.close()
