"""A frame of bytes, blended with the one before."""

from __future__ import annotations

import numpy as np

from cudiff.backend import float32
from cudiff.cuda.launch import blocks, empty, launch
from cudiff.function import Function
from cudiff.ops.cast import require_floats, upcast
from cudiff.tensor import Tensor

__all__ = ["blend_to_uint8"]


class BlendToUint8(Function):
    """See `blend_to_uint8`."""

    differentiable = False

    @staticmethod
    def forward_numpy(ctx, x, last, share):
        value = upcast(x) * 127.5 + 127.5
        value = (1 - share) * value + share * last
        return np.rint(np.fmin(np.fmax(value, 0), 255)).astype(np.uint8)

    @staticmethod
    def forward_cuda(ctx, x, last, share):
        out = empty(x.shape, np.dtype(np.uint8))
        launch("blend", "blend", blocks(x.size, 256), 256, (x, last, share, out, np.int64(x.size)), T=x.dtype)
        return out


def blend_to_uint8(x: Tensor, last: Tensor, share: float | Tensor = 0.0) -> Tensor:
    """(1 - share) x + share last as bytes, clipped to 0..255; x in [-1, 1] first becomes 127.5·x + 127.5.

    x floating, last uint8, of one shape. share: a number, 0 to 1, rounded to float32; or a float32 Tensor (1,), which
    each replay of a graph reads, and whose value is not checked. Rounds to nearest even; NaN becomes 0. No gradient.
    Raises TypeError for other dtypes and shares, ValueError for another number or shapes that differ.
    """
    require_floats("blend_to_uint8", x)
    if last.dtype != np.uint8:
        raise TypeError(f"blend_to_uint8: last must be uint8, not {last.dtype}")
    if x.shape != last.shape:
        raise ValueError(f"blend_to_uint8: x {x.shape} and last {last.shape} differ in shape")
    return BlendToUint8.apply(x, last, share_of("blend_to_uint8", share, x.device))


def share_of(name: str, share: float | Tensor, device: str) -> Tensor:
    """The last frame's share as a float32 Tensor (1,). Raises as `blend_to_uint8`, of an operation called `name`."""
    if isinstance(share, int | float | np.number) and not 0 <= share <= 1:
        raise ValueError(f"{name}: share is 0 to 1, not {share}")
    return number_of(f"{name}: share", share, device)


def number_of(name: str, number: float | Tensor, device: str) -> Tensor:
    """A number as a float32 Tensor (1,); one that is given as it is. Raises TypeError for anything else."""
    if isinstance(number, int | float | np.number):
        return Tensor(np.array([number], np.float32), device=device)
    if not isinstance(number, Tensor) or number.dtype != float32 or number.shape != (1,):
        given = f"{number.dtype} {number.shape}" if hasattr(number, "dtype") else type(number).__name__
        raise TypeError(f"{name} is a number or a float32 Tensor (1,), not {given}")
    return number
