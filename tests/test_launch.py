"""What a kernel gets for each kind of Python argument: its size must be that of the parameter in the .cu file."""

import numpy as np
import pytest

from cudiff.cuda.module import _argument
from cudiff.tensor import Tensor


@pytest.mark.parametrize("value, dtype", [
    (3, np.int32), (True, np.int32), (0.5, np.float32), (None, np.uint64), (np.float64(0.5), np.float64),
    (np.int64(3), np.int64), (np.uint32(3), np.uint32),
])
def test_argument_types(value, dtype):
    assert type(_argument(value)) is dtype


def test_tensors_pass_their_array():
    tensor = Tensor(np.zeros(2, np.float32))
    assert _argument(tensor) is tensor.data
