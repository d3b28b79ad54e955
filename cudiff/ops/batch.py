"""Draw a training batch from images that lie on the device as uint8."""

from __future__ import annotations

import numpy as np

from cudiff.backend import float32, int32
from cudiff.cuda.module import blocks, empty, launch
from cudiff.ops.random import Streams, philox
from cudiff.tensor import Function, Tensor

__all__ = ["draw_batch"]


class DrawBatch(Function):
    differentiable = False

    @staticmethod
    def forward_numpy(ctx, images, labels, step, batch_size, seed, flip):
        from cudiff.data.order import shuffled_index

        n = len(images)
        count = (int(step[0]) & 0xFFFFFFFF) * batch_size + np.arange(batch_size)
        index = shuffled_index(count % n, n, seed, count // n)
        x = images[index]
        if flip:
            flipped = philox(0, count & 0xFFFFFFFF, count >> 32, Streams.FLIP, seed)[:, 0] >= 1 << 31
            x[flipped] = x[flipped][:, :, ::-1]
        x = x.astype(float32) / 127.5 - 1
        return x if labels is None else (x, labels[index])

    @staticmethod
    def forward_cuda(ctx, images, labels, step, batch_size, seed, flip):
        from cudiff.data.order import order_key

        n, height, width, channels = images.shape
        x = empty((batch_size, height, width, channels), float32)
        out_labels = None if labels is None else empty(batch_size, int32)
        launch(
            "batch", "draw_batch", (blocks(height * width * channels, 1024), batch_size), 256,
            (x, out_labels, images, labels, step, np.int64(n), height, width, channels, (n - 1).bit_length(),
             np.uint32(order_key(seed)), np.uint64(seed & 0xFFFFFFFFFFFFFFFF), int(Streams.FLIP), flip),
        )
        return x if labels is None else (x, out_labels)


def draw_batch(images: Tensor, labels: Tensor | None, step: Tensor, batch_size: int, seed: int,
               flip: bool = False) -> tuple[Tensor, Tensor | None]:
    """The batch of training step `step`: images as float32 in [-1, 1], and their labels.

    images uint8 (N, H, W, C), labels int32 (N,) or None, step int32 or uint32 (1,) on the device (the kernel reads it,
    so that a captured graph moves on). Sample i has position step · batch_size + i; position mod N of epoch
    position // N is image `cudiff.data.shuffled_index(...)`. flip: mirror left to right by the top bit of Philox word
    0 of counter (0, position, position >> 32, Streams.FLIP).
    Returns x (batch_size, H, W, C), labels int32 (batch_size,) or None.
    """
    if images.dtype != np.uint8 or images.ndim != 4 or len(images) == 0:
        raise ValueError(f"images must be uint8 (N, H, W, C) with N > 0, got {images.dtype} {images.shape}")
    batch = DrawBatch.apply(images, labels, step, batch_size=batch_size, seed=int(seed), flip=bool(flip))
    return batch if labels is not None else (batch, None)
