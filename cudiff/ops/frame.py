"""A frame of bytes from a network's output in one pass: the estimate of the image, guidance, the last frame's share."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cudiff.backend import float32
from cudiff.cuda.launch import blocks, empty, launch
from cudiff.function import Function
from cudiff.ops.blend import blend_to_uint8, number_of, share_of
from cudiff.ops.cast import as_wide, astype, require_floats, result_dtype
from cudiff.ops.edm import Data, edm_output, levels_of
from cudiff.ops.elementwise import sqrt, square
from cudiff.ops.lerp import lerp
from cudiff.ops.reduce import sum
from cudiff.ops.shape import reshape, split
from cudiff.tensor import Tensor

__all__ = ["blended_frame"]


def _root(sigma: Tensor) -> Tensor:
    return sqrt(square(sigma) + 1)


ESTIMATES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "eps": lambda x, eps, sigma: x - eps * sigma,
    "x0": lambda x, y, sigma: y,
    "v": lambda x, v, sigma: (x / _root(sigma) - v * sigma) / _root(sigma),
    "flow": lambda x, u, sigma: (x - u * sigma) / (sigma + 1),
}
"""D(x; sigma) of what a network may predict, sigma (N, 1, ..., 1): the table of `cudiff.diffusion.prediction`."""


class BlendedFrame(Function):
    """See `blended_frame`. One launch on CUDA."""

    differentiable = False

    @staticmethod
    def compose(x, out, sigma, guidance, last, share, predicts, data):
        x, out = as_wide(x, out)
        if out.shape != x.shape:
            out, _ = split(out, 2, axis=-1)
        if predicts == "edm":
            image = edm_output(x, out, sigma, *data)
        else:
            image = ESTIMATES[predicts](x, out, reshape(sigma, (-1, *(1,) * (x.ndim - 1))))
        if guidance is not None:
            conditional, plain = split(image, 2)
            image = lerp(plain, conditional, guidance)
        return blend_to_uint8(image, last, share), sum(image, tuple(range(2, image.ndim))).detach()

    @staticmethod
    def forward_cuda(ctx, x, out, sigma, guidance, last, share, predicts, data):
        frame, sums = empty(last.shape, last.dtype), empty(last.shape[:2], float32)
        if sums.size:
            row = last.size // sums.size
            args = (frame, sums, x, out, sigma, guidance, last, share, np.array(data, np.float32), last.shape[-1],
                    last.shape[1], np.int64(row))
            launch("frame", "frame", sums.size, min(32 * blocks(row, 32), 256), args, T=x.dtype,
                   PREDICTS=predicts.upper(), WIDE=int(out.shape != x.shape))
        return frame, sums


def blended_frame(
    x: Tensor, out: Tensor, sigma: Tensor, last: Tensor, share: float | Tensor, predicts: str,
    data: tuple[float, float, float] | None = None, guidance: float | Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`blend_to_uint8` of the estimate of the image D(x; sigma), last and share, uint8 (N, H, ...); and the estimate's
    sums over all axes but the first two, (N, H), which show values that are not finite: in float32, of float64 in that.

    predicts: what the network's output is, "eps", "x0", "v" or "flow" of `cudiff.diffusion.prediction`'s table, or
    "edm": then `data` is `edm_output`'s sigma_data, data_mean and data_std, else None. out: like x; of eps, x0 and v
    also with twice the channels, of which the first half counts, as where a variance is learned.
    guidance: x, out and sigma are of 2 N images, N with a class, then the same without; the estimate is that without,
    plus guidance times what the other is more. A number, or as share a float32 Tensor (1,), which each replay of a
    graph reads. Sums run in a fixed order. No gradient. Raises TypeError and ValueError as these operations do, and
    ValueError for another name.
    """
    if (predicts == "edm") != (data is not None) or predicts not in ("edm", *ESTIMATES):
        raise ValueError(f"blended_frame: predicts is edm, with data, or {', '.join(ESTIMATES)}, without; not "
                         f"{predicts!r} with data {data}")
    require_floats("blended_frame", x, out)
    if last.dtype != np.uint8:
        raise TypeError(f"blended_frame: last must be uint8, not {last.dtype}")
    if last.ndim < 2 or (len(last) * (1 if guidance is None else 2), *last.shape[1:]) != x.shape:
        of = "" if guidance is None else ": with guidance x is of twice as many images"
        raise ValueError(f"blended_frame: x {x.shape} and last {last.shape} do not agree{of}")
    wide = (*x.shape[:-1], 2 * x.shape[-1])
    if out.shape != x.shape and (out.shape != wide or predicts in ("edm", "flow")):
        raise ValueError(f"blended_frame: x {x.shape} and the network's output {out.shape} differ")
    sigma, share = levels_of("blended_frame", x, sigma), share_of("blended_frame", share, x.device)
    guidance = guidance if guidance is None else number_of("blended_frame: guidance", guidance, x.device)
    dtype = result_dtype(x, out)
    return BlendedFrame.apply(astype(x, dtype), astype(out, dtype), sigma, guidance, last, share, predicts=predicts,
                              data=Data(*map(float, data or (1, 0, 1))))
