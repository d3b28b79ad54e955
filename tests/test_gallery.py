"""Every program of examples/gallery is short, says what it shows, and comes to the numbers that it should."""

import ast
import re
import runpy
import sys
from pathlib import Path

import pytest

from cudiff import nn

GALLERY = Path(__file__).resolve().parents[1] / "examples" / "gallery"
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]\d+)?")

SHOWN = {
    "cnn": lambda accuracy: accuracy > 95,
    "coordinates": lambda sinusoids, plain: sinusoids > 30 > 15 > plain,
    "diffusion": lambda radius, scatter: abs(radius - 1) < 0.05 and scatter < 0.1,
    "fine_tuning": lambda tuned, alone, moved: tuned > 75 and tuned > alone + 5 and moved == 0,
    "gan": lambda radius, scatter: abs(radius - 1) < 0.1 and scatter < 0.2,
    "huber": lambda slope, intercept: abs(slope - 2) < 0.1 and abs(intercept + 1) < 0.1,
    "k_means": lambda error: error < 0.1,
    "logistic_regression": lambda accuracy: accuracy > 90,
    "matrix_factorisation": lambda error, of_the_mean: error < 0.15 and of_the_mean > 0.8,
    "mixture": lambda error: error < 0.15,
    "mlp": lambda accuracy: accuracy > 98,
    "newton": lambda gradient: gradient < 1e-12,
    "own_function": lambda error: error < 1e-3,
    "own_optimizer": lambda loss, apart: loss < 0.01 and apart < 1e-5,
    "pca": lambda by_power, by_gradient: min(by_power, by_gradient) > 0.99999,
    "rnn": lambda error, repeated: error < repeated / 5,
    "spline": lambda error, samples: error < samples / 3,
    "transformer": lambda bits: bits < 0.4,
    "vae": lambda error, of_the_mean: error < of_the_mean / 3,
    "word_vectors": lambda of_its_own_kind: of_its_own_kind > 90,
}
"""What the numbers of a program's last line have to be."""


def takes_device(name):
    return "[cpu or cuda]" in (GALLERY / f"{name}.py").read_text()


def run(name, *arguments, monkeypatch, names=None):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    with nn.init.seeded(0):  # as in a process of its own
        runpy.run_path(str(GALLERY / f"{name}.py"), names, "__main__")


def shown(name, *arguments, monkeypatch, capsys):
    """The numbers of the last line that a program prints."""
    run(name, *arguments, monkeypatch=monkeypatch)
    return [float(number) for number in NUMBER.findall(capsys.readouterr().out.splitlines()[-1])]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SHOWN if not takes_device(name)])
def test_a_program_comes_to_its_result(name, monkeypatch, capsys):
    assert SHOWN[name](*shown(name, monkeypatch=monkeypatch, capsys=capsys))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SHOWN if takes_device(name)])
def test_a_program_comes_to_its_result_on_either_device(name, device, monkeypatch, capsys):
    assert SHOWN[name](*shown(name, device, monkeypatch=monkeypatch, capsys=capsys))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # its memory may hold any numbers
@pytest.mark.parametrize("name", [name for name in SHOWN if takes_device(name)])
def test_a_program_keeps_its_arrays_on_the_gpu(name, host_of, monkeypatch):
    """On a stand-in for a GPU, in loops of at most 30 rounds: operands are on one device, of dtypes that it takes."""
    host_of(True)
    run(name, "cuda", monkeypatch=monkeypatch, names={"range": lambda n: range(min(n, 30))})


def test_the_programs_are_short_and_listed():
    lines = {path.stem: path.read_text().splitlines() for path in GALLERY.glob("*.py")}
    assert lines.keys() == SHOWN.keys()
    assert max(map(len, lines.values())) < 60
    listed = re.findall(r"^\| \[(\w+)\.py\]\(\1\.py\) (?:\* )?\|", (GALLERY / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(lines)


@pytest.mark.parametrize("name", SHOWN)
def test_a_program_says_what_it_prints(name):
    assert "Prints " in ast.get_docstring(ast.parse((GALLERY / f"{name}.py").read_text()))
