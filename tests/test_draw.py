"""The drawn digits: how many there are unless told, and that more are the same ones and more."""

import numpy as np

from cudiff.data.draw import digits


def test_four_thousand_unless_told():
    data = digits(image_size=8)
    assert len(data.images) == 4000 and np.bincount(data.labels).tolist() == [400] * 10
    np.testing.assert_array_equal(digits(20, image_size=8).images, data.images[:20])
