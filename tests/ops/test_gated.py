"""Linear layers whose result is multiplied by a gate beside a residual."""

import ml_dtypes
import numpy as np
import pytest

from cudiff import Tensor, ops
from tests.check import check_needed, check_op, relative_error, torch

SHAPES = [(3, 8), (2, 5, 24), (3, 2, 3, 320), (2, 70, 33), (300, 3, 16), (1, 1031, 8), (2, 200, 136)]


def arrays_of(rng, shape, inputs):
    """x, weight, bias, residual and gate of a result of this shape."""
    outputs = shape[-1]
    return [rng.standard_normal((*shape[:-1], inputs)), rng.standard_normal((outputs, inputs)) / inputs**0.5,
            rng.standard_normal(outputs), rng.standard_normal(shape), rng.standard_normal((shape[0], outputs))]


@pytest.mark.parametrize("inputs", [16, 7])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_gate_beside_a_residual(device, rng, shape, inputs):
    def plain(x, weight, bias, residual, gate):
        gate = gate.reshape(shape[0], *[1] * (len(shape) - 2), shape[-1])
        return torch.addcmul(residual, gate, torch.nn.functional.linear(x, weight, bias))

    check_op(ops.linear, *arrays_of(rng, shape, inputs), device=device, dtypes=("float32", "bfloat16", "float16"),
             fp32_inputs=(2,), tolerance=2, torch_fn=plain)


@pytest.mark.parametrize("shape", [(3, 5, 24), (2, 4, 4, 40), (3, 16)], ids=str)
@pytest.mark.parametrize("dtype, allowed", [(np.float32, 2e-5), (ml_dtypes.bfloat16, 1.6e-2)])
def test_without_a_backward_to_come(device, rng, shape, dtype, allowed):
    arrays = [array.astype(dtype) for array in arrays_of(rng, shape, 16)]
    x, weight, bias, residual, gate = (array.astype(float) for array in arrays)
    found = ops.linear(*(Tensor(array, device=device) for array in arrays)).numpy()
    gate = gate.reshape(shape[0], *[1] * (len(shape) - 2), shape[-1])
    assert relative_error(found, residual + gate * (x @ weight.T + bias)) < allowed


def test_gradients_are_added_to(device, rng):
    """Of operands that have another user, and of a residual that is the input itself."""
    x, weight, bias, _, gate = arrays_of(rng, (2, 6, 16), 16)

    def twice(x, weight, bias, gate):
        first = ops.linear(x, weight, bias, x, gate)
        return first + ops.linear(x * x, weight * 2.0, bias, x, gate * 2.0) + ops.reshape(gate, (2, 1, 16))

    check_op(twice, x, weight, bias, gate, device=device, dtypes=("float32",))


@pytest.mark.parametrize("needed", [{3}, {4}, {0, 2}, {1}])
def test_only_what_is_needed_has_a_gradient(device, rng, needed):
    check_needed(ops.linear, arrays_of(rng, (2, 6, 16), 16), needed, device)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_the_gates_gradient_is_one_launch(host_of, dtype):
    """Of 128 images of 256 rows alone, whose blocks are enough; of one image its tiles are added up with other sums."""
    host = host_of(True)
    for images in (128, 1):
        shapes = (images, 256, 1152), (1152, 1152), (1152,), (images, 256, 1152), (images, 1152)
        tensors = [Tensor(host.zeros(shape, np.float32 if i in (2, 4) else dtype), requires_grad=True)
                   for i, shape in enumerate(shapes)]
        out = ops.linear(*tensors)
        before = len(host.launches)
        out.backward(out.data)
        assert [name for stem, name in host.launches[before:] if stem == "gated"] == ["backward"]
        assert host.launches[before:].count(("accumulate", "sum_rows")) == 1


def test_a_gate_that_does_not_fit_is_refused(rng):
    x, weight, residual = (Tensor(rng.standard_normal(shape)) for shape in ((2, 3, 4), (5, 4), (2, 3, 5)))
    for given, gate in ((residual, (5,)), (residual, (2, 3, 5)), (None, (2, 5))):
        with pytest.raises(ValueError, match="the gate"):
            ops.linear(x, weight, None, given, Tensor(rng.standard_normal(gate)))


@pytest.mark.gpu
def test_two_runs_are_equal_to_the_bit(rng):
    found = []
    arrays = [array.astype(np.float32) for array in arrays_of(rng, (3, 777, 200), 64)]
    for _ in range(2):
        tensors = [Tensor(array, requires_grad=True, device="cuda") for array in arrays]
        out = ops.linear(*tensors)
        out.backward(out.data)
        found.append([out.numpy().tobytes(), *(Tensor(t.grad).numpy().tobytes() for t in tensors)])
    assert found[0] == found[1]
