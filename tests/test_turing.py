"""What Turing (sm_75) launches, on the stand-in for a GPU: within its shared memory and its registers."""

import math
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from cudiff import Tensor
from cudiff.config import Config
from cudiff.cuda.device import precision_on
from cudiff.data import load_dataset
from cudiff.ops import attention, group_norm
from cudiff.train import Trainer
from tests.compile_kernels import compile_source
from tests.host import forget, pretend
from tests.traces import Case, sampling, training

SHARED_BYTES, REGISTERS = 64 << 10, 64 << 10  # of a block


def launches(case, folder):
    """Of each kernel with its constants that a step or a sampling launches, the most threads and dynamic bytes."""
    most: dict = {}

    def note(launch):
        key = launch.stem, launch.name, tuple(sorted(launch.constants.items()))
        threads, dynamic = most.get(key, (0, 0))
        most[key] = max(threads, math.prod(launch.block)), max(dynamic, launch.shared)

    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        host = pretend(patch, hopper=False, turing=True)
        host.watch = note
        try:
            (training(case, patch, folder) if case.phase == "training" else sampling(case, patch))()
        finally:
            patch.undo()
            forget()
    return most


def used(stem, constants):
    """By kernel, the registers of a thread and the static bytes of shared memory that NVRTC reports for sm_75."""
    _, log = compile_source(stem, "sm_75", dict(constants))
    found = re.findall(r"Compiling entry function '(\w+)'.*?Used (\d+) registers([^\n]*)", log, re.DOTALL)
    static = {name: re.search(r"(\d+) bytes smem", rest) for name, _, rest in found}
    return {name: (int(registers), int(bytes[1]) if (bytes := static[name]) else 0) for name, registers, _ in found}


@pytest.mark.parametrize("case", [
    pytest.param(Case("mnist", "training", "fp16", False), marks=pytest.mark.slow),
    pytest.param(Case("dit-mnist", "sampling", "fp16", False), marks=pytest.mark.slow),
], ids=str)
def test_every_launch_fits(case, tmp_path, nvrtc):
    most = launches(case, tmp_path)
    assert len(most) > 10
    files = list(dict.fromkeys((stem, constants) for stem, _, constants in most))
    with ThreadPoolExecutor() as pool:
        compiled = dict(zip(files, pool.map(used, *zip(*files, strict=True)), strict=True))
    for (stem, name, constants), (threads, dynamic) in most.items():
        registers, static = compiled[stem, constants][name]
        assert static + dynamic <= SHARED_BYTES, f"{stem}.{name} {constants}: {static} + {dynamic} bytes"
        assert threads * registers <= REGISTERS, f"{stem}.{name} {constants}: {threads} x {registers}"


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("dim", [16, 64, 80, 128])
@pytest.mark.parametrize("tokens", [16, 256])
def test_attention_fits(host_of, dtype, dim, tokens):
    """The launch itself fails a test beyond 64 KiB."""
    host = host_of(False, turing=True)
    q, k, v = (Tensor(host.zeros((2, tokens, 2, dim), np.dtype(dtype)), requires_grad=True) for _ in range(3))
    out = attention(q, k, v)
    out.backward(host.zeros(out.shape, np.dtype(dtype)))
    assert ("attention", "backward_kv") in host.launches


@pytest.mark.parametrize("pixels, channels, groups", [(64, 3072, 3), (1, 6048, 6), (64, 2048, 2), (256, 2304, 1)])
def test_group_norm_fits(host_of, nvrtc, pixels, channels, groups):
    """Of large groups, where a block adds up the sums of its groups itself and where it does not."""
    host, half = host_of(False, turing=True), np.dtype(np.float16)
    seen: list = []
    host.watch = seen.append
    x, weight, bias = (Tensor(host.zeros(shape, dtype), requires_grad=True) for shape, dtype in (
        ((16, pixels, channels), half), ((channels,), np.dtype(np.float32)), ((channels,), np.dtype(np.float32))))
    group_norm(x, weight, bias, groups).backward(host.zeros(x.shape, half))
    norms = [launch for launch in seen if launch.stem == "group_norm"]
    static = {name: bytes for name, (_, bytes) in used("group_norm", tuple(norms[0].constants.items())).items()}
    assert {launch.name for launch in norms} >= {"normalize", "input_gradients"}
    for launch in norms:
        assert static[launch.name] + launch.shared <= SHARED_BYTES, f"{launch.name}: {launch.shared} bytes"


def test_fp16_stands_for_bf16_and_auto_picks_what_there_is(host_of, tmp_path):
    assert precision_on("cpu", "auto") == "fp32" and precision_on("cpu", "bf16") == "bf16"
    host_of(True)
    assert precision_on("cuda", "auto") == "bf16" and precision_on("cuda", "fp32") == "fp32"
    host_of(False, turing=True)
    assert [precision_on("cuda", name) for name in ("auto", "bf16", "tf32")] == ["fp16", "fp16", "tf32"]


@pytest.mark.parametrize("precision, told", [("bf16", True), ("auto", False)])
def test_a_run_says_that_it_computes_in_fp16(host_of, tmp_path, precision, told):
    host_of(False, turing=True)
    config = Config(data="digits", image_size=8, model_channels=8, channel_mult=(1,), num_res_blocks=1, num_heads=2,
                    batch_size=4, steps=1, sample_every=0, device="cuda", capture=False, precision=precision)
    trainer = Trainer(config, load_dataset("digits", image_size=8, count=40), tmp_path)
    assert trainer.config.precision == trainer.net.precision == "fp16" and trainer.optimizer.loss_scale is not None
    assert ("this GPU has no bf16: the run computes in fp16" in trainer._notices) == told
