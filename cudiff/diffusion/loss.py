"""Training losses: loss(net, images, labels, generator) -> scalar Tensor.

images (N, H, W, C) float32 in [-1, 1], labels int32 (N,) or None. Every random number is drawn on the device from the
generator, by stream and sample, and nothing is read by the host, so that a captured training step can contain them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cudiff import ops
from cudiff.backend import float32
from cudiff.diffusion.preconditioning import NULL_CLASS, Net, per_sample, split_learned_variance
from cudiff.diffusion.schedule import Schedule
from cudiff.ops.cast import as_index
from cudiff.ops.mse import mse
from cudiff.ops.random import Generator, Streams
from cudiff.tensor import Tensor
from cudiff.values import real

COLUMNS = 6  # of DDPMLoss's table: signal, spread, mean_scale, log_small, log_large, is_later


def drop_labels(labels: Any, probability: float, generator: Generator) -> Tensor | None:
    """Labels (N,), integers, each replaced by the null class -1 with this probability.

    Classifier-free guidance, arXiv 2207.12598, Algorithm 1, line 3.
    """
    if labels is None or probability == 0:
        return labels
    labels = as_index("drop_labels", labels, generator.device)
    draws = generator.uniform(labels.shape, Streams.LABEL_DROP)
    kept = ops.astype(draws + (1 - probability), "uint8")  # not 0 where the draw is at least the probability
    # in float32, exact up to 2^24 classes: device arithmetic is for floats
    return ops.astype(ops.where(kept, ops.astype(labels, float32), float(NULL_CLASS)), labels.dtype)


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
        self.P_mean, self.P_std = real("P_mean", P_mean), real("P_std", P_std, above=0)
        self.c_noise_scale = real("c_noise_scale", c_noise_scale)
        self.label_dropout = real("label_dropout", label_dropout, least=0, most=1)

    def __call__(self, net: Net, images: Tensor, labels: Tensor | None, generator: Generator) -> Tensor:
        labels = drop_labels(labels, self.label_dropout, generator)
        draw = generator.normal((images.shape[0],), Streams.SIGMA)
        noise = generator.normal(images.shape, Streams.NOISE)
        x, target, c_noise = ops.edm_mix(
            images, noise, draw, self.P_mean, self.P_std, self.sigma_data, self.c_noise_scale, self.data_mean,
            self.data_std,
        )
        return mse(net(x, c_noise, labels), target)


class DDPMLoss:
    """DDPM's L_simple on the predicted noise, plus Improved DDPM's L_vlb where the network predicts the variance too.

    L_simple: arXiv 2006.11239, equation 14. L_hybrid = L_simple + `vlb_weight` * L_vlb, arXiv 2102.09672, equation 16,
    whose L_vlb trains only the variance: the mean inside it is held fixed (stop-gradient). As in that paper's code,
    L_vlb = T E_t[L_t] is measured in bits per dimension; t is uniform.
    """

    def __init__(self, schedule: Schedule, label_dropout: float = 0.0, vlb_weight: float = 0.001):
        self.schedule, self.label_dropout = schedule, real("label_dropout", label_dropout, least=0, most=1)
        self.vlb_weight = real("vlb_weight", vlb_weight, least=0)
        self._tables: dict[tuple[str, Any], Tensor] = {}

    def __call__(self, net: Net, images: Tensor, labels: Tensor | None, generator: Generator) -> Tensor:
        labels = drop_labels(labels, self.label_dropout, generator)
        t = generator.randint(0, self.schedule.num_timesteps, (images.shape[0],), Streams.TIMESTEP)
        noise = generator.normal(images.shape, Streams.NOISE)
        out = net(self.q_sample(images, t, noise), ops.astype(t, images.dtype), labels)
        eps, fraction = split_learned_variance(out, images)
        simple = mse(eps, noise)
        if fraction is None:
            return simple
        bits = ops.mean(self.variational_bound(images, t, noise, eps.detach(), fraction))
        return simple + bits * (self.vlb_weight * self.schedule.num_timesteps)

    def q_sample(self, images: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        """x_t (N, H, W, C) for timesteps t int32 (N,): DDPM, arXiv 2006.11239, equation 4."""
        coefficients = self._coefficients(images)[t]
        signal, spread = (per_sample(c, images) for c in ops.split(coefficients, COLUMNS, axis=1)[:2])
        return images * signal + noise * spread

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
