"""What nets may predict: each preconditioning against its table, each loss against its paper, all on one Gaussian."""

import json
import math
from itertools import pairwise

import numpy as np
import pytest

import cudiff
from cudiff import Tensor, ops
from cudiff.cli import main
from cudiff.config import Config, load_toml
from cudiff.diffusion import (
    DDPMDenoiser,
    DDPMLoss,
    FlowDenoiser,
    FlowLoss,
    ImageNoise,
    flow_sigmas,
    karras_sigmas,
    sample_euler,
)
from cudiff.diffusion.prediction import PREDICTIONS
from cudiff.diffusion.schedule import Schedule
from cudiff.errors import CudiffError
from cudiff.ops.random import Generator, Purpose
from cudiff.registry import OBJECTIVES, SAMPLERS
from tests.diffusion.test_samplers import DEVIATION, MEAN, gaussian

SCHEDULE = Schedule("linear")
NAMES = ["eps", "x0", "v", "flow"]


def table(name, s):
    """c_skip, c_out, c_in by the papers, written out again."""
    root = np.sqrt(1 + s**2)
    return {
        "eps": (1 + 0 * s, -s, 1 / root), "x0": (0 * s, 1 + 0 * s, 1 / root),
        "v": (1 / root**2, -s / root, 1 / root), "flow": (1 / (1 + s), -s / (1 + s), 1 / (1 + s)),
    }[name]  # fmt: skip


def denoiser_of(name, net):
    return FlowDenoiser(net) if name == "flow" else DDPMDenoiser(net, SCHEDULE, name)


def ideal_net(name):
    """E[target | z] of Gaussian data at z = alpha y + s n, by t alone."""

    def net(z, t, labels=None):
        time = t.numpy().reshape(-1, 1, 1, 1)
        if name == "flow":
            alpha, s = 1 - time / 1000, time / 1000
        else:
            sigma = SCHEDULE.t_to_sigma(time)
            alpha, s = 1 / np.sqrt(1 + sigma**2), sigma / np.sqrt(1 + sigma**2)
        rest = (z.numpy() - alpha * MEAN) / (alpha**2 * DEVIATION**2 + s**2)
        y, n = MEAN + alpha * DEVIATION**2 * rest, s * rest
        return Tensor({"eps": n, "x0": y, "v": alpha * n - s * y, "flow": n - y}[name])

    return net


@pytest.mark.parametrize("name", NAMES)
def test_coefficients_are_those_of_the_table(rng, name):
    x, out = rng.standard_normal((2, 5, 3, 3, 1))
    sigma = np.array([0.02, 0.3, 1.0, 7.0, 100.0])
    fed = []

    def net(z, t, labels=None):
        fed.append((z.numpy(), t.numpy()))
        return Tensor(out)

    denoised = denoiser_of(name, net)(Tensor(x), Tensor(sigma)).numpy()
    c_skip, c_out, c_in = (c.reshape(-1, 1, 1, 1) for c in table(name, sigma))
    np.testing.assert_allclose(fed[0][0], c_in * x, rtol=1e-12)
    np.testing.assert_allclose(denoised, c_skip * x + c_out * out, rtol=1e-10, atol=1e-12)
    times = 1000 * sigma / (1 + sigma) if name == "flow" else SCHEDULE.sigma_to_t(sigma)
    np.testing.assert_allclose(fed[0][1], times, atol=1e-8)
    y, n = rng.standard_normal((2, 5, 3, 3, 1))
    s = sigma.reshape(-1, 1, 1, 1)
    wanted = PREDICTIONS[name].target(Tensor(y), Tensor(n), Tensor(c_in), Tensor(c_in * s)).numpy()
    np.testing.assert_allclose(wanted, (y - c_skip * (y + s * n)) / c_out, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(PREDICTIONS[name].c_out(Tensor(sigma)).numpy(), c_out.ravel(), rtol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_every_prediction_of_a_gaussian_is_the_same_denoiser(rng, name):
    sigma = np.array([0.02, 0.3, 1.0, 7.0, 100.0])
    x = Tensor(MEAN + rng.standard_normal((5, 3, 3, 1)) * np.sqrt(DEVIATION**2 + sigma.reshape(-1, 1, 1, 1) ** 2))
    denoised = denoiser_of(name, ideal_net(name))(x, Tensor(sigma)).numpy()
    np.testing.assert_allclose(denoised, gaussian(x, Tensor(sigma)).numpy(), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("sampler", list(SAMPLERS))
@pytest.mark.parametrize("name", NAMES)
def test_every_sampler_takes_every_prediction(name, sampler):
    config = Config(eta=0.5, S_churn=2.0, clip_denoised=True)
    sigmas = karras_sigmas(12, 0.02, 80.0)
    noise = ImageNoise((2, 3, 3, 1), 1, dtype=np.float64)
    images = [
        SAMPLERS[sampler].build(denoiser, config, False)(noise.start(80.0), sigmas, noise=noise).numpy()
        for denoiser in (denoiser_of(name, ideal_net(name)), gaussian)
    ]
    np.testing.assert_allclose(*images, rtol=1e-7)


class Fixed:
    """A net that gives tanh of half of what it is fed, and keeps it."""

    def __call__(self, z, t, labels=None):
        self.z, self.t = z.numpy(), t.numpy()
        return ops.tanh(z * 0.5)


@pytest.mark.parametrize("gamma", [0.0, 5.0])
@pytest.mark.parametrize("name", ["eps", "x0", "v"])
def test_ddpm_losses_are_those_of_their_papers(rng, wide_generator, name, gamma):
    """Weights as in section 3.4 of arXiv 2303.09556, by name."""
    images, net = rng.uniform(-1, 1, (16, 4, 4, 1)), Fixed()
    wide_generator.randint = lambda low, high, shape, stream: Tensor((np.arange(16) * 66).astype(np.int32))
    value = DDPMLoss(SCHEDULE, prediction=name, min_snr=gamma)(net, Tensor(images), None, wide_generator).item()
    noise = wide_generator.normal(images.shape, stream=Purpose.NOISE).numpy()
    a = np.cumprod(1 - SCHEDULE.betas)[np.arange(16) * 66].reshape(-1, 1, 1, 1)
    state = np.sqrt(a) * images + np.sqrt(1 - a) * noise
    target = {"eps": noise, "x0": images, "v": np.sqrt(a) * noise - np.sqrt(1 - a) * images}[name]
    snr = a / (1 - a)
    capped = np.minimum(snr, gamma)
    weight = {"eps": capped / snr, "x0": capped, "v": capped / (snr + 1)}[name] if gamma else 1
    np.testing.assert_allclose(net.z, state, rtol=1e-6, atol=1e-9)
    assert value == pytest.approx(np.mean(weight * (np.tanh(state / 2) - target) ** 2), rel=1e-6)


def test_the_flow_s_loss_and_times(rng, wide_generator):
    images, net = rng.uniform(-1, 1, (64, 4, 4, 1)), Fixed()
    value = FlowLoss(0.3, 1.2)(net, Tensor(images), None, wide_generator).item()
    noise = wide_generator.normal(images.shape, stream=Purpose.NOISE).numpy()
    t = 1 / (1 + np.exp(-(0.3 + 1.2 * wide_generator.normal((64,), stream=Purpose.SIGMA).numpy())))
    np.testing.assert_allclose(net.t, 1000 * t, rtol=1e-10)
    t = t.reshape(-1, 1, 1, 1)
    state = (1 - t) * images + t * noise
    assert value == pytest.approx(np.mean((np.tanh(state / 2) - (noise - images)) ** 2), rel=1e-9)
    FlowLoss()(net, Tensor(np.zeros((20000, 1, 1, 1), np.float32)), None, Generator(1))
    logits = np.log(net.t / (1000 - net.t))
    assert abs(logits.mean()) < 4 / math.sqrt(20000) and abs(logits.std() - 1) < 4 / math.sqrt(40000)
    labels = Tensor(np.arange(64, dtype=np.int32))
    dropped = []
    FlowLoss(label_dropout=1.0)(
        lambda z, t, labels: dropped.append(labels.numpy()) or z, Tensor(images), labels, Generator(0))
    assert (dropped[0] == -1).all()


def test_the_flow_s_sampler_is_euler_s_in_its_own_coordinates():
    sigmas, t = flow_sigmas(7), np.linspace(0.999, 0, 8)
    np.testing.assert_allclose(sigmas, t / (1 - t))
    assert sigmas[0] == pytest.approx(999) and sigmas[-1] == 0
    net = ideal_net("flow")
    x = ImageNoise((2, 3, 3, 1), 4, dtype=np.float64).start(sigmas[0])
    z = x.numpy() / (1 + sigmas[0])
    for now, after in pairwise(t):
        z = z + (after - now) * net(Tensor(z), Tensor(np.full(2, 1000 * now))).numpy()
    np.testing.assert_allclose(sample_euler(FlowDenoiser(net), x, sigmas).numpy(), z, rtol=1e-9)
    objective = OBJECTIVES["flow"].build(Config(diffusion="flow", sigma_max=2000.0), 0.25)
    np.testing.assert_array_equal(objective.sigmas(7, True), sigmas)
    np.testing.assert_allclose(objective.sigmas(7, False), karras_sigmas(7, 0.002, 999.0))


@pytest.mark.parametrize("values, message", [
    ({"diffusion": "ddpm", "prediction": "u"}, "unknown prediction 'u': use eps or x0 or v"),
    ({"prediction": "v"}, "prediction is an option of diffusion ddpm, not of model unet with diffusion edm: leave"),
    ({"diffusion": "ddpm", "min_snr": -1.0}, "min_snr must be at least 0, not -1"),
    ({"diffusion": "ddpm", "prediction": "v", "learn_sigma": True}, "learn_sigma is for prediction = eps, not v: drop"),
    ({"diffusion": "flow", "P_std": 0.0}, "P_std must be above 0, not 0"),
    ({"diffusion": "flow", "sigma_min": 1000.0, "sigma_max": 2000.0}, "sigma_min 1000.0 is above a flow's highest"),
    ({"diffusion": "flow", "learn_sigma": True}, "learn_sigma needs diffusion = ddpm: FLOW has no variance to learn"),
])
def test_wrong_options_get_one_line(values, message):
    with pytest.raises(CudiffError, match=message) as error:
        Config(**values)
    assert "\n" not in str(error.value)


def test_unknown_predictions_are_refused_in_python():
    for make in (lambda: DDPMLoss(SCHEDULE, prediction="flow"), lambda: DDPMDenoiser(None, SCHEDULE, "u")):
        with pytest.raises(CudiffError, match=r"unknown prediction .*: use eps or x0 or v"):
            make()


@pytest.mark.parametrize("flags", [
    "--diffusion ddpm --prediction x0", "--diffusion ddpm --prediction v --min-snr 5", "--diffusion flow"])
def test_training_from_the_command_line_lowers_the_loss(tmp_path, flags, capsys):
    """On drawn digits; the checkpoint says what the net predicts, and samples by any sampler."""
    toml = tmp_path / "run.toml"
    words = flags.replace("--", "").split()
    values = {key.replace("-", "_"): value for key, value in zip(words[::2], words[1::2], strict=True)}
    toml.write_text("".join(f"{k} = {v if v.isdigit() else repr(v)}\n" for k, v in values.items()))
    config = load_toml(toml)
    small = "--image-size 8 --model-channels 16 --channel-mult 1,2 --attention-resolutions= --batch-size 32"
    run = ["train", "--data", "digits", *flags.split(), *small.split(), "--num-res-blocks", "1", "--steps", "60"]
    run += ["--log-every", "10", "--lr", "2e-3", "--sample-every", "0", "--device", "cpu", "--folder"]
    assert main([*run, str(tmp_path / "run")]) == 0, capsys.readouterr().err
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < 0.8 * losses[0], losses
    model = cudiff.load(tmp_path / "run", device="cpu")
    for name, value in values.items():
        assert getattr(model.config, name) == getattr(config, name), value
    for sampler in ("unipc", "flow", "ancestral"):
        assert model.sample(2, steps=3, sampler=sampler).shape == (2, 8, 8, 1)
