"""Tensors. Operations are in `function.py`; `autograd.py` has the backward pass."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from cudiff import show
from cudiff.as_array import as_array
from cudiff.backend import (
    Array,
    array_module,
    copy_into,
    device_of,
    float32,
    is_array,
    is_capturing,
    is_float,
    is_low,
    to_device,
)
from cudiff.mode import mode
from cudiff.statistics import ChannelStatistics
from cudiff.values import flag

_node_index = itertools.count()


def grad_enabled() -> bool:
    """Whether operations are being recorded on the tape in this thread."""
    return mode.grad


def now() -> int:
    """A number above those of all operations recorded so far, and below those of later ones."""
    return next(_node_index)


@contextlib.contextmanager
def no_grad() -> Iterator[None]:
    """Record nothing on the tape inside the block; also usable as a decorator, but not of a generator, whose body runs
    later."""
    before, mode.grad = mode.grad, False
    try:
        yield
    finally:
        mode.grad = before


def gradient_depth() -> int:
    """How many times what this thread runs now will be differentiated (see cudiff.differentiate)."""
    return mode.depth


@contextlib.contextmanager
def differentiated(times: int) -> Iterator[None]:
    """Inside the block, operations are recorded, and `gradient_depth` is greater by `times`."""
    before = mode.grad, mode.depth
    mode.grad, mode.depth = True, before[1] + times
    try:
        yield
    finally:
        mode.grad, mode.depth = before


class Tensor:
    """An array with a gradient.

    Parameters
    ----------
    data : array, Tensor or nested sequence of numbers
        NumPy's, CuPy's, or a tensor of PyTorch's, which is detached; made C-contiguous. Python floats become float32.
        Bools, integers and floats of up to 64 bits, bfloat16 included. TypeError for anything else and for masked
        arrays, ValueError for rows of different lengths.
    requires_grad : bool
        Whether `backward` fills `.grad`; TypeError for integers and bools.
    dtype : dtype, optional
    device : {"cpu", "cuda"}, optional
        By default where `data` lies.

    Attributes
    ----------
    data : the array; it may be set to whatever a tensor is made of. grad : array of the same backend and shape, or
        None: data of another shape or device drop it.
    statistics : channel statistics for a norm that follows, `Kind.MOMENTS` or `Kind.CENTRED`, or None. Setting `data`
        drops them, `x.data *= 2` too.
    """

    __slots__ = ("__weakref__", "_data", "_grad", "_grad_empty", "_parameter", "_source", "requires_grad", "statistics")

    _updated = -1  # when a Parameter was, see `now`

    def __init__(self, data: Any, requires_grad: bool = False, dtype: Any = None, device: str | None = None):
        if isinstance(data, Tensor):
            data = data.data
        data = as_array(data, dtype)
        if device is not None:
            data = to_device(data, device)
        if requires_grad and flag("requires_grad", requires_grad) and not is_float(data.dtype):
            raise TypeError(f"only floating tensors can require a gradient, not {data.dtype}")
        self._data: Array = data if data.flags.c_contiguous else array_module(device_of(data)).ascontiguousarray(data)
        self.requires_grad: bool = requires_grad
        self._grad: Array | None = None
        self._grad_empty: bool = False  # whether `_grad` stands for zeros, whatever it holds
        self.statistics: ChannelStatistics | None = None
        self._source: tuple[Any, int] | None = None  # the Node that made it, and which of its outputs
        self._parameter: Tensor | None = None  # whose memory it shares

    @staticmethod
    def _of(array: Array) -> Tensor:
        """A tensor of an array that one may hold as it is, with nothing looked at: for what an operation made."""
        out = Tensor.__new__(Tensor)
        out._data, out.requires_grad, out._grad_empty = array, False, False
        out._grad = out.statistics = out._source = out._parameter = None
        return out

    @property
    def data(self) -> Array:
        return self._data

    @data.setter
    def data(self, array: Any) -> None:
        if array is not self._data:
            array = Tensor(array)._data  # contiguous: kernels read whole arrays
            self._parameter = None
            if self._grad is not None and (array.shape, type(array)) != (self._grad.shape, type(self._grad)):
                self._grad, self._grad_empty = None, False
        self._data, self.statistics = array, None

    @property
    def grad(self) -> Array | None:
        """The gradient so far. `zero_grad` writes no zeros until this is read: read it again before you write to it."""
        if self._grad_empty and self._grad is not None:
            self._grad.fill(0)
        self._grad_empty = False
        return self._grad

    @grad.setter
    def grad(self, array: Array | None) -> None:
        kind = self.dtype, self.shape, self.device
        if array is not None and not is_array(array):
            raise TypeError(f"the gradient of a tensor is an array, not a {type(array).__name__}: give its .data")
        wide = array is not None and array.dtype == float32 and is_low(self.dtype)  # as backward may leave it
        if array is not None and (self.dtype if wide else array.dtype, array.shape, device_of(array)) != kind:
            given = f"{array.dtype} {array.shape} on {device_of(array)}"
            raise ValueError("the gradient of this tensor is an array of {} {} on {}, not ".format(*kind) + given)
        if array is not None and kind[2] == "cuda" and not array.flags.c_contiguous:  # kernels write whole arrays
            raise ValueError("the gradient of a tensor on CUDA is a C-contiguous array: give a copy of this view")
        self._grad, self._grad_empty = array, False

    def zero_grad(self) -> None:
        """Set a `grad` to zeros, which are written only if it is read: else the next backward overwrites the array."""
        self._grad_empty = self._grad is not None

    @property
    def shape(self) -> tuple[int, ...]:
        return self._data.shape

    @property
    def ndim(self) -> int:
        return self._data.ndim

    @property
    def size(self) -> int:
        return self._data.size

    @property
    def dtype(self) -> np.dtype:
        return self._data.dtype

    @property
    def device(self) -> str:
        return device_of(self._data)

    @property
    def is_leaf(self) -> bool:
        """Whether no recorded operation made this tensor; `backward` fills `.grad` of leaves."""
        return self._source is None

    def operand(self, dtype: np.dtype) -> Array:
        """The array that an operation which computes in `dtype` reads. For a Parameter it may be the 16-bit copy."""
        return self.data

    def numpy(self) -> np.ndarray:
        """The values as a NumPy array; shares memory on the CPU, copies (and waits for the GPU) otherwise."""
        return to_device(self.data, "cpu")

    def item(self) -> float | int:
        """The only element as a Python number. Raises ValueError where there are several, or none."""
        if self.size != 1:
            raise ValueError(f"a tensor of shape {self.shape} is not one number: choose an element, or call .numpy()")
        return self.numpy().item()

    def tolist(self) -> Any:
        """The values as nested lists of Python numbers."""
        return self.numpy().tolist()

    def to(self, device: str) -> Tensor:
        """The tensor itself if it is on `device`, else a leaf with the same values there."""
        return self if self.device == device else Tensor(to_device(self.data, device), self.requires_grad)

    def change(self, values: Tensor) -> None:
        """Take over values of this shape and dtype. Recorded operations keep the old ones, except within `capture`,
        where these are overwritten. Raises ValueError for another shape or dtype; RuntimeError where a gradient would
        be lost, for what an operation recorded, and inside of what is differentiated twice, where operations keep
        tensors."""
        if gradient_depth() > 1:
            raise RuntimeError("a tensor does not change in place inside of a function that is differentiated twice")
        for what, own, given in (("shape", self.shape, values.shape), ("dtype", self.dtype, values.dtype)):
            if own != given:
                raise ValueError(f"a tensor of {what} {own} does not change to {given} in place")
        if not self.is_leaf:
            raise RuntimeError("what an operation recorded does not change in place: its gradient would be the old "
                               "values'. Give the new ones a name of their own, or change x.detach()")
        if grad_enabled() and (self.requires_grad or values.requires_grad):
            raise RuntimeError("a tensor changes in place without a gradient: call x.change within cudiff.no_grad()")
        if is_capturing(self.device):
            copy_into(self.data, values.data)
            self.statistics = None
        else:
            self.data = values.data

    @property
    def parameter(self) -> Tensor | None:
        """The Parameter whose memory this is: itself, or for a view of one that; else None."""
        return self._parameter if type(self) is Tensor else self

    def require_unchanged(self, recorded: int) -> None:
        """Raise RuntimeError where a Parameter was updated after the node `recorded` had read it."""

    def detach(self) -> Tensor:
        """A tensor of the same array that does not require a gradient."""
        out = Tensor(self.data)
        out.statistics, out._parameter = self.statistics, self.parameter
        return out

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, a pickled one too, has the values but not `.grad`. Raises TypeError if this is not a leaf."""
        if not self.is_leaf:
            raise TypeError("a tensor that an operation recorded has no copy: use x.detach()")
        return Tensor, (self.data, self.requires_grad)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        """The elements along the first axis."""
        if not self.shape:
            raise TypeError("a 0-d tensor has no elements to index or go through: .item() is its number")
        return (self[i] for i in range(len(self)))

    def __bool__(self) -> bool:
        if self.size != 1:
            raise ValueError(f"the truth of a tensor of shape {self.shape} is not one: use x.any() or x.all()")
        return bool(self.item())

    def __float__(self) -> float:
        if self.requires_grad and gradient_depth():
            raise TypeError("float(x), and math.sin(x), would lose the gradient of a function that is differentiated: "
                            "write np.sin(x), or x.item() for a constant")
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __index__(self) -> int:
        """The only element of an integer tensor, as in `range(n)` and slices. Raises TypeError for others."""
        if self.dtype.kind not in "iu" or self.shape:
            raise TypeError(f"an index is an integer tensor without axes, not {self.dtype} {self.shape}")
        return int(self.item())

    def __pos__(self) -> Tensor:
        return self

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if self.device != "cpu":
            raise TypeError("a CUDA tensor is not converted silently: call .numpy()")
        if self.requires_grad:
            raise TypeError("an array would lose this tensor's gradient: call .numpy(), and join lists by np.stack")
        return np.array(self.data, dtype=dtype, copy=copy)

    def __contains__(self, value: Any) -> bool:
        return bool((self == value).any())

    def __dlpack__(self, **kwargs: Any) -> Any:
        if self.requires_grad:
            raise BufferError("another library would lose this tensor's gradient: give it x.detach()")
        return self.data.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.data.__dlpack_device__()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self.device != "cuda":
            raise AttributeError("a CPU tensor has no __cuda_array_interface__")
        if self.requires_grad:
            raise RuntimeError("CuPy's functions lose the gradient: use cudiff's or NumPy's, np.exp(x), or x.detach()")
        return self.data.__cuda_array_interface__

    def __format__(self, spec: str) -> str:
        """`f"{loss:.3f}"` formats the only element; without a format this is `str`."""
        return format(self.item(), spec) if spec else str(self)

    def __repr__(self) -> str:
        kind = self._kind()
        return f"Tensor({show.values(self.data, prefix='Tensor(')}, {kind})"

    def _repr_html_(self) -> str:
        """The HTML that a notebook shows."""
        return show.array_html(f"Tensor, {self._kind()}", self.data)

    def _kind(self) -> str:
        extra = ", requires_grad=True" if self.requires_grad else ""
        return f"shape={self.shape}, dtype={self.dtype}, device={self.device}{extra}"


def from_dlpack(source: Any) -> Tensor:
    """A tensor that shares memory with any object that supports DLPack (NumPy, CuPy, PyTorch, JAX)."""
    device_type, _ = source.__dlpack_device__()
    return Tensor(array_module("cuda" if device_type == 2 else "cpu").from_dlpack(source))
