"""EDM's preconditioning (arXiv 2206.00364, Table 1), each in one pass: in training a network's input and target, in
sampling its input and the denoised images from its output."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cudiff.backend import Array, compute_dtype
from cudiff.cuda.launch import MOST_ACROSS, aligned, blocks, empty, launch
from cudiff.function import Function
from cudiff.ops.cast import as_wide, astype, downcast, require_floats, result_dtype, upcast
from cudiff.tensor import Tensor

__all__ = ["edm_input", "edm_mix", "edm_output"]


class Data(NamedTuple):
    """Statistics of the images. The network gets y = (image - mean) / std, of standard deviation sigma_data."""

    sigma_data: float
    mean: float
    std: float

    def standardised(self, images: np.ndarray) -> np.ndarray:
        return (upcast(images) - self.mean) / self.std

    def coefficients(self, sigma: np.ndarray, images: np.ndarray) -> tuple[np.ndarray, ...]:
        """c_in, c_skip, c_out for y's noise levels (N,), as (N, 1, ..., 1)."""
        sigma = upcast(sigma).reshape((-1,) + (1,) * (images.ndim - 1))
        c_in = 1 / np.sqrt(np.square(sigma) + self.sigma_data**2)
        return c_in, np.square(self.sigma_data * c_in), self.sigma_data * sigma * c_in


def _launch(name: str, out: Array, arrays: tuple, numbers: tuple[float, ...], data: Data) -> None:
    """Launch a kernel of edm.cu, whose arguments are images `out`, other arrays, its own numbers, and `data`."""
    if not len(out):
        return
    n, size = len(out), out.size // len(out)
    vec = all(aligned(array, size) for array in (out, *arrays) if array is not None and array.shape == out.shape)
    args = (out, *arrays, *numbers, np.array(data, np.float32), np.int64(size))
    across = min(blocks(size, 256 * 16 // out.itemsize), MOST_ACROSS)
    launch("edm", name, (n, across), 256, args, T=out.dtype, VEC=int(vec))


class EDMMix(Function):
    """See `edm_mix`."""

    differentiable = False

    @staticmethod
    def forward_numpy(ctx, images, noise, draw, P_mean, P_std, c_noise_scale, data):
        log_sigma = (draw * P_std + P_mean).astype(compute_dtype(draw.dtype), copy=False)
        sigma = np.exp(log_sigma).reshape((-1,) + (1,) * (images.ndim - 1))
        c_in = data.coefficients(sigma, images)[0]
        y, z = data.standardised(images), upcast(noise)
        x = c_in * y + sigma * c_in * z
        target = sigma * c_in / data.sigma_data * y - data.sigma_data * c_in * z
        return downcast(x, images.dtype), downcast(target, images.dtype), log_sigma * c_noise_scale

    @staticmethod
    def forward_cuda(ctx, images, noise, draw, P_mean, P_std, c_noise_scale, data):
        x, target, c_noise = (empty(a.shape, a.dtype) for a in (images, images, draw))
        _launch("mix", x, (target, c_noise, images, noise, draw), (P_mean, P_std, c_noise_scale), data)
        return x, target, c_noise


class EDMInput(Function):
    """See `edm_input`."""

    @staticmethod
    def forward_numpy(ctx, x, sigma, c_noise_scale, data):
        ctx.data = data
        ctx.save(sigma)
        level = upcast(sigma) / data.std
        scaled = data.coefficients(level, x)[0] * data.standardised(x)
        return downcast(scaled, x.dtype), downcast(np.log(level) * c_noise_scale, sigma.dtype)

    @staticmethod
    def backward_numpy(ctx, dscaled, dc_noise, needs, into):
        if dscaled is None:
            return None, None
        c_in = ctx.data.coefficients(upcast(ctx.saved[0]) / ctx.data.std, dscaled)[0]
        return downcast(c_in / ctx.data.std * upcast(dscaled), dscaled.dtype), None

    @staticmethod
    def forward_cuda(ctx, x, sigma, c_noise_scale, data):
        ctx.data = data
        ctx.save(sigma)
        scaled, c_noise = empty(x.shape, x.dtype), empty(sigma.shape, sigma.dtype)
        _launch("input", scaled, (c_noise, x, sigma), (c_noise_scale,), data)
        return scaled, c_noise

    @staticmethod
    def backward_cuda(ctx, dscaled, dc_noise, needs, into):
        if dscaled is None:
            return None, None
        dx = empty(dscaled.shape, dscaled.dtype)
        _launch("input", dx, (None, dscaled, ctx.saved[0]), (0.0,), ctx.data._replace(mean=0.0))
        return dx, None


class EDMOutput(Function):
    """See `edm_output`."""

    @staticmethod
    def forward_numpy(ctx, x, out, sigma, data):
        ctx.data = data
        ctx.save(sigma)
        _, c_skip, c_out = data.coefficients(upcast(sigma) / data.std, x)
        denoised = data.mean + data.std * (c_skip * data.standardised(x) + c_out * upcast(out))
        return downcast(denoised, x.dtype)

    @staticmethod
    def backward_numpy(ctx, ddenoised, needs, into):
        _, c_skip, c_out = ctx.data.coefficients(upcast(ctx.saved[0]) / ctx.data.std, ddenoised)
        factors = c_skip, ctx.data.std * c_out
        return *(downcast(factor * upcast(ddenoised), ddenoised.dtype) for factor in factors), None

    @staticmethod
    def forward_cuda(ctx, x, out, sigma, data):
        ctx.data = data
        ctx.save(sigma)
        denoised = empty(x.shape, x.dtype)
        _launch("output", denoised, (x, out, sigma), (), data)
        return denoised

    @staticmethod
    def backward_cuda(ctx, ddenoised, needs, into):
        grads: list[Array | None] = [None, None, None]
        for i, places in enumerate([(ddenoised, None), (None, ddenoised)]):
            if needs[i]:
                grads[i] = empty(ddenoised.shape, ddenoised.dtype)
                _launch("output", grads[i], (*places, ctx.saved[0]), (), ctx.data._replace(mean=0.0))
        return tuple(grads)


def edm_mix(images: Tensor, noise: Tensor, draw: Tensor, P_mean: float, P_std: float, sigma_data: float,
            c_noise_scale: float = 1.0, data_mean: float = 0.0, data_std: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """The network's input c_in·(y + sigma·z), its target, and c_noise = c_noise_scale·log(sigma), float32 (N,).

    y = (images - data_mean) / data_std; images and noise z (N, ...) of one shape and dtype; log(sigma) = P_mean +
    P_std·draw, draw float32 (N,). The target is (y - c_skip·(y + sigma·z)) / c_out = c_in·(sigma·y / sigma_data -
    sigma_data·z), of unit variance. No gradients. Raises ValueError where shapes do not agree. EDM, arXiv 2206.00364,
    equation 8 and Table 1.
    """
    if images.shape != noise.shape or images.dtype != noise.dtype:
        raise ValueError(f"edm_mix: images {images.shape} {images.dtype} and noise {noise.shape} {noise.dtype} differ")
    require_floats("edm_mix", images, noise)
    draw = levels_of("edm_mix", images, draw)
    data = _data(sigma_data, data_mean, data_std)
    return EDMMix.apply(
        images, noise, draw, P_mean=float(P_mean), P_std=float(P_std), c_noise_scale=float(c_noise_scale), data=data
    )


def edm_input(x: Tensor, sigma: Tensor, sigma_data: float, c_noise_scale: float, data_mean: float = 0.0,
              data_std: float = 1.0) -> tuple[Tensor, Tensor]:
    """The network's input c_in·(x - data_mean) / data_std, like x (N, ...), and c_noise (N,), like sigma.

    The noise level of the standardised images is s = sigma / data_std, sigma float32 (N,): c_in = 1 / sqrt(s² +
    sigma_data²), c_noise = c_noise_scale·log(s). sigma gets no gradient. Raises ValueError where shapes do not agree.
    EDM, arXiv 2206.00364, Table 1.
    """
    require_floats("edm_input", x)
    sigma = levels_of("edm_input", x, sigma)
    return EDMInput.apply(x, sigma, c_noise_scale=float(c_noise_scale), data=_data(sigma_data, data_mean, data_std))


def edm_output(x: Tensor, out: Tensor, sigma: Tensor, sigma_data: float, data_mean: float = 0.0,
               data_std: float = 1.0) -> Tensor:
    """The estimate of the image, from x (N, ...) and the network's output of the same shape, in the wider dtype.

    data_mean + data_std·(c_skip·(x - data_mean) / data_std + c_out·out); with s as in `edm_input`, c_skip =
    sigma_data² / (s² + sigma_data²), c_out = s·sigma_data / sqrt(s² + sigma_data²). Raises ValueError where shapes do
    not agree. EDM, arXiv 2206.00364, equation 7 and Table 1.
    """
    if x.shape != out.shape:
        raise ValueError(f"edm_output: x {x.shape} and the network's output {out.shape} differ")
    require_floats("edm_output", x, out)
    sigma = levels_of("edm_output", x, sigma)
    dtype = result_dtype(x, out)  # a sampler's images may have another than the network's
    return EDMOutput.apply(astype(x, dtype), astype(out, dtype), sigma, data=_data(sigma_data, data_mean, data_std))


def _data(sigma_data: float, mean: float, std: float) -> Data:
    return Data(float(sigma_data), float(mean), float(std))


def levels_of(name: str, images: Tensor, levels: Tensor) -> Tensor:
    """One number for each image, in float32 unless float64: 16-bit samplers have 16-bit levels."""
    if levels.shape != images.shape[:1]:
        raise ValueError(f"{name}: images {images.shape} and their noise levels {levels.shape} do not agree")
    return as_wide(levels)[0]
