import itertools

import ml_dtypes
import numpy as np
import pytest

from cudiff.backend import bfloat16
from cudiff.cuda import select
from cudiff.cuda.device import current_device
from cudiff.cuda.kernels.convolution import restated
from cudiff.cuda.kernels.convolution.problem import DGRAD, FPROP, WGRAD, Image, Problem, Weight
from cudiff.cuda.kernels.gemm import matmul as portable
from cudiff.cuda.kernels.gemm import whole
from cudiff.cuda.kernels.gemm.problem import Matrix, Product
from cudiff.cuda.kernels.gemm.table import LINEAR, MATMUL
from cudiff.cuda.kernels.gemm.table import matmul as multiply
from cudiff.ops.matmul import linear, matmul, split_linear
from cudiff.precision import allow_tf32
from cudiff.tensor import Tensor
from tests.check import check_op, relative_error, torch
from tests.host import forget


@pytest.mark.parametrize("a, b", [
    ((3, 5), (5, 7)),
    ((1, 1), (1, 1)),
    ((64, 64), (64, 64)),
    ((130, 72), (72, 200)),
    ((65, 33), (33, 129)),
    ((2, 3, 17, 40), (2, 3, 40, 24)),
    ((4, 6, 8), (8, 10)),
    ((6, 8), (5, 8, 10)),
    ((2, 1, 9, 16), (3, 16, 8)),
    ((1, 9, 16), (3, 16, 8)),
    ((5,), (5,)),
    ((3, 4, 5), (5,)),
    ((5,), (2, 5, 3)),
], ids=str)
def test_matmul(device, rng, a, b):
    check_op(matmul, rng.standard_normal(a), rng.standard_normal(b), device=device,
             torch_fn=lambda a, b: torch.matmul(a, b), dtypes=("float32", "bfloat16", "float16"))


@pytest.fixture
def copied(monkeypatch):
    """Products of rows that are not aligned are of copies, however small: these are taken to cost nothing."""
    forget()
    for module, name in [(whole, "fit_microseconds"), (restated, "fit_microseconds")]:
        monkeypatch.setattr(module, name, lambda shape, dtype: -1e6)
    yield
    forget()


@pytest.mark.parametrize("a, b", [
    ((3, 5), (5, 7)), ((1, 1), (1, 1)), ((130, 72), (72, 201)), ((65, 33), (33, 129)), ((2, 3, 17, 41), (2, 3, 41, 24)),
    ((6, 9), (5, 9, 10)), ((2, 1, 9, 17), (3, 17, 8)), ((3, 4, 5), (5,)),
], ids=str)
def test_products_of_copies_with_aligned_rows(device, rng, copied, a, b):
    check_op(matmul, rng.standard_normal(a), rng.standard_normal(b), device=device,
             torch_fn=lambda a, b: torch.matmul(a, b), dtypes=("bfloat16", "float16"))


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("add", [False, True])
def test_a_float32_result_of_copies(rng, copied, transposed, add):
    a, b, before = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, 21, 77), (1, 77, 35), (2, 21, 35)))
    a, b = (x.astype(bfloat16) for x in (a, b))
    turned = (x.swapaxes(1, 2) if turn else x for x, turn in zip((a, b), transposed, strict=True))
    given = [Tensor(x.copy(), device="cuda").data for x in turned]
    out = Tensor(before, device="cuda")
    multiply(*given, *transposed, out.data, add)
    expected = a.astype(float) @ b.astype(float) + before * add
    assert relative_error(out.numpy(), expected) < 1e-6


BF16, FP32 = np.dtype(bfloat16), np.dtype(np.float32)


def product(m, n, k, out=BF16, dtype=BF16, transpose_a=False, transpose_b=False, **more):
    def of(rows, columns, dtype):
        return Matrix((1, rows, columns), dtype, columns * dtype.itemsize % 16 == 0)

    a, b = (k, m) if transpose_a else (m, k), (n, k) if transpose_b else (k, n)
    return Product(of(*a, dtype), of(*b, dtype), of(m, n, out), transpose_a, transpose_b, **more)


@pytest.mark.parametrize("transposed", list(itertools.product((False, True), repeat=2)))
@pytest.mark.parametrize("sizes, more, on_hopper, on_older", [
    ((4095, 4095, 4097), {}, "shape.fit, gemm_sm90", "shape.fit, matmul"),
    ((4095, 4095, 4097), {"add": True}, "shape.fit, gemm_sm90", "shape.fit, matmul"),
    ((4095, 4095, 4097), {"out": FP32}, "shape.fit, gemm_sm90", "shape.fit, matmul"),
    ((1001, 997, 999), {}, "shape.fit, gemm_sm90", "shape.fit, matmul"),
    ((4096, 4096, 4096), {}, "gemm_sm90", "matmul"),
    ((4095, 4095, 4097), {"dtype": FP32, "out": FP32, "products": 3}, "matmul", "matmul"),
    ((3, 5, 7), {}, "matmul", "matmul"), ((63, 65, 129), {}, "matmul", "matmul"),
    ((1, 4095, 4097), {}, "matmul", "matmul"), ((4095, 1, 4097), {}, "matmul", "matmul"),
    ((0, 4095, 4097), {}, "matmul", "matmul"),
], ids=str)
def test_which_products_are_of_copies(sizes, more, on_hopper, on_older, transposed):
    asked = product(*sizes, transpose_a=transposed[0], transpose_b=transposed[1], **more)
    assert [MATMUL.select(asked, name).row.name for name in ("sm_90a", "sm_80")] == [on_hopper, on_older]


@pytest.mark.parametrize("x, outputs", [
    ((1, 1), 1), ((3, 5), 7), ((32, 256), 192), ((2, 5, 72), 40), ((256, 64), 3), ((2, 3, 130), 65), ((4000, 24), 16),
    ((300, 3), 130),
], ids=str)
@pytest.mark.parametrize("with_bias", [True, False])
def test_linear(device, rng, x, outputs, with_bias):
    arrays = [rng.standard_normal(x), rng.standard_normal((outputs, x[-1]))]
    arrays.append(rng.standard_normal(outputs) if with_bias else None)
    check_op(linear, *arrays, device=device, fp32_inputs=(2,), dtypes=("float32", "bfloat16", "float16"),
             torch_fn=lambda x, w, b: torch.nn.functional.linear(x, w, b))


@pytest.mark.parametrize("x, outputs", [
    ((3, 9), 11), ((2, 9, 73), 40), ((2, 4, 72), 41), ((1, 130), 65), ((300, 8), 130),
], ids=str)
@pytest.mark.parametrize("with_bias", [True, False])
def test_linear_layers_with_channels_of_zeros(device, rng, copied, x, outputs, with_bias):
    test_linear(device, rng, x, outputs, with_bias)


def test_linear_layers_with_channels_of_zeros_add_a_residual(device, rng, copied):
    test_linear_adds_a_residual(device, rng, (2, 5, 20))


@pytest.mark.parametrize("direction", [FPROP, DGRAD, WGRAD])
@pytest.mark.parametrize("rows, inputs, outputs, copies", [
    (4095, 4097, 4095, True), (4095, 767, 767, True), (4095, 4096, 4096, False), (3, 5, 7, False), (63, 65, 129, False),
    (50000, 4, 255, False),
])
def test_which_linear_layers_get_channels_of_zeros(direction, rows, inputs, outputs, copies):
    x, out = Image((rows, inputs), BF16), Image((rows, outputs), BF16)
    x, out = (out, x) if direction == DGRAD else (x, out)
    asked = Problem(direction, x, Weight((outputs, 1, 1, inputs), inputs % 4 == 0), out)
    for architecture in ("sm_90a", "sm_80"):
        assert LINEAR.select(asked, architecture).row.name.startswith("shape.fit, channels") == copies


@pytest.mark.parametrize("rows", [1, 2, 3, 8])
@pytest.mark.parametrize("outputs, channels", [(40, 1160), (67, 130), (1, 4)])
def test_linear_of_few_rows(device, rng, rows, outputs, channels, monkeypatch):
    monkeypatch.setattr(portable, "FEW_ROWS_OF", 1)
    sizes = (rows, channels), (outputs, channels), (outputs,), (rows, outputs)
    arrays = [rng.standard_normal(size) for size in sizes]
    check_op(linear, *arrays, device=device, torch_fn=lambda x, w, b, r: torch.nn.functional.linear(x, w, b) + r)


def test_few_rows_are_a_pass_over_the_weight(host_of):
    host = host_of(False)
    for rows, outputs, launched in ((8, 1024, ("gemm", "few_rows")), (9, 1024, ("matmul", "matmul")),
                                    (8, 1023, ("matmul", "matmul"))):
        host.launches.clear()
        linear(*(Tensor(host.zeros(size, np.float32)) for size in ((rows, 1024), (outputs, 1024))))
        assert host.launches[0] == launched


@pytest.mark.parametrize("shape", [(2, 3, 4), (2, 16, 64)])
def test_linear_adds_a_residual(device, rng, shape):
    c = shape[-1]
    arrays = [rng.standard_normal(shape), rng.standard_normal((c, c)), rng.standard_normal(c)]
    # x's gradient comes through the product and past it.
    check_op(lambda x, w, b: linear(x * 0.5, w, b, residual=x), *arrays, device=device, fp32_inputs=(2,), tolerance=2,
             torch_fn=lambda x, w, b: x + torch.nn.functional.linear(x * 0.5, w, b))
    with pytest.raises(ValueError, match="the residual"):
        linear(*(Tensor(a) for a in arrays), residual=Tensor(arrays[1]))


def test_linear_takes_a_float32_weight_in_low_precision(device, rng):
    check_op(linear, rng.standard_normal((20, 24)), rng.standard_normal((16, 24)), rng.standard_normal(16),
             device=device, fp32_inputs=(1, 2), dtypes=("bfloat16",))


def test_gradients_add_to_those_there(device, rng):
    x = Tensor(rng.standard_normal((40, 24)).astype(np.float32), requires_grad=True, device=device)
    weight = Tensor(rng.standard_normal((16, 24)).astype(np.float32), requires_grad=True, device=device)
    bias = Tensor(rng.standard_normal(16).astype(np.float32), requires_grad=True, device=device)
    linear(x, weight, bias).backward(Tensor(np.ones((40, 16), np.float32), device=device).data)
    once = [Tensor(t.grad).numpy().copy() for t in (x, weight, bias)]
    held = weight.grad
    linear(x, weight, bias).backward(Tensor(np.ones((40, 16), np.float32), device=device).data)
    assert weight.grad is held
    for t, grad in zip((x, weight, bias), once, strict=True):
        assert relative_error(Tensor(t.grad).numpy(), 2 * grad) < 1e-6


def test_only_wanted_gradients_are_made(device, rng):
    x = Tensor(rng.standard_normal((4, 8)).astype(np.float32), device=device)
    weight = Tensor(rng.standard_normal((8, 8)).astype(np.float32), requires_grad=True, device=device)
    linear(x, weight).backward(Tensor(np.ones((4, 8), np.float32), device=device).data)
    assert x.grad is None and weight.grad is not None


@pytest.mark.parametrize("a, b", [((3, 0), (0, 4)), ((3, 4), (4, 0)), ((0, 4), (4, 2)), ((2, 3, 0), (2, 0, 4)),
                                  ((3, 4), (0, 4, 2)), ((1, 3, 4), (0, 4, 2)), ((0, 3, 4), (1, 4, 2))])
def test_products_of_nothing(device, rng, a, b):
    """Sums without terms are 0, and add nothing to a gradient that is there."""
    arrays = rng.standard_normal(a), rng.standard_normal(b)
    check_op(lambda a, b: matmul(a, b) + matmul(a, b) * 2, *arrays, device=device)


def test_the_bias_gradient_of_many_rows(rng):
    """Added row by row in float32 it would be 3e-5 off."""
    bias, dout = Tensor(np.zeros(2, np.float32), requires_grad=True), (rng.standard_normal((10**6, 2)) + 3)
    x, weight = (Tensor(np.ones((rows, 1), np.float32)) for rows in (10**6, 2))
    linear(x, weight, bias).backward(Tensor(dout, dtype="float32"))
    assert relative_error(bias.grad, dout.astype(np.float32).astype(np.float64).sum(0)) < 5e-6


def test_products_of_nothing_launch_no_product(host_of):
    host = host_of(True)
    a, b = (Tensor(host.zeros(shape, np.float32), requires_grad=True) for shape in ((3, 4), (4, 0)))
    matmul(a, b).backward(host.zeros((3, 0), np.float32))
    matmul(a, b).backward(host.zeros((3, 0), np.float32))
    assert a.grad.shape == (3, 4) and not np.any(a.grad) and not any(stem == "matmul" for stem, _ in host.launches)


@pytest.mark.parametrize("out, stem", [((2, 16, 8), "gemm_sm90"), ((2, 24, 8), "gemm_sm90"), ((2, 16, 12), "matmul")])
def test_which_kernel_a_batched_product_runs_by(host_of, out, stem):
    """On Hopper; rows of 12 elements of 16 bits do not start on 16 bytes."""
    host = host_of(True)
    batch, rows, columns = out
    a, b = (Tensor(host.zeros(shape, bfloat16)) for shape in ((batch, rows, 32), (batch, 32, columns)))
    matmul(a, b)
    assert {name for name, _ in host.launches} == {stem}


@pytest.mark.parametrize("hopper", [True, False])
def test_gradients_are_of_the_operands_shapes_where_both_are_broadcast(host_of, hopper):
    """By a product for each matrix of the batch, into new memory, which is summed over the batch afterwards."""
    host, shapes, products = host_of(hopper), ((2, 1, 16, 24), (3, 24, 8)), []
    a, b = (Tensor(host.zeros(shape, bfloat16), requires_grad=True) for shape in shapes)
    with select.watched(lambda table, problem, choice: products.append(problem)):
        matmul(a, b).backward(host.zeros((2, 3, 16, 8), bfloat16))
    assert (a.grad.shape, b.grad.shape) == shapes and not any(product.add for product in products)
    assert [product.out.shape for product in products] == [(6, 16, 8), (6, 16, 24), (6, 24, 8)]


def test_parameters_have_float32_gradients(device, rng):
    x = Tensor(rng.standard_normal((20, 24)).astype(ml_dtypes.bfloat16), requires_grad=True, device=device)
    weight = Tensor(rng.standard_normal((16, 24)).astype(np.float32), requires_grad=True, device=device)
    out = linear(x, weight)
    out.backward(out.data)
    assert out.dtype == x.dtype == x.grad.dtype and weight.grad.dtype == np.float32


@pytest.mark.parametrize("shapes", [((4,), (5,)), ((3, 4), (5, 6)), ((2, 3, 4), (3, 4, 5))], ids=str)
def test_shapes_that_do_not_agree_are_refused(rng, shapes):
    with pytest.raises(ValueError):
        matmul(*(Tensor(rng.standard_normal(shape)) for shape in shapes))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_two_runs_are_bit_equal(rng, dtype):
    results = []
    arrays = [rng.standard_normal(shape).astype(dtype) for shape in ((20000, 72), (40, 72))]
    for _ in range(2):
        x, weight = (Tensor(a, requires_grad=True, device="cuda") for a in arrays)
        out = linear(x, weight)
        out.backward(out.data)
        results.append([out.numpy(), Tensor(x.grad).numpy(), Tensor(weight.grad).numpy()])
    for first, second in zip(*results, strict=True):
        assert np.array_equal(first.view(np.uint8), second.view(np.uint8))


@pytest.mark.gpu
def test_precision_of_float32_and_tf32(rng):
    x, weight = rng.standard_normal((256, 2048)), rng.standard_normal((128, 2048))
    tensors = [Tensor(a.astype(np.float32), device="cuda") for a in (x, weight)]
    expected = x.astype(np.float32).astype(float) @ weight.astype(np.float32).astype(float).T
    assert relative_error(linear(*tensors).numpy(), expected) < 1e-6
    with allow_tf32():
        error = relative_error(linear(*tensors).numpy(), expected)
    assert error < 1e-3 and (error > 1e-5 or current_device().capability < 80)  # before sm_80 there is no tf32


@pytest.mark.parametrize("first, second", [("float32", "float64"), ("float64", "float32")])
def test_each_operand_has_a_gradient_of_its_own_dtype(rng, first, second):
    a = Tensor(rng.standard_normal((2, 3)).astype(first), requires_grad=True)
    b = Tensor(rng.standard_normal((3, 4)).astype(second), requires_grad=True)
    matmul(a, b).sum().backward()
    assert (a.grad.dtype, b.grad.dtype) == (first, second)
    np.testing.assert_allclose(a.grad, np.broadcast_to(b.numpy().sum(1), (2, 3)), rtol=1e-5)
    np.testing.assert_allclose(b.grad, np.broadcast_to(a.numpy().sum(0)[:, None], (3, 4)), rtol=1e-5)


def test_each_operand_alone_has_its_gradient(rng):
    arrays = rng.standard_normal((2, 3, 3))
    for wanted in (0, 1):
        a, b = (Tensor(array, requires_grad=i == wanted) for i, array in enumerate(arrays))
        matmul(a, b).sum().backward()
        expected = np.broadcast_to(arrays[1].sum(1), (3, 3)) if wanted == 0 else arrays[0].sum(0)[:, None] * np.ones(3)
        np.testing.assert_allclose((a, b)[wanted].grad, expected)
        assert (a, b)[1 - wanted].grad is None


def test_two_dtypes_meet_in_the_wider_one(rng):
    a, b = Tensor(rng.standard_normal((3, 4)), dtype="bfloat16"), Tensor(rng.standard_normal((4, 5)), dtype="float32")
    assert matmul(a, b).dtype == matmul(b.T, a.T).dtype == np.float32
    np.testing.assert_allclose(matmul(a, b).data, a.data.astype(np.float32) @ b.data, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape, outputs, parts", [
    ((5, 24), 48, 6), ((2, 3, 7), 21, 3), ((130, 16), 64, 2), ((3, 8), 8, 1), ((1, 9), 16, 16), ((1100, 8), 16, 2),
], ids=str)
def test_a_linear_layer_in_parts(device, rng, shape, outputs, parts):
    check_op(
        lambda x, w, b: split_linear(x, w, b, parts), rng.standard_normal(shape),
        rng.standard_normal((outputs, shape[-1])), rng.standard_normal(outputs), device=device, fp32_inputs=(2,),
        dtypes=("float32", "bfloat16", "float16"),
        torch_fn=lambda x, w, b: torch.nn.functional.linear(x, w, b).chunk(parts, -1),
    )


def test_parts_without_a_gradient_and_operands_that_have_some(device, rng):
    """A part that nothing uses counts as zero; gradients are added to those of another layer."""
    check_op(
        lambda x, w, b: split_linear(x, w, b, 3)[1] + split_linear(x * 2.0, w, b, 3)[0] + linear(x, w, b)[:, :8],
        rng.standard_normal((6, 16)), rng.standard_normal((24, 16)), rng.standard_normal(24), device=device,
        dtypes=("float32",),
    )
    x, weight, bias = (Tensor(rng.standard_normal(size), dtype="float32", device=device, requires_grad=size == 24)
                       for size in ((6, 16), (24, 16), 24))
    split_linear(x, weight, bias, 3)[2].sum().backward()
    np.testing.assert_array_equal(Tensor(bias.grad).numpy(), [0] * 16 + [6] * 8)


def test_a_part_is_float32_and_parts_are_equal(device, rng):
    x, weight, bias = (Tensor(rng.standard_normal(size), dtype="bfloat16", device=device)
                       for size in ((6, 16), (24, 16), 24))
    (whole,) = split_linear(x, weight, bias, 1)
    assert whole.dtype == np.float32
    np.testing.assert_array_equal(whole.numpy(), linear(x, weight, bias).numpy().astype(np.float32))
    for parts in (0, 5, 24):
        with pytest.raises(ValueError, match="equal parts, of 16 at most"):
            split_linear(x, weight, bias, parts)
    for others in ((x[:, :8], weight, bias), (x, weight, bias[:8])):  # which a kernel would read beyond
        with pytest.raises(ValueError, match="linear: "):
            split_linear(*others, 3)


def test_parts_take_one_launch_beside_each_product(host_of):
    host = host_of(True)
    x, weight = (Tensor(host.zeros(shape, bfloat16), requires_grad=True) for shape in ((128, 1152), (6912, 1152)))
    bias = Tensor(host.zeros((6912,), np.float32), requires_grad=True)
    before = len(host.launches)
    parts = split_linear(x, weight, bias, 6)
    product, cast = host.launches[before:]
    assert product[0] in ("conv2d_sm90", "gemm_sm90") and cast == ("cast", "split")
    loss = parts[0] * parts[1] * parts[2] * parts[3] * parts[4] * parts[5]
    before = len(host.launches)
    loss.backward(loss.data)
    launches = [launch for launch in host.launches[before:] if launch[0] != "arithmetic"]
    assert launches[0] == ("cast", "join") and launches[-1] == ("accumulate", "sum_rows") and len(launches) == 4
