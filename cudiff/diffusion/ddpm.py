"""The objective "ddpm", Ho et al. 2020 (arXiv 2006.11239), with Improved DDPM's learned variance (arXiv 2102.09672).

The net predicts the noise (eps), the image (x0) or v (`cudiff.diffusion.prediction`).

Losses are called as loss(net, images, labels, generator) -> scalar Tensor: images (N, H, W, C) float32 in [-1, 1],
labels int32 (N,) or None. Every random number is drawn on the device from the generator, by stream and sample, and
nothing is read by the host, so that a captured training step can contain them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cudiff import ops
from cudiff.backend import float32
from cudiff.diffusion.denoiser import Net, per_sample
from cudiff.diffusion.guidance import drop_labels
from cudiff.diffusion.prediction import DISCRETE, PREDICTIONS, Prediction, predicting
from cudiff.diffusion.schedule import BETAS, Schedule, karras_sigmas
from cudiff.errors import CudiffError
from cudiff.ops.mse import mse
from cudiff.ops.random import Generator, Purpose
from cudiff.ops.timestep_embedding import noise_levels
from cudiff.options import Option
from cudiff.registry import Settings, register_objective
from cudiff.tensor import Tensor
from cudiff.values import real

COLUMNS = 6  # of DDPMLoss's table: signal, spread, mean_scale, log_small, log_large, is_later


class DDPMLoss:
    """DDPM's L_simple on what is predicted, plus Improved DDPM's L_vlb where the network predicts the variance too.

    prediction: eps, x0 or v, see `PREDICTIONS`. min_snr: gamma of min-SNR weights, arXiv 2303.09556, 0 for none: an
    image's squared error counts min(SNR, gamma), SNR = 1 / sigma^2, which for what the net predicts is min(SNR, gamma)
    c_out^2: over SNR for eps, over SNR + 1 for v (its section 3.4).
    L_simple: arXiv 2006.11239, equation 14. L_hybrid = L_simple + `vlb_weight` * L_vlb, arXiv 2102.09672, equation 16,
    whose L_vlb trains only the variance: the mean inside it is held fixed (stop-gradient). As in that paper's code,
    L_vlb = T E_t[L_t] is measured in bits per dimension; t is uniform.
    learn_sigma: whether the network has to predict the variance, None to see from its output. Raises CudiffError for an
    output of another shape.
    """

    def __init__(self, schedule: Schedule, label_dropout: float = 0.0, vlb_weight: float = 0.001,
                 prediction: str = "eps", min_snr: float = 0.0, learn_sigma: bool | None = None):
        self.learn_sigma = learn_sigma
        self.schedule, self.label_dropout = schedule, real("label_dropout", label_dropout, least=0, most=1)
        self.prediction, self.min_snr = predicting(prediction), real("min_snr", min_snr, least=0)
        self.vlb_weight = real("vlb_weight", vlb_weight, least=0)
        self._tables: dict[tuple[str, Any], Tensor] = {}

    def __call__(self, net: Net, images: Tensor, labels: Tensor | None, generator: Generator) -> Tensor:
        labels = drop_labels(labels, self.label_dropout, generator)
        t = generator.randint(0, self.schedule.num_timesteps, (images.shape[0],), stream=Purpose.TIMESTEP)
        noise = generator.normal(images.shape, stream=Purpose.NOISE)
        out = net(self.q_sample(images, t, noise), ops.astype(t, images.dtype), labels)
        predicted, fraction = split_learned_variance(out, images, self.learn_sigma)
        simple = mse(predicted, self.target(images, t, noise), self.weights(images)[t] if self.min_snr else None)
        if fraction is None:
            return simple
        bits = ops.mean(self.variational_bound(images, t, noise, predicted.detach(), fraction))
        return simple + bits * (self.vlb_weight * self.schedule.num_timesteps)

    def before_capture(self, images: Tensor) -> None:
        """Make the tables for images of their dtype, on their device: a capture cannot."""
        self._coefficients(images)
        if self.min_snr:
            self.weights(images)

    def q_sample(self, images: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        """x_t (N, H, W, C) for timesteps t int32 (N,): DDPM, arXiv 2006.11239, equation 4."""
        coefficients = self._coefficients(images)[t]
        signal, spread = (per_sample(c, images) for c in ops.split(coefficients, COLUMNS, axis=1)[:2])
        return images * signal + noise * spread

    def target(self, images: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        """What the net should predict, like images."""
        if self.prediction is PREDICTIONS["eps"]:  # which needs no coefficients
            return noise
        columns = ops.split(self._coefficients(images)[t], COLUMNS, axis=1)
        return self.prediction.target(images, noise, *(per_sample(column, images) for column in columns[:2]))

    def weights(self, images: Tensor) -> Tensor:
        """min-SNR's weight of each timestep, (T,), on the images' device."""
        key = images.device, "weights"
        if key not in self._tables:
            sigmas = Tensor(self.schedule.sigmas)
            weights = np.minimum(sigmas.numpy() ** -2, self.min_snr) * self.prediction.c_out(sigmas).numpy() ** 2
            self._tables[key] = Tensor(weights, dtype=float32, device=images.device)
        return self._tables[key]

    def variational_bound(self, images: Tensor, t: Tensor, noise: Tensor, eps: Tensor, fraction: Tensor) -> Tensor:
        """L_t of each element in bits: DDPM equation 5; -log2 p(x_0 | x_1) at t = 0, KL(q || p) elsewhere.

        `eps` is the predicted noise; `fraction` places the log-variance between log beta-tilde (0) and log beta (1).
        The images are 8-bit levels scaled to [-1, 1].
        """
        columns = ops.split(self._coefficients(images)[t], COLUMNS, axis=1)
        mean_scale, log_small, log_large, is_later = (per_sample(c, images) for c in columns[2:])
        difference = (eps - noise) * mean_scale  # true posterior mean - predicted mean
        log_variance = fraction * (log_large - log_small) + log_small
        divergence = normal_kl(difference, log_small, log_variance)
        likelihood = discretised_log_likelihood(images, difference, log_variance)
        return ops.where(ops.astype(is_later, "uint8"), divergence, -likelihood) * (1 / math.log(2))

    def _coefficients(self, images: Tensor) -> Tensor:
        """(T, COLUMNS) on the images' device: what each timestep needs, looked up in one gather."""
        key = images.device, images.dtype
        if key not in self._tables:
            s = self.schedule
            # beta-tilde is 0 at t = 0: its logarithm there is that of t = 1, as in Improved DDPM's code
            log_small = np.log(np.append(s.posterior_variance[1:2], s.posterior_variance[1:]))
            mean_scale = s.betas / np.sqrt((1 - s.betas) * (1 - s.alphas_cumprod))  # DDPM equation 11
            is_later = np.arange(s.num_timesteps) > 0
            signal, spread = np.sqrt(s.alphas_cumprod), np.sqrt(1 - s.alphas_cumprod)
            table = np.stack([signal, spread, mean_scale, log_small, np.log(s.betas), is_later], axis=1)
            self._tables[key] = Tensor(table, dtype=images.dtype, device=images.device)
        return self._tables[key]


def normal_kl(difference: Tensor, log_variance_q: Tensor, log_variance_p: Tensor) -> Tensor:
    """KL(N(m + difference, exp(log_variance_q)) || N(m, exp(log_variance_p))) of each element, in nats."""
    gap = log_variance_q - log_variance_p
    return (ops.exp(gap) + ops.square(difference) * ops.exp(-log_variance_p) - gap - 1) * 0.5


def discretised_log_likelihood(images: Tensor, difference: Tensor, log_variance: Tensor) -> Tensor:
    """log probability, in nats, of 8-bit levels in [-1, 1] under N(images - difference, exp(log_variance)).

    A level owns 1/255 to both sides of it, the first and the last everything beyond: DDPM, arXiv 2006.11239, equation
    13. The normal distribution function is 0.5 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), as in that paper's code.
    """
    rstd = ops.exp(log_variance * -0.5)
    upper = _normal_cdf((difference + 1 / 255) * rstd)
    lower = _normal_cdf((difference - 1 / 255) * rstd)
    is_last = ops.astype(images + 0.001, "uint8")
    is_first = ops.astype(0.001 - images, "uint8")
    probability = ops.where(is_last, 1.0, upper) - ops.where(is_first, 0.0, lower)
    return ops.log(ops.maximum(probability, 1e-12))


def _normal_cdf(x: Tensor) -> Tensor:
    # sigmoid(2 a) = 0.5 (1 + tanh(a))
    return ops.sigmoid((x + x * ops.square(x) * 0.044715) * math.sqrt(8 / math.pi))


class DDPMDenoiser:
    """A DDPM net as a denoiser, D(x; sigma) = c_skip x + c_out F(x / sqrt(1 + sigma^2), t(sigma)): for one that
    predicts the noise x - sigma eps(..). See `PREDICTIONS` for the others.

    EDM, arXiv 2206.00364, Table 1, column VP, with the discrete schedule: t is interpolated in log sigma between the
    schedule's entries and stops at its ends. A network with 2C output channels (learn_sigma) is recognised.
    """

    def __init__(self, net: Net, schedule: Schedule, prediction: str = "eps"):
        predicting(prediction)  # says where it is none
        self.net, self.schedule, self.predicts = net, schedule, prediction
        self._ramps: dict[tuple[str, Any], Tensor] = {}

    def __call__(self, x: Tensor, sigma: Tensor | float, labels: Tensor | None = None) -> Tensor:
        return self._denoise(x, sigma, labels)[0]

    def with_variance(self, x: Tensor, sigma: Tensor | float, labels: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """D(x; sigma), and how far the log-variance lies from its lower (0) to its upper bound (1), learned.

        Improved DDPM, arXiv 2102.09672, equation 15 (its v). Raises CudiffError where the network has no such output.
        """
        denoised, fraction = self._denoise(x, sigma, labels)
        if fraction is None:
            raise CudiffError("this model learned no variance (learn_sigma): use variance='small' or 'large'")
        return denoised, fraction

    def blended_frame(self, x: Tensor, sigma: Tensor, labels: Tensor | None, last: Tensor, share: Tensor,
                      guidance: Any = None) -> tuple[Tensor, Tensor]:
        """`ops.blended_frame` of D(x; sigma), with sums: one kernel after the network."""
        out = _checked(self._out(x, sigma, labels), x)
        return ops.blended_frame(x, out, sigma, last, share, self.predicts, guidance=guidance)

    @property
    def prediction(self) -> Prediction:
        """That of `predicts`: another one would not be that of `blended_frame`."""
        return PREDICTIONS[self.predicts]

    def before_capture(self, x: Tensor, labels: Tensor | None = None) -> None:
        """Make the table of `timestep` for images or levels of x's dtype, on its device: a capture cannot."""
        key = x.device, x.dtype
        if key not in self._ramps:
            logs = np.log(self.schedule.sigmas)
            ramps = np.stack([logs[:-1], 1 / np.diff(logs)])
            self._ramps[key] = Tensor(ramps, dtype=x.dtype, device=x.device)

    def _denoise(self, x: Tensor, sigma: Tensor | float, labels: Tensor | None) -> tuple[Tensor, Tensor | None]:
        sigma = noise_levels(sigma, x)
        predicted, fraction = split_learned_variance(self._out(x, sigma, labels), x)
        return self.prediction.denoised(x, predicted, per_sample(sigma, x)), fraction

    def _out(self, x: Tensor, sigma: Tensor, labels: Tensor | None) -> Tensor:
        """F(c_in x, t(sigma))."""
        return self.net(x / ops.sqrt(ops.square(per_sample(sigma, x)) + 1), self.timestep(sigma), labels)

    def timestep(self, sigma: Tensor) -> Tensor:
        """Real-valued t (N,) in [0, T - 1] of sigma (N,): `Schedule.sigma_to_t` on the device.

        The piecewise linear map is a sum of T - 1 ramps, one an interval, so that the host reads no value.
        """
        self.before_capture(sigma)
        starts, slopes = ops.split(self._ramps[sigma.device, sigma.dtype], 2)  # (1, T - 1) each
        log_sigma = ops.reshape(ops.log(sigma), (sigma.shape[0], 1))
        return ops.sum(ops.clip((log_sigma - starts) * slopes, 0, 1), axis=1)


def split_learned_variance(out: Tensor, x: Tensor, learn_sigma: bool | None = None) -> tuple[Tensor, Tensor | None]:
    """A DDPM network's output: its prediction, and v of Improved DDPM equation 15, in about [0, 1], or None.

    Raises CudiffError where it is neither like x nor has twice its channels, or is not that of `learn_sigma`.
    """
    if _checked(out, x, learn_sigma).shape == x.shape:
        return out, None
    predicted, v = ops.split(out, 2, axis=-1)
    return predicted, (v + 1) * 0.5


def _checked(out: Tensor, x: Tensor, learn_sigma: bool | None = None) -> Tensor:
    """A network's output. Raises as `split_learned_variance` does."""
    plain, wide = x.shape, (*x.shape[:-1], 2 * x.shape[-1])
    wanted = [plain, wide] if learn_sigma is None else [wide if learn_sigma else plain]
    if getattr(out, "shape", None) not in wanted:
        what = f"a Tensor of shape {out.shape}" if isinstance(out, Tensor) else f"a {type(out).__name__}"
        with_sigma = "" if learn_sigma is None else f" {'with' if learn_sigma else 'without'} learn_sigma"
        raise CudiffError(f"the model returned {what}: return one of shape {' or '.join(map(str, wanted))}{with_sigma}")
    return out


def _check(config: Settings) -> None:
    if config.learn_sigma and config.prediction != "eps":
        raise CudiffError(f"learn_sigma is for prediction = eps, not {config.prediction}: drop one of them")


@register_objective("ddpm", "Ho et al. 2020", learns_variance=True, check=_check, options={
    "prediction": Option("eps", "DDPM: what the net predicts, the noise, the image or v", DISCRETE, fixed=True),
    "min_snr": Option(0.0, "DDPM: gamma of min-SNR weights, 5 in their paper; 0 = none", least=0),
    "noise_schedule": Option("linear", "DDPM: how betas grow", BETAS, fixed=True),
    "diffusion_steps": Option(1000, "DDPM: noise levels", least=1, most=10**6, fixed=True),
    "sample_spacing": Option("even", "DDPM: timesteps that ddim and ancestral visit; ddim = by a whole stride",
                             ("even", "ddim")),
})
class DDPM:
    """`DDPMLoss`, `DDPMDenoiser` and the levels of a `Schedule`; see `cudiff.registry.Objective`."""

    def __init__(self, config: Settings, c_noise_scale: float):
        self.config, self.schedule = config, Schedule(config.noise_schedule, config.diffusion_steps)

    def loss(self, label_dropout: float) -> DDPMLoss:
        config = self.config
        return DDPMLoss(self.schedule, label_dropout, prediction=config.prediction, min_snr=config.min_snr,
                        learn_sigma=config.learn_sigma)

    def denoiser(self, net: Net) -> DDPMDenoiser:
        return DDPMDenoiser(net, self.schedule, self.config.prediction)

    def sigmas(self, steps: int, discrete: bool) -> np.ndarray:
        config, sigmas = self.config, self.schedule.sigmas
        if discrete:
            return self.schedule.sampling_sigmas(steps, config.sample_spacing)
        return karras_sigmas(steps, max(config.sigma_min, sigmas[0]), min(config.sigma_max, sigmas[-1]), config.rho)
