"""Dynamic loss scaling, which keeps gradients in fp16 from underflow and from overflow.

The loss is multiplied by a scale before backward, and the update divides by it (Micikevicius et al., 2018, arXiv
1710.03740, sections 3.2 and 5). An update that is skipped for a gradient that is not finite halves the scale;
`interval` updates in a row double it.
"""

from __future__ import annotations

import math

import numpy as np

from cudiff.backend import bfloat16
from cudiff.cuda.launch import launch
from cudiff.function import Context, Function
from cudiff.ops.optim import Counter, Scalar
from cudiff.tensor import Tensor

LARGEST = 2.0**24
"""The largest scale, as in NVIDIA's Apex: gradients that stay 0 would double it without end."""


class Unscale(Function):
    """See `unscale`."""

    differentiable = False

    @staticmethod
    def forward_numpy(ctx: Context, state, scalars, counters, *, scale, clip, interval):
        by, good = float(state[0]), float(state[1])
        norm = float(scalars[Scalar.NORM]) / by
        scalars[Scalar.NORM] = norm
        scalars[Scalar.GRAD_SCALE] = scale * min(1.0, clip / (norm + 1e-6)) / by
        if scalars[Scalar.APPLY]:
            grows = good + 1 >= interval
            state[:] = min(LARGEST, 2 * by) if grows else by, 0 if grows else good + 1
        else:
            if by > 1:
                counters[Counter.SKIPPED_IN_A_ROW] = 0
            state[:] = max(1.0, by / 2), 0
        return state

    @staticmethod
    def forward_cuda(ctx: Context, state, scalars, counters, *, scale, clip, interval):
        args = (state, scalars, counters, np.float64(scale), np.float64(clip), interval, LARGEST)
        launch("optim", "unscale", 1, 32, args, T=bfloat16)
        return state


def unscale(state: Tensor, scalars: Tensor, counters: Tensor, *, scale: float = 1.0, clip: float = math.inf,
            interval: int = 2000) -> Tensor:
    """Divide what `step_scalars` wrote for a scaled gradient by the loss scale, and update the scale; in place.

    state: float32 (2,), the loss scale, in 1 to 2**24, and how many updates in a row used it. `scalars`, `counters`,
    `scale` and `clip` are those of `step_scalars`. A skipped update is not counted in SKIPPED_IN_A_ROW while the scale
    can still be halved. Returns `state`.
    """
    return Unscale.apply(state, scalars, counters, scale=float(scale), clip=float(clip), interval=int(interval))
