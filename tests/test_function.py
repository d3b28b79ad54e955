"""What a user's Function may return, and what is done with it."""

import numpy as np
import pytest

from cudiff import Function, Tensor


def leaf(values, dtype=np.float32):
    return Tensor(np.asarray(values, dtype), requires_grad=True)


def function(backward, forward=lambda x, y: x * y, promises=False):
    """A Function of x and y with this backward(dout, x, y), which promises to be fresh or nothing."""

    class Product(Function):
        fresh = promises

        @staticmethod
        def forward_numpy(ctx, x, y):
            ctx.save(x, y)
            return forward(x, y)

        @staticmethod
        def backward_numpy(ctx, dout, needs, into):
            return backward(dout, *ctx.saved)

    return Product


@pytest.mark.parametrize("backward, error, message", [
    (lambda d, x, y: d * y, TypeError, "backward returned an array of float32 on cpu: return a tuple"),
    (lambda d, x, y: [d * y, d * x], TypeError, "backward returned a list: return a tuple"),
    (lambda d, x, y: None, TypeError, "backward returned None: return a tuple"),
    (lambda d, x, y: (d * y,), ValueError, "backward returned 1 gradients for 2 inputs"),
    (lambda d, x, y: (d * y, d * x, None), ValueError, "backward returned 3 gradients for 2 inputs"),
    (lambda d, x, y: (d * y, (d * x)[:, :1]), ValueError, r"of shape \(3, 1\) for input 1 \(y\), which has \(3, 4\)"),
    (lambda d, x, y: ((d * y).sum(), d * x), ValueError, r"of shape \(\) for input 0 \(x\), which has \(3, 4\)"),
    (lambda d, x, y: (d * y, (d * x).T), ValueError, r"of shape \(4, 3\) for input 1"),
    (lambda d, x, y: (d * y, (d * x).astype(int)), TypeError, "of int64 for input 1"),
    (lambda d, x, y: (d * y, (d * x).astype(np.float16)), TypeError, "of float16 for input 1"),
    (lambda d, x, y: (2.0, d * x), TypeError, r"returned a float for input 0 \(x\): return an array on cpu"),
    (lambda d, x, y: (Tensor(d) * Tensor(y), d * x), TypeError, "returned a Tensor for input 0"),
    (lambda d, x, y: (d * y, (d * x).tolist()), TypeError, "returned a list for input 1"),
])
def test_a_wrong_gradient_is_refused(backward, error, message):
    x, y = leaf(np.ones((3, 4))), leaf(np.ones((3, 4)))
    out = function(backward).apply(x * 1.0, y).sum()
    with pytest.raises(error, match=f"^Product's.*{message}"):
        out.backward()


@pytest.mark.parametrize("result, message", [
    (None, "returned None"), ((), "returned None"), ([1.0], "returned a list"), (1.0, "returned a float"),
    ("text", "returned a str"), ((np.ones(3), None), "returned None"), (Tensor([1.0]), "returned a Tensor"),
], ids=str)
def test_a_forward_returns_arrays(result, message):
    with pytest.raises(TypeError, match=f"^Product's forward {message}: return an array on cpu, or a tuple of arrays$"):
        function(None, lambda x, y: result).apply(leaf([1.0]), leaf([1.0]))


def test_a_forward_returns_numbers():
    with pytest.raises(TypeError, match="real numbers"):
        function(None, lambda x, y: x * 1j).apply(leaf([1.0]), leaf([1.0]))


def test_a_gradient_that_nobody_wants_is_not_looked_at():
    x = leaf([2.0, 3.0])
    function(lambda d, x, y: (d * y, "nothing")).apply(x, Tensor([4.0, 5.0])).sum().backward()
    assert x.grad.tolist() == [4, 5]


def test_a_16_bit_input_takes_a_float32_gradient():
    x, y = leaf([2.0, 3.0], np.float16), leaf([4.0, 5.0], np.float16)
    function(lambda d, x, y: (np.float32(d * y), d * x)).apply(x, y).sum().backward()
    assert x.grad.tolist() == [4, 5] and y.grad.tolist() == [2, 3]


@pytest.mark.parametrize("dtypes", [(np.float32, np.float64), (np.float16, np.float32)], ids=str)
def test_a_gradient_of_another_width_takes_the_inputs(dtypes):
    x, y = leaf([2.0, 3.0], dtypes[0]), leaf([4.0, 5.0], dtypes[1])
    function(lambda d, x, y: (np.float64(d * y), np.float32(d * x))).apply(x, y).sum().backward()
    assert x.grad.tolist() == [4, 5] and y.grad.tolist() == [2, 3]
    assert x.grad.dtype == np.float32 and y.grad.dtype == dtypes[1]


SAME = {
    "an array": lambda d, x, y: (g := d * 2, g),
    "a view": lambda d, x, y: (g := d * 2, g[:]),
    "two views": lambda d, x, y: ((g := d * 2).reshape(2), g[::1]),
    "dout": lambda d, x, y: (d, d),
    "dout and a view": lambda d, x, y: (d, d[:]),
}


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("name", SAME)
def test_a_result_returned_twice(name, fresh):
    """Neither input's further terms reach the other, nor leaf the other leaf."""
    scale = 2 if "dout" not in name else 1
    sum_of = function(SAME[name], lambda x, y: scale * (x + y), fresh)
    a, b = leaf([1.0, 2.0]), leaf([3.0, 4.0])
    sum_of.apply(a, b).sum().backward()
    a.grad *= 5
    assert b.grad.tolist() == [scale] * 2
    for first in (0, 1):  # a further term for one of them, which the tape adds after or before
        a, b = leaf([1.0, 2.0]), leaf([3.0, 4.0])
        p, q = a * 1.0, b * 1.0
        more = (p, q)[first] * 10.0
        before = (p.exp() * 0.0 + p) if first == 0 else p
        out = sum_of.apply(before, q)
        (out * 1.0 + more).sum().backward()
        extra = [10, 0] if first == 0 else [0, 10]
        assert a.grad.tolist() == [scale + extra[0]] * 2 and b.grad.tolist() == [scale + extra[1]] * 2


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("name", SAME)
def test_a_result_returned_twice_and_added_to(name, fresh):
    """p has a second, older consumer: its gradient is added to what the pair shares before q's producer reads it."""
    scale = 2 if "dout" not in name else 1
    a, b = leaf([1.0, 2.0]), leaf([3.0, 4.0])
    q = b * 1.0  # the oldest node: its backward runs last
    p = a * 1.0
    older = p * 10.0
    out = function(SAME[name], lambda x, y: scale * (x + y), fresh).apply(p, q) * 1.0
    (out + older).sum().backward()
    assert a.grad.tolist() == [scale + 10] * 2 and b.grad.tolist() == [scale] * 2


@pytest.mark.parametrize("fresh", [False, True])
def test_a_saved_array_may_be_the_gradient(fresh):
    """d(x·y) for a dout of ones: the inputs themselves, which later terms must not change."""
    x, y = leaf([2.0, 3.0]), leaf([4.0, 5.0])
    product = function(lambda d, x, y: (y, x), promises=fresh)
    for _ in range(2):
        product.apply(x, y).sum().backward()
    assert x.data.tolist() == [2, 3] and y.data.tolist() == [4, 5]
    assert x.grad.tolist() == [8, 10] and y.grad.tolist() == [4, 6]


def test_an_array_that_backward_keeps():
    """It is the gradient of two inputs on several calls, and stays what it is."""
    one = np.ones(2, np.float32)
    add = function(lambda d, x, y: (one, one), lambda x, y: x + y)
    x, y = leaf([2.0, 3.0]), leaf([4.0, 5.0])
    for a, b in ((x, y), (x, y), (x * 1.0, y * 1.0), (x, x)):
        add.apply(a, b).sum().backward()
    assert x.grad.tolist() == [5, 5] and y.grad.tolist() == [3, 3] and one.tolist() == [1, 1]
    h = x * 1.0
    (add.apply(h, h) + add.apply(h, y) + h).sum().backward()  # further terms are added to h's
    assert x.grad.tolist() == [9, 9] and y.grad.tolist() == [4, 4] and one.tolist() == [1, 1]


def doubling(d, x, y):
    d *= 2
    return d, d


def test_a_backward_that_writes_to_its_dout():
    """What others have of it stays: the other operand of a sum, a leaf's gradient, what the caller gave."""
    double = function(doubling, lambda x, y: 2 * (x + y))
    x, y, z = leaf([2.0, 3.0]), leaf([4.0, 5.0]), leaf([6.0, 7.0])
    start = np.ones(2, np.float32)
    (double.apply(x, y) + z).backward(start)
    (z + double.apply(double.apply(x, y), y)).backward(start)
    assert x.grad.tolist() == [6, 6] and y.grad.tolist() == [8, 8] and z.grad.tolist() == [2, 2]
    assert start.tolist() == [1, 1]


def test_a_masked_array_is_refused_from_either_side():
    x, y = leaf([2.0, 3.0]), leaf([4.0, 5.0])
    with pytest.raises(TypeError, match="'s backward returned a MaskedArray for input 1 "):
        function(lambda d, x, y: (d, np.ma.array(d, mask=[True, False]))).apply(x, y).sum().backward()
    with pytest.raises(TypeError, match="'s forward returned a MaskedArray: return an array on cpu"):
        function(lambda d, x, y: (d, d), lambda x, y: np.ma.array(x)).apply(x, y)


def test_a_leaf_of_another_shape_since_the_forward_is_refused():
    """Its gradient is of the new shape: what was recorded of the old one may not be added there."""
    x = leaf(np.ones((4, 3)))
    first = (x[0] * 1).sum()
    x.data = np.ones((2, 3), np.float32)
    x.sum().backward()
    with pytest.raises(ValueError, match=r"gradient of shape \(2, 3\) for input 0 \(x\), which has \(4, 3\)"):
        first.backward()
