"""What operations refuse, and the exact limits of what they take."""

import numpy as np
import pytest

import cudiff
from cudiff import CudiffError, Function, Tensor, backend, from_dlpack, nn, ops
from cudiff.ops import batch, edm, optim, random


def whole(*shape):
    return Tensor(np.ones(shape, np.int32))


def real(*shape):
    return Tensor(np.ones(shape, np.float32))


@pytest.mark.parametrize("name, call", [
    ("conv2d", lambda: ops.conv2d(whole(1, 4, 4, 2), real(3, 3, 3, 2))),
    ("conv2d", lambda: ops.conv2d(real(1, 4, 4, 2), whole(3, 3, 3, 2))),
    ("conv2d", lambda: ops.conv2d(real(1, 4, 4, 2), real(3, 3, 3, 2), whole(3))),
    ("conv_transpose2d", lambda: ops.conv_transpose2d(whole(1, 4, 4, 2), real(2, 3, 3, 3))),
    ("linear", lambda: ops.linear(whole(2, 3), real(4, 3))),
    ("grouped_linear", lambda: ops.grouped_linear(whole(2, 3), [real(4, 3)], [real(4)])),
    ("grouped_linear", lambda: ops.grouped_linear(real(2, 3), [real(4, 3)], [whole(4)])),
    ("edm_mix", lambda: ops.edm_mix(whole(2, 3), whole(2, 3), real(2), -1.2, 1.2, 0.5)),
    ("edm_input", lambda: ops.edm_input(whole(2, 3), real(2), 0.5, 0.25)),
    ("edm_output", lambda: ops.edm_output(whole(2, 3), real(2, 3), real(2), 0.5)),
    ("edm_output", lambda: ops.edm_output(real(2, 3), whole(2, 3), real(2), 0.5)),
    ("group_norm", lambda: ops.group_norm(whole(1, 4, 4), real(4), real(4), num_groups=2)),
    ("layer_norm", lambda: ops.layer_norm(whole(2, 4), real(4), real(4))),
    ("batch_norm", lambda: ops.batch_norm(whole(2, 4), real(4), real(4), real(4), real(4), True)),
    ("norm_silu_conv2d", lambda: ops.norm_silu_conv2d(whole(1, 4, 4, 2), weight=real(3, 3, 3, 2))),
])
def test_integers(name, call):
    with pytest.raises(TypeError, match=f"{name} needs floating tensors, not int32: use .astype"):
        call()


def test_integers_stay_where_a_result_is_one():
    x = Tensor(np.array([-2, 0, 3], np.int32))
    for function in (ops.abs, ops.negative, ops.square):
        assert function(x).dtype == np.int32, function
    for function in (ops.exp, ops.sigmoid, ops.silu, ops.tanh):
        assert function(x).dtype == np.float32, function


def test_what_has_no_gradient_is_not_recorded():
    """A Function that says so leaves no trace on the tape, even of an input that has a gradient."""
    step = Tensor(np.zeros(1, np.float32), requires_grad=True)
    assert not random.Advance.apply(step).requires_grad
    for function in (batch.DrawBatch, batch.NormalizeImages, edm.EDMMix, optim.StepScalars, optim.AdamUpdate,
                     optim.LionUpdate, optim.Rescale, optim.RMSpropUpdate, optim.SGDUpdate, random.Fill,
                     random.Advance):
        assert not function.differentiable


def test_a_power_of_one_is_the_number_itself():
    x = Tensor([-3.0, 0.5])
    assert (x ** 1).numpy().tolist() == [-3, 0.5] and (x ** 2).numpy().tolist() == [9, 0.25]


def test_a_shape_is_one_sequence_or_numbers():
    x = real(2, 3)
    assert x.reshape(3, 2).shape == x.reshape((3, 2)).shape == x.reshape([3, 2]).shape == (3, 2)
    assert x.reshape(6).shape == (6,)
    with pytest.raises((TypeError, ValueError)):
        x.reshape((2, 3), 1)


def test_one_pixel_is_the_least_that_a_convolution_leaves():
    assert ops.conv_transpose2d(real(1, 1, 1, 2), real(2, 3, 3, 4), padding=1).shape == (1, 1, 1, 4)
    assert ops.conv2d(real(1, 3, 3, 2), real(4, 3, 3, 2)).shape == (1, 1, 1, 4)
    with pytest.raises(ValueError, match="leaves nothing inside the padding"):
        ops.conv_transpose2d(real(1, 1, 1, 2), real(2, 2, 2, 4), padding=1)
    with pytest.raises(ValueError, match="is smaller than the kernel"):
        ops.conv2d(real(1, 2, 3, 2), real(4, 3, 3, 2))


@pytest.mark.parametrize("shape", [(), (0, 3), (2, 0)])
def test_dropout_of_a_number_and_of_nothing(shape):
    out = ops.dropout(real(*shape), 0.5, ops.Generator(3), 1000)
    assert out.shape == shape and set(out.numpy().ravel().tolist()) <= {0, 2}


def test_a_level_alone_has_no_gradient_to_the_image():
    x = Tensor(np.ones((2, 3), np.float32), requires_grad=True)
    _, c_noise = ops.edm_input(x, Tensor([1.0, 2.0]), 0.5, 0.25)
    c_noise.sum().backward()
    assert x.grad is None


def test_a_transposed_convolutions_layer_is_its_operation(rng):
    layer, x = nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1), Tensor(rng.standard_normal((1, 4, 4, 2), np.float32))
    expected = ops.conv_transpose2d(x, layer.weight, layer.bias, stride=2, padding=1)
    np.testing.assert_array_equal(layer(x).numpy(), expected.numpy())


def test_a_parameter_takes_its_own_shape_only():
    parameter = nn.Parameter(np.zeros((2, 3), np.float32))
    with pytest.raises(ValueError, match=r"cannot assign shape \(3,\) to a parameter of shape \(2, 3\)"):
        parameter.assign(np.ones(3, np.float32))
    assert not parameter.numpy().any()


def test_values_that_are_no_arrays():
    torchs = type("Tensor", (), {"__module__": "torch"})()
    for values, advice in (([1.0], "use np.asarray"), (torchs, r"cudiff.convert.from_torch\(state, .* converts")):
        with pytest.raises(TypeError, match=f"these are arrays or Tensors, not a .*: {advice}"):
            nn.Parameter(np.zeros(1, np.float32)).assign(values)


def test_inputs_that_are_no_tensors_or_lie_elsewhere(host_of):
    with pytest.raises(TypeError, match="takes tensors and arrays, not float"):
        random.Advance.apply(1.0)
    host = host_of(True)
    there, here = Tensor(host.zeros((2, 3), np.float32)), real(2, 3)
    with pytest.raises(ValueError, match="cpu"):
        ops.mse(there, here)


def test_a_wrong_gradient_of_one_input_of_many_is_told_by_its_number():
    class Sum(Function):
        @staticmethod
        def forward_numpy(ctx, *arrays):
            return arrays[0] + arrays[1]

        @staticmethod
        def backward_numpy(ctx, dout, needs, into):
            return dout[:1], dout

    x = Tensor(np.ones(3, np.float32), requires_grad=True)
    with pytest.raises(ValueError, match="for input 0, which has"):
        Sum.apply(x, x).sum().backward()


def test_a_long_tensor_is_shortened():
    assert "..." not in repr(real(200)) and "..." in repr(real(201))


def test_memory_of_a_gpu_that_is_not_there(monkeypatch):
    monkeypatch.setattr(backend, "cuda_status", lambda: (False, "no driver"))
    there = type("There", (), {"__dlpack_device__": lambda self: (2, 0)})()
    with pytest.raises(CudiffError, match="no CUDA: no driver"):
        from_dlpack(there)
    assert backend.default_device() == "cpu"
    monkeypatch.setattr(backend, "cuda_status", lambda: (True, "H200"))
    assert backend.default_device() == "cuda"


class Doubled(Function):
    """2·x, whose backward writes over the gradient that it is given."""

    @staticmethod
    def forward_numpy(ctx, x):
        return 2 * x

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        dout *= 2
        return (dout,)


@pytest.mark.parametrize("function, each", [
    (lambda x: x, 1), (lambda x: x.reshape(3, 1).reshape(3), 1), (lambda x: x + real(3), 1), (Doubled.apply, 2),
])
def test_a_gradient_that_is_given_stays_the_givers(function, each):
    x, grad = Tensor(np.ones(3, np.float32), requires_grad=True), real(3)
    for _ in range(2):
        function(x).backward(grad)
    assert grad.numpy().tolist() == [1] * 3 and x.grad.tolist() == [2 * each] * 3
    assert not np.shares_memory(x.grad, grad.data)


@pytest.mark.parametrize("a, b, shape", [
    ((3,), (3,), ()), ((3,), (3, 4), (4,)), ((3,), (5, 3, 4), (5, 4)), ((2, 3), (3,), (2,)), ((5, 2, 3), (3,), (5, 2)),
    ((2, 3), (3, 4), (2, 4)), ((5, 1, 2, 3), (6, 3, 4), (5, 6, 2, 4)),
])
def test_products_have_numpys_shapes(a, b, shape):
    assert ops.matmul(real(*a), real(*b)).shape == shape == np.matmul(np.ones(a), np.ones(b)).shape


@pytest.mark.parametrize("call, message", [
    (lambda x: cudiff.mse(x, x), "mse: mean over no elements"),
    (lambda x: cudiff.cross_entropy(x, np.zeros(0, int)), "cross_entropy: mean over no elements"),
    (lambda x: cudiff.nll_loss(x, np.zeros(0, int)), "nll_loss: mean over no elements"),
    (lambda x: cudiff.group_norm(x, None, None, 3), "there are no images to normalise"),
    (lambda x: cudiff.attention_qkv(cudiff.reshape(x, (0, 4, 6)), 2), "attention_qkv takes"),
    (lambda x: cudiff.attention(*[cudiff.reshape(x, (0, 2, 1, 3))] * 3), "attention takes q"),
])
def test_nothing_has_no_mean(call, message):
    with pytest.raises(ValueError, match=message):
        call(Tensor(np.ones((0, 6), np.float32)))


@pytest.mark.parametrize("options", [{}, {"dilation": 2}, {"groups": 2}])
def test_a_convolution_of_no_images_has_none(options):
    x = Tensor(np.ones((0, 9, 9, 4), np.float32), requires_grad=True)
    weight = nn.Parameter(np.ones((2, 3, 3, 4 // options.get("groups", 1)), np.float32))
    out = cudiff.conv2d(x, weight, **options)
    assert len(out) == 0 and out.shape[3] == 2
    out.sum().backward()
    assert x.grad.shape == x.shape and not weight.grad.any()


def test_a_parameter_of_none_is_refused():
    with pytest.raises(TypeError, match="a Parameter takes an array or numbers, not None"):
        nn.Parameter(None)


ONE_AXIS = {
    "argmax": ops.argmax, "argsort": ops.argsort, "sort": ops.sort, "cumsum": ops.cumsum, "softmax": ops.softmax,
    "log_softmax": ops.log_softmax, "diff": lambda x, axis: ops.diff(x, 1, axis),
    "take": lambda x, axis: ops.take(x, [0], axis),
    "repeat": lambda x, axis: ops.repeat(x, 2, axis), "split": lambda x, axis: ops.split(x, 2, axis),
    "stack": lambda x, axis: ops.stack([x, x], axis), "concatenate": lambda x, axis: ops.concatenate([x, x], axis),
    "take_along_axis": lambda x, axis: ops.take_along_axis(x, np.zeros((2, 2), int), axis),
}


@pytest.mark.parametrize("name", ONE_AXIS)
def test_several_axes_are_refused_where_there_is_one(name):
    """As NumPy says it."""
    x = Tensor(np.ones((2, 2), np.float32))
    with pytest.raises(TypeError, match="'tuple' object cannot be interpreted as an integer"):
        ONE_AXIS[name](x, (0, 1))
    if name in ("diff", "softmax", "log_softmax", "split", "stack"):
        with pytest.raises(TypeError, match="'NoneType' object cannot be interpreted as an integer"):
            ONE_AXIS[name](x, None)


@pytest.mark.parametrize("call, error, message", [
    (lambda x: cudiff.stack([]), ValueError, "stack: there are no tensors to join"),
    (lambda x: cudiff.upsample_nearest(x, 1.5), ValueError, "the factor 1.5 1, 2, ..."),
    (lambda x: cudiff.roll(x, 1.5), TypeError, "roll moves by whole elements, not by 1.5"),
    (lambda x: cudiff.avg_pool2d(cudiff.astype(x, "int32")), TypeError, "avg_pool2d needs floating tensors, not int32"),
    (lambda x: cudiff.flatten(x, 5), ValueError, "flatten: start 5 is out of range for a tensor of 4 dimensions"),
    (lambda x: cudiff.round(x, 1.5), TypeError, "'float' object cannot be interpreted as an integer"),
    (lambda x: cudiff.split(x, [1.5], 1), TypeError, "'float' object cannot be interpreted as an integer"),
    (lambda x: cudiff.one_hot([0, 1], 2.5), TypeError, "'float' object cannot be interpreted as an integer"),
    (lambda x: cudiff.bincount([1], minlength=-1), ValueError, "minlength is not negative, and -1 is"),
    (lambda x: nn.Linear(2, 2).load_state_dict(None), TypeError, "a state maps names to arrays: .* not a NoneType"),
])
def test_what_is_refused_says_what_to_give(call, error, message):
    with pytest.raises(error, match=message):
        call(Tensor(np.ones((1, 4, 4, 2), np.float32)))


@pytest.mark.parametrize("call, message", [
    (lambda: ops.linear(real(2, 0), real(3, 0), real(3)), r"linear: x of shape \(2, 0\) has no features"),
    (lambda: ops.mlp(real(2, 4), real(0, 4), real(0), real(3, 0), real(3)), "mlp: .* do not fit each other"),
    (lambda: ops.conv2d(real(1, 4, 4, 0), real(2, 3, 3, 0)), r"conv2d: the weight .* has an axis of size 0"),
    (lambda: ops.conv2d(real(1, 4, 4, 2), real(0, 3, 3, 2)), r"conv2d: the weight .* has an axis of size 0"),
    (lambda: ops.conv1d(real(1, 4, 0), real(2, 3, 0)), r"conv1d: the weight of shape \(2, 3, 0\) has an axis"),
    (lambda: ops.conv_transpose2d(real(1, 4, 4, 2), real(2, 3, 3, 0)), "conv_transpose2d: .* has an axis of size 0"),
    (lambda: ops.group_norm(real(8), real(8), real(8), 2), r"group_norm: x of shape \(8,\) is not \(N, ..., C\)"),
    (lambda: ops.group_norm(real(2, 3, 0), real(0), real(0), 1), "group_norm: 0 channels do not divide"),
])
def test_axes_of_size_0_and_too_few(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_the_null_class_of_an_empty_table(device):
    table = Tensor(np.zeros((0, 3), np.float32), requires_grad=True, device=device)
    out = ops.embedding([-1, -1], table)
    out.sum().backward()
    assert out.tolist() == [[0, 0, 0]] * 2 and table.grad.shape == (0, 3)
