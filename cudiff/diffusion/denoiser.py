"""Denoisers D(x; sigma): a network wrapped so that every sampler can use it.

A denoiser takes x = y + sigma * noise (N, H, W, C), sigma (N,) or a number, labels int32 (N,) or None, and returns its
estimate of y (N, H, W, C). A network takes (x, t, labels) in whatever scaling it was trained.
"""

from __future__ import annotations

from collections.abc import Callable

from cudiff import ops
from cudiff.tensor import Tensor

Denoiser = Callable[[Tensor, Tensor, Tensor | None], Tensor]
Net = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def per_sample(values: Tensor, x: Tensor) -> Tensor:
    """(N,) or (N, 1) as (N, 1, ..., 1), to be broadcast against x (N, ...)."""
    return ops.reshape(values, (x.shape[0],) + (1,) * (x.ndim - 1))
