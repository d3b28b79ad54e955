"""The loader on the CPU: what training sees of an image, and where labels are given."""

import numpy as np
import pytest

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


@pytest.mark.parametrize("accumulate, classes", [(1, 2), (3, 2), (2, 0)])
def test_streamed_batches_are_those_of_resident_data(accumulate, classes):
    """By their numbers, which begin at `first`, for as many updates as there are."""
    config = Config(batch_size=2, accumulate=accumulate, image_size=4, channels=1, num_classes=classes, flip=True)
    resident = Loader(DATA, config, "cpu")
    streamed = Loader(DATA, config.replace(residency="host"), "cpu", first=4)
    assert resident.resident and not streamed.resident and resident.next() == ()
    held = [IMAGES.shape, (3,)] if classes else [IMAGES.shape]
    assert [tensor.shape for tensor in resident.on_device] == held
    shapes = [(2, 4, 4, 1), (2,)] if classes else [(2, 4, 4, 1)]
    assert [tensor.shape for tensor in streamed.on_device] == 2 * accumulate * shapes  # of this update and the next
    for update in range(3):
        arrays = streamed.next()
        assert len(arrays) == accumulate * (2 if classes else 1)
        for index in range(accumulate):
            found = streamed.batch(Tensor(np.int32([0])), arrays, index)
            expected = resident.batch(Tensor(np.int32([4 + update])), (), index)
            np.testing.assert_array_equal(found[0].numpy(), expected[0].numpy())
            assert found[0].dtype == np.float32 and (found[1] is None) == (classes == 0)
            if classes:
                np.testing.assert_array_equal(found[1].numpy(), expected[1].numpy())


def test_where_data_lies_unless_told(monkeypatch):
    """On a CPU in its memory; on a GPU where it takes less than a quarter of that (the stand-in's number of bytes)."""
    for quarter, resident in ((DATA.images.nbytes, False), (DATA.images.nbytes + 1, True)):
        monkeypatch.setattr("cudiff.data.loader.memory_total", lambda device, quarter=quarter: 4 * quarter)
        monkeypatch.setattr("cudiff.data.loader.Staging", lambda device: None)
        monkeypatch.setattr("cudiff.data.loader.Tensor", lambda array, device: device)
        loader = Loader(DATA, Config(batch_size=2, image_size=4, channels=1), "cuda")
        assert loader.resident is resident and loader._images == ("cuda" if resident else "cpu")
    for residency, resident in (("device", True), ("host", False)):
        config = Config(batch_size=2, image_size=4, channels=1, residency=residency)
        assert Loader(DATA, config, "cuda").resident is resident
