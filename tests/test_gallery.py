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
    "coordinates": lambda sinusoids, plain: sinusoids > 30 > 15 > plain,
    "diffusion": lambda radius, scatter: abs(radius - 1) < 0.05 and scatter < 0.1,
    "logistic_regression": lambda accuracy: accuracy > 90,
    "matrix_factorisation": lambda error, of_the_mean: error < 0.15 and of_the_mean > 0.8,
    "newton": lambda gradient: gradient < 1e-12,
    "own_function": lambda error: error < 1e-3,
    "spline": lambda error, samples: error < samples / 3,
    "vae": lambda error, of_the_mean: error < of_the_mean / 3,
}
"""What the numbers of a program's last line have to be."""


def takes_device(name):
    return "[cpu or cuda]" in (GALLERY / f"{name}.py").read_text()


def shown(name, *arguments, monkeypatch, capsys):
    """The numbers of the last line that a program prints."""
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    with nn.init.seeded(0):  # as in a process of its own
        runpy.run_path(str(GALLERY / f"{name}.py"), run_name="__main__")
    return [float(number) for number in NUMBER.findall(capsys.readouterr().out.splitlines()[-1])]


@pytest.mark.parametrize("name", [name for name in SHOWN if not takes_device(name)])
def test_a_program_comes_to_its_result(name, monkeypatch, capsys):
    assert SHOWN[name](*shown(name, monkeypatch=monkeypatch, capsys=capsys))


@pytest.mark.parametrize("name", [name for name in SHOWN if takes_device(name)])
def test_a_program_comes_to_its_result_on_either_device(name, device, monkeypatch, capsys):
    assert SHOWN[name](*shown(name, device, monkeypatch=monkeypatch, capsys=capsys))


def test_the_programs_are_short_and_listed():
    lines = {path.stem: path.read_text().splitlines() for path in GALLERY.glob("*.py")}
    assert lines.keys() == SHOWN.keys()
    assert max(map(len, lines.values())) < 60
    listed = re.findall(r"^\| \[(\w+)\.py\]\(\1\.py\) (?:\* )?\|", (GALLERY / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(lines)


@pytest.mark.parametrize("name", SHOWN)
def test_a_program_says_what_it_prints(name):
    assert "Prints " in ast.get_docstring(ast.parse((GALLERY / f"{name}.py").read_text()))
