"""A convolution whose input a group norm made: what its dgrad is to leave where that makes d_preact itself."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from cudiff import ops
from cudiff.cuda.kernels.convolution.problem import Norm
from cudiff.tensor import Tensor
from tests.check import relative_error

GROUPS = 4


class NormedConvolution:
    """size (N, H, W); `sources` the channels of the norm's inputs, 0 for none; weight (outputs, taps, taps, C).

    dout, weight and the norm's inputs are random, of `dtype`; `scaled`: the norm has a scale and a shift.
    """

    def __init__(self, rng, size, sources, outputs, taps, dtype, scaled, silu=True):
        n, channels = size[0], sum(sources)
        self.dtype, self.silu, self.padding = np.dtype(dtype), silu, (taps // 2, taps // 2)
        self.dout = rng.standard_normal((*size, outputs)).astype(dtype)
        self.weight = (rng.standard_normal((outputs, taps, taps, channels)) / 20).astype(dtype)
        self.x = [rng.standard_normal((*size, c)).astype(dtype) if c else None for c in sources]
        vectors = [rng.standard_normal(channels).astype(np.float32) for _ in range(2)]
        vectors += [rng.standard_normal((n, channels)).astype(np.float32) if scaled else None for _ in range(2)]
        vectors += [rng.standard_normal((n, GROUPS)).astype(np.float32), rng.random((n, GROUPS), np.float32)]
        self.vectors = vectors

        joined = np.concatenate([part.astype(np.float64) for part in self.x if part is not None], axis=3)
        leaf = Tensor(joined, requires_grad=True)
        weight, dout = self.weight.astype(np.float64), self.dout.astype(np.float64)
        ops.conv2d(leaf, Tensor(weight), padding=taps // 2).backward(dout)
        gamma, beta, scale, shift, mean, rstd = (None if v is None else v.astype(np.float64) for v in self.vectors)
        mean, rstd = (np.repeat(v, channels // GROUPS, 1)[:, None, None] for v in (mean, rstd))
        z = (joined - mean) * rstd * gamma + beta
        if scaled:
            z = z * (1 + scale[:, None, None]) + shift[:, None, None]
        sigmoid = 1 / (1 + np.exp(-z))
        self.dy = leaf.grad
        self.d_preact = self.dy * sigmoid * (1 + z * (1 - sigmoid)) if silu else self.dy
        self.factor = joined - mean if self.dtype == np.float32 else joined

    def on_gpu(self):
        """dout, weight and the norm, and NaN for d_preact."""
        dout, weight, *operands = (
            None if array is None else Tensor(array, device="cuda").data
            for array in (self.dout, self.weight, *self.x, *self.vectors)
        )
        d_preact = Tensor(np.full(self.d_preact.shape, np.nan, self.dtype), device="cuda")
        return dout, weight, Norm(self.silu, *operands), d_preact

    def check(self, d_preact, statistics, tolerance=None, noise=3e-3):
        """`noise`, of a sum of random signs, is the error of the slope by the hardware's tanh, or of the operands."""
        tolerance = tolerance or (4e-3 if self.dtype == ml_dtypes.bfloat16 else 6e-4)
        assert relative_error(d_preact.numpy(), self.d_preact) < tolerance
        sums = Tensor(statistics.sums).numpy().astype(np.float64).sum(1)
        for got, factor in ((sums[..., 0], 1), (sums[..., 1], self.factor)):
            allowed = noise * np.sqrt(((self.dy * factor) ** 2).sum((1, 2)))
            assert np.all(np.abs(got - (self.d_preact * factor).sum((1, 2))) < allowed)
