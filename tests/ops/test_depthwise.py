"""Convolutions whose groups have one channel, on the CPU, against those of one channel each."""

import numpy as np
import pytest

from cudiff import Tensor, ops

CASES = [  # x, kernel, stride, padding, dilation
    ((2, 7, 9, 5), (3, 3), (1, 1), (1, 1), (1, 1)), ((3, 8, 8, 4), (3, 3), (2, 2), (1, 1), (1, 1)),
    ((1, 9, 6, 3), (1, 5), (1, 2), (0, 2), (1, 1)), ((2, 11, 12, 2), (3, 2), (2, 1), (2, 0), (2, 3)),
    ((40, 64, 64, 4), (3, 3), (1, 1), (1, 1), (1, 1)),
]


@pytest.mark.parametrize("shape, kernel, stride, padding, dilation", CASES, ids=str)
def test_each_channel_is_convolved_by_itself(rng, shape, kernel, stride, padding, dilation):
    """The last has images enough for several threads."""
    arrays = rng.standard_normal(shape), rng.standard_normal((shape[3], *kernel, 1)), rng.standard_normal(shape[3])
    x, weight, bias = (Tensor(array, requires_grad=True) for array in arrays)
    out = ops.conv2d(x, weight, bias, stride, padding, dilation, groups=shape[3])
    dout = rng.standard_normal(out.shape)
    out.backward(dout)
    for c in range(shape[3]):
        own = slice(c, c + 1)
        parts = arrays[0][..., own], arrays[1][own], arrays[2][own]
        leaves = [Tensor(part.copy(), requires_grad=True) for part in parts]
        alone = ops.conv2d(*leaves, stride, padding, dilation)
        np.testing.assert_allclose(out.numpy()[..., own], alone.numpy(), rtol=1e-12, atol=1e-12)
        alone.backward(dout[..., own])
        for leaf, grad in zip(leaves, (x.grad[..., own], weight.grad[own], bias.grad[own]), strict=True):
            np.testing.assert_allclose(grad, leaf.grad, rtol=1e-9, atol=1e-9)
