"""Gradient descent with momentum."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from cudiff.ops import optim as ops
from cudiff.optim.ema import EMA
from cudiff.optim.optimizer import Checked, Optimizer, Parameters
from cudiff.optim.schedules import Schedule
from cudiff.values import flag, real


class SGD(Optimizer):
    """Stochastic gradient descent with momentum, optionally Nesterov's; weight decay is added to the gradient."""

    moments: tuple[str, ...] = ("momentum_buffer",)
    numbers = ("momentum", "weight_decay", "nesterov")
    kernel: Callable[..., Any] = staticmethod(ops.sgd)
    momentum, nesterov = Checked(partial(real, least=0, below=1)), Checked(flag)

    def __init__(self, parameters: Parameters, lr: float = 1e-2, momentum: float = 0.0, nesterov: bool = False,
                 weight_decay: float = 0.0, clip: float | None = None, schedule: Schedule | None = None,
                 ema: EMA | None = None):
        super().__init__(parameters, lr, weight_decay, clip, schedule, ema, momentum=momentum, nesterov=nesterov)
