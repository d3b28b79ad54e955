"""Habits of NumPy's users: each does what it says, or is refused by one clear line."""

import numpy as np
import pytest

import cudiff
from cudiff import nn
from cudiff.tensor import Tensor


@pytest.mark.parametrize("reduction", [
    "sum(x, 0, float)", "mean(x, 1, np.float32)", "max(x, 0, np.ones(()))", "std(x, 0, np.float64)", "any(x, 0, float)",
    "argmax(x, 0, np.ones((), int))", "prod(x, 1, float)", "prod(i, 1, float)", "quantile(x, 0.5, 0, None)",
])
def test_a_dtype_or_out_by_position_is_not_taken_for_keepdims(reduction):
    """NumPy's third argument is another one."""
    x, i = Tensor([[1.0, 2.0], [3.0, 4.0]]), Tensor([[1, 2], [3, 4]])
    with pytest.raises(TypeError, match=r"keepdims is True or False, not .*: give other arguments by their names"):
        eval(f"np.{reduction}", {"np": np, "x": x, "i": i})
    assert np.sum(x, 0, keepdims=1).shape == (1, 2) and x.max(1, np.True_).shape == (2, 1)


def test_a_float64_array_does_not_widen_a_net(rng):
    array = rng.standard_normal((4, 6))
    net = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.BatchNorm1d(5))
    assert net(array).dtype == net(Tensor(array, dtype="float32")).dtype == np.float32
    assert nn.Conv2d(2, 3, 1)(array.reshape(1, 4, 3, 2)).dtype == np.float32
    assert cudiff.linear(array, Tensor(rng.standard_normal((2, 6)))).dtype == np.float64
    assert cudiff.softmax(array).dtype == np.float64


def test_polynomials_that_a_loop_writes_have_second_derivatives_at_zero():
    def polynomial(x):
        return sum(c * x**i for i, c in enumerate([1.0, 2.0, 3.0, 4.0]))

    assert cudiff.grad(cudiff.grad(polynomial))(0.0) == 6.0
    second = cudiff.grad(cudiff.grad(lambda x: np.sum(x ** np.arange(4.0))))
    assert second(0.0) == 2.0 and second(2.0) == 14.0
    third = cudiff.grad(cudiff.grad(lambda b: 3.0**b))
    np.testing.assert_allclose(third(2.0), 9 * np.log(3) ** 2)
    assert np.isnan(cudiff.grad(cudiff.grad(lambda b: (-3.0) ** b))(2.0))
    assert cudiff.grad(cudiff.grad(lambda b: 0.0**b))(2.0) == 0.0


@pytest.mark.parametrize("change", [
    lambda x: x.__ipow__(2), lambda x: x.__ifloordiv__(2), lambda x: x.__imod__(2), lambda x: x.__imatmul__(np.eye(2)),
])
def test_a_leaf_changes_in_place_by_every_operator(change):
    leaf = Tensor([3.0, 5.0], requires_grad=True)
    with pytest.raises(RuntimeError, match=r"only within cudiff.no_grad\(\): write x = x \+ y for a new tensor"):
        change(leaf)
    with cudiff.no_grad():
        assert change(leaf) is leaf


def test_what_loses_a_gradient_is_refused():
    leaf = Tensor([1.0, 2.0], requires_grad=True)
    with pytest.raises(BufferError, match=r"would lose this tensor's gradient: give it x.detach\(\)"):
        np.from_dlpack(leaf)
    assert np.from_dlpack(leaf.detach()).tolist() == [1.0, 2.0]
    with pytest.raises(TypeError, match=r"is a new tensor and takes no out: write a = a [+] x for a [+]= x"):
        array = np.zeros(2)
        array += leaf
    with pytest.raises(TypeError, match="the gradient of a tensor is an array, not a Tensor: give its"):
        leaf.grad = Tensor([1.0, 1.0])
    whole = Tensor([1, 2])
    whole.requires_grad = True
    with pytest.raises(TypeError, match=r"a tensor of int64 has no gradient: make one of x.astype\('float32'\)"):
        (whole * 0.5).sum().backward()


def test_membership_is_numpy_s():
    x = Tensor([[0.0, 1.0], [2.0, 3.0]])
    assert 2.0 in x and 5.0 not in x and "a" not in x and 1.0 in Tensor(1.0)


def test_a_function_that_calls_methods_is_checked():
    cudiff.check_gradient(lambda x: x.relu() + x.flatten().sigmoid(), np.array([1.0, -2.0]))


def test_numbers_of_numpy_are_sizes_too():
    x = Tensor(np.arange(4.0))
    assert [part.shape for part in np.split(x, np.int64(2))] == [(2,), (2,)]
    assert np.broadcast_to(Tensor(1.0), 4).shape == np.broadcast_to(Tensor(1.0), np.int64(4)).shape == (4,)
    assert np.reshape(x, np.array([2, -1])).shape == (2, 2)


def test_data_are_set_to_what_a_tensor_is_made_of(device):
    x = Tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], device=device)
    x.data = x.data.T  # a view, and kernels read whole arrays
    np.testing.assert_array_equal((x * 2).numpy(), [[2, 8], [4, 10], [6, 12]])
    for given in ([3.0, 4.0], Tensor([3.0, 4.0]), np.array([3.0, 4.0], ">f4")):
        x.data = given
        assert x.sum().item() == 7 and x.dtype == np.float32
    with pytest.raises(TypeError, match="real numbers"):
        x.data = np.array([1j])
    assert x.tolist() == [3, 4]


def test_data_of_another_shape_have_no_gradient_of_the_old(device):
    x = Tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True, device=device)
    x.sum().backward()
    x.data = Tensor([1.0, 2.0], device=device).data
    (x * 3).sum().backward()  # had been added to all rows
    np.testing.assert_array_equal(Tensor(x.grad).numpy(), [3, 3])


def test_pythons_round_and_divmod():
    x = Tensor([7.46, -3.0])
    assert round(x).tolist() == [7, -3] and round(x, 1).dtype == np.float32
    np.testing.assert_allclose(round(x, 1).numpy(), [7.5, -3], rtol=1e-6)
    assert round(Tensor(2.347), 2).item() == pytest.approx(2.35)
    for out, expected in (
        (divmod(x, 2), divmod(x.numpy(), 2)), (divmod(2, x), divmod(2, x.numpy())), (divmod(x, x), ([1, 1], [0, 0])),
    ):
        np.testing.assert_allclose([part.numpy() for part in out], expected, rtol=1e-6)
    assert divmod(Tensor([7.5], requires_grad=True), 2)[1].requires_grad
