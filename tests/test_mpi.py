"""Sums and copies between processes on the CPU."""

import pytest

from cudiff.distributed import shared
from cudiff.errors import CudiffError
from tests.ranks import program, run


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("mpi", [True, False], ids=["MPI", "shared memory"])
def test_sums_are_in_the_order_of_the_processes(size, mpi):
    """Bit for bit, for lengths that the processes do not divide; the same everywhere; other arrays stay. Shared memory
    has place for 64 numbers at a time."""
    code, out, err = run(size, program("""
        import hashlib, os
        import numpy as np
        from cudiff.distributed import join, shared

        shared.CHUNK = 256
        group = join("cpu")
        for length in (1, 5, 1000):
            arrays = [np.random.default_rng([length, rank]).standard_normal(length).astype(np.float32) * 10.0**rank
                      for rank in range(group.size)]
            total = arrays[0].copy()
            for array in arrays[1:]:
                total += array
            own = arrays[group.rank].copy().reshape(1, length)
            group.all_reduce(own)
            assert (own == total).all() and own.shape == (1, length)
            for root in range(group.size):
                for array in (arrays[group.rank].copy(), arrays[group.rank].astype(np.int32), np.array(group.rank)):
                    group.broadcast(array, root)
                    expected = root if array.ndim == 0 else arrays[root].astype(array.dtype)
                    assert (array == expected).all()
        assert group.exchange(group.rank) == list(range(group.size)) and group.leads == (group.rank == 0)
        group.check_same("data", "digits")
        try:
            group.exchange(np.float32(1))
        except TypeError as error:  # of all, which go on together
            assert "JSON" in str(error)
        assert group.exchange(1.0) == [1.0] * group.size
        group.close()
        os.write(1, b"right\\n")
    """), mpi=mpi)
    assert (code, out, err) == (0, "right\n" * size, "")


def test_processes_share_the_cores_and_leave_no_file(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    code, out, err = run(2, program("""
        import os
        from cudiff import threads
        from cudiff.distributed import join

        os.path.isdir = lambda path: path != "/dev/shm"
        every = threads.CORES
        with join("cpu") as group:
            group.exchange("process 0 has removed it")
            assert threads.CORES == max(1, every // 2) and os.listdir(os.environ["TMPDIR"]) == []
        assert threads.CORES == every
        os.write(1, b"right\\n")
    """), mpi=False)
    assert (code, out, err) == (0, "right\n" * 2, "") and not list(tmp_path.iterdir())


def test_no_file_is_left_where_its_room_is_taken_by_another(tmp_path, monkeypatch):
    monkeypatch.setattr(shared.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(shared.os.path, "isdir", lambda path: path != "/dev/shm")
    fill = shared._fill
    with open("/dev/full", "wb", 0) as full:
        monkeypatch.setattr(shared, "_fill", lambda file, size: fill(full, size))
        with pytest.raises(CudiffError, match=r"no room for 8 MB .* let TMPDIR name another folder"):
            shared.SharedMemory(0, 1, lambda value: [value], [])
    assert not list(tmp_path.iterdir())


def test_no_file_is_left_where_one_ends_as_they_meet(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    code, _, err = run(2, program("""
        import os
        from cudiff.distributed import join, shared

        os.path.isdir = lambda path: path != "/dev/shm"
        if os.environ["RANK"] == "1":
            shared.mmap.mmap = lambda *given: os._exit(3)
        join("cpu")
    """), within=30, mpi=False)
    assert code == 3 and "process 1 of 2 ended without a word" in err and not list(tmp_path.iterdir())


@pytest.mark.parametrize("call, told", [
    ("group.all_reduce(np.ones(4 + group.rank, np.float32))", "called ['all_reduce', "),
    ("group.broadcast(np.ones(4), group.rank)", "called ['broadcast', 32, "),
    ("group.exchange(1) if group.rank else group.broadcast(np.ones(4))", "all make the same calls of their group"),
    ("group.rank and group.all_reduce(np.ones(4))", "process 0 of 2 has left the group"),
    ("group.rank or group.all_reduce(np.ones(4))", "process 1 of 2 has left the group"),
])
def test_other_calls_than_the_others_make_are_told(call, told):
    """Numbers would be mixed, or all would wait for ever."""
    code, _, err = run(2, program(f"""
        import numpy as np
        from cudiff.distributed import join

        with join("cpu") as group:
            {call}
    """), within=30, mpi=False)
    assert code and told in err


@pytest.mark.parametrize("mpi", [True, False], ids=["MPI", "shared memory"])
def test_an_error_outside_of_a_block_ends_all(mpi):
    """MPI has a process wait for all others before it ends."""
    code, out, err = run(2, program("""
        import numpy as np
        from cudiff.distributed import join

        group = join("cpu")
        if group.rank == 1:
            print("said before")
            raise KeyError("mine")
        group.all_reduce(np.ones(4, np.float32))
        group.all_reduce(np.ones(4, np.float32))
    """), within=30, mpi=mpi)
    assert code == 1 and err.count("Traceback") == 1 and "ended without a word" not in err and "said before" in out


def test_what_differs_is_told_once():
    code, _, err = run(2, program("""
        from cudiff.distributed import join
        from cudiff.errors import CudiffError

        group = join("cpu")
        try:
            group.check_same("data set", group.rank)
        except CudiffError as error:
            group.fail(2, f"cudiff: {error}")
    """))
    assert code and err.count("process 1 of 2 has another data set than process 0") == 1


def test_a_launcher_without_mpi_is_told(monkeypatch):
    pytest.importorskip("mpi4py")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "another")
    code, _, err = run(1, program("""
        from cudiff.distributed import join
        from cudiff.errors import CudiffError

        try:
            join("cpu")
        except CudiffError as error:
            raise SystemExit(str(error))
    """))
    assert code == 1 and "process 0 of 2 is number 0 of 1 to MPI: on the CPU start all by mpiexec" in err


@pytest.mark.parametrize("error, code, traces, last", [
    ("KeyError('mine')", 1, 1, "KeyError: 'mine'"), ("KeyboardInterrupt", 130, 1, "KeyboardInterrupt"),
    ("SystemExit(3)", 3, 0, ""), ("SystemExit('mine')", 1, 0, "mine"),
])
def test_an_error_of_one_ends_all_with_its_traceback(error, code, traces, last):
    """Of a program of one's own; the other waits for ever. An exit of one's own has none."""
    found, _, err = run(2, program(f"""
        from cudiff.distributed import join

        with join("cpu") as group:
            if group.rank == 1:
                raise {error}
            group.exchange("never")
    """), within=30)
    assert found == code and err.count("Traceback") == traces and last in ["", *err.splitlines()]


def test_all_may_leave_by_an_exit():
    code, out, err = run(2, program("""
        import sys
        from cudiff.distributed import join

        with join("cpu") as group:
            sys.exit(None if group.rank else 0)
    """), within=30)
    assert (code, out, err) == (0, "", "")


def test_processes_that_do_not_end_are_told_by_their_stacks():
    with pytest.raises(pytest.fail.Exception, match=r"(?s)took longer than 15 s.*wait_for_ever"):
        run(2, program("""
            import time
            from cudiff.distributed import join

            def wait_for_ever(group):
                group.exchange("never")

            with join("cpu") as group:
                wait_for_ever(group) if group.rank else time.sleep(100)
        """), within=15)


def test_a_cause_that_takes_long_to_tell_is_told():
    """mpiexec throws away what a process says after another one has ended."""
    code, _, err = run(2, program("""
        import os, time
        from cudiff.distributed import join, wire

        group, write = join("cpu"), os.write
        if group.leads:
            wire.os.write = lambda file, text: (time.sleep(0.1), write(file, text))
            group.fail(2, "the cause")
        group.exchange(1)
    """))
    assert (code, err) == (2, "the cause\n")
