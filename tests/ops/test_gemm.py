import numpy as np
import pytest

from cudiff.cuda.kernels.convolution.problem import (
    DGRAD,
    FPROP,
    WGRAD,
    Fusion,
    Image,
    Problem,
    Weight,
)
from cudiff.cuda.kernels.convolution.table import CONVOLUTION
from cudiff.cuda.kernels.gemm.product import ROW_BYTES, TILES, plan, stages
from cudiff.cuda.kernels.gemm.table import LINEAR
from cudiff.ops.matmul import linear, matmul
from cudiff.precision import allow_tf32
from cudiff.tensor import Tensor
from tests.check import relative_error

SIZES = [
    (131072, 64, 576, 1), (64, 576, 131072, 1), (8192, 192, 1728, 1), (2048, 256, 2304, 1), (1, 1, 1, 1),
    (3, 5, 7, 100), (32, 3712, 256, 1), (131072, 3, 576, 1),
]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("itemsize, products", [(2, 1), (4, 1), (4, 3)])
@pytest.mark.parametrize("aligned", [True, False])
def test_a_plan_covers_the_depth_and_fits_every_gpu(size, itemsize, products, aligned):
    tile, splits, k_tiles = plan(*size, itemsize, products, aligned)
    depth_tiles = -(-size[2] * itemsize // ROW_BYTES)
    assert (splits - 1) * k_tiles < depth_tiles <= splits * k_tiles
    assert stages() * (tile.rows + tile.columns) * ROW_BYTES <= 101376, "consumer GPUs have 99 KB of shared memory"


def test_the_grid_fills_the_gpu():
    for size in SIZES[:4]:
        tile, splits, _ = plan(*size, 2, 1, True)
        assert -(-size[0] // tile.rows) * -(-size[1] // tile.columns) * splits >= 120


def test_few_columns_take_a_narrow_tile():
    assert plan(131072, 3, 576, 1, 2, 1, True).tile.columns == 16


ROWS = Image((1, 32, 8, 64), np.dtype(np.float16))
LAYER = Problem(FPROP, ROWS, Weight((64, 1, 1, 64)), ROWS, wanted=frozenset({Fusion.BIAS, Fusion.ADDEND}))
PAIR = LAYER._replace(weight=Weight((64, 1, 1, 128)), x2=ROWS, wanted=frozenset({Fusion.SECOND_SOURCE}))
BY_WGRAD = "conv2d_wgrad_sm90, conv2d_wgrad_tf32_sm90"


@pytest.mark.parametrize("problem, kernel, left", [
    (LAYER, "conv2d_sm90", 0), (LAYER._replace(direction=DGRAD), "conv2d_sm90", 0),
    (LAYER._replace(direction=WGRAD, wanted=frozenset()), BY_WGRAD, 0),
    (LAYER._replace(x=ROWS._replace(aligned=False)), "matmul", 0),
    (LAYER._replace(weight=Weight((64, 1, 1, 64), rows_aligned=False)), "matmul", 0),
    (LAYER._replace(x=ROWS._replace(shape=(250, 64)), out=ROWS._replace(shape=(250, 64))), "gemm_sm90", 0),
    (PAIR, "conv2d_sm90", 0), (PAIR._replace(direction=DGRAD), "conv2d_sm90", 0),
    (PAIR._replace(direction=WGRAD), BY_WGRAD, 0),
    (PAIR._replace(x2=ROWS._replace(aligned=False)), "matmul", 1),
    (PAIR._replace(x=ROWS._replace(shape=(1, 32, 8, 32))), "matmul", 1),
    (PAIR._replace(direction=DGRAD, x=ROWS._replace(shape=(1, 32, 8, 32))), "conv2d_sm90", 0),
    (PAIR._replace(direction=DGRAD, out=ROWS._replace(shape=(1, 32, 8, 32))), "matmul", 1),
])
def test_which_kernel_a_linear_layer_runs_by(problem, kernel, left):
    """On GPUs but Hopper matmul.cu, which does two sources in two products."""
    chosen = LINEAR.select(problem, "sm_90a")
    assert (chosen.row.name, len(chosen.left)) == (kernel, left)
    chosen = LINEAR.select(problem, "sm_80")
    assert (chosen.row.name, chosen.left) == ("matmul", problem.wanted & {Fusion.SECOND_SOURCE})


def test_choices_are_made_anew_after_other_plans(monkeypatch):
    """Where the depth is cut, conv2d.cu leaves no sums, and matmul.cu is faster."""
    problem = LAYER._replace(wanted=frozenset({Fusion.STATISTICS}))
    plans, kernels = plan.plans, []
    for splits in (1, 2):
        monkeypatch.setattr(plan, "plans", lambda *p, n=splits: [found for found in plans(*p) if found.splits == n])
        plan.forget()
        kernels.append(CONVOLUTION.select(problem._replace(weight=Weight((64, 1, 1, 1024)), x=ROWS._replace(
            shape=(1, 32, 8, 1024))), "sm_80").row.name)
    monkeypatch.undo()
    plan.forget()
    assert kernels == ["conv2d", "matmul"]


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("dtype, tf32", [("float32", True), ("float32", False), ("bfloat16", False)])
def test_every_tile_in_every_layout(monkeypatch, rng, tile, dtype, tf32):
    import ml_dtypes

    if tile.rows * tile.columns > 128 * 64 and dtype == "float32" and not tf32:
        pytest.skip("this tile spills where operands are split")
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    monkeypatch.setattr("cudiff.cuda.kernels.gemm.product.TILES", (tile,))
    plan.forget()
    a, b = (rng.standard_normal(shape).astype(dtype) for shape in ((200, 136), (168, 136)))
    x, weight = (Tensor(array, requires_grad=True, device="cuda") for array in (a, b))
    with allow_tf32(tf32):
        out = linear(x, weight)
        product = matmul(x.detach(), Tensor(np.ascontiguousarray(b.T), device="cuda"))
    out.backward(out.data)
    plan.forget()
    a, b = a.astype(float), b.astype(float)
    dout = out.numpy().astype(float)
    allowed = 1e-2 if dtype.itemsize == 2 else 1e-3 if tf32 else 1e-6
    pairs = [(out, a @ b.T), (product, a @ b.T), (x.grad, dout @ b), (weight.grad, dout.T @ a)]
    for actual, expected in pairs:
        assert relative_error(Tensor(actual).numpy(), expected) < allowed
