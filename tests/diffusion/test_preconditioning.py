"""Denoisers: what the network is fed, what is made of its output, and guidance."""

from functools import partial

import numpy as np
import pytest

from cudiff import Tensor, ops
from cudiff.diffusion import DDPMDenoiser, EDMDenoiser, Guided
from cudiff.diffusion.denoiser import blended
from cudiff.diffusion.prediction import PREDICTIONS
from cudiff.diffusion.schedule import Schedule
from cudiff.errors import CudiffError


class RecordingNet:
    """Returns what it is told to and keeps what it was fed."""

    def __init__(self, out):
        self.out, self.calls = out, []

    def __call__(self, x, t, labels=None):
        self.calls.append((x.numpy(), t.numpy(), None if labels is None else labels.numpy()))
        return Tensor(self.out)


@pytest.mark.parametrize("scale", [0.25, 1.0])
def test_edm_denoiser_is_table_1(rng, scale):
    x, out = rng.standard_normal((2, 3, 4, 4, 1))
    sigma = np.array([0.01, 0.7, 60.0])
    net = RecordingNet(out)
    denoised = EDMDenoiser(net, sigma_data=0.6, c_noise_scale=scale)(Tensor(x), Tensor(sigma), None).numpy()
    fed, c_noise, _ = net.calls[0]
    for i, s in enumerate(sigma):
        c_skip, c_out, c_in = 0.36 / (s**2 + 0.36), s * 0.6 / np.sqrt(s**2 + 0.36), 1 / np.sqrt(s**2 + 0.36)
        assert np.allclose(fed[i], c_in * x[i], rtol=1e-12)
        assert np.allclose(denoised[i], c_skip * x[i] + c_out * out[i], rtol=1e-12)
    assert np.allclose(c_noise, scale * np.log(sigma), rtol=1e-12)


def test_edm_denoiser_passes_labels_and_gradients(rng):
    weight = Tensor(np.float64(0.3).reshape(1), requires_grad=True)
    x, sigma = rng.standard_normal((2, 2, 2, 1)), np.array([0.5, 2.0])
    denoised = EDMDenoiser(lambda x, t, labels: x * weight + labels.astype(np.float64).sum())(
        Tensor(x), Tensor(sigma), Tensor(np.array([1, 2], np.int32))
    )
    denoised.sum().backward()
    s = sigma[:, None, None, None]
    assert np.allclose(weight.grad, (0.5 * s / (s**2 + 0.25) * x).sum())


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
def test_edm_denoiser_of_images_in_another_dtype_than_the_network_s(device, rng, dtype):
    """A sampler may keep its images in float64, or in 16 bits: networks give float32."""
    if (device, dtype) == ("cuda", "float64"):
        pytest.skip("float64 stays on the CPU")
    image, levels = rng.standard_normal((2, 4, 4, 1)), np.array([0.5, 2.0])  # exact in 16 bits
    denoiser = EDMDenoiser(lambda x, t, labels: ops.sin(x.astype("float32")))
    x = Tensor(image, dtype=dtype, device=device, requires_grad=True)
    denoised = denoiser(x, Tensor(levels, dtype=dtype, device=device))
    assert denoised.dtype == np.promote_types(x.dtype, np.float32)
    expected = denoiser(x.detach().astype("float32"), Tensor(levels, dtype="float32", device=device))
    assert np.allclose(denoised.astype("float32").numpy(), expected.numpy(), atol=1e-6 if dtype == "float64" else 2e-2)
    denoised.sum().backward()
    assert x.grad.dtype == x.dtype


def exact_noise_net(schedule, mean, deviation):
    """E[noise | x_t] of Gaussian data, by t alone: real-valued timesteps use the interpolated sigma."""

    def net(x, t, labels=None):
        sigma = Tensor(schedule.t_to_sigma(t.numpy()).reshape(-1, 1, 1, 1))
        ratio = sigma / (deviation**2 + ops.square(sigma))
        return (x * ops.sqrt(ops.square(sigma) + 1) - mean) * ratio

    return net


def test_a_frame_is_of_the_denoisers_prediction(rng):
    """Of the one that was changed too."""
    x, out = rng.standard_normal((2, 2, 3, 4, 1))
    denoiser, x, sigma = DDPMDenoiser(RecordingNet(out), Schedule("linear"), "v"), Tensor(x), Tensor(np.full(2, 0.5))
    last, share = Tensor(np.zeros(x.shape, np.uint8)), Tensor(np.zeros(1, np.float32))
    for name in ("v", "x0"):
        denoiser.predicts = name
        frame, _ = denoiser.blended_frame(x, sigma, None, last, share)
        np.testing.assert_array_equal(frame.numpy(), blended(denoiser(x, sigma), last, share)[0].numpy())
    with pytest.raises(AttributeError):
        denoiser.prediction = PREDICTIONS["v"]


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_ddpm_denoiser_of_gaussian_data_is_exact(rng, name):
    schedule = Schedule(name)
    sigma = np.array([schedule.sigmas[0], schedule.sigmas[400], 0.3, 2.0, 100.0])
    x = rng.standard_normal((5, 2, 2, 3)) * sigma.reshape(-1, 1, 1, 1)
    denoised = DDPMDenoiser(exact_noise_net(schedule, 0.2, 0.5), schedule)(Tensor(x), Tensor(sigma), None)
    s = sigma.reshape(-1, 1, 1, 1)
    assert np.allclose(denoised.numpy(), (0.25 * x + s**2 * 0.2) / (0.25 + s**2), rtol=1e-8, atol=1e-10)


def test_ddpm_denoiser_feeds_the_state_and_timestep_of_ddpm(rng):
    schedule = Schedule("linear")
    t = np.array([0, 1, 250, 999])
    x_t = rng.standard_normal((4, 2, 2, 1))
    net = RecordingNet(np.zeros((4, 2, 2, 1)))
    x = x_t / np.sqrt(schedule.alphas_cumprod[t]).reshape(-1, 1, 1, 1)
    denoised = DDPMDenoiser(net, schedule)(Tensor(x), Tensor(schedule.sigmas[t]), None)
    fed, times, _ = net.calls[0]
    assert np.allclose(fed, x_t, rtol=1e-12)
    assert np.allclose(times, t, atol=1e-9)
    assert np.array_equal(denoised.numpy(), x)


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_timestep_on_the_device_is_that_of_the_schedule(device, name):
    schedule = Schedule(name)
    dtype = np.float64 if device == "cpu" else np.float32
    sigma = np.concatenate([schedule.sigmas[::37], np.geomspace(1e-3, 1e5, 50)])
    t = DDPMDenoiser(None, schedule).timestep(Tensor(sigma, dtype=dtype, device=device))
    assert t.shape == sigma.shape
    assert np.allclose(t.numpy(), schedule.sigma_to_t(sigma), atol=1e-8 if device == "cpu" else 2e-3)


def test_timestep_in_float32():
    schedule = Schedule("linear")
    t = DDPMDenoiser(None, schedule).timestep(Tensor(schedule.sigmas, dtype=np.float32))
    assert np.allclose(t.numpy(), np.arange(1000), atol=2e-3)


def test_learned_variance_is_split_off(rng):
    schedule = Schedule("linear")
    out, x = rng.standard_normal((2, 2, 2, 6)), rng.standard_normal((2, 2, 2, 3))
    sigma = Tensor(schedule.sigmas[[10, 20]])
    denoiser = DDPMDenoiser(RecordingNet(out), schedule)
    denoised, fraction = denoiser.with_variance(Tensor(x), sigma)
    s = sigma.numpy().reshape(-1, 1, 1, 1)
    assert np.allclose(denoised.numpy(), x - s * out[..., :3])
    assert np.allclose(fraction.numpy(), (out[..., 3:] + 1) / 2)
    assert np.array_equal(denoiser(Tensor(x), sigma).numpy(), denoised.numpy())
    with pytest.raises(CudiffError, match="learned no variance"):
        DDPMDenoiser(RecordingNet(out[..., :3]), schedule).with_variance(Tensor(x), sigma)
    few, last = DDPMDenoiser(RecordingNet(out[..., :2]), schedule), Tensor(np.zeros(x.shape, np.uint8))
    for call in (few, partial(few.blended_frame, last=last, share=0.5)):
        with pytest.raises(CudiffError, match=r"the model returned a Tensor of shape \(.*, 2\): return one of shape"):
            call(Tensor(x), Tensor(np.full(len(x), 0.5)), labels=None)


def by_label(x, sigma, labels):
    """A denoiser whose answer is its label everywhere, plus sigma / 100."""
    values = labels.astype(x.dtype) + sigma * 0.01
    return x * 0 + values.reshape(-1, 1, 1, 1)


@pytest.mark.parametrize("guidance", [0.0, 0.5, 3.0])
def test_guidance_goes_from_null_to_class(guidance):
    calls = []

    def denoiser(x, sigma, labels):
        calls.append(labels.numpy().tolist())
        return by_label(x, sigma, labels)

    x, sigma = Tensor(np.ones((2, 1, 1, 1))), Tensor(np.array([1.0, 2.0]))
    out = Guided(denoiser, guidance)(x, sigma, Tensor(np.array([4, 7], np.int32))).numpy().ravel()
    assert calls == [[4, 7, -1, -1]]
    assert np.allclose(out, [-1 + guidance * (4 + 1) + 0.01, -1 + guidance * (7 + 1) + 0.02])


def test_guidance_of_one_or_without_labels_is_one_plain_call():
    sizes = []

    def denoiser(x, sigma, labels):
        sizes.append(x.shape[0])
        return x if labels is None else by_label(x, sigma, labels)

    x, sigma = Tensor(np.ones((2, 1, 1, 1))), Tensor(np.array([1.0, 2.0]))
    assert np.allclose(
        Guided(denoiser, 1.0)(x, sigma, Tensor(np.array([4, 7], np.int32))).numpy().ravel(), [4.01, 7.02]
    )
    assert np.allclose(Guided(denoiser, 5.0)(x, sigma, None).numpy(), 1)
    assert sizes == [2, 2]


def test_guided_variance_is_that_of_the_class():
    class Learned:
        def with_variance(self, x, sigma, labels):
            return by_label(x, sigma * 0, labels), by_label(x, sigma * 0, labels) * 0.1

    x, sigma = Tensor(np.ones((2, 1, 1, 1))), Tensor(np.array([1.0, 2.0]))
    denoised, fraction = Guided(Learned(), 2.0).with_variance(x, sigma, Tensor(np.array([4, 7], np.int32)))
    assert np.allclose(denoised.numpy().ravel(), [9, 15])
    assert np.allclose(fraction.numpy().ravel(), [0.4, 0.7])


def test_guiding_the_denoiser_guides_the_noise(rng):
    """On a DDPM network it is the paper's combination of two noise predictions (arXiv 2207.12598, equation 6)."""
    schedule = Schedule("linear")
    eps = {-1: rng.standard_normal((1, 2, 2, 1)), 3: rng.standard_normal((1, 2, 2, 1))}

    def net(x, t, labels):
        return Tensor(np.concatenate([eps[label] for label in labels.numpy()]))

    x, w = rng.standard_normal((1, 2, 2, 1)), 1.5
    sigma = schedule.sigmas[300:301]
    denoised = Guided(DDPMDenoiser(net, schedule), 1 + w)(Tensor(x), Tensor(sigma), Tensor(np.array([3], np.int32)))
    assert np.allclose(denoised.numpy(), x - sigma * ((1 + w) * eps[3] - w * eps[-1]))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_noise_level_may_be_a_number(rng, dtype):
    x = Tensor(rng.standard_normal((2, 4, 4, 3)), dtype=dtype)
    labels = Tensor(np.int32([0, 1]))

    def net(x, t, labels):
        return x * ops.reshape(t + ops.astype(labels, t.dtype), (-1, 1, 1, 1))

    for denoiser in (EDMDenoiser(net), DDPMDenoiser(net, Schedule("linear"))):
        for wrapped in (denoiser, Guided(denoiser, 2.0)):
            expected = wrapped(x, Tensor(np.full(2, 1.5), dtype=dtype), labels)
            out = wrapped(x, 1.5, labels)
            assert out.dtype == expected.dtype == dtype
            np.testing.assert_array_equal(out.numpy(), expected.numpy())
