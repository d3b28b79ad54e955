"""DiT against an equal one in PyTorch: weights carried over, all of them random, output and every gradient."""

import numpy as np
import pytest

from cudiff.convert import from_torch, to_torch
from cudiff.models import DiT
from cudiff.tensor import Tensor

torch = pytest.importorskip("torch", reason="PyTorch is not installed: no parity test")

from tests.models.test_unet import assert_close  # noqa: E402
from tests.models.torch_dit import TorchDiT  # noqa: E402

TINY = dict(image_size=16, patch_size=4, hidden_size=48, depth=2, num_heads=3)
OPTIONS = {
    "default": {},
    "classes": dict(num_classes=5, in_channels=1),
    "patches of 2, learned variance": dict(patch_size=2, in_channels=4, learn_sigma=True, image_size=8),
    "patches of 8": dict(patch_size=8, num_classes=2),
    "normed queries and keys": dict(qk_norm=True, num_classes=5),
    "rows and columns": dict(image_size=(8, 20)),
    "narrow MLP, one head": dict(mlp_ratio=1.5, num_heads=1, depth=1),
}


def random_pair(options, seed):
    """The two networks with the same weights, every one of them random, also those that start at zero."""
    rng = np.random.default_rng(seed)
    model, reference = DiT(**options), TorchDiT(**options)
    state = reference.state_dict()
    for name, value in state.items():
        if name != "pos_embed":
            fan_in = max(1, value[0].numel() if value.ndim > 1 else value.numel())
            noise = rng.standard_normal(value.shape) / np.sqrt(fan_in)
            state[name] = torch.tensor(noise + (1 if name.endswith("norm.weight") else 0)).float()
    reference.load_state_dict(state)
    given = {name: value.numpy() for name, value in state.items()}
    np.testing.assert_allclose(model.pos_embed.numpy(), given["pos_embed"], rtol=2e-7)
    model.load_state_dict(from_torch(given, model.layouts()))
    back = to_torch(model.state_dict(), model.layouts())
    assert back.keys() == given.keys()
    for name, value in given.items():
        np.testing.assert_array_equal(back[name], value)
    return model, reference


def compare(options, device, batch=3, seed=0, precision="fp32"):
    model, reference = random_pair(options, seed)
    model.precision = precision
    model.flatten(device)
    rng = np.random.default_rng(seed + 1)
    size, classes = options["image_size"], options.get("num_classes", 0)
    height, width = size if isinstance(size, tuple) else (size, size)
    x = rng.standard_normal((batch, height, width, options.get("in_channels", 3))).astype(np.float32)
    t = rng.uniform(0, 1000, batch).astype(np.float32)
    labels = np.array([*rng.integers(0, classes, batch - 1), -1], np.int32) if classes else None
    ours = Tensor(x, requires_grad=True, device=device)
    out = model(ours, Tensor(t, device=device), None if labels is None else Tensor(labels, device=device))
    reference = reference.double()
    theirs = torch.tensor(x.transpose(0, 3, 1, 2)).double().requires_grad_()
    expected = reference(theirs, torch.tensor(t), None if labels is None else torch.tensor(labels).long())
    dout = rng.standard_normal(out.shape).astype(np.float32)
    out.backward(Tensor(dout, device=device).data)
    (expected * torch.tensor(dout.transpose(0, 3, 1, 2)).double()).sum().backward()
    pairs = {"out": (out.numpy(), expected.detach().numpy().transpose(0, 2, 3, 1))}
    grads = {name: p.grad.numpy() for name, p in reference.named_parameters() if p.requires_grad}
    grads = from_torch(grads, model.layouts())
    pairs |= {name: (Tensor(p.grad).numpy(), grads[name]) for name, p in model.named_parameters()}
    pairs["dx"] = (Tensor(ours.grad).numpy(), theirs.grad.numpy().transpose(0, 2, 3, 1))
    return pairs


@pytest.mark.parametrize("name", OPTIONS)
def test_equals_pytorch(name, device):
    assert_close(compare(TINY | OPTIONS[name], device))


@pytest.mark.gpu
@pytest.mark.parametrize("precision, limit", [("bf16", 0.05), ("tf32", 0.01)])
def test_low_precision_stays_near(precision, limit):
    pairs = compare(TINY | dict(num_classes=5), "cuda", batch=8, precision=precision)
    everything = np.sqrt(sum(np.sum(np.square(grad)) for key, (_, grad) in pairs.items() if key != "out"))
    for name, (a, b) in pairs.items():
        assert np.linalg.norm(a - b) <= limit * np.linalg.norm(b) + 1e-3 * everything, name
