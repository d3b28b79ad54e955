"""Processes of a run: which each is, how they meet and talk, and that all end where one fails."""

import copy
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

from cudiff.distributed import ALONE, Group, wire
from cudiff.distributed.launch import LAUNCHER, LOOPBACK, Place, place
from cudiff.errors import CudiffError

RANK = """
import os, signal, sys, time
from cudiff.distributed import wire
from cudiff.distributed.launch import place

here = place()
found = wire.accept(wire.listen(here), here, 20) if here.rank == 0 else wire.call(here, 20)
line = wire.Wire(here, found, TIMEOUT)
line.armed = True
assert line.exchange(here.rank * 10) == [0, 10, 20][: here.size]
say = lambda text: os.write(1, f"{text}\\n".encode())
say(f"pid {os.getpid()}")
"""
START = """
import signal, sys
from cudiff.distributed.launch import start
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the tests may run under nohup
    signal.signal(number, signal.SIG_DFL)
sys.exit(start({size}, [sys.executable, "-c", {code!r}]))
"""


def launched(code, size=2, timeout=60):
    """A launcher with so many processes that run `code`, in which `line` is their connection."""
    program = RANK.replace("TIMEOUT", str(timeout)) + textwrap.dedent(code)
    return subprocess.Popen([sys.executable, "-c", START.format(size=size, code=program)], text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def ended(process, within=15):
    """Exit code, output and errors; fails where a process is left, which would keep the output open."""
    out, err = process.communicate(timeout=within)
    pids = [int(line.split()[1]) for line in out.splitlines() if line.startswith("pid")]
    assert not [pid for pid in pids if alive(pid)]
    return process.returncode, out, err


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_processes_meet_exchange_and_part(monkeypatch):
    monkeypatch.setenv("MARK", "inherited")
    code, out, err = ended(launched("""
        for number in range(100):
            assert line.exchange([here.rank, number]) == [[0, number], [1, number], [2, number]]
        line.close()
        say("done " + os.environ["MARK"])
    """, size=3))
    assert (code, err) == (0, "") and out.count("done inherited") == 3


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "fault, code, told",
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "process {rank} of 2 was ended by SIGKILL"),
        ("line.fail(5, 'cudiff: my mistake')", 5, "cudiff: my mistake"),
        ("os._exit(3)", 3, ""),
    ],
    ids=["killed", "failed", "left"],
)
def test_one_that_fails_ends_all(rank, fault, code, told):
    """Though the other waits for ever."""
    begun = time.monotonic()
    found, _, err = ended(launched(f"if here.rank == {rank}: {fault}\ntime.sleep(100)"))
    assert found == code and time.monotonic() - begun < 30  # 10 are promised, and three processes start
    assert err.splitlines() == [line for line in [err.strip()] if told.format(rank=rank) in line][: len(err)]
    assert told.format(rank=rank) in err and err.count("cudiff:") <= 1


def test_one_that_leaves_early_is_missed():
    code, _, err = ended(launched("sys.exit(0) if here.rank == 1 else time.sleep(100)"))
    assert code == 1 and err.count("\n") == 1 and "process 1 of 2 ended without a word" in err


def test_of_a_mistake_that_all_make_one_tells():
    code, _, err = ended(launched("line.fail(2, 'cudiff: no such file')", size=3))
    assert (code, err) == (2, "cudiff: no such file\n")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("fault", ["time.sleep(99)", "os.kill(os.getpid(), signal.SIGSTOP)"], ids=["stuck", "halted"])
def test_one_that_is_stuck_ends_all_after_the_timeout(rank, fault):
    code, _, err = ended(launched(f"if here.rank == {rank}: {fault}\nline.exchange(1)", timeout=1))
    assert code == 2 and err.count("\n") == 1
    assert f"process {rank} of 2 went no step further for 0.0167 minutes (--timeout)" in err


def test_who_is_not_armed_may_take_its_time():
    """As in loading a large folder, while others wait for it."""
    code, _, err = ended(launched("""
        line.armed = False
        if here.rank == 1:
            time.sleep(5)
        line.close()
    """, timeout=1))
    assert (code, err) == (0, "")


def test_who_makes_beats_is_not_stuck():
    code, _, err = ended(launched("""
        for _ in range(20):
            time.sleep(0.1)
            line.beat()
        line.close()
    """, timeout=1))
    assert (code, err) == (0, "")


def test_beats_of_process_0_are_those_of_who_waits_for_it():
    """As while it alone draws a preview."""
    code, _, err = ended(launched("""
        for _ in range(20 * (here.rank == 0)):
            time.sleep(0.15)
            line.beat()
        line.close()
    """, timeout=1))
    assert (code, err) == (0, "")


def test_all_may_be_halted_for_longer_than_the_timeout():
    """As where a container is paused."""
    process = launched("""
        for _ in range(20):
            time.sleep(0.1)
            line.exchange(None)
        line.close()
    """, timeout=1)
    pids = [int(process.stdout.readline().split()[1]) for _ in range(2)]
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in pids:
            os.kill(pid, number)
        time.sleep(4 * (number == signal.SIGSTOP))
    code, _, err = ended(process)
    assert (code, err) == (0, "")


@pytest.mark.parametrize("rank", [0, 1])
def test_who_parts_from_others_that_work_on_is_told(rank):
    """Its messages would answer theirs, and both would wait for ever."""
    code, _, err = ended(launched(f"line.exchange(None, last=here.rank == {rank})\ntime.sleep(100)"))
    assert code == 2 and err.count("\n") == 1
    assert f"process {rank} of 2 has left the group, by close() or the end of its block, and process {1 - rank}" in err


def test_no_process_outlives_its_launcher():
    process = launched("time.sleep(100)")
    pids = [int(process.stdout.readline().split()[1]) for _ in range(2)]
    process.kill()
    until = time.monotonic() + 10
    while any(alive(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in pids)
    process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_reach_every_process_once(number):
    process = launched(f"""
        seen = []
        signal.signal({int(number)}, lambda *given: seen.append(given))
        line.exchange("ready")
        say("ready")
        while not seen:
            time.sleep(0.01)
        time.sleep(0.5)
        assert len(seen) == 1
        line.close()
        sys.exit({128 + number})
    """)
    lines = [process.stdout.readline() for _ in range(4)]
    assert lines.count("ready\n") == 2
    process.send_signal(number)
    assert ended(process)[::2] == (128 + number, "")


TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "gpu07",
            "MASTER_PORT": "1234", "TORCHELASTIC_RUN_ID": "none"}
SLURM = {"SLURM_PROCID": "4", "SLURM_STEP_NUM_TASKS": "5", "SLURM_LOCALID": "0", "SLURM_NODEID": "2",
         "SLURM_STEP_TASKS_PER_NODE": "2(x2),1", "SLURM_STEP_NODELIST": "gpu[07-08,12]", "SLURM_JOB_ID": "70042",
         "SLURM_STEP_ID": "1"}


@pytest.mark.parametrize(
    "given, expected",
    [
        ({}, Place()),
        (TORCHRUN, Place(3, 4, 1, 2, "gpu07", 1234, "none")),
        (SLURM, Place(4, 5, 0, 1, "gpu07", 29921, "70042.1")),
        (SLURM | {"SLURM_STEP_NODELIST": "a,b[1-2]", "MASTER_PORT": "7"}, Place(4, 5, 0, 1, "a", 7, "70042.1")),
        (SLURM | TORCHRUN, Place(3, 4, 1, 2, "gpu07", 1234, "none.70042.1")),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
          "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, Place(1, 2, 1, 2, LOOPBACK, 29500, "")),
        ({"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}, Place(0, 2, 0, 2)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, Place(1, 2, 1, 2)),
        (TORCHRUN | {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}, Place(3, 4, 3, 4, LOOPBACK, 1234, "none")),
        ({"RANK": "1"}, Place()),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, Place()),  # within an allocation, outside of srun
    ],
)
def test_places_by_launcher(given, expected):
    assert place(given) == expected


@pytest.mark.parametrize(
    "given, told",
    [
        (TORCHRUN | {"RANK": "4"}, "RANK=4 WORLD_SIZE=4"),
        (TORCHRUN | {"RANK": "one"}, "RANK=one is no number"),
        (TORCHRUN | {"LOCAL_RANK": "2"}, "do not fit together"),
        ({name: value for name, value in TORCHRUN.items() if name != "LOCAL_RANK"}, "do not fit together"),
        ({name: value for name, value in TORCHRUN.items() if name != "MASTER_ADDR"}, "set MASTER_ADDR"),
        (SLURM | {"SLURM_NODEID": "3"}, "do not fit together"),
        (TORCHRUN | {"MASTER_PORT": "-9"}, "MASTER_PORT=-9 is no port"),
        (TORCHRUN | {"MASTER_PORT": "70000"}, "MASTER_PORT=70000 is no port"),
    ],
)
def test_places_that_are_none(given, told):
    with pytest.raises(CudiffError, match=told):
        place(given)


def meeting(job="job", size=2, port=None):
    """A port before free ones, and the places of processes that meet after it."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port = port or min(probe.getsockname()[1], 65000)
    return [Place(rank, size, rank, size, LOOPBACK, port, job) for rank in range(size)]


def test_they_meet_where_others_listen_and_call_too():
    """Somebody listens at the first port and does not answer, somebody calls who has nothing to say."""
    places = meeting()
    with socket.create_server((LOOPBACK, places[0].port + 1)):
        server = wire.listen(places[0])
        assert server.getsockname() == (LOOPBACK, places[0].port + 2)
        found = {}
        accepting = threading.Thread(target=lambda: found.update(wire.accept(server, places[0], 20)))
        accepting.start()
        for words in (b"GET / HTTP/1.1\r\n", b"[]\n", b'{"cudiff": "other", "rank": 1, "size": 2}\n', b"x" * 2000,
                      b'{"cudiff": "job", "rank": true, "size": 2}\n', b'{"cudiff": "job", "rank": 0, "size": 2}\n'):
            with socket.create_connection(server.getsockname()) as stranger:
                stranger.sendall(words)
        called = wire.call(places[1], 20)
        accepting.join()
    called[0].sendall(b"hello")
    assert found[1].recv(5) == b"hello"
    for connection in (found[1], called[0]):
        connection.close()


def test_who_does_not_come_is_named():
    here, there = meeting(size=3)[:2]
    with pytest.raises(CudiffError, match=r"processes \[1, 2\] of 3 did not come"):
        wire.accept(wire.listen(here), here, 0.2)
    with pytest.raises(CudiffError, match="process 0 did not answer"):
        wire.call(there, 0.2)


def test_a_port_is_told_where_none_is_free(monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError

    monkeypatch.setattr(socket, "create_server", refuse)
    with pytest.raises(CudiffError, match="cannot listen"):
        wire.listen(meeting()[0])


@pytest.mark.parametrize("changes", [{"port": 65535}, {"address": "a..b", "local_size": 1}])
def test_what_is_no_port_or_name_is_told(changes):
    here, there = (place._replace(**changes) for place in meeting())
    with pytest.raises(CudiffError, match="process 0 cannot listen at"):
        wire.listen(here)
    with pytest.raises(CudiffError, match="process 0 did not answer"):
        wire.call(there, 0.2)


def test_a_group_of_one():
    assert ALONE.exchange({"a": 1}) == [{"a": 1}] and ALONE.leads and (ALONE.rank, ALONE.size) == (0, 1)
    ALONE.check_same("data", "x")
    ALONE.all_gather([np.zeros(3)])
    with ALONE.watched():
        ALONE.beat()
    with ALONE as group:
        assert group.gather(np.ones(2, np.float32)).tolist() == [[1, 1]]
    with pytest.raises(KeyError), ALONE:
        raise KeyError


def test_an_array_that_is_not_contiguous_is_refused():
    for call in (ALONE.all_reduce, ALONE.broadcast):
        with pytest.raises(TypeError, match="takes a C-contiguous array"):
            call(np.ones((4, 4), np.float32)[:, ::2])


def test_values_are_json():
    assert json.loads(wire._line({"value": [1, None, "ä"]})) == {"value": [1, None, "ä"]} and LAUNCHER.isupper()


def test_a_copy_of_a_group_is_the_group():
    """As of a trainer that is copied. Another process has not the connections of a group of several."""
    group = Group(1, 2)
    assert copy.deepcopy([group])[0] is group
    assert copy.deepcopy(ALONE) is ALONE and pickle.loads(pickle.dumps(ALONE)) is ALONE
    with pytest.raises(pickle.PicklingError):
        pickle.dumps(group)
