"""The benchmark: its baselines give cudiff's losses, gradients and outputs from its weights; its time and options."""

import ast
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed: no baseline")
pytest.importorskip("cupy", reason="CuPy is not installed: the benchmark needs it")

import torch

from cudiff import ops
from cudiff.backend import bfloat16
from cudiff.config import PRESETS
from cudiff.cuda.kernels.convolution import few_channels, portable, sm90, wgrad_sm90
from cudiff.cuda.kernels.convolution.problem import DGRAD, FPROP, WGRAD, Operands, Skip
from cudiff.cuda.kernels.gemm import matmul
from cudiff.cuda.kernels.gemm.product import Epilogue
from cudiff.cuda.launch import launches
from cudiff.data.dataset import Dataset
from cudiff.models import build
from cudiff.models.cnn import CNN
from cudiff.pipeline import Pipeline
from cudiff.tensor import Tensor, no_grad
from cudiff.train import Trainer
from examples import bench
from examples.benchmark import baselines, networks, profile
from examples.benchmark.measure import Report, Row
from examples.benchmark.profile import flops_of, launches_of, size_of
from tests.check import problem_of, relative_error

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = {
    "unet": networks.unet_config(
        "fp32", image_size=16, batch_size=4, channel_mult=(1, 2), num_res_blocks=1, attention_resolutions=(8,)
    ),
    "scale and shift": networks.plain(
        PRESETS["imagenet64"], image_size=16, batch_size=4, channel_mult=(1, 2), num_res_blocks=1, model_channels=32,
        num_head_channels=16, attention_resolutions=(8,),
    ),
    "old order": networks.plain(
        PRESETS["guided64"], image_size=16, batch_size=4, channel_mult=(1, 2), num_res_blocks=1, model_channels=32,
        num_heads=2, attention_resolutions=(8,),
    ),
    "cs179": PRESETS["cs179"].replace(batch_size=4, model_channels=16),
    "dit": networks.DITS["DiT-B/4 64x64"].replace(
        precision="fp32", image_size=16, batch_size=4, hidden_size=48, depth=2, num_heads=3
    ),
    "dit on latents": networks.DITS["DiT-XL/2 32x32x4"].replace(
        precision="fp32", image_size=8, batch_size=4, hidden_size=48, depth=2, num_heads=3, latent_scale=0.5
    ),
}


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(baselines, "DEVICE", "cpu")


def trainer_of(config, folder, rng):
    shape, latents = (6, config.image_size, config.image_size, config.channels), config.latent_scale > 0
    images = rng.standard_normal(shape, np.float32) if latents else rng.integers(0, 256, shape, np.uint8)
    trainer = Trainer(config.replace(device="cpu"), Dataset(images, latents=latents), folder)
    networks.fill_zeros(config, trainer.net)
    return trainer


@pytest.mark.parametrize("name", CONFIGS)
def test_a_forward_gives_what_pytorchs_gives(name, rng):
    """And no zeros, which any two networks that begin at zero have in common."""
    config = CONFIGS[name]
    net = build(config)
    networks.fill_zeros(config, net)
    net.eval()
    x = rng.standard_normal((2, config.image_size, config.image_size, config.channels), np.float32)
    t = rng.standard_normal(2, np.float32)
    ours = net(Tensor(x), Tensor(t)).numpy()
    assert np.abs(ours).max() > 0.01
    theirs = baselines.torch_model(config, net).eval()(torch.from_numpy(x).permute(0, 3, 1, 2), torch.from_numpy(t))
    baselines.check("output", ours, theirs.permute(0, 2, 3, 1), 1e-5)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_training_steps_loss_and_gradient(name, precision, tmp_path, rng):
    trainer = trainer_of(CONFIGS[name].replace(precision=precision), tmp_path, rng)
    step = baselines.training(trainer)
    before = [parameter.detach().clone() for parameter in step.parameters]
    assert np.isfinite(step.step(step.loss, averaged=True).item())
    assert all(not torch.equal(old, new) for old, new in zip(before, step.parameters, strict=True))
    baselines.check_losses(trainer, baselines.EDM(trainer.config, baselines.torch_model(trainer.config, trainer.net)))


def test_a_section_may_take_what_those_before_left(monkeypatch):
    """And together they keep within nine minutes, of which PyTorch's import has five seconds."""
    clock, given = [0.0], {}

    def rows_of(name, against, seconds, model, turns):
        given[name] = seconds
        clock[0] += 10
        return [], True

    monkeypatch.setattr(bench, "rows_of", rows_of)
    monkeypatch.setattr(bench.time, "monotonic", lambda: clock[0])
    for name, value in (("cuda_status", lambda: (True, "")), ("summary", lambda *rows: None),
                        ("stop_on_signals", lambda: None)):
        monkeypatch.setattr(bench, name, value)
    for part in bench.PARTS:
        clock[0] = 0.0
        given.clear()
        monkeypatch.setattr("sys.argv", ["bench.py", "--part", part])
        bench.main()
        own = [bench.SECTIONS[name].seconds for name in given]
        assert list(given.values()) == [sum(own[: i + 1]) - 10 * i for i in range(len(own))]
        assert sum(own) <= 535


@pytest.mark.parametrize("arguments, message", [
    (["--only", "nothing"], "no section's name holds 'nothing': use one of limits, first step"),
    (["--part", "1/7", "--only", "CNN"], "no section's name holds 'CNN': use one of first step, U-Net bf16"),
])
def test_a_section_that_is_none(monkeypatch, arguments, message):
    monkeypatch.setattr("sys.argv", ["bench.py", *arguments])
    with pytest.raises(SystemExit, match=message):
        bench.main()


def test_a_profile_takes_no_other_option(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["bench.py", "--profile", "--against", "torch"])
    with pytest.raises(SystemExit):
        bench.main()
    assert "leave out --against" in capsys.readouterr().err


def test_what_was_cut_is_said_at_the_end(monkeypatch, capsys):
    def rows_of(name, against, seconds, model, turns):
        return [Row(name, 1.0)], name == "limits"

    for name, value in (("rows_of", rows_of), ("cuda_status", lambda: (True, "")),
                        ("summary", lambda rows, limits: print([row.name for row in rows])),
                        ("stop_on_signals", lambda: None)):
        monkeypatch.setattr(bench, name, value)
    monkeypatch.setattr("sys.argv", ["bench.py", "--only", "cnn", "MEMORY"])
    with pytest.raises(SystemExit, match=r"not measured to the end: memory, CNN$"):
        bench.main()
    assert capsys.readouterr().out == "['limits', 'memory', 'CNN']\n"


@pytest.mark.parametrize("interrupted", [None, signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_no_section_outlives_its_time_or_the_benchmark(monkeypatch, tmp_path, interrupted):
    """What it had written by then is kept."""
    script = tmp_path / "section.py"
    script.write_text(
        "import sys, time\nopen(sys.argv[-1], 'w').write('{\"name\": \"found\", \"ours\": 1.0}\\n')\ntime.sleep(60)\n"
    )
    processes, wait = [], subprocess.Popen.wait

    def waiting(process, timeout=None):
        processes.append(process)
        try:
            return wait(process, timeout)
        except subprocess.TimeoutExpired:
            if interrupted:
                os.kill(os.getpid(), interrupted)
            raise

    monkeypatch.setattr(bench, "__file__", str(script))
    monkeypatch.setattr(bench.subprocess.Popen, "wait", waiting)
    if interrupted:
        before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGHUP)}
        bench.stop_on_signals()
        try:
            with pytest.raises(KeyboardInterrupt):
                list(bench.measured({"CNN": bench.Section(None, 2, 2)}, None, None, jobs=1))
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    else:
        assert bench.rows_of("CNN", None, 2) == ([Row("found", 1.0)], False)
    assert processes[0].returncode == -signal.SIGKILL


def test_processes_compile_together_and_measure_alone(tmp_path):
    """Three of them: all begin together, and nobody measures while another does, or compiles."""
    program = tmp_path / "process.py"
    program.write_text(f"""if True:
        import sys, time
        sys.path.insert(0, {str(ROOT)!r})
        from pathlib import Path
        from examples.benchmark.turns import Turns
        turns, folder, log = Turns(), Path(sys.argv[1]), []
        turns.join(folder)
        (folder / f"here{{sys.argv[2]}}").touch()
        while len(list(folder.glob("here*"))) < 3:
            time.sleep(0.01)
        for turn in range(3):
            start = time.monotonic()
            time.sleep(0.05)
            log.append(("compile", start, time.monotonic()))
            with turns.alone():
                start = time.monotonic()
                with turns.alone():
                    time.sleep(0.02)
                log.append(("measure", start, time.monotonic()))
        print(log)
    """)
    processes = [subprocess.Popen([sys.executable, program, tmp_path, str(i)], stdout=subprocess.PIPE, text=True)
                 for i in range(3)]
    spans = [span for process in processes for span in ast.literal_eval(process.communicate(timeout=30)[0])]
    assert len(spans) == 18
    together = 0
    for (one, start, end), (other, begin, stop) in itertools.combinations(spans, 2):
        overlap = min(end, stop) > max(start, begin)
        assert not (overlap and "measure" in (one, other))
        together += overlap
    assert together >= 3


def test_sections_at_once(monkeypatch):
    """The first by itself; each of the others may take what all may."""
    given, both = {}, threading.Barrier(2, timeout=10)

    def rows_of(name, against, seconds, model, turns):
        given[name] = seconds, turns is not None
        if name != "limits":
            both.wait()
        return [Row(name, 1.0)], True

    monkeypatch.setattr(bench, "rows_of", rows_of)
    sections = {"limits": bench.Section(None, 0, 25), "CNN": bench.Section(None, 2, 45),
                "memory": bench.Section(None, 2, 20)}
    found = list(bench.measured(sections, None, None, jobs=2))
    assert sorted((name, done) for name, _, done in found) == [("CNN", True), ("limits", True), ("memory", True)]
    assert given["limits"] == (pytest.approx(25, abs=1), False)
    assert given["CNN"] == (pytest.approx(90, abs=1), True)
    assert given["memory"] == (pytest.approx(90, abs=1), True)


def test_what_differs_is_not_timed(tmp_path, rng):
    trainer = trainer_of(CONFIGS["cs179"], tmp_path, rng)
    model = baselines.EDM(trainer.config, baselines.torch_model(trainer.config, trainer.net))
    hook = model.net.out_conv.weight.register_hook(lambda grad: 1.1 * grad)
    with pytest.raises(RuntimeError, match=r"gradient: .*not timed"):
        baselines.check_losses(trainer, model)
    hook.remove()
    baselines.check_losses(trainer, model)
    with torch.no_grad():
        model.net.out_conv.weight *= 1.01
    with pytest.raises(RuntimeError, match=r"loss: .*not timed"):
        baselines.check_losses(trainer, model)


def test_the_denoiser(rng):
    config = CONFIGS["cs179"]
    net = build(config)
    x, sigma = rng.standard_normal((3, 28, 28, 1)).astype(np.float32), np.array([0.1, 1, 30], np.float32)
    model = baselines.EDM(config, baselines.torch_model(config, net))
    with no_grad():
        expected = Pipeline(config, net).denoiser()(Tensor(x), Tensor(sigma)).numpy()
    out = model.denoise(torch.from_numpy(x).permute(0, 3, 1, 2), torch.from_numpy(sigma)).permute(0, 2, 3, 1)
    assert relative_error(out.detach().numpy(), expected) < 1e-5


def test_eulers_method(rng):
    """A step stands for its CUDA graph, and moves on by itself."""
    config = CONFIGS["cs179"]
    net = build(config)
    noise = rng.standard_normal((2, 28, 28, 1)).astype(np.float32)
    model, pipeline = baselines.EDM(config, baselines.torch_model(config, net)), Pipeline(config, net)
    sigmas = pipeline.sigmas("euler", 7)
    with torch.no_grad():
        draw, images = baselines.euler(model.denoise, torch.from_numpy(noise).permute(0, 3, 1, 2), sigmas)
        draw(), draw()
    expected = pipeline.sample(2, steps=7, sampler="euler", noise=noise, floats=True)
    assert relative_error(images.permute(0, 2, 3, 1).numpy(), expected) < 1e-4


def test_the_classifier():
    net, (images, labels) = CNN(), networks.host_batches(8)[0]
    expected = networks.cnn_loss(net, Tensor(images), Tensor(labels)).numpy()
    x = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1
    out = torch.nn.functional.cross_entropy(baselines.cnn_twin(net)(x), torch.from_numpy(labels).long())
    assert relative_error(out.detach().numpy(), expected) < 1e-5


def test_every_size_is_compiled_for_itself():
    sizes = []

    def backend(graph, inputs):
        sizes.append([size for tensor in inputs for size in tensor.shape])
        return graph.forward

    for batch in (1, 16, 64):
        baselines.compile_alone(lambda x: x * 2, backend=backend)(torch.ones(batch, 3))
    assert all(isinstance(size, int) for found in sizes for size in found)  # none is symbolic
    assert sizes == [[1, 3], [16, 3], [64, 3]]


def test_rows_stand_before_pytorch_is_asked_and_after_each_answer(monkeypatch, tmp_path):
    class Opponent:
        def times(self):
            yield {"whole": 9.0, "bare": 8.0}
            raise TimeoutError

    class Optimizer:
        def __init__(self, *args):
            pass

    trainer = SimpleNamespace(optimizer=Optimizer(), net=None, _step=None)
    monkeypatch.setattr(networks, "trainer_of", lambda config: trainer)
    monkeypatch.setattr(networks, "step_time", lambda step: 3.0)
    monkeypatch.setattr(networks, "pool_bytes", lambda *captured: 0)
    monkeypatch.setattr(baselines, "training", lambda trainer: Opponent())
    path = tmp_path / "rows"
    with pytest.raises(TimeoutError):
        networks.training(Report(path, torch=True), "step", networks.cs179_config(), networks.CS179_FLOPS)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["ours"], row["theirs"]) for row in rows] == [(3.0, None), (3.0, None), (3.0, 9.0), (3.0, 8.0)]


CONVOLUTION = 2 * 4 * 32 * 32 * 64 * 128 * 9  # operations of 4 images of 32 x 32 pixels, 64 channels to 128


def test_the_profile_counts_the_operations_of_convolutions(host_of):
    host, launched = host_of(True), []
    host.watch = launched.append

    def bf16(*shape):
        return host.empty(shape, bfloat16)

    def counts():
        found = [flops_of(launch.stem, launch.name, launch.grid, launch.args, launch.constants) for launch in launched]
        launched.clear()
        return [count for count in found if count]

    def run(module, direction, *operands, skip=None):
        given = Operands(*operands, skip=skip)
        problem = problem_of(direction, given, (1, 1), (1, 1))
        module.run(given, module.offer(problem), problem)

    x, weight, dout = bf16(4, 32, 32, 64), bf16(128, 3, 3, 64), bf16(4, 32, 32, 128)
    dweight = host.zeros(weight.shape, np.float32)
    run(sm90, FPROP, x, weight, dout)
    run(sm90, DGRAD, dout, weight, x)
    run(wgrad_sm90, WGRAD, x, dweight, dout)
    wgrad_sm90.wgrad_tf32(x, dout, dweight, add=False)
    for direction, a, out in ((FPROP, x, dout), (DGRAD, dout, x), (WGRAD, x, dout)):
        run(portable, direction, a, weight, out)
    assert counts() == [CONVOLUTION] * 7
    skip = Skip(bf16(4, 32, 32, 64), bf16(4, 32, 32, 40), bf16(128, 1, 1, 104), None)
    run(sm90, FPROP, x, weight, dout, skip=skip)
    assert counts() == [CONVOLUTION + 2 * 4 * 32 * 32 * 104 * 128]
    run(few_channels, FPROP, bf16(2, 16, 16, 3), bf16(64, 3, 3, 3), bf16(2, 16, 16, 64))
    run(few_channels, FPROP, bf16(2, 16, 16, 64), bf16(3, 3, 3, 64), bf16(2, 16, 16, 3))
    matmul.multiply(bf16(6, 20, 72), bf16(6, 72, 40), bf16(6, 20, 40), False, False, Epilogue())
    assert counts() == [2 * 2 * 256 * 27 * 64] * 2 + [2 * 6 * 20 * 72 * 40]


def test_the_profile_counts_the_operations_of_linear_layers_and_attention(host_of):
    host = host_of(True)
    found = []
    host.watch = found.append

    def tensor(*shape):
        return Tensor(host.empty(shape, bfloat16), requires_grad=True)

    ops.linear(tensor(4096, 256), tensor(512, 256)).backward(tensor(4096, 512))
    for dim in (32, 64, 128):
        ops.attention(*[tensor(2, 1024, 4, dim) for _ in range(3)]).backward(tensor(2, 1024, 4 * dim))
    counted = Counter()
    for launch in found:
        counted[launch.stem.split("_")[0]] += flops_of(launch.stem, launch.name, launch.grid, launch.args,
                                                       launch.constants)
    products = 2 * 2 * 4 * 1024**2 * (32 + 64 + 128)
    assert counted["attention"] == products * (2 + 3 + 4)
    assert counted["gemm"] + counted["conv2d"] == 3 * 2 * 4096 * 256 * 512


def test_the_profile_counts_the_bytes_of_an_update():
    def on_gpu(address, dtype):
        values = np.zeros(64, dtype)
        return SimpleNamespace(data=SimpleNamespace(ptr=address), dtype=values.dtype, nbytes=values.nbytes)

    data, grad, first, second, ema = (on_gpu(address, np.float32) for address in range(5))
    compute_copy = on_gpu(5, bfloat16)
    args = (data, grad, first, second, compute_copy, ema, None, np.int64(64), 0.1)
    assert size_of("optim", "adam", args) == 64 * (4 * 4 * 2 + 4 + 2)
    assert size_of("elementwise", "add", (data, grad, data, 64)) == 64 * 4 * 2


@pytest.mark.gpu
def test_a_profile_has_every_launch_of_a_step_and_can_repeat_it(monkeypatch, rng):
    """Those of launches that were made ready and those that were not."""
    if os.environ.get("CUDIFF_EMULATE"):  # it has no pool, whose memory the profile would keep
        pool, using_allocator = SimpleNamespace(malloc=None), lambda allocate: contextlib.nullcontext()
        monkeypatch.setattr(profile, "cupy", SimpleNamespace(
            get_default_memory_pool=lambda: pool, cuda=SimpleNamespace(using_allocator=using_allocator)))
    x, weight, one = (Tensor(rng.standard_normal(shape).astype(bfloat16), device="cuda")
                      for shape in ((2, 8, 8, 16), (16, 3, 3, 16), (16,)))
    norm = dict(norm_weight=one, norm_bias=one, num_groups=4)
    outs = []

    def step():
        outs.append(ops.norm_silu_conv2d(x, weight=weight, **norm).sum())

    step()  # compiles
    before = launches()
    step()
    noted, first = launches_of(step), outs[-1].numpy()
    assert len(noted) == (launches() - before) / 2
    outs[-1].data.fill(0)
    for noted_launch in noted:
        noted_launch.run()
    assert first == outs[-1].numpy() != 0


@pytest.mark.gpu
@pytest.mark.skipif(os.environ.get("CUDIFF_EMULATE") == "1", reason="the emulator has no clock")
def test_a_profile_times_every_launch(capsys, rng):
    x, y = (Tensor(rng.standard_normal(1 << size), dtype="float32", device="cuda") for size in (24, 10))

    def step():
        return [(x + 1).sum(), (y + 1).sum()]

    step()
    timeline = profile.cupy.zeros(1 + 2 * len(launches_of(step)), np.uint64)
    launches = launches_of(step, timeline)
    times = profile.times_of(launches, timeline)
    assert len(times) == len(launches) and times[0] > 5 * times[-2] > 0 < times[-1]  # the first moves 128 MiB
    profile.profile("sums", step, sum(times), {"bf16": 791.0, "copy": 4.27})
    printed = capsys.readouterr().out
    assert f"each of {len(launches)} launches" in printed and "reduce.sum" in printed, printed


@pytest.mark.parametrize("arguments, message", [
    (["--model", "mnist", "--part", "1/7"], "--model is timed alone"),
    (["--model", "mnist", "--only", "CNN"], "--model is timed alone"),
    (["--model", "mnist", "--profile"], "leave out --against, --only, --part and --model"),
])
def test_a_model_is_timed_alone(monkeypatch, capsys, arguments, message):
    monkeypatch.setattr("sys.argv", ["bench.py", *arguments])
    with pytest.raises(SystemExit):
        bench.main()
    assert message in capsys.readouterr().err


def test_a_model_is_a_preset_or_a_file_without_what_a_baseline_lacks(tmp_path):
    (tmp_path / "own.toml").write_text("preset = 'mnist'\nmodel_channels = 32\ndropout = 0.1\n")
    own, preset = (networks.model_of(name) for name in (str(tmp_path / "own.toml"), "imagenet64"))
    assert (own.model_channels, own.dropout, own.num_classes, own.precision) == (32, 0, 0, "bf16")
    assert (preset.diffusion, preset.learn_sigma, preset.dropout, preset.model_channels) == ("edm", False, 0, 192)


def test_a_model_that_there_is_not(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", ["bench.py", "--model", str(tmp_path / "none.toml")])
    with pytest.raises(SystemExit, match=r"bench.py: .*none\.toml"):
        bench.main()
