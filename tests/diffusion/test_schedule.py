"""Schedules against closed forms and against values worked out by hand."""

import math

import numpy as np
import pytest

from cudiff.diffusion.schedule import Schedule, cosine_betas, karras_sigmas, linear_betas
from cudiff.errors import CudiffError


def test_linear_betas_are_those_of_ddpm():
    betas = linear_betas(1000)
    assert betas.shape == (1000,)
    assert betas[0] == 1e-4
    assert betas[-1] == 0.02
    assert np.allclose(np.diff(betas), (0.02 - 1e-4) / 999, rtol=1e-9)
    assert np.allclose(linear_betas(250)[[0, -1]], [4e-4, 0.08])
    with pytest.raises(CudiffError, match="use 21 or more"):
        linear_betas(20)


def test_cosine_alphas_cumprod_follow_equation_17():
    schedule = Schedule("cosine", 1000)

    def f(t):
        return math.cos((t / 1000 + 0.008) / 1.008 * math.pi / 2) ** 2

    for t in (0, 1, 499, 990):  # entry t of the table is the paper's t + 1
        assert math.isclose(schedule.alphas_cumprod[t], f(t + 1) / f(0), rel_tol=1e-9)
    assert cosine_betas(1000)[-1] == 0.999


def test_alphas_cumprod_posterior_and_sigma_by_hand():
    schedule = Schedule(np.array([0.1, 0.2, 0.5]))
    assert np.allclose(schedule.alphas_cumprod, [0.9, 0.72, 0.36])
    assert np.allclose(schedule.posterior_variance, [0, 0.2 * 0.1 / 0.28, 0.5 * 0.28 / 0.64])
    assert np.allclose(schedule.sigmas, [1 / 3, math.sqrt(0.28 / 0.72), 4 / 3])


def test_ddpm_ends_in_noise():
    assert 4e-5 < Schedule("linear").alphas_cumprod[-1] < 4.1e-5
    assert Schedule("linear").sigmas[-1] == pytest.approx(157.4, rel=1e-3)


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_sigma_and_t_are_inverse(name):
    schedule = Schedule(name)
    t = np.array([0, 0.25, 1, 17.5, 500, 998.75, 999])
    assert np.allclose(schedule.sigma_to_t(schedule.t_to_sigma(t)), t, atol=1e-9)
    assert np.allclose(schedule.sigma_to_t(schedule.sigmas), np.arange(1000), atol=1e-9)
    between = math.sqrt(schedule.sigmas[7] * schedule.sigmas[8])
    assert schedule.sigma_to_t(between) == pytest.approx(7.5)
    assert schedule.sigma_to_t(1e-9) == 0
    assert schedule.sigma_to_t(1e9) == 999


@pytest.mark.parametrize("num_steps", [1, 2, 3, 18, 50, 999, 1000])
def test_timesteps_are_distinct_entries_from_last_to_first(num_steps):
    timesteps = Schedule("linear").timesteps(num_steps)
    assert timesteps.shape == (num_steps,)
    assert timesteps[0] == 999
    assert num_steps == 1 or timesteps[-1] == 0
    gaps = -np.diff(timesteps)
    assert (gaps >= 1).all()
    assert num_steps == 1 or gaps.size == 0 or gaps.max() - gaps.min() <= 1


def test_timesteps_out_of_range():
    for num_steps in (0, 1001):
        with pytest.raises(CudiffError, match="has 1000"):
            Schedule("linear").timesteps(num_steps)


def spaced(total, count):
    """guided-diffusion's rule for one section: a running sum of the fractional stride, each entry rounded."""
    taken, position = [], 0.0
    for _ in range(count):
        taken.append(round(position))
        position += (total - 1) / (count - 1)
    return taken


@pytest.mark.parametrize("total", [21, 100, 250, 1000])
def test_even_timesteps_are_those_of_guided_diffusion(total):
    schedule = Schedule("linear", total)
    for count in range(2, total + 1):
        assert schedule.timesteps(count).tolist() == spaced(total, count)[::-1], count


def test_even_timesteps_by_hand():
    """Where a rounding of exact quotients, or one half up, gives others."""
    assert Schedule("linear").timesteps(3).tolist() == [999, 500, 0]  # 499.5
    assert Schedule("linear", 22).timesteps(15).tolist() == [21, 20, 18, 16, 15, 14, 12, 10, 9, 8, 6, 4, 3, 2, 0]
    assert Schedule("linear").timesteps(25)[:4].tolist() == [999, 957, 916, 874]


def test_ddim_spacing_takes_the_smallest_stride_that_gives_so_many():
    schedule = Schedule("linear")
    for stride in range(1, 1000):
        visited = list(range(0, 1000, stride))
        if len(range(0, 1000, stride - 1 or 10**9)) != len(visited):
            assert schedule.timesteps(len(visited), "ddim").tolist() == visited[::-1]
    assert schedule.timesteps(25, "ddim")[[0, 1, -1]].tolist() == [960, 920, 0]
    assert np.array_equal(schedule.sampling_sigmas(2, "ddim"), [schedule.sigmas[500], schedule.sigmas[0], 0])
    with pytest.raises(CudiffError, match="gives 300 steps: use 250 or 334"):
        schedule.timesteps(300, "ddim")
    with pytest.raises(CudiffError, match="gives 1 steps: use 2, or even"):
        schedule.timesteps(1, "ddim")
    with pytest.raises(CudiffError, match="use even or ddim"):
        schedule.timesteps(10, "cosine")


def test_sampling_sigmas_are_looked_up_in_the_table():
    schedule = Schedule("linear")
    table = schedule.sigmas
    assert np.array_equal(schedule.sampling_sigmas(3), [table[999], table[500], table[0], 0])
    assert np.array_equal(schedule.sampling_sigmas(1000), [*table[::-1], 0])


@pytest.mark.parametrize("num_steps", [1, 2, 18, 1000])
def test_karras_sigmas(num_steps):
    sigmas = karras_sigmas(num_steps)
    assert sigmas.shape == (num_steps + 1,)
    assert sigmas[-1] == 0
    assert sigmas[0] == pytest.approx(80)
    assert num_steps == 1 or sigmas[-2] == pytest.approx(0.002)
    roots = sigmas[:-1] ** (1 / 7)
    assert np.allclose(np.diff(roots, 2), 0, atol=1e-12)
    assert (np.diff(sigmas) < 0).all()


def test_karras_sigmas_by_hand():
    assert np.allclose(karras_sigmas(3, sigma_min=1, sigma_max=9, rho=2), [9, 4, 1, 0])
    assert np.allclose(karras_sigmas(3, sigma_min=1, sigma_max=9, rho=1), [9, 5, 1, 0])


def test_bad_arguments_say_what_to_do():
    with pytest.raises(CudiffError, match="linear or cosine"):
        Schedule("sqrt")
    with pytest.raises(CudiffError, match="between 0 and 1"):
        Schedule(np.array([0.1, 1.0]))
    with pytest.raises(CudiffError, match="1 or more"):
        karras_sigmas(0)
    for call in (lambda: karras_sigmas("4"), lambda: Schedule().timesteps(10.0), lambda: Schedule(num_timesteps=1e3)):
        with pytest.raises(CudiffError, match=r"^num_(time)?steps must be a whole number, not ('4'|10\.0|1000\.0)$"):
            call()
    with pytest.raises(CudiffError, match="sigma_min < sigma_max"):
        karras_sigmas(4, sigma_min=2, sigma_max=1)


def test_every_rho_that_is_taken_gives_falling_sigmas():
    for rho in (0.5, 1, 7, 100, 1e6):
        assert (np.diff(karras_sigmas(18, rho=rho)) < 0).all()
    for rho, text in ((1e-40, "1e-40 is too small"), (0.25, "0.25 is too small"), (1e17, r"1e\+17 is too large")):
        with pytest.raises(CudiffError, match=f"^rho {text} for noise levels from 80 to 0.002: use one nearer to 7$"):
            karras_sigmas(18, rho=rho)
    with pytest.raises(CudiffError, match="too small"):
        karras_sigmas(18, 0.001, 0.5, rho=1e-40)  # both become 0
