"""Handwritten-looking digits, drawn with the font that Pillow brings along: a data set that needs no download."""

from __future__ import annotations

import functools

import numpy as np
from PIL import Image, ImageDraw, ImageFont, features

from cudiff.data.dataset import Dataset
from cudiff.errors import CudiffError
from cudiff.memory import check_memory

PARTS = ("train", "test")
STROKES = 8  # thicknesses, from the font's own stroke to the thickest that leaves the holes of 4, 6, 8 and 9 open
MAX_STROKE = 0.032  # of the image's side, added all around

MAX_ROTATION = 0.22  # radians
MAX_SHEAR = 0.35
SCALE = (0.78, 1.12)
MAX_SHIFT = 0.07  # of the image's side
MOST_PIXELS = 1024  # a side; each glyph is first drawn eight times as large
INTENSITY = (0.8, 1.0)


@functools.cache
def _glyph(digit: int, stroke: int, canvas: int) -> Image.Image:
    """One digit, white on black and centred on a `canvas` x `canvas` image; its height is 0.62 of the canvas."""
    side = 4 * canvas  # strokes have whole pixels: drawn large, they can be of any thickness
    font = ImageFont.load_default(size=0.86 * side)  # the font's digits are 0.72 of its size high
    text, width = str(digit), round(stroke / (STROKES - 1) * MAX_STROKE * side)
    left, top, right, bottom = font.getbbox(text, stroke_width=width)
    image = Image.new("L", (side, side))
    corner = ((side - left - right) / 2, (side - top - bottom) / 2)
    ImageDraw.Draw(image).text(corner, text, fill=255, font=font, stroke_width=width)
    return image.reduce(4)


def digits(n: int = 4000, image_size: int = 16, seed: int = 0, part: str = "train") -> Dataset:
    """Draw `n` digits under random rotation, shear, size, thickness, shift and brightness.

    Returns a Dataset of (n, image_size, image_size, 1), white on black, antialiased, labels 0 to 9 in turn. The same
    arguments give the same images, a larger n the same ones and more; the parts "train" and "test" differ.
    Raises CudiffError for an unknown part, n below 1, image_size below 8, or where Pillow lacks FreeType.
    """
    if part not in PARTS:
        raise CudiffError(f"digits has no part '{part}': use train or test")
    if n < 1:
        raise CudiffError(f"cannot draw {n} digits: ask for 1 or more")
    if image_size < 8:
        raise CudiffError(f"digits of {image_size} pixels cannot be read: use an image size of 8 or more")
    if image_size > MOST_PIXELS:
        raise CudiffError(f"digits of {image_size} pixels are not drawn: use an image size of {MOST_PIXELS} or less")
    check_memory(f"{n:,} digits of {image_size}x{image_size}", n * (image_size**2 + 256), "draw fewer")
    if not features.check("freetype2"):
        raise CudiffError(
            "this Pillow has no FreeType, which draws the digits: reinstall it (pip install --force-reinstall pillow) "
            "or use other data (mnist)"
        )
    supersampling = 4 if image_size <= 32 else 2
    canvas = supersampling * image_size
    labels = np.arange(n, dtype=np.int32) % 10
    # One row of uniforms for each image: how many are drawn does not change the first ones.
    draws = np.random.default_rng([seed, PARTS.index(part)]).random((n, 8))
    strokes = (draws[:, 0] * STROKES).astype(int)
    limits = (MAX_ROTATION, MAX_SHEAR, MAX_SHIFT * canvas, MAX_SHIFT * canvas)
    rotation, shear, shift_x, shift_y = ((2 * draws[:, 1:5] - 1) * limits).T
    scale_x, scale_y = (SCALE[0] + (SCALE[1] - SCALE[0]) * draws[:, 5:7]).T
    intensity = INTENSITY[0] + (INTENSITY[1] - INTENSITY[0]) * draws[:, 7]

    cos, sin = np.cos(rotation), np.sin(rotation)
    # Pillow wants the map from output to input pixels: shift back, rotate back, shear back, scale back.
    a, b = (cos + shear * sin) / scale_x, (sin - shear * cos) / scale_x
    d, e = -sin / scale_y, cos / scale_y
    centre = canvas / 2
    to_x, to_y = centre + shift_x, centre + shift_y
    affine = np.stack([a, b, centre - a * to_x - b * to_y, d, e, centre - d * to_x - e * to_y], axis=1)

    images = np.empty((n, image_size, image_size, 1), dtype=np.uint8)
    for i in range(n):
        glyph = _glyph(int(labels[i]), int(strokes[i]), canvas)
        drawn = glyph.transform(glyph.size, Image.Transform.AFFINE, affine[i].tolist(), Image.Resampling.BILINEAR)
        images[i, :, :, 0] = np.asarray(drawn.reduce(supersampling))
    images[:] = np.round(images * intensity[:, None, None, None])
    return Dataset(images, labels, num_classes=10, name="digits", class_names=tuple("0123456789"))
