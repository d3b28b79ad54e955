"""What a step takes of a GPU's memory is known before the first one; where it does not fit, so is what does."""

import contextlib
import gc
import re
import threading
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from cudiff import forecast as module
from cudiff.config import PRESETS, Config
from cudiff.cuda import graph, memory
from cudiff.cuda.memory import PAGE
from cudiff.data import Dataset
from cudiff.distributed import ALONE, Group
from cudiff.errors import CudiffError
from cudiff.forecast import Forecast
from cudiff.models import build
from cudiff.optim import reduction
from cudiff.tensor import Tensor
from cudiff.train import Trainer
from tests.host import Memory


class Gpu:
    """Gives the stand-in for a GPU `total` bytes of memory, and graphs that do nothing: arrays lie in `pool`, and what
    is captured in an `Arena` of the library's, without a driver."""

    def __init__(self, host, monkeypatch, total=1 << 36):
        self.total, self.mapped, self.refused, self.pool = total, 0, 0, Memory()
        gpu = self

        class Arena(memory.Arena):
            def __init__(self):
                memory.Allocator.__init__(self)
                self.needed, self.precompiling, self._pieces = 0, False, []
                weakref.finalize(self, gpu.unmap, self._pieces)

            def allocate(self, size):
                return self.take(size)

            def _back(self, start, size):
                if gpu.used + size > gpu.total:
                    gpu.refused += 1
                    return False
                gpu.mapped += size
                self._pieces.append((start, size))
                return True

        class Stream:
            ptr = 0
            capturing = False

            def __init__(self, **options): pass
            def __enter__(self): self.before, current[:] = list(current), [self]
            def __exit__(self, *details): current[:] = self.before
            def wait_event(self, event): pass
            def is_capturing(self): return self.capturing
            def begin_capture(self): self.capturing = True

            def end_capture(self):
                self.capturing = False
                return SimpleNamespace(launch=lambda: None)

        own = threading.local()  # as CuPy's allocators: what a loader's thread makes lies in no arena

        @contextlib.contextmanager
        def using_allocator(allocate):
            before, own.memory = host.memory, allocate.__self__
            try:
                yield
            finally:
                own.memory = before

        current = [Stream()]
        host.cuda.Stream, host.cuda.get_current_stream = Stream, lambda: current[0]
        host.cuda.Event = lambda **options: SimpleNamespace(record=lambda stream=None: None, synchronize=lambda: None)
        host.cuda.using_allocator = using_allocator
        host.cuda.memory = SimpleNamespace(OutOfMemoryError=type("OutOfMemoryError", (MemoryError,), {}))
        host.cuda.runtime.memGetInfo = lambda: (self.total - self.used, self.total)
        host.cuda.alloc_pinned_memory = lambda size: bytearray(size)
        host.get_default_memory_pool = lambda: SimpleNamespace(free_all_blocks=lambda: None)
        memory_here = property(lambda host: getattr(own, "memory", gpu.pool),
                               lambda host, memory: setattr(own, "memory", memory))
        monkeypatch.setattr(type(host), "memory", memory_here, raising=False)
        monkeypatch.setattr(graph, "Arena", Arena)

    @property
    def used(self):
        return self.pool.taken + self.mapped

    def unmap(self, pieces):
        self.mapped -= sum(size for _, size in pieces)


def trainer_of(config: Config, folder, group: Group = ALONE) -> Trainer:
    config = config.replace(device="cuda", validation=0)
    size, classes = config.image_size or 32, max(0, config.num_classes)
    images = np.zeros((64, size, size, config.channels or 3), np.uint8)
    data = Dataset(images, np.arange(64) % classes, classes) if classes else Dataset(images)
    return Trainer(config, data, folder, group=group)


class Two(Group):
    """This process and one more, whose GPU has the same or what `other` makes of it."""

    other = staticmethod(lambda value: value)

    def __init__(self, rank):
        super().__init__(rank, 2)

    def exchange(self, value):
        return [value, self.other(value)]

    def broadcast(self, array, root=0):
        pass

    register = start_sums = finish_sums = all_reduce = lambda self, *given: None


SMALL = PRESETS["digits"].replace(image_size=32, model_channels=32, num_head_channels=32, num_res_blocks=2,
                                  batch_size=64, precision="bf16")


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("preset, changes", [
    ("mnist", {}), ("mnist", {"residency": "host", "accumulate": 2}),
    ("mnist-ddpm", {"optimizer": "sgd", "precision": "fp32", "min_snr": 5.0, "batch_size": 16}),
    pytest.param("elephants", {}, marks=pytest.mark.slow), pytest.param("dit-mnist", {}, marks=pytest.mark.slow),
    pytest.param("imagenet64", {}, marks=pytest.mark.slow), ("elephants", {"precision": "fp16", "batch_size": 4}),
], ids=str)
def test_the_memory_of_a_run_is_known_within_a_tenth(host_of, monkeypatch, tmp_path, preset, changes, recompute):
    """What stays is what was taken for it, but for some counters; a step's graph then takes what was said, in pages."""
    host = host_of(True)
    gpu = Gpu(host, monkeypatch)
    run = trainer_of(PRESETS[preset].replace(recompute=recompute, **changes), tmp_path)
    before, launched = gpu.used, len(host.launches)
    found = run.forecast()
    assert found.free == gpu.total - before
    assert gpu.mapped - PAGE < found.step <= gpu.mapped
    assert len(host.launches) > launched and run.forecast()._replace(free=found.free) == found
    for _ in range(5):  # three as they are, the recording, the graph
        run._step(*run.loader.next())
    assert found.step <= run._step.pool_bytes < 1.01 * found.step + PAGE
    assert 0.98 * found.stays <= gpu.pool.taken <= 1.01 * found.stays
    assert 0.9 <= (found.stays + found.step) / gpu.used <= 1.1


def test_a_run_says_what_it_takes(host_of, monkeypatch, tmp_path):
    gpu, said = Gpu(host_of(True), monkeypatch), []
    run = trainer_of(SMALL, tmp_path)
    found, kept = run.forecast(), run._step

    def stop(*streamed):
        raise KeyboardInterrupt

    kept.__class__ = type("Stopping", (type(kept),), {"__call__": stop})
    with pytest.raises(KeyboardInterrupt):
        run.run(SimpleNamespace(message=said.append, update=said.append))
    assert said[-1] == str(found._replace(free=gpu.total - gpu.used))
    assert str(Forecast(3 << 30, 5 << 28, 78 << 30)) == (
        "memory on the GPU: 3.00 GiB stay, a step takes 1.25 GiB more, and 78.0 GiB are free")


def test_no_forecast_of_steps_that_are_no_graph(host_of, monkeypatch, tmp_path):
    Gpu(host_of(True), monkeypatch)
    assert trainer_of(SMALL.replace(capture=False), tmp_path / "a").forecast() is None


@pytest.mark.parametrize("rank", [0, 1])
def test_what_each_of_several_gpus_takes(host_of, monkeypatch, tmp_path, rank):
    """As one GPU with its part of the batch does; of another that has less, or takes more, what is worse is told."""
    Gpu(host_of(True), monkeypatch)
    monkeypatch.setattr(reduction, "LAST", 2**20)  # one bucket: of more, launches that are flushed earlier free memory
    alone, group = trainer_of(SMALL.replace(batch_size=32), tmp_path / "one").forecast(), Two(rank)
    run = trainer_of(SMALL, tmp_path / "two", group)
    found = run.forecast()
    assert found.stays == pytest.approx(alone.stays, rel=0.01) and found.step == pytest.approx(alone.step, rel=0.02)
    assert str(found).startswith("memory on each of 2 GPUs: 0.0")
    found = run.forecast()  # the step's memory is there now
    group.other = lambda value: [value[0] + 5, True, value[2] + 7] if isinstance(value, tuple) else value - 3
    assert run.forecast() == (found.stays + 7, found.step + 5, found.free - 3, 2)
    group.other = lambda value: [0, True, value[2]] if isinstance(value, tuple) else value
    assert run.forecast() is None  # it could not record its step


@pytest.mark.parametrize("rank", [0, 1])
def test_what_fits_on_each_of_several_gpus(host_of, monkeypatch, tmp_path, rank):
    """The other GPU has room for passes of 8 images, whatever this one has: both try the same, and say the same."""
    with pytest.MonkeyPatch.context() as patch:
        Gpu(host_of(True), patch)
        config = SMALL.replace(batch_size=16, accumulate=4)
        room = trainer_of(config, tmp_path / "least", Two(rank)).forecast().step
    Gpu(host_of(True), monkeypatch)
    group, tried = Two(rank), []
    run = trainer_of(SMALL, tmp_path / "run", group)

    def other(value):
        if not isinstance(value, tuple):
            return value
        tried.append([len(part) for part in run.loader.passes])
        return [value[0], value[0] <= room, value[2]]

    group.other = other
    with pytest.raises(CudiffError) as caught:
        run.forecast()
    assert "GiB of memory on each of 2 GPUs beside" in str(caught.value)
    assert str(caught.value).endswith(f" free: --batch-size 16 --accumulate 4 ({room / 2**30:.2f} GiB) fits")
    assert tried == [[32], [32], [16, 16], [8, 8, 8, 8]]  # as it is, recomputed, and in passes
    assert run.loader.passes == [range(32 * rank, 32 * rank + 32)]


def need(host_of, tmp_path, batch, residency, **changes) -> int:
    """Bytes of a step."""
    with pytest.MonkeyPatch.context() as patch:
        Gpu(host_of(True), patch)
        config = SMALL.replace(**(dict(batch_size=batch, residency=residency) | changes))
        return trainer_of(config, tmp_path / repr(changes)).forecast().step


@pytest.mark.parametrize("batch, fitting, residency", [
    (64, {"recompute": True}, "auto"), (8, {"batch_size": 4, "accumulate": 2}, "auto"),
    (8, {"batch_size": 2, "accumulate": 4}, "host"), (4, {}, "auto"),
], ids=str)
def test_what_does_not_fit_is_told_with_what_does(host_of, monkeypatch, tmp_path, batch, fitting, residency):
    """A GPU with as much as one choice takes, and no more; or with one page."""
    whole, least = need(host_of, tmp_path, batch, residency), need(host_of, tmp_path, batch, residency, **fitting)
    room = -(-least // PAGE) * PAGE if fitting else PAGE
    gpu = Gpu(host_of(True), monkeypatch)
    run = trainer_of(SMALL.replace(batch_size=batch, residency=residency), tmp_path / "run")
    gpu.total = gpu.pool.taken + room + sum(x.data.nbytes for x in run.loader.on_device) + (64 << 10)
    passes = run.loader.passes
    with pytest.raises(CudiffError) as caught:
        run.forecast()
    match = re.fullmatch(
        r"a step of batch size (\d+) takes ([\d.]+) GiB of memory on the GPU beside [\d.]+ GiB that stay, and "
        r"([\d.]+) GiB are free: (.*)", str(caught.value))
    assert match[1] == str(batch) and match[2] == f"{whole / 2**30:.2f}" and match[3] == f"{room / 2**30:.2f}"
    flags = " ".join(f"--{name.replace('_', '-')} {value}".removesuffix(" True") for name, value in fitting.items())
    assert match[4].startswith(f"{flags} ({least / 2**30:.2f} GiB)" if fitting else "even one image does not fit: use")
    assert run.loader.passes == passes and run._reduction.passes == 1 and run.net.recompute is False
    del caught
    gc.collect()
    assert gpu.mapped == 0


@pytest.mark.parametrize("config, fits, told", [
    (dict(batch_size=64, accumulate=2), {(64, True): 3, (16, False): 5, (32, True): 4},
     "--recompute (3.00 GiB) or --batch-size 16 --accumulate 8 (5.00 GiB) fits"),
    (dict(batch_size=12), {(3, True): 2}, "--batch-size 3 --accumulate 4 --recompute (2.00 GiB) fits"),
    (dict(batch_size=7), {(3, False): 2}, "--batch-size 3 (2.00 GiB) fits"),
    (dict(batch_size=8, recompute=True), {(8, False): 1, (4, True): 2},
     "--batch-size 4 --accumulate 2 (2.00 GiB) fits"),
    (dict(batch_size=8), {}, "even one image does not fit: use a smaller model"),
], ids=str)
def test_options_that_fit(monkeypatch, config, fits, told):
    """Recomputing all, and the largest halving; with recomputing, where no halving fits without."""
    monkeypatch.setattr(module, "_needed", lambda trainer, *choice: fits.get(choice, 0) << 30)
    trainer = SimpleNamespace(config=Config(**config), net=SimpleNamespace(recompute=False), group=ALONE)
    assert module._what_fits(trainer) == told


def test_a_net_that_cannot_recompute_is_not_told_to(monkeypatch):
    monkeypatch.setattr(module, "_needed", lambda trainer, size, recompute: recompute << 30)
    told = module._what_fits(SimpleNamespace(config=Config(), net=SimpleNamespace(), group=ALONE))
    assert told == "even one image does not fit: use a smaller model"


def test_a_step_that_cannot_be_captured_has_no_forecast(host_of, monkeypatch, tmp_path):
    """It is left to the real call to say why."""
    Gpu(host_of(True), monkeypatch)
    run = trainer_of(SMALL, tmp_path)
    run.loss = lambda *args: Tensor(np.zeros(()), device="cuda")
    assert run.forecast() is None


def test_memory_that_is_gone_is_asked_for_once(host_of, monkeypatch, tmp_path):
    """Each time collects garbage."""
    gpu = Gpu(host_of(True), monkeypatch)
    run = trainer_of(SMALL, tmp_path)
    gpu.total = gpu.pool.taken + 3 * PAGE
    need, fits = run._step.needs(*run.loader.alike())
    assert not fits and need > 5 * PAGE and gpu.refused == 1
    run._step.forget()
    loss, run.loss = run.loss, lambda *args: loss(*args) + np.zeros(())  # which cannot be captured
    assert run._step.needs(*run.loader.alike()) == (pytest.approx(need, rel=0.7), False)


def test_a_model_that_does_not_fit_is_told_before_it_is_moved(host_of, monkeypatch, tmp_path):
    gpu = Gpu(host_of(True), monkeypatch)
    stays = trainer_of(SMALL, tmp_path / "a").forecast().stays - 64 * 32 * 32 - 64 * 4
    del gpu
    gpu = Gpu(host_of(True), monkeypatch, total=stays - 1)
    with pytest.raises(CudiffError, match=r"the model's [\d,]+ parameters take 0\.0\d GiB of the GPU's memory with "
                                          r"gradient, moments and average, and 0\.0\d GiB are free: use a smaller"):
        trainer_of(SMALL, tmp_path / "b")
    assert gpu.pool.taken == 0
    monkeypatch.setattr(module, "_free", lambda: stays)
    trainer_of(SMALL, tmp_path / "c")


def test_a_trainer_that_is_thrown_away_holds_no_memory(host_of, monkeypatch, tmp_path):
    """Nor does what it trains: whoever trains twice in a notebook needs the room."""
    Gpu(host_of(True), monkeypatch)
    run = trainer_of(SMALL, tmp_path)
    run.forecast()
    left = [weakref.ref(kept) for kept in (run, run.net, run._step)]
    del run
    gc.collect()
    assert [kept() for kept in left] == [None] * 3


@pytest.mark.parametrize("group, each", [
    (ALONE, 24), (Group(0, 2), 18), (Group(0, 4), 16), (Group(0, 4, one_machine=False), 13),
])
def test_what_a_sharded_model_holds(group, each):
    """Bytes of a parameter's weight, gradient and 16-bit copy; of a process's part average, two moments, and on one
    machine the others' gradients."""
    config = SMALL.replace(shard=True)
    net = build(config)
    size = sum(-(-parameter.size // 32) * 32 for parameter in net.parameters())
    assert module.model_bytes(net, config, group) == pytest.approx(size * each, abs=4)
