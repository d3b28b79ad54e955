"""DPM-Solver++ and UniPC: against their papers' own coordinates, by their order, and by their noise's variance."""

import math
from functools import partial
from itertools import pairwise

import numpy as np
import pytest

from cudiff import Tensor
from cudiff.config import PRESETS
from cudiff.diffusion import (
    DDIM,
    DPMSolver,
    ImageNoise,
    UniPC,
    sample_ddim,
    sample_dpm_solver,
    sample_heun,
    sample_unipc,
)
from cudiff.diffusion.schedule import Schedule, karras_sigmas
from cudiff.registry import OBJECTIVES, SAMPLERS
from tests.diffusion.test_samplers import DEVIATION, MEAN, gaussian, ode_solution, slope, start


def stochastic(*args, **kwargs):
    return sample_dpm_solver(*args, stochastic=True, **kwargs)


def vp(sigma):
    """alpha and sigma of the variance-preserving process, in which both papers write."""
    return 1 / math.sqrt(1 + sigma**2), sigma / math.sqrt(1 + sigma**2)


def estimate(x, sigma):
    """The Gaussian's best denoiser of a variance-preserving state."""
    alpha = vp(sigma)[0]
    return (x / alpha * DEVIATION**2 + sigma**2 * MEAN) / (sigma**2 + DEVIATION**2)


@pytest.mark.parametrize("sampler, order", [(sample_dpm_solver, 2), (sample_unipc, 3)])
def test_error_falls_with_the_order_of_the_method(sampler, order):
    """UniPC's corrector makes its predictor of order 2 one of 3 (theorem 3.1)."""
    steps = np.array([64, 128, 256, 512])
    errors = []
    for n in steps:
        sigmas = karras_sigmas(n)[:-1]
        x, _ = start()
        errors.append(np.abs(sampler(gaussian, x, sigmas).numpy() - ode_solution(x.numpy(), 80.0, sigmas[-1])).max())
    print(f"{sampler.__name__}: errors {errors}, slope {slope(steps, errors):.3f}")
    assert abs(slope(steps, errors) - order) < 0.1


@pytest.mark.parametrize("levels", [karras_sigmas(8), Schedule("cosine").sampling_sigmas(9), karras_sigmas(6)[:-1]])
@pytest.mark.parametrize("with_noise", [False, True])
def test_dpm_solver_in_its_own_coordinates(levels, with_noise):
    """Algorithm 2 of arXiv 2211.01095, and the update of SDE-DPM-Solver++(2M)."""
    x, noise = start(sigma=levels[0])
    expected, last, h_last = x.numpy() * vp(levels[0])[0], None, None
    for i, (sigma, low) in enumerate(pairwise(levels)):
        (_, s), (alpha_low, s_low) = vp(sigma), vp(low)
        denoised = image = estimate(expected, sigma)
        if low == 0:
            expected = denoised
            break
        h = math.log(alpha_low / s_low) - math.log(vp(sigma)[0] / s)
        if last is not None:
            r = h_last / h
            image = (1 + 1 / (2 * r)) * denoised - 1 / (2 * r) * last
        if with_noise:
            drawn = s_low * math.sqrt(1 - math.exp(-2 * h)) * noise(i).numpy()
            expected = s_low / s * math.exp(-h) * expected + alpha_low * (1 - math.exp(-2 * h)) * image + drawn
        else:
            expected = s_low / s * expected - alpha_low * math.expm1(-h) * image
        last, h_last = denoised, h
    out = sample_dpm_solver(gaussian, x, levels, stochastic=with_noise, noise=noise)
    assert np.allclose(out.numpy() * vp(levels[-1])[0], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("levels", [karras_sigmas(8), Schedule("cosine").sampling_sigmas(9), karras_sigmas(6)[:-1]])
def test_unipc_in_its_own_coordinates(levels):
    """Algorithms 1 and 2 of arXiv 2302.04867: the corrected state is made of the last corrected one, not of a
    prediction, with the weights that solve R(h) a = phi(h) / B(h)."""
    x, _ = start(sigma=levels[0])
    half_log_snr = [math.log(1 / sigma) if sigma else math.inf for sigma in levels]

    def moved(x, i, estimates, weights, nodes):
        """From level i to i + 1: the first-order step, and B(h) times the weighted differences of estimates."""
        (_, s), (alpha_low, s_low), h = vp(levels[i]), vp(levels[i + 1]), half_log_snr[i + 1] - half_log_snr[i]
        out = s_low / s * x - alpha_low * math.expm1(-h) * estimates[0]
        for weight, node, other in zip(weights, nodes, estimates[1:], strict=True):
            out = out - alpha_low * math.expm1(-h) * weight * (other - estimates[0]) / node
        return out

    def phi(k, z):
        return math.expm1(z) / z if k == 1 else (phi(k - 1, z) - 1 / math.factorial(k - 1)) / z

    corrected = predicted = x.numpy() * vp(levels[0])[0]
    known = []
    for i in range(len(levels) - 1):
        new = estimate(predicted, levels[i])
        if i == 1:
            corrected = moved(corrected, 0, [known[0], new], [0.5], [1.0])
        elif i > 1:
            h, node = half_log_snr[i] - half_log_snr[i - 1], half_log_snr[i - 2] - half_log_snr[i - 1]
            nodes, B = [node / h, 1.0], math.expm1(-h)
            powers = np.vander(nodes, increasing=True).T
            weights = np.linalg.solve(powers, [(-h) * phi(k + 1, -h) * math.factorial(k) / B for k in (1, 2)])
            corrected = moved(corrected, i - 1, [known[0], known[1], new], weights, nodes)
        known.insert(0, new)
        if levels[i + 1] == 0:
            predicted = new
        elif i == 0:
            predicted = moved(corrected, i, known[:1], [], [])
        else:
            node = (half_log_snr[i - 1] - half_log_snr[i]) / (half_log_snr[i + 1] - half_log_snr[i])
            predicted = moved(corrected, i, known[:2], [0.5], [node])
    out = sample_unipc(gaussian, x, levels).numpy() * vp(levels[-1])[0]
    assert np.allclose(out, predicted, rtol=1e-9, atol=1e-12)
    assert not np.allclose(out, sample_dpm_solver(gaussian, x, levels).numpy() * vp(levels[-1])[0], rtol=1e-4)


def second_moments(sigmas):
    """The deviation of the stochastic form's state at each level, by recursion over the covariance of (x, last D)."""
    pull = [DEVIATION**2 / (sigma**2 + DEVIATION**2) for sigma in sigmas]
    steps = [plan.numbers[1:] for plan in DPMSolver(None, stochastic=True).plan(sigmas)]
    covariance, deviations = np.diag([DEVIATION**2 + sigmas[0] ** 2, 0.0]), []
    for k, (ratio, added, onward) in zip(pull, steps, strict=False):
        denoised = np.array([k, 0.0])
        image = denoised + onward * (denoised - [0.0, 1.0])
        state = image + ratio * (np.array([1.0, 0.0]) - image)
        matrix = np.stack([state, denoised])
        covariance = matrix @ covariance @ matrix.T + np.diag([added**2, 0.0])
        deviations.append(math.sqrt(covariance[0, 0]))
    return np.array(deviations)


def test_the_noise_of_the_stochastic_form_has_the_exact_variance():
    """Of x = y + sigma noise at each level: sqrt(DEVIATION^2 + sigma^2), to the method's error at 100 steps, under
    0.4 %, and to 4 standard errors of 65,536 samples, 1.1 %. The method's error falls with the square of the steps."""
    sigmas = karras_sigmas(100, 0.02, 80.0)[:-1]
    exact = np.sqrt(DEVIATION**2 + sigmas[1:] ** 2)
    noise = ImageNoise((16, 64, 64, 1), 3, dtype=np.float64)
    begin = noise.start(math.sqrt(DEVIATION**2 + 80.0**2)) + MEAN
    seen = []
    stochastic(gaussian, begin, sigmas, noise=noise, callback=lambda step, x, denoised: seen.append(x.numpy()))
    for state, expected, own in zip(seen, exact, second_moments(sigmas), strict=True):
        assert abs(state.mean() - MEAN) < 4 * expected / 256
        assert abs(state.std() / own - 1) < 4 / math.sqrt(2 * 65536)
        assert abs(own / expected - 1) < 0.004
    errors = []
    for n in (100, 200, 400, 800):
        sigmas = karras_sigmas(n, 0.02, 80.0)[:-1]
        errors.append(abs(second_moments(sigmas)[-1] / math.sqrt(DEVIATION**2 + sigmas[-1] ** 2) - 1))
    assert abs(slope([100, 200, 400, 800], errors) - 2) < 0.1


@pytest.mark.parametrize("eta", [0.0, 0.6, 1.0])
def test_euler_ancestral_is_that_of_k_diffusion(eta):
    """Euler's step to sigma_down, then noise of deviation sigma_up."""
    sigmas = karras_sigmas(9)
    x, noise = start()
    expected = x.numpy()
    for i, (sigma, low) in enumerate(pairwise(sigmas)):
        up = min(low, eta * math.sqrt(low**2 * (sigma**2 - low**2) / sigma**2))
        down = math.sqrt(low**2 - up**2)
        slope_here = (expected - gaussian(Tensor(expected), Tensor(np.full(4, sigma))).numpy()) / sigma
        expected = expected + slope_here * (down - sigma) + up * noise(i).numpy()
    out = sample_ddim(gaussian, x, sigmas, eta=eta, noise=noise, clip_denoised=False)
    assert np.allclose(out.numpy(), expected, rtol=1e-9)


def test_euler_ancestral_does_not_clip():
    """Though its step is DDIM's, which does."""
    config = PRESETS["digits"].replace(sampler="euler-ancestral")
    sampler = SAMPLERS[config.sampler].build(lambda x, sigma, labels: x * 0 + 3.0, config, False)
    x, noise = start()
    assert np.allclose(sampler(x, karras_sigmas(3), noise=noise).numpy(), 3.0)


def test_levels_are_those_of_the_data():
    """EDM's largest is 80 deviations of the data's: CS 179's images have one of 0.6162."""
    sigmas = OBJECTIVES["edm"].build(PRESETS["cs179"], 0.25).sigmas(10, False)
    assert np.allclose(sigmas, karras_sigmas(10) * 0.6162) and np.isclose(sigmas[0], 49.296)


def mixture(x, sigma, labels=None):
    """The best denoiser of ten Gaussians in 16 dimensions, of deviation 0.25, at centres in [-1, 1]."""
    centres = np.random.default_rng(0).uniform(-1, 1, (10, 16))
    points, variance = x.numpy().reshape(len(x), -1), 0.25**2 + sigma.numpy().reshape(-1, 1) ** 2
    logits = -np.square(points[:, None] - centres).sum(axis=-1) / (2 * variance)
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    means = shares / shares.sum(axis=1, keepdims=True) @ centres
    return Tensor((means + (points - means) * 0.25**2 / variance).reshape(x.shape))


def test_ten_evaluations_are_nearer_than_heun_s_nine_and_eleven():
    """To 1,000 steps of Heun's method, root mean square over 256 images of 16 pixels."""
    x, _ = start((256, 4, 4, 1))
    solution = sample_heun(mixture, x, karras_sigmas(1000)).numpy()

    def error(sampler, steps):
        return math.sqrt(np.mean(np.square(sampler(mixture, x, karras_sigmas(steps)).numpy() - solution)))

    errors = {"heun 9": error(sample_heun, 5), "heun 11": error(sample_heun, 6)}
    errors |= {"2m": error(sample_dpm_solver, 10), "unipc": error(sample_unipc, 10)}
    print(errors)
    assert max(errors["2m"], errors["unipc"]) < min(errors["heun 9"], errors["heun 11"])


def test_a_sampler_serves_batch_after_batch():
    """What a step hands to the next one does not reach the next images."""
    sigmas = karras_sigmas(6)
    for make in (DPMSolver, UniPC, DDIM):
        sampler = make(gaussian)
        first, second = start(seed=1)[0], start(seed=2)[0]
        sampler(first, sigmas)
        np.testing.assert_array_equal(sampler(second, sigmas).numpy(), make(gaussian)(second, sigmas).numpy())


@pytest.mark.parametrize("sampler", [stochastic, partial(sample_ddim, eta=1.0, clip_denoised=False)])
def test_a_step_from_far_above_adds_nearly_all_of_its_noise(sampler):
    """By rounding it would add more than all."""
    for low in np.geomspace(1e-12, 1e-8, 50):
        x, _ = start(sigma=0.9)
        noise = ImageNoise(x.shape, 1)
        made = sampler(lambda x, sigma, labels: x * 0, x, [0.9, low], noise=noise).numpy()
        assert np.allclose(made, noise(0).numpy() * low, rtol=1e-5, atol=0)
