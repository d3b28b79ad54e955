import numpy as np
import pytest

from cudiff.cuda.device import asked_about
from cudiff.cuda.kernels.pool import _lanes
from cudiff.gradient import Slot
from cudiff.ops.conv2d import conv2d
from cudiff.ops.group_norm import group_norm
from cudiff.ops.pool import avg_pool2d, max_pool2d, upsample_nearest
from cudiff.tensor import Tensor
from tests.check import check_op, sums_of, torch

DTYPES = ("float32", "bfloat16", "float16")

# (shape, size, stride, padding): whole and cut windows, overlaps, gaps, padding, H != W, scalar and packed channels
CASES = [
    ((2, 4, 6, 8), 2, None, 0),
    ((1, 5, 7, 3), 2, None, 0),
    ((2, 6, 5, 16), 3, 2, 1),
    ((3, 7, 4, 5), 3, 1, 1),
    ((1, 8, 9, 8), 2, 3, 1),
    ((1, 2, 2, 1), 2, 1, 0),
    ((2, 16, 16, 32), 16, None, 0),
    ((1, 1, 1, 8), 1, None, 0),
]


RECTANGULAR = [  # (shape, size, stride, padding, ceil_mode)
    ((2, 7, 9, 8), (2, 3), None, 0, False), ((1, 6, 8, 3), (3, 1), (2, 1), (1, 0), False),
    ((2, 8, 5, 16), (2, 5), (1, 2), (0, 2), True), ((1, 7, 7, 8), 2, None, 0, True), ((2, 6, 8, 4), 3, 2, 1, True),
    ((1, 5, 6, 8), (3, 2), (4, 3), (1, 1), True), ((1, 4, 4, 8), 3, 2, 0, True), ((1, 2, 3, 8), 2, 3, 1, True),
]


@pytest.mark.parametrize("shape, size, stride, padding, ceil_mode", RECTANGULAR)
def test_windows_that_are_not_square_or_rounded_up(device, rng, shape, size, stride, padding, ceil_mode):
    x = rng.permutation(int(np.prod(shape))).reshape(shape) / 16.0
    for ours, theirs in ((max_pool2d, "max_pool2d"), (avg_pool2d, "avg_pool2d")):
        check_op(
            lambda x, ours=ours: ours(x, size, stride, padding, ceil_mode=ceil_mode), x, device=device, dtypes=DTYPES,
            torch_fn=channels_first(lambda x, theirs=theirs: getattr(torch.nn.functional, theirs)(
                x, size, stride, padding, ceil_mode=ceil_mode)),
        )


@pytest.mark.parametrize("extent, size, stride, padding, windows", [
    (5, 3, 2, 0, 2), (6, 3, 2, 0, 3), (7, 2, 2, 0, 4), (8, 2, 2, 0, 4), (4, 2, 3, 1, 2), (5, 2, 3, 1, 2),
    (7, 3, 2, 1, 4),
])
def test_how_many_windows_there_are_rounded_up(extent, size, stride, padding, windows):
    """By hand: 0..2, 2..4 of 5; 0..2, 2..4, 4..6 of 6; ...; of 5 with padding -1..0, 2..3, and none at 5, behind it."""
    x = Tensor(np.ones((1, extent, extent, 1)))
    assert max_pool2d(x, size, stride, padding, ceil_mode=True).shape == (1, windows, windows, 1)


def test_windows_that_are_none():
    x = Tensor(np.zeros((1, 8, 8, 1), np.float32))
    for size in ((2,), (2, 2, 2), 2.0, (2, "2")):
        with pytest.raises(ValueError, match=r"max_pool2d: size .* must be a whole number, or a tuple of two"):
            max_pool2d(x, size)
    with pytest.raises(ValueError, match=r"stride 1 or more.*; not 2, \(0, 1\), 0$"):
        avg_pool2d(x, 2, (0, 1))
    with pytest.raises(ValueError, match=r"smaller than the window of \(2, 9\)"):
        avg_pool2d(x, (2, 9))


def channels_first(fn):
    return lambda x: fn(x.movedim(-1, 1)).movedim(1, -1)


@pytest.mark.parametrize("shape, size, stride, padding", CASES)
def test_avg_pool2d(device, rng, shape, size, stride, padding):
    check_op(
        lambda x: avg_pool2d(x, size, stride, padding), rng.standard_normal(shape), device=device, dtypes=DTYPES,
        torch_fn=channels_first(lambda x: torch.nn.functional.avg_pool2d(x, size, stride, padding)),
    )


@pytest.mark.parametrize("shape, size, stride, padding", CASES)
def test_max_pool2d(device, rng, shape, size, stride, padding):
    x = rng.permutation(int(np.prod(shape))).reshape(shape) / 16.0  # no two equal within the step of the differences
    check_op(
        lambda x: max_pool2d(x, size, stride, padding), x, device=device, dtypes=DTYPES,
        torch_fn=channels_first(lambda x: torch.nn.functional.max_pool2d(x, size, stride, padding)),
    )


@pytest.mark.parametrize("shape, size, stride, padding", [case for case in CASES if case[1] < 16])
def test_max_pool2d_with_relu(device, rng, shape, size, stride, padding):
    count = int(np.prod(shape))
    x = (rng.permutation(count).reshape(shape) - count * 0.7 + 0.5) / 16.0
    check_op(
        lambda x: max_pool2d(x, size, stride, padding, relu=True), x, device=device, dtypes=DTYPES,
        torch_fn=channels_first(lambda x: torch.nn.functional.max_pool2d(x.relu(), size, stride, padding)),
    )
    with pytest.raises(ValueError, match="max_pool2d"):
        max_pool2d(Tensor(np.zeros((1, 16, 16, 1))), 16, relu=True)


def test_the_first_of_equal_elements_gets_the_gradient(device):
    for value in (3.0, -np.inf):
        x = Tensor(np.full((1, 4, 4, 2), value), dtype=np.float32, requires_grad=True, device=device)
        max_pool2d(x).sum().backward()
        expected = np.zeros((1, 4, 4, 2))
        expected[:, ::2, ::2] = 1
        np.testing.assert_array_equal(Tensor(x.grad).numpy(), expected)


def check_sums(statistics, dx):
    values = Tensor(dx).numpy().astype(np.float64)
    sums = Tensor(statistics.sums).numpy().astype(np.float64).sum(1)
    assert (np.abs(sums - values.sum((1, 2))) <= 1e-6 * np.abs(values).sum((1, 2))).all()


@pytest.mark.gpu
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("shape", [(2, 8, 6, 64), (3, 5, 7, 3)])
def test_max_pooling_leaves_the_sums_of_its_gradient(rng, shape, relu):
    x = Tensor(rng.standard_normal(shape), requires_grad=True, dtype=np.float32, device="cuda")
    out = max_pool2d(x, relu=relu)
    dout = Tensor(rng.standard_normal(out.shape), dtype=np.float32, device="cuda").data
    node, _ = out._source
    (dx,) = node.function.backward_cuda(node.ctx, dout, needs=(True,), into=[None])
    check_sums(node.ctx.din_statistics[0], dx)


@pytest.mark.parametrize("channels", [1, 8])
def test_the_first_of_equal_maxima_gets_the_gradient(device, channels):
    x = Tensor(np.zeros((1, 4, 4, channels), np.float32), requires_grad=True, device=device)
    out = max_pool2d(x, 3, 1, 1)
    out.backward(Tensor(np.ones(out.shape, np.float32), device=device).data)
    expected = [[4, 2, 2, 0], [2, 1, 1, 0], [2, 1, 1, 0], [0, 0, 0, 0]]
    for c in range(channels):
        np.testing.assert_array_equal(Tensor(x.grad).numpy()[0, :, :, c], expected)


def test_padding_never_wins(device):
    x = Tensor(np.full((1, 2, 2, 8), -3.0, np.float32), device=device)
    np.testing.assert_array_equal(max_pool2d(x, 2, 2, 1).numpy(), np.full((1, 2, 2, 8), -3.0))


@pytest.mark.parametrize("value", [np.int32(-7), np.uint8(3), np.bool_(False)], ids=lambda value: value.dtype.name)
def test_padding_never_wins_among_integers(value):
    x = np.full((1, 2, 2, 1), value)
    np.testing.assert_array_equal(max_pool2d(Tensor(x), 2, 2, 1).numpy(), x, strict=True)


@pytest.mark.parametrize("shape, factor", [((2, 3, 4, 8), 2), ((1, 1, 2, 3), 3), ((2, 5, 3, 1), 2), ((1, 2, 2, 4), 1)])
def test_upsample_nearest(device, rng, shape, factor):
    check_op(
        lambda x: upsample_nearest(x, factor), rng.standard_normal(shape), device=device, dtypes=DTYPES,
        torch_fn=channels_first(lambda x: torch.nn.functional.interpolate(x, scale_factor=factor)),
    )


@pytest.mark.parametrize("op", [max_pool2d, avg_pool2d, upsample_nearest])
@pytest.mark.parametrize("channels", [3, 8])
def test_gradient_is_added_to_what_is_there(device, rng, op, channels):
    x = Tensor(rng.standard_normal((2, 4, 4, channels)), requires_grad=True, dtype=np.float32, device=device)
    out = op(x)
    dout = Tensor(rng.standard_normal(out.shape), dtype=np.float32, device=device).data
    out.backward(dout)
    once = Tensor(x.grad).numpy().copy()
    op(x).backward(dout)
    np.testing.assert_allclose(Tensor(x.grad).numpy(), 2 * once, rtol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("op", [avg_pool2d, upsample_nearest])
@pytest.mark.parametrize("shape", [(2, 8, 6, 64), (3, 5, 7, 3), (1, 4, 4, 2064), (2, 6, 34, 72), (1, 3, 40, 70)])
def test_sums_travel_along(device, rng, op, shape):
    """Forward leaves what a norm of the result needs, backward the sums of dx with what it had before."""
    if device == "cpu":
        pytest.skip("only kernels leave sums")
    x = Tensor(rng.standard_normal(shape), requires_grad=True, dtype=np.float32, device=device)
    out = op(x)
    values, sums = out.numpy().astype(np.float64), sums_of(out.statistics)
    np.testing.assert_allclose(sums, np.stack([values.sum((1, 2)), (values**2).sum((1, 2))], -1), rtol=1e-4, atol=1e-4)
    before = Tensor(rng.standard_normal(shape), dtype=np.float32, device=device).data
    dout = Tensor(rng.standard_normal(out.shape), dtype=np.float32, device=device).data
    node, _ = out._source
    (dx,) = node.function.backward_cuda(node.ctx, dout, needs=(True,), into=[Slot(before)])
    assert dx is before
    check_sums(node.ctx.din_statistics[0], dx)


@pytest.mark.parametrize("rows, columns, packs, nbytes, lanes", [
    (32, 16, 144, 16, 16), (64, 32, 96, 16, 8), (16, 8, 192, 16, 32), (32, 20, 96, 16, 8), (8, 1, 300, 16, 256),
    (32, 16, 8, 16, 8), (32, 32, 5, 16, 5), (131, 2, 128, 16, 128), (131, 3, 128, 16, 80), (32, 32, 383, 2, 64),
    (197, 16, 144, 16, 16), (198, 16, 144, 16, 144), (256, 8, 96, 16, 96), (98, 16, 300, 16, 16),
    (99, 16, 300, 16, 256), (1, 1, 1, 4, 1),
])
def test_few_rows_of_windows_are_cut_along_the_channels(rows, columns, packs, nbytes, lanes):
    with asked_about("sm_90a"):
        assert _lanes(rows, columns, packs, nbytes) == lanes


@pytest.mark.parametrize("op", [avg_pool2d, upsample_nearest, lambda x: upsample_nearest(avg_pool2d(x))])
def test_a_norm_takes_the_sums_that_travel_along(device, rng, op):
    arrays = rng.standard_normal((2, 8, 6, 16)), rng.standard_normal(16), rng.standard_normal(16)
    # The result of pooling is rounded before the norm.
    check_op(lambda x, *affine: group_norm(op(x), *affine, num_groups=4), *arrays, device=device, fp32_inputs=(1, 2),
             tolerance=2)


def test_bad_windows():
    x = Tensor(np.zeros((1, 4, 4, 1)))
    for size, stride, padding in ((17, 1, 8), (2, 0, 0), (2, 1, 2), (5, 1, 0)):
        with pytest.raises(ValueError, match="avg_pool2d"):
            avg_pool2d(x, size, stride, padding)
    with pytest.raises(ValueError, match="upsample_nearest"):
        upsample_nearest(x, 0)


@pytest.mark.parametrize("two", [np.int64(2), [2, 2], (np.int32(2), 2)])
def test_numpys_integers_and_lists_are_pairs(two):
    x, weight = Tensor(np.arange(16.0).reshape(1, 4, 4, 1)), Tensor(np.ones((1, 1, 1, 1)))
    np.testing.assert_array_equal(max_pool2d(x, two, two).numpy(), max_pool2d(x, 2).numpy())
    np.testing.assert_array_equal(conv2d(x, weight, stride=two).numpy(), conv2d(x, weight, stride=2).numpy())
