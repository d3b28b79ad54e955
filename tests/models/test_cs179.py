"""The CS 179 U-Net: equal to PyTorch, and with the project's weights a denoiser of real MNIST."""

import math

import numpy as np
import pytest

import cudiff
from cudiff.backend import bfloat16
from cudiff.config import PRESETS, Config
from cudiff.convert import from_torch, read_weights, to_torch
from cudiff.data import mnist
from cudiff.errors import CudiffError
from cudiff.models import CS179UNet, UNet, build
from cudiff.nn import init
from cudiff.ops.mse import mse
from cudiff.pipeline import Pipeline, export_torch, import_torch
from cudiff.tensor import Tensor, no_grad
from tests.check import relative_error

WEIGHTS = "cs179/model_bf16.safetensors"


def torch_forward(state, x, t):
    """The same network in PyTorch, float64; its skip connections are what was pooled, joined behind x."""
    import torch
    import torch.nn.functional as F

    state = {name: torch.tensor(array).double().requires_grad_() for name, array in state.items()}

    def layer(function, name, x, **settings):
        return function(x, state[f"{name}.weight"], state[f"{name}.bias"], **settings)

    def block(name, x, emb):
        shift = layer(F.linear, f"{name}.time_proj", emb)[:, :, None, None]
        x = F.relu(layer(F.conv2d, f"{name}.conv1", x, padding=1) + shift)
        return F.relu(layer(F.conv2d, f"{name}.conv2", x, padding=1) + shift)

    half = state["time_emb.mlp.0.weight"].shape[1] // 2
    angles = t[:, None] * torch.exp(torch.arange(half).double() * (-math.log(10000) / (half - 1)))
    emb = torch.cat([angles.sin(), angles.cos()], 1)
    emb = layer(F.linear, "time_emb.mlp.2", F.silu(layer(F.linear, "time_emb.mlp.0", emb)))
    skips = []
    for index in range(2):
        x = F.max_pool2d(block(f"enc_blocks.{index}", x, emb), 2)
        skips.append(x)
    x = block("bottleneck", x, emb)
    for index in range(2):
        x = block(f"dec_blocks.{index}", torch.cat([x, skips.pop()], 1), emb)
        x = layer(F.conv_transpose2d, f"dec_blocks.{index}.upsample", x, stride=2)
    return layer(F.conv2d, "out_conv", x), state


@pytest.mark.parametrize("size, channels", [(28, 1), (12, 3)])
def test_output_and_gradients_equal_pytorch(size, channels, device, rng):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: no parity test")
    with init.seeded(3):
        net = CS179UNet(size, channels, model_channels=16).flatten(device)
    x = rng.standard_normal((2, size, size, channels)).astype(np.float32)
    t = np.array([-1.5, 0.7], np.float32)
    weight = rng.standard_normal(x.shape).astype(np.float32)
    x_torch, t_torch = torch.tensor(x.transpose(0, 3, 1, 2)).double(), torch.tensor(t).double()
    expected, state = torch_forward(to_torch(net.state_dict(), net.layouts()), x_torch, t_torch)
    (expected * torch.tensor(weight.transpose(0, 3, 1, 2))).sum().backward()
    out = net(Tensor(x, device=device), Tensor(t, device=device))
    (out * Tensor(weight, device=device)).sum().backward()
    assert relative_error(out.numpy(), expected.detach().numpy().transpose(0, 2, 3, 1)) < 1e-4
    gradients = from_torch({name: value.grad.numpy() for name, value in state.items()}, net.layouts())
    everything = math.sqrt(sum(float(np.square(value).sum()) for value in gradients.values()))
    for name, parameter in net.named_parameters():
        difference = np.linalg.norm(Tensor(parameter.grad).numpy() - gradients[name])
        assert difference <= 1e-4 * np.linalg.norm(gradients[name]) + 1e-6 * everything, name


def test_bf16_stays_near(device, rng):
    """The project's own size, on a GPU a batch as in training: every gradient near that of float32, PyTorch's.

    The target is off the mark, so that the pixels' gradients agree: where they cancel out, what rounding did remains.
    """
    batch = 64 if device == "cuda" else 16
    x, t, target = (
        Tensor(rng.standard_normal(shape).astype(np.float32), device=device)
        for shape in ((batch, 28, 28, 1), (batch,), (batch, 28, 28, 1))
    )
    grads = []
    for precision in ("fp32", "bf16"):
        with init.seeded(3):
            net = CS179UNet()
        net.precision = precision
        net.flatten(device)
        mse(net(x, t), target + 2).backward()
        grads.append({name: Tensor(parameter.grad).numpy() for name, parameter in net.named_parameters()})
    for name, expected in grads[0].items():
        assert relative_error(grads[1][name], expected) < 0.05, name


@pytest.fixture(scope="module")
def trained(data_folder, tmp_path_factory):
    """The project's weights as a pipeline."""
    path = tmp_path_factory.mktemp("cs179") / "model.safetensors"
    import_torch(data_folder / WEIGHTS, path, PRESETS["digits"])  # the file's names tell the model
    return cudiff.load(path, "cpu")


def test_the_projects_weights_load(trained, data_folder):
    state = read_weights(data_folder / WEIGHTS).state
    assert trained.config == PRESETS["cs179"]
    assert {name for name, _ in trained.net.named_parameters()} == state.keys()
    assert trained.net.num_parameters() == sum(array.size for array in state.values())


def test_it_denoises_real_digits(trained, data_folder, rng):
    """Its error stays far below that of the best linear estimate from each pixel alone, the Wiener filter."""
    y = mnist("test", data_folder / "mnist").images[:16].astype(np.float32) / 127.5 - 1
    for sigma, share in ((0.06, 0.25), (0.2, 0.2), (0.6, 0.2), (1.2, 0.3)):
        x = y + sigma * rng.standard_normal(y.shape).astype(np.float32)
        with no_grad():
            denoised = trained.denoiser()(Tensor(x), Tensor(np.full(16, sigma, np.float32))).numpy()
        wiener = sigma**2 * y.var() / (sigma**2 + y.var())
        assert np.square(denoised - y).mean() < share * wiener


def test_its_samples_look_like_digits(trained, data_folder):
    """Black background, white strokes, as much ink as real digits, and each near some real one."""
    images = trained.sample(8, seed=0)
    real = mnist("test", data_folder / "mnist").images[:5000]
    assert ((images < 32) | (images > 223)).mean() > 0.85
    assert 0.6 < images.mean() / real.mean() < 1.5
    distance = np.sqrt(((images[:, None] / 255.0 - real[None, ::5] / 255.0) ** 2).sum(axis=(2, 3, 4)).min(axis=1))
    shuffled = np.random.default_rng(0).permuted(images.reshape(8, -1), axis=1).reshape(images.shape)
    far = np.sqrt(((shuffled[:, None] / 255.0 - real[None, ::5] / 255.0) ** 2).sum(axis=(2, 3, 4)).min(axis=1))
    assert distance.mean() < 0.8 * far.mean()


@pytest.mark.parametrize("name", ["cs179", "unet"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("dtype", [np.uint8, bfloat16], ids=str)
def test_the_images_dtype_does_not_matter(name, precision, dtype, device, rng):
    """To this U-Net and to the other: it is the model's precision that its weights are read in."""
    with init.seeded(3):
        net = CS179UNet() if name == "cs179" else UNet(8, 1, 32, channel_mult=(1, 2), zero_init=False)
    net.precision = precision
    net.flatten(device)
    x, t = rng.integers(0, 2, (2, 8, 8, 1)), Tensor(np.full(2, 0.5, np.float32), device=device)
    outs = []
    for own in (np.float32, dtype):
        out = net(Tensor(x.astype(own), device=device), t)
        out.backward(Tensor(np.ones(out.shape, np.float32), device=device).data)
        outs.append(out.numpy())
    assert np.array_equal(*outs)


def test_what_it_cannot_be():
    with pytest.raises(CudiffError, match="image size 30 does not halve 2 times: use a multiple of 4"):
        CS179UNet(30)
    with pytest.raises(CudiffError, match=r"^model cs179 has no classes: num_classes must be 0, not 10$"):
        PRESETS["cs179"].replace(num_classes=10)
    with pytest.raises(CudiffError, match=r"^model cs179 learns no variance: leave out learn_sigma$"):
        PRESETS["cs179"].replace(learn_sigma=True, diffusion="ddpm")


def test_build_draws_it_from_the_seed():
    one, same, other = (build(PRESETS["cs179"].replace(seed=seed)).out_conv.weight.numpy() for seed in (1, 1, 2))
    assert np.array_equal(one, same) and not np.array_equal(one, other)


def test_one_of_other_widths_is_imported_as_it_is_described(tmp_path):
    """Of one that is not described, nothing tells that it is another than CS 179's, or learned otherwise."""
    config = Config(model="cs179", image_size=8, channels=1, model_channels=16, channel_mult=(1, 1, 2), num_classes=0,
                    diffusion="flow")
    Pipeline(config, build(config)).save(tmp_path / "own.safetensors")
    export_torch(tmp_path / "own.safetensors", tmp_path / "theirs.safetensors")
    with pytest.raises(CudiffError, match=r"do not fit .*: give --preset, --config or --model cs179 with its options$"):
        import_torch(tmp_path / "theirs.safetensors", tmp_path / "again.safetensors", Config())
    assert import_torch(tmp_path / "theirs.safetensors", tmp_path / "again.safetensors", config) == config
    one, other = (cudiff.load(tmp_path / name).net.state_dict() for name in ("own.safetensors", "again.safetensors"))
    assert all((one[name] == other[name]).all() for name in one)
