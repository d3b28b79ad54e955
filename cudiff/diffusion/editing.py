"""Given images in sampling: inpainting, inversion, and the way between two noises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cudiff.backend import is_float
from cudiff.diffusion.euler import Heun
from cudiff.diffusion.samplers import decreasing
from cudiff.errors import CudiffError
from cudiff.ops.timestep_embedding import noise_levels
from cudiff.tensor import Tensor


class Inpainted:
    """A denoiser that knows part of the image: D where a mask is 1, the known image where it is 0.

    A sampler that begins at known + sigma * noise then has the known pixels at each level's noise in every step, and
    ends at them: RePaint's x_known (arXiv 2201.09865, equation 8a), without its repeated steps. `know` comes before.
    """

    def __init__(self, denoiser: Any):
        self.denoiser = denoiser
        self._known: dict[int, tuple[Tensor, Tensor]] = {}  # kept for each size: a graph reads them where they lie

    def know(self, images: Tensor, mask: Tensor) -> None:
        """The known images (N, H, W, C) of the next batch of N, and its mask (N, H, W, 1), 0 to 1."""
        given = images * (1 - mask), mask * 1  # arrays of its own
        for kept, new in zip(self._known.setdefault(len(images), given), given, strict=True):
            kept.data[...] = new.data

    def __call__(self, x: Tensor, sigma: Tensor | float, labels: Tensor | None = None) -> Tensor:
        return self._mixed(self.denoiser(x, sigma, labels))

    def with_variance(self, x: Tensor, sigma: Tensor | float, labels: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The same, with the denoiser's learned variance; see `DDPMDenoiser.with_variance`."""
        denoised, fraction = self.denoiser.with_variance(x, sigma, labels)
        return self._mixed(denoised), fraction

    def _mixed(self, denoised: Tensor) -> Tensor:
        known, mask = _of_batch(self._known, len(denoised), "know(images, mask)")
        return denoised * mask + known


class Between:
    """A denoiser between two classes: (1 - share) D(x; labels) + share D(x; other), both guided where it is.

    Its score is that of p(x | label)^(1 - share) p(x | other)^share at each noise level (arXiv 2206.01714, section 4).
    Two evaluations in place of one. `toward` comes before.
    """

    def __init__(self, denoiser: Any):
        self.denoiser = denoiser
        self._ends: dict[int, tuple[Tensor, Tensor]] = {}  # as in `Inpainted`

    def toward(self, other: Tensor, share: Tensor) -> None:
        """The other class of each image of the next batch, int32 (N,), and its share (N, 1, 1, 1)."""
        if len(other) not in self._ends:
            self._ends[len(other)] = Tensor(other.data.copy()), Tensor(share.data.copy())  # others change theirs
        for kept, new in zip(self._ends[len(other)], (other, share), strict=True):
            kept.data[...] = new.data

    def __call__(self, x: Tensor, sigma: Tensor | float, labels: Tensor | None = None) -> Tensor:
        other, share = _of_batch(self._ends, len(x), "toward(other, share)")
        sigma = noise_levels(sigma, x)
        return self.denoiser(x, sigma, labels) * (1 - share) + self.denoiser(x, sigma, other) * share

    def with_variance(self, x: Tensor, sigma: Tensor | float, labels: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The same, with the learned variance of the labels' classes; see `DDPMDenoiser.with_variance`."""
        other, share = _of_batch(self._ends, len(x), "toward(other, share)")
        denoised, fraction = self.denoiser.with_variance(x, sigma, labels)
        return denoised * (1 - share) + self.denoiser(x, sigma, other) * share, fraction


def _of_batch(given: dict[int, tuple[Tensor, Tensor]], n: int, call: str) -> tuple[Tensor, Tensor]:
    if n not in given:
        raise CudiffError(f"a batch of {n} images comes before what belongs to it: call {call} of {n} first")
    return given[n]


class Inversion(Heun):
    """The probability flow ODE run backwards, from an image to the noise it comes from, by Heun's method.

    Called as a sampler, with sigmas that rise from above 0. DDIM's inversion (arXiv 2010.02502, section 4.3), of second
    order.
    """

    def levels(self, sigmas: Sequence[float] | np.ndarray) -> np.ndarray:
        sigmas = decreasing(np.asarray(sigmas, np.float64)[::-1])[::-1]
        if sigmas[0] == 0:
            raise CudiffError("inversion needs sigmas that rise from above 0, where the ODE's slope has no value")
        return sigmas


def slerp(start: np.ndarray, end: np.ndarray, share: float | np.ndarray) -> np.ndarray:
    """Noise on the great circle from `start` to `end`, at a share of its angle: 0 is start, 1 is end.

    start, end (N, ...) float; share a number from 0 to 1 or (N,) of them. Each of N is turned by itself. Between
    standard normal noises the result is standard normal too, which a straight mixture is not. Raises CudiffError where
    shapes differ, for a start of integers and for another share.
    Shoemake, "Animating rotation with quaternion curves" (SIGGRAPH 1985).
    """
    start, end = np.asarray(start), np.asarray(end)
    if start.shape != end.shape or start.ndim < 2:
        raise CudiffError(f"slerp takes two arrays (N, ...) of one shape, not {start.shape} and {end.shape}")
    if not is_float(start.dtype):
        raise CudiffError(f"slerp takes noise, in floats, not {start.dtype}: mix pictures' noise, as `invert` finds it")
    flat, other = (np.asarray(a, np.float64).reshape(len(a), -1) for a in (start, end))
    share = as_shares(share, len(flat)).reshape(-1, 1).astype(np.float64)
    lengths = np.linalg.norm(flat, axis=1, keepdims=True) * np.linalg.norm(other, axis=1, keepdims=True)
    cosine = np.sum(flat * other, axis=1, keepdims=True) / np.where(lengths > 0, lengths, 1)
    angle = np.arccos(np.clip(cosine, -1, 1))
    weights = np.sin((1 - share) * angle), np.sin(share * angle)
    near = np.sin(angle) < 1e-6  # no circle, or any
    one, two = (np.where(near, straight, w / np.where(near, 1, np.sin(angle)))
                for straight, w in zip((1 - share, share), weights, strict=True))
    return (flat * one + other * two).reshape(start.shape).astype(start.dtype)


def as_shares(share: Any, n: int) -> np.ndarray:
    """A share, 0 to 1, of each of n images, float64 (n, 1, 1, 1). Raises CudiffError where it is none."""
    share = np.asarray(share)
    if share.shape not in ((), (n,)) or share.dtype.kind not in "iuf" or not ((share >= 0) & (share <= 1)).all():
        raise CudiffError(f"share must be a number from 0 to 1, or one for each of {n} images")
    return np.array(np.broadcast_to(share, n), np.float64).reshape(n, 1, 1, 1)


def as_images(images: Any, n: int, shape: tuple[int, int, int], what: str = "init") -> np.ndarray:
    """Images float32 (n, H, W, C) in about [-1, 1], of uint8 or floats (n, H, W, C), or one (H, W, C) for all.

    Raises CudiffError where they are of another shape or dtype, or not finite.
    """
    images = np.asarray(images)
    if images.shape not in (shape, (n, *shape)):
        raise CudiffError(f"{what} has shape {images.shape}: give {(n, *shape)}, or one picture {shape} for all")
    if images.dtype == np.uint8:
        images = images.astype(np.float32) / 127.5 - 1
    if not np.issubdtype(images.dtype, np.floating) or not np.isfinite(images).all():
        raise CudiffError(f"{what} must be uint8, or finite floats in [-1, 1]: {images.dtype} was given")
    return np.broadcast_to(images.astype(np.float32), (n, *shape))


def as_mask(mask: Any, n: int, shape: tuple[int, int, int]) -> np.ndarray:
    """A mask float32 (n, H, W, 1), of bools or numbers 0 to 1, (H, W) for all images or (n, H, W).

    Raises CudiffError where it is of another shape, or outside 0 to 1.
    """
    mask = np.asarray(mask)
    if mask.shape not in (shape[:2], (n, *shape[:2])):
        raise CudiffError(f"mask has shape {mask.shape}: give {shape[:2]}, or {(n, *shape[:2])} for each image")
    if mask.dtype.kind not in "biuf" or not ((mask >= 0) & (mask <= 1)).all():
        raise CudiffError("a mask's numbers are 0, known, to 1, painted anew: divide, or compare with a threshold")
    return np.broadcast_to(mask.astype(np.float32)[..., None], (n, *shape[:2], 1))
