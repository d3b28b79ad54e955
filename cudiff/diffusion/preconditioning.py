"""Denoisers D(x; sigma): a network wrapped so that every sampler can use it.

A denoiser takes x = y + sigma * noise (N, H, W, C), sigma (N,), and labels int32 (N,) or None, and returns its estimate
of y (N, H, W, C). A network takes (x, t, labels) in whatever scaling it was trained.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cudiff import ops
from cudiff.diffusion.schedule import Schedule
from cudiff.errors import CudiffError
from cudiff.tensor import Tensor
from cudiff.values import real

Denoiser = Callable[[Tensor, Tensor, Tensor | None], Tensor]
Net = Callable[[Tensor, Tensor, Tensor | None], Tensor]

NULL_CLASS = -1
"""The label of "no class"; an embedding gives it a zero row."""


def per_sample(values: Tensor, x: Tensor) -> Tensor:
    """(N,) or (N, 1) as (N, 1, ..., 1), to be broadcast against x (N, ...)."""
    return ops.reshape(values, (x.shape[0],) + (1,) * (x.ndim - 1))


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

    def __call__(self, x: Tensor, sigma: Tensor, labels: Tensor | None = None) -> Tensor:
        sigma_data, *standard = self.data
        scaled, c_noise = ops.edm_input(x, sigma, sigma_data, self.c_noise_scale, *standard)
        return ops.edm_output(x, self.net(scaled, c_noise, labels), sigma, sigma_data, *standard)


class DDPMDenoiser:
    """A DDPM noise predictor as a denoiser: D(x; sigma) = x - sigma eps(x / sqrt(1 + sigma^2), t(sigma)).

    EDM, arXiv 2206.00364, Table 1, column VP, with the discrete schedule: t is interpolated in log sigma between the
    schedule's entries and stops at its ends. A network with 2C output channels (learn_sigma) is recognised.
    """

    def __init__(self, net: Net, schedule: Schedule):
        self.net, self.schedule = net, schedule
        self._ramps: dict[tuple[str, Any], Tensor] = {}

    def __call__(self, x: Tensor, sigma: Tensor, labels: Tensor | None = None) -> Tensor:
        return self._denoise(x, sigma, labels)[0]

    def with_variance(self, x: Tensor, sigma: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """D(x; sigma), and how far the log-variance lies from its lower (0) to its upper bound (1), learned.

        Improved DDPM, arXiv 2102.09672, equation 15 (its v). Raises CudiffError where the network has no such output.
        """
        denoised, fraction = self._denoise(x, sigma, labels)
        if fraction is None:
            raise CudiffError("this model learned no variance (learn_sigma): use variance='small' or 'large'")
        return denoised, fraction

    def _denoise(self, x: Tensor, sigma: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor | None]:
        scale = per_sample(sigma, x)
        out = self.net(x / ops.sqrt(ops.square(scale) + 1), self.timestep(sigma), labels)
        eps, fraction = split_learned_variance(out, x)
        return x - eps * scale, fraction

    def timestep(self, sigma: Tensor) -> Tensor:
        """Real-valued t (N,) in [0, T - 1] of sigma (N,): `Schedule.sigma_to_t` on the device.

        The piecewise linear map is a sum of T - 1 ramps, one an interval, so that the host reads no value.
        """
        key = sigma.device, sigma.dtype
        if key not in self._ramps:
            logs = np.log(self.schedule.sigmas)
            ramps = np.stack([logs[:-1], 1 / np.diff(logs)])
            self._ramps[key] = Tensor(ramps, dtype=sigma.dtype, device=sigma.device)
        starts, slopes = ops.split(self._ramps[key], 2)  # (1, T - 1) each
        log_sigma = ops.reshape(ops.log(sigma), (sigma.shape[0], 1))
        return ops.sum(ops.clip((log_sigma - starts) * slopes, 0, 1), axis=1)


def split_learned_variance(out: Tensor, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """A DDPM network's output as (eps, v of Improved DDPM equation 15, in about [0, 1]); no v with C channels."""
    if out.shape[-1] == x.shape[-1]:
        return out, None
    eps, v = ops.split(out, 2, axis=-1)
    return eps, (v + 1) * 0.5


class Guided:
    """Classifier-free guidance: D_null + guidance * (D_class - D_null), in one call of twice the batch.

    arXiv 2207.12598, equation 6, whose w is guidance - 1: 1 is the plain conditional denoiser, 0 the unconditional
    one. The null class is label -1. Without labels there is nothing to guide and the denoiser is called as it is.
    """

    def __init__(self, denoiser: Any, guidance: float):
        self.denoiser, self.guidance = denoiser, real("guidance", guidance)
        self._null: dict[tuple[str, int], Tensor] = {}  # kept for each size: a capture cannot make it

    def __call__(self, x: Tensor, sigma: Tensor, labels: Tensor | None = None) -> Tensor:
        if labels is None or self.guidance == 1:
            return self.denoiser(x, sigma, labels)
        return self._guide(self.denoiser(*self._doubled(x, sigma, labels)))

    def with_variance(self, x: Tensor, sigma: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The guided estimate, and the variance of the class-conditional half; see `DDPMDenoiser.with_variance`."""
        if labels is None or self.guidance == 1:
            return self.denoiser.with_variance(x, sigma, labels)
        denoised, fraction = self.denoiser.with_variance(*self._doubled(x, sigma, labels))
        return self._guide(denoised), ops.split(fraction, 2, axis=0)[0]

    def _doubled(self, x: Tensor, sigma: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        key = labels.device, len(labels)
        if key not in self._null:
            self._null[key] = Tensor(np.full(labels.shape, NULL_CLASS, labels.dtype), device=labels.device)
        return ops.concatenate([x, x]), ops.concatenate([sigma, sigma]), ops.concatenate([labels, self._null[key]])

    def _guide(self, denoised: Tensor) -> Tensor:
        conditional, unconditional = ops.split(denoised, 2)
        return unconditional + (conditional - unconditional) * self.guidance
