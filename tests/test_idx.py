"""IDX folders of unusual shapes: what is read, and what is refused by its sizes."""

import numpy as np
import pytest

from cudiff.data.idx import has_idx, idx_folder
from cudiff.errors import CudiffError
from tests.test_data import idx_bytes, picture


def write(folder, images, labels, part="train"):
    (folder / f"{part}-images-idx3-ubyte").write_bytes(idx_bytes(images))
    (folder / f"{part}-labels-idx1-ubyte").write_bytes(idx_bytes(np.uint8(labels)))
    return folder


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 5), (3, 5, 1)])
def test_images_of_one_pixel_a_side_are_images(tmp_path, shape):
    images, labels = picture(*shape), np.arange(shape[0]) + 4
    assert not has_idx(tmp_path)
    for part, prefix in (("train", "train"), ("test", "t10k")):
        data = idx_folder(write(tmp_path, images, labels, prefix), part)
        np.testing.assert_array_equal(data.images, images[..., None])
        assert data.labels.tolist() == labels.tolist() and data.num_classes == labels.max() + 1
        assert data.name == tmp_path.name and has_idx(tmp_path)


@pytest.mark.parametrize("images, labels, message", [
    ((3, 0, 4), [1, 2, 3], "images of 0x4 pixels: get the files anew"),
    ((3, 4, 0), [1, 2, 3], "images of 4x0 pixels: get the files anew"),
    ((0, 4, 4), [], "0 images and 0 labels: the files do not belong together"),
    ((1, 4, 4), [1, 2], "1 images and 2 labels"), ((3, 4), [1, 2, 3], "images have 2 dimensions and labels 1"),
    ((3, 4, 4), [[1, 2, 3]], "images have 3 dimensions and labels 2"),
])
def test_shapes_that_are_no_images_with_labels(tmp_path, images, labels, message):
    with pytest.raises(CudiffError, match=message):
        idx_folder(write(tmp_path, picture(*images), labels))


def test_an_unknown_part_is_refused(tmp_path):
    with pytest.raises(CudiffError, match="MNIST has no part 'validation': use train or test"):
        idx_folder(tmp_path, "validation")
