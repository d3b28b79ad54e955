"""Samplers: from noise to images along falling sigmas, with any denoiser D(x; sigma) -> (N, H, W, C).

Every sampler takes x (N, H, W, C) at noise level `sigmas[0]`, such as `ImageNoise.start(sigmas[0])`, and `sigmas`,
float64 numbers on the host that fall, usually to 0: `karras_sigmas(n)` or `Schedule.sampling_sigmas(n)`. States are
x = y + sigma * noise in all of them; a DDPM state is the same divided by sqrt(1 + sigma^2), so DDIM and ancestral
sampling work with any denoiser too. `callback(step, x, denoised)` sees the state after each step, and the estimate of
the image that the step began with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from cudiff import ops
from cudiff.backend import float32
from cudiff.diffusion.preconditioning import Denoiser
from cudiff.errors import CudiffError
from cudiff.ops.random import Streams, normal
from cudiff.tensor import Tensor, no_grad

Noise = Callable[[int], Tensor]
Callback = Callable[[int, Tensor, Tensor], None]


class ImageNoise:
    """Standard normal noise for images `first`, `first + 1`, ...: each has its own stream (seed, image number).

    An image therefore does not depend on the batch that it is sampled in. Called with a step it gives the noise that a
    stochastic sampler adds there.
    """

    def __init__(self, shape: Sequence[int], seed: int, first: int = 0, device: str = "cpu", dtype: Any = float32):
        self.shape, self.seed, self.first, self.device, self.dtype = tuple(shape), seed, first, device, dtype

    def start(self, sigma: float) -> Tensor:
        """Noise of standard deviation `sigma` for a sampler to begin with."""
        return self._normal(Streams.SAMPLE, 0) * float(sigma)

    def __call__(self, step: int) -> Tensor:
        return self._normal(Streams.CHURN, step)

    def _normal(self, stream: int, step: int) -> Tensor:
        return normal(self.shape, self.seed, stream, step, self.first, self.device, self.dtype)


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
    """Euler's method on the probability flow ODE: EDM, arXiv 2206.00364, Algorithm 2 without lines 9 to 11.

    One evaluation a step; arguments and errors as for `sample_heun`.
    """
    churned = _churn(sigmas, S_churn, S_min, S_max)
    return _solve(denoiser, x, sigmas, churned, S_noise, labels, noise, callback, second_order=False)


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
    """EDM's sampler, Heun's second-order method with churn: arXiv 2206.00364, Algorithm 2 (Algorithm 1 without churn).

    Two evaluations a step, one where the step ends at 0. With `S_churn` > 0 noise of scale `S_noise` is added in steps
    that begin in [S_min, S_max], taken from `noise(step)`, standard normal like x (an `ImageNoise`).
    Raises CudiffError where that is missing or the sigmas do not fall.
    """
    churned = _churn(sigmas, S_churn, S_min, S_max)
    return _solve(denoiser, x, sigmas, churned, S_noise, labels, noise, callback, second_order=True)


def _churn(sigmas: Sequence[float] | np.ndarray, S_churn: float, S_min: float, S_max: float) -> np.ndarray:
    """sigma-hat of each step (Algorithm 2, lines 4 to 5)."""
    starts = _falling(sigmas)[:-1]
    gamma = min(S_churn / len(starts), math.sqrt(2) - 1)
    return np.where((starts >= S_min) & (starts <= S_max), starts * (1 + gamma), starts)


@no_grad()
def _solve(denoiser, x, sigmas, churned, S_noise, labels, noise, callback, second_order):
    levels, churned_levels = _levels(sigmas, x), _levels(churned, x)
    for step, (sigma, sigma_next) in enumerate(pairwise(map(float, sigmas))):
        sigma_hat = float(churned[step])
        if sigma_hat > sigma:
            x = x + _draw(noise, step) * (S_noise * math.sqrt(sigma_hat**2 - sigma**2))
        denoised = denoiser(x, churned_levels[step], labels)
        # x + (sigma_next - sigma_hat) * (x - D) / sigma_hat, which ends in D itself at sigma_next = 0
        x_next = denoised + (x - denoised) * (sigma_next / sigma_hat)
        if second_order and sigma_next > 0:
            slope = (x - denoised) * (1 / sigma_hat)
            slope_next = (x_next - denoiser(x_next, levels[step + 1], labels)) * (1 / sigma_next)
            x_next = x + (slope + slope_next) * (0.5 * (sigma_next - sigma_hat))
        x = x_next
        if callback is not None:
            callback(step, x, denoised)
    return x


@no_grad()
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
    """DDIM, arXiv 2010.02502, equations 12 and 16: eta 0 is deterministic (and Euler's method), 1 is ancestral.

    `clip_denoised` keeps every estimate of the image in [-1, 1], as DDPM's own code does. eta > 0 needs `noise`.
    Raises CudiffError where that is missing, eta is not in [0, 1], or the sigmas do not fall.
    """
    if not 0 <= eta <= 1:
        raise CudiffError(f"eta {eta}: use a number between 0 and 1")
    levels = _levels(_falling(sigmas), x)
    for step, (sigma, sigma_next) in enumerate(pairwise(map(float, sigmas))):
        denoised = _clipped(denoiser(x, levels[step], labels), clip_denoised)
        added = eta * math.sqrt(_posterior_variance(sigma, sigma_next))
        x = denoised + (x - denoised) * (math.sqrt(sigma_next**2 - added**2) / sigma)
        if added > 0:
            x = x + _draw(noise, step) * added
        if callback is not None:
            callback(step, x, denoised)
    return x


@no_grad()
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
    """Ancestral sampling: DDPM, arXiv 2006.11239, Algorithm 2 with the mean of equation 7; any number of steps.

    `variance`: "small" is beta-tilde, "large" is beta (section 3.2), both of the process that visits only these
    sigmas; "learned" lies between them in the logarithm as the model says (Improved DDPM, arXiv 2102.09672, equation
    15) and needs a denoiser with `with_variance`. `clip_denoised` as in `sample_ddim`. No noise is added at the end.
    Raises CudiffError for another variance, missing `noise`, or sigmas that do not fall.
    """
    if variance not in ("small", "large", "learned"):
        raise CudiffError(f"unknown variance '{variance}': use small, large or learned")
    levels = _levels(_falling(sigmas), x)
    for step, (sigma, sigma_next) in enumerate(pairwise(map(float, sigmas))):
        if variance == "learned":
            denoised, fraction = denoiser.with_variance(x, levels[step], labels)
        else:
            denoised, fraction = denoiser(x, levels[step], labels), None
        denoised = _clipped(denoised, clip_denoised)
        x = denoised + (x - denoised) * (sigma_next / sigma) ** 2
        if sigma_next > 0:
            small = _posterior_variance(sigma, sigma_next)
            large = (sigma**2 - sigma_next**2) * (1 + sigma_next**2) / (1 + sigma**2)
            scale: Tensor | float = math.sqrt(large if variance == "large" else small)
            if fraction is not None:
                scale = ops.exp(fraction * (0.5 * math.log(large / small)) + 0.5 * math.log(small))
            x = x + _draw(noise, step) * scale
        if callback is not None:
            callback(step, x, denoised)
    return x


def _posterior_variance(sigma: float, sigma_next: float) -> float:
    """beta-tilde of DDPM equation 7 for a step from sigma to sigma_next, in units of x = y + sigma * noise."""
    return sigma_next**2 * (sigma**2 - sigma_next**2) / sigma**2


def _falling(sigmas: Sequence[float] | np.ndarray) -> np.ndarray:
    sigmas = np.asarray(sigmas, np.float64)
    if sigmas.ndim != 1 or len(sigmas) < 2 or sigmas[-1] < 0 or not (np.diff(sigmas) < 0).all():
        raise CudiffError("a sampler needs two or more falling sigmas that end at 0 or above")
    return sigmas


def _levels(sigmas: Sequence[float] | np.ndarray, x: Tensor) -> list[Tensor]:
    """Each sigma as a Tensor (N,) beside x; one copy to the device for all."""
    table = Tensor(np.repeat(np.asarray(sigmas)[:, None], x.shape[0], axis=1), dtype=x.dtype, device=x.device)
    return [Tensor(row) for row in table.data]


def _draw(noise: Noise | None, step: int) -> Tensor:
    if noise is None:
        raise CudiffError("this sampler adds noise: pass noise=ImageNoise(x.shape, seed)")
    return noise(step)


def _clipped(denoised: Tensor, clip_denoised: bool) -> Tensor:
    return ops.clip(denoised, -1, 1) if clip_denoised else denoised
