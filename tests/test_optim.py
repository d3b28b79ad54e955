"""Optimisers, schedules and the EMA over a model, on both devices; against PyTorch where it is installed."""

import numpy as np
import pytest

from cudiff.errors import CudiffError
from cudiff.nn import Linear, Module, Parameter, Sequential
from cudiff.optim import EMA, SGD, Adam, AdamW, Constant, Cosine
from cudiff.tensor import Tensor
from tests.check import relative_error, torch

SHAPES = {"weight": (5, 7), "bias": (5,), "conv": (3, 3, 3, 11)}
DECAYED = ("weight", "conv")


class Model(Module):
    """Parameters only: the tests write the gradients. `running` stands for a batch norm's statistics."""

    def __init__(self, seed=0):
        super().__init__()
        rng = np.random.default_rng(seed)
        for name, shape in SHAPES.items():
            values = rng.standard_normal(shape).astype(np.float32)
            setattr(self, name, Parameter(values, low=name in DECAYED, decay=name in DECAYED))
        self.register_buffer("running", Tensor(np.zeros(3, np.float32)))


def set_gradients(model, gradients):
    """Add to the gradients in place, as backward does."""
    for name, parameter in model.named_parameters():
        parameter.grad += Tensor(gradients[name], device=parameter.device).data


def random_gradients(rng):
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def build(device, optimizer=AdamW, precision="fp32", ema=None, **attrs):
    model = Model()
    model.precision = precision
    model.flatten(device)
    if ema is not None:
        attrs["ema"] = EMA(model, **ema)
    return model, optimizer(model, **attrs)


def values(model):
    return {name: parameter.numpy().copy() for name, parameter in model.named_parameters()}


@pytest.mark.skipif(torch is None, reason="PyTorch is not installed")
@pytest.mark.parametrize("optimizer, attrs", [
    (AdamW, {"weight_decay": 0.3}), (Adam, {"betas": (0.8, 0.95)}), (SGD, {"momentum": 0.9}),
    (SGD, {"momentum": 0.9, "nesterov": True}),
])
def test_clipped_training_agrees_with_torch(device, rng, optimizer, attrs):
    model, ours = build(device, optimizer, lr=1e-2, clip=1.0, **attrs)
    start = values(model)
    theirs = {name: torch.nn.Parameter(torch.tensor(value)) for name, value in start.items()}
    decay = attrs.get("weight_decay", 0.0)
    groups = [{"params": [p], "weight_decay": decay if name in DECAYED else 0.0} for name, p in theirs.items()]
    reference = getattr(torch.optim, optimizer.__name__)(groups, lr=1e-2, **attrs)
    for step in range(20):
        gradients = {name: value * 10.0 ** (step % 4 - 3) for name, value in random_gradients(rng).items()}
        ours.zero_grad()
        set_gradients(model, gradients)
        ours.step()
        for name, parameter in theirs.items():
            parameter.grad = torch.tensor(gradients[name])
        norm = torch.nn.utils.clip_grad_norm_(theirs.values(), 1.0)
        reference.step()
        assert abs(ours.metrics()["grad_norm"] / float(norm) - 1) < 1e-5
    for name, value in values(model).items():
        assert relative_error(value - start[name], theirs[name].detach().numpy() - start[name]) < 2e-5


def test_accumulated_gradients_equal_the_large_batch(device, rng):
    parts = [random_gradients(rng) for _ in range(4)]
    mean = {name: sum(part[name] for part in parts) / 4 for name in SHAPES}
    results = []
    for batches, scale in ((parts, 0.25), ([mean], 1.0)):
        model, optimizer = build(device, lr=1e-2, clip=1.0)
        start = values(model)
        optimizer.zero_grad()
        for gradients in batches:
            set_gradients(model, gradients)
        optimizer.step(scale=scale)
        results.append({name: value - start[name] for name, value in values(model).items()})
        assert optimizer.metrics()["updates"] == 1
    for name in SHAPES:
        assert relative_error(results[0][name], results[1][name]) < 1e-4


def test_ema_is_a_twin_that_training_does_not_touch(device, rng):
    model, optimizer = build(device, lr=0.1, ema={"half_life": 4.0, "ramp": 0.5}, precision="bf16")
    ema_model = optimizer.ema.model
    assert ema_model is not model and ema_model.flat is not model.flat and ema_model.flat.grad is None
    assert not ema_model.training and not any(parameter.requires_grad for parameter in ema_model.parameters())
    expected = values(ema_model)
    for name, value in values(model).items():
        np.testing.assert_array_equal(expected[name], value)
    for step in range(12):
        optimizer.zero_grad()
        set_gradients(model, random_gradients(rng))
        model._buffers["running"].data[...] = float(step)
        optimizer.step()
        keep = 0.0 if step == 0 else 0.5 ** (1 / min(4.0, 0.5 * step))
        expected = {name: keep * expected[name] + (1 - keep) * value for name, value in values(model).items()}
    for name, value in values(ema_model).items():
        assert relative_error(value, expected[name]) < 1e-6
    np.testing.assert_array_equal(*(dict(owner.named_buffers())["running"].numpy() for owner in (ema_model, model)))
    for owner in (model, ema_model):
        compute_copy = Tensor(owner.flat.compute_copy).numpy()
        np.testing.assert_array_equal(compute_copy, Tensor(owner.flat.data).numpy().astype(compute_copy.dtype))


def test_the_twin_has_parameters_of_the_same_class():
    class Positive(Parameter):
        def operand(self, dtype):
            return abs(self.data)

    model = Model()
    model.scale = Positive(np.float32([-1, 2]))
    ema_model = EMA(model, half_life=4.0).model.scale
    assert type(ema_model) is Positive and not np.shares_memory(ema_model.data, model.scale.data)
    np.testing.assert_array_equal((ema_model * 3).numpy(), [3, 6])


def test_training_is_the_same_with_and_without_ema(device, rng):
    gradients = [random_gradients(rng) for _ in range(3)]
    results = []
    for ema in (None, {"half_life": 10.0}):
        model, optimizer = build(device, lr=0.1, ema=ema)
        for gradient in gradients:
            optimizer.zero_grad()
            set_gradients(model, gradient)
            optimizer.step()
        results.append(values(model))
    for name in SHAPES:
        np.testing.assert_array_equal(*(result[name] for result in results))


@pytest.mark.parametrize("optimizer", [AdamW, SGD])
def test_state_goes_round_by_name(device, rng, optimizer):
    attrs = {"lr": 0.1, "schedule": Cosine(30, warmup=5), "ema": {"half_life": 4.0}}
    model, first = build(device, optimizer, **attrs)
    gradients = [random_gradients(rng) for _ in range(8)]
    gradients[3]["bias"][2] = np.nan

    def train(model, optimizer, gradients):
        for gradient in gradients:
            optimizer.zero_grad()
            set_gradients(model, gradient)
            optimizer.step()

    train(model, first, gradients[:5])
    state, weights, average = first.state_dict(), model.state_dict(), first.ema.model.state_dict()
    assert set(state) == {"counters"} | {f"{moment}.{name}" for moment in first.moments for name in SHAPES}
    assert all(state[f"{moment}.{name}"].shape == SHAPES[name] for moment in first.moments for name in SHAPES)
    assert state["counters"].tolist() == [4, 1, 0]
    train(model, first, gradients[5:])

    other, second = build(device, optimizer, **attrs)
    other.load_state_dict(weights)
    second.ema.model.load_state_dict(average)
    second.load_state_dict(state)
    train(other, second, gradients[5:])
    for mine, theirs in ((model, other), (first.ema.model, second.ema.model)):
        for name, value in values(mine).items():
            np.testing.assert_array_equal(value, values(theirs)[name])
    assert first.metrics() == second.metrics()


def test_state_may_be_tensors_of_any_floating_dtype(device, rng):
    model, optimizer = build(device)
    set_gradients(model, random_gradients(rng))
    optimizer.step()
    model._buffers["running"].data[...] = 3
    other, second = build(device)
    other.load_state_dict(dict(model.named_parameters()) | dict(model.named_buffers()))
    state = {name: Tensor(value) for name, value in optimizer.state_dict().items()}
    second.load_state_dict(state | {"exp_avg.bias": state["exp_avg.bias"].astype("float64")})
    for mine, theirs in ((model.state_dict(), other.state_dict()), (optimizer.state_dict(), second.state_dict())):
        for name, value in mine.items():
            np.testing.assert_array_equal(value, theirs[name])


def test_foreign_state_is_refused_and_changes_nothing(device, rng):
    model, optimizer = build(device)
    set_gradients(model, random_gradients(rng))
    optimizer.step()
    state = optimizer.state_dict()
    wrong = {name: value * 0 for name, value in state.items() if name != "exp_avg.bias"} | {"exp_avg.head": np.zeros(2)}
    with pytest.raises(CudiffError, match=r"missing exp_avg\.bias; unexpected exp_avg\.head"):
        optimizer.load_state_dict(wrong)
    for name, value in optimizer.state_dict().items():
        np.testing.assert_array_equal(value, state[name])


def test_a_bad_gradient_is_skipped_and_counted(device, rng):
    model, optimizer = build(device, lr=0.1)
    start = values(model)
    gradients = random_gradients(rng)
    gradients["conv"][0, 0, 0, 0] = np.inf
    set_gradients(model, gradients)
    optimizer.step()
    optimizer.step()
    metrics = optimizer.metrics()
    assert (metrics["updates"], metrics["skipped"], metrics["skipped_in_a_row"]) == (0, 2, 2)
    for name, value in values(model).items():
        np.testing.assert_array_equal(value, start[name])


def test_schedule_moves_the_learning_rate(device):
    _, optimizer = build(device, lr=0.5, schedule=Cosine(8, final=0.2, warmup=2))
    for step in range(10):
        optimizer.step()
        assert abs(optimizer.metrics()["lr"] - 0.5 * optimizer.schedule.factor(step)) < 1e-7
    assert [Constant(warmup=4).factor(step) for step in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    assert Cosine(10).factor(0) == 1 and abs(Cosine(10).factor(5) - 0.5) < 1e-12 and Cosine(10).factor(10) == 0


def test_mistakes_are_told():
    with pytest.raises(CudiffError, match="total_steps"):
        Cosine(10, warmup=10)
    for schedule in (Constant, lambda warmup: Cosine(10, warmup=warmup)):
        with pytest.raises(CudiffError, match="warmup must be a whole number"):
            schedule(warmup=2.5)
    with pytest.raises(CudiffError, match="no parameters"):
        AdamW(Module())
    with pytest.raises(CudiffError, match="not trainable"):
        AdamW(Model().flatten("cpu", trainable=False))
    model, optimizer = build("cpu")
    with pytest.raises(CudiffError, match="another model"):
        AdamW(model, ema=EMA(SmallModel(), half_life=10))
    model.flatten("cpu")
    with pytest.raises(CudiffError, match="flattened again"):
        optimizer.step()


@pytest.mark.parametrize("name, value", [
    ("lr", np.nan), ("lr", -1), ("lr", "1"), ("weight_decay", -1), ("clip", -1), ("clip", np.nan), ("clip", "1"),
    ("betas", 0.9), ("betas", (0.9, 1)), ("eps", 0), ("schedule", 3),
])
def test_attributes_are_checked_where_they_are_set(name, value):
    _, optimizer = build("cpu")
    before = getattr(optimizer, name)
    with pytest.raises(CudiffError, match=f"^{name} must be "):
        setattr(optimizer, name, value)
    assert getattr(optimizer, name) == before
    sgd = SGD(Model())
    with pytest.raises(CudiffError, match=r"^momentum must be "):
        sgd.momentum = 1


def test_attributes_that_are_set_later_count(rng):
    model, optimizer = build("cpu", clip=1e-3, lr=0.5)
    set_gradients(model, random_gradients(rng))
    other, expected = build("cpu", lr=0.1, betas=(0.5, 0.6))
    set_gradients(other, {name: value.grad for name, value in model.named_parameters()})
    optimizer.clip, optimizer.lr, optimizer.betas, optimizer.schedule = 0, 0.1, [0.5, 0.6], None
    assert optimizer.clip == np.inf
    optimizer.clip = optimizer.clip
    for one in (optimizer, expected):
        one.step()
    for name, value in values(model).items():
        np.testing.assert_array_equal(value, values(other)[name])


@pytest.mark.parametrize("counters, error, message", [
    (np.array([3, -1, 0]), CudiffError, "are negative"), (np.array(["a", "b", "c"]), TypeError, "real numbers"),
    ("text", TypeError, "not a str"), ([1, 0, 0], TypeError, "not a list"), (None, TypeError, "not a NoneType"),
    (np.array([1.5, 0, 0]), CudiffError, "counters is int32, which does not hold"),
])
def test_counters_are_checked_before_anything_is_loaded(counters, error, message):
    _, optimizer = build("cpu")
    state = {name: value + 1 for name, value in optimizer.state_dict().items()}
    with pytest.raises(error, match=message):
        optimizer.load_state_dict(state | {"counters": counters})
    assert not any(value.any() for value in optimizer.state_dict().values())


class SmallModel(Module):
    def __init__(self):
        super().__init__()
        self.weight = Parameter(np.zeros((2, 2), np.float32))


def test_adamw_shrinks_by_a_hundredth_of_the_rate_unless_told():
    """PyTorch's default too; of a gradient that is zero nothing else moves a weight."""
    for options, share in (({}, 0.01), ({"weight_decay": 0.3}, 0.3)):
        model = Module()
        model.weight = Parameter(np.full((2, 3), 4.0, np.float32), decay=True)
        optimizer = AdamW(model, lr=0.5, **options)
        model.weight.grad[...] = 0
        optimizer.step()
        np.testing.assert_allclose(model.weight.numpy(), 4 * (1 - 0.5 * share), rtol=1e-6)


def test_an_average_is_of_a_model():
    with pytest.raises(CudiffError, match=r"an EMA averages a Module, not a list: EMA\(model, half_life=500\)"):
        EMA([np.ones(2)], half_life=10)


@pytest.mark.parametrize("changed", ["assigned", "stepped while not frozen", "averaged"])
def test_a_backward_through_frozen_weights_that_were_updated_is_refused(changed):
    layer = Linear(2, 1)
    x = Tensor(np.ones((3, 2), np.float32), requires_grad=True)
    if changed == "averaged":
        ema = EMA(layer, half_life=1.0)
        optimizer, y = SGD(layer, lr=1.0, ema=ema), ema.model(x)
    else:
        layer.requires_grad_(False)
        optimizer, y = SGD(layer, lr=1.0), layer(x)
        layer.requires_grad_(True)
    if changed == "assigned":
        layer.weight.assign(np.ones((1, 2)))
    else:
        layer(x.detach()).sum().backward()
        optimizer.step()
    with pytest.raises(RuntimeError, match="updated between forward and backward"):
        y.sum().backward()


def test_frozen_weights_that_stay_are_gone_through():
    frozen, layer = Linear(2, 2), Linear(2, 1)
    frozen.requires_grad_(False)
    optimizer, x = SGD(layer, lr=1.0), Tensor(np.ones((3, 2), np.float32), requires_grad=True)
    y = frozen(x).sum()
    layer(x.detach()).sum().backward()
    optimizer.step()
    y.backward()
    np.testing.assert_allclose(x.grad, np.tile(frozen.weight.numpy().sum(0), (3, 1)), rtol=1e-6)


@pytest.mark.parametrize("zeroed", [False, True])
def test_a_gradient_outlasts_freezing(device, zeroed):
    """As of a critic that is frozen while the generator's gradient goes through it, and updated after that."""
    critic, other = (Sequential(Linear(2, 3), Linear(3, 1)).flatten(device) for _ in range(2))
    other.load_state_dict(critic.state_dict())
    x = Tensor(np.ones((4, 2), np.float32), requires_grad=True, device=device)
    for net, freezes in ((critic, True), (other, False)):
        optimizer = SGD(net, lr=0.1, clip=1.0)
        for _ in range(2):
            (net(x) ** 2).sum().backward()
            if freezes:
                net.requires_grad_(False)
                net(x).sum().backward()
                assert not any(parameter.grad.any() for parameter in net.parameters())
            if zeroed:
                optimizer.zero_grad()
            net.requires_grad_(True)
        optimizer.step()
    for name, values in critic.state_dict().items():
        np.testing.assert_allclose(values, other.state_dict()[name], rtol=1e-6)
    assert (optimizer.metrics()["grad_norm"] == 0) == zeroed


@pytest.mark.parametrize("flat", [False, True])
def test_a_gradient_by_hand_may_have_another_dtype(flat):
    """As `p.grad * np.float64(0.5)` has: it was taken in flat buffers, and refused elsewhere."""
    layer = Linear(2, 2)
    if flat:
        layer.flatten("cpu")
    layer(Tensor(np.ones((1, 2), np.float32))).sum().backward()
    layer.bias.grad = layer.bias.grad * np.float64(0.5)
    assert layer.bias.grad.dtype == np.float32 and layer.bias.grad.tolist() == [0.5, 0.5]


def test_an_optimiser_of_its_own_for_what_is_trained_later():
    """The documented way out: the first steps of what an Adam had frozen are larger, of a new Adam they are not."""
    head, rest = Parameter(np.zeros(2)), Parameter(np.zeros(2))
    rest.requires_grad = False
    optimizer = Adam([head, rest], lr=1e-3)
    for _ in range(500):
        optimizer.zero_grad()
        head.sum().backward()
        optimizer.step()
    rest.requires_grad = True
    moved = {}
    for name, last in (("same", optimizer), ("own", Adam([rest], lr=1e-3))):
        rest.grad = np.ones(2, np.float32)
        before = rest.numpy().copy()
        last.step()
        moved[name] = float((before - rest.numpy()).max() / 1e-3)
    assert moved["own"] == pytest.approx(1, rel=1e-4) and 1.5 < moved["same"] < 6.5
