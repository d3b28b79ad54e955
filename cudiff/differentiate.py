"""Gradients of functions of arrays: `grad(f)(x)` is df/dx at x.

The functions are written with NumPy's names or cudiff's: `np.exp(x)`, `x @ w`. They get tensors in place of arrays.
A gradient comes back as its argument was given: for a NumPy array a NumPy array, for a number a number, for a tensor
a tensor, for lists, tuples and dicts of them the same of gradients. Numbers are computed in float64, arrays in their
own dtype.

A type checker keeps a function's parameters: annotate them by what is given, or by Any.

A gradient may be differentiated again, `grad(grad(f))`, where cudiff/derivatives.py states the derivative of every
operation on the way.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, Concatenate, ParamSpec, TypeVar, TypeVarTuple, overload

import numpy as np

from cudiff.autograd import walk_back
from cudiff.backend import array_module, float64, is_array, is_float
from cudiff.derivatives import DERIVATIVES, like
from cudiff.function import nodes_below
from cudiff.ops import reshape
from cudiff.ops import sum as total
from cudiff.tensor import Tensor, differentiated, grad_enabled, gradient_depth, now

Argnums = int | np.integer | tuple[int, ...]
P = ParamSpec("P")
R = TypeVar("R")
X = TypeVar("X")
Xs = TypeVarTuple("Xs")


@overload
def grad(function: Callable[Concatenate[X, P], Any]) -> Callable[Concatenate[X, P], X]: ...
@overload
def grad(function: Callable[P, Any], argnums: Argnums, *, create_graph: bool = False) -> Callable[P, Any]: ...
@overload
def grad(function: Callable[P, Any], *, create_graph: bool) -> Callable[P, Any]: ...
def grad(function: Callable[..., Any], argnums: Argnums = 0, *, create_graph: bool = False) -> Callable[..., Any]:
    """The function that returns the gradient of `function`, which returns one number.

    argnums: which arguments, by position; of several a tuple of gradients. create_graph: return tensors that were
    recorded, so that a loss made of them has a gradient, as in PyTorch. Inside of a function that is differentiated
    gradients are recorded always. A Module reads parameters of its own, whatever the function is given: their gradients
    come by `loss.backward()`. Raises TypeError where the function returns several numbers or reads such parameters and
    no argument, and where an argument holds integers, RuntimeError where an operation states no derivative that can be
    recorded.
    """
    both = value_and_grad(function, argnums, create_graph=create_graph)

    @functools.wraps(function)
    def gradient(*args: Any, **kwargs: Any) -> Any:
        return both(*args, **kwargs)[1]

    return gradient


@overload
def elementwise_grad(function: np.ufunc) -> Callable[..., Any]: ...
@overload
def elementwise_grad(function: Callable[Concatenate[X, P], Any]) -> Callable[Concatenate[X, P], X]: ...
@overload
def elementwise_grad(function: Callable[P, Any], argnums: Argnums) -> Callable[P, Any]: ...
def elementwise_grad(function: Callable[..., Any], argnums: Argnums = 0) -> Callable[..., Any]:
    """`grad` of the sum of what the function returns: of one that acts element by element, each one's derivative."""
    return grad(functools.wraps(function)(lambda *args, **kwargs: total(function(*args, **kwargs))), argnums)


@overload
def value_and_grad(function: Callable[Concatenate[X, P], R]) -> Callable[Concatenate[X, P], tuple[R, X]]: ...
@overload
def value_and_grad(function: Callable[P, R], argnums: Argnums, *,
                   create_graph: bool = False) -> Callable[P, tuple[R, Any]]: ...
@overload
def value_and_grad(function: Callable[P, R], *, create_graph: bool) -> Callable[P, tuple[R, Any]]: ...
def value_and_grad(function: Callable[..., Any], argnums: Argnums = 0, *,
                   create_graph: bool = False) -> Callable[..., tuple[Any, Any]]:
    """As `grad`, with what `function` returns before the gradient."""
    @functools.wraps(function)
    def both(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        numbers = (int(argnums),) if isinstance(argnums, int | np.integer) else tuple(argnums)
        value, pull_back = _call(function, numbers, args, kwargs, create_graph)
        if (shape := getattr(value, "shape", ())) and math.prod(shape) != 1:
            raise TypeError(f"grad needs a function that returns one number, not an array of shape {shape}")
        gradients = pull_back(None)
        return value, gradients[0] if isinstance(argnums, int | np.integer) else gradients

    return both


def vjp(function: Callable[[*Xs], R], *args: *Xs) -> tuple[R, Callable[[Any], tuple[*Xs]]]:
    """`function(*args)`, an array, and the function from a gradient of that to the tuple of the arguments' gradients.

    The second may be called once, with an array of the first's shape. Raises TypeError where an argument holds
    integers.
    """
    return _call(function, tuple(range(len(args))), args, {}, False)


def check_gradient(function: Callable[..., Any], *args: Any, step: float = 1e-6, tolerance: float = 1e-5) -> None:
    """Hold the gradients of a sum of what `function` returns to central differences, in float64.

    Each element has a weight of its own, a fixed number from 1 to 2: a plain sum hides a backward that forgets its
    dout. step: of a difference, relative to elements larger than 1. tolerance: of each element, relative to elements
    larger than 1. Raises AssertionError that names the element that is furthest away.
    """
    given = [_map(lambda x: np.array(x.numpy() if isinstance(x, Tensor) else x, float64), arg) for arg in args]

    def value(*args: Any) -> float:
        out = np.asarray(_plain(function(*[_map(Tensor, arg) for arg in args])), float64)
        return float(np.sum(out * weights(out)))

    def weights(out: Any) -> np.ndarray:
        return np.random.default_rng(0).uniform(1, 2, np.shape(out))

    def weighted(*args: Any) -> Tensor:
        out = function(*args)
        return total(out * weights(out))

    gradients = grad(weighted, tuple(range(len(args))))(*given)
    for n, (arg, gradient) in enumerate(zip(given, gradients, strict=True)):
        for x, found in zip(_leaves(arg), map(np.asarray, _leaves(gradient)), strict=True):
            expected = np.empty(x.shape)
            for at in np.ndindex(x.shape):
                here, width = x[at], step * max(1.0, abs(x[at]))
                x[at] = here + width
                above = value(*given)
                x[at] = here - width
                expected[at] = (above - value(*given)) / (2 * width)
                x[at] = here
            error = np.abs(found - expected) / np.maximum(1, np.abs(expected))
            if not (error <= tolerance).all():
                at = np.unravel_index(np.argmax(np.where(np.isnan(error), np.inf, error)), x.shape)
                place = f"argument {n} at {[int(i) for i in at]}"
                raise AssertionError(f"the gradient of {place} is {found[at]:.9g}, by differences {expected[at]:.9g}")


def _call(function: Callable[..., Any], argnums: tuple[int, ...], args: tuple, kwargs: dict[str, Any],
          create_graph: bool) -> tuple[Any, Callable[[Any], tuple[Any, ...]]]:
    """`vjp` of the arguments `argnums`. Tensors come back where their gradients are recorded or one was given."""
    if any(not -len(args) <= n < len(args) for n in argnums):
        raise TypeError(f"argnums is {argnums}, and the function got {len(args)} arguments by position")
    recorded = grad_enabled() and (create_graph or gradient_depth() > 0)
    given = [args[n] for n in argnums]
    arguments = list(args)
    for n in argnums:
        arguments[n] = _map(functools.partial(_variable, n, recorded), args[n])
    variables = [variable for n in argnums for variable in _leaves(arguments[n])]
    since = now()
    with differentiated(2 if recorded and gradient_depth() == 0 else 1):
        out = function(*arguments, **kwargs)
    if not (isinstance(out, Tensor | int | float) or is_array(out)):
        raise TypeError(f"a function that is differentiated returns an array, not {type(out).__name__}")
    out = out if isinstance(out, Tensor) else Tensor(out)

    def pull_back(dout: Any) -> tuple[Any, ...]:
        """None stands for ones."""
        if dout is None:
            dout = Tensor(array_module(out.device).ones_like(out.data))
        elif not isinstance(dout, Tensor):
            dout = Tensor(dout, dtype=out.dtype, device=out.device)
        if dout.shape != out.shape:
            raise ValueError(f"the gradient has shape {dout.shape}, the value {out.shape}")
        of = _recorded_gradients if recorded else _gradients
        found = iter(of(out, dout, variables, since))
        if all(x.grad is None for x in variables) and not recorded:
            _require_arguments(out, given, since)
        return tuple(_map(lambda x: _as_given(next(found), x, recorded), x) for x in given)

    plain = not recorded and not any(isinstance(x, Tensor) for x in _leaves(given))
    return _plain(out) if plain else out, pull_back


def _variable(argument: int, recorded: bool, x: Any) -> Tensor:
    """A tensor for a number, an array or a tensor, whose gradient is its own: no other place reads or adds to it."""
    if recorded and isinstance(x, Tensor) and x.requires_grad:
        return reshape(x, x.shape)
    tensor = Tensor(float64.type(x) if isinstance(x, float) else x.data if isinstance(x, Tensor) else x)
    if not is_float(tensor.dtype):
        raise TypeError(f"argument {argument} holds {tensor.dtype}, which has no gradient: give floating numbers")
    tensor.requires_grad = True
    return tensor


def _gradients(out: Tensor, dout: Tensor, variables: list[Tensor], since: int) -> list[Tensor]:
    """The gradient of each variable, for that of `out`; other leaves get none."""
    own = {id(x) for x in variables}
    if out._source is not None and out._source[0].index > since:
        walk_back(out, dout.data, lambda leaf: id(leaf) in own, since)
    elif id(out) in own:
        out.grad = dout.data.copy()
    return [_zeros(x) if x.grad is None else Tensor(x.grad) for x in variables]


def _require_arguments(out: Tensor, given: list[Any], since: int) -> None:
    """Raise TypeError where `out`, which depends on no argument, does depend on the tensors that were given as such."""
    nodes = nodes_below(out._source[0], since) if out._source is not None and out._source[0].index > since else []
    leaves = {id(x) for node in nodes for x in node.inputs}
    if any(id(x) in leaves for x in _leaves(given)):
        raise TypeError("the function reads the tensors that it was given, as a Module its parameters, and not its "
                        "arguments: their gradients come by loss.backward()")


def _recorded_gradients(out: Tensor, dout: Tensor, variables: list[Tensor], since: int) -> list[Tensor]:
    """The same, made of operations."""
    totals: dict[Any, Tensor] = {_place(out): dout}
    nodes = nodes_below(out._source[0], since) if out._source is not None and out._source[0].index > since else []
    on_the_way = set(map(_place, variables))
    for node in reversed(nodes):  # oldest first
        if any(_place(x) in on_the_way for x in node.call[0] if x is not None):
            on_the_way |= {(node.index, i) for i in range(node.num_outputs)}
    for node in nodes:
        douts = [totals.get((node.index, i)) for i in range(node.num_outputs)]
        inputs, attrs = node.call
        if all(x is None for x in douts) or not any(_place(x) in on_the_way for x in inputs if x is not None):
            continue
        if node.function not in DERIVATIVES:
            name = node.function.__name__
            raise RuntimeError(f"{name} has no gradient of its gradient: cudiff/derivatives.py does not state it")
        terms = DERIVATIVES[node.function](*douts, *inputs, **attrs)
        for x, term in zip(inputs, terms, strict=True):
            if x is not None and term is not None and _place(x) in on_the_way:
                before = totals.get(_place(x))
                totals[_place(x)] = like(term, x) if before is None else before + like(term, x)
    return [totals.get(_place(x), _zeros(x)) for x in variables]


def _place(x: Tensor) -> Any:
    """What made a tensor, as the tape knows it: an output of a node, or a leaf."""
    return id(x) if x._source is None else (x._source[0].index, x._source[1])


def _zeros(x: Tensor) -> Tensor:
    return Tensor(array_module(x.device).zeros_like(x.data))


def _as_given(gradient: Tensor, x: Any, recorded: bool) -> Any:
    return gradient if recorded or isinstance(x, Tensor) else _plain(gradient)


def _plain(x: Any) -> Any:
    """A tensor's array; a Python number where it has one element and no axes."""
    if not isinstance(x, Tensor):
        return x
    return x.item() if x.shape == () else x.data


def _map(function: Callable[[Any], Any], tree: Any) -> Any:
    """`function` of each array of a list, tuple or dict of such, in order, as such a list, tuple or dict."""
    if isinstance(tree, dict):
        return {key: _map(function, x) for key, x in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_map(function, x) for x in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(_map(function, x) for x in tree)
    return function(tree)


def _leaves(tree: Any) -> Iterator[Any]:
    """The arrays of a list, tuple or dict of such, in order."""
    if isinstance(tree, dict | list | tuple):
        for x in tree.values() if isinstance(tree, dict) else tree:
            yield from _leaves(x)
    else:
        yield tree
