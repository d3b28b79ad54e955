"""The names of operations that Tensor and NumPy share: operators, methods, and NumPy's own functions on tensors.

`np.exp(x)` of a tensor is `cudiff.exp(x)` by NumPy's protocols for other array types (NEP 13 and NEP 18). An operation
that has the name of a NumPy function is that function; it takes NumPy's arguments by NumPy's names.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from cudiff.tensor import Tensor, grad_enabled

OPERATORS = {
    "add": "add", "sub": "subtract", "mul": "multiply", "truediv": "divide", "pow": "power", "matmul": "matmul",
    "floordiv": "floor_divide", "mod": "remainder",
}
"""Operators of two operands; either may be the tensor."""

BITWISE = {
    "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor", "lshift": "left_shift", "rshift": "right_shift",
}
"""The same, of integers and, but for shifts, bools."""

COMPARISONS = {"lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal"}
"""If the tensor is the second operand, Python itself swaps the two, for == and != too."""

UNARY = {"neg": "negative", "abs": "abs", "invert": "invert", "round": "round"}

CHANGING = {"iadd": "add", "isub": "subtract", "imul": "multiply", "itruediv": "divide", "ifloordiv": "floor_divide",
            "imod": "remainder", "ipow": "power", "imatmul": "matmul"}
"""Operators that change a Parameter, or a leaf that requires a gradient, in place. Else they give a new tensor."""

METHODS = (
    "all", "any", "argmax", "argmin", "argsort", "astype", "clip", "cumsum", "diagonal", "dot", "exp", "flatten", "log",
    "max", "mean", "min", "nonzero", "prod", "ravel", "relu", "repeat", "round", "searchsorted", "sigmoid", "silu",
    "sqrt", "square", "squeeze", "std", "sum", "swapaxes", "take", "tanh", "trace", "var",
)
"""Operations that are methods under their own names: those of NumPy's arrays, and those that networks use."""

ABOUT = (np.result_type, np.may_share_memory, np.size)
"""NumPy's functions that have no gradient and return no array; they get the tensors' values."""

IN_PLACE = (np.copyto, np.fill_diagonal, np.place, np.put, np.put_along_axis, np.putmask)
"""NumPy's functions that write to an argument, which a tensor refuses."""

PYTORCH = {
    "bmm": "x @ y", "clone": "x: no operation changes it", "contiguous": "x: every tensor is",
    "copy": "x: no operation changes it", "cpu": "x.to('cpu')", "cuda": "x.to('cuda')", "dim": "x.ndim",
    "double": "x.astype('float64')", "expand": "np.broadcast_to(x, shape)", "fill": "np.full_like(x, value)",
    "float": "x.astype('float32')", "half": "x.astype('float16')", "long": "x.astype('int64')",
    "masked_fill": "np.where(mask, value, x)", "mm": "x @ y", "norm": "np.sqrt(np.sum(x * x))", "numel": "x.size",
    "permute": "x.transpose(axes)", "sort": "np.sort(x)", "t": "x.T",
    "topk": "x[np.argsort(-x)[:k]]", "type": "x.astype(dtype)",
    "unsqueeze": "np.expand_dims(x, axis)", "view": "x.reshape(shape)",
}
"""What to write instead of methods of PyTorch's tensors, and of NumPy's arrays, that a tensor does not have."""

ATTRIBUTES = {np.shape: "shape", np.ndim: "ndim", np.size: "size"}
"""NumPy's functions that are attributes of a tensor, which need none of its values."""


def add_to(tensor: type[Tensor], operations: Mapping[str, Any]) -> None:
    """Give `tensor` its operators, methods and NumPy's functions, from `operations` by name."""
    given: dict[str, Any] = {name: operations[name] for name in METHODS}
    for name, operation in (OPERATORS | BITWISE).items():
        given |= {f"__{name}__": operations[operation], f"__r{name}__": _reflected(operations[operation])}
    given |= {f"__{name}__": operations[operation] for name, operation in (COMPARISONS | UNARY).items()}
    for name, operation in CHANGING.items():
        given[f"__{name}__"] = _changing(operations[operation], operations["astype"])
    given |= {"__divmod__": _divmod, "__rdivmod__": _rdivmod}
    given |= {"__eq__": _equality(operations["equal"]), "__ne__": _equality(operations["not_equal"])}
    given |= {"__getitem__": operations["getitem"], "reshape": reshape, "transpose": transpose}
    given |= {name: _Missing(name) for name in PYTORCH} | {"__setitem__": _refuse_assignment}
    given |= {"__dir__": _names}
    given |= {"at": property(operations["at"], doc=operations["at"].__doc__)}
    given |= {"T": property(operations["transpose"], doc="The axes in reversed order, copied.")}
    given |= {"__array_ufunc__": _array_ufunc, "__array_function__": _array_function}
    for name, method in given.items():
        setattr(tensor, name, method)
    for name, operation in operations.items():
        function = getattr(np, name, None)
        if callable(function) and not isinstance(function, type):
            NUMPY[function] = operation


NUMPY: dict[Callable, Callable] = {}
"""NumPy's functions, and the operations that they are on tensors."""


def _reflected(operation: Callable[[Any, Any], Tensor]) -> Callable[[Tensor, Any], Tensor]:
    def method(x: Tensor, other: Any) -> Tensor:
        return operation(other, x)

    method.__doc__ = f"{operation.__name__} of the other operand and x."
    return method


def _divmod(x: Tensor, other: Any) -> tuple[Tensor, Tensor]:
    """x // other and x % other."""
    return x // other, x % other


def _rdivmod(x: Tensor, other: Any) -> tuple[Tensor, Tensor]:
    """other // x and other % x."""
    return other // x, other % x


def _changing(operation: Callable[[Any, Any], Tensor],
              astype: Callable[[Any, Any], Tensor]) -> Callable[[Tensor, Any], Tensor]:
    def method(x: Tensor, other: Any) -> Tensor:
        if not (x.requires_grad and x.is_leaf):
            return operation(x, other)
        if grad_enabled():
            raise RuntimeError("a leaf that requires a gradient changes in place only within cudiff.no_grad(): write "
                               "x = x + y for a new tensor")
        x.change(astype(operation(x, other), x.dtype))
        return x

    method.__doc__ = f"{operation.__name__} of x and the other operand, as a new tensor; see `CHANGING`."
    return method


def _equality(operation: Callable[[Any, Any], Tensor]) -> Callable[[Tensor, Any], Tensor]:
    def method(x: Tensor, other: Any) -> Tensor:
        if isinstance(other, int | float | list | tuple) or hasattr(other, "dtype"):
            return operation(x, other)
        return Tensor(np.full(x.shape, operation.__name__ == "not_equal"), device=x.device)

    method.__doc__ = f"{operation.__name__} of x and the other operand; None, text and the like equal no element."
    return method


class _Missing:
    """An attribute that a tensor does not have. With a `__getattr__` for them a Tensor's own would take longer."""

    def __init__(self, name: str) -> None:
        self.name, self.__doc__ = name, f"A Tensor has none: write {PYTORCH[name]}."

    def __get__(self, x: Tensor | None, owner: type[Tensor]) -> Any:
        raise AttributeError(f"a Tensor has no '{self.name}': write {PYTORCH[self.name]}", name=self.name, obj=x)


def _names(x: Tensor) -> list[str]:
    """A tensor's attributes, without those that it lacks."""
    return [name for name in object.__dir__(x) if name not in PYTORCH or hasattr(x, name)]  # a subclass may have some


def _refuse_assignment(x: Tensor, index: Any, value: Any) -> None:
    """A tensor's elements are not assigned: raises TypeError."""
    raise TypeError("a tensor is not changed in place: write x = x.at[i].set(v), or .add(v) for x[i] += v")


def reshape(x: Tensor, *shape: Any) -> Tensor:
    """The same elements in another shape, `x.reshape(2, 3)` or `x.reshape((2, 3))`, sharing memory; one may be -1."""
    return NUMPY[np.reshape](x, _one_sequence(shape))


def transpose(x: Tensor, *axes: Any) -> Tensor:
    """Axes in another order, `x.transpose(1, 0)` or `x.transpose((1, 0))`, copied; reversed where none are given."""
    return NUMPY[np.transpose](x, _one_sequence(axes) if axes and axes != (None,) else None)


def _one_sequence(given: tuple) -> Any:
    return given[0] if len(given) == 1 and isinstance(given[0], tuple | list) else given


def _array_ufunc(x: Tensor, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
    """`ufunc(*inputs)`, called by NumPy if a tensor is among them."""
    if "out" in kwargs:
        raise TypeError(f"np.{ufunc.__name__} of a tensor is a new tensor and takes no out: write a = a + x for a += x")
    if method == "__call__":
        return _numpy(ufunc, inputs, kwargs)
    raise TypeError(f"np.{ufunc.__name__}.{method} does not take tensors: use cudiff's operations, or x.numpy()")


def _array_function(x: Tensor, function: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    """NumPy's `function(*args)`, called by NumPy if a tensor is among them."""
    return _numpy(function, args, kwargs)


def _numpy(function: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The operation of NumPy's name; if there is none, NumPy's result for the tensors' arrays.

    Raises TypeError for a function that would lose a gradient, and for arguments that the operation does not have.
    """
    if function in ATTRIBUTES and len(args) == 1 and not kwargs:
        return getattr(args[0], ATTRIBUTES[function])
    if function in IN_PLACE:
        raise TypeError(f"np.{function.__name__} changes an array in place: write x = x.at[i].set(v), or use x.numpy()")
    operation = NUMPY.get(function)
    if operation is None:
        tensors: list[Tensor] = []
        args, kwargs = _as_arrays(args, tensors), _as_arrays(kwargs, tensors)
        if function not in ABOUT and any(t.requires_grad for t in tensors):
            raise TypeError(f"{_name(function)} has no gradient in cudiff: give it x.numpy()")
        return function(*args, **kwargs)
    try:
        _signature(operation).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"np.{function.__name__} of a tensor is cudiff.{operation.__name__}: {error}") from None
    return operation(*args, **kwargs)


def _name(function: Callable) -> str:
    """np.exp, np.linalg.norm."""
    parts = [part for part in function.__module__.split(".")[1:] if not part.startswith("_")]
    return ".".join(["np", *parts, function.__name__])


_signature = functools.cache(inspect.signature)


def _as_arrays(value: Any, tensors: list[Tensor]) -> Any:
    """`value` with NumPy's arrays in place of its tensors, which are added to `tensors`."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return value.numpy()
    if isinstance(value, dict):
        return {key: _as_arrays(item, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_as_arrays(item, tensors) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value
