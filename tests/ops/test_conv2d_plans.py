"""Plans of convolutions on Hopper: what they need of the GPU, and which skip paths their times allow."""

import pytest

from cudiff.cuda.kernels.convolution import plans_sm90, sm90
from cudiff.cuda.launch import blocks

WIDTHS = (*range(1, 129, 7), 64, 104, 112, 120, 128)
SIZES = [(height, width) for height in (1, 2, 3, 7, 16, 33, 64, 128) for width in WIDTHS]


@pytest.mark.parametrize("kernel", [(r, s) for r in (1, 3) for s in sm90.COLUMNS])
@pytest.mark.parametrize("upsample", [False, True])
@pytest.mark.parametrize("itemsize, skip", [(2, 0), (4, 0), (2, 72), (2, 1000)])
def test_every_plan_fits(kernel, itemsize, skip, upsample):
    """What kernels/sm90/conv2d_sm90.cu needs of shared memory and its rings; some tile takes each shape."""
    for height, width in SIZES:
        for channels, outputs in ((8, 136), (72, 64), (1000, 20000)):
            shape = (4, height, width, channels)
            problem = shape, outputs, kernel, itemsize, skip, upsample
            plans = plans_sm90.plans(*problem)
            assert plans_sm90.plan(*problem) in plans
            for tile, cluster, rows, each, halos, weights, shared, together, images, whole_rows in plans:
                chunk_of = [chunk for chunk in range(blocks(channels * itemsize, 128)) for _ in range(kernel[1])]
                chunk_of += [chunk_of[-1] + 1 + chunk for chunk in range(-(-skip * itemsize // 128))]
                steps = len(chunk_of)
                tiles = blocks(4, images) * blocks(height, rows) * (1 if whole_rows else blocks(width, 8))
                iterations = 2 if together else blocks(tiles, each)
                assert cluster == 1 or (iterations == 1 and each * blocks(outputs, 64) <= plans_sm90.at_once(cluster))
                parts = [(steps * rank // cluster, steps * (rank + 1) // cluster) for rank in range(cluster)]
                assert all(first < last for first, last in parts)
                chunks = max(len(set(chunk_of[first:last])) for first, last in parts)
                assert rows <= height and images * (rows + kernel[0] // 2) - kernel[0] // 2 <= tile.pixels // 8
                assert images == 1 or (rows == height and width <= 8 and cluster == 1 and not upsample)
                assert halos >= min(2, chunks * iterations) and weights >= min(2, -(-steps // cluster))
                pitch, weight = 7 + kernel[1] + (2 if upsample and kernel[1] in (3, 7) else 0), kernel[0] * 8192
                halo = (tile.pixels // 8 + kernel[0] - 1) * pitch
                if whole_rows:  # and zeros after the last
                    pitch = width + kernel[1] // 2
                    halo = (rows + kernel[0] - 1) * pitch + kernel[1] // 2
                    assert rows * pitch <= tile.pixels and width > 8 and cluster == images == 1 and not upsample
                halo = blocks(halo * 128, 1024) * 1024
                assert 16 * (halos + weights) + 40 <= plans_sm90.BARRIER_BYTES == 1024
                finished = 1 if together and tiles * blocks(outputs, 64) <= each else min(2, iterations)
                others = 1024 * (1 + images) + (tile.pixels * 64 * 4 if cluster > 1 else 0)
                others += finished * blocks(tile.pixels // 8 // cluster, 2) * 2 * 8 * 64 * itemsize
                assert others + halos * halo + weights * weight <= shared <= plans_sm90.SHARED_BYTES - 1024
                room = plans_sm90.SHARED_BYTES - 1024 - others - min(2, chunks * iterations) * halo
                assert kernel == (1, 1) or skip or weights == min(16, room // weight, -(-steps // cluster))


@pytest.mark.parametrize("images", [1, 16, 32, 64])
@pytest.mark.parametrize("size, skip, outputs", [
    (64, 128, 64), (64, 192, 64), (32, 64, 128), (32, 192, 128), (32, 256, 128), (32, 320, 128), (16, 128, 192),
    (16, 320, 192), (16, 384, 192), (16, 448, 192), (8, 192, 256), (8, 448, 256), (8, 512, 256),
])
def test_a_skip_path_costs_less_than_a_launch_of_its_own(images, size, skip, outputs):
    """Of each residual block of the U-Net that is measured."""
    shape, image, kernel = (images, size, size, outputs), (1, images * size**2 // 8, 8, skip), (3, 3)
    alone = plans_sm90.plan.estimate(shape, outputs, kernel, 2, 0, False)
    path = plans_sm90.plan.estimate(image, outputs, (1, 1), 2, 0, False)
    both = plans_sm90.plan.estimate(shape, outputs, kernel, 2, skip, False)
    assert both < alone + path
