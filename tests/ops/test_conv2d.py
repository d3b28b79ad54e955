import ml_dtypes
import numpy as np
import pytest

import cudiff
from cudiff.backend import bfloat16
from cudiff.cuda.device import current_device
from cudiff.cuda.kernels.convolution import table
from cudiff.cuda.kernels.convolution.problem import DGRAD, FPROP, Fusion, Image, Operands, Problem, Weight
from cudiff.cuda.kernels.gemm.product import TILES, plan
from cudiff.ops.conv2d import conv1d, conv2d, conv_transpose2d
from cudiff.precision import allow_tf32
from cudiff.tensor import Tensor
from tests.check import check_op, relative_error, torch
from tests.normed import NormedConvolution

# (N, H, W, C), (K, R, S), stride, padding
SHAPES = [
    ((1, 1, 1, 1), (1, 1, 1), 1, 0),
    ((2, 5, 7, 3), (7, 3, 3), 1, 1),
    ((1, 6, 4, 5), (1, 3, 3), 1, 1),
    ((3, 9, 8, 1), (5, 5, 3), 1, 2),
    ((2, 8, 9, 3), (4, 3, 2), 2, 1),
    ((2, 7, 7, 8), (8, 3, 3), 2, 1),
    ((1, 12, 10, 6), (9, 4, 4), (2, 3), (1, 0)),
    ((2, 6, 6, 4), (3, 1, 1), 1, 0),
    ((2, 6, 7, 4), (3, 1, 1), 2, 1),
    ((2, 8, 6, 16), (24, 2, 2), 2, 0),
    ((1, 9, 7, 5), (3, 2, 2), 2, 0),
    ((1, 3, 3, 2), (2, 3, 3), 1, 0),
    ((2, 4, 4, 2), (3, 1, 3), 1, (0, 1)),
    ((2, 8, 8, 64), (64, 3, 3), 1, 1),
    ((1, 9, 11, 72), (40, 3, 3), 1, 1),
    ((2, 6, 6, 16), (136, 3, 3), 1, 1),
    ((1, 16, 16, 3), (64, 3, 3), 1, 1),
    ((1, 16, 16, 64), (3, 3, 3), 1, 1),
    ((2, 16, 16, 24), (32, 3, 3), 2, 1),
    ((3, 20, 12, 128), (128, 1, 1), 1, 0),
]


def torch_conv2d(stride, padding, dilation=1, groups=1):
    def apply(x, weight, bias=None):
        x, weight = x.permute(0, 3, 1, 2), weight.permute(0, 3, 1, 2)
        out = torch.nn.functional.conv2d(x, weight, bias, stride, padding, dilation, groups)
        return out.permute(0, 2, 3, 1)

    return apply


@pytest.mark.parametrize("x, kernel, stride, padding", SHAPES, ids=str)
@pytest.mark.parametrize("with_bias", [True, False])
def test_conv2d(device, rng, x, kernel, stride, padding, with_bias):
    arrays = [rng.standard_normal(x), rng.standard_normal((*kernel, x[3]))]
    arrays.append(rng.standard_normal(kernel[0]) if with_bias else None)
    check_op(lambda *t: conv2d(*t, stride=stride, padding=padding), *arrays, device=device, fp32_inputs=(2,),
             torch_fn=torch_conv2d(stride, padding), dtypes=("float32", "bfloat16", "float16"))


# (N, H, W, C), (K, R, S), stride, padding, dilation, groups
GROUPED = [
    ((2, 6, 7, 8), (8, 3, 3), 1, 1, 1, 8),
    ((1, 7, 5, 3), (3, 2, 3), (2, 1), (0, 1), 1, 3),
    ((2, 9, 10, 40), (40, 3, 5), (1, 2), (2, 1), (2, 1), 40),
    ((1, 4, 3, 264), (264, 3, 3), 1, 1, 1, 264),
    ((1, 2, 38, 264), (264, 3, 3), 1, 1, 1, 264),
    ((1, 3, 5, 16), (16, 2, 7), (2, 1), (0, 5), (2, 1), 16),
    ((1, 12, 11, 4), (4, 9, 2), 1, (4, 0), 1, 4),
    ((2, 5, 6, 3), (6, 3, 3), 1, 1, 1, 3),
    ((2, 6, 5, 8), (12, 3, 2), (1, 2), 1, 1, 4),
    ((1, 8, 9, 5), (7, 3, 3), 1, 2, 2, 1),
    ((2, 9, 9, 6), (4, 2, 3), (2, 3), (1, 2), (3, 2), 2),
    ((1, 10, 10, 72), (136, 3, 3), 1, 1, 1, 2),
    ((2, 8, 7, 40), (24, 3, 3), 2, 2, 2, 1),
    ((1, 3, 5, 2), (2, 3, 3), 1, 2, 1, 2),
]


@pytest.mark.parametrize("hopper", [True, False])
@pytest.mark.parametrize("kernel, steps, stem", [
    ((3, 3), dict(groups=4), "conv2d_grouped"), ((3, 3), dict(groups=2), "conv2d_grouped"),
    *(((3, 3), dict(dilation=dilation, stride=2), "conv2d_grouped") for dilation in (2, (1, 2), (2, 1))),
    ((3, 3), dict(groups=64), "conv2d_depthwise"), ((8, 8), dict(groups=64), "conv2d_depthwise"),
    ((9, 8), dict(groups=64), "conv2d_grouped"), ((8, 9), dict(groups=64), "conv2d_grouped"),
])
def test_kernels_of_groups_and_dilation(host_of, hopper, kernel, steps, stem):
    host = host_of(hopper)
    weight = host.zeros((64, *kernel, 64 // steps.get("groups", 1)), np.float32)
    conv2d(Tensor(host.zeros((2, 16, 16, 64), np.float32)), Tensor(weight), padding=1, **steps)
    assert [name for name, _ in host.launches] == [stem]


@pytest.mark.parametrize("channels, groups", [(64, 1), (48, 3), (8, 4)])
def test_parts_of_a_weights_gradient_are_whole_steps(host_of, channels, groups):
    """Of the 16 pixels that conv2d_grouped.cu takes at a time; together they have every pixel, and none is empty."""
    host, parts = host_of(True), []
    host.watch = lambda launch: parts.append(launch) if launch.constants.get("PASS") == "WGRAD" else None
    weight = Tensor(host.zeros((channels, 3, 3, channels // groups), bfloat16), requires_grad=True)
    out = conv2d(Tensor(host.zeros((5, 37, 41, channels), bfloat16)), weight, None, (2, 1), 2, 2, groups)
    out.backward(host.zeros(out.shape, bfloat16))
    (launch,) = parts
    (_, count), pixels = launch.grid, launch.args[5]
    assert pixels % 16 == 0 and (count - 1) * pixels < 5 * 19 * 41 <= count * pixels and count > 1


@pytest.mark.parametrize("x, kernel, stride, padding, dilation, groups", GROUPED, ids=str)
@pytest.mark.parametrize("with_bias", [True, False])
def test_groups_and_dilation(device, rng, x, kernel, stride, padding, dilation, groups, with_bias):
    """Depthwise, of as many and of more outputs than channels, and of kernels too large for its own CUDA kernel."""
    arrays = [rng.standard_normal(x), rng.standard_normal((*kernel, x[3] // groups))]
    arrays.append(rng.standard_normal(kernel[0]) if with_bias else None)
    steps = dict(stride=stride, padding=padding, dilation=dilation, groups=groups)
    check_op(lambda *t: conv2d(*t, **steps), *arrays, device=device, fp32_inputs=(2,),
             torch_fn=torch_conv2d(stride, padding, dilation, groups), dtypes=("float32", "bfloat16", "float16"))


def image(*shape):
    return Image(shape, bfloat16)


NO, COPIED = (0, 0), "matmul, shape.copy"


@pytest.mark.parametrize("direction, x, kernel, out, stride, padding, wanted, row", [
    (DGRAD, (16, 8), (2, 3), (32, 24), (2, 3), NO, Fusion.BIAS, COPIED),
    (DGRAD, (32, 8), (1, 2), (32, 16), (1, 2), NO, Fusion.BIAS, COPIED),
    (DGRAD, (8, 16), (2, 1), (16, 16), (2, 1), NO, Fusion.BIAS, COPIED),
    (DGRAD, (16, 8), (2, 3), (32, 24), (2, 3), NO, Fusion.ADDEND, "conv2d"),
    (DGRAD, (16, 8), (2, 3), (32, 24), (2, 3), NO, Fusion.EMB, "conv2d"),
    (DGRAD, (16, 8), (2, 3), (33, 24), (2, 3), NO, Fusion.BIAS, "conv2d"),
    (DGRAD, (16, 8), (2, 3), (32, 25), (2, 3), NO, Fusion.BIAS, "conv2d"),
    (DGRAD, (2, 2), (3, 3), (6, 6), (2, 2), NO, Fusion.BIAS, "conv2d"),  # they overlap, and are as large together
    (DGRAD, (4, 4), (3, 3), (12, 12), (3, 3), (1, 1), Fusion.BIAS, "conv2d"),
    (DGRAD, (16, 8), (1, 1), (16, 8), (1, 1), NO, Fusion.BIAS, "matmul"),
    (DGRAD, (16, 8), (1, 1), (16, 8), (1, 1), NO, Fusion.NORM_BACKWARD, "conv2d"),
    (FPROP, (16, 8), (1, 1), (18, 10), (1, 1), (1, 1), Fusion.BIAS, "conv2d"),
    (FPROP, (16, 8), (1, 1), (8, 4), (2, 2), NO, Fusion.BIAS, "conv2d"),
    (FPROP, (16, 8), (3, 3), (14, 6), (1, 1), NO, Fusion.BIAS, "conv2d"),
])
def test_pixels_and_windows_side_by_side_are_rows_of_a_product(
    direction, x, kernel, out, stride, padding, wanted, row
):
    """But for what a product cannot add, or leave."""
    x, out, weight = image(2, *x, 64), image(2, *out, 64), Weight((64, *kernel, 64))
    problem = Problem(direction, x, weight, out, stride, padding, norm=(out,), wanted=frozenset({wanted}))
    assert table.CONVOLUTION.select(problem, "sm_80").row.name == row


@pytest.mark.parametrize("direction, sums", [(FPROP, Fusion.STATISTICS), (DGRAD, Fusion.NORM_BACKWARD)])
@pytest.mark.parametrize("shape, leaves", [
    ((40000, 8, 8, 64), True), ((2, 8, 8, 40000), True), ((1, 64, 32767, 64), True), ((1, 32767, 64, 64), True),
    ((1, 64, 32768, 64), False), ((1, 32768, 64, 64), False), ((2, 5, 7, 64), False),
])
def test_which_results_have_sums_left_for_a_norm(direction, sums, shape, leaves):
    """By conv2d.cu: of sides that 15 bits count, of any number of images and channels, and where tiles are of one."""
    out, one = image(*shape), image(*shape[:3], 64)
    weight = Weight((shape[3], 3, 3, 128) if direction == FPROP else (64, 3, 3, shape[3] + 64))
    problem = Problem(direction, one, weight, out, padding=(1, 1), x2=one, norm=(out, one),
                      wanted=frozenset({sums, Fusion.SECOND_SOURCE}))
    chosen = table.CONVOLUTION.select(problem, "sm_80")
    assert (chosen.row.name, chosen.left) == ("conv2d", set() if leaves else {sums})


@pytest.mark.parametrize("x, kernel, steps", [
    ((2, 9, 4), (6, 3), dict(padding=1)), ((1, 12, 3), (3, 4), dict(stride=2, padding=3, dilation=2, groups=3)),
    ((3, 5, 8), (4, 1), dict(stride=3)), ((2, 40, 6), (4, 5), dict(dilation=3, groups=2)),
    ((1, 40001, 2), (3, 5), dict(stride=3, padding=2, dilation=4)), ((1, 33000, 8), (8, 4), {}),
], ids=str)
def test_conv1d(device, rng, x, kernel, steps):
    channels = x[2] // steps.get("groups", 1)
    arrays = rng.standard_normal(x), rng.standard_normal((*kernel, channels)), rng.standard_normal(kernel[0])

    def reference(x, weight, bias):
        return torch.nn.functional.conv1d(x.movedim(2, 1), weight.movedim(2, 1), bias, **steps).movedim(1, 2)

    check_op(lambda *t: conv1d(*t, **steps), *arrays, device=device, fp32_inputs=(2,), torch_fn=reference,
             dtypes=("float32", "bfloat16", "float16"))


@pytest.mark.parametrize("shapes, steps, message", [
    (((1, 4, 4, 6), (4, 3, 3, 6)), dict(groups=2), r"does not fit weight \(4, 3, 3, 6\) \(K, R, S, C / 2\)"),
    (((1, 4, 4, 6), (5, 3, 3, 3)), dict(groups=2), "5 output channels do not divide into 2 groups"),
    (((1, 4, 4, 6), (4, 3, 3, 6)), dict(groups=0), "groups 0 must be a whole number of at least 1"),
    (((1, 4, 4, 6), (4, 3, 3, 6)), dict(dilation=0), "dilation 0 must be"),
    (((1, 4, 4, 6), (4, 3, 3, 6)), dict(dilation=(1, 2)), r"smaller than the kernel .* dilated by \(1, 2\)"),
])
def test_groups_and_dilations_that_are_none(shapes, steps, message):
    x, weight = (Tensor(np.ones(shape, np.float32)) for shape in shapes)
    with pytest.raises(ValueError, match=f"conv2d: .*{message}"):
        conv2d(x, weight, **steps)


def test_what_conv1d_does_not_take():
    x, weight = Tensor(np.ones((1, 4, 2), np.float32)), Tensor(np.ones((3, 5, 2), np.float32))
    with pytest.raises(ValueError, match=r"x of shape \(1, 4, 2\) padded by 0 is smaller than the kernel \(3, 5, 2\)$"):
        conv1d(x, weight)
    with pytest.raises(ValueError, match=r"padded by 2 is smaller than the kernel \(3, 5, 2\) dilated by 3$"):
        conv1d(x, weight, padding=2, dilation=3)
    with pytest.raises(ValueError, match=r"shape \(1, 4, 2\) \(N, L, C\) does not fit weight \(3, 5, 1\) \(K, S, C\)$"):
        conv1d(x, Tensor(np.ones((3, 5, 1), np.float32)))
    with pytest.raises(ValueError, match=r"conv1d: dilation 0 must be a whole number of at least 1$"):
        conv1d(x, weight, dilation=0)
    with pytest.raises(ValueError, match=r"conv1d: x has shape \(1, 4, 4, 2\)"):
        conv1d(Tensor(np.ones((1, 4, 4, 2), np.float32)), weight)
    with pytest.raises(ValueError, match="conv1d: stride"):
        conv1d(x, weight, stride=(1, 1), padding=2)


@pytest.mark.parametrize("x, kernel, stride, padding", [
    ((2, 3, 4, 5), (3, 3, 3), 2, 1), ((1, 4, 4, 8), (16, 4, 4), 2, 1), ((2, 5, 3, 1), (2, 2, 3), 1, 0),
    ((2, 6, 6, 64), (64, 3, 3), 1, 1), ((1, 2, 2, 3), (1, 2, 2), (3, 2), 0), ((2, 7, 7, 64), (64, 2, 2), 2, 0),
    ((3, 2, 5, 3), (2, 2, 3), (2, 3), 0), ((2, 14, 14, 128), (128, 2, 2), 2, 0),
], ids=str)
def test_conv_transpose2d(device, rng, x, kernel, stride, padding):
    outputs, rows, columns = kernel
    arrays = [rng.standard_normal(x), rng.standard_normal((x[3], rows, columns, outputs)), rng.standard_normal(outputs)]

    def reference(x, weight, bias):
        x, weight = x.permute(0, 3, 1, 2), weight.permute(0, 3, 1, 2)
        return torch.nn.functional.conv_transpose2d(x, weight, bias, stride, padding).permute(0, 2, 3, 1)

    check_op(lambda *t: conv_transpose2d(*t, stride=stride, padding=padding), *arrays, device=device,
             fp32_inputs=(2,), torch_fn=reference)


def test_images_that_need_several_blocks_of_patches(rng):
    arrays = [rng.standard_normal((5, 32, 30, 48)), rng.standard_normal((4, 3, 3, 48)), rng.standard_normal(4)]
    check_op(lambda *t: conv2d(*t, padding=1), *arrays, device="cpu", torch_fn=torch_conv2d(1, 1))


def test_gradients_add_to_those_there(device, rng):
    shapes = ((2, 6, 6, 16), (8, 3, 3, 16), (8,))
    tensors = [Tensor(rng.standard_normal(s).astype(np.float32), requires_grad=True, device=device) for s in shapes]
    dout = Tensor(rng.standard_normal((2, 6, 6, 8)).astype(np.float32), device=device).data
    conv2d(*tensors, padding=1).backward(dout)
    once = [Tensor(t.grad).numpy().copy() for t in tensors]
    conv2d(*tensors, padding=1).backward(dout)
    for t, grad in zip(tensors, once, strict=True):
        assert relative_error(Tensor(t.grad).numpy(), 2 * grad) < 1e-6


def test_a_tensor_used_twice_collects_both_gradients(device, rng):
    arrays = [rng.standard_normal((2, 5, 5, 8)), rng.standard_normal((8, 3, 3, 8)), rng.standard_normal((8, 1, 1, 8))]
    check_op(lambda x, a, b: conv2d(x, a, padding=1) + conv2d(x, b), *arrays, device=device, dtypes=("float32",))


def test_only_wanted_gradients_are_made(device, rng):
    x = Tensor(rng.standard_normal((1, 5, 5, 3)).astype(np.float32), device=device)
    weight = Tensor(rng.standard_normal((4, 3, 3, 3)).astype(np.float32), requires_grad=True, device=device)
    out = conv2d(x, weight, padding=1)
    out.backward(out.data)
    assert x.grad is None and weight.grad is not None


def test_parameters_have_float32_gradients(device, rng):
    x = Tensor(rng.standard_normal((2, 6, 6, 8)).astype(ml_dtypes.bfloat16), requires_grad=True, device=device)
    weight = Tensor(rng.standard_normal((8, 3, 3, 8)).astype(np.float32), requires_grad=True, device=device)
    out = conv2d(x, weight, padding=1)
    out.backward(out.data)
    assert out.dtype == x.dtype == x.grad.dtype and weight.grad.dtype == np.float32


@pytest.mark.parametrize("function", [conv2d, conv_transpose2d])
@pytest.mark.parametrize("steps, message", [
    (dict(stride=0), "stride 0 must be"), (dict(stride=(1, -1)), r"stride \(1, -1\) must be"),
    (dict(padding=-1), "padding -1 must be"), (dict(padding=(1, 1, 1)), r"padding \(1, 1, 1\) must be"),
    (dict(stride=1.5), "stride 1.5 must be a whole number of at least 1, or a tuple of two"),
])
def test_steps_that_are_none(device, function, steps, message):
    x, weight = (Tensor(np.ones(shape, np.float32), device=device) for shape in ((1, 4, 4, 2), (2, 3, 3, 2)))
    with pytest.raises(ValueError, match=message):
        function(x, weight, **steps)


def test_shapes_that_do_not_agree_are_refused(rng):
    x, weight = Tensor(rng.standard_normal((1, 4, 4, 3))), Tensor(rng.standard_normal((2, 3, 3, 4)))
    with pytest.raises(ValueError, match="does not fit weight"):
        conv2d(x, weight)
    with pytest.raises(ValueError, match="smaller than the kernel"):
        conv2d(Tensor(np.ones((1, 2, 2, 4))), weight)
    with pytest.raises(ValueError, match="bias"):
        conv2d(Tensor(np.ones((1, 4, 4, 4))), weight, Tensor(np.ones(3)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("groups, dilation", [(1, 1), (1, 2), (4, 1), (64, 1)])
def test_two_runs_are_bit_equal(rng, dtype, groups, dilation):
    results = []
    arrays = [rng.standard_normal(shape).astype(dtype) for shape in ((8, 32, 32, 64), (64, 3, 3, 64 // groups))]
    for _ in range(2):
        x, weight = (Tensor(a, requires_grad=True, device="cuda") for a in arrays)
        bias = Tensor(np.ones(64, np.float32), requires_grad=True, device="cuda")
        out = conv2d(x, weight, bias, padding=1, dilation=dilation, groups=groups)
        out.backward(out.data)
        results.append([out.numpy(), *(Tensor(t.grad).numpy() for t in (x, weight, bias))])
    for first, second in zip(*results, strict=True):
        assert np.array_equal(first.view(np.uint8), second.view(np.uint8))


@pytest.mark.gpu
def test_tf32_rounds_and_float32_does_not(rng):
    x, weight = rng.standard_normal((2, 16, 16, 128)), rng.standard_normal((64, 3, 3, 128))
    tensors = [Tensor(a.astype(np.float32), device="cuda") for a in (x, weight)]
    expected = conv2d(*(Tensor(t.numpy().astype(float)) for t in tensors), padding=1).numpy()
    assert relative_error(conv2d(*tensors, padding=1).numpy(), expected) < 1e-6
    with allow_tf32():
        error = relative_error(conv2d(*tensors, padding=1).numpy(), expected)
    assert error < 1e-3 and (error > 1e-5 or current_device().capability < 80)  # before sm_80 there is no tf32


@pytest.fixture
def only(monkeypatch, for_any_gpu):
    """only(tile, splits=1): all products are of that tile, so cut, by the kernels for any GPU."""
    plans = plan.plans

    def choose(tile, splits=1):
        for_any_gpu()
        monkeypatch.setattr(plan, "plans", lambda *problem: [p for p in plans(*problem) if p[:2] == (tile, splits)])
        plan.forget()

    yield choose
    plan.forget()


# dtype, tf32, and of what the result's relative error stays below
PRECISIONS = [
    (np.float32, False, 2e-6), (np.float32, True, 1e-3), (ml_dtypes.bfloat16, False, 4e-3), (np.float16, False, 6e-4)
]


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("size, sources, outputs, scaled, taps", [
    ((9, 8, 8), (128, 64), 40, True, 3), ((2, 32, 6), (64, 40), 40, False, 3), ((3, 16, 16), (72, 0), 40, True, 1),
    ((5, 8, 24), (24, 0), 40, False, 3), ((2, 16, 8), (40, 0), 3, False, 3), ((2, 8, 16), (64, 8), 5, True, 1),
], ids=str)
@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize("dtype, tf32, tolerance", PRECISIONS)
def test_gradient_to_a_norm(only, rng, tile, size, sources, outputs, scaled, taps, silu, dtype, tf32, tolerance):
    """Strips that fill an image, or a part; tiles that end beyond the channels or the last image; gradients that are
    read one by one, as of a U-Net's result."""
    large = tile.rows * tile.columns
    if (large > 128 * 64 and dtype == np.float32 and not tf32) or (large > 64 * 64 and outputs % 8):
        pytest.skip("this tile spills where operands are split or read one by one")
    only(tile)
    convolution = NormedConvolution(rng, size, sources, outputs, taps, dtype, scaled, silu)
    dout, weight, norm, out = convolution.on_gpu()
    with allow_tf32(tf32):
        statistics = table.dgrad(Operands(dout, weight, out.data, norm=norm), (1, 1), convolution.padding)
    strips = size[1] * size[2] // (tile.rows // tile.warps_m)
    assert statistics.sums.shape == (size[0], strips, sum(sources), 2)
    convolution.check(out, statistics, tolerance, noise=1e-5 if dtype == np.float32 and not tf32 else 3e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("taps", [1, 3])
@pytest.mark.parametrize("size, channels, splits", [
    ((2, 5, 7), (24, 0), 1), ((2, 8, 8), (20, 0), 1), ((2, 8, 8), (28, 4), 1), ((2, 8, 8), (24, 0), 2),
], ids=str)
def test_what_makes_no_gradient_to_a_norm(only, rng, size, channels, splits, taps):
    """Strips of more than one image, channels of which 16 bytes hold parts, a depth in parts: then this is the input's
    gradient."""
    only(TILES[3], splits)
    convolution = NormedConvolution(rng, size, channels, 512, taps, ml_dtypes.bfloat16, False)
    dout, weight, norm, out = convolution.on_gpu()
    assert table.dgrad(Operands(dout, weight, out.data, norm=norm), (1, 1), convolution.padding) is None
    assert relative_error(out.numpy(), convolution.dy) < 4e-3


def test_a_bias_of_another_length():
    x, weight, bias = (Tensor(np.ones(shape, np.float32)) for shape in ((1, 3, 3, 2), (2, 3, 3, 2), (3,)))
    for name in ("conv2d", "conv_transpose2d"):
        with pytest.raises(ValueError, match=f"{name}: the bias"):
            getattr(cudiff, name)(x, weight, bias)


def test_a_batch_without_images(device):
    x, weight, bias = (Tensor(np.ones(shape, np.float32), device=device, requires_grad=True)
                       for shape in ((0, 5, 5, 4), (8, 3, 3, 4), (8,)))
    out = conv2d(x, weight, bias)
    assert out.shape == (0, 3, 3, 8)
    out.backward(Tensor(np.zeros(out.shape, np.float32), device=device))
    assert x.grad.shape == x.shape and not Tensor(weight.grad).numpy().any() and not Tensor(bias.grad).numpy().any()
