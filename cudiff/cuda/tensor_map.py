"""Tensor maps: descriptors of an array, and of the boxes of it that Hopper's bulk tensor copies (TMA) copy."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from cudiff.backend import Array, bfloat16, float16, float32
from cudiff.cuda.device import library
from cudiff.errors import CudiffError

_TYPES = {float16: 6, float32: 7, bfloat16: 9}  # CU_TENSOR_MAP_DATA_TYPE_FLOAT16, _FLOAT32 and _BFLOAT16
_TFLOAT32 = 11
BYTES = 128  # of a map
_SWIZZLES = {32: 1, 64: 2, 128: 3}  # CU_TENSOR_MAP_SWIZZLE_32B, _64B and _128B
_PROMOTION = 2  # CU_TENSOR_MAP_L2_PROMOTION_L2_128B. By 256 bytes, attention with heads of 72 channels took 9 % longer.

FARTHEST, LONGEST_STEP = 127, 8  # pixels from an image's corners to windows, and from one window to the next


class Windows(NamedTuple):
    """A convolution's windows over images, all (vertical, horizontal). taps: of a window. size: how many windows an
    image has. first: the first pixel of the first one, which may be outside the image. step: from one to the next."""

    taps: tuple[int, int] = (1, 1)
    size: tuple[int, int] = (1, 1)
    first: tuple[int, int] = (0, 0)
    step: tuple[int, int] = (1, 1)

    def beyond(self, image: tuple[int, ...]) -> tuple[int, ...]:
        """Pixels from the last one of an image of this size to the first one of the last window."""
        return tuple([first + (count - 1) * step - (length - 1)
                      for first, count, step, length in zip(self.first, self.size, self.step, image, strict=True)])

    def mappable(self, image: tuple[int, ...]) -> bool:
        """Whether the driver takes such windows, for an image of this size."""
        corners = *self.first, *self.beyond(image)
        return max(self.step) <= LONGEST_STEP and max(map(abs, corners)) <= FARTHEST


def tensor_map(array: Array, box: tuple[int, ...], operand: bool = True) -> bytes:
    """The 128 bytes of a CUtensorMap for boxes of `box` elements of a CUDA array, to be passed to a kernel by value.

    array: float16, bfloat16 or float32, of up to 5 axes. The last one is contiguous; the address and the other strides
    are multiples of 16 bytes. box: its last axis has 128, 64 or 32 bytes. operand: whether float32 is rounded to tf32
    by the copy. Raises CudiffError if the driver refuses.
    """
    return _map(array.data.ptr, array.shape, array.dtype, array.strides, box, operand)


@functools.lru_cache(maxsize=4096)
def _map(pointer: int, shape: tuple[int, ...], dtype: np.dtype, strides: tuple[int, ...], box: tuple[int, ...],
         operand: bool) -> bytes:
    return form_of(shape, dtype, box, operand, strides=strides).at(pointer)


class Form:
    """All of a tensor map but the address. at(address): the bytes of the map there."""

    def __init__(self, **of: Any) -> None:
        self.at = functools.lru_cache(maxsize=256)(functools.partial(map_at, **of))


@functools.lru_cache(maxsize=4096)
def form_of(shape: tuple[int, ...], dtype: np.dtype, box: tuple[int, ...], operand: bool = True, twice: bool = False,
            swizzled: bool = True, windows: Windows | None = None, *, strides: tuple[int, ...]) -> Form:
    """That of `tensor_map`, or `windows_map`, of an array of this shape, dtype and these strides.

    twice: the array gets an axis of length 2 and stride 0 before its last one, which repeats each line; the box has it
    too. swizzled: if not, the box's last axis may have any multiple of 16 bytes.
    """
    steps = _steps(shape, strides)
    if twice:
        shape, steps = (*shape[:-1], 2, shape[-1]), (*steps, 0)
    kind = _TFLOAT32 if operand and dtype == float32 else _TYPES[dtype]
    swizzle = _SWIZZLES[box[-1] * dtype.itemsize] if swizzled else 0
    return Form(kind=kind, shape=shape, strides=steps, box=box, swizzle=swizzle, windows=windows)


def windows_map(images: Array, windows: Windows, at_once: int) -> bytes:
    """An "im2col" CUtensorMap, for boxes of 64 channels of one tap of `at_once` windows. images: CUDA (N, H, W, C) of
    16 bits, whose pixels may have any strides that are multiples of 16 bytes."""
    box = at_once, 128 // images.dtype.itemsize
    return form_of(images.shape, images.dtype, box, windows=windows, strides=images.strides).at(images.data.ptr)


def _steps(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """The strides of all axes but the last, as the driver takes them. That of an axis of one element may be anything,
    even negative after a flip, because nothing is one step along: it becomes a multiple of 16 bytes."""
    return tuple([max(0, stride) // 16 * 16 if size == 1 else stride
                  for size, stride in zip(shape, strides[:-1], strict=False)])


def map_at(pointer: int, kind: int, shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...],
           swizzle: int, windows: Windows | None) -> bytes:
    """The map of an array at an address. kind, swizzle: the driver's numbers of the type and of the swizzle."""
    rank = len(shape)

    def reversed_array(of: Any, values: tuple[int, ...]) -> ctypes.Array:
        return (of * len(values))(*reversed(values))  # the driver counts axes from the innermost

    buffer = (ctypes.c_uint64 * 32)()
    address = -(-ctypes.addressof(buffer) // 64) * 64  # a CUtensorMap starts at a multiple of 64 bytes
    steps = (1,) * rank
    if windows is None:
        encode, area = library().cuTensorMapEncodeTiled, [reversed_array(ctypes.c_uint32, box)]
    else:  # corners: the first tap in the first window, and in the last one, counted from the image's last pixel
        encode, steps = library().cuTensorMapEncodeIm2col, (1, *windows.step, 1)
        corners = windows.first, windows.beyond(shape[1:3])
        area = [*(reversed_array(ctypes.c_int, corner) for corner in corners), *reversed_array(ctypes.c_uint32, box)]
    status = encode(
        ctypes.c_void_p(address), kind, rank, ctypes.c_void_p(pointer), reversed_array(ctypes.c_uint64, shape),
        reversed_array(ctypes.c_uint64, strides), *area,
        reversed_array(ctypes.c_uint32, steps), 0, swizzle, _PROMOTION, 0,
    )
    if status:
        raise CudiffError(
            f"the driver refuses a tensor map of shape {shape} and box {box} (error {status}): update it, or set "
            "CUDIFF_PORTABLE=1, which does without"
        )
    return ctypes.string_at(address, BYTES)
