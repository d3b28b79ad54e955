"""The objective "edm", Karras et al. 2022 (arXiv 2206.00364): its loss, its denoiser and its noise levels.

Losses are called as loss(net, images, labels, generator) -> scalar Tensor: images (N, H, W, C) float32 in [-1, 1],
labels int32 (N,) or None. Every random number is drawn on the device from the generator, by stream and sample, and
nothing is read by the host, so that a captured training step can contain them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cudiff import ops
from cudiff.diffusion.denoiser import Net
from cudiff.diffusion.guidance import drop_labels
from cudiff.diffusion.schedule import karras_sigmas, log_normal
from cudiff.ops.mse import mse
from cudiff.ops.random import Generator, Purpose
from cudiff.ops.timestep_embedding import noise_levels
from cudiff.options import Option
from cudiff.registry import Settings, register_objective
from cudiff.tensor import Tensor
from cudiff.values import real


class EDMLoss:
    """E[lambda(sigma) (D(y + n; sigma) - y)^2], log sigma ~ N(P_mean, P_std^2): EDM, arXiv 2206.00364, equation 8.

    Since lambda(sigma) c_out^2 = 1 (Table 1), it is the mean square difference between the raw network output and
    (y - c_skip (y + n)) / c_out. `ops.edm_mix` gives this target, which has unit variance, and the network's input in
    forms that cancel nothing at small sigma.
    """

    def __init__(
        self,
        sigma_data: float = 0.5,
        P_mean: float = -1.2,
        P_std: float = 1.2,
        c_noise_scale: float = 0.25,
        label_dropout: float = 0.0,
        data_mean: float = 0.0,
        data_std: float = 1.0,
    ):
        self.data_mean = real("data_mean", data_mean)  # the net sees (images - data_mean) / data_std
        self.data_std, self.sigma_data = real("data_std", data_std, above=0), real("sigma_data", sigma_data, above=0)
        self.P_mean, self.P_std = log_normal(P_mean, P_std)
        self.c_noise_scale = real("c_noise_scale", c_noise_scale)
        self.label_dropout = real("label_dropout", label_dropout, least=0, most=1)

    def __call__(self, net: Net, images: Tensor, labels: Tensor | None, generator: Generator) -> Tensor:
        labels = drop_labels(labels, self.label_dropout, generator)
        draw = generator.normal((images.shape[0],), stream=Purpose.SIGMA)
        noise = generator.normal(images.shape, stream=Purpose.NOISE)
        x, target, c_noise = ops.edm_mix(
            images, noise, draw, self.P_mean, self.P_std, self.sigma_data, self.c_noise_scale, self.data_mean,
            self.data_std,
        )
        return mse(net(x, c_noise, labels), target)


class EDMDenoiser:
    """D(x; sigma) = c_skip x + c_out F(c_in x, c_noise): EDM, arXiv 2206.00364, equation 7 and Table 1.

    Parameters
    ----------
    net : F. sigma_data : standard deviation of the images that it sees, 0.5 for natural ones in [-1, 1].
    c_noise_scale : c_noise = c_noise_scale * log(sigma); 1/4 in EDM, 1 in the CS 179 trainer.
    data_mean, data_std : the net sees (images - mean) / std; x and sigma are those of the images themselves.

    No gradient goes to sigma.
    """

    def __init__(self, net: Net, sigma_data: float = 0.5, c_noise_scale: float = 0.25, data_mean: float = 0.0,
                 data_std: float = 1.0):
        self.net, self.c_noise_scale = net, real("c_noise_scale", c_noise_scale)
        self.data = (real("sigma_data", sigma_data, above=0), real("data_mean", data_mean),
                     real("data_std", data_std, above=0))

    def __call__(self, x: Tensor, sigma: Tensor | float, labels: Tensor | None = None) -> Tensor:
        sigma = noise_levels(sigma, x)
        return ops.edm_output(x, self._out(x, sigma, labels), sigma, *self.data)

    def blended_frame(self, x: Tensor, sigma: Tensor, labels: Tensor | None, last: Tensor, share: Tensor,
                      guidance: Any = None) -> tuple[Tensor, Tensor]:
        """`ops.blended_frame` of D(x; sigma), with sums: one kernel after the network."""
        return ops.blended_frame(x, self._out(x, sigma, labels), sigma, last, share, "edm", self.data, guidance)

    def _out(self, x: Tensor, sigma: Tensor, labels: Tensor | None) -> Tensor:
        """F(c_in x, c_noise)."""
        sigma_data, *standard = self.data
        return self.net(*ops.edm_input(x, sigma, sigma_data, self.c_noise_scale, *standard), labels)


def _check(config: Settings) -> None:
    log_normal(config.P_mean, config.P_std)


@register_objective("edm", "Karras et al. 2022", check=_check, options={
    "sigma_data": Option(0.5, "EDM: standard deviation of the data", above=0, fixed=True),
    "data_mean": Option(0.0, "EDM: subtracted from pixels in [-1, 1]; the noise levels are those after it", fixed=True),
    "data_std": Option(1.0, "EDM: pixels less data_mean are divided by it", above=0, fixed=True),
    "P_mean": Option(-1.2, "EDM, flow: mean of log(sigma) in training"),
    "P_std": Option(1.2, "EDM, flow: standard deviation of log(sigma) in training", above=0),
})
class EDM:
    """`EDMLoss`, `EDMDenoiser` and Karras' levels for a configuration's options; see `cudiff.registry.Objective`."""

    def __init__(self, config: Settings, c_noise_scale: float):
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
