"""What the host does for each launch, and what a reader has to know of it: `python -m tests.effort`.

Calls are those of functions of cudiff, on the stand-in for a GPU of tests/host.py, where caches are warm; a function
that it replaces counts as one call, and one whose result is cached as none. Comprehensions and steps of generator
expressions are not counted: some are calls in one version of Python and none in another. Everything else is read from
the sources.
"""

from __future__ import annotations

import ast
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest
from rich import print
from rich.table import Table

import cudiff
from cudiff.backend import bfloat16
from cudiff.models.unet import ResBlock
from cudiff.ops.norm_silu_conv2d import norm_silu_conv2d
from cudiff.tensor import Tensor
from tests.host import Host, forget, loaded_modules, pretend
from tests.traces import Case, training

PACKAGE = Path(cudiff.__file__).parent
HOST = str(Path(__file__).with_name("host.py"))
NOT_CALLED = ("<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>")
LONG = 40
Files = dict[CodeType, str]
CHOOSERS = re.compile(r"select(ed)?|hopper|_?suits\w*")
"""What chooses a kernel: a table's `select` and `selected`, or questions beside the tables; and `plan.run`, a tile."""


def calls(stand_ins: Files, run: Callable[[], Any], to_last_launch: bool = False) -> list[str]:
    """The file of each call that `run` makes, in order; `to_last_launch`, of those before the last launch."""
    files: list[str] = []
    inside, launched = 0, 0

    def note(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal inside, launched
        code = frame.f_code
        path = stand_ins.get(code, code.co_filename)
        if event == "call" and not inside and path.startswith(str(PACKAGE)) and code.co_name not in NOT_CALLED:
            files.append(path)
        if code.co_filename == HOST and event in ("call", "return"):
            inside += 1 if event == "call" else -1
            launched = len(files) if code.co_name == "run" else launched

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return files[:launched] if to_last_launch else files


def functions() -> dict[tuple[str, str], Any]:
    """Those of cudiff, by the module where they are written and their name."""
    found = ((module.__name__, name, value) for module in loaded_modules() for name, value in vars(module).items())
    return {(module, name): value for module, name, value in found if getattr(value, "__module__", "") == module}


def unit(host: Host) -> Callable[[], Any]:
    """The forward of a norm, SiLU and convolution with an embedding and a residual, to be trained."""
    def tensor(*shape: int, dtype: Any = np.float32) -> Tensor:
        return Tensor(host.zeros(shape, dtype), requires_grad=True)

    x, residual = (tensor(32, 32, 32, 128, dtype=bfloat16) for _ in range(2))
    parameters = dict(weight=tensor(128, 3, 3, 128, dtype=bfloat16), bias=tensor(128), emb=tensor(32, 128))
    norm = dict(norm_weight=tensor(128), norm_bias=tensor(128))
    return lambda: norm_silu_conv2d(x, residual=residual, **parameters, **norm)


def block_backward(host: Host) -> Callable[[], Any]:
    """The backward of a residual block of the U-Net, with an embedding and a skip convolution."""
    block = ResBlock(64, 128, 256)
    block.precision = "bf16"
    block.flatten("cuda")
    x = Tensor(host.zeros((32, 32, 32, 64), bfloat16), requires_grad=True)
    emb = Tensor(host.zeros((32, 128), np.float32), requires_grad=True)
    out = block(x, (emb,))
    grad = host.zeros(out.shape, bfloat16)
    return lambda: out.backward(grad)


def effort() -> list[tuple[str, int]]:
    """Calls, files and changes of file of a unit's forward; calls of a block's backward, and of a training step."""
    elephants = Case("elephants", "training", "bf16", hopper=True)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder, np.errstate(all="ignore"):
        before = functions()
        host = pretend(patch, hopper=True)
        now = {key: getattr(sys.modules[key[0]], key[1]) for key in before}
        replaced = [key for key in before if now[key] is not before[key] and not hasattr(now[key], "cache_clear")]
        stand_ins = {now[key].__code__: str(sys.modules[key[0]].__file__) for key in replaced}
        for make in (unit, block_backward):
            make(host)()
        files = calls(stand_ins, unit(host), to_last_launch=True)
        back = calls(stand_ins, block_backward(host))
        step = training(elephants, patch, folder)
        step()
        whole = calls(stand_ins, step)
    forget()
    return [
        ("a fused unit's forward: calls up to its launch", len(files)), ("  files that they are in", len(set(files))),
        ("  changes of file", sum(a != b for a, b in pairwise(files))),
        ("a residual block's backward: calls", len(back)), ("a training step of elephants: calls", len(whole)),
    ]


def sources(*folders: str) -> dict[Path, str]:
    paths = [path for folder in folders or (".",) for path in sorted((PACKAGE / folder).rglob("*.py"))]
    return {path: path.read_text() for path in paths}


def choices(tree: ast.AST) -> int:
    """Places that choose a kernel or its tile: calls of CHOOSERS, and of a Planner's `run`."""
    names = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return sum(
        bool(CHOOSERS.fullmatch(getattr(name, "attr", getattr(name, "id", "")))) or ast.unparse(name) == "plan.run"
        for name in names
    )


def long_functions(tree: ast.AST) -> int:
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return sum((node.end_lineno or 0) - node.lineno + 1 > LONG for node in functions)


def imports(path: Path, inside: bool, types: bool) -> Iterator[str]:
    """The modules that a file imports; those `inside` functions too, and those for `types` alone.

    A package of which a module is imported is not: every module of cudiff would import all."""
    def below(node: ast.AST) -> Iterator[ast.AST]:
        for child in ast.iter_child_nodes(node):
            checking = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
            if (inside or not isinstance(child, ast.FunctionDef)) and (types or not checking):
                yield child
                yield from below(child)

    for node in below(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in MODULES else node.module


MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sources()
}


def circles(imported: dict[str, set[str]]) -> list[list[str]]:
    """Modules that import each other, over others or directly."""
    reached = dict(imported)
    for by in reached:
        for name, found in reached.items():
            if by in found:
                reached[name] = found | reached[by]
    sets = {frozenset(b for b in found if a in reached[b]) for a, found in reached.items()}
    return sorted(sorted(names) for names in sets if names)


def circles_of_cudiff(inside: bool, types: bool) -> list[list[str]]:
    return circles({name: MODULES.keys() & imports(path, inside, types) for name, path in MODULES.items()})


def main() -> None:
    inner = sources("ops", "cuda")
    engine = {PACKAGE / name: (PACKAGE / name).read_text() for name in ("tensor.py", "function.py", "autograd.py")}
    trees = [ast.parse(text) for text in (inner | engine).values()]
    named = [
        path for path, text in sources("ops").items() if re.search("sm90|hopper", path.name + text, re.IGNORECASE)
    ]
    table = Table("host-side effort", "")
    table.columns[1].justify = "right"
    rows: list[tuple[str, int]] = [
        *effort(),
        ("places that choose a kernel", sum(map(choices, trees))),
        ("files of ops that name an architecture", len(named)),
        ("lines of ops and cuda", sum(len(text.splitlines()) for text in inner.values())),
        (f"functions of ops, cuda and the engine over {LONG} lines", sum(map(long_functions, trees))),
        ("lines of cudiff with tf32", sum("tf32" in line for text in sources().values() for line in text.splitlines())),
        ("circles among imports at the top level", len(circles_of_cudiff(inside=False, types=False))),
        ("  with those inside functions", len(circles_of_cudiff(inside=True, types=False))),
        ("  and with those for types", len(found := circles_of_cudiff(inside=True, types=True))),
    ]
    for what, count in rows:
        table.add_row(what, f"{count:,}")
    print(table)
    for names in found:
        print("a circle:", ", ".join(names))


if __name__ == "__main__":
    main()
