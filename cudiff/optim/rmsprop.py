"""RMSprop."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from cudiff.ops import optim as ops
from cudiff.optim.ema import EMA
from cudiff.optim.optimizer import Checked, Optimizer, Parameters
from cudiff.optim.schedules import Schedule
from cudiff.values import flag, real


class RMSprop(Optimizer):
    """RMSprop (Hinton, lecture 6e of "Neural Networks for Machine Learning", 2012) as torch.optim.RMSprop defines it.

    The gradient is divided by the root of its mean square, of its variance where `centered` (Graves, 2013), which
    takes a buffer more and cannot be changed later. Weight decay is added to the gradient.
    """

    moments: tuple[str, ...] = ("square_avg", "momentum_buffer")
    numbers = ("alpha", "eps", "momentum", "weight_decay")
    kernel: Callable[..., Any] = staticmethod(ops.rmsprop)
    alpha, eps = Checked(partial(real, least=0, below=1)), Checked(partial(real, above=0))
    momentum = Checked(partial(real, least=0, below=1))

    def __init__(self, parameters: Parameters, lr: float = 1e-2, alpha: float = 0.99, eps: float = 1e-8,
                 momentum: float = 0.0, centered: bool = False, weight_decay: float = 0.0, clip: float | None = None,
                 schedule: Schedule | None = None, ema: EMA | None = None):
        if flag("centered", centered):
            self.moments = (*RMSprop.moments, "grad_avg")
            self.kernel = ops.centered_rmsprop
        super().__init__(parameters, lr, weight_decay, clip, schedule, ema, alpha=alpha, eps=eps, momentum=momentum)
