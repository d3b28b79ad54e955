"""How gradients flow back over the tape."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from cudiff.backend import Array, array_module, device_of, is_low
from cudiff.function import Node, fitting_gradients
from cudiff.gradient import Kept, Vacant
from cudiff.tensor import Tensor


def backward(tensor: Tensor, grad: Any = None) -> None:
    """Add d(self)/d(leaf) to `.grad` of every leaf that requires it.

    `grad` is d(loss)/d(self), of this tensor's shape; it may be left out for a single element.
    Raises RuntimeError where nothing was recorded or the tape was used already. After any other error no `.grad`
    has a meaning.
    """
    if not tensor.requires_grad:
        raise RuntimeError(
            "backward() needs a tensor that requires a gradient: nothing that it was made of does "
            "(cudiff.load(path, trainable=True) loads a net to be trained)"
        )
    if grad is None:
        if tensor.size != 1:
            raise RuntimeError(f"backward() of a tensor of shape {tensor.shape} needs the gradient to start from")
        grad = array_module(tensor.device).ones_like(tensor.data)
    else:
        grad = Tensor(grad, dtype=tensor.dtype, device=tensor.device).data
    if grad.shape != tensor.shape:
        raise ValueError(f"the gradient has shape {grad.shape}, the tensor {tensor.shape}")
    _walk_back(tensor, grad)


Tensor.backward = backward  # type: ignore[method-assign]


def _walk_back(root: Tensor, grad: Array) -> None:
    """Add d(root)/d(leaf), times `grad`, to `.grad` of every leaf below `root`."""
    if root._source is None:
        _add_to_leaf(root, grad, True)
        return
    pending: dict[int, list[_Gradient]] = {}
    order = _nodes_below(root._source[0])
    for node in order:
        pending[node.index] = [_Gradient() for _ in range(node.num_outputs)]
    pending[order[0].index][root._source[1]].add(grad, True, None)
    with _deferred(device_of(grad)) as queue:
        for node in order:
            slots = pending.pop(node.index)
            for slot in slots:
                slot.settle(queue)
            if node.ctx is None:
                raise RuntimeError("backward() ran through this part of the tape already: run the forward again")
            node.ctx.dout_partials = slots[0].partials
            if any(slot.array is not None for slot in slots):
                _run_backward(node, slots, [
                    pending[source[0].index][source[1]] if isinstance(source, tuple)
                    else source if source is not None and source.wants_gradient(node.index) else None
                    for source in node.inputs
                ], queue)
            node.ctx = None  # frees what forward saved


def _nodes_below(root: Node) -> list[Node]:
    """Every node that `root` depends on, itself first, newest first: a fixed order, so sums are reproducible."""
    found = {root.index: root}
    stack = [root]
    while stack:
        for source in stack.pop().inputs:
            if isinstance(source, tuple) and source[0].index not in found:
                found[source[0].index] = source[0]
                stack.append(source[0])
    return [found[index] for index in sorted(found, reverse=True)]


class _Gradient:
    """A gradient under construction. A borrowed array is shared with someone else and never written to; so is `more`,
    one more term of an array that is not, which a backward may add with its own."""

    __slots__ = ("array", "borrowed", "more", "partials")

    def __init__(self) -> None:
        self.array: Array | None = None
        self.more: Array | None = None
        self.borrowed = False
        self.partials: Array | None = None

    def into(self) -> Array | None:
        return None if self.borrowed else self.array

    def own(self) -> Array | None:
        """The array, or a copy of one that is borrowed."""
        return self.array.copy() if self.borrowed and self.array is not None else self.array

    def settle(self, queue: Any) -> None:
        """Add the term that still is to be."""
        if self.more is not None:
            queue.before_write(self.array)
            accumulate(self.array, self.more)
            self.more = None

    def add(self, array: Array, borrowed: bool, partials: Array | None) -> None:
        """One more term."""
        if self.array is None:
            self.array, self.borrowed, self.partials = array, borrowed, partials
            return
        if self.borrowed and borrowed:
            self.array, self.borrowed = self.array.copy(), False
        elif self.borrowed:
            self.array, array, self.borrowed = array, self.array, False
        accumulate(self.array, array)
        self.partials = None


def accumulate(total: Array, term: Array) -> None:
    """total += term, in place, on either backend."""
    if device_of(total) == "cpu":
        total += term.astype(total.dtype, copy=False)
    else:
        from cudiff.cuda.accumulate import add_into

        add_into(total, term)


class _EmptyQueue:
    """On the CPU nothing is deferred."""

    def before_read(self, array: Any) -> None: ...
    def before_write(self, array: Any) -> None: ...
    def is_read(self, array: Any) -> bool:
        return False


def _deferred(device: str) -> contextlib.AbstractContextManager:
    """On CUDA some launches are deferred; the queue that this gives runs those that cannot be any longer."""
    if device == "cpu":
        return contextlib.nullcontext(_EmptyQueue())
    from cudiff.cuda.deferred import deferred

    return deferred()


def _run_backward(node: Node, slots: list[_Gradient], targets: list[Tensor | _Gradient | None], queue: Any) -> None:
    fresh = node.function.fresh
    douts = [slot.array if fresh else slot.own() for slot in slots]
    device = next(device_of(dout) for dout in douts if dout is not None)
    for dout in douts:
        queue.before_read(dout) if fresh else queue.before_write(dout)
    into = _places(node, targets, device, queue)
    backward = node.function.backward_cuda if device == "cuda" else node.function.backward_numpy
    results = backward(node.ctx, *douts, needs=node.needs, into=list(into))
    results = fitting_gradients(node, results, next(type(dout) for dout in douts if dout is not None), device)
    places = [
        place.array if isinstance(place, Vacant) else place.sum if isinstance(place, Kept) else place for place in into
    ]
    shared = {id(slot.array) for slot in slots if slot.borrowed} | {id(array) for array in node.ctx.saved}
    passed_on = {id(result) for result in results if any(result is dout for dout in douts)}
    owners = [None if x is None or like is None else _owner(x) for x, like in zip(results, node.likes, strict=True)]
    # First what lies in its place: of a tensor that is an input twice, the other result is added to that.
    for i in sorted(range(len(targets)), key=lambda i: results[i] is not places[i]):
        result, target = results[i], targets[i]
        if result is None or target is None:
            continue
        partials = node.ctx.din_partials.get(i)
        if result is places[i]:
            if isinstance(target, _Gradient):
                target.array, target.more, target.partials = result, None, partials
            else:
                target.grad = result
            continue
        result = np.asarray(result) if isinstance(result, np.generic) else result  # an in-place sum needs an array
        borrowed = (
            not fresh or result.base is not None or id(result) in shared or owners.count(owners[i]) > 1
        )
        before = target._grad if isinstance(target, Tensor) else target.array
        if isinstance(target, _Gradient):
            target.settle(queue)
            own = target.into()
            if device == "cuda" and own is not None and id(result) in passed_on and result.dtype == own.dtype:
                target.more, target.partials = result, None  # a norm's backward may add it with its own term
                continue
        if before is not None or (borrowed and isinstance(target, Tensor)):
            turned = isinstance(target, _Gradient) and target.borrowed  # then what was there is added to the result
            total, term = (result, before) if turned else (before, result)
            queue.before_read(term)
            queue.before_write(total)
        if isinstance(target, Tensor):
            _add_to_leaf(target, result, borrowed)
        else:
            target.add(result, borrowed, partials)


def _owner(array: Array) -> int:
    """Which memory an array lies in: two of one owner may overlap."""
    return id(array if array.base is None else array.base)


def _places(node: Node, targets: list[Tensor | _Gradient | None], device: str,
            queue: Any) -> list[Array | Vacant | Kept | None]:
    """What a backward gets as `into`: where the gradient of each input may go, with what it has so far."""
    into: list[Array | Vacant | Kept | None] = []
    for i, target in enumerate(targets):
        if not isinstance(target, _Gradient):
            into.append(_into_leaf(target, device, any(target is other for other in targets[:i])))
            queue.before_write(into[-1])
            continue
        elsewhere = i in node.function.adds_elsewhere
        if not elsewhere or sum(target is other for other in targets) > 1:
            target.settle(queue)
        place = target.into()
        if any(isinstance(other, Kept) and other.array is place for other in into):
            place = None  # the sum will lie elsewhere: the tape adds this term to it
        keeps = elsewhere and place is not None and (target.more is not None or queue.is_read(place))
        queue.before_read(place) if keeps else queue.before_write(place)  # it may be added to
        into.append(Kept(place, target.more) if keeps else place)
    return into


def _into_leaf(leaf: Tensor | None, device: str, again: bool) -> Array | Vacant | None:
    """What a backward gets as `into` for a leaf, which may be among its inputs `again`."""
    if leaf is None:
        return None
    if leaf._vacant:
        return None if again or device == "cpu" else Vacant(leaf._grad)
    return leaf.grad


def _add_to_leaf(leaf: Tensor, grad: Array, borrowed: bool) -> None:
    if leaf._grad is None and is_low(grad.dtype) and not is_low(leaf.dtype):  # of a parameter that was read in 16 bits
        leaf.grad = array_module(leaf.device).zeros(leaf.shape, leaf.dtype)
        accumulate(leaf.grad, grad)
    elif leaf._grad is None:
        leaf.grad = grad.copy() if borrowed else grad
    elif leaf._vacant:
        leaf._grad[...] = grad
        leaf._vacant = False
    else:
        accumulate(leaf.grad, grad)
