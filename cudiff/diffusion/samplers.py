"""What samplers share: from noise to images along decreasing sigmas, with any denoiser D(x; sigma) -> (N, H, W, C).

Every sampler takes x (N, H, W, C) at noise level `sigmas[0]`, such as `ImageNoise.start(sigmas[0])`, and `sigmas`,
float64 numbers on the host that fall, usually to 0: `karras_sigmas(n)` or `Schedule.sampling_sigmas(n)`. States are
x = y + sigma * noise in all of them; a DDPM state is the same divided by sqrt(1 + sigma^2), so DDIM and ancestral
sampling work with any denoiser too. `noise(step)` is standard normal like x, such as an `ImageNoise`.
`callback(step, x, denoised)` sees the state after each step, and the estimate of the image that the step began with.

`sample_heun(denoiser, x, sigmas, ...)` is `Heun(denoiser, ...)(x, sigmas, ...)`; such an object can have its steps
captured, all as one CUDA graph or each as its own, and serves any number of batches.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from cudiff import ops
from cudiff.backend import float32
from cudiff.cuda.graph import Captured, capture
from cudiff.cuda.launch import launches
from cudiff.errors import CudiffError
from cudiff.ops.random import Purpose, normal
from cudiff.options import Option
from cudiff.registry import Settings
from cudiff.tensor import Tensor, no_grad
from cudiff.values import whole

Noise = Callable[[int], Tensor]
Callback = Callable[[int, Tensor, Tensor], None]
Kinds = tuple[tuple[int, bool], ...]  # of each step: how many numbers it takes, and whether it adds noise

MOST_LAUNCHES = 5000
"""Of a graph for all steps. To record a launch takes the host as long as to make it, so with more each step is one."""


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
    def drawn(counter: Tensor, x: Tensor, stream: int = Purpose.CHURN) -> Tensor:
        """The noise of one row of `counters`, like x: that of a step; or of row 0, with Purpose.SAMPLE, what `start`
        scales."""
        seed, step, first = (Tensor(counter.data[part]) for part in (slice(0, 2), slice(2, 3), slice(3, 4)))
        return normal(x.shape, seed, stream, step, first, x.device, x.dtype)


class Plan(NamedTuple):
    """What the host knows of a step: numbers that the device needs, and whether the step adds noise."""

    numbers: list[float]
    noisy: bool
    to_image: Callable[..., Any] | None = None
    """The class' `step`, where it ends in D(x; sigma) itself, sigma its first number, as one to 0 does: `Ends` may take
    its place. In a subclass with another `step` this says nothing."""


class Ends(NamedTuple):
    """What is done before a sampler's first step and after its last one. Where all steps are one graph, it is recorded
    there; others of these functions have the graph recorded anew. They go with an `ImageNoise` of the states' shape.
    """

    begin: Callable[..., Tensor]
    """(x, counters of `ImageNoise`, *arrays) -> the float32 state to begin with, of x's shape"""
    finish: Callable[..., Any]
    """(images, *arrays) -> what the sampler returns"""
    arrays: tuple[Tensor, ...]
    denoise: Callable[..., Any] | None = None
    """(denoiser, x, sigma, labels, *arrays) -> the same, in place of a last step `to_image` and of `finish`; a graph
    where a step is one. `callback` sees the steps before."""


class Sampler:
    """sampler(x, sigmas, labels, noise=, callback=) -> images. A subclass says what the host plans and the device does.

    captured: all steps are one CUDA graph, recorded in the first call of a shape and launched from then on. Its inputs
    are x, labels, the sigmas, and of an `ImageNoise` like x seed and image numbers. Steps of other kinds, as of another
    number, have it recorded anew. With `callback`, with another `noise`, which is copied in, and with more than 5,000
    launches each step is a graph, recorded in the second step of its kind, for any number of steps. The denoiser must
    not read from the device (see `cudiff.capture`), and what is returned, or shown to `callback`, is overwritten by
    the next call, or step.
    ends: what a call does before and after its steps, whose arrays are inputs of the graph too. Then x may have another
    dtype, and what `finish` returns is returned.
    memory: of what a step returns after its state, how many the next one is given too, for methods of several steps.
    Raises CudiffError for sigmas that do not fall, where a step adds noise and `noise` is missing, and for plans of
    another number and states and noise of another shape than they have to be.
    """

    memory = 0

    def __init__(self, denoiser: Any, captured: bool = False):
        self.denoiser, self._captured = denoiser, captured
        self._uploaded: tuple[tuple, Tensor] | None = None  # the last table
        self._recorded: tuple = ()  # kinds, and ends without arrays, of the graph of all steps
        self._all_steps: Captured | None = None  # None where they are too many
        own: Any = weakref.proxy(self)  # a circle would keep the graphs' memory until garbage is collected
        self._one_step = capture(lambda *inputs: own._drawn_step(*inputs), warmup=1, precompile=True)
        self._last_step: tuple[Any, Any] = None, None  # of a call's `Ends.denoise`, and its graph

    def levels(self, sigmas: Sequence[float] | np.ndarray) -> np.ndarray:
        """`sigmas` as float64, checked."""
        return decreasing(sigmas)

    def plan(self, sigmas: np.ndarray) -> list[Plan]:
        """A plan for each step from a sigma to the next. Steps with more numbers, or noise, are of another kind."""
        raise NotImplementedError

    def step(self, x: Tensor, numbers: Tensor, noise: Tensor | None, labels: Tensor | None) -> tuple[Tensor, ...]:
        """The next state, and the estimate of the image; `numbers` (K, N) are the plan's, for each of N images.

        With `memory` there are further arguments: what the last step returned after its state, so many of them at most,
        none in the first step. What is returned for them has to be computed in the step: a graph's arguments change.
        """
        raise NotImplementedError

    @no_grad()
    def __call__(self, x: Tensor, sigmas: Sequence[float] | np.ndarray, labels: Tensor | None = None, *,
                 noise: Noise | None = None, callback: Callback | None = None, ends: Ends | None = None) -> Any:
        plans = self._plans(self.levels(sigmas))
        kinds = tuple((len(plan.numbers), bool(plan.noisy)) for plan in plans)
        dtype = x.dtype if ends is None else float32
        counters = noise.counters(len(plans)) if _is_like(noise, x, dtype) else None
        inputs = x, self._table(plans, x, dtype), counters, labels
        ends = ends or Ends(_first, _first, ())
        last, step = plans[-1], getattr(self.step, "__func__", self.step)
        if last.noisy or last.to_image is not step:
            ends = ends._replace(denoise=None)
        if self._captured and callback is None and (counters is not None or not any(noisy for _, noisy in kinds)):
            images = self._at_once(kinds, ends, *inputs)
            if images is not None:
                return images
        if self._captured and ends.denoise is not None:
            ends = ends._replace(denoise=self._denoising(ends.denoise))
        go = partial(self._go, self._one_step if self._captured else self._drawn_step, noise=noise, callback=callback)
        return self._whole(go, kinds, ends, *inputs, *ends.arrays)

    def _plans(self, sigmas: np.ndarray) -> list[Plan]:
        """`plan`'s, checked."""
        plans = self.plan(sigmas)
        what = f"a {type(plans).__name__}"
        if isinstance(plans, list | tuple):
            others = [type(plan).__name__ for plan in plans if not isinstance(plan, Plan)]
            if not others and len(plans) == len(sigmas) - 1:
                return list(plans)
            what = f"{what} of {others[0]}" if others else f"{len(plans)} plans"
        raise CudiffError(
            f"sampler {type(self).__name__}: plan returned {what} for {len(sigmas)} sigmas; return a list of "
            f"{len(sigmas) - 1}, one Plan for each step"
        )

    def _table(self, plans: list[Plan], x: Tensor, dtype: Any) -> Tensor:
        """All plans' numbers below each other, for each of x (N, ...), on its device: (rows, N). A graph gets a copy,
        so the next call may have the same table: an upload takes the host 90 µs."""
        numbers = np.concatenate([plan.numbers for plan in plans])
        key = numbers.tobytes(), len(x), dtype
        if self._uploaded is not None and self._uploaded[0] == key:
            return self._uploaded[1]
        table = Tensor(np.repeat(numbers[:, None], len(x), axis=1), dtype=dtype, device=x.device)
        if self._captured and x.device == "cuda":
            self._uploaded = key, table
        return table

    def _whole(self, go: Callable[..., Tensor], kinds: Kinds, ends: Ends, x: Tensor, table: Tensor,
               counters: Tensor | None, labels: Tensor | None, *arrays: Tensor) -> Any:
        """What is done before the steps, the steps by `go`, and what is done after them."""
        x = ends.begin(x, counters, *arrays)
        if ends.denoise is None:
            return ends.finish(go(kinds, x, table, counters, labels), *arrays)
        x = go(kinds[:-1], x, table, counters, labels)
        sigma = Tensor(table.data[len(table) - kinds[-1][0]])
        return ends.denoise(self.denoiser, x, sigma, labels, *arrays)

    def _denoising(self, denoise: Callable[..., Any]) -> Callable[..., Any]:
        """`Ends.denoise` as a graph of its own."""
        if self._last_step[0] is not denoise:
            own: Any = weakref.proxy(self)
            made = capture(lambda *inputs: denoise(own.denoiser, *inputs), warmup=1, precompile=True)
            self._last_step = denoise, lambda denoiser, *inputs: made(*inputs)
        return self._last_step[1]

    def _at_once(self, kinds: Kinds, ends: Ends, *inputs: Tensor | None) -> Any:
        """What all steps make of `inputs`, as one graph; None where they have too many launches."""
        form = kinds, ends._replace(arrays=())
        if self._recorded != form:
            own: Any = weakref.proxy(self)
            self._recorded, self._all_steps = form, capture(
                lambda *inputs: own._whole(partial(own._go, own._drawn_step), *form, *inputs),
                warmup=lambda *inputs: own._whole(own._warm_up, *form, *inputs), precompile=True,
            )
        if self._all_steps is not None:
            try:
                return self._all_steps(*inputs, *ends.arrays)
            except _TooManyLaunches:
                self._all_steps = None
        return None

    def _warm_up(self, kinds: Kinds, *inputs: Tensor | None) -> Tensor:
        """The state after one step of each kind. Raises _TooManyLaunches where all steps have more than a graph may."""
        made: dict[tuple, tuple[tuple[Tensor, ...], int]] = {}
        total = 0

        def step(x: Tensor, numbers: Tensor, noise: None, counter: Tensor | None, labels: Tensor | None,
                 *before: Tensor) -> tuple[Tensor, ...]:
            nonlocal total
            kind = len(numbers), counter is None, len(before)
            if kind not in made:
                start = launches()
                made[kind] = self._drawn_step(x, numbers, noise, counter, labels, *before), launches() - start
            result, count = made[kind]
            total += count
            return result

        x = self._go(step, kinds, *inputs)  # type: ignore[arg-type]
        if total > MOST_LAUNCHES:
            raise _TooManyLaunches
        return x

    def _go(self, step: Callable[..., Any], kinds: Kinds, x: Tensor, table: Tensor, counters: Tensor | None,
            labels: Tensor | None, noise: Noise | None = None, callback: Callback | None = None) -> Tensor:
        """The state after all steps by `step`, each with its rows of the table, and noise of counters or of `noise`."""
        before: tuple[Tensor, ...] = ()
        row = 0
        for index, (count, noisy) in enumerate(kinds):
            drawn = counter = None
            if noisy and counters is not None:
                counter = Tensor(counters.data[index])
            elif noisy:
                drawn = _draw(noise, index, x)
            x, *made = step(x, Tensor(table.data[row : row + count]), drawn, counter, labels, *before)
            row, before = row + count, tuple(made[: self.memory])
            if callback is not None:
                callback(index, x, made[0])
        return x

    def _drawn_step(self, x: Tensor, numbers: Tensor, noise: Tensor | None, counter: Tensor | None,
                    labels: Tensor | None, *before: Tensor) -> tuple[Tensor, ...]:
        """`step`, with noise drawn from a counter where there is one."""
        step: Any = self.step
        made = step(x, numbers, noise if counter is None else ImageNoise.drawn(counter, x), labels, *before)
        shapes = [getattr(one, "shape", None) for one in made] if isinstance(made, tuple) else []
        if set(shapes) != {x.shape} or not 2 <= len(shapes) <= max(2, 1 + self.memory):
            raise CudiffError(
                f"sampler {type(self).__name__}: return two Tensors from step, the next state and the image, both of "
                f"shape {x.shape}"
            )
        return made


def _first(x: Tensor, *others: Tensor | None) -> Tensor:
    return x


class _TooManyLaunches(Exception):
    """For one graph."""


def posterior_variance(sigma: float, sigma_next: float) -> float:
    """beta-tilde of DDPM equation 7 for a step from sigma to sigma_next, in units of x = y + sigma * noise."""
    return sigma_next**2 * (sigma**2 - sigma_next**2) / sigma**2


def kept_deviation(sigma_next: float, variance: float) -> float:
    """The standard deviation, at sigma_next, of the noise that a step keeps where it adds noise of such a variance."""
    return math.sqrt(max(0.0, sigma_next**2 - variance))  # from far above nearly all is added, by rounding more


def decreasing(sigmas: Sequence[float] | np.ndarray) -> np.ndarray:
    """`sigmas` as float64. Raises CudiffError where a sampler cannot go along them."""
    sigmas = np.asarray(sigmas, np.float64)
    if sigmas.ndim != 1 or len(sigmas) < 2 or sigmas[-1] < 0 or not (np.diff(sigmas) < 0).all() or sigmas[0] == np.inf:
        raise CudiffError("a sampler needs two or more decreasing sigmas that end at 0 or above, all finite")
    return sigmas


def rows(numbers: Tensor) -> list[Tensor]:
    """A step's numbers (K, N) one by one, each (N,): `per_sample` makes them fit images."""
    return [Tensor(row) for row in numbers.data]


def _is_like(noise: Noise | None, x: Tensor, dtype: Any) -> TypeGuard[ImageNoise]:
    """Whether `ImageNoise.drawn` gives what noise would, for states of `dtype`: a subclass's may be other numbers."""
    return type(noise) is ImageNoise and (noise.shape, noise.dtype, noise.device) == (x.shape, dtype, x.device)


def _draw(noise: Noise | None, step: int, x: Tensor) -> Tensor:
    if noise is None:
        raise CudiffError("this sampler adds noise: pass noise=ImageNoise(x.shape, seed)")
    drawn = noise(step)
    if getattr(drawn, "shape", None) != x.shape:  # that of one image would be broadcast to all
        what = f"shape {drawn.shape}" if hasattr(drawn, "shape") else f"a {type(drawn).__name__}"
        raise CudiffError(f"noise({step}) gives {what}: give standard normal numbers of x's shape {x.shape}")
    return drawn


CLIPPING = {"clip_denoised": Option(True, "ddim, ancestral: cut estimates of a picture to [-1, 1]")}


def clips(config: Settings) -> bool:
    """Whether estimates are to be cut: those of pictures alone, as latents go beyond [-1, 1]."""
    return config.clip_denoised and not config.latent_scale and config.channels in (0, 1, 3)


def clipped(denoised: Tensor, clip_denoised: bool) -> Tensor:
    """An estimate of the image kept in [-1, 1], where that is wanted."""
    return ops.clip(denoised, -1, 1) if clip_denoised else denoised
