import ml_dtypes
import numpy as np
import pytest

from cudiff import Tensor, ops
from cudiff.ops.gated import gated
from tests.check import check_op, torch

SHAPES = [(3, 8), (2, 5, 24), (3, 2, 3, 320), (2, 70, 33), (300, 3, 16), (1, 1031, 8), (2, 200, 136)]


def arrays_of(rng, shape):
    return rng.standard_normal(shape), rng.standard_normal((shape[0], shape[-1])), rng.standard_normal(shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gated(device, rng, shape):
    def plain(residual, gate, y):
        return torch.addcmul(residual, gate.reshape(shape[0], *[1] * (len(shape) - 2), shape[-1]), y)

    check_op(gated, *arrays_of(rng, shape), device=device, dtypes=("float32", "bfloat16", "float16"), fp32_inputs=(1,),
             torch_fn=plain)


def test_gradients_are_added_to(device, rng):
    """Of a gate and a y that have another user, and of a residual that is y itself."""
    _, gate, y = arrays_of(rng, (2, 6, 16))

    def twice(gate, y):
        return gated(y, gate, y) + gated(y * y, gate * 2.0, y) + ops.reshape(gate, (2, 1, 16))

    check_op(twice, gate, y, device=device, fp32_inputs=(0,), dtypes=("float32",))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a_backward_is_one_launch_and_another_where_tiles_are_many(host_of, dtype):
    """Of 128 images of 256 rows one, whose blocks are enough; of one image the tiles are summed."""
    host = host_of(True)
    for images, launches in ((128, ["backward"]), (1, ["backward", "sum_tiles"])):
        residual, gate, y = (Tensor(host.zeros(shape, kind), requires_grad=True) for shape, kind in (
            ((images, 256, 1152), dtype), ((images, 1152), np.float32), ((images, 256, 1152), dtype)))
        out = gated(residual, gate, y)
        before = len(host.launches)
        out.backward(out.data)
        found = [name for stem, name in host.launches[before:] if stem == "gated"]
        assert found == launches


@pytest.mark.gpu
def test_two_runs_are_equal_to_the_bit(rng):
    found = []
    arrays = [array.astype(np.float32) for array in arrays_of(rng, (3, 777, 200))]
    for _ in range(2):
        residual, gate, y = (Tensor(array, requires_grad=True, device="cuda") for array in arrays)
        out = gated(residual, gate, y)
        out.backward(out.data)
        found.append([out.numpy().tobytes(), *(Tensor(t.grad).numpy().tobytes() for t in (gate, y))])
    assert found[0] == found[1]
