"""What a type checker tells a user of cudiff: the types of results and calls, and mistakes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

PROGRAM = '''
from collections.abc import Callable
from typing import Any

import numpy as np

import cudiff
from cudiff import Tensor, nn, optim

x = Tensor(np.zeros((2, 3), np.float32))
reveal_type(cudiff.exp(x))  # Tensor
reveal_type(1 + x * 2)  # Tensor
reveal_type(x[0].sum())  # Tensor
reveal_type(x.tanh())  # Tensor
reveal_type(divmod(x, 2))  # tuple[Tensor, Tensor]
reveal_type(x > 0)  # Tensor
reveal_type(x.shape)  # tuple[int, ...]
reveal_type(x.item())  # float | int
reveal_type([row for row in x])  # list[Tensor]
x.nonexistent  # error: attr-defined
cudiff.nonexistent  # error: attr-defined
cudiff.exp()  # error: call-arg


def loss(weights: Tensor) -> Tensor:
    return cudiff.square(weights).mean()


def of_arrays(weights: np.ndarray, bias: float, *, decay: float = 0.1) -> Any:
    return np.sum(weights**2) * bias + decay


def of_either(weights: Any) -> Any:
    return np.sum(weights**2)


reveal_type(cudiff.grad(loss))  # def (Tensor) -> Tensor
reveal_type(cudiff.value_and_grad(loss)(x))  # tuple[Tensor, Tensor]
reveal_type(cudiff.grad(of_arrays)(np.ones(3), 2.0, decay=0.0))  # ndarray
reveal_type(cudiff.value_and_grad(of_arrays)(np.ones(3), 2.0))  # tuple[Any, ndarray]
reveal_type(cudiff.grad(of_arrays, argnums=(0, 1)))  # def (weights: ndarray, bias: float, *, decay: float =) -> Any
reveal_type(cudiff.value_and_grad(loss, create_graph=True))  # def (weights: Tensor) -> tuple[Tensor, Any]
reveal_type(cudiff.elementwise_grad(cudiff.tanh))  # def (Any) -> Any
cudiff.elementwise_grad(np.tanh)(np.ones(3))
cudiff.grad(of_either)(np.ones(3)) + cudiff.grad(cudiff.grad(lambda w: w**3))(2.0)
cudiff.check_gradient(loss, np.ones(3))
value, pull_back = cudiff.vjp(of_arrays, np.ones(3), 2.0)
reveal_type(pull_back(1.0))  # tuple[ndarray, float]
cudiff.grad(3)  # error: call-overload
cudiff.grad(of_arrays)(np.ones(3), "x")  # error: arg-type
cudiff.grad(of_arrays)(np.ones(3))  # error: call-arg
cudiff.value_and_grad(of_arrays, 1)(np.ones(3), 2.0, dacay=0.0)  # error: call-arg
cudiff.vjp(loss, np.ones(3))  # error: arg-type


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.rest = nn.Linear(3, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.rest(self.first(x)) * scale


model = Net().eval()
reveal_type(model)  # Net
reveal_type(model(x, scale=2.0))  # Tensor
model("x")  # error: arg-type
model(x, 1.0, 2.0)  # error: call-arg
forward: Callable[[Tensor], Tensor] = model
wrong: Callable[[str], Tensor] = model  # error: assignment
for parameter in model.parameters():
    parameter -= 0.1 * parameter
    reveal_type(parameter)  # Parameter
optimizer = optim.AdamW(model.parameters(), lr=1e-3)
reveal_type(optimizer.step())  # None
optim.AdamW(model.parameters(), learning_rate=1e-3)  # error: call-arg
reveal_type(cudiff.load("run").sample(4))  # ndarray
reveal_type(cudiff.load_dataset("digits").labels)  # ndarray | None
'''


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What `mypy --strict` says of each line of PROGRAM, and of the gallery."""
    pytest.importorskip("mypy", reason="mypy is not installed: pip install mypy")
    folder = tmp_path_factory.mktemp("project")
    (folder / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--cache-dir=cache",
               "--no-error-summary", "program.py", *map(str, sorted((ROOT / "examples" / "gallery").glob("*.py")))]
    done = subprocess.run(command, cwd=folder, env=os.environ | {"MYPYPATH": str(ROOT)}, capture_output=True, text=True)
    assert not done.stderr, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_types_and_mistakes(found):
    told = {}
    for line in found:
        if match := re.match(r'program\.py:(\d+): (?:note: Revealed type is "(.*)"|error: .*\[(.*)\])', line):
            number, kind, code = match.groups()
            told[int(number)] = re.sub(r"\b(cudiff|numpy|program|builtins)\.([a-z_]+\.)*", "", kind or f"error: {code}")
    lines = enumerate(PROGRAM.splitlines(), start=1)
    expected = {number: line.split("  # ")[1] for number, line in lines if "  # " in line}
    told = {number: re.sub(r"ndarray\[tuple\[.*?\], dtype\[.*?\]\]", "ndarray", kind) for number, kind in told.items()}
    assert told == expected


@pytest.mark.slow
def test_the_gallery_is_typed(found):
    assert [line for line in found if not line.startswith("program.py")] == []
