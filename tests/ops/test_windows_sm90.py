"""Hopper's convolutions as products of matrices: which they are, and their results with every plan."""

import ml_dtypes
import numpy as np
import pytest

from cudiff import Tensor
from cudiff.cuda import tiles
from cudiff.cuda.kernels.convolution import windows_sm90
from cudiff.cuda.kernels.convolution.problem import (
    DGRAD,
    FPROP,
    WGRAD,
    Fusion,
    Image,
    Operands,
    Problem,
    Weight,
)
from cudiff.cuda.kernels.convolution.table import CONVOLUTION
from cudiff.cuda.kernels.gemm import sm90 as gemm
from cudiff.cuda.kernels.gemm.plans_sm90 import plans
from cudiff.cuda.kernels.gemm.product import Epilogue
from cudiff.cuda.kernels.gemm.sm90 import whole_channels
from cudiff.cuda.select import Offer
from cudiff.ops.conv2d import dgrad_numpy, fprop_numpy, wgrad_numpy
from tests.check import problem_of, relative_error

BF16 = np.dtype(ml_dtypes.bfloat16)
NORMED = frozenset({Fusion.NORM_BACKWARD})
SUMMED = frozenset({Fusion.STATISTICS})


def convolution(direction, images, inputs, outputs, taps, **changes):
    """The problem of a convolution of images (N, H, W) by so many taps a side."""
    x, out = (outputs, inputs) if direction == DGRAD else (inputs, outputs)
    if Fusion.NORM_BACKWARD in changes.get("wanted", ()):
        changes["norm"] = (Image((*images, out), BF16),)
    return Problem(direction, Image((*images, x), BF16), Weight((outputs, taps, taps, inputs)),
                   Image((*images, out), BF16), padding=(taps // 2, taps // 2))._replace(**changes)


@pytest.mark.parametrize("problem, row", [
    (convolution(FPROP, (32, 8, 8), 1536, 768, 3, wanted=SUMMED), "conv2d_sm90"),
    (convolution(DGRAD, (32, 8, 8), 768, 768, 3, wanted=NORMED), "conv2d_sm90"),
    (convolution(FPROP, (128, 4, 4), 256, 256, 3), "conv2d_sm90"),
    (convolution(DGRAD, (256, 4, 4), 256, 128, 3), "gemm_sm90"),
    (convolution(FPROP, (32, 32, 32), 384, 1152, 1), "gemm_sm90"),
    (convolution(DGRAD, (32, 32, 32), 384, 1152, 1, wanted=NORMED), "gemm_sm90"),
    (convolution(FPROP, (32, 64, 64), 192, 192, 3, wanted=SUMMED), "conv2d_sm90"),
    (convolution(DGRAD, (32, 32, 32), 384, 384, 3, wanted=NORMED), "conv2d_sm90"),
    (convolution(FPROP, (32, 8, 8), 768, 768, 3, wanted=frozenset({Fusion.RELU})), "conv2d_sm90"),
    (convolution(FPROP, (32, 8, 8), 768, 768, 3, stride=(2, 2), out=Image((32, 4, 4, 768), BF16)), "gemm_sm90"),
    (convolution(DGRAD, (64, 32, 32), 128, 128, 3, stride=(2, 2), x=Image((64, 16, 16, 128), BF16)), "gemm_sm90"),
    (convolution(DGRAD, (64, 32, 32), 128, 128, 1, stride=(2, 2), x=Image((64, 16, 16, 128), BF16)), "conv2d"),
    (convolution(FPROP, (64, 32, 32), 128, 128, 3, padding=(0, 0), out=Image((64, 30, 30, 128), BF16)), "gemm_sm90"),
    (convolution(FPROP, (256, 28, 28), 64, 64, 3, stride=(2, 2), out=Image((256, 14, 14, 64), BF16), wanted=SUMMED),
     "gemm_sm90"),
    (convolution(FPROP, (8, 224, 224), 64, 64, 7, stride=(2, 2), out=Image((8, 112, 112, 64), BF16)), "gemm_sm90"),
    (convolution(WGRAD, (256, 14, 14), 128, 128, 3, stride=(2, 2), out=Image((256, 7, 7, 128), BF16)), "gemm_sm90"),
    (convolution(WGRAD, (256, 14, 14), 128, 128, 3, stride=(2, 2), out=Image((256, 7, 7, 128), BF16),
                 weight=Weight((128, 3, 3, 128), contiguous=False)), "conv2d"),
    (convolution(WGRAD, (256, 14, 14), 128, 128, 3), "conv2d_wgrad_sm90, conv2d_wgrad_tf32_sm90"),
    (convolution(WGRAD, (32, 32, 32), 64, 64, 5), "gemm_sm90"),
    (convolution(WGRAD, (64, 32, 32), 256, 256, 3, stride=(2, 2), out=Image((64, 16, 16, 256), BF16)), "gemm_sm90"),
    (convolution(FPROP, (256, 28, 28), 48, 48, 3, stride=(2, 2), out=Image((256, 14, 14, 48), BF16)), "conv2d"),
    (convolution(FPROP, (64, 300, 300), 64, 64, 3, stride=(9, 9), out=Image((64, 34, 34, 64), BF16)), "conv2d"),
])
def test_it_takes_strides_one_tap_and_small_images(problem, row):
    """As measured on an H200."""
    chosen = CONVOLUTION.select(problem, "sm_90a")
    assert chosen.row.name == row
    if row == "gemm_sm90":
        assert chosen.left == problem.wanted & (SUMMED | NORMED)
    assert CONVOLUTION.select(problem, "sm_80").row.name in ("conv2d", "matmul")


def test_conv2d_leaves_only_statistics_that_it_cannot_write():
    """Of 14 x 14 pixels a warp's rows are of two images."""
    for side, writes in ((16, True), (14, False)):
        asked = convolution(FPROP, (64, 2 * side, 2 * side), 64, 64, 3, stride=(2, 2),
                            out=Image((64, side, side, 64), BF16))
        without, summed = (windows_sm90.otherwise(asked._replace(wanted=wanted)) for wanted in (frozenset(), SUMMED))
        assert (summed == without) == writes


def on_gpu(array):
    return None if array is None else Tensor(array, device="cuda").data


def run(direction, x, weight, out, plan, x2=None, stride=(1, 1), padding=None, in_place=False, **epilogue):
    """`out`, and in dgrad x2, as float64. in_place: what is added lies there."""
    terms = {name: on_gpu(array) for name, array in epilogue.items()}
    given = Operands(on_gpu(x), on_gpu(weight), on_gpu(out), Epilogue(**terms), on_gpu(x2))
    if in_place:
        given = given._replace(epilogue=given.epilogue._replace(addend=given.out))
    problem = problem_of(direction, given, stride, padding or (weight.shape[1] // 2, weight.shape[2] // 2))
    windows_sm90.run(given, Offer(plan=[(part, windows_sm90._product(problem, part), plan)
                                           for part in windows_sm90.parts_of(problem)]), problem)
    return [Tensor(array).numpy().astype(float) for array in (given.out, given.x2) if array is not None]


@pytest.mark.gpu
@pytest.mark.parametrize("images", [(5, 7, 7), (9, 4, 4), (3, 8, 8), (2, 5, 11), (1, 14, 14), (200, 1, 1)], ids=str)
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_every_plan_of_windows(hopper, rng, images, dtype):
    """Tiles that end within an image, channels that end within a step; bias, embedding and addend; twice the same."""
    inputs, outputs, taps = 72, 136, (3, 3)
    x = rng.standard_normal((*images, inputs)).astype(dtype)
    weight = rng.standard_normal((outputs, *taps, inputs)).astype(dtype)
    bias, emb = (rng.standard_normal(shape).astype(np.float32) for shape in ((outputs,), (images[0], outputs)))
    addend = rng.standard_normal((*images, outputs)).astype(dtype)
    expected = fprop_numpy(x.astype(float), weight.astype(float), (1, 1), (1, 1))
    rows = x[..., 0].size
    for plan in plans(rows, outputs, 9 * 128, True):
        found = [run(FPROP, x, weight, np.full_like(addend, np.nan), plan, bias=bias)[0] for _ in range(2)]
        assert relative_error(found[0], expected + bias) < 1e-2, plan
        assert found[0].tobytes() == found[1].tobytes(), plan
        found = run(FPROP, x, weight, np.full_like(addend, np.nan), plan, bias=bias, emb=emb, addend=addend)
        assert relative_error(found[0], expected + bias + emb[:, None, None] + addend) < 1e-2, plan
    dout = rng.standard_normal((*images, outputs)).astype(dtype)
    expected = dgrad_numpy(dout.astype(float), weight.astype(float), images[1:], (1, 1), (1, 1))
    for plan in plans(rows, inputs, 9 * 192, True):
        assert relative_error(run(DGRAD, dout, weight, np.full_like(x, np.nan), plan)[0], expected) < 1e-2, plan


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [(1, 1), (3, 3), (1, 5)], ids=str)
@pytest.mark.parametrize("split", [64, 128])
def test_two_sources(hopper, rng, kernel, split):
    """The input's channels lie in two images, and so does its gradient."""
    images, inputs, outputs, padding = (3, 6, 10), 200, 72, (kernel[0] // 2, kernel[1] // 2)
    x = rng.standard_normal((*images, inputs)).astype(BF16)
    weight = rng.standard_normal((outputs, *kernel, inputs)).astype(BF16)
    dout = rng.standard_normal((*images, outputs)).astype(BF16)
    first, second = (np.ascontiguousarray(part) for part in np.split(x, [split], axis=3))
    expected = fprop_numpy(x.astype(float), weight.astype(float), (1, 1), padding)
    taps = kernel[0] * kernel[1]
    for plan in plans(180, outputs, taps * (256 if taps > 1 else inputs), True):
        found, _ = run(FPROP, first, weight, np.full_like(dout, np.nan), plan, x2=second)
        assert relative_error(found, expected) < 1e-2, plan
    expected = dgrad_numpy(dout.astype(float), weight.astype(float), images[1:], (1, 1), padding)
    for plan in plans(180, inputs, taps * (128 if taps > 1 else outputs), True):
        poisoned = [np.full_like(part, np.nan) for part in (first, second)]
        found = run(DGRAD, dout, weight, poisoned[0], plan, x2=poisoned[1])
        assert relative_error(np.concatenate(found, axis=3), expected) < 1e-2, plan


STRIDED = [
    ((3, 8, 8), (3, 3), (2, 2), (1, 1)), ((2, 7, 11), (3, 3), (2, 2), (1, 1)), ((2, 9, 6), (4, 4), (2, 2), (1, 1)),
    ((3, 6, 5), (3, 3), (1, 1), (0, 0)), ((2, 10, 7), (5, 3), (2, 1), (2, 2)), ((1, 16, 13), (3, 4), (3, 4), (0, 0)),
    ((5, 1, 4), (3, 2), (2, 2), (1, 0)), ((1, 20, 20), (7, 7), (8, 5), (3, 6)), ((40, 3, 3), (2, 2), (2, 2), (1, 1)),
]


@pytest.mark.gpu
@pytest.mark.parametrize("images, kernel, stride, padding", STRIDED, ids=str)
def test_strides_and_paddings(hopper, rng, images, kernel, stride, padding):
    """Of fprop, and of dgrad where every pixel is under a tap: with a bias and an embedding, and added in place."""
    inputs, outputs = 72, 40
    x = rng.standard_normal((*images, inputs)).astype(BF16)
    weight = rng.standard_normal((outputs, *kernel, inputs)).astype(BF16)
    bias, emb = (rng.standard_normal(shape).astype(np.float32) for shape in ((outputs,), (images[0], outputs)))
    expected = fprop_numpy(x.astype(float), weight.astype(float), stride, padding)
    same = dict(stride=stride, padding=padding)
    dout = rng.standard_normal(expected.shape).astype(BF16)
    for plan in plans(dout[..., 0].size, outputs, 128, True):
        found, = run(FPROP, x, weight, np.full_like(dout, np.nan), plan, bias=bias, emb=emb, **same)
        assert relative_error(found, expected + bias + emb[:, None, None]) < 1e-2, plan
        found, = run(FPROP, x, weight, dout, plan, in_place=True, **same)
        assert relative_error(found, expected + dout) < 1e-2, plan
    if any(taps < step for taps, step in zip(kernel, stride, strict=True)):
        return
    expected = dgrad_numpy(dout.astype(float), weight.astype(float), images[1:], stride, padding)
    for plan in plans(x[..., 0].size, inputs, 64, True):
        bias = rng.standard_normal(inputs).astype(np.float32)
        found, = run(DGRAD, dout, weight, np.full_like(x, np.nan), plan, bias=bias, **same)
        assert relative_error(found, expected + bias) < 1e-2, plan
        found, = run(DGRAD, dout, weight, x, plan, in_place=True, **same)
        assert relative_error(found, expected + x) < 1e-2, plan


@pytest.mark.gpu
@pytest.mark.parametrize("inputs, outputs", [(72, 40), (64, 200)])
@pytest.mark.parametrize("images, kernel, stride, padding", [*STRIDED, ((5, 29, 30), (3, 3), (2, 2), (1, 1))], ids=str)
def test_weight_gradients(hopper, monkeypatch, rng, images, kernel, stride, padding, inputs, outputs):
    """By every plan, of few blocks too; overwritten, and added to. The last one's depth is split."""
    x = rng.standard_normal((*images, inputs)).astype(BF16)
    size = [(length + 2 * before - taps) // step + 1
            for length, before, taps, step in zip(images[1:], padding, kernel, stride, strict=True)]
    dout = rng.standard_normal((images[0], *size, outputs)).astype(BF16)
    expected = wgrad_numpy(x.astype(float), dout.astype(float), kernel, stride, padding)
    before = rng.standard_normal(expected.shape).astype(np.float32)
    found = {}
    for plan in plans(outputs, whole_channels(kernel, inputs), dout[..., 0].size, False, 1, True):
        for add, count in ((False, 132), (False, 2), (True, 132)):
            monkeypatch.setattr(gemm, "multiprocessors", lambda count=count: count)
            weight = on_gpu(before if add else np.full_like(before, np.nan))
            given = Operands(on_gpu(x), weight, on_gpu(dout), add=add)
            problem = problem_of(WGRAD, given, stride, padding)
            part, = windows_sm90.parts_of(problem)
            added_to = []
            with tiles.watched(lambda planner, asked, launch, to, leaves, told=added_to: told.extend(to)):
                windows_sm90.run(given, Offer(plan=[(part, windows_sm90._product(problem, part), plan)]), problem)
            assert len(added_to) == add
            found[add, count] = Tensor(weight).numpy()
        assert relative_error(found[False, 132], expected) < 1e-4, plan
        assert relative_error(found[True, 132], expected + before) < 1e-4, plan
        assert found[False, 132].tobytes() == found[False, 2].tobytes(), plan
