"""What all optimisers share."""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, ClassVar, NamedTuple, NoReturn

import numpy as np

from cudiff.backend import Array, array_module, copy_into, float32, int32, is_low, to_device
from cudiff.cuda.graph import record_again
from cudiff.errors import CudiffError
from cudiff.nn import FlatParameters, Module, Parameter
from cudiff.nn.module import require_fit
from cudiff.nn.parameter import NOT_TRAINABLE, array_of, fitting, structure, structure_changes
from cudiff.ops import optim as ops
from cudiff.ops.loss_scale import LARGEST, unscale
from cudiff.optim.ema import EMA
from cudiff.optim.loss_scale import LossScale
from cudiff.optim.schedules import Constant, Schedule, Tabulated
from cudiff.tensor import Tensor
from cudiff.values import real

Parameters = Module | Iterable[Parameter] | Iterable[Mapping[str, Any]]
"""A model, parameters, or groups such as {"params": model.head.parameters(), "lr": 1e-4}."""


class Checked:
    """An option of an optimiser, checked wherever it is set. check(name, value) -> what it becomes."""

    def __init__(self, check: Callable[[str, Any], Any]):
        self.check = check

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, optimizer: Any, owner: type) -> Any:
        return self if optimizer is None else optimizer.options[self.name]

    def __set__(self, optimizer: Any, value: Any) -> None:
        optimizer.options[self.name] = self.check(self.name, value)
        record_again()  # a captured step holds the one before


class Fixed(tuple):
    """What an optimiser was made for: a tuple that says what to do instead of growing as a list does."""

    def append(self, *value: Any) -> NoReturn:
        raise CudiffError("an optimiser keeps the parameters that it was made for: make it anew with all groups")

    extend = insert = remove = pop = clear = append


class Group(ChainMap):
    """`params`, and the options that a group of parameters has for itself; what it lacks are the optimiser's own.

    own: None where no groups were given: what is set here is then set in the optimiser itself.
    """

    def __init__(self, parameters: list[Parameter], own: Mapping[str, Any] | None, optimizer: Optimizer):
        super().__init__({"params": Fixed(parameters)}, optimizer.options)
        self.kind, self.own = type(optimizer), self.maps[1 if own is None else 0]
        for name, value in (own or {}).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        options = ("lr", *self.kind.numbers)
        if name not in options:
            raise CudiffError(f"a group of {self.kind.__name__} has no option '{name}': use {', '.join(options)}")
        self.own[name] = getattr(self.kind, name).check(name, value)
        record_again()


class Range(NamedTuple):
    """Parameters of one group that lie side by side, as slices of the flat buffers. flags are of every 32 elements;
    places: the start, stop and shape of each parameter in the slices."""

    group: Group
    data: Tensor
    grad: Tensor
    moments: list[Tensor]
    flags: Tensor
    targets: tuple[Tensor | None, ...]
    places: list[tuple[int, int, tuple[int, ...]]]


def _clip(name: str, value: Any) -> float:
    unbounded = value is None or (isinstance(value, float) and value == math.inf)
    return math.inf if unbounded else real(name, value, least=0) or math.inf


def _schedule(name: str, value: Any) -> Schedule:
    if not isinstance(value, Schedule | None):
        kind = type(value).__name__
        raise CudiffError(f"{name} must be a Constant, a Cosine or Tabulated(function, total_steps), not a {kind}")
    return value or Constant()


def betas_of(name: str, value: Any) -> tuple[float, float]:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise CudiffError(f"{name} must be two numbers such as (0.9, 0.999), not {value!r}")
    first, second = (real(name, beta, least=0, below=1) for beta in value)
    return first, second


def _listed(parameters: Any) -> list[Parameter]:
    """The parameters of a model, or those given, each once."""
    if isinstance(parameters, Module):
        return parameters.parameters()
    given = [parameters] if isinstance(parameters, Tensor) or not isinstance(parameters, Iterable) else parameters
    found: list[Any] = list({id(value): value for value in given}.values())
    for value in found:
        if not isinstance(value, Parameter):
            raise CudiffError(
                f"an optimiser takes a Module, nn.Parameters or groups of them, not a {type(value).__name__}: "
                "AdamW(model), AdamW([nn.Parameter(array)])"
            )
    return found


def _flat(parameters: list[Parameter]) -> FlatParameters:
    """The buffers of a list: the range of flat buffers in which they lie, else new ones in the list's order."""
    if not parameters:
        raise CudiffError("there are no parameters to optimise: an iterator may have been used up before")
    named = {str(index): parameter for index, parameter in enumerate(parameters)}
    whole = parameters[0].flat
    flat = None if whole is None else whole.part(named)
    if flat is not None:
        return flat
    if any(value.flat is not None and not value.flat.trainable for value in parameters):
        raise CudiffError(NOT_TRAINABLE)
    devices = {value.device for value in parameters}
    if len(devices) > 1:
        raise CudiffError("the parameters lie on different devices: call the model's flatten(device) first")
    low = None if whole is None or whole.compute_copy is None else whole.compute_copy.dtype
    flat = FlatParameters(named, devices.pop(), low)
    if whole is not None:
        flat.shard(whole.shards.group)
    return flat


class Optimizer:
    """What all optimisers share: flat buffers, device counters, clipping, schedule, EMA, state by name.

    Parameters
    ----------
    parameters : Module, or iterable of Parameter or of groups
        A model is flattened where its parameters lie, unless it is flat. A part of a flat model is trained in its range
        of the model's buffers, so that both may have optimisers; make that of the whole first. Listed parameters that
        do not fill such a range move into buffers of this optimiser. A group is a dict of `params` and of options that
        differ for them: `[{"params": a, "lr": 1e-4}, {"params": b, "weight_decay": 0}]`. Each of its ranges of the
        buffers is an update of its own: list parameters before they are flat, or call `flatten` where a 16-bit
        precision or an EMA needs it. Of a sharded model (`FlatParameters.shard`) it holds the moments of this process's
        part, and all processes call `step`.
    lr : float
        The schedule multiplies it. Where it or another option is set, also in `param_groups`, a captured step is
        recorded again: use a schedule for what changes at each step.
    weight_decay : float
        Applies where `Parameter.decay` is set: not to norms, biases and embeddings.
    clip : float or None
        Largest norm of the whole gradient; None or 0: no clipping.
    schedule : Constant, Cosine or Tabulated
    ema : EMA of the same model, or None
        One optimiser updates an EMA: the last that it was given to. `step` of the one before raises CudiffError.

    A step whose gradient holds a NaN, an infinity or numbers beyond 1e19, whose squares float32 does not hold, changes
    nothing but the counters: see `metrics`. A frozen parameter (`requires_grad = False`) is left as it is, with its
    moments and its average. Adam's bias correction counts all updates: what was frozen from the start and is trained
    later moves up to six times as far at first, unless it gets an optimiser of its own then. What no backward has
    reached has a gradient of zeros: unlike in PyTorch, weight decay and momentum move it, unless it is frozen. Raises
    CudiffError for options out of range, also where they are set later, and `step` for a model whose parameters have
    been replaced since.
    """

    moments: tuple[str, ...] = ()
    numbers: ClassVar[tuple[str, ...]] = ()
    kernel: Callable[..., Any]
    betas: Any = (0.0, 0.0)
    lr, weight_decay = Checked(partial(real, least=0)), Checked(partial(real, least=0))
    clip, schedule = Checked(_clip), Checked(_schedule)

    def __init__(self, parameters: Parameters, lr: float, weight_decay: float, clip: float | None,
                 schedule: Schedule | None, ema: EMA | None, **options: Any):
        self.options: dict[str, Any] = {}
        options |= {"lr": lr, "weight_decay": weight_decay, "clip": clip, "schedule": schedule}
        for name, value in options.items():
            setattr(self, name, value)
        self.model = parameters if isinstance(parameters, Module) else None
        self._param_groups = Fixed(self._groups(parameters))
        self._listed = [parameter for group in self.param_groups for parameter in group["params"]]
        flat = _flat(self._listed) if self.model is None else self.model.flat_parameters()
        if not flat.trainable:
            raise CudiffError(NOT_TRAINABLE)
        self.flat = flat
        self._structure = -1  # at which the parameters were last looked at
        module = array_module(flat.device)
        self._shards = flat.shards
        held = self._shards.own.stop - self._shards.own.start
        self.buffers = {name: module.zeros(held, float32) for name in self.moments}
        self.counters = Tensor(module.zeros(len(ops.Counter), int32))
        self.scalars = Tensor(module.zeros(len(ops.Scalar), float32))
        self._token = object()  # an EMA's optimiser is told by it
        self._tabulated: tuple[Schedule | None, Tensor | None] = (None, None)
        self._ema: EMA | None = None
        self._average: FlatParameters | None = None
        self._buffer_pairs: list[tuple[Tensor, Tensor]] = []
        self._ranges = self._arranged()
        self._loss_scale: LossScale | None = None
        self._scale_state = Tensor(module.zeros(2, float32))
        self._scaled = False  # whether a gradient of a scaled loss has been taken since the last step
        if ema is not None:
            self.ema = ema

    @property
    def param_groups(self) -> Sequence[Group]:
        """One where no groups were given. Their options may be set, their parameters may not."""
        return self._param_groups

    def add_param_group(self, group: Mapping[str, Any]) -> NoReturn:
        """Raises CudiffError: an optimiser is made for all that it trains."""
        self._param_groups.append(group)

    def _groups(self, parameters: Any) -> list[Group]:
        given = list(parameters) if isinstance(parameters, Iterable) and not isinstance(parameters, Tensor) else []
        if not given or isinstance(parameters, Module) or not all(isinstance(group, Mapping) for group in given):
            whole = parameters if isinstance(parameters, Module | Tensor) or not given else given
            return [Group(_listed(whole), None, self)]
        groups = []
        for group in given:
            if "params" not in group:
                raise CudiffError('a group of parameters is {"params": parameters, "lr": 1e-4}; this one has no params')
            own = {name: value for name, value in group.items() if name != "params"}
            groups.append(Group(_listed(group["params"]), own, self))
        listed = [id(parameter) for group in groups for parameter in group["params"]]
        if len(groups) > 1 and len(set(listed)) < len(listed):
            raise CudiffError("a parameter is in two groups: list each in one")
        return groups

    def _arranged(self) -> list[Range]:
        """The ranges of the flat buffers that this process updates at once, in their order."""
        flat, shard, ranges, places = self.flat, self._shards.own, [], []
        averages: tuple[Array | None, ...] = (None, None) if self._ema is None else self._ema.held
        group_of = {id(parameter): group for group in self.param_groups for parameter in group["params"]}
        for parameter, (start, stop, shape) in {
            id(value): (value, place) for value, place in zip(self._own(), flat.slots.values(), strict=True)
        }.values():
            end = start + -(-(stop - start) // 32) * 32
            places.append((start, end, group_of[id(parameter)], (start, stop, shape)))
        places.sort(key=lambda place: place[0])
        for _, run in groupby(places, key=lambda place: id(place[2])):
            (first, last, group, place), *others = run
            own = slice(max(first, shard.start), min(others[-1][1] if others else last, shard.stop))
            if own.start >= own.stop:
                continue
            held = slice(own.start - shard.start, own.stop - shard.start)
            targets = ((flat.compute_copy, own), *((average, held) for average in averages))
            ranges.append(Range(
                group, Tensor(flat.data[own]), Tensor(flat.grad[own]),  # type: ignore[index]
                [Tensor(buffer[held]) for buffer in self.buffers.values()],
                Tensor(flat.flags[own.start // 32 : own.stop // 32]),
                tuple(None if target is None else Tensor(target[place]) for target, place in targets),
                [(a - first, b - first, shape) for a, b, shape in (place, *(other[3] for other in others))],
            ))
        return ranges

    def _own(self) -> list[Parameter]:
        """The parameters that it trains, as they are now: one for each of the buffers' slots."""
        return self._listed if self.model is None else [value for _, value in self.model.named_parameters()]

    @property
    def ema(self) -> EMA | None:
        """What each step updates besides the parameters; it may be set to another EMA of the model, or to None."""
        return self._ema

    @ema.setter
    def ema(self, ema: EMA | None) -> None:
        if ema is self._ema:
            return
        average, pairs, flat = None, [], self.flat
        if ema is not None:
            if not isinstance(ema, EMA):
                raise CudiffError(f"ema must be EMA(model, half_life) or None, not a {type(ema).__name__}")
            average = ema._model.flat_parameters()
            places = [(id(value), place) for value, place in zip(self._own(), flat.slots.values(), strict=True)]
            averaged = list(zip(map(id, ema._averaged), average.slots.values(), strict=True))
            same = self.model is None or list(average.slots) == list(flat.slots)
            same = same and ema._shards.own == self._shards.own
            if not same or dict(places) != dict(averaged) or average.device != flat.device:
                raise CudiffError(
                    "the EMA was made of another model, or of this one in other buffers or shards: use EMA(model, ...) "
                    "on the optimiser's model, and make it before an optimiser of listed parameters"
                )
            pairs = self._paired(ema)
            ema._user = self._token
            structure_changes()  # the optimiser that had it looks at it again
        self._ema, self._average, self._buffer_pairs = ema, average, pairs
        self._ranges = self._arranged()
        record_again()  # a captured step holds the one before

    @property
    def loss_scale(self) -> LossScale | None:
        """How the loss is scaled, for fp16; it may be set, and begins anew then. None: not at all."""
        return self._loss_scale

    @loss_scale.setter
    def loss_scale(self, loss_scale: LossScale | None) -> None:
        if not isinstance(loss_scale, LossScale | None):
            raise CudiffError(f"loss_scale must be a LossScale() or None, not a {type(loss_scale).__name__}")
        self._loss_scale, self._scaled = loss_scale, False
        self._scale_state.data[...] = to_device(np.array([loss_scale.initial if loss_scale else 0, 0], np.float32),
                                                self.flat.device)
        record_again()

    def backward(self, loss: Tensor) -> None:
        """`loss.backward()`; where `loss_scale` is set, of the loss times the scale.

        `step` divides the whole gradient by the scale: then all losses between two steps have to come here."""
        if self._loss_scale is None or loss.size != 1:
            loss.backward()
            return
        loss = loss.astype(float32) if is_low(loss.dtype) else loss  # fp16 has no number as large as the scale
        loss.backward(Tensor(self._scale_state.data[:1].reshape(loss.shape)))
        self._scaled = True

    def zero_grad(self) -> None:
        """Set the gradients to zero; the next backward overwrites them."""
        self.flat.zero_grad()

    def step(self, scale: float = 1.0) -> None:
        """Update the parameters from `scale` times the gradients, and the EMA. Reads nothing back from the device."""
        if self._structure != structure():
            self._require_parameters()
            self._structure = structure()
        if self._loss_scale is not None and not self._scaled:
            raise CudiffError("this optimiser scales the loss: call optimizer.backward(loss), not loss.backward()")
        self._scaled, scale = False, real("scale", scale, above=0)
        schedule, shards = self.schedule, self._shards
        grad, peers = Tensor(self.flat.grad[shards.own]), self._peers(self.flat.data[shards.own])  # type: ignore[index]
        squares = Tensor(shards.sums(ops.square_sums(grad, shards.chunk, peers).data))
        half_life, ramp = (1.0, None) if self.ema is None else self.ema.checked()
        lr = max(group["lr"] for group in self.param_groups)
        ops.step_scalars(
            self.scalars, self.counters, squares, lr=lr, warmup=schedule.warmup, total_steps=schedule.total_steps,
            final=schedule.final, betas=self.betas, scale=scale, clip=self.clip, half_life=half_life, ramp=ramp,
        )
        if self._loss_scale is not None:
            unscale(self._scale_state, self.scalars, self.counters, scale=scale, clip=self.clip,
                    interval=self._loss_scale.interval)
        if isinstance(schedule, Tabulated):
            if self._tabulated[0] is not schedule:
                self._tabulated = schedule, Tensor(to_device(schedule.factors, self.flat.device))
            ops.rescale(self.scalars, self.counters, self.scalars, self._tabulated[1], betas=self.betas)
        known = {(lr, self.betas): self.scalars}

        def scalars_for(rate: float, betas: tuple[float, float]) -> Tensor:
            if (rate, betas) not in known:
                own = Tensor(array_module(self.flat.device).empty(len(ops.Scalar), float32))
                ratio = rate / lr if lr else 0.0
                known[rate, betas] = ops.rescale(self.scalars, self.counters, own, ratio=ratio, betas=betas)
            return known[rate, betas]

        for part in self._ranges:
            self._update(part, scalars_for)
        self.flat.finish_update()
        self.flat.updated()
        if self._average is not None:
            self._average.updated()
        for value, ema_value in self._buffer_pairs:
            ema_value.data[...] = value.data

    def __getstate__(self) -> dict[str, Any]:
        """What a copy takes over: its parameters are to be looked at."""
        return vars(self) | {"_structure": -1}

    def __copy__(self) -> Any:
        raise CudiffError(
            "a copy of an optimiser would train the same parameters: make a new one, and load_state_dict of this one's "
            "state_dict()"
        )

    def _require_parameters(self) -> None:
        """Raise CudiffError unless the model and its EMA still have the parameters that they had."""
        if not self.flat.holds(self._own()):
            raise CudiffError(
                "the optimiser was made for other parameters (the model was flattened again, a layer was replaced, an "
                "optimiser of a larger model took them over, or this is a copy): make it anew"
            )
        if self.ema is None or self._average is None:
            return
        if self.ema._user is not self._token:
            raise CudiffError("another optimiser was given this one's EMA: make an EMA(model, ...) for each")
        if not self._average.holds([value for _, value in self.ema._model.named_parameters()]):
            raise CudiffError(
                "the EMA's model was flattened again, or a layer of it replaced: make the optimiser anew, or train a "
                "copy.deepcopy of that model"
            )
        self._buffer_pairs = self._paired(self.ema)

    def _paired(self, ema: EMA) -> list[tuple[Tensor, Tensor]]:
        """The model's buffers and the EMA's, to which each step copies them. Raises CudiffError where they differ."""
        own, averages = dict(ema._source.named_buffers()), dict(ema._model.named_buffers())
        require_fit(own, averages, "the buffers were registered after the EMA was made, make it and the optimiser anew")
        return [(value, averages[name]) for name, value in own.items()]

    def _update(self, part: Range, scalars_for: Callable[[float, tuple[float, float]], Tensor]) -> None:
        """Update one range. scalars_for(lr, betas): the step's scalars with these."""
        group = part.group
        scalars = scalars_for(group["lr"], group.get("betas", self.betas))
        numbers = {name: group[name] for name in self.numbers}
        numbers["peers"] = self._peers(part.data.data)
        self.kernel(part.data, part.grad, *part.moments, scalars, part.flags, *part.targets, **numbers)

    def _peers(self, data: Array) -> list[ops.Peer]:
        return [ops.Peer(*addresses) for addresses in self._shards.group.peers(data)]

    def metrics(self) -> dict[str, float]:
        """The last step's `lr` (the groups' largest) and `grad_norm` (before clipping); how many steps were `skipped`,
        how many `skipped_in_a_row`, how many `updates` made; the next step's `loss_scale` where that is set. Waits for
        the device: call it when logging."""
        scalars, counters = self.scalars.numpy(), self.counters.numpy()
        values = {"lr": float(scalars[ops.Scalar.LR]), "grad_norm": float(scalars[ops.Scalar.NORM])}
        if self._loss_scale is not None:
            values["loss_scale"] = float(self._scale_state.numpy()[0])
        return values | {counter.name.lower(): int(counters[counter]) for counter in ops.Counter}

    def state_dict(self) -> dict[str, np.ndarray]:
        """Copies: `counters`, `loss_scale` where that is set, and every moment by parameter name, e.g.
        `exp_avg.input_blocks.0.0.weight`. Of a sharded model process 0 has the moments, and all processes call it."""
        state = {"counters": np.array(self.counters.numpy())}
        if self._loss_scale is not None:
            state["loss_scale"] = np.array(self._scale_state.numpy())
        for moment, buffer in self.buffers.items():
            whole = self._shards.whole(buffer)
            views = {} if whole is None else self.flat.views(whole)
            state |= {f"{moment}.{name}": np.array(view) for name, view in views.items()}
        return state

    def load_state_dict(self, state: Mapping[str, Array | Tensor]) -> None:
        """Continue from `state_dict()`, whole on all processes of a sharded model. A `loss_scale` that only the state
        has is left out; one that only the optimiser has stays as it is. Raises CudiffError where other names or shapes
        differ or numbers are out of range, TypeError for what are no numbers, both before anything is changed."""
        targets: dict[str, Array] = {"counters": self.counters.data}
        if self._loss_scale is None:
            state = {name: value for name, value in state.items() if name != "loss_scale"}
        elif "loss_scale" in state:
            targets["loss_scale"] = self._scale_state.data
        shared = self._shards.shared
        wholes = {moment: np.zeros(self.flat.size, float32) if shared else own for moment, own in self.buffers.items()}
        for moment, whole in wholes.items():
            targets |= {f"{moment}.{name}": view for name, view in self.flat.views(whole).items()}
        state = {name: array_of(value) for name, value in state.items()}
        require_fit(state, targets, "the optimiser's state does not fit")
        fitted = {name: fitting(name, state[name], target.dtype) for name, target in targets.items()}
        if (fitted["counters"] < 0).any():
            raise CudiffError(f"the optimiser's counters are negative, {fitted['counters']}: the state is damaged")
        if "loss_scale" in fitted and not (1 <= fitted["loss_scale"][0] <= LARGEST and fitted["loss_scale"][1] >= 0):
            raise CudiffError(f"the loss scale is {fitted['loss_scale'][0]}, not in 1 to 2**24: the state is damaged")
        for name, target in targets.items():
            copy_into(target, fitted[name])
        for moment, own in self.buffers.items() if shared else ():
            copy_into(own, wholes[moment][self._shards.own])
