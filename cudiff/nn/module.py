"""Module: parameters and sub-modules with names, and what can be asked of them."""

from __future__ import annotations

import os
from collections import UserList, deque
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from typing import Any, ParamSpec, Protocol, Self, TypeVar

import numpy as np

from cudiff import show
from cudiff.backend import PRECISIONS, Array, array_module, copy_into, is_capturing, is_low, to_device
from cudiff.cuda.graph import record_again
from cudiff.errors import CudiffError
from cudiff.mode import mode
from cudiff.nn.parameter import FlatParameters, Parameter, array_of, fitting, structure_changes
from cudiff.nn.state_dict import StateDict, digests_in, is_batch_count, metadata_of, require_native
from cudiff.ops.cast import as_input
from cudiff.precision import allow_tf32
from cudiff.tensor import Tensor, gradient_depth
from cudiff.values import flag

P = ParamSpec("P")
R = TypeVar("R", covariant=True)


class HasForward(Protocol[P, R]):
    """A Module, of the type of its `forward`: that of a call."""

    _precision: str

    def forward(self, *args: P.args, **kwargs: P.kwargs) -> R: ...


class Shaped(Protocol):
    """An array, a Tensor, or an entry of a file."""

    @property
    def shape(self) -> tuple[int, ...]: ...


def require_fit(state: Mapping[str, Shaped], targets: Mapping[str, Any], complaint: str) -> None:
    """Raise CudiffError, `complaint` and the first differences, unless `state` has the targets' names and shapes."""
    problems = [f"missing {name}" for name in targets if name not in state]
    problems += [f"unexpected {name[:80]}" for name in state if name not in targets]
    problems += [
        f"{name} has shape {tuple(state[name].shape)}, not {target.shape}"
        for name, target in targets.items()
        if name in state and tuple(state[name].shape) != target.shape
    ]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise CudiffError(f"{complaint}: {'; '.join(problems[:3])}{more}")


def _untrained(value: Any) -> bool:
    """Whether `value` is a tensor that wants a gradient, of nothing that was recorded, and yet no Parameter."""
    return isinstance(value, Tensor) and not isinstance(value, Parameter) and value.requires_grad and value.is_leaf


def _nameless(value: Any) -> bool:
    if isinstance(value, SimpleNamespace):
        value = vars(value)
    elif is_dataclass(value) and not isinstance(value, type | Module):
        value = {field.name: getattr(value, field.name, None) for field in fields(value)}
    elif isinstance(value, np.ndarray) and value.dtype == object:
        value = list(value.flat)
    containers = list | tuple | set | frozenset | deque | UserList | KeysView | ValuesView | ItemsView
    parts = (*value, *value.values()) if isinstance(value, Mapping) else value if isinstance(value, containers) else ()
    return any(isinstance(part, Module | Parameter) or _untrained(part) or _nameless(part) for part in parts)


def _require_names(name: str, value: Any) -> None:
    """Raise TypeError for what would not be found, and not be trained: modules in containers, tensors that are no
    Parameters. A name that starts with _ may hold some."""
    if name.startswith("_"):
        return
    if _untrained(value):
        raise TypeError(f"{name}: a tensor that requires a gradient is not trained: make it an nn.Parameter")
    if _nameless(value):
        kind = type(value).__name__
        raise TypeError(f"{name}: layers in a {kind} have no names: use nn.ModuleList, or an attribute for each")


_NONE = object()


def _decides(name: str, before: Any, value: Any) -> bool:
    """Whether a captured function may have been recorded with another value of an attribute than it has from now on.

    Of private ones, which a forward may change, and of `training` and `flat` it is not asked.
    """
    if before is _NONE or value is before or isinstance(before, property):
        return False
    if isinstance(before, Module | Parameter):
        return True
    plain = type(value) is type(before) and isinstance(value, bool | int | float | str)
    return not (name.startswith("_") or name in ("training", "flat") or (plain and value == before))


class Module:
    """A part of a model. Attributes that are Parameters, Modules or (registered) buffers get names.

    Names join attributes by dots (`input_blocks.1.0.in_layers.0.weight`), in the order of assignment.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self.training = True
        self._precision = "fp32"
        self.flat: FlatParameters | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Raises TypeError for layers of the class, which all of its models would share and no optimiser would find."""
        super().__init_subclass__(**kwargs)
        for name, value in vars(cls).items():
            if isinstance(value, Module | Parameter) or _nameless(value):
                raise TypeError(f"{cls.__name__}.{name}: layers are attributes of a model: set self.{name} in __init__")

    def __setattr__(self, name: str, value: Any) -> None:
        """Raises TypeError for what would silently not be trained, RuntimeError before `Module.__init__` was called."""
        own = vars(self)
        if name != "_buffers" and "_buffers" not in own:
            raise RuntimeError(f"{type(self).__name__}: call super().__init__() before '{name}' is set")
        if isinstance(before := own.get(name), Parameter) and not isinstance(value, Parameter | None):
            raise TypeError(f"{name} is a Parameter: set {name}.data to new values, or {name} to a Parameter or None")
        if name == "requires_grad":
            raise TypeError("a Module is frozen by requires_grad_(False), and trained again by requires_grad_()")
        _require_names(name, value)
        if name in own.get("_buffers", ()):
            if isinstance(value, Module | Parameter):
                raise TypeError(f"{name} is a buffer: give the {type(value).__name__} another name")
            buffer = self._buffers[name]
            array = fitting(name, Tensor(value), buffer.dtype)
            if array.shape != buffer.shape:
                raise ValueError(f"{name} is a buffer of shape {buffer.shape}, not {array.shape}")
            self._set_buffer(name, buffer, array)
            return
        if _decides(name, own.get(name, getattr(type(self), name, _NONE)), value):
            record_again()  # a captured function holds the old one
        super().__setattr__(name, value)
        if isinstance(value, Module | Parameter) or isinstance(before, Module | Parameter):
            structure_changes()

    def _set_buffer(self, name: str, buffer: Tensor, array: Array) -> None:
        """New values in a new array: the backward of what was recorded reads the old one. Within a graph, in place."""
        captured, values = is_capturing(buffer.device), buffer.data
        if not captured:
            values = array_module(buffer.device).empty_like(values)
        copy_into(values, array)
        if gradient_depth() > 1 and not captured:  # there operations keep the tensor itself
            self._buffers[name] = Tensor(values)
            structure_changes()
        else:
            buffer.data = values
        record_again()  # a captured function holds the old array

    def __delattr__(self, name: str) -> None:
        if name in self._buffers:
            del self._buffers[name]
        else:
            super().__delattr__(name)
        structure_changes()
        record_again()

    def __getattr__(self, name: str) -> Any:
        """A registered buffer by its name."""
        try:
            return vars(self)["_buffers"][name]
        except KeyError:
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'") from None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no forward")

    def __call__(self: HasForward[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        if mode.tf32 == (self._precision != "fp32"):
            return self.forward(*args, **kwargs)
        with allow_tf32(not mode.tf32):
            return self.forward(*args, **kwargs)

    def named_children(self) -> Iterator[tuple[str, Module]]:
        """(name, module) of the direct sub-modules."""
        for name, value in vars(self).items():
            if isinstance(value, Module):
                yield name, value

    def children(self) -> Iterator[Module]:
        """The direct sub-modules, each once."""
        return iter({id(module): module for _, module in self.named_children()}.values())

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """(name, module) of this module and everything below it; its own name is `prefix`."""
        yield prefix, self
        for name, child in self.named_children():
            yield from child.named_modules(f"{prefix}.{name}" if prefix else name)

    def modules(self) -> Iterator[Module]:
        """This module and everything below it, each once, whatever names it has."""
        return iter({id(module): module for _, module in self.named_modules()}.values())

    def apply(self, function: Callable[[Module], Any]) -> Self:
        """Call `function` with everything below and then with this module, as PyTorch does."""
        for child in self.children():
            child.apply(function)
        function(self)
        return self

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """(name, parameter) in state_dict order; one of two names comes twice. Raises TypeError for layers in lists."""
        for prefix, module in self.named_modules():
            for name, value in vars(module).items():
                if isinstance(value, Parameter):
                    yield f"{prefix}.{name}" if prefix else name, value
                else:
                    _require_names(name, value)  # a list may have grown since it was set

    def parameters(self) -> list[Parameter]:
        """The parameters in state_dict order, each once, whatever names it has."""
        return list({id(parameter): parameter for _, parameter in self.named_parameters()}.values())

    def register_buffer(self, name: str, value: Tensor) -> None:
        """Keep a tensor that is saved with the model but not trained (running statistics), in the place of another
        buffer of this name; an array of float64 as float32. Raises TypeError where the name is something else's.
        `module.name = values` gives it a new array, and backward reads the old one; `capture` overwrites that."""
        if name not in self._buffers and hasattr(self, name):
            raise TypeError(f"{name} is a {type(getattr(self, name)).__name__} already: give the buffer another name")
        if name in self._buffers:
            record_again()  # a captured function holds the old one
        self._buffers[name] = as_input(value)
        structure_changes()

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of all registered buffers."""
        for prefix, module in self.named_modules():
            for name, value in module._buffers.items():
                yield f"{prefix}.{name}" if prefix else name, value

    def buffers(self) -> list[Tensor]:
        """All registered buffers, in the order of `named_buffers`, each once."""
        return list({id(value): value for _, value in self.named_buffers()}.values())

    def layouts(self) -> dict[str, str]:
        """For each parameter name how PyTorch's file layout differs (`Parameter.layout`)."""
        return {name: parameter.layout for name, parameter in self.named_parameters()}

    def state_dict(self) -> StateDict:
        """Copies of all parameters and buffers as NumPy arrays in native layout (conv weights KRSC), by name."""
        return StateDict((name, np.array(x.numpy())) for name, x in (*self.named_parameters(), *self.named_buffers()))

    def load_state_dict(self, state: Mapping[str, Array | Tensor], strict: bool = True) -> None:
        """Copy values in by name, in native layout: PyTorch's state dict goes through `cudiff.convert.from_torch`.

        strict: whether the names are those of the model, but for PyTorch's `num_batches_tracked` of batch norms, which
        is not read; otherwise what either lacks is left as it is. Raises CudiffError on missing, unknown or mis-shaped
        ones, on convolutions' weights that are PyTorch's, or may be, and on numbers out of range, TypeError for what
        are no numbers, both before anything is changed.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"a state maps names to arrays: give state_dict(), not a {type(state).__name__}")
        targets: dict[str, Tensor] = dict(self.named_parameters()) | dict(self.named_buffers())
        native = isinstance(state, StateDict)
        if not strict:
            state = {name: values for name, values in state.items() if name in targets}
            targets = {name: target for name, target in targets.items() if name in state}
        state = {name: array_of(values) for name, values in state.items() if not is_batch_count(name, targets)}
        if not native:
            require_native(state, dict(self.named_parameters()))
        require_fit(state, targets, "the weights do not fit the model")
        fitted = {name: fitting(name, state[name], target.dtype) for name, target in targets.items()}
        for name, target in targets.items():
            if isinstance(target, Parameter):
                target.assign(fitted[name])
            else:
                copy_into(target.data, fitted[name])

    def save(self, path: str | os.PathLike) -> None:
        """Write `state_dict` to a .safetensors file, whole or not at all, which `load` of a model alike reads.

        Raises CudiffError where the system refuses to write.
        """
        from cudiff.tensorfile import digest, write_tensors  # slow to import, and `import cudiff` is not

        state = self.state_dict()
        write_tensors(path, state, metadata_of({name: digest(array) for name, array in state.items()}))

    def load(self, path: str | os.PathLike, strict: bool = True) -> Self:
        """`load_state_dict` of a file that `save` wrote, whose tensors are compared with their SHA-256 digests.

        Raises CudiffError where it is damaged or something else.
        """
        from cudiff.tensorfile import read_header, read_tensors

        state, _ = read_tensors(path, digests=digests_in(path, read_header(path)[1]))
        self.load_state_dict(StateDict(state), strict)
        return self

    def train(self, mode: bool = True) -> Self:
        """Set training mode (dropout, batch statistics) everywhere below."""
        for module in self.modules():
            module.training = flag("mode", mode)
        return self

    def eval(self) -> Self:
        """Set evaluation mode everywhere below."""
        return self.train(False)

    @property
    def precision(self) -> str:
        """`fp32`, `tf32`, `bf16` or `fp16`: what matrix products compute in and activations are stored as. In all but
        `fp32` a GPU rounds operands that are float32, such as a U-Net's embedding, to 10 bits of mantissa.

        In 16 bits it is the model that takes its inputs to `activation_dtype`, as cudiff's models do: layers compute in
        the dtype of what they are given.
        """
        return self._precision

    @precision.setter
    def precision(self, name: str) -> None:
        if name not in PRECISIONS:
            raise CudiffError(f"unknown precision '{name}': use one of {', '.join(PRECISIONS)}")
        for module in self.modules():
            if module._precision != name:
                module._precision = name
                record_again()

    @property
    def activation_dtype(self) -> np.dtype:
        """The dtype activations are stored in."""
        return PRECISIONS[self._precision]

    def flatten(self, device: str, trainable: bool = True) -> Self:
        """Move all parameters into flat buffers on `device` (once, after construction and choice of precision)."""
        low = self.activation_dtype if is_low(self.activation_dtype) else None
        self.flat = FlatParameters(dict(self.named_parameters()), device, low, trainable)
        for module in self.modules():
            for value in module._buffers.values():
                value.data = to_device(value.data, device)
        return self

    def to(self, device: str) -> Self:
        """Move parameters and buffers to "cpu" or "cuda": `flatten`, where they are not all there already.

        Raises CudiffError for anything else: parameters stay float32, and `precision` says what is computed in.
        """
        if device not in ("cpu", "cuda"):
            raise CudiffError(f'a model moves to "cpu" or "cuda", not {device!r}: for 16 bits set precision = "bf16"')
        values = [*self.parameters(), *(value for _, value in self.named_buffers())]
        if all(value.device == device for value in values):
            return self
        return self.flatten(device, trainable=self.flat is None or self.flat.trainable)

    def flat_parameters(self) -> FlatParameters:
        """The flat buffers of exactly the parameters that the model has now.

        A part of a flat model gets its range of the model's buffers; otherwise the model is flattened now, where its
        parameters lie. Raises CudiffError where there are none, or on different devices.
        """
        parameters = dict(self.named_parameters())
        if not parameters:
            raise CudiffError("the model has no parameters to optimise")
        if self.flat is None or not self.flat.holds(list(parameters.values())):
            whole = next(iter(parameters.values())).flat
            self.flat = None if whole is None else whole.part(parameters)
        if self.flat is None:
            devices = sorted({parameter.device for parameter in parameters.values()})
            if len(devices) > 1:
                raise CudiffError("the model's parameters lie on different devices: call flatten(device) first")
            self.flatten(devices[0])
        assert self.flat is not None
        return self.flat

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Freeze all parameters below with False, or have them trained again; see `Parameter`."""
        for parameter in self.parameters():
            parameter.requires_grad = requires_grad
        return self

    def __getstate__(self) -> dict[str, Any]:
        """What a copy takes over, a pickled one too: all but the flat buffers, which hold other parameters."""
        return vars(self) | {"flat": None}

    def zero_grad(self) -> None:
        """Set all gradients to zero where the model is flat, or drop them."""
        for parameter in self.parameters():
            parameter.grad = None

    def num_parameters(self) -> int:
        """How many numbers the parameters hold, frozen ones too."""
        return sum(parameter.size for parameter in self.parameters())

    def summary(self) -> None:
        """Print a table of every layer that has parameters: its name, its type, their shapes and counts."""
        from rich.console import Console  # slow to import, and `import cudiff` is not
        from rich.table import Table

        table = Table(title=f"{type(self).__name__}: {self.num_parameters():,} parameters")
        table.add_column("layer", overflow="fold")
        table.add_column("type")
        table.add_column("shapes")
        table.add_column("parameters", justify="right")
        for row in self._rows():
            table.add_row(*row)
        Console().print(table)

    def _repr_html_(self) -> str:
        """What a notebook shows: the rows of `summary`."""
        title = f"{type(self).__name__}: {self.num_parameters():,} parameters"
        return show.table(title, self._rows(), head=("layer", "type", "shapes", "parameters"))

    def _rows(self) -> Iterator[tuple[str, str, str, str]]:
        """Name, type, shapes and count of every layer that has parameters."""
        for name, module in self.named_modules():
            own = {key: value for key, value in vars(module).items() if isinstance(value, Parameter)}
            if own:
                count = sum(value.size for value in own.values())
                yield name or "(self)", type(module).__name__, module._shapes(), f"{count:,}"

    def _shapes(self) -> str:
        """Its own parameters, as "weight 3×2, bias 3"."""
        own = {name: value for name, value in vars(self).items() if isinstance(value, Parameter)}
        return ", ".join(f"{name} {'×'.join(map(str, value.shape))}" for name, value in own.items())

    def extra_repr(self) -> str:
        """What `repr` says of the module itself: its parameters' shapes; a layer's own says its options."""
        return self._shapes()

    def __repr__(self) -> str:
        """`extra_repr`, and below it the modules in it, each on lines of its own, as in PyTorch."""
        own = self.extra_repr()
        inside = [f"({name}): {child!r}".replace("\n", "\n  ") for name, child in self.named_children()]
        parts = "\n  ".join(["", *filter(None, [own]), *inside]) + "\n" if inside else own
        return f"{type(self).__name__}({parts})"


class ModuleList(Module):
    """A list of modules; names are their indices, before those of attributes.

    `None` entries keep PyTorch's numbering where a layer has nothing.
    """

    def __init__(self, items: Iterable[Module | None] = ()):
        super().__init__()
        self._items: list[Module | None] = []
        for item in items:
            self.append(item)

    def named_children(self) -> Iterator[tuple[str, Module]]:
        for index, item in enumerate(self._items):
            if item is not None:
                yield str(index), item
        yield from super().named_children()

    def _require_module(self, item: Any) -> None:
        if not isinstance(item, Module | None):
            kind = type(item).__name__
            raise TypeError(f"a {type(self).__name__} holds modules, not a {kind}: give it a class of its own")

    def append(self, item: Module | None) -> None:
        """Raises TypeError for what is no module."""
        self._require_module(item)
        _, first = next(self.named_parameters(), (None, None))
        self._items.append(item)
        structure_changes()
        if first is not None and first.flat is not None:  # else the model is still being made
            record_again()  # a captured function goes through those before alone

    def __setitem__(self, index: int, item: Module | None) -> None:
        self._require_module(item)
        self._items[index] = item
        structure_changes()
        record_again()

    def __getitem__(self, index: int | slice) -> Any:
        """The module at an index; of a slice a ModuleList of them, of a Sequential's a Sequential."""
        if isinstance(index, slice):
            return Sequential(*self._items[index]) if isinstance(self, Sequential) else ModuleList(self._items[index])
        return self._items[index]

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)


class Sequential(ModuleList):
    """Modules called one after the other."""

    def __init__(self, *items: Module | None):
        super().__init__(items)

    def forward(self, x: Tensor) -> Tensor:
        for item in self._items:
            if item is not None:
                x = item(x)
        return x
