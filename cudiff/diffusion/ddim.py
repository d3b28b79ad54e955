"""DDIM, Song et al. 2021 (arXiv 2010.02502)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from cudiff import ops
from cudiff.diffusion.denoiser import Denoiser, per_sample
from cudiff.diffusion.samplers import (
    CLIPPING,
    Callback,
    Noise,
    Plan,
    Sampler,
    clipped,
    clips,
    kept_deviation,
    posterior_variance,
    rows,
)
from cudiff.errors import CudiffError
from cudiff.options import Option
from cudiff.registry import Settings, register_sampler
from cudiff.tensor import Tensor
from cudiff.values import flag


class DDIM(Sampler):
    """DDIM, arXiv 2010.02502, equations 12 and 16: eta 0 is deterministic (and Euler's method), 1 is ancestral.

    `clip_denoised` keeps every estimate of the image in [-1, 1], as DDPM's own code does. eta > 0 needs `noise`.
    Raises CudiffError where eta is not in [0, 1].
    """

    def __init__(self, denoiser: Denoiser, eta: float = 0.0, clip_denoised: bool = True, captured: bool = False):
        super().__init__(denoiser, captured)
        if not 0 <= eta <= 1:
            raise CudiffError(f"eta {eta}: use a number between 0 and 1")
        self.eta, self.clip_denoised = eta, flag("clip_denoised", clip_denoised)

    def plan(self, sigmas: np.ndarray) -> list[Plan]:
        plans = []
        for sigma, sigma_next in pairwise(map(float, sigmas)):
            added = self.eta * math.sqrt(posterior_variance(sigma, sigma_next))
            numbers = [sigma, kept_deviation(sigma_next, added**2) / sigma, added]
            to_image = DDIM.step if sigma_next == 0 and not self.clip_denoised else None
            plans.append(Plan(numbers, added > 0, to_image))
        return plans

    def step(self, x: Tensor, numbers: Tensor, noise: Tensor | None, labels: Tensor | None) -> tuple[Tensor, Tensor]:
        sigma, ratio, added = rows(numbers)
        denoised = clipped(self.denoiser(x, sigma, labels), self.clip_denoised)
        x = ops.lerp(denoised, x, per_sample(ratio, x))
        return x if noise is None else x + noise * per_sample(added, x), denoised


def sample_ddim(
    denoiser: Denoiser,
    x: Tensor,
    sigmas: Sequence[float] | np.ndarray,
    labels: Tensor | None = None,
    *,
    eta: float = 0.0,
    noise: Noise | None = None,
    clip_denoised: bool = True,
    callback: Callback | None = None,
) -> Tensor:
    """`DDIM`'s images from x."""
    return DDIM(denoiser, eta, clip_denoised)(x, sigmas, labels, noise=noise, callback=callback)


@register_sampler("ddim", "Song et al. 2021", discrete=True, options=CLIPPING | {
    "eta": Option(0.0, "ddim, euler-ancestral: share of the ancestral noise", least=0, most=1)})
def _ddim(denoiser: Denoiser, config: Settings, captured: bool) -> Sampler:
    return DDIM(denoiser, config.eta, clips(config), captured)
