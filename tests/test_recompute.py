"""Recomputation: the same gradients to the bit, with less memory."""

import numpy as np
import pytest

from cudiff import Tensor, grad, nn, no_grad, ops
from cudiff.config import PRESETS, Config
from cudiff.data import load_dataset
from cudiff.errors import CudiffError
from cudiff.models import build
from cudiff.nn import set_generator
from cudiff.ops import mean, square
from cudiff.ops.random import Generator
from cudiff.optim import SGD
from cudiff.recompute import recomputed
from cudiff.train import Trainer
from tests.host import Memory
from tests.test_host import trainer

UNET = Config(image_size=16, channels=3, model_channels=16, channel_mult=(1, 2), num_res_blocks=1, num_heads=2,
              attention_resolutions=(8,), num_classes=5)


def filled(net, seed=3):
    numbers = np.random.default_rng(seed)
    for value in net.parameters():
        value.assign((numbers.standard_normal(value.shape) * 0.1).astype(np.float32))
    return net


def gradients(net, *inputs):
    """The loss, and all gradients, of one backward."""
    loss = mean(square(net(*inputs)))
    loss.backward()
    return loss.item(), [Tensor(value.grad).numpy().copy() for value in net.parameters()]


def assert_same(first, second):
    assert first[0] == second[0] and len(first[1]) == len(second[1])
    assert all(np.array_equal(a, b) for a, b in zip(first[1], second[1], strict=True))
    assert any(gradient.any() for gradient in first[1])


@pytest.mark.parametrize("config", [
    UNET, UNET.replace(dropout=0.2), UNET.replace(use_scale_shift_norm=True, resblock_updown=True),
    PRESETS["dit-mnist"].replace(num_classes=5, hidden_size=64, depth=3, num_heads=2),
], ids=["embedding added", "dropout", "scale and shift", "DiT"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_are_the_same_to_the_bit(device, rng, config, precision):
    shape = (3, config.image_size, config.image_size, config.channels)
    x = Tensor(rng.standard_normal(shape).astype(np.float32), device=device)
    t, labels = Tensor(rng.standard_normal(3).astype(np.float32), device=device), Tensor([0, 4, 2], device=device)
    found = []
    for recompute in (False, True):
        net = filled(build(config))
        net.precision, net.recompute = precision, recompute
        net.flatten(device)
        set_generator(net, Generator(4, device))
        found.append(gradients(net, x, t, labels))
    assert_same(*found)


class Deep(nn.Module):
    """Parts within parts, with masks of the layers' own numbers, and an input that two parts share."""

    def __init__(self, again):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.dropout, self.again = nn.Dropout(0.4), again

    def part(self, x, y):
        inner = self.call(lambda z: self.dropout(ops.tanh(self.third(z))), x)
        return self.dropout(ops.silu(self.second(x))) + inner + y

    def call(self, run, *inputs):
        return recomputed(run, *inputs) if self.again else run(*inputs)

    def forward(self, x):
        h = self.first(x)
        out = self.call(self.part, h, h * 2.0)
        return self.call(self.part, out, h)


def test_parts_within_parts_with_their_own_masks(device, rng):
    x = Tensor(rng.standard_normal((5, 4)).astype(np.float32), device=device)
    found = []
    for again in (False, True):
        net = filled(Deep(again))
        net.flatten(device)
        set_generator(net, Generator(2, device))
        found.append([gradients(net, x), gradients(net, x)])  # the layer counts its calls
    for first, second in zip(*found, strict=True):
        assert_same(first, second)
    assert found[1][0][0] != found[1][1][0]


def test_a_leaf_and_what_needs_no_gradient_as_inputs(device, rng):
    x = Tensor(rng.standard_normal((2, 3)).astype(np.float32), requires_grad=True, device=device)
    scale = Tensor(rng.standard_normal((2, 3)).astype(np.float32), device=device)
    ones = Tensor(np.ones((2, 3), np.float32), device=device)
    recomputed(lambda a, b, none: ops.exp(a) * b, x, scale, None).backward(ones)
    np.testing.assert_allclose(Tensor(x.grad).numpy(), np.exp(x.numpy()) * scale.numpy(), rtol=1e-6)
    assert scale.grad is None


PARTS = {
    "its input": lambda h, c, x: h,
    "an input in another part": lambda h, c, x: recomputed(lambda g: g, h),
    "an older tensor": lambda h, c, x: c,
    "a leaf": lambda h, c, x: x,
    "what reads an older tensor": lambda h, c, x: h * c,
    "what reads one in another part": lambda h, c, x: recomputed(lambda g: g * c, h * 2.0),
    "what reads a leaf": lambda h, c, x: h * x,
    "a constant": lambda h, c, x: Tensor(np.full(3, 2.0, np.float32), device=h.device),
}


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_parts_that_pass_on_or_read_other_tensors(device, rng, part):
    """h is its input; c, which nothing else reads, and the leaf x come from outside."""
    values, found = rng.standard_normal(3, dtype=np.float32), []
    for call in (lambda run, h: run(h), recomputed):
        x = Tensor(values, requires_grad=True, device=device)
        h, c = x * 3.0, ops.exp(x)
        (call(lambda h, c=c, x=x: part(h, c, x), h) * 5.0 + h).sum().backward()
        found.append(Tensor(x.grad).tolist())
    assert found[0] == found[1]
    np.testing.assert_allclose(found[0], grad_of(part, values), rtol=1e-5)


def grad_of(part, values):
    """The same by `cudiff.grad`, whose recording reaches no further than its function."""
    def function(x):
        h, c = x * 3.0, ops.exp(x)
        return (recomputed(lambda h: part(h, c, x), h) * 5.0 + h).sum()

    return grad(function)(values).tolist()


def test_an_input_that_was_changed_in_between_is_told():
    x = Tensor(np.full(3, 2.0), requires_grad=True)
    out = recomputed(ops.square, x)
    with no_grad():
        x += 1
    with pytest.raises(RuntimeError, match="was changed between forward and backward"):
        out.sum().backward()


@pytest.mark.parametrize("training", [True, False])
def test_a_mode_that_was_changed_in_between_is_told(training):
    """The masks that backward would have are not forward's."""
    net, x = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 3)), Tensor(np.ones((2, 3)), requires_grad=True)
    net.train(training)
    out = recomputed(net, x)
    net.train(not training)
    with pytest.raises(RuntimeError, match="other dropout in backward than it had in forward"):
        out.sum().backward()


def test_a_part_returns_one_tensor():
    for returned in ((1, 2), None):
        with pytest.raises(TypeError, match=f"recomputed returned {type(returned).__name__}: return one tensor"):
            recomputed(lambda x, returned=returned: returned, Tensor([1.0], requires_grad=True))
    assert recomputed(ops.square, np.array([2.0])).tolist() == [4]


def test_where_nothing_would_come_back_the_part_just_runs():
    calls = []

    def run(x):
        calls.append(x)
        return x * 2.0

    x = Tensor(np.ones(3), requires_grad=True)
    with no_grad():
        assert not recomputed(run, x).requires_grad
    assert not recomputed(run, Tensor(np.ones(3))).requires_grad
    assert len(calls) == 2
    out = recomputed(run, x)
    assert len(calls) == 3
    out.sum().backward()
    assert len(calls) == 4 and x.grad.tolist() == [2, 2, 2]
    with pytest.raises(RuntimeError, match="already: run the forward again"):
        out.sum().backward()


def test_parameters_that_were_updated_in_between_are_told():
    net = filled(nn.Linear(3, 2))
    optimizer = SGD(net, lr=0.1)
    x = Tensor(np.ones((1, 3), np.float32), requires_grad=True)
    out = recomputed(net, x).sum()
    (net(x).sum() * 1.0).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="updated between forward and backward"):
        out.backward()


def test_a_frozen_parameter_that_is_an_input_and_was_updated_is_told():
    weight = nn.Parameter(np.ones(3))
    weight.requires_grad = False
    x = Tensor(np.ones(3, np.float32), requires_grad=True)
    out = recomputed(lambda p, q: p * q, x, weight).sum()
    weight.assign(np.full(3, 9.0))
    with pytest.raises(RuntimeError, match="updated between forward and backward"):
        out.backward()


@pytest.mark.parametrize("preset, share", [("elephants", 0.75), ("dit-mnist", 0.25)])
def test_a_step_takes_less_memory(host_of, tmp_path, preset, share):
    """599 and 446 MiB, 3,751 and 839."""
    host, taken = host_of(True), []
    for recompute in (False, True):
        config = PRESETS[preset].replace(precision="bf16", recompute=recompute)
        step = trainer(config, tmp_path / str(recompute)).train_step
        step()
        host.memory = Memory()
        step()
        taken.append(host.memory.taken)
        host.memory = None
    assert taken[1] < share * taken[0]


def test_a_run_is_the_same_and_a_model_without_blocks_is_refused(tmp_path):
    data = load_dataset("digits", image_size=8, count=40)
    config = Config(image_size=8, model_channels=8, channel_mult=(1, 2), num_res_blocks=1, num_heads=2, dropout=0.1,
                    batch_size=8, accumulate=2, steps=2, sample_every=0, device="cpu")
    nets = []
    for recompute in (False, True):
        run = Trainer(config.replace(recompute=recompute), data, tmp_path / str(recompute))
        run.run()
        nets.append(run.net.state_dict())
    assert all(np.array_equal(nets[0][name], nets[1][name]) for name in nets[0])
    with pytest.raises(CudiffError, match="a cs179 cannot recompute its blocks: leave --recompute out"):
        Trainer(PRESETS["cs179"].replace(recompute=True, data="digits", image_size=16, device="cpu"),
                load_dataset("digits", count=40), tmp_path / "cs179")
