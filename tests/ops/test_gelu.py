"""GELU and the error function that NumPy lacks."""

import math

import numpy as np
import pytest

from cudiff import Tensor, ops
from cudiff.ops.gelu import erf
from tests.check import check_op


def test_erf_agrees_with_the_standard_library():
    x = np.linspace(-8, 8, 2001)
    assert np.abs(erf(x) - [math.erf(v) for v in x]).max() < 3e-15


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_both_forms(device, rng, approximate):
    """Against their formulas, far from 0 too."""
    x = np.concatenate([rng.standard_normal(50) * 3, [0, -30, 30, 1e-6]])
    exact = [v * 0.5 * (1 + math.erf(v / math.sqrt(2))) for v in x]
    tanh = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    assert np.allclose(ops.gelu(Tensor(x), approximate).numpy(), exact if approximate == "none" else tanh, atol=1e-6)
    check_op(lambda t: ops.gelu(t, approximate), x, device=device)


def test_another_approximation_is_refused():
    with pytest.raises(ValueError, match='"none" or "tanh"'):
        ops.gelu(Tensor([1.0]), "sigmoid")
