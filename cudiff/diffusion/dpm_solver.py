"""DPM-Solver++ of second order, Lu et al. 2022 (arXiv 2211.01095): its multistep form, and that with noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from cudiff import ops
from cudiff.diffusion.denoiser import Denoiser, per_sample
from cudiff.diffusion.samplers import Callback, Noise, Plan, Sampler, kept_deviation, posterior_variance, rows
from cudiff.registry import Settings, register_sampler
from cudiff.tensor import Tensor
from cudiff.values import flag


class DPMSolver(Sampler):
    """DPM-Solver++(2M), arXiv 2211.01095, Algorithm 2; with `stochastic` SDE-DPM-Solver++(2M), its section 5.

    One evaluation a step. In l = -log(sigma) the estimate of the image is taken to go on as it went in the last step:
    D + (D - D_before) h / (2 h_before), with h the step's length in l. To that image goes an exact step, which
    is Euler's (DDIM's) or, with noise, that of ancestral sampling. The first step, and the last to 0, take D itself.
    """

    memory = 1

    def __init__(self, denoiser: Denoiser, stochastic: bool = False, captured: bool = False):
        super().__init__(denoiser, captured)
        self.stochastic = flag("stochastic", stochastic)

    def plan(self, sigmas: np.ndarray) -> list[Plan]:
        plans = []
        for (sigma, sigma_next), onward in zip(pairwise(map(float, sigmas)), extrapolations(sigmas), strict=True):
            variance = posterior_variance(sigma, sigma_next) if self.stochastic else 0.0
            ratio = kept_deviation(sigma_next, variance) / sigma
            to_image = None if sigma_next else DPMSolver.step
            plans.append(Plan([sigma, ratio, math.sqrt(variance), onward], variance > 0, to_image))
        return plans

    def step(self, x: Tensor, numbers: Tensor, noise: Tensor | None, labels: Tensor | None,
             *before: Tensor) -> tuple[Tensor, ...]:
        sigma, ratio, added, onward = rows(numbers)
        denoised = image = self.denoiser(x, sigma, labels)
        if before:
            image = denoised + (denoised - before[0]) * per_sample(onward, x)
        x = ops.lerp(image, x, per_sample(ratio, x))
        return x if noise is None else x + noise * per_sample(added, x), denoised


def extrapolations(sigmas: np.ndarray) -> list[float]:
    """h / (2 h_before) of each step in l = -log(sigma): how much of the last change of D a step adds to D.

    0 in the first step and in one to sigma 0, where h has no end.
    """
    with np.errstate(divide="ignore"):
        h = np.diff(-np.log(sigmas))
    return [0.0] + [0.5 * step / last if math.isfinite(step) else 0.0 for last, step in pairwise(map(float, h))]


def sample_dpm_solver(
    denoiser: Denoiser,
    x: Tensor,
    sigmas: Sequence[float] | np.ndarray,
    labels: Tensor | None = None,
    *,
    stochastic: bool = False,
    noise: Noise | None = None,
    callback: Callback | None = None,
) -> Tensor:
    """`DPMSolver`'s images from x."""
    return DPMSolver(denoiser, stochastic)(x, sigmas, labels, noise=noise, callback=callback)


@register_sampler("dpmpp-2m", "DPM-Solver++, of second order with one evaluation a step")
def _dpmpp_2m(denoiser: Denoiser, config: Settings, captured: bool) -> Sampler:
    return DPMSolver(denoiser, captured=captured)


@register_sampler("dpmpp-2m-sde", "the same with noise in each step")
def _dpmpp_2m_sde(denoiser: Denoiser, config: Settings, captured: bool) -> Sampler:
    return DPMSolver(denoiser, stochastic=True, captured=captured)
