import functools

import numpy as np
import pytest

from cudiff.ops.layer_norm import _cut, layer_norm
from cudiff.tensor import Tensor
from tests.check import check_needed, check_op, relative_error, torch

SHAPES = [
    (3, 8), (1, 1, 5), (2, 3, 64), (7, 17), (1, 2, 3, 320), (300, 16), (2, 1031), (3, 1640), (2, 1537), (2, 12296),
    (1, 24575), (1, 40000),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_layer_norm(device, rng, shape):
    channels = shape[-1]
    check_op(
        layer_norm, rng.standard_normal(shape) * 2 + 0.5, 1 + 0.3 * rng.standard_normal(channels),
        rng.standard_normal(channels), device=device, dtypes=("float32", "bfloat16", "float16"), fp32_inputs=(1, 2),
        torch_fn=lambda x, w, b: torch.nn.functional.layer_norm(x, (channels,), w, b),
    )


@pytest.mark.parametrize("shape", [
    (3, 8), (2, 5, 24), (3, 2, 3, 320), (2, 70, 33), (300, 3, 16), (1, 1031, 8), (2, 21, 12296),
])
@pytest.mark.parametrize("plus_one", [False, True])
def test_each_image_its_own(device, rng, shape, plus_one):
    """Weight and bias (N, C), or as DiT's modulation a scale in the weight's place."""
    weight, bias = (rng.standard_normal((shape[0], shape[-1])) for _ in range(2))

    def plain(x, w, b):
        between = (shape[0], *(1,) * (len(shape) - 2), shape[-1])
        return torch.nn.functional.layer_norm(x, shape[-1:]) * (w + plus_one).reshape(between) + b.reshape(between)

    check_op(
        functools.partial(layer_norm, plus_one=plus_one), rng.standard_normal(shape) * 2 + 0.5, weight, bias,
        device=device, dtypes=("float32", "bfloat16", "float16"), fp32_inputs=(1, 2), torch_fn=plain,
    )


@pytest.mark.parametrize("needed", [{0}, {1}, {2}, {1, 2}])
@pytest.mark.parametrize("shape", [(2, 5, 24), (3, 70, 1640), (5, 10241)])
def test_only_what_is_needed_has_a_gradient(device, rng, needed, shape):
    check_needed(layer_norm, [rng.standard_normal(part) for part in (shape, shape[-1:], shape[-1:])], needed, device)


@pytest.mark.parametrize("shape, parameters", [
    ((0, 4, 16), (0, 16)), ((0, 4, 16), (16,)), ((2, 0, 16), (2, 16)),
], ids=str)
def test_no_rows(device, shape, parameters):
    x, weight, bias = (Tensor(np.ones(size, np.float32), device=device, requires_grad=True)
                       for size in (shape, parameters, parameters))
    y = layer_norm(x, weight, bias)
    assert y.shape == shape
    y.sum().backward()
    for tensor in (x, weight, bias):
        np.testing.assert_array_equal(Tensor(tensor.grad).numpy(), np.zeros(tensor.shape))


def test_large_mean(device, rng):
    x = (100 + rng.standard_normal((40, 96))).astype(np.float32)
    wide = x.astype(np.float64)
    expected = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-5)
    ones, zeros = (Tensor(make(96, np.float32), device=device) for make in (np.ones, np.zeros))
    assert relative_error(layer_norm(Tensor(x, device=device), ones, zeros).numpy(), expected) < 2e-5


def test_shapes_that_do_not_fit():
    with pytest.raises(ValueError, match="layer_norm: weight"):
        layer_norm(Tensor(np.zeros((2, 3))), Tensor(np.zeros(2)), Tensor(np.zeros(3)))


@pytest.mark.parametrize("x, weight, bias", [
    ((2, 3), (3,), (2, 3)), ((2, 3), (2, 3), (3,)), ((2, 3), (1, 3), (1, 3)), ((2, 4, 3), (2, 4, 3), (2, 4, 3)),
    ((2, 4, 3), (4, 3), (4, 3)), ((3,), (3, 3), (3, 3)), ((), (), ()),
])
def test_parameters_that_are_of_no_image(x, weight, bias):
    with pytest.raises(ValueError, match="do not fit x"):
        layer_norm(*(Tensor(np.zeros(shape, np.float32)) for shape in (x, weight, bias)))


@pytest.mark.parametrize("shared, groups, at_once, tiles", [
    (256, 128, 396, 6), (256, 32, 396, 12), (256, 256, 528, 4), (256, 500, 396, 3), (100, 1, 528, 13), (7, 2, 396, 1),
    (0, 1, 396, 1), (256, 0, 396, 32),
])
def test_tiles_fill_whole_waves_of_blocks(shared, groups, at_once, tiles):
    """As measured on an H200; of eight rows or more, and one at least."""
    assert _cut(shared, groups, 4, at_once) == tiles
