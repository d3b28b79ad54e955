"""Losses against their papers' formulas in plain NumPy, and their gradients against PyTorch and finite differences."""

import math

import numpy as np
import pytest

from cudiff import Tensor, ops
from cudiff.backend import device_of
from cudiff.config import Config
from cudiff.diffusion import DDPMLoss, EDMDenoiser, EDMLoss, drop_labels
from cudiff.diffusion.ddpm import discretised_log_likelihood, normal_kl
from cudiff.diffusion.schedule import Schedule
from cudiff.errors import CudiffError
from cudiff.ops.random import Generator, Purpose
from cudiff.registry import OBJECTIVES

try:
    import torch
except ImportError:
    torch = None

SHAPE = (6, 4, 3, 2)


def level_images(rng, shape=SHAPE):
    """8-bit levels in [-1, 1], both ends among them."""
    images = rng.integers(0, 256, shape) / 127.5 - 1
    images[:, 0, 0, :] = -1
    images[:, 0, 1, :] = 1
    return images


class PointwiseNet:
    """out = tanh(x @ weight + t * slope), differentiable in weight (C, C_out); keeps what it was fed."""

    def __init__(self, weight, slope=0.01):
        self.weight = weight if isinstance(weight, Tensor) else Tensor(weight, requires_grad=True)
        self.slope, self.fed = slope, None

    def __call__(self, x, t, labels=None):
        self.fed = x.numpy(), t.numpy(), None if labels is None else labels.numpy()
        n, h, w, c = x.shape
        rows = ops.reshape(x, (n, h * w, c, 1)) * self.weight
        return ops.tanh(ops.reshape(rows.sum(axis=2), (n, h, w, -1)) + ops.reshape(t * self.slope, (n, 1, 1, 1)))


def numpy_net(x, t, weight, slope=0.01):
    return np.tanh(x @ weight + slope * t.reshape(-1, 1, 1, 1))


# Labels


def test_labels_are_dropped_with_their_probability():
    labels = Tensor(np.arange(20000, dtype=np.int32) % 10)
    generator = Generator(3)
    assert drop_labels(labels, 0, generator) is labels
    assert drop_labels(None, 0.5, generator) is None
    assert (drop_labels(labels, 1.0, generator).numpy() == -1).all()
    dropped = drop_labels(labels, 0.1, generator)
    assert dropped.dtype == np.int32
    lost = dropped.numpy() == -1
    assert abs(lost.mean() - 0.1) < 4 * math.sqrt(0.09 / 20000)
    assert np.array_equal(dropped.numpy()[~lost], labels.numpy()[~lost])
    generator.advance()
    assert not np.array_equal(drop_labels(labels, 0.1, generator).numpy(), dropped.numpy())


@pytest.mark.parametrize("loss", [EDMLoss(label_dropout=1.0), DDPMLoss(Schedule("linear"), label_dropout=1.0)])
def test_losses_drop_labels(rng, loss):
    net = PointwiseNet(rng.standard_normal((2, 2)).astype(np.float32))
    images = Tensor(level_images(rng), dtype=np.float32)
    loss(net, images, Tensor(np.arange(6, dtype=np.int32)), Generator(0))
    assert net.fed[2].tolist() == [-1] * 6
    loss.label_dropout = 0.0
    loss(net, images, Tensor(np.arange(6, dtype=np.int32)), Generator(0))
    assert net.fed[2].tolist() == list(range(6))


# EDM


@pytest.mark.parametrize("scale", [0.25, 1.0])
def test_edm_loss_is_equation_2_weighted_as_in_table_1(rng, wide_generator, scale):
    images, weight = level_images(rng), rng.standard_normal((2, 2))
    net = PointwiseNet(weight)
    loss = EDMLoss(sigma_data=0.6, P_mean=-0.8, P_std=1.1, c_noise_scale=scale)
    value = loss(net, Tensor(images), None, wide_generator).item()

    sigma = np.exp(-0.8 + 1.1 * wide_generator.normal((6,), stream=Purpose.SIGMA).numpy())
    noise = wide_generator.normal(SHAPE, stream=Purpose.NOISE).numpy()
    s = sigma.reshape(-1, 1, 1, 1)
    denoised = EDMDenoiser(net, 0.6, scale)(Tensor(images + s * noise), Tensor(sigma), None).numpy()
    expected = np.mean((s**2 + 0.36) / (s * 0.6) ** 2 * (denoised - images) ** 2)
    assert value == pytest.approx(expected, rel=1e-10)
    assert np.allclose(net.fed[1], scale * np.log(sigma))
    assert np.allclose(net.fed[0], (images + s * noise) / np.sqrt(s**2 + 0.36))


def test_edm_noise_levels_are_lognormal(rng):
    net = PointwiseNet(np.zeros((1, 1), np.float32))
    EDMLoss()(net, Tensor(np.zeros((20000, 1, 1, 1), np.float32)), None, Generator(1))
    log_sigma = 4 * net.fed[1]
    assert abs(log_sigma.mean() + 1.2) < 4 * 1.2 / math.sqrt(20000)
    assert abs(log_sigma.std() - 1.2) < 4 * 1.2 / math.sqrt(40000)


def test_edm_loss_of_a_blind_net_is_one():
    """The target has unit variance for data of deviation sigma_data, at every noise level: the output 0 costs 1."""
    images = Tensor(0.5 * np.random.default_rng(0).standard_normal((64, 16, 16, 1)), dtype=np.float32)
    value = EDMLoss()(lambda x, t, labels: x * 0, images, None, Generator(2)).item()
    assert value == pytest.approx(1, abs=0.05)


# DDPM


def test_q_sample_is_equation_4(rng):
    schedule = Schedule("cosine")
    images, noise = level_images(rng), rng.standard_normal(SHAPE)
    t = np.array([0, 1, 10, 500, 998, 999], np.int32)
    x = DDPMLoss(schedule).q_sample(Tensor(images), Tensor(t), Tensor(noise)).numpy()
    for i, step in enumerate(t):
        a = np.prod(1 - schedule.betas[: step + 1])
        assert np.allclose(x[i], math.sqrt(a) * images[i] + math.sqrt(1 - a) * noise[i], rtol=1e-9, atol=1e-12)


def test_q_sample_marginals_are_those_of_the_chain(rng):
    """100,000 walks of x_t = sqrt(1 - beta) x_{t-1} + sqrt(beta) z end as q_sample's formula says."""
    betas = np.array([0.1, 0.3, 0.2, 0.4])
    walk = np.full(100000, 0.7)
    for beta in betas:
        walk = math.sqrt(1 - beta) * walk + math.sqrt(beta) * rng.standard_normal(100000)
    images = Tensor(np.full((1, 400, 250, 1), 0.7))
    x = DDPMLoss(Schedule(betas)).q_sample(
        images, Tensor(np.array([3], np.int32)), Tensor(rng.standard_normal(images.shape))
    )
    assert x.numpy().mean() == pytest.approx(walk.mean(), abs=0.02)
    assert x.numpy().std() == pytest.approx(walk.std(), abs=0.01)


def test_timesteps_are_uniform_over_the_whole_table(rng):
    net = PointwiseNet(np.zeros((1, 1), np.float32))
    DDPMLoss(Schedule(np.full(5, 0.1)))(net, Tensor(np.zeros((20000, 1, 1, 1), np.float32)), None, Generator(1))
    counts = np.bincount(net.fed[1].astype(int), minlength=5)
    assert len(counts) == 5
    assert (abs(counts / 20000 - 0.2) < 4 * math.sqrt(0.16 / 20000)).all()


def test_simple_loss_is_equation_14(rng, wide_generator):
    schedule = Schedule("linear")
    images, weight = level_images(rng), rng.standard_normal((2, 2))
    net = PointwiseNet(weight)
    value = DDPMLoss(schedule)(net, Tensor(images), None, wide_generator).item()
    t = wide_generator.randint(0, 1000, (6,), stream=Purpose.TIMESTEP).numpy()
    noise = wide_generator.normal(SHAPE, stream=Purpose.NOISE).numpy()
    a = schedule.alphas_cumprod[t].reshape(-1, 1, 1, 1)
    x = np.sqrt(a) * images + np.sqrt(1 - a) * noise
    assert np.array_equal(net.fed[1], t)
    assert np.allclose(net.fed[0], x)
    assert value == pytest.approx(np.mean((numpy_net(x, t, weight) - noise) ** 2), rel=1e-10)


# Improved DDPM

SHORT = Schedule(np.array([0.01, 0.05, 0.1, 0.2]))  # so short that t = 0 is drawn


def tanh_cdf(x):
    return 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def numpy_bound(schedule, images, t, noise, eps, v):
    """L_t in bits, element by element, by equations 3 to 8 of Improved DDPM: x_0 first, then the two posteriors."""
    bits = np.empty_like(images)
    for i in range(len(t)):
        beta, a = schedule.betas[t[i]], schedule.alphas_cumprod[t[i]]
        a_prev = schedule.alphas_cumprod[t[i] - 1] if t[i] > 0 else 1.0
        x_t = np.sqrt(a) * images[i] + np.sqrt(1 - a) * noise[i]
        start = (x_t - np.sqrt(1 - a) * eps[i]) / np.sqrt(a)

        def posterior_mean(x0, x_t=x_t, a=a, a_prev=a_prev, beta=beta):
            return np.sqrt(a_prev) * beta / (1 - a) * x0 + np.sqrt(1 - beta) * (1 - a_prev) / (1 - a) * x_t

        step = max(t[i], 1)
        small = schedule.betas[step] * (1 - schedule.alphas_cumprod[step - 1]) / (1 - schedule.alphas_cumprod[step])
        variance = np.exp(v[i] * np.log(beta) + (1 - v[i]) * np.log(small))
        mean = posterior_mean(start)
        if t[i] > 0:
            true_mean = posterior_mean(images[i])
            nats = 0.5 * (np.log(variance / small) - 1 + small / variance + (true_mean - mean) ** 2 / variance)
        else:
            upper = tanh_cdf((images[i] + 1 / 255 - mean) / np.sqrt(variance))
            lower = tanh_cdf((images[i] - 1 / 255 - mean) / np.sqrt(variance))
            upper[images[i] > 0.999] = 1
            lower[images[i] < -0.999] = 0
            nats = -np.log(np.maximum(upper - lower, 1e-12))
        bits[i] = nats / np.log(2)
    return bits


def hybrid_draws(generator, schedule):
    t = generator.randint(0, schedule.num_timesteps, (6,), stream=Purpose.TIMESTEP).numpy()
    assert 0 in t and t.max() > 0, "another seed: this one does not draw both kinds of step"
    return t, generator.normal(SHAPE, stream=Purpose.NOISE).numpy()


def test_hybrid_loss_is_equation_16(rng, wide_generator):
    images, weight = level_images(rng), 0.3 * rng.standard_normal((2, 4))
    t, noise = hybrid_draws(wide_generator, SHORT)
    value = DDPMLoss(SHORT)(PointwiseNet(weight), Tensor(images), None, wide_generator).item()
    a = SHORT.alphas_cumprod[t].reshape(-1, 1, 1, 1)
    out = numpy_net(np.sqrt(a) * images + np.sqrt(1 - a) * noise, t, weight)
    eps, v = out[..., :2], (out[..., 2:] + 1) / 2
    bound = 4 * numpy_bound(SHORT, images, t, noise, eps, v).mean()  # 4 timesteps, each drawn with probability 1/4
    assert value == pytest.approx(np.mean((eps - noise) ** 2) + 0.001 * bound, rel=1e-9)


def test_bound_of_every_kind_of_step(rng):
    images, noise = level_images(rng), rng.standard_normal(SHAPE)
    eps, v = noise + 0.1 * rng.standard_normal(SHAPE), rng.random(SHAPE)
    t = np.array([0, 1, 2, 3, 0, 3], np.int32)
    arguments = (Tensor(images), Tensor(t), Tensor(noise), Tensor(eps), Tensor(v))
    bits = DDPMLoss(SHORT).variational_bound(*arguments).numpy()
    assert np.allclose(bits, numpy_bound(SHORT, images, t, noise, eps, v), rtol=1e-7, atol=1e-9)


def test_the_mean_is_fixed_inside_the_bound(rng, wide_generator):
    """The bound's weight changes the gradient of the variance's channels only."""
    images, weight = level_images(rng), 0.3 * rng.standard_normal((2, 4))
    grads = []
    for vlb_weight in (0.001, 1.0):
        net = PointwiseNet(weight)
        DDPMLoss(SHORT, vlb_weight=vlb_weight)(net, Tensor(images), None, wide_generator).backward()
        grads.append(net.weight.grad)
    assert np.array_equal(grads[0][:, :2], grads[1][:, :2])
    assert np.allclose(1000 * grads[0][:, 2:], grads[1][:, 2:], rtol=1e-9)
    assert np.abs(grads[1][:, 2:]).min() > 1e-4


@pytest.mark.parametrize("learn_sigma, made, told", [
    (True, lambda x: x, r"a Tensor of shape \(2, 4, 4, 3\): return one of shape \(2, 4, 4, 6\) with learn_sigma"),
    (False, lambda x: ops.concatenate([x, x], axis=3), r"\(2, 4, 4, 6\): return one of shape \(2, 4, 4, 3\) without"),
    (None, lambda x: x[..., :2], r"shape \(2, 4, 4, 2\): return one of shape \(2, 4, 4, 3\) or \(2, 4, 4, 6\)"),
    (None, ops.mean, r"a Tensor of shape \(\): return one"),
    (None, lambda x: None, "a NoneType: return one of shape"),
])
def test_a_net_without_the_variance_that_is_learned_is_told(learn_sigma, made, told):
    images = Tensor(np.zeros((2, 4, 4, 3), np.float32))
    with pytest.raises(CudiffError, match=f"the model returned .*{told}"):
        DDPMLoss(SHORT, learn_sigma=learn_sigma)(lambda x, t, labels: made(x), images, None, Generator(1))


def test_the_objective_asks_for_the_variance_where_the_configuration_does():
    for learn_sigma in (True, False):
        config = Config(diffusion="ddpm", learn_sigma=learn_sigma)
        assert OBJECTIVES["ddpm"].build(config, 1.0).loss(0.1).learn_sigma is learn_sigma


def test_level_probabilities_sum_to_one(rng):
    levels = (np.arange(256) / 127.5 - 1).reshape(256, 1, 1, 1)
    mean, log_variance = rng.uniform(-1.1, 1.1, 8), np.log(np.geomspace(1e-4, 1, 8))
    log_probability = discretised_log_likelihood(
        Tensor(np.tile(levels, (1, 1, 1, 8))), Tensor(levels - mean), Tensor(np.tile(log_variance, (256, 1, 1, 1)))
    )
    assert np.allclose(np.exp(log_probability.numpy()).sum(axis=0), 1, atol=1e-6)


def test_normal_kl_against_an_integral():
    x = np.linspace(-12, 12, 200001)
    q = np.exp(-((x - 0.7) ** 2) / (2 * 0.3)) / math.sqrt(2 * np.pi * 0.3)
    p = np.exp(-((x - 0.2) ** 2) / (2 * 1.7)) / math.sqrt(2 * np.pi * 1.7)
    integral = (q * (np.log(np.maximum(q, 1e-300)) - np.log(p))).sum() * (x[1] - x[0])
    kl = normal_kl(Tensor(np.array([0.5])), Tensor(np.log([0.3])), Tensor(np.log([1.7]))).item()
    assert kl == pytest.approx(integral, rel=1e-6)


@pytest.mark.skipif(torch is None, reason="PyTorch is not installed")
def test_hybrid_gradients_are_those_of_torch(rng, wide_generator):
    images, weight = level_images(rng), 0.3 * rng.standard_normal((2, 4))
    t, noise = hybrid_draws(wide_generator, SHORT)
    net = PointwiseNet(weight)
    DDPMLoss(SHORT, vlb_weight=0.5)(net, Tensor(images), None, wide_generator).backward()

    leaf, x0, z = torch.tensor(weight, requires_grad=True), torch.tensor(images), torch.tensor(noise)
    rows = [
        torch.tensor(a[t]).reshape(-1, 1, 1, 1) for a in (SHORT.betas, SHORT.alphas_cumprod, SHORT.alphas_cumprod_prev)
    ]
    beta, a, a_prev = rows
    x_t = a.sqrt() * x0 + (1 - a).sqrt() * z
    out = torch.tanh(x_t @ leaf + 0.01 * torch.tensor(t).reshape(-1, 1, 1, 1))
    eps, v = out[..., :2], (out[..., 2:] + 1) / 2
    start = (x_t - (1 - a).sqrt() * eps.detach()) / a.sqrt()
    gap = a_prev.sqrt() * beta / (1 - a) * (x0 - start)
    small = torch.tensor(np.append(SHORT.posterior_variance[1], SHORT.posterior_variance[1:])[t]).reshape(-1, 1, 1, 1)
    variance = torch.exp(v * beta.log() + (1 - v) * small.log())
    kl = torch.distributions.kl_divergence(
        torch.distributions.Normal(gap, small.sqrt().expand_as(gap)),
        torch.distributions.Normal(gap * 0, variance.sqrt()),
    )

    def cdf(x):
        return 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    upper, lower = cdf((gap + 1 / 255) / variance.sqrt()), cdf((gap - 1 / 255) / variance.sqrt())
    upper = torch.where(x0 > 0.999, torch.ones_like(upper), upper)
    lower = torch.where(x0 < -0.999, torch.zeros_like(lower), lower)
    likelihood = torch.log((upper - lower).clamp(min=1e-12))
    bits = torch.where(torch.tensor(t == 0).reshape(-1, 1, 1, 1), -likelihood, kl) / math.log(2)
    (((eps - z) ** 2).mean() + 0.5 * 4 * bits.mean()).backward()
    assert np.allclose(net.weight.grad, leaf.grad.numpy(), rtol=1e-8)


@pytest.mark.parametrize("channels", [2, 4], ids=["fixed variance", "learned variance"])
@pytest.mark.parametrize("name", ["edm", "ddpm"])
def test_gradients_against_finite_differences(rng, wide_generator, name, channels):
    if name == "edm" and channels == 4:
        pytest.skip("EDM learns no variance")
    images, weight = level_images(rng), 0.3 * rng.standard_normal((2, channels))
    loss = EDMLoss() if name == "edm" else DDPMLoss(SHORT, vlb_weight=0.0)  # the bound's stop-gradient: torch's test

    def value(w):
        return loss(PointwiseNet(w), Tensor(images), None, wide_generator)

    net = PointwiseNet(weight)
    loss(net, Tensor(images), None, wide_generator).backward()
    for index in np.ndindex(2, 2):
        step = np.zeros_like(weight)
        step[index] = 1e-5
        numeric = (value(weight + step).item() - value(weight - step).item()) / 2e-5
        assert net.weight.grad[index] == pytest.approx(numeric, rel=1e-6, abs=1e-9)


# On a device


LOSSES = {"edm": EDMLoss(label_dropout=0.3), "ddpm": DDPMLoss(Schedule("linear"), 0.3), "hybrid": DDPMLoss(SHORT, 0.3)}


@pytest.mark.parametrize("name", LOSSES)
def test_float32_on_every_device_agrees_with_float64(rng, wide_generator, device, name):
    images = level_images(rng)
    weight = 0.3 * rng.standard_normal((2, 4 if name == "hybrid" else 2))
    labels = np.arange(6, dtype=np.int32)
    expected = LOSSES[name](PointwiseNet(weight), Tensor(images), Tensor(labels), wide_generator).item()
    net = PointwiseNet(Tensor(weight, requires_grad=True, dtype=np.float32, device=device))
    narrow = Tensor(images, dtype=np.float32, device=device)
    value = LOSSES[name](net, narrow, Tensor(labels, device=device), Generator(5, device))
    assert value.dtype == np.float32
    assert value.item() == pytest.approx(expected, rel=2e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_the_host_reads_nothing_and_copies_nothing(rng, device, name, monkeypatch):
    weight = Tensor(0.3 * rng.standard_normal((2, 4 if name == "hybrid" else 2)), True, np.float32, device)
    images = Tensor(level_images(rng), dtype=np.float32, device=device)
    labels = Tensor(np.arange(6, dtype=np.int32), device=device)
    generator = Generator(5, device)

    def net(x, t, labels):
        n, h, w, c = x.shape
        return ops.reshape((ops.reshape(x, (n, h * w, c, 1)) * weight).sum(axis=2), (n, h, w, -1))

    def forbidden(*args, **kwargs):
        raise AssertionError("the loss moved data between host and device")

    LOSSES[name](net, images, labels, generator)  # the tables are made in the first call
    monkeypatch.setattr("cudiff.tensor.to_device",
                        lambda array, to, *rest: array if device_of(array) == to else forbidden())
    monkeypatch.setattr(Tensor, "numpy", forbidden)
    LOSSES[name](net, images, labels, generator).backward()


@pytest.mark.parametrize("name", LOSSES)
def test_the_generator_decides_everything(rng, name):
    images = Tensor(level_images(rng), dtype=np.float32)
    net = PointwiseNet(0.3 * rng.standard_normal((2, 4 if name == "hybrid" else 2)).astype(np.float32))
    generator = Generator(5)
    first = LOSSES[name](net, images, None, generator).item()
    assert LOSSES[name](net, images, None, generator).item() == first
    generator.advance()
    assert LOSSES[name](net, images, None, generator).item() != first
