import numpy as np
import pytest

import cudiff
from cudiff import Tensor
from tests.check import check_op

ANY = lambda x: x  # noqa: E731
BELOW_ONE = lambda x: 0.9 * np.tanh(x)  # noqa: E731
DOMAINS = {
    "sin": ANY, "cos": ANY, "tan": np.tanh, "arcsin": BELOW_ONE, "arccos": BELOW_ONE, "arctan": ANY, "sinh": ANY,
    "cosh": ANY, "tanh": ANY, "arcsinh": ANY, "arccosh": lambda x: 2 + np.abs(x), "arctanh": BELOW_ONE,
}


@pytest.mark.parametrize("shape", [(), (7,), (2, 33, 17)], ids=str)
@pytest.mark.parametrize("name", DOMAINS)
def test_function(name, shape, device, rng):
    x = np.asarray(DOMAINS[name](rng.standard_normal(shape)))
    check_op(getattr(cudiff, name), x, device=device, torch_fn=lambda x: getattr(x, name)(),
             dtypes=("float32", "bfloat16", "float16"))


@pytest.mark.parametrize("name", DOMAINS)
def test_a_gradient_is_added_to_what_is_there(name, device, rng):
    fn = getattr(cudiff, name)
    x = DOMAINS[name](rng.standard_normal((5, 19)))
    check_op(lambda x: fn(x) + fn(x * 1.0) * 2.0 + x, x, device=device, dtypes=("float32",))


@pytest.mark.parametrize("name", DOMAINS)
def test_it_is_numpys_function_on_tensors(name, device):
    x = np.float32(DOMAINS[name](np.linspace(-1, 1, 5)))
    out = getattr(np, name)(Tensor(x, device=device))
    assert isinstance(out, Tensor) and out.dtype == np.float32
    np.testing.assert_allclose(out.numpy(), getattr(np, name)(x), rtol=1e-6, atol=1e-7)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name, outside", [("arcsin", 1.5), ("arccos", -1.5), ("arctanh", 1.5), ("arccosh", 0.5)])
def test_outside_of_the_domain_it_is_nan(name, outside, device):
    assert np.isnan(getattr(cudiff, name)(Tensor([outside], device=device)).numpy()).all()


def test_ends_of_the_domains(device):
    for name, x, expected in [("arcsin", 1, np.pi / 2), ("arccos", -1, np.pi), ("arccosh", 1, 0), ("cosh", 0, 1),
                              ("arctan", np.inf, np.pi / 2), ("arcsinh", -np.inf, -np.inf), ("sinh", -np.inf, -np.inf)]:
        out = getattr(cudiff, name)(Tensor([float(x)], device=device))
        assert out.item() == np.float32(expected), name
