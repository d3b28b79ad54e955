"""Convolutions on Hopper of an upsampled input: read as it is, or upsampled first."""

import ml_dtypes
import numpy as np
import pytest

from cudiff.backend import bfloat16
from cudiff.cuda.kernels.convolution import sm90
from cudiff.cuda.kernels.convolution.problem import FPROP, Fusion, Image, Operands, Problem, Weight
from cudiff.cuda.kernels.convolution.table import CONVOLUTION, fprop
from cudiff.cuda.kernels.gemm.product import Epilogue
from cudiff.tensor import Tensor
from tests.check import relative_error, sums_of
from tests.ops.test_conv2d_sm90 import random_convolution


@pytest.mark.parametrize("images, size, channels, first", [
    (16, 32, 384, True), (16, 16, 576, True), (16, 8, 768, True), (32, 32, 64, False), (32, 32, 128, False),
    (1, 32, 128, False), (3, 24, 72, False),
])
def test_wide_images_are_upsampled_first(images, size, channels, first):
    """Their halo tiles, loaded row by row, take longer than the products."""
    x = Image((images, size, size, channels), bfloat16)
    out = x._replace(shape=(images, 2 * size, 2 * size, channels))
    problem = Problem(FPROP, x, Weight((channels, 3, 3, channels)), out, padding=(1, 1),
                      wanted=frozenset({Fusion.UPSAMPLE, Fusion.STATISTICS}))
    chosen = CONVOLUTION.select(problem, "sm_90a")
    assert chosen.row.name == "conv2d_sm90" and (Fusion.UPSAMPLE in chosen.left) == first


@pytest.mark.gpu
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_both_ways_agree_with_numpy(hopper, rng, monkeypatch, first, relu):
    monkeypatch.setattr(sm90, "_upsampling_gains", lambda problem: first)
    CONVOLUTION.forget()
    try:
        (x, weight, bias, emb, addend), (plain, expected) = random_convolution(
            rng, (3, 5, 7, 72), 40, (3, 3), ml_dtypes.bfloat16, False, upsample=True)
        expected = plain.clip(0) if relu else expected
        out = Tensor(np.full(addend.shape, np.nan, ml_dtypes.bfloat16), device="cuda").data
        given = Operands(x, weight, out, Epilogue(bias, emb, None if relu else addend))
        left = fprop(given, (1, 1), (1, 1), statistics=not relu, relu=relu, upsample=True)
    finally:
        CONVOLUTION.forget()
    got = Tensor(out).numpy()
    assert relative_error(got, expected) < 4e-3
    if not relu:
        assert np.allclose(sums_of(left)[..., 0], got.astype(np.float64).sum((1, 2)), rtol=1e-4, atol=1e-2)
