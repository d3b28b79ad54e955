"""Training and sampling launch what tests/traces/ says: the same kernels, in the same order, with the same arguments.

A commit that changes a launch, where it is meant to, writes the traces anew (`python -m tests.traces --update`) and
says in its message which launches changed and why. One that renames kernels or constants alone adds the names to
tests/traces/renames.toml instead.
"""

import numpy as np
import pytest

from cudiff.cuda.launch import launch
from cudiff.cuda.tensor_map import tensor_map
from tests.host import Array
from tests.traces import CASES, FOLDER, NO_NAMES, Trace, difference, old_names, record, stored


def is_fast(case):
    small = case.preset in ("digits", "mnist", "cs179", "dit-mnist")
    return small or (case.preset, case.precision) == ("elephants", "bf16")


@pytest.mark.parametrize("case", [
    case if is_fast(case) else pytest.param(case, marks=pytest.mark.slow) for case in CASES
], ids=str)
def test_what_is_launched_is_what_was(case):
    told = difference(case, record(case, old_names()), stored(case))
    assert not told, told


@pytest.fixture
def host(host_of):
    host = host_of(True)
    host.watch = Trace(NO_NAMES)
    return host


def cast(x, y, grid=1, count=6):
    launch("cast", "cast", grid, 256, (x, y, np.int64(count)), FROM=x.dtype, TO=y.dtype)


def test_a_trace_tells_everything_but_addresses(host):
    x, y = host.zeros((2, 3), np.int32), host.zeros((4, 3), np.float32)
    cast(x, y)
    cast(x[1:], y[2:], count=3)
    assert host.watch.lines == [
        "cast 1 x256 FROM=int TO=float: 1=i32[2,3] 2=f32[4,3] 6", "cast 1 x256 FROM=int TO=float: 1+12 2+24 3",
    ]


def test_what_cupy_does_by_itself_is_told(host, monkeypatch):
    x = host.zeros((2, 3), np.int32)
    monkeypatch.setattr(Array, "watch", staticmethod(host.watch.by_cupy))
    y = x.astype(np.float32)
    y.copy(), y.fill(0), x.astype(np.int32, copy=False)
    x[:1] = y[:1]
    host.asarray(np.ones(2)), host.zeros(3)
    assert host.watch.lines == [
        "cupy.astype: 1=f32[2,3] 2=i32[2,3]", "cupy.copy: 3=f32[2,3] 1", "cupy.fill: 1", "cupy.set: 2 1",
        "cupy.set: 4=float64[2]", "cupy.zeros: 5=float64[3]",
    ]


def test_memory_used_again_is_another_array(host):
    x = host.zeros((2, 3), np.int32)
    for _ in range(2):
        cast(x, host.zeros((2, 3), np.float32))
    assert [line.split(": ")[1] for line in host.watch.lines] == ["1=i32[2,3] 2=f32[2,3] 6", "1 3=f32[2,3] 6"]


def test_tables_are_told_by_their_arrays_and_a_digest_of_the_rest(host):
    """A tensor map by all that the driver is asked for."""
    x, trace = host.zeros((2, 8, 64), np.float32), Trace(NO_NAMES)
    plain, low = (tensor_map(x, (1, 8, 32), operand=operand) for operand in (True, False))
    assert trace._argument(plain) == "{1=f32[2,8,64] 2,8,64 1,8,32 11.3}"
    assert trace._argument(low) == "{1 2,8,64 1,8,32 7.3}" and trace._argument(low) == "{1}"
    assert trace._argument(tensor_map(x[:, ::2], (1, 4, 32))) == "{1 2,4,64/2048,512 1,4,32 11.3}"
    row = np.dtype([("map", "u8", 16), ("place", "u8"), ("count", "i4", 2)])
    words = np.frombuffer(plain, np.uint64)
    tables = [np.array([(words, x[1].data.ptr, (count, 0))], row) for count in (5, 5, 6)]
    first, again, other = (Trace(NO_NAMES)._argument(table) for table in tables)
    assert first == again != other
    assert first.startswith("({1=f32[2,8,64] 2,8,64 1,8,32 11.3} 1+2048 #")


@pytest.mark.parametrize("case", [CASES[0], CASES[1]], ids=["in full", "by marks"])
def test_the_first_difference_is_told(host, case):
    x, y = host.zeros((2, 3), np.int32), host.zeros((2, 3), np.float32)

    def trace(*grids):
        host.watch = Trace(NO_NAMES)
        for grid in grids:
            cast(x, y, grid)
        return host.watch

    before = trace(1, 2, 3)
    before = before.lines if case.in_full else before.summary
    assert difference(case, trace(1, 2, 3), before) == ""
    told = difference(case, trace(1, 5, 3), before)
    assert "3 launches before, 3 now; launch 2 is the first" in told and "now:    cast 5 x256" in told
    assert ("before: cast 2 x256" in told) == case.in_full
    assert "3 launches before, 2 now; launch 3 is the first" in difference(case, trace(1, 2), before)
    assert "launch 4 is the first" in difference(case, trace(1, 2, 3, 4), before)


def test_a_renamed_kernel_is_compared_by_its_old_name(host):
    x, y = host.zeros((2, 3), np.int32), host.zeros((2, 3), np.float32)
    host.watch = Trace({"kernels": {"cast": "convert.all"}, "constants": {"FROM": "Z_SOURCE"}})
    cast(x, y)
    assert host.watch.lines == ["convert.all 1 x256 TO=float Z_SOURCE=int: 1=i32[2,3] 2=f32[2,3] 6"]


def test_each_trace_is_stored_once():
    titles = [block.split("\n")[0] for block in (FOLDER / "others.txt").read_text().split("\n\n")]
    assert titles == [str(case) for case in CASES if not case.in_full]
    assert {path.stem for path in FOLDER.glob("*.txt")} == {case.preset for case in CASES if case.in_full} | {"others"}
