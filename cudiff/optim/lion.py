"""Lion."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cudiff.ops import optim as ops
from cudiff.optim.ema import EMA
from cudiff.optim.optimizer import Checked, Optimizer, Parameters, betas_of
from cudiff.optim.schedules import Schedule


class Lion(Optimizer):
    """Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, arXiv 2302.06675, algorithm 2).

    Every parameter moves by the learning rate, in the direction of a sign; weight decay is decoupled. Against AdamW's,
    the paper takes a learning rate 3 to 10 times smaller and a weight decay as many times larger.
    """

    moments: tuple[str, ...] = ("exp_avg",)
    numbers = ("betas", "weight_decay")
    kernel: Callable[..., Any] = staticmethod(ops.lion)
    betas = Checked(betas_of)

    def __init__(self, parameters: Parameters, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99),
                 weight_decay: float = 0.0, clip: float | None = None, schedule: Schedule | None = None,
                 ema: EMA | None = None):
        super().__init__(parameters, lr, weight_decay, clip, schedule, ema, betas=betas)
