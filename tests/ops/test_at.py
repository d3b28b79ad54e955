"""x.at[index].set(v) and .add(v): NumPy's assignment, with gradients of x and v. Random indices: test_index.py."""

import ml_dtypes
import numpy as np
import pytest

import cudiff
from cudiff import CudiffError, Tensor
from tests.check import check_op

INDICES = [
    np.s_[1], np.s_[-1, 2], np.s_[:, 1:, ::2], np.s_[..., 0], np.s_[::-1], np.s_[None, 3:3], np.s_[:], np.s_[()],
    np.s_[[0, 2, 0, -1]], np.s_[:, [1, 1]], np.s_[[0, 3, 0], :, [1, 7, 1]], np.s_[[]], np.s_[np.arange(4) > 1],
    np.s_[np.arange(4) > 1, 0], np.s_[..., np.arange(8) % 3 == 0], np.s_[True], np.s_[False, 0],
    np.s_[[[1, 2], [2, 1]], 0], np.arange(20).reshape(4, 5) % 3 == 0, np.s_[:, np.array(1)],
]


def put(x, index, v):
    out = x.copy()
    out[index] = v
    return out


@pytest.mark.parametrize("index", INDICES, ids=lambda index: str(index).replace("\n", ""))
def test_set_and_add(index, device, rng):
    x = rng.standard_normal((4, 5, 8))
    shape = x[index].shape
    for size in {shape, shape[-1:], ()}:
        v = np.asarray(rng.standard_normal(size))
        check_op(lambda x, v: x.at[index].set(v), x, v, device=device, dtypes=("float32", "bfloat16", "float16"))
        check_op(lambda x, v: x.at[index].add(v), x, v, device=device, dtypes=("float32", "bfloat16"))
        before, values = (Tensor(a, dtype=np.float32, device=device) for a in (x, v))
        out, expected = before.at[index].set(values), before.numpy().copy()
        expected[index] = values.numpy()
        np.testing.assert_array_equal(out.numpy(), expected)
        np.testing.assert_array_equal(before.numpy(), x.astype(np.float32))  # it is left as it was


def test_of_several_at_one_place_the_last_counts(device):
    x, v = (Tensor(np.float32(a), device=device, requires_grad=True) for a in ([1, 2, 3, 4], [5, 6, 7]))
    out = x.at[[2, 0, -2]].set(v)
    assert out.numpy().tolist() == [6, 2, 7, 4]
    out.backward(np.float32([1, 10, 100, 1000]))
    assert Tensor(x.grad).numpy().tolist() == [0, 10, 0, 1000] and Tensor(v.grad).numpy().tolist() == [0, 1, 100]
    out = x.at[[2, 0, -2]].add(v)
    assert out.numpy().tolist() == [7, 2, 15, 4]
    x.grad = v.grad = None
    out.backward(np.float32([1, 10, 100, 1000]))
    assert Tensor(x.grad).numpy().tolist() == [1, 10, 100, 1000] and Tensor(v.grad).numpy().tolist() == [100, 1, 100]


def test_nan_that_is_written_over_is_gone(device):
    x, v = (Tensor(np.float32(a), device=device, requires_grad=True) for a in ([np.nan, 2, 3], [np.nan, 6]))
    for index in (np.s_[:2], [0, 1], np.array([True, True, False])):
        x.grad = v.grad = None
        out = x.at[index].set(v)
        (out.at[0].set(1.0) ** 2).sum().backward()
        assert Tensor(x.grad).numpy().tolist() == [0, 0, 6] and Tensor(v.grad).numpy().tolist() == [0, 12]


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8, np.bool_])
def test_integers_are_exact(dtype, device):
    large = {np.int32: 2**30 + 1, np.int64: 2**60 + 1, np.uint8: 100, np.bool_: True}[dtype]
    x = Tensor(np.zeros((3, 4), dtype), device=device)
    for index in (1, [1], np.array([False, True, False]), np.s_[1:2], ([1], slice(None))):
        out = x.at[index].set(large)
        assert out.dtype == dtype and out.numpy().tolist() == [[0] * 4, [large] * 4, [0] * 4]
        if dtype is not np.bool_:
            assert x.at[index].add(large).numpy().tolist() == out.numpy().tolist()
    if dtype is not np.bool_:
        assert x.at[[0, 0], 1].add([large // 2, large // 2 + 1]).numpy()[0, 1] == large // 2 * 2 + 1


def test_values_take_the_tensors_dtype(device):
    x = Tensor(np.ones(3, ml_dtypes.bfloat16), device=device)
    for v in (2, 2.0, np.float64(2), [2.0], np.array([2.0]), Tensor([2.0], device=device), True + 1):
        out = x.at[[1]].set(v)
        assert out.dtype == x.dtype and out.numpy().astype(float).tolist() == [1, 2, 1]
    assert cudiff.at([1.0, 2.0])[0].add(1).numpy().tolist() == [2, 2]


@pytest.mark.parametrize("call, error, message", [
    (lambda x: x.at[0].set([1, 2, 3]), ValueError, "broadcast"),
    (lambda x: x.at[5].set(0), IndexError, "out of bounds"),
    (lambda x: x.at[[5]].add(0), IndexError, "index 5 is out of bounds for axis 0 with size 3"),
    (lambda x: x.at["a"].set(0), TypeError, "cannot index with str"),
    (lambda x: x.at[[True]].set(0), IndexError, r"mask of shape \(1,\)"),
    (lambda x: x.astype("int32").at[0].set(0.5), TypeError, "floats into a tensor of int32"),
    (lambda x: x.astype("int32").at[[0]].add(x[0]), TypeError, "floats into a tensor of int32"),
    (lambda x: (x > 0).at[0].add(True), TypeError, "takes numbers, not bools"),
    (lambda x: x.__setitem__(0, 1), TypeError, r"^a tensor is not changed in place: write x = x.at\[i\].set\(v\)"),
])
def test_what_is_refused(call, error, message, device):
    with pytest.raises(error, match=message):
        call(Tensor(np.ones((3, 2), np.float32), device=device))


@pytest.mark.parametrize("call", [
    lambda x: np.put(x, [0], 1), lambda x: np.put_along_axis(x, np.array([0]), 1, 0), lambda x: np.copyto(x, 1),
    lambda x: np.place(x, x.numpy() > 0, 1), lambda x: np.putmask(x, x.numpy() > 0, 1),
    lambda x: np.fill_diagonal(x, 1), lambda x: np.put_along_axis(np.ones(2), np.array([0]), x, 0),
])
def test_numpys_functions_that_change_an_array_are_refused(call):
    with pytest.raises(TypeError, match=r"^np.\w+ changes an array in place: write x = x.at\[i\].set\(v\)"):
        call(Tensor(np.ones(2)))


def test_on_a_gpu(host_of, monkeypatch):
    """What a captured function may do: nothing waits for the GPU, and no array is copied there."""
    host = host_of(True)
    x, index = Tensor(host.zeros((4, 3), np.float32), requires_grad=True), Tensor(host.zeros(2, np.int32))
    monkeypatch.setattr(host.cuda.get_current_stream(), "is_capturing", lambda: True)
    for at in (x.at[index], x.at[1:, 0], x.at[index, 1], x.at[x > 0]):
        for out in (at.set(1.0), at.add(2.0)):
            out.backward(host.zeros((4, 3), np.float32))
    assert ("shape", "last") in host.launches
    with pytest.raises(CudiffError, match="a mask's result has a size"):
        x.at[x > 0].set(x[0])


@pytest.mark.gpu
def test_rows_out_of_range_are_passed_over_on_cuda():
    x = Tensor(np.zeros((3, 2), np.float32), device="cuda")
    index = Tensor([0, 3, -4, -6, -2], device="cuda")
    assert x.at[index].set(1.0).numpy().tolist() == x.at[index].add(1.0).numpy().tolist() == [[1, 1], [1, 1], [0, 0]]
