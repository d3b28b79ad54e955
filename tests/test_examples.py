"""The examples tell a mistake in one line, and explain themselves."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

import cudiff
from cudiff import CudiffError, cuda_available

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
    ("own_model", ["0"], "own_model.py: training would never end"),
    ("train_mnist", ["soon"], "invalid float value: 'soon'"),
    ("compare_precisions", [], "required: photos"),
    ("compare_precisions", ["none"], "compare_precisions.py: no data at 'none'"),
    ("compare_precisions", ["none", "300"], "give a multiple of 200, not 300"),
])
def test_a_mistake_is_one_line(name, arguments, told, tmp_path):
    assert told in mistake(name, *arguments, folder=tmp_path)


def test_a_model_and_a_sampler_of_ones_own(tmp_path):
    """Trained, saved, loaded and drawn; the checkpoint names the model, and says so where it is not registered."""
    done = run("own_model", 20, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert Image.open(tmp_path / "own-model.png").size == (530, 530)  # 8 x 8 images, which a grid enlarges
    with pytest.raises(CudiffError, match=r"its model 'mlp' is not registered here: .*cudiff\.register_model"):
        cudiff.load(tmp_path / "runs" / "own-model")


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


def test_a_table_says_which_kernel_serves_a_problem(capsys):
    """The code of docs/adding-a-kernel.md prints what the page says."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "adding-a-kernel.md").read_text(), re.DOTALL)
    exec(code, {})
    expected = ["sm_80 conv2d set() {'norm backward'}", "sm_90a conv2d_sm90 {'norm backward'} set()"]
    assert capsys.readouterr().out.splitlines() == expected
    fused = {24, 27, 37, 54, 67, 128}
    for images in (1, 23, 24, 27, 28, 36, 37, 54, 55, 66, 67, 128):
        exec(code.replace("(32, 8, 8, 256)", f"({images}, 8, 8, 256)"), {})
        a100, h200 = capsys.readouterr().out.splitlines()
        assert a100.endswith("{'norm backward'} set()") == (images in fused) and h200 == expected[1]


@pytest.mark.skipif(cuda_available(), reason="there is a GPU")
def test_the_benchmark_says_what_it_needs(tmp_path):
    assert mistake("bench", folder=tmp_path).startswith("bench.py")
