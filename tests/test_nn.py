"""Layers and modules: initial values, precision, what is read where, and the layers' own checks."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import cudiff
from cudiff import nn, ops
from cudiff.backend import bfloat16
from cudiff.convert import from_torch
from cudiff.cuda import graph
from cudiff.errors import CudiffError
from cudiff.nn import init
from cudiff.tensor import Tensor
from tests.recording import stand_in


def test_uniform_fan_in_fills_its_range():
    with init.seeded(3):
        values = init.uniform_fan_in((300, 200), 16)
    assert values.dtype == np.float32 and values.shape == (300, 200)
    assert values.max() <= 0.25 < values.max() + 1e-3 and values.min() >= -0.25 > values.min() - 1e-3
    assert abs(values.mean()) < 0.003


def test_a_summary_is_printed(capsys):
    nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1, bias=False)).summary()
    printed = capsys.readouterr().out
    assert "Sequential: 10 parameters" in printed and "weight 2×3, bias 2" in printed and "ReLU" not in printed


def test_seeds_make_parameters_and_end_with_their_block():
    with init.seeded(5):
        first, (with_inner, second) = nn.Linear(3, 4), (None, None)
        with init.seeded(6):
            with_inner = nn.Linear(3, 4)
        second = nn.Linear(3, 4)
    with init.seeded(5):
        again, after = nn.Linear(3, 4), nn.Linear(3, 4)
    np.testing.assert_array_equal(first.weight.data, again.weight.data)
    np.testing.assert_array_equal(second.weight.data, after.weight.data)
    assert not np.array_equal(first.weight.data, with_inner.weight.data)


def test_blocks_of_one_thread_leave_others_alone():
    """A model is outlined by one thread and drawn by another at the same time; outside of a block both draw alike."""
    entered, built = threading.Barrier(2, timeout=10), {}

    def outline():
        with init.outlined(10, 100):
            entered.wait()
            entered.wait()
            with pytest.raises(CudiffError, match="the model is larger"):
                nn.Linear(30, 40)

    def draw():
        with init.seeded(5):
            entered.wait()
            built["beside"] = nn.Linear(30, 40).weight.data
            entered.wait()

    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(outline), pool.submit(draw)]:
            future.result()
    with init.seeded(5):
        np.testing.assert_array_equal(built["beside"], nn.Linear(30, 40).weight.data)


def test_normal_has_its_deviation():
    with init.seeded(1):
        values = init.normal((400, 300), 0.5)
    assert abs(values.std() - 0.5) < 0.01 and abs(values.mean()) < 0.01 and values.dtype == np.float32


def test_precision_reaches_every_layer_and_no_other_name_does():
    model = nn.Sequential(nn.Linear(3, 4), nn.SiLU(), nn.Linear(4, 2))
    for name in ("fp32", "tf32", "bf16", "fp16"):
        model.precision = name
        assert [layer.precision for layer in model] == [name] * 3
    with pytest.raises(CudiffError, match="unknown precision 'int8': use one of fp32"):
        model.precision = "int8"
    assert model.precision == "fp16"


def test_grouped_layers_are_each_layers_own_output(rng):
    layers = [nn.Linear(5, width) for width in (3, 7)]
    x = Tensor(rng.standard_normal((4, 5)).astype(np.float32))
    for silu in (False, True):
        outs = nn.grouped_linear(x, *layers, silu=silu)
        for out, layer in zip(outs, layers, strict=True):
            expected = ops.silu(layer(x)) if silu else layer(x)
            np.testing.assert_allclose(out.numpy(), expected.numpy(), rtol=1e-5, atol=1e-6)


def test_weights_in_16_bits_are_those_of_float32_after_every_change(rng):
    model = nn.Linear(6, 4, bias=False)
    model.precision = "bf16"
    x = Tensor(np.eye(6), dtype=bfloat16)

    def seen():
        return model(x).numpy().T

    model.flatten("cpu")
    np.testing.assert_array_equal(seen(), model.weight.data.astype(bfloat16))
    model.load_state_dict({"weight": rng.standard_normal((4, 6)).astype(np.float32)})
    np.testing.assert_array_equal(seen(), model.weight.data.astype(bfloat16))
    model.weight.assign(rng.standard_normal((4, 6)).astype(np.float32))
    np.testing.assert_array_equal(seen(), model.weight.data.astype(bfloat16))


def test_dropout_of_nothing_needs_no_numbers():
    x, layer = Tensor(np.ones(3, np.float32)), nn.Dropout(0.0)
    assert layer.train()(x) is x
    assert nn.Dropout(0.5).eval()(x) is x
    assert layer.draw("cpu") is None and nn.Dropout(0.5).eval().draw("cpu") is None


def test_dropout_makes_random_numbers_of_its_own(device):
    x = Tensor(np.ones((4, 32), np.float32), device=device, requires_grad=True)

    def masks():
        cudiff.seed(5)
        model = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5))
        return [layer(x).numpy().tobytes() for layer in (*model, *model, *copy.deepcopy(model))]

    assert len(set(masks())) == 6 and masks() == masks()
    layer = nn.Dropout(0.5)
    out = layer(x)
    layer(x)
    assert layer.generator.step.numpy() == 2
    out.backward(np.ones((4, 32), np.float32))
    np.testing.assert_array_equal(Tensor(x.grad).numpy(), out.numpy())
    given = cudiff.Generator(3, device)
    nn.set_generator(layer, given)
    layer(x)
    assert layer.generator is given and given.step.numpy() == 0


def dropped(layer, n=1):
    """The masks of n calls of it, in training."""
    x = Tensor(np.ones((4, 32), np.float32), device=layer.generator.device)
    return [layer.train()(x).numpy().tobytes() for _ in range(n)]


def test_dropout_differs_from_call_to_call(device):
    """PyTorch's does, whose loop advances nothing; equal seeds and calls give equal masks."""
    def masks():
        layer, generator, found = nn.Dropout(0.5), cudiff.Generator(3, device), []
        nn.set_generator(layer, generator)
        for _ in range(3):
            found += dropped(layer, 3)
            generator.advance()
        return found

    assert len(set(masks())) == 9 and masks() == masks()


@pytest.mark.parametrize("calls", [0, 2])
@pytest.mark.parametrize("step", [1, 5])
def test_dropout_s_first_call_of_a_step_depends_on_seed_and_step_alone(device, step, calls):
    """A run that is resumed has the masks of one that was not, whatever was called before."""
    layer, generator = nn.Dropout(0.5), cudiff.Generator(3, device)
    nn.set_generator(layer, generator)
    dropped(layer, 4)
    generator.load_state({"seed": 3, "step": step})
    again = nn.Dropout(0.5)
    nn.set_generator(again, cudiff.Generator(3, device))
    for _ in range(step):
        dropped(again, calls)
        again.generator.advance()
    x = Tensor(np.ones((4, 32), np.float32), device=device)
    expected = cudiff.dropout(x, 0.5, generator, cudiff.Purpose.DROPOUT).numpy().tobytes()
    assert dropped(layer) == dropped(again) == [expected]


def test_two_models_of_one_generator_drop_others(device):
    generator = cudiff.Generator(3, device)
    one, other = (nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)) for _ in range(2))
    for model in (one, other, one):  # again: as it was
        nn.set_generator(model, generator)
    assert len({mask for model in (one, other) for layer in model for mask in dropped(layer)}) == 4
    assert [layer.stream - cudiff.Purpose.DROPOUT for layer in (*one, *other)] == [0, 1, 2, 3]
    nn.set_generator(one, cudiff.Generator(4, device))
    fresh = nn.Dropout(0.5)
    nn.set_generator(fresh, cudiff.Generator(4, device))
    assert dropped(one[0]) == dropped(fresh)


def test_the_gradient_of_dropout_has_its_call_s_mask(device):
    layer = nn.Dropout(0.5).train()
    nn.set_generator(layer, cudiff.Generator(3, device))
    x = Tensor(np.ones((4, 32), np.float32), device=device, requires_grad=True)
    first, second = layer(x), layer(x)
    cudiff.sum(first).backward()
    np.testing.assert_array_equal(x.grad.get() if hasattr(x.grad, "get") else x.grad, first.numpy())
    assert (first.numpy() != second.numpy()).any()


def test_convolutions_keep_the_size_by_default():
    x = Tensor(np.zeros((1, 5, 4, 2), np.float32))
    assert nn.Conv2d(2, 3, 3)(x).shape == (1, 5, 4, 3)
    assert nn.Conv2d(2, 3, 3, padding=0)(x).shape == (1, 3, 2, 3)
    assert nn.Conv2d(2, 3, 3, stride=2)(x).shape == (1, 3, 2, 3)


def test_an_outline_has_as_many_arrays_and_numbers_as_it_may():
    with init.outlined(2, 7):
        assert init.zeros((2, 2)).shape == (2, 2) and init.normal((3,)).dtype == np.float32
        with pytest.raises(CudiffError, match="larger"):
            init.ones(())
    with init.outlined(3, 7), pytest.raises(CudiffError, match="larger"):
        init.zeros((2, 4))
    with init.outlined(1, 7):
        init.zeros((2,))
        with pytest.raises(CudiffError, match="larger"):
            init.zeros((2,))
    assert init.zeros((2,)).tolist() == [0, 0] and init.ones((2,)).tolist() == [1, 1]  # values again


def test_norms_begin_as_nothing_but_the_norm():
    for norm in (nn.GroupNorm(2, 4), nn.LayerNorm(4), nn.BatchNorm2d(4)):
        assert norm.weight.numpy().tolist() == [1] * 4 and norm.bias.numpy().tolist() == [0] * 4
        assert norm.eps == 1e-5
    buffers = norm.state_dict()
    assert buffers["running_mean"].tolist() == [0] * 4 and buffers["running_var"].tolist() == [1] * 4
    assert norm.momentum == 0.1


def test_weights_begin_within_one_over_the_root_of_their_inputs():
    for layer, fan_in in ((nn.Linear(64, 500), 64), (nn.Conv2d(8, 200, 3), 72), (nn.ConvTranspose2d(90, 5, 6), 180)):
        for parameter, close in ((layer.weight, 0.01), (layer.bias, 0.5)):
            largest = np.abs(parameter.numpy()).max() * fan_in**0.5
            assert 1 - close < largest <= 1
    assert abs(nn.Embedding(500, 60).weight.numpy().std() - 1) < 0.02


def test_which_parameters_decay_and_are_read_in_16_bits():
    layers = [nn.Linear(2, 3), nn.Conv2d(2, 3, 3), nn.ConvTranspose2d(2, 3, 3), nn.GroupNorm(1, 2), nn.Embedding(2, 3)]
    assert [(layer.weight.decay, layer.weight.low) for layer in layers] == [(True, True)] * 3 + [(False, False)] * 2
    assert not any(layer.bias.decay or layer.bias.low for layer in layers[:4])
    assert nn.Linear(2, 3, bias=False).bias is None and nn.Conv2d(2, 3, 1, bias=False).bias is None


@pytest.mark.parametrize("make", [
    lambda: nn.Linear(0, 2), lambda: nn.Linear(2, 0), lambda: nn.Conv2d(0, 1, 1), lambda: nn.Conv2d(1, 0, 1),
    lambda: nn.Conv2d(1, 1, 0), lambda: nn.Conv2d(1, 1, 1, stride=0), lambda: nn.Conv2d(1, 1, 1, padding=-1),
    lambda: nn.ConvTranspose2d(1, 0, 1), lambda: nn.GroupNorm(0, 2), lambda: nn.GroupNorm(1, 0),
    lambda: nn.GroupNorm(2, 3), lambda: nn.GroupNorm(1, 2, eps=0), lambda: nn.LayerNorm(0),
    lambda: nn.LayerNorm(2, eps=0), lambda: nn.BatchNorm2d(0), lambda: nn.BatchNorm2d(2, eps=0),
    lambda: nn.BatchNorm2d(2, momentum=-0.1), lambda: nn.BatchNorm2d(2, momentum=1.1), lambda: nn.Embedding(0, 1),
    lambda: nn.Embedding(1, 0), lambda: nn.Dropout(1), lambda: nn.Dropout(-0.1),
])
def test_sizes_that_make_no_layer_are_refused(make):
    with pytest.raises(CudiffError):
        make()


@pytest.mark.parametrize("options", [
    dict(kernel_size=(3, 5), groups=2), dict(kernel_size=3, stride=(1, 2), dilation=(2, 1), groups=4),
    dict(kernel_size=(1, 2), padding=(0, 3), bias=False),
], ids=str)
def test_a_convolution_is_pytorchs_with_its_weights(rng, options):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    layer, x = nn.Conv2d(4, 8, **options), rng.standard_normal((2, 7, 6, 4)).astype(np.float32)
    theirs = torch.nn.Conv2d(4, 8, **{"padding": layer.padding} | options)
    state = {name: value.detach().numpy() for name, value in theirs.state_dict().items()}
    layer.load_state_dict(from_torch(state, layer.layouts()))
    expected = theirs(torch.tensor(x).permute(0, 3, 1, 2)).permute(0, 2, 3, 1).detach().numpy()
    np.testing.assert_allclose(layer(Tensor(x)).numpy(), expected, rtol=1e-4, atol=1e-5)
    if "padding" not in options and "stride" not in options:
        assert expected.shape[1:3] == x.shape[1:3]


def test_the_least_sizes_make_layers():
    nn.Linear(1, 1), nn.Conv2d(1, 1, 1, stride=1, padding=0), nn.ConvTranspose2d(1, 1, 1), nn.GroupNorm(1, 1)
    nn.LayerNorm(1), nn.BatchNorm2d(1, momentum=0), nn.BatchNorm2d(1, momentum=1), nn.Embedding(1, 1), nn.Dropout(0)


def test_layers_without_parameters_are_their_operations(rng):
    x = Tensor(rng.standard_normal((2, 4, 6, 3)), dtype=np.float32)
    pairs = {
        nn.Identity(): lambda x: x, nn.SiLU(): ops.silu, nn.ReLU(): ops.relu, nn.GELU(): ops.gelu, nn.Tanh(): ops.tanh,
        nn.Sigmoid(): ops.sigmoid, nn.Flatten(): lambda x: ops.reshape(x, (2, 72)),
        nn.MaxPool2d(2): lambda x: ops.max_pool2d(x, 2), nn.AvgPool2d(2): lambda x: ops.avg_pool2d(x, 2),
        nn.MaxPool2d(3, stride=1, padding=1): lambda x: ops.max_pool2d(x, 3, 1, 1),
        nn.AvgPool2d(3, stride=1, padding=1): lambda x: ops.avg_pool2d(x, 3, 1, 1),
    }
    for layer, operation in pairs.items():
        np.testing.assert_array_equal(layer(x).numpy(), operation(x).numpy())
    for layer, operation in ((nn.MaxPool2d, ops.max_pool2d), (nn.AvgPool2d, ops.avg_pool2d)):
        out = layer((2, 4), (3, 2), (1, 0), ceil_mode=True)(x)
        np.testing.assert_array_equal(out.numpy(), operation(x, (2, 4), (3, 2), (1, 0), ceil_mode=True).numpy())
    for make in (lambda: nn.MaxPool2d((2, 0)), lambda: nn.MaxPool2d(0), lambda: nn.AvgPool2d(2, stride=0),
                 lambda: nn.MaxPool2d(2, padding=-1)):
        with pytest.raises(CudiffError):
            make()


def test_a_module_shows_its_options_and_what_is_in_it():
    net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Sequential(nn.Linear(3, 1, bias=False)))
    assert repr(net) == """Sequential(
  (0): Linear(in_features=2, out_features=3, bias=True)
  (1): ReLU()
  (2): Sequential(
    (0): Linear(in_features=3, out_features=1, bias=False)
  )
)"""


def test_lists_of_modules_hold_modules():
    for make in (nn.ModuleList, lambda items: nn.Sequential(*items)):
        with pytest.raises(TypeError, match=r"holds modules, not a (list|int)"):
            make([nn.SiLU(), [nn.SiLU()]])
    layers = nn.ModuleList([nn.SiLU(), None])
    with pytest.raises(TypeError, match="a ModuleList holds modules, not a int"):
        layers.append(3)


def test_a_layer_that_is_appended_is_in_what_was_captured(monkeypatch):
    stand_in(monkeypatch)
    net, x = nn.Sequential(nn.Linear(2, 3)).flatten("cpu"), Tensor([[-1.0, 2.0]])
    captured = graph.capture(lambda x: net(x), warmup=1)
    for _ in range(3):
        captured(x)
    net.append(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)))
    assert captured(x).tolist() == net(x).tolist() != net[0](x).tolist()
    before = graph.recording_state()
    nn.ModuleList([nn.Linear(2, 2)]).append(nn.Linear(2, 2))  # of another model, which nobody has called
    assert graph.recording_state() == before


def test_a_layer_that_is_deleted_is_gone():
    net = nn.Sequential(nn.Linear(2, 3))
    net.extra = nn.Linear(3, 1)
    del net.extra
    assert not hasattr(net, "extra") and list(dict(net.named_parameters())) == ["0.weight", "0.bias"]


def test_a_buffer_in_the_place_of_another_is_recorded_again():
    """A captured function holds the old one; of a first buffer it holds none."""
    module = nn.Module()
    before = graph._state
    module.register_buffer("count", Tensor(np.zeros(2, np.float32)))
    assert graph._state == before
    module.register_buffer("count", Tensor(np.ones(2, np.float32)))
    assert graph._state > before and module.count.numpy().tolist() == [1, 1]


def test_a_buffer_that_is_set_in_a_forward_has_its_old_values_in_backward(device):
    """As a running deviation: setting it gives what computed before no other gradient."""
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(np.ones(2))
            self.register_buffer("scale", np.array([2.0, 3.0]))

        def forward(self, x):
            y = x * self.weight * self.scale
            self.scale = self.scale * 5
            return y

    net = Scaled().flatten(device)
    net(Tensor([1.0, 1.0], device=device)).sum().backward()
    assert Tensor(net.weight.grad).tolist() == [2, 3] and net.scale.tolist() == [10, 15]
    net.zero_grad()
    slope = cudiff.grad(lambda x: net(x).sum(), create_graph=True)(Tensor([1.0, 1.0], device=device))
    assert slope.tolist() == [10, 15] and net.scale.tolist() == [50, 75]
    before = graph.recording_state()
    slope.sum().backward()
    assert Tensor(net.weight.grad).tolist() == [10, 15] and graph.recording_state() == before
    net.scale = [1.0, 1.0]
    assert graph.recording_state() > before and net.scale.device == device


def test_a_buffer_that_is_set_within_a_graph_keeps_its_array(host_of, monkeypatch):
    host = host_of(True)
    module = nn.Module()
    module.register_buffer("count", Tensor(host.zeros(2, np.float32)))
    data, values = module.count.data, Tensor(np.ones(2, np.float32), device="cuda")
    monkeypatch.setattr(host.cuda.get_current_stream(), "is_capturing", lambda: True)
    module.count = values
    assert module.count.data is data and module.count.numpy().tolist() == [1, 1]


def test_a_model_moves_to_a_device(host_of):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm2d(4))
    assert model.to("cpu") is model and model.flat is None
    host_of(True)
    assert model.to("cuda") is model
    assert {value.device for value in (*model.parameters(), *dict(model.named_buffers()).values())} == {"cuda"}
    flat = model.flat
    assert model.to("cuda").flat is flat and model[0].to("cuda").flat is None
    model.flatten("cuda", trainable=False)
    assert not model.to("cpu").flat.trainable and {value.device for value in model.parameters()} == {"cpu"}


def test_a_model_that_moves_keeps_its_values(device):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm2d(4))
    before = model.state_dict()
    after = model.to(device).to("cpu").state_dict()
    assert all((values == before[name]).all() for name, values in after.items())


VIEWS = {
    "a slice": lambda w: w[1], "a shape": lambda w: w.reshape(16), "detached": lambda w: w.detach(),
    "a slice of a shape": lambda w: w.reshape(2, 8)[1:], "an axis": lambda w: np.squeeze(np.expand_dims(w, 0), 0),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("frozen", [True, False])
def test_a_view_of_a_parameter_is_read_in_backward_too(device, view, frozen):
    """One that requires no gradient: of a frozen parameter, or taken within no_grad."""
    module = nn.Module()
    module.weight = nn.Parameter(np.arange(16.0).reshape(4, 4))
    module.weight.requires_grad = not frozen
    module.flatten(device)
    with cudiff.no_grad():
        seen = view(module.weight)
    x = Tensor(np.ones(seen.shape, np.float32), requires_grad=True, device=device)
    out, kept = (x * seen).sum(), (x * (seen * 1.0)).sum()
    before = seen.numpy().copy()
    module.weight.assign(np.full((4, 4), 9.0))
    with pytest.raises(RuntimeError, match="updated between forward and backward"):
        out.backward()
    x.grad = None
    kept.backward()
    np.testing.assert_array_equal(Tensor(x.grad).numpy(), before)


def test_weights_of_conv1d_that_change_before_backward_are_told(device):
    net = nn.Conv1d(2, 3, 3)
    net.requires_grad_(False)
    net.flatten(device)
    out = net(Tensor(np.ones((1, 4, 2), np.float32), requires_grad=True, device=device)).sum()
    net.weight.assign(np.full(net.weight.shape, 5.0))
    with pytest.raises(RuntimeError, match="updated between forward and backward"):
        out.backward()


@pytest.mark.parametrize("change, expected", [
    ("p **= 2", [9, 16]), ("p //= 2", [1, 2]), ("p %= 2", [1, 0]), ("p += 1", [4, 5]), ("p /= 2", [1.5, 2]),
])
def test_every_operator_changes_a_frozen_parameter_in_place(change, expected):
    parameter = nn.Parameter(np.array([3.0, 4.0]))
    parameter.requires_grad = False
    names = {"p": parameter}
    exec(change, names)
    assert names["p"] is parameter and parameter.numpy().tolist() == expected
