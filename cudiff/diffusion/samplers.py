"""Samplers: from noise to images along falling sigmas, with any denoiser D(x; sigma) -> (N, H, W, C).

Every sampler takes x (N, H, W, C) at noise level `sigmas[0]`, such as `ImageNoise.start(sigmas[0])`, and `sigmas`,
float64 numbers on the host that fall, usually to 0: `karras_sigmas(n)` or `Schedule.sampling_sigmas(n)`. States are
x = y + sigma * noise in all of them; a DDPM state is the same divided by sqrt(1 + sigma^2), so DDIM and ancestral
sampling work with any denoiser too. `noise(step)` is standard normal like x, such as an `ImageNoise`.
`callback(step, x, denoised)` sees the state after each step, and the estimate of the image that the step began with.

`sample_heun(denoiser, x, sigmas, ...)` is `Heun(denoiser, ...)(x, sigmas, ...)`; such an object can have its steps
captured, each one CUDA graph, and serves any number of batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import numpy as np

from cudiff import ops
from cudiff.backend import float32
from cudiff.cuda.graph import capture
from cudiff.diffusion.preconditioning import Denoiser, per_sample
from cudiff.errors import CudiffError
from cudiff.ops.random import Streams, normal
from cudiff.options import Option
from cudiff.registry import register_sampler
from cudiff.tensor import Tensor, no_grad
from cudiff.values import real, whole

if TYPE_CHECKING:
    from cudiff.config import Config

Noise = Callable[[int], Tensor]
Callback = Callable[[int, Tensor, Tensor], None]


class ImageNoise:
    """Standard normal noise for images `first`, `first + 1`, ...: each has its own stream (seed, image number).

    An image therefore does not depend on the batch that it is sampled in. Called with a step it gives the noise that a
    stochastic sampler adds there. A sampler that finds it to be like its images does not call it, but draws the same in
    its step, from `counters`: if captured, inside the step's graph.
    """

    def __init__(self, shape: Sequence[int], seed: int, first: int = 0, device: str = "cpu", dtype: Any = float32):
        self.shape, self.seed, self.first = tuple(shape), whole("seed", seed, None), whole("first", first, None)
        self.device, self.dtype = device, np.dtype(dtype)

    def start(self, sigma: float) -> Tensor:
        """Noise of standard deviation `sigma` for a sampler to begin with."""
        return self._normal(Streams.SAMPLE, 0) * float(sigma)

    def __call__(self, step: int) -> Tensor:
        return self._normal(Streams.CHURN, step)

    def _normal(self, stream: int, step: int) -> Tensor:
        return normal(self.shape, self.seed, stream, step, self.first, self.device, self.dtype)

    def counters(self, steps: int) -> Tensor:
        """uint32 (steps, 4): what `drawn` needs for each step, on the device."""
        words = np.empty((steps, 4), np.uint32)
        words[:] = self.seed & 0xFFFFFFFF, self.seed >> 32 & 0xFFFFFFFF, 0, self.first & 0xFFFFFFFF
        words[:, 2] = range(steps)
        return Tensor(words, device=self.device)

    @staticmethod
    def drawn(counter: Tensor, x: Tensor) -> Tensor:
        """The noise of one row of `counters`, like x."""
        seed, step, first = (Tensor(counter.data[part]) for part in (slice(0, 2), slice(2, 3), slice(3, 4)))
        return normal(x.shape, seed, Streams.CHURN, step, first, x.device, x.dtype)


class Plan(NamedTuple):
    """What the host knows of a step: numbers that the device needs, and whether the step adds noise."""

    numbers: list[float]
    noisy: bool


class Sampler:
    """sampler(x, sigmas, labels, noise=, callback=) -> images. A subclass says what the host plans and the device does.

    captured: each step is one CUDA graph, recorded in the second step of a shape and launched from then on. An
    `ImageNoise` like x is drawn in it; what another `noise` returns is copied in. The denoiser must then not read from
    the device (see `cudiff.capture`), and what is returned, or shown to `callback`, is overwritten by the next step.
    Raises CudiffError for sigmas that do not fall, and where a step adds noise and `noise` is missing.
    """

    def __init__(self, denoiser: Any, captured: bool = False):
        self.denoiser = denoiser
        self._step: Any = capture(self._drawn_step, warmup=1, rehearse=True) if captured else self._drawn_step

    def plan(self, sigmas: np.ndarray) -> list[Plan]:
        """Each step's plan. Steps with more numbers, or with noise, have a graph of their own."""
        raise NotImplementedError

    def step(self, x: Tensor, numbers: Tensor, noise: Tensor | None, labels: Tensor | None) -> tuple[Tensor, Tensor]:
        """The next state, and the estimate of the image; `numbers` (K, N) are the plan's, for each of N images."""
        raise NotImplementedError

    @no_grad()
    def __call__(self, x: Tensor, sigmas: Sequence[float] | np.ndarray, labels: Tensor | None = None, *,
                 noise: Noise | None = None, callback: Callback | None = None) -> Tensor:
        plans = self.plan(falling(sigmas))
        counters = noise.counters(len(plans)) if _is_like(noise, x) else None
        for index, (numbers, plan) in enumerate(zip(_on_device(plans, x), plans, strict=True)):
            drawn = counter = None
            if plan.noisy and counters is not None:
                counter = Tensor(counters.data[index])
            elif plan.noisy:
                drawn = _draw(noise, index)
            x, denoised = self._step(x, numbers, drawn, counter, labels)
            if callback is not None:
                callback(index, x, denoised)
        return x

    def _drawn_step(self, x: Tensor, numbers: Tensor, noise: Tensor | None, counter: Tensor | None,
                    labels: Tensor | None) -> tuple[Tensor, Tensor]:
        """`step`, with noise drawn from a counter where there is one."""
        return self.step(x, numbers, noise if counter is None else ImageNoise.drawn(counter, x), labels)


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
            plans.append(Plan(numbers, sigma_hat > sigma))
        return plans

    def step(self, x: Tensor, numbers: Tensor, noise: Tensor | None, labels: Tensor | None) -> tuple[Tensor, Tensor]:
        sigma_hat, ratio, added, *correction = rows(numbers)
        if noise is not None:
            x = x + noise * per_sample(added, x)
        denoised = self.denoiser(x, sigma_hat, labels)
        # x + (sigma_next - sigma_hat) * (x - D) / sigma_hat, which ends in D itself at sigma_next = 0
        x_next = denoised + (x - denoised) * per_sample(ratio, x)
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


class DDIM(Sampler):
    """DDIM, arXiv 2010.02502, equations 12 and 16: eta 0 is deterministic (and Euler's method), 1 is ancestral.

    `clip_denoised` keeps every estimate of the image in [-1, 1], as DDPM's own code does. eta > 0 needs `noise`.
    Raises CudiffError where eta is not in [0, 1].
    """

    def __init__(self, denoiser: Denoiser, eta: float = 0.0, clip_denoised: bool = True, captured: bool = False):
        super().__init__(denoiser, captured)
        if not 0 <= eta <= 1:
            raise CudiffError(f"eta {eta}: use a number between 0 and 1")
        self.eta, self.clip_denoised = eta, clip_denoised

    def plan(self, sigmas: np.ndarray) -> list[Plan]:
        plans = []
        for sigma, sigma_next in pairwise(map(float, sigmas)):
            added = self.eta * math.sqrt(_posterior_variance(sigma, sigma_next))
            plans.append(Plan([sigma, math.sqrt(sigma_next**2 - added**2) / sigma, added], added > 0))
        return plans

    def step(self, x: Tensor, numbers: Tensor, noise: Tensor | None, labels: Tensor | None) -> tuple[Tensor, Tensor]:
        sigma, ratio, added = rows(numbers)
        denoised = _clipped(self.denoiser(x, sigma, labels), self.clip_denoised)
        x = denoised + (x - denoised) * per_sample(ratio, x)
        return x if noise is None else x + noise * per_sample(added, x), denoised


class Ancestral(Sampler):
    """Ancestral sampling: DDPM, arXiv 2006.11239, Algorithm 2 with the mean of equation 7; any number of steps.

    `variance`: "small" is beta-tilde, "large" is beta (section 3.2), both of the process that visits only these
    sigmas; "learned" lies between them in the logarithm as the model says (Improved DDPM, arXiv 2102.09672, equation
    15) and needs a denoiser with `with_variance`. `clip_denoised` as in `DDIM`. No noise is added at the end.
    Raises CudiffError for another variance.
    """

    def __init__(self, denoiser: Any, variance: str = "small", clip_denoised: bool = True, captured: bool = False):
        super().__init__(denoiser, captured)
        if variance not in ("small", "large", "learned"):
            raise CudiffError(f"unknown variance '{variance}': use small, large or learned")
        self.variance, self.clip_denoised = variance, clip_denoised

    def plan(self, sigmas: np.ndarray) -> list[Plan]:
        plans = []
        for sigma, sigma_next in pairwise(map(float, sigmas)):
            numbers = [sigma, (sigma_next / sigma) ** 2]
            if sigma_next > 0:
                small = _posterior_variance(sigma, sigma_next)
                large = (sigma**2 - sigma_next**2) * (1 + sigma_next**2) / (1 + sigma**2)
                if self.variance == "learned":
                    numbers += [0.5 * math.log(small), 0.5 * math.log(large / small)]
                else:
                    numbers.append(math.sqrt(large if self.variance == "large" else small))
            plans.append(Plan(numbers, sigma_next > 0))
        return plans

    def step(self, x: Tensor, numbers: Tensor, noise: Tensor | None, labels: Tensor | None) -> tuple[Tensor, Tensor]:
        sigma, ratio, *spread = rows(numbers)
        if self.variance == "learned":
            denoised, fraction = self.denoiser.with_variance(x, sigma, labels)
        else:
            denoised, fraction = self.denoiser(x, sigma, labels), None
        denoised = _clipped(denoised, self.clip_denoised)
        x = denoised + (x - denoised) * per_sample(ratio, x)
        if noise is not None:
            scale = per_sample(spread[0], x)
            x = x + noise * (scale if fraction is None else ops.exp(fraction * per_sample(spread[1], x) + scale))
        return x, denoised


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
    """`DDIM`'s images from x."""
    return DDIM(denoiser, eta, clip_denoised)(x, sigmas, labels, noise=noise, callback=callback)


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
    """`Ancestral`'s images from x."""
    return Ancestral(denoiser, variance, clip_denoised)(x, sigmas, labels, noise=noise, callback=callback)


def _posterior_variance(sigma: float, sigma_next: float) -> float:
    """beta-tilde of DDPM equation 7 for a step from sigma to sigma_next, in units of x = y + sigma * noise."""
    return sigma_next**2 * (sigma**2 - sigma_next**2) / sigma**2


def falling(sigmas: Sequence[float] | np.ndarray) -> np.ndarray:
    """`sigmas` as float64. Raises CudiffError where a sampler cannot go along them."""
    sigmas = np.asarray(sigmas, np.float64)
    if sigmas.ndim != 1 or len(sigmas) < 2 or sigmas[-1] < 0 or not (np.diff(sigmas) < 0).all():
        raise CudiffError("a sampler needs two or more falling sigmas that end at 0 or above")
    return sigmas


def _on_device(plans: list[Plan], x: Tensor) -> list[Tensor]:
    """Each plan's numbers as a Tensor (K, N) beside x (N, ...); one copy to the device for all."""
    numbers = np.concatenate([plan.numbers for plan in plans])
    table = Tensor(np.repeat(numbers[:, None], x.shape[0], axis=1), dtype=x.dtype, device=x.device).data
    ends = np.cumsum([len(plan.numbers) for plan in plans])
    return [Tensor(table[end - len(plan.numbers) : end]) for plan, end in zip(plans, ends, strict=True)]


def rows(numbers: Tensor) -> list[Tensor]:
    """A step's numbers (K, N) one by one, each (N,): `per_sample` makes them fit images."""
    return [Tensor(row) for row in numbers.data]


def _is_like(noise: Noise | None, x: Tensor) -> TypeGuard[ImageNoise]:
    """Whether `ImageNoise.drawn` gives what noise would: a subclass's may be other numbers."""
    return type(noise) is ImageNoise and (noise.shape, noise.dtype, noise.device) == (x.shape, x.dtype, x.device)


def _draw(noise: Noise | None, step: int) -> Tensor:
    if noise is None:
        raise CudiffError("this sampler adds noise: pass noise=ImageNoise(x.shape, seed)")
    return noise(step)


def _clipped(denoised: Tensor, clip_denoised: bool) -> Tensor:
    return ops.clip(denoised, -1, 1) if clip_denoised else denoised


_CHURN = {
    "S_churn": Option(0.0, "heun and euler: noise added anew, over all steps", least=0),
    "S_min": Option(0.0, "lowest noise level that is churned", least=0),
    "S_max": Option(1e9, "highest noise level that is churned", least=0),
    "S_noise": Option(1.0, "scale of the noise that churning adds", least=0),
}


@register_sampler("heun", "EDM's, of second order", options=_CHURN)
def _heun(denoiser: Denoiser, config: Config, captured: bool) -> Sampler:
    return Heun(denoiser, config.S_churn, config.S_min, config.S_max, config.S_noise, captured)


@register_sampler("euler", "one evaluation a step", options=_CHURN)
def _euler(denoiser: Denoiser, config: Config, captured: bool) -> Sampler:
    return Euler(denoiser, config.S_churn, config.S_min, config.S_max, config.S_noise, captured)


@register_sampler("ddim", "Song et al. 2021", discrete=True,
                  options={"eta": Option(0.0, "DDIM: share of the ancestral noise", least=0, most=1)})
def _ddim(denoiser: Denoiser, config: Config, captured: bool) -> Sampler:
    return DDIM(denoiser, config.eta, captured=captured)


@register_sampler("ancestral", "DDPM's", discrete=True)
def _ancestral(denoiser: Any, config: Config, captured: bool) -> Sampler:
    return Ancestral(denoiser, "learned" if config.learn_sigma else "small", captured=captured)
