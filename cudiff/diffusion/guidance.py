"""Classifier-free guidance, arXiv 2207.12598: labels dropped in training, two estimates mixed in sampling."""

from __future__ import annotations

from typing import Any

import numpy as np

from cudiff import ops
from cudiff.backend import float32
from cudiff.diffusion.denoiser import levels
from cudiff.ops.cast import as_index
from cudiff.ops.random import Generator, Purpose
from cudiff.tensor import Tensor
from cudiff.values import real

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
    """

    def __init__(self, denoiser: Any, guidance: float):
        self.denoiser, self.guidance = denoiser, real("guidance", guidance)
        self._null: dict[tuple[str, int], Tensor] = {}  # kept for each size: a capture cannot make it

    def __call__(self, x: Tensor, sigma: Tensor | float, labels: Tensor | None = None) -> Tensor:
        if labels is None or self.guidance == 1:
            return self.denoiser(x, sigma, labels)
        return self._guide(self.denoiser(*self._doubled(x, sigma, labels)))

    def with_variance(self, x: Tensor, sigma: Tensor | float, labels: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The guided estimate, and the variance of the class-conditional half; see `DDPMDenoiser.with_variance`."""
        if labels is None or self.guidance == 1:
            return self.denoiser.with_variance(x, sigma, labels)
        denoised, fraction = self.denoiser.with_variance(*self._doubled(x, sigma, labels))
        return self._guide(denoised), ops.split(fraction, 2, axis=0)[0]

    def _doubled(self, x: Tensor, sigma: Tensor | float, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        sigma = levels(sigma, x)
        key = labels.device, len(labels)
        if key not in self._null:
            self._null[key] = Tensor(np.full(labels.shape, NULL_CLASS, labels.dtype), device=labels.device)
        return ops.concatenate([x, x]), ops.concatenate([sigma, sigma]), ops.concatenate([labels, self._null[key]])

    def _guide(self, denoised: Tensor) -> Tensor:
        conditional, unconditional = ops.split(denoised, 2)
        return unconditional + (conditional - unconditional) * self.guidance
