import numpy as np
import pytest

from cudiff.ops import edm_mix
from cudiff.tensor import Tensor
from tests.check import TOLERANCE, relative_error


@pytest.mark.parametrize("shape", [(3, 4, 6, 2), (2, 3, 5, 1), (40, 64, 64, 3)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_input_and_target(device, rng, shape, dtype):
    images, noise = (Tensor(rng.standard_normal(shape), dtype="float32").astype(dtype) for _ in range(2))
    draw = Tensor(rng.standard_normal(shape[0]), dtype="float32")
    y, z = (t.astype("float32").numpy().astype(np.float64) for t in (images, noise))
    sigma = np.exp(-1.2 + 1.2 * draw.numpy().astype(np.float64)).reshape(-1, 1, 1, 1)
    total = sigma**2 + 0.25
    c_skip, c_out, c_in = 0.25 / total, 0.5 * sigma / np.sqrt(total), 1 / np.sqrt(total)  # EDM, Table 1
    x, target, log_sigma = edm_mix(*(t.to(device) for t in (images, noise, draw)), -1.2, 1.2, 0.5)
    assert x.dtype == target.dtype == images.dtype and log_sigma.dtype == np.float32
    assert relative_error(x.astype("float32").numpy(), c_in * (y + sigma * z)) < TOLERANCE[x.dtype]
    expected = (y - c_skip * (y + sigma * z)) / c_out
    assert relative_error(target.astype("float32").numpy(), expected) < TOLERANCE[x.dtype]
    assert relative_error(log_sigma.numpy(), np.log(sigma).ravel()) < 1e-6


def test_operands_must_agree():
    x = Tensor(np.zeros((2, 3), np.float32))
    with pytest.raises(ValueError, match="edm_mix"):
        edm_mix(x, x, Tensor(np.zeros(3, np.float32)), 0, 1, 0.5)
