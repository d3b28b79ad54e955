"""Adam and AdamW."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from cudiff.ops import optim as ops
from cudiff.optim.ema import EMA
from cudiff.optim.optimizer import Checked, Optimizer, Parameters, betas_of
from cudiff.optim.schedules import Schedule
from cudiff.values import real


class Adam(Optimizer):
    """Adam (Kingma and Ba, 2015); weight decay is added to the gradient."""

    moments: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    numbers = ("betas", "eps", "weight_decay")
    kernel: Callable[..., Any] = staticmethod(ops.adam)
    betas, eps = Checked(betas_of), Checked(partial(real, above=0))

    def __init__(self, parameters: Parameters, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
                 eps: float = 1e-8, weight_decay: float = 0.0, clip: float | None = None,
                 schedule: Schedule | None = None, ema: EMA | None = None):
        super().__init__(parameters, lr, weight_decay, clip, schedule, ema, betas=betas, eps=eps)


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019)."""

    kernel: Callable[..., Any] = staticmethod(ops.adamw)

    def __init__(self, parameters: Parameters, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
                 eps: float = 1e-8, weight_decay: float = 0.01, clip: float | None = None,
                 schedule: Schedule | None = None, ema: EMA | None = None):
        super().__init__(parameters, lr, betas, eps, weight_decay, clip, schedule, ema)
