"""The examples tell a mistake in one line, and explain themselves."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

import cudiff
from cudiff import CudiffError, cuda_available
from cudiff.cli import _parser
from cudiff.config import from_arguments
from cudiff.data import Dataset
from examples import classify_mnist, compare_samplers
from tests.test_pipeline import pipeline

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))


def run(name, *arguments, folder):
    here = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py"), *map(str, arguments)]
    return subprocess.run(command, cwd=folder, env=os.environ | {"PYTHONPATH": here}, capture_output=True, text=True)


def mistake(name, *arguments, folder):
    """The last line on stderr of a run that has to fail without a traceback."""
    done = run(name, *arguments, folder=folder)
    assert done.returncode != 0 and "Traceback" not in done.stderr, done.stderr
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize("name", EXAMPLES)
def test_help(name, tmp_path):
    if name == "bench":
        pytest.importorskip("cupy", reason="CuPy is not installed: the benchmark needs it")
    done = run(name, "--help", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ")


@pytest.mark.parametrize("name, arguments, told", [
    ("sample", [], "required: checkpoint"),
    ("sample", ["none"], "sample.py: cannot read none"),
    ("train_elephants", [], "required: photos"),
    ("train_elephants", ["none"], "train_elephants.py: no data at 'none'"),
    ("realtime_video", ["none"], "required: video"),
    ("realtime_video", ["none", "none"], "realtime_video.py: cannot read none"),
    ("own_model", ["0"], "own_model.py: training would never end"),
    ("train_mnist", ["soon"], "invalid float value: 'soon'"),
    ("classify_mnist", ["--data", "none"], "classify_mnist.py: no data at 'none'"),
    ("classify_mnist", ["--data", "digits", "--batch-size", "0"], "give --batch-size 1 to 4000"),
    ("classify_mnist", ["--data", "digits", "--lr", "0"], "--lr above 0"),
    ("classify_mnist", ["--data", "digits", "--seed", "-1"], "--seed 0 or more"),
    ("classify_mnist", ["--data", "."], "classify_mnist.py: . holds no images"),
    ("compare_precisions", [], "required: photos"),
    ("compare_precisions", ["none"], "compare_precisions.py: no data at 'none'"),
    ("compare_precisions", ["none", "300"], "give a multiple of 200, not 300"),
    ("compare_samplers", [], "required: checkpoint"),
    ("compare_samplers", ["none"], "compare_samplers.py: cannot read none"),
    *(("compare_samplers", ["none", count], f"give an even one from 4, not {count}") for count in ("2", "9")),
])
def test_a_mistake_is_one_line(name, arguments, told, tmp_path):
    assert told in mistake(name, *arguments, folder=tmp_path)


def test_the_classifiers_batches(rng):
    """Each epoch has every image but what is left, in another order, with its label; half of them mirrored."""
    images = rng.integers(0, 256, (203, 2, 3, 1)).astype(np.uint8)
    data = Dataset(images, images[:, 0, 1, 0] % 10, 10)
    options = SimpleNamespace(seed=1, batch_size=10, flip=True, device="cpu")
    both = {array.tobytes(): array[:, ::-1].tobytes() for array in images}
    back, epochs = {mirror: array for array, mirror in both.items()}, []
    found = list(classify_mnist.batches(data, options, epochs=2))
    assert len(found) == 40
    for batch, labels in found:
        np.testing.assert_array_equal(labels.numpy(), batch.numpy()[:, 0, 1, 0] % 10)
        epochs += [array.tobytes() for array in batch.numpy()]
    mirrored = sum(array not in both for array in epochs)
    assert 120 < mirrored < 280
    halves = [[back.get(array, array) if array not in both else array for array in half]
              for half in (epochs[:200], epochs[200:])]
    assert all(len(set(half)) == 200 and set(half) <= set(both) for half in halves) and halves[0] != halves[1]


@pytest.mark.slow
def test_a_classifier_learns_by_plain_sgd(tmp_path):
    done = run("classify_mnist", "--data", "digits", "--batch-size", "16", "--epochs", "2", "--device", "cpu",
               folder=tmp_path)
    assert done.returncode == 0, done.stderr
    right = [float(share) for share in re.findall(r"([0-9.]+)% of the test images right", done.stdout)]
    assert len(right) == 2 and right[-1] > 95, done.stdout


@pytest.mark.slow
def test_the_classifiers_iterations_are_pytorchs(tmp_path):
    """From the same weights by the same batches, 200 of them end in the same loss."""
    pytest.importorskip("torch", reason="PyTorch is not installed: nothing to time beside")
    done = run("classify_mnist", "--data", "digits", "--batch-size", "16", "--epochs", "0", "--device", "cpu",
               "--lr", "0.01", "--against", "torch", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    ours, theirs = (float(loss) for loss in re.findall(r"last loss ([0-9.]+)", done.stdout))
    assert abs(ours - theirs) < 2e-4 and "PyTorch takes" in done.stdout, done.stdout


def test_a_model_and_a_sampler_of_ones_own(tmp_path):
    """Trained, saved, loaded and drawn; the checkpoint names the model, and says so where it is not registered."""
    done = run("own_model", 20, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert Image.open(tmp_path / "own-model.png").size == (530, 530)  # 8 x 8 images, which a grid enlarges
    with pytest.raises(CudiffError, match=r"its model 'mlp' is not registered here: .* it, own_model\.py \(cudiff"):
        cudiff.load(tmp_path / "runs" / "own-model")


@pytest.mark.parametrize("changes", [
    {"S_churn": 20.0}, {"diffusion": "flow"}, {"diffusion": "ddpm", "diffusion_steps": 100, "sampler": "ddim"},
    {"channels": 4, "latent_scale": 0.2, "num_classes": 0, "guidance": 1.0},
], ids=str)
def test_samplers_are_compared(tmp_path, monkeypatch, capsys, changes):
    """By their evaluations, and along the same way where a checkpoint's own sampling adds noise."""
    pipeline(**changes).save(tmp_path / "model.safetensors")
    monkeypatch.setattr(compare_samplers, "SOLUTION", 40)
    monkeypatch.setattr(sys, "argv", ["compare_samplers.py", str(tmp_path / "model.safetensors"), "6", "-n", "2"])
    compare_samplers.main()
    told = capsys.readouterr().out
    found = re.findall(r"^(\S+), (\d+) evaluations: (\d+\.\d{4})$", told, re.M)
    assert [(name, int(count)) for name, count, _ in found] == [
        ("heun", 5), ("heun", 7), ("euler", 6), ("dpmpp-2m", 6), ("unipc", 6)
    ] and len(told.splitlines()) == 5
    pipeline(**changes | {"S_churn": 0.0}).save(tmp_path / "model.safetensors")
    compare_samplers.main()
    assert capsys.readouterr().out == told
    monkeypatch.setattr(sys, "argv", [*sys.argv[:-1], "0"])
    with pytest.raises(CudiffError, match="n must be at least 1, not 0"):
        compare_samplers.main()


@pytest.mark.slow
@pytest.mark.parametrize("form", ["GIF", "folder"])
def test_a_video_is_redrawn(form, tmp_path, rng):
    """Blended frames flicker less."""
    video = [Image.fromarray(rng.integers(0, 256, (12, 16, 3)).astype(np.uint8)) for _ in range(6)]
    given = tmp_path / ("video.gif" if form == "GIF" else "frames")
    if form == "GIF":
        video[0].save(given, save_all=True, append_images=video[1:])
    else:
        given.mkdir()
        for number, picture in enumerate(video):
            picture.save(given / f"{number:03}.png")
    pipeline(channels=3).save(tmp_path / "model.safetensors")
    done = run("realtime_video", "model.safetensors", given, "--out", "out.gif", "--class", "3", "--blend", "0.8",
               folder=tmp_path)
    assert done.returncode == 0, done.stderr
    told = r"blend (\S+): p50 (\S+) ms, p99 (\S+) ms a frame, flicker (\S+), the video's (\S+)"
    found = [list(map(float, line)) for line in re.findall(told, done.stdout)]
    (alone, p50, p99, flicker, own), (blended, _, _, less, _) = found
    assert (alone, blended) == (0.0, 0.8) and 0 < p50 <= p99 and own > 10 and less < 0.6 * flicker
    with Image.open(tmp_path / "out.gif") as out:
        assert out.size == (8, 8) and out.n_frames == 6
    (tmp_path / "bad.gif").write_bytes(b"GIF89a no more")
    assert "cannot read bad.gif" in mistake("realtime_video", "model.safetensors", "bad.gif", folder=tmp_path)
    for name in ("out.txt", "none/out.gif"):
        told = mistake("realtime_video", "model.safetensors", given, "--out", name, folder=tmp_path)
        assert f"--out {name} is no GIF in a folder that is there" in told
    pipeline(channels=3, latent_scale=1.0).save(tmp_path / "latents.safetensors")
    told = mistake("realtime_video", "latents.safetensors", given, folder=tmp_path)
    assert "latents.safetensors makes latents, not pictures: give a model of pictures" in told


@pytest.mark.parametrize("page", ["adding-a-model", "adding-a-sampler"])
def test_the_code_of_a_page_runs(page, tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / f"{page}.md").read_text(), re.DOTALL)
    checks = "assert images.shape == (4, 8, 8, 1) and images.dtype == 'uint8'\n"
    if page == "adding-a-sampler":
        checks += "assert abs(pipeline.sample(4, 1, steps=3, sampler='euler') - 1.0 * images).max() <= 1\n"
        checks += "assert more.shape == images.shape and (more != images).any()\n"
    (tmp_path / "page.py").write_text("\n".join([*blocks, checks]))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "page.py"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_commands_for_the_projects_before_are_ones_that_there_are():
    """And their configurations are whole."""
    readme = (ROOT / "README.md").read_text().split("## The projects before")[1].split("\n## ")[0]
    commands = re.findall(r"`cudiff ([^`]+)`", readme + (ROOT / "docs" / "projects-before.md").read_text())
    assert len(commands) > 15
    for command in commands:
        options = _parser().parse_args(shlex.split(command))
        if options.command == "train":
            from_arguments(options)


def test_a_table_says_which_kernel_serves_a_problem(capsys):
    """The code of docs/adding-a-kernel.md prints what the page says."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "adding-a-kernel.md").read_text(), re.DOTALL)
    exec(code, {})
    expected = ["sm_80 conv2d set() {'norm backward'}", "sm_90a conv2d_sm90 {'norm backward'} set()"]
    assert capsys.readouterr().out.splitlines() == expected
    fused = {24, 27, 37, 54, 67, 73, 74, 128}
    for images in (1, 23, 24, 27, 28, 36, 37, 54, 55, 66, 67, 73, 74, 128):
        exec(code.replace("(32, 8, 8, 256)", f"({images}, 8, 8, 256)"), {})
        a100, h200 = capsys.readouterr().out.splitlines()
        assert a100.endswith("{'norm backward'} set()") == (images in fused)
        assert h200 == expected[1]


@pytest.mark.skipif(cuda_available(), reason="there is a GPU")
def test_the_benchmark_says_what_it_needs(tmp_path):
    assert mistake("bench", folder=tmp_path).startswith("bench.py")
