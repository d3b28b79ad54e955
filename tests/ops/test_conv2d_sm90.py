import math

import ml_dtypes
import numpy as np
import pytest

from cudiff import ops
from cudiff.cuda.kernels.convolution import plans_sm90, sm90, wgrad_sm90
from cudiff.cuda.kernels.convolution.problem import (
    DGRAD,
    FPROP,
    WGRAD,
    Fusion,
    Image,
    Operands,
    Problem,
    Skip,
    Weight,
)
from cudiff.cuda.kernels.convolution.table import CONVOLUTION
from cudiff.cuda.kernels.gemm import product
from cudiff.cuda.kernels.gemm.product import Epilogue
from cudiff.cuda.kernels.gemm.table import LINEAR
from cudiff.cuda.select import Offer
from cudiff.precision import allow_tf32
from cudiff.tensor import Tensor
from tests.check import problem_of, relative_error, sums_of
from tests.normed import NormedConvolution

# (N, H, W, C), (K, R, S)
SHAPES = [
    ((2, 64, 64, 64), (64, 3, 3)), ((2, 32, 32, 128), (128, 3, 3)), ((2, 16, 16, 192), (192, 3, 3)),
    ((3, 8, 8, 256), (256, 3, 3)), ((2, 9, 11, 72), (40, 3, 3)), ((1, 6, 6, 16), (136, 3, 3)),
    ((3, 20, 12, 128), (128, 1, 1)), ((2, 28, 28, 64), (128, 3, 3)), ((3, 7, 7, 128), (256, 3, 3)),
    ((8, 7, 5, 72), (40, 1, 1)), ((3, 9, 7, 16), (24, 1, 1)),
    ((1, 13, 100, 24), (72, 1, 3)), ((2, 5, 40, 64), (192, 1, 3)), ((2, 33, 17, 448), (192, 3, 3)),
    ((1, 1, 1, 8), (8, 3, 3)), ((2, 64, 64, 8), (8, 3, 3)), ((1, 4, 128, 16), (24, 3, 5)),
    ((2, 70, 64, 136), (200, 3, 3)), ((1, 6, 120, 64), (64, 3, 3)), ((1, 5, 140, 24), (16, 3, 7)),
]


def run(arrays, padding):
    """out, its left, dx, dweight, dbias of one convolution on the GPU."""
    x, weight, bias, dout = (Tensor(array, device="cuda") for array in arrays)
    x, weight, bias = (Tensor(t.data, requires_grad=True) for t in (x, weight, bias))
    with allow_tf32():
        out = ops.conv2d(x, weight, bias, padding=padding)
    out.backward(dout.data)
    return out, out.statistics, *(Tensor(t.grad) for t in (x, weight, bias))


def convolve(given, plan, *wanted, direction=FPROP):
    """`sm90.run` with all the fused ops of the operands, by this plan, or by the planner's if it is None."""
    rows, columns = given.weight.shape[1:3]
    problem = problem_of(direction, given, (1, 1), (rows // 2, columns // 2), *wanted)
    return sm90.run(given, Offer(problem.wanted, sm90.Prepared(problem, problem.wanted, plan)), problem)


# ‖error‖ / ‖expected‖ of results in the storage type, and of the float32 gradient of a weight
TOLERANCES = {ml_dtypes.bfloat16: (4e-3, 1e-5), np.float16: (6e-4, 1e-5), np.float32: (5e-4, 5e-4)}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCES, ids=["bf16", "fp16", "tf32"])
@pytest.mark.parametrize("shape, kernel", SHAPES, ids=str)
def test_against_numpy_and_the_portable_kernels(hopper, for_any_gpu, rng, shape, kernel, dtype):
    padding = (kernel[1] // 2, kernel[2] // 2)
    shapes = (shape, (*kernel, shape[3]), kernel[:1], (*shape[:3], kernel[0]))
    arrays = [rng.standard_normal(s).astype(dtype) for s in shapes]
    arrays[1:3] = [array.astype(np.float32) for array in arrays[1:3]]
    wide = [array.astype(np.float64) for array in arrays]
    x, weight, bias = (Tensor(array, requires_grad=True) for array in wide[:3])
    out = ops.conv2d(x, weight, bias, padding=padding)
    out.backward(wide[3])
    expected = (out.numpy(), x.grad, weight.grad, bias.grad)
    low, exact = TOLERANCES[dtype]

    def leaves_sums():
        got, left, *gradients = run(arrays, padding)
        for result, reference, tolerance in zip((got, *gradients), expected, (low, low, exact, 1e-5), strict=True):
            assert relative_error(result.numpy(), reference) < tolerance
        if left is None:
            return False
        rounded, sums = got.numpy().astype(np.float64), sums_of(left)
        assert np.allclose(sums[..., 0], rounded.sum((1, 2)), rtol=1e-4, atol=1e-3 * np.sqrt(rounded[0, ..., 0].size))
        assert relative_error(sums[..., 1], (rounded**2).sum((1, 2))) < 1e-5
        return True

    assert leaves_sums()
    for_any_gpu()
    size = math.prod(shape[:3]), kernel[0], math.prod(kernel[1:]) * shape[3], 1
    split = product.plan(*product.problem_of(arrays[0].dtype, size, products=1, aligned=True)).splits > 1
    assert leaves_sums() or split or math.prod(shape[1:3]) % 64 > 0


def random_convolution(rng, shape, outputs, kernel, dtype, transposed, upsample=False):
    """x, weight, bias, emb and addend on the GPU, and in float64 what they should give: without, with the addend."""
    times = 2 if upsample else 1
    x = rng.standard_normal(shape).astype(dtype)
    weight = rng.standard_normal((shape[3], *kernel, outputs) if transposed else (outputs, *kernel, shape[3]))
    weight = weight.astype(dtype)
    bias, emb = (rng.standard_normal(size).astype(np.float32) for size in (outputs, (len(x), outputs)))
    addend = rng.standard_normal((shape[0], times * shape[1], times * shape[2], outputs)).astype(dtype)
    seen = x.astype(np.float64).repeat(times, 1).repeat(times, 2)
    wide = weight.astype(np.float64)
    wide = wide[:, ::-1, ::-1].transpose(3, 1, 2, 0).copy() if transposed else wide
    padding = (kernel[0] // 2, kernel[1] // 2)
    expected = ops.conv2d(Tensor(seen), Tensor(wide), padding=padding).numpy()
    expected += bias + emb[:, None, None]
    operands = [Tensor(array, device="cuda").data for array in (x, weight, bias, emb, addend)]
    return operands, (expected, expected + addend.astype(np.float64))


SHARED = [{"cluster": 2}, {"cluster": 4}, {"cluster": 8}, {"stream_k": True}]  # how blocks share the depth


def divisions(pixels):
    """All ways, and none; stream-K with two of the tiles, as each way takes 4 s to compile."""
    return [{}, *(SHARED if pixels in (128, 64) else SHARED[:3])]


@pytest.mark.gpu
@pytest.mark.parametrize("pixels", plans_sm90.TILES, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("stream_k", [False, True])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32], ids=["bf16", "tf32"])
def test_every_tile(hopper, rng, pixels, transposed, stream_k, dtype):
    shape, outputs = (2, 11, 19, 136), 200
    (x, weight, bias, emb, out), (_, expected) = random_convolution(rng, shape, outputs, (3, 3), dtype, transposed)
    chosen = plans_sm90.fit(pixels, shape, outputs, (3, 3), x.itemsize, stream_k=stream_k)
    assert chosen is not None
    given = Operands(x, weight, out, Epilogue(bias, emb, out))
    assert convolve(given, chosen, direction=DGRAD if transposed else FPROP) is None
    assert relative_error(Tensor(out).numpy(), expected) < TOLERANCES[dtype][0]


# (N, H, W, C), (K, R, S): shares of an output tile in and out of the image, parts of the depth in one chunk and across
CLUSTERED = [
    ((1, 11, 7, 136), (72, 3, 3)), ((2, 3, 9, 520), (64, 3, 3)), ((3, 8, 8, 256), (64, 3, 3)),
    ((1, 1, 8, 512), (200, 1, 1)), ((1, 5, 24, 264), (40, 1, 3)),
]


@pytest.mark.gpu
@pytest.mark.parametrize("shared", SHARED, ids=str)
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32], ids=["bf16", "tf32"])
def test_blocks_share_the_depth(hopper, rng, dtype, transposed, adds, shared):
    for shape, (outputs, *kernel) in CLUSTERED:
        (x, weight, bias, emb, addend), results = random_convolution(rng, shape, outputs, kernel, dtype, transposed)
        chosen = plans_sm90.fit(plans_sm90.TILES[-1], shape, outputs, tuple(kernel), x.itemsize, **shared)
        assert chosen is not None
        out, again = (Tensor(np.full(addend.shape, np.nan, dtype), device="cuda").data for _ in range(2))
        epilogue = Epilogue(bias, emb, addend if adds else None)
        asked = (DGRAD, []) if transposed else (FPROP, [Fusion.STATISTICS])
        for target in (out, again):
            left = convolve(Operands(x, weight, target, epilogue), chosen, *asked[1], direction=asked[0])
        got = Tensor(out).numpy()
        assert relative_error(got, results[adds]) < TOLERANCES[dtype][0]
        assert np.array_equal(got, Tensor(again).numpy())
        if not transposed:
            sums, rounded = sums_of(left), got.astype(np.float64)
            assert np.allclose(sums[..., 0], rounded.sum((1, 2)), rtol=1e-4, atol=1e-3 * np.sqrt(shape[1] * shape[2]))
            assert relative_error(sums[..., 1], (rounded**2).sum((1, 2))) < 1e-5


# (N, H, W, C) before it is upsampled, (K, R, S)
UPSAMPLED = [
    ((3, 5, 7, 64), (96, 3, 3)), ((1, 1, 1, 8), (8, 3, 3)), ((1, 9, 4, 96), (136, 3, 3)), ((3, 33, 18, 72), (40, 3, 3)),
    ((140, 8, 8, 72), (64, 3, 3)), ((2, 3, 5, 16), (24, 1, 1)), ((1, 4, 9, 136), (64, 3, 5)),
    ((2, 5, 6, 8), (72, 1, 7)),
]


@pytest.mark.gpu
@pytest.mark.parametrize("shape, weight_shape", UPSAMPLED, ids=str)
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=["bf16", "fp16", "tf32"])
def test_an_input_is_read_upsampled(hopper, rng, dtype, adds, shape, weight_shape):
    """By every tile and cluster, with statistics and without, and with the fewest halo tiles and weights in flight."""
    outputs, kernel = weight_shape[0], weight_shape[1:]
    operands, results = random_convolution(rng, shape, outputs, kernel, dtype, False, upsample=True)
    x, weight, bias, emb, addend = operands
    padding = kernel[0] // 2, kernel[1] // 2
    problem = problem_of(FPROP, Operands(x, weight, addend), (1, 1), padding, Fusion.UPSAMPLE)._replace(products=1)
    assert Fusion.UPSAMPLE in sm90.offer(problem).fused
    seen = (*addend.shape[:3], shape[3])
    fitted = (plans_sm90.fit(pixels, seen, outputs, kernel, x.itemsize, upsample=True, **shared)
              for pixels in plans_sm90.TILES for shared in divisions(pixels))
    for chosen in (None, *filter(None, fitted)):
        least = chosen and chosen._replace(halos=min(2, chosen.halos), weights=min(2, chosen.weights))
        out, again = (Tensor(np.full(addend.shape, np.nan, dtype), device="cuda") for _ in range(2))
        for target, plan, statistics in ((out, chosen, True), (again, least, False)):
            given = Operands(x, weight, target.data, Epilogue(bias, emb, addend if adds else None))
            left = convolve(given, plan, Fusion.UPSAMPLE, *[Fusion.STATISTICS] * statistics)
            assert (left is not None) == statistics
            if statistics:
                sums = sums_of(left)
        got = out.numpy()
        assert relative_error(got, results[adds]) < TOLERANCES[dtype][0]
        assert np.array_equal(got, again.numpy())
        rounded = got.astype(np.float64)
        noise = 1e-3 * np.sqrt(seen[1] * seen[2])
        assert np.allclose(sums[..., 0], rounded.sum((1, 2)), rtol=1e-4, atol=noise)
        assert relative_error(sums[..., 1], (rounded**2).sum((1, 2))) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("pixels", plans_sm90.TILES, ids=str)
@pytest.mark.parametrize("size, sources, scaled, taps", [
    ((100, 8, 8), (128, 64), True, 3), ((2, 11, 19), (64, 40), False, 3), ((3, 33, 17), (72, 0), True, 1),
    ((5, 16, 15), (64, 40), True, 1), ((5, 70, 9), (24, 0), False, 3), ((1, 13, 9), (128, 64), True, 3),
], ids=str)
@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16], ids=["bf16", "fp16"])
def test_gradient_to_a_norm(hopper, rng, pixels, size, sources, scaled, taps, silu, dtype):
    """Blocks with many tiles, one, or part of one; tiles beyond the image, channels beyond the second source."""
    convolution = NormedConvolution(rng, size, sources, 200, taps, dtype, scaled, silu)
    dout, weight, norm, out = convolution.on_gpu()
    problem = dout.shape, sum(sources), (taps, taps), dout.itemsize
    fitted = [plans_sm90.fit(pixels, *problem, **shared) for shared in divisions(pixels)]
    assert fitted[0] is not None
    given = Operands(dout, weight, out.data, norm=norm)
    assert Fusion.NORM_BACKWARD in sm90.offer(problem_of(DGRAD, given, (1, 1), convolution.padding)).fused
    for chosen in (None, *(plan for plan in fitted if plan is not None)):
        out.data.fill(np.nan)
        left = convolve(given, chosen, direction=DGRAD)
        convolution.check(out, left)


# (N, H, W, C), K, channels of the skip path's sources
SKIPS = [
    ((2, 5, 13, 72), 72, (40, 0)), ((1, 11, 19, 40), 200, (64, 40)), ((3, 70, 9, 24), 64, (128, 72)),
    ((100, 8, 8, 64), 200, (192, 64)), ((1, 1, 1, 8), 8, (520, 0)), ((1, 12, 8, 328), 40, (64, 8)),
]


@pytest.mark.gpu
@pytest.mark.parametrize("statistics", [False, True])
@pytest.mark.parametrize("pixels", plans_sm90.TILES, ids=str)
@pytest.mark.parametrize("shape, outputs, sources", SKIPS, ids=str)
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16], ids=["bf16", "fp16"])
def test_a_skip_path_is_further_depth(hopper, rng, dtype, shape, outputs, sources, pixels, statistics):
    """Also with the fewest halo tiles and weights in flight, and in clusters of which some blocks have none of it or
    all."""
    (x, weight, bias, emb, _), (expected, _) = random_convolution(rng, shape, outputs, (3, 3), dtype, False)
    expected -= Tensor(emb).numpy()[:, None, None]
    images = [rng.standard_normal((*shape[:3], c)).astype(dtype) if c else None for c in sources]
    skip_weight = rng.standard_normal((outputs, 1, 1, sum(sources))).astype(dtype)
    skip_bias = rng.standard_normal(outputs).astype(np.float32)
    joined = np.concatenate([image.astype(np.float64) for image in images if image is not None], axis=3)
    expected = expected + joined @ skip_weight[:, 0, 0].astype(np.float64).T + skip_bias
    skip = Skip(
        *(None if array is None else Tensor(array, device="cuda").data for array in (*images, skip_weight, skip_bias))
    )
    for shared in divisions(pixels):
        chosen = plans_sm90.fit(pixels, shape, outputs, (3, 3), x.itemsize, skip=sum(sources), **shared)
        assert shared or chosen is not None
        if chosen is None:
            continue
        for plan in (chosen, chosen._replace(halos=min(2, chosen.halos), weights=min(2, chosen.weights))):
            out, again = (Tensor(np.full(expected.shape, np.nan, dtype), device="cuda") for _ in range(2))
            given = Operands(x, weight, out.data, Epilogue(bias), skip=skip)
            assert Fusion.SKIP in sm90.offer(problem_of(FPROP, given, (1, 1), (1, 1))).fused
            for target in (out, again):
                left = convolve(given._replace(out=target.data), plan, *[Fusion.STATISTICS] * statistics)
            got = out.numpy()
            assert relative_error(got, expected) < TOLERANCES[dtype][0]
            assert np.array_equal(got, again.numpy())
            assert (left is not None) == statistics
            if statistics:
                sums, rounded = sums_of(left), got.astype(np.float64)
                noise = 1e-3 * np.sqrt(shape[1] * shape[2])
                assert np.allclose(sums[..., 0], rounded.sum((1, 2)), rtol=1e-4, atol=noise)
                assert relative_error(sums[..., 1], (rounded**2).sum((1, 2))) < 1e-5


@pytest.mark.gpu
def test_a_skip_path_without_biases(hopper, rng):
    """Its weight is float32, and is rounded on the way."""
    shape = (2, 9, 11, 64)
    (x, weight, *_), _ = random_convolution(rng, shape, 72, (3, 3), ml_dtypes.bfloat16, False)
    image = rng.standard_normal((*shape[:3], 136)).astype(ml_dtypes.bfloat16)
    skip_weight = rng.standard_normal((72, 1, 1, 136)).astype(np.float32)
    plain, out = (Tensor(np.full((*shape[:3], 72), np.nan, image.dtype), device="cuda").data for _ in range(2))
    convolve(Operands(x, weight, plain), None)
    skip = Skip(Tensor(image, device="cuda").data, None, Tensor(skip_weight, device="cuda").data, None)
    convolve(Operands(x, weight, out, skip=skip), None)
    rounded = skip_weight[:, 0, 0].astype(ml_dtypes.bfloat16).astype(np.float64)
    expected = Tensor(plain).numpy().astype(np.float64) + image.astype(np.float64) @ rounded.T
    assert relative_error(Tensor(out).numpy(), expected) < TOLERANCES[ml_dtypes.bfloat16][0]


@pytest.mark.gpu
def test_operands_that_start_anywhere(hopper, rng):
    """As many bytes after a multiple of 16 as one element has."""
    images = [rng.standard_normal((2, 4, 8, 16)).astype(ml_dtypes.bfloat16) for _ in range(2)]
    vectors = [rng.standard_normal(shape).astype(np.float32) for shape in (16, (2, 16))]
    weight = rng.standard_normal((16, 3, 3, 16)).astype(np.float32)

    def anywhere(array):
        buffer = Tensor(np.append(array.ravel()[:1], array.ravel()), device="cuda").data
        return Tensor(buffer[1:].reshape(array.shape))

    def result(place):
        x, w = (Tensor(array, device="cuda") for array in (images[0], weight))
        bias, emb, residual = map(place, (*vectors, images[1]))
        return ops.norm_silu_conv2d(x, weight=w, bias=bias, emb=emb, residual=residual).numpy()

    assert np.array_equal(result(anywhere), result(lambda array: Tensor(array, device="cuda")))


HALF, SINGLE = np.dtype(np.float16), np.dtype(np.float32)


@pytest.mark.parametrize("change", [
    "nothing", "one source", "float32", "channels", "first source", "size", "taps", "part of an image", "emb", "addend",
    "relu", "second source",
])
def test_which_skip_paths_are_further_depth(change):
    dtype = SINGLE if change == "float32" else HALF
    taps, first, second = 1 if change == "taps" else 3, 72 if change == "first source" else 64, 40
    second = 36 if change == "channels" else second
    size = (2, 8, 6) if change == "size" else (2, 6, 8)
    sources = [Image((*size, first), dtype), Image((*size, second), dtype, change != "part of an image")]
    if change == "one source":
        sources = [Image((*size, 72), dtype)]
    problem = Problem(
        FPROP, Image((2, 6, 8, 64), dtype), Weight((16, taps, taps, 64)), Image((2, 6, 8, 16), dtype), (1, 1),
        (taps // 2, taps // 2), 1, frozenset({Fusion.SKIP, Fusion.BIAS, Fusion.STATISTICS}), skip=tuple(sources),
        skip_weight=Weight((16, 1, 1, sum(source.shape[3] for source in sources))),
    )
    more = {change} & {"emb", "addend", "relu", "second source"}
    problem = problem._replace(wanted=problem.wanted | more, x2=problem.x if change == "second source" else None)
    left = problem.wanted - sm90.offer(problem).fused
    assert left == (set() if change in ("nothing", "one source") else {Fusion.SKIP})


@pytest.mark.parametrize("images, channels, skip, together", [
    ((32, 64, 64), 64, 128, True), ((64, 16, 16), 384, 256, True), ((256, 28, 28), 64, 192, True),
    ((64, 64, 64), 128, 256, False), ((64, 32, 32), 256, 512, False), ((32, 64, 64), 192, 384, False),
])
def test_a_wide_skip_path_is_a_product_of_its_own(images, channels, skip, together):
    """Three of guided64's taken together made its step 0.6 % longer on an H200."""
    x, weight = Image((*images, channels), HALF), Weight((channels, 3, 3, channels))
    problem = Problem(FPROP, x, weight, x, (1, 1), (1, 1), 1, frozenset({Fusion.SKIP, Fusion.STATISTICS}),
                      skip=(Image((*images, skip), HALF),), skip_weight=Weight((channels, 1, 1, skip)))
    assert (Fusion.SKIP in sm90.offer(problem).fused) == together


@pytest.mark.parametrize("shape, weight", [
    ((0, 8, 8, 16), (16, 3, 3, 16)), ((1, 0, 8, 16), (16, 1, 1, 16)), ((1, 8, 8, 16), (16, 3, 9, 16)),
    ((1, 8, 8, 16), (16, 5, 5, 16)), ((1, 8, 8, 16), (16, 3, 3, 16)),
], ids=str)
def test_what_is_left_to_the_portable_kernels(shape, weight):
    """All but the last."""
    problem = Problem(FPROP, Image(shape, HALF), Weight(weight), Image((*shape[:3], weight[0]), HALF),
                      padding=(weight[1] // 2, weight[2] // 2))
    taken = shape == (1, 8, 8, 16) and weight == (16, 3, 3, 16)
    for offer in (sm90.offer(problem), wgrad_sm90.offer(problem._replace(direction=WGRAD))):
        assert (offer is not None) == taken


@pytest.mark.parametrize("images", [(32, 8, 8), (32, 16, 16), (3, 7, 5), (8, 7, 5), (2, 9, 13)])
def test_full_tiles_are_no_slower(images):
    """Of the same pixels in the same order, with one image a tile; images that stay apart keep theirs."""
    for apart in (False, True):
        tiles = sm90.full_tiles(images, apart)
        assert math.prod(tiles) == math.prod(images)
        assert not apart or tiles[0] == images[0]
        problems = [((*taken, 192), 576, (1, 1), 2, 0, False) for taken in (tiles, images)]
        full, own = (min(plans_sm90.time(plan, *p) for plan in plans_sm90.plans(*p)
                         if plan.images == 1 and not plan.whole_rows) for p in problems)
        assert full <= own


@pytest.mark.parametrize("dtype", [HALF, SINGLE])
@pytest.mark.parametrize("rows", [1, 7, 300, 8])
def test_matrices_whose_rows_make_no_image_are_left_to_the_portable_kernels(rows, dtype):
    image = Image((1, rows // 8, 8, 16) if rows % 8 == 0 else (rows, 16), dtype)
    for direction in (FPROP, DGRAD, WGRAD):
        problem = Problem(direction, image, Weight((16, 1, 1, 16)), image)
        assert LINEAR.select(problem, "sm_90a").row.name.startswith("conv2d") == (rows % 8 == 0)


def test_float32_is_left_to_the_portable_kernels_unless_tf32_may_be():
    image = Image((1, 8, 8, 16), SINGLE)
    for direction, offer in ((FPROP, sm90.offer), (DGRAD, sm90.offer), (WGRAD, wgrad_sm90.offer)):
        problem = Problem(direction, image, Weight((16, 3, 3, 16)), image, padding=(1, 1), products=3)
        assert offer(problem) is None and offer(problem._replace(products=1)) is not None


def image(channels, dtype=HALF, size=(2, 32, 32), aligned=True):
    return Image((*size, channels), dtype, aligned)


FUSIONS = frozenset({Fusion.BIAS, Fusion.EMB, Fusion.ADDEND, Fusion.STATISTICS, Fusion.RELU})
ASKED = Problem(FPROP, image(64), Weight((64, 3, 3, 64)), image(64), padding=(1, 1), wanted=FUSIONS)
ONE = dict(weight=Weight((64, 1, 1, 64)), padding=(0, 0))
PAIR = dict(weight=Weight((64, 3, 3, 128)), x2=image(64), wanted=frozenset({Fusion.SECOND_SOURCE}))
NORM = dict(direction=DGRAD, norm=(image(64),), wanted=frozenset({Fusion.NORM_BACKWARD, Fusion.SUMS}))
FEW = dict(x=image(3), weight=Weight((64, 3, 3, 3)), wanted=FUSIONS - {Fusion.ADDEND})
EXACT = dict(x=image(64, SINGLE), out=image(64, SINGLE), wanted=frozenset({Fusion.STATISTICS}), products=3)


@pytest.mark.parametrize("changes, on_hopper, elsewhere", [
    ({}, ("conv2d_sm90", ""), ("conv2d", "relu statistics")),
    ({"wanted": frozenset({Fusion.STATISTICS})}, ("conv2d_sm90", ""), ("conv2d", "")),
    ({"x": image(64, aligned=False)}, ("conv2d", "relu statistics"), ("conv2d", "relu statistics")),
    ({"weight": Weight((64, 3, 3, 64), rows_aligned=False)}, ("conv2d", "relu statistics"),
     ("conv2d", "relu statistics")),
    ({"stride": (2, 2), "out": image(64, size=(2, 16, 16))}, ("conv2d", "relu statistics"),
     ("conv2d", "relu statistics")),
    (ONE, ("conv2d_sm90", ""), ("matmul", "relu statistics")),
    ({**ONE, "wanted": frozenset({Fusion.STATISTICS})}, ("conv2d_sm90", ""), ("conv2d", "")),
    ({**ONE, "direction": WGRAD, "wanted": frozenset()}, ("conv2d_wgrad_sm90, conv2d_wgrad_tf32_sm90", ""),
     ("matmul", "")),
    (EXACT, ("conv2d, exact", "statistics"), ("conv2d", "")),
    ({**EXACT, "products": 1}, ("conv2d_sm90", ""), ("conv2d", "")),
    ({**EXACT, **ONE}, ("matmul, exact", "statistics"), ("conv2d", "")),
    (PAIR, ("conv2d_sm90", ""), ("conv2d", "")),
    ({**PAIR, "direction": WGRAD}, ("conv2d_wgrad_sm90, conv2d_wgrad_tf32_sm90", ""), ("conv2d", "")),
    ({**PAIR, "x": image(72), "weight": Weight((64, 3, 3, 136))}, ("conv2d", ""), ("conv2d", "")),
    ({**PAIR, "wanted": frozenset({Fusion.SECOND_SOURCE, Fusion.UPSAMPLE}), "x": image(64, size=(2, 16, 16)),
      "x2": image(64, size=(2, 16, 16))}, ("conv2d", ""), ("conv2d", "")),
    (NORM, ("conv2d_sm90", "sums"), ("conv2d", "sums")),
    ({**NORM, "wanted": NORM["wanted"] | {Fusion.ADDEND}}, ("conv2d_sm90", "norm backward sums"),
     ("conv2d", "norm backward sums")),
    ({**NORM, "norm": (image(32, aligned=False), image(32))}, ("conv2d_sm90", "norm backward sums"),
     ("conv2d", "norm backward sums")),
    ({"direction": DGRAD, "stride": (2, 2), "padding": (0, 0), "weight": Weight((64, 2, 2, 64)),
      "x": image(64, size=(2, 16, 16)), "wanted": frozenset({Fusion.BIAS, Fusion.SUMS})},
     ("matmul, shape.copy", "sums"), ("matmul, shape.copy", "sums")),
    ({"groups": 4, "weight": Weight((64, 3, 3, 16))},
     ("conv2d_sm90, gemm_sm90, conv2d_wgrad_sm90, of bundles", "emb relu statistics"),
     ("conv2d_grouped", "emb relu statistics")),
    ({"groups": 64, "weight": Weight((64, 3, 3, 1))}, ("conv2d_depthwise", "emb relu statistics"),
     ("conv2d_depthwise", "emb relu statistics")),
    (FEW, ("conv2d_few_channels", ""), ("conv2d_few_channels", "")),
    ({**FEW, "x": image(3, SINGLE), "wanted": frozenset({Fusion.CAST})}, ("conv2d_few_channels", ""),
     ("conv2d_few_channels", "")),
    ({**FEW, "wanted": FUSIONS}, ("conv2d", "relu statistics"), ("conv2d", "relu statistics")),
    ({"out": image(3), "weight": Weight((3, 3, 3, 64)), "wanted": FUSIONS - {Fusion.ADDEND, Fusion.EMB}},
     ("conv2d_few_channels", "relu statistics"), ("conv2d_few_channels", "relu statistics")),
    ({**FEW, "direction": DGRAD, "x": image(64), "out": image(3), "wanted": frozenset({Fusion.SUMS})},
     ("conv2d_few_channels", "sums"), ("conv2d_few_channels", "sums")),
    ({"direction": DGRAD, "x": image(3), "weight": Weight((3, 3, 3, 64)), "norm": (image(64),),
      "wanted": frozenset({Fusion.NORM_BACKWARD})}, ("conv2d_few_channels", ""), ("conv2d_few_channels", "")),
    ({**FEW, "direction": WGRAD, "x": image(3, size=(2, 12, 12)), "out": image(64, size=(2, 24, 24)),
      "wanted": frozenset({Fusion.UPSAMPLE})}, ("conv2d_wgrad_sm90, conv2d_wgrad_tf32_sm90", "upsample"),
     ("conv2d", "")),
    ({"direction": WGRAD, "x": image(64, size=(2, 16, 16)), "wanted": frozenset({Fusion.UPSAMPLE})},
     ("conv2d_wgrad_sm90, conv2d_wgrad_tf32_sm90", ""), ("conv2d", "")),
])
def test_which_kernel_runs_and_what_it_leaves(changes, on_hopper, elsewhere):
    for architecture, expected in (("sm_90a", on_hopper), ("sm_80", elsewhere)):
        chosen = CONVOLUTION.select(ASKED._replace(**changes), architecture)
        assert (chosen.row.name, " ".join(sorted(chosen.left))) == expected, architecture
