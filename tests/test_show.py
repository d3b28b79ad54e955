"""What notebooks show of tensors, modules, data and runs; and that little of a large tensor is copied for it."""

import base64
import io
import re
import sys

import numpy as np
import pytest
from PIL import Image

from cudiff import Config, Tensor, Trainer, load_dataset, nn, plot, show
from cudiff.backend import to_device
from cudiff.data import Dataset


def rows(html):
    """The texts of a table's cells."""
    return [re.findall(r"<t[dh].*?>(.*?)</t[dh]>", row) for row in re.findall(r"<tr>(.*?)</tr>", html)]


@pytest.mark.parametrize("shape", [(201,), (7, 40), (100, 100), (8, 8, 8), (3, 4, 50), (300, 1)])
def test_text_of_a_large_array_is_that_of_numpy(shape, rng, device):
    array = rng.standard_normal(shape).astype(np.float32)
    expected = np.array2string(array, separator=", ", prefix="Tensor(", threshold=200, precision=4)
    assert repr(Tensor(array, device=device)).startswith(f"Tensor({expected}, shape={shape}, ")


@pytest.mark.parametrize("shape", [(1000, 1000), (8, 100_000), (500_000,), (20, 20, 20, 20)])
def test_little_of_a_large_tensor_is_copied(shape, device, monkeypatch):
    copied = []

    def spy(array, target):
        copied.append(array.size)
        return to_device(array, target)

    monkeypatch.setattr(show, "to_device", spy)
    x = Tensor(np.zeros(shape, np.float32), device=device)
    assert len(repr(x)) < 40_000 and len(x._repr_html_()) < 40_000
    assert len(copied) == 2 and max(copied) <= 7**4


def test_a_matrix_is_a_table(device):
    html = Tensor([[1.0, -2.5], [1 / 3, 4e9]], requires_grad=True, device=device)._repr_html_()
    assert rows(html) == [["1", "-2.5"], ["0.3333", "4e+09"]]
    assert f"<div>Tensor, shape=(2, 2), dtype=float32, device={device}, requires_grad=True</div>" in html
    assert rows(Tensor([7, 123_456_789], device=device)._repr_html_()) == [["7", "123456789"]]


def test_a_large_matrix_shows_its_corners(device):
    x = Tensor(np.arange(90).reshape(9, 10), device=device)
    shown = rows(x._repr_html_())
    dots = ["…"] * 9
    numbers = [[str(10 * i + j) for j in (0, 1, 2, 3, 6, 7, 8, 9)] for i in (0, 1, 2, 3, 5, 6, 7, 8)]
    lines = [[*row[:4], "…", *row[4:]] for row in numbers]
    assert shown == [*lines[:4], dots, *lines[4:]]
    assert rows(Tensor(np.arange(8))._repr_html_()) == [list("01234567")]


def test_other_tensors_are_text():
    for x in (Tensor(2.0), Tensor(np.zeros((2, 3, 4))), Tensor(np.zeros((0, 3)))):
        assert f"<pre>{show.values(x.data)}</pre>" in x._repr_html_()


def test_a_module_is_a_table_of_its_layers():
    html = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1, bias=False))._repr_html_()
    assert html.startswith("<div>Sequential: 12 parameters</div>")
    assert rows(html) == [["layer", "type", "shapes", "parameters"], ["0", "Linear", "weight 3×2, bias 3", "9"],
                          ["2", "Linear", "weight 1×3", "3"]]


def test_text_is_escaped():
    assert show.table("<b>", [["&"]], head=["<i>"]).count("<b>") == 0
    assert "&lt;i&gt;" in show.table("", [], head=["<i>"]) and "&amp;" in show.table("", [["&"]])


@pytest.mark.parametrize("size, shown", [(16, 64), (300, 4)])
def test_data_shows_its_first_images(size, shown, rng):
    images = rng.integers(0, 256, (70, size, size, 1), dtype=np.uint8)
    html = Dataset(images)._repr_html_()
    assert f"<div>Dataset(data: 70 images {size}x{size}x1, no labels)</div>" in html
    picture = Image.open(io.BytesIO(base64.b64decode(re.search(r"base64,(.*?)\"", html)[1])))
    np.testing.assert_array_equal(np.asarray(picture), np.asarray(plot.grid(images[:shown])))


def test_data_without_images_is_text():
    empty = load_dataset("digits", count=3).subset([])
    assert repr(empty) in empty._repr_html_() and "<img" not in empty._repr_html_()


def test_a_run_shows_its_loss(tmp_path, monkeypatch):
    config = Config(model_channels=16, batch_size=2, steps=2, log_every=1, sample_every=0, device="cpu")
    trainer = Trainer(config, load_dataset("digits", count=4), tmp_path)
    assert trainer._repr_png_() is None
    trainer.run()
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: no loss curves")
    assert Image.open(io.BytesIO(trainer._repr_png_())).size == (1200, 675)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert trainer._repr_png_() is None
