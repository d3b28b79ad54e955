"""Limits of .npz files on both sides, and the advice for images of other types."""

import struct
import zipfile

import numpy as np
import pytest

from cudiff.data import load_dataset
from cudiff.data.npz import inflates
from tests.test_data import picture, refused
from tests.test_readers import npy, write_npz


def header(shape, length=None):
    text = repr({"descr": "|u1", "fortran_order": False, "shape": shape})
    return text.ljust(length or len(text))


@pytest.mark.parametrize("version", [1, 2, 3])
def test_headers_of_every_version(tmp_path, version):
    """Their length has two bytes in version 1, four since."""
    images = picture(2, 4, 4, 3)
    write_npz(tmp_path / "a.npz", images=npy(header=header(images.shape, 700), version=version) + images.tobytes())
    np.testing.assert_array_equal(load_dataset(tmp_path / "a.npz").images, images)


@pytest.mark.parametrize("version", [0, 4])
def test_headers_of_other_versions_are_refused(tmp_path, version):
    write_npz(tmp_path / "a.npz", images=npy(picture(2, 4, 4, 3), version=version))
    refused("it holds something other than arrays", tmp_path / "a.npz")


def test_a_header_has_up_to_10_000_bytes(tmp_path):
    images = picture(2, 4, 4, 3)
    for length in (10_000, 10_001):
        write_npz(tmp_path / "a.npz", images=npy(header=header(images.shape, length)) + images.tobytes())
        if length == 10_000:
            np.testing.assert_array_equal(load_dataset(tmp_path / "a.npz").images, images)
    refused("a header of 10,001 bytes", tmp_path / "a.npz")


def test_arrays_of_more_than_eight_dimensions_are_none(tmp_path):
    for shape, message in [((1,) * 8, r"images have shape \(1, 1, 1, 1, 1, 1, 1, 1\)"), ((1,) * 9, "9 dimensions")]:
        write_npz(tmp_path / "a.npz", images=npy(np.zeros(shape, np.uint8)))
        refused(message, tmp_path / "a.npz")


@pytest.mark.parametrize("channels", [0, 1, 2, 3, 4])
def test_images_of_one_or_three_channels(tmp_path, channels):
    images = picture(3, 5, 5, channels)
    np.savez(tmp_path / "a.npz", images=images)
    if channels in (1, 3):
        np.testing.assert_array_equal(load_dataset(tmp_path / "a.npz").images, images)
    else:
        refused(rf"images have shape \(3, 5, 5, {channels}\): save them as \(N, H, W, C\)", tmp_path / "a.npz")


@pytest.mark.parametrize("channels", [1, 3])
def test_channels_that_come_first(tmp_path, channels):
    np.savez(tmp_path / "a.npz", images=picture(4, channels, 5, 5))
    refused("channels first", tmp_path / "a.npz")


def test_classes_are_fewer_than_2_to_the_20(tmp_path):
    for highest in (2**20 - 1, 2**20):
        np.savez(tmp_path / "a.npz", images=picture(2, 4, 4, 3), labels=np.array([0, highest]))
        if highest < 2**20:
            assert load_dataset(tmp_path / "a.npz").num_classes == 2**20
    refused("labels run to 1048576: number the classes from 0, fewer than 1048576", tmp_path / "a.npz")


@pytest.mark.parametrize("labels, message", [
    ([-1, -1], "labels begin at -1: number the classes from 0, or leave labels out"), ([-3, 2], "labels begin at -3"),
    (["ant", "bee"], "labels.npy: an array of text, objects or another kind that is not read: give numbers"),
])
def test_labels_that_number_no_classes(tmp_path, labels, message):
    np.savez(tmp_path / "a.npz", images=picture(2, 4, 4, 3), labels=np.array(labels))
    refused(message, tmp_path / "a.npz")


def test_what_may_be_inflated():
    """64 MiB, or 500 times the file."""
    for size, compressed in ((2**26, 0), (500 * 2**20, 2**20), (2**26, 2**26 // 500)):
        assert inflates(size, compressed) and not inflates(size + 1, compressed)


def test_an_array_of_other_names_is_listed_by_ten_of_them(tmp_path):
    np.savez(tmp_path / "a.npz", **{f"n{i}": np.zeros(1) for i in range(12)})
    refused(r"\(it holds n0, n1, n2, n3, n4, n5, n6, n7, n8, n9\): rename", tmp_path / "a.npz")
    np.savez(tmp_path / "a.npz", **{f"{i}".ljust(60, "x"): np.zeros(1) for i in range(9)})
    refused(r"\(it holds .{200}\): rename", tmp_path / "a.npz")
    with zipfile.ZipFile(tmp_path / "a.npz", "w"):
        pass
    refused("it holds nothing", tmp_path / "a.npz")


def test_a_directory_of_one_mebibyte_is_read(tmp_path):
    """Entries of 46 bytes, the name and a comment."""
    images = picture(2, 4, 4, 3)
    for size in (2**20, 2**20 + 1):
        left = size - 46 - len("images.npy")
        with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
            archive.writestr("images.npy", npy(images))
            for number in range(16):
                entry = zipfile.ZipInfo(f"{number:02}.npy")
                entry.comment = b"c" * (left - 15 * (left // 16) - 52 if number == 15 else left // 16 - 52)
                archive.writestr(entry, b"")
        content = (tmp_path / "a.npz").read_bytes()
        assert struct.unpack_from("<I", content, len(content) - 10) == (size,)
        if size == 2**20:
            np.testing.assert_array_equal(load_dataset(tmp_path / "a.npz").images, images)
    refused("its directory is too long", tmp_path / "a.npz")


SIGNED, UNSIGNED, OTHER = r"span \[-1, 1\], save .*1\) \* 127\.5", r"span \[0, 1\].* \* 255", "scale"
WHOLE, HIGH = r"save images\.astype\(numpy\.uint8\)", "images >> 8"


@pytest.mark.parametrize("values, advice", [
    ([-1, 1], SIGNED), ([-0.5, 0.5], SIGNED), ([-1, -0.5], SIGNED), ([-1.01, 1], OTHER), ([-1, 1.01], OTHER),
    ([-2, 1], OTHER), ([-1, 2], OTHER), ([0, 1], UNSIGNED), ([0, 0], UNSIGNED), ([0.5, 0.7], UNSIGNED),
    ([0, 1.01], OTHER), ([0, 2], OTHER), ([0, 255], OTHER), ([], OTHER), (np.array([0, 255]), WHOLE),
    (np.array([-1, 1]), SIGNED), (np.array([0, 256]), OTHER), (np.array([0, 65535], np.uint16), HIGH),
    (np.array([0, 255], np.uint16), WHOLE), (np.array([True, False]), r"uint8\) \* 255"),
], ids=str)
def test_images_of_other_types_get_the_advice_that_their_values_ask_for(tmp_path, values, advice):
    """Of the span that they seem to have; followed, it loses nothing."""
    dtype = None if isinstance(values, np.ndarray) else np.float32
    images = np.resize(np.asarray(values, dtype), (2 if len(values) else 0, 2, 2, 3))
    np.savez(tmp_path / "a.npz", images=images)
    refused(f"images are {images.dtype}, not uint8: .*{advice}", tmp_path / "a.npz")


@pytest.mark.parametrize("labels, told", [
    ([0, 1, 2], None), ([1, 2, 1], "of 3 classes 1 have no image, the first of them 0"),
    ([0, 1, 4], "of 5 classes 2 have no image, the first of them 2"),
    ([0, 0, 999_999], "of 1,000,000 classes 999,998 have no image, the first of them 1"),
])
def test_classes_without_images_are_told(tmp_path, labels, told):
    np.savez(tmp_path / "a.npz", images=np.zeros((3, 8, 8, 1), np.uint8), labels=np.array(labels))
    found = load_dataset(tmp_path / "a.npz").notes
    assert found == () if told is None else f"labels count from 0, and {told}: a model does not learn these" in found
