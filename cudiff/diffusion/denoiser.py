"""Denoisers D(x; sigma): a network wrapped so that every sampler can use it.

A denoiser takes x = y + sigma * noise (N, H, W, C), sigma (N,) or a number, labels int32 (N,) or None, and returns its
estimate of y (N, H, W, C). A network takes (x, t, labels) in whatever scaling it was trained.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cudiff import ops
from cudiff.backend import is_float
from cudiff.errors import CudiffError
from cudiff.ops.cast import as_wide
from cudiff.tensor import Tensor

Denoiser = Callable[[Tensor, Tensor, Tensor | None], Tensor]
Net = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def per_sample(values: Tensor, x: Tensor) -> Tensor:
    """(N,) or (N, 1) as (N, 1, ..., 1), to be broadcast against x (N, ...)."""
    return ops.reshape(values, (x.shape[0],) + (1,) * (x.ndim - 1))


class Checked:
    """A denoiser of one's own, with its attributes. Raises CudiffError where it returns no floats of x's shape."""

    def __init__(self, denoiser: Denoiser):
        self._denoiser = denoiser

    def __getattr__(self, name: str) -> Any:
        return getattr(self._denoiser, name)

    def __call__(self, x: Tensor, sigma: Tensor, labels: Tensor | None = None) -> Tensor:
        made = self._denoiser(x, sigma, labels)
        if not isinstance(made, Tensor) or made.shape != x.shape or not is_float(made.dtype):
            what = f"{made.dtype} of shape {made.shape}" if isinstance(made, Tensor) else f"a {type(made).__name__}"
            raise CudiffError(f"the denoiser returned {what}: return a Tensor of floats of x's shape {x.shape}")
        return made


def blended(image: Tensor, last: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """`ops.blend_to_uint8`, and the image's sum, which shows values that are not finite."""
    (image,) = as_wide(image)  # one of 16 bits has no room for its sum
    return ops.blend_to_uint8(image, last, share), ops.sum(image)


def frame_of(denoiser: Any, x: Tensor, sigma: Tensor, labels: Tensor | None, last: Tensor,
             share: Tensor) -> tuple[Tensor, Tensor]:
    """`blended` of D(x; sigma): by the denoiser's `blended_frame` where it has one, with sums of parts of the image."""
    if has_frame(denoiser):
        return denoiser.blended_frame(x, sigma, labels, last, share)
    return blended(denoiser(x, sigma, labels), last, share)


def has_frame(denoiser: Any) -> bool:
    """Whether the class that defines a denoiser's call has its `blended_frame` too. One that a class with another call
    inherits, or that a wrapper passes on, would be of another estimate."""
    caller = next((kind for kind in type(denoiser).__mro__ if "__call__" in vars(kind)), object)
    return "blended_frame" in vars(caller)
