"""The moving average of a model's weights."""

from __future__ import annotations

import copy

from cudiff.errors import CudiffError
from cudiff.nn import Module
from cudiff.values import real


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
        if not isinstance(model, Module):
            raise CudiffError(f"an EMA averages a Module, not a {type(model).__name__}: EMA(model, half_life=500)")
        flat = model.flat_parameters()
        self._source, self._averaged = model, model.parameters()
        self._user: object = None  # the token of the optimiser that updates it
        self.half_life = real("half_life", half_life, above=0)
        self.ramp = None if ramp is None else real("ramp", ramp, above=0)
        # The EMA model starts on the same arrays: flatten copies their values into buffers of its own.
        own = {id(x): copy.copy(x) for x in model.parameters()}
        self.model: Module = copy.deepcopy(model, own)
        self.model.eval().flatten(flat.device, trainable=False)
