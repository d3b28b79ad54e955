"""Convolutions that run as others, of copies of their operands (cudiff/cuda/kernels/convolution/restated.py)."""

import numpy as np
import pytest

from cudiff.backend import bfloat16
from cudiff.cuda.kernels.convolution import bundles, grouped, restated
from cudiff.cuda.kernels.convolution.problem import DGRAD, FPROP, WGRAD, Fusion, Image, Problem, Weight
from cudiff.cuda.kernels.convolution.table import CONVOLUTION
from cudiff.ops.conv2d import conv1d, conv2d, conv_transpose2d
from cudiff.ops.norm_silu_conv2d import norm_silu_conv2d
from cudiff.tensor import Tensor
from tests.check import check_op
from tests.host import forget
from tests.ops.test_conv2d import torch_conv2d

LOW = np.dtype(bfloat16)
COPIES, CHANNELS = "shape.copy, undilated", "shape.fit, channels"

# (N, H, W, C), (K, R, S), padding, dilation
DILATED = [
    ((2, 8, 8, 64), (64, 3, 3), 2, 2),
    ((1, 9, 7, 16), (24, 3, 3), 2, 2),
    ((2, 7, 10, 8), (16, 3, 3), (3, 5), (2, 3)),
    ((1, 8, 9, 5), (7, 2, 4), 1, (1, 2)),
    ((1, 11, 5, 8), (8, 3, 1), (0, 1), (4, 3)),
    ((1, 3, 3, 8), (8, 3, 3), 8, 8),
    ((2, 12, 1, 3), (64, 3, 1), (2, 0), (2, 1)),
]


@pytest.fixture
def always(monkeypatch):
    """Convolutions of any size are restated: copies are taken to cost nothing."""
    forget()
    monkeypatch.setattr(grouped, "microseconds", lambda p: 1e9)
    for name in ("fit_microseconds", "move_microseconds"):
        monkeypatch.setattr(restated, name, lambda shape, dtype: -1e6)
    yield
    forget()


@pytest.mark.parametrize("x, kernel, padding, dilation", DILATED, ids=str)
@pytest.mark.parametrize("with_bias", [True, False])
def test_dilation(device, rng, always, x, kernel, padding, dilation, with_bias):
    arrays = [rng.standard_normal(x), rng.standard_normal((*kernel, x[3]))]
    arrays.append(rng.standard_normal(kernel[0]) if with_bias else None)
    steps = dict(padding=padding, dilation=dilation)
    check_op(lambda *t: conv2d(*t, **steps), *arrays, device=device, fp32_inputs=(2,),
             torch_fn=torch_conv2d(1, padding, dilation), dtypes=("float32", "bfloat16", "float16"))


def test_dilation_of_signals(device, rng, always):
    x, weight = rng.standard_normal((2, 37, 16)), rng.standard_normal((8, 3, 16))
    check_op(lambda *t: conv1d(*t, padding=4, dilation=4), x, weight, device=device)


def problem(direction, x, weight, padding=(2, 2), dilation=(2, 2), dtype=LOW, **more):
    axes = zip(x[1:3], padding, dilation, weight[1:3], strict=True)
    size = [length + 2 * p - d * (taps - 1) for length, p, d, taps in axes]
    x, out = Image(x, dtype), Image((x[0], *size, weight[0]), dtype)
    x, out = (out, x) if direction == DGRAD else (x, out)
    more.setdefault("products", 1)
    return Problem(direction, x, Weight(weight), out, padding=padding, dilation=dilation, **more)


@pytest.mark.parametrize("direction", [FPROP, DGRAD, WGRAD])
@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_90a"])
@pytest.mark.parametrize("images, side, channels, row", [
    (64, 32, 128, COPIES), (64, 33, 128, COPIES), (64, 31, 100, COPIES), (1, 128, 64, COPIES), (16, 63, 65, COPIES),
    (1, 8, 8, "conv2d_grouped"), (1, 3, 2, "conv2d_grouped"), (1, 70, 2, "conv2d_grouped"),
])
def test_which_dilated_convolutions(direction, architecture, images, side, channels, row):
    asked = problem(direction, (images, side, side, channels), (channels, 3, 3, channels))
    assert CONVOLUTION.select(asked, architecture).row.name == row


def test_other_strides_groups_and_long_sides_are_not_taken_apart():
    large = (64, 32, 32, 128)
    assert CONVOLUTION.select(problem(FPROP, large, (128, 3, 3, 128)), "sm_90a").row.name == COPIES
    for asked in (
        problem(FPROP, large, (128, 3, 3, 128), stride=(2, 1)),
        problem(WGRAD, (1, 2, 70000, 64), (64, 3, 3, 64)),
    ):
        assert CONVOLUTION.select(asked, "sm_90a").row.name == "conv2d_grouped"


# (N, H, W, C), (K, R, S), stride, padding
CHANNELED = [
    ((2, 8, 8, 100), (100, 3, 3), 1, 1),
    ((1, 9, 7, 12), (8, 3, 3), 1, 1),
    ((1, 9, 7, 8), (13, 3, 3), 1, 1),
    ((2, 6, 5, 10), (20, 2, 4), (2, 1), (0, 3)),
    ((1, 12, 10, 9), (9, 5, 3), 1, 0),
]


@pytest.mark.parametrize("x, kernel, stride, padding", CHANNELED, ids=str)
@pytest.mark.parametrize("with_bias", [True, False])
def test_channels(device, rng, always, x, kernel, stride, padding, with_bias):
    arrays = [rng.standard_normal(x), rng.standard_normal((*kernel, x[3]))]
    arrays.append(rng.standard_normal(kernel[0]) if with_bias else None)
    check_op(lambda *t: conv2d(*t, stride=stride, padding=padding), *arrays, device=device, fp32_inputs=(2,),
             torch_fn=torch_conv2d(stride, padding), dtypes=("bfloat16", "float16"))


@pytest.mark.parametrize("c, k, stride", [(12, 20, 2), (16, 9, 1), (10, 16, (2, 1)), (24, 3, 2)])
def test_transposed_convolutions(device, rng, always, c, k, stride):
    x, weight, bias = rng.standard_normal((2, 5, 4, c)), rng.standard_normal((c, 3, 2, k)), rng.standard_normal(k)
    check_op(lambda *t: conv_transpose2d(*t, stride=stride, padding=1), x, weight, bias, device=device,
             fp32_inputs=(2,), dtypes=("float32", "bfloat16"))


@pytest.mark.parametrize("side, height", [(3, 8), (1, 5)])  # of 5 rows: conv2d writes no statistics
@pytest.mark.parametrize("with_skip", [True, False])
@pytest.mark.parametrize("c, k", [(20, 12), (24, 12), (20, 16)])
def test_channels_of_fused_convolutions(device, rng, always, side, height, with_skip, c, k):
    """An embedding, a residual or a skip path are added, behind a norm."""
    shapes = (2, height, 8, c), (k, side, side, c), (2, height, 8, c if with_skip else k), (k,), (2, k), (c,), (c,)
    arrays = [rng.standard_normal(shape) for shape in (*shapes, *([(k, 1, 1, c)] if with_skip else []))]

    def unit(x, weight, residual, bias, emb, norm_weight, norm_bias, skip_weight=None):
        return norm_silu_conv2d(x, weight=weight, bias=bias, norm_weight=norm_weight, norm_bias=norm_bias, emb=emb,
                                residual=residual, skip_weight=skip_weight, num_groups=4)

    # The gradient passes through two roundings.
    check_op(unit, *arrays, device=device, fp32_inputs=(3, 4, 5, 6), dtypes=("bfloat16",), tolerance=2)


@pytest.mark.parametrize("direction", [FPROP, DGRAD, WGRAD])
@pytest.mark.parametrize("x, weight, on_hopper, on_older", [
    ((64, 32, 32, 100), (100, 3, 3, 100), CHANNELS, CHANNELS), ((64, 33, 31, 60), (60, 3, 3, 60), CHANNELS, CHANNELS),
    ((64, 32, 32, 104), (104, 3, 3, 104), "conv2d_sm90", "conv2d"), ((1, 8, 8, 5), (7, 3, 3, 5), "conv2d", "conv2d"),
    ((1, 1, 1, 9), (9, 3, 3, 9), "conv2d", "conv2d"), ((64, 64, 64, 7), (200, 3, 3, 7), "conv2d", "conv2d"),
    ((4, 33, 33, 12), (12, 3, 3, 12), "conv2d", None),
])
def test_which_channels(direction, x, weight, on_hopper, on_older):
    asked = problem(direction, x, weight, (1, 1), (1, 1))
    names = [CONVOLUTION.select(asked, architecture).row.name for architecture in ("sm_90a", "sm_80")]
    if direction == WGRAD:  # Hopper's own takes any number of channels
        on_hopper = "conv2d_wgrad_sm90"
    assert names[0].startswith(on_hopper) and (on_older is None or names[1] == on_older)


@pytest.mark.parametrize("wanted", [Fusion.SECOND_SOURCE, Fusion.UPSAMPLE, Fusion.CAST])
def test_channels_of_other_fusions_are_left(wanted):
    asked = problem(FPROP, (64, 32, 32, 100), (100, 3, 3, 100), (1, 1), (1, 1), wanted=frozenset({wanted}))
    if wanted == Fusion.SECOND_SOURCE:
        asked = asked._replace(x=Image((64, 32, 32, 50), LOW), x2=Image((64, 32, 32, 50), LOW))
    assert not CONVOLUTION.select(asked, "sm_90a").row.name.startswith("shape.")


# (N, H, W, C), (K, R, S), stride, padding, groups
BUNDLED = [
    ((1, 9, 7, 12), (15, 3, 3), 1, 1, 3),
    ((2, 8, 8, 64), (64, 3, 3), 1, 1, 8),
    ((1, 9, 7, 48), (24, 3, 3), 1, 1, 3),
    ((2, 5, 8, 16), (80, 1, 1), 1, 0, 8),
    ((3, 9, 8, 64), (128, 3, 3), 2, 1, 4),
    ((1, 6, 5, 24), (72, 2, 3), 1, (1, 0), 3),
    ((1, 4, 6, 128), (128, 3, 3), 1, 1, 2),
]


@pytest.mark.parametrize("x, kernel, stride, padding, groups", BUNDLED, ids=str)
@pytest.mark.parametrize("with_bias", [True, False])
def test_groups(device, rng, always, x, kernel, stride, padding, groups, with_bias):
    arrays = [rng.standard_normal(x), rng.standard_normal((*kernel, x[3] // groups))]
    arrays.append(rng.standard_normal(kernel[0]) if with_bias else None)
    steps = dict(stride=stride, padding=padding, groups=groups)
    check_op(lambda *t: conv2d(*t, **steps), *arrays, device=device, fp32_inputs=(2,),
             torch_fn=torch_conv2d(stride, padding, 1, groups), dtypes=("float32", "bfloat16", "float16"))


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [(48, 3, 3), (48, 1, 1)], ids=str)
def test_bundles_that_are_channels_of_images(hopper, rng, always, monkeypatch, kernel):
    """One group each, whose pixels lie apart."""
    ways = bundles._ways
    monkeypatch.setattr(bundles, "_ways", lambda p: ways(p)[:1])
    arrays = rng.standard_normal((2, 4, 6, 48)), rng.standard_normal((*kernel, 24)), rng.standard_normal(48)
    check_op(lambda *t: conv2d(*t, padding=kernel[1] // 2, groups=2), *arrays, device="cuda", fp32_inputs=(2,),
             dtypes=("bfloat16",))


def test_groups_with_dilation(device, rng, always):
    x, weight = rng.standard_normal((2, 6, 9, 32)), rng.standard_normal((16, 3, 3, 8))
    check_op(lambda *t: conv2d(*t, padding=2, dilation=(2, 1), groups=4), x, weight, device=device,
             torch_fn=torch_conv2d(1, 2, (2, 1), 4))


VIEWS, COPIED = "conv2d_sm90, gemm_sm90, conv2d_wgrad_sm90, of bundles", "shape.copy, bundles"


@pytest.mark.parametrize("direction", [FPROP, DGRAD, WGRAD])
@pytest.mark.parametrize("images, side, channels, groups, bundle", [
    (64, 32, 256, 32, 8), (64, 33, 256, 32, 8), (64, 56, 128, 32, 16), (64, 32, 256, 4, 1), (64, 32, 256, 2, 1),
    (64, 32, 128, 64, 32), (1, 3, 16, 2, None), (1, 6, 16, 4, None), (64, 32, 100, 2, 0), (64, 32, 33, 3, 0),
])
def test_which_groups(direction, images, side, channels, groups, bundle):
    asked = problem(direction, (images, side, side, channels), (channels, 3, 3, channels // groups), (1, 1), (1, 1),
                    groups=groups)
    on_hopper, on_older = (CONVOLUTION.select(asked, name) for name in ("sm_90a", "sm_80"))
    expected = ["conv2d_grouped"] * 2 if bundle is None else [COPIED if bundle == 0 else VIEWS, COPIED]
    assert [on_hopper.row.name, on_older.row.name] == expected
    assert not bundle or on_hopper.offer.plan.groups == bundle


def test_float32_and_dilated_groups_are_copied():
    x, weight = (64, 32, 32, 256), (256, 3, 3, 8)
    for more, row in (
        (dict(dtype=np.dtype(np.float32)), COPIED), (dict(dtype=np.dtype(np.float32), products=3), COPIED),
        (dict(dilation=(2, 1)), COPIED), (dict(dilation=(2, 1), stride=(1, 2)), "conv2d_grouped"),
    ):
        asked = problem(FPROP, x, weight, groups=32, **{"padding": (1, 1), "dilation": (1, 1), **more})
        assert CONVOLUTION.select(asked, "sm_90a").row.name == row


def test_weights_of_bundles_have_one_launch(host_of):
    host = host_of(True)
    x = Tensor(host.zeros((64, 32, 32, 256), bfloat16))
    weight = Tensor(host.zeros((256, 3, 3, 8), np.float32), requires_grad=True)
    out = conv2d(x, weight, padding=1, groups=32)
    host.launches.clear()
    out.backward(host.zeros(out.shape, bfloat16))
    assert [name for name, _ in host.launches].count("conv2d_wgrad_sm90") == 1


# (N, H, W, C), (K, R, S), stride, padding
FOLDED = [
    ((2, 12, 10, 3), (16, 7, 7), 2, 3),
    ((1, 9, 8, 1), (9, 3, 2), (2, 3), (1, 0)),
    ((2, 16, 16, 3), (24, 4, 4), 4, 0),
    ((1, 9, 9, 3), (8, 2, 2), 4, 0),
    ((1, 6, 7, 2), (64, 1, 5), (1, 2), (2, 1)),
]


@pytest.mark.parametrize("x, kernel, stride, padding", FOLDED, ids=str)
@pytest.mark.parametrize("with_bias", [True, False])
def test_strides_from_few_channels(device, rng, always, x, kernel, stride, padding, with_bias):
    arrays = [rng.standard_normal(x), rng.standard_normal((*kernel, x[3]))]
    arrays.append(rng.standard_normal(kernel[0]) if with_bias else None)
    check_op(lambda *t: conv2d(*t, stride=stride, padding=padding), *arrays, device=device, fp32_inputs=(2,),
             torch_fn=torch_conv2d(stride, padding), dtypes=("float32", "bfloat16", "float16"))


def strided(direction, x, outputs, kernel, stride, padding, dtype=LOW):
    out = (x[1] + 2 * padding - kernel) // stride + 1
    weight = Weight((outputs, kernel, kernel, x[3]))
    x, out = Image(x, dtype), Image((x[0], out, out, outputs), dtype)
    x, out = (out, x) if direction == DGRAD else (x, out)
    return Problem(direction, x, weight, out, (stride,) * 2, (padding,) * 2, 1 if dtype == LOW else 3)


@pytest.mark.parametrize("direction", [FPROP, DGRAD, WGRAD])
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("x, outputs, kernel, stride, padding, folds", [
    ((64, 224, 224, 3), 64, 7, 2, 3, True), ((64, 223, 223, 3), 64, 7, 2, 3, True),
    ((64, 224, 224, 1), 64, 7, 2, 3, True), ((64, 224, 224, 3), 768, 16, 16, 0, True),
    ((64, 224, 224, 8), 64, 7, 2, 3, False), ((64, 224, 224, 3), 64, 7, 1, 3, False),
    ((1, 5, 5, 3), 8, 3, 2, 1, False),
])
def test_which_strides(direction, architecture, x, outputs, kernel, stride, padding, folds):
    asked = strided(direction, x, outputs, kernel, stride, padding)
    if direction == DGRAD and kernel == stride:  # without overlap: windows are copied once
        folds = False
    assert (CONVOLUTION.select(asked, architecture).row.name == "shape.copy, folded") == folds


def test_strides_that_leave_pixels_out_are_not_folded_for_their_gradient():
    asked = strided(DGRAD, (64, 225, 225, 3), 64, 2, 4, 0)
    assert CONVOLUTION.select(asked, "sm_90a").row.name == "conv2d"
    whole = strided(DGRAD, (64, 224, 224, 3), 64, 7, 2, 3, np.dtype(np.float32))
    assert CONVOLUTION.select(whole, "sm_90a").row.name == "shape.copy, folded"
