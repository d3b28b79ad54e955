"""What Hopper's kernel for linear layers is given, and its results with every plan."""

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from cudiff import Tensor
from cudiff.cuda.kernels.convolution import plans_sm90 as plans_of_convolutions
from cudiff.cuda.kernels.convolution.problem import DGRAD, FPROP, WGRAD, Fusion, Image, Problem, Weight
from cudiff.cuda.kernels.gemm import plans_sm90, sm90
from cudiff.cuda.kernels.gemm.problem import Matrix, Product
from cudiff.cuda.kernels.gemm.product import Epilogue
from cudiff.cuda.kernels.gemm.table import LINEAR, MATMUL
from cudiff.cuda.kernels.gemm.table import matmul as matmul_cuda
from cudiff.ops.elementwise import silu
from cudiff.ops.gelu import gelu
from cudiff.ops.matmul import linear, matmul
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


def test_a_weight_gradient_of_few_tiles_is_split():
    """18 tiles for 132 multiprocessors: 14.2 µs on an H200, in clusters 18.1."""
    assert plans_sm90.plan.by_rule(384, 768, 8192, False)[0].splits > 1


def test_results_of_up_to_64_columns_have_tiles_as_wide():
    assert [plans_sm90.plan.by_rule(50176, columns, 576, True)[0].columns for columns in (8, 64, 72)] == [64, 64, 128]
    assert plans_sm90.plan.by_rule(64, 576, 50176, False)[0].columns == 64, "of the transposed product"
    assert all(plan.columns > 64 for plan in plans_sm90.plans(50176, 72, 576, True))


def test_no_rows_of_tiles_of_windows_are_whole():
    """Of 288 tiles 264 would fill two waves. They cannot be cut off: their rows are channels of all taps."""
    shape = 1024, 9216, 65536, False
    assert any(plan.whole for plan in plans_sm90.plans(*shape))
    assert all(plan.transposed and not plan.whole for plan in plans_sm90.plans(*shape, images=2**24))


WIDE = 8192, 768, 3072


@pytest.mark.parametrize("direction, changes", [
    (FPROP, {"wanted": frozenset({Fusion.EMB})}),
    (FPROP, {"wanted": frozenset({Fusion.SECOND_SOURCE}), "x": Image((1, 1024, 8, 712), HALF),
             "x2": Image((1, 1024, 8, 56), HALF)}),
    (WGRAD, {"wanted": frozenset({Fusion.SECOND_SOURCE}), "x": Image((1, 1024, 8, 704), HALF),
             "x2": Image((1, 1024, 8, 64), HALF)}),
    (FPROP, {"x": Image((1, 1024, 8, 768), HALF, aligned=False)}),
    (FPROP, {"weight": Weight((3072, 1, 1, 768), rows_aligned=False)}),
    (WGRAD, {"out": Image((1, 1024, 8, 3072), HALF, aligned=False)}),
    (DGRAD, {"x": Image((1, 1024, 8, 3072), np.dtype(np.float32))}),
])
def test_what_it_declines(direction, changes):
    assert LINEAR.select(layer(direction, *WIDE, **changes), "sm_90a").row.name != "gemm_sm90"


def test_what_it_adds():
    wanted = frozenset({Fusion.BIAS, Fusion.ADDEND})
    chosen = LINEAR.select(layer(FPROP, *WIDE, wanted=wanted), "sm_90a")
    assert chosen.row.name == "gemm_sm90" and chosen.offer.fused == wanted


def beside(other, gate):
    """What is read or left beside a result, in all ways."""
    return (
        Epilogue(addend=other), Epilogue(addend=other, gate=gate), Epilogue(addend=other, gate=gate, aux=other),
        Epilogue(factor=other), Epilogue(activation="gelu_tanh", aux=other), Epilogue(activation="silu", aux=other),
        Epilogue(activation="gelu"),
    )


@pytest.mark.parametrize("fusion", [Fusion.GATE, Fusion.ACTIVATION, Fusion.FACTOR])
def test_what_becomes_of_a_result(fusion):
    """Of a result that is added to besides it is another's work."""
    wanted = frozenset({Fusion.BIAS, fusion} | ({Fusion.ADDEND} if fusion == Fusion.GATE else set()))
    chosen = LINEAR.select(layer(FPROP, *WIDE, wanted=wanted), "sm_90a")
    assert chosen.row.name == "gemm_sm90" and chosen.offer.fused == wanted
    for others in ({Fusion.ADDEND, Fusion.FACTOR}, {Fusion.EMB}):
        chosen = LINEAR.select(layer(FPROP, *WIDE, wanted=wanted | others), "sm_90a")
        assert chosen.row.name != "gemm_sm90" and fusion in chosen.left
    assert fusion in LINEAR.select(layer(FPROP, *WIDE, wanted=wanted), "sm_80").left


@pytest.mark.parametrize("changes, kernel", [
    ({}, "gemm_sm90"), ({"transpose_a": True}, "gemm_sm90"),
    ({"a": Matrix((16, 64, 64), HALF, aligned=False)}, "matmul"),
    ({"a": Matrix((1, 64, 64), HALF)}, "gemm_sm90"),
    ({"out": Matrix((16, 64, 64), np.dtype(np.float32)), "add": True}, "gemm_sm90"),
    ({"out": Matrix((16, 63, 64), np.dtype(np.float32))}, "matmul"),
    ({"a": Matrix((16, 64, 0), HALF), "b": Matrix((16, 0, 64), HALF)}, "matmul"),
    ({name: Matrix((16, 64, 64), np.dtype(np.float32)) for name in ("a", "b", "out")}, "matmul"),
])
def test_which_products_of_matrices_it_takes(changes, kernel):
    matrix = Matrix((16, 64, 64), HALF)
    problem = Product(matrix, matrix, matrix)._replace(**changes)
    assert MATMUL.select(problem, "sm_90a").row.name == kernel
    assert MATMUL.select(problem, "sm_80").row.name == "matmul"


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("low_out", [True, False])
def test_every_plan_covers_the_result_and_fits(monkeypatch, size, low_out):
    """Tiles against the result, each block's part of the depth and of a tile, shared memory against an H200's."""
    found = []
    monkeypatch.setattr(sm90, "Launch", lambda stem, name, grid, block, shared, **constants: SimpleNamespace(
        run=lambda args: found.append((grid, *block, args, shared, constants))))
    monkeypatch.setattr(sm90, "_launch", sm90._launch.__wrapped__)
    monkeypatch.setattr(sm90, "tensor_map", lambda *args, **kwargs: None)
    monkeypatch.setattr(sm90, "at_16_bytes", lambda array: array)
    monkeypatch.setattr(sm90, "multiprocessors", lambda: 132)
    monkeypatch.setattr(sm90, "empty", np.empty)
    summed = []
    monkeypatch.setattr(sm90, "add_parts", lambda parts, out, add: summed.append((parts.shape, out.shape)))
    rows, columns, depth = size
    out = np.zeros((1, rows, columns), HALF if low_out else np.float32)
    a, b = (np.zeros((1, n, depth) if low_out else (1, depth, n), HALF) for n in (rows, columns))
    plans, launches = list(plans_sm90.plans(rows, columns, depth, low_out)), []
    several = plans_sm90.plans(rows, columns, depth, low_out, 3)
    assert all(plan.splits == 1 for plan in several), "one matrix alone is split"
    for plan in plans:
        for epilogue in [Epilogue(), *beside(out, out)] if low_out else [Epilogue()]:
            sm90.multiply(a, b, out, epilogue, not low_out, not low_out, False, plan)
            (m, n), parts = found[-1][2][-15:-13], found[-1][2][-11]
            if plan.whole:
                assert n == found[-2][2][-14] and m > 0, "the columns of those that are not split"
                m += found[-2][2][-15]
            assert (m, n) == ((columns, rows) if plan.transposed else (rows, columns)) and parts == plan.splits
            assert plan.splits == 1 or summed.pop()[0][0] == plan.splits
            launches += found
            found.clear()
    assert len(plans) >= 3 and not summed
    for grid, threads, args, shared, constants in launches:
        (m, n), parts = args[-15:-13], args[-11]
        width, cluster, stages = (constants[name] for name in ("BN", "CLUSTER", "STAGES"))
        tiles = -(-m // 128) * -(-n // width) * parts
        assert grid == ((min(tiles, 132), 1, 1) if cluster == 1 else (tiles, 1, cluster)) and threads == 384
        assert max(cluster, parts) <= -(-depth // 64)
        assert width // cluster % (64 if low_out else 8) == 0
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
@pytest.mark.parametrize("size", [(300, 200, 1032), (128, 264, 72), (700, 776, 520), (300, 40, 1032)], ids=str)
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("b_mn", [False, True])
def test_every_plan_of_a_rounded_product(hopper, monkeypatch, rng, size, dtype, b_mn):
    """Odd sizes, a bias, an addend that is the result itself; what is beyond the result stays."""
    rows, columns, depth = size
    a, b = (rng.standard_normal((n, depth)).astype(dtype) for n in (rows, columns))
    bias, before = rng.standard_normal(columns).astype(np.float32), rng.standard_normal((rows, columns)).astype(dtype)
    product = a.astype(float) @ b.astype(float).T
    for plan in plans_sm90.plans(rows, columns, depth, True):
        for adds in (False, True):
            found = []
            for count in (132, 2):  # with two blocks, each has many tiles
                monkeypatch.setattr(sm90, "multiprocessors", lambda count=count: count)
                out = Tensor(before if adds else np.full((rows, columns), np.nan, dtype), device="cuda").data[None]
                x, w = (Tensor(array, device="cuda").data[None] for array in (a, b.T.copy() if b_mn else b))
                epilogue = Epilogue(Tensor(bias, device="cuda").data, addend=out if adds else None)
                sm90.multiply(x, w, out, epilogue, False, b_mn, False, plan)
                found.append(Tensor(out).numpy()[0])
            expected = product + bias + (before.astype(float) if adds else 0)
            assert relative_error(found[0], expected) < 1e-2, plan
            assert found[0].tobytes() == found[1].tobytes(), plan


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [192, 576])
def test_many_tiles_of_three_panels(hopper, rng, columns):
    """A block rounds tile after tile of a shallow product: no panel is written while the one before it is stored."""
    rows, outs = 32768, []
    a, b = (Tensor(rng.standard_normal((1, n, 64)).astype(ml_dtypes.bfloat16), device="cuda") for n in (rows, columns))
    for _ in range(20):
        outs.append(Tensor(np.full((1, rows, columns), np.nan, ml_dtypes.bfloat16), device="cuda"))
        sm90.multiply(a.data, b.data, outs[-1].data, Epilogue(), False, False, False, plans_sm90.Plan(192, 1, 0))
    expected = outs[0].numpy()
    assert relative_error(expected[0], a.numpy()[0].astype(float) @ b.numpy()[0].astype(float).T) < 1e-2
    assert all(out.numpy().tobytes() == expected.tobytes() for out in outs[1:])


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(200, 136, 1032), (264, 520, 72), (776, 136, 4104), (200, 64, 1032), (40, 136, 72)],
                         ids=str)
@pytest.mark.parametrize("add", [False, True])
def test_every_plan_of_a_product_of_floats(hopper, monkeypatch, rng, size, add):
    """Operands along the result's axes, those of splits along the depth too, which is no multiple of a step. The
    result's rows are slices of longer ones; what lies beside it stays."""
    rows, columns, depth = size
    a, b = (rng.standard_normal((depth, n)).astype(ml_dtypes.bfloat16) for n in (rows, columns))
    before = np.full((rows, columns + 16), np.nan, np.float32)
    if add:
        before[:] = rng.standard_normal(before.shape)
    expected = a.astype(float).T @ b.astype(float) + (before[:, 8:-8] if add else 0)
    plans = []
    for count in (132, 4):  # with four there are rows of tiles that are not split
        with monkeypatch.context() as patch:
            patch.setattr(plans_of_convolutions, "multiprocessors", lambda count=count: count)
            plans += [plan for plan in plans_sm90.plans(rows, columns, depth, False) if plan not in plans]
    assert rows < 776 or {plan.whole > 0 for plan in plans if plan.splits > 1} == {False, True}
    cases = [(plan, True) for plan in plans]
    if depth % 8 == 0:  # rows along the depth begin at multiples of 16 bytes
        cases += [(plan, False) for plan in plans if plan.splits > 1 and plan.columns == 256]
    for plan, mn in cases:
        found = []
        for count in (132, 2):
            monkeypatch.setattr(sm90, "multiprocessors", lambda count=count: count)
            out = Tensor(before, device="cuda")
            dout, x = (Tensor(array if mn else array.T.copy(), device="cuda").data[None] for array in (a, b))
            sm90.multiply(dout, x, out.data[None][:, :, 8:-8], Epilogue(), mn, mn, add, plan)
            found.append(out.numpy())
        assert relative_error(found[0][:, 8:-8], expected) < 1e-4, (plan, mn)
        assert found[0].tobytes() == found[1].tobytes(), (plan, mn)
        np.testing.assert_array_equal(found[0][:, :8], before[:, :8])
        np.testing.assert_array_equal(found[0][:, -8:], before[:, -8:])


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(300, 200, 1032), (700, 776, 520), (300, 56, 264)], ids=str)
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_what_becomes_of_a_result_with_every_plan(hopper, monkeypatch, rng, size, dtype):
    """Activations and gates of images of 70 rows with what they leave, factors with sums; results of about 1."""
    rows, columns, depth = size
    a, b = ((rng.standard_normal((n, depth)) / depth**0.25).astype(dtype) for n in (rows, columns))
    bias = rng.standard_normal(columns).astype(np.float32)
    before, gate = rng.standard_normal((rows, columns)).astype(dtype), rng.standard_normal((10, columns))
    v, x = a.astype(float) @ b.astype(float).T + bias, before.astype(float)
    gates = np.repeat(gate.astype(np.float32).astype(float), 70, 0)[:rows]

    def value(f, at):
        return f(Tensor(at)).numpy()

    def slope(f, at):
        point = Tensor(at, requires_grad=True)
        f(point).sum().backward()
        return point.grad

    def tanh_gelu(at):
        return gelu(at, approximate="tanh")

    gated = x + gates * v
    expected = [v + x, gated, gated, v * x, value(tanh_gelu, v), value(silu, v), value(gelu, v)]
    expected_aux = {2: v, 4: slope(tanh_gelu, v), 5: slope(silu, v)}
    for plan in plans_sm90.plans(rows, columns, depth, True):
        for i, result in enumerate(expected):
            found = []
            for count in (132, 2):
                monkeypatch.setattr(sm90, "multiprocessors", lambda count=count: count)
                nothing = np.full((1, rows, columns), np.nan, dtype)
                out, aux = (Tensor(nothing, device="cuda").data for _ in range(2))
                left, right, other = (Tensor(array, device="cuda").data[None] for array in (a, b, before))
                sums = Tensor(np.full((1, -(-rows // 64), columns), np.nan, np.float32), device="cuda").data
                epilogue = beside(other, Tensor(gate.astype(np.float32), device="cuda").data)[i]
                leaves, multiplies = i in expected_aux, epilogue.factor is not None
                epilogue = epilogue._replace(bias=Tensor(bias, device="cuda").data, rows_per_image=70,
                                             aux=aux if leaves else None)
                sm90.multiply(left, right, out, epilogue, False, False, False, plan, sums=sums if multiplies else None)
                found.append([Tensor(array).numpy()[0] for array in (out, other, aux, sums)])
            assert relative_error(found[0][0], result) < 1e-2, (plan, i)
            assert (found[0][1] == before).all(), (plan, i)
            left_there = found[0][2].astype(float)
            if leaves:
                assert relative_error(left_there, expected_aux[i]) < 1e-2, (plan, i)
            else:
                assert np.isnan(left_there).all(), (plan, i)
            if multiplies:
                tiles = np.split(found[0][0].astype(float), range(64, rows, 64))
                assert relative_error(found[0][3], np.array([tile.sum(0) for tile in tiles])) < 1e-5, (plan, i)
            assert [array.tobytes() for array in found[0]] == [array.tobytes() for array in found[1]], (plan, i)


@pytest.mark.gpu
@pytest.mark.parametrize("a, b", [
    ((1, 264, 136), (1, 136, 72)), ((3, 200, 72), (3, 72, 264)), ((1, 64, 40), (5, 40, 136)),
    ((5, 136, 520), (1, 520, 8)),
], ids=str)
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
def test_products_of_matrices_in_every_layout(hopper, rng, a, b, transpose_a, transpose_b):
    """A batch of one serves all; results of 16 bits and of floats, new and added to; what is summed is rounded once."""
    dtype, batches = ml_dtypes.bfloat16, max(a[0], b[0])
    left, right = (rng.standard_normal(shape).astype(dtype) for shape in (a, b))
    before = rng.standard_normal((batches, a[1], b[2]))
    arrays = [array.swapaxes(1, 2).copy() if turned else array
              for array, turned in ((left, transpose_a), (right, transpose_b))]
    product = left.astype(float) @ right.astype(float)
    for kind, allowed in ((dtype, 1e-2), (np.float32, 1e-4)):
        for add in (False, True):
            found = []
            for _ in range(2):
                out = Tensor(before.astype(kind), device="cuda").data
                given = (Tensor(array, device="cuda").data for array in arrays)
                matmul_cuda(*given, transpose_a, transpose_b, out, add)
                found.append(Tensor(out).numpy())
            expected = product + before.astype(kind).astype(float) if add else product
            assert relative_error(found[0], expected) < allowed, (kind, add)
            assert found[0].tobytes() == found[1].tobytes(), (kind, add)


@pytest.mark.gpu
@pytest.mark.parametrize("a, b", [
    ((264, 136), (136, 72)), ((3, 200, 72), (3, 72, 264)), ((64, 40), (5, 40, 136)),
], ids=str)
def test_matmul_and_its_gradients(hopper, rng, a, b):
    check_op(matmul, rng.standard_normal(a), rng.standard_normal(b), device="cuda", dtypes=("bfloat16", "float16"))
