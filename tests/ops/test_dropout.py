"""dropout: the share it drops, its mask on both backends and in backward, and what it does at p = 0."""

import numpy as np
import pytest

from cudiff import Generator, Tensor, dropout
from cudiff.cuda.kernels.norm import portable
from cudiff.ops.group_norm import group_norm
from cudiff.ops.norm_silu_conv2d import norm_silu_conv2d
from cudiff.ops.random import random_bits
from tests.check import check_op, relative_error


@pytest.mark.parametrize("shape", [(1,), (5, 3), (3, 5), (2, 4, 4, 8), (33, 7, 3), (2, 1030)])
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_gradient_and_backends(device, rng, shape, p):
    generators = {d: Generator(3, d) for d in ("cpu", device)}
    check_op(lambda x: dropout(x, p, generators[x.device], 1004), rng.standard_normal(shape), device=device)


def test_mask_is_of_halves_of_philox_words(device):
    """With all bits of seed and stream."""
    seed, stream = 5 + (3 << 40), 1000 + (2 << 16)
    generator = Generator(seed, device)
    generator.advance()
    x = Tensor(np.ones((4, 6, 7), np.float32), device=device)
    words = random_bits(4, 21, seed, stream, 1, 0)[:, :21]  # 32 bits for two elements
    halves = np.stack((words & 0xFFFF, words >> 16), axis=-1).reshape(x.shape)
    assert np.array_equal(dropout(x, 0.3, generator, stream).numpy() != 0, halves >= round(0.3 * 2**16))


@pytest.mark.parametrize("p, dropped", [(1e-9, 1), (3 / 2**17, 2), (1 - 1e-9, 2**16 - 1)])
def test_the_mean_stays_where_p_is_rounded(device, p, dropped):
    """To 1 or more, and fewer than all, of 65,536."""
    x = Tensor(np.ones((32, 65536), np.float32), device=device)
    kept = set(np.unique(dropout(x, p, Generator(0, device), 1000).numpy())) - {0}
    assert kept == {np.float32(65536 / (65536 - dropped))}


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_what_is_dropped_is_0_whatever_it_was(device, value):
    x = np.ones((4, 50), np.float32)
    dropped = dropout(Tensor(x, device=device), 0.4, Generator(5, device), 1000).numpy() == 0
    x[dropped] = value
    out = dropout(Tensor(x, device=device), 0.4, Generator(5, device), 1000).numpy()
    assert np.array_equal(out == 0, dropped) and np.isfinite(out).all()


def test_backward_uses_forwards_mask_even_after_advance(device):
    generator = Generator(5, device)
    x = Tensor(np.ones((8, 50), np.float32), requires_grad=True, device=device)
    out = dropout(x, 0.4, generator, 1000)
    generator.advance()
    out.backward(Tensor(np.ones(x.shape, np.float32), device=device))
    assert np.array_equal(Tensor(x.grad).numpy(), out.numpy())


def test_statistics(device):
    x = Tensor(np.ones((64, 4096), np.float32), device=device)
    out = dropout(x, 0.25, Generator(0, device), 1000).numpy()
    n = out.size
    assert set(np.unique(out)) == {np.float32(0), np.float32(1 / 0.75)}
    assert abs((out == 0).mean() - 0.25) < 5 * (0.25 * 0.75 / n) ** 0.5


def test_rows_do_not_depend_on_the_batch(device):
    x = np.ones((5, 11), np.float32)
    whole = dropout(Tensor(x, device=device), 0.5, Generator(0, device), 1000).numpy()
    part = dropout(Tensor(x[:2], device=device), 0.5, Generator(0, device), 1000).numpy()
    assert np.array_equal(whole[:2], part)


def test_rows_are_of_the_samples_at_hand(device):
    """Also in backward, after the generator has others."""
    generator = Generator(0, device)
    whole = dropout(Tensor(np.ones((10, 11), np.float32), device=device), 0.5, generator, 1000).numpy()
    for samples, rows in ((range(3, 5), 2), (range(1, 3), 4)):  # a row a sample, and two
        generator.samples = samples
        x = Tensor(np.ones((rows, 11), np.float32), requires_grad=True, device=device)
        out = dropout(x, 0.5, generator, 1000)
        generator.samples = range(9, 10)
        out.backward(Tensor(np.ones(x.shape, np.float32), device=device))
        first = samples.start * rows // len(samples)
        assert np.array_equal(out.numpy(), whole[first : first + rows])
        assert np.array_equal(Tensor(x.grad).numpy(), out.numpy())


def test_identity_and_bad_p(device):
    x = Tensor(np.ones(3, np.float32), device=device)
    assert dropout(x, 0, Generator(0, device), 1000) is x
    for p in (-0.1, 1.0):
        with pytest.raises(ValueError, match="p must"):
            dropout(x, p, Generator(0, device), 1000)


@pytest.mark.parametrize("size", [1001, 1004])  # in single elements, and in fours
def test_a_gradient_is_added_to_the_one_there(device, rng, size):
    dout = Tensor(rng.standard_normal((3, size)), dtype="float32", device=device).data
    x = Tensor(rng.standard_normal((3, size)), dtype="float32", device=device, requires_grad=True)
    dropout(x, 0.4, Generator(5, device), 1000).backward(dout)
    alone, before = Tensor(x.grad).numpy().copy(), rng.standard_normal((3, size)).astype(np.float32)
    x.grad = Tensor(before.copy(), device=device).data
    dropout(x, 0.4, Generator(5, device), 1000).backward(dout)
    np.testing.assert_allclose(Tensor(x.grad).numpy(), before + alone, rtol=1e-6, atol=1e-6)


def test_integers_are_refused():
    with pytest.raises(TypeError, match="dropout needs floating tensors, not int64"):
        dropout(Tensor(np.ones(4, np.int64)), 0.5, Generator(0), 0)


def test_a_units_dropout_is_that_of_the_operation_by_itself(device, rng):
    """The mask is the same, results by a weight of one tap to float32's rounding; backward has forward's mask, whatever
    the generator does."""
    x, dout = (rng.standard_normal((3, 5, 5, 9)).astype(np.float32) for _ in range(2))
    grads, outs = [], []
    for fused in (True, False):
        generator = Generator(3, device)
        generator.samples = range(2, 5)
        own = Tensor(x, requires_grad=True, device=device)
        eye, one, zero = (Tensor(a.astype(np.float32), device=device) for a in (np.eye(9), np.ones(9), np.zeros(9)))
        mask = 0.3, generator, 1004
        if fused:
            out = norm_silu_conv2d(own, weight=eye, norm_weight=one, norm_bias=zero, num_groups=3, dropout=mask)
        else:
            out = dropout(group_norm(own, one, zero, 3, silu=True), *mask)
        generator.advance()
        generator.samples = None
        out.backward(Tensor(dout, device=device))
        outs.append(out.numpy())
        grads.append(Tensor(own.grad).numpy())
    assert np.array_equal(*(out == 0 for out in outs)) and len({*(outs[0][:, -1, -1, -1] == 0)}) == 2
    assert relative_error(*outs) < 1e-6 and relative_error(*grads) < 1e-5


def test_a_weights_gradient_alone_is_of_what_was_kept(device, rng):
    """No backward of the norm computes its output again."""
    x, weight = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, 5, 3, 8), (4, 8)))
    x, one = Tensor(x, device=device), Tensor(np.ones(8, np.float32), device=device)
    mask, own = (0.3, Generator(3, device), 1003), Tensor(weight, device=device, requires_grad=True)
    norm_silu_conv2d(x, weight=own, norm_weight=one, norm_bias=one, num_groups=2, dropout=mask).sum().backward()
    kept = dropout(group_norm(x, one, one, 2, silu=True), *mask).numpy()
    assert relative_error(Tensor(own.grad).numpy(), np.tile(kept.sum((0, 1, 2)), (4, 1))) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [(16, 8), (3, 5)])
def test_threads_of_several_pixels_of_two_sources(for_any_gpu, monkeypatch, rng, channels):
    """group_norm.cu's, by one tile for an image: a mask's rows are as long as both sources'."""
    for_any_gpu()
    tiling = portable.tiling
    monkeypatch.setattr(portable, "tiling", lambda *args, **more: (1, *tiling(*args, **more)[1:]))
    arrays = [rng.standard_normal(shape) for shape in (*((2, 27, 29, c) for c in channels), (4, sum(channels)))]
    found = []
    for device, dtype in (("cpu", np.float64), ("cuda", np.float32)):
        x, x2, weight = leaves = [Tensor(a.astype(dtype), device=device, requires_grad=True) for a in arrays]
        one = Tensor(np.ones(sum(channels), dtype), device=device)
        out = norm_silu_conv2d(x, x2, weight=weight, norm_weight=one, norm_bias=one, num_groups=4,
                               dropout=(0.3, Generator(3, device), 1003))
        (out * out).sum().backward()
        found.append([out.numpy(), *(Tensor(leaf.grad).numpy() for leaf in leaves)])
    assert all(relative_error(got, expected) < 1e-5 for expected, got in zip(*found, strict=True))


def test_a_unit_without_dropout_and_dropout_without_a_norm(device, rng):
    x, weight, one, zero = (Tensor(array.astype(np.float32), device=device) for array in (
        rng.standard_normal((1, 4, 4, 8)), rng.standard_normal((8, 8)), np.ones(8), np.zeros(8)))
    norm = dict(norm_weight=one, norm_bias=zero, num_groups=2)
    generator = Generator(3, device)
    plain, dropped = (norm_silu_conv2d(x, weight=weight, **norm, dropout=mask).numpy()
                      for mask in (None, (0.0, generator, 1000)))
    assert np.array_equal(plain, dropped)
    with pytest.raises(ValueError, match="dropout follows a norm"):
        norm_silu_conv2d(x, weight=weight, dropout=(0.3, generator, 1000))
    with pytest.raises(ValueError, match=r"p must lie in \[0, 1\), got 1"):
        norm_silu_conv2d(x, weight=weight, **norm, dropout=(1.0, generator, 1000))


@pytest.mark.gpu
def test_a_units_generator_on_another_device():
    x, weight, one = (Tensor(np.ones(shape, np.float32), device="cuda") for shape in ((1, 4, 4, 8), (8, 8), (8,)))
    with pytest.raises(ValueError, match="on cuda by a generator on cpu"):
        norm_silu_conv2d(x, weight=weight, norm_weight=one, norm_bias=one, num_groups=2,
                         dropout=(0.3, Generator(3), 1000))


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.array])
def test_p_as_numpy_has_it(device, kind):
    x, weight, one = (Tensor(np.ones(shape, np.float32), device=device) for shape in ((2, 4, 4, 8), (8, 8), (8,)))
    plain, given = (norm_silu_conv2d(x, weight=weight, norm_weight=one, norm_bias=one, num_groups=2,
                                     dropout=(p, Generator(3, device), 1000)).numpy() for p in (0.25, kind(0.25)))
    assert np.array_equal(plain, given)
