"""What tells one data set from another: its fingerprint, and the words for each difference."""

import hashlib
import json

import numpy as np
import pytest

from cudiff.data import dataset, load_dataset
from cudiff.data.dataset import Dataset, differences
from cudiff.errors import CudiffError

PRINT = {"name": "a", "number": 1200, "size": [4, 6, 3], "classes": 2, "labels": "x", "pixels": "y",
         "class_names": ["cat", "dog"]}


@pytest.mark.parametrize("changes, found", [
    ({}, []), ({"name": "b"}, []), ({"pixels": "z"}, ["the pixels differ"]), ({"labels": "z"}, ["the labels differ"]),
    ({"number": 1300, "labels": "z", "pixels": "z"}, ["1,200 images are now 1,300"]),
    ({"size": [4, 6, 1]}, ["their size 4x6x3 is now 4x6x1"]),
    ({"classes": 1001, "labels": "z"}, ["2 classes are now 1,001"]),
    ({"labels": "z", "pixels": "z", "name": "b"}, ["a is now b", "the labels differ"]),
    ({"class_names": ["cat", "hen"]}, ["the class dog is now hen"]), ({"class_names": None}, []),
    ({"class_names": ["cat", "hen"], "labels": "z"}, ["the labels differ", "the class dog is now hen"]),
    ({"number": 3, "size": [1], "classes": 0, "name": "b"},
     ["a is now b", "1,200 images are now 3", "their size 4x6x3 is now 1", "2 classes are now 0"]),
], ids=str)
def test_what_differs_between_two_data_sets_is_said(changes, found):
    assert differences(PRINT, PRINT | changes) == found


def test_a_checkpoint_without_class_names_does_not_differ():
    assert differences({key: PRINT[key] for key in PRINT if key != "class_names"}, PRINT) == []


def test_what_a_strangers_checkpoint_lacks_differs():
    assert differences({}, PRINT) == ["None is now a", "? images are now 1,200", "their size ? is now 4x6x3",
                                      "? classes are now 2"]


def test_images_alone_are_a_data_set_without_classes():
    data = Dataset(np.zeros((2, 3, 3, 1), np.uint8))
    assert (data.labels, data.num_classes, data.name, data.class_names) == (None, 0, "data", None)
    assert data.skipped == data.notes == ()


def test_labels_without_a_number_of_classes_ask_for_it():
    with pytest.raises(CudiffError, match=r"^mine: labels need num_classes; give it, one more than the highest label$"):
        Dataset(np.zeros((2, 3, 3, 1), np.uint8), np.array([0, 4]), name="mine")
    with pytest.raises(CudiffError, match="labels run from 0 to 4; number the 4 classes from 0 to 3"):
        Dataset(np.zeros((2, 3, 3, 1), np.uint8), np.array([0, 4]), 4)


def test_masks_are_not_dropped():
    images, labels = np.zeros((2, 4, 4, 1), np.uint8), np.array([0, 1])
    for given in ((np.ma.array(images), labels), (images, np.ma.array(labels))):
        with pytest.raises(TypeError, match=r"give array\.filled\(value\)"):
            Dataset(*given, num_classes=2)


def test_a_fingerprint_reads_all_images_or_as_many_as_it_may(monkeypatch, rng):
    data = Dataset(rng.integers(0, 256, (50, 4, 4, 1), np.uint8), np.zeros(50, int), 1)
    print_ = data.fingerprint()
    assert json.loads(json.dumps(print_)) == print_
    assert (print_["number"], print_["size"], print_["classes"]) == (50, [4, 4, 1], 1)

    def notices():
        """Images whose change is seen."""
        before, seen = data.fingerprint()["pixels"], []
        for index in range(50):
            data.images[index, 0, 0, 0] ^= 1
            seen += [index] if data.fingerprint()["pixels"] != before else []
            data.images[index, 0, 0, 0] ^= 1
        return seen

    assert notices() == list(range(50))
    monkeypatch.setattr(dataset, "DIGESTED", 5 * 16)
    assert notices() == [0, 12, 24, 37, 49]
    data.labels[7] = 0
    assert data.fingerprint()["labels"] == print_["labels"]


@pytest.mark.parametrize("count", [1, 64, 65, 130])
def test_the_pixels_digest_is_that_of_all_of_them_in_their_order(count, rng):
    """However many are read at a time: else a run could not go on with the data that its checkpoint names."""
    images = rng.integers(0, 256, (count, 4, 4, 1), np.uint8)
    assert dataset.pixel_digest(images) == hashlib.sha256(images.tobytes()).hexdigest()


def test_a_fingerprint_tells_labels_and_what_has_none(rng):
    images = rng.integers(0, 256, (4, 2, 2, 1), np.uint8)
    one, other = (Dataset(images, np.array(labels), 2).fingerprint() for labels in ([0, 1, 0, 1], [0, 1, 1, 1]))
    assert one["labels"] != other["labels"] and one["pixels"] == other["pixels"]
    assert Dataset(images).fingerprint()["labels"] is None
    assert Dataset(images[:0]).fingerprint() == Dataset(images[:0], name="data").fingerprint()
    assert Dataset(images[:0]).fingerprint()["number"] == 0


@pytest.mark.parametrize("validation, held_out", [(0, 0), (1, 1), (9, 9), (0.25, 2), (0.5, 5), (0.9, 9)])
def test_how_many_are_held_out(validation, held_out):
    data = Dataset(np.arange(10, dtype=np.uint8).reshape(10, 1, 1, 1))
    training, rest = data.split(validation)
    assert (len(training), len(rest)) == (10 - held_out, held_out)
    assert sorted(training.images.ravel().tolist() + rest.images.ravel().tolist()) == list(range(10))


@pytest.mark.parametrize("validation", [-1, 10, 11, 0.99])
def test_something_is_left_to_train_on(validation):
    with pytest.raises(CudiffError, match=f"cannot hold out {validation} of 10 images; hold out at most 9"):
        Dataset(np.zeros((10, 1, 1, 1), np.uint8)).split(validation)


def test_what_a_data_set_is_called_by():
    images = np.zeros((1200, 2, 3, 1), np.uint8)
    assert repr(Dataset(images)) == "Dataset(data: 1,200 images 2x3x1, no labels)"
    assert repr(Dataset(images, np.zeros(1200, int), 7, "mine")) == "Dataset(mine: 1,200 images 2x3x1, 7 classes)"


@pytest.mark.parametrize("images, labels, classes, names, message", [
    ((2, 3, 3, 2), None, 0, None, "with 1 or 3 channels"), ((2, 3, 3), None, 0, None, "give uint8"),
    ((2, 3, 3, 1), [0, 1, 1], 2, None, "give one integer for each of the 2 images"),
    ((2, 3, 3, 1), [-1, 1], 2, None, "labels run from -1 to 1; number the 2 classes from 0 to 1"),
    ((2, 3, 3, 1), [0, 2], 2, None, "labels run from 0 to 2; number the 2 classes from 0 to 1"),
    ((2, 3, 3, 1), [0, 1], 2, ("a",), "1 class names for 2 classes; give one for each"),
    ((2, 3, 3, 1), [0, 1], 2, ("a", "b", "c"), "3 class names for 2 classes"),
])
def test_parts_that_do_not_agree_are_refused(images, labels, classes, names, message):
    with pytest.raises(CudiffError, match=message):
        Dataset(np.zeros(images, np.uint8), None if labels is None else np.array(labels), classes, class_names=names)


def test_classes_are_chosen_by_numpys_integers_and_one_at_least():
    data = Dataset(np.zeros((3, 4, 4, 1), np.uint8), [0, 1, 2], 3, class_names=("a", "b", "c"))
    assert data.only(np.int64(2)).class_names == ("c",)
    with pytest.raises(CudiffError, match=r"only\(\) of no class leaves no image"):
        data.only([])
    with pytest.raises(CudiffError, match="class_names are one text for each class, not 'abc'"):
        Dataset(data.images, [0, 1, 2], 3, class_names="abc")


def test_no_images_have_no_labels_and_no_need_of_classes():
    data = Dataset(np.zeros((0, 3, 3, 1), np.uint8), np.zeros(0, int))
    assert (len(data), data.num_classes, data.labels.tolist()) == (0, 0, [])


@pytest.mark.parametrize("seed, held_out", [(0, [2, 11, 16, 36, 39]), (5, [4, 13, 20, 38, 39]),
                                            (2**40 + 5, [5, 11, 12, 21, 22])])
def test_which_images_are_held_out_never_changes(seed, held_out):
    """Else a resumed run would train on what it had held out before."""
    data = Dataset(np.arange(40, dtype=np.uint8).reshape(40, 1, 1, 1))
    assert data.split(5, seed)[1].images.ravel().tolist() == held_out


def test_lists_and_nothing_are_told():
    for images in ([[1]], [[1], [2, 3]], (np.zeros((8, 8, 1), np.uint8),)):
        with pytest.raises(CudiffError, match=r"images are a (list|tuple): give np.stack\(images\)"):
            Dataset(images)
    for images in (None, 3, "mnist", {}):
        with pytest.raises(CudiffError, match=r"images are a \w+: give an array \(N, H, W, C\), or a name or"):
            Dataset(images)
    with pytest.raises(CudiffError, match="there are no images"):
        Dataset(np.zeros((0, 8, 8, 1), np.uint8)).split(2)


def test_numpys_numbers_and_names(rng):
    labels = np.arange(6) % 3
    data = Dataset(rng.integers(0, 256, (6, 8, 8, 1), dtype=np.uint8), labels, labels.max() + 1,
                   class_names=np.array(["a", "b", "c"]))
    assert json.loads(json.dumps(data.fingerprint()))["classes"] == 3 and data.class_names == ("a", "b", "c")
    with pytest.raises(CudiffError, match="num_classes must be a whole number"):
        Dataset(data.images, labels, 3.0)


@pytest.mark.parametrize("spec, options, message", [
    (np.zeros((2, 8, 8, 1), np.uint8), {}, r"a name or a path, not ndarray: of arrays make cudiff.data.Dataset\("),
    (None, {}, "takes a name or a path, not NoneType"), (["a.png"], {}, "takes a name or a path, not list"),
    ("digits", {"image_size": 8.5}, "image_size must be a whole number, not 8.5"),
    ("digits", {"image_size": (8, 8)}, "image_size must be a whole number"),
    ("digits", {"channels": "1"}, "channels must be a whole number, not '1'"),
    ("digits", {"count": 3.5}, "count must be a whole number, not 3.5"),
    ("digits", {"seed": "a"}, "seed must be a whole number, not 'a'"),
    ("digits", {"seed": -1}, "seed must be at least 0, not -1"),
])
def test_what_is_no_name_and_no_number_is_told(spec, options, message):
    with pytest.raises(CudiffError, match=message):
        load_dataset(spec, **options)
