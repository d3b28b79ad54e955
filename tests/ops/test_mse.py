import ml_dtypes
import numpy as np
import pytest

from cudiff.ops.mse import mse
from cudiff.tensor import Tensor
from tests.check import check_op

SHAPES = [(2, 4, 4, 3), (1, 1), (5,), (3, 7, 5, 1), (64, 16, 16, 8), (2, 40001), (1500, 9)]


def reference(pred, target, weight):
    square = (pred - target) ** 2
    return (square if weight is None else square * weight.reshape(-1, *(1,) * (pred.ndim - 1))).mean()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_mse(device, rng, shape, weighted):
    check_op(
        mse, rng.standard_normal(shape), rng.standard_normal(shape), rng.random(shape[0]) if weighted else None,
        device=device, torch_fn=reference, fp32_inputs=(2,),  # in float16 the gradient of a mean of many underflows
    )


def test_the_loss_is_float32(device):
    pred, target = (Tensor(np.ones((2, 3), ml_dtypes.bfloat16) * k, device=device) for k in (1, 3))
    loss = mse(pred, target)
    assert loss.dtype == np.float32 and loss.shape == () and loss.item() == 4


def test_mixed_dtypes_meet_in_float32(device, rng):
    pred, target = rng.standard_normal((2, 5)).astype(np.float16), rng.standard_normal((2, 5)).astype(np.float32)
    x = Tensor(pred, requires_grad=True, device=device)
    loss = mse(x, Tensor(target, device=device))
    loss.backward()
    np.testing.assert_allclose(loss.item(), ((pred.astype(np.float32) - target) ** 2).mean(), rtol=1e-6)
    assert x.grad.dtype == np.float16


@pytest.mark.parametrize("weight", [
    [1, 3], np.array([1, 3]), np.array([1.0, 3.0]), Tensor([1.0, 3.0], dtype="float64"),
], ids=["list", "integers", "float64", "tensor"])
def test_a_weight_is_read_in_the_losss_dtype(device, weight):
    if isinstance(weight, Tensor) and device == "cuda":
        pytest.skip("a GPU has no float64")
    pred, target = (Tensor(np.full((2, 4), k, np.float32), device=device) for k in (1, 3))
    loss = mse(pred, target, weight)
    assert loss.dtype == np.float32 and loss.item() == 8


def test_a_weight_of_pytorchs_that_wants_a_gradient_is_refused():
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match="records no gradient of PyTorch's"):
        mse(np.ones((2, 3)), np.ones((2, 3)), torch.ones(2, requires_grad=True))


def test_two_runs_are_bit_equal(device, rng):
    arrays = [Tensor(rng.standard_normal((7, 33, 17, 3)), device=device, dtype=np.float32) for _ in range(2)]
    assert mse(*arrays).numpy().tobytes() == mse(*arrays).numpy().tobytes()


def test_shapes_that_do_not_fit():
    with pytest.raises(ValueError, match="mse: pred of shape"):
        mse(Tensor(np.zeros((2, 3))), Tensor(np.zeros((2, 1))))
    with pytest.raises(ValueError, match="the weight has shape"):
        mse(Tensor(np.zeros((2, 3))), Tensor(np.zeros((2, 3))), Tensor(np.zeros(3)))
