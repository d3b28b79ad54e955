"""How the benchmark times: medians over CUDA-graph replays on random data, so that both sides are free of launch costs.

A `Report` writes the rows of a section to a file, which the process that started the section reads.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import cupy

from cudiff import ops
from cudiff.backend import bfloat16
from cudiff.cuda.timing import median_time
from cudiff.tensor import Tensor
from examples.benchmark.turns import turns


@dataclass
class Row:
    """A line of the table: `ours` and `theirs` in `unit`, and the work that `limit` bounds.

    flops: of one run, held against the matrix product's limit "bf16" or "tf32"; size: bytes moved, against "copy".
    """

    name: str
    ours: float | None
    theirs: float | None = None
    unit: str = "µs"
    flops: float = 0.0
    size: float = 0.0
    limit: str = "bf16"

    @property
    def rate(self) -> float:
        """TFLOP/s or TB/s; 0 where nothing is counted."""
        return (self.flops or self.size) / self.ours / 1e6 if self.ours else 0.0


class Report:
    """The rows of one section, each printed and written to `path` at once: what is cut short is not lost."""

    def __init__(self, path: str | Path | None, torch: bool):
        self.path, self.torch = path, torch

    def add(self, name: str, ours: float | None, theirs: float | None = None, **details: Any) -> None:
        row = Row(name, ours, theirs, **details)
        beside = f", PyTorch {theirs:,.1f}" if theirs else ""
        print(f"{name}: {f'{ours:,.1f}' if ours else 'none'} {row.unit}{beside}", flush=True)
        if self.path:
            with open(self.path, "a") as file:
                file.write(json.dumps(asdict(row)) + "\n")


def step_time(step: Callable[[], object], copies: int = 10, warmup: int = 5) -> float:
    """Microseconds of a step among others, as in training: the host prepares the next while the GPU runs one."""
    for _ in range(warmup):
        step()
    cupy.cuda.Device().synchronize()
    with turns.alone():
        return median_time(lambda: [step() for _ in range(copies)], copies, 7)


@functools.cache
def _generator() -> ops.Generator:
    return ops.Generator(0, "cuda")


def random_tensor(*shape: int, dtype: Any = bfloat16, grad: bool = False) -> Tensor:
    """Normal numbers, in each call others."""
    tensor = ops.astype(_generator().normal(shape), dtype)
    return Tensor(tensor.data, requires_grad=grad)


def backward_of(out: Tensor, needs: tuple[bool, ...]) -> Callable[[], object]:
    """A call of the backward of the operation that made `out`, for the inputs that `needs` marks."""
    node, _ = out._source
    dout = random_tensor(*out.shape, dtype=out.dtype).data
    return lambda: node.function.backward_cuda(node.ctx, dout, needs=needs, into=(None,) * len(needs))
