"""Forward passes that share an update's samples: the same images, random numbers and gradient as one pass of all."""

import numpy as np
import pytest

from cudiff.checkpoint import load_checkpoint
from cudiff.config import Config
from cudiff.data import load_dataset
from cudiff.train import Trainer

TINY = Config(
    data="digits", image_size=8, channels=1, model_channels=8, channel_mult=(1, 2), num_res_blocks=1, num_heads=2,
    num_classes=10, batch_size=8, lr=2e-3, steps=6, log_every=2, sample_every=0, save_every=0, device="cpu",
)
DDPM = {"diffusion": "ddpm", "sampler": "ddim", "learn_sigma": True}


@pytest.fixture(scope="module")
def digits():
    return load_dataset("digits", image_size=8, count=100)


def test_accumulated_gradients_are_the_mean(digits, tmp_path):
    trainer = Trainer(TINY.replace(accumulate=2, dropout=0.2), digits, tmp_path / "run")
    gradients, losses = [], []
    for number, samples in enumerate(trainer.loader.passes):
        trainer.generator.samples = samples
        trainer.net.zero_grad()
        loss = trainer.loss(trainer.net, *trainer.loader.batch(trainer.generator.step, (), number), trainer.generator)
        loss.backward()
        gradients.append(trainer.net.flat.grad.copy())
        losses.append(loss.item())
    assert trainer.train_step().item() == pytest.approx(np.mean(losses), rel=1e-5)
    np.testing.assert_allclose(trainer.net.flat.grad, np.mean(gradients, axis=0), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("changes", [{}, DDPM, {"model": "dit", "num_heads": 3}], ids=["edm", "ddpm", "dit"])
def test_two_passes_are_one_of_twice_the_batch(digits, tmp_path, changes):
    """Of the same images, flips, noise, labels and dropout: random numbers are of the sample."""
    config = TINY.replace(flip=True, lr=1e-4, **changes)
    config = config if "model" in changes else config.replace(dropout=0.3)
    whole = Trainer(config.replace(batch_size=16), digits, tmp_path / "whole")
    halves = Trainer(config.replace(accumulate=2), digits, tmp_path / "halves")
    for step in range(3):
        losses = [trainer.train_step().item() for trainer in (whole, halves)]
        a, b = (trainer.net.flat.grad for trainer in (whole, halves))
        assert np.abs(a - b).max() < 1e-5 * max(1, np.abs(a).max()), step
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_run_that_counted_passes_goes_on_with_its_next_update(digits, tmp_path):
    """Checkpoints had the number of forward passes, 2 an update, in their generator's state."""
    part = Trainer(TINY.replace(steps=3, accumulate=2), digits, tmp_path / "part")
    part.run()
    old = load_checkpoint(part.folder)
    assert old.counters["generator"]["step"] == 3
    old.counters["generator"]["step"] = 6
    again = Trainer(part.config.replace(steps=6), digits, tmp_path / "again", old)
    assert again.generator.step.item() == 3 and again.loader._number == 3
