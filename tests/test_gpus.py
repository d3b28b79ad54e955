"""Two GPUs and four: the same run as one that accumulates their parts, and the ends of runs. Skips without them."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from cudiff.checkpoint import load_checkpoint
from tests.ranks import ROOT
from tests.test_distributed import START
from tests.test_together import OPTIONS, assert_same, losses, metrics, values

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


@pytest.fixture(autouse=True)
def two():
    needs(2)


def needs(gpus):
    from cudiff.backend import get_cupy

    if (found := get_cupy().cuda.runtime.getDeviceCount()) < gpus:
        pytest.skip(f"{found} GPUs here")


def command(folder, *words, **changes):
    options = OPTIONS | {"device": "cuda", "image-size": "16", "model-channels": "64", "num-head-channels": "32"}
    options |= {"batch-size": "32"} | {name.replace("_", "-"): str(value) for name, value in changes.items()}
    flags = [word for name, value in options.items() for word in (f"--{name}", value)]
    return [sys.executable, "-m", "cudiff", "train", "--flip", "--folder", str(folder), *flags, *words]


def train(folder, *words, **changes):
    done = subprocess.run(command(folder, *words, **changes), capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
def test_two_are_one_that_accumulates_the_halves(precision, tmp_path):
    """Bit for bit, captured or not; two runs too."""
    changes = dict(precision=precision, steps=20, log_every=1)
    assert "on 2 GPUs" in train(tmp_path / "two", "--gpus", "2", **changes)
    train(tmp_path / "again", "--gpus", "2", **changes)
    train(tmp_path / "eager", "--gpus", "2", "--no-capture", **changes)
    train(tmp_path / "halves", batch_size=16, accumulate=2, **changes)
    for other in ("again", "eager", "halves"):
        assert_same(tmp_path / "two", tmp_path / other)
        assert losses(tmp_path / "two") == losses(tmp_path / other)


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
def test_sharded_is_as_not(precision, tmp_path):
    """Bit for bit, captured or not; the EMA's losses and previews too. Then one goes on with the whole."""
    changes = dict(precision=precision, steps=20, log_every=1, sample_every=8, save_every=8)
    train(tmp_path / "whole", "--gpus", "2", **changes)
    train(tmp_path / "sharded", "--gpus", "2", "--shard", **changes)
    train(tmp_path / "eager", "--gpus", "2", "--shard", "--no-capture", **changes)
    previews = sorted((tmp_path / "whole").glob("samples-*.png"))
    for other in ("sharded", "eager"):
        assert_same(tmp_path / "whole", tmp_path / other)
        assert values(tmp_path / "whole") == values(tmp_path / other) and len(previews) == 3
        assert all(path.read_bytes() == (tmp_path / other / path.name).read_bytes() for path in previews)
    for name in ("whole", "sharded"):
        words = ["train", "--resume", str(tmp_path / name), "--steps", "24", "--gpus", "1"]
        subprocess.run([sys.executable, "-m", "cudiff", *words], check=True, timeout=240, cwd=ROOT)
    assert_same(tmp_path / "whole", tmp_path / "sharded")


@pytest.mark.parametrize("precision, tolerance", [("fp32", 1e-3), ("bf16", 2e-2)])
def test_two_halves_are_one_batch_over_200_steps(precision, tolerance, tmp_path):
    """By a quarter of the preset elephants' learning rate: by all of it this network amplifies a rounding 10,000 times
    within 50 steps, so that the losses differed by up to 1.7 % in fp32, tf32 and bf16 alike."""
    changes = dict(precision=precision, steps=200, log_every=1, lr_schedule="cosine", warmup=100, lr=5e-5)
    train(tmp_path / "two", "--gpus", "2", **changes)
    train(tmp_path / "one", **changes)
    worst = np.abs(np.divide(losses(tmp_path / "two"), losses(tmp_path / "one")) - 1).max()
    print(f"{precision}: losses differ by {worst:.2e} at most")
    assert worst < tolerance


@pytest.mark.parametrize("words", [[], ["--shard"]], ids=["whole", "sharded"])
def test_four_are_one_that_accumulates_the_quarters(words, tmp_path):
    """But for the order in which four gradients are added. Two runs of four are bit-equal, and two go on with it."""
    needs(4)
    changes = dict(precision="fp32", steps=60, log_every=1, lr_schedule="cosine", warmup=60, lr=5e-5)
    assert "on 4 GPUs" in train(tmp_path / "four", "--gpus", "4", *words, **changes)
    train(tmp_path / "again", "--gpus", "4", *words, **changes)
    train(tmp_path / "quarters", **changes | {"batch_size": 8, "accumulate": 4})
    assert_same(tmp_path / "four", tmp_path / "again")
    np.testing.assert_allclose(losses(tmp_path / "four"), losses(tmp_path / "quarters"), rtol=1e-4)
    resumed = ["train", "--resume", str(tmp_path / "four"), "--steps", "70", "--gpus", "2"]
    subprocess.run([sys.executable, "-m", "cudiff", *resumed], check=True, timeout=240, cwd=ROOT)
    assert len(losses(tmp_path / "four")) == 70


def test_resumed_by_one_then_two_then_one(tmp_path):
    folder = tmp_path / "parts"
    train(tmp_path / "whole", steps=30, log_every=1)
    train(folder, steps=10, log_every=1)
    for steps, gpus in ((20, 2), (30, 1)):
        words = ["train", "--resume", str(folder), "--steps", str(steps), "--gpus", str(gpus)]
        subprocess.run([sys.executable, "-m", "cudiff", *words], check=True, timeout=240, cwd=ROOT)
    assert [line["step"] for line in metrics(folder) if "loss" in line] == list(range(1, 31))
    np.testing.assert_allclose(losses(folder), losses(tmp_path / "whole"), rtol=1e-3)


def test_sampling_on_two_is_sampling_on_one(tmp_path):
    train(tmp_path / "run")
    made = []
    for gpus in (1, 2):
        out = tmp_path / f"{gpus}.npz"
        words = ["sample", str(tmp_path / "run"), "-n", "40", "--batch-size", "16", "--out", str(out)]
        subprocess.run([sys.executable, "-m", "cudiff", *words, "--gpus", str(gpus)], check=True, timeout=240, cwd=ROOT)
        made.append(out.read_bytes())
    assert made[0] == made[1]


def ranks_of(launcher):
    """The processes that a process has started, in their order."""
    return [int(pid) for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]


def running(folder, *words, gpus=2, **changes):
    """A run that has made a checkpoint and goes on."""
    process = subprocess.Popen(command(folder, "--gpus", str(gpus), *words, steps=10**7, save_every=50, **changes),
                               text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=ROOT)
    until = time.monotonic() + 200
    while not any(folder.glob("step-*.safetensors")):
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.1)
    return process, ranks_of(process.pid)


def gone(pids):
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.parametrize("words", [[], ["--shard"]], ids=["whole", "sharded"])
@pytest.mark.parametrize("gpus, rank", [(2, 0), (2, 1), (4, 2)])
def test_one_that_is_killed_ends_all(gpus, rank, words, tmp_path):
    needs(gpus)
    process, pids = running(tmp_path / "run", *words, gpus=gpus)
    begun = time.monotonic()
    os.kill(pids[rank], signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    took = time.monotonic() - begun
    print(f"process {rank} killed: all had ended after {took:.1f} s")
    assert process.returncode == 137 and f"process {rank} of {gpus} was ended by SIGKILL" in err
    assert took < 10 and gone(pids)
    load_checkpoint(tmp_path / "run")


@pytest.mark.parametrize("words", [[], ["--shard"]], ids=["whole", "sharded"])
def test_one_that_is_halted_ends_both_after_the_timeout(words, tmp_path):
    process, pids = running(tmp_path / "run", "--timeout", "0.5", *words)  # a first step compiles within these 30 s
    os.kill(pids[1], signal.SIGSTOP)
    _, err = process.communicate(timeout=90)
    assert process.returncode == 2 and "(--timeout)" in err and gone(pids)


def test_the_launcher_passes_a_signal_on_and_leaves_nobody(tmp_path):
    process, pids = running(tmp_path / "run")
    process.terminate()
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (143, "") and gone(pids)
    process, pids = running(tmp_path / "other")
    process.kill()
    until = time.monotonic() + 10
    while not gone(pids) and time.monotonic() < until:
        time.sleep(0.1)
    assert gone(pids)


def test_a_batch_that_does_not_fit_is_told_once(tmp_path):
    words = command(tmp_path / "run", "--gpus", "2", batch_size=40_000, image_size=64, precision="fp32", steps=2)
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert done.returncode == 2 and done.stderr.count("cudiff: ") == 1
    told = r"takes [\d.]+ GiB of memory on each of 2 GPUs .*: --batch-size \d+ --accumulate \d+ .* fits"
    assert re.search(told, done.stderr)


def test_other_launchers(tmp_path):
    """torchrun, which holds MASTER_PORT itself."""
    pytest.importorskip("torch")
    words = command(tmp_path / "run", steps=20)[1:]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    done = subprocess.run([*torchrun, *words], capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert done.returncode == 0 and "on 2 GPUs" in done.stdout, done.stderr


BATCH_NORM = """
import numpy as np
import cudiff
from cudiff import nn
from cudiff.distributed import join

group = join("cuda")
rng = np.random.default_rng(0)
x, dout = (rng.standard_normal((6, 4, 4, 8)).astype(np.float32) for _ in range(2))
part = slice(3 * group.rank, 3 * group.rank + 3)
for pooled in (False, True):
    alone, shared = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
    for layer in (alone, shared):
        layer.flatten("cuda")
    nn.set_group(shared, group)
    d = dout[:, ::2, ::2] if pooled else dout
    found = []
    for layer, rows in ((alone, slice(None)), (shared, part)):
        given = cudiff.Tensor(x[rows] * 3 + 7, device="cuda", requires_grad=True)
        out = layer(given, pooled)
        out.backward(cudiff.Tensor(np.ascontiguousarray(d[rows]), device="cuda"))
        gradient = layer.flat.grad.copy()
        if layer is shared:
            group.all_reduce(gradient)
        found.append([out.numpy(), cudiff.Tensor(given.grad).numpy(), gradient.get()]
                     + [buffer.numpy() for _, buffer in layer.named_buffers()])
    for index, (whole, own) in enumerate(zip(*found)):
        np.testing.assert_allclose(own, whole[part] if index < 2 else whole, rtol=1e-3, atol=1e-4)
group.close()
"""


def test_batch_norm_takes_its_statistics_over_both():
    words = [sys.executable, "-c", START.format(size=2, code=BATCH_NORM)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
