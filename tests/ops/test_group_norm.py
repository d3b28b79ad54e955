import itertools

import numpy as np
import pytest

from cudiff.backend import bfloat16
from cudiff.cuda.kernels.norm import portable, table
from cudiff.cuda.kernels.norm.problem import kernel_constants
from cudiff.cuda.select import current_target
from cudiff.function import Function
from cudiff.gradient import Slot, State
from cudiff.ops.batch_norm import batch_norm
from cudiff.ops.conv2d import conv2d
from cudiff.ops.group_norm import group_norm
from cudiff.ops.pool import avg_pool2d, upsample_nearest
from cudiff.precision import allow_tf32
from cudiff.statistics import ChannelStatistics, Kind
from cudiff.tensor import Tensor
from tests.check import check_op, relative_error, torch

# (shape of x, channels of x2, groups): groups of 1, 2, 3, 10, 12 and 14 channels, groups that straddle the two
# sources, one pixel, one image, H != W, more channel packs than threads, more channels than shared memory holds, and
# large groups of many tiles, whose sums a launch of its own adds up.
CASES = [
    ((2, 4, 4, 32), 0, 16),
    ((1, 5, 3, 6), 0, 2),
    ((3, 1, 1, 8), 0, 2),
    ((2, 7), 0, 1),
    ((1, 3, 5, 24), 16, 4),
    ((2, 3, 2, 10), 5, 5),
    ((2, 6, 5, 48), 64, 8),
    ((1, 2, 3, 300), 20, 32),
    ((1, 33, 17, 8), 0, 8),
    ((2, 1, 2, 16384), 0, 32),
    ((1, 24, 20, 512), 64, 2),
]


def inputs(rng, shape, channels2, modulated):
    n, channels = shape[0], shape[-1] + channels2
    x2 = rng.standard_normal((*shape[:-1], channels2)) if channels2 else None
    scale, shift = (rng.standard_normal((n, channels)) * 0.5 for _ in range(2)) if modulated else (None, None)
    return (rng.standard_normal(shape) * 2 + 0.5, x2, 1 + 0.3 * rng.standard_normal(channels),
            rng.standard_normal(channels), scale, shift)


def torch_group_norm(x, x2, weight, bias, scale, shift, num_groups, silu):
    h = x if x2 is None else torch.cat([x, x2], -1)
    h = torch.nn.functional.group_norm(h.movedim(-1, 1), num_groups, weight, bias, 1e-5).movedim(1, -1)
    if scale is not None:
        middle = (len(x), *(1,) * (x.ndim - 2), -1)
        h = h * (1 + scale.reshape(middle)) + shift.reshape(middle)
    return torch.nn.functional.silu(h) if silu else h


@pytest.mark.parametrize("silu, modulated", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("shape, channels2, num_groups", CASES)
def test_group_norm(device, rng, shape, channels2, num_groups, silu, modulated):
    check_op(
        lambda x, x2, w, b, scale, shift: group_norm(x, w, b, num_groups, 1e-5, silu, scale, shift, x2),
        *inputs(rng, shape, channels2, modulated),
        device=device,
        torch_fn=lambda *tensors: torch_group_norm(*tensors, num_groups, silu),
        dtypes=("float32", "bfloat16", "float16"),
        fp32_inputs=(2, 3, 4, 5),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("shape, channels2, num_groups", [*CASES, ((2, 9, 7, 132), 0, 4)])
def test_group_norm_by_the_kernels_for_every_gpu(for_any_gpu, rng, shape, channels2, num_groups):
    """Packs of channels that do not divide a warp; of the last shape a chunk that ends beyond the last channel."""
    for_any_gpu()
    check_op(
        lambda x, x2, w, b, scale, shift: group_norm(x, w, b, num_groups, 1e-5, True, scale, shift, x2),
        *inputs(rng, shape, channels2, True), device="cuda", dtypes=("float32", "bfloat16"), fp32_inputs=(2, 3, 4, 5),
    )


@pytest.mark.parametrize("shape, num_groups", [((2, 6, 5, 48), 8), ((1, 5, 3, 6), 2), ((2, 7), 1)])
def test_a_gradient_of_two_terms(device, rng, monkeypatch, shape, num_groups):
    """On CUDA the norm's backward adds both: what the product left, and the dout of the sum that it is a term of."""
    shared, init = [], Slot.__init__

    def watched(slot, array, state=State.HOLDS, pending=None):
        init(slot, array, state, pending)
        if state is State.SHARED:
            shared.append(slot)

    monkeypatch.setattr(Slot, "__init__", watched)

    def block(x, weight, bias):
        x = x * 1.0
        return group_norm(x, weight, bias, num_groups, silu=True) + x + x * 2.0

    x, _, weight, bias, _, _ = inputs(rng, shape, 0, False)
    check_op(block, x, weight, bias, device=device, dtypes=("float32", "bfloat16", "float16"), fp32_inputs=(1, 2),
             tolerance=2)  # three terms
    assert bool(shared) == (device == "cuda") and all(slot.pending is not None for slot in shared)


@pytest.mark.parametrize("scale_only", [True, False])
def test_scale_or_shift_alone(device, rng, scale_only):
    x, _, weight, bias, scale, shift = inputs(rng, (2, 3, 3, 8), 0, True)
    check_op(
        lambda x, w, b, m: group_norm(x, w, b, 4, scale=m if scale_only else None, shift=None if scale_only else m),
        x, weight, bias, scale if scale_only else shift, device=device, fp32_inputs=(1, 2, 3),
    )


@pytest.mark.parametrize("corner, tolerance", [(100, 2e-5), (0, 3e-4)])
def test_large_mean(device, rng, corner, tolerance):
    """Also where the element that statistics are taken around is far from it."""
    x = (100 + rng.standard_normal((2, 64, 64, 16))).astype(np.float32)
    x[:, 0, 0, ::4] = corner
    weight, bias = np.ones(16), np.zeros(16)
    expected = group_norm(Tensor(x.astype(np.float64)), Tensor(weight, dtype=np.float64), Tensor(bias), 4).numpy()
    out = group_norm(*(Tensor(a.astype(np.float32), device=device) for a in (x, weight, bias)), 4).numpy()
    assert relative_error(out, expected) < tolerance


def test_silu_of_a_large_negative_argument_is_zero(device):
    x, weight, bias = (
        Tensor(np.array(values, np.float32), device=device) for values in ([[[[-1]], [[1]]]], [200], [0])
    )
    out = group_norm(x, weight, bias, 1, silu=True)
    np.testing.assert_allclose(out.numpy().ravel(), [0, 200], atol=2e-3)


@pytest.mark.parametrize("pixels", [(3, 3), (1, 1)])
@pytest.mark.parametrize("portable", [False, True])
def test_the_gradients_of_parameters_alone(device, rng, for_any_gpu, pixels, portable):
    """No pass for dx adds up an image's sums on the way."""
    if portable:
        for_any_gpu()
    x, _, weight, bias, scale, shift = inputs(rng, (2, *pixels, 16), 0, True)

    def norm(weight, bias, scale, shift):
        image = Tensor(x.astype(np.float32), device=weight.device, dtype=weight.dtype)
        return group_norm(image, weight, bias, 4, silu=True, scale=scale, shift=shift)

    check_op(norm, weight, bias, scale, shift, device=device)


def test_gradient_is_added_to_what_is_there(device, rng):
    x, _, weight, bias, _, _ = inputs(rng, (2, 4, 4, 16), 0, False)

    def gradients(uses):
        tensors = [Tensor(a, requires_grad=True, dtype=np.float32, device=device) for a in (x, weight, bias)]
        dout = Tensor(np.ones(x.shape, np.float32), device=device).data
        for _ in range(uses):
            group_norm(*tensors, 4, silu=True).backward(dout)
        return [Tensor(t.grad).numpy() for t in tensors]

    for once, twice in zip(gradients(1), gradients(2), strict=True):
        assert relative_error(twice, 2 * once) < 1e-6


def test_one_tensor_as_both_sources(device, rng):
    x, _, weight, bias, _, _ = inputs(rng, (32, 4, 4, 64), 64, False)
    arrays = [Tensor(a.astype(np.float32), requires_grad=True, device=device) for a in (x, x, weight, bias)]
    dout = rng.standard_normal((32, 4, 4, 128)).astype(np.float32)
    group_norm(arrays[0], *arrays[2:], 8, x2=arrays[1], silu=True).backward(dout)
    once = Tensor(arrays[0].grad).numpy() + Tensor(arrays[1].grad).numpy()
    for tensor in arrays:
        tensor.grad = None
    for _ in range(2):
        group_norm(arrays[0], *arrays[2:], 8, x2=arrays[0], silu=True).backward(dout)
    assert relative_error(Tensor(arrays[0].grad).numpy(), 2 * once) < 1e-5


def test_shapes_that_do_not_fit():
    x, vector = Tensor(np.zeros((1, 2, 2, 6))), Tensor(np.zeros(6))
    with pytest.raises(ValueError, match="6 channels do not divide into 0 groups"):
        group_norm(x, vector, vector, 0)
    with pytest.raises(ValueError, match="6 channels do not divide into 4 groups"):
        group_norm(x, vector, vector, 4)
    with pytest.raises(ValueError, match="scale has shape"):
        group_norm(x, vector, vector, 3, scale=Tensor(np.zeros((2, 6))))


def partial_sums(x, tiles, centred):
    """What a producer's epilogue leaves of each tile of pixels: see `Tensor.statistics`."""
    rows = x.reshape(len(x), tiles, -1, x.shape[-1]).astype(np.float64)
    centre = rows[:, :, 0] if centred else np.zeros((len(x), tiles, x.shape[-1]))
    gap = rows - centre[:, :, None]
    kinds = gap.sum(2), np.square(gap).sum(2)
    return np.stack((np.full_like(centre, rows.shape[2]), centre, *kinds) if centred else kinds, -1).astype(np.float32)


# The second case has groups that straddle two chunks of channels, and so many tiles that threads share them; the third
# so many that a kernel of its own adds them up. The fourth has groups of more channels than a block has threads, and so
# has the last, whose tiles a kernel of its own adds up; the fifth has more channels than a T4's block has room for.
@pytest.mark.gpu
@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("shape, channels2, num_groups, tiles", [
    ((2, 4, 6, 16), 8, 4, (4, 3)), ((2, 16, 6, 128), 64, 32, (48, 3)), ((2, 16, 6, 128), 64, 32, (96, 2)),
    ((2, 4, 6, 512), 128, 2, (4, 3)), ((2, 2, 3, 4096), 512, 32, (3, 2)), ((2, 2, 3, 1024), 512, 2, (3, 2)),
])
@pytest.mark.parametrize("given", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("centred", [(False, False), (True, True), (False, True)])
def test_statistics_that_come_with_images_save_a_pass(for_any_gpu, rng, given, centred, shape, channels2, num_groups,
                                                      tiles, portable):
    if portable:
        for_any_gpu()
    x, x2, weight, bias, _, _ = inputs(rng, shape, channels2, False)
    tensors = [Tensor(a.astype(np.float32), device="cuda") for a in (x, x2, weight, bias)]
    expected = group_norm(*(Tensor(a) for a in (x, weight, bias)), num_groups, x2=Tensor(x2)).numpy()
    for tensor, use, *how in zip(tensors, given, tiles, centred, strict=False):
        if use:
            sums = Tensor(partial_sums(tensor.numpy(), *how), device="cuda").data
            tensor.statistics = ChannelStatistics(Kind.CENTRED if how[1] else Kind.MOMENTS, sums)
    out = group_norm(tensors[0], *tensors[2:], num_groups, x2=tensors[1]).numpy()
    assert relative_error(out, expected) < 2e-5


def batch_norm_of(x, weight, bias):
    running = (Tensor(np.zeros(x.shape[-1]), dtype=x.dtype, device=x.device) for _ in range(2))
    return batch_norm(x, weight, bias, *running, training=True)


@pytest.mark.gpu
@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("image", [(64, 64), (8, 8), (12, 13)], ids=str)
@pytest.mark.parametrize("norm", [lambda x, *affine: group_norm(x, *affine, 8), batch_norm_of])
@pytest.mark.parametrize("kind", ["fp32", "tf32", "pooled", "upsampled"])
def test_a_large_mean_behind_a_producer_costs_no_digits(for_any_gpu, rng, kind, norm, image, portable):
    """Its sums are not around 0, where the variance would be off by 1 %."""
    if portable:
        for_any_gpu()
    arrays = rng.standard_normal((2, *image, 16)), rng.standard_normal((16, 3, 3, 16)) / 12, np.full(16, 1000.0)
    x, weight, bias = (Tensor(a.astype(np.float32), device="cuda") for a in arrays)
    if kind in ("fp32", "tf32"):
        with allow_tf32(kind == "tf32"):
            x = conv2d(x, weight, bias, padding=1)
        on_hopper = current_target().architecture == "sm_90a"
        none = kind == "fp32" if on_hopper else image == (12, 13)  # tiles of conv2d.cu would be of two images
    else:
        x, none = avg_pool2d(x + bias, 2) if kind == "pooled" else upsample_nearest(x + bias), False
    assert x.statistics is None if none else x.statistics.kind is Kind.CENTRED
    affine = np.ones(16), np.zeros(16)
    expected = norm(Tensor(x.numpy().astype(np.float64)), *map(Tensor, affine)).numpy()
    got = norm(x, *(Tensor(a.astype(np.float32), device="cuda") for a in affine)).numpy()
    assert relative_error(got, expected) < 2e-4


# Shapes for clusters of 1, 2, 4 and 8 blocks on Hopper forward, of one box or several, the last cut short, of chunks of
# 64 to 512 bytes, of two sources too. The last three are for streams: a chunk would have channels of both sources, or
# there are no packs; the very last has so many tiles that a kernel of its own finishes the statistics.
CLUSTERS = [
    ((32, 3, 5, 256), 0, 32),
    ((32, 8, 4, 128), 0, 32),
    ((128, 8, 8, 256), 0, 32),
    ((32, 5, 7, 64), 0, 32),
    ((2, 64, 64, 64), 0, 32),
    ((2, 32, 33, 128), 128, 32),
    ((40, 16, 33, 64), 64, 32),
    ((1, 33, 31, 320), 0, 32),
    ((3, 17, 5, 96), 0, 32),
    ((2, 32, 33, 192), 128, 32),
    ((3, 16, 16, 192), 256, 32),
    ((1, 96, 96, 10), 0, 5),
]


@pytest.mark.gpu
@pytest.mark.parametrize("silu, modulated", [(True, False), (False, True)])
@pytest.mark.parametrize("shape, channels2, num_groups", CLUSTERS)
def test_shapes_of_a_unet(rng, shape, channels2, num_groups, silu, modulated):
    check_op(
        lambda x, x2, w, b, scale, shift: group_norm(x, w, b, num_groups, 1e-5, silu, scale, shift, x2),
        *inputs(rng, shape, channels2, modulated),
        device="cuda", dtypes=("float32", "bfloat16", "float16"), fp32_inputs=(2, 3, 4, 5),
    )


class Seen(Function):
    """The identity, which keeps the gradient that came and its sums."""

    @staticmethod
    def forward_cuda(ctx, x):
        return x.copy()

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        Seen.dout, Seen.sums = Tensor(dout).numpy(), ctx.dout_sums
        return (dout,)


@pytest.mark.gpu
@pytest.mark.parametrize("shape, channels2, num_groups", CLUSTERS)
@pytest.mark.parametrize("more", [False, True])
def test_the_sums_of_a_gradient_travel_with_it(rng, shape, channels2, num_groups, more):
    x, x2, weight, bias, _, _ = (
        None if a is None else Tensor(a, requires_grad=True, dtype=np.float32, device="cuda")
        for a in inputs(rng, shape, channels2, False)
    )
    seen = Seen.apply(x)
    out = group_norm(seen, weight, bias, num_groups, silu=True, x2=x2)
    if more:  # the norm's backward adds to the gradient of a newer use
        out = group_norm(out, weight, bias, num_groups, x2=None) + (0 if x2 is not None else seen * 3.0)
    out.backward(Tensor(rng.standard_normal(out.shape), dtype=np.float32, device="cuda").data)
    expected = Seen.dout.reshape(shape[0], -1, shape[-1]).astype(np.float64)
    error = np.abs(Tensor(Seen.sums).numpy().sum(1) - expected.sum(1)) / (1 + np.abs(expected).sum(1))
    assert error.max() < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, bfloat16, np.float16])
@pytest.mark.parametrize("shape, channels2, num_groups", [*CASES[:2], *CLUSTERS])
def test_the_backward_writes_the_output_once_more_bit_for_bit(rng, shape, channels2, num_groups, dtype, silu):
    arrays = [
        None if a is None else Tensor(a, requires_grad=True, device="cuda", dtype=dtype if i < 2 else np.float32)
        for i, a in enumerate(inputs(rng, shape, channels2, True))
    ]
    x, x2, weight, bias, scale, shift = arrays
    out = group_norm(x, weight, bias, num_groups, 1e-5, silu, scale, shift, x2)
    node, _ = out._source
    *norm, scale, shift, mean, rstd = node.ctx.saved
    y = Tensor(np.zeros(out.shape), dtype=dtype, device="cuda")
    table.backward(out.data, *norm, mean, rstd, silu, scale, shift, needs=node.needs, into=(None,) * 6, y=y.data)
    assert y.numpy().tobytes() == out.numpy().tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("shape, channels2, num_groups", [((2, 33, 17, 48), 16, 8), ((3, 20, 9, 7), 5, 3), CLUSTERS[3]])
def test_two_runs_are_bit_equal(rng, shape, channels2, num_groups):
    arrays = inputs(rng, shape, channels2, True)
    dout = rng.standard_normal((*shape[:-1], shape[-1] + channels2))

    def run():
        x, x2, *rest = tensors = [
            None if a is None else Tensor(a, requires_grad=True, dtype=np.float32, device="cuda") for a in arrays
        ]
        out = group_norm(x, rest[0], rest[1], num_groups, 1e-5, True, rest[2], rest[3], x2)
        out.backward(Tensor(dout, dtype=np.float32, device="cuda").data)
        return [out.numpy()] + [Tensor(t.grad).numpy() for t in tensors if t is not None]

    for first, second in zip(run(), run(), strict=True):
        assert first.tobytes() == second.tobytes()


def test_every_chunk_of_channels_has_some():
    """A block without a channel would divide by its width, 0, and read parameters beyond the last."""
    tiling = portable.tiling
    for dtype, vec in ((np.float32, 1), (np.float16, 1), (np.float16, 0)):
        pack = 16 // np.dtype(dtype).itemsize if vec else 1
        for n, pixels, packs in itertools.product((1, 2, 3, 8, 64), (1, 64, 256, 1024), range(1, 513)):
            for arrays in (1, 2, 4):
                _, chunks, across = tiling(n, pixels, packs * pack, pack, 132, arrays)
                assert across <= 32 and (chunks - 1) * across < packs <= chunks * across


@pytest.mark.parametrize("n, pixels, channels, arrays, tiles, chunks", [
    (128, 64, 512, 4, 1, 2), (128, 64, 512, 2, 1, 2), (256, 196, 256, 4, 1, 1), (32, 4096, 64, 4, 8, 1),
    (128, 4096, 64, 4, 4, 1), (128, 4096, 64, 2, 4, 1), (32, 4096, 576, 2, 5, 3), (8, 4096, 128, 4, 32, 1),
    (2, 256, 1152, 2, 3, 18), (8, 576, 128, 4, 6, 2), (32, 256, 1152, 2, 1, 8),
])
def test_the_cuts_that_were_fastest(n, pixels, channels, arrays, tiles, chunks):
    """On an H200: 10.0 µs for 17.7 in eight chunks in the first row, for instance; in the last three, each by no more
    blocks than run at once, 2.6 for 4.6, 3.7 for 6.2 and 13.2 for 15.2."""
    assert portable.tiling(n, pixels, channels, 8, 132, arrays)[:2] == (tiles, chunks)


@pytest.mark.parametrize("n, pixels, channels, more", [
    (1, 4096, 384, False), (1, 16384, 256, False), (4, 16384, 256, False), (8, 16384, 192, False),
    (8, 65536, 128, True),
])
def test_tiles_that_take_another_launch_are_worth_it(n, pixels, channels, more):
    """Above 64 tiles of an image a launch adds up their sums. More tiles save a small pass less than it takes."""
    assert (portable.tiling(n, pixels, channels, 8, 132, arrays=4)[0] > 64) == more


@pytest.mark.parametrize("tiles, of_group, itself", [
    (64, 32, True), (64, 33, False), (65, 1, False), (1, 1024, True), (1, 1025, False), (2, 1024, True),
    (3, 1024, False),
])
def test_when_a_block_adds_up_the_sums_of_its_groups(tiles, of_group, itself):
    assert portable._adds_itself(of_group, tiles) == itself


@pytest.mark.parametrize("shape, groups, blocks", [((1, 256, 256, 128), 32, 16), ((2, 24, 20, 576), 2, 2)])
def test_the_blocks_that_finish_an_image_s_sums(host_of, shape, groups, blocks):
    """Each has so few groups that a thread adds up 16 tiles at most, or one large group."""
    host, found = host_of(False), []
    host.watch = lambda launch: found.append(launch) if launch.name == "finish_sums" else None
    x, weight, bias = (Tensor(host.zeros(size, np.dtype(np.float32)), requires_grad=True)
                       for size in (shape, shape[-1:], shape[-1:]))
    group_norm(x, weight, bias, groups).backward(host.zeros(shape, np.dtype(np.float32)))
    assert [launch.grid for launch in found] == [(shape[0], blocks)]


def test_packs_need_channels_and_addresses_at_16_bytes(host_of):
    host, low = host_of(True), np.dtype(np.float16)
    whole, shifted = host.zeros((2, 8, 64), low), host.zeros(2 * 8 * 64 + 8, low)
    for arrays, packs in (
        ((whole,), 1), ((whole, whole), 1), ((whole, host.zeros((2, 8, 60), low)), 0),
        ((host.zeros((2, 8, 60), np.dtype(np.float32)),), 1), ((whole, None), 1),
        ((shifted[8:].reshape(2, 8, 64),), 1), ((whole, shifted[1:1025].reshape(2, 8, 64)), 0),
    ):
        assert kernel_constants(*arrays) == {"T": arrays[0].dtype, "VEC": packs}
