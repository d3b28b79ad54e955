"""How kernels are launched: what each gets for a Python argument, and that none starts work too early."""

import re
import struct
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from cudiff.cuda import device as devices
from cudiff.cuda import select
from cudiff.cuda.accumulate import add_into
from cudiff.cuda.compiler import kernel_folder
from cudiff.cuda.graph import capture
from cudiff.cuda.launch import as_float32, formats, pack, padded_shared
from cudiff.errors import CudiffError
from cudiff.tensor import Tensor
from tests.compile_kernels import compile_source


def packed_as(args):
    kinds, values = pack(args)
    return struct.pack("".join(formats(kinds)), *values)


@pytest.mark.parametrize("value, dtype", [
    (3, np.int32), (True, np.int32), (np.bool_(True), np.int32), (0.5, np.float32), (None, np.uint64),
    (np.float32(0.5), np.float32), (np.float64(0.5), np.float64), (np.int32(3), np.int32), (np.int64(3), np.int64),
    (np.uint32(3), np.uint32), (np.uint64(3), np.uint64),
])
def test_an_argument_is_packed_as_its_c_type(value, dtype):
    packed = packed_as([value])
    assert len(packed) == 8
    assert np.frombuffer(packed, dtype, 1)[0] == (value or 0)


def test_floats_that_float32_does_not_hold_are_infinite():
    found = as_float32([1e40, -1e40, 0.5, 1 << 40, np.float64(1e40)])
    assert found == [np.inf, -np.inf, 0.5, 1 << 40, 1e40]


@pytest.mark.parametrize("capability, driver, portable, architecture", [
    (90, 13000, "", "sm_90a"), (90, 12010, "0", "sm_90a"), (90, 12000, "", "sm_90"), (90, 13000, "1", "sm_90"),
    (89, 13000, "", "sm_89"), (120, 13000, "1", "sm_120"),
])
def test_where_hoppers_kernels_run(monkeypatch, capability, driver, portable, architecture):
    monkeypatch.setenv("CUDIFF_PORTABLE", portable)
    runtime = SimpleNamespace(getDevice=lambda: 3)
    monkeypatch.setattr(select, "get_cupy", lambda: SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    monkeypatch.setattr(select, "device", {3: H200._replace(capability=capability)}.__getitem__)
    monkeypatch.setattr(select, "driver_version", lambda: driver)
    select._target.cache_clear()
    assert select.current_target() == ("NVIDIA H200", architecture, 132)
    select._target.cache_clear()


@pytest.mark.parametrize("compute, architecture, target, of_block", [
    (None, "sm_90a", "sm_90a", 227), ("75", "compute_75", "sm_75", 64), ("80", "compute_80", "sm_80", 163),
])
def test_a_gpu_may_stand_for_an_older_one(host_of, monkeypatch, compute, architecture, target, of_block):
    monkeypatch.setattr(select, "_target", select._target.__wrapped__)
    asked = select.current_target
    host_of(True)
    if compute is not None:
        monkeypatch.setenv("CUDIFF_COMPUTE", compute)
    monkeypatch.setattr(select, "driver_version", lambda: 13000)
    monkeypatch.setattr(select, "current_target", asked)
    found = devices.current_device()
    assert (found.architecture, found.of_block) == (architecture, of_block << 10)
    assert select.current_target().architecture == target


@pytest.mark.parametrize("number", [75, 80])
def test_a_gpu_that_stands_for_an_older_one_gets_ptx(number, nvrtc):
    """Code of another generation does not load."""
    text, _ = compile_source("cast", f"compute_{number}", {"FROM": "half", "TO": "float"})
    assert f".target sm_{number}".encode() in text


@pytest.mark.parametrize("compute", ["90", "90a", "120", "7.5", ""])
def test_an_older_one_that_there_is_not_is_refused(host_of, monkeypatch, compute):
    host_of(True)
    monkeypatch.setenv("CUDIFF_COMPUTE", compute)
    with pytest.raises(CudiffError, match="is none of 75, 80, 86, 89 that NVIDIA H200 runs: leave it out"):
        devices.current_device()


def test_numpy_arrays_are_passed_whole():
    table = np.arange(3, dtype=np.int32)
    assert packed_as([table]) == table.tobytes() + bytes(4)


class FakeArray:
    """As much of a CuPy array as a launch looks at."""

    def __init__(self, address):
        self.data, self.dtype, self.flags = self, np.dtype(np.float32), self
        self.ptr, self.c_contiguous = address, True


def test_arrays_pass_their_address():
    array = FakeArray(1 << 40)
    assert pack([array]) == ([np.float32], [1 << 40])
    assert np.frombuffer(packed_as([array]), np.uint64) == 1 << 40


@pytest.mark.parametrize("path", sorted(kernel_folder().glob("*/*.cu")), ids=lambda path: path.stem)
def test_every_kernel_waits_for_the_one_before(path):
    """Itself, or in a function of its file that it calls."""
    functions = re.split(r"^(?=[^\n]*__(?:global|device)__)", path.read_text(), flags=re.MULTILINE)
    waits = {"wait_for_previous"}
    for function in functions:
        if "__device__" in function and "wait_for_previous();" in function:
            waits.add(re.search(r"(\w+)\(", function.split("__forceinline__")[-1]).group(1))
    for kernel in (function for function in functions if "__global__" in function):
        assert set(re.findall(r"^\s+(\w+)(?:<.*>)?\(", kernel, re.MULTILINE)) & waits, f"{path}: {kernel[:100]}"


H200 = devices.Device("NVIDIA H200", 90, multiprocessors=132, blocks=32, threads=2048, shared=233472, of_block=232448,
                      reserved=1024)


@pytest.mark.parametrize("blocks, threads, each", [
    (1, 32, 1), (132, 384, 1), (133, 256, 2), (256, 256, 2), (1056, 256, 8),
])
def test_blocks_that_fit_at_once_spread_evenly(blocks, threads, each):
    taken = padded_shared(blocks, threads, H200) + H200.reserved
    assert taken <= H200.of_block and each * (taken + 127) <= H200.shared < (each + 1) * taken


def test_blocks_that_do_not_fit_at_once_are_not_padded():
    assert padded_shared(1057, 256, H200) == padded_shared(32 * 132 + 1, 32, H200) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [False, True])
def test_kernels_keep_their_order_among_copies_and_streams(captured):
    import cupy

    rounds, calls = 40, 5
    large, one = (cupy.full(1 << 22, value, np.float32) for value in (0, 1))
    small, total = cupy.zeros(33, np.float32), cupy.zeros(33, np.float32)
    aside = cupy.cuda.Stream(non_blocking=True)

    def work():
        stream = cupy.cuda.get_current_stream()
        for _ in range(rounds):
            add_into(large, one)
            add_into(small, large[-33:])
            fork, join = cupy.cuda.Event(disable_timing=True), cupy.cuda.Event(disable_timing=True)
            fork.record(stream)
            with aside:
                aside.wait_event(fork)
                add_into(total, small)
                join.record(aside)
            add_into(large, one)
            stream.wait_event(join)
            small.fill(0)
            cupy.subtract(large, one, out=large)
            add_into(small, one[:33])
        return Tensor(total)

    work = capture(work, device="cuda") if captured else work
    for _ in range(calls):
        work()
    # Each round adds 1 to `large` and then, but in the first, 1 + large to `total`.
    count = rounds * calls
    np.testing.assert_array_equal(total.get(), np.float32(count * (count + 1) / 2 + count - 1))
    np.testing.assert_array_equal(large.get(), np.float32(count))


@pytest.mark.gpu
def test_a_thread_may_begin_with_a_launch():
    import cupy

    total, term = cupy.zeros(5, np.float32), cupy.ones(5, np.float32)
    add_into(total, term)
    cupy.cuda.Device().synchronize()
    thread = threading.Thread(target=add_into, args=(total, term))
    thread.start()
    thread.join()
    cupy.cuda.Device().synchronize()
    np.testing.assert_array_equal(total.get(), 2)
