"""Samplers, losses and guidance at the ends of what they take."""

import math
import re

import numpy as np
import pytest

from cudiff import Tensor, astype
from cudiff.diffusion import (
    DDIM,
    Ancestral,
    Between,
    EDMDenoiser,
    Euler,
    Guided,
    Heun,
    ImageNoise,
    Inpainted,
    per_sample,
)
from cudiff.diffusion.ddpm import DDPMLoss
from cudiff.diffusion.edm import EDMLoss
from cudiff.diffusion.samplers import Plan, Sampler, decreasing
from cudiff.diffusion.schedule import Schedule, karras_sigmas
from cudiff.errors import CudiffError
from cudiff.ops.random import Purpose, normal

SIGMAS = np.array([8.0, 4.0, 2.0, 1.0, 0.0])


@pytest.mark.parametrize("least, most, churned", [
    (2.0, 4.0, [0, 1, 1, 0]), (2.1, 4.0, [0, 1, 0, 0]), (2.0, 3.9, [0, 0, 1, 0]), (0.0, math.inf, [1, 1, 1, 1]),
    (8.0, 8.0, [1, 0, 0, 0]), (1.0, 0.5, [0, 0, 0, 0]),
])
@pytest.mark.parametrize("method", [Euler, Heun])
def test_steps_that_begin_in_the_range_are_churned(method, least, most, churned):
    """Both of its ends count (EDM, Algorithm 2, line 3)."""
    plans = method(None, S_churn=1.0, S_min=least, S_max=most, S_noise=1.5).plan(SIGMAS)
    assert [plan.noisy for plan in plans] == [bool(one) for one in churned]
    for plan, sigma, one in zip(plans, SIGMAS[:-1], churned, strict=True):
        sigma_hat = 1.25 * sigma if one else sigma
        assert plan.numbers[0] == sigma_hat
        assert plan.numbers[2] == pytest.approx(1.5 * math.sqrt(sigma_hat**2 - sigma**2))


@pytest.mark.parametrize("options, message", [
    ({"S_churn": -0.1}, "S_churn"), ({"S_min": -0.1}, "S_min"), ({"S_noise": -0.1}, "S_noise"),
    ({"S_max": -0.1}, "S_max must be at least 0, not -0.1"), ({"S_max": math.nan}, "S_max must be at least 0, not nan"),
])
@pytest.mark.parametrize("method", [Euler, Heun])
def test_numbers_that_are_no_churn_are_refused(method, options, message):
    with pytest.raises(CudiffError, match=message):
        method(None, **options)
    method(None, **dict.fromkeys(options, 0.0))


def test_eta_and_label_dropout_are_shares():
    for make in (lambda share: DDIM(None, share), lambda share: EDMLoss(label_dropout=share),
                 lambda share: DDPMLoss(Schedule("linear"), label_dropout=share)):
        for share in (0.0, 0.5, 1.0):
            make(share)
        for share in (-0.01, 1.01, 1.5, math.nan):
            with pytest.raises(CudiffError):
                make(share)


@pytest.mark.parametrize("make", [EDMLoss, lambda **options: EDMDenoiser(None, **options)], ids=["loss", "denoiser"])
def test_deviations_are_above_0(make):
    names = ["sigma_data", "data_std", *(["P_std"] if make is EDMLoss else [])]
    for name in names:
        make(**{name: 1e-3})
        for value in (0.0, -0.5):
            with pytest.raises(CudiffError, match=name):
                make(**{name: value})


@pytest.mark.parametrize("first", [0, 7])
def test_the_noise_of_an_image_by_its_streams(first):
    """What sampling starts from has the stream SAMPLE and number 0; a step's own has CHURN and the step."""
    noise = ImageNoise((2, 3, 3, 1), 5, first)
    start = normal((2, 3, 3, 1), 5, Purpose.SAMPLE, 0, first, "cpu", np.float32).numpy()
    np.testing.assert_array_equal(noise.start(1.0).numpy(), start)
    np.testing.assert_array_equal(noise.start(3.0).numpy(), 3 * start)
    for step in (0, 1, 4):
        expected = normal((2, 3, 3, 1), 5, Purpose.CHURN, step, first, "cpu", np.float32).numpy()
        np.testing.assert_array_equal(noise(step).numpy(), expected)


class Making(Sampler):
    """Its steps return what `made` makes of the state."""

    def __init__(self, made):
        super().__init__(None)
        self.made = made

    def plan(self, sigmas):
        return [Plan([1.0], False)] * (len(sigmas) - 1)

    def step(self, x, numbers, noise, labels):
        return self.made(x)


@pytest.mark.parametrize("made", [
    lambda x: [x, x], lambda x: x, lambda x: (x,), lambda x: (x, x, x), lambda x: (x, x[:1]), lambda x: (x[:1], x),
    lambda x: (x, None),
], ids=["list", "one", "1", "3", "short image", "short state", "None"])
def test_a_step_returns_a_state_and_an_image(made):
    x = Tensor(np.ones((2, 3, 3, 1), np.float32))
    np.testing.assert_array_equal(Making(lambda x: (x * 2, x))(x, SIGMAS).numpy(), np.full((2, 3, 3, 1), 16))
    with pytest.raises(CudiffError, match=r"return two Tensors from step, .* both of shape \(2, 3, 3, 1\)"):
        Making(made)(x, SIGMAS)


@pytest.mark.parametrize("sigmas", [[1.0], [], [1.0, 1.0], [1.0, 2.0], [1.0, -0.1], [[2.0, 1.0]], [1.0, math.nan],
                                    [math.inf, 1.0]])
def test_sigmas_fall_to_0_or_above(sigmas):
    with pytest.raises(CudiffError, match="two or more decreasing sigmas that end at 0 or above"):
        decreasing(sigmas)
    assert decreasing([1.0, 0.0]).tolist() == [1, 0] and decreasing([2, 1]).tolist() == [2, 1]


@pytest.mark.parametrize("guidance, labels, sizes", [
    (1.0, [4, 7], 2), (0.0, [4, 7], 4), (2.0, [4, 7], 4), (2.0, None, 2),
])
def test_guidance_of_one_asks_once(guidance, labels, sizes):
    """With a variance or without; the variance is that of the class."""
    asked = []

    class Net:
        def with_variance(self, x, sigma, labels):
            return self(x, sigma, labels), x * 0.5

        def __call__(self, x, sigma, labels):
            asked.append(None if labels is None else labels.numpy().tolist())
            assert len(x) == len(sigma) == sizes
            return x * 3

    x, sigma = Tensor(np.ones((2, 1, 1, 1), np.float32)), Tensor(np.ones(2, np.float32))
    labels = None if labels is None else Tensor(np.int32(labels))
    guided = Guided(Net(), guidance)
    for denoised, fraction in [(guided(x, sigma, labels), x * 0.5), guided.with_variance(x, sigma, labels)]:
        assert denoised.numpy().ravel().tolist() == [3, 3] and fraction.numpy().ravel().tolist() == [0.5, 0.5]
    assert asked == 2 * [None if labels is None else [4, 7] + [-1, -1] * (sizes == 4)]


@pytest.mark.parametrize("dtype", ["uint8", "uint64", "int8", "int64"])
def test_guidance_takes_labels_of_any_integers(dtype):
    """The null class, -1, is none of a byte's numbers."""
    guided = Guided(lambda x, sigma, labels: x + per_sample(astype(labels, "float32"), x), 2.0)
    made = guided(Tensor(np.zeros((2, 1, 1, 1), np.float32)), 1.0, Tensor(np.array([1, 2], dtype)))
    assert made.numpy().ravel().tolist() == [3, 5]


@pytest.mark.parametrize("noise, what", [
    (lambda step: Tensor(np.ones((1, 2, 2, 1), np.float32)), r"shape \(1, 2, 2, 1\)"), (lambda step: 0.5, "a float"),
    (ImageNoise((3, 2, 2, 1), 0), r"shape \(3, 2, 2, 1\)"),
])
def test_every_image_has_noise_of_its_own(noise, what):
    """One image's had been added to all."""
    x = Tensor(np.ones((2, 2, 2, 1), np.float32))
    with pytest.raises(CudiffError, match=rf"^noise\(0\) gives {what}: give .* of x's shape \(2, 2, 2, 1\)$"):
        DDIM(lambda x, sigma, labels: x, eta=1.0)(x, SIGMAS, noise=noise)


@pytest.mark.parametrize("make, call", [(Inpainted, "know(images, mask)"), (Between, "toward(other, share)")])
def test_what_belongs_to_a_batch_comes_first(make, call):
    x = Tensor(np.ones((2, 2, 2, 1), np.float32))
    with pytest.raises(CudiffError, match=f"a batch of 2 images comes before .*: call {re.escape(call)} of 2 first$"):
        make(lambda x, sigma, labels: x)(x, 1.0)


def test_karras_levels_need_a_step_and_a_range():
    np.testing.assert_allclose(karras_sigmas(1), [80, 0])
    np.testing.assert_allclose(karras_sigmas(2), [80, 0.002, 0])
    for options in ({"num_steps": 0}, {"num_steps": 2, "sigma_min": 0.0}, {"num_steps": 2, "sigma_min": 80.0}):
        with pytest.raises(CudiffError, match="use"):
            karras_sigmas(**options)


def test_schedules_take_two_variances_or_more_between_0_and_1():
    assert Schedule([0.1, 0.9]).num_timesteps == 2
    for betas in ([0.5], [], [0.0, 0.5], [0.5, 1.0], [[0.1, 0.2]], [0.1, math.nan]):
        with pytest.raises(CudiffError, match="two or more variances"):
            Schedule(betas)


@pytest.mark.parametrize("steps", [0, 11])
def test_a_schedule_has_as_many_steps_as_timesteps(steps):
    schedule = Schedule(np.full(10, 0.1))
    assert schedule.timesteps(10).tolist() == list(range(9, -1, -1)) and schedule.timesteps(1).tolist() == [9]
    with pytest.raises(CudiffError, match=f"{steps} steps of a schedule that has 10: use 1 to 10"):
        schedule.timesteps(steps)


def test_the_last_ancestral_step_adds_no_noise():
    plans = Ancestral(None).plan(SIGMAS)
    assert [plan.noisy for plan in plans] == [True, True, True, False]
    assert [len(plan.numbers) for plan in plans] == [3, 3, 3, 2]
    assert [plan.noisy for plan in DDIM(None, 0.0).plan(SIGMAS)] == [False] * 4
    assert [plan.noisy for plan in DDIM(None, 0.5).plan(SIGMAS)] == [True, True, True, False]
