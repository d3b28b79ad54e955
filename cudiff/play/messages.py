"""What the page sends: a wish for pictures as JSON, or a picture to begin with. Nothing is taken unchecked."""

from __future__ import annotations

import io
import json
import warnings
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageOps

from cudiff.data.pictures import as_rgb
from cudiff.errors import CudiffError
from cudiff.values import real, whole

MOST_TEXT = 4096
MOST_PICTURE = 8 * 2**20
MOST_PIXELS = 2**24
"""Of a picture once decoded, 4,096 x 4,096: few bytes can announce many."""
MOST_SEED = 2**53 - 1
"""The largest whole number that JavaScript counts to."""


class Wish(NamedTuple):
    """Which pictures to draw: number, of the wish; label, None for all classes in turn; moving, whether to go on."""

    number: int
    label: int | None
    guidance: float
    steps: int
    seed: int
    strength: float
    moving: bool


def read_wish(text: str) -> Wish | None:
    """The wish in a message, or None where it asks to forget the picture. Raises CudiffError for anything else."""
    try:
        if len(text) > MOST_TEXT or len(text.encode()) > MOST_TEXT:
            raise CudiffError(f"a message is longer than {MOST_TEXT:,} bytes")
        given = json.loads(text)
    except (ValueError, RecursionError):
        raise CudiffError("a message is not JSON") from None
    if given == {"forget": True}:
        return None
    if not isinstance(given, dict) or set(given) != set(Wish._fields):
        raise CudiffError(f"a message is an object of {', '.join(Wish._fields)}")
    if given["label"] is not None:
        whole("label", given["label"], -1, 2**31 - 1)
    if not isinstance(given["moving"], bool):
        raise CudiffError("moving is true or false")
    return Wish(
        whole("number", given["number"], 0, MOST_SEED), given["label"], real("guidance", given["guidance"], 0, 1000),
        whole("steps", given["steps"], 1, 1000), whole("seed", given["seed"], 0, MOST_SEED),
        real("strength", given["strength"], 0, 1), given["moving"],
    )


def read_picture(content: bytes, shape: tuple[int, int, int]) -> np.ndarray:
    """A PNG, JPEG, WebP, GIF or BMP as uint8 of the shape (H, W, C), cropped in the middle and resized.

    Raises CudiffError where it is none, or of more than 2^24 pixels.
    """
    height, width, channels = shape
    try:
        with warnings.catch_warnings(action="ignore"), \
             Image.open(io.BytesIO(content), formats=("PNG", "JPEG", "WEBP", "GIF", "BMP")) as picture:
            if picture.width * picture.height > MOST_PIXELS:
                raise CudiffError(f"the picture has more than {MOST_PIXELS:,} pixels: make it smaller")
            picture.draft(None, (2 * width, 2 * height))
            ImageOps.exif_transpose(picture, in_place=True)
            picture.load()
            fitted = ImageOps.fit(as_rgb(picture, (0, 0, *picture.size), "white"), (width, height),
                                  Image.Resampling.LANCZOS)
    except CudiffError:
        raise
    except Exception:  # whatever a decoder raises for damaged content
        raise CudiffError("the picture cannot be read: give a PNG, JPEG, WebP, GIF or BMP") from None
    return np.asarray(fitted.convert("L" if channels == 1 else "RGB")).reshape(shape)
