"""Parameters and the flat buffers that hold a whole model's parameters, gradients and 16-bit copies."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from itertools import pairwise
from operator import attrgetter
from typing import Any

import numpy as np

from cudiff import ops
from cudiff.as_array import plain
from cudiff.backend import (
    Array,
    array_module,
    copy_into,
    device_of,
    float32,
    float64,
    is_array,
    is_capturing,
    is_float,
    is_low,
    to_device,
)
from cudiff.cuda.graph import record_again
from cudiff.distributed import Group
from cudiff.distributed.shards import Shards
from cudiff.errors import CudiffError
from cudiff.ops.optim import Flag
from cudiff.tensor import Tensor, grad_enabled, now
from cudiff.values import flag

BLOCK = 32
"""Every tensor in a flat buffer is padded to this many float32: 128 bytes."""


_structure = 0


def structure() -> int:
    """Another number after any model got, lost or exchanged a part, or a parameter moved to other buffers."""
    return _structure


def structure_changes() -> None:
    """Have `structure` differ from now on."""
    global _structure
    _structure += 1


def array_of(values: Array | Tensor) -> Array:
    """The array of a tensor, or the array that is given. Raises TypeError for anything else."""
    if not isinstance(values, Tensor) and not is_array(values):
        kind = type(values)
        torch = kind.__module__.startswith("torch")  # whose layout differs
        advice = "cudiff.convert.from_torch(state, model.layouts()) converts PyTorch's" if torch else "use np.asarray"
        raise TypeError(f"these are arrays or Tensors, not a {'torch.' * torch}{kind.__qualname__}: {advice}")
    return values.data if isinstance(values, Tensor) else plain(values)


def fitting(name: str, values: Array | Tensor, dtype: np.dtype = float32) -> Array:
    """The array of `values`, which `name`, of this dtype, is to take.

    Raises TypeError for what are no numbers, CudiffError where that dtype does not hold them.
    """
    array = Tensor(array_of(values)).data
    if not np.can_cast(array.dtype, dtype):
        module = array_module(device_of(array))
        with np.errstate(over="ignore", invalid="ignore"):
            cast = array.astype(dtype)
        held = module.isfinite(cast) == module.isfinite(array) if is_float(dtype) else cast == array
        if not held.all():
            raise CudiffError(f"{name} is {dtype}, which does not hold every {array.dtype} given: scale or clip them")
    return array


def _in_place(operation: Callable[[Tensor, Any], Tensor]) -> Callable[[Parameter, Any], Parameter]:
    def change(self: Parameter, other: Any) -> Parameter:
        if grad_enabled() and self.requires_grad:
            raise RuntimeError("a parameter that requires a gradient changes in place only within cudiff.no_grad()")
        self.assign(operation(self, other))
        return self

    return change


class Parameter(Tensor):
    """A float32 leaf that training changes.

    Parameters
    ----------
    data : array of any floating dtype, whose values are copied
    low : bool
        Whether matrix products in a 16-bit precision read a 16-bit compute copy of it (weights of conv and linear).
    decay : bool or None
        Whether weight decay applies. None: where there are two or more dimensions. Norms, biases and embeddings do not
        decay.
    layout : {"vector", "linear", "conv2d", "conv_transpose2d", "conv1d", "pointwise", "embedding"}
        How PyTorch's file layout differs: see `cudiff.convert`.
    copy : bool
        False where nobody else holds `data`, which then becomes the parameter's own array.

    Attributes
    ----------
    flat : FlatParameters or None
        The buffers that hold it, once its model is flattened. A copy of it, a pickled one too, is in none.
    data : the array. Setting it is `assign`. Writing into the array itself leaves the 16-bit copy as it was until the
        next update.
    grad : the gradient. In flat buffers it is a view, which the next step's backward overwrites: keep a copy of it.
        Setting it copies the values there, and None stands for zeros.
    requires_grad : False freezes it: no gradient, no update, no weight decay, no momentum, no moving average, and where
        a captured step holds it, that step is recorded again. True gives back the gradient that it had before, unless
        `zero_grad` was called.

    A backward through what was computed before an update raises RuntimeError: its gradients would mix old and new.
    """

    __slots__ = ("_decay", "_frozen", "_frozen_grad", "_stale", "_updated", "compute_copy", "flat", "layout", "low")
    _copied = ("data", "requires_grad", "decay", "layout", "low")

    def __init__(self, data: Any, low: bool = False, decay: bool | None = None, layout: str = "vector",
                 copy: bool = True):
        self.flat: FlatParameters | None = None
        self.compute_copy: Array | None = None
        self._stale, self._updated = True, -1
        self._frozen_grad: Array | None = None  # in flat buffers, whose norm is taken whole
        if data is None:
            raise TypeError("a Parameter takes an array or numbers, not None")
        given = Tensor(data if hasattr(data, "dtype") else np.asarray(data, float64), requires_grad=True)
        super().__init__(fitting("a parameter", given).astype(float32, copy=copy), requires_grad=True)
        self.low, self.layout = flag("low", low), layout
        self._decay = self.ndim >= 2 if decay is None else flag("decay", decay)

    def _set_data(self, array: Any) -> None:
        self.assign(Tensor(array))

    data: Any = property(attrgetter("_data"), _set_data)  # in C: operations read it often

    @property
    def grad(self) -> Array | None:  # type: ignore[override]
        return _grad.fget(self)

    @grad.setter
    def grad(self, array: Array | None) -> None:
        array = None if array is None else fitting("a gradient", array).astype(float32, copy=False)
        if array is not None and array.shape != self.shape:
            raise ValueError(f"a gradient of shape {array.shape} for a parameter of shape {self.shape}")
        if self.flat is None or array is self._grad or self._grad is None:
            _grad.fset(self, array)
        elif array is None:
            self.zero_grad()
        elif not self.requires_grad:
            raise ValueError("a frozen parameter takes no gradient: set requires_grad = True first")
        else:
            copy_into(self._grad, array)
            self._grad_empty = False

    def _set_requires_grad(self, wanted: bool) -> None:
        wanted, flat = flag("requires_grad", wanted), self.flat
        if wanted and flat is not None and not flat.trainable:
            raise CudiffError(NOT_TRAINABLE)
        changes = flat is not None and flat.trainable and wanted != self.requires_grad
        self._frozen = not wanted
        _requires_grad.__set__(self, wanted)
        if changes:
            flat.set_flags(self)  # type: ignore[union-attr]
            grad = self._frozen_grad if wanted else None if self._grad_empty else self._grad.copy()  # type: ignore[union-attr]
            self._grad.fill(0)  # type: ignore[union-attr]
            self.zero_grad()
            if wanted and grad is not None:
                self.grad = grad
            else:
                self._frozen_grad = grad
            record_again()

    # Read in C. False for all parameters of a model that is not trainable, frozen or not.
    requires_grad: Any = property(Tensor.__dict__["requires_grad"].__get__, _set_requires_grad)

    def zero_grad(self) -> None:
        super().zero_grad()
        self._frozen_grad = None

    @property
    def decay(self) -> bool:
        return self._decay

    @decay.setter
    def decay(self, wanted: bool) -> None:
        self._decay = flag("decay", wanted)
        if self.flat is not None:
            self.flat.set_flags(self)

    # `p -= lr * p.grad`, which would else name a new tensor
    __iadd__, __isub__ = _in_place(ops.add), _in_place(ops.subtract)
    __imul__, __itruediv__ = _in_place(ops.multiply), _in_place(ops.divide)
    __ifloordiv__, __imod__ = _in_place(ops.floor_divide), _in_place(ops.remainder)
    __ipow__, __imatmul__ = _in_place(ops.power), _in_place(ops.matmul)

    __reduce__: Any = object.__reduce__  # which asks __getstate__

    def __getstate__(self) -> dict[str, Any]:
        """What a copy takes over: it owns its array, and has no gradient and no place in flat buffers."""
        own = vars(self) if hasattr(self, "__dict__") else {}  # of a subclass
        state = {name: getattr(self, name) for name in self._copied}
        return own | state | {"requires_grad": not self._frozen}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Parameter.__init__(self, state["data"], copy=False)
        for name, value in state.items():
            if name != "data":
                setattr(self, name, value)

    def operand(self, dtype: np.dtype) -> Array:
        if not self.low or not is_low(dtype):
            return self._data
        made = self.compute_copy
        if made is None or made.dtype != dtype or type(made) is not type(self._data):
            own = None if self.flat is None else self.flat.compute_copy_of(self, dtype)
            made = self.compute_copy = array_module(self.device).empty(self.shape, dtype) if own is None else own
            self._stale = True
        # Where the precision was chosen after flatten, no optimiser writes this compute copy.
        if self._stale or (self.flat is not None and not self.flat.keeps_compute_copies(dtype)):
            made[...] = self._data
            self._stale = is_capturing(self.device)  # then the copy is not made now, and may never be
        return made

    def assign(self, array: Any) -> None:
        """Copy new values in; the compute copy is recast before it is read again.

        Raises ValueError on another shape, TypeError for what are no numbers, CudiffError for numbers out of range.
        """
        array = fitting("a parameter", array)
        if array.shape != self.shape:
            raise ValueError(f"cannot assign shape {array.shape} to a parameter of shape {self.shape}")
        copy_into(self.data, array)
        if self.compute_copy is not None and not self._stale:
            record_again()  # a captured function may read the compute copy without casting it anew
        self._stale = True
        self._updated = now()

    def require_unchanged(self, recorded: int) -> None:
        if self._updated > recorded:
            raise RuntimeError(
                "a parameter has been updated between forward and backward, whose gradients would mix old and new: run "
                "the forward again after an optimiser's step"
            )

    def bind(self, flat: FlatParameters, data: Array, grad: Array | None, compute_copy: Array | None) -> None:
        """Move the storage into slices of flat buffers; values stay, and so does a gradient where it is to be used."""
        moved = self.data is not data
        if moved:
            copy_into(data, self.data)
        if grad is not None and self._grad is not None and not self._grad_empty and not self._frozen:
            copy_into(grad, self._grad)
        if moved and (self.flat is not None or self.device == "cuda"):
            record_again()  # a captured function holds the old buffers
        self._data = data
        _grad.fset(self, grad)
        self.flat, self.compute_copy, self._stale = flat, compute_copy, True
        _requires_grad.__set__(self, flat.trainable and not self._frozen)


_grad: Any = Tensor.__dict__["grad"]
_requires_grad: Any = Tensor.__dict__["requires_grad"]

NOT_TRAINABLE = (
    "the model is not trainable, as it was flattened with trainable=False: load it with cudiff.load(path, "
    "trainable=True), or call flatten(device) once more"
)


class FlatParameters:
    """All parameters of a model in one buffer each for values, gradients and 16-bit compute copies.

    Attributes
    ----------
    data, grad : float32 (size,). grad is None for a model that is not trained.
    compute_copy : 16-bit (size,) or None
    slots : dict from parameter name to (start, stop, shape), in state_dict order. Two names of one parameter share one.
    flags : uint8 (size / 32,) of `Flag`; on the same device
    trainable : bool
    shards : which part of them this process updates, and holds the optimiser's state of: all, unless `shard` was called
    """

    def __init__(self, parameters: Mapping[str, Parameter], device: str, low: np.dtype | None, trainable: bool = True):
        module = array_module(device)
        self.device, self.trainable = device, trainable
        self._parameters = list(parameters.values())
        self._owner = self  # whose buffers these are a range of
        self._ranges: dict[int, tuple[int, int]] = {}
        start = 0
        for parameter in self._parameters:
            if id(parameter) not in self._ranges:
                self._ranges[id(parameter)] = start, start + parameter.size
                start += -(-parameter.size // BLOCK) * BLOCK
        self.size = start
        self.shards = Shards(start)
        structure_changes()
        self.slots = {name: (*self._ranges[id(value)], value.shape) for name, value in parameters.items()}
        self.data: Array = module.zeros(start, float32)
        self._grad: Array | None = module.zeros(start, float32) if trainable else None
        self.compute_copy: Array | None = module.zeros(start, low) if low is not None else None
        flags = np.zeros(start // BLOCK, np.uint8)
        for parameter in self._parameters:
            first, last = self._ranges[id(parameter)]
            frozen = parameter._frozen
            flags[first // BLOCK : -(-last // BLOCK)] = parameter.decay * Flag.DECAY | frozen * Flag.FROZEN
            data, grad, compute_copy = (
                None if flat is None else flat[first:last].reshape(parameter.shape)
                for flat in (self.data, self._grad, self.compute_copy if parameter.low else None)
            )
            parameter.bind(self, parameter.data if parameter.flat is self else data, grad, compute_copy)
        self.flags: Array = to_device(flags, device)

    def holds(self, parameters: list[Parameter]) -> bool:
        """Whether these are the parameters that lie here, no more and no fewer, and still do."""
        return len(parameters) == len(self._parameters) and all(
            mine is theirs and mine.flat is self._owner
            for mine, theirs in zip(self._parameters, parameters, strict=True)
        )

    def part(self, parameters: Mapping[str, Parameter]) -> FlatParameters | None:
        """The range of these buffers in which exactly these parameters lie, one after the other; None where none is."""
        if not all(value.flat is self for value in parameters.values()):
            return None
        ranges = [self._ranges[id(value)] for value in parameters.values()]
        padded = sorted({(start, start + -(-(stop - start) // BLOCK) * BLOCK) for start, stop in ranges})
        if any(stop != start for (_, stop), (start, _) in pairwise(padded)):
            return None
        first, last = padded[0][0], padded[-1][1]
        part = copy.copy(self)
        part._parameters, part.size = list(parameters.values()), last - first
        part.shard(self.shards.group)
        part.slots = {
            name: (start - first, stop - first, parameters[name].shape)
            for name, (start, stop) in zip(parameters, ranges, strict=True)
        }
        part.data, part.flags = self.data[first:last], self.flags[first // BLOCK : last // BLOCK]
        part._grad = None if self._grad is None else self._grad[first:last]
        part.compute_copy = None if self.compute_copy is None else self.compute_copy[first:last]
        return part

    def shard(self, group: Group) -> None:
        """Have the optimisers and EMAs that are made from now on hold 1/size of their state each process: see `Shards`.

        Gradients and weights stay whole. The processes have equal weights, and sum gradients before each step.
        """
        self.shards = Shards(self.size, group)

    def all_gather(self) -> None:
        """Where they are sharded, give all processes each one's part of the weights, and cast the 16-bit copies."""
        if self.shards.shared:
            self.shards.all_gather(self.data)
            if self.compute_copy is not None:
                self.compute_copy[...] = self.data

    def finish_update(self) -> None:
        """`all_gather` after an update, which has written the 16-bit copies of this process's part."""
        if self.shards.shared:
            self.shards.finish_update(self.data)
            for rank, part in enumerate(self.shards.parts):
                if self.compute_copy is not None and rank != self.shards.group.rank:
                    self.compute_copy[part] = self.data[part]

    def lend(self, parameters: list[Parameter]) -> None:
        """Have parameters of a model alike, copies that share these arrays, lie here too; they are not trained."""
        lent = copy.copy(self._owner)
        lent._owner, lent._parameters, lent._grad, lent.trainable = lent, parameters, None, False
        lent._ranges = {}
        for mine, theirs in zip(self._parameters, parameters, strict=True):
            lent._ranges[id(theirs)] = self._ranges[id(mine)]
            theirs.bind(lent, theirs.data, None, mine.compute_copy)

    def set_flags(self, parameter: Parameter) -> None:
        """Have updates leave `parameter` as it is, change it or decay it, as it says now."""
        first, last = self._ranges[id(parameter)]
        frozen = parameter._frozen
        self.flags[first // BLOCK : -(-last // BLOCK)] = parameter.decay * Flag.DECAY | frozen * Flag.FROZEN

    def keeps_compute_copies(self, dtype: np.dtype) -> bool:
        """Whether optimisers write 16-bit copies of this dtype."""
        return self.compute_copy is not None and self.compute_copy.dtype == dtype

    def compute_copy_of(self, parameter: Parameter, dtype: np.dtype) -> Array | None:
        """The slice that holds its 16-bit copy of this dtype, if there is one."""
        if self.compute_copy is None or not self.keeps_compute_copies(dtype):
            return None
        first, last = self._ranges[id(parameter)]
        return self.compute_copy[first:last].reshape(parameter.shape)

    def updated(self) -> None:
        """Note that a kernel has changed all parameters and their compute copies."""
        at = now()
        for parameter in self._parameters:
            if not parameter._frozen:
                parameter._updated = at

    @property
    def grad(self) -> Array | None:
        for parameter in self._parameters:
            if parameter._grad_empty:
                _ = parameter.grad  # writes zeros where no backward wrote
        return self._grad

    @property
    def buffer(self) -> Array:
        """The gradients as they are now: what no backward has reached is undefined."""
        assert self._grad is not None
        return self._grad

    def zero_grad(self) -> None:
        """Set the gradients to zero; the next backward overwrites them."""
        for parameter in self._parameters:
            parameter._grad_empty, parameter._frozen_grad = parameter._grad is not None, None

    def views(self, flat: Array) -> dict[str, Array]:
        """Each parameter's slice of any flat buffer of this size, by name and in its shape."""
        return {name: flat[start:stop].reshape(shape) for name, (start, stop, shape) in self.slots.items()}
