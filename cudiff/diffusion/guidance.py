"""Classifier-free guidance, arXiv 2207.12598: labels dropped in training, two estimates mixed in sampling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cudiff import ops
from cudiff.backend import copy_into, float32
from cudiff.diffusion.denoiser import blended, frame_of, has_frame, per_sample
from cudiff.errors import CudiffError
from cudiff.ops.cast import as_index
from cudiff.ops.random import Generator, Purpose
from cudiff.ops.timestep_embedding import noise_levels
from cudiff.tensor import Tensor
from cudiff.values import real, whole

NULL_CLASS = -1
"""The label of "no class"; an embedding gives it a zero row."""


def drop_labels(labels: Any, probability: float, generator: Generator) -> Tensor | None:
    """Labels (N,), integers, each replaced by the null class -1 with this probability.

    Classifier-free guidance, arXiv 2207.12598, Algorithm 1, line 3.
    """
    if labels is None or probability == 0:
        return labels
    labels = as_index("drop_labels", labels, generator.device)
    draws = generator.uniform(labels.shape, stream=Purpose.LABEL_DROP)
    kept = ops.astype(draws + (1 - probability), "uint8")  # not 0 where the draw is at least the probability
    # in float32, exact up to 2^24 classes: device arithmetic is for floats
    return ops.astype(ops.where(kept, ops.astype(labels, float32), float(NULL_CLASS)), labels.dtype)


class Guided:
    """Classifier-free guidance: D_null + guidance * (D_class - D_null), in one call of twice the batch.

    arXiv 2207.12598, equation 6, whose w is guidance - 1: 1 is the plain conditional denoiser, 0 the unconditional
    one. The null class is label -1. Without labels there is nothing to guide and the denoiser is called as it is.

    interval: (low, high), the noise levels low < sigma <= high that are guided; the others take D_class (arXiv
    2404.07724, equation 5). That saves no evaluation: the host does not know a captured step's sigma.
    rescale: phi of arXiv 2305.08891, equations 15 and 16, 0 to 1, here of estimates of the image: the guided one's
    standard deviation is brought to D_class's, and phi of that is mixed with 1 - phi of the guided one as it was.
    channels: only so many channels, the first ones, are guided, of the others D_class is taken; 0 for all. DiT's own
    code (arXiv 2212.09748) guides the first three of its latents' four.
    device: where the numbers lie as Tensors, for graphs, which then follow `guide`; without it they are Python's.
    Raises CudiffError for numbers out of range.
    """

    def __init__(self, denoiser: Any, guidance: float, interval: tuple[float, float] | None = None,
                 rescale: float = 0.0, channels: int = 0, device: str | None = None):
        self.denoiser, self._device = denoiser, device
        self.channels = whole("guidance_channels", channels, least=0)
        self._table: Tensor | None = None
        self._null: dict[tuple[str, int], Tensor] = {}  # for each size
        self.guide(guidance, interval, rescale)

    def guide(self, guidance: float, interval: tuple[float, float] | None = None, rescale: float = 0.0) -> None:
        """Other numbers from now on, in graphs too, which are those of one `form`. Raises as the constructor."""
        self.guidance, self.rescale = real("guidance", guidance), real("guidance_rescale", rescale, least=0, most=1)
        if interval is not None:
            if not isinstance(interval, Sequence | np.ndarray) or isinstance(interval, str) or len(interval) != 2:
                raise CudiffError(f"guidance_interval must be two noise levels such as 0.2, 5, not {interval!r}")
            low, high = (real("guidance_interval", level, least=0) for level in interval)
            if low >= high:
                raise CudiffError(f"guidance_interval must go from a lower noise level up, not from {low} to {high}")
            interval = low, high
        self.interval = interval
        numbers = self.guidance, self.rescale, 1 - self.rescale, *(interval or (0.0, 0.0))
        self._numbers: Sequence[Any] = numbers
        if self._device is not None:
            table = np.array(numbers, np.float32)
            if self._table is None:
                self._table = Tensor(table, device=self._device)
            else:
                copy_into(self._table.data, table)
            self._numbers = [Tensor(self._table.data[i : i + 1]) for i in range(len(numbers))]

    @property
    def form(self) -> tuple[int, ...]:
        """What decides the operations: whether there is something to guide, an interval, a rescale; the channels."""
        guided = self.guidance != 1
        return guided, guided and self.interval is not None, guided and self.rescale != 0, guided * self.channels

    def __call__(self, x: Tensor, sigma: Tensor | float, labels: Tensor | None = None) -> Tensor:
        if labels is None or self.guidance == 1:
            return self.denoiser(x, sigma, labels)
        return self._guide(self.denoiser(*self._doubled(x, sigma, labels)), sigma)

    def with_variance(self, x: Tensor, sigma: Tensor | float, labels: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The guided estimate, and the variance of the class-conditional half; see `DDPMDenoiser.with_variance`."""
        if labels is None or self.guidance == 1:
            return self.denoiser.with_variance(x, sigma, labels)
        denoised, fraction = self.denoiser.with_variance(*self._doubled(x, sigma, labels))
        return self._guide(denoised, sigma), ops.split(fraction, 2, axis=0)[0]

    def blended_frame(self, x: Tensor, sigma: Tensor, labels: Tensor | None, last: Tensor,
                      share: Tensor) -> tuple[Tensor, Tensor]:
        """`frame_of` the guided estimate: by the denoiser's `blended_frame` where it is guided by a number alone."""
        if labels is None or self.guidance == 1:
            return frame_of(self.denoiser, x, sigma, labels, last, share)
        if any(self.form[1:]) or not has_frame(self.denoiser):
            return blended(self(x, sigma, labels), last, share)
        return self.denoiser.blended_frame(*self._doubled(x, sigma, labels), last, share, self._numbers[0])

    def _doubled(self, x: Tensor, sigma: Tensor | float, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        labels = as_index("guidance", labels, x.device)  # the null class has no place among bytes
        self.before_capture(x, labels)
        sigma, null = noise_levels(sigma, x), self._null[labels.device, len(labels)]
        return ops.tile(x, (2, *(1,) * (x.ndim - 1))), ops.tile(sigma, 2), ops.concatenate([labels, null])

    def before_capture(self, x: Tensor, labels: Tensor | None = None) -> None:
        """Make the null class for each of `labels`: a capture cannot."""
        if labels is not None and (labels.device, len(labels)) not in self._null:
            null = np.full(labels.shape, NULL_CLASS, labels.dtype)
            self._null[labels.device, len(labels)] = Tensor(null, device=labels.device)

    def _guide(self, denoised: Tensor, sigma: Tensor | float) -> Tensor:
        guidance, rescale, rest, low, high = self._numbers
        conditional, unconditional = ops.split(denoised, 2)
        guided = ops.lerp(unconditional, conditional, guidance)
        if 0 < self.channels < guided.shape[-1]:
            guided = ops.concatenate([guided[..., : self.channels], conditional[..., self.channels :]], axis=-1)
        if self.rescale:
            axes = tuple(range(1, guided.ndim))
            deviations = [ops.std(part, axes, keepdims=True) for part in (conditional, guided)]
            ratio = deviations[0] / ops.maximum(deviations[1], 1e-20)  # of flat estimates it is 0, and they stay
            guided = guided * (ratio * rescale + rest)
        if self.interval is None:
            return guided
        sigma = per_sample(noise_levels(sigma, conditional), conditional)
        return ops.where(ops.logical_and(sigma > low, sigma <= high), guided, conditional)
