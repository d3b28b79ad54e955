"""Tensors and the tape: what an operation is and how it is recorded. `tape.py` walks back."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from cudiff.backend import DTYPES, Array, array_module, device_of, float32, is_array, is_float, to_device

_mode = threading.local()
_node_index = itertools.count()


def grad_enabled() -> bool:
    """Whether operations are being recorded on the tape in this thread."""
    return getattr(_mode, "grad", True)


def now() -> int:
    """A number above those of all operations recorded so far, and below those of later ones."""
    return next(_node_index)


@contextlib.contextmanager
def no_grad() -> Iterator[None]:
    """Record nothing on the tape inside the block; also usable as a decorator."""
    before = grad_enabled()
    _mode.grad = False
    try:
        yield
    finally:
        _mode.grad = before


class Tensor:
    """An array with a gradient.

    Parameters
    ----------
    data : array, Tensor or nested sequence of numbers
        NumPy or CuPy; made C-contiguous. Python floats become float32. Of bools, integers or floats of up to 64 bits,
        bfloat16 among them: TypeError for anything else, ValueError for rows of different lengths.
    requires_grad : bool
        Whether `backward` shall fill `.grad`. Only floating tensors can.
    dtype : dtype, optional
    device : {"cpu", "cuda"}, optional
        Where `data` lies is the default.

    Attributes
    ----------
    data : the array. grad : array of the same backend and shape, or None; reading it writes zeros that are still due.
    partials : float32 array (N, tiles, C, 2) or (N, tiles, C, 4), or None
        What the producer left of each image's tiles of pixels for a following norm: sums and sums of squares, or
        pixels, a centre, and the sums of differences from it and of their squares.
    """

    __slots__ = ("__weakref__", "_grad", "_source", "_vacant", "data", "partials", "requires_grad")
    __array_ufunc__ = None  # `ndarray + Tensor` is handed to Tensor.__radd__

    if TYPE_CHECKING:  # given by cudiff.ops
        __add__: Any
        __radd__: Any
        __sub__: Any
        __rsub__: Any
        __mul__: Any
        __rmul__: Any
        __truediv__: Any
        __rtruediv__: Any
        __pow__: Any
        __rpow__: Any
        __matmul__: Any
        __neg__: Any
        __abs__: Any
        __getitem__: Any

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, data: Any, requires_grad: bool = False, dtype: Any = None, device: str | None = None):
        if isinstance(data, Tensor):
            data = data.data
        if not is_array(data):
            data = _from_sequence(data, dtype)
        if data.dtype not in DTYPES:
            data = _in_native_order(data)
        if isinstance(data, np.generic):
            data = np.asarray(data)
        if dtype is not None and data.dtype != np.dtype(dtype):
            if np.dtype(dtype) not in DTYPES:
                raise TypeError(_holds(dtype))
            data = data.astype(dtype)
        if device is not None:
            data = to_device(data, device)
        if requires_grad and not is_float(data.dtype):
            raise TypeError(f"only floating tensors can require a gradient, not {data.dtype}")
        self.data: Array = data if data.flags.c_contiguous else array_module(device_of(data)).ascontiguousarray(data)
        self.requires_grad = requires_grad
        self._grad: Array | None = None
        self._vacant = False  # whether `_grad` stands for zeros, whatever it holds
        self.partials: Array | None = None
        self._source: tuple[Node, int] | None = None

    @property
    def grad(self) -> Array | None:
        if self._vacant and self._grad is not None:
            self._grad.fill(0)
        self._vacant = False
        return self._grad

    @grad.setter
    def grad(self, array: Array | None) -> None:
        self._grad, self._vacant = array, False

    def zero_grad(self) -> None:
        """Set a `grad` to zeros in its place; the next backward overwrites it, which saves writing and adding them."""
        self._vacant = self._grad is not None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    @property
    def ndim(self) -> int:
        return self.data.ndim

    @property
    def size(self) -> int:
        return self.data.size

    @property
    def dtype(self) -> np.dtype:
        return self.data.dtype

    @property
    def device(self) -> str:
        return device_of(self.data)

    @property
    def is_leaf(self) -> bool:
        """Whether no recorded operation made this tensor; `backward` fills `.grad` of leaves."""
        return self._source is None

    def operand(self, dtype: np.dtype) -> Array:
        """The array an operation computing in `dtype` reads; a Parameter may offer its low-precision copy."""
        return self.data

    def numpy(self) -> np.ndarray:
        """The values as a NumPy array; shares memory on the CPU, copies (and waits for the GPU) otherwise."""
        return to_device(self.data, "cpu")

    def item(self) -> float | int:
        """The only element as a Python number. Raises ValueError where there are several, or none."""
        if self.size != 1:
            raise ValueError(f"a tensor of shape {self.shape} is not one number: choose an element, or call .numpy()")
        return self.numpy().item()

    def to(self, device: str) -> Tensor:
        """The same values on `device`, cut from the tape; the tensor itself where it is there already."""
        return self if self.device == device else Tensor(to_device(self.data, device), self.requires_grad)

    def wants_gradient(self, recorded: int) -> bool:
        """Whether backward, at an operation that was `recorded` as number so and so, fills this leaf's `.grad`."""
        return self.requires_grad

    def detach(self) -> Tensor:
        """The same array, cut from the tape."""
        out = Tensor(self.data)
        out.partials = self.partials
        return out

    def backward(self, grad: Any = None) -> None:
        """Add d(self)/d(leaf) to `.grad` of every leaf that requires it.

        `grad` is d(loss)/d(self), of this tensor's shape; it may be left out for a single element.
        Raises RuntimeError where nothing was recorded or the tape was used already. After any other error no `.grad`
        has a meaning.
        """
        if not self.requires_grad:
            raise RuntimeError(
                "backward() needs a tensor that requires a gradient: nothing that it was made of does "
                "(cudiff.load(path, trainable=True) loads a net to be trained)"
            )
        if grad is None:
            if self.size != 1:
                raise RuntimeError(f"backward() of a tensor of shape {self.shape} needs the gradient to start from")
            grad = array_module(self.device).ones_like(self.data)
        else:
            grad = Tensor(grad, dtype=self.dtype, device=self.device).data
        if grad.shape != self.shape:
            raise ValueError(f"the gradient has shape {grad.shape}, the tensor {self.shape}")
        from cudiff.tape import walk_back

        walk_back(self, grad)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]

    def __bool__(self) -> bool:
        return bool(self.item())

    def __eq__(self, other: object) -> bool:
        if other is self or not (isinstance(other, int | float) or hasattr(other, "dtype")):
            return other is self
        raise TypeError("a tensor is not compared with ==: compare arrays, x.numpy() == y.numpy()")

    __hash__ = object.__hash__

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if self.device != "cpu":
            raise TypeError("a CUDA tensor is not converted silently: call .numpy()")
        return np.array(self.data, dtype=dtype, copy=copy)

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.data.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.data.__dlpack_device__()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self.device != "cuda":
            raise AttributeError("a CPU tensor has no __cuda_array_interface__")
        return self.data.__cuda_array_interface__

    def __repr__(self) -> str:
        body = np.array2string(self.numpy(), separator=", ", prefix="Tensor(", threshold=200, precision=4)
        extra = ", requires_grad=True" if self.requires_grad else ""
        return f"Tensor({body}, shape={self.shape}, dtype={self.dtype}, device={self.device}{extra})"


def _holds(dtype: Any) -> str:
    return f"a tensor holds real numbers (bool, integers, float16, bfloat16, float32, float64), not {dtype}"


def _from_sequence(data: Any, dtype: Any) -> np.ndarray:
    """What is no array yet as one; Python's floats as float32 unless another `dtype` is wanted."""
    try:
        array = np.asarray(data)
    except ValueError:
        raise ValueError("a tensor's rows must be of equal lengths, and this nested sequence's are not") from None
    return array.astype(float32) if array.dtype == np.float64 and dtype is None else array


def _in_native_order(array: Array) -> Array:
    """An array from a file of the other byte order as one of this machine. Raises TypeError where it holds no numbers
    that a Tensor takes."""
    native = array.dtype.newbyteorder("=")
    if native not in DTYPES:
        raise TypeError(_holds(array.dtype))
    return array.astype(native)


def from_dlpack(source: Any) -> Tensor:
    """A tensor that shares memory with any object that speaks DLPack (NumPy, CuPy, PyTorch, JAX)."""
    device_type, _ = source.__dlpack_device__()
    return Tensor(array_module("cuda" if device_type == 2 else "cpu").from_dlpack(source))


class Vacant(NamedTuple):
    """Where a backward on CUDA may put a gradient of this shape that starts from zero: it overwrites the array."""

    array: Array


class Kept:
    """A gradient so far that somebody still reads, or of two terms not added yet, `array` and `more`: a backward on
    CUDA may put the sum with its own term elsewhere, and says so here."""

    __slots__ = ("array", "more", "sum")

    def __init__(self, array: Array, more: Array | None = None):
        self.array, self.more = array, more
        self.sum: Array | None = None


class Context:
    """What a Function's forward leaves for its backward."""

    def __init__(self, needs: tuple[bool, ...], partials: tuple[Array | None, ...]):
        self.needs = needs  # which inputs want a gradient; all False while nothing is recorded
        self.partials = partials  # of the inputs
        self.out_partials: Array | None = None  # set by forward: statistics of its first output
        # In backward: the first dout's sums over tiles of pixels, float32 (N or 1, tiles, C), if a backward left them.
        self.dout_partials: Array | None = None
        self.din_partials: dict[int, Array] = {}  # set by backward: the same of input i's gradient, with what it had
        self.saved: tuple[Array | None, ...] = ()

    def save(self, *arrays: Array | None) -> None:
        """Hold `arrays` until backward has run."""
        self.saved = arrays


class Function:
    """A differentiable operation on both backends; see `apply` for the signatures.

    A subclass defines four static methods: `forward_numpy(ctx, *arrays, **attrs)`, which returns an array or a tuple
    of arrays; `backward_numpy(ctx, *douts, needs, into)`, which returns one gradient (or None) for each input; and the
    same pair with `_cuda`. `needs[i]` says whether input i wants a gradient. `into[i]` is the gradient it has so
    far, or None: a backward that adds to it in place returns it, any other returned array is added by the tape. On CUDA
    it may also be `Vacant`, and for the inputs of which `adds_elsewhere` says so, `Kept`, all of whose terms it adds;
    `gradient_target`, `gradient_sum` and `gradient_sums` of `cudiff.cuda.module` know them all.
    A gradient has the shape and dtype of what forward got; that of 16 bits may be float32 too. TypeError or ValueError
    names the Function and the input otherwise.
    A forward writes to none of its inputs, where it is differentiable. A dout may be returned but never written to. Its
    new owner may add to it, as to any array returned: what reads it after backward has returned says so (see
    `cudiff.cuda.waiting`), and an array kept outside `ctx.saved` is returned as a copy.
    """

    differentiable: ClassVar[bool] = True
    adds_elsewhere: ClassVar[tuple[int, ...]] = ()

    @classmethod
    def operand_dtype(cls, inputs: Sequence[Tensor | None], attrs: dict[str, Any]) -> np.dtype:
        """What it computes in, of which a Parameter may offer a copy: the first input's dtype."""
        return next(t.dtype for t in inputs if t is not None)

    @classmethod
    def apply(cls, *inputs: Tensor | None, **attrs: Any) -> Any:
        """Run the forward on the inputs' device and record it. Returns a Tensor, or a tuple where forward does."""
        device = _common_device(cls.__name__, inputs)
        recording = cls.differentiable and grad_enabled()
        needs = tuple(recording and t is not None and t.requires_grad for t in inputs)
        ctx = Context(needs, tuple(None if t is None else t.partials for t in inputs))
        dtype = cls.operand_dtype(inputs, attrs)
        arrays = [None if t is None else t.operand(dtype) for t in inputs]
        forward = cls.forward_cuda if device == "cuda" else cls.forward_numpy  # type: ignore[attr-defined]
        results = forward(ctx, *arrays, **attrs)
        several = isinstance(results, tuple)
        for result in results or (None,) if several else (results,):
            if not is_array(result) or device_of(result) != device:
                raise TypeError(
                    f"{cls.__name__}'s forward returned {described(result)}: return an array on {device}, or a tuple "
                    f"of arrays"
                )
        outs = tuple(Tensor(result) for result in (results if several else (results,)))
        outs[0].partials = ctx.out_partials
        if any(needs):
            node = Node(cls, ctx, inputs, arrays, needs, len(outs))
            for i, out in enumerate(outs):
                if is_float(out.dtype):
                    out.requires_grad, out._source = True, (node, i)
        return outs if several else outs[0]


class Composite(Function):
    """A Function whose NumPy side records `compose(*inputs, **attrs)`, the operations that define it, on a tape of its
    own."""

    @classmethod
    def forward_numpy(cls, ctx, *arrays, **attrs):
        ctx.inputs = [
            None if array is None else Tensor(array, requires_grad=need)
            for array, need in zip(arrays, ctx.needs, strict=True)
        ]
        ctx.out = cls.compose(*ctx.inputs, **attrs)  # type: ignore[attr-defined]
        return ctx.out.data

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        ctx.out.backward(dout)
        return tuple(x.grad if need else None for x, need in zip(ctx.inputs, needs, strict=True))


def described(result: Any) -> str:
    """What a Function returned, for a complaint."""
    if not is_array(result):
        return "None" if result is None else f"a {type(result).__name__}"
    return f"an array of {result.dtype} on {device_of(result)}"


def _common_device(name: str, inputs: Sequence[Tensor | None]) -> str:
    for t in inputs:
        if t is not None and not isinstance(t, Tensor):
            raise TypeError(f"{name} takes tensors, not {type(t).__name__}: wrap it in cudiff.Tensor(...)")
    devices = {t.device for t in inputs if t is not None}
    if len(devices) > 1:
        raise ValueError(f"{name} got tensors on different devices: move them with .to('cuda') or .to('cpu')")
    return devices.pop()


class Node:
    """One recorded operation: how to run its backward and where its inputs' gradients go."""

    __slots__ = ("ctx", "function", "index", "inputs", "likes", "needs", "num_outputs")

    def __init__(self, function: Any, ctx: Context, inputs: Sequence[Tensor | None], arrays: Sequence[Array | None],
                 needs: tuple, num_outputs: int):
        self.function, self.needs, self.num_outputs = function, needs, num_outputs
        self.ctx: Any = ctx  # a Context, None once backward has run
        self.index = next(_node_index)
        # What each wanted gradient must be like: the arrays that the forward got can be freed.
        self.likes = [(a.shape, a.dtype) if need and a is not None else None
                      for a, need in zip(arrays, needs, strict=True)]
        # An input made by another node is kept as that node's output slot, so that its array can be freed.
        self.inputs = [
            (t if t._source is None else t._source) if need and t is not None else None
            for t, need in zip(inputs, needs, strict=True)
        ]
