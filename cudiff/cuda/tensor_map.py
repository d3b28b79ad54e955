"""Tensor maps: how Hopper's bulk tensor copies (TMA) are told where an array lies and what box of it to bring."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np

from cudiff.backend import Array, bfloat16, float16, float32
from cudiff.cuda.device import library
from cudiff.errors import CudiffError

_TYPES = {float16: 6, float32: 7, bfloat16: 9}  # CU_TENSOR_MAP_DATA_TYPE_FLOAT16, _FLOAT32 and _BFLOAT16
_TFLOAT32 = 11
_MAP = np.dtype([("words", np.uint64, 16)])
_SWIZZLES = {64: 2, 128: 3}  # CU_TENSOR_MAP_SWIZZLE_64B and _128B
_PROMOTE_256B = 3


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


def windows_map(images: Array, taps: tuple[int, int], pixels: int) -> np.ndarray:
    """The same for so many `pixels` in a row of CUDA images (N, H, W, C) of 16 bits, 64 channels of each, and for what
    lies beside them under a convolution of (R, S) taps that keeps the images' size: the driver's "im2col" maps."""
    channels = 128 // images.dtype.itemsize
    return _encode(images.data.ptr, _TYPES[images.dtype], images.shape, images.strides[:-1], (pixels, channels),
                   _SWIZZLES[128], taps)


@functools.lru_cache(maxsize=4096)
def _encode(pointer: int, kind: int, shape: tuple[int, ...], strides: tuple[int, ...],
            box: tuple[int, ...], swizzle: int, taps: tuple[int, int] | None = None) -> np.ndarray:
    rank = len(shape)

    def reversed_array(of: Any, values: tuple[int, ...]) -> ctypes.Array:
        return (of * len(values))(*reversed(values))  # the driver counts axes from the innermost

    buffer = (ctypes.c_uint64 * 32)()
    address = -(-ctypes.addressof(buffer) // 64) * 64  # a CUtensorMap starts at a multiple of 64 bytes
    if taps is None:
        encode, area = library().cuTensorMapEncodeTiled, [reversed_array(ctypes.c_uint32, box)]
    else:  # the first tap's pixels: they begin, and end, as far before the image's as a window reaches
        corner = reversed_array(ctypes.c_int, tuple(-(count // 2) for count in taps))
        encode, area = library().cuTensorMapEncodeIm2col, [corner, corner, *reversed_array(ctypes.c_uint32, box)]
    status = encode(
        ctypes.c_void_p(address), kind, rank, ctypes.c_void_p(pointer), reversed_array(ctypes.c_uint64, shape),
        reversed_array(ctypes.c_uint64, strides), *area,
        (ctypes.c_uint32 * rank)(*[1] * rank), 0, swizzle, _PROMOTE_256B, 0,
    )
    if status:
        raise CudiffError(
            f"the driver refuses a tensor map of shape {shape} and box {box} (error {status}): update it, or set "
            "CUDIFF_PORTABLE=1, which does without"
        )
    words = (ctypes.c_uint64 * 16).from_address(address)
    return np.array([tuple([list(words)])], _MAP)
