"""Work on all cores: nothing is lost, nothing depends on how many there are, and errors come through."""

import ctypes
import os
import signal
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from threadpoolctl import ThreadpoolController

from cudiff import ops, threads
from cudiff.tensor import Tensor


@pytest.mark.parametrize("count, item_bytes", [(0, 4), (1, 1 << 30), (7, 1 << 20), (32, 300_000), (5000, 8)])
def test_a_cut_covers_everything_once(count, item_bytes):
    parts = threads.cut(count, item_bytes)
    assert [i for part in parts for i in range(count)[part]] == list(range(count))
    lengths = [part.stop - part.start for part in parts]
    assert max(lengths) - min(lengths) <= 1
    assert max(lengths) <= 1 or max(lengths) * item_bytes <= threads.PART_BYTES


def test_results_come_in_order_and_errors_come_through(monkeypatch):
    monkeypatch.setattr(threads, "CORES", 3)
    before = ThreadpoolController().info()
    assert threads.parallel_map(lambda i: i * i, range(100)) == [i * i for i in range(100)]
    with pytest.raises(ZeroDivisionError):
        threads.parallel_map(lambda i: 1 // (i - 50), range(100))
    assert threads.parallel_map(str, []) == []
    assert ThreadpoolController().info() == before


def test_every_thread_treats_floating_errors_as_the_caller_does(monkeypatch):
    monkeypatch.setattr(threads, "CORES", 2)
    meet = threading.Barrier(2, timeout=10)  # each part in a thread of its own

    def divide(part):
        meet.wait()
        return np.divide(1.0, np.zeros(1))

    with np.errstate(divide="ignore"):
        assert np.isinf(threads.parallel_map(divide, range(2))).all()
    with np.errstate(divide="raise"), pytest.raises(FloatingPointError):
        threads.parallel_map(divide, range(2))


def test_a_c_library_that_takes_32_mb_at_most_gets_them(monkeypatch):
    taken = {}

    def mallopt(parameter, value):
        accepted = parameter != -3 or value <= 32 << 20
        return int(accepted and taken.setdefault(parameter, value) == value)

    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=mallopt))
    threads.keep_freed_memory()
    assert taken == {-1: 1 << 30, -3: 32 << 20}


def test_results_do_not_depend_on_the_cores(monkeypatch):
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape, dtype=np.float32) for shape in ((9, 16, 16, 32), (32, 3, 3, 32), (32,))]

    def gradients(cores):
        monkeypatch.setattr(threads, "CORES", cores)
        x, weight, bias = (Tensor(array, device="cpu", requires_grad=True) for array in arrays)
        h = ops.group_norm(x, bias, bias, 8, silu=True)
        h = ops.conv2d(h, weight, bias, padding=1)
        out = ops.linear(h, ops.reshape(weight[:, 0, 0], (32, 32)), bias)
        ops.sum(ops.square(out)).backward()
        return [out.numpy(), *(tensor.grad for tensor in (x, weight, bias))]

    for one, three in zip(gradients(1), gradients(3), strict=True):
        np.testing.assert_array_equal(one, three)


def test_parts_run_at_one_time_on_so_many_cores(monkeypatch):
    """Each of two parts waits for the other."""
    monkeypatch.setattr(threads, "CORES", 2)
    meeting = threading.Barrier(2)
    assert sorted(threads.parallel_map(lambda _: meeting.wait(20), [0, 1])) == [0, 1]


def test_how_many_parts_there_are(monkeypatch):
    """One of less than LEAST_BYTES in all, else an even number of PART_BYTES at most; no part without an item."""
    monkeypatch.setattr(threads, "PART_BYTES", 100)
    monkeypatch.setattr(threads, "LEAST_BYTES", 80)
    bytes_in_all = (0, 79, 80, 101, 200, 201, 400, 401, 1000)
    assert [len(threads.cut(count, 1)) for count in bytes_in_all] == [1, 1, 2, 2, 2, 4, 4, 6, 10]
    assert [len(threads.cut(count, 1000)) for count in (0, 1, 3)] == [1, 1, 3]


@pytest.mark.parametrize("cores, parts", [(1, 4), (2, 5), (3, 2), (3, 3)])
def test_no_more_threads_than_cores_or_parts_each_with_one_of_blas(monkeypatch, cores, parts):
    def blas_threads():
        return max(info["num_threads"] for info in ThreadpoolController().info() if info["user_api"] == "blas")

    seen, at_once, most = [], [], min(cores, parts)
    meeting = threading.Barrier(most)

    def work(part):
        at_once.append(part)
        if part < most:  # all threads have begun
            meeting.wait(20)
        seen.append((threading.get_ident(), blas_threads()))
        at_once.remove(part)
        return len(at_once)

    monkeypatch.setattr(threads, "CORES", cores)
    threads._pool.cache_clear()
    with ThreadpoolController().limit(limits=2, user_api="blas"):
        assert max(threads.parallel_map(work, range(parts))) < most
    assert len({thread for thread, _ in seen}) == most and {limit for _, limit in seen} == {1}
    threads._pool.cache_clear()


def test_the_cores_are_those_that_the_process_may_use():
    assert len(os.sched_getaffinity(0)) == threads.CORES


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_child_that_was_forked_while_another_thread_computes_computes_too():
    began, done = threading.Event(), threading.Event()
    thread = threading.Thread(target=threads.parallel_map, args=(lambda _: (began.set(), done.wait(20)), [0]))
    thread.start()
    assert began.wait(20)
    threading.Timer(0.2, done.set).start()
    child = os.fork()  # waits until nothing is computed
    if child == 0:
        os._exit(threads.parallel_map(lambda number: number, [7])[0])
    until = time.monotonic() + 20
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < until:
        time.sleep(0.01)
    thread.join()
    if ended == (0, 0):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended[0] == child and os.waitstatus_to_exitcode(ended[1]) == 7
    assert threads.parallel_map(str, [1, 2]) == ["1", "2"]
