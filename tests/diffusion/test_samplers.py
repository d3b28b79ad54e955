"""Samplers against data whose denoiser is known: Gaussian, where every step and the whole path have closed forms."""

import math
from itertools import pairwise

import numpy as np
import pytest

from cudiff import Config, Tensor, ops, registry
from cudiff.diffusion import (
    DDIM,
    Ancestral,
    DDPMDenoiser,
    DPMSolver,
    EDMDenoiser,
    Euler,
    Guided,
    Heun,
    ImageNoise,
    UniPC,
    sample_ddim,
    sample_ddpm,
    sample_dpm_solver,
    sample_euler,
    sample_heun,
    sample_unipc,
)
from cudiff.diffusion.schedule import Schedule, karras_sigmas
from cudiff.errors import CudiffError
from cudiff.ops.random import normal
from cudiff.tensor import grad_enabled

MEAN, DEVIATION = 0.3, 0.5
SAMPLERS = {
    "euler": sample_euler,
    "heun": sample_heun,
    "euler with churn": lambda *args, noise=None, **kwargs: sample_euler(*args, noise=noise, S_churn=40, **kwargs),
    "heun with churn": lambda *args, noise=None, **kwargs: sample_heun(*args, noise=noise, S_churn=40, **kwargs),
    "ddim": sample_ddim,
    "ddim eta 1": lambda *args, noise=None, **kwargs: sample_ddim(*args, noise=noise, eta=1.0, **kwargs),
    "ddpm": sample_ddpm,
    "ddpm large": lambda *args, noise=None, **kwargs: sample_ddpm(*args, noise=noise, variance="large", **kwargs),
    "dpmpp-2m": sample_dpm_solver,
    "dpmpp-2m-sde": lambda *args, **kwargs: sample_dpm_solver(*args, stochastic=True, **kwargs),
    "unipc": lambda *args, noise=None, **kwargs: sample_unipc(*args, **kwargs),
}


def gaussian(x, sigma, labels=None):
    """The best denoiser of N(MEAN, DEVIATION^2) data, in any dtype."""
    variance = sigma.reshape(-1, 1, 1, 1).square()
    return (x * DEVIATION**2 + variance * MEAN) / (variance + DEVIATION**2)


def ode_solution(x, sigma, sigma_end):
    """The probability flow ODE from (sigma, x) to sigma_end: the deviation follows sqrt(DEVIATION^2 + sigma^2)."""
    return MEAN + (x - MEAN) * math.sqrt((DEVIATION**2 + sigma_end**2) / (DEVIATION**2 + sigma**2))


def start(shape=(4, 3, 3, 1), sigma=80.0, seed=0, dtype=np.float64):
    noise = ImageNoise(shape, seed, dtype=dtype)
    return noise.start(sigma), noise


def slope(steps, errors):
    return -np.polyfit(np.log(steps), np.log(errors), 1)[0]


@pytest.mark.parametrize("sampler, order", [(sample_euler, 1), (sample_heun, 2)])
def test_error_falls_with_the_order_of_the_method(sampler, order):
    steps = np.array([16, 32, 64, 128, 256])
    errors = []
    for n in steps:
        sigmas = karras_sigmas(n)
        x, _ = start()
        path = sampler(gaussian, x, sigmas[:-1]).numpy()
        errors.append(np.abs(path - ode_solution(x.numpy(), 80.0, sigmas[-2])).max())
        # the last step, to 0, is the denoiser itself: its error is that of sigma_min and does not depend on n
        last = gaussian(Tensor(path), Tensor(np.full(4, sigmas[-2]))).numpy()
        assert np.allclose(sampler(gaussian, x, sigmas).numpy(), last, rtol=1e-12)
    print(f"{sampler.__name__}: errors {errors}, slope {slope(steps, errors):.3f}")
    assert abs(slope(steps, errors) - order) < 0.1


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("num_steps", [1, 2, 18, 1000])
@pytest.mark.parametrize("levels", [karras_sigmas, Schedule("linear").sampling_sigmas], ids=["karras", "ddpm"])
def test_any_number_of_steps(name, num_steps, levels):
    sigmas = levels(num_steps)
    x, noise = start(sigma=sigmas[0])
    seen, evaluated = [], []

    def denoiser(x, sigma, labels):
        evaluated.append(sigma.numpy()[0])
        return gaussian(x, sigma)

    out = SAMPLERS[name](
        denoiser, x, sigmas, noise=noise, callback=lambda step, x, denoised: seen.append((step, x.numpy(), denoised))
    )
    assert [step for step, _, _ in seen] == list(range(num_steps))
    assert np.array_equal(seen[-1][1], out.numpy())
    assert np.allclose(out.numpy(), seen[-1][2].numpy())  # the last sigma is 0: the result is the last estimate
    assert min(evaluated) > 0
    assert len(evaluated) == (2 * num_steps - 1 if "heun" in name else num_steps)
    assert np.isfinite(out.numpy()).all()
    if num_steps > 2 or "heun" not in name:  # from 80 to 0.002 in one step Heun's method overshoots
        assert np.abs(out.numpy() - MEAN).max() < 5 * DEVIATION
    if num_steps == 1 and "churn" not in name:
        assert np.allclose(out.numpy(), gaussian(x, Tensor(np.full(4, sigmas[0]))).numpy())


@pytest.mark.parametrize("name", SAMPLERS)
def test_float32_on_every_device_agrees_with_float64(device, name):
    # 20 noise levels of random error 1e-7, each relative to its own level
    x, noise = start()
    narrow = ImageNoise(x.shape, 0, device=device)
    expected = SAMPLERS[name](gaussian, x, karras_sigmas(18), noise=noise, **unclipped(name)).numpy()
    out = SAMPLERS[name](gaussian, narrow.start(80.0), karras_sigmas(18), noise=narrow, **unclipped(name))
    assert out.dtype == np.float32
    assert np.allclose(out.numpy(), expected, atol=2e-5)


class Counting:
    """`gaussian` with a learned variance, counting the evaluations that Python sees."""

    calls = 0

    def __call__(self, x, sigma, labels=None):
        self.calls += 1
        return gaussian(x, sigma)

    def with_variance(self, x, sigma, labels=None):
        return self(x, sigma), x * 0.1 + 0.3


@pytest.mark.parametrize("make", [
    Euler, Heun, lambda *args, **kwargs: Euler(*args, S_churn=9, **kwargs),
    lambda *args, **kwargs: Heun(*args, S_churn=9, S_min=0.1, S_max=20, **kwargs), DDIM,
    lambda *args, **kwargs: DDIM(*args, eta=0.7, **kwargs), Ancestral,
    lambda *args, **kwargs: Ancestral(*args, variance="learned", **kwargs),
    DPMSolver, lambda *args, **kwargs: DPMSolver(*args, stochastic=True, **kwargs), UniPC,
])
def test_a_step_is_one_graph_and_gives_the_same_bits(make, device):
    """With a callback, over three batches: steps of a kind are called eagerly, recorded, and from then on launched."""
    eager, captured = make(Counting()), make(Counting(), captured=True)
    for first in (0, 4, 8):
        noise = ImageNoise((4, 3, 3, 1), seed=2, first=first, device=device)
        expected, seen = [], []
        for sampler, states in ((eager, expected), (captured, seen)):
            out = sampler(
                noise.start(80.0), karras_sigmas(9), noise=noise,
                callback=lambda step, x, denoised, states=states: states.append((step, x.numpy(), denoised.numpy())),
            )
            assert np.array_equal(out.numpy(), states[-1][1])
        for (step, x, denoised), (same, x_seen, denoised_seen) in zip(expected, seen, strict=True):
            assert step == same
            np.testing.assert_array_equal(x_seen, x)
            np.testing.assert_array_equal(denoised_seen, denoised)
    if device == "cuda":
        assert captured.denoiser.calls < eager.denoiser.calls / 2


def test_noise_is_drawn_in_the_graph(device, monkeypatch):
    """Of images and seeds that change; what is no plain ImageNoise is called and copied in."""
    drawn = []

    def counting(*args):
        drawn.append(args)
        return normal(*args)

    monkeypatch.setattr("cudiff.diffusion.samplers.normal", counting)

    class Negative(ImageNoise):
        def __call__(self, step):
            return -super().__call__(step)

    eager, captured = (Ancestral(gaussian, captured=flag) for flag in (False, True))
    shape, sigmas = (4, 3, 3, 1), karras_sigmas(9)
    images = []
    for seed, first in ((2, 0), (2**63 + 7, 4), (2, 8)):
        noise = ImageNoise(shape, seed, first, device)
        images.append(captured(noise.start(80.0), sigmas, noise=noise).numpy())
        assert np.array_equal(eager(noise.start(80.0), sigmas, noise=noise).numpy(), images[-1])
    assert not np.allclose(images[0], images[2])
    x = noise.start(80.0)
    drawn.clear()
    captured(x, sigmas, noise=noise)
    assert len(drawn) == (0 if device == "cuda" else 8)
    for other in (Negative(shape, 2, 8, device), lambda step: -noise(step)):
        out = captured(x, sigmas, noise=other).numpy()
        assert np.array_equal(eager(x, sigmas, noise=other).numpy(), out) and not np.allclose(out, images[2])


@pytest.mark.parametrize("seed, first", [
    (np.int32(5), np.int32(3)), (-1, 0), (2**70 + 5, 2**32 + 1), (np.uint64(2**64 - 1), np.int8(4)),
])
def test_seeds_and_images_of_any_integer(seed, first):
    noise, sigmas = ImageNoise((2, 3, 3, 1), seed, first), karras_sigmas(4)
    x = noise.start(80.0)
    drawn = Ancestral(gaussian)(x, sigmas, noise=noise)
    given = Ancestral(gaussian)(x, sigmas, noise=lambda step: noise(step))
    assert np.array_equal(drawn.numpy(), given.numpy())


@pytest.mark.parametrize("sampler", [Heun, Ancestral])
def test_captured_guidance_of_batches_of_changing_size(sampler, device):
    """Their last step is of another kind than the others."""

    def denoiser(x, sigma, labels):
        return gaussian(x, sigma) + ops.astype(labels, x.dtype).reshape(-1, 1, 1, 1)

    eager, captured = (sampler(Guided(denoiser, 2.0), captured=flag) for flag in (False, True))
    for n in (4, 2, 4, 2, 4):
        noise, labels = ImageNoise((n, 3, 3, 1), seed=2, device=device), Tensor(np.arange(n, dtype=np.int32)).to(device)
        images, same = (
            run(noise.start(80.0), karras_sigmas(5), labels, noise=noise).numpy() for run in (eager, captured)
        )
        np.testing.assert_array_equal(same, images)


def unclipped(name):
    return {"clip_denoised": False} if name.startswith("dd") else {}


@pytest.mark.parametrize("name", SAMPLERS)
def test_an_image_does_not_depend_on_its_batch(name):
    def sample(first, count):
        noise = ImageNoise((count, 3, 3, 1), seed=9, first=first)
        return SAMPLERS[name](gaussian, noise.start(80.0), karras_sigmas(6), noise=noise).numpy()

    together = sample(0, 5)
    assert np.array_equal(sample(0, 2), together[:2])
    assert np.array_equal(sample(2, 3), together[2:])
    assert np.array_equal(sample(0, 5), together)
    assert not np.allclose(together[0], together[1])


@pytest.mark.parametrize("name", SAMPLERS)
def test_no_tape_and_labels_arrive(name):
    labels = Tensor(np.array([3, 1, 4, 1], np.int32))
    weight = Tensor(np.ones(1), requires_grad=True)

    def denoiser(x, sigma, given):
        assert given is labels
        assert not grad_enabled()
        assert sigma.shape == (4,)
        return gaussian(x, sigma) * weight

    x, noise = start()
    assert not SAMPLERS[name](denoiser, x, karras_sigmas(3), labels, noise=noise).requires_grad
    assert grad_enabled()


@pytest.mark.parametrize("sampler, order", [(sample_euler, 1), (sample_heun, 2)])
def test_churn_keeps_the_distribution(sampler, order):
    """40,000 samples of the exact distribution at sigma 10: Heun keeps it, Euler but for its own first-order error."""
    shape, sigmas = (40, 40, 25, 1), karras_sigmas(200, sigma_max=10)
    noise = ImageNoise(shape, seed=3, dtype=np.float64)
    x = noise.start(math.sqrt(10**2 + DEVIATION**2)) + MEAN
    out = sampler(gaussian, x, sigmas, S_churn=60, S_min=0.01, S_max=5, noise=noise).numpy()
    expected = churned_deviation(sigmas, order)
    assert abs(expected - DEVIATION) < (0.04 if order == 1 else 0.002)
    assert abs(out.mean() - MEAN) < 4 * DEVIATION / math.sqrt(40000)
    assert abs(out.std() - expected) < 4 * DEVIATION / math.sqrt(80000)


def churned_deviation(sigmas, order):
    """What a Gaussian's deviation becomes: each step adds a variance and multiplies by the solver's factor."""
    variance = sigmas[0] ** 2 + DEVIATION**2
    for sigma, sigma_next in pairwise(sigmas):
        raised = sigma * (1 + 60 / 200) if 0.01 <= sigma <= 5 else sigma
        rate, rate_next = (s / (s**2 + DEVIATION**2) for s in (raised, sigma_next))
        width = sigma_next - raised
        factor = 1 + width * rate
        if order == 2 and sigma_next > 0:
            factor = 1 + width * (rate + factor * rate_next) / 2
        variance = (variance + raised**2 - sigma**2) * factor**2
    return math.sqrt(variance)


def test_churn_is_algorithm_2():
    """Every line of it, written out with NumPy."""
    sigmas, S_churn, S_min, S_max, S_noise = karras_sigmas(7, 0.02, 20), 2.1, 0.05, 9.0, 1.007
    x, noise = start(sigma=20.0)

    def D(x, s):
        return (x * DEVIATION**2 + s**2 * MEAN) / (s**2 + DEVIATION**2)

    expected, churned = x.numpy(), 0
    for i in range(7):
        gamma = min(S_churn / 7, math.sqrt(2) - 1) if S_min <= sigmas[i] <= S_max else 0
        churned += gamma > 0
        t_hat = sigmas[i] + gamma * sigmas[i]
        x_hat = expected + math.sqrt(t_hat**2 - sigmas[i] ** 2) * S_noise * noise(i).numpy()
        d = (x_hat - D(x_hat, t_hat)) / t_hat
        expected = x_hat + (sigmas[i + 1] - t_hat) * d
        if sigmas[i + 1] != 0:
            d_next = (expected - D(expected, sigmas[i + 1])) / sigmas[i + 1]
            expected = x_hat + (sigmas[i + 1] - t_hat) * (d / 2 + d_next / 2)
    options = {"S_churn": S_churn, "S_min": S_min, "S_max": S_max, "S_noise": S_noise, "noise": noise}
    out = sample_heun(gaussian, x, sigmas, **options)
    assert 0 < churned < 7
    assert np.allclose(out.numpy(), expected, rtol=1e-12)
    without = sample_heun(gaussian, x, sigmas)
    assert not np.allclose(out.numpy(), without.numpy(), rtol=1e-3)


def test_churn_is_at_most_sqrt_2():
    sigmas = []
    x, noise = start()
    sample_euler(
        lambda x, sigma, labels: sigmas.append(sigma.numpy()[0]) or gaussian(x, sigma),
        x, karras_sigmas(4), S_churn=1e9, S_max=70.0, noise=noise,
    )  # fmt: skip
    expected = karras_sigmas(4)[:-1] * np.array([1, math.sqrt(2), math.sqrt(2), math.sqrt(2)])
    assert np.allclose(sigmas, expected)


def test_ddim_without_noise_is_the_ode_in_the_limit():
    schedule = Schedule("linear")
    errors = []
    for n in (125, 250, 500, 1000):
        sigmas = schedule.sampling_sigmas(n)
        x, _ = start(sigma=sigmas[0])
        out = sample_ddim(gaussian, x, sigmas, clip_denoised=False)
        errors.append(np.abs(out.numpy() - ode_solution(x.numpy(), sigmas[0], 0.0)).max())
    assert errors[-1] < 0.02
    assert errors[0] > 1.8 * errors[1] > 3 * errors[2]


@pytest.mark.parametrize("eta", [0.0, 0.4, 1.0])
def test_ddim_is_equation_12_in_its_own_coordinates(eta):
    schedule = Schedule("cosine")
    timesteps = schedule.timesteps(9)
    sigmas = schedule.sampling_sigmas(9)
    x, noise = start(sigma=sigmas[0])
    a = np.append(schedule.alphas_cumprod[timesteps], 1.0)
    expected = x.numpy() * np.sqrt(a[0])
    for i in range(9):
        s = math.sqrt((1 - a[i]) / a[i])
        denoised = (expected / math.sqrt(a[i]) * DEVIATION**2 + s**2 * MEAN) / (s**2 + DEVIATION**2)
        eps = (expected - math.sqrt(a[i]) * denoised) / math.sqrt(1 - a[i])
        added = eta * math.sqrt((1 - a[i + 1]) / (1 - a[i])) * math.sqrt(1 - a[i] / a[i + 1])
        expected = math.sqrt(a[i + 1]) * denoised + math.sqrt(1 - a[i + 1] - added**2) * eps + added * noise(i).numpy()
    out = sample_ddim(gaussian, x, sigmas, eta=eta, noise=noise, clip_denoised=False)
    assert np.allclose(out.numpy(), expected, rtol=1e-8)


@pytest.mark.parametrize("variance", ["small", "large", "learned"])
@pytest.mark.parametrize("num_steps", [1000, 40])
def test_ddpm_is_its_algorithm_2_in_its_own_coordinates(variance, num_steps):
    """x_t itself, with the eps-form of the mean (equation 11) and the betas of the steps taken."""
    schedule = Schedule("linear")
    timesteps, sigmas = schedule.timesteps(num_steps), schedule.sampling_sigmas(num_steps)
    fraction = 0.3

    class Learned:
        def __call__(self, x, sigma, labels):
            return gaussian(x, sigma)

        def with_variance(self, x, sigma, labels):
            return gaussian(x, sigma), x * 0 + fraction

    x, noise = start(sigma=sigmas[0])
    a = np.append(schedule.alphas_cumprod[timesteps], 1.0)
    if num_steps == 1000:
        assert np.allclose(1 - a[:-1] / a[1:], schedule.betas[::-1])
    expected = x.numpy() * np.sqrt(a[0])
    for i in range(num_steps):
        alpha = a[i] / a[i + 1]
        beta, s = 1 - alpha, math.sqrt((1 - a[i]) / a[i])
        denoised = (expected / math.sqrt(a[i]) * DEVIATION**2 + s**2 * MEAN) / (s**2 + DEVIATION**2)
        eps = (expected - math.sqrt(a[i]) * denoised) / math.sqrt(1 - a[i])
        expected = (expected - beta / math.sqrt(1 - a[i]) * eps) / math.sqrt(alpha)
        if i + 1 < num_steps:
            small = beta * (1 - a[i + 1]) / (1 - a[i])
            added = {"small": small, "large": beta, "learned": beta**fraction * small ** (1 - fraction)}[variance]
            expected = expected + math.sqrt(added) * noise(i).numpy()
    out = sample_ddpm(Learned(), x, sigmas, noise=noise, variance=variance, clip_denoised=False)
    assert np.allclose(out.numpy(), expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("variance", ["small", "large"])
def test_ancestral_sampling_of_a_gaussian_noise_model(variance):
    schedule = Schedule("linear")
    sigma_of = schedule.sigmas

    def net(x, t, labels):
        s = sigma_of[np.rint(t.numpy()).astype(int)].reshape(-1, 1, 1, 1)
        x_t = x.numpy()
        return Tensor((x_t * np.sqrt(1 + s**2) - MEAN) * s / (s**2 + DEVIATION**2))

    noise = ImageNoise((8, 32, 32, 1), seed=1, dtype=np.float64)
    sigmas = schedule.sampling_sigmas(1000)
    out = sample_ddpm(
        DDPMDenoiser(net, schedule), noise.start(sigmas[0]), sigmas, noise=noise, variance=variance, clip_denoised=False
    ).numpy()
    assert abs(out.mean() - MEAN) < 4 * DEVIATION / math.sqrt(8192)
    assert abs(out.std() - DEVIATION) < 4 * DEVIATION / math.sqrt(16384) + 0.005


@pytest.mark.parametrize("sampler", [sample_euler, sample_heun])
def test_a_ddpm_model_in_the_edm_samplers(sampler):
    schedule = Schedule("linear")

    def net(x, t, labels):
        s = schedule.t_to_sigma(t.numpy()).reshape(-1, 1, 1, 1)
        return Tensor((x.numpy() * np.sqrt(1 + s**2) - MEAN) * s / (s**2 + DEVIATION**2))

    x, _ = start()
    sigmas = karras_sigmas(40, schedule.sigmas[0], 80.0)
    out = sampler(DDPMDenoiser(net, schedule), x, sigmas)
    assert np.allclose(out.numpy(), sampler(gaussian, x, sigmas).numpy(), rtol=1e-7)


def test_an_edm_model_in_the_ddpm_samplers():
    def net(x, t, labels):  # F of equation 7 for Gaussian data, sigma_data 0.5
        s = np.exp(4 * t.numpy()).reshape(-1, 1, 1, 1)
        h = np.sqrt(s**2 + 0.25)
        noisy = x.numpy() * h
        denoised = gaussian(Tensor(noisy), Tensor(s.ravel())).numpy()
        return Tensor((denoised - 0.25 / h**2 * noisy) * h / (0.5 * s))

    x, noise = start()
    for sampler in (sample_ddim, sample_ddpm):
        out = sampler(EDMDenoiser(net), x, karras_sigmas(20), noise=noise)
        assert np.allclose(out.numpy(), sampler(gaussian, x, karras_sigmas(20), noise=noise).numpy(), rtol=1e-8)


def test_guidance_shifts_samples_as_it_should():
    """Point masses at each class: the guided estimate is a point too, and every sampler ends there."""

    def points(x, sigma, labels):
        return x * 0 + Tensor(np.where(labels.numpy() < 0, 0.1, 0.2 * labels.numpy()).reshape(-1, 1, 1, 1))

    x, noise = start((2, 1, 1, 1))
    labels = Tensor(np.array([1, 2], np.int32))
    for name, sampler in SAMPLERS.items():
        out = sampler(Guided(points, 2.0), x, karras_sigmas(5), labels, noise=noise)
        assert np.allclose(out.numpy().ravel(), [0.3, 0.7]), name


@pytest.mark.parametrize("name", list(registry.SAMPLERS))
@pytest.mark.parametrize("config", [
    Config(S_churn=0.0, eta=0.0, clip_denoised=True), Config(S_churn=4.0, eta=0.5, clip_denoised=False),
], ids=["clipped", "noisy"])
def test_a_step_to_the_image_ends_in_the_estimate_that_it_began_with(name, config):
    """What a plan promises of it, for `Ends` to take its place."""
    for count in (1, 3):
        (x, noise), seen = start(), []
        sampler = registry.SAMPLERS[name].build(gaussian, config, False)
        sigmas = karras_sigmas(count)
        sampler(x, sigmas, noise=noise, callback=lambda step, x, denoised, seen=seen: seen.append((x, denoised)))
        plans = sampler.plan(sigmas)
        assert not any(plan.to_image for plan in plans[:-1])
        if plans[-1].to_image:
            begun = seen[-2][0] if count > 1 else x
            estimate = gaussian(begun, Tensor(np.full(len(x), plans[-1].numbers[0])))
            np.testing.assert_allclose(seen[-1][0].numpy(), estimate.numpy(), rtol=1e-12)
        changed = {"ancestral", *(("heun", "euler") if config.S_churn else ("ddim",))}  # churned before, or clipped
        assert plans[-1].to_image is (None if name in changed else type(sampler).step)


@pytest.mark.parametrize("sampler", [sample_ddim, sample_ddpm])
def test_clipping_limits_the_estimate(sampler):
    x, noise = start(sigma=100.0)
    for level, limited in [(3.0, 1.0), (-3.0, -1.0), (-0.5, -0.5)]:
        out = sampler(lambda x, sigma, labels, level=level: x * 0 + level, x, karras_sigmas(4), noise=noise)
        assert np.array_equal(out.numpy(), np.full(x.shape, limited))
    out = sampler(lambda x, sigma, labels: x * 0 + 3, x, karras_sigmas(4), noise=noise, clip_denoised=False)
    assert np.array_equal(out.numpy(), np.full(x.shape, 3.0))


def test_bad_arguments_say_what_to_do():
    x, noise = start()
    with pytest.raises(CudiffError, match="pass noise="):
        sample_heun(gaussian, x, karras_sigmas(4), S_churn=10)
    with pytest.raises(CudiffError, match="decreasing sigmas"):
        sample_euler(gaussian, x, karras_sigmas(4)[::-1])
    with pytest.raises(CudiffError, match="between 0 and 1"):
        sample_ddim(gaussian, x, karras_sigmas(4), eta=1.5)
    with pytest.raises(CudiffError, match="small, large or learned"):
        sample_ddpm(gaussian, x, karras_sigmas(4), noise=noise, variance="medium")
