"""Draw a training batch from images or latents that lie on the device; or normalise images that are a batch already.

The order is a keyed bijection of each epoch's positions, so that no shuffle has to be stored to resume.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cudiff.backend import Array, float16, float32, int32, is_array
from cudiff.cuda.launch import blocks, empty, launch
from cudiff.function import Function
from cudiff.ops.cast import as_index, downcast
from cudiff.ops.random import Purpose, philox
from cudiff.tensor import Tensor
from cudiff.values import flag

__all__ = ["draw_batch", "normalize_images"]

ROUNDS = 8  # 6 leave a bias of a few percent where n is below 10
GOLDEN = np.uint32(0x9E3779B9)


def mix32(x: Array) -> Array:
    """The finaliser of MurmurHash3: a bijection of uint32 in which every input bit moves every output bit."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def order_key(seed: int) -> Array:
    """Hash a 64-bit seed to 32 bits: mix32(mix32(low word + GOLDEN) ^ high word)."""
    with np.errstate(over="ignore"):
        return mix32(mix32(np.uint32(seed & 0xFFFFFFFF) + GOLDEN) ^ np.uint32(seed >> 32 & 0xFFFFFFFF))


def shuffled_index(position: int | np.ndarray, n: int, seed: int, epoch: int | np.ndarray = 0) -> np.ndarray:
    """Which of `n` samples is at `position` of an epoch's shuffled order: a bijection of [0, n) for each epoch.

    position: integers in [0, n), any shape; epoch: integers, broadcast against position (a batch may span two
    epochs: pass `count % n` and `count // n`). Returns int64 of the broadcast shape. Raises ValueError for a
    position outside [0, n) or n outside [1, 2^32].

    A Feistel network (Luby and Rackoff 1988) over the `bits` of n - 1, high half `left`, low half `right`, then
    cycle walking (Black and Rogaway 2002): what falls outside [0, n) is enciphered again. All words are uint32,
    sums and products wrap, so that a kernel gives the same indices bit for bit:

        bits = bit_length(n - 1); low = (bits + 1) / 2
        key = mix32(order_key(seed) ^ epoch)
        do  left = index >> low; right = index & (2^low - 1)
            for r = 0, 2, 4, 6:
                left  ^= mix32(right ^ (key + r * GOLDEN))       & (2^(bits - low) - 1)
                right ^= mix32(left  ^ (key + (r + 1) * GOLDEN)) & (2^low - 1)
            index = left << low | right
        while index >= n

    The halves are updated in turn instead of swapped, which lets them differ in width: the domain is then less than
    twice n and a walk takes under two turns on average.
    """
    position, epoch = np.asarray(position, np.int64), np.asarray(epoch, np.int64)
    if not 1 <= n <= 2**32:
        raise ValueError(f"n must lie in [1, 2^32], got {n}")
    if position.size and (position.min() < 0 or position.max() >= n):
        raise ValueError(f"positions must lie in [0, {n})")
    bits = (n - 1).bit_length()
    with np.errstate(over="ignore"):
        key = mix32(order_key(seed) ^ epoch.astype(np.uint32))
        index = _encipher(position.astype(np.uint32), key, bits)
        while (outside := index > np.uint32(n - 1)).any():
            index = np.where(outside, _encipher(index, key, bits), index)
    return index.astype(np.int64)


def _encipher(index: np.ndarray, key: np.ndarray, bits: int) -> np.ndarray:
    """The rounds of `shuffled_index`, uint32 to uint32."""
    low = (bits + 1) // 2
    left_mask, right_mask = np.uint32((1 << bits - low) - 1), np.uint32((1 << low) - 1)
    left, right = index >> np.uint32(low), index & right_mask
    for r in range(0, ROUNDS, 2):
        left = left ^ (mix32(right ^ (key + np.uint32(r) * GOLDEN)) & left_mask)
        right = right ^ (mix32(left ^ (key + np.uint32(r + 1) * GOLDEN)) & right_mask)
    return left << np.uint32(low) | right


def _unit(images: Array) -> Array:
    """Bytes in [−1, 1]."""
    return images.astype(float32) / 127.5 - 1


class NormalizeImages(Function):
    """See `normalize_images`."""

    differentiable = False

    @staticmethod
    def forward_numpy(ctx, images, dtype):
        return downcast(_unit(images), dtype)

    @staticmethod
    def forward_cuda(ctx, images, dtype):
        x, pack = empty(images.shape, dtype), 16 // dtype.itemsize
        whole = images.size % pack == 0 and images.data.ptr % pack == 0
        launch("batch", "normalize_images", blocks(x.size, 256 * (pack if whole else 1)), 256,
               (x, images, np.int64(x.size)), T=dtype, VEC=int(whole))
        return x


class DrawBatch(Function):
    differentiable = False

    @staticmethod
    def forward_numpy(ctx, images, labels, step, samples, of, seed, flip, file=None):
        images = images if file is None else file
        n = len(images)
        count = (int(step[0]) & 0xFFFFFFFF) * of + np.arange(samples.start, samples.stop)
        index = shuffled_index(count % n, n, seed, count // n)
        x = images[index]
        if flip:
            flipped = philox(0, count & 0xFFFFFFFF, count >> 32, Purpose.FLIP, seed)[:, 0] >= 1 << 31
            x[flipped] = x[flipped][:, :, ::-1]
        x = _unit(x) if x.dtype == np.uint8 else x.astype(float32)
        return x if labels is None else (x, labels[index])

    @staticmethod
    def forward_cuda(ctx, images, labels, step, samples, of, seed, flip):
        n, height, width, channels = images.shape
        batch_size = len(samples)
        x = empty((batch_size, height, width, channels), float32)
        out_labels = None if labels is None else empty(batch_size, int32)
        kernel, dtype = ("draw_batch", float32) if images.dtype == np.uint8 else ("draw_latents", images.dtype)
        launch(
            "batch", kernel, (blocks(height * width * channels, 1024), batch_size), 256,
            (x, out_labels, images, labels, step, np.uint32(samples.start), np.uint32(of), np.int64(n), height, width,
             channels, (n - 1).bit_length(), np.uint32(order_key(seed)), np.uint64(seed & 0xFFFFFFFFFFFFFFFF),
             np.uint32(Purpose.FLIP), flip),
            T=dtype, VEC=0,
        )
        return x if labels is None else (x, out_labels)


def draw_batch(images: Any, labels: Any, step: Tensor, batch_size: int, seed: int,
               flip: bool = False, samples: range | None = None) -> tuple[Tensor, Tensor | None]:
    """The batch of training step `step`: images as float32 in [-1, 1], or latents as float32, and their labels.

    images uint8 (N, H, W, C), or latents, float32 or float16; a Tensor or, on the CPU, `cudiff.data.rows.Rows`. labels
    integers (N,) or None; step int32 or uint32 (1,) on the device: the kernel reads it, so each replay of a graph uses
    its present value. Sample i has position step · batch_size + i; position mod N of epoch position // N is image
    `shuffled_index(...)`. samples: which of range(batch_size) are drawn, None for all. flip: mirror left to right by
    the top bit of Philox word 0 of counter (0, position, position >> 32, Purpose.FLIP).
    Returns x (len(samples), H, W, C), labels int32 (len(samples),) or None.
    """
    samples = range(batch_size) if samples is None else samples
    if not 0 <= samples.start < samples.stop <= batch_size or samples.step != 1:
        raise ValueError(f"draw_batch: samples {samples} are none of a batch of {batch_size}")
    if images.dtype not in (np.uint8, float32, float16) or images.ndim != 4 or len(images) == 0:
        raise ValueError(f"images must be uint8, float32 or float16 (N, H, W, C) with N > 0, got {images.dtype} "
                         f"{images.shape}")
    if step.shape != (1,) or step.dtype not in (int32, np.uint32):
        raise ValueError(f"draw_batch: step must be int32 or uint32 (1,), got {step.dtype} {step.shape}")
    if labels is not None:
        labels = as_index("draw_batch", labels, step.device)
        if labels.shape != images.shape[:1]:
            raise ValueError(f"draw_batch: {len(images)} images have labels of shape {labels.shape}")
    given = dict(samples=samples, of=batch_size, seed=int(seed), flip=flag("flip", flip))
    if isinstance(images, Tensor) or is_array(images):
        batch = DrawBatch.apply(images, labels, step, **given)
    elif step.device == "cuda":
        raise ValueError("draw_batch: images in a file are drawn on the CPU: give a step that lies there")
    else:
        batch = DrawBatch.apply(None, labels, step, file=images, **given)
    return batch if labels is not None else (batch, None)


def normalize_images(images: Tensor, dtype: Any = float32) -> Tensor:
    """uint8 images of any shape as numbers in [−1, 1] of a floating dtype. A copy of bytes to the device is a quarter
    of one of float32."""
    if images.dtype != np.uint8:
        raise ValueError(f"normalize_images takes uint8, not {images.dtype}")
    return NormalizeImages.apply(images, dtype=np.dtype(dtype))
