"""The classifier against an equal PyTorch network with the same random weights: logits and every gradient."""

import numpy as np
import pytest

from cudiff import nn
from cudiff.errors import CudiffError
from cudiff.models.cnn import CNN
from cudiff.tensor import Tensor
from tests.check import relative_error

SIZES = [(16, 1), (28, 1), (32, 3), (18, 3), (4, 1)]


def random_network(size, channels, classes=7, seed=0):
    with nn.init.seeded(seed):
        model = CNN(size, channels, classes)
    rng = np.random.default_rng(seed)
    for norm in (model.norm1, model.norm2):
        for parameter, start in ((norm.weight, 1), (norm.bias, 0)):
            parameter.assign((start + 0.3 * rng.standard_normal(parameter.shape)).astype(np.float32))
    return model


def torch_network(model, size):
    """The same in PyTorch, float64; its linear layer reads channels first, so that its columns are permuted."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: no parity test")
    state = {name: torch.tensor(value).double() for name, value in model.state_dict().items()}
    channels, classes = state["conv1.weight"].shape[3], len(state["fc2.bias"])
    side = size // 4
    features = torch.nn.Sequential(
        torch.nn.Conv2d(channels, 32, 3, padding=1), torch.nn.BatchNorm2d(32), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(32, 64, 3, padding=1), torch.nn.BatchNorm2d(64), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
        torch.nn.Flatten(), torch.nn.Linear(64 * side * side, 128), torch.nn.ReLU(),
    ).double()
    last = torch.nn.Linear(128, classes).double()
    for layer, name in ((0, "conv1"), (1, "norm1"), (4, "conv2"), (5, "norm2"), (9, "fc1")):
        own = {key.partition(".")[2]: value for key, value in state.items() if key.startswith(f"{name}.")}
        if name.startswith("conv"):
            own["weight"] = own["weight"].permute(0, 3, 1, 2)
        if name == "fc1":
            own["weight"] = own["weight"].reshape(128, side, side, 64).permute(0, 3, 1, 2).reshape(128, -1)
        features[layer].load_state_dict(own, strict=False)
    last.load_state_dict({key: state[f"fc2.{key}"] for key in ("weight", "bias")})
    return features, last


def native(name, gradient, side):
    """A PyTorch gradient in our layout."""
    if name == "fc1.weight":
        return gradient.reshape(128, 64, side, side).permute(0, 2, 3, 1).reshape(128, -1)
    return gradient.permute(0, 2, 3, 1) if gradient.ndim == 4 else gradient


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("size, channels", SIZES)
def test_equals_pytorch(size, channels, training, device, rng):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: no parity test")
    model = random_network(size, channels).train(training).flatten(device)
    features, last = torch_network(model, size)
    features.train(training)
    x = rng.standard_normal((6, size, size, channels)).astype(np.float32)
    dout = rng.standard_normal((6, 7)).astype(np.float32)
    out = model(Tensor(x, device=device))
    out.backward(Tensor(dout, device=device).data)
    expected = last(features(torch.tensor(x.transpose(0, 3, 1, 2)).double()))
    (expected * torch.tensor(dout).double()).sum().backward()
    assert relative_error(out.numpy(), expected.detach().numpy()) < 1e-5
    layers = {"conv1": features[0], "norm1": features[1], "conv2": features[4], "norm2": features[5],
              "fc1": features[9], "fc2": last}
    gradients = {
        f"{layer}.{name}": native(f"{layer}.{name}", value.grad, size // 4).numpy()
        for layer, module in layers.items() for name, value in module.named_parameters()
    }
    everything = np.sqrt(sum(np.sum(np.square(value)) for value in gradients.values()))
    for name, parameter in model.named_parameters():
        error = np.linalg.norm(Tensor(parameter.grad).numpy() - gradients[name])
        assert error <= 1e-4 * np.linalg.norm(gradients[name]) + 1e-6 * everything, name
    for layer, index in (("norm1", 1), ("norm2", 5)):
        for buffer in ("running_mean", "running_var"):
            ours, theirs = model.state_dict()[f"{layer}.{buffer}"], getattr(features[index], buffer).numpy()
            assert relative_error(ours, theirs) < 1e-5, f"{layer}.{buffer}"


def test_logits_are_the_last_layer_of_the_features(device, rng):
    model = random_network(16, 1).eval().flatten(device)
    x = Tensor(rng.standard_normal((3, 16, 16, 1)).astype(np.float32), device=device)
    features = model.features(x).numpy()
    assert features.shape == (3, CNN.FEATURES) and (features >= 0).all()
    expected = features @ model.fc2.weight.numpy().T + model.fc2.bias.numpy()
    assert relative_error(model(x).numpy(), expected) < 1e-5


@pytest.mark.parametrize("size, channels", [(64, 3), (29, 1), (30, 1), (31, 1)])
def test_other_sizes(size, channels, device, rng):
    model = CNN(size, channels, 2).flatten(device)
    x = Tensor(rng.standard_normal((2, size, size, channels)).astype(np.float32), device=device)
    assert model(x).shape == (2, 2)


def test_too_small_an_image():
    with pytest.raises(CudiffError, match="4 or more"):
        CNN(3)


@pytest.mark.gpu
def test_bf16_stays_near(rng):
    model = random_network(28, 1).eval()
    x = rng.standard_normal((8, 28, 28, 1)).astype(np.float32)
    expected = model(Tensor(x)).numpy()
    model.precision = "bf16"
    out = model.flatten("cuda")(Tensor(x, device="cuda"))
    assert out.dtype == np.float32 and relative_error(out.numpy(), expected) < 0.03


def test_mnist_unless_told():
    shapes = {name: parameter.shape for name, parameter in CNN().named_parameters() if name.endswith("weight")}
    assert shapes == {
        "conv1.weight": (32, 3, 3, 1), "norm1.weight": (32,), "conv2.weight": (64, 3, 3, 32), "norm2.weight": (64,),
        "fc1.weight": (128, 7 * 7 * 64), "fc2.weight": (10, 128),
    }
    assert CNN(4)(Tensor(np.zeros((2, 4, 4, 1), np.float32))).shape == (2, 10)
