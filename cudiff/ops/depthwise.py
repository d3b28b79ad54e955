"""Convolutions in NumPy whose groups have one channel, in and out: each tap is one product of whole images."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np

from cudiff.cuda.kernels.convolution.problem import Pair
from cudiff.threads import cut, parallel_map


def taps(padded: np.ndarray, kernel: Pair, size: Pair, stride: Pair,
         dilation: Pair) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yields each tap (r, s) with its pixels in all `size` windows, a view of padded (..., height, width, C)."""
    for r, s in np.ndindex(*kernel):
        rows, columns = (
            slice(place * gap, place * gap + step * (count - 1) + 1, step)
            for place, gap, step, count in zip((r, s), dilation, stride, size, strict=True)
        )
        yield r, s, padded[..., rows, columns, :]


def padded(image: np.ndarray, padding: Pair) -> np.ndarray:
    """An image (N, H, W, C) with zeros around it."""
    return np.pad(image, ((0, 0), *((p, p) for p in padding), (0, 0)))


def fprop(x: np.ndarray, weight: np.ndarray, size: Pair, stride: Pair, padding: Pair, dilation: Pair) -> np.ndarray:
    """x (N, H, W, C), weight (C, R, S, 1) → (N, *size, C)."""
    out = np.empty((len(x), *size, x.shape[3]), x.dtype)

    def images(part: slice) -> None:
        total, product = out[part], np.empty_like(out[part])
        for r, s, tap in taps(padded(x[part], padding), weight.shape[1:3], size, stride, dilation):
            np.multiply(tap, weight[:, r, s, 0], out=product if r + s else total)
            if r + s:
                total += product

    parallel_map(images, cut(len(x), out[:1].nbytes))
    return out


def dgrad(dout: np.ndarray, weight: np.ndarray, size: Pair, stride: Pair, padding: Pair, dilation: Pair) -> np.ndarray:
    """The gradient of x, (N, *size, C), of that of the result, dout."""
    (top, left), (height, width) = padding, size
    dx = np.zeros((len(dout), height + 2 * top, width + 2 * left, dout.shape[3]), dout.dtype)

    def images(part: slice) -> None:
        for r, s, tap in taps(dx[part], weight.shape[1:3], dout.shape[1:3], stride, dilation):
            tap += dout[part] * weight[:, r, s, 0]

    parallel_map(images, cut(len(dout), dx[:1].nbytes))
    return np.ascontiguousarray(dx[:, top : top + height, left : left + width])


def wgrad(x: np.ndarray, dout: np.ndarray, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair) -> np.ndarray:
    """The gradient of the weight, (C, R, S, 1): a sum over pixels of each image, and over images in their order."""
    def images(part: slice) -> np.ndarray:
        own, total = dout[part], np.empty((*kernel, dout.shape[3]), x.dtype)
        ones = np.ones(own[..., 0].size, x.dtype)
        for r, s, tap in taps(padded(x[part], padding), kernel, dout.shape[1:3], stride, dilation):
            total[r, s] = ones @ (tap * own).reshape(len(ones), -1)
        return total

    total = functools.reduce(np.add, parallel_map(images, cut(len(x), dout[:1].nbytes)))
    return np.ascontiguousarray(np.moveaxis(total, 2, 0)[..., None])
