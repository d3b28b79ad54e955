"""Buckets of a gradient: complete when they are summed, each once, and the last one small."""

import numpy as np
import pytest

from cudiff import nn
from cudiff.config import PRESETS
from cudiff.data import Dataset
from cudiff.distributed import ALONE, Group
from cudiff.nn import Module
from cudiff.ops import relu
from cudiff.optim import reduction
from cudiff.optim.reduction import Reduction, in_buckets
from cudiff.recompute import recomputed
from cudiff.tensor import Tensor
from cudiff.train import Trainer


class Doubling:
    """Two processes that have the same gradients, as far as a reduction sees; notes what it is asked for."""

    size = 2

    def __init__(self):
        self.sums, self.finished = [], 0

    def start_sums(self, arrays, number, registered):
        assert number == len(self.sums) and registered is None
        for array in arrays:
            array *= 2
        self.sums.append([array.size for array in arrays])

    def finish_sums(self):
        self.finished += 1


class Net(Module):
    """Layers of which `shared` is used first and last, and `frozen` and `unused` have no gradient."""

    def __init__(self):
        super().__init__()
        self.first, self.shared, self.frozen, self.unused = (nn.Linear(6, 6) for _ in range(4))
        self.last = nn.Linear(6, 6)
        for parameter in self.frozen.parameters():
            parameter.requires_grad = False

    def forward(self, x):
        return self.last(self.shared(relu(self.frozen(self.first(self.shared(x))))))


class Registered(Group):
    """Two processes, of which one registers a gradient; notes what it begins to sum, by its numbers."""

    def __init__(self):
        super().__init__(0, 2)
        self.steps = []

    def register(self, gradient, weights, parts):
        return gradient, weights, parts

    def start_sums(self, arrays, number, registered):
        gradient, weights, parts = registered
        assert gradient.size == weights.size == parts[-1].stop
        if number == 0:
            self.steps.append([])
        assert number == len(self.steps[-1])
        places = [(array.ctypes.data - gradient.ctypes.data) // 4 for array in arrays]
        self.steps[-1].append([(place, place + array.size) for place, array in zip(places, arrays, strict=True)])
        self.copied = gradient.copy()

    def finish_sums(self):
        pass


@pytest.mark.parametrize("passes", [1, 2])
def test_of_a_registered_gradient_all_is_begun_each_once(passes, monkeypatch, rng):
    """In each step: what no backward reaches is zero, though it was not before."""
    monkeypatch.setattr(reduction, "LEAST", 64)
    monkeypatch.setattr(reduction, "LAST", 32)
    net, group = Net(), Registered()
    net.flatten("cpu")
    net.flat.shard(group)
    reducing = Reduction(net.flat, net, group, passes)
    for _ in range(2):
        net.flat.buffer[...] = 7
        net.zero_grad()
        for index in range(passes):
            loss = (net(Tensor(rng.standard_normal((3, 6)).astype(np.float32))) ** 2).sum()
            with reducing.during(last=index + 1 == passes):
                loss.backward()
    for step in group.steps:
        begun = np.concatenate([np.arange(start, stop) for ranges in step for start, stop in ranges])
        wanted = np.concatenate([np.arange(start, stop) for start, stop, _ in net.flat.slots.values()])
        assert len(begun) == len(set(begun)) and set(wanted) <= set(begun) and len(step) > 2
    for name in ("unused.weight", "unused.bias", "frozen.weight", "frozen.bias"):
        start, stop, _ = net.flat.slots[name]
        assert not group.copied[start:stop].any()
    assert len(group.steps) == 2


def gradient(net, group, rng, passes=1):
    net.flatten("cpu")
    reducing = Reduction(net.flat, net, group, passes)
    net.zero_grad()
    for index in range(passes):
        loss = (net(Tensor(rng.standard_normal((3, 6)).astype(np.float32))) ** 2).sum()
        if index + 1 < passes:
            loss = loss + (net.unused(Tensor(np.ones((1, 6), np.float32))) ** 2).sum()
        with reducing.during(last=index + 1 == passes):
            loss.backward()
    return net.flat.grad.copy()


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("sizes", [(1, 1), (100, 100), (10**6, 10**6)], ids=["many", "some", "one"])
def test_every_gradient_is_summed_once_when_it_is_complete(monkeypatch, passes, sizes):
    monkeypatch.setattr(reduction, "LEAST", sizes[0])
    monkeypatch.setattr(reduction, "LAST", sizes[1])
    net, group = Net(), Doubling()
    alone = gradient(net, ALONE, np.random.default_rng(0), passes)
    np.testing.assert_array_equal(gradient(net, group, np.random.default_rng(0), passes), 2 * alone)
    assert np.count_nonzero(alone) and group.finished == 1
    layers = 3 + (passes == 2)  # `unused` has a gradient of the first pass alone, and is summed at the end
    assert len(group.sums) == {1: layers, 100: 2 + (passes == 2), 10**6: layers - 2}[sizes[0]]


class OnHost(Group):
    """Two processes on the stand-in for a GPU, where nothing is computed."""

    def __init__(self):
        super().__init__(0, 2)

    def exchange(self, value):
        return [value, value]

    def broadcast(self, array, root=0):
        pass

    register = start_sums = finish_sums = finish_update = all_reduce = all_gather = lambda self, *given: None

    def peers(self, array):
        return []

    def gather_sums(self, array):
        return self.gather(array)


def test_passes_of_one_process_flush_as_those_of_several(host_of, tmp_path, monkeypatch):
    """So that the same gradients are batched, whose sums are split alike; a single pass flushes at its end alone."""
    monkeypatch.setattr(reduction, "LEAST", 2**16)
    monkeypatch.setattr(reduction, "LAST", 2**14)
    host, launches = host_of(True), {}
    config = PRESETS["digits"].replace(precision="bf16", device="cuda", batch_size=16, capture=False, sample_every=0)
    data = Dataset(np.zeros((64, 16, 16, 1), np.uint8), np.arange(64, dtype=np.int32) % 10, 10)
    for name, group, changes in (("two", OnHost(), {}), ("passes", ALONE, {"batch_size": 8, "accumulate": 2}),
                                 ("one", ALONE, {"batch_size": 8})):
        trainer = Trainer(config.replace(**changes), data, tmp_path / name, group=group)
        trainer.train_step()
        host.launches.clear()
        trainer.train_step()
        launches[name] = [launch for launch in host.launches if "wgrad" in launch[0] or launch[1] == "sum_rows"]
    assert launches["passes"] == 2 * launches["two"] and len(launches["two"]) > len(launches["one"])


def test_buckets_are_filled_from_the_end(monkeypatch):
    monkeypatch.setattr(reduction, "LAST", 10)
    at = {2: [(0, 8)], 5: [(32, 40), (96, 104)], 7: [(64, 70)], 9: [(200, 204)]}
    assert in_buckets(at, 16) == {9: [(200, 204), (64, 70)], 5: [(32, 40), (96, 104)], 2: [(0, 8)]}
    assert in_buckets(at, 24) == {9: [(200, 204), (64, 70)], 5: [(32, 40), (96, 104), (0, 8)]}
    assert in_buckets({1: [(0, 99)]}, 16) == {1: [(0, 99)]} and in_buckets({}, 16) == {}


def test_neighbours_are_one_range():
    assert reduction._joined([(64, 70), (0, 33), (96, 128), (160, 170)]) == [(0, 128), (160, 170)]


class Again(Net):
    """The same, of which the middle is recomputed; `shared` is used inside of it and outside."""

    def forward(self, x):
        return self.last(recomputed(lambda h: self.shared(relu(self.frozen(self.first(h)))), self.shared(x)))


def test_gradients_of_what_is_recomputed_are_summed_at_the_end(monkeypatch):
    monkeypatch.setattr(reduction, "LEAST", 1)
    monkeypatch.setattr(reduction, "LAST", 1)
    net, group = Again(), Doubling()
    alone = gradient(net, ALONE, np.random.default_rng(0))
    np.testing.assert_array_equal(gradient(net, group, np.random.default_rng(0)), 2 * alone)
    assert np.count_nonzero(alone) and len(group.sums) == group.finished == 1
