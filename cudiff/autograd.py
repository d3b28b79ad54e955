"""The backward pass: gradients flow back over the autograd tape."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from cudiff.backend import Array, array_module, device_of, device_of_type, is_float, is_low
from cudiff.cuda.accumulate import add_into
from cudiff.cuda.deferred import Queue, deferred
from cudiff.function import Node, fitting_gradients, nodes_below
from cudiff.gradient import EMPTY, HOLDS, SHARED, Slot
from cudiff.mode import mode
from cudiff.precision import allow_tf32
from cudiff.recompute import Recomputed, record_again
from cudiff.statistics import ChannelStatistics
from cudiff.tensor import Tensor, now


def backward(self: Tensor, grad: Any = None) -> None:
    """Add d(self)/d(leaf) to `.grad` of every leaf that requires it.

    grad: d(loss)/d(self), of this tensor's shape; it may be left out for a tensor of one element.

    Raises RuntimeError where nothing was recorded or the tape was used already, and ValueError for a `grad` of another
    shape. After an error during a backward the contents of every `.grad` are undefined.
    """
    if not self.requires_grad:
        raise RuntimeError(
            "backward() needs a tensor that requires a gradient: nothing that it was made of does "
            "(cudiff.load(path, trainable=True) loads a net to be trained)"
        )
    given = grad is not None
    if not given:
        if self.size != 1:
            raise RuntimeError(f"backward() of a tensor of shape {self.shape} needs the gradient to start from")
        grad = array_module(self.device).ones_like(self.data)
    else:
        grad = Tensor(grad, dtype=self.dtype, device=self.device).data
    if grad.shape != self.shape:
        raise ValueError(f"the gradient has shape {grad.shape}, the tensor {self.shape}")
    if given and self._source is not None:
        grad = _apart(grad, nodes_below(self._source[0], -1))
    walk_back(self, grad)


def _apart(grad: Array, nodes: list[Node]) -> Array:
    """`grad`, or a copy where a leaf's gradient may lie in its memory, as in `y.backward(x.grad)`: that is written to
    before all nodes have read `grad`. The leaves of a part that is recomputed are not known yet."""
    leaves = [source._grad for node in nodes for source in node.inputs if isinstance(source, Tensor)]
    if any([node.function is Recomputed for node in nodes]) or any([_overlap(grad, one) for one in leaves]):
        return grad.copy()
    return grad


def _overlap(one: Array, other: Array | None) -> bool:
    """Whether two arrays of one device may have memory in common."""
    if other is None or not isinstance(other, type(one)):
        return False
    if device_of(one) == "cpu":
        return np.may_share_memory(one, other)
    starts = one.data.ptr, other.data.ptr
    return max(starts) < min(starts[0] + one.nbytes, starts[1] + other.nbytes)


Tensor.backward = backward  # type: ignore[method-assign]


def walk_back(root: Tensor, grad: Array, wanted: Callable[[Tensor], bool] | None = None, since: int = -1) -> None:
    """Add d(root)/d(leaf), times `grad`, to `.grad` of every leaf below `root`.

    wanted(leaf): whether this leaf gets a gradient; by default all do. since: only nodes with a greater index are
    visited.
    """
    if root._source is None:
        _add_to_leaf(root, grad, True)
        return
    first = _Gradient()
    first.add(grad, True, None)
    with deferred() as queue, allow_tf32(mode.tf32):  # on the CPU nothing is deferred
        _Walk(wanted, since, queue).down(root._source, first, since, _watch.begin)


class _Walk:
    """One walk back over the tape. gradients[node.index]: the gradients so far of a node's outputs."""

    def __init__(self, wanted: Callable[[Tensor], bool] | None, since: int, queue: Queue) -> None:
        self.wanted, self.since, self.queue = wanted, since, queue
        self.gradients: dict[int, list[_Gradient]] = {}

    def down(self, output: tuple[Node, int], gradient: _Gradient, since: int, begin: Begin | None = None,
             recorded: int | None = None) -> None:
        """Run the backward of the node that made `output`, and of all that it depends on with an index above `since`.

        output: a node and which of its outputs. gradient: that output's. begin: see `watched`. recorded: for nodes that
        were recorded again, the index of the Recomputed node, after which no parameter may have been updated.
        """
        order = nodes_below(output[0], since)
        after = None if begin is None else begin(order)
        for node in order:
            self.gradients[node.index] = gradients = [_Gradient()]
            while len(gradients) < node.num_outputs:
                gradients.append(_Gradient())
        self.gradients[output[0].index][output[1]] = gradient
        for position, node in enumerate(order):
            gradients = self.gradients.pop(node.index)
            kind = None
            for one in gradients:
                if one.pending is not None:
                    one.settle(self.queue)
                if kind is None and one.array is not None:
                    kind = type(one.array)
            if node.ctx is None:
                raise RuntimeError("backward() ran through this part of the tape already: run the forward again")
            if kind is not None:
                mode.tf32 = node.ctx.tf32
                for constant in node.constants:
                    constant.require_unchanged(recorded or node.index)
                if node.function is Recomputed:
                    before, again = now(), record_again(node)
                    if again._source is not None:
                        self.down(again._source, gradients[0], before, recorded=recorded or node.index)
                else:
                    node.ctx.dout_statistics = gradients[0].statistics
                    _run_backward(node, gradients, kind, self.targets(node, recorded or node.index), self.queue)
            node.ctx = None  # frees what forward saved
            if after is not None:
                after(position, self.queue)

    def targets(self, node: Node, recorded: int) -> dict[int, Tensor | _Gradient]:
        """For each input i of which a gradient is wanted what that is added to: a leaf or a _Gradient."""
        found: dict[int, Tensor | _Gradient] = {}
        for i in node.likes:
            source: Any = node.inputs[i]
            if type(source) is tuple:
                if source[0].index > self.since:
                    found[i] = self.gradients[source[0].index][source[1]]
                continue
            if source._updated > recorded:
                source.require_unchanged(recorded)
            if source.requires_grad and (self.wanted is None or self.wanted(source)):
                found[i] = source
        return found


Begin = Callable[[list[Node]], Callable[[int, Queue], None]]


class _Watch(threading.local):
    begin: Begin | None = None


_watch = _Watch()


@contextlib.contextmanager
def watched(begin: Begin) -> Iterator[None]:
    """Inside the block, a backward calls `begin(nodes)` with its nodes, in the order in which it visits them.

    `begin` returns a function, which the backward calls after each node with the node's position in that list and the
    queue of deferred launches. Nodes that are recorded again are not in the list.
    """
    before, _watch.begin = _watch.begin, begin
    try:
        yield
    finally:
        _watch.begin = before


class _Gradient:
    """The gradient of one output of a node, while its terms are still being added up.

    array: the sum so far, or None. shared: whether `array` is aliased; then it is never written to. pending: a term
    that is not in `array` yet, or None; only if `array` is not shared. A backward may add it together with its own
    term. It is never written to. statistics: those of `array`, if a backward left any.
    """

    __slots__ = ("array", "pending", "shared", "statistics")

    def __init__(self) -> None:
        self.array: Array | None = None
        self.pending: Array | None = None
        self.shared = False
        self.statistics: ChannelStatistics | None = None

    def own(self) -> Array | None:
        """The array itself, or a copy of it if it is shared."""
        return self.array.copy() if self.shared and self.array is not None else self.array

    def settle(self, queue: Queue) -> None:
        """Add the pending term to `array`."""
        queue.before_write(self.array)
        accumulate(self.array, self.pending)
        self.pending = None

    def add(self, array: Array, shared: bool, statistics: ChannelStatistics | None) -> None:
        """Add a term. shared: whether it is aliased. statistics: the term's; a sum of several terms has none."""
        if self.array is None:
            self.array, self.shared, self.statistics = array, shared, statistics
            return
        if self.shared and shared:
            self.array, self.shared = self.array.copy(), False
        elif self.shared:
            self.array, array, self.shared = array, self.array, False
        accumulate(self.array, array)
        self.statistics = None


def accumulate(total: Array, term: Array) -> None:
    """total += term, in place, on the CPU or on CUDA."""
    if device_of(total) == "cpu":
        total += term.astype(total.dtype, copy=False)
    else:
        add_into(total, term)


def _run_backward(node: Node, gradients: list[_Gradient], kind: type, targets: dict[int, Tensor | _Gradient],
                  queue: Queue) -> None:
    """Run the node's backward on the gradients of its outputs, arrays of this kind, and add the results to `targets`.
    """
    device, douts = device_of_type(kind), []
    for one in gradients:
        if node.function.fresh:
            dout = one.array
            queue.before_read(dout)
        else:
            dout = one.own()
            queue.before_write(dout)  # a backward that is not fresh may write to it
        douts.append(dout)
    into = _slots(node, targets, queue)
    if device == "cuda":
        results = node.function.backward_cuda(node.ctx, *douts, needs=node.needs, into=into)
    else:
        arrays = [_array_to_add_to(slot) for slot in into]
        results = node.function.backward_numpy(node.ctx, *douts, needs=node.needs, into=arrays)
    results = fitting_gradients(node, results, kind, device, queue.before_read)
    terms: list[tuple[int, Tensor | _Gradient]] = []
    for i, target in targets.items():
        result, slot = results[i], into[i]
        if result is None:
            continue
        if slot is None or result is not slot.whole:  # one more term; `slot.whole` is the sum of all terms
            terms.append((i, target))
        elif isinstance(target, Tensor):
            target._grad_empty = False  # the result is the leaf's own array
        else:
            target.array, target.pending, target.statistics = result, None, node.ctx.din_statistics.get(i)
    if terms:  # last, because a tensor may be two inputs: one result may be its new array, to which the other is added
        shared = [*node.ctx.saved]
        for one in gradients:
            if one.shared:
                shared.append(one.array)
        _add_terms(node, terms, results, shared, douts if device == "cuda" else [], queue)


def _array_to_add_to(slot: Slot | None) -> Array | None:
    """What a backward on the CPU gets as `into[i]`: the slot's array if that HOLDS a gradient, else None."""
    if slot is None or slot.state is not HOLDS:
        return None
    slot.whole = slot.array
    return slot.array


def _add_terms(node: Node, terms: list[tuple[int, Tensor | _Gradient]], results: tuple, aliased: list[Array | None],
               douts: list[Array | None], queue: Queue) -> None:
    """Add result i to its target, for each (i, target) of `terms`. A result that is one of `douts` becomes the target's
    pending term if possible. aliased: arrays that others hold."""
    for i, target in terms:
        result = results[i]
        if isinstance(result, np.generic):  # an in-place sum needs an array
            result = np.asarray(result)
        shared = not node.function.fresh or result.base is not None  # else `result` owns its memory
        for array in () if shared else aliased:
            shared = shared or array is result
        for other in () if shared else node.likes:  # another result may be the same array, or a view of it
            array = results[other]
            if other != i and array is not None and (array is result or array.base is result):
                shared = True
        if isinstance(target, Tensor):
            if target._grad is not None or shared:
                queue.before_read(result)
                queue.before_write(target._grad)
            _add_to_leaf(target, result, shared)
            continue
        if target.pending is not None:
            target.settle(queue)
        so_far = target.array
        adds = so_far is not None and not target.shared and result.dtype == so_far.dtype
        if adds and any(result is dout for dout in douts):
            target.pending, target.statistics = result, None  # a norm's backward can add it together with its own term
            continue
        if so_far is not None and target.shared:  # the sum goes into the result
            queue.before_write(result)
            queue.before_read(so_far)
        elif so_far is not None:
            queue.before_read(result)
            queue.before_write(so_far)
        target.add(result, shared, node.ctx.din_statistics.get(i))


def _slots(node: Node, targets: dict[int, Tensor | _Gradient], queue: Queue) -> list[Slot | None]:
    """For each input the Slot with its gradient so far, or None if the backward is to make a new array."""
    into: list[Slot | None] = [None] * len(node.needs)
    twice = len({*targets.values()}) < len(targets)  # the same tensor is an input twice
    for i, target in targets.items():
        if twice and (first := next(j for j, other in targets.items() if other is target)) < i:
            slot = into[first]
            into[i] = slot if slot is not None and slot.state is HOLDS else None
        elif isinstance(target, _Gradient):
            if target.array is not None:
                elsewhere = i in node.function.adds_elsewhere
                alone = elsewhere and (not twice or [*map(id, targets.values())].count(id(target)) == 1)
                into[i] = _slot(target, elsewhere, alone, queue)
        elif target._grad is not None:
            if target._grad_empty:
                into[i] = Slot(target._grad, EMPTY)
            else:
                queue.before_write(target._grad)
                into[i] = Slot(target._grad)
    return into


def _slot(target: _Gradient, adds_elsewhere: bool, alone: bool, queue: Queue) -> Slot | None:
    """The Slot for the gradient of another node's output, or None if the backward is to make a new array.

    adds_elsewhere: whether the backward can write the sum to another array. alone: whether it can and the output is not
    its input twice. Only then it may add the pending term too.
    """
    if target.pending is not None and not alone:
        target.settle(queue)
    if target.shared:
        return None
    if adds_elsewhere and (target.pending is not None or queue.is_read(target.array)):
        queue.before_read(target.array)
        return Slot(target.array, SHARED, target.pending)
    queue.before_write(target.array)  # it may be added to
    return Slot(target.array)


def _add_to_leaf(leaf: Tensor, grad: Array, shared: bool) -> None:
    if not is_float(leaf.dtype):
        raise TypeError(f"a tensor of {leaf.dtype} has no gradient: make one of x.astype('float32') require it")
    if leaf._grad is None and is_low(grad.dtype) and not is_low(leaf.dtype):  # forward read a 16-bit copy
        leaf._grad = array_module(leaf.device).zeros(leaf.shape, leaf.dtype)
        accumulate(leaf._grad, grad)
    elif leaf._grad is None:
        leaf._grad = grad.copy() if shared else grad
    elif leaf._grad_empty:
        leaf._grad[...] = grad
        leaf._grad_empty = False
    else:
        accumulate(leaf._grad, grad)
