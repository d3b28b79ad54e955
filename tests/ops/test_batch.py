"""draw_batch: every image once an epoch, the same bits on both backends, flips, labels and range."""

import numpy as np
import pytest

from cudiff import Tensor, draw_batch, ops, randint
from cudiff.backend import bfloat16, float16, float32
from cudiff.data import shuffled_index


def dataset(rng, n, shape=(3, 5, 3)):
    return rng.integers(0, 256, (n, *shape), dtype=np.uint8), np.arange(n, dtype=np.int32)


def draw(images, labels, step, batch_size, seed, flip=False, device="cpu"):
    labels = None if labels is None else Tensor(labels, device=device)
    x, y = draw_batch(
        Tensor(images, device=device), labels, Tensor(np.array([step], np.int32), device=device), batch_size, seed, flip
    )
    return x.numpy(), None if y is None else y.numpy()


@pytest.mark.parametrize("n, batch_size", [(1, 3), (2, 1), (7, 5), (100, 32), (1000, 64)])
def test_order_is_shuffled_index(device, rng, n, batch_size):
    images, labels = dataset(rng, n)
    for step in (0, 1, 12345, 2**31 - 1):
        x, y = draw(images, labels, step, batch_size, 2**40 + 9, device=device)
        count = step * batch_size + np.arange(batch_size)
        assert np.array_equal(y, shuffled_index(count % n, n, 2**40 + 9, count // n))
        assert x.dtype == np.float32 and np.array_equal(x, images[y].astype(np.float32) / 127.5 - 1)


def test_an_epoch_shows_every_image_once(device, rng):
    images, labels = dataset(rng, 60)
    seen = np.concatenate([draw(images, labels, step, 10, 4, device=device)[1] for step in range(12)])
    assert np.array_equal(np.sort(seen[:60]), labels) and np.array_equal(np.sort(seen[60:]), labels)
    assert not np.array_equal(seen[:60], seen[60:])


def test_range_and_no_labels(device):
    images = np.array([0, 255], np.uint8).reshape(2, 1, 1, 1)
    x, y = draw(images, None, 0, 2, 0, device=device)
    assert y is None and sorted(x.reshape(-1)) == [-1, 1]


@pytest.mark.parametrize("dtype", [float32, float16])
@pytest.mark.parametrize("shape", [(8, 8, 4), (3, 5, 1), (33, 31, 7)])
def test_latents_are_drawn_as_they_are(device, rng, shape, dtype):
    """In the order of images, with their flips; float16 is float32 from then on."""
    latents, labels = (5 * rng.standard_normal((20, *shape))).astype(dtype), np.arange(20, dtype=np.int32)
    for flip in (False, True):
        x, y = draw(latents, labels, 3, 50, 8, flip, device)
        plain = latents[y].astype(np.float32)
        bits = randint(-(2**31), 2**31, (50,), 8, stream=3, first=150).numpy() >= 0  # as in the test of flips below
        expected = np.where(bits[:, None, None, None], plain[:, :, ::-1], plain) if flip else plain
        assert x.dtype == np.float32 and np.array_equal(x, expected)
    images = rng.integers(0, 256, (20, 8, 8, 1), np.uint8)
    assert np.array_equal(y, draw(images, labels, 3, 50, 8, device=device)[1])


@pytest.mark.parametrize("dtype", [float32, bfloat16, float16])
@pytest.mark.parametrize("shape", [(3, 5, 5, 3), (2, 8, 8, 4)])
def test_images_of_the_host(device, rng, shape, dtype):
    images = rng.integers(0, 256, shape, np.uint8)
    x = ops.normalize_images(Tensor(images, device=device), dtype)
    assert x.dtype == dtype and np.array_equal(x.numpy(), (images.astype(np.float32) / 127.5 - 1).astype(dtype))
    with pytest.raises(ValueError, match="uint8"):
        ops.normalize_images(x)


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 5, 3), (16, 16, 1), (33, 31, 3)])
def test_flips_are_horizontal_and_a_half(device, rng, shape):
    images, labels = dataset(rng, 50, shape)
    plain, y = draw(images, labels, 3, 200, 8, device=device)
    flipped, y_flipped = draw(images, labels, 3, 200, 8, flip=True, device=device)
    assert np.array_equal(y, y_flipped)
    bits = randint(-(2**31), 2**31, (200,), 8, stream=3, first=600).numpy() >= 0  # a set top bit, moved by -2^31
    assert 60 < bits.sum() < 140
    assert np.array_equal(flipped, np.where(bits[:, None, None, None], plain[:, :, ::-1], plain))


def test_samples_do_not_depend_on_the_batch_size(device, rng):
    images, labels = dataset(rng, 40)
    whole, y = draw(images, labels, 1, 12, 1, True, device)
    halves = [draw(images, labels, step, 6, 1, True, device) for step in (2, 3)]
    assert np.array_equal(whole, np.concatenate([x for x, _ in halves]))
    assert np.array_equal(y, np.concatenate([y for _, y in halves]))


def test_a_part_of_a_batch(device, rng):
    images, labels = dataset(rng, 40)
    whole, y = draw(images, labels, 1, 12, 1, True, device)
    arrays = [Tensor(array, device=device) for array in (images, labels, np.int32([1]))]
    for samples in (range(0, 5), range(5, 12), range(12)):
        part, classes = draw_batch(*arrays, 12, 1, True, samples)
        assert np.array_equal(part.numpy(), whole[samples.start : samples.stop])
        assert np.array_equal(classes.numpy(), y[samples.start : samples.stop])
    for samples in (range(0, 13), range(3, 3), range(-1, 4), range(0, 8, 2)):
        with pytest.raises(ValueError, match="a batch of 12"):
            draw_batch(Tensor(images), None, Tensor(np.zeros(1, np.int32)), 12, 1, samples=samples)


def test_bad_images():
    with pytest.raises(ValueError, match="uint8"):
        draw_batch(Tensor(np.zeros((2, 3, 3, 1), np.int32)), None, Tensor(np.zeros(1, np.int32)), 1, 0)


def test_the_order_of_a_seed_stays_what_it_was():
    """Runs are resumed by it, and kernels give the same."""
    for arguments, expected in [
        ((np.arange(12), 12, 0, 0), [5, 7, 10, 4, 0, 9, 2, 6, 1, 8, 3, 11]),
        ((np.arange(12), 12, 2**40 + 3, 5), [2, 10, 4, 7, 3, 1, 0, 6, 9, 5, 11, 8]),
        ((np.arange(5) * 1000, 60000, 7, 1), [50455, 3301, 25837, 40513, 21236]),
    ]:
        assert shuffled_index(*arguments).tolist() == expected
