"""Convolutions on Hopper whose output tiles have whole rows of an image."""

from functools import partial

import ml_dtypes
import numpy as np
import pytest

from cudiff.cuda.kernels.convolution import plans_sm90
from tests.ops.test_conv2d_several_images import (
    check_epilogue,
    check_norms_backward,
    check_skip_path,
    check_two_sources_and_relu,
    plans_where,
)
from tests.ops.test_conv2d_sm90 import TOLERANCES

# (N, H, W, C), K, (R, S): one tile an image and several, the last with fewer rows, more zeros between rows, none
CASES = [
    ((3, 14, 14, 72), 72, (3, 3)), ((2, 28, 28, 8), 136, (3, 3)), ((5, 10, 10, 136), 64, (3, 3)),
    ((2, 5, 9, 200), 8, (3, 3)), ((1, 13, 33, 24), 72, (3, 3)), ((1, 3, 127, 16), 64, (3, 3)),
    ((1, 7, 219, 8), 8, (3, 3)), ((2, 6, 11, 24), 72, (3, 5)), ((1, 9, 15, 8), 64, (1, 7)), ((1, 9, 9, 40), 64, (1, 3)),
    ((3, 14, 14, 72), 72, (1, 1)), ((1, 9, 9, 24), 8, (1, 1)), ((2, 1, 9, 8), 8, (3, 3)),
]


of_whole_rows = partial(plans_where, lambda plan: plan.whole_rows)


@pytest.mark.parametrize("size, kernel, expected", [
    ((28, 28), (3, 3), {208: 7, 192: 6, 160: 5, 128: 4, 96: 3, 64: 2}),
    ((14, 14), (3, 3), {216: 14, 112: 7, 96: 5, 64: 4}), ((14, 14), (1, 1), {208: 14, 112: 7, 96: 5, 64: 4}),
    ((9, 60), (3, 3), {192: 3, 128: 2, 64: 1}), ((9, 256), (3, 3), {}), ((9, 7), (3, 3), {}), ((9, 255), (3, 5), {}),
])
def test_the_smallest_tile_for_each_number_of_tiles(size, kernel, expected):
    plans = plans_sm90.plans((256, *size, 64), 64, kernel, 2, 0, False)
    assert {plan.pixels: plan.rows for plan in plans if plan.whole_rows} == expected


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCES, ids=["bf16", "fp16", "tf32"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape, outputs, kernel", CASES, ids=str)
def test_against_numpy(hopper, rng, shape, outputs, kernel, transposed, dtype):
    check_epilogue(rng, of_whole_rows, shape, outputs, kernel, transposed, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(3, 14, 14), (2, 9, 27), (1, 30, 10)], ids=str)
def test_a_skip_path(hopper, rng, size):
    check_skip_path(rng, of_whole_rows, size)


@pytest.mark.gpu
@pytest.mark.parametrize("taps, silu", [(3, True), (1, True), (1, False)])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16], ids=["bf16", "fp16"])
def test_a_norm_s_backward(hopper, rng, taps, silu, dtype):
    check_norms_backward(rng, of_whole_rows, ((3, 14, 14), (2, 7, 9), (1, 28, 28)), taps, silu, dtype)


@pytest.mark.gpu
def test_two_sources_and_relu(hopper, rng):
    check_two_sources_and_relu(rng, of_whole_rows, (3, 14, 9))
