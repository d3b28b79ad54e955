"""What Hopper's kernel for linear layers is given, and its results with every plan."""

import ml_dtypes
import numpy as np
import pytest

from cudiff import Tensor
from cudiff.cuda.kernels.convolution.problem import DGRAD, FPROP, WGRAD, Fusion, Image, Problem, Weight
from cudiff.cuda.kernels.gemm import sm90
from cudiff.cuda.kernels.gemm.product import Epilogue
from cudiff.cuda.kernels.gemm.table import LINEAR
from cudiff.ops.matmul import linear
from tests.check import check_op, relative_error

HALF = np.dtype(np.float16)
SIZES = [(8192, 768, 3072), (300, 136, 200), (512, 4608, 1536), (1, 8, 8), (129, 64, 264), (64, 4096, 1024)]


def layer(direction, rows, inputs, outputs, **changes):
    """The problem of a linear layer."""
    def image(channels):
        return Image((1, rows // 8, 8, channels) if rows % 8 == 0 else (rows, channels), HALF)

    x, out = (outputs, inputs) if direction == DGRAD else (inputs, outputs)
    return Problem(direction, image(x), Weight((outputs, 1, 1, inputs)), image(out))._replace(**changes)


@pytest.mark.parametrize("rows, inputs, outputs, kernels", [
    (8192, 768, 3072, "ggg"), (8192, 3072, 768, "ggg"), (4096, 4096, 4096, "ggg"), (512, 1536, 4608, "ggg"),
    (300, 136, 200, "ggg"), (256, 1024, 1024, "ccc"), (131072, 64, 64, "ccc"), (32, 256, 1024, "ccc"),
])
def test_wide_layers_take_it_and_others_the_convolutions(rows, inputs, outputs, kernels):
    """As measured on an H200; rows that 8 does not divide make no image."""
    for direction, kernel in zip((FPROP, DGRAD, WGRAD), kernels, strict=True):
        chosen = LINEAR.select(layer(direction, rows, inputs, outputs), "sm_90a")
        assert chosen.row.name[0] == kernel, direction
        assert LINEAR.select(layer(direction, rows, inputs, outputs), "sm_80").row.name == "matmul"


WIDE = 8192, 768, 3072


@pytest.mark.parametrize("direction, changes", [
    (FPROP, {"wanted": frozenset({Fusion.EMB})}),
    (FPROP, {"wanted": frozenset({Fusion.SECOND_SOURCE}), "x2": Image((1, 1024, 8, 64), HALF)}),
    (FPROP, {"x": Image((1, 1024, 8, 768), HALF, aligned=False)}),
    (FPROP, {"weight": Weight((3072, 1, 1, 768), rows_aligned=False)}),
    (WGRAD, {"out": Image((1, 1024, 8, 3072), HALF, aligned=False)}),
    (DGRAD, {"x": Image((1, 1024, 8, 3072), np.dtype(np.float32)), "tf32": True}),
])
def test_what_it_declines(direction, changes):
    assert LINEAR.select(layer(direction, *WIDE, **changes), "sm_90a").row.name != "gemm_sm90"


def test_what_it_adds():
    wanted = frozenset({Fusion.BIAS, Fusion.ADDEND})
    chosen = LINEAR.select(layer(FPROP, *WIDE, wanted=wanted), "sm_90a")
    assert chosen.row.name == "gemm_sm90" and chosen.offer.fused == wanted


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("rounds", [True, False])
def test_every_plan_covers_the_result_and_fits(monkeypatch, size, rounds):
    """Tiles against the result, each block's part of the depth and of a tile, shared memory against an H200's."""
    found = []
    monkeypatch.setattr(sm90, "launch", lambda stem, name, grid, threads, args, shared, **constants:
                        found.append((grid, threads, args, shared, constants)))
    monkeypatch.setattr(sm90, "tensor_map", lambda *args, **kwargs: None)
    monkeypatch.setattr(sm90, "at_16_bytes", lambda array: array)
    monkeypatch.setattr(sm90, "multiprocessors", lambda: 132)
    rows, columns, depth = size
    out = np.zeros((1, rows, columns), HALF if rounds else np.float32)
    a, b = (np.zeros((1, n, depth) if rounds else (1, depth, n), HALF) for n in (rows, columns))
    plans = list(sm90.plans(rows, columns, depth, rounds))
    for plan in plans:
        for addend in (None, out) if rounds else (None,):
            sm90.multiply(a, b, out, Epilogue(addend=addend), not rounds, not rounds, False, plan)
    assert len(found) == (2 if rounds else 1) * len(plans) >= 3
    for grid, threads, args, shared, constants in found:
        m, n = args[-4:-2]
        width, cluster, stages = (constants[name] for name in ("BN", "CLUSTER", "STAGES"))
        tiles = -(-m // 128) * -(-n // width)
        assert grid == ((min(tiles, 132), 1, 1) if cluster == 1 else (tiles, 1, cluster)) and threads == 384
        assert {m, n} == {rows, columns} and cluster <= -(-depth // 64)
        assert width // cluster % (64 if rounds else 8) == 0
        assert stages >= 3 and shared <= 227 << 10
        assert 128 * width * 4 <= stages * (128 + width) * 128, "what blocks send each other lies where operands did"


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(300, 136, 200), (257, 520, 72), (1, 64, 128), (4096, 320, 384), (77, 8, 8)], ids=str)
@pytest.mark.parametrize("residual", [False, True])
def test_linear_layers(hopper, rng, size, residual):
    rows, inputs, outputs = size
    shapes = [(rows, inputs), (outputs, inputs), (outputs,)] + [(rows, outputs)] * residual
    check_op(linear, *(rng.standard_normal(shape) for shape in shapes), device="cuda", dtypes=("bfloat16", "float16"))


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(300, 200, 1032), (128, 264, 72), (700, 776, 520)], ids=str)
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("b_mn", [False, True])
def test_every_plan_of_a_rounded_product(hopper, rng, size, dtype, b_mn):
    """Odd sizes, a bias, an addend that is the result itself; what is beyond the result stays."""
    rows, columns, depth = size
    a, b = (rng.standard_normal((n, depth)).astype(dtype) for n in (rows, columns))
    bias, before = rng.standard_normal(columns).astype(np.float32), rng.standard_normal((rows, columns)).astype(dtype)
    product = a.astype(float) @ b.astype(float).T
    for plan in sm90.plans(rows, columns, depth, True):
        for adds in (False, True):
            found = []
            for _ in range(2):
                out = Tensor(before if adds else np.full((rows, columns), np.nan, dtype), device="cuda").data[None]
                x, w = (Tensor(array, device="cuda").data[None] for array in (a, b.T.copy() if b_mn else b))
                epilogue = Epilogue(Tensor(bias, device="cuda").data, addend=out if adds else None)
                sm90.multiply(x, w, out, epilogue, False, b_mn, False, plan)
                found.append(Tensor(out).numpy()[0])
            expected = product + bias + (before.astype(float) if adds else 0)
            assert relative_error(found[0], expected) < 1e-2, plan
            assert found[0].tobytes() == found[1].tobytes(), plan


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(200, 136, 1032), (264, 520, 72), (776, 136, 4100)], ids=str)
@pytest.mark.parametrize("add", [False, True])
def test_every_plan_of_a_product_of_floats(hopper, rng, size, add):
    """Both operands lie along the result's axes; the depth is no multiple of a step."""
    rows, columns, depth = size
    a, b = (rng.standard_normal((depth, n)).astype(ml_dtypes.bfloat16) for n in (rows, columns))
    before = rng.standard_normal((rows, columns)).astype(np.float32)
    expected = a.astype(float).T @ b.astype(float) + (before if add else 0)
    for plan in sm90.plans(rows, columns, depth, False):
        found = []
        for _ in range(2):
            out = Tensor(before if add else np.full((rows, columns), np.nan, np.float32), device="cuda").data[None]
            x, dout = (Tensor(array, device="cuda").data[None] for array in (b, a))
            sm90.multiply(dout, x, out, Epilogue(), True, True, add, plan)
            found.append(Tensor(out).numpy()[0])
        assert relative_error(found[0], expected) < 1e-4, plan
        assert found[0].tobytes() == found[1].tobytes(), plan
