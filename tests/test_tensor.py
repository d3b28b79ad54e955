"""The engine: construction, the tape, shared gradients, conversions, errors."""

import ml_dtypes
import numpy as np
import pytest

import cudiff
from cudiff import CudiffError, Function, Tensor, from_dlpack, nn, no_grad, ops
from cudiff.recompute import recomputed


def leaf(values, device="cpu", dtype=np.float32):
    return Tensor(np.asarray(values, dtype), requires_grad=True, device=device)


def grad(tensor):
    return Tensor(tensor.grad).numpy().tolist()


def test_construction():
    assert Tensor([1.0, 2.0]).dtype == np.float32
    assert Tensor([1, 2]).dtype == np.int64
    assert Tensor(np.ones(2)).dtype == np.float64
    assert Tensor([1.0], dtype=ml_dtypes.bfloat16).dtype == ml_dtypes.bfloat16
    assert Tensor(np.float32(3)).shape == ()
    assert Tensor(np.ones((3, 4)).T).data.flags.c_contiguous
    x = Tensor(np.ones((2, 3)))
    assert (x.shape, x.ndim, x.size, len(x), x.device, x.is_leaf) == ((2, 3), 2, 6, 2, "cpu", True)
    assert np.shares_memory(Tensor(x).data, x.data)
    with pytest.raises(TypeError, match="floating"):
        Tensor([1, 2], requires_grad=True)
    with pytest.raises(TypeError, match="len"):
        len(Tensor(1.0))
    for data in ("abc", [None], 1j):
        with pytest.raises(TypeError, match="a tensor holds real numbers"):
            Tensor(data)
    with pytest.raises(TypeError, match=r"real numbers .*, not object"):
        Tensor([1.0]) + None


def test_an_integer_is_an_index(device):
    assert list(range(3))[Tensor(np.array(1), device=device)] == 1 and [*range(Tensor(2))] == [0, 1]
    x = Tensor(np.arange(4))
    assert x[: Tensor(np.uint8(2))].numpy().tolist() == [0, 1]
    for other in (Tensor(1.0), Tensor([1]), Tensor(True)):
        with pytest.raises(TypeError, match="an index is an integer tensor without axes, not"):
            range(other)
    assert +x is x


REFUSED = {
    "text": np.array(["a", "b"]), "bytes": np.array([b"a"]), "objects": np.array([1, None], object),
    "dates": np.array(["2026-01-01"], "datetime64[D]"), "durations": np.array([1], "timedelta64[s]"),
    "complex": np.ones(2, np.complex64), "a complex scalar": np.complex128(1), "records": np.zeros(2, "i4,f4"),
    "long doubles": np.ones(2, np.longdouble), "float8": np.ones(2, ml_dtypes.float8_e4m3fn),
    "int4": np.ones(2, ml_dtypes.int4), "huge integers": [2**70],
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_real_number_is_refused(name):
    with pytest.raises(TypeError, match=r"^a tensor holds real numbers \(.*\), not [^\n]*$"):
        Tensor(REFUSED[name])


@pytest.mark.parametrize("dtype", ["complex64", "longdouble", "U3", "object", "M8[s]", ml_dtypes.float8_e5m2], ids=str)
def test_a_tensor_is_not_made_of_another_dtype(dtype):
    for data in ([1.0], np.ones(2, np.float32)):
        with pytest.raises(TypeError, match="a tensor holds real numbers"):
            Tensor(data, dtype=dtype)


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
def test_masks_and_matrices():
    masked = np.ma.masked_array([1.0, 2.0], mask=[False, True])
    for use in (Tensor, lambda x: Tensor([1.0, 2.0]) + x, lambda x: setattr(nn.Linear(1, 2).bias, "data", x),
                lambda x: setattr(nn.Linear(1, 2).bias, "grad", x)):
        with pytest.raises(TypeError, match=r"mask would be lost: give array\.filled\(value\)"):
            use(masked)
    square = Tensor(np.matrix([[1.0, 2.0], [3.0, 4.0]]))
    assert type(square.data) is np.ndarray and (square * square).numpy().tolist() == [[1, 4], [9, 16]]


def test_rows_of_different_lengths():
    with pytest.raises(ValueError, match=r"^a tensor's rows must be of equal lengths[^\n]*$"):
        Tensor([[1.0, 2.0], [3.0]])


@pytest.mark.parametrize("dtype", [*"?bhilqBHILQefd", ml_dtypes.bfloat16], ids=str)
def test_every_dtype_that_is_kept(dtype):
    assert Tensor(np.ones(2, dtype)).dtype == dtype and Tensor(np.ones(2, dtype)[0]).dtype == dtype


def test_the_other_byte_order_is_turned():
    x = Tensor(np.array([1.0, 2.0], ">f4"))
    assert x.dtype == np.float32 and x.dtype.isnative and x.numpy().tolist() == [1, 2]


def test_numbers():
    assert float(Tensor(2.5)) == 2.5 and int(Tensor([3])) == 3 and bool(Tensor([0.0])) is False
    with pytest.raises(ValueError, match=r"a tensor of shape \(2,\) is not one number"):
        float(Tensor([1.0, 2.0]))


def test_a_tensor_is_hashed_as_the_object_it_is():
    x, same = Tensor([1.0, 2.0]), Tensor([1.0, 2.0])
    assert {x: 1}[x] == 1 and same not in {x: 1} and len({x, same}) == 2


def test_same_input_twice(device):
    for fn, slope in ((lambda x: x + x, 2), (lambda x: x * x, 6), (lambda x: x - x, 0), (lambda x: x / x, 0)):
        x = leaf([3], device)
        fn(x).backward()
        assert grad(x) == [slope]
        y = leaf([1.5], device)
        fn(y * 2.0).backward()
        assert grad(y) == [2 * slope]


@pytest.mark.parametrize("shape", [(), (3,)], ids=str)
def test_fan_in(shape, device):
    x = leaf(np.full(shape, 2.0), device)
    h = x * 1.0
    out = h + h * h + cudiff.exp(h * 0.0) + h.reshape(shape) + (h + h)
    out.backward(Tensor(np.ones(shape, np.float32), device=device))
    assert np.allclose(Tensor(x.grad).numpy(), 8)


def test_a_shared_gradient_is_never_written_to(device):
    """`a + b` hands the same dout to both; later terms of one must not reach the other."""
    a, b = leaf([1, 2], device), leaf([3, 4], device)
    p, q = a * 1.0, b * 1.0
    start = Tensor(np.float32([1, 1]), device=device)
    ((p + q) + p * 10.0 + p.reshape(2, 1).reshape(2)).backward(start)
    assert grad(a) == [12, 12] and grad(b) == [1, 1]
    assert start.numpy().tolist() == [1, 1]


def test_a_gradient_that_is_passed_on_belongs_to_its_new_owner(device):
    x, weight = leaf([[1.0, 2.0]], device), leaf([[1.0, 0.0], [0.0, 1.0]], device)
    h = x * 1.0
    out = cudiff.ops.linear(h * 2.0, weight, residual=h)
    start = Tensor(np.ones((1, 2), np.float32), device=device).data
    (out * 1.0).backward(start)
    assert grad(x) == [[3, 3]] and grad(weight) == [[2, 4], [2, 4]]
    assert Tensor(start).numpy().tolist() == [[1, 1]]
    a, b = leaf([1.0, 2.0], device), leaf([3.0, 4.0], device)
    (cudiff.ops.add(a * 1.0, b * 1.0) * 2.0).sum().backward()  # both get the same array
    assert grad(a) == grad(b) == [2, 2]


def test_two_leaves_do_not_share_a_gradient(device):
    a, b = leaf([1, 2], device), leaf([3, 4], device)
    (a + b).backward(Tensor(np.float32([1, 1]), device=device))
    a.grad *= 5
    assert grad(b) == [1, 1]


def test_gradients_of_leaves_accumulate(device):
    for shape in ((), (2,)):
        x = leaf(np.full(shape, 2.0), device)
        for _ in range(3):
            (x * x).sum().backward()
        assert np.allclose(Tensor(x.grad).numpy(), 12)


def test_a_leaf_is_its_own_result(device):
    x = leaf(3.0, device)
    x.backward()
    x.backward()
    assert grad(x) == 2


def test_gradient_of_one_output_only(device):
    x = leaf(np.arange(6.0), device)
    first, _, third = cudiff.split(x, 3)
    (first.sum() + third.sum() * 2.0).backward()
    assert grad(x) == [1, 1, 0, 0, 2, 2]


def test_no_grad_and_detach(device):
    x = leaf([1, 2], device)
    with no_grad():
        y = x * 2.0
    assert not y.requires_grad and y.is_leaf
    assert (x * 2.0).requires_grad

    @no_grad()
    def double(x):
        return x * 2.0

    assert not double(x).requires_grad
    z = (x * 2.0).detach()
    assert not z.requires_grad
    (x * z).sum().backward()
    assert grad(x) == [2, 4]


def test_nested_no_grad():
    x = leaf([1.0])

    @no_grad()
    def inner(x):
        return x * 2.0

    with no_grad():
        with no_grad():
            pass
        assert not (x * 2.0).requires_grad  # the inner block's end does not switch recording on
        inner(x)
        assert not (x * 2.0).requires_grad
    assert (x * 2.0).requires_grad and not inner(x).requires_grad and not inner(inner(x)).requires_grad
    assert (x * 2.0).requires_grad


def test_no_grad_ends_with_an_error():
    with pytest.raises(KeyError), no_grad():
        raise KeyError
    assert cudiff.tensor.grad_enabled()


def test_integers_get_no_gradient():
    x = leaf([1.4, 2.6])
    assert not x.astype("int32").requires_grad


def test_nothing_is_kept_after_backward(device):
    x = leaf([1, 2], device)
    y = x * x
    node = y._source[0]
    y.sum().backward()
    assert node.ctx is None


def test_errors(device):
    x = leaf([1, 2], device)
    with pytest.raises(RuntimeError, match="requires a gradient"):
        x.detach().backward()
    with pytest.raises(RuntimeError, match="needs the gradient to start from"):
        (x * 2.0).backward()
    with pytest.raises(ValueError, match="shape"):
        (x * 2.0).backward(Tensor(np.ones(3, np.float32), device=device))
    with pytest.raises(TypeError, match=r"takes tensors and arrays, not float: wrap it in cudiff.Tensor\(...\)"):
        cudiff.ops.shape.Reshape.apply(1.5, shape=())
    if device == "cpu":
        assert cudiff.nn.Linear(3, 2)(np.ones((1, 3), np.float32)).shape == (1, 2)
    (x * 2.0).backward([1, 3])
    assert x.grad.dtype == np.float32 and grad(x) == [2, 6]
    y = x * x
    y.sum().backward()
    for part in (y, y * 2.0):  # the freed part itself, and what is built on it
        with pytest.raises(RuntimeError, match="ran through this part of the tape already: run the forward again"):
            part.sum().backward()


def test_what_is_imported_later_is_listed():
    assert {"Tensor", "load", "Trainer"} <= set(dir(cudiff))


def test_unknown_device():
    with pytest.raises(CudiffError, match="use 'cpu' or 'cuda'"):
        Tensor([1.0], device="tpu")


@pytest.mark.gpu
def test_devices_do_not_mix():
    with pytest.raises(ValueError, match=r"\.to\('cuda'\)"):
        Tensor([1.0]) + Tensor([1.0], device="cuda")
    with pytest.raises(CudiffError, match="float64"):
        Tensor(np.ones(2), device="cuda")
    with pytest.raises(TypeError, match="numpy"):
        np.asarray(Tensor([1.0], device="cuda"))


def test_to_and_numpy(device):
    x = leaf([1, 2])
    y = x.to(device)
    assert y.device == device and y.numpy().tolist() == [1, 2] and y.requires_grad
    assert x.to("cpu") is x


def test_numpy_protocols():
    x = Tensor([1.0, 2.0])
    assert np.shares_memory(x.numpy(), x.data)
    assert np.asarray(x).tolist() == [1, 2] and np.asarray(x, np.float64).dtype == np.float64
    assert isinstance(np.ones(2, np.float32) - x, Tensor)
    with pytest.raises(AttributeError):
        _ = x.__cuda_array_interface__


def test_dlpack(device):
    x = Tensor(np.arange(4, dtype=np.float32), device=device)
    y = from_dlpack(x)
    assert y.device == device and y.numpy().tolist() == [0, 1, 2, 3]
    y.data[0] = 7
    assert x.numpy()[0] == 7


def test_dlpack_with_torch():
    torch = pytest.importorskip("torch")
    x = Tensor(np.arange(4, dtype=np.float32))
    assert torch.from_dlpack(x).tolist() == [0, 1, 2, 3]
    assert from_dlpack(torch.arange(3.0)).numpy().tolist() == [0, 1, 2]


@pytest.mark.gpu
def test_cuda_array_interface():
    x = Tensor(np.arange(4, dtype=np.float32), device="cuda")
    interface = x.__cuda_array_interface__
    assert interface["shape"] == (4,) and interface["data"][0] == x.data.data.ptr


def test_repr(device):
    assert repr(leaf([1, 2.5], device)) == (
        f"Tensor([1. , 2.5], shape=(2,), dtype=float32, device={device}, requires_grad=True)"
    )
    assert len(repr(Tensor(np.zeros((100, 100), np.float32), device=device))) < 400


def test_operators_and_methods(device):
    x = leaf([[1, 2, 3], [4, 5, 6]], device)
    assert ((2 - x) * 3 / (1 + x) ** 2).shape == (2, 3)
    assert abs(-x).sqrt().exp().log().tanh().shape == (2, 3)
    assert x.T.shape == (3, 2) and x.transpose(1, 0).shape == x.transpose((1, 0)).shape == x.transpose().shape == (3, 2)
    assert x.reshape(3, 2).shape == x.reshape((3, 2)).shape == x.reshape(-1, 2).shape == (3, 2)
    assert x.flatten().shape == (6,) and x.sum(0).shape == (3,) and x.mean().shape == ()
    assert x.max(axis=1, keepdims=True).shape == (2, 1) and x.var(1).shape == x.std(1).shape == x.min(1).shape == (2,)
    assert x[0, 1:].shape == (2,) and x.astype("float16").dtype == np.float16
    assert (x @ x.T).shape == (2, 2)
    row = [1.0, 2.0]  # is copied to no other device
    if device == "cpu":
        assert (row @ x).numpy().tolist() == (np.array(row) @ x).numpy().tolist() == (x.T @ row).numpy().tolist()
    with pytest.raises(ValueError, match=r"matmul: the shapes \(2, 3\) and \(\) do not agree"):
        x @ 2.0


def test_one_number_is_formatted_as_a_number():
    assert f"{Tensor(1 / 3):.3f} {Tensor([7]):>3d} {Tensor(2.0)}" == f"0.333   7 {Tensor(2.0)!s}"
    with pytest.raises(ValueError, match="is not one number"):
        f"{Tensor([1.0, 2.0]):.3f}"


class Counted(Function):
    """out = 2 x, which records what its backward was given."""

    fresh = True
    given: list = []  # noqa: RUF012

    @staticmethod
    def forward_numpy(ctx, x):
        ctx.statistics_seen = ctx.statistics[0]
        ctx.out_statistics = np.ones(1, np.float32)
        return x * 2

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        Counted.given.append((needs, None if into[0] is None else into[0].copy(), ctx.dout_statistics))
        if into[0] is None:
            ctx.din_statistics[0] = np.full(1, 5, np.float32)
            return (dout * 2,)
        into[0] += dout * 2
        return (into[0],)


def test_into_and_statistics():
    Counted.given.clear()
    x = leaf([1.0])
    h = x * 1.0
    a = Counted.apply(h)
    b = Counted.apply(h)
    assert a.statistics.tolist() == [1] and a.detach().statistics.tolist() == [1]
    (Counted.apply(a) + b).backward()
    assert grad(x) == [6]
    (needs, into, statistics), second, third = Counted.given
    assert needs == (True,) and into is None and statistics is None  # Counted(a): its dout came without statistics
    assert second[1] is None  # b, newer than a
    assert third[1].tolist() == [2] and third[2].tolist() == [5]  # a adds to what b left; statistics came with its dout


def test_a_function_without_gradient():
    class Fill(Function):
        differentiable = False

        @staticmethod
        def forward_numpy(ctx, x):
            return np.zeros_like(x)

    assert not Fill.apply(leaf([1.0])).requires_grad


@pytest.mark.parametrize("inputs", [(), (None, None)])
def test_no_input_at_all(inputs):
    with pytest.raises(TypeError, match=r"^Counted got no tensor: give it one at least$"):
        Counted.apply(*inputs)


def test_an_absent_input():
    class First(Function):
        @staticmethod
        def forward_numpy(ctx, x, y):
            assert y is None and ctx.needs == (True, False)
            return x + 0

        @staticmethod
        def backward_numpy(ctx, dout, needs, into):
            return dout, None

    x = leaf([1.0])
    First.apply(x, None).backward()
    assert grad(x) == [1]


def test_zero_grad_keeps_the_place_and_the_next_backward_overwrites_it(device):
    w = Tensor([1.0, 2.0], requires_grad=True, device=device)
    v = Tensor([3.0, 4.0], requires_grad=True, device=device)
    (w * v).sum().backward()
    place = w.grad
    w.grad *= float("nan")  # what is left there must not be read
    w.zero_grad()
    v.zero_grad()
    (w * w + w).sum().backward()  # w several times: what follows the first is added
    assert w.grad is place and grad(w) == [3, 5]
    assert grad(v) == [0, 0]  # no backward wrote
    w.zero_grad()
    (w * v).sum().backward()
    (w * v).sum().backward()
    assert w.grad is place and grad(w) == [6, 8]


def test_zero_grad_leaves_a_tensor_without_a_gradient_as_it_is(device):
    w = Tensor([1.0, 2.0], requires_grad=True, device=device)
    w.zero_grad()
    assert w.grad is None
    w.zero_grad()
    (w * 3).sum().backward()
    assert grad(w) == [3, 3]


def test_a_tensor_is_gone_through_along_its_first_axis(device):
    x = leaf([[1.0, 2.0], [3.0, 4.0]], device)
    first, second = x
    (first * second).sum().backward()
    assert second.numpy().tolist() == [3, 4] and x.grad.tolist() == [[3, 4], [1, 2]]
    with pytest.raises(TypeError, match=r"a 0-d tensor has no elements .*\.item\(\)"):
        iter(Tensor(1.0, device=device))


def test_a_16_bit_leafs_float32_gradient_may_be_set_again():
    w = Tensor(np.ones((1, 1, 1, 1), np.float16), requires_grad=True)
    cudiff.conv2d(Tensor(np.ones((1, 2, 2, 1), np.float16)), w).sum().backward()
    assert w.grad.dtype == np.float32
    w.grad = w.grad * 0.5
    assert w.grad.item() == 2


def test_a_change_in_place_that_would_lose_a_gradient_is_refused(device):
    x = Tensor(np.float32([1, 2]), requires_grad=True, device=device)
    state, made = Tensor(np.float32([3, 4]), device=device), x * 2
    with pytest.raises(RuntimeError, match="what an operation recorded does not change in place"):
        made.change(made * 3)
    for own, values in ((x, state), (state, made)):
        with pytest.raises(RuntimeError, match=r"within cudiff.no_grad\(\)"):
            own.change(values)
    with pytest.raises(ValueError, match="dtype float32 does not change to int32"):
        state.change(Tensor(np.int32([1, 2]), device=device))
    with cudiff.no_grad():
        state.change(made)
        x.change(state * 2)
    (x * state).sum().backward()
    assert Tensor(x.grad).numpy().tolist() == [2, 4] and x.numpy().tolist() == [4, 8] and x.requires_grad


@pytest.mark.parametrize("zeroed", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_a_leafs_gradient_to_start_from(device, rng, zeroed, again):
    """As in a power iteration, `y.backward(x.grad)`: what is added to x's gradient is not read as that of y."""
    values = [rng.standard_normal(shape).astype(np.float32) for shape in ((1, 4, 4, 3), (3, 3, 3, 3), (1, 4, 4, 3))]

    def gradients(first):
        x, w = (Tensor(value, requires_grad=True, device=device) for value in values[:2])
        x.grad, start = Tensor(values[2].copy(), device=device).data, Tensor(values[2].copy(), device=device)
        given = start if first is None else first(x.grad)
        if zeroed:
            x.zero_grad()

        def part(x):
            return ops.conv2d(x, w, padding=1) + x

        (recomputed(part, x) if again else part(x)).backward(given)
        return [Tensor(leaf.grad).numpy() for leaf in (x, w)]

    for first in (lambda grad: grad, Tensor, lambda grad: grad[:]):
        for found, expected in zip(gradients(first), gradients(None), strict=True):
            np.testing.assert_allclose(found, expected, 1e-5, 1e-5)
