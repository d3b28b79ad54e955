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
        for n, channels, outputs in ((4, 8, 136), (4, 72, 64), (4, 1000, 20000), (1, 640, 1024)):
            shape = (n, height, width, channels)
            problem = shape, outputs, kernel, itemsize, skip, upsample
            plans = plans_sm90.plans(*problem)
            assert plans_sm90.plan(*problem) in plans
            for pixels, cluster, rows, each, halos, weights, shared, together, images, whole_rows in plans:
                chunk_of = [chunk for chunk in range(blocks(channels * itemsize, 128)) for _ in range(kernel[1])]
                chunk_of += [chunk_of[-1] + 1 + chunk for chunk in range(-(-skip * itemsize // 128))]
                steps = len(chunk_of)
                tiles = blocks(n, images) * blocks(height, rows) * (1 if whole_rows else blocks(width, 8))
                iterations = 2 if together else blocks(tiles, each)
                assert cluster == 1 or (iterations == 1 and each * blocks(outputs, 64) <= plans_sm90.at_once(cluster))
                parts = [(steps * rank // cluster, steps * (rank + 1) // cluster) for rank in range(cluster)]
                assert all(first < last for first, last in parts)
                chunks = max(len(set(chunk_of[first:last])) for first, last in parts)
                assert rows <= height and images * (rows + kernel[0] // 2) - kernel[0] // 2 <= pixels // 8
                assert images == 1 or (rows == height and width <= 8 and cluster == 1 and not upsample)
                assert halos >= min(2, chunks * iterations) and weights >= min(2, -(-steps // cluster))
                pitch, weight = 7 + kernel[1] + (2 if upsample and kernel[1] in (3, 7) else 0), kernel[0] * 8192
                halo = (pixels // 8 + kernel[0] - 1) * pitch
                if whole_rows:  # and zeros after the last
                    pitch = width + kernel[1] // 2
                    halo = (rows + kernel[0] - 1) * pitch + kernel[1] // 2
                    assert rows * pitch <= pixels and width > 8 and cluster == images == 1 and not upsample
                halo = blocks(halo * 128, 1024) * 1024
                assert 16 * (halos + weights) + 40 <= plans_sm90.BARRIER_BYTES == 1024
                finished = 1 if together and tiles * blocks(outputs, 64) <= each else min(2, iterations)
                others = 1024 * (1 + images) + (pixels * 64 * 4 if cluster > 1 else 0)
                others += finished * blocks(pixels // 8 // cluster, 2) * 2 * 8 * 64 * itemsize
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


@pytest.mark.parametrize("problem, measured", [  # by the choice: microseconds on an H200
    (((4, 128, 128, 128), 192, (3, 3), 2, 0, False), {(256, 1): 43.4, (128, 1): 47.3, (64, 1): 74.1}),
    (((6, 16, 16, 64), 128, (3, 3), 2, 0, False), {(64, 1): 3.8, (256, 1): 6.4, (128, 1, 1): 7.6}),
    (((11, 4, 4, 256), 256, (3, 3), 2, 0, False), {(64, 2): 6.0, (96, 1, 0, 2): 8.7, (160, 1, 0, 4): 11.3}),
    (((12, 8, 8, 384), 768, (3, 3), 2, 0, False), {(136, 1, 0, 2): 12.1, (128, 1, 1): 14.9, (112, 1): 18.8}),
    (((15, 32, 32, 384), 384, (3, 3), 2, 0, False), {(256, 1, 1): 52.9, (128, 1): 57.0, (64, 1): 87.7}),
    (((55, 8, 8, 320), 320, (3, 3), 2, 0, False), {(136, 1, 1, 2): 15.2, (208, 1, 0, 3): 15.6, (112, 1): 23.6}),
    (((13, 14, 14, 640), 640, (3, 3), 2, 0, False), {(216, 1, 0, 1, 1): 28.0, (128, 1): 32.0, (96, 1, 1, 1, 1): 42.5}),
    (((36, 20, 20, 256), 96, (3, 3), 2, 0, False), {(216, 1, 1, 1, 1): 17.2, (216, 1, 0, 1, 1): 22.0}),
    (((62, 8, 8, 448), 256, (1, 1), 2, 0, False), {(128, 1, 0, 2): 5.5, (112, 1): 6.7, (96, 1, 1): 9.6}),
    (((1, 16, 8, 1024), 768, (1, 1), 2, 0, False), {(64, 4): 4.6, (64, 1): 6.1, (128, 1): 6.7}),
    (((136, 14, 14, 256), 256, (1, 1), 2, 0, False), {(208, 1, 0, 1, 1): 13.7, (128, 1): 16.7, (64, 1): 24.7}),
    # with a skip path, whose chunks have one tap each: large tiles wait for its halo tiles
    (((3, 32, 32, 256), 256, (3, 3), 2, 320, False), {(128, 1): 10.1, (64, 1, 1): 14.2, (256, 1, 1): 16.8}),
    (((256, 28, 28, 64), 64, (3, 3), 2, 192, False), {(128, 1, 0, 1, 1): 45.9, (208, 1, 0, 1, 1): 56.0}),
    (((4, 7, 7, 320), 64, (3, 3), 2, 192, False), {(64, 8): 4.2, (64, 2): 6.5, (64, 1): 8.9}),
    (((138, 4, 4, 256), 64, (3, 3), 2, 256, False), {(96, 1, 0, 2): 8.9, (160, 1, 0, 4): 11.9, (96, 1): 14.4}),
    (((3, 16, 16, 1152), 1024, (3, 3), 2, 768, False), {(128, 1, 1): 29.4, (64, 1, 1): 38.7, (256, 1, 1): 51.1}),
    # of floats
    (((2, 40, 40, 512), 768, (3, 3), 4, 0, False), {(160, 1, 1): 57.6, (112, 1): 67.1, (64, 1): 101.0}),
    (((21, 32, 32, 64), 64, (3, 3), 4, 0, False), {(128, 1): 10.2, (256, 1): 11.2, (256, 1, 1): 14.6}),
    (((65, 4, 4, 128), 320, (3, 3), 4, 0, False), {(112, 1, 0, 3): 8.4, (96, 1, 1, 2): 11.3, (160, 1, 1, 4): 13.0}),
    (((1, 2048, 8, 192), 576, (1, 1), 4, 0, False), {(128, 1): 22.2, (256, 1): 37.8}),
    # upsampled
    (((1, 128, 128, 256), 64, (3, 3), 2, 0, True), {(128, 1): 10.7, (256, 1): 15.2, (64, 1, 1): 17.1}),
    (((2, 40, 40, 320), 320, (3, 3), 2, 64, True), {(160, 1): 13.3, (256, 1): 18.6, (256, 1, 1): 22.5}),
    (((3, 24, 24, 640), 128, (3, 3), 2, 0, True), {(64, 2): 9.9, (112, 1, 1): 13.6, (64, 1): 14.9}),
])
def test_the_rule_takes_what_was_fast(problem, measured):
    """The fastest plan of those that were measured, the slowest, and one between them or the rule's."""
    plans = {tuple(plan.choice): plan for plan in plans_sm90.plans(*problem)}
    estimates = {choice: plans_sm90.time(plans[choice], *problem) for choice in measured}
    assert estimates == pytest.approx(measured, rel=0.24)
    assert measured[min(estimates, key=estimates.get)] <= 1.03 * min(measured.values())
