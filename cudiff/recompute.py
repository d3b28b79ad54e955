"""Recomputation: of a part of a network only the inputs are kept, and backward records it again (Chen et al., 2016,
arXiv 1604.06174). It takes less memory, and one more forward."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from cudiff.function import Function, Node
from cudiff.tensor import Tensor, differentiated, grad_enabled

Drawn = TypeVar("Drawn")


def recomputed(run: Callable[..., Tensor], *inputs: Tensor | None) -> Tensor:
    """`run(*inputs)`, of which nothing is kept but the inputs: backward runs it again. The gradients are the same, to
    the bit.

    run: returns one tensor, and gives the same each time, as modules do but for BatchNorm; nn.Dropout has its mask
    again. Its parameters get their gradients too. Where nothing is recorded, and where no input requires a gradient,
    this is `run(*inputs)`.
    """
    if not grad_enabled() or not any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
        return run(*inputs)
    return Recomputed.apply(*inputs, run=run)


class Recomputed(Function):
    """See `recomputed`. It has no backward: the tape walks over what `record_again` records."""

    @staticmethod
    def forward_numpy(ctx, *arrays, run):
        ctx.save(*arrays)
        ctx.run, ctx.given, ctx.drawn = run, ctx.statistics, []
        inputs = [None if array is None else Tensor(array, requires_grad=need)
                  for array, need in zip(arrays, ctx.needs, strict=True)]
        with _part(ctx.drawn.append, None):
            out = _recorded(ctx, inputs)  # as in backward, to the launch; what it holds is freed at the end
        if not isinstance(out, Tensor):
            raise TypeError(f"a part that is recomputed returned {type(out).__name__}: return one tensor")
        ctx.out_statistics = out.statistics
        return out.data

    forward_cuda = forward_numpy


def record_again(node: Node) -> Tensor:
    """The output of a Recomputed's node, recorded down to the inputs that this had."""
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
    """The parts that this thread is in, the outermost first: where each notes what is drawn, or has it from."""

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
    """Whether this is inside of a part that is recomputed."""
    return bool(_parts.stack)


def repeated(draw: Callable[[], Drawn]) -> Drawn:
    """`draw()`; in a part that is recorded again, what it was the first time."""
    again = [drawn for _, drawn in _parts.stack if drawn is not None]
    value = next(again[0]) if again else draw()
    for note, _ in _parts.stack:
        if note is not None:
            note(value)
    return value
