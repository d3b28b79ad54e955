"""A sharded step's copies between GPUs: each process's operations run one at a time, in turns that chance decides."""

import ctypes
import threading
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from cudiff.cuda import peers
from cudiff.cuda.compiler import compiling_ahead
from cudiff.distributed import Group
from cudiff.distributed.shards import Shards
from cudiff.errors import CudiffError

WAIT = 1  # CU_STREAM_MEM_OP_WAIT_VALUE_32
FIELDS = (ctypes.c_int, 0), (ctypes.c_uint64, 8), (ctypes.c_uint32, 16)  # of CUstreamBatchMemOpParams, of 48 bytes


class Memory(np.ndarray):
    """An array of the host that has an address as CuPy's have."""

    @property
    def data(self):
        return SimpleNamespace(ptr=self.ctypes.data)


class Machine:
    """Several GPUs, of which each has a stream. What is launched waits in the stream until `run`."""

    def __init__(self, size, monkeypatch, reachable=True, operates=True):
        self.size, self.streams, self.current, self.reachable = size, [[] for _ in range(size)], 0, reachable
        self.opened, self.operates, self.mapped = 0, operates, peers.Mapped()
        runtime = SimpleNamespace(
            memcpyAsync=self.copy, memcpyDefault=4, CUDARuntimeError=RuntimeError, ipcCloseMemHandle=self.shut,
            ipcGetMemHandle=lambda pointer: pointer.to_bytes(64, "big"), ipcOpenMemHandle=self.open,
        )
        cuda = SimpleNamespace(runtime=runtime, get_current_stream=lambda: SimpleNamespace(ptr=0),
                               Device=lambda: SimpleNamespace(synchronize=lambda: None))
        host = SimpleNamespace(cuda=cuda, empty=lambda *a: np.full(*a[:1], np.nan, *a[1:]).view(Memory),
                               zeros=lambda *a: np.zeros(*a).view(Memory))
        driver = SimpleNamespace(cuMemGetAddressRange_v2=self.base, cuStreamBatchMemOp_v2=self.operate)
        monkeypatch.setattr(peers, "get_cupy", lambda: host)
        monkeypatch.setattr(peers, "library", lambda: driver)

    def open(self, handle):
        if not self.reachable:
            raise RuntimeError("cudaErrorPeerAccessUnsupported")
        self.opened += 1
        return int.from_bytes(handle, "big")

    def shut(self, pointer):
        self.opened -= 1

    def base(self, base, length, pointer):
        base._obj.value = pointer.value - pointer.value % 4096
        return 0

    def copy(self, to, source, count, kind, stream):
        self.streams[self.current].append(lambda: ctypes.memmove(to, source, count) and True)

    def operate(self, stream, count, batch, flags):
        if not self.operates:
            return 801  # CUDA_ERROR_NOT_SUPPORTED
        for place in range(batch.value, batch.value + 48 * count.value, 48):
            kind, address, value = (kind.from_address(place + offset).value for kind, offset in FIELDS)
            flag = ctypes.c_uint32.from_address(address)
            self.streams[self.current].append(partial(self.one, kind, flag, value))
        return 0

    @staticmethod
    def one(kind, flag, value):
        """Whether the stream may go on."""
        if kind == WAIT:
            return flag.value >= value
        flag.value = value
        return True

    def join(self, gradients, weights, parts):
        """What each process makes of its buffers, or the error that it raises."""
        barrier, said, made = threading.Barrier(self.size), [None] * self.size, [None] * self.size

        def process(rank):
            def exchange(value):
                said[rank] = value
                barrier.wait()
                everybody = list(said)
                barrier.wait()
                return everybody

            try:
                made[rank] = peers.Peers(rank, gradients[rank], weights[rank], parts, exchange, self.mapped)
            except OSError as error:
                made[rank] = error

        threads = [threading.Thread(target=process, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return made

    def run(self, rng, times=1):
        """Run all streams `times` times, one operation of one that may go on at a time; one goes on for a while."""
        streams = [stream * times for stream in self.streams]
        done, ready = [0] * self.size, list(range(self.size))
        while any(position < len(stream) for position, stream in zip(done, streams, strict=True)):
            if rng.random() < 0.05:
                rng.shuffle(ready)
            for rank in ready:
                if done[rank] < len(streams[rank]) and streams[rank][done[rank]]():
                    done[rank] += 1
                    break
            else:
                raise AssertionError("every stream waits")


LENGTH = 2048
BUCKETS = [[(0, 64), (320, 1000)], [(64, 300)], [(1024, 2048)]]  # what lies between belongs to no parameter
TAKEN = np.concatenate([np.arange(start, stop) for ranges in BUCKETS for start, stop in ranges])


def arrays(size, value=0):
    return [np.full(LENGTH, value, np.float32).view(Memory) for _ in range(size)]


def parts_of(size):
    return Shards(LENGTH, Group(0, size)).parts


def at(address, count):
    return np.frombuffer((ctypes.c_float * count).from_address(address), np.float32)


def update(given, sums, own, gradient, addresses):
    """As kernels do: own -= the gradients' sum, for all. What all have `given` is there, and gradients are final."""
    assert (sums == np.arange(len(sums))[:, None]).all() and sums.shape[1:] == given.shape
    own -= gradient
    for _, received in addresses:
        own -= at(received, own.size)
    for weights, _ in addresses:
        at(weights, own.size)[...] = own
    return True


def read(seen, own, gradient, addresses):
    """As the norm's kernel: the sum of this part's gradients."""
    seen.append(float(gradient.sum() + sum(at(received, own.size).sum() for _, received in addresses)))
    return True


def launch_step(machine, all_peers, gradients, weights, parts):
    """weights -= the summed gradient, by two updates of each process's part. Returns what `read` saw."""
    seen = [[] for _ in all_peers]
    for rank, own in enumerate(all_peers):
        machine.current, part, gradient, mine = rank, parts[rank], gradients[rank], weights[rank]
        for number, ranges in enumerate(BUCKETS):
            own.start([gradient[start:stop] for start, stop in ranges], number)
        assert own.addresses(mine[part]) == [] and own.gather_sums(mine) is None
        own.finish()
        machine.streams[rank].append(partial(read, seen[rank], mine[part], gradient[part], own.addresses(mine[part])))
        given = np.full(7, rank, np.float32).view(Memory)
        assert own.gather_sums(np.zeros(peers.SUMS + 1, np.float32).view(Memory)) is None
        sums = own.gather_sums(given)
        middle = part.start + 32
        for piece in (slice(part.start, middle), slice(middle, part.stop)):
            addresses = own.addresses(mine[piece])
            machine.streams[rank].append(partial(update, given, sums, mine[piece], gradient[piece], addresses))
        assert own.addresses(gradient[part]) == own.addresses(mine) == []  # another array, and more than its part
        own.wait_for_weights()
        assert not own.summed
    return seen


@pytest.mark.parametrize("size", [2, 3, 5])
def test_steps_in_any_order(size, monkeypatch, rng):
    """All processes have the same weights after each; a replay finds the flags as they were."""
    machine, parts = Machine(size, monkeypatch), parts_of(size)
    gradients, weights = arrays(size), arrays(size)
    all_peers = machine.join(gradients, weights, parts)
    seen = launch_step(machine, all_peers, gradients, weights, parts)
    expected = np.zeros(LENGTH, np.float32)
    for _ in range(5):
        values = np.zeros((size, LENGTH), np.float32)
        values[:, TAKEN] = rng.integers(-1000, 1000, (size, TAKEN.size))
        for gradient, value in zip(gradients, values, strict=True):
            gradient[...] = value
        machine.run(rng)
        expected -= values.sum(axis=0)
        assert [sums[-1] for sums in seen] == [values[:, part].sum() for part in parts]
        for own in weights:
            np.testing.assert_array_equal(own[TAKEN], expected[TAKEN])
    assert machine.opened == 4 * size * (size - 1) and len(machine.mapped.arrays) == 4 * size
    machine.mapped.close()
    assert machine.opened == 0 and not machine.mapped.arrays


@pytest.mark.parametrize("size", [2, 3])
def test_steps_one_after_the_other(size, monkeypatch, rng):
    """Launched at once: none overwrites what another process still reads, and none takes another step's flag."""
    machine, parts = Machine(size, monkeypatch), parts_of(size)
    gradients, weights = arrays(size), arrays(size)
    all_peers = machine.join(gradients, weights, parts)
    machine.run(rng)
    machine.streams = [[] for _ in range(size)]
    for rank in range(size):  # each step's gradients are the weights + 1
        machine.streams[rank].append(partial(follow, gradients[rank], weights[rank]))
    launch_step(machine, all_peers, gradients, weights, parts)
    machine.run(rng, times=6)
    expected = np.float32(0)
    for _ in range(6):
        expected -= size * (expected + 1)
    for own in weights:
        assert (own[TAKEN] == expected).all()


def follow(gradient, weights):
    gradient[TAKEN] = weights[TAKEN] + 1
    return True


def test_a_step_that_was_given_up_changes_nothing_of_the_next(monkeypatch, rng):
    machine, parts = Machine(2, monkeypatch), parts_of(2)
    gradients, weights = arrays(2, 1), arrays(2)
    all_peers = machine.join(gradients, weights, parts)
    for machine.current, own in enumerate(all_peers):
        for number in range(1 + machine.current):
            own.start([gradients[machine.current]], number)
    machine.streams = [[], []]
    launch_step(machine, all_peers, gradients, weights, parts)
    machine.run(rng)
    assert all((own[TAKEN] == -2).all() for own in weights)


def test_nothing_is_copied_while_kernels_are_compiled_ahead(monkeypatch):
    """The other processes need not compile now."""
    machine, (gradients, weights) = Machine(2, monkeypatch), (arrays(2), arrays(2))
    own = machine.join(gradients, weights, parts_of(2))[0]
    machine.streams[0].clear()
    with compiling_ahead():
        own.start([gradients[0]], 0)
        own.finish()
        own.gather_sums(weights[0][:7])
        own.wait_for_weights()
    assert machine.streams[0] == []


@pytest.mark.parametrize("size, length, reachable, operates", [
    (3, LENGTH, False, True), (3, LENGTH, True, False), (3, 64, True, True), (9, LENGTH, True, True),
])
def test_all_are_told_what_cannot_be(size, length, reachable, operates, monkeypatch):
    """Memory that is not reached; no operations on it; of three processes one without a part; more than eight."""
    machine = Machine(size, monkeypatch, reachable, operates)
    made = machine.join(arrays(size), arrays(size), Shards(length, Group(0, size)).parts)
    assert all(isinstance(error, OSError) for error in made)


def test_too_many_buckets(monkeypatch):
    machine, gradients = Machine(2, monkeypatch), arrays(2)
    own = machine.join(gradients, arrays(2), parts_of(2))[0]
    with pytest.raises(CudiffError, match="64 buckets at most"):
        own.start([gradients[0]], peers.BUCKETS)
