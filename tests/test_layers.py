"""Layers against PyTorch's with its weights, and how modules are held by name and shown."""

from collections import ChainMap, UserList
from dataclasses import make_dataclass
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest

import cudiff
from cudiff import nn, ops
from cudiff.convert import from_torch, read_weights, to_torch, write_weights
from cudiff.errors import CudiffError
from cudiff.nn import init
from cudiff.optim import SGD
from cudiff.tensor import Tensor
from cudiff.tensorfile import write_tensors
from tests.check import torch

needs_torch = pytest.mark.skipif(torch is None, reason="PyTorch is not installed")


def load_from(layer, theirs):
    """Give `layer` PyTorch's weights, which come back as they were."""
    state = theirs.state_dict()
    layer.load_state_dict(from_torch(state, layer.layouts()))
    for name, value in to_torch(layer.state_dict(), layer.layouts()).items():
        np.testing.assert_array_equal(value, state[name].numpy())


@needs_torch
@pytest.mark.parametrize("options", [
    dict(kernel_size=3, groups=2), dict(kernel_size=5, stride=2, dilation=2),
    dict(kernel_size=2, padding=3, bias=False),
], ids=str)
def test_conv1d_is_pytorchs(rng, options):
    layer, x = nn.Conv1d(4, 6, **options), rng.standard_normal((2, 11, 4)).astype(np.float32)
    theirs = torch.nn.Conv1d(4, 6, **{"padding": layer.padding} | options)
    load_from(layer, theirs)
    expected = theirs(torch.tensor(x).transpose(1, 2)).transpose(1, 2).detach().numpy()
    np.testing.assert_allclose(layer(Tensor(x)).numpy(), expected, rtol=1e-4, atol=1e-5)
    if options == dict(kernel_size=3, groups=2):
        assert expected.shape == (2, 11, 6)


@needs_torch
@pytest.mark.parametrize("shape", [(6, 3), (4, 5, 3)])
def test_batch_norm_1d_is_pytorchs(rng, shape):
    layer, theirs = nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3)
    x = rng.standard_normal(shape).astype(np.float32) * 2 + 1
    channels_second = torch.tensor(x) if len(shape) == 2 else torch.tensor(x).transpose(1, 2)
    for training in (True, False):
        expected = theirs.train(training)(channels_second).detach()
        expected = expected.numpy() if len(shape) == 2 else expected.transpose(1, 2).numpy()
        np.testing.assert_allclose(layer.train(training)(Tensor(x)).numpy(), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(layer.running_var.numpy(), theirs.running_var.numpy(), rtol=1e-5)
    with pytest.raises(ValueError, match=r"BatchNorm1d: x has shape \(2, 2, 2, 3\), not \(N, C\) or \(N, L, C\)"):
        layer(Tensor(np.zeros((2, 2, 2, 3), np.float32)))


def test_multihead_attention_is_its_formula(rng):
    """Causal, of one sequence, which is the same as query, key and value given apart."""
    layer, x = nn.MultiheadAttention(6, 2), rng.standard_normal((2, 5, 6)).astype(np.float32)
    weight, sees = layer.in_proj_weight.numpy(), np.tri(5, dtype=bool)
    q, k, v = (part.reshape(2, 5, 2, 3).swapaxes(1, 2) for part in np.split(x @ weight.T, 3, axis=2))
    scores = np.where(sees, q @ k.swapaxes(2, 3) / np.sqrt(3), -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = (p / p.sum(-1, keepdims=True) @ v).swapaxes(1, 2).reshape(2, 5, 6)
    expected = mixed @ layer.out_proj.weight.numpy().T
    for given in ((x,), (x, x, x)):
        np.testing.assert_allclose(layer(*map(Tensor, given), mask=sees).numpy(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layer", [
    nn.SiLU(), nn.ReLU(), nn.GELU(), nn.Tanh(), nn.Sigmoid(), nn.Flatten(), nn.MaxPool2d(2), nn.AvgPool2d(2),
    nn.Identity(), nn.Dropout(0.5), nn.Dropout(0.5).eval(),
])
def test_a_layer_without_parameters_widens_no_net(layer, rng):
    """An array of float64 in front of one that has parameters, as `images / 255` is."""
    x = rng.standard_normal((2, 4, 4, 1))
    net = nn.Sequential(layer, nn.Flatten(), nn.Linear(layer(x).size // 2, 3))
    assert net(x).dtype == net(Tensor(x, dtype="float32")).dtype == np.float32
    assert layer(Tensor(x)).dtype == np.float64


def test_a_buffer_of_an_array_of_float64_widens_no_net():
    layer = nn.Linear(3, 2)
    layer.register_buffer("positions", np.linspace(0, 1, 2))
    assert (layer(np.ones((1, 3))) + layer.positions).dtype == np.float32
    layer.register_buffer("positions", Tensor(np.linspace(0, 1, 2)))  # asked for
    assert layer.positions.dtype == np.float64


@needs_torch
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_is_pytorchs(rng, approximate):
    x = rng.standard_normal((3, 5))
    expected = torch.nn.GELU(approximate)(torch.from_numpy(x))
    np.testing.assert_allclose(nn.GELU(approximate)(Tensor(x)).numpy(), expected, atol=1e-12)
    assert repr(nn.GELU(approximate)) == ("GELU()" if approximate == "none" else "GELU(approximate='tanh')")


def test_gelu_refuses_another_way():
    with pytest.raises(ValueError, match='approximate is "none" or "tanh", not'):
        nn.GELU("exact")


def test_conv1d_of_an_array_of_float64_stays_in_float32(rng):
    x = rng.standard_normal((2, 5, 3))
    layer = nn.Conv1d(3, 4, 3)
    out = layer(x)
    assert out.dtype == np.float32
    np.testing.assert_array_equal(out.numpy(), layer(Tensor(x, dtype="float32")).numpy())


def test_conv1d_and_batch_norm_1d_are_their_formulas(rng):
    x = rng.standard_normal((2, 7, 3)).astype(np.float32)
    layer = nn.Conv1d(3, 4, 3, padding=0)
    weight, bias = layer.weight.numpy(), layer.bias.numpy()
    expected = np.stack([np.einsum("nsc,ksc->nk", x[:, i : i + 3], weight) for i in range(5)], 1) + bias
    np.testing.assert_allclose(layer(Tensor(x)).numpy(), expected, rtol=1e-4, atol=1e-5)
    expected = (x - x.mean((0, 1))) / np.sqrt(x.var((0, 1)) + 1e-5)
    np.testing.assert_allclose(nn.BatchNorm1d(3)(Tensor(x)).numpy(), expected, rtol=1e-4, atol=1e-5)


@needs_torch
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("cross", [True, False])
def test_multihead_attention_is_pytorchs(rng, bias, causal, cross):
    layer, theirs = nn.MultiheadAttention(12, 3, bias), torch.nn.MultiheadAttention(12, 3, bias=bias, batch_first=True)
    with torch.no_grad():
        for parameter in theirs.parameters():  # biases start at 0
            parameter.copy_(torch.tensor(rng.standard_normal(tuple(parameter.shape)) / 3))
    load_from(layer, theirs)
    query, key, value = (rng.standard_normal((2, t, 12)).astype(np.float32) for t in (5, 7, 7))
    given = (query, key, value) if cross else (query,) * 3
    sees = np.tri(5, given[1].shape[1], dtype=bool)
    expected, _ = theirs(*map(torch.tensor, given), attn_mask=torch.tensor(~sees) if causal else None)
    x = [Tensor(array, requires_grad=True) for array in given[: 3 if cross else 1]]
    out = layer(*x, mask=sees if causal else None)
    np.testing.assert_allclose(out.numpy(), expected.detach().numpy(), rtol=1e-4, atol=1e-5)
    dout = rng.standard_normal(out.shape).astype(np.float32)
    out.backward(dout)
    expected.backward(torch.tensor(dout))
    for name, parameter in theirs.named_parameters():
        mine = dict(layer.named_parameters())[name].grad
        np.testing.assert_allclose(mine, parameter.grad.numpy(), rtol=1e-3, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_multihead_attention_in_16_bits(rng, precision):
    layer = nn.MultiheadAttention(8, 2)
    x = Tensor(rng.standard_normal((2, 5, 8)).astype(np.float32))
    for given in ((x,), (x, x, x)):
        for mask in (None, np.tri(5, dtype=bool)):
            layer.precision = "fp32"
            expected = layer(*given, mask=mask).numpy()
            layer.precision = precision
            out = layer(*(ops.astype(part, layer.activation_dtype) for part in given), mask=mask)
            assert out.dtype == layer.activation_dtype
            np.testing.assert_allclose(out.numpy().astype(np.float32), expected, atol=0.03)


def test_multihead_attention_refuses_what_does_not_fit():
    layer, x = nn.MultiheadAttention(8, 2), Tensor(np.zeros((2, 5, 8), np.float32))
    with pytest.raises(CudiffError, match="embed_dim 8 is no multiple of num_heads 3"):
        nn.MultiheadAttention(8, 3)
    with pytest.raises(ValueError, match="give key and value, or neither"):
        layer(x, x)
    with pytest.raises(ValueError, match=r"are not \(N, T, 8\)"):
        layer(Tensor(np.zeros((2, 5, 7), np.float32)))


@pytest.mark.parametrize("make", [
    lambda: nn.Conv1d(0, 1, 1), lambda: nn.Conv1d(1, 0, 1), lambda: nn.Conv1d(1, 1, 0), lambda: nn.Conv1d(1, 1, (1, 1)),
    lambda: nn.Conv1d(3, 4, 1, groups=2), lambda: nn.Conv1d(1, 1, 1, padding=-1), lambda: nn.BatchNorm1d(0),
    lambda: nn.MultiheadAttention(0, 1), lambda: nn.MultiheadAttention(4, 0),
])
def test_sizes_that_make_no_layer_are_refused(make):
    with pytest.raises(CudiffError):
        make()


@pytest.mark.parametrize("read", [
    lambda model: model.parameters(), lambda model: model.state_dict(), lambda model: model.num_parameters(),
    lambda model: SGD(model), lambda model: SGD(model.parameters()), lambda model: model.layouts(),
])
def test_layers_added_to_a_list_are_not_left_out_in_silence(read):
    model = nn.Linear(2, 2)
    model.layers = []
    read(model)
    model.layers.append(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"layers: layers in a list have no names: use nn\.ModuleList"):
        read(model)


@pytest.mark.parametrize("holds", [
    lambda layer: SimpleNamespace(layer=layer), lambda layer: np.array([layer, None], object),
    lambda layer: {"a": [layer]}, lambda layer: (layer,), lambda layer: {layer: 1}, lambda layer: {"a": layer}.values(),
    lambda layer: UserList([layer]), lambda layer: ChainMap({"a": layer}), lambda layer: MappingProxyType({"a": layer}),
    lambda layer: make_dataclass("Parts", ["layer"])(layer),
])
def test_layers_without_names_are_refused(holds):
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"parts: layers in a .* have no names"):
        model.parts = holds(nn.ReLU())
    model.parts = holds(3)


def test_a_dict_of_modules():
    layers = nn.ModuleDict({"up": nn.Linear(2, 3), "down": nn.ReLU()})
    assert layers.training and layers.flat is None  # as any module begins
    layers["last"] = nn.Linear(3, 1, bias=False)
    assert list(dict(layers.named_parameters())) == ["up.weight", "up.bias", "last.weight"]
    assert list(layers) == list(layers.keys()) == ["up", "down", "last"] and len(layers) == 3 and "down" in layers
    assert layers["up"] is dict(layers.items())["up"] and list(layers.values())[1] is layers["down"]
    flat = layers.flat_parameters()
    del layers["last"]
    assert list(dict(layers.named_parameters())) == ["up.weight", "up.bias"] and layers.flat_parameters() is not flat
    for name in ("a.b", "", "training", 3):
        with pytest.raises(TypeError, match="names are text without dots"):
            layers[name] = nn.ReLU()
    with pytest.raises(TypeError, match="holds modules, not a int"):
        layers["number"] = 3


@pytest.mark.parametrize("layer, expected", [
    (nn.Linear(2, 3, bias=False), "Linear(in_features=2, out_features=3, bias=False)"),
    (nn.Conv2d(2, 4, 3, stride=2, groups=2),
     "Conv2d(2, 4, kernel_size=(3, 3), stride=(2, 2), padding=(1, 1), groups=2)"),
    (nn.Conv2d(2, 4, 1, bias=False), "Conv2d(2, 4, kernel_size=(1, 1), stride=(1, 1), bias=False)"),
    (nn.Conv1d(2, 4, 3, dilation=2), "Conv1d(2, 4, kernel_size=(3,), stride=1, padding=2, dilation=2)"),
    (nn.ConvTranspose2d(2, 4, 3, padding=1), "ConvTranspose2d(2, 4, kernel_size=(3, 3), stride=1, padding=1)"),
    (nn.GroupNorm(2, 4), "GroupNorm(2, 4, eps=1e-05)"), (nn.LayerNorm(4), "LayerNorm(4, eps=1e-05)"),
    (nn.BatchNorm2d(4), "BatchNorm2d(4, eps=1e-05, momentum=0.1)"), (nn.Embedding(10, 3), "Embedding(10, 3)"),
    (nn.Dropout(0.5), "Dropout(p=0.5)"), (nn.MaxPool2d(3, 2, 1), "MaxPool2d(3, stride=2, padding=1)"),
    (nn.ModuleDict({"a": nn.ReLU()}), "ModuleDict(\n  (a): ReLU()\n)"),
])
def test_how_layers_are_shown(layer, expected):
    assert repr(layer) == expected


@needs_torch
def test_pytorchs_tensors_become_ours():
    """Where shapes coincide too; what a batch norm counts has no place here."""
    theirs = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.BatchNorm2d(4)).bfloat16()
    ours = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    load_from(ours, theirs.float())
    theirs.bfloat16()
    ours.load_state_dict(from_torch(theirs.state_dict(), ours.layouts()))
    expected = theirs[0].weight.detach().float().numpy()
    assert expected.shape == ours[0].weight.shape
    np.testing.assert_array_equal(ours[0].weight.numpy(), expected.transpose(0, 2, 3, 1))


def test_a_model_is_saved_and_loaded(tmp_path):
    model, other = (nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3)) for _ in "ab")
    path = tmp_path / "model.safetensors"
    model[1].running_mean = np.float32([1, 2, 3])
    model.save(path)
    assert other.load(path) is other
    for name, value in model.state_dict().items():
        np.testing.assert_array_equal(other.state_dict()[name], value)
    with pytest.raises(CudiffError, match=r"do not fit the model: missing weight"):
        nn.Linear(2, 3).load(path)
    with pytest.raises(CudiffError, match="is a cudiff checkpoint already"):
        read_weights(path)
    write_weights(path, to_torch(model.state_dict(), model.layouts()))
    with pytest.raises(CudiffError, match=r"was not written by Module.save, or is damaged: cudiff.load reads"):
        model.load(path)


def test_a_damaged_file_is_refused_and_its_tensor_named(tmp_path):
    model, path = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 64)), tmp_path / "model.safetensors"
    model.save(path)
    whole, before = path.read_bytes(), model.state_dict()
    model.save(path)
    assert path.read_bytes() == whole
    half = len(whole) // 2
    for damaged, name in [
        (whole[:-1] + bytes([whole[-1] ^ 1]), "1.weight"), (whole[:half] + bytes(len(whole) - half), r"1\.\w+"),
    ]:
        path.write_bytes(damaged)
        with pytest.raises(CudiffError, match=f"is damaged: the values of {name} are not those that were saved"):
            model.load(path)
    path.write_bytes(whole.replace(b"sha256", b"sha257"))
    with pytest.raises(CudiffError, match=r"was not written by Module.save, or is damaged"):
        model.load(path)
    assert all((value == before[name]).all() for name, value in model.state_dict().items())
    write_tensors(path, before, {"cudiff_module": "native KRSC"})  # as before there were digests
    nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 64)).load(path)


def test_a_part_of_a_state_is_loaded_where_that_is_said():
    model, other = (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3)) for _ in "ab")
    state = {"0.weight": model[0].weight, "head.weight": np.ones(3)}
    with pytest.raises(CudiffError, match=r"missing 0\.bias"):
        other.load_state_dict(state)
    before = other.state_dict()
    other.load_state_dict(state, strict=False)
    changed = [name for name, value in other.state_dict().items() if (value != before[name]).any()]
    assert changed == ["0.weight"] and (other[0].weight.numpy() == model[0].weight.numpy()).all()
    with pytest.raises(CudiffError, match=r"0.weight has shape \(3, 2\), not \(2, 2\)"):
        other.load_state_dict({"0.weight": np.ones((3, 2))}, strict=False)


def test_a_seed_makes_weights():
    def weights(seed):
        cudiff.seed(seed)
        return np.concatenate([nn.Linear(3, 4).weight.numpy(), nn.Linear(3, 4).weight.numpy()])

    with init.seeded(0):  # which ends what is seeded in it
        first, other = weights(1), weights(2)
        assert (weights(1) == first).all() and (first != other).any() and (first[:4] != first[4:]).any()
        with pytest.raises(CudiffError, match="n must be at least 0"):
            cudiff.seed(-1)


def test_named_modules_and_devices_are_pytorchs():
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    outer = nn.ModuleDict({"a": model})
    outer.head = nn.ReLU()
    assert dict(model.named_modules()) == {"": model, "0": model[0], "1": model[1]}
    assert dict(outer.named_modules("b")) == {"b": outer, "b.a": model, "b.a.0": model[0], "b.a.1": model[1],
                                              "b.head": outer.head}
    assert list(outer.modules()) == [outer, model, *model, outer.head]
    assert dict(outer.named_children()) == {"a": model, "head": outer.head}
    assert list(outer.children()) == [model, outer.head] and list(model.children()) == list(model)
    for wrong in (np.float16, "bfloat16", "cuda:0"):
        with pytest.raises(CudiffError, match=r'moves to "cpu" or "cuda", not .*precision = "bf16"'):
            model.to(wrong)


@needs_torch
def test_what_has_several_names_is_listed_once_as_in_pytorch():
    """A loop over them, as to scale initial values, comes by each once; names are all there."""
    lists = []
    for library in (nn, torch.nn):
        norm, activation = library.BatchNorm1d(2), library.ReLU()
        model = library.Sequential(norm, activation, library.Linear(2, 2), activation)
        model.again, seen = norm, []
        model.apply(seen.append)
        arrays = [*model.parameters(), *(value for value in model.buffers() if len(value.shape))]
        found = model.modules(), model.children(), seen
        lists.append([[type(module).__name__ for module in modules] for modules in found])
        lists[-1] += [[list(value.shape) for value in arrays]]
    assert lists[0] == lists[1]
    ours = nn.Sequential(layer := nn.Linear(2, 2), layer)
    assert [name for name, _ in ours.named_parameters()] == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_a_layer_that_a_dictionary_takes_later_is_noticed_by_the_optimiser():
    model = nn.Sequential(nn.Linear(2, 2))
    model.more = nn.ModuleDict({"a": nn.Linear(2, 2)})
    optimizer, layer = cudiff.optim.SGD(model, lr=0.1), nn.Linear(2, 2)
    optimizer.step()
    model.more["b"] = layer
    with pytest.raises(CudiffError, match="the optimiser was made for other parameters"):
        optimizer.step()
