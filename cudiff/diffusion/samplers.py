"""What samplers share: from noise to images along decreasing sigmas, with any denoiser D(x; sigma) -> (N, H, W, C).

Every sampler takes x (N, H, W, C) at noise level `sigmas[0]`, such as `ImageNoise.start(sigmas[0])`, and `sigmas`,
float64 numbers on the host that fall, usually to 0: `karras_sigmas(n)` or `Schedule.sampling_sigmas(n)`. States are
x = y + sigma * noise in all of them; a DDPM state is the same divided by sqrt(1 + sigma^2), so DDIM and ancestral
sampling work with any denoiser too. `noise(step)` is standard normal like x, such as an `ImageNoise`.
`callback(step, x, denoised)` sees the state after each step, and the estimate of the image that the step began with.

`sample_heun(denoiser, x, sigmas, ...)` is `Heun(denoiser, ...)(x, sigmas, ...)`; such an object can have its steps
captured, each one CUDA graph, and serves any number of batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from cudiff import ops
from cudiff.backend import float32
from cudiff.cuda.graph import capture
from cudiff.errors import CudiffError
from cudiff.ops.random import Purpose, normal
from cudiff.tensor import Tensor, no_grad
from cudiff.values import whole

Noise = Callable[[int], Tensor]
Callback = Callable[[int, Tensor, Tensor], None]


class ImageNoise:
    """Standard normal noise for images `first`, `first + 1`, ...: each has its own stream (seed, image number).

    An image therefore does not depend on the batch that it is sampled in. Called with a step it gives the noise that a
    stochastic sampler adds there. A sampler that finds it to be like its images does not call it, but draws the same in
    its step, from `counters`: if captured, inside the step's graph. Of a seed the low 64 bits count, of `first` 32.
    """

    def __init__(self, shape: Sequence[int], seed: int, first: int = 0, device: str = "cpu", dtype: Any = float32):
        self.shape, self.device, self.dtype = tuple(shape), device, np.dtype(dtype)
        self.seed, self.first = whole("seed", seed, None) % 2**64, whole("first", first, None) % 2**32

    def start(self, sigma: float) -> Tensor:
        """Noise of standard deviation `sigma` for a sampler to begin with."""
        return self._normal(Purpose.SAMPLE, 0) * float(sigma)

    def __call__(self, step: int) -> Tensor:
        return self._normal(Purpose.CHURN, step)

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
        return normal(x.shape, seed, Purpose.CHURN, step, first, x.device, x.dtype)


class Plan(NamedTuple):
    """What the host knows of a step: numbers that the device needs, and whether the step adds noise."""

    numbers: list[float]
    noisy: bool


class Sampler:
    """sampler(x, sigmas, labels, noise=, callback=) -> images. A subclass says what the host plans and the device does.

    captured: each step is one CUDA graph, recorded in the second step of a shape and launched from then on. An
    `ImageNoise` like x is drawn in it; what another `noise` returns is copied in. The denoiser must then not read from
    the device (see `cudiff.capture`), and what is returned, or shown to `callback`, is overwritten by the next step.
    Raises CudiffError for sigmas that do not fall, where a step adds noise and `noise` is missing, and for plans of
    another number and states of another shape than they have to be.
    """

    def __init__(self, denoiser: Any, captured: bool = False):
        self.denoiser = denoiser
        self._step: Any = capture(self._drawn_step, warmup=1, precompile=True) if captured else self._drawn_step

    def plan(self, sigmas: np.ndarray) -> list[Plan]:
        """A plan for each step from a sigma to the next. Steps with more numbers, or noise, have their own graph."""
        raise NotImplementedError

    def step(self, x: Tensor, numbers: Tensor, noise: Tensor | None, labels: Tensor | None) -> tuple[Tensor, Tensor]:
        """The next state, and the estimate of the image; `numbers` (K, N) are the plan's, for each of N images."""
        raise NotImplementedError

    @no_grad()
    def __call__(self, x: Tensor, sigmas: Sequence[float] | np.ndarray, labels: Tensor | None = None, *,
                 noise: Noise | None = None, callback: Callback | None = None) -> Tensor:
        sigmas = decreasing(sigmas)
        plans = self.plan(sigmas)
        if not isinstance(plans, list | tuple) or len(plans) != len(sigmas) - 1:
            what = f"{len(plans)} plans" if isinstance(plans, list | tuple) else f"a {type(plans).__name__}"
            raise CudiffError(
                f"sampler {type(self).__name__}: plan returned {what} for {len(sigmas)} sigmas; return a list of "
                f"{len(sigmas) - 1}, one Plan for each step"
            )
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
        made = self.step(x, numbers, noise if counter is None else ImageNoise.drawn(counter, x), labels)
        if not isinstance(made, tuple) or [getattr(one, "shape", None) for one in made] != [x.shape, x.shape]:
            raise CudiffError(
                f"sampler {type(self).__name__}: return two Tensors from step, the next state and the image, both of "
                f"shape {x.shape}"
            )
        return made


def posterior_variance(sigma: float, sigma_next: float) -> float:
    """beta-tilde of DDPM equation 7 for a step from sigma to sigma_next, in units of x = y + sigma * noise."""
    return sigma_next**2 * (sigma**2 - sigma_next**2) / sigma**2


def decreasing(sigmas: Sequence[float] | np.ndarray) -> np.ndarray:
    """`sigmas` as float64. Raises CudiffError where a sampler cannot go along them."""
    sigmas = np.asarray(sigmas, np.float64)
    if sigmas.ndim != 1 or len(sigmas) < 2 or sigmas[-1] < 0 or not (np.diff(sigmas) < 0).all():
        raise CudiffError("a sampler needs two or more decreasing sigmas that end at 0 or above")
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


def clipped(denoised: Tensor, clip_denoised: bool) -> Tensor:
    """An estimate of the image kept in [-1, 1], where that is wanted."""
    return ops.clip(denoised, -1, 1) if clip_denoised else denoised
