"""Philox: published vectors, the meaning of its counters, the distributions, and one backend against the other."""

import math

import numpy as np
import pytest

from cudiff.errors import CudiffError
from cudiff.ops.random import Generator, Purpose, _to_normal, normal, philox, randint, uniform
from cudiff.tensor import Tensor

SHAPES = [(), (1,), (7,), (3, 5), (2, 4, 4, 3), (0, 3), (33, 17)]


@pytest.mark.parametrize(
    "counter, seed, expected",
    [
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), 0x299F31D0A4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)  # fmt: skip
def test_philox_known_answers(counter, seed, expected):
    # Random123's kat_vectors, philox4x32 with 10 rounds.
    assert tuple(philox(*counter, seed)[0]) == expected


def test_counter_layout(device):
    """All 32 bits of element e of row n are lane e % 4 of counter (e // 4, first + n, step, stream)."""
    seed, stream, step, first = 0x123456789ABCDEF0, 1003, 77, 5
    got = randint(-(2**31), 2**31, (3, 6), seed, stream, step, first, device).numpy().view(np.uint32) ^ 0x80000000
    for n in range(3):
        for e in range(6):
            assert got[n, e] == philox(e // 4, first + n, step, stream, seed)[0, e % 4]


@pytest.mark.parametrize("shape", SHAPES)
def test_cuda_equals_numpy(device, shape):
    for seed, stream, step in [(0, 0, 0), (2**63 + 5, Purpose.DROPOUT + 3, 2**31 - 1)]:
        a, b = (uniform(shape, seed, stream, step, device=d).numpy() for d in ("cpu", device))
        assert a.shape == shape and a.dtype == np.float32 and np.array_equal(a, b)
        a, b = (randint(-3, 1000, shape, seed, stream, step, device=d).numpy() for d in ("cpu", device))
        assert a.shape == shape and a.dtype == np.int32 and np.array_equal(a, b)
        a, b = (normal(shape, seed, stream, step, device=d).numpy() for d in ("cpu", device))
        assert a.shape == shape and a.dtype == np.float32
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_normals_are_normal(device):
    x = normal((64, 4096), seed=1, device=device).numpy().astype(np.float64)
    n = x.size
    assert abs(x.mean()) < 5 / n**0.5
    assert abs(x.var() - 1) < 5 * (2 / n) ** 0.5
    assert abs((x**3).mean()) < 5 * (15 / n) ** 0.5
    assert abs((x**4).mean() - 3) < 5 * (96 / n) ** 0.5
    edges = np.array([-3, -2, -1, 0, 1, 2, 3])
    cdf = np.array([0.001349898, 0.022750132, 0.158655254, 0.5, 0.841344746, 0.977249868, 0.998650102])
    below = (x[..., None] < edges).mean((0, 1))
    assert (abs(below - cdf) < 5 * (cdf * (1 - cdf) / n) ** 0.5).all()
    for shift in (1, 2, 3, 4):  # the lanes of one counter, and neighbouring counters, are independent
        assert abs((x[:, :-shift] * x[:, shift:]).mean()) < 5 / n**0.5
    assert abs((x[:-1] * x[1:]).mean()) < 5 / n**0.5


def test_uniforms_and_integers_are_even(device):
    x = uniform((64, 4096), seed=2, device=device).numpy()
    assert x.min() >= 0 and x.max() < 1
    assert abs(x.mean(dtype=np.float64) - 0.5) < 5 / (12 * x.size) ** 0.5
    counts = np.bincount(randint(0, 10, 100_000, seed=3, device=device).numpy(), minlength=10)
    assert counts.size == 10 and ((counts - 10_000) ** 2 / 10_000).sum() < 35


def test_rows_do_not_depend_on_the_batch(device):
    whole = normal((9, 5, 3), seed=4, stream=2, step=8, device=device).numpy()
    for n in range(9):
        assert np.array_equal(normal((1, 5, 3), 4, 2, 8, first=n, device=device).numpy()[0], whole[n])


def test_seeds_steps_and_streams_differ(device):
    draws = [
        uniform(64, seed, stream, step, device=device).numpy().tobytes()
        for seed in (0, 1, 2**32) for stream in (0, 1) for step in (0, 1)
    ]  # fmt: skip
    assert len(set(draws)) == len(draws)


def test_numbers_on_the_device(device):
    """seed, step and first read by the kernel are as those given to it, in each kind of number."""
    seed, step, first = 0x8BCDEF0123456789, 2**31 + 6, 2**32 - 1
    words = np.array([seed & 0xFFFFFFFF, seed >> 32, step, first], np.uint32)
    for dtype in (np.int32, np.uint32):
        table = Tensor(words.view(dtype), device=device)
        low_high, at, image = (Tensor(table.data[part]) for part in (slice(0, 2), slice(2, 3), slice(3, 4)))
        for fill in (normal, uniform, lambda *args, **kwargs: randint(-9, 1000, *args, **kwargs)):
            expected = fill((2, 3), seed, 5, step, first, device=device).numpy()
            for read in ((low_high, at, image), (seed, at, first), (low_high, step, first), (seed, step, image)):
                assert np.array_equal(fill((2, 3), read[0], 5, *read[1:], device=device).numpy(), expected)
    for name, size in (("seed", 1), ("step", 2), ("first", 2)):
        with pytest.raises(TypeError, match=f"a {name} tensor has shape"):
            normal((2, 3), **{"seed": 0, name: Tensor(np.zeros(size, np.int32), device=device)}, device=device)


def test_generator(device):
    generator = Generator(11, device)
    first = generator.normal((2, 3), stream=Purpose.NOISE).numpy()
    assert np.array_equal(first, generator.normal((2, 3), stream=Purpose.NOISE).numpy())
    assert np.array_equal(first[1:], generator.normal((1, 3), stream=Purpose.NOISE, first=1).numpy())
    array = generator.step.data
    generator.advance()
    assert generator.step.data is array and generator.state() == {"seed": 11, "step": 1, "draws": 0}
    assert np.array_equal(generator.uniform(4, stream=1).numpy(), uniform(4, 11, 1, step=1).numpy())
    assert np.array_equal(generator.randint(0, 9, 4, stream=2).numpy(), randint(0, 9, 4, 11, 2, step=1).numpy())
    generator.load_state({"seed": 11, "step": 0})
    assert generator.step.data is array
    assert np.array_equal(first, generator.normal((2, 3), stream=Purpose.NOISE).numpy())


def test_samples_of_a_generator(device):
    """Rows are of the samples at hand, so many rows a sample; what has other rows is the whole batch's."""
    generator = Generator(11, device)
    wholes = [generator.normal((16, 3), stream=0), generator.uniform((32,), stream=1), generator.uniform((), stream=2)]
    generator.load_state({"seed": 11, "step": 0})
    for samples in (range(0, 8), range(8, 16), range(4, 6)):
        generator.samples = samples
        parts = [generator.normal((len(samples), 3), stream=0), generator.uniform(2 * len(samples), stream=1)]
        parts.append(generator.uniform((), stream=2))
        each = [whole.numpy()[rows * samples.start : rows * samples.stop] for rows, whole in enumerate(wholes[:2], 1)]
        for part, expected in zip(parts, [*each, wholes[2].numpy()], strict=True):
            assert np.array_equal(part.numpy(), expected)
    generator.samples = range(8, 16)
    assert np.array_equal(generator.uniform((3,), stream=1).numpy(), wholes[1].numpy()[:3])
    generator.draws.data[...] = 0
    second = generator.randint(0, 99, (8,)).numpy()
    generator.samples, generator.draws.data[...] = None, 0
    assert np.array_equal(second, generator.randint(0, 99, (16,)).numpy()[8:])


def test_float64_normals_round_to_float32():
    a, b = (normal((5, 7), 0, dtype=dtype).numpy() for dtype in (np.float64, np.float32))
    assert a.dtype == np.float64 and np.array_equal(a.astype(np.float32), b)


def test_bad_arguments():
    with pytest.raises(ValueError, match="low < high"):
        randint(3, 3, (1,), 0)
    with pytest.raises(TypeError, match="float32"):
        normal((1,), 0, dtype=np.float16)


@pytest.mark.parametrize("name, wrong", [
    ("seed", (-1, 2**64, 1.5, True, "1")), ("step", (-1, 2**32, 0.5)), ("first", (-1, 2**32, 0.5)),
    ("stream", (-1, 2**32, 0.5, (2, 3))),
])
def test_what_a_draw_depends_on_is_checked(name, wrong):
    for draw in (normal, uniform, lambda *args, **words: randint(0, 9, *args, **words)):
        for value in wrong:
            with pytest.raises(CudiffError, match=f"^{name} must be "):
                draw((2, 3), **({"seed": 0} | {name: value}))


def test_integers_lie_between_integers():
    for low, high, name in ((0.5, 3, "low"), (0, 2.9, "high"), (False, 3, "low")):
        with pytest.raises(CudiffError, match=f"^{name} must be a whole number"):
            randint(low, high, 4, 0)
    assert randint(np.int64(-3), np.int64(-2), 4, 0).numpy().tolist() == [-3] * 4


def test_a_shape_in_two_words_is_no_stream():
    """PyTorch takes randn(2, 3)."""
    generator = Generator(0)
    for draw, bounds in ((generator.normal, ()), (generator.uniform, ()), (generator.randint, (0, 9))):
        with pytest.raises(TypeError, match="positional argument"):
            draw(*bounds, 2, 3)


@pytest.mark.parametrize("state", [
    {}, {"seed": 1}, {"step": 1}, {"seed": 1, "step": 2, "extra": 3}, [1, 2], None, {"seed": -1, "step": 0},
    {"seed": 1, "step": "2"}, {"seed": 1, "step": 1.5}, {"seed": 1, "step": 2**31},
    {"seed": 1, "step": 2, "draws": None},
])
def test_a_generators_state_is_checked_before_it_is_loaded(state):
    generator = Generator(7)
    with pytest.raises(CudiffError, match=r"^(seed|step|draws) must be|^a generator's state holds"):
        generator.load_state(state)
    assert generator.state() == {"seed": 7, "step": 0, "draws": 0}


def test_no_two_uses_share_a_stream():
    names = list(Purpose.__members__)
    assert len({Purpose[name].value for name in names}) == len(names)


DRAWS = {
    "normal": lambda g, **which: g.normal((3, 5), **which),
    "uniform": lambda g, **which: g.uniform((3, 5), **which),
    "randint": lambda g, **which: g.randint(0, 1 << 30, (3, 5), **which),
}


@pytest.mark.parametrize("kind", DRAWS)
def test_two_draws_differ(kind, device):
    draw, g = DRAWS[kind], Generator(3, device)
    first, second = draw(g).numpy(), draw(g).numpy()
    assert not (first == second).any()
    g.advance()  # is of no concern to them
    assert not np.isin(draw(g).numpy(), [first, second]).any()
    again = Generator(3, device)
    assert (draw(again).numpy() == first).all() and (draw(again).numpy() == second).all()


@pytest.mark.parametrize("kind", DRAWS)
def test_a_draw_of_a_stream_is_a_function_of_the_step(kind, device):
    draw, g = DRAWS[kind], Generator(3, device)
    before = draw(g, stream=Purpose.NOISE).numpy()
    mine = draw(g).numpy()
    assert (draw(g, stream=Purpose.NOISE).numpy() == before).all()  # draws without a stream do not move it
    for stream in Purpose:
        assert stream is Purpose.USER or not (draw(g, stream=stream).numpy() == mine).any(), stream


def test_rows_of_a_draw_are_samples(device):
    whole = Generator(3, device).normal((6, 5)).numpy()
    assert (Generator(3, device).normal((2, 5), first=4).numpy() == whole[4:]).all()


def test_draws_are_resumed(device):
    g = Generator(3, device)
    g.normal(4)
    g.advance()
    state = g.state()
    assert state == {"seed": 3, "step": 1, "draws": 1}
    expected = g.normal(4).numpy()
    g = Generator(0, device)
    counter = g.draws.data
    g.load_state(state)
    assert g.draws.data is counter and (g.normal(4).numpy() == expected).all()
    g.load_state({"seed": 3, "step": 1})  # saved before draws were counted
    assert g.state()["draws"] == 0
    g.load_state({"seed": 2**64 - 1, "step": 0})
    assert g.seed == 2**64 - 1


@pytest.mark.parametrize("seed", [1.5, True, "1", math.nan, -1, 2**64])
def test_a_seed_is_a_whole_number_of_64_bits(seed):
    with pytest.raises(CudiffError, match=r"^seed must be"):
        Generator(seed)
    assert Generator(np.uint64(2**64 - 1)).seed == 2**64 - 1


def test_no_bits_make_infinite_noise():
    """u1 = 0 would: the corners of both words, and their neighbours."""
    corners = np.array([0, 1, 255, 256, 2**32 - 257, 2**32 - 256, 2**32 - 1], np.uint32)
    bits = np.stack(np.meshgrid(corners, corners), -1).reshape(-1, 2)
    numbers = _to_normal(bits)
    assert np.isfinite(numbers).all()
    assert np.allclose(np.abs(numbers).max(), np.sqrt(48 * np.log(2)))  # the largest radius: u1 = 2^-24
    full = bits[bits[:, 0] == 2**32 - 1]
    assert (_to_normal(full) == 0).all()  # u1 = 1
