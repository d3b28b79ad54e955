"""The rules that keep the project readable: imports point downward, stems pair up, files stay small."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.effort import circles_of_cudiff

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "cudiff"

# Each layer may import the layers after it, and its own.
LAYERS = [
    {"cli", "convert_command", "sample_command", "__main__"},
    {"demo", "play"},
    {"tune"},
    {"train", "evaluate", "display", "info"},
    {"pipeline", "samplings", "stream", "processes"},
    {"folder", "beginning", "forecast", "pace"},
    {"models", "diffusion", "optim", "data", "checkpoint", "convert", "config", "options",
     "registry", "plot", "torchfile", "distances", "report"},
    {"nn", "tensorfile", "differentiate", "torchfunction"},
    {"derivatives"},
    {"ops"},
    {"autograd", "recompute"},
    {"function", "cuda", "distributed"},
    {"tensor"},
    {"as_array", "gradient", "show", "statistics"},
    {"backend", "threads", "memory", "precision", "mode"},
    {"values", "files", "classes"},
    {"errors", "signals"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
MAY_IMPORT_CUPY = {"backend", "cuda"}


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        yield path, parts[0]


def imports_of(path):
    """(module name, whether it stands at the top of the file) of every import."""
    tree = ast.parse(path.read_text())
    top = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, id(node) in top
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = [f"cudiff.{alias.name}" for alias in node.names]
            for name in inside if node.module == "cudiff" else [node.module]:
                yield name, id(node) in top


@pytest.mark.parametrize("path, own", list(modules()), ids=lambda value: getattr(value, "stem", value))
def test_imports_point_downward(path, own):
    if own == "__init__":
        return
    assert own in LEVEL, f"cudiff/{own} has no layer: give it one in {Path(__file__).name}"
    for name, top in imports_of(path):
        parts = name.split(".")
        if parts[0] == "cudiff" and len(parts) > 1 and parts[1] in LEVEL:
            assert LEVEL[parts[1]] >= LEVEL[own], f"{path.name} imports {name}, which lies above it"
        assert parts[0] != "torch", f"{path.name} imports PyTorch"
        if parts[0] in ("cupy", "cupyx", "cupy_backends"):
            assert own in MAY_IMPORT_CUPY, f"{path.name} imports {name}: only cuda/ and backend.py may"
            assert not top, f"{path.name} imports {name} at its top: import it where it is used"


def test_nothing_imports_in_a_circle():
    assert not circles_of_cudiff(inside=True, types=True)


def test_diffusion_never_imports_models():
    for path in (PACKAGE / "diffusion").glob("*.py"):
        assert not any(name.startswith("cudiff.models") for name, _ in imports_of(path)), path.name


def test_every_kernel_file_is_launched_and_every_op_has_its_test():
    host = "".join(path.read_text() for folder in ("ops", "cuda") for path in (PACKAGE / folder).rglob("*.py"))
    for kernel in (ROOT / "kernels").glob("*/*.cu"):
        assert f'"{kernel.stem}"' in host, f"no file of cudiff launches {kernel}"
    for op in (PACKAGE / "ops").glob("*.py"):
        if op.stem != "__init__":
            assert (ROOT / "tests" / "ops" / f"test_{op.stem}.py").is_file(), f"ops/{op.name} has no test"


def test_every_kernel_file_opens_with_its_contract():
    for kernel in (ROOT / "kernels").glob("*/*.cu*"):
        assert kernel.read_text().startswith("//"), f"{kernel.name} does not open with its contract"


def test_kernels_for_every_architecture_include_no_header_of_hoppers():
    hopper = {path.name for path in (ROOT / "kernels" / "sm90").glob("*.cuh")}
    for folder in ("common", "portable"):
        for path in (ROOT / "kernels" / folder).glob("*.cu*"):
            assert not hopper & set(re.findall(r'#include "(.+)"', path.read_text())), path


def test_files_stay_small():
    files = [*PACKAGE.rglob("*.py"), *(ROOT / "kernels").glob("*/*.cu*"), *(ROOT / "tests").rglob("*.py")]
    long = {path.name: lines for path in files if (lines := len(path.read_text().splitlines())) > 500}
    assert not long, f"over 500 lines: {long}"


def test_the_wheel_holds_every_package():
    given = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {".".join(path.parent.relative_to(ROOT).parts) for path in PACKAGE.rglob("__init__.py")}
    assert set(given) == found | {"cudiff.kernels"}


def test_the_wheel_holds_the_page():
    """Of `cudiff play`: what the patterns take is what there is."""
    given = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["cudiff.play"]
    folder = PACKAGE / "play"
    taken = {path for pattern in given for path in folder.glob(pattern)}
    assert taken == {path for path in folder.rglob("*.*") if path.suffix not in (".py", ".pyc")} and len(taken) == 3


def test_import_is_fast_and_needs_no_cupy(tmp_path):
    """From byte code, which the first of the imports writes: 0.15 s, 1.3 times NumPy's own. NumPy tells how
    fast this machine is now."""
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(tmp_path)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    code = (
        "import sys, time; start = time.process_time(); import numpy; middle = time.process_time(); import cudiff;"
        "assert not {'cupy', 'torch', 'matplotlib'} & set(sys.modules);"
        "print(middle - start, time.process_time() - middle)"
    )
    times = [
        subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, env=environment, text=True).split()
        for _ in range(7)
    ]
    numpy, own = (min(map(float, column)) for column in zip(*times, strict=True))
    assert own < max(0.2, 2 * numpy), f"import cudiff takes {own:.2f} s more than NumPy's {numpy:.2f}"


def test_public_names_are_there():
    import cudiff

    assert set(cudiff.__all__) <= set(dir(cudiff)) and all(getattr(cudiff, name) is not None for name in cudiff.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        cudiff.nothing  # noqa: B018
