"""A stand-in for a CUDA graph: on the CPU, a recording of operations that is computed again with the arrays it began
with, whatever Python would decide by then."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from cudiff.cuda import graph
from cudiff.function import Context, Function
from cudiff.tensor import Tensor

_apply = Function.apply.__func__  # type: ignore[attr-defined]


class _Mode(threading.local):
    tape: list[tuple] | None = None


_mode = _Mode()


def _taped(cls: type[Function], *inputs: Any, **attrs: Any) -> Any:
    """`Function.apply`, noted where a tape is on; of an operation that others define, these are."""
    if cls.compose is not None:
        return _apply(cls, *inputs, **attrs)
    tape, _mode.tape = _mode.tape, None
    try:
        outs = _apply(cls, *inputs, **attrs)
    finally:
        _mode.tape = tape
    if tape is not None:
        dtype = next(x.dtype for x in inputs if x is not None)
        arrays = [x.operand(dtype) if isinstance(x, Tensor) else x for x in inputs]
        tape.append((cls, arrays, attrs, [out.data for out in (outs if isinstance(outs, tuple) else (outs,))]))
    return outs


class Tape:
    """Operations, their arrays and their numbers; `launch` computes them into the arrays that they made."""

    def __init__(self, operations: list[tuple]):
        self.operations = operations

    def launch(self) -> None:
        for cls, arrays, attrs, outs in self.operations:
            none = (None,) * len(arrays)
            results = cls.forward_numpy(Context((False,) * len(arrays), none), *arrays, **attrs)
            for out, result in zip(outs, results if isinstance(results, tuple) else (results,), strict=True):
                if not np.shares_memory(out, result):
                    out[...] = result


class Recording(graph._Recording):
    """`capture`'s, with a tape for a graph."""

    def __init__(self, fn: Callable, warmup: int | Callable):
        self.fn, self.state, self.graph, self.inputs = fn, graph._state, None, []
        self.eager_calls = 0 if callable(warmup) else warmup
        self.warmup = warmup if callable(warmup) else None

    def precompile(self, args: tuple) -> None:
        """There is nothing to compile."""

    def _record(self, args: tuple) -> None:
        with self._private():
            self.inputs = [None if x is None else Tensor(x.data.copy()) for x in args]
            _mode.tape = []
            try:
                self._run()
                self.graph = Tape(_mode.tape)
            finally:
                _mode.tape = None

    @contextlib.contextmanager
    def _private(self) -> Iterator[None]:
        graph._mode.busy = True
        try:
            yield
        finally:
            graph._mode.busy = False


def stand_in(patch: pytest.MonkeyPatch, taped: bool = True) -> None:
    """Have functions captured by such recordings, of arrays on the CPU; or on the stand-in for a GPU, which computes
    nothing, with empty tapes."""
    if taped:
        patch.setattr(Function, "apply", classmethod(_taped))
    patch.setattr(graph, "_Recording", Recording)
    patch.setattr(graph.Captured, "_device", lambda self, args: "cuda")


def counted(patch: pytest.MonkeyPatch) -> list[Any]:
    """A list that gets the functions of all graphs that are recorded from now on."""
    recorded: list[Any] = []
    record = graph._Recording._record

    def note(self: Any, args: tuple) -> None:
        recorded.append(self.fn)
        record(self, args)

    patch.setattr(graph._Recording, "_record", note)
    return recorded
