import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import cudiff
from cudiff import nn
from cudiff.backend import bfloat16
from cudiff.distributed import ALONE, Group
from cudiff.ops.batch_norm import batch_norm, batch_norm_relu_pool
from cudiff.ops.conv2d import conv2d
from cudiff.tensor import Tensor
from tests.check import check_op, relative_error, torch

SHAPES = [(4, 3, 5, 8), (2, 2, 2, 3), (1, 7, 9, 64), (6, 5), (2, 40, 40, 16), (3, 2, 1, 300)]


def inputs(rng, shape):
    channels = shape[-1]
    return (rng.standard_normal(shape) * 2 + 0.5, 1 + 0.3 * rng.standard_normal(channels),
            rng.standard_normal(channels), rng.standard_normal(channels), 0.5 + rng.random(channels))


def running(arrays, like, device):
    """The running statistics for a function of `like`; new ones, as training updates them."""
    dtype = np.float64 if like.dtype == np.float64 else np.float32
    return [Tensor(array.astype(dtype), device=device if like.device == "cuda" else "cpu") for array in arrays]


def torch_batch_norm(x, weight, bias, mean, var, training):
    return torch.nn.functional.batch_norm(
        x.movedim(-1, 1), torch.tensor(mean), torch.tensor(var), weight, bias, training
    )


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_batch_norm(device, rng, shape, training):
    x, weight, bias, *statistics = inputs(rng, shape)
    check_op(
        lambda x, w, b: batch_norm(x, w, b, *running(statistics, x, device), training),
        x, weight, bias, device=device, dtypes=("float32", "bfloat16", "float16"), fp32_inputs=(1, 2),
        torch_fn=lambda x, w, b: torch_batch_norm(x, w, b, *statistics, training).movedim(1, -1),
    )


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [(4, 4, 6, 8), (3, 5, 2, 3), (2, 7, 9, 64), (2, 40, 41, 16), (3, 2, 3, 300)])
def test_batch_norm_relu_pool(device, rng, shape, training):
    x, weight, bias, *statistics = inputs(rng, shape)
    weight[::2] *= -1  # then the smallest x of a window wins
    check_op(
        lambda x, w, b: batch_norm_relu_pool(x, w, b, *running(statistics, x, device), training),
        x, weight, bias, device=device, dtypes=("float32", "bfloat16", "float16"), fp32_inputs=(1, 2),
        torch_fn=lambda x, w, b: torch.nn.functional.max_pool2d(
            torch_batch_norm(x, w, b, *statistics, training).relu(), 2
        ).movedim(1, -1),
    )


def test_after_a_convolution(device, rng):
    """Its epilogue's sums serve the norm; dx's sums give its bias a gradient, of 0."""
    x, weight = rng.standard_normal((3, 14, 14, 32)), rng.standard_normal((64, 3, 3, 32)) / 17
    bias, norm_weight, mean, var = rng.standard_normal((4, 64))
    check_op(
        lambda x, w, b, nw, nb: batch_norm(
            conv2d(x, w, b, padding=1), nw, nb, *running((mean, np.abs(var)), x, device), True
        ),
        x, weight, bias, norm_weight, bias, device=device, dtypes=("float32", "bfloat16", "float16"),
        fp32_inputs=(1, 2, 3, 4),
    )


@pytest.mark.gpu
def test_sums_of_the_producer_give_the_same(rng):
    x, weight = rng.standard_normal((5, 28, 28, 1)), rng.standard_normal((32, 3, 3, 1)).astype(np.float32)
    images = conv2d(Tensor(x.astype(bfloat16), device="cuda"), Tensor(weight, device="cuda"), padding=1)
    assert images.statistics is not None

    def run(h):
        arrays = np.ones(32), np.zeros(32), np.zeros(32), np.ones(32)
        tensors = [Tensor(array.astype(np.float32), device="cuda") for array in arrays]
        return [y.numpy() for y in (batch_norm_relu_pool(h, *tensors, training=True), *tensors[2:])]

    for with_sums, without in zip(run(images), run(Tensor(images.data)), strict=True):
        assert relative_error(with_sums, without) < 1e-3


def test_the_first_of_equal_elements_gets_the_gradient(device):
    x = Tensor(np.ones((1, 2, 2, 8), np.float32), requires_grad=True, device=device)
    one, zero = (Tensor(np.full(8, value, np.float32), device=device) for value in (1, 0))
    batch_norm_relu_pool(x, one, one, zero, one, training=False).sum().backward()
    grad = Tensor(x.grad).numpy()
    assert (grad[0, 0, 0] > 0.9).all() and np.count_nonzero(grad) == 8


def test_a_large_mean_costs_no_digits(device, rng):
    x = (rng.standard_normal((4, 8, 8, 16)) + 4096).astype(np.float32)
    arrays = x, np.ones(16, np.float32), *np.zeros((2, 16), np.float32), np.ones(16, np.float32)
    y = batch_norm(*(Tensor(array, device=device) for array in arrays), training=True)
    rows = x.reshape(-1, 16).astype(np.float64)
    expected = ((rows - rows.mean(0)) / rows.std(0)).reshape(x.shape)
    assert relative_error(y.numpy(), expected) < 5e-4  # the rounding of the mean is 2.4e-4


@pytest.mark.parametrize("shape", SHAPES)
def test_running_statistics(device, rng, shape):
    x, weight, bias, mean, var = (array.astype(np.float32) for array in inputs(rng, shape))
    tensors = [Tensor(array.copy(), device=device) for array in (x, weight, bias, mean, var)]
    for _ in range(2):
        batch_norm(*tensors, training=True, momentum=0.25)
    batch_norm(*tensors, training=False)
    rows = x.reshape(-1, shape[-1]).astype(np.float64)
    for _ in range(2):
        mean, var = 0.75 * mean + 0.25 * rows.mean(0), 0.75 * var + 0.25 * rows.var(0, ddof=1)
    assert relative_error(tensors[3].numpy(), mean) < 2e-5
    assert relative_error(tensors[4].numpy(), var) < 2e-5


def test_shapes_that_do_not_fit():
    vector = Tensor(np.zeros(3))
    with pytest.raises(ValueError, match="running_var has shape"):
        batch_norm(Tensor(np.zeros((2, 3))), vector, vector, vector, Tensor(np.zeros(2)), True)
    with pytest.raises(ValueError, match="2 pixels a side"):
        batch_norm_relu_pool(Tensor(np.zeros((2, 1, 4, 3))), vector, vector, vector, vector, True)


@pytest.mark.parametrize("function", [cudiff.batch_norm, cudiff.batch_norm_relu_pool])
def test_a_tenth_of_the_batch_goes_into_the_running_statistics(function, rng):
    x = rng.standard_normal((4, 2, 2, 3)) * 2 + 1
    operands = [Tensor(np.full(3, value), dtype=np.float64) for value in (1, 0, 5, 7)]
    function(Tensor(x), *operands, training=True)
    rows = x.reshape(-1, 3)
    np.testing.assert_allclose(operands[2].numpy(), 0.9 * 5 + 0.1 * rows.mean(0))
    np.testing.assert_allclose(operands[3].numpy(), 0.9 * 7 + 0.1 * rows.var(0, ddof=1))


@pytest.mark.parametrize("shape", [(1, 1, 2, 3), (1, 2, 1, 3), (2, 2, 3)], ids=str)
def test_windows_need_two_pixels_a_side(shape):
    with pytest.raises(ValueError, match="2 pixels a side"):
        cudiff.batch_norm_relu_pool(Tensor(np.ones(shape)), *(Tensor(np.ones(3)) for _ in range(4)), training=True)


class OfTwo(Group):
    """One of two processes, which are threads here: they sum by `given`, and wait for each other."""

    def __init__(self, rank, given, both):
        super().__init__(rank, 2)
        self.given, self.both = given, both

    def all_reduce(self, array):
        self.given[self.rank] = array.copy()
        self.both.wait()
        array[...] = sum(self.given)
        self.both.wait()


@pytest.mark.parametrize("training", [True, False])
def test_two_processes_have_the_statistics_of_both(rng, training):
    """Halves of a batch, of other means and variances, give what the whole gives to one process."""
    x, dout = rng.standard_normal((2, 6, 4, 5, 3))
    x[3:] = 3 * x[3:] + 2
    arrays = rng.standard_normal(3), rng.standard_normal(3), rng.standard_normal(3), 0.5 + rng.random(3)

    def run(part, group):
        tensors = [Tensor(array.copy(), requires_grad=i < 3) for i, array in enumerate((x[part], *arrays))]
        y = batch_norm(*tensors, training=training, momentum=0.3, eps=0.2, group=group)
        y.backward(dout[part])
        return [y.numpy(), *(tensor.grad for tensor in tensors[:3]), *(tensor.numpy() for tensor in tensors[3:])]

    given, both = [None, None], threading.Barrier(2, timeout=10)
    with ThreadPoolExecutor(2) as threads:
        halves = threads.map(run, (slice(3), slice(3, 6)), (OfTwo(rank, given, both) for rank in range(2)))
        (y, dx, dweight, dbias, *running), (y2, dx2, dweight2, dbias2, *running2) = halves
    found = [np.concatenate((y, y2)), np.concatenate((dx, dx2)), dweight + dweight2, dbias + dbias2, *running]
    for one, other, expected in zip(found, found[:4] + running2, run(slice(6), ALONE), strict=True):
        np.testing.assert_allclose(one, expected, rtol=1e-10, atol=1e-10)
        np.testing.assert_allclose(other, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("count", [2, 3])
def test_the_running_variance_of_few_is_that_without_bias(count, rng):
    x = rng.standard_normal((count, 4))
    operands = [Tensor(np.full(4, value), dtype=np.float64) for value in (1, 0, 0, 0)]
    batch_norm(Tensor(x), *operands, training=True, momentum=0.5, eps=1e-12)
    np.testing.assert_allclose(operands[3].numpy(), 0.5 * x.var(0, ddof=1), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan, 1e30])
def test_a_channel_that_is_not_finite_leaves_its_running_statistics(device, rng, bad):
    x = rng.standard_normal((6, 3)).astype(np.float32)
    x[1, 1] = bad
    operands = [Tensor(np.full(3, value, np.float32), device=device) for value in (1, 0, 0.5, 2)]
    with np.errstate(all="ignore"):
        batch_norm(Tensor(x, device=device), *operands, training=True, momentum=0.5)
    mean, var = (operand.numpy() for operand in operands[2:])
    assert (mean[1], var[1]) == (0.5, 2)
    others = x[:, [0, 2]]
    np.testing.assert_allclose(mean[[0, 2]], 0.25 + 0.5 * others.mean(0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(var[[0, 2]], 1 + 0.5 * others.var(0, ddof=1), rtol=1e-4)


def test_evaluation_reads_the_running_statistics(device, rng):
    x, (weight, bias, mean), var = rng.standard_normal((4, 6, 3)), rng.standard_normal((3, 3)), np.array([0.5, 2, 3])
    arrays = (array.astype(np.float32) for array in (x, weight, bias, mean, var))
    y = batch_norm(*(Tensor(array, device=device) for array in arrays), training=False, eps=0.25)
    np.testing.assert_allclose(y.numpy(), (x - mean) / np.sqrt(var + 0.25) * weight + bias, rtol=1e-4, atol=1e-5)


def test_an_empty_batch_leaves_the_running_statistics():
    for norm in (nn.BatchNorm2d(3), nn.BatchNorm2d(3).eval()):
        before = {name: array.copy() for name, array in norm.state_dict().items()}
        x = Tensor(np.ones((0, 2, 2, 3), np.float32))
        if norm.training:
            with pytest.raises(ValueError, match=r"a batch of shape \(0, 2, 2, 3\) has no statistics to train with"):
                norm(x)
        else:
            assert norm(x).shape == x.shape
        assert all(np.array_equal(array, before[name]) for name, array in norm.state_dict().items())


@pytest.mark.parametrize("norm, shape", [(nn.BatchNorm1d(3), (1, 3)), (nn.BatchNorm2d(3), (1, 1, 1, 3))])
def test_one_value_a_channel_is_not_trained_with(norm, shape):
    x = Tensor(np.ones(shape, np.float32))
    with pytest.raises(ValueError, match=r"has one value a channel: give more images, or use eval\(\)$"):
        norm(x)
    assert not norm.running_mean.numpy().any() and norm.eval()(x).shape == shape
