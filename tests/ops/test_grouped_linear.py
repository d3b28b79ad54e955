import functools
import importlib

import ml_dtypes
import numpy as np
import pytest

from cudiff import grad, ops
from cudiff.ops.grouped_linear import GROUPS, grouped_linear
from cudiff.tensor import Tensor
from tests.check import check_op, relative_error, torch


def apply(x, *parameters, silu=False):
    """grouped_linear, its inputs in one row: x, all weights, all biases."""
    return grouped_linear(x, parameters[: len(parameters) // 2], parameters[len(parameters) // 2 :], silu)


def torch_grouped_linear(x, *parameters, silu=False):
    groups = len(parameters) // 2
    outs = (torch.nn.functional.linear(x, w, b) for w, b in zip(parameters[:groups], parameters[groups:], strict=True))
    return tuple(torch.nn.functional.silu(out) if silu else out for out in outs)


def random_parameters(rng, features, outputs):
    return [rng.standard_normal((k, features)) for k in outputs] + [rng.standard_normal(k) for k in outputs]


def tensors(arrays, device):
    return [Tensor(array.astype(np.float32), requires_grad=True, device=device) for array in arrays]


@pytest.mark.parametrize("silu", [False, True], ids=["", "silu"])
@pytest.mark.parametrize("n, features, outputs", [
    (1, 1, (1,)),
    (3, 5, (7, 1, 2)),
    (32, 256, (64, 128, 192, 256, 64)),
    (32, 256, (64, 10, 128)),
    (33, 68, (36, 100)),
    (9, 68, (36, 100)),
    (2, 1156, (20, 9)),
    (2, 1156, (20, 12)),
    (8, 300, (4, 36)),
    (7, 131, (33, 3)),
    (130, 67, (33, 129)),
    (1, 256, (64, 128)),
    (130, 140, (2900, 2883)),
    (130, 70, tuple(1 + g % 9 for g in range(45))),
    (5, 12, tuple(1 + g % 9 for g in range(GROUPS + 3))),
], ids=str)
def test_grouped_linear(device, rng, n, features, outputs, silu):
    """The last case is of more layers than a launch takes; on the CPU, where they take turns, of eight. The two before
    it have tiles of 64: of the outputs and the weights' gradients, and of the input's."""
    outputs = outputs if device == "cuda" else outputs[:8]
    arrays = rng.standard_normal((n, features)), *random_parameters(rng, features, outputs)
    fn, torch_fn = (functools.partial(of, silu=silu) for of in (apply, torch_grouped_linear))
    check_op(fn, *arrays, device=device, torch_fn=torch_fn, dtypes=("float32",))


def test_up_to_four_rows_are_a_pass_over_the_weights(host_of):
    host = host_of(False)
    for rows, name in ((0, "forward"), (1, "few_rows"), (4, "few_rows"), (5, "forward")):
        host.launches.clear()
        x, weight, bias = (Tensor(host.zeros(size, np.float32)) for size in ((rows, 12), (20, 12), (20,)))
        grouped_linear(x, [weight], [bias])
        assert host.launches == [("grouped_linear", name)]


def test_tiles_are_large_where_two_of_them_come_to_a_multiprocessor(monkeypatch):
    module = importlib.import_module("cudiff.ops.grouped_linear")
    for count, problem, side in ((132, (65, 64, 132), 64), (132, (65, 64, 131), 32), (131, (65, 64, 131), 64),
                                 (132, (33, 65, 132), 64), (132, (32, 6400, 64), 32)):
        monkeypatch.setattr(module, "multiprocessors", lambda count=count: count)
        assert module._side(*problem) == side


@pytest.mark.parametrize("silu", [False, True], ids=["", "silu"])
def test_parts_are_columns_of_the_whole(device, rng, silu):
    """Also where some parts, and all of a layer, have no gradient; twice, so that gradients are added."""
    parameters = random_parameters(rng, 20, (24, 6, 12))
    results = []
    for parts in (1, 3):
        inputs = tensors([rng.standard_normal((5, 20)) if parts == 1 else results[0][1], *parameters], device)
        x, *rest = inputs
        for _ in range(2):
            outs = grouped_linear(x, rest[:3], rest[3:], silu, parts)
            whole = [ops.concatenate(outs[first : first + parts], axis=1) for first in range(0, 3 * parts, parts)]
            used = [whole[0][:, 8:16], whole[2][:, :8]] if parts == 1 else [outs[1], outs[6], outs[7]]
            sum((out * out).sum() for out in used).backward()
        gradients = [None if t.grad is None else Tensor(t.grad).numpy() for t in inputs]
        results.append(([out.numpy() for out in whole], x.numpy(), gradients))
    (first, _, expected), (second, _, gradients) = results
    assert all(np.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(first, second, strict=True))
    assert [g is None for g in gradients] == [False, False, True, False, False, True, False]
    for g, (a, b) in enumerate(zip(expected, gradients, strict=True)):
        assert b is None or np.allclose(a, b, rtol=1e-4, atol=1e-4), g


def test_parts_are_equal(rng):
    x, weight, bias = (Tensor(rng.standard_normal(shape)) for shape in ((2, 3), (7, 3), (7,)))
    with pytest.raises(ValueError, match="7 outputs do not make 2 equal parts"):
        grouped_linear(x, [weight], [bias], parts=2)


@pytest.mark.parametrize("features", [24, 23])
def test_gradients_add_to_those_there(device, rng, features):
    inputs = tensors([rng.standard_normal((40, features)), *random_parameters(rng, features, (16, 72))], device)
    held = []
    for _ in range(2):
        first, second = apply(*inputs)
        (first.sum() + (second * second).sum()).backward()
        held.append([(t.grad, Tensor(t.grad).numpy().copy()) for t in inputs])
    for (array, once), (same, twice) in zip(*held, strict=True):
        assert array is same
        assert relative_error(twice, 2 * once) < 1e-6


@pytest.mark.parametrize("silu", [False, True], ids=["", "silu"])
@pytest.mark.parametrize("used", [(0,), (2,), (0, 2)], ids=str)
def test_unused_outputs_have_no_gradient(device, rng, used, silu):
    inputs = tensors([rng.standard_normal((8, 12)), *random_parameters(rng, 12, (4, 20, 8))], device)
    outs = apply(*inputs, silu=silu)
    sum((outs[g] * outs[g]).sum() for g in used).backward()
    expected, z = 0, apply(*inputs)
    for g in range(3):
        weight, bias = inputs[1 + g], inputs[4 + g]
        assert (weight.grad is not None) == (bias.grad is not None) == (g in used)
        if g in used:
            gate = 1 / (1 + np.exp(-z[g].numpy()))
            dout = 2 * outs[g].numpy() * (gate + outs[g].numpy() * (1 - gate) if silu else 1)
            expected = expected + dout @ weight.numpy()
            assert relative_error(Tensor(weight.grad).numpy(), dout.T @ inputs[0].numpy()) < 1e-5
            assert relative_error(Tensor(bias.grad).numpy(), dout.sum(0)) < 1e-5
    assert relative_error(Tensor(inputs[0].grad).numpy(), expected) < 1e-5


@pytest.mark.parametrize("wanted", [(0,), (1,), (4,), (2, 3)], ids=str)
def test_only_wanted_gradients_are_made(device, rng, wanted):
    inputs = tensors([rng.standard_normal((8, 12)), *random_parameters(rng, 12, (4, 20))], device)
    for i, tensor in enumerate(inputs):
        tensor.requires_grad = i in wanted
    first, second = apply(*inputs)
    (first.sum() + second.sum()).backward()
    assert [i for i, tensor in enumerate(inputs) if tensor.grad is not None] == list(wanted)
    assert all(np.isfinite(Tensor(inputs[i].grad).numpy()).all() for i in wanted)


def test_a_gradient_of_the_gradient(device, rng):
    x, *parameters = tensors([rng.standard_normal((4, 6)), *random_parameters(rng, 6, (4, 8))], device)

    def twice(outs):
        slope = grad(lambda x: sum(out.sum() for out in outs(x)))
        return grad(lambda x: (slope(x) ** 2).sum())(x)

    def unfused(x):
        return [ops.silu(ops.linear(x, *layer)) for layer in zip(parameters[:2], parameters[2:], strict=True)]

    expected = twice(unfused).numpy()
    assert np.abs(expected).max() > 0.01
    found = twice(lambda x: grouped_linear(x, parameters[:2], parameters[2:], silu=True, parts=2))
    assert relative_error(found.numpy(), expected) < 1e-5


def test_slices_of_a_longer_buffer(device, rng):
    """A weight that starts at no multiple of 16 bytes, and its gradient too."""
    x, weight, bias = tensors([rng.standard_normal((8, 12)), *random_parameters(rng, 12, (20,))], device)
    buffer, grads = (Tensor(rng.standard_normal(241).astype(np.float32), device=device).data for _ in range(2))
    expected = Tensor(grads).numpy()[1:].reshape(20, 12) + np.ones((8, 20)).T @ x.numpy()
    weight.data, weight.grad = (flat[1:].reshape(20, 12) for flat in (buffer, grads))
    (out,) = grouped_linear(x, [weight], [bias])
    assert relative_error(out.numpy(), x.numpy() @ weight.numpy().T + bias.numpy()) < 1e-6
    out.sum().backward()
    assert relative_error(Tensor(grads).numpy()[1:].reshape(20, 12), expected) < 1e-6


def test_low_precision(rng, device):
    arrays = rng.standard_normal((4, 8)), *random_parameters(rng, 8, (3, 5))
    low = [Tensor(array.astype(ml_dtypes.bfloat16), requires_grad=True, device=device) for array in arrays]
    outs = apply(*low)
    (outs[0].sum() + outs[1].sum()).backward()
    assert all(out.dtype == ml_dtypes.bfloat16 for out in outs)
    x, *weights = (t.numpy().astype(np.float64) for t in low[:3])
    for out, weight, bias in zip(outs, weights, low[3:], strict=True):
        assert relative_error(out.numpy(), x @ weight.T + bias.numpy().astype(np.float64)) < 8e-3
    assert relative_error(Tensor(low[0].grad).numpy(), np.broadcast_to(sum(w.sum(0) for w in weights), x.shape)) < 8e-3
    for weight in low[1:3]:
        assert relative_error(Tensor(weight.grad).numpy(), np.broadcast_to(x.sum(0), weight.shape)) < 8e-3


def test_sizes_that_do_not_agree_are_refused(rng):
    x, weight, bias = tensors([rng.standard_normal((4, 8)), *random_parameters(rng, 8, (3,))], "cpu")
    for weights, biases in ([], []), ([weight], []), ([weight], [x]), ([bias], [bias]), ([weight] * 2, [bias] * 2):
        with pytest.raises(ValueError, match="grouped_linear"):
            grouped_linear(x, weights, biases)


@pytest.mark.gpu
def test_two_runs_are_bit_equal(rng):
    arrays = rng.standard_normal((32, 256)), *random_parameters(rng, 256, (64, 128, 256))
    results = []
    for _ in range(2):
        inputs = tensors(arrays, "cuda")
        outs = apply(*inputs)
        sum((out * out).sum() for out in outs).backward()
        results.append([out.numpy() for out in outs] + [Tensor(t.grad).numpy() for t in inputs])
    for first, second in zip(*results, strict=True):
        assert np.array_equal(first, second)
