"""Latents: floats of any channels, read, trained on by their scale and sampled to in their own units."""

import dataclasses

import numpy as np
import pytest

from cudiff import plot
from cudiff.backend import float16, float32
from cudiff.checkpoint import load_checkpoint
from cudiff.config import Config
from cudiff.data import Dataset, load_dataset
from cudiff.data.loader import Loader
from cudiff.errors import CudiffError
from cudiff.models import build
from cudiff.pipeline import Pipeline, load
from cudiff.plot import save_grid, save_npz
from cudiff.registry import SAMPLERS
from cudiff.tensor import Tensor
from cudiff.train import Trainer
from tests.test_cli import cli, mistake  # noqa: F401  fixtures
from tests.test_data import picture, refused


@pytest.fixture
def file(tmp_path, rng):
    """12 latents of 8x8x4 in two classes, of deviation 5."""
    latents = (5 * rng.standard_normal((12, 8, 8, 4)) + 1).astype(np.float32)
    np.savez(tmp_path / "latents.npz", latents=latents, labels=np.arange(12) % 2)
    return tmp_path / "latents.npz", latents


@pytest.mark.parametrize("stored, kept", [(np.float32, float32), (np.float16, float16), (np.float64, float32)])
def test_latents_are_read_as_they_are(tmp_path, rng, stored, kept):
    latents = (4 * rng.standard_normal((6, 5, 5, 7))).astype(stored)
    np.savez_compressed(tmp_path / "a.npz", latents=latents, labels=[0, 1, 2, 0, 1, 2])
    data = load_dataset(tmp_path / "a.npz", channels=7, image_size=5)
    assert data.latents and data.images.dtype == kept and data.num_classes == 3
    np.testing.assert_array_equal(data.images, latents.astype(kept))
    assert repr(data) == "Dataset(a: 6 latents 5x5x7, 3 classes)"
    values = latents.astype(np.float64)
    assert f"mean is {values.mean():.3g} and their standard deviation {values.std():.3g}: times" in data.notes[0]
    assert "img" not in data._repr_html_()
    assert data.fingerprint() != dataclasses.replace(data, images=data.images + kept.type(0.5)).fingerprint()
    assert data.only([2]).images.dtype == kept and len(data.split(2)[1]) == 2


@pytest.mark.parametrize("arrays, message", [
    ({"latents": np.zeros((2, 4, 8, 8))}, r"latents \(2, 4, 8, 8\) have channels first: save latents.transpose"),
    ({"latents": np.zeros((2, 8, 6, 4))}, r"latents have shape \(2, 8, 6, 4\): save them as \(N, S, S, C\)"),
    ({"latents": np.zeros((2, 8, 8))}, r"latents have shape \(2, 8, 8\)"),
    ({"latents": np.zeros((0, 8, 8, 4))}, "holds no images"), ({"latents": np.zeros((2, 8, 8, 0))}, "holds no images"),
    ({"latents": np.zeros((2, 8, 8, 4), np.uint8)}, "latents are uint8, not floats: bytes of pictures are called"),
    ({"latents": np.full((2, 8, 8, 4), np.nan)}, "latents hold values that are not finite"),
    ({"latents": np.full((2, 8, 8, 4), 1e300)}, "latents hold values that are not finite"),
    ({"latents": np.zeros((2, 8, 8, 4)), "labels": [1, 2, 3]}, "give one integer for each of the 2"),
])
def test_latents_that_are_refused(tmp_path, arrays, message):
    with np.errstate(all="ignore"):
        np.savez(tmp_path / "a.npz", **arrays)
        refused(message, tmp_path / "a.npz")


def test_latents_are_not_resized_and_pictures_are_none(file):
    path, _ = file
    for changes in ({"image_size": 16}, {"channels": 3}, {"channels": 1, "image_size": 8}):
        refused("latents are 8x8x4 and taken as they are: make image_size and channels these, or 0", path, **changes)
    np.savez(path, images=picture(2, 8, 8, 3))
    refused(r"images cannot have 4 channels: use 1 \(gray\) or 3", path, channels=4)
    with pytest.raises(CudiffError, match="the data are pictures, and latent_scale is for latents: leave it out"):
        Config(latent_scale=0.5).for_data((2, 8, 8, 3), 0)
    for images in (np.zeros((2, 8, 8, 3), np.float32), picture(2, 8, 8, 4)):
        with pytest.raises(CudiffError, match="with 1 or 3 channels, or floats with latents=True"):
            Dataset(images)
    for latents in (picture(2, 8, 8, 3), np.zeros((2, 8, 8, 3)), np.zeros((2, 8, 8), np.float32)):
        with pytest.raises(CudiffError, match=r"latents are .*; give float32 or float16 \(N, H, W, C\)"):
            Dataset(latents, latents=True)


def test_a_configuration_of_latents():
    config = Config().for_data((2, 8, 8, 4), 0, latents=True)
    assert (config.image_size, config.channels, config.latent_scale) == (8, 4, 1.0)
    assert Config(latent_scale=0.25).for_data((2, 8, 8, 4), 0, latents=True).latent_scale == 0.25
    assert config.fixed()["latent_scale"] == 1.0


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("residency", ["device", "host"])
def test_training_sees_latents_times_their_scale_and_no_flips(rng, dtype, residency):
    latents = (5 * rng.standard_normal((6, 4, 4, 4))).astype(dtype)
    data = Dataset(latents, np.arange(6) % 2, 2, latents=True)
    config = Config(batch_size=6, latent_scale=0.125, residency=residency).for_data(latents.shape, 2, latents=True)
    loader = Loader(data, config, "cpu")
    batch, labels = loader.batch(Tensor(np.zeros(1, np.int32)), loader.next(), 0)
    expected = latents.astype(np.float32) * np.float32(0.125)
    assert batch.dtype == float32
    assert {row.tobytes() for row in batch.numpy()} == {row.tobytes() for row in expected}
    chosen, own = loader.normalised(data, [4, 1])
    np.testing.assert_array_equal(chosen.numpy(), expected[[4, 1]])
    assert own.numpy().tolist() == [0, 1] and len(labels) == 6


class Known:
    """D(x, sigma) of a single latent, whatever x is: every sampler ends at it."""

    def __init__(self, latent):
        self.latent = Tensor(latent)

    def __call__(self, x, sigma, labels=None):
        return x * 0 + self.latent

    def with_variance(self, x, sigma, labels=None):
        return self(x, sigma), x * 0


def pipeline(model="unet", **changes):
    own = {"unet": dict(model_channels=16, channel_mult=(1,), num_res_blocks=1),
           "dit": dict(patch_size=2, hidden_size=16, depth=1, num_heads=2)}[model]
    config = Config(model=model, image_size=8, channels=4, num_classes=0, sample_steps=4, latent_scale=0.25, **own)
    config = config.replace(**changes)
    return Pipeline(config, build(config))


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_samples_are_in_the_latents_units_and_never_cut(rng, sampler):
    """Beyond [-1, 1], which ancestral and ddim keep pictures in. The net's latents are a quarter of these."""
    latent = (8 * rng.standard_normal((8, 8, 4))).astype(np.float32)
    found = pipeline(diffusion="ddpm" if sampler == "ancestral" else "edm").sample(
        3, sampler=sampler, denoiser=Known(latent * 0.25), steps=6)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, np.broadcast_to(latent, found.shape), atol=0.3)


def test_latents_to_begin_with(rng):
    """strength 0 gives them back; what a mask knows stays; bytes are none."""
    model, latents = pipeline(), (5 * rng.standard_normal((2, 8, 8, 4))).astype(np.float32)
    np.testing.assert_allclose(model.sample(2, init=latents, strength=0.0), latents, rtol=1e-6)
    mask = np.zeros((8, 8))
    mask[:4] = 1
    made = model.sample(2, init=latents, mask=mask)
    np.testing.assert_allclose(made[:, 4:], latents[:, 4:], rtol=1e-4, atol=1e-3)
    assert not np.allclose(made[:, :4], latents[:, :4], atol=1)
    inverse = model.invert(latents, steps=20)
    again = model.sample(2, noise=inverse, sampler="heun", steps=20)
    assert np.abs(again - latents).mean() < 0.05 * np.abs(latents).mean()
    for call in (model.sample, model.invert):
        with pytest.raises(CudiffError, match="must be latents, in floats, as the model's are"):
            call(2, init=picture(2, 8, 8, 4)) if call == model.sample else call(picture(2, 8, 8, 4))
    with pytest.raises(CudiffError, match="latents, not pictures: leave frames out"):
        model.sample(2, frames=[])


@pytest.mark.parametrize("channels", [3, 4])
def test_latents_that_are_not_finite_are_refused(channels):
    model = pipeline(channels=channels)
    with pytest.raises(CudiffError, match="values that are not finite"):
        model.sample(2, denoiser=Known(np.full((8, 8, channels), np.nan, np.float32)))


def test_grids_are_of_pictures(tmp_path, rng):
    for channels in (2, 4, 7):
        for images in (picture(2, 8, 8, channels), rng.standard_normal((2, 8, 8, channels)).astype(np.float32)):
            with pytest.raises(ValueError, match=r"1 or 3 channels, not .*: write latents by save_npz"):
                save_grid(tmp_path / "a.png", images)
    with pytest.raises(ValueError, match="write latents by save_npz"):
        plot.save_images(tmp_path / "a", picture(2, 8, 8, 4))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("model, words", [
    ("unet", ["--model-channels", "16", "--channel-mult", "1,2", "--num-res-blocks", "1"]),
    ("dit", ["--patch-size", "2", "--hidden-size", "16", "--depth", "1", "--num-heads", "2"]),
])
def test_from_latents_to_latents(file, cli, mistake, tmp_path, model, words):  # noqa: F811
    """Trained on and sampled to; what is written is read; a run goes on."""
    path, _ = file
    train = ["train", "--data", path, "--model", model, *words, "--latent-scale", "0.1", "--batch-size", "4",
             "--device", "cpu", "--steps", "2", "--sample-every", "2", "--samples", "3", "--sample-steps", "2",
             "--validation", "2"]
    code, out, error = cli(*train, "--folder", "run")
    assert code == 0, error
    assert "12 latents 8x8x4, 2 classes" in out and "their standard deviation" in out
    config = load_checkpoint(tmp_path / "run").config
    assert (config.channels, config.latent_scale, config.flip) == (4, 0.1, False)
    assert load_dataset(tmp_path / "run" / "samples-00000002.npz").images.shape == (3, 8, 8, 4)
    sample = ["sample", "run", "-n", "4", "--device", "cpu", "--seed", "3"]
    assert cli(*sample, "--out", "made.npz")[0] == 0
    made = load_dataset(tmp_path / "made.npz")
    assert made.images.dtype == np.float32 and made.labels.tolist() == [0, 1, 0, 1]
    found = load(tmp_path / "run", "cpu")
    np.testing.assert_array_equal(made.images, found.sample(4, seed=3))
    unscaled = Pipeline(found.config.replace(latent_scale=1.0), found.net).sample(4, seed=3)
    np.testing.assert_allclose(made.images, unscaled * 10, rtol=1e-5)
    for out in ("a.png", "a.gif", "folder"):
        assert "latents of 4 channels, which are no pictures: give --out NAME.npz" in mistake(*sample, "--out", out)
    assert cli(*sample, "--out", "again.npz", "--init", "made.npz", "--strength", "0")[0] == 0
    np.testing.assert_allclose(load_dataset(tmp_path / "again.npz").images, made.images, rtol=1e-5)
    assert cli("sample", "run", "-n", "1", "--device", "cpu", "--seed", "3", "--out", "one.npz")[0] == 0
    assert cli(*sample, "--out", "again.npz", "--init", "one.npz", "--strength", "0")[0] == 0
    np.testing.assert_allclose(load_dataset(tmp_path / "again.npz").images, made.images[[0] * 4], rtol=1e-5)
    assert "and begins with those of an .npz, not with a.png" in mistake(*sample, "--out", "a.npz", "--init", "a.png")
    assert cli("train", "--resume", "run", "--steps", "3")[0] == 0
    assert "cannot change latent_scale from 0.1 to 0.2" in mistake("train", "--resume", "run", "--latent-scale", "0.2")


def test_latents_of_three_channels_are_latents_too(tmp_path, rng):
    """As some autoencoders make them."""
    data = Dataset(rng.standard_normal((4, 8, 8, 3)).astype(np.float32), name="three", latents=True)
    config = Config(model_channels=16, channel_mult=(1,), num_res_blocks=1, batch_size=2, steps=1, samples=2,
                    sample_steps=2, device="cpu")
    trainer = Trainer(config, data, tmp_path)
    trainer.run()
    assert trainer.save_preview().suffix == ".npz" and trainer.preview.sample(1).dtype == np.float32


def test_the_loss_falls_on_latents(tmp_path, device):
    """Latents of four constant planes, far outside of [-1, 1], are learned: times the scale they deviate by 0.5."""
    latent = np.float32([6, -5, 2, -4]) + np.zeros((1, 8, 8, 4), np.float32)
    data = Dataset(np.repeat(latent, 8, axis=0), latents=True)
    config = Config(model="dit", patch_size=2, hidden_size=32, depth=1, num_heads=2, batch_size=16, steps=150, lr=3e-3,
                    latent_scale=0.1, sample_every=0, log_every=1, ema_half_life=10.0, device=device)
    trainer = Trainer(config, data, tmp_path)
    trainer.run()
    made = trainer.preview.sample(4, steps=8)
    assert np.abs(made - latent).mean() < 0.25 * np.abs(latent).mean()


def test_labels_of_latents_are_written_with_them(tmp_path, rng):
    latents = rng.standard_normal((3, 4, 4, 2)).astype(np.float32)
    save_npz(tmp_path / "a.npz", latents, np.array([1, 0, 1]))
    data = load_dataset(tmp_path / "a.npz")
    np.testing.assert_array_equal(data.images, latents)
    assert data.labels.tolist() == [1, 0, 1]


@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_a_gpus_training_step_draws_latents(host_of, tmp_path, hopper, dtype):
    """On the stand-in for a GPU, whose launches are checked against the kernels' own signatures."""
    host = host_of(hopper)
    data = Dataset(np.zeros((16, 16, 16, 4), dtype), np.arange(16) % 3, 3, latents=True)
    config = Config(model="dit", patch_size=2, hidden_size=64, depth=1, num_heads=2, device="cuda", batch_size=8,
                    latent_scale=0.2, precision="bf16", capture=False)
    Trainer(config, data, tmp_path).train_step()
    assert host.launches.count(("batch", "draw_latents")) == 1 and ("batch", "draw_batch") not in host.launches
