import numpy as np
import pytest

import cudiff
from cudiff import Tensor, ops
from tests.check import check_op, torch


@pytest.mark.parametrize("name, torch_name, options", [
    ("mae", "l1_loss", {}), ("huber", "huber_loss", {}), ("huber", "huber_loss", {"delta": 0.4}),
    ("binary_cross_entropy_with_logits", "binary_cross_entropy_with_logits", {}),
])
def test_losses(name, torch_name, options, device, rng):
    pred, target = 2 * rng.standard_normal((5, 7)), rng.uniform(size=(5, 7))
    check_op(lambda x, t: getattr(cudiff, name)(x, t, **options), pred, target, device=device,
             torch_fn=lambda x, t: getattr(torch.nn.functional, torch_name)(x, t, **options))


@pytest.mark.parametrize("shape", [(), (1,), (3, 8), (4097,), (130, 65)])
@pytest.mark.parametrize("delta", [0.5, 3.0])
def test_huber(shape, delta, device, rng):
    pred, target = 2 * rng.standard_normal(shape), rng.standard_normal(shape)
    check_op(lambda x, t: cudiff.huber(x, t, delta), np.asarray(pred), np.asarray(target), device=device,
             torch_fn=lambda x, t: torch.nn.functional.huber_loss(x, t, delta=delta))


def test_hubers_gradient_beside_a_target_without_one(device):
    pred = Tensor(np.float32([0, 3, -3, np.nan]), device=device, requires_grad=True)
    for count in (1, 2):
        cudiff.huber(pred, np.zeros(4, np.float32), 2).backward()
        np.testing.assert_array_equal(Tensor(pred.grad).numpy(), count * np.float32([0, 0.5, -0.5, np.nan]))
    with pytest.raises(ValueError, match=r"huber: mean over no elements of shape \(0,\)"):
        cudiff.huber(pred[:0], pred[:0])


@pytest.mark.parametrize("name, options", [
    ("leaky_relu", {}), ("leaky_relu", {"negative_slope": 0.3}), ("elu", {}), ("elu", {"alpha": 0.5}),
    ("gelu", {"approximate": "tanh"}), ("softplus", {}), ("softplus", {"beta": 2.5}),
])
def test_activations(name, options, device, rng):
    check_op(lambda x: getattr(cudiff, name)(x, **options), 2 * rng.standard_normal((5, 7)), device=device,
             torch_fn=lambda x: getattr(torch.nn.functional, name)(x, **options))


@pytest.mark.parametrize("name, slope", [("leaky_relu", 0.01), ("elu", 1), ("softplus", 0.5)])
def test_slopes_at_zero_are_pytorchs(name, slope, device):
    x = Tensor(np.zeros(1, np.float32), requires_grad=True, device=device)
    getattr(cudiff, name)(x).sum().backward()
    assert Tensor(x.grad).numpy().tolist() == [np.float32(slope)]


def test_far_inputs(device):
    x = Tensor(np.float32([-1000, 1000]), device=device)
    np.testing.assert_array_equal(cudiff.softplus(x).numpy(), [0, 1000])
    np.testing.assert_array_equal(cudiff.elu(x).numpy(), [-1, 1000])
    loss = cudiff.binary_cross_entropy_with_logits(x, Tensor(np.float32([0, 1]), device=device))
    assert loss.item() == 0


@pytest.mark.parametrize("axis, keepdims", [(1, False), (-1, True), ((0, 2), False)])
def test_logsumexp(axis, keepdims, device, rng):
    check_op(lambda x: cudiff.logsumexp(x, axis, keepdims), 3 * rng.standard_normal((3, 4, 5)), device=device,
             torch_fn=lambda x: torch.logsumexp(x, axis, keepdims))


@pytest.mark.parametrize("shape, axis", [((70, 33), 0), ((5, 2000), 1), ((300, 3), 1), ((2, 3), None), ((), None)])
def test_logsumexp_of_rows_and_columns(shape, axis, device, rng):
    check_op(lambda x: cudiff.logsumexp(x, axis), np.asarray(3 * rng.standard_normal(shape)), device=device,
             dtypes=("float32", "bfloat16", "float16"))


def test_logsumexp_of_a_long_row_is_composed(device, rng):
    x = rng.standard_normal(70_000).astype(np.float32)
    assert cudiff.logsumexp(Tensor(x, device=device)).item() == pytest.approx(np.log(np.exp(x.astype(float)).sum()))


def test_logsumexp_of_far_and_infinite_values(device):
    rows = [[1000, 1000], [-1000, -np.inf], [-np.inf, -np.inf], [np.inf, 0], [np.inf, np.nan], [np.nan, 0]]
    x = Tensor(np.float32(rows), device=device)
    expected = [1000 + np.log(2), -1000, -np.inf, np.inf, np.nan, np.nan]
    with np.errstate(divide="ignore", invalid="ignore"):
        np.testing.assert_allclose(cudiff.logsumexp(x, 1).numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("shape, axis, kept", [((3, 0), 1, (3,)), ((0, 3), 1, (0,)), ((0,), None, ())])
def test_logsumexp_of_no_elements(device, shape, axis, kept):
    x = Tensor(np.zeros(shape, np.float32), requires_grad=True, device=device)
    out = ops.logsumexp(x, axis)
    np.testing.assert_array_equal(out.numpy(), np.full(kept, -np.inf, np.float32))
    np.testing.assert_array_equal(ops.logsumexp(x, axis, keepdims=True).numpy().reshape(kept), out.numpy())
    out.sum().backward()
    assert x.grad.shape == shape


def test_losses_are_float32(device):
    x = Tensor(np.ones((2, 3), np.float16), device=device)
    for name in ("mae", "huber", "binary_cross_entropy_with_logits"):
        loss = getattr(ops, name)(x, x)
        assert loss.dtype == np.float32 and loss.shape == ()


def test_logsumexp_of_what_float32_does_not_hold():
    x = np.array([1e300, 1e300 - 1e284, -np.inf])
    np.testing.assert_allclose(cudiff.logsumexp(Tensor(x)).item(), 1e300)


def test_what_they_do_not_take():
    x = Tensor(np.ones((2, 3), np.float32))
    for name in ("mae", "huber", "binary_cross_entropy_with_logits"):
        with pytest.raises(ValueError, match=rf"{name}: shapes \(2, 3\) and \(3,\) must be equal"):
            getattr(ops, name)(x, x[0])
    with pytest.raises(ValueError, match="huber: delta is above 0, not 0"):
        cudiff.huber(x, x, 0)
    with pytest.raises(ValueError, match="softplus: beta is above 0, not -1"):
        cudiff.softplus(x, -1)
    with pytest.raises(ValueError, match='gelu: approximate is "none" or "tanh", not \'erf\''):
        cudiff.gelu(x, "erf")


def test_logaddexp_of_infinities_and_far_numbers(device):
    a, b = np.float32([-np.inf, np.inf, 1000, -1000, -np.inf]), np.float32([-np.inf, 1, 1000, 1000, 2])
    out = np.logaddexp(Tensor(a, device=device), Tensor(b, device=device))
    np.testing.assert_allclose(out.numpy(), np.logaddexp(a, b), rtol=1e-6)
    x = Tensor(np.float64([1.0, 3.0]), requires_grad=True)
    np.logaddexp(x, 1.0).sum().backward()
    np.testing.assert_allclose(x.grad, 1 / (1 + np.exp(1 - x.numpy())), rtol=1e-12)


def test_logaddexp_near_zero_keeps_its_digits(device):
    x = np.float32([0, -9, -20.5, -100])
    for out in (np.logaddexp(0, Tensor(x, device=device)), np.logaddexp(Tensor(x, device=device), 0)):
        np.testing.assert_allclose(out.numpy(), np.logaddexp(0, x), rtol=1e-6)


def test_slopes_of_logaddexp_beside_infinities_and_at_equal_numbers(device):
    pair = np.float32([np.inf, -np.inf, 0, 2, 2]), np.float32([0, 1, -np.inf, np.inf, 2])
    a, b = (Tensor(x, requires_grad=True, device=device) for x in pair)
    cudiff.logaddexp(a, b).sum().backward()
    assert Tensor(a.grad).tolist() == [1, 0, 1, 0, 0.5] and Tensor(b.grad).tolist() == [0, 1, 0, 1, 0.5]
    assert cudiff.grad(cudiff.grad(cudiff.logaddexp))(1.0, 1.0) == 0.25
