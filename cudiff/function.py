"""Operations: what a Function is, how it is recorded, and what its backward may return."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from cudiff.backend import Array, compute_dtype, device_of, device_of_type, float32, float64, is_array, is_float
from cudiff.mode import mode
from cudiff.statistics import ChannelStatistics
from cudiff.tensor import Tensor, now

_readers: list[list[weakref.ref[Tensor]]] = []
"""Lists that get what operations read, of all threads: see `reads_noted`."""


@contextlib.contextmanager
def reads_noted() -> Iterator[list[weakref.ref[Tensor]]]:
    """A list of all tensors, but for Parameters, that operations inside the block read."""
    found: list[weakref.ref[Tensor]] = []
    _readers.append(found)
    try:
        yield found
    finally:
        _readers[:] = [other for other in _readers if other is not found]


class Context:
    """What a Function's forward leaves for its backward."""

    out_statistics: ChannelStatistics | None = None  # of the first output; forward sets them
    dout_statistics: ChannelStatistics | None = None  # of the first dout, if the backward that computed it left any
    saved: tuple[Array | None, ...] = ()

    def __init__(self, needs: tuple[bool, ...], statistics: tuple[ChannelStatistics | None, ...]):
        self.needs = needs  # which inputs want a gradient; all False while nothing is recorded
        self.statistics = statistics  # of the inputs
        # Of input i's whole gradient at i, earlier terms included; backward sets them.
        self.din_statistics: dict[int, ChannelStatistics | None] = {}
        self.tf32 = mode.tf32  # backward uses forward's setting

    @property
    def dout_sums(self) -> Array | None:
        """The sums of the first dout over tiles of pixels, float32 (N or 1, tiles, C), or None."""
        return None if self.dout_statistics is None else self.dout_statistics.sums

    def save(self, *arrays: Array | None) -> None:
        """Hold `arrays` until backward has run."""
        self.saved = arrays


class Function:
    """A differentiable operation for the CPU (NumPy) and CUDA (CuPy); `apply` runs it.

    A subclass defines four static methods:
    `forward_numpy(ctx, *arrays, **attrs)` returns an array or a tuple of arrays. A differentiable forward writes to
    none of its inputs.
    `backward_numpy(ctx, *douts, needs, into)` returns a tuple with a gradient (or None) for each input. `needs[i]` says
    whether input i wants one. The dout of an output that nothing used is None, but never all of them. `into[i]` is
    input i's gradient so far, or None. A backward may add to it in place and return it; the tape adds any other array
    that is returned.
    `forward_cuda` and `backward_cuda` are the same on CUDA. There `into[i]` is a `cudiff.gradient.Slot` or None, and
    `cudiff.cuda.accumulate` says where to write: `gradient_target`, or for the inputs that `adds_elsewhere` names,
    whose slots may be SHARED, `gradient_sum` or `gradient_sums`.

    A gradient has the shape and the dtype of the forward's input; that of a 16-bit input may be float32 as well. Any
    other float32 or float64 gradient is cast, to the input's dtype or for a 16-bit input to float32. For everything
    else the tape raises TypeError or ValueError, which names the Function and the input. On CUDA a float32 gradient is
    cast to 16 bits if another Function made the input, unless that one's backward takes both: `takes_wide`.

    `fresh` promises that backward writes to no dout, and that nothing else uses the arrays that it returns, other than
    douts and those in `ctx.saved`. So the tape may add to all others in place. A deferred launch may read such an
    array after backward has returned: it names it in `reads` (see `cudiff.cuda.deferred`). cudiff's own Functions are
    `fresh`. For other Functions the tape adds to copies.

    `compose(*inputs, **attrs)`, if a subclass has it, computes the same by other operations. `apply` records those
    instead on the CPU, and wherever a gradient is to be differentiated. Then the `_numpy` pair is not needed.
    """

    compose: ClassVar[Callable[..., Any] | None] = None
    differentiable: ClassVar[bool] = True
    takes_wide: ClassVar[bool] = False
    adds_elsewhere: ClassVar[tuple[int, ...]] = ()
    fresh: ClassVar[bool] = False
    own: ClassVar[bool] = True  # cudiff's; what others return is checked for views
    shares_memory: ClassVar[bool] = False  # whether the result may be a view of the first input

    def __init_subclass__(cls) -> None:
        cls.own = cls.__module__.startswith("cudiff.")
        cls.fresh = vars(cls).get("fresh", cls.own)

    @classmethod
    def operand_dtype(cls, inputs: Sequence[Tensor | None], attrs: dict[str, Any]) -> np.dtype:
        """The dtype to compute in, by default the first input's. A Parameter may pass a copy in this dtype."""
        given = iter(inputs)
        while (first := next(given)) is None:
            pass
        return first._data.dtype

    @classmethod
    def apply(cls, *inputs: Tensor | Array | None, **attrs: Any) -> Any:
        """Run the forward on the inputs' device and record it. Returns a Tensor, or a tuple if forward does."""
        inputs, device, kind = _on_one_device(cls.__name__, inputs)
        if cls.compose is not None and (device == "cpu" or mode.depth > 1):
            return cls.compose(*inputs, **attrs)
        dtype, recording = cls.operand_dtype(inputs, attrs), cls.differentiable and mode.grad
        arrays: list[Any] = [None] * len(inputs)
        needs, statistics = [False] * len(inputs), list(arrays)
        for i, t in enumerate(inputs):
            if t is not None:
                arrays[i] = t._data if type(t) is Tensor else t.operand(dtype)
                needs[i], statistics[i] = recording and t.requires_grad, t.statistics
        for reader in _readers:
            reader += [weakref.ref(t) for t in inputs if type(t) is Tensor]
        ctx = Context(tuple(needs), tuple(statistics))
        forward = cls.forward_cuda if device == "cuda" else cls.forward_numpy  # type: ignore[attr-defined]
        results: Any = forward(ctx, *arrays, **attrs)
        several = isinstance(results, tuple)
        outs: list[Tensor] = []
        for result in results or (None,) if several else (results,):
            if type(result) is not kind and not _lies_on(device, result):
                raise TypeError(
                    f"{cls.__name__}'s forward returned {described(result)}: return an array on {device}, or a tuple "
                    f"of arrays"
                )
            as_it_is = cls.own and type(result) is kind and result.flags.c_contiguous  # type: ignore[union-attr]
            outs.append(Tensor._of(result) if as_it_is else Tensor(result))
        outs[0].statistics = ctx.out_statistics
        if cls.shares_memory and inputs[0] is not None and outs[0].data.base is not None:
            outs[0]._parameter = inputs[0].parameter  # type: ignore[union-attr]
        if True in needs:
            node = Node(cls, ctx, inputs, arrays, len(outs), (inputs, attrs) if mode.depth > 1 else None)
            for i, out in enumerate(outs):
                if is_float(out._data.dtype):
                    out.requires_grad, out._source = True, (node, i)
        return tuple(outs) if several else outs[0]


def described(result: Any) -> str:
    """What a Function returned, in words for an error message."""
    if not is_array(result) or isinstance(result, np.ma.MaskedArray):
        return "None" if result is None else f"a {type(result).__name__}"
    return f"an array of {result.dtype} on {device_of(result)}"


def _lies_on(device: str, result: Any) -> bool:
    """Whether `result` is an array on `device`, and not a masked one, whose mask would be lost."""
    return is_array(result) and device_of(result) == device and not isinstance(result, np.ma.MaskedArray)


def _wrapped(name: str, inputs: Sequence[Any]) -> tuple[Tensor | None, ...]:
    """The inputs, with arrays converted to tensors, on the GPU if one of the tensors is there.

    A float64 array takes the widest floating dtype of the tensors. If no tensor is floating, it becomes float32 beside
    one on the GPU, else it stays float64. Arrays of other dtypes keep theirs. Raises TypeError for anything else.
    """
    given = [x for x in inputs if x is not None and not isinstance(x, Tensor)]
    for x in given:
        if not is_array(x):
            raise TypeError(f"{name} takes tensors and arrays, not {type(x).__name__}: wrap it in cudiff.Tensor(...)")
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    device = "cuda" if any(x.device == "cuda" for x in tensors) else None
    floats = [x.dtype for x in tensors if is_float(x.dtype)]
    wide = max(floats, key=lambda dtype: dtype.itemsize) if floats else float64 if device is None else float32
    return tuple(
        x if x is None or isinstance(x, Tensor) else
        Tensor(x, dtype=wide if x.dtype == float64 else x.dtype, device=device) for x in inputs
    )


def _on_one_device(name: str, inputs: tuple[Any, ...]) -> tuple[tuple[Any, ...], str, Any]:
    """The inputs, `_wrapped` where they are not all tensors, the device that they are on, and the type of the last
    one's array. Raises ValueError where they are on different devices, TypeError where there is no tensor."""
    kind: Any = None
    device = None
    for t in inputs:
        if t is None:
            continue
        if not isinstance(t, Tensor):
            return _on_one_device(name, _wrapped(name, inputs))
        if type(t._data) is not kind:
            kind = type(t._data)
            own = device_of_type(kind)
            if device not in (None, own):
                raise ValueError(f"{name} got tensors on different devices: move them with .to('cuda') or .to('cpu')")
            device = own
    if device is None:
        raise TypeError(f"{name} got no tensor: give it one at least")
    return inputs, device, kind


class Node:
    """One recorded operation: what runs its backward, and where the gradients of its inputs go."""

    __slots__ = ("call", "constants", "ctx", "function", "index", "inputs", "likes", "needs", "num_outputs")

    def __init__(self, function: Any, ctx: Context, inputs: Sequence[Tensor | None], arrays: Sequence[Array | None],
                 num_outputs: int, call: tuple | None = None):
        self.function, self.needs, self.num_outputs = function, ctx.needs, num_outputs
        self.ctx: Any = ctx  # a Context, None once backward has run
        self.call: Any = call  # (inputs, attributes), for a gradient that is itself recorded: see cudiff.differentiate
        self.index = now()
        # inputs: what made each that wants a gradient, (node, which of its outputs), or the leaf itself; else None.
        # likes: for each i of these the shape, None for a Parameter's, which stays, and the dtype of the gradient.
        # Neither keeps the arrays, which can be freed.
        # constants: the parameters among the other inputs, such as frozen ones, or of which these are views: backward
        # reads their arrays too.
        self.inputs: list[Tensor | tuple[Node, int] | None] = [None] * len(arrays)
        self.likes: dict[int, tuple[tuple[int, ...] | None, np.dtype]] = {}
        self.constants: list[Tensor] = []
        for i, t in enumerate(inputs):
            if t is None:
                continue
            if ctx.needs[i]:
                self.inputs[i] = t if t._source is None else t._source
                self.likes[i] = arrays[i].shape if type(t) is Tensor else None, arrays[i].dtype  # type: ignore[union-attr]
            elif (constant := t._parameter if type(t) is Tensor else t) is not None:
                self.constants.append(constant)


def nodes_below(root: Node, since: int = -1) -> list[Node]:
    """`root` and every node that it depends on with an index above `since`, the newest first. The order is fixed, so
    that sums are reproducible."""
    found = {root.index: root}
    stack = [root]
    while stack:
        for source in stack.pop().inputs:
            if type(source) is tuple and source[0].index > since and source[0].index not in found:
                found[source[0].index] = source[0]
                stack.append(source[0])
    return [found[index] for index in sorted(found, reverse=True)]


def fitting_gradients(node: Node, results: Any, kind: type, device: str, before_read: Callable[[Array], None]) -> tuple:
    """What a backward returned, checked and cast as `Function` says, with the TypeErrors and ValueErrors that it names.
    kind: the usual type of arrays on `device`. before_read(array): called before an array's numbers are read, which a
    deferred launch may not have written yet."""
    name = node.function.__name__
    if not isinstance(results, tuple):
        raise TypeError(
            f"{name}'s backward returned {described(results)}: return a tuple, with a gradient (or None) for each input"
        )
    if len(results) != len(node.needs):
        raise ValueError(f"{name}'s backward returned {len(results)} gradients for {len(node.needs)} inputs")
    for i, (shape, dtype) in node.likes.items():
        result = results[i]
        source: Any = node.inputs[i]
        if result is None or (shape is None and result is source._grad):
            continue
        shape = source.shape if shape is None else shape
        if type(result) is not kind and not _lies_on(device, result):
            raise TypeError(
                f"{name}'s backward returned {described(result)} for {_input(node, i)}: return an array on {device}"
            )
        if result.shape != shape:
            raise ValueError(f"{name}'s backward returned a gradient of shape {result.shape} for {_input(node, i)}, "
                             f"which has {shape}")
        if device == "cuda" and not node.function.own and not result.flags.c_contiguous:  # kernels read whole arrays
            result = result.copy()
            results = *results[:i], result, *results[i + 1 :]
        if result.dtype == dtype:
            continue
        if result.dtype not in (float32, float64):
            raise TypeError(
                f"{name}'s backward returned a gradient of {result.dtype} for {_input(node, i)}, which has {dtype}"
            )
        as_is = device == "cpu" or not isinstance(source, tuple) or source[0].function.takes_wide
        wanted = compute_dtype(dtype) if as_is else dtype
        if result.dtype != wanted:
            before_read(result)
            results = *results[:i], result.astype(wanted), *results[i + 1 :]
    return results


def _input(node: Node, i: int) -> str:
    """Input i of a node in words, with the name of the forward's parameter if that has one."""
    function = node.function
    forward = getattr(function, "forward_numpy", None) or function.forward_cuda
    names = [
        parameter.name for parameter in inspect.signature(forward).parameters.values()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ][1:]  # the first is ctx
    return f"input {i} ({names[i]})" if i < len(names) else f"input {i}"
