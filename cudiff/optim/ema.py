"""The moving average of a model's weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

from cudiff.backend import Array
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
        from it. Of a sharded model (`FlatParameters.shard`) a process holds a part of the average: outside of `whole`
        this raises CudiffError.

    What is frozen keeps the average that it has: load weights before the average is made.
    """

    def __init__(self, model: Module, half_life: float, ramp: float | None = 0.05):
        if not isinstance(model, Module):
            raise CudiffError(f"an EMA averages a Module, not a {type(model).__name__}: EMA(model, half_life=500)")
        flat = model.flat_parameters()
        self._source, self._averaged = model, [value for _, value in model.named_parameters()]
        self._user: object = None  # the token of the optimiser that updates it
        self.half_life, self.ramp = half_life, ramp
        self.checked()
        # The EMA model starts on the same arrays: flatten copies their values into buffers of its own.
        own = {id(x): copy.copy(x) for x in model.parameters()}
        self._model: Module = copy.deepcopy(model, own).eval()
        self._flat, self._shards = flat, flat.shards
        self._part: Array | None = None
        self._is_whole = not flat.shards.shared
        if self._is_whole:
            self._model.flatten(flat.device, trainable=False)
        else:  # it stays on them, for which `whole` exchanges the average
            flat.lend([value for _, value in self._model.named_parameters()])
            self._part = flat.data[flat.shards.own].copy()

    def checked(self) -> tuple[float, float | None]:
        """half_life and ramp, which may have been set since. Raises CudiffError where they are not above 0."""
        ramp = None if self.ramp is None else real("ramp", self.ramp, above=0)
        return real("half_life", self.half_life, above=0), ramp

    @property
    def model(self) -> Module:
        if not self._is_whole:
            raise CudiffError(
                f"the average lies in {self._shards.group.size} parts, one a process: use its model within `with "
                "ema.whole():`, which all processes enter, or load a checkpoint"
            )
        return self._model

    @property
    def held(self) -> tuple[Array, Array | None]:
        """The average, flat, of what this process updates; its 16-bit copy where it has one."""
        if self._part is not None:
            return self._part, None
        flat = self._model.flat_parameters()
        return flat.data, flat.compute_copy

    @contextmanager
    def whole(self) -> Iterator[Module]:
        """Within the block `model`, which it gives, has the whole average.

        All processes of a sharded model enter it; until they leave, the model's own weights are the average, which
        takes no more memory. Values that are loaded into `model` are kept.
        """
        if self._is_whole:
            yield self._model
            return
        self._exchange()
        self._is_whole = True
        try:
            yield self._model
        finally:
            self._is_whole = False
            self._exchange()

    def _exchange(self) -> None:
        """Swap this process's part of the weights and of the average, and gather what the weights are then."""
        assert self._part is not None
        own = self._flat.data[self._shards.own]
        kept = own.copy()
        own[...] = self._part
        self._part[...] = kept
        self._flat.all_gather()
