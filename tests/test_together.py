"""Training in several processes on the CPU: the same run as one process that accumulates their parts."""

import json
import subprocess
import sys

import numpy as np
import pytest

from cudiff.checkpoint import load_checkpoint, save_checkpoint
from cudiff.cli import main
from tests.ranks import mpiexec, program, run

OPTIONS = {
    "data": "digits", "image-size": "8", "model-channels": "8", "channel-mult": "1,2", "num-res-blocks": "1",
    "num-head-channels": "8", "batch-size": "12", "steps": "6", "log-every": "2", "sample-every": "0",
    "save-every": "0", "validation": "8", "dropout": "0.1", "clip": "0.5", "samples": "4", "sample-steps": "2",
    "sampler": "euler", "device": "cpu", "lr-schedule": "constant", "warmup": "0",
}


def train(folder, size=1, *flags, mpi=True, **changes):
    """`cudiff train` in so many processes, over MPI or by --processes; returns its exit code, output and errors."""
    options = OPTIONS | {name.replace("_", "-"): str(value) for name, value in changes.items()}
    words = ["train", "--flip", "--folder", str(folder), *flags]
    for name, value in options.items():
        words += [f"--{name}", value]
    if size == 1:
        return main(words), "", ""
    if not mpi:
        found = subprocess.run([sys.executable, "-m", "cudiff", *words, "--processes", str(size)],
                               capture_output=True, text=True, timeout=120)
        return found.returncode, found.stdout, found.stderr
    return run(size, [sys.executable, "-m", "cudiff", *words])


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder):
    return [line["loss"] for line in metrics(folder) if "loss" in line]


def values(folder):
    """The lines of metrics without what a clock or the system tells."""
    told = ("step_ms", "images_per_second", "memory_mb", "seconds")
    return [{name: value for name, value in line.items() if name not in told} for line in metrics(folder)]


def assert_same(a, b):
    a, b = (load_checkpoint(folder) for folder in (a, b))
    assert a.tensors.keys() == b.tensors.keys() and a.counters["optimizer"] == b.counters["optimizer"]
    for name in a.tensors:
        np.testing.assert_array_equal(a.tensors[name], b.tensors[name], err_msg=name)


@pytest.mark.parametrize("size, changes", [
    pytest.param(2, {"log_every": 1}, id="two"),
    pytest.param(2, {"log_every": 1, "mpi": False}, id="two that share memory"),
    pytest.param(2, {"accumulate": 2, "residency": "host"}, id="accumulating", marks=pytest.mark.slow),
    pytest.param(3, {}, id="three", marks=pytest.mark.slow),
    pytest.param(2, {"precision": "bf16"}, id="bf16", marks=pytest.mark.slow),
    pytest.param(2, {"diffusion": "ddpm", "sampler": "ddim", "optimizer": "sgd"}, id="ddpm", marks=pytest.mark.slow),
])
def test_processes_are_one_that_accumulates_their_parts(size, changes, tmp_path):
    """Bit for bit in all that a run leaves, but for sums of losses between two lines of metrics."""
    code, out, err = train(tmp_path / "many", size, **changes)
    assert (code, err) == (0, "") and out.count("saved ") == 1 and f"on {size} CPUs" in out
    parts = size * changes.get("accumulate", 1)
    if parts == size:
        assert train(tmp_path / "one", batch_size=12 // size, **(changes | {"accumulate": size}))[0] == 0
        assert_same(tmp_path / "many", tmp_path / "one")
        np.testing.assert_allclose(losses(tmp_path / "many"), losses(tmp_path / "one"), rtol=1e-6)
        if "log_every" in changes:
            assert losses(tmp_path / "many") == losses(tmp_path / "one")
    assert train(tmp_path / "whole", **changes)[0] == 0
    tolerance = 1e-2 if "precision" in changes else 1e-4
    np.testing.assert_allclose(losses(tmp_path / "many"), losses(tmp_path / "whole"), rtol=tolerance)


@pytest.mark.slow
def test_two_halves_are_one_batch_over_200_steps(tmp_path):
    """Losses within 1e-3. By five times this learning rate the network amplifies a rounding until the losses differ by
    4 %."""
    changes = dict(batch_size=32, steps=200, log_every=1, lr_schedule="cosine", warmup=50, lr=5e-4)
    assert train(tmp_path / "two", 2, **changes)[0] == 0
    assert train(tmp_path / "one", **changes)[0] == 0
    assert len(losses(tmp_path / "one")) == 200
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "one"), rtol=1e-3)


def test_the_first_gradient_is_that_of_the_whole_batch(tmp_path):
    code, out, err = run(2, program(f"""
        import numpy as np
        from cudiff.data import load_dataset
        from cudiff.distributed import ALONE, join
        from cudiff.train import Trainer
        from tests.test_passes import TINY

        digits, group = load_dataset("digits", image_size=8, count=100), join("cpu")
        config = TINY.replace(batch_size=32, dropout=0.1, flip=True)
        both = [Trainer(config, digits, f"{tmp_path}/{{one.size}}", group=one) for one in (group, ALONE)]
        for trainer in both:
            trainer.train_step()
        first, second = (trainer.net.flat.grad for trainer in both)
        assert np.abs(second).max() > 0.1 and np.abs(first - second).max() < 1e-5
        group.close()
    """))
    assert (code, out, err) == (0, "", "")


def test_resumed_by_one_then_two_then_one(tmp_path, capsys):
    assert train(tmp_path / "whole", steps=9, log_every=1)[0] == 0
    folder = tmp_path / "parts"
    assert train(folder, steps=3, log_every=1)[0] == 0
    for size, steps in ((2, 6), (1, 9)):
        words = ["train", "--resume", str(folder), "--steps", str(steps)]
        if size == 1:
            assert main(words) == 0
        else:
            code, _, err = run(size, [sys.executable, "-m", "cudiff", *words])
            assert (code, err) == (0, "")
    assert [line["step"] for line in metrics(folder) if "loss" in line] == list(range(1, 10))
    np.testing.assert_allclose(losses(folder), losses(tmp_path / "whole"), rtol=1e-4)


def test_one_process_writes(tmp_path):
    """Previews, validation, checkpoints and metrics, each once; and training is as without them."""
    code, out, err = train(tmp_path / "looking", 2, sample_every=2, save_every=3, keep=0)
    assert (code, err) == (0, "")
    folder = tmp_path / "looking"
    assert sorted(path.name for path in folder.glob("s*")) == [
        "samples-00000002.png", "samples-00000004.png", "samples-00000006.png", "step-00000003.safetensors",
        "step-00000006.safetensors",
    ]
    assert [(line["step"], "loss" in line) for line in metrics(folder)] == [
        (2, True), (2, False), (4, True), (4, False), (6, True), (6, False)
    ]
    assert out.count("images to train on") == 1 and out.count("EMA: held out") == 3
    assert train(tmp_path / "quiet", 2)[0] == 0
    assert_same(folder, tmp_path / "quiet")


def test_minutes_are_those_of_one_clock(tmp_path):
    code, _, err = train(tmp_path / "run", 2, steps=0, minutes=0.02)
    assert (code, err) == (0, "") and load_checkpoint(tmp_path / "run").counters["seconds"] >= 1.2


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_process_stops_all_after_the_same_step(rank, tmp_path):
    code, out, err = run(2, program(f"""
        import os, signal
        from cudiff.distributed import join
        from cudiff.data import load_dataset
        from cudiff.train import Trainer
        from tests.test_passes import TINY

        group = join("cpu")
        digits = load_dataset("digits", image_size=8)
        trainer = Trainer(TINY.replace(steps=10**6), digits, "{tmp_path}/run", group=group)
        step = trainer._step

        def interrupted():
            if trainer.step == 5 and group.rank == {rank}:
                os.kill(os.getpid(), signal.SIGTERM)
            return step()

        trainer._step = interrupted
        trainer.run()
        assert trainer.stopped_by == signal.SIGTERM
        steps = group.exchange(trainer.step)
        assert steps[0] == steps[1] >= 6
        group.close()
        os.write(1, f"{{trainer.step}}\\n".encode())
    """))
    assert (code, err) == (0, "")
    steps = {int(line) for line in out.split()}
    assert len(steps) == 1 and load_checkpoint(tmp_path / "run").counters["step"] in steps


def test_a_gradient_that_is_not_finite_on_one_process_skips_the_step_on_all(tmp_path):
    code, _, err = run(2, program(f"""
        import numpy as np
        from cudiff.distributed import join
        from cudiff.data import load_dataset
        from cudiff.train import Trainer
        from tests.test_passes import TINY

        group = join("cpu")
        trainer = Trainer(TINY.replace(steps=4), load_dataset("digits", image_size=8), "{tmp_path}/run", group=group)
        loss = trainer.loss

        def broken(*given):
            return loss(*given) * (np.nan if trainer.step == 2 and group.rank == 1 else 1.0)

        trainer.loss = broken
        trainer.run()
        status = trainer.optimizer.metrics()
        assert (status["skipped"], status["updates"]) == (1, 3)
        weights = trainer.net.flat.data.copy()
        group.broadcast(weights)
        assert (weights == trainer.net.flat.data).all() and np.isfinite(weights).all()
        group.close()
    """))
    assert (code, err) == (0, "")


@pytest.mark.parametrize(
    "fault, told",
    [
        ("raise CudiffError('my mistake')", "cudiff: my mistake"),
        ("raise MemoryError", "process 1 of 2 is out of memory: use a --batch-size below 12"),
        ("os.kill(os.getpid(), 9)", None),
    ],
    ids=["mistake", "memory", "killed"],
)
def test_one_process_that_fails_ends_the_command(fault, told, tmp_path):
    """While the other waits for it in a sum; the last checkpoint is whole."""
    code, _, err = run(2, program(f"""
        import os, sys
        from cudiff import cli, train
        from cudiff.distributed import joined
        from cudiff.errors import CudiffError

        step = train.Trainer.train_step

        def failing(trainer, *given):
            if trainer.step == 3 and joined().rank == 1:
                {fault}
            return step(trainer, *given)

        train.Trainer.train_step = failing
        sys.exit(cli.main({["train", "--save-every", "2", "--folder", str(tmp_path / "run"), *words()]!r}))
    """), within=30)
    assert code and load_checkpoint(tmp_path / "run").counters["step"] == 2
    if told is not None:
        assert code == 2 and err.count("cudiff: ") == 1 and told in err


@pytest.mark.parametrize("debug, told", [([], "cudiff: cannot read"), (["--debug"], "errors.CudiffError: cannot read")])
def test_one_process_that_fails_before_the_processes_meet_ends_the_command(debug, told, tmp_path):
    """As over a file that its machine alone lacks; the other waits in MPI, which has no end of its own."""
    assert train(tmp_path / "run")[0] == 0
    code, _, err = run(2, program(f"""
        import sys
        from cudiff import cli

        weights = "none" if cli.processes.place().rank == 1 else "run"
        sys.exit(cli.main(["train", "--resume", "{tmp_path}/" + weights, "--steps", "9", *{debug!r}]))
    """), within=30)
    assert code == 2 and err.count(told) == 1 and err.count("Traceback") == len(debug)


def words():
    return [word for name, value in OPTIONS.items() if name != "save-every" for word in (f"--{name}", value)]


def test_a_batch_without_equal_parts_is_told_once(tmp_path):
    code, _, err = train(tmp_path / "run", 2, batch_size=7)
    told = "cudiff: a batch of 7 has no 2 equal parts, one a process: use --batch-size 6 or 8"
    assert code == 2 and err.count(told) == 1


def test_other_options_than_process_0_are_told(tmp_path):
    code, _, err = run(2, program(f"""
        import os, sys
        from cudiff.cli import main

        sys.exit(main({["train", "--folder", str(tmp_path / "run"), *words()]!r} + ["--seed", os.environ["PMI_RANK"]]))
    """) if "ompi" not in mpiexec()[0] else pytest.skip("PMI_RANK is MPICH's"))
    assert code == 2 and err.count("process 1 of 2 has another configuration than process 0") == 1


def test_another_checkpoint_than_process_0s_is_told(tmp_path):
    """Other weights with the same counters, as converted ones of two files have: each process would train its own."""
    assert train(tmp_path / "run")[0] == 0
    first = load_checkpoint(tmp_path / "run")
    for name, factor in (("0", 1), ("1", 2)):
        tensors = {key: array * np.float32(factor) for key, array in first.tensors.items()}
        save_checkpoint(tmp_path / f"{name}.safetensors", first.config, tensors, first.counters)
    code, _, err = run(2, program(f"""
        import os, sys
        from cudiff.cli import main

        sys.exit(main(["train", "--resume", f"{tmp_path}/{{os.environ['RANK']}}.safetensors", "--steps", "9",
                       "--folder", "{tmp_path}/new"]))
    """), mpi=False)
    assert code == 2 and err.count("process 1 of 2 has another checkpoint than process 0") == 1


def test_batch_norm_takes_its_statistics_over_all_processes():
    """In outputs, running statistics and gradients, with the window's maximum too; not in eval mode, nor in a copy."""
    code, _, err = run(2, program("""
        import copy
        import numpy as np
        import cudiff
        from cudiff import nn
        from cudiff.distributed import join

        group = join("cpu")
        rng = np.random.default_rng(0)
        x, dout = rng.standard_normal((6, 4, 4, 5)) * 3 + 7, rng.standard_normal((6, 4, 4, 5))
        part = slice(3 * group.rank, 3 * group.rank + 3)
        for pooled in (False, True):
            alone, shared = nn.BatchNorm2d(5), nn.BatchNorm2d(5)
            for layer in (alone, shared):
                layer.weight.assign(rng.standard_normal(5).astype(np.float32) if layer is alone else alone.weight.data)
            nn.set_group(shared, group)
            assert copy.deepcopy(shared).group.size == 1
            whole = cudiff.Tensor(x, requires_grad=True)
            own = cudiff.Tensor(x[part], requires_grad=True)
            outs = alone(whole, pooled), shared(own, pooled)
            np.testing.assert_allclose(outs[1].numpy(), outs[0].numpy()[part], rtol=1e-6, atol=1e-6)
            for name, buffer in alone.named_buffers():
                np.testing.assert_allclose(dict(shared.named_buffers())[name].numpy(), buffer.numpy(), rtol=1e-6)
            d = dout[:, ::2, ::2] if pooled else dout
            outs[0].backward(cudiff.Tensor(d))
            outs[1].backward(cudiff.Tensor(d[part]))
            np.testing.assert_allclose(own.grad, whole.grad[part], rtol=1e-4, atol=1e-6)
            for ours, theirs in ((shared.weight, alone.weight), (shared.bias, alone.bias)):
                total = ours.grad.copy()
                group.all_reduce(total)
                np.testing.assert_allclose(total, theirs.grad, rtol=1e-4, atol=1e-5)
            shared.eval()
            if group.rank == 0:
                shared(own, pooled)  # waits for nobody
        group.close()
    """))
    assert (code, err) == (0, "")


def test_sampling_deals_out_whole_batches(tmp_path):
    """The same pictures, image for image, written once; in an animation and in `eval` too."""
    assert train(tmp_path / "run")[0] == 0
    words = [str(tmp_path / "run"), "-n", "11", "--seed", "3", "--batch-size", "4", "--device", "cpu"]
    for out in ("images.npz", "film.gif"):
        assert main(["sample", *words, "--out", str(tmp_path / f"one-{out}")]) == 0
        for size in (2, 3):
            command = [sys.executable, "-m", "cudiff", "sample", *words, "--out", str(tmp_path / f"{size}-{out}")]
            code, told, err = run(size, command)
            assert (code, err) == (0, "") and told.count("images in") == 1
            assert (tmp_path / f"{size}-{out}").read_bytes() == (tmp_path / f"one-{out}").read_bytes()


@pytest.mark.slow
def test_eval_deals_out_whole_batches(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CUDIFF_CACHE_DIR", str(tmp_path / "cache"))
    assert train(tmp_path / "run")[0] == 0
    words = ["eval", str(tmp_path / "run"), "-n", "24", "--batch-size", "8", "--device", "cpu"]
    capsys.readouterr()
    assert main(words) == 0
    expected = capsys.readouterr().out
    code, told, err = run(2, [sys.executable, "-m", "cudiff", *words])
    assert (code, err) == (0, "") and told.split() == expected.split()
