"""EDM's samplers (arXiv 2206.00364, Algorithm 2): Euler's method and Heun's, with churn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from cudiff import ops
from cudiff.diffusion.denoiser import Denoiser, per_sample
from cudiff.diffusion.samplers import Callback, Noise, Plan, Sampler, rows
from cudiff.errors import CudiffError
from cudiff.options import Option
from cudiff.registry import Settings, register_sampler
from cudiff.tensor import Tensor
from cudiff.values import real


class Euler(Sampler):
    """Euler's method on the probability flow ODE: EDM, arXiv 2206.00364, Algorithm 2 without lines 9 to 11.

    One evaluation a step. With `S_churn` > 0 noise of scale `S_noise` is added in steps that begin in [S_min, S_max].
    """

    second_order = False

    def __init__(self, denoiser: Denoiser, S_churn: float = 0.0, S_min: float = 0.0, S_max: float = math.inf,
                 S_noise: float = 1.0, captured: bool = False):
        super().__init__(denoiser, captured)
        self.S_churn, self.S_noise = real("S_churn", S_churn, least=0), real("S_noise", S_noise, least=0)
        self.S_min, self.S_max = real("S_min", S_min, least=0), S_max
        if not S_max >= 0:
            raise CudiffError(f"S_max must be at least 0, not {S_max}")

    def plan(self, sigmas: np.ndarray) -> list[Plan]:
        gamma = min(self.S_churn / (len(sigmas) - 1), math.sqrt(2) - 1)
        plans = []
        for sigma, sigma_next in pairwise(map(float, sigmas)):
            sigma_hat = sigma * (1 + gamma) if self.S_min <= sigma <= self.S_max else sigma
            added = self.S_noise * math.sqrt(sigma_hat**2 - sigma**2)
            numbers = [sigma_hat, sigma_next / sigma_hat, added]
            if self.second_order and sigma_next > 0:
                numbers += [sigma_next, 1 / sigma_hat, 1 / sigma_next, 0.5 * (sigma_next - sigma_hat)]
            to_image = Euler.step if sigma_next == 0 and sigma_hat == sigma else None
            plans.append(Plan(numbers, sigma_hat > sigma, to_image))
        return plans

    def step(self, x: Tensor, numbers: Tensor, noise: Tensor | None, labels: Tensor | None) -> tuple[Tensor, Tensor]:
        sigma_hat, ratio, added, *correction = rows(numbers)
        if noise is not None:
            x = x + noise * per_sample(added, x)
        denoised = self.denoiser(x, sigma_hat, labels)
        # x + (sigma_next - sigma_hat) * (x - D) / sigma_hat, which ends in D itself at sigma_next = 0
        x_next = ops.lerp(denoised, x, per_sample(ratio, x))
        if correction:
            sigma_next, rate, rate_next, width = correction
            slope = (x - denoised) * per_sample(rate, x)
            slope_next = (x_next - self.denoiser(x_next, sigma_next, labels)) * per_sample(rate_next, x)
            x_next = x + (slope + slope_next) * per_sample(width, x)
        return x_next, denoised


class Heun(Euler):
    """EDM's sampler, Heun's second-order method with churn: arXiv 2206.00364, Algorithm 2 (Algorithm 1 without churn).

    Two evaluations a step, one where the step ends at 0.
    """

    second_order = True


def sample_euler(
    denoiser: Denoiser,
    x: Tensor,
    sigmas: Sequence[float] | np.ndarray,
    labels: Tensor | None = None,
    *,
    S_churn: float = 0.0,
    S_min: float = 0.0,
    S_max: float = math.inf,
    S_noise: float = 1.0,
    noise: Noise | None = None,
    callback: Callback | None = None,
) -> Tensor:
    """`Euler`'s images from x."""
    sampler = Euler(denoiser, S_churn, S_min, S_max, S_noise)
    return sampler(x, sigmas, labels, noise=noise, callback=callback)


def sample_heun(
    denoiser: Denoiser,
    x: Tensor,
    sigmas: Sequence[float] | np.ndarray,
    labels: Tensor | None = None,
    *,
    S_churn: float = 0.0,
    S_min: float = 0.0,
    S_max: float = math.inf,
    S_noise: float = 1.0,
    noise: Noise | None = None,
    callback: Callback | None = None,
) -> Tensor:
    """`Heun`'s images from x."""
    sampler = Heun(denoiser, S_churn, S_min, S_max, S_noise)
    return sampler(x, sigmas, labels, noise=noise, callback=callback)


_CHURN = {
    "S_churn": Option(0.0, "heun and euler: noise added anew, over all steps", least=0),
    "S_min": Option(0.0, "lowest noise level, of pixels, that is churned", least=0),
    "S_max": Option(1e9, "highest noise level, of pixels, that is churned", least=0),
    "S_noise": Option(1.0, "scale of the noise that churning adds", least=0),
}


@register_sampler("heun", "EDM's, of second order", options=_CHURN)
def _heun(denoiser: Denoiser, config: Settings, captured: bool) -> Sampler:
    return Heun(denoiser, config.S_churn, config.S_min, config.S_max, config.S_noise, captured)


@register_sampler("euler", "one evaluation a step", options=_CHURN)
def _euler(denoiser: Denoiser, config: Settings, captured: bool) -> Sampler:
    return Euler(denoiser, config.S_churn, config.S_min, config.S_max, config.S_noise, captured)
