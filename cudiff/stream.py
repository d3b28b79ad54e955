"""Frames in time: each begins with the last one, noised a little, and is denoised in few evaluations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from cudiff.diffusion import ImageNoise
from cudiff.diffusion.denoiser import blended, frame_of
from cudiff.diffusion.samplers import Callback, Ends
from cudiff.diffusion.sampling import Guidance
from cudiff.errors import CudiffError
from cudiff.ops import blend_to_uint8, normalize_images
from cudiff.ops.random import Purpose
from cudiff.samplings import Way, twice
from cudiff.tensor import Tensor
from cudiff.values import real, whole

LEVELS = 100
"""Noise levels of a whole sampling, of which a frame goes through the last `strength`."""
GOLDEN = 0x9E3779B97F4A7C15
"""From the seed of a frame to the next one's: odd, so that 2^64 frames have other seeds (Steele et al., 2014)."""


class Frames(NamedTuple):
    """What a frame is made with: see `Pipeline.stream`."""

    seed: int
    classes: Any
    steps: int
    guidance: float | None
    strength: float
    blend: float


class Stream:
    """An endless iterator of frames, uint8 (n, H, W, C), of `Pipeline.stream`, which says what its options are.

    Attributes: options, of the next frame; last, the last frame or None; number, how many there were. `change` sets
    options between frames: on a GPU nothing is recorded anew, but for other steps, or guidance to or from 1.
    """

    def __init__(self, pipeline: Any, n: int, sampler: str | None, options: Frames,
                 each_step: Callable[[int], None] | None = None):
        if pipeline.makes_latents:
            raise CudiffError("the model makes latents, not pictures: a stream is for pictures")
        self.n, self.number = whole("n", n), 0
        self.last: np.ndarray | None = None
        self._pipeline, self._sampler, self._each_step = pipeline, sampler, each_step
        self._last: Tensor | None = None
        self._uploads: dict[str, tuple] = {}
        self.options = options
        self.change()

    def change(self, **options: Any) -> None:
        """Set options of the next frame. Raises CudiffError for what they cannot be, and leaves them as they were."""
        unknown = sorted(set(options) - set(Frames._fields))
        if unknown:
            raise CudiffError(f"a stream has no option {unknown[0]}: it has {', '.join(Frames._fields)}")
        new = self.options._replace(**options)
        self._pipeline.checked(self.n, new.seed, self._levels(), new.guidance, self._sampler, self.n)
        self._pipeline.labels(self.n, new.classes)
        whole("steps", new.steps, 1, LEVELS), real("strength", new.strength, 0, 1), real("blend", new.blend, 0, 1)
        self.options = new

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> np.ndarray:
        return self.frame()

    def frame(self, picture: np.ndarray | None = None) -> np.ndarray:
        """The next frame; of a video begun with `picture`, uint8 (n, H, W, C) or one (H, W, C), in place of the last.

        The first of a stream is `Pipeline.sample`'s, by the model's number of steps, where no picture is given.
        Raises CudiffError for a picture of another shape or dtype, and for a frame that is not finite.
        """
        pipeline, options = self._pipeline, self.options
        if picture is not None:
            begin = self._taken(picture)
        elif self._last is not None:
            begin = self._last
        else:
            return self._keep(Tensor(pipeline.sample(
                self.n, options.seed, options.classes, guidance=options.guidance, sampler=self._sampler,
                batch_size=self.n, each_step=self._each_step,
            ), device=pipeline.device))
        with pipeline._sampled():
            made = twice(lambda: self._made(begin))
        if made is None:
            raise CudiffError(f"out of memory: {self.n} pictures at once are too many, stream fewer")
        return self._keep(made)

    def _taken(self, picture: np.ndarray) -> Tensor:
        picture, shape = np.asarray(picture), self._pipeline.shape
        if picture.dtype != np.uint8 or picture.shape not in (shape, (self.n, *shape)):
            raise CudiffError(f"the picture is {picture.dtype} of shape {picture.shape}: give uint8 "
                              f"{(self.n, *shape)}, or one {shape} for all")
        given = np.ascontiguousarray(np.broadcast_to(picture, (self.n, *shape)))
        return Tensor(given, device=self._pipeline.device)

    def _keep(self, frame: Tensor) -> np.ndarray:
        self._last, self.last = frame, frame.numpy().copy()  # a caller may draw on it
        self.number += 1
        return self.last

    def _levels(self) -> int:
        """How many noise levels a frame's are chosen from: LEVELS, or all that a schedule has."""
        return min(LEVELS, self._pipeline.config.options.get("diffusion_steps", LEVELS))

    def _made(self, begin: Tensor) -> Tensor:
        """The frame that begins with bytes, noised to the level of `strength`, and is blended with the last one."""
        pipeline, options, count = self._pipeline, self.options, self._levels()
        sampler, guidance, levels = pipeline.checked(
            self.n, options.seed, count, options.guidance, self._sampler, self.n
        )
        last = begin if self._last is None else self._last
        passed = round(options.strength * count)
        if not passed:
            return blend_to_uint8(normalize_images(begin), last, options.blend)
        sigmas = levels[np.linspace(count - passed, count, min(options.steps, passed) + 1).round().astype(int)]
        labels = pipeline.labels(self.n, options.classes)
        guide = None if labels is None else Guidance.of(guidance, channels=pipeline.config.guidance_channels)
        way, each, steps = Way(sampler, guide, ("last",), None), self._each_step, len(sigmas) - 1
        between = None if each is None or steps == 1 else _but_the_last(each, steps)
        graphs, together = pipeline._cache_for(way), None if between else steps
        run = pipeline._sampling(way, self.n, together, graphs, pipeline.config.capture)
        seed = (options.seed + self.number * GOLDEN) % 2**64
        numbers = self._uploaded("numbers", np.array([sigmas[0], options.blend], np.float32))
        with np.errstate(all="ignore"):  # below it is said what is not finite
            made, sums = run(
                begin, sigmas, None if labels is None else self._uploaded("labels", labels), guidance=guide, given={},
                noise=ImageNoise((self.n, *pipeline.shape), seed, 0, pipeline.device),
                callback=between, ends=Ends(_noised, _blended, (last, numbers), _denoised),
            )
        made = Tensor(made.data.copy())  # the graph's own is overwritten by another stream's frame, as are the sums
        finite = np.isfinite(sums.numpy()).all()
        if each is not None:
            each(steps - 1)
        if not finite:
            raise CudiffError("the frame holds values that are not finite: use less guidance or an earlier checkpoint")
        return made

    def _uploaded(self, name: str, array: np.ndarray) -> Tensor:
        """A copy of an array on the pipeline's device: the last frame's, where the array and the device are as then. An
        upload takes the host 90 µs."""
        key = array.tobytes(), self._pipeline.device
        if self._uploads.get(name, ("",))[0] != key:
            self._uploads[name] = key, Tensor(array.copy(), device=self._pipeline.device)
        return self._uploads[name][1]


def _but_the_last(each_step: Callable[[int], None], steps: int) -> Callback:
    """`each_step` after all of a sampler's steps but the last, which is done when its frame is."""
    return lambda step, x, denoised: each_step(step) if step < steps - 1 else None


def _noised(begin: Tensor, counters: Tensor, last: Tensor, numbers: Tensor) -> Tensor:
    """Bytes as floats, with noise of the frame's first level, the first of the numbers."""
    x = normalize_images(begin)
    return x + ImageNoise.drawn(Tensor(counters.data[0]), x, Purpose.SAMPLE) * Tensor(numbers.data[:1])


def _blended(drawn: Tensor, last: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """The frame, with the last one's share, the second of the numbers; and what shows values that are not finite."""
    return blended(drawn, last, Tensor(numbers.data[1:]))


def _denoised(denoiser: Any, x: Tensor, sigma: Tensor, labels: Tensor | None, last: Tensor,
              numbers: Tensor) -> tuple[Tensor, Tensor]:
    """The same of D(x; sigma), the last step's."""
    return frame_of(denoiser, x, sigma, labels, last, Tensor(numbers.data[1:]))
