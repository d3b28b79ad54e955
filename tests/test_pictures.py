"""Pictures: the fraction at which a JPEG is decoded, deep pixels, and what takes memory, to the byte."""

import io
import struct
import time
import zlib

import numpy as np
import pytest
from PIL import Image

import cudiff.memory
from cudiff.data import Dataset, load_dataset, pictures
from cudiff.data.pictures import fit, read_picture, reason
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


@pytest.mark.parametrize("suffix", ["png", "tiff", "pgm"])
@pytest.mark.parametrize("value, level", [(0, 0), (255, 0), (256, 1), (65535, 255)])
def test_pixels_of_16_bits(tmp_path, value, level, suffix):
    """Pillow's mode for the PGM is I, as it was for PNGs."""
    pixels, file = np.full((4, 4), value, np.uint16), tmp_path / f"a.{suffix}"
    if suffix == "pgm":  # which older Pillows do not write
        file.write_bytes(b"P5 4 4 65535\n" + pixels.astype(">u2").tobytes())
    else:
        Image.fromarray(pixels).save(file)
    assert np.unique(load_dataset(tmp_path).images).tolist() == [level]


def write_png(file, bits, color, rows, *others):
    """A PNG of 2x2 pixels, of which Pillow does not write all kinds."""
    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    content = chunk(b"IHDR", struct.pack(">IIBBBBB", 2, 2, bits, color, 0, 0, 0)) + b"".join(chunk(*o) for o in others)
    content += chunk(b"IDAT", zlib.compress(b"".join(b"\0" + row for row in rows))) + chunk(b"IEND", b"")
    file.write_bytes(b"\x89PNG\r\n\x1a\n" + content)


@pytest.mark.parametrize("bits, color, rows, clear, levels", [
    (2, 0, [b"\x10", b"\xb0"], [1], [0, 255, 170, 255]), (4, 0, [b"\x01", b"\xf7"], [7], [0, 17, 255, 255]),
    (4, 0, [b"\x01", b"\xf7"], [1], [0, 255, 255, 119]),
    (16, 2, [bytes([1, 9] * 3 + [7, 9] * 3), bytes([9, 9] * 6)], [0x109] * 3, [255, 7, 9, 9]),
])
def test_a_transparent_color_is_told_in_the_files_bits(tmp_path, bits, color, rows, clear, levels):
    """Pillow compares it with pixels of 8 bits: others were white, or none."""
    write_png(tmp_path / "a.png", bits, color, rows, (b"tRNS", struct.pack(f">{len(clear)}H", *clear)))
    assert load_dataset(tmp_path).images[0, ..., 0].ravel().tolist() == levels


def test_gray_and_alpha_of_16_bits_is_gray(tmp_path):
    """Pillow gives it as RGBA, and does not write it."""
    pixels = np.array([[[0, 65535], [51400, 65535]], [[25700, 0], [65535, 65535]]], ">u2")
    write_png(tmp_path / "a.png", 16, 4, [row.tobytes() for row in pixels])
    assert load_dataset(tmp_path).images[0, :, :, 0].tolist() == [[0, 200], [255, 255]]
    assert load_dataset(tmp_path).images.shape == (1, 2, 2, 1)


def test_16_bits_of_which_0_is_white_are_not_taken_for_a_negative(tmp_path):
    file, tag = tmp_path / "a.tiff", struct.pack("<HHI", 262, 3, 1)
    Image.fromarray(np.full((4, 4), 60_000, np.uint16)).save(file)
    file.write_bytes(file.read_bytes().replace(tag + b"\1", tag + b"\0"))
    refused(r"\(16 bits of which 0 is white: save it with 0 as black\)", tmp_path)


@pytest.mark.parametrize("dtype, bits", [(np.int32, 32), (np.uint16, 12)])
def test_gray_of_other_bits_is_not_taken_for_black(tmp_path, dtype, bits):
    """In 32 bits 200 may be nearly white or nearly black; of 12 Pillow gives values up to 4095."""
    file, size = tmp_path / "a.tiff", 8 * np.dtype(dtype).itemsize
    Image.fromarray(np.full((4, 4), 200, dtype)).save(file)
    tag = struct.pack("<HHI", 258, 3, 1)
    file.write_bytes(file.read_bytes().replace(tag + bytes([size]), tag + bytes([bits])))
    message = r"\(gray of 12, 32 or signed bits: save it with 8 or 16\)"
    refused(message, tmp_path)
    with pytest.raises(cudiff.CudiffError, match=r"cannot read the picture .*a\.tiff: gray of 12, 32 or signed bits"):
        read_picture(file, 1)


def test_more_frames_than_the_first_are_told(tmp_path):
    frames = [Image.fromarray(picture(8, 8, 3)) for _ in range(3)]
    for name in ("a.gif", "b.tif", "c.webp", "d.png"):
        frames[0].save(tmp_path / f"many {name}", save_all=True, append_images=frames[1:], lossless=True)
        frames[0].save(tmp_path / f"one {name}", lossless=True)
    data = load_dataset(tmp_path)
    assert data.notes == (
        "of several frames or pages only the first is taken: 4 (many a.gif, many b.tif, many c.webp, ...); make files "
        "of the others to train on them",)
    for many, one in zip(data.images[:4], data.images[4:], strict=True):
        np.testing.assert_array_equal(many, one)


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


def many(folder, n=60):
    """Pictures of many sizes and kinds in two class folders; every tenth is damaged, every second a square."""
    rng = np.random.default_rng(3)
    for i in range(n):
        (folder / "ab"[i % 2]).mkdir(exist_ok=True)
        width, height = rng.integers(20, 90, 2)
        pixels = picture(height, width if i % 4 // 2 else height, 3)
        file = folder / "ab"[i % 2] / f"{i:03d}.{('png', 'jpg', 'bmp')[i % 3]}"
        Image.fromarray(pixels).save(file)
        if i % 10 == 7:
            file.write_bytes(file.read_bytes()[:100])


def test_pictures_read_by_threads_are_those_read_by_one(tmp_path, monkeypatch):
    """In order, whichever thread is first: the first file is the slowest here."""
    many(tmp_path)
    read = pictures._read_picture

    def slow(file, image_size):
        time.sleep(0.05 if file.name in ("000.png", "001.jpg", "020.bmp") else 0)
        return read(file, image_size)

    monkeypatch.setattr(pictures, "_read_picture", slow)
    found = []
    for threads in (1, 2, 5):
        monkeypatch.setattr(pictures, "THREADS", threads)
        found.append(load_dataset(tmp_path, image_size=16, skip_bad=True))
        refused("cannot read image .*/a/050.bmp|cannot read image .*/b/007.jpg", tmp_path, image_size=16)
    for data in found[1:]:
        np.testing.assert_array_equal(data.images, found[0].images)
        np.testing.assert_array_equal(data.labels, found[0].labels)
        assert data.skipped == found[0].skipped and data.notes == found[0].notes
    alone = [name for name in sorted(tmp_path.rglob("*.*")) if str(name) not in found[0].skipped]
    assert len(alone) == len(found[0]) == 54
    for file, image in zip(alone, found[0].images, strict=True):
        np.testing.assert_array_equal(image, np.asarray(read(file, 16)[0]))


def test_an_error_ends_the_reading_soon(tmp_path, monkeypatch):
    """Pictures far behind the damaged one are not decoded."""
    many(tmp_path, 100)
    seen, read = [], pictures._read_picture
    monkeypatch.setattr(pictures, "THREADS", 2)
    monkeypatch.setattr(pictures, "_read_picture", lambda file, size: seen.append(file) or read(file, size))
    refused("cannot read image .*/b/007", tmp_path, image_size=16)
    assert len(seen) <= 53 + 2 * 2  # of 100: those of the folder a, and four of b


@pytest.mark.parametrize("turn", [1, 6])
def test_pictures_that_are_not_square_are_counted(tmp_path, turn):
    exif = Image.Exif()
    exif[0x0112] = turn
    Image.fromarray(picture(20, 20, 3)).save(tmp_path / "a.png")
    assert load_dataset(tmp_path, image_size=8).notes == ()
    Image.fromarray(picture(20, 41, 3)).save(tmp_path / "b.jpg", exif=exif)
    Image.fromarray(picture(41, 40, 3)).save(tmp_path / "c.png")
    shown = "41x20" if turn == 1 else "20x41"
    assert load_dataset(tmp_path, image_size=8).notes == (
        f"2 of 3 pictures are not square and cropped to the square in their middle, first b.jpg ({shown})",)


def test_arrays_that_are_not_square_are_told(tmp_path):
    np.savez(tmp_path / "a.npz", images=picture(3, 8, 6, 3))
    assert load_dataset(tmp_path / "a.npz", image_size=4).notes == (
        "all 3 images are 6x8 and cropped to the square in their middle",)
    np.savez(tmp_path / "a.npz", images=picture(3, 8, 8, 3))
    assert load_dataset(tmp_path / "a.npz", image_size=4).notes == ()


def test_only_the_class_folders_asked_for_are_decoded(tmp_path):
    """A damaged picture elsewhere does not matter, nor one beside the class folders."""
    for name in ("x", "y", "z"):
        (tmp_path / name).mkdir()
        Image.fromarray(picture(8, 8, 3)).save(tmp_path / name / "1.png")
    whole = load_dataset(tmp_path)
    (tmp_path / "x" / "2.png").write_text("no picture")
    (tmp_path / "beside.png").write_text("no picture")
    data = load_dataset(tmp_path, only_classes=["z", 1])
    np.testing.assert_array_equal(data.images, whole.images[1:])
    assert data.class_names == ("z", "y") and data.labels.tolist() == [1, 0] and data.notes == ()
    refused("has no class 'w': its classes are x, y, z", tmp_path, only_classes=["w"])
    refused("has no class 3: its classes are x, y, z", tmp_path, only_classes=[3])
    for name in ("x", "y", "z"):
        (tmp_path / name).rename(tmp_path / f".{name}")
    refused("has no class folders, so only_classes cannot choose: leave it out", tmp_path, only_classes=["x"])
