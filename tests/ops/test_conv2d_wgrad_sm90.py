from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from cudiff import ops
from cudiff.cuda.deferred import deferred
from cudiff.cuda.kernels.convolution import plans_sm90, sm90, wgrad_sm90
from cudiff.cuda.kernels.convolution.problem import FPROP, WGRAD, Fusion, Image, Operands, Problem, Weight
from cudiff.cuda.launch import blocks
from cudiff.cuda.select import Offer
from cudiff.tensor import Tensor
from tests.check import problem_of, relative_error
from tests.ops.test_conv2d_plans import SIZES
from tests.ops.test_conv2d_sm90 import TOLERANCES


def run(x, dout, dweight, add, plan=None, x2=None):
    given = Operands(x, dweight, dout, x2=x2, add=add)
    problem = problem_of(WGRAD, given, (1, 1), (1, 1))
    wgrad_sm90.run(given, Offer(plan=wgrad_sm90.Prepared(problem, plan)), problem)


@pytest.mark.gpu
@pytest.mark.parametrize("cluster, splits", [(1, 1), (1, 5), (2, 2), (2, 6), (4, 4), (8, 8)])
@pytest.mark.parametrize("outputs, channels", [(136, 200), (64, 3), (3, 64)])
@pytest.mark.parametrize("kernel, columns", [((3, 3), 9), ((3, 3), 8), ((3, 3), 30), ((1, 1), 9), ((3, 3), 24)])
def test_wgrad_in_splits_adds_to_what_is_there(hopper, rng, outputs, channels, cluster, splits, kernel, columns):
    x, dout = (rng.standard_normal((3, 61, columns, c)).astype(ml_dtypes.bfloat16) for c in (channels, outputs))
    weight = Tensor(np.zeros((outputs, *kernel, channels)), requires_grad=True)
    ops.conv2d(Tensor(x.astype(np.float64)), weight, padding=kernel[0] // 2).backward(dout.astype(np.float64))
    before = rng.standard_normal(weight.shape).astype(np.float32)
    operands = [Tensor(array, device="cuda").data for array in (x, dout)]
    plans = wgrad_sm90.plans((3, 61, columns), (weight.shape,), upsample=False)
    cuts = {(plan[:2], plan.cut): plan._replace(cluster=cluster, splits=splits) for plan in plans}
    assert all(plan.cut.steps((3, 61, columns)) >= splits for plan in cuts.values())
    assert {plan.cut.whole_rows for plan in cuts.values()} == {columns % 8 > 0, columns == 24 or columns % 8 > 0}
    for chosen in cuts.values():
        dweight = Tensor(before, device="cuda").data
        run(*operands, dweight, True, chosen)
        assert relative_error(Tensor(dweight).numpy(), before + weight.grad) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [129, 136, 200, 256, 300])
@pytest.mark.parametrize("kernel", [(3, 3), (1, 3), (3, 1)])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32], ids=["bf16", "fp16", "tf32"])
def test_wgrad_of_wide_images(hopper, rng, dtype, kernel, columns):
    """By each shape of plan: a row is read in parts, whose halos are of their neighbours."""
    if dtype == np.float32 and kernel != (3, 3):
        pytest.skip("in tf32 kernels are square")
    x, dout = (rng.standard_normal((2, 5, columns, c)).astype(dtype) for c in (40, 72))
    weight = Tensor(np.zeros((72, *kernel, 40)), requires_grad=True)
    expected = ops.conv2d(Tensor(x.astype(np.float64)), weight, padding=(kernel[0] // 2, kernel[1] // 2))
    expected.backward(dout.astype(np.float64))
    before = rng.standard_normal(weight.shape).astype(np.float32)
    operands = [Tensor(array, device="cuda").data for array in (x, dout)]
    cuts = {plan[:3]: plan for plan in wgrad_sm90.plans((2, 5, columns), (weight.shape,), upsample=False)}
    assert {plan.taps for plan in cuts.values()} == ({1, 3} if kernel == (3, 3) else {1})
    for chosen in cuts.values() if dtype != np.float32 else (None,):
        dweight = Tensor(before, device="cuda").data
        run(*operands, dweight, True, chosen)
        tolerance = TOLERANCES[np.float32][1] if dtype == np.float32 else 1e-5
        assert relative_error(Tensor(dweight).numpy(), before + weight.grad) < tolerance


@pytest.mark.gpu
@pytest.mark.parametrize("cluster, splits", [(1, 1), (1, 5), (2, 6), (4, 4), (8, 8)])
@pytest.mark.parametrize("size, outputs, channels", [
    ((5, 5, 7), 96, 64), ((1, 70, 4), 64, 8), ((4, 9, 3), 136, 200), ((2, 7, 32), 8, 96), ((1, 4, 64), 64, 64),
    ((1, 4, 100), 72, 16),
], ids=str)
@pytest.mark.parametrize("taps", [3, 1])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16], ids=["bf16", "fp16"])
def test_wgrad_reads_its_input_upsampled(hopper, rng, dtype, taps, size, outputs, channels, cluster, splits):
    n, height, columns = size
    x, dout = (rng.standard_normal(shape).astype(dtype)
               for shape in ((*size, channels), (n, 2 * height, 2 * columns, outputs)))
    weight = Tensor(np.zeros((outputs, taps, taps, channels)), requires_grad=True)
    seen = x.astype(np.float64).repeat(2, 1).repeat(2, 2)
    ops.conv2d(Tensor(seen), weight, padding=taps // 2).backward(dout.astype(np.float64))
    x, dout = (Tensor(array, device="cuda").data for array in (x, dout))
    dweight = Tensor(np.zeros(weight.shape, np.float32), device="cuda").data
    given = Operands(x, dweight, dout)
    problem = problem_of(WGRAD, given, (1, 1), (taps // 2, taps // 2), Fusion.UPSAMPLE)
    assert Fusion.UPSAMPLE in wgrad_sm90.offer(problem).fused
    cuts = {plan._replace(cluster=cluster, splits=splits)
            for plan in wgrad_sm90.plans(dout.shape[:3], (weight.shape,), upsample=True)}
    assert {plan.taps for plan in cuts} == {1, taps}
    before = rng.standard_normal(weight.shape).astype(np.float32)
    for chosen in (None, *cuts):
        dweight, new = (Tensor(array, device="cuda").data for array in (before, np.full_like(before, np.nan)))
        run(x, dout, dweight, True, chosen)
        run(x, dout, new, False, chosen)
        assert relative_error(Tensor(dweight).numpy(), before + weight.grad) < 1e-5
        assert relative_error(Tensor(new).numpy(), weight.grad) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(3, 8, 8), (2, 5, 24), (1, 40, 8)], ids=str)
@pytest.mark.parametrize("kernel", [(3, 3), (1, 1)])
def test_weight_gradients_are_deferred_and_share_launches(hopper, rng, monkeypatch, size, kernel):
    """More than a launch takes, of different channels, from one and two sources, one of them twice; those whose dout is
    about to be overwritten are done before."""
    launched = []
    monkeypatch.setattr(wgrad_sm90, "_WGRADS", replace(
        wgrad_sm90._WGRADS, run=lambda batch: (launched.append(len(batch)), wgrad_sm90._launch(batch))))
    sources = [(64, 40), (64, 0), (8, 0), (3, 0), (72, 0), (128, 24), (200, 0), (16, 0), (64, 64), (24, 0), (72, 0)]
    sources += [(16, 0)] * 8
    inputs, results, expected = [], [], []
    for i, (first, second) in enumerate(sources):
        outputs = (64, 3, 136, 72)[i % 4]
        arrays = [rng.standard_normal((*size, c)).astype(ml_dtypes.bfloat16) if c else None
                  for c in (first, second, outputs)]
        inputs.append([None if array is None else Tensor(array, device="cuda").data for array in arrays])
        joined = np.concatenate([array for array in arrays[:2] if array is not None], axis=3).astype(np.float64)
        weight = Tensor(np.zeros((outputs, *kernel, first + second)), requires_grad=True)
        ops.conv2d(Tensor(joined), weight, padding=kernel[0] // 2).backward(arrays[2].astype(np.float64))
        before = rng.standard_normal(weight.shape).astype(np.float32) if i % 3 else np.full(weight.shape, np.nan)
        results.append(Tensor(before.astype(np.float32), device="cuda").data)
        expected.append((before if i % 3 else 0) + weight.grad)
    with deferred() as queue:
        for i, ((x, x2, dout), result) in enumerate(zip(inputs, results, strict=True)):
            run(x, dout, result, bool(i % 3), x2=x2)
        assert launched == [16]
        run(x, dout, results[-1], True, x2=x2)
        expected[-1] = expected[-1] + weight.grad
        assert launched == [16, 3]
        queue.before_write(inputs[0][2]), queue.before_read(dout)
        assert launched == [16, 3]
        assert queue.is_read(dout) and not queue.is_read(inputs[0][2])
        queue.before_write(dout)
        dout.fill(np.nan)
        assert launched == [16, 3, 1]
    assert launched == [16, 3, 1]
    for result, reference in zip(results, expected, strict=True):
        assert relative_error(Tensor(result).numpy(), reference) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("cluster", [1, 2, 4, 8])
@pytest.mark.parametrize("taps", [1, 3])
def test_a_launch_gives_the_same_bits_each_time(hopper, rng, taps, cluster):
    """Sums were once lost where they lay on barriers, in one of a hundred launches."""
    images, weights = (32, 8, 8), ((256, 3, 3, 192), *[(256, 3, 3, 256)] * 3)
    plans = wgrad_sm90.plans(images, weights, upsample=False)
    chosen = next(plan for plan in plans if plan.taps == taps)._replace(cluster=cluster, splits=cluster)
    jobs, first = [], []
    for weight in weights:
        x, dout = (Tensor(rng.standard_normal((*images, c)).astype(ml_dtypes.bfloat16), device="cuda").data
                   for c in (weight[3], weight[0]))
        dweight = Tensor(np.zeros(weight, np.float32), device="cuda").data
        jobs.append(Operands(x, dweight, dout))
    launch = wgrad_sm90.Configured(chosen, *[
        wgrad_sm90.Prepared(problem_of(WGRAD, job, (1, 1), (1, 1)), chosen) for job in jobs])
    for count in range(300):
        launch(jobs)
        if count == 0:
            first = [job.weight.copy() for job in jobs]
            differ = first[0][0, 0, 0, 0] * 0
        for job, expected in zip(jobs, first, strict=True):
            differ += (job.weight.view(np.int32) != expected.view(np.int32)).sum()
    assert Tensor(differ).item() == 0


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 5])
@pytest.mark.parametrize("outputs, channels", [(136, 200), (64, 3), (3, 64)])
@pytest.mark.parametrize("kernel", [(3, 3), (1, 1)])
def test_wgrad_of_tf32_in_splits_adds_to_what_is_there(hopper, rng, outputs, channels, splits, kernel):
    x, dout = (rng.standard_normal((2, 48, 9, c)).astype(np.float32) for c in (channels, outputs))
    weight = Tensor(np.zeros((outputs, *kernel, channels)), requires_grad=True)
    ops.conv2d(Tensor(x.astype(np.float64)), weight, padding=kernel[0] // 2).backward(dout.astype(np.float64))
    before = rng.standard_normal(weight.shape).astype(np.float32)
    dweight = Tensor(before, device="cuda").data
    wgrad_sm90.wgrad_tf32(*(Tensor(array, device="cuda").data for array in (x, dout)), dweight, True, splits)
    assert relative_error(Tensor(dweight).numpy(), before + weight.grad) < TOLERANCES[np.float32][1]


@pytest.mark.parametrize("kernel_rows, upsample", [(1, False), (3, False), (1, True), (3, True)])
def test_every_wgrad_fits(kernel_rows, upsample):
    for height, columns in [*SIZES, (3, 129), (9, 200), (64, 256), (1, 640), (512, 1), (767, 2)]:
        width = wgrad_sm90.width_of(columns)
        for channels in (8, 65, 129, 512):
            images, weights = (2, height, columns), ((72, kernel_rows, 3, channels), (200, kernel_rows, 3, 8))
            plans = list(wgrad_sm90.plans(images, weights, upsample))
            if upsample:
                assert bool(plans) == (width == 8 or width % 16 == 0)
            if not plans:
                continue
            assert wgrad_sm90.plan(images, weights, upsample) in plans
            for plan in plans:
                _, rows, pitch, stages, shared = cut = plan.cut
                dout, halo = rows * pitch, (rows + kernel_rows - 1) * (pitch + plan.taps - 1 + 2 * upsample)
                if cut.whole_rows:  # zeros follow the rows, so far as products read
                    assert pitch == columns + plan.taps // 2 and columns % 8 + plan.taps > 1
                    assert rows * pitch <= cut.pixels
                    dout, halo = cut.pixels, cut.pixels + (kernel_rows - 1) * pitch + plan.taps - 1
                else:
                    assert pitch == width and (plan.taps == 1 or width == 8 or width % 16 == 0)
                halo = blocks(halo * 128, 1024) * 1024
                assert stages * (dout * 128 + plan.across * halo) + 16 * stages <= shared
                assert dout % 16 == 0 and dout <= 256
                assert max(rows + kernel_rows - 1, pitch + plan.taps - 1 + 2 * upsample) <= 256, "of a box of TMA"
                assert 1 <= plan.across <= (3 if kernel_rows == 1 else 1) and stages >= 2
                assert plan.taps == 1 or kernel_rows == 3
                steps = 2 * blocks(height, rows) * blocks(columns, pitch)
                assert cut.steps(images) == steps
                assert plan.cluster <= plan.splits <= steps and plan.splits % plan.cluster == 0
                assert 256 * 64 * kernel_rows * plan.across * plan.taps + 16 * stages <= shared
                assert shared + 1024 <= plans_sm90.SHARED_BYTES
            if columns <= 128 and kernel_rows == 3 and not upsample:
                assert any(plan.taps == 3 for plan in plans), "of any width"
            rows, across, stages, shared = wgrad_sm90.fit_tf32(height, columns, channels, kernel_rows)
            part = wgrad_sm90.width_of(columns, wgrad_sm90.TF32_COLUMNS)
            assert rows * part <= 128 and 1 <= rows <= height and across >= 1 and stages >= 3
            sums = kernel_rows**2 * across * 16 * 128 * 4
            assert sums + 16 * stages <= shared <= plans_sm90.SHARED_BYTES - 1024


@pytest.mark.parametrize("columns", [*range(1, 30), 112, 113, 200, 256])
def test_every_tap_of_a_tf32_wgrad_lies_in_the_slab(monkeypatch, columns):
    """The pixels that fill a row up to a multiple of 8 are read too, at each tap."""
    found = []
    monkeypatch.setattr(wgrad_sm90, "launch", lambda *args, **constants: found.append(args[4]))
    monkeypatch.setattr(wgrad_sm90, "empty", np.empty)
    monkeypatch.setattr(wgrad_sm90, "tensor_map", lambda array, box: box)
    monkeypatch.setattr(wgrad_sm90, "add_parts", lambda *args: None)
    x = np.zeros((2, 5, columns, 32), np.float32)
    wgrad_sm90.wgrad_tf32(x, x, np.zeros((32, 3, 3, 32), np.float32), add=False)
    ((x_box, dout_box, *_, rows, width, pitch, _),) = found
    assert x_box == (1, rows + 2, pitch, 32) and dout_box == (1, rows, width, 32)
    assert (columns <= width or columns > 112) and width - 1 + 2 < pitch <= 256 and pitch % 8 == 0


@pytest.mark.parametrize("most", [wgrad_sm90.COLUMNS, wgrad_sm90.TF32_COLUMNS])
def test_parts_of_a_row_leave_little_rest(most):
    for columns in range(1, 1025):
        width = wgrad_sm90.width_of(columns, most)
        parts = blocks(columns, width)
        assert width % 8 == 0 and width <= most and (parts == 1) == (columns <= most)
        assert parts == 1 or (width % 16 == 0 and parts * width < columns + 16)


def test_weight_gradients_left_to_the_portable_kernels():
    """In tf32 of kernels that are not square: forward takes them."""
    image = Image((1, 8, 8, 16), np.dtype(np.float32))
    problem = Problem(FPROP, image, Weight((16, 1, 3, 16)), image, padding=(0, 1))
    assert sm90.offer(problem) is not None
    assert wgrad_sm90.offer(problem._replace(direction=WGRAD)) is None
