"""Parameters stay with what trains them: copies, replaced arrays and layers, parts of a model, freezing."""

import copy
import pickle

import numpy as np
import pytest

import cudiff
from cudiff import nn
from cudiff.backend import bfloat16
from cudiff.config import PRESETS
from cudiff.cuda import graph
from cudiff.errors import CudiffError
from cudiff.models import build
from cudiff.optim import EMA, SGD, Adam, AdamW, Constant, Cosine
from cudiff.pipeline import Pipeline, load
from cudiff.tensor import Tensor


def network(device="cpu"):
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 2))
    return model.flatten(device)


def inputs(device="cpu"):
    return Tensor(np.random.default_rng(2).standard_normal((6, 3)).astype(np.float32), device=device)


def train(model, optimizer, steps=3):
    """The weights' changes by name."""
    before = model.state_dict()
    for _ in range(steps):
        optimizer.zero_grad()
        cudiff.square(model(inputs(model.parameters()[0].device))).sum().backward()
        optimizer.step()
    return {name: value - before[name] for name, value in model.state_dict().items()}


def assert_equal(mine, theirs):
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        np.testing.assert_array_equal(value, theirs[name], err_msg=name)


@pytest.fixture
def expected(device):
    """How the weights change in training that nothing happened before."""
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 2))
    model.load_state_dict(start().state_dict())
    changes = train(model.flatten(device), SGD(model, lr=0.01, momentum=0.9))
    assert all(np.abs(change).max() > 1e-5 for change in changes.values())
    return changes


def start(device="cpu"):
    """A model with weights that are always the same."""
    rng = np.random.default_rng(1)
    model = network(device)
    model.load_state_dict({name: rng.standard_normal(value.shape) for name, value in model.state_dict().items()})
    return model


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_trains_alone(device, duplicate, expected):
    model = start(device)
    train(model, SGD(model, lr=0.3))  # the copy takes over neither gradients nor momentum
    model.load_state_dict(start().state_dict())
    before = model.state_dict()
    other = duplicate(model)
    assert_equal(other.state_dict(), before)
    assert_equal(train(other, SGD(other, lr=0.01, momentum=0.9)), expected)
    assert_equal(model.state_dict(), before)


def test_a_copy_of_a_net_for_sampling_trains(device, expected):
    other = copy.deepcopy(start(device).flatten(device, trainable=False))
    assert_equal(train(other, SGD(other, lr=0.01, momentum=0.9)), expected)


def test_a_copy_with_dropout_has_random_numbers_of_its_own(device):
    model = nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.5)).flatten(device)
    generator = cudiff.Generator(1, device)
    nn.set_generator(model, generator)
    other = copy.deepcopy(model)
    other(inputs(device))
    assert model[1].generator is generator and other[1].generator is not generator
    assert generator.step.numpy() == 0
    EMA(model, half_life=2).model(inputs(device))  # which drops nothing


def test_new_data_is_what_trains(device, expected):
    model = network(device)
    optimizer = SGD(model, lr=0.01, momentum=0.9)
    for parameter, value in zip(model.parameters(), start().state_dict().values(), strict=True):
        parameter.data = Tensor(value.astype(np.float64)).data  # of any floating dtype, from the CPU
    assert_equal(train(model, optimizer), expected)
    with pytest.raises(ValueError, match="shape"):
        model[0].weight.data = np.zeros((2, 2), np.float32)


def test_a_parameter_changes_in_place_within_no_grad(device):
    model = network()
    model.precision = "bf16"
    model.flatten(device)
    weight, before = model[0].weight, model[0].weight.numpy().copy()
    weight.operand(bfloat16)
    with pytest.raises(RuntimeError, match="no_grad"):
        weight -= 1.0
    with cudiff.no_grad():
        for parameter in [weight]:
            parameter -= Tensor(before, device=device).data
            parameter += 3
            parameter *= 2
            parameter /= 4
    assert model[0].weight is weight and weight.requires_grad
    for values in (weight.numpy(), Tensor(weight.operand(bfloat16)).numpy(), Tensor(model.flat.data).numpy()[:15]):
        np.testing.assert_array_equal(values, np.full_like(values, 1.5))


def test_what_would_not_be_trained_is_refused():
    class Late(nn.Module):
        def __init__(self):
            self.layer = nn.Linear(2, 2)

    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match=r"super\(\)\.__init__\(\) before 'layer'"):
        Late()
    with pytest.raises(TypeError, match=r"weight is a Parameter: set weight\.data"):
        model[0].weight = Tensor(np.zeros((2, 2), np.float32))
    for parts in ([nn.Linear(2, 2)], {"a": nn.Linear(2, 2)}, (nn.Parameter(np.zeros(2)),)):
        with pytest.raises(TypeError, match="ModuleList"):
            model.layers = parts
    with pytest.raises(CudiffError, match=r"takes a Module, nn\.Parameters or groups of them, not a ndarray"):
        SGD([np.zeros(2, np.float32)])


@pytest.mark.parametrize("load", ["load_state_dict", "assign", "data"])
def test_the_16_bit_copy_follows_new_weights(device, load):
    model = network()
    model.precision = "bf16"
    model.flatten(device)
    weight, values = model[0].weight, start()[0].weight.numpy()
    weight.operand(bfloat16)
    if load == "load_state_dict":
        model.load_state_dict(start().state_dict())
    elif load == "assign":
        weight.assign(Tensor(values, device=device))
    else:
        weight.data = values
    np.testing.assert_array_equal(Tensor(weight.operand(bfloat16)).numpy(), values.astype(bfloat16))


@pytest.mark.parametrize("changes", [("bf16",), ("bf16", "fp16"), ("bf16", "fp16", "bf16")])
def test_a_precision_chosen_after_the_optimiser_sees_its_updates(device, changes):
    model = network()
    model.precision = "bf16"
    model.flatten(device)
    for precision in changes:
        model.precision = precision
        optimizer, dtype, weight = SGD(model, lr=1.0), model.activation_dtype, model[0].weight
        for _ in range(2):
            before = Tensor(weight.operand(dtype)).numpy().copy()
            weight.grad = Tensor(np.ones((5, 3), np.float32), device=device).data
            optimizer.step()
            after = Tensor(weight.operand(dtype)).numpy()
            np.testing.assert_array_equal(after, weight.numpy().astype(dtype))
            assert np.abs(after.astype(float) - before.astype(float) + 1).max() < 0.02


def test_a_precision_chosen_after_flatten_sees_updates(device):
    model = network(device)
    optimizer = SGD(model, lr=1.0)
    model.precision = "bf16"
    weight = model[0].weight
    weight.operand(bfloat16)
    weight.grad = Tensor(np.ones((5, 3), np.float32), device=device).data
    optimizer.step()
    np.testing.assert_array_equal(Tensor(weight.operand(bfloat16)).numpy(), weight.numpy().astype(bfloat16))


def test_a_step_casts_no_weight_again():
    model = network()
    model.precision = "bf16"
    model.flatten("cpu")
    optimizer = SGD(model, lr=0.1)
    model[0].weight.operand(bfloat16)
    optimizer.step()
    model.flat.compute_copy[...] = 7
    assert np.all(model[0].weight.operand(bfloat16) == 7)


def test_a_gradient_from_before_the_optimiser_counts(device):
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    model[1].requires_grad_(False)
    before = model[0].bias.numpy().copy()
    model[0].bias.grad = np.arange(5, dtype=np.float32)
    model.flatten(device)
    SGD(model, lr=1.0).step()
    np.testing.assert_array_equal(model[0].bias.numpy(), before - np.arange(5, dtype=np.float32))
    model.zero_grad()
    model[0].bias.grad = None
    assert not Tensor(model.flatten(device).flat.grad).numpy().any()


def test_decay_may_be_chosen_after_the_optimiser(device):
    model = start(device)
    optimizer, before = AdamW(model, lr=0.5, weight_decay=0.2), model.state_dict()
    model[0].weight.decay, model[0].bias.decay = False, True
    optimizer.step()
    for name, value in model.state_dict().items():
        factor = 0.9 if name in ("0.bias", "2.weight", "4.weight") else 1
        np.testing.assert_allclose(value, factor * before[name], rtol=1e-6, err_msg=name)


def test_an_optimiser_of_a_part_leaves_the_whole_whole(device, expected):
    model = start(device)
    whole = SGD(model, lr=0.01, momentum=0.9)
    part = SGD(model[2], lr=0.01)
    assert_equal(train(model, whole), expected)
    changes = train(model, part)
    assert {name for name, change in changes.items() if change.any()} == {"2.weight", "2.bias"}
    assert model[2].flat.data.size == 64 and {"weight", "bias"} == set(model[2].flat.slots)


def test_an_optimiser_of_the_whole_after_that_of_a_part(device, expected):
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 2))
    model.load_state_dict(start().state_dict())
    part = SGD(model[2], lr=0.01)
    model.flatten(device)
    assert_equal(train(model, SGD(model, lr=0.01, momentum=0.9)), expected)
    with pytest.raises(CudiffError, match="made for other parameters"):
        part.step()
    assert train(model, SGD(model[2], lr=0.01))["2.weight"].any()


def test_a_replaced_layer_trains(device, expected):
    model = network(device)
    old = SGD(model, lr=0.01)
    model[2] = nn.Linear(5, 5)
    model.load_state_dict(start().state_dict())
    with pytest.raises(CudiffError, match="made for other parameters"):
        old.step()
    if device == "cpu":
        assert_equal(train(model, SGD(model, lr=0.01, momentum=0.9)), expected)
    else:
        with pytest.raises(CudiffError, match="different devices"):
            SGD(model)


def test_tied_weights_train_as_one(device):
    model = start(device)
    model[2].weight = model[0].weight = nn.Parameter(np.eye(3, dtype=np.float32) + 0.1)
    model[0].bias = model[2].bias = None
    model[4] = nn.Linear(3, 2)
    model.flatten(device)
    x = Tensor(np.eye(3, dtype=np.float32), device=device)
    cudiff.sum(model[2](model[0](x))).backward()
    weight = model[0].weight.numpy().copy()
    expected = np.ones((3, 3)) @ weight.T + weight.T @ np.ones((3, 3))
    np.testing.assert_allclose(Tensor(model[0].weight.grad).numpy(), expected.T, rtol=1e-6)
    optimizer = SGD(model, lr=0.1)
    optimizer.step()
    np.testing.assert_allclose(model[2].weight.numpy(), weight - 0.1 * expected.T, rtol=1e-6)
    with cudiff.no_grad():
        for parameter in model.parameters():  # each once
            parameter -= 0.1 * parameter.grad
    np.testing.assert_allclose(model[2].weight.numpy(), weight - 0.2 * expected.T, rtol=1e-6)
    SGD(model, lr=0.1, ema=EMA(model, half_life=2)).step()
    np.testing.assert_allclose(model[2].weight.numpy(), weight - 0.3 * expected.T, rtol=1e-5)
    assert model.num_parameters() == 9 + 6 + 2
    model.load_state_dict(model.state_dict())
    optimizer.load_state_dict(optimizer.state_dict())


def test_gradients_set_to_none_are_gone(device, expected):
    model = start(device)
    optimizer = SGD(model, lr=0.01, momentum=0.9)
    before = model.state_dict()
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = None
        cudiff.square(model(inputs(device))).sum().backward()
        optimizer.step()
    assert_equal({name: value - before[name] for name, value in model.state_dict().items()}, expected)
    for parameter in model.parameters():
        parameter.grad = None
    still = SGD(model, lr=1.0)
    before = model.state_dict()
    still.step()
    assert_equal(model.state_dict(), before)


def test_a_gradient_written_by_hand_counts(device):
    model = start(device)
    optimizer = SGD(model, lr=1.0)
    optimizer.zero_grad()
    before, gradient = model[0].bias.numpy().copy(), np.arange(5, dtype=np.float32)
    model[0].bias.grad = Tensor(gradient, device=device).data
    optimizer.step()
    np.testing.assert_array_equal(model[0].bias.numpy(), before - gradient)
    with pytest.raises(ValueError, match="shape"):
        model[0].bias.grad = np.zeros(4, np.float32)


@pytest.mark.parametrize("optimizer, attrs", [
    (SGD, {"momentum": 0.9, "weight_decay": 0.1}), (SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (Adam, {"weight_decay": 0.1}), (AdamW, {"weight_decay": 0.1}),
])
def test_frozen_is_frozen(device, optimizer, attrs):
    model = start(device)
    ema = EMA(model, half_life=2, ramp=None)
    ours = optimizer(model, lr=0.05, clip=0.5, ema=ema, **attrs)
    train(model, ours)
    model[2].requires_grad_(False)
    frozen = ("2.weight", "2.bias")
    moments, average = ours.state_dict(), ema.model.state_dict()
    changes = train(model, ours)
    assert all(bool(change.any()) != (name in frozen) for name, change in changes.items())
    for moment in ours.moments:
        for name in frozen:
            np.testing.assert_array_equal(ours.state_dict()[f"{moment}.{name}"], moments[f"{moment}.{name}"])
    for name, value in ema.model.state_dict().items():
        assert np.array_equal(value, average[name]) == (name in frozen)
    norm = sum(float(np.sum(np.square(Tensor(p.grad).numpy()))) for n, p in model.named_parameters() if n not in frozen)
    assert abs(ours.metrics()["grad_norm"] / norm**0.5 - 1) < 1e-5
    with pytest.raises(ValueError, match="frozen"):
        model[2].bias.grad = np.ones(5, np.float32)
    model[2].requires_grad_(True)
    assert all(change.any() for change in train(model, ours).values())


def test_what_was_frozen_before_the_optimiser_stays_frozen(device):
    model = start(device)
    model[0].weight.requires_grad = False
    changes = train(model.flatten(device), AdamW(model, lr=0.1, weight_decay=0.5))
    assert [name for name, change in changes.items() if not change.any()] == ["0.weight"]


def test_a_captured_step_is_recorded_again_where_parameters_are_frozen(monkeypatch):
    made = []

    class Recording(graph._Recording):
        def __init__(self, fn, warmup):
            self.state = graph._state
            made.append(self)

        def __call__(self, args):
            return made.index(self)

    monkeypatch.setattr(graph, "_Recording", Recording)
    step = graph.capture(lambda: None, device="cuda")
    model, other = network(), network().flatten("cpu", trainable=False)
    assert [step(), step()] == [0, 0]
    model[0].weight.requires_grad = True  # as it was
    other.requires_grad_(False)  # takes part in no training
    copy.deepcopy(model).requires_grad_(False)
    assert step() == 0
    model[0].weight.requires_grad = False
    assert [step(), step()] == [1, 1]
    model[0].weight.requires_grad = True
    assert step() == 2
    model.load_state_dict(model.state_dict())  # no 16-bit copy was read
    assert step() == 2
    model[0].weight.operand(bfloat16)
    model.load_state_dict(model.state_dict())
    assert [step(), step()] == [3, 3]
    monkeypatch.setattr(graph._mode, "busy", True, raising=False)
    model[0].weight.requires_grad = False  # within a captured function: recorded with it
    monkeypatch.setattr(graph._mode, "busy", False)
    assert step() == 3
    model[0].bias = nn.Parameter(np.zeros(5))
    assert [step(), step()] == [4, 4]
    model[0] = nn.Linear(3, 5)
    assert [step(), step()] == [5, 5]
    model.flatten("cpu")
    assert [step(), step()] == [6, 6]
    EMA(model, half_life=2)
    network()
    assert step() == 6


@pytest.mark.gpu
def test_freezing_between_captured_steps():
    model = start("cuda")
    optimizer = SGD(model, lr=0.01, momentum=0.9, weight_decay=0.1)
    x = inputs("cuda")

    def step():
        optimizer.zero_grad()
        cudiff.square(model(x)).sum().backward()
        optimizer.step()

    captured = cudiff.capture(step, warmup=1, device="cuda")
    for frozen in (False, True, False):
        model[2].requires_grad_(not frozen)
        for _ in range(3):
            before = model.state_dict()
            captured()
            moved = {name for name, value in model.state_dict().items() if not np.array_equal(value, before[name])}
            assert ("2.weight" in moved) != frozen and "0.weight" in moved


def test_weight_decay_is_for_two_or_more_dimensions(device):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.matrix, self.vector = nn.Parameter(np.ones((3, 2))), nn.Parameter(np.ones(4))
            self.table = nn.Parameter(np.ones((3, 2)), decay=False)
            self.gain = nn.Parameter(np.ones(4), decay=True)
            self.embedding, self.norm, self.linear = nn.Embedding(3, 2), nn.GroupNorm(1, 2), nn.Linear(2, 2)

    model = Model().flatten(device)
    before = model.state_dict()
    AdamW(model, lr=0.5, weight_decay=0.2).step()  # of gradients that are zero
    for name, value in model.state_dict().items():
        factor = 0.9 if name in ("matrix", "gain", "linear.weight") else 1
        np.testing.assert_allclose(value, factor * before[name], rtol=1e-6, err_msg=name)


def test_adam_adds_its_decay_to_the_gradient(device):
    model = nn.Sequential(nn.Linear(2, 2)).flatten(device)
    before = model[0].weight.numpy().copy()
    Adam(model, lr=0.5, weight_decay=0.2).step()
    decay = 0.2 * before  # the gradient; its first step is its sign, but for eps
    np.testing.assert_allclose(model[0].weight.numpy(), before - 0.5 * decay / (np.abs(decay) + 1e-8), rtol=1e-4)


def test_the_learning_rate_counts_skipped_steps(device):
    model = network(device)
    optimizer = SGD(model, lr=1.0, schedule=Constant(warmup=4))
    for step, bad in enumerate((False, True, True, False)):
        optimizer.zero_grad()
        model[0].bias.grad = Tensor(np.full(5, np.nan if bad else 1, np.float32), device=device).data
        optimizer.step()
        assert optimizer.metrics()["lr"] == (step + 1) / 4


def test_a_loaded_net_is_trained_where_it_is_loaded_for_it(tmp_path, device):
    config = PRESETS["digits"].replace(image_size=8, model_channels=8, num_head_channels=8)
    Pipeline(config, build(config)).save(tmp_path / "net.safetensors")
    net = load(tmp_path / "net.safetensors", device).net
    for attempt in (lambda: AdamW(net), lambda: net.requires_grad_(True)):
        with pytest.raises(CudiffError, match=r"cudiff\.load\(path, trainable=True\)"):
            attempt()
    with pytest.raises(RuntimeError, match="trainable=True"):
        net.out[2].weight.sum().backward()
    for trained in (net.train().flatten(device), cudiff.load(tmp_path / "net.safetensors", device, trainable=True).net):
        assert trained.training
        before = trained.state_dict()
        optimizer = AdamW(trained, lr=1e-2)
        pipeline = Pipeline(config, trained)
        images = Tensor(np.random.default_rng(0).uniform(-1, 1, (4, 8, 8, 1)).astype(np.float32), device=device)
        labels = Tensor(np.arange(4, dtype=np.int32), device=device)
        pipeline.loss()(trained, images, labels, cudiff.Generator(1, device)).backward()
        optimizer.step()
        assert sum(not np.array_equal(value, before[name]) for name, value in trained.state_dict().items()) > 10


@pytest.mark.parametrize("make, complaint", [
    (lambda m: AdamW(m, lr=np.nan), "lr"), (lambda m: AdamW(m, lr=-1.0), "lr"), (lambda m: SGD(m, lr="fast"), "lr"),
    (lambda m: AdamW(m, betas=(2, 3)), "betas"), (lambda m: Adam(m, betas=(0.9,)), "betas"),
    (lambda m: Adam(m, betas=0.9), "betas"), (lambda m: Adam(m, eps=0), "eps"),
    (lambda m: SGD(m, momentum=1.0), "momentum"), (lambda m: SGD(m, weight_decay=-0.1), "weight_decay"),
    (lambda m: SGD(m, clip=-1), "clip"), (lambda m: SGD(m, clip=np.nan), "clip"),
    (lambda m: Constant(warmup=-1), "warmup"), (lambda m: Cosine(10, warmup=-2), "warmup"),
    (lambda m: Cosine(10, final=-1), "final"), (lambda m: EMA(m, half_life=0), "half_life"),
    (lambda m: EMA(m, half_life=np.inf), "half_life"), (lambda m: EMA(m, half_life=3, ramp=-1), "ramp"),
])
def test_options_out_of_range_are_told_at_once(make, complaint):
    with pytest.raises(CudiffError, match=complaint) as caught:
        make(network())
    assert "\n" not in str(caught.value)


def test_no_clipping_is_none_or_zero():
    assert SGD(network(), clip=0).clip == SGD(network(), clip=None).clip == np.inf


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_what_the_parameter_was(duplicate):
    parameter = nn.Parameter(np.ones((2, 3), np.float32), low=True, decay=False, layout="linear")
    parameter.requires_grad = False
    other = duplicate(parameter)
    assert type(other) is nn.Parameter and other.flat is None and other.grad is None
    assert (other.low, other.decay, other.layout, other.requires_grad) == (True, False, "linear", False)
    other.data[...] = 5
    assert parameter.numpy().tolist() == [[1] * 3] * 2


def test_an_optimiser_whose_model_was_flattened_again_says_so():
    model = start()
    optimizer = SGD(model, lr=0.01)
    optimizer.step()
    model.flatten("cpu")
    with pytest.raises(CudiffError, match="the model was flattened again"):
        optimizer.step()
