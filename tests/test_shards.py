"""Sharded optimiser state (ZeRO, stage 1): each process holds and updates its part, to the same bits as without."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

from cudiff import nn
from cudiff.backend import bfloat16
from cudiff.checkpoint import load_checkpoint
from cudiff.cli import main
from cudiff.config import PRESETS
from cudiff.data import Dataset
from cudiff.distributed import ALONE, Group
from cudiff.distributed.shards import Shards
from cudiff.errors import CudiffError
from cudiff.nn import Module
from cudiff.ops.optim import Flag
from cudiff.optim import EMA, SGD, AdamW, Lion, Muon, RMSprop
from cudiff.train import Trainer
from tests.ranks import program, run
from tests.test_reduction import OnHost
from tests.test_together import OPTIONS, assert_same, train, values

# --- parts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size, processes, ends", [
    (96, 1, [96]), (96, 2, [64, 96]), (64, 2, [32, 64]), (320, 3, [128, 256, 320]), (64, 4, [32, 64, 64, 64]),
])
def test_parts_are_of_whole_blocks(size, processes, ends):
    shards = [Shards(size, Group(rank, processes)) for rank in range(processes)]
    parts = [one.own for one in shards]
    assert [part.stop for part in parts] == ends and [part.start for part in parts] == [0, *ends[:-1]]
    assert all(one.parts == parts and one.shared == (processes > 1) for one in shards)


@pytest.mark.parametrize("size, chunk", [(2**18, 32), (2**18 + 32, 64), (20_494_240, 4096)])
def test_a_norms_sums_are_few_and_the_same_for_any_number_of_processes(size, chunk):
    for processes in (1, 2, 3, 8):
        shards = Shards(size, Group(0, processes))
        assert shards.chunk == chunk and all(part.start % chunk == 0 or part.start == size for part in shards.parts)


class Told(Group):
    """A process that is told fives by the others; notes how many."""

    def __init__(self, rank, size):
        super().__init__(rank, size)
        self.sizes = []

    def broadcast(self, array, root=0):
        self.sizes.append(array.size)
        if root != self.rank:
            array[...] = 5


@pytest.mark.parametrize("rank, found", [(0, [1] * 32 + [5] * 32), (1, None), (3, None)])
def test_process_0_has_the_whole(rank, found):
    shards = Shards(64, Told(rank, 4))
    whole = shards.whole(np.ones(32 if rank < 2 else 0, np.float32))
    assert (whole if found is None else whole.tolist()) == found and shards.group.sizes == [32, 32]


class Apart(Group):
    """A process that hears nothing from the others: its own part of everything goes on."""

    def all_reduce(self, array):
        pass

    def peers(self, array):
        return []

    def gather_sums(self, array):
        return self.gather(array)

    def all_gather(self, parts):
        pass

    finish_update = all_gather


class Summed(Apart):
    """A process whose sums are those of all, which are threads here; weights it does not get."""

    def __init__(self, rank, size, barrier, given):
        super().__init__(rank, size)
        self.barrier, self.given = barrier, given

    def all_reduce(self, array):
        self.given[self.rank] = array.copy()
        self.barrier.wait()
        array[...] = np.sum(self.given, axis=0)
        self.barrier.wait()


class Net(Module):
    """Layers whose parameters lie across the bounds of parts; one is frozen."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(9, 30), nn.Linear(30, 40), nn.Linear(40, 3)
        self.second.bias.requires_grad = False


def two_groups(net):
    return [{"params": net.first.parameters(), "lr": 0.3, "weight_decay": 0.2},
            {"params": [*net.second.parameters(), *net.last.parameters()]}]


KINDS = {
    "adamw": lambda net, ema: AdamW(net, 0.1, weight_decay=0.1, clip=0.5, ema=ema),
    "sgd": lambda net, ema: SGD(net, 0.1, momentum=0.9, weight_decay=0.1, clip=0.5, ema=ema),
    "rmsprop": lambda net, ema: RMSprop(net, 0.1, momentum=0.9, centered=True, ema=ema),
    "lion": lambda net, ema: Lion(net, 0.1, weight_decay=0.1, ema=ema),
    "groups": lambda net, ema: AdamW(two_groups(net), 0.1, ema=ema),
    "a part": lambda net, ema: AdamW(net.second, 0.1),
}


def stepped(kind, group):
    """An optimiser and its EMA after steps with the same gradients, in bf16."""
    rng, net = np.random.default_rng(0), Net()
    for parameter in net.parameters():
        parameter.assign(rng.standard_normal(parameter.shape).astype(np.float32))
    net.precision = "bf16"
    net.flatten("cpu")
    net.flat.shard(group)
    ema = EMA(net, half_life=2)
    optimizer = KINDS[kind](net, ema)
    for _ in range(3):
        optimizer.zero_grad()
        for parameter in net.parameters():
            values = rng.standard_normal(parameter.shape).astype(np.float32)
            if parameter.requires_grad:
                parameter.grad = values
        optimizer.step()
    return optimizer, ema


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("processes", [2, 3, 7])
def test_parts_put_together_are_the_whole_update(kind, processes):
    whole, average = stepped(kind, ALONE)
    barrier, given = threading.Barrier(processes, timeout=60), [None] * processes
    with ThreadPoolExecutor(processes) as threads:
        groups = [Summed(rank, processes, barrier, given) for rank in range(processes)]
        made = list(threads.map(partial(stepped, kind), groups))
    for optimizer, ema in made:
        own = optimizer._shards.own
        np.testing.assert_array_equal(optimizer.flat.data[own], whole.flat.data[own])
        for name, buffer in optimizer.buffers.items():
            np.testing.assert_array_equal(buffer, whole.buffers[name][own])
        if optimizer.ema is not None:
            np.testing.assert_array_equal(ema.held[0], average.held[0][own])
            assert ema.held[1] is None
        trained = np.repeat(whole.flat.flags & Flag.FROZEN == 0, 32)[own]
        copies = optimizer.flat.compute_copy[own]
        np.testing.assert_array_equal(copies[trained], whole.flat.data[own][trained].astype(bfloat16))
        assert optimizer.metrics() == whole.metrics()
    assert np.count_nonzero(whole.flat.data)


@pytest.mark.parametrize("part", [False, True])
def test_the_average_takes_the_weights_place(part):
    """In float32 and in the 16-bit copies, and gives it back; of a part of a model too."""
    net = Net()
    net.precision = "bf16"
    net.flatten("cpu")
    net.flat.shard(Apart(1, 2))
    own = net.second if part else net
    ema, flat = EMA(own, 2), own.flat_parameters()
    weights = flat.data.copy()
    ema.held[0][...] += 1
    with ema.whole() as average:
        assert dict(average.named_parameters()).keys() == dict(own.named_parameters()).keys() and not average.training
        for mine, theirs in zip(own.parameters(), average.parameters(), strict=True):
            np.testing.assert_array_equal(theirs.data, mine.data)
            assert np.shares_memory(theirs.data, flat.data) and theirs.grad is None and not theirs.requires_grad
            assert not mine.low or np.shares_memory(theirs.operand(bfloat16), flat.compute_copy)
        np.testing.assert_array_equal(flat.data[flat.shards.own], weights[flat.shards.own] + 1)
        np.testing.assert_array_equal(flat.compute_copy, flat.data.astype(bfloat16))
    np.testing.assert_array_equal(flat.data, weights)
    np.testing.assert_array_equal(flat.compute_copy, weights.astype(bfloat16))
    with pytest.raises(CudiffError, match="the average lies in 2 parts"):
        _ = ema.model
    with ema.whole() as average, ema.whole() as again:  # a second time too
        assert average is again is ema.model
        np.testing.assert_array_equal(flat.data[flat.shards.own], weights[flat.shards.own] + 1)


def test_more_processes_than_blocks():
    """Those without a part update nothing."""
    layer = nn.Linear(2, 2)
    layer.flatten("cpu")
    layer.flat.shard(Apart(3, 4))
    optimizer = AdamW(layer, ema=EMA(layer, 2))
    optimizer.kernel = None  # is not called: on a GPU it would be launched with no blocks
    before = layer.flat.data.copy()
    layer.weight.grad = np.ones((2, 2), np.float32)
    optimizer.step()
    assert (layer.flat.data == before).all() and optimizer.metrics()["updates"] == 1


def test_what_cannot_be_sharded_is_told():
    layer = nn.Linear(8, 8)
    layer.flatten("cpu")
    early = EMA(layer, 2)
    layer.flat.shard(Apart(0, 2))
    with pytest.raises(CudiffError, match="Muon needs whole matrices, and a sharded model is updated in parts"):
        Muon([layer.weight])
    with pytest.raises(CudiffError, match="made of another model, or of this one in other buffers or shards"):
        AdamW(layer, ema=early)
    with pytest.raises(CudiffError, match=r"the average lies in 2 parts, one a process: use its model within"):
        _ = EMA(layer, 2).model


class Noting(OnHost):
    """Notes the parts that are gathered."""

    def __init__(self):
        super().__init__()
        self.gathered = []

    def finish_update(self, parts):
        self.gathered.append([part.size for part in parts])


def test_a_step_on_a_gpu_updates_a_part_and_gathers_the_weights(host_of, tmp_path):
    """On the stand-in: the launch of AdamW has half of the elements, and its buffers are halves."""
    host, config = host_of(True), PRESETS["digits"].replace(precision="bf16", device="cuda", capture=False, shard=True)
    data = Dataset(np.zeros((64, 16, 16, 1), np.uint8), np.arange(64, dtype=np.int32) % 10, 10)
    group, sizes = Noting(), []
    trainer = Trainer(config.replace(sample_every=0), data, tmp_path / "run", group=group)
    host.watch = lambda launch: sizes.append(launch.args[10]) if launch.name == "adam" else None
    group.gathered.clear()
    trainer.train_step()
    flat = trainer.net.flat
    half = flat.size // 64 * 32 + 32 * (flat.size % 64 > 0)
    assert sizes == [half] and group.gathered == [[half, flat.size - half]]
    assert {buffer.size for buffer in (*trainer.optimizer.buffers.values(), trainer.ema.held[0])} == {half}


# --- runs, over MPI ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size, changes", [
    pytest.param(2, {}, id="two"),
    pytest.param(3, {}, id="three", marks=pytest.mark.slow),
    pytest.param(2, {"precision": "bf16"}, id="bf16", marks=pytest.mark.slow),
    pytest.param(2, {"precision": "fp16", "lr": "1e-3"}, id="fp16", marks=pytest.mark.slow),
    pytest.param(2, {"accumulate": 2, "optimizer": "sgd"}, id="sgd", marks=pytest.mark.slow),
])
def test_a_sharded_run_is_as_one_that_is_not(size, changes, tmp_path):
    """Losses, norms of gradients, checkpoints, the EMA's losses and previews, bit for bit."""
    changes = {"sample_every": 3, "save_every": 3, "log_every": 1} | changes
    for name, flags in (("sharded", ["--shard"]), ("whole", [])):
        code, out, err = train(tmp_path / name, size, *flags, **changes)
        assert (code, err) == (0, "") and out.count("saved ") == 1
    assert_same(tmp_path / "sharded", tmp_path / "whole")
    assert values(tmp_path / "sharded") == values(tmp_path / "whole") and len(values(tmp_path / "whole")) == 8
    for name in ("samples-00000003.png", "samples-00000006.png"):
        assert (tmp_path / "sharded" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.slow
def test_resumed_by_one_then_two_then_one(tmp_path, capsys):
    """Sharded, then not, then sharded: the same run as without. One process holds all, which is said."""
    for name, flags in (("sharded", ["--shard"]), ("whole", [])):
        assert train(tmp_path / name, 1, *flags, steps=2, log_every=1)[0] == 0
        for size, steps, words in ((2, 4, []), (2, 6, ["--no-shard"]), (1, 8, flags)):
            words = ["train", "--resume", str(tmp_path / name), "--steps", str(steps), *words]
            if size == 1:
                assert main(words) == 0
            else:
                code, _, err = run(size, [sys.executable, "-m", "cudiff", *words])
                assert (code, err) == (0, "")
    assert_same(tmp_path / "sharded", tmp_path / "whole")
    lines = [values(tmp_path / name) for name in ("sharded", "whole")]
    assert lines[0] == lines[1] and [line["step"] for line in lines[0] if "loss" in line] == list(range(1, 9))
    assert capsys.readouterr().out.count("shard changes nothing: there is one process, which holds all") == 2


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_process_holds_its_part_alone(size, tmp_path):
    """Of the moments and of the average; the weights are back after the average took their place."""
    code, out, err = run(size, program(f"""
        import numpy as np
        from cudiff.beginning import moments_of
        from cudiff.checkpoint import load_checkpoint
        from cudiff.data import load_dataset
        from cudiff.distributed import join
        from cudiff.errors import CudiffError
        from cudiff.train import Trainer
        from tests.test_passes import TINY

        group, digits = join("cpu"), load_dataset("digits", image_size=8, count=100)
        config = TINY.replace(batch_size=12, shard=True)
        trainer = Trainer(config, digits, "{tmp_path}/run", group=group)
        flat, optimizer, ema = trainer.net.flat, trainer.optimizer, trainer.ema
        share = -(-flat.size // {size} // 32) * 32
        parts = [*optimizer.buffers.values(), ema.held[0]]
        assert len(parts) == 3 and all(part.base is None and part.size <= share for part in parts)
        assert sum(group.exchange(parts[0].size)) == flat.size
        trainer.train_step()
        trainer.train_step()
        weights = flat.data.copy()
        try:
            trainer.preview.sample(1)
            raise AssertionError
        except CudiffError as error:
            assert "the average lies in {size} parts" in str(error)
        with ema.whole() as average, ema.whole():
            assert average is trainer.preview.net is ema.model
            assert all(np.shares_memory(weight.data, flat.data) for weight in average.parameters())
            averaged = average.state_dict()
            assert (flat.data[flat.shards.own] != weights[flat.shards.own]).any()
            assert trainer.validation_loss(digits) > 0
        assert (flat.data == weights).all()
        moments = optimizer.state_dict()
        assert (len(moments) > 1) == group.leads
        path = trainer.save()
        group.exchange(None)
        saved = load_checkpoint(path)
        assert all((saved.tensors["ema." + name] == values).all() for name, values in averaged.items())
        kept = [part.copy() for part in parts]
        for part in parts:
            part *= 2  # zeros between parameters stay
        optimizer.load_state_dict(moments_of(saved))
        with ema.whole() as average:
            average.load_state_dict(averaged)
        assert all((part == before).all() for part, before in zip(parts, kept)) and (flat.data == weights).all()
        group.close()
    """))
    assert (code, out, err) == (0, "", ""), err


@pytest.mark.parametrize("fails", ["_record", "save_preview"])
def test_a_process_that_cannot_write_has_all_save_first(fails, tmp_path):
    """The weights, whose place the average had when it failed."""
    code, _, err = run(2, program(f"""
        import sys
        from cudiff import cli, train

        write = train.Trainer.{fails}

        def failing(trainer, *given):
            if trainer.step == 4 and trainer.group.leads:
                raise OSError(28, "no room")
            return write(trainer, *given)

        train.Trainer.{fails} = failing
        words = {[word for name, value in (OPTIONS | {"sample-every": "4"}).items() for word in (f"--{name}", value)]!r}
        sys.exit(cli.main(["train", "--flip", "--shard", "--folder", {str(tmp_path / "run")!r}, *words]))
    """), within=60)
    assert code == 2 and err.count("cudiff: cannot write (no room)") == 1
    assert load_checkpoint(tmp_path / "run").counters["step"] == 4
    assert train(tmp_path / "whole", 2, steps=4)[0] == 0
    assert_same(tmp_path / "run", tmp_path / "whole")
