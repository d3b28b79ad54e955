"""Noise levels: the beta schedules of DDPM, their noise-to-signal ratio sigma, and the sigmas a sampler visits.

Everything here is host arithmetic in float64 NumPy. Samplers and denoisers speak of sigma, the noise's standard
deviation over a signal of scale one: x = y + sigma * noise. A DDPM state x_t = sqrt(alphas_cumprod) * y +
sqrt(1 - alphas_cumprod) * noise is the same thing divided by sqrt(1 + sigma^2) (EDM, arXiv 2206.00364,
Table 1, column VP).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from cudiff.errors import CudiffError
from cudiff.values import real, whole


def linear_betas(num_timesteps: int = 1000) -> np.ndarray:
    """Variances rising linearly from 1e-4 to 0.02, float64 (T,), scaled by 1000/T for other T.

    DDPM, arXiv 2006.11239, section 4; the scaling is Improved DDPM's, so that the last sigma hardly depends on T.
    Raises CudiffError where T < 21: the scaled variances would reach 1.
    """
    scale = 1000 / num_timesteps
    if 0.02 * scale >= 1:
        raise CudiffError(f"a linear schedule of {num_timesteps} timesteps has variances over 1: use 21 or more")
    return np.linspace(1e-4 * scale, 0.02 * scale, num_timesteps)


def cosine_betas(num_timesteps: int = 1000, offset: float = 0.008, max_beta: float = 0.999) -> np.ndarray:
    """Variances whose alphas_cumprod follows a squared cosine, float64 (T,).

    Improved DDPM, arXiv 2102.09672, equation 17; `max_beta` keeps the last steps from a division by zero.
    """
    time = np.arange(num_timesteps + 1) / num_timesteps
    alphas_cumprod = np.cos((time + offset) / (1 + offset) * np.pi / 2) ** 2
    return np.minimum(1 - alphas_cumprod[1:] / alphas_cumprod[:-1], max_beta)


BETAS: dict[str, Callable[[int], np.ndarray]] = {"linear": linear_betas, "cosine": cosine_betas}
"""The schedules by the name they have in a configuration."""


class Schedule:
    """The discrete forward process of DDPM for given betas.

    Parameters
    ----------
    betas : float64 array (T,), each in (0, 1)
        Or "linear" or "cosine", with `num_timesteps`.

    Attributes
    ----------
    alphas_cumprod : (T,), DDPM equation 4. sigmas : (T,), rising, sqrt((1 - alphas_cumprod) / alphas_cumprod).
    posterior_variance : (T,), beta-tilde of DDPM equation 7; 0 at t = 0.
    """

    def __init__(self, betas: np.ndarray | str = "linear", num_timesteps: int = 1000):
        if isinstance(betas, str):
            if betas not in BETAS:
                raise CudiffError(f"unknown noise schedule '{betas}': use {' or '.join(BETAS)}")
            betas = BETAS[betas](whole("num_timesteps", num_timesteps))
        self.betas = np.asarray(betas, np.float64)
        if self.betas.ndim != 1 or len(self.betas) < 2 or not ((self.betas > 0) & (self.betas < 1)).all():
            raise CudiffError("a noise schedule needs two or more variances (betas), each between 0 and 1")
        self.num_timesteps = len(self.betas)
        self.alphas_cumprod = np.cumprod(1 - self.betas)
        self.alphas_cumprod_prev = np.append(1.0, self.alphas_cumprod[:-1])
        self.sigmas = np.sqrt((1 - self.alphas_cumprod) / self.alphas_cumprod)
        self.posterior_variance = self.betas * (1 - self.alphas_cumprod_prev) / (1 - self.alphas_cumprod)

    def sigma_to_t(self, sigma: np.ndarray | float) -> np.ndarray:
        """The timestep, real-valued in [0, T - 1], of each sigma: linear in log sigma between the table's entries."""
        return np.interp(np.log(sigma), np.log(self.sigmas), np.arange(self.num_timesteps))

    def t_to_sigma(self, t: np.ndarray | float) -> np.ndarray:
        """The inverse of `sigma_to_t`: sigma at a real-valued timestep in [0, T - 1]."""
        return np.exp(np.interp(t, np.arange(self.num_timesteps), np.log(self.sigmas)))

    def timesteps(self, num_steps: int, spacing: str = "even") -> np.ndarray:
        """`num_steps` timesteps of the table, int64, decreasing: those of guided-diffusion's `space_timesteps`.

        spacing: "even" goes from T - 1 to 0, each timestep the nearest whole number; "ddim" goes down to 0 by the
        smallest whole stride that gives exactly `num_steps` (guided-diffusion's "ddimN", DDIM's own spacing). One even
        step is T - 1, where guided-diffusion's would be 0, at which no noise is left to start from.
        Raises CudiffError where `num_steps` is not in [1, T] and where no stride gives that many.
        """
        total = self.num_timesteps
        if not 1 <= whole("num_steps", num_steps, None) <= total:
            raise CudiffError(f"{num_steps} steps of a schedule that has {total}: use 1 to {total}")
        if spacing == "ddim":
            return np.arange(0, total, self._stride(num_steps))[::-1]
        if spacing != "even":
            raise CudiffError(f"unknown spacing '{spacing}' of timesteps: use even or ddim")
        if num_steps == 1:
            return np.array([total - 1])
        strides = np.full(num_steps, (total - 1) / (num_steps - 1))
        strides[0] = 0
        return np.rint(np.cumsum(strides)).astype(np.int64)[::-1]  # a running sum, rounded half to even, as theirs

    def _stride(self, num_steps: int) -> int:
        counts = {-(-self.num_timesteps // stride): stride for stride in range(self.num_timesteps - 1, 0, -1)}
        if num_steps not in counts:
            fewer = [count for count in counts if count < num_steps]
            more = min(count for count in counts if count > num_steps)
            raise CudiffError(
                f"no whole stride through {self.num_timesteps} timesteps gives {num_steps} steps: use "
                f"{f'{max(fewer)} or ' if fewer else ''}{more}, or even spacing"
            )
        return counts[num_steps]

    def sampling_sigmas(self, num_steps: int, spacing: str = "even") -> np.ndarray:
        """The sigmas of `timesteps(num_steps, spacing)` and a final 0, float64 (num_steps + 1,): a DDPM sampler's."""
        return np.append(self.sigmas[self.timesteps(num_steps, spacing)], 0.0)


def log_normal(P_mean: float, P_std: float) -> tuple[float, float]:
    """Mean and standard deviation of log(sigma) in training, checked.

    Raises CudiffError where float32 does not hold the square of a sigma; none is drawn beyond 7 standard deviations.
    """
    real("P_mean", P_mean), real("P_std", P_std, above=0)
    if abs(P_mean) + 7 * P_std > 43:
        raise CudiffError(f"P_mean {P_mean:g} and P_std {P_std:g} give noise levels too large or small for float32: "
                          "use |P_mean| + 7 P_std of at most 43")
    return float(P_mean), float(P_std)


def karras_sigmas(num_steps: int, sigma_min: float = 0.002, sigma_max: float = 80.0, rho: float = 7.0) -> np.ndarray:
    """Sigmas decreasing from `sigma_max` to `sigma_min`, evenly spaced in sigma^(1/rho), and a final 0.

    Float64 (num_steps + 1,); one step goes from `sigma_max` to 0. EDM, arXiv 2206.00364, equation 5.
    Raises CudiffError where num_steps < 1, where the range is not 0 < sigma_min < sigma_max, and for a rho with which
    float64 does not reach sigma_min from sigma_max.
    """
    if whole("num_steps", num_steps, None) < 1:
        raise CudiffError(f"{num_steps} sampling steps: use 1 or more")
    real("rho", rho, above=0)
    if not 0 < sigma_min < sigma_max < np.inf:
        raise CudiffError(f"sigma_min {sigma_min} and sigma_max {sigma_max}: use 0 < sigma_min < sigma_max")
    ramp = np.arange(num_steps) / max(num_steps - 1, 1)
    try:  # Python's power: NumPy's differs in the last bit, which would change a seed's pictures
        low, high = sigma_min ** (1 / rho), sigma_max ** (1 / rho)
    except OverflowError:
        low = high = math.inf
    with np.errstate(all="ignore"):
        highest, lowest = (high + np.array([0.0, 1.0]) * (low - high)) ** rho
    if not (math.isclose(highest, sigma_max, rel_tol=1e-3) and math.isclose(lowest, sigma_min, rel_tol=1e-3)):
        raise CudiffError(f"rho {rho:g} is too {'small' if rho < 1 else 'large'} for noise levels from {sigma_max:g} "
                          f"to {sigma_min:g}: use one nearer to 7")
    return np.append((high + ramp * (low - high)) ** rho, 0.0)
