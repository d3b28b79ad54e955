"""Gradients of functions of arrays, and gradients of gradients."""

import math
from typing import NamedTuple

import numpy as np
import pytest

import cudiff
from cudiff import Tensor, check_gradient, elementwise_grad, grad, nn, no_grad, ops, value_and_grad, vjp
from cudiff.derivatives import DERIVATIVES
from cudiff.ops.place import place, place_rows

RNG = np.random.default_rng(5)


def test_a_gradient_comes_back_as_its_argument_was_given(device):
    x = np.array([1.0, 2.0], np.float32)

    def f(x):
        return np.sum(x * x)

    gradient = grad(f)(x)
    assert type(gradient) is np.ndarray and gradient.dtype == np.float32 and gradient.tolist() == [2, 4]
    assert grad(f)(x.astype(np.float64)).dtype == np.float64
    assert type(grad(f)(3.0)) is float and grad(f)(3.0) == 6
    of_tensor = grad(f)(Tensor(x, device=device))
    assert isinstance(of_tensor, Tensor) and of_tensor.device == device and not of_tensor.requires_grad
    assert of_tensor.numpy().tolist() == [2, 4]
    assert abs(grad(np.tanh)(1.0) - (1 - np.tanh(1.0) ** 2)) < 1e-15  # in float64


class Pair(NamedTuple):
    w: np.ndarray
    b: np.ndarray


def test_lists_tuples_and_dicts_of_arrays():
    tree = {"a": [np.ones(2), (np.ones((2, 2)), 2.0)], "b": Pair(np.ones(3), np.zeros(1))}
    gradient = grad(lambda t: np.sum(t["a"][0] * 3) + np.sum(t["a"][1][0]) * t["a"][1][1] + np.sum(t["b"].w * 5))(tree)
    assert gradient["a"][0].tolist() == [3, 3] and gradient["a"][1][0].tolist() == [[2, 2], [2, 2]]
    assert gradient["a"][1][1] == 4 and isinstance(gradient["b"], Pair)
    assert gradient["b"].w.tolist() == [5, 5, 5] and gradient["b"].b.tolist() == [0]  # of what it does not depend on


def test_several_arguments():
    a, b = np.array([1.0, 2.0]), np.array([3.0, 5.0])
    value, (da, db) = value_and_grad(lambda a, b, scale: np.sum(a * b) * scale, (0, 1))(a, b, scale=2)
    assert value == 26 and type(value) is float and da.tolist() == [6, 10] and db.tolist() == [2, 4]
    assert grad(lambda a, b: np.sum(a * b), argnums=-1)(a, b).tolist() == a.tolist()
    assert [g.tolist() for g in grad(lambda a, b: np.sum(a * b), (0, 1))(a, a)] == [[1, 2], [1, 2]]
    with pytest.raises(TypeError, match=r"argnums is \(2,\), and the function got 2 arguments by position"):
        grad(lambda a, b: a, argnums=2)(a, b)


def test_vjp():
    x, w = RNG.standard_normal((3, 4)), RNG.standard_normal((4, 2))
    out, pull_back = vjp(lambda x, w: x @ w, x, w)
    np.testing.assert_allclose(out, x @ w)
    dout = RNG.standard_normal((3, 2))
    dx, dw = pull_back(dout)
    np.testing.assert_allclose(dx, dout @ w.T)
    np.testing.assert_allclose(dw, x.T @ dout)
    with pytest.raises(ValueError, match=r"the gradient has shape \(3,\), the value \(2,\)"):
        vjp(lambda x: x * 2, np.ones(2))[1](np.ones(3))
    dout = np.ones(2)
    (same,) = vjp(lambda x: x, np.zeros(2))[1](dout)
    dout[:] = 7
    assert same.tolist() == [1, 1]


def test_an_argument_is_chosen_by_numpys_integers_too():
    assert grad(lambda x, y: x * y**2, np.int64(1))(3.0, 2.0) == 12
    assert elementwise_grad(lambda x, y: x * y, np.int64(0))(np.ones(2), 2.0).tolist() == [2, 2]


def test_what_is_refused():
    with pytest.raises(TypeError, match=r"grad needs a function that returns one number, not an array of shape \(2,\)"):
        grad(lambda x: x * 2)(np.ones(2))
    for x in (3, np.arange(3), True):
        with pytest.raises(TypeError, match=r"argument 0 holds .*, which has no gradient: give floating numbers"):
            grad(np.sum)(x)
    with pytest.raises(TypeError, match="a function that is differentiated returns an array, not NoneType"):
        grad(lambda x: None)(1.0)


def test_a_function_that_does_not_depend_on_its_argument():
    assert grad(lambda x: 3.0)(np.ones(2)).tolist() == [0, 0]
    assert grad(lambda x: np.sum(x.detach()))(np.ones(2)).tolist() == [0, 0]
    assert grad(lambda x: x)(2.0) == 1


def test_a_function_that_reads_what_was_given_in_place_of_its_argument():
    layer, x = nn.Linear(3, 2), Tensor(np.ones((1, 3), np.float32))
    for wrong in (lambda: value_and_grad(lambda ps: layer(x).sum())(layer.parameters()),
                  lambda: grad(lambda w: layer(x).sum())(layer.weight)):
        with pytest.raises(TypeError, match=r"and not its arguments: their gradients come by loss.backward\(\)$"):
            wrong()
    assert grad(lambda b: np.sum(x @ layer.weight.T + b + layer.bias))(layer.bias).tolist() == [1, 1]
    assert layer.weight.grad is None


def test_a_number_made_of_a_tensor_does_not_lose_the_gradient_in_silence():
    """It had been 0; a number for what is printed, and of what needs no gradient, is as before."""
    for function in (lambda x: float(x) ** 2, math.sin, lambda x: math.sqrt(np.sum(x * x))):
        with pytest.raises(TypeError, match=r"would lose the gradient .* write np\.sin\(x\), or x\.item\(\) for"):
            grad(function)(2.0)
    assert grad(lambda x: x * x.item() * float(x.detach()))(2.0) == 4 and grad(lambda x: x * len(f"{x:.2f}"))(2.0) == 4
    assert math.sin(Tensor(2.0, requires_grad=True)) == pytest.approx(math.sin(2))


def test_nothing_around_it_is_touched():
    """Neither a layer's gradients, nor what was recorded before, nor the argument itself."""
    layer, x = nn.Linear(3, 2), Tensor(np.ones((1, 3), np.float32), requires_grad=True)
    hidden = layer(x)
    gradient = grad(lambda y: np.sum(layer(y) * hidden))(x)
    assert layer.weight.grad is None and x.grad is None and gradient.shape == (1, 3)
    hidden.sum().backward()
    assert x.grad is not None and layer.weight.grad is not None
    with no_grad():
        assert grad(lambda x: np.sum(x * x))(np.ones(2)).tolist() == [2, 2]


def test_check_gradient_names_what_is_wrong():
    check_gradient(lambda a, b: np.sin(a) @ b["w"], RNG.standard_normal((2, 3)), {"w": RNG.standard_normal((3, 2))})
    check_gradient(lambda x: x * x, 1e6)

    class Wrong(cudiff.Function):
        @staticmethod
        def forward_numpy(ctx, x):
            return x * x

        @staticmethod
        def backward_numpy(ctx, dout, needs, into):
            return (dout * np.array([2.0, 0.0]),)

    with pytest.raises(AssertionError, match=r"the gradient of argument 0 at \[1\] is 0, by differences 5.0"):
        check_gradient(Wrong.apply, np.array([1.0, 2.0]))


class Forgetful(cudiff.Function):
    """x²; its backward gives 2x, whatever dout is."""

    @staticmethod
    def forward_numpy(ctx, x):
        ctx.save(x)
        return x * x

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        return (2 * ctx.saved[0],)


@pytest.mark.parametrize("x", [np.ones(3), np.array(3.0), 3.0])
def test_check_gradient_notices_a_backward_that_forgets_its_dout(x):
    for function in (Forgetful.apply, lambda x: np.sum(Forgetful.apply(x))):
        with pytest.raises(AssertionError, match=r"the gradient of argument 0 at .* is [26], by differences"):
            check_gradient(function, x)


def test_derivatives_of_any_order():
    x = np.linspace(-2, 2, 9)
    f, orders = np.tanh, []
    for _ in range(5):
        orders.append(f(x))
        f = elementwise_grad(f)
    t = np.tanh(x)
    for order, expected in zip(orders, [t, 1 - t**2, -2 * t * (1 - t**2), (1 - t**2) * (6 * t**2 - 2)], strict=False):
        np.testing.assert_allclose(order, expected, atol=1e-12)
    check_gradient(elementwise_grad(elementwise_grad(elementwise_grad(np.tanh))), x)


W = RNG.standard_normal((3, 4))
SECOND = {
    "negative": lambda x: (-x) ** 3, "exp": np.exp, "log": lambda x: np.log(x * x + 1),
    "sqrt": lambda x: np.sqrt(x * x + 1), "cbrt": np.cbrt, "sin": np.sin, "cos": np.cos,
    "hypot": lambda x: np.hypot(x, x * x), "square": lambda x: np.square(x) * x,
    "tanh": np.tanh, "sigmoid": cudiff.sigmoid, "silu": cudiff.silu, "abs": lambda x: np.abs(x) ** 3,
    "relu": lambda x: cudiff.relu(x) ** 3, "clip": lambda x: np.clip(x, -0.5, 0.5) ** 3,
    "one end": lambda x: np.clip(x, None, 0.5) ** 3 + np.clip(x, min=-0.5) ** 3,
    "steps": lambda x: (np.sign(x) + np.floor(x) + np.ceil(x) + np.round(x)) * x**2,
    "tan": np.tan, "softplus": cudiff.softplus, "expm1": np.expm1,
    "exp2": np.exp2, "log2": lambda x: np.log2(x * x + 1), "log10": lambda x: np.log10(x * x + 1),
    "arcsin": lambda x: np.arcsin(x / 2), "arccos": lambda x: np.arccos(x / 2), "arctan": np.arctan, "sinh": np.sinh,
    "cosh": np.cosh, "arcsinh": np.arcsinh, "arccosh": lambda x: np.arccosh(x * x + 2),
    "arctanh": lambda x: np.arctanh(x / 2), "maximum": lambda x: np.maximum(x**3, 0.1 * x) + np.maximum(0.3, x) ** 2,
    "minimum": lambda x: np.minimum(np.sin(x), np.sum(x)) ** 2,
    "log1p": lambda x: np.log1p(x * x), "arctan2": lambda x: np.arctan2(x, x * x + 1),
    "floor_divide": lambda x: x // 0.3 * x**2, "remainder": lambda x: 2 % (x * x) + x**3 % 0.4,
    "cumsum": lambda x: np.cumsum(x, 0) ** 3, "mask": lambda x: x[x > 0] ** 3,
    "add": lambda x: (x + np.sum(x, 0, keepdims=True)) ** 3, "subtract": lambda x: (np.sum(x) - x) ** 3,
    "divide": lambda x: x / (1 + x * x), "numbers": lambda x: 2 / (x + 9) - (1 - x) ** 3,
    "power": lambda x: (x * x + 1) ** (x / 3), "number to a power": lambda x: 2.0**x,
    "lerp": lambda x: cudiff.lerp(x**3, np.sin(x), np.mean(x, 1, keepdims=True)) + cudiff.lerp(x, x * x, 0.3) ** 2,
    "where": lambda x: np.where(W > 0, x**3, np.sin(x)), "astype": lambda x: (x + x.astype("float32")) ** 3,
    "var": lambda x: np.var(x, 0, ddof=1) ** 2, "mean": lambda x: np.mean(x, (0, 1)) ** 3,
    "max": lambda x: np.max(x * x, 1) ** 2, "min": lambda x: np.min(x * x, (0, 1)) ** 2, "ptp": lambda x: np.ptp(x**3),
    "mse": lambda x: cudiff.mse(x**2, np.sin(x)) * x.sum(),
    "weighted mse": lambda x: cudiff.mse(x**2, x, np.square(x[:, 1])) ** 2,
    "cross entropy": lambda x: cudiff.cross_entropy(x**2, np.array([2, 0, 3])) * x.sum(),
    "gelu by tanh": lambda x: cudiff.gelu(x, "tanh") ** 2,
    "layer norm": lambda x: cudiff.layer_norm(x, x[0], x[1]) ** 2,
    "modulated": lambda x: cudiff.layer_norm(x.reshape(2, 3, 2), x[:2, :2], x[1:, 2:], plus_one=True) ** 2,
    "layer norm of rows": lambda x: cudiff.layer_norm(x, x * 2, x) ** 2,
    "embedding": lambda x: cudiff.embedding(Tensor(np.int32([[2, 0], [2, -1]])), x) ** 3,
    "softmax": lambda x: cudiff.softmax(x) ** 2, "log_softmax": lambda x: cudiff.log_softmax(x, 0) ** 2,
    "matmul": lambda x: (x @ W.T) @ x,
    "batched": lambda x: (np.reshape(x, (3, 2, 2)) @ np.reshape(x, (3, 2, 2))) ** 2,
    "linear": lambda x: ops.linear(x, x, np.ones(3)) ** 2,
    "mlp": lambda x: ops.mlp(x, W, None, W.T, np.ones(4), x, "silu") ** 2,
    "gated": lambda x: ops.linear(np.reshape(x, (3, 2, 2)), W[:2, :2], None, np.reshape(x, (3, 2, 2)), x[:, :2]),
    "reshape": lambda x: np.reshape(x, -1) ** 3,
    "transpose": lambda x: np.transpose(x) @ x, "broadcast_to": lambda x: np.broadcast_to(x, (2, 3, 4)) ** 3,
    "concatenate": lambda x: np.concatenate([x, x * x], 1) ** 2, "pad": lambda x: ops.pad(x, 1) ** 3,
    "split": lambda x: np.split(x, [1, 3], 1)[1] ** 3, "rows": lambda x: np.split(x, [1], 0)[1] ** 3,
    "slice": lambda x: x[::-2, None, 1:] ** 3 * x[0, 0],
    "place": lambda x: place(x, (2, 3, 9), np.s_[1, :, 8:0:-2]) ** 3,
    "take": lambda x: x[[2, 0, 2, -1]] ** 3, "roll": lambda x: np.roll(x, 3, 1) ** 3 * x,
    "index": lambda x: x[:, [0, 0, 3]] ** 3 * x[[1], 0], "prod": lambda x: np.prod(x, 1),
    "sort": lambda x: np.sort(x, 1) ** 3 * np.median(x), "set": lambda x: x.at[[2, 0, 2]].set(x**2) ** 2,
    "place rows": lambda x: place_rows(x, (2, 4), Tensor(np.int32([1, 0, 1]))) ** 3,
}


@pytest.mark.parametrize("name", SECOND)
def test_the_gradient_of_a_gradient(name):
    f, x, v = SECOND[name], RNG.uniform(0.2, 1.5, (3, 4)) * RNG.choice([-1, 1], (3, 4)), RNG.standard_normal((3, 4))
    first = grad(lambda x: cudiff.sum(f(x)))
    np.testing.assert_allclose(
        grad(lambda x: cudiff.sum(f(x)), create_graph=True)(x).numpy(), first(x), rtol=1e-9, atol=1e-9,
    )
    if name != "astype":  # float32 is too coarse for differences
        check_gradient(lambda x: first(x) * v, x)


def test_every_derivative_has_its_case(monkeypatch):
    used = set()
    for function, derivative in list(DERIVATIVES.items()):
        def noted(*args, function=function, derivative=derivative, **attrs):
            used.add(function)
            return derivative(*args, **attrs)

        monkeypatch.setitem(DERIVATIVES, function, noted)
    for f in SECOND.values():
        grad(lambda x, f=f: cudiff.sum(f(x)), create_graph=True)(W)
    assert used == set(DERIVATIVES)


def test_a_penalty_on_a_gradient():
    """As of WGAN-GP (Gulrajani et al. 2017): weights learn from the norm of the gradient with respect to the input."""
    w, x = RNG.standard_normal((4, 3)), RNG.standard_normal((5, 4))

    def penalty(w, of=grad):
        slope = of(lambda x: np.sum(np.tanh(x @ w)))(x)
        return np.mean((np.sum(slope**2, 1) ** 0.5 - 1) ** 2)

    check_gradient(penalty, w)
    weight = Tensor(w, requires_grad=True)
    penalty(weight, lambda f: grad(f, create_graph=True)).backward()
    np.testing.assert_allclose(weight.grad, grad(penalty)(w), rtol=1e-9)


def test_an_operation_without_a_stated_derivative():
    x = RNG.standard_normal((1, 3, 3, 1))
    with pytest.raises(RuntimeError, match=r"Conv2d has no gradient of its gradient: cudiff/derivatives.py does not"):
        grad(lambda x: np.sum(grad(lambda y: np.sum(ops.conv2d(y, np.ones((1, 1, 1, 1)))))(x)))(x)


@pytest.mark.parametrize("function, at, expected", [
    (lambda x: np.arctan2(x, 0.0 * x), 0.0, 0.0), (lambda x: np.arctan2(x, 1e200), 1e200, 5e-201),
    (lambda x: 1e200 / x, 1e200, -1e-200),
])
def test_a_gradient_to_be_differentiated_holds_where_squares_overflow(function, at, expected):
    """As the plain gradient does."""
    for create_graph in (False, True):
        _, slope = cudiff.value_and_grad(function, create_graph=create_graph)(np.array(at))
        np.testing.assert_allclose(np.asarray(getattr(slope, "data", slope)), expected, rtol=1e-12)


def test_a_product_with_the_hessian_of_a_network_and_its_loss():
    """Held to differences of the gradient along the vector."""
    x, labels = RNG.standard_normal((5, 4)), np.array([0, 2, 1, 2, 0])

    def loss(w, v):
        hidden = cudiff.gelu(cudiff.layer_norm(cudiff.linear(x, w), Tensor(np.ones(6)), Tensor(np.zeros(6))), "tanh")
        return cudiff.cross_entropy(cudiff.linear(hidden, v), labels) + cudiff.mse(hidden, 0.5 * hidden.tanh())

    w, v, along = RNG.standard_normal((6, 4)), RNG.standard_normal((3, 6)), RNG.standard_normal((6, 4))
    product = grad(lambda w: np.sum(grad(loss)(w, v) * along))(w)
    expected = (grad(loss)(w + 1e-5 * along, v) - grad(loss)(w - 1e-5 * along, v)) / 2e-5
    np.testing.assert_allclose(product, expected, rtol=1e-6, atol=1e-8)


def test_mixed_derivatives_of_a_power_agree_where_the_exponent_is_0():
    def power(a, b):
        return cudiff.sum(np.power(a, b))

    a, b = np.array([2.0]), np.array([0.0])
    assert grad(lambda b: cudiff.sum(grad(power, 0)(a, b)))(b)[0] == pytest.approx(0.5)
    assert grad(lambda a: cudiff.sum(grad(power, 1)(a, b)))(a)[0] == pytest.approx(0.5)


def test_hubers_second_derivative_where_nothing_differs():
    def huber(x):
        return cudiff.huber(x, np.array([1.0, 2.0]))

    np.testing.assert_allclose(grad(lambda x: cudiff.sum(grad(huber)(x)))(np.array([1.0, 5.0])), [0.5, 0.0])


def test_a_tensor_does_not_change_inside_of_what_is_differentiated_twice():
    def f(x):
        scale = Tensor([3.0], dtype="float64")
        y = x * x * scale
        scale.change(Tensor([100.0], dtype="float64"))
        return cudiff.sum(y)

    assert grad(f)(np.array([2.0]))[0] == 12
    with pytest.raises(RuntimeError, match="does not change in place"):
        grad(lambda x: cudiff.sum(grad(f)(x)))(np.array([2.0]))
