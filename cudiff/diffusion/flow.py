"""The objective "flow", rectified flow, Liu et al. 2022 (arXiv 2209.03003), with the times of arXiv 2403.03206."""

from __future__ import annotations

from typing import Any

import numpy as np

from cudiff import ops
from cudiff.diffusion.denoiser import Denoiser, Net, per_sample
from cudiff.diffusion.euler import Euler
from cudiff.diffusion.guidance import drop_labels
from cudiff.diffusion.prediction import PREDICTIONS
from cudiff.diffusion.samplers import Sampler
from cudiff.diffusion.schedule import karras_sigmas, log_normal
from cudiff.errors import CudiffError
from cudiff.ops.mse import mse
from cudiff.ops.random import Generator, Purpose
from cudiff.ops.timestep_embedding import noise_levels
from cudiff.options import Option
from cudiff.registry import Settings, register_objective, register_sampler
from cudiff.tensor import Tensor
from cudiff.values import real, whole

TIME_SCALE = 1000.0
"""The net is told 1000 t, as wide as DDPM's timesteps, which its embedding of time is made for."""

LAST_TIME = 0.999
"""Where sampling begins: at t = 1 sigma has no end."""


class FlowLoss:
    """E[(F(z_t, t) - (n - y))^2] with z_t = (1 - t) y + t n: rectified flow, arXiv 2209.03003, equation 1.

    log(t / (1 - t)) ~ N(P_mean, P_std^2): the logit-normal times of arXiv 2403.03206, section 3.1. That is log(sigma),
    as sigma = t / (1 - t).
    """

    def __init__(self, P_mean: float = 0.0, P_std: float = 1.0, label_dropout: float = 0.0):
        self.P_mean, self.P_std = log_normal(P_mean, P_std)
        self.label_dropout = real("label_dropout", label_dropout, least=0, most=1)

    def __call__(self, net: Net, images: Tensor, labels: Tensor | None, generator: Generator) -> Tensor:
        labels = drop_labels(labels, self.label_dropout, generator)
        draw = generator.normal((images.shape[0],), stream=Purpose.SIGMA)
        noise = generator.normal(images.shape, stream=Purpose.NOISE)
        t = ops.sigmoid(draw * self.P_std + self.P_mean)
        share = per_sample(t, images)
        state = images * (1 - share) + noise * share
        target = PREDICTIONS["flow"].target(images, noise, 1 - share, share)
        return mse(net(state, t * TIME_SCALE, labels), target)


class FlowDenoiser:
    """D(x; sigma) = (x - sigma u) / (1 + sigma) of the net's u at z = x / (1 + sigma) and t = sigma / (1 + sigma)."""

    def __init__(self, net: Net):
        self.net = net

    def __call__(self, x: Tensor, sigma: Tensor | float, labels: Tensor | None = None) -> Tensor:
        sigma = noise_levels(sigma, x)
        return PREDICTIONS["flow"].denoised(x, self._out(x, sigma, labels), per_sample(sigma, x))

    def blended_frame(self, x: Tensor, sigma: Tensor, labels: Tensor | None, last: Tensor, share: Tensor,
                      guidance: Any = None) -> tuple[Tensor, Tensor]:
        """`ops.blended_frame` of D(x; sigma), with sums: one kernel after the network."""
        return ops.blended_frame(x, self._out(x, sigma, labels), sigma, last, share, "flow", guidance=guidance)

    def _out(self, x: Tensor, sigma: Tensor, labels: Tensor | None) -> Tensor:
        """u of z and t."""
        return self.net(x / (per_sample(sigma, x) + 1), sigma / (sigma + 1) * TIME_SCALE, labels)


def flow_sigmas(num_steps: int) -> np.ndarray:
    """sigma = t / (1 - t) for t from 0.999 to 0 in even steps, float64 (num_steps + 1,)."""
    t = np.linspace(LAST_TIME, 0.0, whole("num_steps", num_steps) + 1)
    return t / (1 - t)


def _check(config: Settings) -> None:
    log_normal(config.P_mean, config.P_std)
    if config.sigma_min >= LAST_TIME / (1 - LAST_TIME):
        raise CudiffError(f"sigma_min {config.sigma_min} is above a flow's highest noise level: use one below 999")


@register_objective("flow", "rectified flow, Liu et al. 2022", check=_check, options={
    "P_mean": Option(0.0, "EDM, flow: mean of log(sigma) in training"),
    "P_std": Option(1.0, "EDM, flow: standard deviation of log(sigma) in training", above=0),
})
class Flow:
    """`FlowLoss`, `FlowDenoiser`, and even times or Karras' levels; see `cudiff.registry.Objective`."""

    def __init__(self, config: Settings, c_noise_scale: float):
        self.config = config

    def loss(self, label_dropout: float) -> FlowLoss:
        return FlowLoss(self.config.P_mean, self.config.P_std, label_dropout)

    def denoiser(self, net: Net) -> FlowDenoiser:
        return FlowDenoiser(net)

    def sigmas(self, steps: int, discrete: bool) -> np.ndarray:
        if discrete:
            return flow_sigmas(steps)
        config, most = self.config, LAST_TIME / (1 - LAST_TIME)
        return karras_sigmas(steps, config.sigma_min, min(config.sigma_max, most), config.rho)


@register_sampler("flow", "Euler's method along a flow's own times", discrete=True)
def _flow(denoiser: Denoiser, config: Settings, captured: bool) -> Sampler:
    """z_t + (t_next - t) u, arXiv 2209.03003, Algorithm 1. For x = (1 + sigma) z that is Euler's step in sigma: both go
    the same share of a straight line to the same estimate of the image."""
    return Euler(denoiser, captured=captured)
