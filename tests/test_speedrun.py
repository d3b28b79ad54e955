"""The speed run: its clock, its judge, its log; and that PyTorch's side does what cudiff's does."""

import json
import time
from types import SimpleNamespace

import numpy as np
import pytest

from cudiff.config import PRESETS
from cudiff.data import digits
from cudiff.pipeline import Pipeline
from cudiff.train import Trainer
from examples import speedrun
from examples.benchmark.fresh import clocked
from tests.test_examples import mistake, run

TINY = "--data", "digits", "--device", "cpu", "--steps", "2"


@pytest.mark.slow
def test_a_run_on_the_cpu(tmp_path):
    """Each run has a line in the log, with all that is told of it; what the clock holds adds up."""
    begun = time.perf_counter()
    sides = ["cudiff"]
    (tmp_path / "short.toml").write_text("sample_steps = 2\nguidance = 1.0\n")
    arguments = [*TINY, "--seeds", "3", "--samples", "130", "--log", "log.jsonl", "--recipe", "short.toml"]
    try:
        import cupy  # noqa: F401
        import torch  # noqa: F401

        arguments += ["--against", "torch"]
        sides += ["torch"]
    except ImportError:
        pass
    (tmp_path / "log.jsonl").write_text('{"an": "earlier run"}\n')
    done = run("speedrun", *arguments, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()][1:]
    assert [(row["side"], row["seed"], row["data"], row["samples"]) for row in rows] == [
        (side, 3, "digits", 130) for side in sides]
    for row in rows:
        assert list(row["parts"]) == list(speedrun.PARTS) and min(row["parts"].values()) > 0
        assert row["seconds"] == pytest.approx(sum(row["parts"].values()))
        assert row["frechet"] > row["floor"] > 0 and row["ratio"] == pytest.approx(row["frechet"] / row["floor"])
        assert 0 <= row["as_asked"] < 0.6 and row["classifier_accuracy"] > 0.9 and row["reached"] is None
        assert row["recipe"]["batch_size"] == PRESETS["digits"].batch_size
        assert row["recipe"]["steps"] == row["recipe"]["sample_steps"] == 2 and row["recipe"]["seed"] == 3
        assert row["weaker"] == list(speedrun.WEAKER["digits"])
        assert {"python", "cudiff", "numpy"} <= set(row["versions"]) and row["commit"] and row["device"] and row["time"]
    assert sum(row["seconds"] for row in rows) < time.perf_counter() - begun
    assert all(f"side {side}, seed 3, seconds " in done.stdout for side in sides)


@pytest.mark.parametrize("arguments, told", [
    (["--seeds", "0,x"], "argument --seeds: give whole numbers such as 0,1,2, not '0,x'"),
    (["--seeds", str(2**63)], "speedrun.py: seed"),
    (["--samples", "1"], "speedrun.py: give --samples 2 or more"),
    (["--steps", "0"], "--steps 1 or more"),
    (["--data", "photos"], "invalid choice: 'photos'"),
    (["--recipe", "none.toml"], "speedrun.py: cannot read none.toml"),
    (["--weaker", "1.5,2"], "argument --weaker: give a share from 0 to 1 and a factor, such as 0.06,1.1, not '1.5,2'"),
    (["--weaker", "0.1"], "argument --weaker: give a share from 0 to 1 and a factor"),
    (["--log", "none/log.jsonl"], "speedrun.py: cannot write none/log.jsonl (No such file or directory)"),
])
def test_a_mistake_is_one_line(arguments, told, tmp_path):
    assert told in mistake("speedrun", *TINY, *arguments, folder=tmp_path)


def test_a_recipe_of_ones_own(tmp_path):
    """A file's options over the recipe's; the command line's over both."""
    (tmp_path / "own.toml").write_text('guidance = 1.5\nsampler = "heun"\nsteps = 7\n')
    given = dict(data="mnist", device="cpu", recipe=str(tmp_path / "own.toml"))
    config = speedrun.recipe(SimpleNamespace(**given, steps=None), 4)
    assert (config.guidance, config.sampler, config.steps, config.seed, config.device) == (1.5, "heun", 7, 4, "cpu")
    assert config.lr == speedrun.RECIPES["mnist"].lr
    assert speedrun.recipe(SimpleNamespace(**given, steps=3), 4).steps == 3


def test_a_weaker_model_of_ones_own():
    """The recipe's without one; none at all by a factor of 1."""
    given = dict(data="mnist", weaker=None)
    assert speedrun.weaker_of(SimpleNamespace(**given)) == speedrun.WEAKER["mnist"]
    assert speedrun.weaker_of(SimpleNamespace(**given | {"weaker": speedrun.weaker_given("0.2,1.5")})) == (0.2, 1.5)
    assert speedrun.weaker_of(SimpleNamespace(**given | {"weaker": speedrun.weaker_given("0.2,1")})) is None


def test_autoguidance_goes_from_the_worse_estimate_beyond_the_better():
    denoise = speedrun.autoguided(lambda x, sigma, labels: x + sigma, lambda x, sigma, labels: x + labels, 1.5)
    assert denoise(1.0, 4.0, 2.0) == 3.0 + 1.5 * 2.0


def test_the_clock(tmp_path, capfd):
    """It begins before the process does and ends with the last part, whatever the process does then."""
    program = ("import os, time; from examples.benchmark.fresh import CACHES, mark; time.sleep(0.3); mark('one');"
               "print(*(os.environ[name] for name in CACHES)); time.sleep(0.6); mark('two parts'); time.sleep(1)")
    begun = time.perf_counter()
    parts = clocked(["-c", program], ["one", "two parts"], tmp_path)
    whole = time.perf_counter() - begun
    assert parts["one"] > 0.3 and parts["two parts"] >= 0.59 and sum(parts.values()) < whole - 0.9
    caches = capfd.readouterr().out.split()
    assert len(set(caches)) == 5 and all(cache.startswith(str(tmp_path)) for cache in caches)
    with pytest.raises(RuntimeError, match="failed after one, two parts, see above"):
        clocked(["-c", program], ["one", "two parts", "three"], tmp_path)
    with pytest.raises(RuntimeError, match="failed after nothing, see above"):
        clocked(["-c", "raise SystemExit(3)"], [], tmp_path)


@pytest.mark.parametrize("data, changes, expected", [
    ("mnist", {}, True),
    ("mnist", {"seconds": 30.1}, False),
    ("mnist", {"ratio": 1.51}, False),
    ("mnist", {"as_asked": 0.9849}, False),
    ("mnist", {"samples": 9999}, None),
    ("fashion-mnist", {"seconds": 60.0, "as_asked": 0.5}, True),
    ("fashion-mnist", {"seconds": 60.1}, False),
    ("digits", {}, None),
])
def test_targets(data, changes, expected):
    row = {"data": data, "samples": 10_000, "seconds": 30.0, "ratio": 1.5, "as_asked": 0.985}
    assert speedrun.reached(row | changes) is expected


def test_a_missed_target_is_the_exit_status(monkeypatch, tmp_path, capsys):
    """Of cudiff's runs: PyTorch may miss it."""
    seconds = {("cudiff", 0): 20.0, ("cudiff", 1): 31.0, ("cudiff", 2): 40.0, ("torch", 0): 90.0}
    quality = {"frechet": 5.0, "floor": 4.0, "ratio": 1.25, "as_asked": 0.99, "classifier_accuracy": 0.99}
    monkeypatch.setattr(speedrun, "judge_of", lambda options: lambda images: quality)
    monkeypatch.setattr(speedrun, "find_spec", lambda name: None if name == "torch" else name)

    def measure(side, seed, options):
        return dict.fromkeys(speedrun.PARTS, seconds[side, seed] / 4), None

    monkeypatch.setattr(speedrun, "measure", measure)
    monkeypatch.setattr("sys.argv", ["speedrun.py", "--device", "cpu", "--log", str(tmp_path / "log")])
    with pytest.raises(speedrun.CudiffError, match=r"the target is missed with seed 1, 2$"):
        speedrun.main()
    monkeypatch.setattr(speedrun, "find_spec", lambda name: name)
    monkeypatch.setattr(speedrun, "version", lambda name: "1")
    monkeypatch.setattr("sys.argv", ["speedrun.py", "--device", "cpu", "--seeds", "0", "--against", "torch"])
    speedrun.main()
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("side")]
    assert [line.rpartition(" ")[2] for line in told] == ["reached", "missed", "missed", "reached", "missed"]
    assert len((tmp_path / "log").read_text().splitlines()) == 3


def test_data_in_the_users_cache_is_found_by_a_process_with_an_empty_one(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDIFF_CACHE_DIR", str(tmp_path))
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "a file").touch()
    (tmp_path / "kernels").mkdir()

    def look(arguments, parts, folder):
        assert [path.name for path in (folder_of(folder)).iterdir()] == ["mnist"]
        assert (folder_of(folder) / "mnist" / "a file").exists()
        np.save(arguments[arguments.index("--out") + 1], np.arange(3))
        return {}

    def folder_of(folder):
        return tmp_path.__class__(folder) / "CUDIFF_CACHE_DIR"

    monkeypatch.setattr(speedrun, "clocked", look)
    monkeypatch.setattr("sys.argv", ["speedrun.py"])
    _, images = speedrun.measure("cudiff", 0, SimpleNamespace(data="mnist"))
    assert images.tolist() == [0, 1, 2] and (tmp_path / "mnist" / "a file").exists()


# --- PyTorch's side --------------------------------------------------------------------------------------------------


@pytest.fixture
def opponent(monkeypatch):
    pytest.importorskip("torch", reason="PyTorch is not installed: no opponent")
    pytest.importorskip("cupy", reason="CuPy is not installed: the benchmark needs it")
    from examples.benchmark import opponent

    monkeypatch.setattr(opponent.baselines, "DEVICE", "cpu")
    return opponent


CONFIG = PRESETS["digits"].replace(device="cpu", steps=8, warmup=3, ema_half_life=2.0, batch_size=6, lr=5e-3, clip=0.5,
                                   image_size=8, model_channels=16, num_head_channels=16, attention_resolutions=(4,))


def both(opponent, config, folder):
    """A trainer, and PyTorch's training from its weights."""
    import torch

    data = digits(40, 8)
    trainer = Trainer(config, data, folder)
    model = opponent.EDM(trainer.config, opponent.baselines.torch_model(trainer.config, trainer.net))
    return trainer, opponent.Training(model, torch.from_numpy(data.images), torch.from_numpy(data.labels).long())


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_pytorch_trains_as_cudiff_does(opponent, schedule, tmp_path, monkeypatch):
    """On the same batches and noise: rate, clipping, update and average, with labels of which some are dropped."""
    import torch

    from cudiff.diffusion.guidance import drop_labels
    from cudiff.ops.random import Purpose

    config = CONFIG.replace(lr_schedule=schedule, label_dropout=0.4)
    trainer, training = both(opponent, config, tmp_path)
    dropped = 0

    def draw(*_):
        nonlocal dropped
        images, labels = trainer.loader.batch(trainer.generator.step, (), 0)
        labels = drop_labels(labels, config.label_dropout, trainer.generator)
        log_sigma = trainer.generator.normal((len(images),), stream=Purpose.SIGMA) * config.P_std + config.P_mean
        noise = trainer.generator.normal(images.shape, stream=Purpose.NOISE)
        x, log_sigma, noise, labels = (torch.from_numpy(value.numpy()) for value in (images, log_sigma, noise, labels))
        dropped += int((labels < 0).sum())
        return x.permute(0, 3, 1, 2), log_sigma, noise.permute(0, 3, 1, 2), labels.long()

    monkeypatch.setattr(training.model, "draw", draw)
    for _ in range(config.steps):
        training.step(training.loss)
        trainer._step(*trainer.loader.next())
    assert dropped > 5
    ours = opponent.baselines.torch_model(trainer.config, trainer.ema.model)
    theirs = training.averaged().net
    for expected, found in zip(ours.parameters(), theirs.parameters(), strict=True):
        np.testing.assert_allclose(found.detach(), expected.detach(), atol=2e-4)
    assert any((a != b).any() for a, b in zip(theirs.parameters(), training.parameters, strict=True))


def test_pytorchs_average_is_rounded_as_training_rounds(opponent, tmp_path):
    """Where it computes in 16 bits: to round the weights of norms too would put an error on every estimate."""
    import torch

    _, training = both(opponent, CONFIG.replace(precision="bf16"), tmp_path)
    with torch.no_grad():
        for value in (*training.parameters, *training.average):
            value += 0.01 * torch.randn_like(value)
    sampled, x = training.averaged(), torch.randn(2, 1, 8, 8)
    state = sampled.net.state_dict()
    assert {state["time_embed.0.weight"].dtype, state["out.2.weight"].dtype} == {torch.bfloat16}
    with torch.no_grad():
        for value, average in zip(training.parameters, training.average, strict=True):
            value.copy_(average)
        expected, found = (model.denoise(x, torch.ones(2), torch.arange(2)) for model in (training.model, sampled))
    assert torch.equal(found, expected)


def test_a_batch_of_pytorchs_has_its_own_labels(opponent, tmp_path):
    """And the share of them that is dropped."""
    import torch

    trainer, training = both(opponent, CONFIG.replace(batch_size=400, label_dropout=0.25), tmp_path)
    images = torch.arange(40, dtype=torch.uint8)[:, None, None, None].expand(40, 8, 8, 1)
    x, _, _, labels = training.model.draw(images, torch.arange(40))
    drawn = ((x[:, 0, 0, 0] + 1) * 127.5).round().long()
    kept = labels >= 0
    assert torch.equal(labels[kept], drawn[kept]) and 0.15 < 1 - kept.float().mean() < 0.35
    assert torch.equal(training.labels, torch.from_numpy(trainer.training.labels).long())


@pytest.mark.parametrize("sampler, guidance, factor", [
    ("euler", 1.0, 1.0), ("euler", 2.0, 1.0), ("dpmpp-2m", 2.0, 1.0), ("dpmpp-2m-sde", 1.0, 1.0), ("euler", 1.0, 1.5),
    ("dpmpp-2m-sde", 2.0, 1.5),
])
def test_pytorch_samples_as_cudiff_does(opponent, sampler, guidance, factor, rng):
    """From the same weights, noise and classes the same pictures, but for rounding; the last batch is not full."""
    import torch

    from cudiff.diffusion.samplers import ImageNoise
    from cudiff.models import build

    config = CONFIG.replace(sampler=sampler, guidance=guidance, sample_steps=6)
    pipelines = []
    for _ in range(2):
        net = build(config)
        net.load_state_dict({name: 0.1 * rng.standard_normal(array.shape).astype(np.float32) if not array.any() else
                             array for name, array in net.state_dict().items()}, strict=False)
        pipelines.append(Pipeline(config, net))
    better, worse = pipelines
    labels = np.array([3, 9, 0, 0, 5], np.int32)
    noise = rng.standard_normal((5, 8, 8, 1)).astype(np.float32)
    denoiser = speedrun.autoguided(better.denoiser(), worse.denoiser(), factor)
    expected = better.sample(5, classes=labels, noise=noise, denoiser=denoiser)
    model, weaker = (opponent.EDM(config, opponent.baselines.torch_model(config, one.net)) for one in pipelines)
    drawn = [ImageNoise((2, 8, 8, 1), 0, start)(step) for start in (0, 2, 4) for step in range(6)]
    draws = iter([torch.from_numpy(one.numpy()).permute(0, 3, 1, 2) for one in drawn])
    sigmas = better.sigmas(sampler, 6)
    found = opponent.sample(
        model, torch.from_numpy(noise).permute(0, 3, 1, 2), torch.from_numpy(labels).long(), sigmas, batch_size=2,
        worse=(weaker, factor) if factor != 1 else None, draw=lambda x: next(draws),
    )
    assert found.dtype == np.uint8 and found.shape == expected.shape and expected.std() > 20
    assert abs(found.astype(int) - expected).max() <= 1


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_pytorchs_side_runs(opponent, precision, capsys):
    labels = np.arange(7, dtype=np.int32) % 10
    config = CONFIG.replace(precision=precision, sample_steps=3)
    images = opponent.train_and_sample(config, digits(40, 8), labels, 4, compiled=True, weaker=(0.5, 1.2))
    assert images.shape == (7, 8, 8, 1) and images.dtype == np.uint8
    assert capsys.readouterr().out.splitlines() == [f"done: {part}" for part in speedrun.PARTS[:-1]]
    with pytest.raises(speedrun.CudiffError, match="samples by euler, dpmpp-2m, dpmpp-2m-sde, not by heun"):
        opponent.train_and_sample(config.replace(sampler="heun"), digits(40, 8), labels, 4, compiled=False)


def test_recipes_are_ones_that_both_sides_have(opponent):
    for name, config in speedrun.RECIPES.items():
        assert config.sampler in opponent.SAMPLERS and config.weight_decay == 0 and config.optimizer == "adamw", name
        assert config.data == name and config.options["dropout"] == 0 and config.num_classes == 10
