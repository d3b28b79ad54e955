"""Data sets: what loads, what is refused and in which words, and the order of the samples. No test uses a network."""

import gzip
import os
import re
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, features

from cudiff.data import Dataset, digits, load_dataset, shuffled_index
from cudiff.errors import CudiffError

rng = np.random.default_rng(0)


def refused(pattern, *args, **kwargs):
    """Loading raises CudiffError with one line that matches `pattern`."""
    with pytest.raises(CudiffError, match=pattern) as caught:
        load_dataset(*args, **kwargs)
    assert "\n" not in str(caught.value)


def picture(*shape):
    return rng.integers(0, 256, shape, dtype=np.uint8)


# --- order ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 7, 64, 1000, 60000])
def test_order_is_a_bijection(n):
    for seed, epoch in [(0, 0), (1, 0), (2**63 + 5, 7)]:
        order = shuffled_index(np.arange(n), n, seed, epoch)
        assert order.dtype == np.int64
        np.testing.assert_array_equal(np.sort(order), np.arange(n))


def test_order_depends_on_seed_and_epoch():
    orders = [shuffled_index(np.arange(1000), 1000, *key) for key in [(0, 0), (0, 1), (1, 0), (2**32, 0)]]
    for i, order in enumerate(orders):
        assert (order == np.arange(1000)).mean() < 0.02
        for other in orders[:i]:
            assert (order == other).mean() < 0.02


def test_order_takes_every_place_equally_often():
    epochs = np.arange(20000)
    for n in (3, 4, 10, 100):
        counts = np.bincount(shuffled_index(0, n, 5, epochs), minlength=n)
        chi_square = ((counts - 20000 / n) ** 2 / (20000 / n)).sum()
        assert chi_square < n - 1 + 5 * np.sqrt(2 * (n - 1))


def test_order_broadcasts_epochs_and_matches_its_definition():
    """A batch across two epochs; and the docstring's algorithm again, in Python integers."""
    count = np.arange(95, 105)
    batch = shuffled_index(count % 100, 100, 3, count // 100)
    np.testing.assert_array_equal(batch[:5], shuffled_index(np.arange(95, 100), 100, 3, 0))
    np.testing.assert_array_equal(batch[5:], shuffled_index(np.arange(5), 100, 3, 1))

    def mix(x):
        x = (x ^ x >> 16) * 0x85EBCA6B & 0xFFFFFFFF
        x = (x ^ x >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
        return x ^ x >> 16

    def index_of(position, n, seed, epoch):
        bits = (n - 1).bit_length()
        low = (bits + 1) // 2
        key = mix(mix(mix((seed & 0xFFFFFFFF) + 0x9E3779B9 & 0xFFFFFFFF) ^ seed >> 32) ^ epoch)
        while True:
            left, right = position >> low, position & (1 << low) - 1
            for r in range(0, 8, 2):
                left ^= mix(right ^ key + r * 0x9E3779B9 & 0xFFFFFFFF) & (1 << bits - low) - 1
                right ^= mix(left ^ key + (r + 1) * 0x9E3779B9 & 0xFFFFFFFF) & (1 << low) - 1
            position = left << low | right
            if position < n:
                return position

    for n, seed, epoch in [(1, 0, 0), (2, 1, 5), (100, 2**40 + 3, 9), (60000, 12345678901, 2**32 - 1), (2**32, 7, 1)]:
        for position in {0, n // 2, n - 1}:
            assert int(shuffled_index(position, n, seed, epoch)) == index_of(position, n, seed, epoch)


def test_order_refuses_positions_outside():
    for position, n in [(-1, 5), (5, 5), (0, 0), (0, 2**32 + 1)]:
        with pytest.raises(ValueError):
            shuffled_index(position, n, 0, 0)


# --- Dataset -------------------------------------------------------------------------------------------------------


def test_dataset_checks_its_parts():
    images = picture(4, 8, 8, 3)
    data = Dataset(images[..., ::-1], [0, 1, 2, 1], 3, "toys", ("a", "b", "c"))
    assert data.images.flags.c_contiguous and data.labels.dtype == np.int32 and len(data) == 4
    assert repr(data) == "Dataset(toys: 4 images 8x8x3, 3 classes)"
    assert repr(Dataset(images)) == "Dataset(data: 4 images 8x8x3, no labels)"
    for arguments in [
        (images.astype(np.float32),),
        (images[..., :2],),
        (images[0],),
        (images, [0, 1, 2], 3),
        (images, [0.0, 1, 2, 1], 3),
        (images, [0, 1, 2, 3], 3),
        (images, [-1, 1, 2, 0], 3),
        (images, [0, 1, 2, 1], 3, "toys", ("a", "b")),
    ]:
        with pytest.raises(CudiffError):
            Dataset(*arguments)


def test_split_is_exact_disjoint_and_repeatable():
    data = Dataset(np.arange(250, dtype=np.uint8).reshape(-1, 1, 1, 1), np.arange(250) % 10, 10)
    train, held_out = data.split(20, seed=3)
    assert (len(train), len(held_out)) == (230, 20) and train.num_classes == 10
    np.testing.assert_array_equal(np.sort(np.r_[train.images.ravel(), held_out.images.ravel()]), np.arange(250))
    np.testing.assert_array_equal(held_out.images.ravel() % 10, held_out.labels)
    np.testing.assert_array_equal(held_out.images, data.split(20, seed=3)[1].images)
    assert not np.array_equal(held_out.images, data.split(20, seed=4)[1].images)
    assert len(data.split(0.1)[1]) == 25 and len(data.split(0)[1]) == 0
    for validation in (250, 1000, -1):
        with pytest.raises(CudiffError, match="hold out"):
            data.split(validation)


def test_subset_copies_in_the_order_asked():
    data = Dataset(np.arange(5, dtype=np.uint8).reshape(-1, 1, 1, 1), [0, 1, 0, 1, 0], 2)
    part = data.subset([4, 1])
    assert part.images.ravel().tolist() == [4, 1] and part.labels.tolist() == [0, 1]
    part.images[:] = 9
    assert data.images.ravel().tolist() == [0, 1, 2, 3, 4]


# --- digits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [8, 16, 28, 64])
def test_digits_are_balanced_varied_and_repeatable(size):
    data = digits(200, size, seed=1)
    assert data.images.shape == (200, size, size, 1) and np.bincount(data.labels).tolist() == [20] * 10
    np.testing.assert_array_equal(data.images, digits(200, size, seed=1).images)
    np.testing.assert_array_equal(data.images[:50], digits(50, size, seed=1).images)
    assert len(np.unique(data.images.reshape(200, -1), axis=0)) == 200
    assert not np.array_equal(data.images, digits(200, size, seed=2).images)
    assert not np.array_equal(data.images, digits(200, size, seed=1, part="test").images)
    ink = data.images.mean(axis=(1, 2, 3))
    assert ink.min() > 5 and ink.max() < 110 and data.images.max() > 180
    border = np.concatenate([data.images[:, [0, -1]].ravel(), data.images[:, :, [0, -1]].ravel()])
    assert border.mean() < 2  # hardly anything is cut off


def test_digits_can_be_told_apart():
    """The nearest training digit has the right class for nine of ten test digits: pixels do not match, shapes do."""
    train, test = digits(4000), digits(1000, part="test")
    a, b = (d.images.reshape(len(d), -1).astype(np.float32) for d in (test, train))
    nearest = ((a**2).sum(1)[:, None] - 2 * a @ b.T + (b**2).sum(1)).argmin(axis=1)
    assert (train.labels[nearest] == test.labels).mean() > 0.88


def test_digits_through_load_dataset(monkeypatch):
    data = load_dataset()
    assert data.images.shape == (4000, 16, 16, 1) and len(load_dataset("digits", part="test")) == 1000
    colour = load_dataset("digits", count=10, channels=3, image_size=20)
    assert colour.images.shape == (10, 20, 20, 3) and (np.ptp(colour.images, axis=3) == 0).all()
    refused("no part|unknown part", "digits", part="validation")
    refused("ask for 1", "digits", count=0)
    refused("8 or more", "digits", image_size=4)
    refused("1 .gray. or 3", "digits", channels=2)
    monkeypatch.setattr(features, "check", lambda feature: False)
    refused("FreeType.*pip install", "digits")


# --- IDX and MNIST -------------------------------------------------------------------------------------------------


def idx_bytes(array):
    return struct.pack(f">BBBB{array.ndim}i", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


@pytest.fixture
def idx_files(tmp_path):
    images, labels = picture(12, 28, 28), (np.arange(12) % 3).astype(np.uint8)
    for prefix in ("train", "t10k"):
        (tmp_path / f"{prefix}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx_bytes(images)))
        (tmp_path / f"{prefix}-labels.idx1-ubyte").write_bytes(idx_bytes(labels))
    return tmp_path, images, labels


def test_idx_folder(idx_files):
    folder, images, labels = idx_files
    for part in ("train", "test"):
        data = load_dataset(folder, part=part)
        np.testing.assert_array_equal(data.images[..., 0], images)
        np.testing.assert_array_equal(data.labels, labels)
        assert data.num_classes == 3
    assert load_dataset(folder, image_size=14, channels=3).images.shape == (12, 14, 14, 3)


def test_damaged_idx_folder(idx_files):
    folder, images, labels = idx_files
    file = folder / "train-images-idx3-ubyte.gz"
    whole = file.read_bytes()
    for content, message in [
        (whole[:-20], "cannot read .*train-images.*anew"),
        (b"nonsense", "cannot read"),
        (gzip.compress(idx_bytes(images)[:-7]), "truncated.*12x28x28"),
        (gzip.compress(b"nonsense"), "not an IDX file"),
        (gzip.compress(idx_bytes(images)[:9]), "not an IDX file"),
        (gzip.compress(idx_bytes(images[:0])), "0 images and 12 labels"),
        (gzip.compress(idx_bytes(images[:5])), "5 images and 12 labels"),
        (gzip.compress(idx_bytes(labels)), "1 dimensions"),
    ]:
        file.write_bytes(content)
        refused(message, folder)
        assert file.read_bytes() == content
    (folder / "train-labels.idx1-ubyte").unlink()
    refused("has no train-labels", folder)


def shared_data(name):
    root = os.environ.get("CUDIFF_DATA")
    if not root or not (Path(root) / name).exists():
        pytest.skip(f"$CUDIFF_DATA/{name} is not there: set CUDIFF_DATA to the folder with the sample data")
    return Path(root) / name


def test_real_mnist():
    shared_data("mnist")
    train, test = load_dataset("mnist"), load_dataset("mnist", part="test")
    assert train.images.shape == (60000, 28, 28, 1) and test.images.shape == (10000, 28, 28, 1)
    assert train.labels[:5].tolist() == [5, 0, 4, 1, 9] and test.labels[:5].tolist() == [7, 2, 1, 0, 4]


def test_real_elephants():
    data = load_dataset(shared_data("elephants64"))
    assert data.images.shape == (202, 64, 64, 3) and data.labels is None and data.name == "elephants64"
    assert [len(part) for part in data.split(20)] == [182, 20]


# --- folders of images ---------------------------------------------------------------------------------------------


def test_folder_of_any_images(tmp_path):
    """Every mode, size and depth becomes RGB of the size asked for; sub-folders are classes in sorted order."""
    for folder in ("zebra", "ant/deep"):
        (tmp_path / folder).mkdir(parents=True)
    colour = Image.fromarray(picture(50, 70, 3))
    colour.save(tmp_path / "zebra" / "a.jpg")
    colour.convert("P").save(tmp_path / "zebra" / "b.PNG")
    colour.convert("CMYK").save(tmp_path / "zebra" / "c.tiff")
    colour.convert("RGBA").save(tmp_path / "ant" / "d.png")
    colour.convert("L").save(tmp_path / "ant" / "deep" / "e.png")
    colour.convert("1").save(tmp_path / "ant" / "deep" / "f.png")
    (tmp_path / "zebra" / ".hidden.png").write_bytes(b"not an image")
    (tmp_path / "notes.txt").write_text("not an image either")
    data = load_dataset(tmp_path, image_size=32)
    assert data.images.shape == (6, 32, 32, 3) and data.class_names == ("ant", "zebra")
    assert data.labels.tolist() == [0, 0, 0, 1, 1, 1] and data.skipped == ()
    np.testing.assert_array_equal(data.images, load_dataset(str(tmp_path), image_size=32).images)
    assert load_dataset(tmp_path, image_size=32, channels=1).images.shape == (6, 32, 32, 1)
    refused("not squares of one size.*--image-size", tmp_path)
    refused("no test part", tmp_path, part="test")
    colour.save(tmp_path / "loose.png")
    assert load_dataset(tmp_path, image_size=32).labels is None


@pytest.mark.parametrize("folders, names", [
    (("0", "1", "2", "10", "11"), ("0", "1", "2", "10", "11")),
    (("02", "1", "10"), ("1", "02", "10")),
    (("10", "2", "x"), ("10", "2", "x")),
])
def test_class_folders_that_are_numbers_are_in_their_order(folders, names, tmp_path):
    for folder in folders:
        (tmp_path / folder).mkdir()
        Image.fromarray(picture(8, 8, 3)).save(tmp_path / folder / "a.png")
    data = load_dataset(tmp_path)
    assert data.class_names == names and sorted(data.labels.tolist()) == list(range(len(names)))
    chosen = Image.open(tmp_path / names[1] / "a.png")
    np.testing.assert_array_equal(data.images[data.labels.tolist().index(1)], np.asarray(chosen))


def test_folder_with_linked_classes(tmp_path):
    (tmp_path / "all" / "n02504013").mkdir(parents=True)
    (tmp_path / "some").mkdir()
    Image.fromarray(picture(8, 8, 3)).save(tmp_path / "all" / "n02504013" / "a.png")
    (tmp_path / "some" / "elephant").symlink_to(tmp_path / "all" / "n02504013")
    (tmp_path / "some" / "elephant" / "again").symlink_to(tmp_path / "some")  # and round and round
    (tmp_path / "some" / "elephant" / "too").symlink_to(tmp_path)
    data = load_dataset(tmp_path / "some")
    assert data.class_names == ("elephant",) and len(data) == 1


def test_folder_keeps_pixels_and_gray(tmp_path):
    pixels = picture(3, 16, 16)
    for i, image in enumerate(pixels):
        Image.fromarray(image).save(tmp_path / f"{i}.png")
    data = load_dataset(tmp_path)
    np.testing.assert_array_equal(data.images[..., 0], pixels)
    assert data.images.shape == (3, 16, 16, 1) and data.images.flags.c_contiguous
    assert load_dataset(tmp_path, channels=3).images.shape == (3, 16, 16, 3)
    Image.fromarray(pixels[0].astype(np.uint16) * 257).save(tmp_path / "3.png")
    np.testing.assert_array_equal(load_dataset(tmp_path).images[3, :, :, 0], pixels[0])


def test_pictures_are_cropped_turned_and_laid_over_white(tmp_path):
    wide = np.zeros((20, 60, 3), np.uint8)
    wide[:, 20:40] = 200
    Image.fromarray(wide).save(tmp_path / "a.png")
    turned = np.zeros((16, 16, 3), np.uint8)
    turned[:, :8] = 250
    exif = Image.Exif()
    exif[0x0112] = 6  # to be shown rotated clockwise: the left half comes to the top
    Image.fromarray(turned).save(tmp_path / "b.png", exif=exif)
    Image.new("RGBA", (16, 16), (255, 0, 0, 0)).save(tmp_path / "c.png")
    images = load_dataset(tmp_path, image_size=16).images
    assert (images[0] == 200).all()
    assert (images[1, :8] == 250).all() and (images[1, 8:] == 0).all()
    assert (images[2] == 255).all()


def test_bad_images_are_named_or_skipped(tmp_path):
    refused("holds no images", tmp_path)
    Image.fromarray(picture(32, 32, 3)).save(tmp_path / "good.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "good.png").read_bytes()[:900])
    (tmp_path / "text.jpg").write_text("not an image")
    refused("cannot read image .*cut.png.*: repair it, move it elsewhere.*--skip-bad", tmp_path)
    data = load_dataset(tmp_path, skip_bad=True)
    assert len(data) == 1 and [Path(name).name for name in data.skipped] == ["cut.png", "text.jpg"]
    (tmp_path / "good.png").unlink()
    refused("none of the 2 images", tmp_path, skip_bad=True)


# --- .npz and .bin -------------------------------------------------------------------------------------------------


def test_npz(tmp_path):
    file = tmp_path / "set.npz"
    images, labels = picture(5, 8, 8, 3), np.array([0, 2, 1, 1, 0])
    for names in [("images", "labels"), ("arr_0", "arr_1")]:
        np.savez(file, **dict(zip(names, (images, labels), strict=True)))
        data = load_dataset(file)
        np.testing.assert_array_equal(data.images, images)
        assert data.labels.tolist() == labels.tolist() and data.num_classes == 3 and data.name == "set"
    np.savez_compressed(file, images=images[..., 0])
    data = load_dataset(str(file))
    assert data.images.shape == (5, 8, 8, 1) and data.labels is None
    assert load_dataset(file, image_size=4, channels=3).images.shape == (5, 4, 4, 3)


def test_refused_npz(tmp_path):
    file = tmp_path / "set.npz"
    images = picture(5, 8, 8, 3)
    for arrays, message in [
        ({"x": images}, "no array 'images'.*holds x"),
        ({"images": images / 255}, "float64, not uint8.*images \\* 255"),
        ({"images": images / 127.5 - 1}, r"images \+ 1\) \* 127.5"),
        ({"images": images.astype(np.float32)}, "scale them"),
        ({"images": images.astype(np.int64)}, "not uint8.*astype"),
        ({"images": images.transpose(0, 3, 1, 2)}, "channels first"),
        ({"images": images[:0]}, "no images"),
        ({"images": images[:, :4]}, "8x4, not square"),
        ({"images": images, "labels": np.arange(4)}, "one integer for each"),
        ({"images": images, "labels": np.arange(5) - 1}, "labels begin at -1"),
        ({"images": images, "labels": np.arange(5) / 2}, "float64"),
        ({"images": np.array([{}])}, "cannot read .*set.npz"),
    ]:
        np.savez(file, **arrays)
        refused(message, file)
    np.savez(file, images=images)
    file.write_bytes(file.read_bytes()[:-100])
    refused("truncated or not an .npz", file)
    np.savez(file, images=images)
    damaged = bytearray(file.read_bytes())
    damaged[400] ^= 1
    file.write_bytes(damaged)
    refused("cannot read .*CRC", file)


def unetcu_bytes(images, magic=20240620):
    header = np.zeros(256, "<i4")
    header[:5] = magic, len(images), images.shape[3], *images.shape[1:3]
    return header.tobytes() + (images.astype("<f4") / 127.5 - 1).transpose(0, 3, 1, 2).tobytes()


def test_unetcu_bin(tmp_path, monkeypatch):
    file = tmp_path / "elephants.bin"
    images = np.arange(256, dtype=np.uint8).repeat(3).reshape(4, 8, 8, 3)
    content = unetcu_bytes(images)
    file.write_bytes(content)
    data = load_dataset(file)
    np.testing.assert_array_equal(data.images, images)
    assert data.labels is None
    for images_at_once in (1, 3):
        monkeypatch.setattr("cudiff.data.unetcu.CHUNK", images_at_once * 192)
        np.testing.assert_array_equal(load_dataset(file).images, images)
    nan = content[:-4] + np.float32(np.nan).tobytes()
    for damaged, message in [
        (content[:-1], "truncated.*4x3x8x8"),
        (content + b"0", "damaged"),
        (content[:100], "not unet.cu's"),
        (unetcu_bytes(images, magic=1), "not unet.cu's"),
        (unetcu_bytes(images[:0]), "damaged"),
        (nan, "image 3 leaves"),
    ]:
        file.write_bytes(damaged)
        refused(message, file)


def test_what_is_not_a_data_set(tmp_path):
    refused("no data at .*give digits, mnist", tmp_path / "missing")
    refused(f"no data at 'minst'.*; this path is looked for in {re.escape(os.getcwd())}$", "minst")
    refused("the data has no name: give digits, mnist", "")
    (tmp_path / "data.csv").write_text("1,2")
    refused("not a data set", tmp_path / "data.csv")
    refused("leave it out", tmp_path, count=5)
    refused("8 or more", tmp_path, image_size=0)


def test_arrays_of_an_npz_that_are_not_read_are_named(tmp_path):
    images = np.zeros((3, 8, 8, 1), np.uint8)
    np.savez(tmp_path / "a.npz", images, labels=np.arange(3))
    np.savez(tmp_path / "b.npz", images=images, labels=np.arange(3))
    assert load_dataset(tmp_path / "a.npz").notes == ("arrays that are not read: labels",)
    assert load_dataset(tmp_path / "b.npz").notes == ()


def test_a_16_bit_gray_pictures_transparent_pixels_are_white(tmp_path):
    for depth, values in ((np.uint8, [[0, 100], [200, 255]]), (np.uint16, [[0, 25700], [51400, 65535]])):
        folder = tmp_path / np.dtype(depth).name
        folder.mkdir()
        Image.fromarray(np.array(values, depth)).save(folder / "a.png")
        content, chunk = (folder / "a.png").read_bytes(), b"tRNS" + struct.pack(">H", values[0][1])
        chunk = struct.pack(">I", 2) + chunk + struct.pack(">I", zlib.crc32(chunk))
        (folder / "a.png").write_bytes(content[:33] + chunk + content[33:])  # behind the header
    found = [load_dataset(folder, image_size=2).images[0] for folder in sorted(tmp_path.iterdir())]
    np.testing.assert_array_equal(found[0], found[1])
    assert found[0].max() == 255 and found[0][0, 1, 0] == 255


def test_both_parts_of_an_idx_folder_have_the_same_classes(idx_files):
    folder, images, _ = idx_files
    (folder / "t10k-labels.idx1-ubyte").write_bytes(idx_bytes(np.zeros(len(images), np.uint8)))
    assert load_dataset(folder, part="test").num_classes == load_dataset(folder).num_classes > 1
