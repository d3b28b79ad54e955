"""Downsampled ImageNet's files: pixels, labels, which classes are kept, memory, and what is refused."""

import dataclasses
import hashlib

import numpy as np
import pytest

import cudiff.data.npz as npz
from cudiff.data import has_test_part, load_dataset
from cudiff.data.wnids import WNIDS
from cudiff.memory import peak_of, resident
from tests.test_data import picture, refused

INDIAN, AFRICAN = 194, 24


def batch(folder, number, labels, side=8, name="train_data_batch_{}.npz", save=np.savez):
    """One file as the authors write it; returns its images (N, S, S, 3)."""
    images = picture(len(labels), side, side, 3)
    rows = images.transpose(0, 3, 1, 2).reshape(len(labels), -1)
    save(folder / name.format(number), data=rows, labels=np.array(labels), mean=rows.mean(axis=0))
    return images


@pytest.fixture
def folder(tmp_path):
    """Batches 1, 2 and 10; the images and the labels in the files, in that order."""
    labels = [[24, 1, 194, 1000], [500, 24], [194, 194, 7]]
    images = [batch(tmp_path, n, own) for n, own in zip((1, 2, 10), labels, strict=True)]
    return tmp_path, np.concatenate(images), np.concatenate(labels)


def test_the_order_of_the_classes_is_map_clslocs():
    """By the digest of the 1,000 ids, a line each; two copies of the file agree on them."""
    assert len(set(WNIDS)) == 1000 and (WNIDS[0], WNIDS[999]) == ("n02119789", "n03255030")
    assert (WNIDS[INDIAN - 1], WNIDS[AFRICAN - 1]) == ("n02504013", "n02504458")
    digest = hashlib.sha256("\n".join(WNIDS).encode()).hexdigest()
    assert digest == "930a31901625f2149f8bab016254025ad225daf9efafa3f00011daf6f5f919f9"


def test_all_classes_of_a_folder_and_of_one_file(folder):
    path, images, labels = folder
    data = load_dataset(path)
    np.testing.assert_array_equal(data.images, images)
    np.testing.assert_array_equal(data.labels, labels - 1)
    assert data.num_classes == 1000 and data.class_names == WNIDS and data.name == path.name
    assert "of ImageNet's 10 files of training images 3 are read" in data.notes[0]
    one = load_dataset(path / "train_data_batch_2.npz", image_size=4, channels=1)
    assert one.images.shape == (2, 4, 4, 1) and one.name == "train_data_batch_2"


@pytest.mark.parametrize("asked", [["n02504013", "n02504458"], ["194", "24"], [194, "n02504458"]])
@pytest.mark.parametrize("chunk", [1, 3 * 192, 2**20])
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_only_some_classes_in_the_order_asked(folder, asked, chunk, save, monkeypatch):
    path, images, labels = folder
    images = np.concatenate([batch(path, n, own, save=save) for n, own in
                             zip((1, 2, 10), (labels[:4], labels[4:6], labels[6:]), strict=True)])
    monkeypatch.setattr(npz, "CHUNK", chunk)
    data = load_dataset(path, only_classes=asked)
    kept = np.isin(labels, (INDIAN, AFRICAN))
    np.testing.assert_array_equal(data.images, images[kept])
    np.testing.assert_array_equal(data.labels, (labels[kept] == AFRICAN).astype(int))
    assert data.num_classes == 2 and data.class_names == ("n02504013", "n02504458")


def test_validation_images_are_the_test_part(folder):
    path, images, _ = folder
    assert not has_test_part(path)
    refused("has no test part", path, part="test")
    images = batch(path, "", [AFRICAN, 3], name="val_data{}.npz")
    assert has_test_part(path) and len(load_dataset(path)) == 9
    data = load_dataset(path, part="test", only_classes=["24"])
    np.testing.assert_array_equal(data.images, images[:1])
    assert data.notes == () and data.labels.tolist() == [0]


def test_memory_is_little_more_than_what_is_kept(tmp_path):
    """24 MiB of images, of which 3 are kept; without a limit on pieces the file's 24 would be read first."""
    if resident() is None or peak_of(lambda: None) is None:
        pytest.skip("the system does not tell how much memory was taken")
    labels = np.full(2048, 7)
    labels[::8] = INDIAN
    batch(tmp_path, 1, labels, side=64, save=np.savez_compressed)
    load_dataset(tmp_path / "train_data_batch_1.npz", only_classes=["7"])  # whatever is imported and kept
    before = resident()
    found = []
    peak = peak_of(lambda: found.append(load_dataset(tmp_path, only_classes=["194"])))
    (data,) = found
    assert len(data) == 256 and data.images.nbytes == 3 * 2**20
    assert peak - before < 2 * data.images.nbytes + 2**21


def test_memory_is_asked_for_what_is_kept(folder, monkeypatch):
    path, _, _ = folder
    monkeypatch.setattr("cudiff.memory.memory_available", lambda: 3 * 192)
    assert len(load_dataset(path, only_classes=["194"])) == 3
    refused(r"5 images of 8x8 would take .*: keep fewer classes \(only_classes\)", path, only_classes=["194", "24"])


def test_classes_without_images_are_told(folder):
    path, _, _ = folder
    data = load_dataset(path, only_classes=["24", "2"])
    assert data.notes[-1] == "classes without an image in these files: n02100735" and data.num_classes == 2
    refused("no image is of n02100735: give other classes or files", path, only_classes=["2"])


@pytest.mark.parametrize("asked, message", [
    (["n02504014"], "have no class 'n02504014': give WordNet ids such as n02504013, or numbers from 1 to 1000"),
    (["0"], "have no class '0'"), (["1001"], "have no class '1001'"), (["-1"], "have no class '-1'"),
    (["elephant"], "have no class 'elephant'"), (["24", "24"], "24 twice: give each class once"),
    (["24", "n02504458"], "24 and n02504458, one class: give each class once"),
])
def test_classes_that_imagenet_does_not_have(folder, asked, message):
    refused(message, folder[0], only_classes=asked)


def arrays(n=4, side=8):
    return {"data": np.zeros((n, 3 * side * side), np.uint8), "labels": np.arange(n) + 1}


@pytest.mark.parametrize("changes, message", [
    ({"data": np.zeros((4, 191), np.uint8)}, r"data is uint8 \(4, 191\), not uint8 \(N, 3·S·S\)"),
    ({"data": np.zeros((4, 0), np.uint8)}, r"data is uint8 \(4, 0\)"),
    ({"data": np.zeros((4, 192))}, r"data is float64 \(4, 192\)"),
    ({"data": np.zeros((4, 8, 8, 3), np.uint8)}, r"data is uint8 \(4, 8, 8, 3\)"),
    ({"data": np.zeros((3, 192), np.uint8)}, "one whole number for each of the 3 rows"),
    ({"data": np.asfortranarray(np.zeros((4, 192), np.uint8))}, "Fortran order"),
    ({"labels": np.arange(4) / 2}, "labels are float64"), ({"labels": np.arange(4)}, "labels run from 0 to 3"),
    ({"labels": np.arange(4) + 998}, "labels run from 998 to 1001, ImageNet's from 1 to 1000"),
    ({"data": np.zeros((0, 192), np.uint8), "labels": np.arange(0)}, "holds no images"),
])
def test_files_that_are_none_of_imagenets(tmp_path, changes, message):
    np.savez(tmp_path / "train_data_batch_1.npz", **arrays() | changes)
    refused(message, tmp_path)
    refused(message, tmp_path / "train_data_batch_1.npz")


def test_damaged_files(folder):
    path, _, _ = folder
    file = path / "train_data_batch_2.npz"
    whole = file.read_bytes()
    damaged = bytearray(whole)
    damaged[300] ^= 1
    for content, message in [(whole[:-50], "truncated or not an .npz"), (damaged, "cannot read .*CRC")]:
        file.write_bytes(content)
        refused(message, path)
    np.savez(file, labels=[1])
    refused("has no array 'data', as ImageNet's files have", path)
    batch(path, 2, [5], side=4)
    refused("has images of 4 and 8 pixels: keep one size there", path)


def test_other_data_sets_are_asked_for_classes_too(tmp_path):
    data = load_dataset("digits", count=20, image_size=8)
    chosen = load_dataset("digits", count=20, image_size=8, only_classes=["7", 3])
    kept = np.isin(data.labels, (7, 3))
    np.testing.assert_array_equal(chosen.images, data.images[kept])
    assert chosen.labels.tolist() == [int(label == 3) for label in data.labels[kept]]
    assert chosen.class_names == ("7", "3") and chosen.num_classes == 2
    for alone in ("7", 7):
        assert load_dataset("digits", count=20, image_size=8, only_classes=alone).class_names == ("7",)
    unnamed = dataclasses.replace(data, class_names=None).only([3])
    assert unnamed.class_names == ("3",) and unnamed.labels.tolist() == [0, 0]
    refused("digits has no class 10: its classes are 0, 1, 2", "digits", count=20, only_classes=["10"])
    refused("digits has no class 'x': its classes are 0, 1, 2", "digits", count=20, only_classes=["x"])
    refused("only_classes has 3 twice", "digits", count=20, only_classes=["3", "3"])
    refused("digits has no image of 9: give others", "digits", count=5, only_classes=["9"])
    np.savez(tmp_path / "a.npz", images=picture(3, 8, 8, 3))
    refused("a has no labels, so only_classes cannot choose", tmp_path / "a.npz", only_classes=["0"])
