"""The whole U-Net against an equal one in PyTorch: weights carried over, all of them random, output and gradients."""

import numpy as np
import pytest

from cudiff.convert import from_torch
from cudiff.errors import CudiffError
from cudiff.models import CS179UNet, DiT, UNet
from cudiff.tensor import Tensor

torch = pytest.importorskip("torch", reason="PyTorch is not installed: no parity test")

from tests.models.torch_unet import TorchUNet  # noqa: E402

TINY = dict(image_size=16, model_channels=32, channel_mult=(1, 2), num_res_blocks=1, attention_resolutions=(8,))
OPTIONS = {
    "default": {},
    "no conv resample": dict(conv_resample=False, max_period=1000.0),
    "scale shift": dict(use_scale_shift_norm=True),
    "res updown": dict(resblock_updown=True, use_scale_shift_norm=True),
    "classes": dict(num_classes=10, in_channels=1),
    "learn sigma": dict(learn_sigma=True),
    "new order": dict(use_new_attention_order=True, num_head_channels=16),
    "heads": dict(num_heads=2, num_head_channels=-1),
    "odd channels": dict(
        model_channels=24, num_head_channels=-1, num_heads=3, image_size=20, attention_resolutions=(20,)
    ),
    "two channels a group": dict(norm_group_channels=2),
    "three levels": dict(channel_mult=(1, 2, 3), num_res_blocks=2, attention_resolutions=(8, 4)),
}


def random_pair(options, seed):
    """The two networks with the same weights, every one of them random, also those that start at zero."""
    rng = np.random.default_rng(seed)
    model = UNet(**options)
    reference = TorchUNet(**options)
    state = reference.state_dict()
    for name, value in state.items():
        fan_in = max(1, value[0].numel() if value.ndim > 1 else value.numel())
        noise = rng.standard_normal(value.shape) / np.sqrt(fan_in)
        state[name] = torch.tensor(noise + (1 if name.endswith("weight") and value.ndim == 1 else 0)).float()
    reference.load_state_dict(state)
    model.load_state_dict(from_torch({k: v.numpy() for k, v in state.items()}, model.layouts()))
    return model, reference


def compare(options, device, batch=2, seed=0, precision="fp32"):
    model, reference = random_pair(options, seed)
    model.precision = precision
    model.flatten(device)
    rng = np.random.default_rng(seed + 1)
    size, channels, classes = options["image_size"], options.get("in_channels", 3), options.get("num_classes", 0)
    x = rng.standard_normal((batch, size, size, channels)).astype(np.float32)
    t = rng.uniform(0, 1000, batch).astype(np.float32)
    labels = rng.integers(0, classes, batch).astype(np.int32) if classes else None
    x_ours = Tensor(x, requires_grad=True, device=device)
    out = model(x_ours, Tensor(t, device=device), None if labels is None else Tensor(labels, device=device))
    reference = reference.double()
    x_torch = torch.tensor(x.transpose(0, 3, 1, 2)).double().requires_grad_()
    expected = reference(x_torch, torch.tensor(t), None if labels is None else torch.tensor(labels).long())
    dout = rng.standard_normal(out.shape).astype(np.float32)
    out.backward(Tensor(dout, device=device).data)
    (expected * torch.tensor(dout.transpose(0, 3, 1, 2)).double()).sum().backward()
    pairs = {"out": (out.numpy(), expected.detach().numpy().transpose(0, 2, 3, 1))}
    grads = from_torch({k: p.grad.numpy() for k, p in reference.named_parameters()}, model.layouts())
    pairs |= {name: (Tensor(p.grad).numpy(), grads[name]) for name, p in model.named_parameters()}
    pairs["dx"] = (Tensor(x_ours.grad).numpy(), x_torch.grad.numpy().transpose(0, 2, 3, 1))
    return pairs


def assert_close(pairs, relative=1e-4, absolute=1e-6):
    everything = np.sqrt(sum(np.sum(np.square(b)) for name, (_, b) in pairs.items() if name != "out"))
    for name, (a, b) in pairs.items():
        allowed = relative * np.linalg.norm(b) + absolute * everything
        error = np.linalg.norm(a.astype(np.float64) - b)
        assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}"


@pytest.mark.parametrize("name", OPTIONS)
def test_equals_pytorch(name, device):
    options = TINY | OPTIONS[name]
    assert_close(compare(options, device))


@pytest.mark.slow
def test_unet_cu_preset_equals_pytorch(device):
    options = dict(image_size=64, conv_resample=False, max_period=1000.0)
    assert_close(compare(options, device, batch=2 if device == "cuda" else 1))


@pytest.mark.gpu
@pytest.mark.parametrize("precision, limit", [("bf16", 0.05), ("tf32", 0.01)])
def test_low_precision_stays_near(precision, limit):
    pairs = compare(TINY, "cuda", batch=4, precision=precision)
    for name, (a, b) in pairs.items():
        everything = np.sqrt(sum(np.sum(np.square(grad)) for key, (_, grad) in pairs.items() if key != "out"))
        assert np.linalg.norm(a - b) <= limit * np.linalg.norm(b) + 1e-3 * everything, name


def test_sizes_that_do_not_halve_say_which_do():
    with pytest.raises(CudiffError, match="multiple of 8, such as 56 or 64"):
        UNet(image_size=60)


def test_heads_that_do_not_divide():
    with pytest.raises(CudiffError, match=r"num_head_channels 48 does not divide the 64 .* 16, 32, 64"):
        UNet(**TINY | dict(num_head_channels=48))


@pytest.mark.parametrize("make, told", [
    (lambda: UNet(**TINY | dict(image_size=0)), "image_size must be at least 1, not 0"),
    (lambda: UNet(**TINY | dict(model_channels=1)), "model_channels must be at least 2, not 1"),
    (lambda: UNet(**TINY | dict(num_res_blocks=0)), "num_res_blocks must be at least 1, not 0"),
    (lambda: UNet(**TINY | dict(max_period=0)), "max_period must be above 1, not 0"),
    (lambda: CS179UNet(-4), "image_size must be at least 1, not -4"),
    (lambda: CS179UNet(8, model_channels=1), "model_channels must be at least 2, not 1"),
    (lambda: DiT(8, patch_size=0), "patch_size must be at least 1, not 0"),
    (lambda: DiT(8, hidden_size=0), "hidden_size must be at least 4, not 0"),
    (lambda: DiT(8, depth=0), "depth must be at least 1, not 0"),
])
def test_models_built_by_hand_name_what_is_out_of_range(make, told):
    with pytest.raises(CudiffError, match=told):
        make()


def test_names_are_guided_diffusions():
    names = {name for name, _ in UNet(**TINY | dict(num_classes=3)).named_parameters()}
    assert names == set(TorchUNet(**TINY | dict(num_classes=3)).state_dict())


def test_labels_of_an_unconditional_net_are_refused():
    x, t, labels = (Tensor(np.zeros(shape, np.float32)) for shape in ((2, 8, 8, 3), (2,), (2,)))
    with pytest.raises(ValueError, match="this U-Net is unconditional and takes no labels"):
        UNet(image_size=8, model_channels=8, channel_mult=(1,), num_head_channels=8)(x, t, labels)
    with pytest.raises(ValueError, match="has no classes and takes no labels"):
        CS179UNet(8, 3, model_channels=4)(x, t, labels)
