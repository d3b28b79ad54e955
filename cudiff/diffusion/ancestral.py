"""DDPM's ancestral sampling (arXiv 2006.11239, Algorithm 2), with Improved DDPM's learned variance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from cudiff import ops
from cudiff.diffusion.denoiser import per_sample
from cudiff.diffusion.samplers import (
    CLIPPING,
    Callback,
    Noise,
    Plan,
    Sampler,
    clipped,
    clips,
    posterior_variance,
    rows,
)
from cudiff.errors import CudiffError
from cudiff.registry import Settings, register_sampler
from cudiff.tensor import Tensor
from cudiff.values import flag


class Ancestral(Sampler):
    """Ancestral sampling: DDPM, arXiv 2006.11239, Algorithm 2 with the mean of equation 7; any number of steps.

    `variance`: "small" is beta-tilde, "large" is beta (section 3.2), both of the process that visits only these
    sigmas; "learned" lies between them in the logarithm as the model says (Improved DDPM, arXiv 2102.09672, equation
    15) and needs a denoiser with `with_variance`. `clip_denoised` as in `DDIM`. No noise is added at the end.
    Raises CudiffError for another variance.
    """

    def __init__(self, denoiser: Any, variance: str = "small", clip_denoised: bool = True, captured: bool = False):
        super().__init__(denoiser, captured)
        if variance not in ("small", "large", "learned"):
            raise CudiffError(f"unknown variance '{variance}': use small, large or learned")
        self.variance, self.clip_denoised = variance, flag("clip_denoised", clip_denoised)

    def plan(self, sigmas: np.ndarray) -> list[Plan]:
        plans = []
        for sigma, sigma_next in pairwise(map(float, sigmas)):
            numbers = [sigma, (sigma_next / sigma) ** 2]
            if sigma_next > 0:
                small = posterior_variance(sigma, sigma_next)
                large = (sigma**2 - sigma_next**2) * (1 + sigma_next**2) / (1 + sigma**2)
                if self.variance == "learned":
                    numbers += [0.5 * math.log(small), 0.5 * math.log(large / small)]
                else:
                    numbers.append(math.sqrt(large if self.variance == "large" else small))
            plans.append(Plan(numbers, sigma_next > 0))
        return plans

    def step(self, x: Tensor, numbers: Tensor, noise: Tensor | None, labels: Tensor | None) -> tuple[Tensor, Tensor]:
        sigma, ratio, *spread = rows(numbers)
        if self.variance == "learned":
            denoised, fraction = self.denoiser.with_variance(x, sigma, labels)
        else:
            denoised, fraction = self.denoiser(x, sigma, labels), None
        denoised = clipped(denoised, self.clip_denoised)
        x = ops.lerp(denoised, x, per_sample(ratio, x))
        if noise is not None:
            scale = per_sample(spread[0], x)
            x = x + noise * (scale if fraction is None else ops.exp(fraction * per_sample(spread[1], x) + scale))
        return x, denoised


def sample_ddpm(
    denoiser: Any,
    x: Tensor,
    sigmas: Sequence[float] | np.ndarray,
    labels: Tensor | None = None,
    *,
    noise: Noise | None,
    variance: str = "small",
    clip_denoised: bool = True,
    callback: Callback | None = None,
) -> Tensor:
    """`Ancestral`'s images from x."""
    return Ancestral(denoiser, variance, clip_denoised)(x, sigmas, labels, noise=noise, callback=callback)


@register_sampler("ancestral", "DDPM's", discrete=True, options=CLIPPING)
def _ancestral(denoiser: Any, config: Settings, captured: bool) -> Sampler:
    own = denoiser
    while hasattr(own, "denoiser"):  # what guides or repaints asks the one within
        own = own.denoiser
    learned = config.learn_sigma and hasattr(own, "with_variance")  # a user's function has none
    return Ancestral(denoiser, "learned" if learned else "small", clips(config), captured)
