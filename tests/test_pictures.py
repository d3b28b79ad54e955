"""Pictures: the fraction at which a JPEG is decoded, deep pixels, and what takes memory, to the byte."""

import io
import struct

import numpy as np
import pytest
from PIL import Image

import cudiff.memory
from cudiff.data import Dataset, load_dataset
from cudiff.data.pictures import fit, reason
from tests.test_data import picture, refused


@pytest.mark.parametrize("width, height", [(160, 80), (80, 160), (80, 80)])
def test_a_jpeg_is_decoded_at_twice_the_size_or_more(tmp_path, width, height):
    """As Pillow decodes it at half of its size, where 20 pixels a side are wanted of 80."""
    Image.fromarray(picture(height, width, 3)).save(tmp_path / "a.jpg", quality=95)
    with Image.open(tmp_path / "a.jpg") as half:
        half.draft(None, (width // 2, height // 2))
        assert half.size == (width // 2, height // 2)
        left, top = (half.width - 40) // 2, (half.height - 40) // 2
        expected = half.crop((left, top, left + 40, top + 40)).resize((20, 20), Image.Resampling.LANCZOS)
    np.testing.assert_array_equal(load_dataset(tmp_path, image_size=20).images[0], np.asarray(expected))


@pytest.mark.parametrize("side, message", [
    (8192, "image file is truncated"), (8193, "8193x8192 pixels are more than 67,108,864"),
])
def test_a_picture_has_up_to_8192_pixels_a_side(tmp_path, side, message):
    """A header alone: a size that is taken is read on, and found to lack its pixels."""
    image = io.BytesIO()
    Image.new("1", (8, 8)).save(image, "BMP")
    content = bytearray(image.getvalue())
    content[18:26] = struct.pack("<ii", side, 8192)
    (tmp_path / "a.bmp").write_bytes(content)
    refused(message, tmp_path, image_size=8)


@pytest.mark.parametrize("value, level", [(0, 0), (255, 0), (256, 1), (65535, 255), (65536, None), (-1, None)])
def test_pixels_of_up_to_16_bits(tmp_path, value, level):
    Image.fromarray(np.full((4, 4), value, np.int32)).save(tmp_path / "a.tiff")
    if level is None:
        refused("pixels of more than 16 bits", tmp_path)
    else:
        assert np.unique(load_dataset(tmp_path).images).tolist() == [level]


def test_pixels_that_are_floats(tmp_path):
    Image.fromarray(np.full((4, 4), 0.5, np.float32)).save(tmp_path / "a.tiff")
    refused("floating-point pixels", tmp_path)


def test_memory_is_asked_for_to_the_byte(tmp_path, monkeypatch):
    """Images times pixels times channels; of digits 256 bytes more each."""
    data = Dataset(picture(3, 4, 4, 1))
    np.savez(tmp_path / "a.npz", images=picture(3, 20, 20, 3))
    for needed, load in [
        (3 * 10 * 10 * 3, lambda: fit(data, 10, 3)), (3 * 10 * 10, lambda: fit(data, 10)),
        (3 * 20 * 20 * 3, lambda: load_dataset(tmp_path / "a.npz")),
        (3 * (10 * 10 + 256), lambda: load_dataset("digits", image_size=10, count=3)),
    ]:
        monkeypatch.setattr(cudiff.memory, "memory_available", lambda needed=needed: needed)
        load()
        monkeypatch.setattr(cudiff.memory, "memory_available", lambda needed=needed: needed - 1)
        with pytest.raises(cudiff.CudiffError, match=r"would take .* GiB of memory"):
            load()


def test_why_a_file_cannot_be_read_is_one_line_of_300_characters():
    assert reason(ValueError("x" * 301 + "\ny")) == "x" * 300 and reason(ValueError("first\nsecond")) == "first"
    assert reason(ValueError()) == "ValueError" and reason(OSError("no reason")) == "no reason"
    assert reason(FileNotFoundError(2, "No such file")) == "No such file"
