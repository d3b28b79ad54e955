"""Tensors and the tape: what an operation is, how it is recorded, and how gradients flow back through it."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from cudiff.backend import Array, array_module, device_of, float32, is_float, to_device

_mode = threading.local()
_node_index = itertools.count()


def grad_enabled() -> bool:
    """Whether operations are being recorded on the tape in this thread."""
    return getattr(_mode, "grad", True)


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
        NumPy or CuPy; made C-contiguous. Python floats become float32.
    requires_grad : bool
        Whether `backward` shall fill `.grad`. Only floating tensors can.
    dtype : dtype, optional
    device : {"cpu", "cuda"}, optional
        Where `data` lies is the default.

    Attributes
    ----------
    data : the array. grad : array of the same backend and shape, or None; reading it writes zeros that are still due.
    partials : float32 array (N, tiles, C, 2) or None
        Sums and sums of squares of each image's tiles of pixels, which the producer left for a following norm.
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
        if not hasattr(data, "dtype"):
            data = np.asarray(data)
            if not is_float(data.dtype) and data.dtype.kind not in "biu":
                raise TypeError(f"a tensor holds real numbers, not {data.dtype}")
            if data.dtype == np.float64 and dtype is None:
                data = data.astype(float32)
        if isinstance(data, np.generic):
            data = np.asarray(data)
        if dtype is not None and data.dtype != np.dtype(dtype):
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
            raise RuntimeError("backward() needs a tensor that requires a gradient")
        if grad is None:
            if self.size != 1:
                raise RuntimeError(f"backward() of a tensor of shape {self.shape} needs the gradient to start from")
            grad = array_module(self.device).ones_like(self.data)
        else:
            grad = Tensor(grad, dtype=self.dtype, device=self.device).data
        if grad.shape != self.shape:
            raise ValueError(f"the gradient has shape {grad.shape}, the tensor {self.shape}")
        _backward(self, grad)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]

    def __bool__(self) -> bool:
        return bool(self.item())

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
    it may also be `Vacant`, and for the inputs of which `adds_elsewhere` says so, `Kept`; `gradient_target` and
    `gradient_sum` of `cudiff.cuda.module` know them all.
    A dout may be returned but never written to. Its new owner may add to it: what reads it after backward has returned
    says so (see `cudiff.cuda.waiting`).
    """

    differentiable: ClassVar[bool] = True
    adds_elsewhere: ClassVar[tuple[int, ...]] = ()

    @classmethod
    def apply(cls, *inputs: Tensor | None, **attrs: Any) -> Any:
        """Run the forward on the inputs' device and record it. Returns a Tensor, or a tuple where forward does."""
        device = _common_device(cls.__name__, inputs)
        recording = cls.differentiable and grad_enabled()
        needs = tuple(recording and t is not None and t.requires_grad for t in inputs)
        ctx = Context(needs, tuple(None if t is None else t.partials for t in inputs))
        dtype = next(t.dtype for t in inputs if t is not None)
        arrays = [None if t is None else t.operand(dtype) for t in inputs]
        forward = cls.forward_cuda if device == "cuda" else cls.forward_numpy  # type: ignore[attr-defined]
        results = forward(ctx, *arrays, **attrs)
        outs = tuple(Tensor(result) for result in (results if isinstance(results, tuple) else (results,)))
        outs[0].partials = ctx.out_partials
        if any(needs):
            node = Node(cls, ctx, inputs, needs, len(outs))
            for i, out in enumerate(outs):
                if is_float(out.dtype):
                    out.requires_grad, out._source = True, (node, i)
        return outs if isinstance(results, tuple) else outs[0]


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

    __slots__ = ("ctx", "function", "index", "inputs", "needs", "num_outputs")

    def __init__(self, function: Any, ctx: Context, inputs: Sequence[Tensor | None], needs: tuple, num_outputs: int):
        self.function, self.needs, self.num_outputs = function, needs, num_outputs
        self.ctx: Any = ctx  # a Context, None once backward has run
        self.index = next(_node_index)
        # An input made by another node is kept as that node's output slot, so that its array can be freed.
        self.inputs = [
            (t if t._source is None else t._source) if need and t is not None else None
            for t, need in zip(inputs, needs, strict=True)
        ]


class _Gradient:
    """A gradient under construction. A borrowed array is shared with someone else and never written to; so is `more`,
    one more term that a backward may add with its own."""

    __slots__ = ("array", "borrowed", "more", "partials")

    def __init__(self) -> None:
        self.array: Array | None = None
        self.more: Array | None = None
        self.borrowed = False
        self.partials: Array | None = None

    def into(self) -> Array | None:
        return None if self.borrowed else self.array

    def settle(self, waits: Any) -> None:
        """Add the term that still is to be."""
        if self.more is not None:
            waits.finish(self.array, written=True)
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
        from cudiff.cuda.module import add_into

        add_into(total, term)


def _backward(root: Tensor, grad: Array) -> None:
    if root._source is None:
        _add_to_leaf(root, grad, True)
        return
    pending: dict[int, list[_Gradient]] = {}
    order = _nodes_below(root._source[0])
    for node in order:
        pending[node.index] = [_Gradient() for _ in range(node.num_outputs)]
    pending[order[0].index][root._source[1]].add(grad, True, None)
    with _waiting(device_of(grad)) as waits:
        for node in order:
            slots = pending.pop(node.index)
            for slot in slots:
                slot.settle(waits)
            if node.ctx is None:
                raise RuntimeError("backward() ran through this part of the tape already: run the forward again")
            node.ctx.dout_partials = slots[0].partials
            if any(slot.array is not None for slot in slots):
                _run_backward(node, slots, [
                    pending[source[0].index][source[1]] if isinstance(source, tuple) else source
                    for source in node.inputs
                ], waits)
            node.ctx = None  # frees what forward saved


class _NothingWaits:
    """On the CPU all is done at once."""

    def finish(self, array: Any, written: bool = False) -> None: ...
    def reads(self, array: Any) -> bool:
        return False


def _waiting(device: str) -> contextlib.AbstractContextManager:
    """On CUDA some work waits for more of its kind; what this gives does what cannot. See cudiff.cuda.waiting."""
    if device == "cpu":
        return contextlib.nullcontext(_NothingWaits())
    from cudiff.cuda.waiting import waiting

    return waiting()


def _run_backward(node: Node, slots: list[_Gradient], targets: list[Tensor | _Gradient | None], waits: Any) -> None:
    douts = [slot.array for slot in slots]
    device = next(device_of(dout) for dout in douts if dout is not None)
    for dout in douts:
        waits.finish(dout)
    into: list[Array | Vacant | Kept | None] = []
    for i, target in enumerate(targets):
        again = any(target is other for other in targets[:i])
        elsewhere = i in node.function.adds_elsewhere and isinstance(target, _Gradient)
        if isinstance(target, _Gradient) and not (elsewhere and sum(target is other for other in targets) == 1):
            target.settle(waits)
        more = target.more if isinstance(target, _Gradient) else None
        place: Array | Vacant | None = (
            target.into() if isinstance(target, _Gradient) else _into_leaf(target, device, again)
        )
        if any(isinstance(other, Kept) and other.array is place for other in into):
            place = None  # the sum will lie elsewhere: the tape adds this term to it
        keeps = elsewhere and (more is not None or waits.reads(place))
        waits.finish(place, written=not keeps)  # it may be added to
        into.append(Kept(place, more) if keeps else place)
    backward = node.function.backward_cuda if device == "cuda" else node.function.backward_numpy
    results = backward(node.ctx, *douts, needs=node.needs, into=list(into))
    places = [
        place.array if isinstance(place, Vacant) else place.sum if isinstance(place, Kept) else place for place in into
    ]
    shared = {id(slot.array) for slot in slots if slot.borrowed}
    passed_on = [id(result) for result in results if any(result is dout for dout in douts)]
    shared |= {key for key in passed_on if passed_on.count(key) > 1}
    returned: set[int] = set()
    for i, (result, target) in enumerate(zip(results, targets, strict=True)):
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
        borrowed = result.base is not None or id(result) in shared
        before = target._grad if isinstance(target, Tensor) else target.array
        if isinstance(target, _Gradient):
            target.settle(waits)
            own = target.into()
            if device == "cuda" and own is not None and id(result) in passed_on and result.dtype == own.dtype:
                target.more, target.partials = result, None  # a norm's backward may add it with its own term
                continue
        if before is not None or id(result) in returned or (borrowed and isinstance(target, Tensor)):
            turned = isinstance(target, _Gradient) and target.borrowed  # then what was there is added to the result
            waits.finish(result, written=turned)
            waits.finish(before, written=not turned)
        if id(result) in returned and not borrowed:
            result = result.copy()
        returned.add(id(result))
        if isinstance(target, Tensor):
            _add_to_leaf(target, result, borrowed)
        else:
            target.add(result, borrowed, partials)


def _into_leaf(leaf: Tensor | None, device: str, again: bool) -> Array | Vacant | None:
    """What a backward gets as `into` for a leaf, which may be among its inputs `again`."""
    if leaf is None:
        return None
    if leaf._vacant:
        return None if again or device == "cpu" else Vacant(leaf._grad)
    return leaf.grad


def _add_to_leaf(leaf: Tensor, grad: Array, borrowed: bool) -> None:
    if leaf._grad is None:
        leaf.grad = grad.copy() if borrowed else grad
    elif leaf._vacant:
        leaf._grad[...] = grad
        leaf._vacant = False
    else:
        accumulate(leaf.grad, grad)


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
