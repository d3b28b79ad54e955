"""One way to sample, built once: a denoiser guided and edited, and a sampler. A graph of it takes other inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cudiff.backend import array_module, float32
from cudiff.diffusion.denoiser import Denoiser
from cudiff.diffusion.editing import Between, Inpainted
from cudiff.diffusion.guidance import Guided
from cudiff.diffusion.samplers import Callback, Ends, ImageNoise, Noise, Sampler
from cudiff.tensor import Tensor


class Guidance(NamedTuple):
    """What `Guided` takes, and its `form`."""

    guidance: float
    interval: tuple[float, float] | None
    rescale: float
    channels: int
    form: tuple[int, ...]

    @classmethod
    def of(cls, guidance: float, interval: tuple[float, float] | None = None, rescale: float = 0.0,
           channels: int = 0) -> Guidance:
        """These, checked. Raises CudiffError as `Guided` does."""
        return cls(guidance, interval, rescale, channels, Guided(None, guidance, interval, rescale, channels).form)


class Sampling:
    """sampling(x, sigmas, labels, guidance=, given=, noise=, callback=, ends=) -> images: one sampler, one denoiser.

    Parameters
    ----------
    denoiser, build : D(x, sigma, labels), and what makes a sampler of one, `build(denoiser)`.
    guidance : the first call's, None where there are no classes. Later ones may have another of the same form.
    given : the names of the arrays that calls are given: "other" and "share" for `Between`, "init" and "mask" for
        `Inpainted`. Others change nothing here.
    device : where a sampler that records graphs reads guidance; None where it records none.
    one_by_one : whether each step has a graph of its own, which serves any number of steps.

    What is returned is overwritten by the next call, where the sampler records graphs.

    Attributes: running, whether it is in the midst of a call, which another one would disturb.
    """

    def __init__(self, denoiser: Denoiser, build: Callable[[Any], Callable[..., Any]], guidance: Guidance | None,
                 given: Sequence[str] = (), device: str | None = None, one_by_one: bool = False):
        self._guided = self._between = self._inpainted = None
        self._one_by_one, self.running = one_by_one, False
        own = denoiser
        if guidance is not None:
            denoiser = self._guided = Guided(denoiser, *guidance[:4], device=device)
        if "other" in given:
            denoiser = self._between = Between(denoiser)
        if "mask" in given:
            denoiser = self._inpainted = Inpainted(denoiser)
        made: tuple[Any, ...] = (own, self._guided) if device is not None else ()
        self._ready = [one.before_capture for one in made if hasattr(one, "before_capture")]
        self._sampler = build(denoiser)

    def __call__(self, x: Tensor, sigmas: Sequence[float] | np.ndarray, labels: Tensor | None = None, *,
                 guidance: Guidance | None = None, given: Mapping[str, Tensor], noise: Noise | None = None,
                 callback: Callback | None = None, ends: Ends | None = None) -> Any:
        self.running = True
        try:
            if self._guided is not None and guidance is not None:
                self._guided.guide(*guidance[:3])
            for ready in self._ready:
                state = x if ends is None else Tensor(array_module(x.device).empty(x.shape, float32))
                ready(state, labels)  # kernels are compiled ahead under a capture, which would end there
            if self._between is not None:
                self._between.toward(given["other"], given["share"])
            if self._inpainted is not None:
                self._inpainted.know(given["init"], given["mask"])
            if self._one_by_one and callback is None:
                callback = _nothing
            if ends is None:
                return self._sampler(x, sigmas, labels, noise=noise, callback=callback)
            if type(self._sampler).__call__ is Sampler.__call__:
                return self._sampler(x, sigmas, labels, noise=noise, callback=callback, ends=ends)
            assert isinstance(noise, ImageNoise)
            x = ends.begin(x, noise.counters(1), *ends.arrays)  # for a function, and a class with a call of its own
            return ends.finish(self._sampler(x, sigmas, labels, noise=noise, callback=callback), *ends.arrays)
        finally:
            self.running = False


def _nothing(step: int, x: Tensor, denoised: Tensor) -> None:
    """Seen by nobody, a step is a graph of its own all the same."""
