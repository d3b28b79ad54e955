import numpy as np
import pytest

import cudiff
from cudiff import Tensor, check_gradient, grad
from tests.check import check_op, torch


@pytest.mark.parametrize("widths", [1, (1, 2), ((0, 0), (2, 1), (8, 8)), ((1, 0), (0, 0), (0, 0))], ids=str)
@pytest.mark.parametrize("value", [0, -1.5])
def test_pad(widths, value, device, rng):
    x = rng.standard_normal((2, 3, 8))
    pairs = np.broadcast_to(widths, (3, 2))[::-1].reshape(-1).tolist()
    check_op(
        lambda x: cudiff.pad(x, widths, constant_values=value), x, device=device,
        torch_fn=lambda x: torch.nn.functional.pad(x, pairs, value=value),
    )


@pytest.mark.parametrize("mode, widths", [
    ("reflect", ((1, 1), (2, 0), (0, 3))), ("reflect", 1), ("reflect", 0), ("edge", ((0, 4), (5, 0), (2, 2))),
    ("edge", (0, 1)),
], ids=str)
def test_modes(mode, widths, device, rng):
    x = rng.standard_normal((2, 3, 8))
    check_op(lambda x: cudiff.pad(x, widths, mode), x, device=device)
    np.testing.assert_array_equal(np.pad(Tensor(x), widths, mode).numpy(), np.pad(x, widths, mode))
    check_gradient(grad(lambda x: np.sum(np.pad(x, pad_width=widths, mode=mode) ** 3)), x)


def test_integers_have_borders(device):
    x = np.arange(6).reshape(2, 3)
    for given, options in (((1, 2), {"constant_values": 7}), ((0, 1), {"mode": "reflect"}), (2, {"mode": "edge"})):
        out = cudiff.pad(Tensor(x, device=device), given, **options)
        assert out.dtype == x.dtype
        np.testing.assert_array_equal(out.numpy(), np.pad(x, given, **options))


@pytest.mark.parametrize("args, message", [
    ((-1,), "pad widths are not negative"), (((1, 2, 3),), "one pair, or one for each of 2 axes"),
    ((1, "wrap"), "unknown mode 'wrap' of pad: use 'constant', 'edge' or 'reflect'"),
    ((((0, 0), (3, 0)), "reflect"), "mode 'reflect' by 3, 0 needs an axis of 4, not of 3"),
])
def test_what_is_refused(args, message):
    with pytest.raises(ValueError, match=message):
        cudiff.pad(Tensor(np.ones((2, 3))), *args)
    with pytest.raises(TypeError, match="integer"):
        cudiff.pad(Tensor(np.ones(3)), 1.5)
    with pytest.raises(TypeError, match="pad takes one number for constant_values"):
        cudiff.pad(Tensor(np.ones(3)), 1, constant_values=(1, 2))
    with pytest.raises(ValueError, match="mode 'edge' by 1, 1 needs an axis of 1, not of 0"):
        cudiff.pad(Tensor(np.ones((0, 3))), 1, "edge")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_integers_have_a_finite_border(value):
    with pytest.raises(ValueError, match="finite constant"):
        cudiff.pad(Tensor([1, 2]), 1, constant_values=value)
