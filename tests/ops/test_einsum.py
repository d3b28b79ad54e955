"""Products by NumPy's names: values, dtypes, gradients of gradients, and what is refused."""

import ml_dtypes
import numpy as np
import pytest

import cudiff
from cudiff import Tensor, check_gradient, grad, ops
from tests.check import check_op

SUMS = {
    "ij,jk->ik": ((3, 4), (4, 5)), "ij,jk": ((3, 4), (4, 5)), "ba,ac": ((3, 4), (4, 5)), "ij,kj->ki": ((3, 4), (5, 4)),
    "bij,bjk->bik": ((2, 3, 4), (2, 4, 5)), "bij,bjk->kbi": ((2, 3, 4), (2, 4, 5)), "nqhd,nkhd->nhqk":
    ((2, 3, 2, 4), (2, 5, 2, 4)), "i,j->ij": ((3,), (4,)), "i,i": ((3,), (3,)), "i,i->i": ((3,), (3,)),
    "ij,ij->": ((3, 4), (3, 4)), "ij->ji": ((3, 4),), "ji": ((3, 4),), "ij->": ((3, 4),), "ij->j": ((3, 4),),
    "ii": ((4, 4),), "ii->i": ((4, 4),), "iji->j": ((3, 4, 3),), "iii->i": ((3, 3, 3),), "ii,i->i": ((4, 4), (4,)),
    "...ij,...jk->...ik": ((2, 1, 3, 4), (5, 4, 2)), "...i->...": ((2, 3, 4),), "i...,i...": ((3, 2), (3, 4, 2)),
    "...,...": ((), (2, 3)), "b...,b->...": ((2, 3, 4), (2,)), "ij,jk,kl->il": ((2, 3), (3, 4), (4, 5)),
    "i,j,k->kij": ((2,), (3,), (4,)), "ij,k->i": ((2, 3), (4,)), "ij,i,j->": ((2, 3), (2,), (3,)),
    "bi,bj,b->ij": ((4, 2), (4, 3), (4,)), "Zz,zA": ((2, 3), (3, 4)), "ij,jk->ik ": ((2, 0), (0, 3)),
    "ij,jk->j": ((2, 1), (3, 4)), "i j , j k -> i k": ((2, 3), (3, 4)), "ij,jk->k": ((2, 1), (3, 4)),
    "ij,j->": ((2, 0), (1,)), "bhqk,bkhd->bqhd": ((2, 3, 4, 5), (2, 5, 3, 2)),
}


@pytest.mark.parametrize("subscripts", SUMS)
def test_values(subscripts, rng):
    arrays = [rng.integers(-4, 5, shape) for shape in SUMS[subscripts]]
    expected = np.einsum(subscripts, *arrays)
    for dtype in (np.float32, np.float64, np.int32, np.int8, ml_dtypes.bfloat16):
        tensors = [Tensor(array, dtype=dtype) for array in arrays]
        for out in (cudiff.einsum(subscripts, *tensors), np.einsum(subscripts, *tensors)):
            assert isinstance(out, Tensor) and out.dtype == dtype
            np.testing.assert_array_equal(out.numpy().astype(float), expected.astype(dtype).astype(float))


@pytest.mark.parametrize("subscripts", SUMS)
def test_gradients(subscripts, device, rng):
    arrays = [np.asarray(rng.standard_normal(shape)) for shape in SUMS[subscripts]]
    check_op(lambda *x: cudiff.einsum(subscripts, *x), *arrays, device=device, tolerance=2)
    if device == "cpu" and 0 not in np.shape(arrays[0]):
        slopes = grad(lambda *x: np.sum(np.einsum(subscripts, *x) ** 3), tuple(range(len(arrays))))
        check_gradient(lambda *x: sum(np.sum(s**2) for s in slopes(*x)), *arrays)


def test_a_product_of_matrices_is_one_launch(host_of):
    host = host_of(True)
    a, b = (Tensor(host.zeros(shape, np.float32)) for shape in ((2, 32, 64), (2, 64, 32)))
    cudiff.einsum("bij,bjk->bik", a, b)
    product, host.launches[:] = list(host.launches), []
    assert (cudiff.matmul(a, b).shape, host.launches) == ((2, 32, 32), product)


def test_every_sum_runs_on_a_gpu(host_of):
    for subscripts, shapes in SUMS.items():
        if 0 in shapes[0]:
            continue
        x = [Tensor(host_of(True).zeros(shape, np.float32), requires_grad=True) for shape in shapes]
        out = cudiff.einsum(subscripts, *x)
        assert out.device == "cuda" and out.shape == np.einsum(subscripts, *map(np.ones, shapes)).shape
        out.sum().backward()


PAIRS = [((3,), (3,)), ((2, 3), (3,)), ((2, 3), (3, 4)), ((5, 2, 3), (4, 3, 6)), ((), (2, 3)), ((2, 3), ()), ((), ())]


@pytest.mark.parametrize("name, shapes", [
    *(("dot", pair) for pair in PAIRS), *(("outer", pair) for pair in PAIRS),
    *(("inner", pair) for pair in [*PAIRS[:2], *PAIRS[4:], ((2, 3), (4, 3)), ((5, 2, 3), (4, 3))]),
    *(("vdot", pair) for pair in [((3,), (3,)), ((2, 3), (3, 2)), ((), ())]),
], ids=str)
def test_dot_inner_outer(name, shapes, device, rng):
    a, b = (np.asarray(rng.standard_normal(shape)) for shape in shapes)
    for namespace in (cudiff, np):
        out = getattr(namespace, name)(Tensor(a), Tensor(b))
        assert isinstance(out, Tensor)
        np.testing.assert_allclose(out.numpy(), getattr(np, name)(a, b), rtol=1e-12, atol=1e-12)
    check_op(getattr(cudiff, name), a, b, device=device)


@pytest.mark.parametrize("axes", [0, 1, 2, (0, 0), ((0, 1), (0, 1)), ([1, 0], [1, 0]), (-1, 0), ((), ())], ids=str)
def test_tensordot(axes, device, rng):
    a, b = rng.standard_normal((3, 3, 3)), rng.standard_normal((3, 3, 2))
    np.testing.assert_allclose(np.tensordot(Tensor(a), Tensor(b), axes).numpy(), np.tensordot(a, b, axes), rtol=1e-12)
    check_op(lambda a, b: cudiff.tensordot(a, b, axes), a, b, device=device)
    if device == "cpu":
        check_gradient(grad(lambda a: np.sum(np.tensordot(a, b, axes) ** 3)), a)


def test_arrays_and_other_dtypes():
    x = Tensor(np.ones((2, 3), np.float32))
    assert cudiff.einsum("ij,j->i", x, np.ones(3)).dtype == np.float32
    assert cudiff.einsum("ij,j->i", x.astype("bfloat16"), Tensor(np.ones(3, np.float32))).dtype == np.float32
    assert cudiff.outer([1.0, 2.0], x).shape == (2, 6) and x.dot([1.0, 2.0, 3.0]).numpy().tolist() == [6, 6]


@pytest.mark.parametrize("subscripts, shapes, message", [
    ("ij,jk->ik", ((2, 3), (4, 5)), r"^einsum 'ij,jk->ik': the sizes 3 and 4 of 'j' do not agree$"),
    ("ii", ((2, 3),), "sizes 2 and 3"), ("ii", ((1, 3),), "sizes 1 and 3"),
    ("...i,...i", ((2, 3), (4, 3)), "sizes 2 and 4"),
    ("ij,j", ((2, 0), (3,)), "sizes 0 and 3"),
    ("ij,jk", ((2, 3),), "^einsum 'ij,jk' names 2 operands, and got 1$"),
    ("ijk", ((2, 3),), "^einsum 'ijk': operand 0 has 2 axes, which 'ijk' does not name$"),
    ("i", ((2, 3),), "operand 0 has 2 axes"), ("...i...", ((2, 3),), "operand 0 has 2 axes"),
    ("ij->ii", ((2, 3),), "the output names 'i' twice, or no operand does"),
    ("ij->k", ((2, 3),), "the output names 'k' twice, or no operand does"),
    ("...j->j", ((2, 3),), "the output has no '...', for 1 axes"),
    ("i1", ((2, 3),), r"letters, commas, '\.\.\.' and one '->'"), ("ij->i->j", ((2, 3),), "one '->'"),
])
def test_what_einsum_refuses(subscripts, shapes, message):
    with pytest.raises(ValueError, match=message):
        cudiff.einsum(subscripts, *map(cudiff.ones, shapes))


@pytest.mark.parametrize("call, message", [
    (lambda x: cudiff.tensordot(x, x.T), r"^the shapes \(2, 3\) and \(3, 2\) do not agree along the axes \[0, 1\]"),
    (lambda x: cudiff.dot(x[:, :1], x), r"\(2, 1\) and \(2, 3\) do not agree"),
    (lambda x: cudiff.tensordot(x, x, 3), "tensordot sums over as many axes of each, which have 2 and 2, not 3"),
    (lambda x: cudiff.tensordot(x, x, -1), "tensordot sums over"),
    (lambda x: cudiff.tensordot(x, x, ((0, 1), 0)), "tensordot sums over"),
    (lambda x: cudiff.tensordot(x, x, ((0, 0), (0, 1))), "axis 0 is named twice"),
    (lambda x: cudiff.tensordot(x, x, (2, 0)), "axis 2 is out of range"),
    (lambda x: cudiff.dot(x, x), r"axes \[-1\] and \[0\]"),
    (lambda x: cudiff.inner(x, x.T), r"axes \[-1\] and \[-1\]"),
    (lambda x: cudiff.vdot(x, x[:1]), r"the shapes \(6,\) and \(3,\)"),
])
def test_what_products_refuse(call, message):
    with pytest.raises(ValueError, match=message):
        call(cudiff.ones((2, 3)))


def test_bools_and_subscripts_that_are_no_text(host_of):
    x = cudiff.ones((2, 2), bool)
    for call in (lambda: cudiff.einsum("ij->i", x), lambda: cudiff.dot(x, x), lambda: cudiff.outer(x, x)):
        with pytest.raises(TypeError, match=r"takes numbers, not bool: use \.astype\('int32'\), or & and any\(\)"):
            call()
    with pytest.raises(TypeError, match="einsum takes its subscripts first, as in 'ij,jk->ik', not Tensor"):
        np.einsum(Tensor([1.0]), [0])
    there = Tensor(host_of(True).zeros((2, 2), np.int32))
    with pytest.raises(TypeError, match="matmul on CUDA needs a floating tensor, not int32"):
        ops.einsum("ij,jk", there, there)
