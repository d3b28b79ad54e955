"""Recomputation (gradient checkpointing): only the inputs of a part of a network are kept, and backward runs the part
again to record it. It takes less memory, and one more forward (Chen et al., 2016, arXiv 1604.06174)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from cudiff.function import Function, Node
from cudiff.tensor import Tensor, differentiated, grad_enabled

Drawn = TypeVar("Drawn")


def recomputed(run: Callable[..., Tensor], *inputs: Tensor | None) -> Tensor:
    """Return `run(*inputs)` and keep only the inputs; backward runs it again. The gradients are the same, to the bit.

    run: returns one tensor, and has to give the same result each time. All modules do except BatchNorm; nn.Dropout gets
    the same mask again. The parameters in it get their gradients too. If gradients are disabled, or no input requires
    one, this is the same as `run(*inputs)`. Raises TypeError if `run` returns anything but one tensor.
    """
    if not grad_enabled() or not any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
        return run(*inputs)
    return Recomputed.apply(*inputs, run=run)


class Recomputed(Function):
    """The operation that `recomputed` records. Instead of its backward the tape runs `record_again`'s nodes."""

    @staticmethod
    def forward_numpy(ctx, *arrays, run):
        ctx.save(*arrays)
        ctx.run, ctx.given, ctx.drawn = run, ctx.statistics, []
        inputs = [None if array is None else Tensor(array, requires_grad=need)
                  for array, need in zip(arrays, ctx.needs, strict=True)]
        with _part(ctx.drawn.append, None):
            out = _recorded(ctx, inputs)  # recorded, to launch exactly what backward will; the tape is dropped
        if not isinstance(out, Tensor):
            raise TypeError(f"a part that is recomputed returned {type(out).__name__}: return one tensor")
        ctx.out_statistics = out.statistics
        return out.data

    forward_cuda = forward_numpy


def record_again(node: Node) -> Tensor:
    """The output of a Recomputed node, computed and recorded again from the node's inputs."""
    inputs: list[Tensor | None] = []
    for array, source in zip(node.ctx.saved, node.inputs, strict=True):
        if array is None:
            inputs.append(None)
        elif isinstance(source, Tensor):  # a leaf
            inputs.append(source)
        else:
            inputs.append(x := Tensor(array, requires_grad=source is not None))
            x._source = source
    with _part(None, iter(node.ctx.drawn)):
        return _recorded(node.ctx, inputs)


def _recorded(ctx: Any, inputs: list[Tensor | None]) -> Tensor:
    for x, statistics in zip(inputs, ctx.given, strict=True):
        if x is not None:
            x.statistics = statistics
    with differentiated(0):
        return ctx.run(*inputs)


class _Parts(threading.local):
    """stack: (note, drawn) of each recomputed part that this thread is inside of, the outermost first. In the forward
    note keeps random draws, and drawn is None. In the backward note is None, and drawn yields these draws again."""

    def __init__(self) -> None:
        self.stack: list[tuple[Callable[[Any], None] | None, Iterator[Any] | None]] = []


_parts = _Parts()


@contextlib.contextmanager
def _part(note: Callable[[Any], None] | None, drawn: Iterator[Any] | None) -> Iterator[None]:
    _parts.stack.append((note, drawn))
    try:
        yield
    finally:
        _parts.stack.pop()


def inside() -> bool:
    """Whether the caller runs inside a recomputed part."""
    return bool(_parts.stack)


def repeated(draw: Callable[[], Drawn]) -> Drawn:
    """`draw()`, or, inside a part that is recorded again, what it returned the first time."""
    again = [drawn for _, drawn in _parts.stack if drawn is not None]
    value = next(again[0]) if again else draw()
    for note, _ in _parts.stack:
        if note is not None:
            note(value)
    return value
