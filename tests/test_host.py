"""What the host does for a training step on a GPU: that every path runs, how many launches it makes, its memory."""

import math
from collections import Counter

import numpy as np
import pytest

from cudiff.backend import bfloat16
from cudiff.config import PRESETS
from cudiff.cuda import launch
from cudiff.cuda.accumulate import gradient_sums, gradient_target
from cudiff.cuda.deferred import Queue
from cudiff.cuda.kernels.attention.problem import SUMS
from cudiff.cuda.kernels.attention.table import ATTENTION
from cudiff.data import Dataset
from cudiff.function import Function
from cudiff.gradient import State
from cudiff.nn.parameter import Parameter
from cudiff.ops.attention import attention, attention_qkv
from cudiff.ops.conv2d import conv2d, conv_transpose2d
from cudiff.ops.edm import edm_input, edm_mix, edm_output
from cudiff.ops.frame import blended_frame
from cudiff.ops.group_norm import group_norm
from cudiff.ops.grouped_linear import grouped_linear
from cudiff.ops.matmul import linear
from cudiff.ops.mse import mse
from cudiff.ops.norm_silu_conv2d import norm_silu_conv2d
from cudiff.ops.pool import avg_pool2d, max_pool2d, upsample_nearest
from cudiff.precision import allow_tf32
from cudiff.tensor import Tensor
from cudiff.train import Trainer
from tests.host import H200, Array, Memory


def trainer(config, folder):
    config = config.replace(device="cuda", validation=0, capture=False)
    size, classes = config.image_size or 32, max(0, config.num_classes)
    images = np.zeros((64, size, size, config.channels or 3), np.uint8)
    data = Dataset(images, np.arange(64) % classes, classes) if classes else Dataset(images)
    return Trainer(config, data, folder)


@pytest.mark.parametrize("hopper", [True, False], ids=["hopper", "portable"])
@pytest.mark.parametrize("precision", ["bf16", "tf32", "fp32"])
@pytest.mark.parametrize("preset", ["digits", "mnist", "mnist-ddpm", "cs179", "elephants"])
def test_every_path_of_a_training_step_runs(host_of, tmp_path, preset, precision, hopper):
    host = host_of(hopper)
    step = trainer(PRESETS[preset].replace(precision=precision), tmp_path).train_step
    step()
    first = host.launches.copy()
    step()
    assert host.launches == 2 * first
    kernels = {stem for stem, _ in first}
    assert ("conv2d_sm90" in kernels) == (hopper and precision != "fp32")
    assert hopper or not any(stem.endswith("_sm90") for stem in kernels)
    assert {"optim", "group_norm" if preset != "cs179" else "pool"} <= {stem.removesuffix("_sm90") for stem in kernels}


@pytest.mark.parametrize("hopper", [True, False], ids=["hopper", "portable"])
@pytest.mark.parametrize("rows", [70_000, 1_100_000])
@pytest.mark.parametrize("name", [
    "attention", "attention_qkv", "grouped_linear", "edm_mix", "edm_input", "edm_output", "blended_frame", "mse",
])  # fmt: skip
def test_a_grid_has_room_for_many_rows(host_of, name, rows, hopper):
    """Of which the second and third axis take 65,535."""
    host = host_of(hopper)

    def tensor(*shape, dtype=np.float32):
        return Tensor(host.empty(shape, np.dtype(dtype)), requires_grad=True)

    images, level = tensor(rows, 1, 2), tensor(rows)
    out = {
        "attention": lambda: attention(*(tensor(rows, 1, 1, 8, dtype=bfloat16) for _ in range(3))),
        "attention_qkv": lambda: attention_qkv(tensor(rows, 2, 24, dtype=bfloat16), 1),
        "grouped_linear": lambda: grouped_linear(tensor(rows, 4), [tensor(8, 4)], [tensor(8)])[0],
        "edm_mix": lambda: edm_mix(images, images, level, 0.0, 1.0, 0.5)[0],
        "edm_input": lambda: edm_input(images, level, 0.5, 0.25)[0],
        "edm_output": lambda: edm_output(images, images, level, 0.5),
        "blended_frame": lambda: blended_frame(images, images, level, images.detach().astype("uint8"), 0.5, "eps")[0],
        "mse": lambda: mse(level, tensor(rows)),
    }[name]()
    if out.requires_grad:
        out.backward(host.empty(out.shape, out.dtype))


def test_the_benchmarks_step(host_of, tmp_path):
    """An H200 took 634 MiB for the graph at d9d2fd3, beside 476 for what a step keeps."""
    host = host_of(True)
    step = trainer(PRESETS["elephants"].replace(precision="bf16", dropout=0.0), tmp_path).train_step
    step()
    host.launches.clear()
    host.memory = Memory()
    step()
    launches = Counter(stem for stem, _ in host.launches)
    assert launches.total() <= 346 and launches["conv2d_wgrad_sm90"] <= 17 and launches["optim"] == 3
    assert host.memory.taken <= 650 << 20


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # what no kernel wrote is undefined
def test_the_benchmarks_norms(host_of, monkeypatch, tmp_path):
    """Each is one launch, by itself and between convolutions."""
    pytest.importorskip("cupy", reason="CuPy is not installed: the benchmark needs it")
    from examples.benchmark import kernels
    from examples.benchmark.measure import Report

    host, timed = host_of(True), []

    def timed_once(fn):
        host.launches.clear()
        fn()
        timed.append([name for _, name in host.launches])
        return 1.0

    monkeypatch.setattr(kernels, "cupy", host)
    monkeypatch.setattr(kernels, "graph_time", timed_once)
    monkeypatch.setattr(kernels, "GROUP_NORMS", [(64, 64), (256, 8)])
    kernels.group_norms(Report(tmp_path / "rows", torch=False))
    assert timed == 2 * [["forward"], ["backward"], ["normalize"], ["input_gradients"]]


@pytest.mark.parametrize("hopper", [True, False], ids=["hopper", "portable"])
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("dtype", [bfloat16, np.dtype(np.float32)], ids=str)
@pytest.mark.parametrize("taps", [3, 1])
def test_an_upsampled_image_is_not_made(host_of, taps, dtype, norm, hopper):
    host = host_of(hopper)
    shapes = dict(x=(2, 8, 8, 64), weight=(64, taps, taps, 64), bias=64, norm_weight=64, norm_bias=64)
    tensors = {
        name: Tensor(host.zeros(shape, dtype if name in ("x", "weight") else np.float32), requires_grad=True)
        for name, shape in shapes.items() if norm or not name.startswith("norm")
    }
    out = norm_silu_conv2d(tensors.pop("x"), upsample=True, **tensors)
    assert not any(stem == "pool" for stem, _ in host.launches)
    out.backward(host.zeros(out.shape, dtype))
    assert ("pool", "sum_windows") in host.launches and ("pool", "spread_windows") not in host.launches


@pytest.mark.parametrize("hopper", [True, False], ids=["hopper", "portable"])
@pytest.mark.parametrize("channels, image, kernel, upsample", [
    ((72, 8), (16, 16), (3, 3), False), ((32, 32), (8, 8), (3, 3), False), ((64, 64), (8, 8), (3, 3), True),
    ((64, 8), (6, 8), (3, 5), False), ((64, 8), (6, 8), (1, 3), False), ((64, 8), (6, 8), (2, 2), False),
])
def test_a_skip_path_beside_a_pair(host_of, channels, image, kernel, upsample, hopper):
    """Of pairs that no kernel of Hopper's takes, and of sizes that are not kept."""
    host, times = host_of(hopper), 2 if upsample else 1
    size = tuple(times * e + 2 * (kernel[0] // 2) - r + 1 for e, r in zip(image, kernel, strict=True))
    shapes = [*((2, *image, c) for c in channels), (64, *kernel, sum(channels)), (2, *size, 64), (64, 1, 1, 64)]
    tensors = [Tensor(host.zeros(shape, bfloat16), requires_grad=True) for shape in shapes]
    x, x2, weight, residual, skip = tensors
    out = norm_silu_conv2d(x, x2, weight=weight, residual=residual, skip_weight=skip, upsample=upsample)
    assert sum(stem in ("matmul", "conv2d", "conv2d_sm90", "gemm_sm90") for stem, _ in host.launches) == 2
    out.backward(host.zeros(out.shape, bfloat16))
    assert [t.grad.shape for t in tensors] == shapes


def test_an_image_too_long_for_16_bits(host_of):
    host = host_of(False)
    x, weight = (Tensor(host.zeros(shape, bfloat16)) for shape in ((1, 2, 40000, 64), (64, 3, 3, 64)))
    with pytest.raises(ValueError, match="cut it into parts of at most 32766"):
        norm_silu_conv2d(x, weight=weight)
    norm_silu_conv2d(x, weight=Tensor(host.zeros((64, 1, 1, 64), bfloat16)))
    assert host.launches == [("matmul", "matmul")]


def test_a_group_of_more_channels_than_shared_memory_holds(host_of):
    host = host_of(True)
    x, weight = Tensor(host.empty((1, 4, 70_000), bfloat16)), Tensor(host.empty(70_000, np.dtype(np.float32)))
    with pytest.raises(ValueError, match="a group of 35000 channels, over 14528: use more groups"):
        group_norm(x, weight, weight, 2)
    group_norm(x, weight, weight, 5)


@pytest.mark.parametrize("hopper", [True, False], ids=["hopper", "portable"])
@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("dtype, tf32", [
    (bfloat16, False), (np.dtype(np.float32), True), (np.dtype(np.float32), False),
])
def test_the_sums_that_a_result_leaves(host_of, dtype, tf32, kernel, hopper):
    """Of float32 around a centre, which takes two numbers more."""
    host = host_of(hopper)
    x, weight = (Tensor(host.zeros(shape, dtype)) for shape in ((2, 16, 16, 64), (64, kernel, kernel, 64)))
    with allow_tf32(tf32):
        out = conv2d(x, weight, padding=kernel // 2)
    numbers = 2 if dtype == bfloat16 else 4
    for result in (avg_pool2d(out), upsample_nearest(out)):
        assert result.statistics.kind.numbers == numbers
    if hopper and dtype != bfloat16 and not tf32:
        assert out.statistics is None
    else:
        assert out.statistics.sums.shape[::2] == (2, 64) and out.statistics.sums.shape[3] == numbers


@pytest.mark.parametrize("channels, outputs, taps, norm", [
    (3, 64, 3, False), (64, 3, 3, True), (64, 3, 3, False), (32, 1, 1, True)
])
@pytest.mark.parametrize("low", [bfloat16, np.dtype(np.float16)], ids=str)
def test_two_dtypes_without_a_cast(host_of, channels, outputs, taps, norm, low):
    """Between few channels, float32, and many, in both passes."""
    host = host_of(True)
    dtypes = (np.dtype(np.float32), low) if channels < outputs else (low, np.dtype(np.float32))
    weight = Parameter(host.zeros((outputs, taps, taps, channels), np.float32), low=True)
    vectors = [Tensor(host.zeros(channels, np.float32), requires_grad=True) for _ in range(2)]
    x = Tensor(host.zeros((2, 8, 8, channels), dtypes[0]), requires_grad=True)
    affine = dict(norm_weight=vectors[0], norm_bias=vectors[1], num_groups=1) if norm else {}
    out = norm_silu_conv2d(x, weight=weight, dtype=dtypes[1], **affine)
    out.backward(host.zeros(out.shape, dtypes[1]))
    assert out.dtype == dtypes[1] and x.grad.dtype == dtypes[0] and weight.compute_copy.dtype == low
    assert "cast" not in {stem for stem, _ in host.launches}
    assert Counter(host.launches)["conv2d_few_channels", "wgrad"] == 1


def fresh(values):
    """An array of its own: what NumPy makes of such arrays are views."""
    array = np.ndarray.__new__(Array, values.shape, values.dtype)
    array[...] = values
    return array


class Norm(Function):
    """3 x, whose backward adds what there is of x's gradient."""

    adds_elsewhere, fresh = (0,), True

    @staticmethod
    def forward_cuda(ctx, x):
        return fresh(x * 3)

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        dx, *terms = gradient_sums(into[0], dout.shape, dout.dtype)
        Norm.terms.append(len([term for term in terms if term is not None]))
        dx[...] = 3 * dout + sum(term for term in terms if term is not None)
        return (dx,)


class Residual(Function):
    """a + x, which passes its dout on to x."""

    fresh = True

    @staticmethod
    def forward_cuda(ctx, a, x):
        return fresh(a + x)

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        return fresh(dout), dout


class Minus(Function):
    """x - y, which passes its dout on to x and adds to y's gradient in place."""

    fresh = True

    @staticmethod
    def forward_cuda(ctx, x, y):
        return fresh(x - y)

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        dy, add = gradient_target(into[1], dout.shape, dout.dtype)
        dy[...] = (dy if add else 0) - dout
        return dout, dy


@pytest.fixture
def adding_host(host_of, monkeypatch):
    """The tape's own kernel adds."""
    host = host_of(True)
    kernel = host.kernel

    def adding(stem, name, **constants):
        if name != "add_into":
            return kernel(stem, name, **constants)
        return lambda grid, block, args, **options: np.add(args[0], args[1], out=args[0])

    monkeypatch.setattr(launch, "kernel", adding)
    monkeypatch.setattr(Norm, "terms", [], raising=False)
    return host


def test_a_tensor_that_is_both_inputs(adding_host):
    leaf = Tensor(adding_host.asarray(np.ones(4, np.float32)), requires_grad=True)
    x = Norm.apply(leaf)
    Twice.apply(x, Minus.apply(x, x)).backward(adding_host.asarray(np.ones(4, np.float32)))
    assert np.array_equal(leaf.grad, np.full(4, 6.0, np.float32))


@pytest.mark.parametrize("later, expected, terms", [(0, 4.0, [0]), (1, 6.0, [2]), (2, 8.0, [2])])
def test_a_gradient_of_two_terms(adding_host, later, expected, terms):
    """x's gradient begins with `later` uses of the result's; Residual adds dout, and Norm's backward all."""
    host = adding_host
    leaf = Tensor(host.asarray(np.ones(4, np.float32)), requires_grad=True)
    x = Residual.apply(leaf, Tensor(host.asarray(np.zeros(4, np.float32))))
    out = Residual.apply(Norm.apply(x), x)
    for _ in range(later):
        out = Residual.apply(out, Tensor(host.asarray(np.zeros(4, np.float32))))
        out = Twice.apply(x, out)
    out.backward(host.asarray(np.ones(4, np.float32)))
    assert np.array_equal(leaf.grad, np.full(4, expected, np.float32)) and Norm.terms == terms


class Twice(Function):
    """2 x + out."""

    fresh = True

    @staticmethod
    def forward_cuda(ctx, x, out):
        return fresh(2 * x + out)

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        return fresh(2 * dout), fresh(dout)


class Sum(Function):
    """3 x + y + z, whose gradients of x are added elsewhere, and of y and z in place."""

    adds_elsewhere, fresh = (0,), True

    @staticmethod
    def forward_cuda(ctx, x, y, z):
        return fresh(3 * x + y + z)

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        Sum.shared += [slot.array for slot in into if slot is not None and slot.state is State.SHARED]
        dx, *terms = gradient_sums(into[0], dout.shape, dout.dtype)
        dx[...] = 3 * dout + sum(term for term in terms if term is not None)
        results = [dx]
        for slot in into[1:]:
            target, add = gradient_target(slot, dout.shape, dout.dtype)
            target[...] = (target if add else 0) + dout
            results.append(target)
        return tuple(results)


@pytest.mark.parametrize("reads", [False, True])
def test_a_gradient_that_a_pending_launch_reads_is_not_written(adding_host, monkeypatch, reads):
    """x has a gradient already when Sum's backward begins, and stands among its inputs once, twice and three times."""
    monkeypatch.setattr(Queue, "is_read", lambda self, array: reads)
    monkeypatch.setattr(Queue, "before_write", Queue.before_read)
    for inputs, expected in ((lambda x, y: (x, y, y), 5), (lambda x, y: (x, x, y), 6), (lambda x, y: (x, x, x), 7)):
        monkeypatch.setattr(Sum, "shared", [], raising=False)
        leaf, other = (Tensor(adding_host.asarray(np.ones(3, np.float32)), requires_grad=True) for _ in range(2))
        x, y = Norm.apply(leaf), Norm.apply(other)
        Twice.apply(x, Sum.apply(*inputs(x, y))).backward(adding_host.asarray(np.ones(3, np.float32)))
        assert np.array_equal(leaf.grad, np.full(3, 3 * expected, np.float32))
        assert len(Sum.shared) == reads
        assert all(np.array_equal(array, np.full(3, 2, np.float32)) for array in Sum.shared)


def test_a_kernel_is_asked_for_the_sums_that_a_bias_before_qkv_needs(host_of, monkeypatch):
    """Not for those of three arrays, behind which no one layer stands."""
    host, asked = host_of(True), []
    select = ATTENTION.select
    monkeypatch.setattr(ATTENTION, "select", lambda problem: asked.append(problem) or select(problem))
    qkv = Tensor(host.zeros((2, 64, 192), bfloat16), requires_grad=True)
    three = [Tensor(host.zeros((2, tokens, 2, 32), bfloat16), requires_grad=True) for tokens in (64, 48, 48)]
    for out in (attention_qkv(qkv, 2), attention(*three)):
        out.backward(out.data)
    assert [(problem.backward, problem.keys, set(problem.wanted)) for problem in asked] == [
        (False, 64, set()), (False, 48, set()), (True, 64, {SUMS}), (True, 48, set()),
    ]


@pytest.mark.parametrize("dim, dtype, aligned", [
    (32, bfloat16, True), (24, bfloat16, True), (12, bfloat16, False), (12, np.float32, True), (6, np.float32, False),
])
def test_a_kernel_is_told_whether_heads_start_at_16_bytes(host_of, monkeypatch, dim, dtype, aligned):
    host, asked = host_of(True), []
    select = ATTENTION.select
    monkeypatch.setattr(ATTENTION, "select", lambda problem: asked.append(problem) or select(problem))
    attention_qkv(Tensor(host.zeros((2, 64, 6 * dim), np.dtype(dtype))), 2)
    assert [problem.aligned for problem in asked] == [aligned]


@pytest.mark.parametrize("hopper", [True, False], ids=["hopper", "portable"])
@pytest.mark.parametrize("count", [132, 108, 40])
def test_a_launch_is_planned_for_the_gpus_multiprocessors(host_of, monkeypatch, hopper, count):
    monkeypatch.setitem(H200, "MultiProcessorCount", count)
    host = host_of(hopper)
    grids = {}
    host.watch = lambda launch: grids.setdefault((launch.stem, launch.name), math.prod(launch.grid))
    x, weight = (Tensor(host.zeros(shape, bfloat16)) for shape in ((64, 32, 32, 128), (128, 3, 3, 128)))
    norm = [Tensor(host.zeros(128, np.float32)) for _ in range(2)]
    group_norm(conv2d(x, weight, padding=1), *norm, num_groups=32)
    if hopper:
        assert count // 2 < grids["conv2d_sm90", "conv2d_sm90"] <= count
    grid = grids["group_norm", "normalize"]
    assert grid >= 1.5 * count * -(-grid // (2 * count))  # two blocks on each run at once: few idle


@pytest.mark.parametrize("hopper", [True, False])
@pytest.mark.parametrize("operation", [
    lambda x, w: conv2d(x, w, None, 1, 1), lambda x, w: conv2d(x, w, None, 1, 1, dilation=2),
    lambda x, w: conv_transpose2d(x, w), lambda x, w: max_pool2d(x), lambda x, w: avg_pool2d(x),
    lambda x, w: upsample_nearest(x),
])
def test_a_batch_without_images_makes_no_launch_over_windows(host_of, hopper, operation):
    """An empty grid would be refused, here too; the weight's gradient is zero."""
    host = host_of(hopper)
    for dtype in (np.float32, bfloat16):
        x, weight = (Tensor(np.ones(shape), dtype=dtype, device="cuda", requires_grad=True)
                     for shape in ((0, 8, 8, 16), (16, 3, 3, 16)))
        out = operation(x, weight)
        out.backward(Tensor(np.zeros(out.shape), dtype=dtype, device="cuda"))
        assert len(out) == 0 and x.grad.shape == x.shape
        assert not {stem for stem, _ in host.launches if stem.startswith(("conv2d", "pool", "gemm"))}
        assert weight.grad is None or not Tensor(weight.grad).numpy().any()


@pytest.mark.parametrize("hopper", [True, False])
def test_the_stride_of_an_axis_of_one_element_may_be_anything(host_of, hopper):
    """It makes an array no less contiguous; a tensor map takes multiples of 16 bytes, from 0 on."""
    host = host_of(hopper)

    def tensor(*shape):
        return Tensor(host.zeros(shape, bfloat16), requires_grad=True)

    column, image, weight = Tensor(tensor(64, 1).data.T), tensor(2, 1, 8, 64), tensor(192, 64)
    qkv = linear(image[:, ::-1], weight)[:, :, :1][:, :, ::-1]
    for out in (linear(column, weight), attention_qkv(qkv, 2), conv2d(image[:, ::-1], tensor(64, 3, 3, 64), padding=1)):
        out.backward(out.data)
    assert ("conv2d_sm90", "conv2d_sm90") in host.launches or not hopper
