"""Pictures: what is in them, pixel by pixel where it can be said, and that a file is replaced whole or not at all."""

import sys

import numpy as np
import pytest
from PIL import Image, ImageSequence

from cudiff import plot
from cudiff.backend import bfloat16
from cudiff.data import load_dataset
from cudiff.errors import CudiffError
from cudiff.tensor import Tensor


def pictures(rng, *shape):
    return rng.integers(0, 256, shape, dtype=np.uint8)


def test_bytes_come_back_from_what_training_sees(device):
    images = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(plot.to_uint8(images / np.float32(127.5) - 1), images)
    large = np.full(200, 2e36, np.float32)  # their sum is beyond float32
    for seen, expected in (
        (images / np.float32(127.5) - 1, images), ([-3.0, -1.0, 0.0, 1.0, 7.0], [0, 0, 128, 255, 255]),
        (np.zeros((), np.float32), 128), (np.zeros((0, 8, 8, 3), np.float32), np.zeros((0, 8, 8, 3))),
        (np.full(99, -1, bfloat16), np.zeros(99)), (large, np.full(200, 255)),
    ):
        np.testing.assert_array_equal(plot.to_uint8(Tensor(seen, device=device)), expected)
    for bad in (np.nan, np.inf, -np.inf):
        given = np.array([0.0, bad], np.float32)
        for images in (given, Tensor(given, device=device)):
            with pytest.raises(CudiffError, match="not finite"):
                plot.to_uint8(images)


def test_grid_places_every_image(rng):
    images = pictures(rng, 5, 4, 6, 3)
    canvas = np.asarray(plot.grid(images, columns=3, scale=2, gap=2))
    assert canvas.shape == (2 * (8 + 2) + 2, 3 * (12 + 2) + 2, 3)
    for index, image in enumerate(images):
        top, left = 2 + index // 3 * 10, 2 + index % 3 * 14
        np.testing.assert_array_equal(canvas[top : top + 8 : 2, left : left + 12 : 2], image)
        np.testing.assert_array_equal(canvas[top + 1 : top + 8 : 2, left + 1 : left + 12 : 2], image)
    assert (canvas[12:, 30:] == plot.BACKGROUND).all()  # the sixth place is empty


def test_grid_of_digits_is_square_and_well_visible(rng):
    picture = plot.grid(pictures(rng, 64, 16, 16, 1))
    assert picture.mode == "L" and picture.width == picture.height and 640 <= picture.width <= 840
    assert plot.grid(pictures(rng, 64, 64, 64, 3)).size == (8 * 66 + 2, 8 * 66 + 2)


def test_grid_takes_what_a_model_sees(rng, device):
    images = pictures(rng, 5, 8, 8, 3)
    seen = Tensor(images / np.float32(127.5) - 1, device=device)
    expected = np.asarray(plot.grid(images))
    for given in (seen, seen.data, Tensor(images, device=device)):
        np.testing.assert_array_equal(np.asarray(plot.grid(given)), expected)


@pytest.mark.parametrize("bad", [np.zeros((2, 4, 4, 1), np.int32), np.zeros((4, 4, 1), np.uint8),
                                 np.zeros((2, 4, 4, 2), np.uint8), np.zeros((0, 4, 4, 1), np.uint8)])
def test_grid_refuses_what_is_no_image(bad):
    with pytest.raises(ValueError, match="uint8"):
        plot.grid(bad)


@pytest.mark.parametrize("channels", [1, 3])
def test_saved_images_are_the_images(tmp_path, rng, channels):
    images = pictures(rng, 3, 5, 7, channels)
    paths = plot.save_images(tmp_path / "new" / "folder", images)
    assert [path.name for path in paths] == ["000000.png", "000001.png", "000002.png"]
    for path, image in zip(paths, images, strict=True):
        with Image.open(path) as opened:
            np.testing.assert_array_equal(np.asarray(opened).reshape(image.shape), image)
    assert len(list(paths[0].parent.iterdir())) == 3  # no temporary file is left


def test_npz_is_a_data_set(tmp_path, rng):
    images, labels = pictures(rng, 4, 8, 8, 3), np.array([0, 2, 1, 2])
    plot.save_npz(tmp_path / "samples.npz", images, labels)
    data = load_dataset(tmp_path / "samples.npz")
    np.testing.assert_array_equal(data.images, images)
    np.testing.assert_array_equal(data.labels, labels)
    plot.save_npz(tmp_path / "samples.npz", images)
    assert load_dataset(tmp_path / "samples.npz").labels is None


def test_npz_keeps_what_it_is_given(tmp_path, rng):
    latents = rng.standard_normal((3, 4, 4, 5)).astype(bfloat16)
    plot.save_npz(tmp_path / "latents.npz", latents)
    found = load_dataset(tmp_path / "latents.npz").images
    np.testing.assert_array_equal(found, latents.astype(np.float32))
    with pytest.raises(ValueError, match="labels run from 0 to 4294967296: number the classes from 0"):
        plot.save_npz(tmp_path / "latents.npz", latents, np.array([0, 1, 2**32]))


@pytest.mark.parametrize("channels", [1, 3])
def test_gif_shows_each_frame_and_rests_on_the_last(tmp_path, rng, channels):
    frames = [np.full((4, 8, 8, channels), 20 * index, np.uint8) for index in range(7)]
    plot.save_gif(tmp_path / "denoising.gif", frames)
    with Image.open(tmp_path / "denoising.gif") as gif:
        assert gif.n_frames == 7 and gif.info["loop"] == 0
        shown = [
            (np.asarray(frame.convert("L"))[8, 8], frame.info["duration"]) for frame in ImageSequence.Iterator(gif)
        ]
    assert [level for level, _ in shown] == [0, 20, 40, 60, 80, 100, 120]
    assert [duration for _, duration in shown] == [plot.FRAME] * 6 + [plot.LAST_FRAME]


def test_long_gifs_are_thinned_and_keep_both_ends(tmp_path):
    frames = [np.full((1, 8, 8, 1), index, np.uint8) for index in range(200)]
    plot.save_gif(tmp_path / "long.gif", frames)
    with Image.open(tmp_path / "long.gif") as gif:
        levels = [np.asarray(frame.convert("L"))[8, 8] for frame in ImageSequence.Iterator(gif)]
    assert len(levels) == plot.MOST_FRAMES and levels[0] == 0 and levels[-1] == 199
    assert set(np.diff(levels)) <= {3, 4}


def test_nearest_finds_what_a_direct_search_finds(rng):
    training, samples = pictures(rng, 2500, 4, 4, 3), pictures(rng, 9, 4, 4, 3)
    samples[3], samples[4] = training[2400], training[7]
    difference = samples[:, None].astype(int) - training[None].astype(int)
    expected = np.square(difference).sum(axis=(2, 3, 4)).argmin(axis=1)
    found = plot.nearest(samples, training)
    np.testing.assert_array_equal(found, expected)
    assert found[3] == 2400 and found[4] == 7


def test_nearest_sees_mirrored_photos_when_asked(rng):
    training = pictures(rng, 50, 4, 5, 1)
    mirrored = training[[11, 42]][:, :, ::-1]
    assert plot.nearest(mirrored, training, flip=True).tolist() == [11, 42]
    assert plot.nearest(training[[3]], training, flip=True).tolist() == [3]
    assert plot.nearest(mirrored, training).tolist() != [11, 42]
    with pytest.raises(ValueError, match="differ"):
        plot.nearest(training, training.transpose(0, 2, 1, 3))
    with pytest.raises(ValueError, match="uint8"):
        plot.nearest(training, training[:0])


def test_neighbours_stand_beside_their_samples(tmp_path, rng):
    samples, photos = pictures(rng, 2, 6, 6, 1), pictures(rng, 2, 6, 6, 1)
    plot.save_neighbours(tmp_path / "neighbours.png", samples, photos)
    with Image.open(tmp_path / "neighbours.png") as opened:
        canvas = np.asarray(opened)
    gap, side = 8, 6 * plot.LARGEST_SCALE
    first = canvas[gap : gap + side : 8, gap : gap + 2 * side : 8]
    np.testing.assert_array_equal(first, np.concatenate([samples[0], photos[0]], axis=1)[..., 0])
    with pytest.raises(ValueError, match="differ"):
        plot.save_neighbours(tmp_path / "neighbours.png", samples, photos[:1])


def test_loss_curve(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: no loss curve")
    metrics = [{"step": step, "loss": 1 / step, "lr": 1e-4} for step in range(1, 200)]
    metrics[20]["loss"] = float("nan")
    metrics += [{"step": step, "val_loss": 2 / step, "train_loss": 1.5 / step} for step in range(50, 200, 50)]
    assert plot.save_loss_curve(tmp_path / "loss.png", metrics, "digits")
    with Image.open(tmp_path / "loss.png") as opened:
        pixels = np.unique(np.asarray(opened.convert("RGB")).reshape(-1, 3), axis=0)
    colours = {"#{:02x}{:02x}{:02x}".format(*pixel) for pixel in pixels}
    assert {plot.LINE, plot.ACCENT, plot.SECOND} <= colours  # every curve is drawn


@pytest.mark.parametrize("losses", [[], [float("inf")], [0.5], [0.5, 0.5], [-1.0, 3.0], [1.0, 0.0]])
def test_loss_curve_of_little(tmp_path, losses):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: no loss curve")
    metrics = [{"step": step, "loss": loss} for step, loss in enumerate(losses)]
    assert plot.save_loss_curve(tmp_path / "loss.png", metrics)
    assert (tmp_path / "loss.png").is_file() == bool(np.isfinite(losses).any())


def test_loss_curve_of_a_folder_whose_name_could_be_a_formula():
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: no loss curve")
    assert plot.loss_curve([{"step": 1, "loss": 1.0}], "runs/a$x_{$b")


def test_loss_curve_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert plot.save_loss_curve(tmp_path / "loss.png", [{"step": 1, "loss": 1.0}]) is False
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_written_leaves_the_old_file(tmp_path, rng, monkeypatch):
    path = tmp_path / "grid.png"
    plot.save_grid(path, pictures(rng, 4, 8, 8, 1))
    before = path.read_bytes()

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", full)
    with pytest.raises(CudiffError, match="No space left"):
        plot.save_grid(path, pictures(rng, 4, 8, 8, 1))
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_pictures_of_which_one_cannot_be_written_are_removed(tmp_path, rng, monkeypatch):
    """But for those that were there before."""
    plot.save_images(tmp_path / "out", pictures(rng, 1, 8, 8, 1))
    save, left = Image.Image.save, [2]

    def full(self, *args, **kwargs):
        if not left[0]:
            raise OSError(28, "No space left on device")
        left[0] -= 1
        save(self, *args, **kwargs)

    monkeypatch.setattr(Image.Image, "save", full)
    with pytest.raises(CudiffError, match="No space left"):
        plot.save_images(tmp_path / "out", pictures(rng, 4, 8, 8, 1))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["000000.png"]
