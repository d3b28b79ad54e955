"""Operands of other dtypes than an op computes in: right, or one clear error, and on a GPU as on the CPU."""

import itertools

import numpy as np
import pytest

from cudiff import Tensor, nn, ops
from cudiff.backend import bfloat16
from cudiff.diffusion import drop_labels
from cudiff.errors import CudiffError
from cudiff.models import UNet
from tests.ops.cases import Numbers
from tests.ops.table import ROWS

INTEGERS = [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64]


def devices(host_of):
    """The CPU, and what stands for a GPU older than Hopper and for one of Hopper."""
    yield "cpu", lambda array: Tensor(array)
    for hopper in (False, True):
        host = host_of(hopper)
        yield "cuda", lambda array, host=host: Tensor(host.asarray(array))


def lookups(labels, tensor):
    """The result of every op that takes labels."""
    table = tensor(np.arange(24, dtype=np.float32).reshape(8, 3))
    images = tensor(np.zeros((2, 2, 2, 1), np.uint8))
    step = tensor(np.zeros(1, np.int32))
    return {
        "embedding": ops.embedding(labels, table),
        "getitem": table[labels],
        "cross_entropy": ops.cross_entropy(logits(tensor), labels),
        "draw_batch": ops.draw_batch(images, labels, step, 2, 0)[1],
    }


def logits(tensor):
    return tensor(np.linspace(0, 1, 16, dtype=np.float32).reshape(2, 8))


@pytest.mark.parametrize("dtype", INTEGERS)
def test_labels_of_any_integer_dtype(host_of, dtype):
    expected = {name: out.numpy() for name, out in lookups(Tensor(np.array([1, 7], np.int32)), Tensor).items()}
    for device, tensor in devices(host_of):
        for labels in (tensor(np.array([1, 7], dtype)), np.array([1, 7], dtype), [1, 7]):
            for name, out in lookups(labels, tensor).items():
                assert out.device == device and out.dtype == expected[name].dtype, name
                if device == "cpu":
                    np.testing.assert_array_equal(out.numpy(), expected[name], err_msg=name)


def test_a_kernel_gets_the_labels_as_32_bits(host_of):
    """The stand-in refuses a launch with others; a cast comes before it."""
    for hopper in (False, True):
        host = host_of(hopper)
        labels = Tensor(host.asarray(np.array([1, 7])))
        ops.embedding(labels, Tensor(host.zeros((8, 3), np.float32)))
        assert host.launches == [("cast", "index"), ("embedding", "gather")]


@pytest.mark.parametrize("labels", [np.array([1.0, 7.0]), np.array([True, False]), [1.0, 7.0]])
def test_labels_that_are_no_integers(host_of, labels):
    for _, tensor in devices(host_of):
        table = tensor(np.zeros((8, 3), np.float32))
        for given in (labels, tensor(np.asarray(labels))):
            for call in (lambda g=given, t=table: ops.embedding(g, t),
                         lambda g=given, f=tensor: ops.cross_entropy(logits(f), g)):
                with pytest.raises(TypeError, match=r"integers, not (float|bool)"):
                    call()


def test_labels_beyond_32_bits_do_not_wrap(host_of):
    for device, tensor in devices(host_of):
        table = tensor(np.zeros((8, 3), np.float32))
        labels = np.array([1, 2**32 + 7])
        for given in (labels, Tensor(labels)) if device == "cpu" else (labels,):
            with pytest.raises(IndexError, match="outside 32 bits: 1 to 4294967303"):
                ops.embedding(given, table)


def test_no_labels_at_all(host_of):
    for _, tensor in devices(host_of):
        assert ops.embedding([], tensor(np.zeros((8, 3), np.float32))).shape == (0, 3)


@pytest.mark.parametrize("dtype", [np.int64, np.uint8])
def test_labels_of_a_loss(host_of, dtype):
    expected = drop_labels(Tensor(np.arange(64, dtype=np.int32)), 0.5, ops.Generator(0)).numpy()
    assert {-1} < set(expected)
    for device, tensor in devices(host_of):
        dropped = drop_labels(tensor(np.arange(64, dtype=dtype)), 0.5, ops.Generator(0, device))
        assert dropped.device == device and dropped.dtype == np.int32
        if device == "cpu":
            np.testing.assert_array_equal(dropped.numpy(), expected)


@pytest.mark.parametrize("labels", [[1, 7], np.array([1, 7]), Tensor(np.array([1, 7], np.uint8))])
def test_labels_of_a_network(labels):
    net = UNet(8, in_channels=1, model_channels=32, channel_mult=(1,), num_res_blocks=1, attention_resolutions=(),
               num_classes=8, zero_init=False)
    x, t = Tensor(np.zeros((2, 8, 8, 1), np.float32)), Tensor(np.zeros(2, np.float32))
    expected = net(x, t, Tensor(np.array([1, 7], np.int32)))
    np.testing.assert_array_equal(net(x, t, labels).numpy(), expected.numpy())


@pytest.mark.parametrize("step", [np.zeros(1, np.int64), np.zeros(1, np.float32), np.zeros(2, np.int32)])
def test_the_step_of_a_batch(host_of, step):
    for _, tensor in devices(host_of):
        images = tensor(np.zeros((2, 2, 2, 1), np.uint8))
        with pytest.raises(ValueError, match="step must be int32 or uint32"):
            ops.draw_batch(images, None, tensor(step), 2, 0)


C = 16
# Of each op: the shapes of its floating operands and how it is called.
OPS = {
    "add": (((2, C), (2, C)), ops.add),
    "multiply": (((2, C), (C,)), ops.multiply),
    "divide": (((2, C), (2, C)), ops.divide),
    "power": (((2, C), (2, C)), ops.power),
    "maximum": (((2, C), (2, C)), ops.maximum),
    "where": (((2, C), (2, C)), lambda a, b: ops.where(Tensor(a.data != 0), a, b)),
    "lerp": (((2, C), (2, C), (2, 1)), ops.lerp),
    "concatenate": (((2, C), (2, C)), lambda *all: ops.concatenate(all)),
    "matmul": (((4, C), (C, 8)), ops.matmul),
    "linear": (((4, C), (8, C), (8,)), ops.linear),
    "linear residual": (((4, C), (8, C), (8,), (4, 8)), lambda x, w, b, r: ops.linear(x, w, b, residual=r)),
    "grouped_linear": (((4, C), (8, C), (8,)), lambda x, w, b: ops.grouped_linear(x, [w], [b])[0]),
    "conv2d": (((2, 4, 4, C), (8, 3, 3, C), (8,)), lambda x, w, b: ops.conv2d(x, w, b, padding=1)),
    "conv_transpose2d": (((2, 4, 4, C), (C, 3, 3, 8), (8,)), ops.conv_transpose2d),
    "group_norm": (((2, 4, C), (C,), (C,)), lambda x, w, b: ops.group_norm(x, w, b, num_groups=4)),
    "group_norm x2": (
        ((2, 4, C), (2, 4, C), (2 * C,), (2 * C,)),
        lambda x, x2, w, b: ops.group_norm(x, w, b, num_groups=4, x2=x2),
    ),
    "group_norm scale": (
        ((2, 4, C), (C,), (C,), (2, C), (2, C)),
        lambda x, w, b, scale, shift: ops.group_norm(x, w, b, num_groups=4, scale=scale, shift=shift),
    ),
    "layer_norm": (((4, C), (C,), (C,)), ops.layer_norm),
    "layer_norm of images": (((2, 4, C), (2, C), (2, C)), ops.layer_norm),
    "batch_norm": (
        ((2, 4, 4, C), (C,), (C,), (C,), (C,)), lambda *all: ops.batch_norm(*all, training=True),
    ),
    "attention": (((2, 4, 2, 8), (2, 5, 2, 8), (2, 5, 2, 8)), ops.attention),
    "mse": (((2, C), (2, C)), ops.mse),
    "mse weight": (((2, C), (2, C), (2,)), ops.mse),
    "norm_silu_conv2d": (
        ((2, 4, 4, 32), (8, 3, 3, 32), (8,), (32,), (32,), (2, 8)),
        lambda x, w, b, nw, nb, emb: ops.norm_silu_conv2d(x, weight=w, bias=b, norm_weight=nw, norm_bias=nb, emb=emb),
    ),
    "edm_mix": (
        ((2, 4, 4, 3), (2, 4, 4, 3), (2,)), lambda i, n, d: ops.edm_mix(i, n, d, -1.2, 1.2, 0.5, 0.25)[0],
    ),
    "edm_input": (((2, 4, 4, 3), (2,)), lambda x, s: ops.edm_input(x, s, 0.5, 0.25)[0]),
    "edm_output": (((2, 4, 4, 3), (2, 4, 4, 3), (2,)), lambda x, o, s: ops.edm_output(x, o, s, 0.5)),
    "embedding": (((8, C),), lambda w: ops.embedding([1, 7], w)),
    "timestep_embedding": (((4,),), lambda t: ops.timestep_embedding(t, C)),
}
DTYPES = [np.dtype(np.float32), bfloat16, np.dtype(np.float16), np.dtype(np.int32)]
MIXES = [
    (name, first, other, position)
    for name, (sizes, _) in OPS.items() for first in DTYPES for other in DTYPES for position in range(len(sizes))
    if (first == other) == (position == 0)
]


def outcome(name, dtypes, tensor):
    """The dtypes of the result and of the gradients, or None where the op refuses these operands."""
    sizes, call = OPS[name]
    operands = [tensor(np.ones(size, dtype)) for size, dtype in zip(sizes, dtypes, strict=True)]
    for operand in operands:
        operand.requires_grad = operand.dtype.kind != "i"
    try:
        out = call(*operands)
        if out.requires_grad:
            out.backward(tensor(np.ones(out.shape, out.dtype)))
        return out.dtype, *(None if operand.grad is None else operand.grad.dtype for operand in operands)
    except (TypeError, ValueError) as error:
        assert "kernels/" not in str(error), f"{name} reached a launch: {error}"
        return None


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # what no kernel wrote is undefined
@pytest.mark.parametrize("name, first, other, position", MIXES, ids=str)
def test_mixed_dtypes(host_of, name, first, other, position):
    """One operand of another dtype than the rest, which are what the op is documented to take."""
    sizes, _ = OPS[name]
    dtypes = [first if index != position else other for index in range(len(sizes))]
    expected, *others = (outcome(name, dtypes, tensor) for _, tensor in devices(host_of))
    integers = {dtype.kind for dtype in dtypes} == {"i"}  # of which no product, and no row, is on CUDA: it says so
    for found in others:
        assert found == expected or (found is None and integers and name in ("matmul", "embedding"))


# What takes tensors alone, as layers give them, and looks at them before they meet.
TENSORS = {
    "at", "mlp", "linear", "grouped_linear", "mse", "batch_norm", "batch_norm_relu_pool", "norm_silu_conv2d",
    "edm_mix", "edm_output", "cross_entropy", "nll_loss",
}
MANY = {name: draw(Numbers(np.random.default_rng(7), "ordinary")) for name, (draw, _) in ROWS.items()}
MANY = {name: case for name, case in MANY.items() if len(case.arrays) > 1 and name not in TENSORS}


@pytest.mark.parametrize("name", MANY)
def test_arrays_beside_a_tensor_on_a_gpu(name, host_of, monkeypatch):
    """Any one operand is a tensor there, the others NumPy's arrays of float64: the result is there too."""
    host, case = host_of(True), MANY[name]
    capturing = False
    monkeypatch.setattr(host.cuda.get_current_stream(), "is_capturing", lambda: capturing)
    for i, own in enumerate(case.arrays):
        there = Tensor(host.asarray(own.astype(np.float32) if own.dtype == np.float64 else own))
        operands = [there if i == j else array for j, array in enumerate(case.arrays)]
        capturing = False
        outs = case.fn(*operands)
        assert {out.device for out in (outs if isinstance(outs, tuple) else (outs,))} == {"cuda"}
        capturing = True
        with pytest.raises(CudiffError, match="a captured function copied a host array to the GPU: make it before"):
            case.fn(*operands)


TWO = ["add", "multiply", "divide", "power", "maximum", "where", "concatenate", "matmul", "attention", "mse"]


@pytest.mark.parametrize("name", OPS)
def test_float64_beside_float32(name):
    """What forward takes can be trained: each gradient has its operand's dtype. Two operands meet as in NumPy."""
    sizes, _ = OPS[name]
    for given in itertools.product((np.dtype(np.float32), np.dtype(np.float64)), repeat=len(sizes)):
        found = outcome(name, given, Tensor)
        if found is None:
            assert len(set(given)) == 2
            continue
        assert all(grad in (None, dtype) for grad, dtype in zip(found[1:], given, strict=True))
        if name in TWO:
            assert found[0] == max(given, key=lambda dtype: dtype.itemsize)


def test_a_product_of_integers_is_as_wide_as_the_wider():
    a, b = Tensor(np.full((1, 2), 100, np.int8)), Tensor(np.full((2, 1), 100, np.int32))
    assert (a @ b).numpy().tolist() == (b.reshape(1, 2) @ a.reshape(2, 1)).numpy().tolist() == [[20000]]


def test_a_product_in_16_bits_reads_the_weights_own_copy():
    x, weight = Tensor(np.ones((1, 2), bfloat16)), nn.Parameter(np.float32([[1.001], [2.0]]), low=True)
    assert (x @ weight).dtype == bfloat16 and (x @ Tensor(weight.data)).dtype == np.float32


@pytest.mark.parametrize("computed, expected", [
    (lambda x: x([10, 200], "uint8") - np.int64(100), [-90, 100]),
    (lambda x: x([100], "int8") + np.int64(100), [200]),
    (lambda x: x([2**30], "int32") * np.int64(4), [2**32]),
    (lambda x: np.int64(456) == x([200], "uint8"), [False]),
    (lambda x: x([200], "uint8") * np.array(2, "int32"), [400]),
])
def test_a_numpy_integer_beside_integers_widens_them(computed, expected):
    """As in NumPy 2; a Python number takes their dtype."""
    assert computed(lambda values, dtype: Tensor(np.array(values, dtype))).numpy().tolist() == expected
    assert (Tensor(np.array([200], "uint8")) + 1).dtype == np.uint8
    assert (Tensor(np.array([1], "float32")) + np.int64(1)).dtype == np.float32
