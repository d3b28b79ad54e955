"""Optimisers, learning-rate schedules and the moving average of weights, over a model's flat buffers.

    model.flatten(device)
    optimizer = AdamW(model, lr=2e-4, clip=1.0, schedule=Cosine(10_000, warmup=200), ema=EMA(model, half_life=500))
    ...
    optimizer.zero_grad()
    loss_fn(model, images, labels, generator).backward()
    optimizer.step()
    generator.advance()  # else the next step has the same noise

Gradients add up in the flat buffer until `zero_grad`; for the mean over k backward passes call `step(scale=1 / k)`.
`step` reads nothing back from the device, so that it can be captured in a CUDA graph.
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np

from cudiff.backend import Array, array_module, copy_into, float32, int32, to_device
from cudiff.cuda.graph import record_again
from cudiff.errors import CudiffError
from cudiff.nn import FlatParameters, Module
from cudiff.nn.module import require_fit
from cudiff.nn.parameter import NOT_TRAINABLE, array_of, fitting, structure, structure_changes
from cudiff.ops import optim as ops
from cudiff.tensor import Tensor
from cudiff.values import real


@dataclass(frozen=True)
class Constant:
    """The full learning rate, after a linear rise over the first `warmup` steps."""

    warmup: int = 0
    total_steps: ClassVar[int] = 0
    final: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        real("warmup", self.warmup, least=0)

    def factor(self, step: int) -> float:
        """What the learning rate is multiplied by at `step`, counted from 0."""
        return ops.lr_factor(step, self.warmup, self.total_steps, self.final)


@dataclass(frozen=True)
class Cosine:
    """A linear rise over `warmup` steps, then half a cosine down to `final` times the learning rate at `total_steps`.

    Loshchilov and Hutter, "SGDR" (2017), equation 5, without restarts.
    """

    total_steps: int
    final: float = 0.0
    warmup: int = 0

    def __post_init__(self) -> None:
        real("warmup", self.warmup, least=0)
        real("final", self.final, least=0)
        if self.total_steps <= self.warmup:
            raise CudiffError(f"a cosine schedule needs total_steps ({self.total_steps}) beyond warmup ({self.warmup})")

    def factor(self, step: int) -> float:
        """What the learning rate is multiplied by at `step`, counted from 0."""
        return ops.lr_factor(step, self.warmup, self.total_steps, self.final)


class _Checked:
    """An attribute of an optimiser, checked wherever it is set. check(name, value) -> what it becomes."""

    def __init__(self, check: Callable[[str, Any], Any]):
        self.check = check

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, optimizer: Any, owner: type) -> Any:
        return self if optimizer is None else vars(optimizer)[self.name]

    def __set__(self, optimizer: Any, value: Any) -> None:
        vars(optimizer)[self.name] = self.check(self.name, value)


def _clip(name: str, value: Any) -> float:
    unbounded = value is None or (isinstance(value, float) and value == math.inf)
    return math.inf if unbounded else real(name, value, least=0) or math.inf


def _schedule(name: str, value: Any) -> Constant | Cosine:
    if not isinstance(value, Constant | Cosine | None):
        raise CudiffError(f"{name} must be a Constant or a Cosine of cudiff.optim, not a {type(value).__name__}")
    return value or Constant()


def _betas(name: str, value: Any) -> tuple[float, float]:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise CudiffError(f"{name} must be two numbers such as (0.9, 0.999), not {value!r}")
    first, second = (real(name, beta, least=0, below=1) for beta in value)
    return first, second


def _flat(model: Any) -> FlatParameters:
    if not isinstance(model, Module):
        raise CudiffError(f"an optimiser takes a Module, not a {type(model).__name__}: AdamW(model)")
    return model.flat_parameters()


class EMA:
    """An exponential moving average of a model's weights, held by an EMA model; the optimiser's kernel updates it.

    Parameters
    ----------
    model : Module, flattened or flattened now
    half_life : float
        Steps after which a weight counts half; EDM gives it in images: divide by the batch size.
    ramp : float or None
        The half-life is at most ramp · step, so that a young average forgets the initial weights (Karras et al. 2022,
        training code, ema_rampup_ratio). None: no ramp.

    Attributes
    ----------
    model : Module
        The EMA model: averaged weights (with their own 16-bit compute copy), evaluation mode, no gradients. Sample
        from it.

    What is frozen keeps the average that it has: load weights before the average is made.
    """

    def __init__(self, model: Module, half_life: float, ramp: float | None = 0.05):
        flat = _flat(model)
        self._averaged = model.parameters()
        self._user: object = None  # the token of the optimiser that updates it
        self.half_life = real("half_life", half_life, above=0)
        self.ramp = None if ramp is None else real("ramp", ramp, above=0)
        # The EMA model starts on the same arrays: flatten copies their values into buffers of its own.
        own = {id(x): copy.copy(x) for x in model.parameters()}
        self.model: Module = copy.deepcopy(model, own)
        self.model.eval().flatten(flat.device, trainable=False)


class Optimizer:
    """What all optimisers share: flat buffers, device counters, clipping, schedule, EMA, state by name.

    Parameters
    ----------
    model : Module
        Flattened, or flattened now where its parameters lie. A part of a flat model is trained in its range of the
        model's buffers, so that both may have optimisers; make that of the whole first.
    lr : float
        The schedule multiplies it. It, and all numbers below, are frozen into a captured step.
    weight_decay : float
        Applies where `Parameter.decay` is set: not to norms, biases and embeddings.
    clip : float or None
        Largest norm of the whole gradient; None or 0: no clipping.
    schedule : Constant or Cosine
    ema : EMA of the same model, or None
        One optimiser updates an EMA: the last that it was given to. `step` of the one before raises CudiffError.

    A step whose gradient holds a NaN or an infinity changes nothing but the counters: see `metrics`. A frozen parameter
    (`requires_grad = False`) is left as it is, with its moments and its average. Raises CudiffError for options out of
    range, also where they are set later, and `step` for a model whose parameters have been replaced since.
    """

    moments: ClassVar[tuple[str, ...]] = ()
    betas: Any = (0.0, 0.0)
    lr, weight_decay = _Checked(partial(real, least=0)), _Checked(partial(real, least=0))
    clip, schedule = _Checked(_clip), _Checked(_schedule)
    _ema: EMA | None = None

    def __init__(self, model: Module, lr: float, weight_decay: float, clip: float | None,
                 schedule: Constant | Cosine | None, ema: EMA | None):
        self.lr, self.weight_decay, self.clip, self.schedule = lr, weight_decay, clip, schedule
        flat = _flat(model)
        if not flat.trainable:
            raise CudiffError(NOT_TRAINABLE)
        self.model, self.flat = model, flat
        self._structure = -1  # at which the parameters were last looked at
        module = array_module(flat.device)
        self.buffers = {name: module.zeros(flat.size, float32) for name in self.moments}
        self.counters = Tensor(module.zeros(len(ops.Counter), int32))
        self.scalars = Tensor(module.zeros(8, float32))
        self._token = object()  # an EMA's optimiser is told by it
        self._average: FlatParameters | None = None
        self._buffer_pairs: list[tuple[Tensor, Tensor]] = []
        self._targets: tuple[Tensor | None, ...] = (_tensor(flat.compute_copy), None, None)
        self.ema = ema

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
            average, own = _flat(ema.model), self.model.parameters()
            averaged = len(own) == len(ema._averaged) and all(map(operator.is_, own, ema._averaged))
            if not averaged or average.slots != flat.slots or average.device != flat.device:
                raise CudiffError("the EMA was made of another model: use EMA(model, ...) on the optimiser's model")
            pairs = self._paired(ema)
            ema._user = self._token
            structure_changes()  # the optimiser that had it looks at it again
        self._ema, self._average, self._buffer_pairs = ema, average, pairs
        averages = (None, None) if average is None else (_tensor(average.data), _tensor(average.compute_copy))
        self._targets = (_tensor(flat.compute_copy), *averages)
        record_again()  # a captured step holds the one before

    def zero_grad(self) -> None:
        """Set the gradients to zero: one fill of the flat buffer."""
        self.flat.zero_grad()

    def step(self, scale: float = 1.0) -> None:
        """Update the parameters from `scale` times the gradients, and the EMA. Reads nothing back from the device."""
        if self._structure != structure():
            self._require_parameters()
            self._structure = structure()
        grad = Tensor(self.flat.grad)
        average = (1.0, None) if self.ema is None else (self.ema.half_life, self.ema.ramp)
        scale = real("scale", scale, above=0)
        ops.step_scalars(
            self.scalars, self.counters, grad, lr=self.lr, warmup=self.schedule.warmup,
            total_steps=self.schedule.total_steps, final=self.schedule.final, betas=self.betas, scale=scale,
            clip=self.clip, half_life=average[0], ramp=average[1],
        )
        buffers = [Tensor(buffer) for buffer in self.buffers.values()]
        self._update(Tensor(self.flat.data), grad, *buffers, self.scalars, Tensor(self.flat.flags), *self._targets)
        self.flat.updated()
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
        if not self.flat.holds(self.model.parameters()):
            raise CudiffError(
                "the optimiser was made for other parameters (the model was flattened again, a layer was replaced, an "
                "optimiser of a larger model took them over, or this is a copy): make it anew"
            )
        if self.ema is None or self._average is None:
            return
        if self.ema._user is not self._token:
            raise CudiffError("another optimiser was given this one's EMA: make an EMA(model, ...) for each")
        if not self._average.holds(self.ema.model.parameters()):
            raise CudiffError(
                "the EMA's model was flattened again, or a layer of it replaced: make the optimiser anew, or train a "
                "copy.deepcopy of that model"
            )
        self._buffer_pairs = self._paired(self.ema)

    def _paired(self, ema: EMA) -> list[tuple[Tensor, Tensor]]:
        """The model's buffers and the EMA's, to which each step copies them. Raises CudiffError where they differ."""
        own, averages = dict(self.model.named_buffers()), dict(ema.model.named_buffers())
        require_fit(own, averages, "the buffers were registered after the EMA was made, make it and the optimiser anew")
        return [(value, averages[name]) for name, value in own.items()]

    def _update(self, *buffers: Any) -> None:
        raise NotImplementedError

    def metrics(self) -> dict[str, float]:
        """The last step's `lr` and `grad_norm` (before clipping); how many steps were `skipped`, how many
        `skipped_in_a_row`, how many `updates` made. Waits for the device: call it when logging."""
        scalars, counters = self.scalars.numpy(), self.counters.numpy()
        values = {"lr": float(scalars[ops.Scalar.LR]), "grad_norm": float(scalars[ops.Scalar.NORM])}
        return values | {counter.name.lower(): int(counters[counter]) for counter in ops.Counter}

    def state_dict(self) -> dict[str, np.ndarray]:
        """Copies: `counters`, and every moment by parameter name, e.g. `exp_avg.input_blocks.0.0.weight`."""
        state = {"counters": np.array(self.counters.numpy())}
        for moment, buffer in self.buffers.items():
            views = self.flat.views(to_device(buffer, "cpu"))
            state |= {f"{moment}.{name}": np.array(view) for name, view in views.items()}
        return state

    def load_state_dict(self, state: Mapping[str, Array | Tensor]) -> None:
        """Continue from `state_dict()`. Raises CudiffError where names or shapes differ or numbers are out of range,
        TypeError for what are no numbers, both before anything is changed."""
        targets: dict[str, Array] = {"counters": self.counters.data}
        for moment, buffer in self.buffers.items():
            targets |= {f"{moment}.{name}": view for name, view in self.flat.views(buffer).items()}
        state = {name: array_of(value) for name, value in state.items()}
        require_fit(state, targets, "the optimiser's state does not fit")
        fitted = {name: fitting(name, state[name], target) for name, target in targets.items()}
        if (fitted["counters"] < 0).any():
            raise CudiffError(f"the optimiser's counters are negative, {fitted['counters']}: the state is damaged")
        for name, target in targets.items():
            copy_into(target, fitted[name])


def _tensor(array: Array | None) -> Tensor | None:
    return None if array is None else Tensor(array)


class Adam(Optimizer):
    """Adam (Kingma and Ba, 2015); weight decay is added to the gradient."""

    moments = ("exp_avg", "exp_avg_sq")
    betas, eps = _Checked(_betas), _Checked(partial(real, above=0))
    _kernel: ClassVar[Callable] = staticmethod(ops.adam)

    def __init__(self, model: Module, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 0.0, clip: float | None = None, schedule: Constant | Cosine | None = None,
                 ema: EMA | None = None):
        self.betas, self.eps = betas, eps
        super().__init__(model, lr, weight_decay, clip, schedule, ema)

    def _update(self, *buffers: Any) -> None:
        self._kernel(*buffers, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay)


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019)."""

    _kernel = staticmethod(ops.adamw)

    def __init__(self, model: Module, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 0.01, clip: float | None = None, schedule: Constant | Cosine | None = None,
                 ema: EMA | None = None):
        super().__init__(model, lr, betas, eps, weight_decay, clip, schedule, ema)


class SGD(Optimizer):
    """Stochastic gradient descent with momentum, optionally Nesterov's; weight decay is added to the gradient."""

    moments = ("momentum_buffer",)
    momentum, nesterov = _Checked(partial(real, least=0, below=1)), _Checked(lambda name, value: bool(value))

    def __init__(self, model: Module, lr: float = 1e-2, momentum: float = 0.0, nesterov: bool = False,
                 weight_decay: float = 0.0, clip: float | None = None, schedule: Constant | Cosine | None = None,
                 ema: EMA | None = None):
        self.momentum, self.nesterov = momentum, nesterov
        super().__init__(model, lr, weight_decay, clip, schedule, ema)

    def _update(self, *buffers: Any) -> None:
        ops.sgd(*buffers, momentum=self.momentum, weight_decay=self.weight_decay, nesterov=self.nesterov)
