import ml_dtypes
import numpy as np
import pytest

import cudiff
from cudiff import Tensor
from cudiff.ops.cast import as_index, as_wide, require_float, require_floats, result_dtype

BF16 = np.dtype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("dtype", ["float32", "float16", ml_dtypes.bfloat16, "int32", "int64", "uint8"])
@pytest.mark.parametrize("source", ["float32", "float16", ml_dtypes.bfloat16, "int32", "int64", "uint8"])
@pytest.mark.parametrize("shape", [(), (1,), (13, 7), (3, 257), (5, 1031)], ids=str)
def test_values(source, dtype, shape, device, rng):
    """Of the last two shapes a thread on CUDA has several elements: of one block, and of several."""
    x = rng.uniform(0, 100, shape).astype(source)
    out = Tensor(x, device=device).astype(dtype)
    assert out.dtype == dtype and np.array_equal(out.numpy(), x.astype(dtype))


@pytest.mark.parametrize("source", ["float32", ml_dtypes.bfloat16, "int32", "int64", "uint8"])
def test_whether_an_element_is_zero(source, device):
    x = (np.arange(3001) % 3).astype(source)
    out = Tensor(x, device=device).astype(bool)
    assert out.dtype == bool and np.array_equal(out.numpy(), np.arange(3001) % 3 != 0)


def test_same_dtype_is_the_same_tensor(device):
    x = Tensor(np.ones(3, np.float32), device=device)
    assert x.astype("float32") is x


def test_gradient_has_the_input_dtype(device, rng):
    x = Tensor(rng.standard_normal((4, 5)).astype(np.float32), requires_grad=True, device=device)
    low = x.astype(BF16)
    dout = rng.standard_normal((4, 5)).astype(BF16)
    low.backward(Tensor(dout, device=device))
    assert x.grad.dtype == np.float32
    assert np.array_equal(Tensor(x.grad).numpy(), dout.astype(np.float32))


def test_gradient_is_added_to_what_is_there(device, rng):
    x = Tensor(rng.standard_normal(9).astype(np.float32), requires_grad=True, device=device)
    total = x.astype(BF16).astype("float32") + x + x.astype("float16").astype("float32")
    total.backward(Tensor(np.ones(9, np.float32), device=device))
    assert Tensor(x.grad).numpy().tolist() == [3] * 9


def test_mixed_dtypes():
    def tensor(dtype):
        return Tensor(np.zeros(1, dtype))

    assert result_dtype(tensor(BF16), tensor(np.float32)) == np.float32
    assert result_dtype(tensor(BF16), tensor(np.float16)) == np.float32
    assert result_dtype(tensor(BF16), tensor(np.float64)) == np.float64
    assert result_dtype(tensor(BF16), tensor(np.int32)) == BF16
    assert result_dtype(tensor(BF16), 2.5) == BF16
    assert result_dtype(tensor(np.int32), 2) == np.int32
    assert result_dtype(tensor(np.int32), 2.5) == np.float32
    assert result_dtype(tensor(np.int32), tensor(np.int64)) == np.int64


def test_booleans_stay_booleans_beside_booleans():
    flags = Tensor(np.array([True, False]))
    assert cudiff.where(flags, flags, flags).dtype == np.bool_
    assert cudiff.where(flags, flags, 2).dtype == np.int64


def test_a_number_as_a_bool_is_0_or_1(device):
    flags = Tensor(np.float32([0, 0.5, -3, np.nan]), device=device).astype(bool)
    assert flags.dtype == np.bool_ and flags.astype("uint8").numpy().tolist() == [0, 1, 1, 1]
    assert flags.sum().item() == 3


def test_a_norms_parameters_are_read_in_32_bits_or_more():
    assert as_wide(None, None) == (None, None)
    for dtype, wide in ((BF16, np.float32), (np.float16, np.float32), (np.float32, np.float32), (float, np.float64)):
        (result,) = as_wide(Tensor(np.ones(2, dtype)))
        assert result.dtype == wide


def test_integers_are_refused_by_name():
    whole, real = Tensor(np.ones(2, np.int32)), Tensor(np.ones(2, np.float32))
    require_floats("norm", real, None)
    with pytest.raises(TypeError, match=r"norm needs floating tensors, not int32: use .astype\('float32'\)"):
        require_floats("norm", real, None, whole)
    require_float("Exp", real.data)
    with pytest.raises(TypeError, match="exp on CUDA needs a floating tensor, not int32"):
        require_float("Exp", whole.data)


def test_indices_are_integers_that_32_bits_hold():
    least, most = -(2**31), 2**31 - 1
    for index in ([least, most], np.array([least]), Tensor(np.array([most])), np.uint8([3]), 5):
        found = as_index("rows", index, "cpu")
        assert found.dtype == np.int32
        np.testing.assert_array_equal(found.numpy(), index.numpy() if isinstance(index, Tensor) else index)
    assert as_index("rows", [], "cpu").shape == (0,)
    for index in ([least - 1], [most + 1], Tensor(np.array([0, most + 1]))):
        with pytest.raises(IndexError, match="rows: an index lies outside 32 bits"):
            as_index("rows", index, "cpu")
    for index in ([0.5], np.array([True]), Tensor(np.ones(2, np.float32))):
        with pytest.raises(TypeError, match="rows: labels and indices are integers, not"):
            as_index("rows", index, "cpu")
