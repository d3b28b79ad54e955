"""Recomputation (gradient checkpointing): only the inputs of a part of a network are kept, and backward runs the part
again to record it. It takes less memory, and one more forward (Chen et al., 2016, arXiv 1604.06174)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from cudiff.function import Function, Node, nodes_below
from cudiff.tensor import Tensor, differentiated, grad_enabled, now

Drawn = TypeVar("Drawn")


def recomputed(run: Callable[..., Tensor], *inputs: Tensor | None) -> Tensor:
    """Return `run(*inputs)` and keep only the inputs; backward runs it again. The gradients are the same, to the bit.

    run: returns one tensor, and has to give the same result each time. All modules do except BatchNorm; nn.Dropout gets
    the same mask again. Parameters and other tensors that it reads get their gradients too. If gradients are disabled,
    or no input requires one, this is the same as `run(*inputs)`. Raises TypeError if `run` returns anything but one
    tensor. Backward raises RuntimeError where an input or a parameter was changed after the forward.
    """
    if not grad_enabled() or not any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
        return run(*inputs)
    out = Recomputed.apply(*inputs, run=run)
    if out._source is not None:
        node, _ = out._source
        node.inputs += node.ctx.others  # so that the tape visits what made them after this node
    return out


class Recomputed(Function):
    """The operation that `recomputed` records. Instead of its backward the tape runs `record_again`'s nodes."""

    @staticmethod
    def forward_numpy(ctx, *arrays, run):
        ctx.save(*arrays)
        ctx.run, ctx.given, ctx.drawn = run, ctx.statistics, []
        inputs = [None if array is None else Tensor(array, requires_grad=need)
                  for array, need in zip(arrays, ctx.needs, strict=True)]
        before = now()
        with _part(ctx.drawn.append, None):
            out = _recorded(ctx, inputs)  # recorded, to launch exactly what backward will; the tape is dropped
        if not isinstance(out, Tensor):
            raise TypeError(f"a part that is recomputed returned {type(out).__name__}: return one tensor")
        ctx.out_statistics = out.statistics
        ctx.others = _older(out, before)
        return out.data

    forward_cuda = forward_numpy


class Passed(Function):
    """The identity, for a part that returns a tensor made outside of it."""

    @staticmethod
    def forward_numpy(ctx, x):
        return x

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        return (dout,)

    forward_cuda, backward_cuda = forward_numpy, backward_numpy


def _older(out: Tensor, before: int) -> list[tuple[Node, int]]:
    """The outputs of earlier nodes, with an index up to `before`, that a part read besides its inputs."""
    if out._source is None:
        return []
    made = [out._source] if out._source[0].index <= before else [
        source for node in nodes_below(out._source[0], before) for source in node.inputs if isinstance(source, tuple)
    ]
    return list(dict.fromkeys(source for source in made if source[0].index <= before))


def record_again(node: Node) -> Tensor:
    """The output of a Recomputed node, computed and recorded again from the node's inputs. Where it requires a
    gradient, a new node made it."""
    inputs: list[Tensor | None] = []
    for array, source in zip(node.ctx.saved, node.inputs, strict=False):  # behind its own inputs lie `others`
        if array is None:
            inputs.append(None)
        elif isinstance(source, Tensor):  # a leaf
            if type(source) is Tensor and source.data is not array:
                raise RuntimeError("an input of a part that is recomputed was changed between forward and backward, "
                                   "whose gradients would mix old and new: change it after backward()")
            inputs.append(source)
        else:
            inputs.append(x := Tensor(array, requires_grad=source is not None))
            x._source = source
    before, drawn = now(), iter(node.ctx.drawn)
    with _part(None, drawn):
        out = _recorded(node.ctx, inputs)
    if next(drawn, None) is not None:
        raise RuntimeError(_OTHER_DRAWS)
    return out if out._source is not None and out._source[0].index > before else Passed.apply(out)


_OTHER_DRAWS = (
    "a part that is recomputed has other dropout in backward than it had in forward: leave train() and eval() as they "
    "are in between"
)


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
    value = next(again[0], None) if again else draw()
    if value is None:
        raise RuntimeError(_OTHER_DRAWS)
    for note, _ in _parts.stack:
        if note is not None:
            note(value)
    return value
