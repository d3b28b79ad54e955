"""The memory of captured functions: where arrays are put, and that freed places join. And how much the host has."""

import gc
import itertools
import mmap
import sys
import threading
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from cudiff import memory as host
from cudiff.cuda import memory
from cudiff.cuda.memory import ALIGNMENT, PAGE, Allocator, Arena
from cudiff.errors import CudiffError

KB = 1024


class Line(Allocator):
    """Remembers how far it had to reach, and may end."""

    def __init__(self, end=1 << 40):
        super().__init__()
        self.reached, self.end = 0, end

    def _reach(self, end):
        if end > self.end:
            raise MemoryError
        self.reached = max(self.reached, end)


def test_places_are_aligned_and_do_not_overlap(rng):
    line, places = Line(), []
    for _ in range(2000):
        if places and rng.random() < 0.5:
            places.pop(rng.integers(len(places)))
        places.append(line.take(int(rng.integers(0, 5000))))
        ends = sorted((place.start, place.start + place.size) for place in places)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))
    assert all(place.start % ALIGNMENT == 0 for place in places)
    assert [line.take(size).size // ALIGNMENT for size in (0, 1, ALIGNMENT, ALIGNMENT + 1)] == [1, 1, 1, 2]
    places.clear()
    assert line.take(line.reached).start == 0


def test_the_smallest_free_place_is_taken_and_of_two_the_lower():
    line = Line()
    sizes = (8, 1, 4, 1, 2, 1, 4, 1)
    places = [line.take(size * KB) for size in sizes]
    starts = [place.start for place in places]
    assert starts == [KB * sum(sizes[:i]) for i in range(len(sizes))]
    for i in (0, 6, 2, 4):
        places[i] = None
    taken = [line.take(size * KB) for size in (3, 2, 4, 9, 5)]
    assert [place.start for place in taken] == [starts[2], starts[4], starts[6], KB * sum(sizes), starts[0]]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)])
def test_freed_neighbours_join(order):
    line = Line()
    places, last = [line.take(2 * KB) for _ in range(3)], line.take(KB)
    for i in order:
        places[i] = None
    assert line.take(6 * KB).start == 0
    assert (last.start, line.reached) == (6 * KB, 7 * KB)


def test_a_place_is_free_once_nothing_holds_it():
    line = Line()
    place = line.take(KB)
    other = place
    del place
    assert line.take(KB).start == KB
    del other
    assert line.take(KB).start == 0


def test_places_may_be_given_back_by_any_thread():
    line, held, failures, lock = Line(), [], [], threading.Lock()

    def use():
        try:
            for i in range(300):
                place = line.take((i % 7 + 1) * KB)
                with lock:
                    held.append(place)
                    place = held.pop(i % len(held)) if i % 3 else None  # given back where the next takes its place
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    held.clear()
    assert not failures
    assert line.take(line.reached).start == 0


def test_where_memory_ends_nothing_is_lost():
    line = Line(end=4 * KB)
    place = line.take(3 * KB)
    with pytest.raises(MemoryError):
        line.take(2 * KB)
    assert line.take(KB).start == 3 * KB
    del place
    assert line.take(4 * KB).start == 0


def step(line):
    """What a training step of a U-Net takes: outputs that wait for the backward, gradients and short-lived parts."""
    live = peak = 0
    held = {}

    def take(name, size):
        nonlocal live, peak
        held[name] = line.take(size)
        live += held[name].size
        peak = max(peak, live)

    def free(name):
        nonlocal live
        live -= held.pop(name).size

    sizes = [(16 << 20) >> min(level, 8 - level) for level in range(9) for _ in range(6)]
    for i, size in enumerate(sizes):
        take(("parts", i), size // 16)
        take(("out", i), size)
        take(("statistics", i), 4096)
        free(("parts", i))
    for i, size in reversed(list(enumerate(sizes))):
        take(("gradient", i), size)
        take(("wgrad", i), 3 << 20)
        if i + 1 < len(sizes):
            free(("gradient", i + 1))
        free(("out", i))
        free(("statistics", i))
        if i % 8 == 0:
            for j in range(i, min(i + 8, len(sizes))):
                free(("wgrad", j))
    free(("gradient", 0))
    assert not held
    return peak


def test_a_step_takes_little_more_than_lives_at_once_and_the_next_one_nothing():
    line = Line()
    peak = step(line)
    reached = line.reached
    assert peak <= reached <= 1.15 * peak
    for _ in range(3):
        assert step(line) == peak
    assert line.reached == reached


@pytest.mark.gpu
def test_arrays_lie_in_an_arena_that_grows_and_keep_it_alive(monkeypatch):
    import cupy

    gc.collect()  # arenas of other tests
    calls, call = [], memory._call
    monkeypatch.setattr(memory, "_call", lambda name, *args, **rest: calls.append(name) or call(name, *args, **rest))
    arena, stream = Arena(), cupy.cuda.Stream(non_blocking=True)
    assert arena.total_bytes() == 0
    with stream, cupy.cuda.using_allocator(arena.allocate):
        small = cupy.full(3, 1, np.float32)
        assert arena.total_bytes() == PAGE
        large = cupy.full((5, PAGE), 2, np.uint8)  # over pieces of memory of its own
        assert arena.total_bytes() == 6 * PAGE
        copy = large.copy()
        empty = cupy.empty(0, np.float32)
    stream.synchronize()
    assert empty.size == 0 and large.data.ptr % ALIGNMENT == 0
    del arena, large, empty
    gc.collect()
    assert small.get().tolist() == [1, 1, 1] and (copy.get() == 2).all()
    assert calls.count("cuMemMap") == 3 and "cuMemUnmap" not in calls
    del small, copy
    assert calls.count("cuMemUnmap") == 3 and calls[-1] == "cuMemAddressFree"


@pytest.mark.gpu
def test_a_request_beyond_all_memory_is_told():
    import cupy

    arena = Arena()
    held = arena.allocate(1)
    with pytest.raises(cupy.cuda.memory.OutOfMemoryError):
        arena.allocate(1 << 50)
    assert arena.allocate(1).ptr == held.ptr + ALIGNMENT


class Cycle:
    """Garbage that only the collector sees."""

    def __init__(self):
        self.itself = self


def test_an_arena_grows_by_pages_until_the_gpu_has_no_more(monkeypatch):
    """With a stand-in for the driver, which refuses what `refused` says."""
    calls, refused, freed, structures = [], [], [], set()

    def call(name, *args, expected=0):
        calls.append((name, *(arg for arg in args if isinstance(arg, int))))
        structures.update(arg for arg in args if isinstance(arg, bytes))
        assert expected == 2 * (name == "cuMemCreate")  # CUDA_ERROR_OUT_OF_MEMORY
        assert name != "cuMemCreate" or args[-1] == 0  # its flags
        return expected if name == "cuMemCreate" and refused and refused.pop(0) else 0

    cuda = SimpleNamespace(
        runtime=SimpleNamespace(getDevice=lambda: 3, malloc=lambda size: 7, free=lambda address: None),
        memory=SimpleNamespace(OutOfMemoryError=MemoryError), UnownedMemory=lambda *details: details,
        MemoryPointer=lambda memory, offset: (*memory, offset),
    )
    monkeypatch.setattr(memory, "get_cupy", lambda: SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(memory, "memory_total", lambda device: 5 * PAGE - 1)
    monkeypatch.setattr(memory, "free_memory", lambda: freed.append(garbage()))
    monkeypatch.setattr(memory, "_call", call)
    arena = Arena()
    assert calls == [("cuMemAddressReserve", 5 * PAGE, 0, 0, 0)] and arena.total_bytes() == 0
    calls.clear()
    first = arena.allocate(3)
    assert first[:2] == (0, 3) and first[3:] == (3, 0)
    assert calls == [("cuMemCreate", PAGE, 0), ("cuMemMap", 0, PAGE, 0, 0), ("cuMemRelease",),
                     ("cuMemSetAccess", 0, PAGE, 1)]
    second = arena.allocate(PAGE - ALIGNMENT)
    assert second[0] == ALIGNMENT and arena.total_bytes() == PAGE and len(calls) == 4 and not freed
    garbage = weakref.ref(Cycle())
    refused[:] = [True]  # once: garbage held the memory
    third = arena.allocate(PAGE + 1)
    assert third[0] == PAGE and arena.total_bytes() == 3 * PAGE and freed == [None]
    refused[:] = [True, True]
    with pytest.raises(MemoryError):
        arena.allocate(PAGE)
    assert len(freed) == 2 and arena.total_bytes() == 3 * PAGE
    with pytest.raises(MemoryError):  # more than there are addresses: the driver is not asked
        arena.allocate(4 * PAGE)
    assert len(freed) == 2
    needed, arena.precompiling, refused[:] = arena.needed, True, [True, True]
    beyond = arena.allocate(PAGE), arena.allocate(9 * PAGE)  # addresses alone, and the driver is asked once
    assert [piece[0] for piece in beyond] == [2 * PAGE + ALIGNMENT, 3 * PAGE + ALIGNMENT]
    assert (needed, arena.needed) == (2 * PAGE + ALIGNMENT, 12 * PAGE + ALIGNMENT) and len(freed) == 3
    assert arena.total_bytes() == 3 * PAGE and not refused
    arena.needed, arena.precompiling = needed, False
    del beyond
    fourth = arena.allocate(3 * PAGE - ALIGNMENT)
    assert fourth[0] == 2 * PAGE + ALIGNMENT and arena.total_bytes() == 5 * PAGE
    assert structures == {np.int32([1, 0, 1, 3, 0, 0, 0, 0]).tobytes(), np.int32([1, 3, 3]).tobytes()}  # of device 3
    calls.clear()
    del arena, first, second, third, fourth
    gc.collect()
    assert calls == [("cuMemUnmap", 0, PAGE), ("cuMemUnmap", PAGE, 2 * PAGE), ("cuMemUnmap", 3 * PAGE, 2 * PAGE),
                     ("cuMemAddressFree", 0, 5 * PAGE)]


@pytest.fixture
def system(monkeypatch, tmp_path):
    """Files that stand for Linux's: system({name: text}) writes them and returns `memory_available()`."""
    own, lines = host._FILES, host._lines
    monkeypatch.setattr(host, "_FILES", {
        name: (tmp_path / (name or "unified"), *files) for name, (_, *files) in own.items()})
    monkeypatch.setattr(host, "_lines", lambda path: lines(f"{tmp_path}{path}" if str(path).startswith("/proc")
                                                           else path))

    def write(files):
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return host.memory_available()

    return write


def test_the_memory_left_is_the_least_of_what_the_system_says(system):
    assert system({}) == sys.maxsize
    assert system({"proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 7 kB\n"}) == 7 * KB
    assert system({"proc/self/cgroup": "4:cpu:/job\n0::/job\n"}) == 7 * KB
    group = {"memory.max": "6000", "memory.current": "5000", "memory.stat": "file 8\ninactive_file 300"}
    files = {f"unified/job/{name}": text for name, text in group.items()}
    assert system(files) == 1300
    assert system({"unified/job/memory.max": "max"}) == 7 * KB
    assert system({f"unified/{name}": text for name, text in group.items()}) == 1300  # as a container sees its own
    assert system({"unified/memory.current": "9000"}) == 0
    one = {"limit_in_bytes": "900", "usage_in_bytes": "850", "stat": "inactive_file 1\ntotal_inactive_file 40"}
    assert system({"proc/self/cgroup": "4:memory:/old\n"} | {
        f"memory/old/memory.{name}": text for name, text in one.items()}) == 90


def test_what_needs_all_that_is_left_is_made(monkeypatch):
    monkeypatch.setattr(host, "memory_available", lambda: 3 << 29)
    host.check_memory("this", 3 << 29, "draw fewer")
    with pytest.raises(CudiffError, match=r"^this would take 1\.5 GiB of memory, and 1\.5 GiB are free: draw fewer$"):
        host.check_memory("this", (3 << 29) + 1, "draw fewer")


@pytest.mark.skipif(not host.resident(), reason="the system does not tell")
def test_memory_that_was_given_back_counts_in_the_peak():
    def touch():
        with mmap.mmap(-1, 96 << 20) as pages:  # the system's, not what the process has kept for itself
            for at in range(0, len(pages), mmap.PAGESIZE):
                pages[at] = 1

    before = host.resident()
    peak = host.peak_of(touch)
    assert 90 << 20 <= peak - before <= 400 << 20
    assert host.resident() - before < 48 << 20
