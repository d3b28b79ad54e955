"""embedding against PyTorch, with the null class, repeated indices and accumulation."""

import numpy as np
import pytest

from cudiff import Tensor, embedding
from tests.check import check_op, torch


@pytest.mark.parametrize("count, num, dim", [(1, 1, 1), (7, 3, 5), (32, 10, 64), (300, 1000, 33)])
def test_embedding(device, rng, count, num, dim):
    indices = rng.integers(0, num, count).astype(np.int32)
    weight = rng.standard_normal((num, dim))
    check_op(
        embedding, indices, weight, device=device,
        torch_fn=lambda i, w: torch.nn.functional.embedding(i.long(), w), fp32_inputs=(1,), dtypes=("float32",),
    )


def test_null_class_is_zero_and_gets_no_gradient(device, rng):
    indices = np.array([-1, 2, -1, 0], np.int32)
    weight = rng.standard_normal((3, 4))
    check_op(embedding, indices, weight, device=device, dtypes=("float32",))
    w = Tensor(weight.astype(np.float32), requires_grad=True, device=device)
    out = embedding(Tensor(indices, device=device), w)
    assert (out.numpy()[[0, 2]] == 0).all()
    out.backward(Tensor(np.ones((4, 4), np.float32), device=device))
    assert np.array_equal(Tensor(w.grad).numpy(), np.array([[1], [0], [1]], np.float32) * np.ones((1, 4), np.float32))


def test_gradient_adds_to_what_is_there(device, rng):
    w = Tensor(rng.standard_normal((3, 4)).astype(np.float32), requires_grad=True, device=device)
    indices = Tensor(np.array([[0, 1], [1, -1]], np.int32), device=device)
    grads = []
    for _ in range(2):
        embedding(indices, w).backward(Tensor(np.ones((2, 2, 4), np.float32), device=device))
        grads.append(Tensor(w.grad).numpy().copy())
    assert np.array_equal(grads[1], 2 * grads[0])


def test_what_lies_behind_the_indices_gets_no_gradient(device, rng):
    """They and their gradient are the first of longer arrays, whose next index is a row too."""
    indices, dout = np.int32([2, 0, 2, 1]), rng.standard_normal((4, 5)).astype(np.float32)
    w = Tensor(rng.standard_normal((3, 5)).astype(np.float32), requires_grad=True, device=device)
    out = embedding(Tensor(Tensor(indices, device=device).data[:3]), w)
    out.backward(Tensor(dout, device=device).data[:3])
    assert np.allclose(Tensor(w.grad).numpy(), [dout[1], np.zeros(5), dout[0] + dout[2]], atol=1e-6)


def test_index_out_of_range():
    for index in (-2, 3):
        with pytest.raises(IndexError, match="outside"):
            embedding(Tensor(np.array([index], np.int32)), Tensor(np.zeros((3, 2), np.float32)))


@pytest.mark.gpu
def test_indices_that_are_not_rows_are_never_read_on_cuda():
    """-1 gives zeros and others NaN, also the first behind the table, where other numbers lie in memory."""
    table = Tensor(Tensor(np.ones((6, 2), np.float32), device="cuda").data[:3])
    out = embedding(Tensor(np.int32([2, -1, 3, -2]), device="cuda"), table).numpy()
    assert out[:2].tolist() == [[1, 1], [0, 0]] and np.isnan(out[2:]).all()
