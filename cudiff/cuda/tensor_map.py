"""Tensor maps: they tell Hopper's bulk tensor copies (TMA) where an array lies and what box of it to copy."""

from __future__ import annotations

import ctypes
import functools
from typing import Any, NamedTuple

import numpy as np

from cudiff.backend import Array, bfloat16, float16, float32
from cudiff.cuda.device import library
from cudiff.errors import CudiffError

_TYPES = {float16: 6, float32: 7, bfloat16: 9}  # CU_TENSOR_MAP_DATA_TYPE_FLOAT16, _FLOAT32 and _BFLOAT16
_TFLOAT32 = 11
_MAP = np.dtype([("words", np.uint64, 16)])
_SWIZZLES = {64: 2, 128: 3}  # CU_TENSOR_MAP_SWIZZLE_64B and _128B
_PROMOTE_256B = 3

FARTHEST, LONGEST_STEP = 127, 8  # of windows: from the image's corners, and to the next


class Windows(NamedTuple):
    """The windows of a convolution over images. taps: of a window. size: how many windows an image has. first: where
    the first begins, which may be outside the image. step: from one to the next. All are (vertical, horizontal)."""

    taps: tuple[int, int] = (1, 1)
    size: tuple[int, int] = (1, 1)
    first: tuple[int, int] = (0, 0)
    step: tuple[int, int] = (1, 1)

    def beyond(self, image: tuple[int, ...]) -> tuple[int, ...]:
        """How far after the last pixel of an image of this size the last window begins."""
        return tuple([first + (count - 1) * step - (length - 1)
                      for first, count, step, length in zip(self.first, self.size, self.step, image, strict=True)])

    def mappable(self, image: tuple[int, ...]) -> bool:
        """Whether the driver takes such windows, for an image of this size."""
        corners = *self.first, *self.beyond(image)
        return max(self.step) <= LONGEST_STEP and max(map(abs, corners)) <= FARTHEST


def tensor_map(array: Array, box: tuple[int, ...], operand: bool = True, twice: bool = False,
               swizzled: bool = True) -> np.ndarray:
    """The 128 bytes of a CUtensorMap for boxes of `box` elements of a CUDA array, to be passed to a kernel by value.

    float16, bfloat16 or float32, up to 5 axes, the last one contiguous; the box's last axis has 128 or 64 bytes where
    they are to be `swizzled`, else a multiple of 16. An `operand` of float32 is rounded to tf32 on its way. Array and
    strides are multiples of 16 bytes.
    `twice`: as if each line of the last axis were there twice in a row, on an axis before it that the box counts.
    Raises CudiffError where the driver refuses.
    """
    kind = _TFLOAT32 if operand and array.dtype == float32 else _TYPES[array.dtype]
    swizzle = _SWIZZLES[box[-1] * array.dtype.itemsize] if swizzled else 0
    shape, strides = array.shape, array.strides[:-1]
    if twice:
        shape, strides = (*shape[:-1], 2, shape[-1]), (*strides, 0)
    return _encode(array.data.ptr, kind, shape, strides, box, swizzle)


def windows_map(images: Array, windows: Windows, at_once: int) -> np.ndarray:
    """The same for 64 channels of a tap of so many windows `at_once`, of CUDA images (N, H, W, C) of 16 bits: the
    driver's "im2col" maps. Pixels lie at any strides, multiples of 16 bytes."""
    return _encode(images.data.ptr, _TYPES[images.dtype], images.shape, images.strides[:-1],
                   (at_once, 128 // images.dtype.itemsize), _SWIZZLES[128], windows)


@functools.lru_cache(maxsize=4096)
def _encode(pointer: int, kind: int, shape: tuple[int, ...], strides: tuple[int, ...],
            box: tuple[int, ...], swizzle: int, windows: Windows | None = None) -> np.ndarray:
    rank = len(shape)

    def reversed_array(of: Any, values: tuple[int, ...]) -> ctypes.Array:
        return (of * len(values))(*reversed(values))  # the driver counts axes from the innermost

    buffer = (ctypes.c_uint64 * 32)()
    address = -(-ctypes.addressof(buffer) // 64) * 64  # a CUtensorMap starts at a multiple of 64 bytes
    steps = (1,) * rank
    if windows is None:
        encode, area = library().cuTensorMapEncodeTiled, [reversed_array(ctypes.c_uint32, box)]
    else:  # the first tap's pixels, from the first window's to the last one's, that counted from the image's end
        encode, steps = library().cuTensorMapEncodeIm2col, (1, *windows.step, 1)
        corners = windows.first, windows.beyond(shape[1:3])
        area = [*(reversed_array(ctypes.c_int, corner) for corner in corners), *reversed_array(ctypes.c_uint32, box)]
    status = encode(
        ctypes.c_void_p(address), kind, rank, ctypes.c_void_p(pointer), reversed_array(ctypes.c_uint64, shape),
        reversed_array(ctypes.c_uint64, strides), *area,
        reversed_array(ctypes.c_uint32, steps), 0, swizzle, _PROMOTE_256B, 0,
    )
    if status:
        raise CudiffError(
            f"the driver refuses a tensor map of shape {shape} and box {box} (error {status}): update it, or set "
            "CUDIFF_PORTABLE=1, which does without"
        )
    words = (ctypes.c_uint64 * 16).from_address(address)
    return np.array([tuple([list(words)])], _MAP)
