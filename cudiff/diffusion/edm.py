"""The objective "edm": Karras et al. 2022 (arXiv 2206.00364)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cudiff.diffusion.loss import EDMLoss
from cudiff.diffusion.preconditioning import EDMDenoiser, Net
from cudiff.diffusion.schedule import karras_sigmas
from cudiff.options import Option
from cudiff.registry import register_objective

if TYPE_CHECKING:
    from cudiff.config import Config


@register_objective("edm", "Karras et al. 2022", options={
    "sigma_data": Option(0.5, "EDM: standard deviation of the data", above=0, fixed=True),
    "data_mean": Option(0.0, "EDM: subtracted from pixels in [-1, 1]; the noise levels are those after it", fixed=True),
    "data_std": Option(1.0, "EDM: pixels less data_mean are divided by it", above=0, fixed=True),
    "P_mean": Option(-1.2, "EDM: mean of log(sigma) in training"),
    "P_std": Option(1.2, "EDM: standard deviation of log(sigma) in training", above=0),
})
class EDM:
    """`EDMLoss`, `EDMDenoiser` and Karras' levels for a configuration's options; see `cudiff.registry.Objective`."""

    def __init__(self, config: Config, c_noise_scale: float):
        self.config, self.c_noise_scale = config, c_noise_scale

    def loss(self, label_dropout: float) -> EDMLoss:
        config = self.config
        return EDMLoss(
            config.sigma_data, config.P_mean, config.P_std, self.c_noise_scale, label_dropout, config.data_mean,
            config.data_std,
        )

    def denoiser(self, net: Net) -> EDMDenoiser:
        config = self.config
        return EDMDenoiser(net, config.sigma_data, self.c_noise_scale, config.data_mean, config.data_std)

    def sigmas(self, steps: int, discrete: bool) -> np.ndarray:
        config = self.config
        return karras_sigmas(steps, config.sigma_min, config.sigma_max, config.rho) * config.data_std
