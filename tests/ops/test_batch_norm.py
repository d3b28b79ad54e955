import numpy as np
import pytest

from cudiff.ops.batch_norm import batch_norm
from cudiff.tensor import Tensor
from tests.check import check_op, relative_error, torch

SHAPES = [(4, 3, 5, 8), (2, 2, 2, 3), (1, 7, 9, 64), (6, 5), (2, 40, 40, 16), (3, 2, 1, 300)]


def inputs(rng, shape):
    channels = shape[-1]
    return (rng.standard_normal(shape) * 2 + 0.5, 1 + 0.3 * rng.standard_normal(channels),
            rng.standard_normal(channels), rng.standard_normal(channels), 0.5 + rng.random(channels))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_batch_norm(device, rng, shape, training):
    x, weight, bias, mean, var = inputs(rng, shape)

    def running(like):
        dtype = np.float64 if like.dtype == np.float64 else np.float32
        return [Tensor(array.astype(dtype), device=device if like.device == "cuda" else "cpu") for array in (mean, var)]

    check_op(
        lambda x, w, b: batch_norm(x, w, b, *running(x), training),
        x, weight, bias, device=device, dtypes=("float32", "bfloat16", "float16"), fp32_inputs=(1, 2),
        torch_fn=lambda x, w, b: torch.nn.functional.batch_norm(
            x.movedim(-1, 1), torch.tensor(mean), torch.tensor(var), w, b, training
        ).movedim(1, -1),
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_running_statistics(device, rng, shape):
    x, weight, bias, mean, var = (array.astype(np.float32) for array in inputs(rng, shape))
    tensors = [Tensor(array.copy(), device=device) for array in (x, weight, bias, mean, var)]
    for _ in range(2):
        batch_norm(*tensors, training=True, momentum=0.25)
    batch_norm(*tensors, training=False)
    rows = x.reshape(-1, shape[-1]).astype(np.float64)
    for _ in range(2):
        mean, var = 0.75 * mean + 0.25 * rows.mean(0), 0.75 * var + 0.25 * rows.var(0, ddof=1)
    assert relative_error(tensors[3].numpy(), mean) < 2e-5
    assert relative_error(tensors[4].numpy(), var) < 2e-5


def test_shapes_that_do_not_fit():
    vector = Tensor(np.zeros(3))
    with pytest.raises(ValueError, match="running_var has shape"):
        batch_norm(Tensor(np.zeros((2, 3))), vector, vector, vector, Tensor(np.zeros(2)), True)
