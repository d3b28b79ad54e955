"""The objective "ddpm": Ho et al. 2020 (arXiv 2006.11239), Improved DDPM's learned variance (arXiv 2102.09672)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cudiff.diffusion.loss import DDPMLoss
from cudiff.diffusion.preconditioning import DDPMDenoiser, Net
from cudiff.diffusion.schedule import BETAS, Schedule, karras_sigmas
from cudiff.options import Option
from cudiff.registry import register_objective

if TYPE_CHECKING:
    from cudiff.config import Config


@register_objective("ddpm", "Ho et al. 2020", learns_variance=True, options={
    "noise_schedule": Option("linear", "DDPM: how betas grow", BETAS, fixed=True),
    "diffusion_steps": Option(1000, "DDPM: noise levels", least=1, most=10**6, fixed=True),
    "sample_spacing": Option("even", "DDPM: timesteps that ddim and ancestral visit; ddim = by a whole stride",
                             ("even", "ddim")),
})
class DDPM:
    """`DDPMLoss`, `DDPMDenoiser` and the levels of a `Schedule`; see `cudiff.registry.Objective`."""

    def __init__(self, config: Config, c_noise_scale: float):
        self.config, self.schedule = config, Schedule(config.noise_schedule, config.diffusion_steps)

    def loss(self, label_dropout: float) -> DDPMLoss:
        return DDPMLoss(self.schedule, label_dropout)

    def denoiser(self, net: Net) -> DDPMDenoiser:
        return DDPMDenoiser(net, self.schedule)

    def sigmas(self, steps: int, discrete: bool) -> np.ndarray:
        config, sigmas = self.config, self.schedule.sigmas
        if discrete:
            return self.schedule.sampling_sigmas(steps, config.sample_spacing)
        return karras_sigmas(steps, max(config.sigma_min, sigmas[0]), min(config.sigma_max, sigmas[-1]), config.rho)
