"""Loss scaling for fp16."""

from __future__ import annotations

from cudiff.ops.loss_scale import LARGEST
from cudiff.values import real, whole


class LossScale:
    """Dynamic loss scaling (Micikevicius et al., 2018, arXiv 1710.03740), for `optimizer.loss_scale`.

    initial : float
        What the loss is multiplied by at first, in 1 to 2**24. A gradient that is not finite halves it, to 1 at least.
    interval : int
        Updates in a row after which it doubles, to 2**24 at most.

    fp16 has no numbers below 6e-8 and none above 65504; gradients are often smaller. `optimizer.backward(loss)` takes
    the gradient of the scaled loss, and `step` divides by the scale. It lies on the device, so that a captured step can
    change it.
    """

    def __init__(self, initial: float = 2.0**16, interval: int = 2000):
        self.initial = real("initial", initial, least=1, most=LARGEST)
        self.interval = whole("interval", interval, least=1)
