"""Convolutions on Hopper whose output tiles, or steps, have whole rows of an image."""

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
from tests.ops.test_conv2d_several_images import poisoned
from tests.ops.test_conv2d_sm90 import TOLERANCES, convolve, random_convolution

# (N, H, W, C), K, (R, S): one tile an image and several, the last with fewer rows, more zeros between rows, none
CASES = [
    ((3, 14, 14, 72), 72, (3, 3)), ((2, 28, 28, 8), 136, (3, 3)), ((5, 10, 10, 136), 64, (3, 3)),
    ((2, 5, 9, 200), 8, (3, 3)), ((1, 13, 33, 24), 72, (3, 3)), ((1, 3, 127, 16), 64, (3, 3)),
    ((1, 7, 219, 8), 8, (3, 3)), ((2, 6, 11, 24), 72, (3, 5)), ((1, 9, 15, 8), 64, (1, 7)), ((1, 9, 9, 40), 64, (1, 3)),
    ((3, 14, 14, 72), 72, (1, 1)), ((1, 9, 9, 24), 8, (1, 1)), ((2, 1, 9, 8), 8, (3, 3)),
]


def of_whole_rows(shape, outputs, kernel, itemsize, skip=0):
    """The plans of whole rows, of this GPU, and of three multiprocessors: a block has several tiles."""
    found = []
    for count in (plans_sm90.multiprocessors(), 3):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plans_sm90, "multiprocessors", lambda count=count: count)
            plans = plans_sm90.plans(shape, outputs, kernel, itemsize, skip, False)
            found += [plan for plan in plans if plan.whole_rows]
    assert found
    return found


@pytest.mark.parametrize("size, kernel, expected", [
    ((28, 28), (3, 3), {208: 7, 192: 6, 160: 5, 128: 4, 96: 3, 64: 2}),
    ((14, 14), (3, 3), {216: 14, 112: 7, 96: 5, 64: 4}), ((14, 14), (1, 1), {208: 14, 112: 7, 96: 5, 64: 4}),
    ((9, 60), (3, 3), {192: 3, 128: 2, 64: 1}), ((9, 256), (3, 3), {}), ((9, 7), (3, 3), {}), ((9, 255), (3, 5), {}),
])
def test_the_smallest_tile_for_each_number_of_tiles(size, kernel, expected):
    plans = plans_sm90.plans((256, *size, 64), 64, kernel, 2, 0, False)
    assert {plan.tile.pixels: plan.rows for plan in plans if plan.whole_rows} == expected


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCES, ids=["bf16", "fp16", "tf32"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape, outputs, kernel", CASES, ids=str)
def test_against_numpy(hopper, rng, shape, outputs, kernel, transposed, dtype):
    """With an embedding for each image, and an addend; and each image's statistics."""
    operands, (_, expected) = random_convolution(rng, shape, outputs, kernel, dtype, transposed)
    x, weight, bias, emb, addend = operands
    asked = (DGRAD, []) if transposed else (FPROP, [Fusion.STATISTICS])
    for plan in of_whole_rows(shape, outputs, kernel, x.itemsize):
        out = poisoned(addend)
        left = convolve(Operands(x, weight, out, Epilogue(bias, emb, addend)), plan, *asked[1], direction=asked[0])
        got = Tensor(out).numpy()
        assert relative_error(got, expected) < TOLERANCES[dtype][0]
        if not transposed:
            rounded, sums = got.astype(np.float64), sums_of(left)
            assert np.allclose(sums[..., 0], rounded.sum((1, 2)), rtol=1e-4, atol=1e-3 * np.sqrt(shape[1] * shape[2]))
            assert relative_error(sums[..., 1], (rounded**2).sum((1, 2))) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(3, 14, 14), (2, 9, 27), (1, 30, 10)], ids=str)
def test_a_skip_path(hopper, rng, size):
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
        for plan in of_whole_rows(shape, outputs, (3, 3), 2, sum(channels)):
            result = poisoned(out)
            convolve(Operands(x, weight, result, Epilogue(bias), skip=skip), plan, Fusion.STATISTICS)
            assert relative_error(Tensor(result).numpy(), expected + path) < 4e-3


@pytest.mark.gpu
@pytest.mark.parametrize("taps, silu", [(3, True), (1, True), (1, False)])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16], ids=["bf16", "fp16"])
def test_a_norm_s_backward(hopper, rng, taps, silu, dtype):
    for size in ((3, 14, 14), (2, 7, 9), (1, 28, 28)):
        case = NormedConvolution(rng, size, (64, 72), 72, taps, dtype, True, silu)
        dout, weight, norm, out = case.on_gpu()
        for plan in of_whole_rows(dout.shape, 136, (taps, taps), 2):
            out.data.fill(np.nan)
            case.check(out, convolve(Operands(dout, weight, out.data, norm=norm), plan, direction=DGRAD))


@pytest.mark.gpu
def test_two_sources_and_relu(hopper, rng):
    shape, outputs, dtype = (3, 14, 9, 136), 72, ml_dtypes.bfloat16
    (x, weight, bias, emb, out), (expected, _) = random_convolution(rng, shape, outputs, (3, 3), dtype, False)
    joined = Tensor(x).numpy()
    first, second = (Tensor(np.ascontiguousarray(part), device="cuda").data for part in np.split(joined, [64], axis=-1))
    for plan in of_whole_rows(shape, outputs, (3, 3), 2):
        result = poisoned(out)
        convolve(Operands(first, weight, result, Epilogue(bias, emb), second), plan)
        assert relative_error(Tensor(result).numpy(), expected) < 4e-3
        result = poisoned(out)
        convolve(Operands(x, weight, result, Epilogue(bias, emb)), plan, Fusion.RELU)
        assert relative_error(Tensor(result).numpy(), expected.clip(0)) < 4e-3
