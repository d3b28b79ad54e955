"""What tells one data set from another: the words for each difference."""

import numpy as np
import pytest

from cudiff.data.dataset import Dataset, differences
from cudiff.errors import CudiffError

PRINT = {"name": "a", "number": 1200, "size": [4, 6, 3], "classes": 2, "labels": "x", "pixels": "y"}


@pytest.mark.parametrize("changes, found", [
    ({}, []), ({"name": "b"}, []), ({"pixels": "z"}, ["the pixels differ"]), ({"labels": "z"}, ["the labels differ"]),
    ({"number": 1300, "labels": "z", "pixels": "z"}, ["1,200 images are now 1,300"]),
    ({"size": [4, 6, 1]}, ["their size 4x6x3 is now 4x6x1"]),
    ({"classes": 1001, "labels": "z"}, ["2 classes are now 1,001"]),
    ({"labels": "z", "pixels": "z", "name": "b"}, ["a is now b", "the labels differ"]),
    ({"number": 3, "size": [1], "classes": 0, "name": "b"},
     ["a is now b", "1,200 images are now 3", "their size 4x6x3 is now 1", "2 classes are now 0"]),
], ids=str)
def test_what_differs_between_two_data_sets_is_said(changes, found):
    assert differences(PRINT, PRINT | changes) == found


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
