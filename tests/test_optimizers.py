"""Lists and groups of parameters, schedules of functions, RMSprop and Lion; against PyTorch and plain NumPy."""

import numpy as np
import pytest

from cudiff import nn
from cudiff.cuda import graph
from cudiff.errors import CudiffError
from cudiff.optim import EMA, SGD, Adam, AdamW, Cosine, Lion, Muon, RMSprop, Tabulated
from cudiff.tensor import Tensor
from tests.check import relative_error, torch

SHAPES = ((5, 7), (33,), (2, 3, 4), (6,))


@pytest.fixture
def parameters(rng, device):
    return [nn.Parameter(Tensor(rng.standard_normal(shape), dtype="float32", device=device)) for shape in SHAPES]


def give(parameters, rng):
    gradients = [rng.standard_normal(p.shape).astype(np.float32) for p in parameters]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = Tensor(gradient, device=parameter.device)
    return gradients


def train(optimizer, parameters, rng, steps=8):
    for _ in range(steps):
        optimizer.zero_grad()
        give(parameters, rng)
        optimizer.step()
    return [parameter.numpy().copy() for parameter in parameters]


@pytest.mark.skipif(torch is None, reason="PyTorch is not installed")
@pytest.mark.parametrize("optimizer, attrs, groups", [
    (AdamW, {"lr": 1e-2}, [{"lr": 3e-2}, {"weight_decay": 0.0}]),
    (AdamW, {"lr": 0.0}, [{"lr": 3e-2, "betas": (0.5, 0.7)}, {"eps": 0.1}]),
    (Adam, {"lr": 1e-2}, [{"betas": (0.8, 0.9)}, {"lr": 1e-4}]),
    (SGD, {"lr": 1e-2, "momentum": 0.9}, [{"nesterov": True}, {"momentum": 0.3}]),
    (RMSprop, {"lr": 1e-2}, [{"alpha": 0.5, "momentum": 0.4}, {"lr": 1e-3}]),
    (RMSprop, {"lr": 1e-2, "centered": True, "momentum": 0.9}, [{}, {"alpha": 0.5}]),
])
def test_groups_agree_with_torch(parameters, rng, optimizer, attrs, groups):
    """Interleaved in the buffers of a model, too: each range has the options of its own group."""
    for flat in (False, True):
        mine = [nn.Parameter(p.numpy(), decay=True) for p in parameters]
        if flat:
            nn.ModuleList([holder(p) for p in mine]).flatten("cpu")
        theirs = [torch.nn.Parameter(torch.tensor(p.numpy())) for p in parameters]
        split = ((0, 2), (1, 3))
        ours, reference = (
            kind([{"params": [own[i] for i in part], **group} for part, group in zip(split, groups, strict=True)],
                 **({"weight_decay": 0.1} | attrs))
            for kind, own in ((optimizer, mine), (getattr(torch.optim, optimizer.__name__), theirs))
        )
        for _ in range(8):
            for parameter, gradient in zip(theirs, give(mine, rng), strict=True):
                parameter.grad = torch.tensor(gradient)
            ours.step()
            reference.step()
        for parameter, other, start in zip(mine, theirs, parameters, strict=True):
            moved = other.detach().numpy() - start.numpy()
            np.testing.assert_allclose(parameter.numpy() - start.numpy(), moved, rtol=2e-4, atol=2e-6)


def holder(parameter):
    module = nn.Module()
    module.weight = parameter
    return module


def test_a_model_its_parameters_and_an_iterator_are_the_same(parameters, device):
    results = []
    for listed in (lambda m: m, lambda m: m.parameters(), lambda m: iter(m.parameters()),
                   lambda m: [{"params": m}], lambda m: [{"params": m[0].weight}, {"params": m.parameters()[1:]}]):
        model = nn.Sequential(*(holder(nn.Parameter(p.numpy())) for p in parameters)).flatten(device)
        before = model.flat.data
        optimizer = AdamW(listed(model), lr=1e-2, ema=EMA(model, 3.0))
        train(optimizer, model.parameters(), np.random.default_rng(1))
        assert model.flat.data is before
        results.append([*model.state_dict().values(), *optimizer.ema.model.state_dict().values()])
    for other in results[1:]:
        for value, expected in zip(other, results[0], strict=True):
            np.testing.assert_array_equal(value, expected)


def test_a_list_that_fills_no_range_has_its_own_norm_and_leaves_the_others(parameters, device, rng):
    model = nn.Sequential(*map(holder, parameters)).flatten(device)
    chosen, others = parameters[::2], parameters[1::2]
    before = [p.numpy().copy() for p in others]
    optimizer = SGD(chosen, lr=0.1, clip=1.0)
    gradients = give(parameters, rng)
    optimizer.step()
    norm = np.sqrt(sum((g.astype(float) ** 2).sum() for g in gradients[::2]))
    assert optimizer.metrics()["grad_norm"] == pytest.approx(norm, rel=1e-5)
    for parameter, value in zip(others, before, strict=True):
        np.testing.assert_array_equal(parameter.numpy(), value)
    model.flatten(device)
    with pytest.raises(CudiffError, match="flattened again"):
        optimizer.step()


def test_a_frozen_parameter_of_a_group_stays_and_decay_follows_the_parameter(parameters, device, rng):
    parameters[0].decay, parameters[2].decay = False, True
    optimizer = SGD([{"params": parameters[:2]}, {"params": parameters[2:], "weight_decay": 0.5}], lr=0.1)
    parameters[3].requires_grad = False
    before = [p.numpy().copy() for p in parameters]
    optimizer.zero_grad()
    optimizer.step()
    for index, factor in enumerate((1, 1, 0.95, 1)):
        np.testing.assert_allclose(parameters[index].numpy(), factor * before[index], rtol=1e-6)


@pytest.mark.parametrize("kind", [AdamW, RMSprop, Lion])
def test_state_of_a_list_goes_round(parameters, device, kind):
    optimizer = kind([{"params": parameters[:1], "lr": 0.05}, {"params": parameters[1:]}], lr=0.01)
    train(optimizer, parameters, np.random.default_rng(1))
    copies = [nn.Parameter(Tensor(p.numpy(), device=device)) for p in parameters]
    second = kind([{"params": copies[:1], "lr": 0.05}, {"params": copies[1:]}], lr=0.01)
    state = optimizer.state_dict()
    assert set(state) == {"counters"} | {f"{moment}.{i}" for moment in kind.moments for i in range(4)}
    second.load_state_dict(state)
    for mine, other in zip(*(train(o, p, np.random.default_rng(2))
                             for o, p in ((optimizer, parameters), (second, copies))), strict=True):
        np.testing.assert_array_equal(mine, other)
    del state[f"{kind.moments[0]}.2"]
    with pytest.raises(CudiffError, match=rf"missing {kind.moments[0]}\.2"):
        second.load_state_dict(state)


@pytest.mark.parametrize("add", [
    lambda optimizer, more: optimizer.param_groups.append({"params": more}),
    lambda optimizer, more: optimizer.param_groups[0]["params"].extend(more),
    lambda optimizer, more: optimizer.add_param_group({"params": more}),
])
def test_parameters_that_come_later_are_refused_as_they_would_not_be_trained(add):
    first, second = nn.Linear(2, 3), nn.Linear(3, 2)
    optimizer = SGD(first.parameters(), lr=0.1)
    with pytest.raises(CudiffError, match="make it anew with all groups"):
        add(optimizer, second.parameters())
    with pytest.raises(AttributeError):
        optimizer.param_groups = [{"params": second.parameters()}]


def test_options_set_between_steps_count_and_have_a_captured_step_recorded_again(parameters, device):
    optimizer = SGD([{"params": parameters[:1], "lr": 0.5}, {"params": parameters[1:]}], lr=0.1)
    states = [graph._state]
    optimizer.lr = 0.2
    states.append(graph._state)
    optimizer.param_groups[0]["lr"] = 0.3
    states.append(graph._state)
    assert states == sorted(set(states))
    assert [group["lr"] for group in optimizer.param_groups] == [0.3, 0.2]
    before = [p.numpy().copy() for p in parameters]
    for parameter in parameters:
        parameter.grad = Tensor(np.ones(parameter.shape, np.float32), device=parameter.device)
    optimizer.step()
    for parameter, value, lr in zip(parameters, before, (0.3, 0.2, 0.2, 0.2), strict=True):
        np.testing.assert_allclose(parameter.numpy(), value - lr, rtol=1e-5, atol=1e-6)
    assert optimizer.metrics()["lr"] == pytest.approx(0.3)


def test_without_groups_an_options_two_names_are_one(parameters):
    """`param_groups[0]["lr"]`, PyTorch's habit, and `lr`: the last that was set counts. A given group has its own."""
    optimizer = SGD(parameters, lr=0.1)
    optimizer.param_groups[0]["lr"] = 0.2
    assert optimizer.lr == 0.2
    optimizer.lr = 0.3
    assert optimizer.param_groups[0]["lr"] == 0.3
    grouped = SGD([{"params": parameters}], lr=0.1)
    grouped.param_groups[0]["lr"] = 0.2
    assert grouped.lr == 0.1


def test_a_schedule_may_be_any_function(parameters, device, rng):
    """Of the steps made, skipped ones too; Adam's step has the factor as well, and the last one remains."""
    factors, before = (1.0, 0.5, 0.0, 0.25), parameters[0].numpy().copy()
    optimizer = AdamW([{"params": parameters[:1], "lr": 0.2}, {"params": parameters[1:]}], lr=0.1, weight_decay=0.0,
                      betas=(0.0, 0.0), eps=1e-12, schedule=Tabulated(factors.__getitem__, 4))
    seen = []
    for step in range(6):
        gradient = np.full(SHAPES[0], np.nan if step == 1 else 3.0, np.float32)
        parameters[0].grad = Tensor(gradient, device=parameters[0].device)
        optimizer.step()
        seen.append(optimizer.metrics()["lr"])
    np.testing.assert_allclose(seen, 0.2 * np.array([1, 0.5, 0, 0.25, 0.25, 0.25]), rtol=1e-6)
    np.testing.assert_allclose(parameters[0].numpy(), before - 0.2 * 1.75, rtol=1e-5, atol=1e-6)
    assert [optimizer.schedule.factor(step) for step in (0, 3, 99)] == [1, 0.25, 0.25]


@pytest.mark.parametrize("clip", [None, 1.0])
def test_lion_is_the_papers(parameters, device, clip):
    optimizer = Lion(parameters, lr=1e-2, betas=(0.8, 0.95), weight_decay=0.3, clip=clip)
    start = [p.numpy().astype(np.float64) for p in parameters]
    expected, momenta = [p.copy() for p in start], [0 * p for p in start]
    rng = np.random.default_rng(3)
    for _ in range(10):
        gradients = give(parameters, rng)
        norm = np.sqrt(sum((g.astype(float) ** 2).sum() for g in gradients))
        for index, gradient in enumerate(gradients):
            g = gradient * (1 if clip is None else min(1, clip / norm))
            sign = np.sign(0.8 * momenta[index] + 0.2 * g)
            expected[index] *= 1 - 1e-2 * 0.3 * parameters[index].decay
            expected[index] -= 1e-2 * sign
            momenta[index] = 0.95 * momenta[index] + 0.05 * g
        optimizer.step()
    for parameter, value in zip(parameters, expected, strict=True):
        assert relative_error(parameter.numpy(), value) < 1e-6


@pytest.mark.parametrize("make, message", [
    (lambda p: AdamW([]), "no parameters to optimise"),
    (lambda p: AdamW(iter([])), "no parameters to optimise"),
    (lambda p: AdamW([Tensor(np.ones(3, np.float32))]), r"nn\.Parameters or groups of them, not a Tensor"),
    (lambda p: AdamW(3), "not a int"),
    (lambda p: AdamW([{"lr": 0.1}]), "this one has no params"),
    (lambda p: AdamW([{"params": p}, {"params": p[0]}]), "a parameter is in two groups"),
    (lambda p: SGD([{"params": p, "betas": (0, 0)}]), "a group of SGD has no option 'betas': use lr, momentum"),
    (lambda p: SGD([{"params": p, "lr": -1}]), "lr must be at least 0"),
    (lambda p: RMSprop(p, alpha=1), "alpha must be at least 0 and below 1"),
    (lambda p: RMSprop(p, momentum=1), "momentum must be at least 0 and below 1"),
    (lambda p: SGD(p, schedule=lambda step: 1.0), r"Tabulated\(function, total_steps\), not a function"),
    (lambda p: Tabulated(lambda step: -1.0, 3), "the factor of step 0 must be at least 0"),
    (lambda p: Cosine(10.5), "total_steps must be a whole number, not 10.5"),
    (lambda p: Cosine(float("nan")), "total_steps must be a whole number, not nan"),
    (lambda p: AdamW(p, lr=10**400), "lr must be at most 3.4e"),
    (lambda p: AdamW(p, eps=1e-60), "eps must be above 0, and 1e-60 is 0 in float32"),
    (lambda p: SGD(p, ema=EMA(nn.Linear(2, 2), 3)), "the EMA was made of another model"),
])
def test_mistakes_are_told(parameters, make, message):
    with pytest.raises(CudiffError, match=message):
        make(parameters)


@pytest.mark.parametrize("name, make", [
    ("nesterov", lambda p: SGD(p, nesterov="no")), ("nesterov", lambda p: Muon(p, nesterov="no")),
    ("centered", lambda p: RMSprop(p, centered="no")),
])
def test_what_is_no_flag_is_refused(parameters, name, make):
    with pytest.raises(TypeError, match=f"^{name} is True or False, not 'no'"):
        make(parameters)
