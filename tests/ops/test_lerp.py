import numpy as np
import pytest

from cudiff import Tensor, lerp
from tests.check import check_op


@pytest.mark.parametrize("shapes", [
    ((3, 5), (3, 5), (3, 5)), ((2, 3, 4, 8), (2, 3, 4, 8), (2, 1, 1, 1)), ((7,), (), (1,)), ((4, 1), (1, 6), (4, 6)),
], ids=str)
def test_lerp(shapes, device, rng):
    operands = [np.asarray(rng.standard_normal(shape)) for shape in shapes]
    check_op(lerp, *operands, device=device, torch_fn=lambda a, b, w: a + (b - a) * w,
             dtypes=("float32", "bfloat16", "float16"))
    for number in (0.25, -3, 1):
        check_op(lambda a, b, number=number: lerp(a, b, number), *operands[:2], device=device,
                 torch_fn=lambda a, b, number=number: a + (b - a) * number)


def test_lerp_of_numbers_and_integers(device):
    weight = Tensor(np.float32([0, 0.5, 1, 2]), device=device)
    np.testing.assert_array_equal(lerp(1, 3, weight).numpy(), [1, 2, 3, 5])
    assert lerp(Tensor(np.int32([1, 2]), device=device), 4, 0.5).tolist() == [2.5, 3.0]
    with pytest.raises(ValueError):
        lerp(weight, Tensor(np.zeros(3, np.float32), device=device), 0.5)
