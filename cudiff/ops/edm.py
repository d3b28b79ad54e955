"""What EDM's loss gives its network and asks of it, in one pass over images and noise."""

from __future__ import annotations

import numpy as np

from cudiff.backend import compute_dtype, float32
from cudiff.cuda.module import blocks, empty, launch
from cudiff.ops.cast import narrow, require_float, widen
from cudiff.tensor import Function, Tensor


class EDMMix(Function):
    """See `edm_mix`."""

    differentiable = False

    @staticmethod
    def forward_numpy(ctx, images, noise, draw, mean, std, sigma_data):
        log_sigma = (draw * std + mean).astype(compute_dtype(draw.dtype), copy=False)
        sigma = np.exp(log_sigma).reshape((-1,) + (1,) * (images.ndim - 1))
        c_in = 1 / np.sqrt(np.square(sigma) + sigma_data**2)
        y, z = widen(images), widen(noise)
        x = c_in * y + sigma * c_in * z
        target = sigma * c_in / sigma_data * y - sigma_data * c_in * z
        return narrow(x, images.dtype), narrow(target, images.dtype), log_sigma

    @staticmethod
    def forward_cuda(ctx, images, noise, draw, mean, std, sigma_data):
        require_float("edm_mix", images)
        n, size = len(images), images.size // len(images)
        x, target, log_sigma = (empty(a.shape, a.dtype) for a in (images, images, draw))
        pack = 16 // images.itemsize
        vec = size % pack == 0 and images.data.ptr % 16 == 0 and noise.data.ptr % 16 == 0
        launch(
            "edm", "mix", (blocks(size, 256 * pack), n), 256,
            (x, target, log_sigma, images, noise, draw, mean, std, sigma_data, np.int64(size)),
            T=images.dtype, VEC=int(vec),
        )
        return x, target, log_sigma


def edm_mix(images: Tensor, noise: Tensor, draw: Tensor, P_mean: float, P_std: float,
            sigma_data: float) -> tuple[Tensor, Tensor, Tensor]:
    """The network's input c_in·(y + sigma·z), its target, and log sigma = P_mean + P_std·draw, float32 (N,).

    images y and noise z (N, ...) of one shape and dtype, draw float32 (N,); c_in = 1 / sqrt(sigma² + sigma_data²). The
    target is (y - c_skip·(y + sigma·z)) / c_out = c_in·(sigma·y / sigma_data - sigma_data·z), of unit variance. No
    gradients. Raises ValueError where shapes do not agree. EDM, arXiv 2206.00364, equation 8 and Table 1.
    """
    if images.shape != noise.shape or images.dtype != noise.dtype or draw.shape != images.shape[:1]:
        raise ValueError(f"edm_mix: images {images.shape}, noise {noise.shape} and draw {draw.shape} do not agree")
    if draw.dtype != float32 and images.device == "cuda":
        raise TypeError("edm_mix on CUDA takes a float32 draw: use .astype('float32')")
    return EDMMix.apply(images, noise, draw, mean=float(P_mean), std=float(P_std), sigma_data=float(sigma_data))
