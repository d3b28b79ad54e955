"""The drawn digits: how many there are unless told, and that more are the same ones and more."""

import numpy as np
import pytest

from cudiff.data.draw import _glyph, digits
from cudiff.errors import CudiffError


def test_four_thousand_unless_told():
    data = digits(image_size=8)
    assert len(data.images) == 4000 and np.bincount(data.labels).tolist() == [400] * 10
    np.testing.assert_array_equal(digits(20, image_size=8).images, data.images[:20])


def ink(glyph):
    rows, columns = (np.flatnonzero(np.asarray(glyph).any(axis)) for axis in (1, 0))
    return np.array([rows[0], rows[-1] + 1, columns[0], columns[-1] + 1])


def test_a_glyph_is_centred_and_of_the_height_that_is_said():
    """0.62 of the canvas (the flat digits are a little lower), and the thickest stroke adds 0.032 all around."""
    for digit in range(10):
        thin, thick = (ink(_glyph(digit, stroke, 200)) for stroke in (0, 7))
        assert thin[1] - thin[0] == pytest.approx(124 if digit in (0, 3, 6, 8, 9) else 121, abs=1.5)
        assert (thick - thin).tolist() == pytest.approx([-6.4, 6.4, -6.4, 6.4], abs=1)
        assert thin[0] + thin[1] == pytest.approx(200, abs=1)
        assert thin[2] + thin[3] == pytest.approx(200, abs=12)  # a digit's place in its own width is the font's
    areas = [np.asarray(_glyph(8, stroke, 200)).mean() for stroke in range(8)]
    assert (np.diff(areas) > 0).all() and _glyph(1, 0, 200).size == (200, 200)


def moments(image):
    """Of what is drawn: its centre (x, y) from the image's, and its covariance, in shares of the side."""
    places = (np.arange(len(image)) + 0.5) / len(image) - 0.5
    weights = image / image.sum()
    points = np.stack(np.broadcast_arrays(places[None, :], places[:, None]))
    centre = (weights * points).sum((1, 2))
    away = points - centre[:, None, None]
    return centre, np.einsum("yx,iyx,jyx->ij", weights, away, away)


@pytest.mark.parametrize("size, canvas", [(32, 128), (40, 80)])
def test_digits_are_scaled_sheared_turned_and_moved_as_is_said(size, canvas):
    """The moments of each are those of its glyph, carried over by its own random numbers."""
    data, draws = digits(80, size, seed=5), np.random.default_rng([5, 0]).random((80, 8))
    for image, label, draw in zip(data.images[..., 0].astype(float), data.labels, draws, strict=True):
        rotation, shear, *shift = (2 * draw[1:5] - 1) * (0.22, 0.35, 0.07, 0.07)
        turn = np.array([[np.cos(rotation), -np.sin(rotation)], [np.sin(rotation), np.cos(rotation)]])
        matrix = turn @ [[1, shear], [0, 1]] @ np.diag(0.78 + 0.34 * draw[5:7])
        centre, covariance = moments(np.asarray(_glyph(int(label), int(8 * draw[0]), canvas)))
        found, spread = moments(image)
        np.testing.assert_allclose(found, matrix @ centre + shift, atol=2e-3)
        np.testing.assert_allclose(spread, matrix @ covariance @ matrix.T, atol=3e-4)
        if label in (0, 8):
            assert image.max() == pytest.approx(255 * (0.8 + 0.2 * draw[7]), abs=1)


def test_digits_have_up_to_1024_pixels_a_side():
    assert digits(1, image_size=1024).images.shape == (1, 1024, 1024, 1)
    with pytest.raises(CudiffError, match="digits of 1025 pixels are not drawn: use an image size of 1024 or less"):
        digits(1, image_size=1025)


def test_digits_have_8_pixels_a_side_or_more_and_are_one_or_more():
    assert digits(1, image_size=8).images.shape == (1, 8, 8, 1)
    with pytest.raises(CudiffError, match="digits of 7 pixels cannot be read: use an image size of 8 or more"):
        digits(1, image_size=7)
    with pytest.raises(CudiffError, match="cannot draw 0 digits: ask for 1 or more"):
        digits(0)
    with pytest.raises(CudiffError, match="digits has no part 'validation': use train or test"):
        digits(1, part="validation")
