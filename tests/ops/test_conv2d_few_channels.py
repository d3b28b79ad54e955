import itertools

import ml_dtypes
import numpy as np
import pytest

from cudiff import ops
from cudiff.cuda.device import asked_about, shared_memory
from cudiff.cuda.kernels.convolution import few_channels, table
from cudiff.cuda.kernels.convolution.problem import DGRAD, FPROP, WGRAD, Fusion, Image, Operands, Problem, Weight
from cudiff.cuda.kernels.gemm.product import Epilogue
from cudiff.tensor import Tensor
from tests.check import problem_of, relative_error, sums_of
from tests.normed import NormedConvolution

# (N, H, W, C), K
SHAPES = [
    ((2, 64, 64, 3), 64), ((2, 64, 64, 64), 3), ((3, 28, 28, 1), 32), ((3, 28, 28, 32), 1), ((2, 9, 11, 7), 96),
    ((2, 13, 21, 128), 6), ((1, 1, 1, 2), 64), ((40, 3, 5, 64), 4), ((1, 130, 7, 3), 128), ((300, 4, 4, 32), 5),
    ((2, 40, 101, 96), 3), ((1, 5, 256, 3), 64), ((2, 3, 256, 64), 3), ((2, 20, 24, 3), 192), ((1, 9, 10, 4), 416),
    ((2, 41, 6, 3), 416), ((2, 20, 24, 384), 3), ((1, 9, 10, 160), 6), ((3, 11, 5, 192), 1),
]


def _skip_without_room(shape):
    if shape[2] > 128 and shared_memory() <= 64 << 10:
        pytest.skip("a T4's shared memory has no room for rows of 256 pixels")


def gradients(arrays, device):
    """out, dx, dweight, dbias of one convolution, and what out carries for a norm."""
    x, weight, bias, dout = (Tensor(array, device=device) for array in arrays)
    x, weight, bias = (Tensor(t.data, requires_grad=True) for t in (x, weight, bias))
    out = ops.conv2d(x, weight, bias, padding=weight.shape[1] // 2)
    out.backward(dout.data)
    return [out.numpy(), *(Tensor(t.grad).numpy() for t in (x, weight, bias))], out.statistics


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("shape, outputs, taps", [*((*s, 3) for s in SHAPES), *((*s, 1) for s in SHAPES[2:8])], ids=str)
def test_against_numpy(device, rng, monkeypatch, shape, outputs, taps, dtype):
    if device == "cpu":
        pytest.skip("compares the two backends")
    _skip_without_room(shape)
    taken, launch = [], few_channels.launch
    monkeypatch.setattr(few_channels, "launch", lambda *a, **k: taken.append(a[1]) or launch(*a, **k))
    shapes = (shape, (outputs, taps, taps, shape[3]), (outputs,), (*shape[:3], outputs))
    arrays = [rng.standard_normal(s).astype(dtype) for s in shapes]
    arrays[1:3] = [array.astype(np.float32) for array in arrays[1:3]]
    expected, _ = gradients([array.astype(np.float64) for array in arrays], "cpu")
    results, statistics = gradients(arrays, "cuda")
    contract = "contract_many" if max(shape[3], outputs) > 128 else "contract"
    assert taken == [*(["expand", contract] if shape[3] < outputs else [contract, "expand"]), "wgrad"]
    low = 4e-3 if dtype == ml_dtypes.bfloat16 else 6e-4
    for result, reference, tolerance in zip(results, expected, (low, low, 1e-5, 1e-5), strict=True):
        assert relative_error(result, reference) < tolerance
    assert (statistics is None) == (outputs < 8)
    if statistics is not None:
        rounded, sums = results[0].astype(np.float64), sums_of(statistics)
        assert np.allclose(sums[..., 0], rounded.sum((1, 2)), rtol=1e-4, atol=1e-3 * np.sqrt(rounded[0, ..., 0].size))
        assert relative_error(sums[..., 1], (rounded**2).sum((1, 2))) < 1e-5
    again, _ = gradients(arrays, "cuda")
    assert all(np.array_equal(a, b) for a, b in zip(results, again, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("shape, outputs, taps", [
    *((*s, 3) for s in SHAPES), *((*s, 1) for s in SHAPES[2:8]),
], ids=str)
def test_a_thin_image_of_float32(rng, shape, outputs, taps, dtype):
    """It is rounded where it is read and written as it is summed, by each pass and whether x or out."""
    _skip_without_room(shape)
    shapes = shape, (*shape[:3], outputs)
    stored = [np.float32 if s[3] <= few_channels.MOST else dtype for s in shapes]
    x, dout = (rng.standard_normal(s).astype(d) for s, d in zip(shapes, stored, strict=True))
    weight = rng.standard_normal((outputs, taps, taps, shape[3])).astype(dtype)
    bias = rng.standard_normal(outputs).astype(np.float32)
    leaves = [Tensor(a.astype(dtype).astype(np.float64), requires_grad=True) for a in (x, weight)]
    expected = ops.conv2d(*leaves, Tensor(bias.astype(np.float64)), padding=taps // 2)
    expected.backward(dout.astype(dtype).astype(np.float64))

    x, dout, weight, bias = (Tensor(a, device="cuda").data for a in (x, dout, weight, bias))
    dx, out, dweight = (Tensor(np.full(s, np.nan, d), device="cuda").data for s, d in zip(
        (*shapes, weight.shape), (*stored, np.float32), strict=True
    ))
    place = (1, 1), (taps // 2, taps // 2)
    problem = problem_of(FPROP, Operands(x, weight, out), *place)
    assert few_channels.offer(problem).fused >= problem.wanted
    statistics = table.fprop(Operands(x, weight, out, Epilogue(bias)), *place, statistics=True)
    table.dgrad(Operands(dout, weight, dx), *place)
    table.wgrad(Operands(x, dweight, dout), *place)
    low = 4e-3 if dtype == ml_dtypes.bfloat16 else 6e-4
    for result, reference in ((out, expected.data), (dx, leaves[0].grad), (dweight, leaves[1].grad)):
        assert relative_error(Tensor(result).numpy(), reference) < (1e-5 if result.dtype == np.float32 else low)
    assert (statistics is None) == (outputs <= few_channels.MOST)
    if statistics is not None:
        sums = sums_of(statistics)
        assert relative_error(sums[..., 1], (Tensor(out).numpy().astype(np.float64) ** 2).sum((1, 2))) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("shape, outputs", SHAPES[:4], ids=str)
def test_the_weight_gradient_adds_to_what_is_there(device, rng, shape, outputs):
    if device == "cpu":
        pytest.skip("calls the kernel")
    x, dout = (rng.standard_normal((*shape[:3], c)).astype(ml_dtypes.bfloat16) for c in (shape[3], outputs))
    weight = Tensor(np.zeros((outputs, 3, 3, shape[3])), requires_grad=True)
    ops.conv2d(Tensor(x.astype(np.float64)), weight, padding=1).backward(dout.astype(np.float64))
    before = rng.standard_normal(weight.shape).astype(np.float32)
    dweight = Tensor(before, device="cuda").data
    x, dout = (Tensor(array, device="cuda").data for array in (x, dout))
    given = Operands(x, dweight, dout, add=True)
    problem = problem_of(WGRAD, given, (1, 1), (1, 1))
    few_channels.run(given, few_channels.offer(problem), problem)
    assert relative_error(Tensor(dweight).numpy(), before + weight.grad) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("shape, outputs", [((3, 28, 28, 1), 64), ((2, 9, 11, 7), 96)], ids=str)
def test_the_embedding_and_relu_come_with_it(rng, shape, outputs):
    x, weight, out = (rng.standard_normal(s).astype(ml_dtypes.bfloat16) for s in (
        shape, (outputs, 3, 3, shape[3]), (*shape[:3], outputs)
    ))
    bias, emb = (rng.standard_normal(s).astype(np.float32) for s in ((outputs,), (shape[0], outputs)))
    wide = [Tensor(a.astype(np.float64)) for a in (x, weight, bias)]
    expected = np.maximum(ops.conv2d(*wide, padding=1).numpy() + emb[:, None, None], 0)
    x, weight, out, bias, emb = (Tensor(a, device="cuda").data for a in (x, weight, out, bias, emb))
    given = Operands(x, weight, out, Epilogue(bias, emb))
    problem = problem_of(FPROP, given, (1, 1), (1, 1), Fusion.RELU)
    offer = few_channels.offer(problem)
    assert offer.fused == problem.wanted
    few_channels.run(given, offer, problem)
    assert relative_error(Tensor(out).numpy(), expected) < 4e-3


@pytest.mark.gpu
@pytest.mark.parametrize("shape, outputs, taps", [
    ((2, 64, 64, 64), 3, 3), ((3, 13, 9, 128), 6, 3), ((2, 10, 12, 192), 3, 3), ((40, 3, 5, 96), 1, 1),
    ((1, 130, 7, 32), 7, 3),
], ids=str)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("float32_dout", [False, True])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16], ids=["bf16", "fp16"])
def test_gradient_to_a_norm(rng, shape, outputs, taps, scaled, float32_dout, dtype):
    """From a thin gradient of 16 bits or, `float32_dout`, of float32."""
    *size, channels = shape
    convolution = NormedConvolution(rng, tuple(size), (channels, 0), outputs, taps, dtype, scaled)
    if float32_dout:  # by less than half of a rounding away
        rounded = convolution.dout
        away = 1 + 1e-4 if dtype == ml_dtypes.bfloat16 else 1 + 1e-5
        convolution.dout = rounded.astype(np.float32) * np.float32(away)
        assert np.array_equal(convolution.dout.astype(dtype), rounded)
    dout, weight, norm, out = convolution.on_gpu()
    given = Operands(dout, weight, out.data, norm=norm)
    problem = problem_of(DGRAD, given, (1, 1), convolution.padding)
    assert Fusion.NORM_BACKWARD in few_channels.offer(problem).fused
    statistics = table.dgrad(given, (1, 1), convolution.padding)
    convolution.check(out, statistics)


@pytest.mark.parametrize("turing", [False, True])
def test_a_cast_is_taken_by_all_three_passes_or_none(host_of, turing):
    host_of(not turing, turing=turing)
    taken = []
    for channels, few, taps, width in itertools.product((64, 384, 1024, 3072), (1, 3, 7), (1, 3), (8, 64, 256)):
        thin = Image((2, 8, width, few), np.dtype(np.float32))
        wide = Image((2, 8, width, channels), np.dtype(np.float16))
        for x, out in ((thin, wide), (wide, thin)):
            weight = Weight((out.shape[3], taps, taps, x.shape[3]))
            problems = [Problem(direction, *images, padding=(taps // 2,) * 2, wanted=frozenset({Fusion.CAST}))
                        for direction, images in ((FPROP, (x, weight, out)), (DGRAD, (out, weight, x)),
                                                  (WGRAD, (x, weight, out)))]
            offers = {few_channels.offer(problem) is None for problem in problems}
            assert len(offers) == 1
            taken.append(offers == {False})
    assert 0.5 < np.mean(taken) < 1


@pytest.mark.parametrize("outputs", [1, 2])
def test_a_weight_that_is_every_second_one_of_more(host_of, outputs):
    """A single one is contiguous, as it stands, whatever its stride."""
    host = host_of(True)
    weight = host.zeros((2 * outputs, 3, 3, 64), ml_dtypes.bfloat16)[::2]
    ops.conv2d(Tensor(host.zeros((2, 9, 9, 64), ml_dtypes.bfloat16)), Tensor(weight), padding=1)
    assert ("conv2d_few_channels", "contract") in host.launches


@pytest.mark.parametrize("hopper, shape, outputs", [
    (True, (1, 8, 8, 7), 2048), (True, (1, 8, 256, 7), 192), (False, (1, 8, 64, 3), 512), (False, (1, 8, 64, 512), 3),
], ids=str)
def test_a_cast_only_where_all_passes_fit(host_of, hopper, shape, outputs):
    """The gradient of a thin float32 image takes the most shared memory, as its weights stay there."""
    low = ml_dtypes.bfloat16 if hopper else np.float16
    host = host_of(hopper, turing=not hopper)
    thin_in = shape[3] < outputs
    own, wanted = (np.float32, low) if thin_in else (low, np.float32)
    x = Tensor(host.zeros(shape, own), requires_grad=True)
    weight = Tensor(host.zeros((outputs, 3, 3, shape[3]), low), requires_grad=True)
    out = ops.norm_silu_conv2d(x, weight=weight, dtype=wanted)
    out.backward(host.zeros(out.shape, wanted))
    assert (x.grad.dtype, out.dtype) == (own, wanted)


def test_a_weights_gradient_needs_no_room_for_weights(host_of):
    host = host_of(False, turing=True)
    x, weight = (Tensor(host.zeros(s, np.float16), requires_grad=True) for s in ((1, 8, 64, 512), (3, 3, 3, 512)))
    out = ops.conv2d(x, weight, padding=1)
    out.backward(host.zeros(out.shape, np.float16))
    assert [name for stem, name in host.launches if stem == "conv2d_few_channels"] == ["expand", "wgrad"]


@pytest.mark.parametrize("flipped", [False, True])
@pytest.mark.parametrize("shape", [(64, 3, 3, 3), (3, 3, 3, 64)])
def test_where_the_kernel_finds_the_weight(shape, flipped):
    """conv2d_few_channels.cu's Weight: (tap, channel of few, of many) against the array's own indexing."""
    weight = np.arange(np.prod(shape)).reshape(shape)
    at = few_channels._weight(shape, few_last=shape[3] == 3, flipped=flipped)
    turned = weight[:, ::-1, ::-1] if flipped else weight
    for tap, j, c in ((0, 0, 0), (1, 2, 5), (5, 1, 63), (8, 2, 0)):
        expected = turned[(c, tap // 3, tap % 3, j) if shape[3] == 3 else (j, tap // 3, tap % 3, c)]
        assert at["first"] + tap * at["tap"] + j * at["few"] + c * at["many"] == expected


@pytest.mark.parametrize("n, size, few", [(1, 64, 3), (32, 64, 3), (264, 64, 7), (400, 224, 3)])
def test_a_tile_fits_in_shared_memory(n, size, few):
    for bytes_of in (few_channels.patches_bytes, few_channels.copies_bytes, few_channels.products_bytes):
        rows, shared = few_channels._rows(n, size, lambda rows, of=bytes_of: of(rows, size, few, 3))
        assert 0 < rows <= size and shared == bytes_of(rows, size, few, 3) <= few_channels.shared_bytes()


@pytest.mark.parametrize("n, size, chunks, rows", [
    (1, 64, 1, 1), (1, 64, 6, 2), (2, 64, 6, 3), (3, 65, 6, 5), (8, 64, 6, 8), (32, 64, 3, 8), (64, 64, 3, 16),
    (2, 256, 6, 2), (1, 600, 6, 3), (2, 3, 6, 1), (132, 28, 1, 14),
])
def test_blocks_of_the_same_rows_are_counted(n, size, chunks, rows):
    with asked_about("sm_90a"):
        assert few_channels._rows(n, size, lambda rows: rows, size, chunks) == (rows, rows)


@pytest.mark.parametrize("width", [1, 4, 15, 16, 17, 28, 64, 65, 80, 81, 252])
def test_rows_of_patches_begin_in_other_banks(width):
    words = few_channels.patches_pitch(width) // 2
    assert words % 32 == 8 and 0 <= 2 * words - 4 * -(-width // 4) < 64
