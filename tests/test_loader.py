"""The loader on the CPU: what training sees of an image, and where labels are given."""

import numpy as np

from cudiff.config import Config
from cudiff.data import Dataset
from cudiff.data.loader import Loader
from cudiff.tensor import Tensor

IMAGES = np.arange(3 * 4 * 4, dtype=np.uint8).reshape(3, 4, 4, 1) * 5
DATA = Dataset(IMAGES, np.int32([0, 1, 0]), 2)


def test_chosen_images_are_as_training_sees_them():
    loader = Loader(DATA, Config(batch_size=2, image_size=4, channels=1, num_classes=2), "cpu")
    images, labels = loader.normalised(DATA, [2, 0])
    np.testing.assert_allclose(images.numpy(), IMAGES[[2, 0]] / 127.5 - 1, rtol=1e-6)
    assert labels.numpy().tolist() == [0, 0] and images.dtype == np.float32
    batch, _ = loader.batch(Tensor(np.zeros(1, np.int32)), (), 0)
    assert {row.tobytes() for row in batch.numpy()} <= {
        row.tobytes() for row in loader.normalised(DATA, [0, 1, 2])[0].numpy()
    }


def test_labels_are_given_to_a_net_with_classes():
    for classes, given in ((0, False), (2, True)):
        loader = Loader(DATA, Config(batch_size=2, image_size=4, channels=1, num_classes=classes), "cpu")
        assert (loader.batch(Tensor(np.zeros(1, np.int32)), (), 0)[1] is not None) == given
        assert (loader.normalised(DATA, [0])[1] is not None) == given
