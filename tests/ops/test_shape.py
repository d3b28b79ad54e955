import ml_dtypes
import numpy as np
import pytest

import cudiff
from cudiff import Tensor
from cudiff.cuda.kernels import shape as shape_kernels
from cudiff.cuda.kernels.shape import merge_axes
from tests.check import check_op, relative_error, torch

INTEGERS = [np.uint8, np.int32, np.int64, np.bool_]


@pytest.mark.parametrize(
    "shape, new", [((2, 6), (3, 4)), ((2, 6), (-1, 2)), ((1,), ()), ((), (1, 1)), ((4,), (4,)), ((0, 3), (0,))], ids=str
)
def test_reshape(shape, new, device, rng):
    x = np.asarray(rng.standard_normal(shape))
    check_op(lambda x: cudiff.reshape(x, new), x, device=device, torch_fn=lambda x: x.reshape(new))
    tensor = Tensor(x, dtype=np.float32, device=device)
    assert cudiff.reshape(tensor, new).data.base is not None or tensor.size == 0  # no copy


def test_reshape_that_does_not_fit(device):
    for shape in ((4, -1), (-2, -3), (-1, -6)):
        with pytest.raises(ValueError, match="6 elements do not fill"):
            Tensor(np.ones((2, 3), np.float32), device=device).reshape(shape)


def test_flatten_expand_squeeze(device, rng):
    x = rng.standard_normal((2, 3, 1, 4))
    check_op(lambda x: cudiff.flatten(x, 1), x, device=device, torch_fn=lambda x: x.flatten(1))
    check_op(lambda x: cudiff.expand_dims(x, (0, -1)), x, device=device, torch_fn=lambda x: x[None, ..., None])
    check_op(lambda x: cudiff.squeeze(x, 2), x, device=device, torch_fn=lambda x: x.squeeze(2))
    assert cudiff.squeeze(Tensor(np.ones((1, 2, 1)))).shape == (2,)


@pytest.mark.parametrize(
    "shape, axes",
    [
        ((3, 5), None), ((3, 5), (0, 1)), ((2, 3, 4), (2, 0, 1)), ((2, 3, 4, 8), (0, 2, 1, 3)), ((33, 65), (1, -2)),
        ((130, 64), (1, 0)), ((2, 40, 3, 36), (3, 0, 2, 1)), ((32, 2, 3, 33), (1, 3, 2, 0)),
        ((), None),
    ],
    ids=str,
)
def test_transpose(shape, axes, device, rng):
    x = np.asarray(rng.standard_normal(shape))
    order = axes or tuple(range(len(shape)))[::-1]
    check_op(lambda x: cudiff.transpose(x, axes), x, device=device, torch_fn=lambda x: x.permute(order))
    twice = lambda x: cudiff.transpose(x * 1.0, axes) + cudiff.transpose(x, axes)  # noqa: E731
    check_op(twice, x, device=device, dtypes=("float32",))


@pytest.mark.parametrize("shape, new", [((1,), (7,)), ((3, 1), (3, 8)), ((4,), (2, 3, 4)), ((), (5,))], ids=str)
def test_broadcast_to(shape, new, device, rng):
    x = np.asarray(rng.standard_normal(shape))
    check_op(lambda x: cudiff.broadcast_to(x, new), x, device=device, torch_fn=lambda x: x.broadcast_to(new))


@pytest.mark.parametrize(
    "shapes, axis",
    [
        (((2, 3), (4, 3)), 0), (((2, 3), (2, 1), (2, 5)), -1), (((2, 3, 3, 8), (2, 3, 3, 16)), 3), (((3,), (0,)), 0),
        (((5, 2),), 1),
    ],
    ids=str,
)
def test_concatenate(shapes, axis, device, rng):
    arrays = [rng.standard_normal(shape) for shape in shapes]
    check_op(
        lambda *tensors: cudiff.concatenate(tensors, axis), *arrays, device=device,
        torch_fn=lambda *tensors: torch.cat(tensors, axis),
    )

    def twice(*tensors):
        return cudiff.concatenate([t * 1.0 for t in tensors], axis) + cudiff.concatenate(tensors, axis)

    check_op(twice, *arrays, device=device, dtypes=("float32",))


def test_concatenate_of_the_flattened(device, rng):
    a, b = rng.standard_normal((2, 3)), rng.standard_normal(())
    check_op(lambda a, b: np.concatenate([a, b], axis=None), a, b, device=device, dtypes=("float32",))
    np.testing.assert_array_equal(cudiff.concatenate([a, b], None).numpy(), np.concatenate([a, b], None))


def test_concatenate_with_itself_and_other_dtypes(device, rng):
    check_op(lambda x: cudiff.concatenate([x, x, x], 1), rng.standard_normal((3, 4)), device=device)
    low = Tensor(np.ones((2, 2), ml_dtypes.bfloat16), device=device)
    full = Tensor(np.ones((2, 2), np.float32), device=device)
    assert cudiff.concatenate([low, full]).dtype == np.float32
    for axis, others in ((1, [full[:1], full[0]]), (0, [full[:, :1], full[0]])):
        for other in others:
            with pytest.raises(ValueError, match=f"do not join along axis {axis}"):
                cudiff.concatenate([full, other], axis)


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -3])
def test_stack(axis, device, rng):
    arrays = [rng.standard_normal((3, 8)) for _ in range(3)]
    check_op(
        lambda *tensors: cudiff.stack(tensors, axis), *arrays, device=device,
        torch_fn=lambda *tensors: torch.stack(tensors, axis),
    )


@pytest.mark.parametrize("sections, axis", [(3, 1), ([2, 5], 1), (2, 0), ([0, 1], -1), ([8, 16], 2)], ids=str)
def test_split(sections, axis, device, rng):
    x = rng.standard_normal((4, 6, 24))

    def torch_fn(x):
        return torch.tensor_split(x, sections, axis)

    check_op(lambda x: cudiff.split(x, sections, axis), x, device=device, torch_fn=torch_fn)
    check_op(lambda x: cudiff.split(x, sections, axis)[1], x, device=device)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.uint8, np.int64])
@pytest.mark.parametrize("widths", [(16,) * 19, (1, 0, 8, 24, 3) * 7, (5,), (0, 0)], ids=str)
@pytest.mark.parametrize("before, behind", [((), ()), ((3,), (8,)), ((2, 5), ())])
def test_many_parts_are_joined(device, rng, dtype, widths, before, behind):
    """Of more than one launch has, in packs of 16 bytes or not, some of no size."""
    parts = [rng.integers(0, 200, (*before, width, *behind)).astype(dtype) for width in widths]
    joined = cudiff.concatenate([Tensor(part, device=device) for part in parts], len(before))
    np.testing.assert_array_equal(joined.numpy(), np.concatenate(parts, len(before)))


def test_a_result_too_large_to_count_is_joined(device, rng, monkeypatch):
    monkeypatch.setattr(shape_kernels, "COUNTED", 8)
    parts = [rng.standard_normal((3, width)).astype(np.float32) for width in (4, 0, 8, 5)]
    joined = cudiff.concatenate([Tensor(part, device=device) for part in parts], 1)
    np.testing.assert_array_equal(joined.numpy(), np.concatenate(parts, 1))


class InFloat32(cudiff.Function):
    """The tensor itself. Its gradient is float32."""

    @staticmethod
    def forward_numpy(ctx, x):
        return x.copy()

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        return (dout.astype(np.float32),)

    forward_cuda, backward_cuda = forward_numpy, backward_numpy


@pytest.mark.parametrize("wide", [(0,), (1,), (0, 2)])
def test_parts_may_have_wider_gradients(device, rng, wide):
    x = Tensor(rng.standard_normal((3, 24)).astype(ml_dtypes.bfloat16), device=device, requires_grad=True)
    weights = rng.standard_normal((3, 8)).astype(np.float32).astype(ml_dtypes.bfloat16)
    parts = [InFloat32.apply(part) if i in wide else part for i, part in enumerate(cudiff.split(x, 3, axis=1))]
    total = sum((part * Tensor(weights, device=device)).astype("float32").sum() for part in parts)
    total.backward()
    np.testing.assert_array_equal(Tensor(x.grad).numpy().astype(np.float32), np.tile(weights.astype(np.float32), 3))


@pytest.mark.parametrize("made", [
    cudiff.relu, cudiff.gelu, cudiff.softmax, cudiff.exp, lambda w: cudiff.maximum(w, w * 0.5), lambda w: w * w,
    lambda w: cudiff.split(cudiff.relu(w), 2)[0], lambda w: cudiff.transpose(cudiff.relu(w)).reshape(8, 16),
    lambda w: cudiff.tanh(w.astype("float32")).astype(w.dtype),
])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_what_makes_a_16_bit_weight_has_its_gradient(device, rng, made, dtype):
    """A linear layer's weight has a float32 gradient, which not every backward reads."""
    given = [rng.standard_normal(shape).astype(dtype) for shape in ((4, 16), (8, 16))]
    grads = []
    for wanted, where in ((dtype, device), (np.float64, "cpu")):
        x, w = (Tensor(array.astype(wanted), device=where, requires_grad=True) for array in given)
        cudiff.linear(x, made(w)).sum().backward()
        grads.append([Tensor(t.grad).numpy().astype(float) for t in (x, w)])
    for found, expected in zip(*grads, strict=True):
        assert relative_error(found, expected) < 2e-2


class Turned(cudiff.Function):
    """x (m, n) → (n, m). Its gradient is a view."""

    @staticmethod
    def forward_numpy(ctx, x):
        return x.T.copy()

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        return (dout.T,)

    forward_cuda, backward_cuda = forward_numpy, backward_numpy


class FreshlyTurned(Turned):
    fresh = True


@pytest.mark.parametrize("turned", [Turned, FreshlyTurned])
def test_a_gradient_may_be_a_view(device, turned):
    x = Tensor(np.ones((3, 8), np.float32), device=device, requires_grad=True)
    weights = np.arange(24, dtype=np.float32).reshape(8, 3)
    (turned.apply(cudiff.relu(x)) * Tensor(weights, device=device)).sum().backward()
    np.testing.assert_array_equal(Tensor(x.grad).numpy(), weights.T)


def test_split_that_does_not_divide():
    with pytest.raises(ValueError, match="equal parts"):
        cudiff.split(Tensor(np.ones((2, 5))), 2, 1)
    with pytest.raises(ValueError, match="cut positions"):
        cudiff.split(Tensor(np.ones((2, 5))), [4, 2], 1)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_move_exactly(dtype, device, rng):
    x = rng.integers(0, 2 if dtype == np.bool_ else 200, (3, 5, 16)).astype(dtype)
    tensor = Tensor(x, device=device)
    for fn in (
        lambda a: a[:, ::2], lambda a: a[1:, 3], lambda a: a[::-1], lambda a: a[..., 5:9],
        lambda a: a.transpose(2, 0, 1),
    ):
        out = fn(tensor).numpy()
        assert out.dtype == dtype and out.flags.c_contiguous and np.array_equal(out, fn(x))
    wide = rng.integers(0, 2 if dtype == np.bool_ else 200, (70, 35)).astype(dtype)
    assert np.array_equal(Tensor(wide, device=device).T.numpy(), wide.T)
    assert np.array_equal(cudiff.concatenate([tensor, tensor], 1).numpy(), np.concatenate([x, x], 1))
    assert np.array_equal(tensor[[2, 0]].numpy(), x[[2, 0]])


def test_merge_axes():
    assert merge_axes((2, 3, 4), [(12, 4, 1), (12, 4, 1)]) == ((24,), ((1,), (1,)))
    assert merge_axes((2, 3, 4, 5), [(60, 20, 5, 1), (0, 0, 0, 1)]) == ((24, 5), ((5, 1), (0, 1)))
    assert merge_axes((4, 1, 3), [(3, 99, 1), (1, 7, 0)]) == ((4, 3), ((3, 1), (1, 0)))
    assert merge_axes((), [(), ()])[0] == (1,)
    assert merge_axes((1, 1, 1), [(8, 4, 4), (8, 4, 4)]) == ((1,), ((8,), (8,)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
@pytest.mark.parametrize("own, shape", [
    ((1, 3, 5), (1, 3, 8)), ((2, 7, 13), (2, 8, 16)), ((2, 8, 16), (2, 7, 13)), ((3, 4, 1), (3, 1, 3)), ((5,), (8,)),
    ((2, 3, 4, 10), (2, 3, 4, 16)), ((2, 3, 4, 16), (2, 3, 4, 9)), ((5, 2, 3, 7), (8, 2, 3, 8)), ((4, 9), (4, 16)),
    ((1, 300, 41), (1, 300, 48)),
])
def test_rows_are_cut_or_get_zeros(rng, dtype, own, shape):
    """Of whole arrays and of rows that are parts of longer ones, into arrays that held something else."""
    values = rng.standard_normal((*own[:-1], own[-1] + 3)).astype(dtype)
    wide = Tensor(values, device="cuda").data
    expected, common = np.zeros(shape, dtype), tuple(slice(min(pair)) for pair in zip(own, shape, strict=True))
    expected[common] = values[common]
    for x in (wide[..., : own[-1]], wide[..., : own[-1]].copy()):
        for longer in (0, 1):  # rows of the result may be parts of longer ones too
            held = np.full((*shape[:-1], shape[-1] + longer), np.nan, dtype)
            out = Tensor(held, device="cuda").data[..., : shape[-1]]
            shape_kernels.fit(out, x)
            assert np.array_equal(Tensor(out.copy()).numpy(), expected)


def test_too_many_elements_to_fit(host_of):
    host = host_of(True)
    with pytest.raises(ValueError, match=r"fewer than 2\*\*31 elements"):
        shape_kernels.fitted(host.zeros((1, 2, 3), np.float16), (1, 2**16, 2**15))


@pytest.mark.parametrize("dtype", ["int8", "int16", "uint32", "uint64"])
def test_integers_that_kernels_do_not_move_are_told(host_of, dtype):
    x = Tensor(host_of(True).zeros((4, 6), np.dtype(dtype)))
    for op in (lambda: x[:, ::2], lambda: x.T, lambda: x[:, :0:-1]):
        with pytest.raises(TypeError, match=rf"not {dtype}: convert it on the CPU first"):
            op()
