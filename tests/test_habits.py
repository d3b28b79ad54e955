"""Habits of PyTorch's users: each does what it says, or is refused by one clear line."""

import copy
import pickle
import subprocess
import sys

import numpy as np
import pytest

import cudiff
from cudiff import nn
from cudiff.cuda import graph
from cudiff.errors import CudiffError
from cudiff.ops.methods import PYTORCH
from cudiff.optim import EMA, SGD, AdamW
from cudiff.tensor import Tensor

X = np.random.default_rng(2).standard_normal((6, 3)).astype(np.float32)


def network():
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))


def loss(model):
    return cudiff.square(model(Tensor(X, device=model.parameters()[0].device))).sum()


def gradient_norm(model):
    return np.sqrt(sum(np.square(parameter.grad).sum(dtype=np.float64) for parameter in model.parameters()))


def test_frozen_between_forward_and_backward():
    """What is frozen gets no gradient, which would count in the norm that is clipped."""
    model = network()
    optimizer = SGD(model, clip=1.0)
    out = loss(model)
    model[0].requires_grad_(False)
    out.backward()
    optimizer.step()
    assert not model[0].weight.grad.any() and model[2].weight.grad.any()
    assert optimizer.metrics()["grad_norm"] == pytest.approx(gradient_norm(model[2]), rel=1e-6)


def test_a_step_between_forward_and_backward():
    model = network()
    optimizer = SGD(model)
    first, second = loss(model), loss(model)
    first.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="updated between forward and backward"):
        second.backward()
    loss(model).backward()
    out = loss(model)
    with cudiff.no_grad():
        model[0].weight *= 0.5
    with pytest.raises(RuntimeError, match="updated between forward and backward"):
        out.backward()


def test_two_optimisers_take_turns():
    """A step of one part leaves what another part's backward goes through."""
    model = network()
    model.flatten("cpu")
    features = model[0](Tensor(X))
    head = SGD(model[2])
    cudiff.square(model[2](features.detach())).sum().backward()
    head.step()
    before = model.state_dict()
    cudiff.square(model[2](features)).sum().backward()
    SGD(model[0]).step()
    changed = [name for name, value in model.state_dict().items() if (value != before[name]).any()]
    assert changed == ["0.weight", "0.bias"]


def test_backward_before_the_optimiser_is_made(device):
    model, expected = network(), {}
    model.flatten(device)
    loss(model).backward()
    expected = {name: value.grad.copy() for name, value in model.named_parameters()}
    for part in (model, nn.Sequential(model[0], model[2]), copy.copy(model)):
        part.flatten(device)
        for (name, parameter), grad in zip(model.named_parameters(), expected.values(), strict=True):
            np.testing.assert_array_equal(Tensor(parameter.grad).numpy(), Tensor(grad).numpy(), err_msg=name)
    before = model.state_dict()
    SGD(model, lr=1.0).step()
    for name, value in model.state_dict().items():
        np.testing.assert_allclose(value, before[name] - Tensor(expected[name]).numpy(), rtol=1e-6)


@pytest.mark.parametrize("before", ["fp32", "fp16"])
def test_precision_chosen_after_the_optimiser(device, before):
    """The weights that matrix products read are the trained ones, whatever precision the buffers were made for."""
    models = [network(), network()]
    models[1].load_state_dict(models[0].state_dict())
    models[0].precision, models[1].precision = "bf16", before
    losses = []
    for model in models:
        optimizer = SGD(model.flatten(device), lr=0.01)
        model.precision = "bf16"
        losses.append([])
        for _ in range(3):
            optimizer.zero_grad()
            out = loss(model)
            out.backward()
            optimizer.step()
            losses[-1].append(out.item())
    assert losses[0] == losses[1] and len(set(losses[0])) == 3


@pytest.mark.parametrize("change", [
    lambda model: model.flatten("cpu"),
    lambda model: SGD(nn.Sequential(model[0], model.head)),
    lambda model: setattr(model, "head", nn.Linear(3, 3)),
    lambda model: setattr(model[2], "bias", None),
    lambda model: delattr(model, "head"),
    lambda model: setattr(model, "precision", "bf16"),
])
def test_a_captured_step_is_recorded_again_where_its_arrays_are_others(change):
    model = network()
    model.head = nn.Linear(2, 2)
    SGD(model)
    before = graph._state
    network().flatten("cpu")
    copy.deepcopy(model)
    loss(model).backward()
    model.eval()
    assert graph._state == before
    change(model)
    assert graph._state > before


@pytest.mark.parametrize("change", [
    lambda model: model.flatten("cpu"),
    lambda model: setattr(model[0], "weight", nn.Parameter(np.ones((5, 3)))),
    lambda model: setattr(model[0], "bias", None),
    lambda model: delattr(model[0], "bias"),
    lambda model: model.append(nn.Linear(2, 2)),
    lambda model: model.__setitem__(0, nn.Linear(3, 5)),
    lambda model: setattr(model, "extra", nn.Linear(2, 2)),
])
def test_a_step_looks_at_the_parameters_after_any_change(change):
    model = network()
    ema = EMA(model, 2)
    optimizer = SGD(model, ema=ema)
    optimizer.step()
    change(ema.model)
    with pytest.raises(CudiffError, match="EMA's model was flattened again, or a layer"):
        optimizer.step()
    optimizer = SGD(model)
    optimizer.step()
    change(model)
    with pytest.raises(CudiffError, match="make it anew"):
        optimizer.step()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_a_copied_optimiser(duplicate):
    model = network()
    optimizer = AdamW(model, ema=EMA(model, 2))
    optimizer.step()
    with pytest.raises(CudiffError, match="a copy of an optimiser would train the same parameters: make a new one"):
        copy.copy(optimizer)
    with pytest.raises(CudiffError, match="or this is a copy"):
        duplicate(optimizer).step()
    optimizer.step()


def trained(optimizer):
    """How far the EMA's weights moved in a step."""
    before = optimizer.ema.model.state_dict()
    for parameter in optimizer.model.parameters():
        parameter.grad[...] = 1
    optimizer.step()
    return max(np.abs(value - before[name]).max() for name, value in optimizer.ema.model.state_dict().items())


def test_an_ema_is_of_the_optimisers_own_model():
    model, other = network(), network()
    optimizer = SGD(model, lr=0.1)
    for refused in (lambda: SGD(model, ema=EMA(other, 2)), lambda: setattr(optimizer, "ema", EMA(other, 2))):
        with pytest.raises(CudiffError, match="the EMA was made of another model"):
            refused()
    with pytest.raises(CudiffError, match=r"ema must be EMA\(model, half_life\) or None, not a Sequential"):
        optimizer.ema = other
    assert optimizer.ema is None
    optimizer.step()


def test_an_ema_that_is_set_later_follows():
    model = network()
    optimizer, first, second = SGD(model, lr=0.1), EMA(model, 2), EMA(model, 2)
    optimizer.ema = first
    assert trained(optimizer) > 0
    optimizer.ema, kept = second, first.model.state_dict()
    assert trained(optimizer) > 0
    optimizer.ema, followed = None, second.model.state_dict()
    optimizer.step()
    for ema, values in ((first, kept), (second, followed)):
        for name, value in ema.model.state_dict().items():
            np.testing.assert_array_equal(value, values[name])


def test_an_ema_has_one_optimiser():
    model = network()
    ema = EMA(model, 2)
    before = SGD(model, lr=0.1, ema=ema)
    assert trained(before) > 0
    with pytest.raises(CudiffError, match="betas"):
        AdamW(model, betas=(0.9, 2), ema=ema)
    assert trained(before) > 0  # no other was made
    after = SGD(model, lr=0.1, ema=ema)
    assert trained(after) > 0
    with pytest.raises(CudiffError, match=r"another optimiser was given this one's EMA: make an EMA\(model, ...\) for"):
        before.step()
    before.ema = None
    before.step()


def test_a_list_that_grows_after_it_was_set():
    class Grows(nn.Module):
        def __init__(self, layers):
            super().__init__()
            self.out, self.layers = nn.Linear(2, 2), layers
            layers.append(nn.Linear(2, 2))

    with pytest.raises(TypeError, match="layers: layers in a list have no names: use nn"):
        SGD(Grows([]))
    with pytest.raises(TypeError, match="layers: layers in a list"):
        Grows([[nn.Linear(2, 2)]])
    assert len(SGD(Grows(nn.ModuleList())).model.parameters()) == 4


def test_attributes_of_a_sequential_train():
    model = network()
    model.head = nn.Linear(2, 4)
    assert [name for name, _ in model.named_parameters()][-2:] == ["head.weight", "head.bias"]


@pytest.mark.parametrize("item", [nn.Parameter(np.ones(3)), abs, [nn.ReLU()]])
def test_a_list_of_modules_holds_nothing_else(item):
    for make in (lambda: nn.ModuleList([item]), lambda: nn.Sequential(item), lambda: nn.ModuleList().append(item),
                 lambda: network().__setitem__(0, item)):
        with pytest.raises(TypeError, match="holds modules, not a"):
            make()


def test_what_would_not_be_trained_is_no_attribute():
    model, wanted = network(), Tensor([1.0], requires_grad=True)
    for value in (wanted, [wanted], {"a": (wanted,)}, {nn.ReLU()}, frozenset([nn.Parameter([1.0])]), (nn.ReLU(),)):
        advice = "a tensor .*an nn.Parameter" if value is wanted else "layers in a .* use nn.ModuleList"
        with pytest.raises(TypeError, match=f"head: {advice}"):
            model.head = value
    model.seen, model._hidden, model.fixed = wanted * 2.0, wanted, Tensor([1.0])  # a result, hidden, a constant
    assert len(model.parameters()) == 4


def test_a_module_is_frozen_by_its_method():
    model = network()
    for module in (model, model[0]):
        with pytest.raises(TypeError, match=r"requires_grad_\(False\)"):
            module.requires_grad = False


@pytest.mark.parametrize("late", ["registered", "replaced"])
def test_a_buffer_after_the_ema(late):
    """The average has the buffers of its model, or the optimiser says so."""
    model = network()
    model.register_buffer("seen", Tensor([1.0]))
    ema = EMA(model, 2)
    optimizer = SGD(model, ema=ema)
    optimizer.step()
    if late == "replaced":
        before = graph._state
        model.register_buffer("seen", Tensor([3.0]))
        optimizer.step()
        assert graph._state > before and ema.model.seen.numpy().tolist() == [3]
        return
    model[0].register_buffer("count", Tensor([2.0]))
    for step in (optimizer.step, lambda: SGD(model, ema=ema)):
        with pytest.raises(CudiffError, match=r"after the EMA was made.*unexpected 0.count"):
            step()
    ema = EMA(model, 2)
    SGD(model, ema=ema).step()
    assert ema.model[0].count.numpy().tolist() == [2]


def test_a_buffer_is_an_attribute():
    norm = nn.BatchNorm2d(3)
    held = norm.running_mean
    norm.running_mean = np.array([1, 2, 3])
    assert norm.running_mean is held and norm.state_dict()["running_mean"].tolist() == [1, 2, 3]
    with pytest.raises(TypeError, match="running_mean is a buffer: give the Parameter another name"):
        norm.running_mean = nn.Parameter(np.ones(3))
    for name, kind in (("weight", "Parameter"), ("eps", "float"), ("forward", "method")):
        with pytest.raises(TypeError, match=f"{name} is a {kind} already: give the buffer another name"):
            norm.register_buffer(name, Tensor([1.0]))
    with pytest.raises(CudiffError, match="running_mean is float32, which does not hold every float64 given"):
        norm.running_mean = np.full(3, 1e300)
    with pytest.raises(ValueError, match=r"running_mean is a buffer of shape \(3,\), not \(2,\)"):
        norm.running_mean = np.ones(2)
    with pytest.raises(AttributeError, match="'BatchNorm2d' object has no attribute 'running'"):
        norm.running  # noqa: B018
    norm.register_buffer("running_mean", np.array([4.0]))
    assert norm.running_mean.numpy().tolist() == [4]
    assert sorted(norm.state_dict()) == ["bias", "running_mean", "running_var", "weight"]
    del norm.running_mean
    assert sorted(norm.state_dict()) == ["bias", "running_var", "weight"]


@pytest.mark.parametrize("flat", [False, True])
def test_what_is_no_array_of_numbers(flat):
    model = network()
    if flat:
        model.flatten("cpu")
    weight, state = model[0].weight, model.state_dict()
    for write in (lambda x: setattr(weight, "grad", x), weight.assign,
                  lambda x: model.load_state_dict(state | {"0.weight": x})):
        with pytest.raises(TypeError, match="arrays or Tensors, not a list"):
            write([1.0])
    with pytest.raises(ValueError, match=r"a gradient of shape \(3,\) for a parameter of shape \(5, 3\)"):
        weight.grad = np.ones(3)
    for write in (weight.assign, lambda x: model.load_state_dict(state | {"0.weight": x})):
        with pytest.raises(TypeError, match=r"real numbers .* not complex128"):
            write(np.ones((5, 3), complex))


def test_pytorchs_tensors_are_not_taken_for_arrays():
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=r"not a torch.Tensor: cudiff.convert.from_torch\(state, model.layouts\(\)\) "):
        nn.Conv2d(3, 4, 3).load_state_dict(torch.nn.Conv2d(3, 4, 3).state_dict())


@pytest.mark.parametrize("flat", [False, True])
def test_a_parameter_owns_its_values(flat):
    given, later = np.ones((2, 3), np.float32), np.full((2, 3), 2.0)
    assert all(nn.Parameter(given.astype(dtype)).dtype == np.float32 for dtype in (np.float16, np.float64))
    model = nn.Module()
    model.weight = nn.Parameter(given)
    if flat:
        model.flatten("cpu")
    given[...] = 5
    assert (model.weight.numpy() == 1).all()
    model.weight.data = later
    later[...] = 5
    assert (model.weight.numpy() == 2).all() and model.weight.dtype == np.float32
    with pytest.raises(ValueError, match=r"shape \(4, 1\) to a parameter of shape \(2, 3\)"):
        model.weight.data = np.ones((4, 1), np.float32)


def test_weights_out_of_range_change_nothing():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm2d(2))
    model.register_buffer("count", Tensor(np.int32([3])))
    before = model.state_dict()
    many = {name: np.full(value.shape, 7.0) for name, value in before.items()}
    for name in before:
        for bad, error in ((1e300, CudiffError), (1j, TypeError), ("a", TypeError)):
            with pytest.raises(error, match=f"{name} is .*, which does not hold" if error is CudiffError else "real"):
                model.load_state_dict(many | {name: np.full(before[name].shape, bad)})
            np.testing.assert_equal(model.state_dict(), before)
    with pytest.raises(CudiffError, match="count is int32, which does not hold every float64 given"):
        model.load_state_dict(many | {"count": np.array([1.5])})
    with pytest.raises(CudiffError, match="a parameter is float32, which does not hold"):
        model[0].weight.data = np.full((2, 2), -1e300)
    many["0.weight"][0] = np.inf, np.nan  # as they were saved
    model.load_state_dict(many)
    np.testing.assert_equal(model.state_dict(), many)
    optimizer = AdamW(model)
    state = optimizer.state_dict()
    with pytest.raises(CudiffError, match=r"exp_avg_sq.0.bias is float32"):
        optimizer.load_state_dict({name: value + 1 for name, value in state.items()}
                                  | {"exp_avg_sq.0.bias": np.full(2, 1e300)})
    np.testing.assert_equal(optimizer.state_dict(), state)
    with pytest.raises(CudiffError, match="a gradient is float32, which does not hold every float64 given"):
        model[0].weight.grad = np.full((2, 2), 1e300)
    for given in (np.full(2, 1e300), [1.0, 1e300]):
        with pytest.raises(CudiffError, match="a parameter is float32, which does not hold every float64 given"):
            nn.Parameter(given)


def test_modules_are_there_after_import_cudiff():
    code = "import cudiff; cudiff.optim.AdamW, cudiff.data.Dataset, cudiff.diffusion.EDMLoss, cudiff.models.build;" \
           "cudiff.convert.from_torch, cudiff.checkpoint.load_checkpoint"  # which messages name
    subprocess.run([sys.executable, "-c", code], check=True)
    assert {"convert", "optim", "data", "diffusion", "models", "plot"} <= set(dir(cudiff))


def test_a_leaf_changes_in_place_within_no_grad(device):
    """A loop over tensors names each anew: what it changes is the tensor, or nothing would be trained."""
    x = Tensor(X, device=device)
    weights = [Tensor(np.ones(3, np.float32), requires_grad=True, device=device),
               Tensor(np.float32(0), requires_grad=True, device=device)]
    first, before = weights[0], weights[0].data
    losses = []
    for _ in range(3):
        for weight in weights:
            weight.zero_grad()
        out = cudiff.square(x @ weights[0] + weights[1]).mean()
        again, last = (weights[0] * weights[0]).sum(), weights[0].numpy().copy()
        out.backward()
        with cudiff.no_grad():
            for weight in weights:
                weight -= 0.05 * Tensor(weight.grad)
        losses.append(out.item())
    assert losses[0] > losses[1] > losses[2] and weights[0] is first and first.requires_grad and first.is_leaf
    kept = first.numpy().copy()
    first.grad = None
    with cudiff.no_grad():
        first += 1.0
        first *= 2
        first /= 4
    np.testing.assert_allclose(first.numpy(), (kept + 1) / 2, rtol=1e-6)
    again.backward()
    np.testing.assert_allclose(Tensor(first.grad).numpy(), 2 * last, rtol=1e-6)  # of the values that it was made with
    assert Tensor(before).numpy().tolist() == [1, 1, 1]
    with pytest.raises(RuntimeError, match=r"^a leaf that requires a gradient changes in place only within cudiff"):
        first -= 1.0
    with pytest.raises(ValueError, match=r"shape \(3,\) does not change to \(6, 3\) in place"), cudiff.no_grad():
        first += x


def test_other_tensors_are_named_anew(device):
    x = Tensor(np.float32([1, 2]), requires_grad=True, device=device)
    out = other = x * 2
    out += 1
    out *= out
    assert other.numpy().tolist() == [2, 4] and out.numpy().tolist() == [9, 25]
    out.sum().backward()
    assert Tensor(x.grad).numpy().tolist() == [12, 20]


def test_a_captured_change_writes_to_the_tensor(host_of, monkeypatch):
    host = host_of(True)
    x = Tensor(host.zeros(3, np.float32), requires_grad=True)
    data = x.data
    monkeypatch.setattr(host.cuda.get_current_stream(), "is_capturing", lambda: True)
    with cudiff.no_grad():
        x -= 1.0
    assert x.data is data


def test_apply_reaches_every_module():
    model, seen = network(), []
    assert model.apply(lambda module: seen.append(module)) is model
    assert seen == [*model, model]


def test_values_as_lists(device):
    assert Tensor(np.float32([[1, 2.5]]), device=device).tolist() == [[1.0, 2.5]]
    assert Tensor(np.array(3), device=device).tolist() == 3


def test_no_array_is_made_of_a_gradients_tensor_in_silence():
    """NumPy's functions of lists, and SciPy's, make arrays without asking: a part of a loss would not be trained."""
    x = Tensor(np.ones((2, 2)), requires_grad=True)
    for lost in (lambda x: np.mean([x, x]), np.asarray, lambda x: np.array([x[0], x[1]]), lambda x: np.ones(2).dot(x)):
        with pytest.raises(TypeError, match="an array would lose this tensor's gradient: call"):
            lost(x)
        lost(x.detach())
    with pytest.raises(TypeError, match="would lose this tensor's gradient"):
        cudiff.grad(lambda x: cudiff.sum(x) + np.linalg.det(np.asarray(x)))(np.ones((2, 2)))
    assert np.stack([x, x]).requires_grad and np.asarray(x.numpy()).shape == (2, 2)


def test_a_part_of_a_sequential_is_one():
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    features, head = model[:-1], model[-1]
    assert type(features) is nn.Sequential and [*features, head] == [*model]
    np.testing.assert_array_equal(head(features(X)).numpy(), model(X.tolist()).numpy())
    layers = nn.ModuleList([nn.ReLU(), None, nn.ReLU()])[1:]
    assert type(layers) is nn.ModuleList and layers[0] is None and len(layers) == 2


def test_buffers_are_listed_as_parameters_are():
    norm = nn.BatchNorm2d(2)
    assert norm.buffers() == [norm.running_mean, norm.running_var] and nn.Dropout().p == 0.5


@pytest.mark.parametrize("name, told", [
    ("view", r"a Tensor has no 'view': write x.reshape\(shape\)"), ("viev", "'Tensor' object has no attribute 'viev'$"),
])
def test_pytorchs_methods_are_told_by_numpys_names(name, told):
    with pytest.raises(AttributeError, match=told):
        getattr(Tensor(np.zeros((2, 3))), name)


def test_every_method_of_pytorch_that_has_advice_is_none_of_ours():
    x = Tensor(np.arange(6.0).reshape(2, 3))
    assert not [name for name in PYTORCH if hasattr(Tensor, name)] and not set(PYTORCH) & set(dir(x))
    assert "clone" in dir(type("Cloned", (Tensor,), {"clone": Tensor.tolist})(x))
    given = dict(x=x, y=x.T, np=np, shape=(2, 3), mask=x.numpy() > 2, value=-1.0, axes=(1, 0), axis=0, k=2)
    given |= {"dtype": "float16"}
    for name, instead in PYTORCH.items():
        if name not in ("cuda", "topk"):
            assert isinstance(eval(instead.split(":")[0], given), Tensor | int), name
    given["x"] = x[1]
    assert eval(PYTORCH["topk"], given).numpy().tolist() == [5.0, 4.0]
