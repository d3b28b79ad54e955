"""cudiff/tensor.pyi, what type checkers and editors read of Tensor: `python -m tests.stub` writes it anew.

It holds the signatures of cudiff/tensor.py, and of the methods that cudiff/ops/methods.py gives to Tensor.
"""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import cudiff
from cudiff import Tensor

ROOT = Path(__file__).resolve().parents[1]
STUB = ROOT / "cudiff" / "tensor.pyi"

HEAD = '''"""Signatures of tensor.py and of Tensor's methods from the operations; written by `python -m tests.stub`."""

import contextlib
from collections.abc import {names}
from typing import Any

import numpy as np

from cudiff.backend import Array
from cudiff.ops.at import At
from cudiff.ops.reduce import Axis
from cudiff.statistics import ChannelStatistics

'''


def stub() -> str:
    """The text of cudiff/tensor.pyi."""
    tree = ast.parse((ROOT / "cudiff" / "tensor.py").read_text())
    lines = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            lines += _signature(node)
        elif isinstance(node, ast.ClassDef):
            lines += ["", f"class {node.name}:", *(f"    {line}" for line in _members(node)), ""]
    body = "\n".join(lines) + "\n"
    names = [name for name in ("Callable", "Iterator", "Mapping", "Sequence") if name in body]
    return HEAD.format(names=", ".join(names)) + body


def _members(tensor: ast.ClassDef) -> list[str]:
    lines = []
    for node in ast.walk(tensor):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Attribute):
            lines.append(f"{node.target.attr}: {ast.unparse(node.annotation)}")
    for node in tensor.body:
        if isinstance(node, ast.FunctionDef):
            lines += _signature(node)
    lines.append("__hash__ = object.__hash__")
    own = {node.name for node in tensor.body if isinstance(node, ast.FunctionDef)}
    for name, method in sorted(vars(Tensor).items()):
        if name in own or getattr(method, "__module__", "") == "cudiff.tensor":
            continue
        if isinstance(method, property):
            returns = inspect.signature(method.fget).return_annotation
            lines += ["@property", f"def {name}(self) -> {returns}: ..."]
        elif inspect.isfunction(method):
            lines.append(_given(name, method))
    return lines


def _signature(node: ast.FunctionDef) -> list[str]:
    decorators = [f"@{ast.unparse(decorator)}" for decorator in node.decorator_list]
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return [*decorators, f"def {node.name}({ast.unparse(node.args)}){returns}: ..."]


def _given(name: str, method: Any) -> str:
    """The line of a method whose first argument is the tensor."""
    signature = inspect.signature(method)
    first, *rest = signature.parameters.values()
    parameters = [first.replace(name="self", annotation=first.empty), *rest]
    text = re.sub("(: |-> )'([^']*)'", r"\1\2", str(signature.replace(parameters=parameters)))  # not of a default
    ignored = "  # type: ignore[override]" if name in ("__eq__", "__ne__") else ""  # object's return a bool
    return f"def {name}{text}: ...{ignored}"


def main() -> None:
    STUB.write_text(stub())
    print(f"{STUB.relative_to(ROOT)}: {len(stub().splitlines())} lines, cudiff {cudiff.__version__}")


if __name__ == "__main__":
    main()
