import ml_dtypes
import numpy as np
import pytest

from cudiff import Tensor, gelu, ops
from cudiff.cuda.kernels.convolution.problem import DGRAD, FPROP, Operands
from cudiff.cuda.kernels.gemm.product import Epilogue
from cudiff.cuda.kernels.gemm.table import linear as linear_cuda
from cudiff.ops.mlp import ACTIVATIONS, mlp
from tests.check import check_op, relative_error, torch


def arrays_of(rng, x, hidden, outputs):
    """Weights that keep the size of what they multiply."""
    inputs = x[-1]
    return [rng.standard_normal(x), rng.standard_normal((hidden, inputs)) / inputs**0.5, rng.standard_normal(hidden),
            rng.standard_normal((outputs, hidden)) / hidden**0.5, rng.standard_normal(outputs)]


def torch_mlp(activation):
    functional = torch.nn.functional if torch else None

    def run(x, weight, bias, weight2, bias2):
        z = functional.linear(x, weight, bias)
        h = functional.silu(z) if activation == "silu" else functional.gelu(
            z, approximate="tanh" if activation == "gelu_tanh" else "none")
        return functional.linear(h, weight2, bias2)

    return run


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("x, hidden, outputs", [((3, 5), 7, 4), ((2, 33, 72), 200, 40), ((300, 64), 256, 72)], ids=str)
def test_mlp(device, rng, activation, x, hidden, outputs):
    check_op(lambda *given: mlp(*given, activation=activation), *arrays_of(rng, x, hidden, outputs), device=device,
             fp32_inputs=(2, 4), dtypes=("float32", "bfloat16", "float16"), tolerance=2,
             torch_fn=torch_mlp(activation))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_to_be_trained_or_not_it_gives_the_same_bits(device, rng, activation, dtype):
    arrays = [array.astype(dtype) for array in arrays_of(rng, (64, 40), 72, 40)]
    recorded, plain = (
        mlp(*(Tensor(array, device=device, requires_grad=needs) for array in arrays), activation=activation).numpy()
        for needs in (True, False)
    )
    assert recorded.tobytes() == plain.tobytes()


def test_a_residual_and_no_biases(device, rng):
    x, weight, _, weight2, _ = arrays_of(rng, (2, 16, 64), 128, 64)
    check_op(lambda x, w, v: mlp(x, w, None, v, None, residual=x), x, weight, weight2, device=device, tolerance=2)


def test_a_gate_and_a_residual(device, rng):
    """Its values and gradients are those of its parts, with and without a backward to come."""
    arrays = [*arrays_of(rng, (3, 16, 64), 128, 40), rng.standard_normal((3, 16, 40)), rng.standard_normal((3, 40))]

    def gated_mlp(*given):
        return mlp(*given[:6], activation="gelu_tanh", gate=given[6])

    def parts(x, weight, bias, weight2, bias2, residual, gate):
        h = gelu(ops.linear(x, weight, bias), approximate="tanh")
        return residual + ops.reshape(gate, (3, 1, 40)) * ops.linear(h, weight2, bias2)

    check_op(gated_mlp, *arrays, device=device, fp32_inputs=(2, 4), dtypes=("float32", "bfloat16"), tolerance=2)
    for dtype, allowed in ((np.float32, 2e-5), (ml_dtypes.bfloat16, 1.6e-2)):
        plain = [Tensor(array.astype(dtype), device=device) for array in arrays]
        expected = parts(*(Tensor(t.numpy().astype(float)) for t in plain))
        assert relative_error(gated_mlp(*plain).numpy(), expected.numpy()) < allowed


def test_it_is_its_parts(rng):
    given = [Tensor(array) for array in arrays_of(rng, (4, 8), 16, 8)]
    x, weight, bias, weight2, bias2 = given
    parts = ops.linear(gelu(ops.linear(x, weight, bias)), weight2, bias2)
    np.testing.assert_array_equal(mlp(*given).numpy(), parts.numpy())


def test_what_it_refuses(rng):
    given = [Tensor(array) for array in arrays_of(rng, (4, 8), 16, 8)]
    with pytest.raises(ValueError, match="activation is one of gelu, gelu_tanh, silu, not 'relu'"):
        mlp(*given, activation="relu")
    with pytest.raises(ValueError, match="do not fit each other"):
        mlp(given[0], given[1], given[2], given[1], given[2])
    with pytest.raises(ValueError, match="mlp: the residual"):
        mlp(*given, residual=given[1])
    for residual, gate in ((None, (4, 8)), (given[0], (4, 16)), (given[0], (8,))):
        with pytest.raises(ValueError, match="mlp: the gate"):
            mlp(*given, residual=residual, gate=Tensor(rng.standard_normal(gate)))
    with pytest.raises(ValueError, match="weight2 of shape"):
        mlp(*given[:4], given[2])


def test_without_a_gradient_no_slope_is_kept(host_of):
    host = host_of(True)
    tensors = [Tensor(host.zeros(shape, ml_dtypes.bfloat16)) for shape in ((4096, 1024), (4096, 1024), (1024, 4096))]
    before = len(host.launches)
    mlp(tensors[0], tensors[1], None, tensors[2], None)
    assert host.launches[before:] == [("gemm_sm90", "gemm_sm90")] * 2


def test_a_gate_is_in_the_launch(host_of):
    host = host_of(True)
    shapes = (16, 256, 1024), (4096, 1024), (1024, 4096), (16, 256, 1024), (16, 1024)
    for recorded in (False, True):
        x, weight, weight2, residual = (Tensor(host.zeros(shape, ml_dtypes.bfloat16)) for shape in shapes[:4])
        gate = Tensor(host.zeros(shapes[4], np.float32), requires_grad=recorded)
        before = len(host.launches)
        mlp(x, weight, None, weight2, None, residual, gate=gate)
        assert host.launches[before:] == [("gemm_sm90", "gemm_sm90")] * 2


def test_older_gpus_take_a_launch_more_for_an_activation_and_for_its_slope(host_of):
    host = host_of(False)
    shapes = (4096, 1024), (4096, 1024), (1024, 4096)
    tensors = [Tensor(host.zeros(shape, ml_dtypes.bfloat16), requires_grad=True) for shape in shapes]
    before = len(host.launches)
    mlp(tensors[0], tensors[1], None, tensors[2], None).sum().backward()
    launches = [launch for launch in host.launches[before:] if launch[0] in ("elementwise", "arithmetic")]
    assert launches == [("elementwise", "gelu_with_slope"), ("arithmetic", "multiply_forward")]


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("rows, columns", [(300, 200), (129, 264), (77, 13)])
def test_an_activation_leaves_its_slope(rng, activation, dtype, rows, columns):
    """Numbers of few bits times the identity are exact: value and slope are those of float64 but for a float's error
    and one rounding, far out x or 0, and 1 or 0. A product with the slope is rounded once."""
    x = (3 * rng.standard_normal((rows, columns))).astype(np.float16)
    x[0, :8] = 0, -0.0, 30, -30, 1e4, -1e4, 1e-7, -1e-7
    x = x.astype(dtype).astype(float)
    point = Tensor(x, requires_grad=True)
    value = ACTIVATIONS[activation](point)
    value.sum().backward()
    matrix, identity = (Tensor(array.astype(dtype), device="cuda").data for array in (x, np.eye(columns)))
    out, slope, product = (Tensor(np.full(x.shape, np.nan, dtype), device="cuda").data for _ in range(3))
    linear_cuda(FPROP, Operands(matrix, identity, out, Epilogue(activation=activation, aux=slope)))
    for array, expected in ((out, value.numpy()), (slope, Tensor(point.grad).numpy())):
        found = Tensor(array).numpy()
        low, high = ((expected + error).astype(dtype) for error in (-2e-6, 2e-6))
        assert ((low <= found) & (found <= high)).all()
        assert (np.abs(found.astype(float) - expected.round())[np.abs(x) >= 30] < 1e-11).all()
    linear_cuda(DGRAD, Operands(matrix, identity, product, Epilogue(factor=slope)))
    multiplied = (x * Tensor(slope).numpy().astype(float)).astype(np.float32).astype(dtype)
    np.testing.assert_array_equal(Tensor(product).numpy(), multiplied)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_wide_layers_in_one_launch_each(hopper, rng, activation):
    """Of sizes that gemm_sm90 takes, with every gradient; run twice, to the bit."""
    arrays = arrays_of(rng, (4, 256, 512), 2048, 512)
    check_op(lambda *given: mlp(*given, activation=activation), *arrays, device="cuda", fp32_inputs=(2, 4),
             dtypes=("bfloat16", "float16"), tolerance=2)
    found = []
    for _ in range(2):
        tensors = [Tensor(array.astype(ml_dtypes.bfloat16), requires_grad=True, device="cuda") for array in arrays]
        out = mlp(*tensors, activation=activation)
        out.backward(out.data)
        found.append([out.numpy().tobytes(), *(Tensor(t.grad).numpy().tobytes() for t in tensors)])
    assert found[0] == found[1]


def test_a_gate_of_images_of_one_row(rng):
    given = [Tensor(array) for array in arrays_of(rng, (4, 8), 16, 8)]
    residual, gate = (Tensor(rng.standard_normal((4, 8))) for _ in range(2))
    expected = residual.numpy() + gate.numpy() * mlp(*given).numpy()
    np.testing.assert_allclose(mlp(*given, residual, gate=gate).numpy(), expected, rtol=1e-12)
