"""Convolutions that run as others, of copies of their operands, where the copies take less time than is gained.

A dilated convolution of stride 1 is one without dilation: the taps that reach a pixel of the result lie d pixels apart,
and so do those of the pixel d further on. An image is cut into d² images of every d-th row and column, and the results
are put together again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from cudiff.backend import Array
from cudiff.cuda.kernels.convolution import grouped, portable
from cudiff.cuda.kernels.convolution.problem import DGRAD, LONGEST, WGRAD, Fusion, Operands, Pair, Problem
from cudiff.cuda.kernels.shape import contiguous, move, move_microseconds, padded
from cudiff.cuda.launch import empty
from cudiff.cuda.select import Offer


class Restated(NamedTuple):
    """The convolution that runs instead: operands, stride, padding, dilation, groups. finish(): copies its result to
    where it belongs."""

    given: Operands
    steps: tuple[Pair, Pair, Pair, int]
    finish: Callable[[], None] = lambda: None


class Apart(NamedTuple):
    """A dilated convolution as one of the images of every d-th row and column. size_in, size_out: their sizes before
    and after it. padding: its own. before: zeros before the first pixel of the input, so that d divides what is left of
    the dilated one's padding."""

    size_in: Pair
    size_out: Pair
    padding: Pair
    before: Pair


def _apart(p: Problem) -> Apart:
    x = p.out if p.direction == DGRAD else p.x
    axes = []
    for length, taps, d, padding in zip(x.shape[1:3], p.kernel, p.dilation, p.padding, strict=True):
        count = -(-(length + 2 * (padding % d)) // d)
        axes.append((count, count + 2 * (padding // d) - (taps - 1), padding // d, padding % d))
    rows, columns = axes
    return Apart(*zip(rows, columns, strict=True))


def offer_dilated(p: Problem) -> Offer | None:
    """Serves stride 1 without groups, where the copies and conv2d.cu are estimated to take less time than
    conv2d_grouped.cu. A faster kernel may run then."""
    if p.dilation == (1, 1) or p.groups > 1 or p.stride != (1, 1) or max(p.x.size, p.out.size) >= 2**31:
        return None
    parts = _apart(p)
    if max(*parts.size_in, *parts.size_out) + max(parts.padding) > LONGEST:
        return None
    x, out = (parts.size_out, parts.size_in) if p.direction == DGRAD else (parts.size_in, parts.size_out)
    images = p.x.shape[0] * p.dilation[0] * p.dilation[1]
    inner = p._replace(
        x=p.x._replace(shape=(images, *x, p.x.shape[3]), aligned=True),
        out=p.out._replace(shape=(images, *out, p.out.shape[3]), aligned=True),
        padding=parts.padding, dilation=(1, 1),
    )
    copies = sum((1 if image.size == own.size else 2) * move_microseconds(image.shape, image.dtype)
                 for image, own in ((inner.x, p.x), (inner.out, p.out)))
    gains = copies + portable.microseconds(inner) < grouped.microseconds(p)
    return Offer(p.wanted & {Fusion.BIAS, Fusion.ADDEND}) if gains else None


def undilated(given: Operands, p: Problem) -> Restated:
    parts, backward = _apart(p), p.direction == DGRAD
    of_input, of_output = (parts.size_in, parts.before), (parts.size_out, (0, 0))
    steps = (1, 1), parts.padding, (1, 1), 1
    if p.direction == WGRAD:
        x, dout = _cut(given.x, p.dilation, *of_input), _cut(given.out, p.dilation, *of_output)
        return Restated(given._replace(x=x, out=dout), steps)
    out, addend = given.out, given.epilogue.addend
    of_x, of_result = (of_output, of_input) if backward else (of_input, of_output)
    x = _cut(given.x, p.dilation, *of_x)
    if addend is None:
        result = empty((len(x), *of_result[0], out.shape[3]), out.dtype)
    else:
        result = addend = _cut(addend, p.dilation, *of_result)
    given = given._replace(x=x, out=result, epilogue=given.epilogue._replace(addend=addend))
    return Restated(given, steps, lambda: _join(result, p.dilation, of_result[1], out))


def _cut(image: Array, dilation: Pair, size: Pair, before: Pair) -> Array:
    """The images (d_h · d_w · N, *size, C) of every d_h-th row and d_w-th column of an image (N, H, W, C) among zeros:
    `before` of them come before its first row and column."""
    widths = [(0, 0)] * 4
    for axis, count, d, first in zip((1, 2), size, dilation, before, strict=True):
        widths[axis] = first, count * d - first - image.shape[axis]
    whole = padded(image, widths) if any(map(any, widths)) else image
    return contiguous(_every(whole, dilation)).reshape(-1, *size, image.shape[3])


def _join(parts: Array, dilation: Pair, before: Pair, out: Array) -> None:
    """Copy what `_cut` would make of out, `parts`, to out."""
    (n, height, width, c), (_, rows, columns, _) = out.shape, parts.shape
    whole, size = out, (rows * dilation[0], columns * dilation[1])
    if (height, width) != size:
        whole = empty((n, *size, c), out.dtype)
    view = _every(whole, dilation)
    move(view, parts.reshape(view.shape))
    if whole is not out:
        move(out, whole[:, before[0] : before[0] + height, before[1] : before[1] + width])


def _every(image: Array, dilation: Pair) -> Array:
    """The view (d_h, d_w, N, H / d_h, W / d_w, C) of an image: the images of every d_h-th row and d_w-th column."""
    (n, height, width, c), (down, across) = image.shape, dilation
    return image.reshape(n, height // down, down, width // across, across, c).transpose(2, 4, 0, 1, 3, 5)
