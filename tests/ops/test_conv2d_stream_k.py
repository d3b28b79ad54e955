"""Convolutions on Hopper by stream-K: how the blocks of any GPU share the steps, and blocks with many tiles."""

import ml_dtypes
import numpy as np
import pytest

from cudiff.cuda.kernels.convolution import plans_sm90
from cudiff.cuda.kernels.convolution.problem import DGRAD, FPROP, Fusion, Operands
from cudiff.cuda.kernels.gemm.product import Epilogue
from cudiff.cuda.launch import blocks
from cudiff.tensor import Tensor
from tests.check import relative_error, sums_of
from tests.ops.test_conv2d_sm90 import TOLERANCES, convolve, random_convolution


@pytest.mark.parametrize("count", [1, 3, 20, 78, 114, 132, 144])
def test_blocks_share_all_steps(monkeypatch, count):
    """On a GPU of any number of multiprocessors: `together` divides its blocks and the tiles. Each block has a step, so
    that none waits for one that leaves nothing, and a tile few enough blocks to be added in turn."""
    monkeypatch.setattr(plans_sm90, "multiprocessors", lambda: count)
    taken = 0
    for images in (1, 2, 3, 16, 33):
        for size in ((1, 1), (8, 8), (7, 9), (16, 16), (33, 70)):
            for channels, outputs, skip in ((8, 8, 0), (72, 200, 0), (576, 576, 0), (1160, 1152, 392)):
                shape, kernel = (images, *size, channels), (3, 3)
                several = plans_sm90._of_several(shape, kernel[0], False)
                for tile, in_tile in (*((tile, 1) for tile in plans_sm90.TILES), *several):
                    chosen = plans_sm90.fit(tile, shape, outputs, kernel, 2, skip=skip, stream_k=True, images=in_tile)
                    if chosen is None:
                        continue
                    taken += 1
                    tiles = plans_sm90.count_of(shape, chosen.rows, in_tile, chosen.whole_rows)
                    steps = sum(plans_sm90.steps_of(channels, kernel, 2, skip))
                    assert chosen.blocks % chosen.together == tiles % chosen.together == 0
                    assert chosen.blocks == min(count, tiles * blocks(outputs, 64) * min(steps, plans_sm90.MOST_PARTS))
                    assert chosen.shared + 1024 <= plans_sm90.SHARED_BYTES
    assert taken > 0


@pytest.mark.parametrize("images, size, channels", [(33, 8, 512), (11, 24, 512)])
def test_two_tiles_for_each_multiprocessor_may_fill_them_unevenly(images, size, channels):
    """33 images have 264 tiles of 64 pixels, 33 of each of eight runs of 64 channels. A run's 16 of 132 blocks take
    three tiles, one of them two."""
    few, own, more = (
        plans_sm90.plan.estimate((count, size, size, channels), channels, (3, 3), 2, 0, False)
        for count in (images - 1, images, images + 1)
    )
    assert few <= 1.02 * own and own <= 1.02 * more


# multiprocessors of 12 tiles: three tiles of a block, whole ones of two and of one, and parts of a tile
@pytest.mark.gpu
@pytest.mark.parametrize("count", [4, 5, 6, 7, 12, 20, 50])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32], ids=["bf16", "tf32"])
@pytest.mark.parametrize("transposed", [False, True])
def test_blocks_with_many_tiles(hopper, rng, monkeypatch, count, dtype, transposed):
    """Also with the fewest halo tiles and weights in flight."""
    monkeypatch.setattr(plans_sm90, "multiprocessors", lambda: count)
    shape, outputs, kernel = (1, 17, 9, 136), 72, (3, 3)
    (x, weight, bias, emb, addend), (_, expected) = random_convolution(
        rng, shape, outputs, kernel, dtype, transposed)
    chosen = plans_sm90.fit(plans_sm90.TILES[-1], shape, outputs, kernel, x.itemsize, stream_k=True)
    assert chosen is not None and chosen.blocks == count
    asked, found = (DGRAD, []) if transposed else (FPROP, [Fusion.STATISTICS]), []
    for plan in (chosen, chosen._replace(halos=2, weights=2)):
        out = Tensor(np.full(addend.shape, np.nan, dtype), device="cuda").data
        left = convolve(Operands(x, weight, out, Epilogue(bias, emb, addend)), plan, *asked[1], direction=asked[0])
        found.append((Tensor(out).numpy(), None if left is None else sums_of(left)))
    (got, sums), (again, sums_again) = found
    assert relative_error(got, expected) < TOLERANCES[dtype][0]
    assert np.array_equal(got, again)
    if not transposed:
        assert np.array_equal(sums, sums_again)
        rounded = got.astype(np.float64)
        assert np.allclose(sums[..., 0], rounded.sum((1, 2)), rtol=1e-4, atol=1e-3 * np.sqrt(shape[1] * shape[2]))
