"""Convolutions that run as others, of copies of their operands, where the copies take less time than is gained.

A dilated convolution of stride 1 is one without dilation: the taps that reach a pixel of the result lie d pixels apart,
and so do those of the pixel d further on. An image is cut into d² images of every d-th row and column, and the results
are put together again.

16-bit images whose channels are no multiple of 8, so that pixels do not start at multiples of 16 bytes, get channels of
zeros. Without these Hopper's kernels take none, and the portable ones load each element by itself.

A convolution of stride s from a few channels is one of stride 1 from s² times as many: each s × s pixels become one. Of
the input's gradient no tap falls between the pixels then, and a tile's columns are s² channels. Where s does not divide
the kernel's side the weight gets taps of zeros, and a pixel under one that is not finite makes NaN of the result.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from cudiff.backend import Array, float32, is_low
from cudiff.cuda.deferred import immediate
from cudiff.cuda.kernels.convolution import grouped, portable
from cudiff.cuda.kernels.convolution.problem import (
    DGRAD,
    EPILOGUE,
    FPROP,
    LONGEST,
    WGRAD,
    Fusion,
    Image,
    Operands,
    Pair,
    Problem,
    Weight,
)
from cudiff.cuda.kernels.shape import copy, fit, fit_microseconds, fitted, move, move_microseconds, padded, zeros
from cudiff.cuda.launch import blocks, empty
from cudiff.cuda.select import Offer


class Restated(NamedTuple):
    """The convolution, or linear layer, that runs instead, without dilation and groups. finish(): copies its result to
    where it belongs; None where it is there."""

    given: Operands
    finish: Callable[[], None] | None
    stride: Pair
    padding: Pair

    def run(self, launch: Callable[..., Any], *more: Any) -> None:
        """launch(operands, *more), and finish. What it launches is not deferred if `finish` reads its result."""
        with contextlib.nullcontext() if self.finish is None else immediate():
            launch(self.given, *more)
        if self.finish is not None:
            self.finish()


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
    steps = (1, 1), parts.padding
    if p.direction == WGRAD:
        x, dout = _cut(given.x, p.dilation, *of_input), _cut(given.out, p.dilation, *of_output)
        return Restated(given._replace(x=x, out=dout), None, *steps)
    out, addend = given.out, given.epilogue.addend
    of_x, of_result = (of_output, of_input) if backward else (of_input, of_output)
    x = _cut(given.x, p.dilation, *of_x)
    if addend is None:
        result = empty((len(x), *of_result[0], out.shape[3]), out.dtype)
    else:
        result = addend = _cut(addend, p.dilation, *of_result)
    given = given._replace(x=x, out=result, epilogue=given.epilogue._replace(addend=addend), norm=None)
    return Restated(given, lambda: _join(result, p.dilation, of_result[1], out), *steps)


def _cut(image: Array, dilation: Pair, size: Pair, before: Pair) -> Array:
    """The images (d_h · d_w · N, *size, C) of every d_h-th row and d_w-th column of an image (N, H, W, C) among zeros:
    `before` of them come before its first row and column."""
    widths = [(0, 0)] * 4
    for axis, count, d, first in zip((1, 2), size, dilation, before, strict=True):
        widths[axis] = first, count * d - first - image.shape[axis]
    whole = padded(image, widths) if any(map(any, widths)) else image
    view = _every(whole, dilation)
    out = empty(view.shape, image.dtype)
    copy(out, view)
    return out.reshape(-1, *size, image.shape[3])


def _join(parts: Array, dilation: Pair, before: Pair, out: Array) -> None:
    """Copy what `_cut` would make of out, `parts`, to out."""
    (n, height, width, c), (_, rows, columns, _) = out.shape, parts.shape
    whole, size = out, (rows * dilation[0], columns * dilation[1])
    if (height, width) != size:
        whole = empty((n, *size, c), out.dtype)
    view = _every(whole, dilation)
    copy(view, parts.reshape(view.shape))
    if whole is not out:
        copy(out, whole[:, before[0] : before[0] + height, before[1] : before[1] + width])


def _every(image: Array, dilation: Pair) -> Array:
    """The view (d_h, d_w, N, H / d_h, W / d_w, C) of an image: the images of every d_h-th row and d_w-th column."""
    (n, height, width, c), (down, across) = image.shape, dilation
    return image.reshape(n, height // down, down, width // across, across, c).transpose(2, 4, 0, 1, 3, 5)


def offer_channels(own: Callable[[Problem], float],
                   estimate: Callable[[Problem], float]) -> Callable[[Problem], Offer | None]:
    """The `offer` of a row that adds channels of zeros, also of a linear layer. own: microseconds that the problem
    takes without. estimate: those of the problem with these, by the kernel that serves it. It declines unless that and
    the copies take less time."""
    def offer(p: Problem) -> Offer | None:
        images = [image for image in (p.x, p.out) if not image.rows_aligned]
        left = p.wanted & {Fusion.SECOND_SOURCE, Fusion.UPSAMPLE, Fusion.CAST}
        if left or not images or not is_low(p.x.dtype) or min(p.x.size, p.out.size) == 0:
            return None
        k, rows, columns, c = p.weight.shape
        if min(k, c) < 8 or math.prod(p.x.shape[:-1]) <= 64:  # most of the copies would be zeros, or the weight
            return None
        fused = p.wanted & EPILOGUE
        again = p._replace(
            x=_with_channels(p.x), out=_with_channels(p.out), wanted=fused,
            weight=p.weight._replace(shape=(_whole(k), rows, columns, _whole(c)), rows_aligned=True), norm=(), skip=(),
            skip_weight=None,
        )
        if max(again.x.size, again.out.size, math.prod(again.weight.shape)) >= 2**31:
            return None
        images += [p.out] if Fusion.ADDEND in p.wanted and p.out in images else []
        copies = sum(fit_microseconds(image.shape, image.dtype) for image in images)
        weight = fit_microseconds(p.weight.shape, float32)
        return Offer(fused) if copies + weight + estimate(again) < own(p) else None

    return offer


def _whole(channels: int) -> int:
    """The next multiple of 8: of 16 bits, 16 bytes."""
    return blocks(channels, 8) * 8


def _with_channels(image: Image) -> Image:
    return Image((*image.shape[:-1], _whole(image.shape[-1])), image.dtype)


def whole_channels(given: Operands, p: Problem) -> Restated:
    x, weight, out, epilogue = _fitted(given.x, p.x), given.weight, given.out, given.epilogue
    steps = p.stride, p.padding
    shape = _whole(weight.shape[0]), *weight.shape[1:-1], _whole(weight.shape[-1])
    if p.direction == WGRAD:
        again = given._replace(x=x, out=_fitted(out, p.out))
        if shape == weight.shape:
            return Restated(again, None, *steps)
        dweight = empty(shape, float32)
        own = dweight[: weight.shape[0], ..., : weight.shape[-1]]
        return Restated(again._replace(weight=dweight, add=False), lambda: move(weight, own, given.add), *steps)
    if shape != weight.shape:
        weight = fitted(weight, shape)
    if p.out.rows_aligned:
        return Restated(given._replace(x=x, weight=weight, norm=None), None, *steps)
    channels = out.shape[-1]
    bias, emb, addend = (None if term is None else fitted(term, (*term.shape[:-1], _whole(channels)))
                         for term in epilogue[:3])
    result = empty((*out.shape[:-1], _whole(channels)), out.dtype) if addend is None else addend
    again = Operands(x, weight, result, epilogue._replace(bias=bias, emb=emb, addend=addend))
    return Restated(again, lambda: fit(out, result), *steps)


def _fitted(array: Array, image: Image) -> Array:
    return array if image.rows_aligned else fitted(array, (*array.shape[:-1], _whole(array.shape[-1])))


def offer_folded(p: Problem) -> Offer | None:
    """Serves strides, from pixels of less than 16 bytes, where the copies and conv2d.cu of stride 1 are estimated to
    take less time than conv2d.cu. A faster kernel may run then. For the input's gradient the windows must reach each
    pixel."""
    few, backward = p.weight.shape[3], p.direction == DGRAD
    if p.stride == (1, 1) or p.groups > 1 or p.dilation != (1, 1) or few * p.x.dtype.itemsize >= 16:
        return None
    left = {Fusion.SECOND_SOURCE, Fusion.UPSAMPLE, Fusion.CAST} | ({Fusion.BIAS, Fusion.EMB} if backward else set())
    if p.wanted & left or min(p.x.size, p.out.size) == 0:
        return None
    again, x = _folded(p), p.out if backward else p.x
    image = again.out if backward else again.x
    size = [length * step for length, step in zip(image.shape[1:3], p.stride, strict=True)]
    reached = all(length >= own + before for length, own, before in zip(size, x.shape[1:3], p.padding, strict=True))
    if (backward and not reached) or max(image.size, x.size) >= 2**31:
        return None
    passes = 2 if backward and Fusion.ADDEND in p.wanted else 1
    copies = passes * (move_microseconds(x.shape, x.dtype) + move_microseconds(image.shape, x.dtype) + 4)
    copies += 4 * move_microseconds(again.weight.shape, float32)
    fused = p.wanted & EPILOGUE
    gains = copies + portable.microseconds(again) < portable.microseconds(p)
    return Offer(fused) if gains else None


def _folded(p: Problem) -> Problem:
    """The convolution of stride 1."""
    (k, *kernel, c), (down, across) = p.weight.shape, p.stride
    x, out = (p.out, p.x) if p.direction == DGRAD else (p.x, p.out)
    pack = 16 // x.dtype.itemsize
    channels = blocks(down * across * c, pack) * pack
    taps = [blocks(length, step) for length, step in zip(kernel, p.stride, strict=True)]
    size = [length + tap - 1 for length, tap in zip(out.shape[1:3], taps, strict=True)]
    again = p._replace(weight=Weight((k, *taps, channels)), stride=(1, 1), padding=(0, 0), norm=(), skip=(),
                       skip_weight=None, wanted=p.wanted & EPILOGUE)
    image = Image((x.shape[0], *size, channels), x.dtype)
    return again._replace(out=image) if p.direction == DGRAD else again._replace(x=image)


def folded(given: Operands, p: Problem) -> Restated:
    again, weight, none = _folded(p), given.weight, (0, 0)
    steps = again.stride, again.padding
    if p.direction == WGRAD:
        dweight = empty(again.weight.shape, float32)
        one = Operands(_fold(given.x, p.stride, p.padding, again.x.shape), dweight, given.out)
        return Restated(one, lambda: _unfold(dweight, p.stride, none, weight, given.add), *steps)
    weight = _fold(weight, p.stride, none, again.weight.shape)
    if p.direction == FPROP:
        x = _fold(given.x, p.stride, p.padding, again.x.shape)
        return Restated(given._replace(x=x, weight=weight, norm=None), None, *steps)
    addend = given.epilogue.addend
    if addend is None:
        result = empty(again.out.shape, given.out.dtype)
    else:
        result = addend = _fold(addend, p.stride, p.padding, again.out.shape)
    one = Operands(given.x, weight, result, given.epilogue._replace(addend=addend))
    return Restated(one, lambda: _unfold(result, p.stride, p.padding, given.out), *steps)


def _fold(array: Array, stride: Pair, before: Pair, shape: tuple[int, ...]) -> Array:
    """An image, or a weight, whose pixels are s_h × s_w pixels of `array` (N, H, W, C) among zeros: `before` of them
    come before its first row and column. It has this shape (N, H', W', C'), and zeros from channel s_h · s_w · C on."""
    (n, height, width, c), (_, rows, columns, _) = array.shape, shape
    whole = zeros((n, rows * stride[0], columns * stride[1], c), array.dtype)
    inside = whole[:, before[0] : before[0] + height, before[1] : before[1] + width]
    copy(inside, array[:, : inside.shape[1], : inside.shape[2]])
    out = zeros(shape, array.dtype)
    view = _pixels(out, stride, c)
    copy(view, whole.reshape(view.shape))
    return out


def _unfold(folded: Array, stride: Pair, before: Pair, out: Array, add: bool = False) -> None:
    """out = or, with `add`, += what `_fold` would make `folded` of."""
    (n, height, width, c), (_, rows, columns, _) = out.shape, folded.shape
    whole, view = empty((n, rows * stride[0], columns * stride[1], c), out.dtype), _pixels(folded, stride, c)
    copy(whole.reshape(view.shape), view)
    inside = whole[:, before[0] : before[0] + height, before[1] : before[1] + width]
    move(out, inside, add)


def _pixels(folded: Array, stride: Pair, channels: int) -> Array:
    """The view (N, H', s_h, W', s_w · C) of a folded image: its pixels in the order in which they lie in the image."""
    n, rows, columns, _ = folded.shape
    pixels = folded[..., : stride[0] * stride[1] * channels]
    return pixels.reshape(n, rows, columns, stride[0], stride[1] * channels).transpose(0, 1, 3, 2, 4)
