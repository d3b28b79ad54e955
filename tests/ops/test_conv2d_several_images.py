"""Convolutions on Hopper whose output tiles have several small images."""

from functools import partial

import ml_dtypes
import numpy as np
import pytest

from cudiff import ops
from cudiff.cuda.kernels.convolution import plans_sm90
from cudiff.cuda.kernels.convolution.problem import DGRAD, FPROP, Fusion, Operands, Skip
from cudiff.cuda.kernels.gemm.product import Epilogue
from cudiff.tensor import Tensor
from tests.check import relative_error, sums_of
from tests.normed import NormedConvolution
from tests.ops.test_conv2d_sm90 import TOLERANCES, convolve, random_convolution

# (N, H, W, C), K, (R, S): whole tiles and images that are missing in the last, rows to spare, narrow images
CASES = [
    ((4, 8, 8, 72), 72, (3, 3)), ((3, 8, 8, 136), 40, (3, 3)), ((7, 7, 7, 64), 136, (3, 3)),
    ((5, 4, 4, 200), 64, (3, 3)), ((11, 5, 5, 72), 72, (3, 3)), ((5, 3, 6, 64), 8, (3, 5)), ((2, 1, 1, 8), 8, (3, 3)),
    ((5, 8, 8, 72), 72, (1, 1)), ((4, 5, 3, 24), 72, (1, 1)),
    ((3, 15, 8, 64), 64, (3, 3)),
]


def plans_where(chosen, shape, outputs, kernel, itemsize, skip=0):
    """The plans for which chosen(plan), of this GPU, and of three multiprocessors: a block has several tiles."""
    found = []
    for count in (plans_sm90.multiprocessors(), 3):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plans_sm90, "multiprocessors", lambda count=count: count)
            found += filter(chosen, plans_sm90.plans(shape, outputs, kernel, itemsize, skip, False))
    assert found
    return found


several = partial(plans_where, lambda plan: plan.images > 1)


def poisoned(like):
    return Tensor(np.full(like.shape, np.nan, Tensor(like).dtype), device="cuda").data


def check_epilogue(rng, plans, shape, outputs, kernel, transposed, dtype):
    """By all of plans(shape, outputs, kernel, itemsize), beside NumPy: with an embedding for each image, and an addend;
    and each image's statistics."""
    operands, (_, expected) = random_convolution(rng, shape, outputs, kernel, dtype, transposed)
    x, weight, bias, emb, addend = operands
    asked = (DGRAD, []) if transposed else (FPROP, [Fusion.STATISTICS])
    for plan in plans(shape, outputs, kernel, x.itemsize):
        out = poisoned(addend)
        left = convolve(Operands(x, weight, out, Epilogue(bias, emb, addend)), plan, *asked[1], direction=asked[0])
        got = Tensor(out).numpy()
        assert relative_error(got, expected) < TOLERANCES[dtype][0]
        if not transposed:
            rounded, sums = got.astype(np.float64), sums_of(left)
            assert np.allclose(sums[..., 0], rounded.sum((1, 2)), rtol=1e-4, atol=1e-3 * np.sqrt(shape[1] * shape[2]))
            assert relative_error(sums[..., 1], (rounded**2).sum((1, 2))) < 1e-5


def check_skip_path(rng, plans, size):
    """Of one source, and of two."""
    shape, outputs, dtype = (*size, 72), 72, ml_dtypes.bfloat16
    (x, weight, bias, _, out), _ = random_convolution(rng, shape, outputs, (3, 3), dtype, False)
    for channels in ((40,), (64, 24)):
        sources = [rng.standard_normal((*size, count)).astype(dtype) for count in channels]
        matrix = rng.standard_normal((outputs, 1, 1, sum(channels))).astype(dtype)
        expected = ops.conv2d(*(Tensor(Tensor(array).numpy().astype(np.float64)) for array in (x, weight)), padding=1)
        expected = expected.numpy() + Tensor(bias).numpy()
        path = np.concatenate(sources, -1).astype(np.float64) @ matrix[:, 0, 0].astype(np.float64).T
        on_gpu = [Tensor(array, device="cuda").data for array in (*sources, matrix)]
        skip = Skip(on_gpu[0], on_gpu[1] if len(channels) == 2 else None, on_gpu[-1], None)
        for plan in plans(shape, outputs, (3, 3), 2, sum(channels)):
            result = poisoned(out)
            convolve(Operands(x, weight, result, Epilogue(bias), skip=skip), plan, Fusion.STATISTICS)
            assert relative_error(Tensor(result).numpy(), expected + path) < 4e-3


def check_norms_backward(rng, plans, sizes, taps, silu, dtype):
    """Each image has its own affine maps, and its own sums."""
    for size in sizes:
        case = NormedConvolution(rng, size, (64, 72), 72, taps, dtype, True, silu)
        dout, weight, norm, out = case.on_gpu()
        for plan in plans(dout.shape, 136, (taps, taps), 2):
            out.data.fill(np.nan)
            case.check(out, convolve(Operands(dout, weight, out.data, norm=norm), plan, direction=DGRAD))


def check_two_sources_and_relu(rng, plans, size):
    shape, outputs, dtype = (*size, 136), 72, ml_dtypes.bfloat16
    (x, weight, bias, emb, out), (expected, _) = random_convolution(rng, shape, outputs, (3, 3), dtype, False)
    joined = Tensor(x).numpy()
    first, second = (Tensor(np.ascontiguousarray(part), device="cuda").data for part in np.split(joined, [64], axis=-1))
    for plan in plans(shape, outputs, (3, 3), 2):
        result = poisoned(out)
        convolve(Operands(first, weight, result, Epilogue(bias, emb), second), plan)
        assert relative_error(Tensor(result).numpy(), expected) < 4e-3
        result = poisoned(out)
        convolve(Operands(x, weight, result, Epilogue(bias, emb)), plan, Fusion.RELU)
        assert relative_error(Tensor(result).numpy(), expected.clip(0)) < 4e-3


def test_the_smallest_tile_that_images_fit():
    """Two images of 8 rows have a row of zeros between them: 17 rows."""
    for shape, taps, expected in (
        ((9, 8, 8), 3, {2: 136, 3: 208}), ((9, 7, 7), 3, {2: 128, 3: 192}), ((9, 8, 8), 1, {2: 128, 3: 192}),
        ((2, 4, 4), 3, {2: 96}), ((9, 4, 4), 3, {2: 96, 3: 112, 4: 160}), ((9, 5, 5), 3, {2: 96, 3: 136, 4: 192}),
        ((9, 6, 6), 3, {2: 112, 3: 160}), ((9, 5, 5), 1, {2: 96, 3: 128, 4: 160}),
        ((1, 8, 8), 3, {}), ((9, 8, 9), 3, {}), ((9, 15, 8), 3, {2: 256}), ((9, 16, 8), 3, {}),
    ):
        plans = plans_sm90.plans((*shape, 64), 64, (taps, taps), 2, 0, False)
        found = {(plan.images, plan.pixels) for plan in plans if plan.images > 1}
        assert found == set(expected.items())
    assert all(plan.images == 1 for plan in plans_sm90.plans((9, 8, 8, 64), 64, (3, 3), 2, 0, True))


@pytest.mark.parametrize("size", [8, 7, 3])
def test_each_plan_has_a_choice_of_its_own(size):
    """One image of 7 x 7 and two have tiles of 128 pixels; of 3 x 3, one and two have tiles of 64."""
    plans = plans_sm90.plans((32, size, size, 512), 512, (3, 3), 2, 0, False)
    assert len({tuple(plan.choice) for plan in plans}) == len(plans)
    assert {plan.images for plan in plans if plan.together} == ({1, 2, 3, 4} if size == 3 else {1, 2, 3})


@pytest.mark.parametrize("images, size, channels, outputs, taken, measured", [
    (32, 8, 768, 768, 3, 31.2), (32, 8, 1536, 768, 3, 57.0), (32, 8, 576, 768, 3, 24.8), (16, 8, 768, 768, 2, 20.4),
    (16, 8, 1536, 768, 2, 33.2), (64, 8, 512, 512, 2, 27.0), (40, 8, 320, 320, 2, 11.0), (128, 8, 256, 256, 2, 16.0),
    (256, 7, 128, 128, 2, 9.6), (20, 7, 512, 512, 2, 14.0), (64, 6, 384, 384, 3, 14.5), (32, 8, 256, 256, 1, 7.9),
    (2, 8, 1536, 1536, 1, 20.6), (128, 4, 256, 256, 4, 11.1), (64, 4, 512, 512, 4, 17.6), (256, 4, 256, 128, 4, 11.0),
    (128, 2, 256, 256, 4, 8.6), (100, 5, 320, 320, 4, 14.4), (132, 4, 128, 192, 3, 6.5),
])
def test_the_rule_takes_them_where_they_were_faster(images, size, channels, outputs, taken, measured):
    """Microseconds on an H200: docs/kernel-notes.md. Of two images the weights come from memory."""
    problem = (images, size, size, channels), outputs, (3, 3), 2, 0, False
    chosen, = plans_sm90.plan.by_rule(*problem)
    assert chosen.images == taken
    assert abs(plans_sm90.plan.estimate(*problem) / measured - 1) < 0.08


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCES, ids=["bf16", "fp16", "tf32"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape, outputs, kernel", CASES, ids=str)
def test_against_numpy(hopper, rng, shape, outputs, kernel, transposed, dtype):
    check_epilogue(rng, several, shape, outputs, kernel, transposed, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("images", [3, 4, 7])
@pytest.mark.parametrize("size", [8, 7, 4])
def test_a_skip_path(hopper, rng, images, size):
    """The rows between images hold what was there before."""
    check_skip_path(rng, several, (images, size, size))


@pytest.mark.gpu
@pytest.mark.parametrize("taps, silu", [(3, True), (1, True), (1, False)])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16], ids=["bf16", "fp16"])
def test_a_norm_s_backward(hopper, rng, taps, silu, dtype):
    check_norms_backward(rng, several, ((4, 8, 8), (5, 7, 7), (7, 4, 4), (9, 5, 5)), taps, silu, dtype)


@pytest.mark.gpu
def test_two_sources_and_relu(hopper, rng):
    check_two_sources_and_relu(rng, several, (3, 8, 8))
