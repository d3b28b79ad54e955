"""Muon against plain NumPy in float64, and PyTorch's, which iterates in bfloat16."""

import numpy as np
import pytest

from cudiff import nn
from cudiff.errors import CudiffError
from cudiff.nn.init import seeded
from cudiff.optim import EMA, AdamW, Muon
from cudiff.optim.muon import orthogonal
from cudiff.tensor import Tensor
from tests.check import relative_error, torch

SHAPES = [(6, 10), (12, 5), (4, 3, 3, 2), (40, 8), (1, 1)]


@pytest.fixture
def parameters(rng, device):
    return [nn.Parameter(Tensor(rng.standard_normal(shape).astype(np.float32), device=device)) for shape in SHAPES]


def give(parameters, rng):
    gradients = [rng.standard_normal(p.shape).astype(np.float32) for p in parameters]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = Tensor(gradient, device=parameter.device)
    return gradients


def newton_schulz(x, steps=5):
    x = x / (np.linalg.norm(x) + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


def test_the_direction_is_near_orthogonal(rng):
    for shape in ((8, 20), (20, 8), (9, 9)):
        x = rng.standard_normal(shape)
        values = np.linalg.svd(orthogonal(Tensor(x), 5).numpy(), compute_uv=False)
        assert values.min() > 0.5 and values.max() < 1.3
        left, _, right = np.linalg.svd(x, full_matrices=False)
        ours = orthogonal(Tensor(x), 5).numpy()
        assert np.abs(ours - left @ right).max() < 0.35 and np.sum(ours * (left @ right)) > 0.8 * min(shape)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_muon_is_jordans(parameters, rng, nesterov, clip):
    """Clipped gradients differ from step to step in their momentum."""
    optimizer = Muon([{"params": parameters[:3], "lr": 0.05}, {"params": parameters[3:], "momentum": 0.5}], lr=0.02,
                     momentum=0.9, nesterov=nesterov, weight_decay=0.3, clip=clip)
    expected = [p.numpy().astype(np.float64) for p in parameters]
    momenta = [0 * p for p in expected]
    for _ in range(4):
        gradients = [g.astype(np.float64) for g in give(parameters, rng)]
        norm = np.sqrt(sum((g**2).sum() for g in gradients))
        optimizer.step()
        for index, gradient in enumerate(gradients):
            lr, momentum = (0.05, 0.9) if index < 3 else (0.02, 0.5)
            gradient *= 1 if clip is None else min(1, clip / norm)
            momenta[index] = momentum * momenta[index] + gradient
            update = gradient + momentum * momenta[index] if nesterov else momenta[index]
            rows = update.reshape(len(update), -1)
            tall = rows.shape[0] > rows.shape[1]
            direction = newton_schulz(rows.T).T if tall else newton_schulz(rows)
            direction *= max(1, rows.shape[0] / rows.shape[1]) ** 0.5
            expected[index] *= 1 - lr * 0.3
            expected[index] -= lr * direction.reshape(update.shape)
    for parameter, value in zip(parameters, expected, strict=True):
        assert relative_error(parameter.numpy(), value) < 1e-5


@pytest.mark.skipif(not hasattr(getattr(torch, "optim", None), "Muon"), reason="PyTorch has no Muon")
def test_muon_is_pytorchs(rng):
    weight = rng.standard_normal((12, 5)).astype(np.float32)
    mine, theirs = nn.Parameter(weight), torch.nn.Parameter(torch.tensor(weight))
    ours = Muon([mine], lr=0.02, weight_decay=0.1)
    reference = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, momentum=0.95)
    for _ in range(3):
        (gradient,) = give([mine], rng)
        theirs.grad = torch.tensor(gradient)
        ours.step()
        reference.step()
    assert relative_error(mine.numpy() - weight, theirs.detach().numpy() - weight) < 0.03


def test_what_is_skipped_or_frozen_stays(parameters, rng):
    optimizer = Muon(parameters, lr=0.1)
    parameters[1].requires_grad = False
    before = [p.numpy().copy() for p in parameters]
    gradient = np.full(SHAPES[0], np.nan, np.float32)
    parameters[0].grad = Tensor(gradient, device=parameters[0].device)
    optimizer.step()
    assert all((p.numpy() == old).all() for p, old in zip(parameters, before, strict=True))
    assert not any(value.any() for name, value in optimizer.state_dict().items() if name != "counters")
    for parameter in parameters[:1]:
        parameter.grad = Tensor(rng.standard_normal(parameter.shape).astype(np.float32), device=parameter.device)
    optimizer.step()
    changed = [bool((p.numpy() != old).any()) for p, old in zip(parameters, before, strict=True)]
    assert changed == [True, False, False, False, False]


def test_muon_beside_adamw_and_with_an_average(rng, device):
    with seeded(0):
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).flatten(device)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    optimizers = Muon(matrices), AdamW([p for p in model.parameters() if p.ndim < 2], lr=0.02)
    x = Tensor(rng.standard_normal((32, 4)).astype(np.float32), device=device)
    y = Tensor(x.numpy()[:, :2] ** 2, device=device)
    losses = []
    for _ in range(80):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]
    layer = nn.Linear(3, 4, bias=False).flatten(device)
    ema = EMA(layer, half_life=1, ramp=None)
    first = layer.weight.numpy().copy()
    give([layer.weight], rng)
    Muon(layer, ema=ema).step()
    np.testing.assert_allclose(ema.model.weight.numpy(), (first + layer.weight.numpy()) / 2, rtol=1e-5, atol=1e-6)


def test_vectors_are_refused():
    with pytest.raises(CudiffError, match=r"not parameters of shape \(3,\): give it \[p for p in model"):
        Muon(nn.Linear(2, 3))
    with pytest.raises(CudiffError, match="ns_steps must be at least 1"):
        Muon(nn.Linear(2, 3, bias=False), ns_steps=0)


@pytest.mark.parametrize("hopper", [True, False])
def test_muon_on_a_gpu_launches_what_it_may(host_of, hopper):
    host = host_of(hopper)
    layer = nn.Conv2d(8, 16, 3, bias=False)
    layer.precision = "bf16"
    layer.flatten("cuda")
    optimizer = Muon(layer, ema=EMA(layer, half_life=2))
    optimizer.step()
    assert [name for stem, name in host.launches if stem == "optim"].count("sgd") == 2
