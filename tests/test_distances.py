"""Distances of sets of features against closed forms, and against their definitions written out pair by pair."""

import numpy as np
import pytest

from cudiff import distances
from cudiff.distances import frechet_distance, frechet_or_none, kernel_distance, precision_recall

# --- Fréchet distance ------------------------------------------------------------------------------------------------


def with_moments(rng, n, mean, covariance):
    """`n` points whose sample mean and sample covariance are exactly these."""
    x = rng.standard_normal((n, len(mean)))
    x -= x.mean(axis=0)
    whitened = x @ np.linalg.inv(np.linalg.cholesky(np.cov(x, rowvar=False))).T
    return whitened @ np.linalg.cholesky(covariance).T + mean


def random_covariance(rng, size):
    factor = rng.standard_normal((size, 2 * size))
    return factor @ factor.T / size


def test_frechet_of_spheres_is_the_closed_form(rng):
    """|μa − μb|² + D (σa − σb)² for covariances σ²·I."""
    a = with_moments(rng, 200, np.zeros(8), 4.0 * np.eye(8))
    b = with_moments(rng, 300, np.full(8, 0.5), 0.25 * np.eye(8))
    assert frechet_distance(a, b) == pytest.approx(8 * 0.25 + 8 * 1.5**2, rel=1e-10)


def test_frechet_of_commuting_covariances(rng):
    """Σ (√λa − √λb)² where both covariances have the same eigenvectors."""
    rotation, _ = np.linalg.qr(rng.standard_normal((5, 5)))
    values_a, values_b = rng.uniform(0.1, 3, (2, 5))
    a = with_moments(rng, 100, np.zeros(5), rotation * values_a @ rotation.T)
    b = with_moments(rng, 100, np.zeros(5), rotation * values_b @ rotation.T)
    expected = np.square(np.sqrt(values_a) - np.sqrt(values_b)).sum()
    assert frechet_distance(a, b) == pytest.approx(expected, rel=1e-9)


def test_frechet_of_any_covariances_by_the_eigenvalues_of_their_product(rng):
    """tr (Ca Cb)^½ is the sum of the roots of Ca·Cb's eigenvalues, which are real and positive; it is symmetric."""
    covariance_a, covariance_b, mean = random_covariance(rng, 6), random_covariance(rng, 6), rng.standard_normal(6)
    a, b = with_moments(rng, 50, mean, covariance_a), with_moments(rng, 80, np.zeros(6), covariance_b)
    common = np.sqrt(np.linalg.eigvals(covariance_a @ covariance_b).real).sum()
    expected = mean @ mean + np.trace(covariance_a) + np.trace(covariance_b) - 2 * common
    assert frechet_distance(a, b) == pytest.approx(expected, rel=1e-9)
    assert frechet_distance(b, a) == pytest.approx(frechet_distance(a, b), rel=1e-12)


def test_frechet_is_zero_for_equal_sets_and_takes_flat_ones(rng):
    a = rng.standard_normal((40, 128)).astype(np.float32)  # fewer points than dimensions
    a[:, ::3] = 0  # dead features
    assert abs(frechet_distance(a, a[::-1])) < 1e-9
    assert frechet_distance(a, a + 0.5) == pytest.approx(128 * 0.25, rel=1e-5)
    assert frechet_distance(a[:, :1], 2 * a[:, :1]) == pytest.approx(0, abs=1e-12)  # one dimension, dead
    with pytest.raises(ValueError, match="two features"):
        frechet_distance(a[:1], a)


def test_a_frechet_distance_needs_two_images_of_each():
    two = np.array([[0.0], [2.0]])
    assert frechet_distance(two, two + 3) == pytest.approx(9)
    for a, b in ((two[:1], two), (two, two[:1])):
        with pytest.raises(ValueError, match="a covariance needs two features or more, not "):
            frechet_distance(a, b)


def test_a_frechet_distance_in_as_many_dimensions_as_features_says_nothing(rng):
    a = rng.standard_normal((6, 5))
    assert frechet_or_none(a, a[:5]) is None and frechet_or_none(a[:5], a) is None
    assert frechet_or_none(a, a + 1) == pytest.approx(5)


# --- kernel distance -------------------------------------------------------------------------------------------------


def mmd(a, b):
    """Gretton et al. 2012, equation 3, a pair at a time in Python's floats."""
    def k(x, y):
        return (sum(float(u) * float(v) for u, v in zip(x, y, strict=True)) / len(x) + 1) ** 3

    within = [sum(k(x, y) for i, x in enumerate(s) for j, y in enumerate(s) if i != j) / (len(s) * (len(s) - 1))
              for s in (a, b)]
    return sum(within) - 2 * sum(k(x, y) for x in a for y in b) / (len(a) * len(b))


@pytest.mark.parametrize("n, m, dimensions", [(2, 2, 1), (7, 11, 3), (20, 5, 8)])
@pytest.mark.parametrize("pairs", [1, 30, 2**23])
def test_kernel_distance_is_its_definition(rng, monkeypatch, n, m, dimensions, pairs):
    monkeypatch.setattr(distances, "PAIRS", pairs)
    a, b = rng.standard_normal((n, dimensions)) + 1, 2 * rng.standard_normal((m, dimensions))
    assert kernel_distance(a, b) == pytest.approx(mmd(a, b), rel=1e-10, abs=1e-12)
    assert kernel_distance(b, a) == pytest.approx(mmd(a, b), rel=1e-10, abs=1e-12)


def test_kernel_distance_is_unbiased(rng):
    """Of small sets of one distribution its mean is 0, within four standard errors; the biased one's is not.

    And of two Gaussians in one dimension it is E[k(x, x')] + E[k(y, y')] - 2 E[k(x, y)], where for independent u, v
    E[(uv + 1)^3] = 1 + 3 E[u]E[v] + 3 E[u^2]E[v^2] + E[u^3]E[v^3].
    """
    same = [kernel_distance(*rng.standard_normal((2, 4, 3))) for _ in range(4000)]
    assert abs(np.mean(same)) < 4 * np.std(same) / np.sqrt(4000) and min(same) < 0

    def moments(mean, deviation):
        return np.array([1, mean, mean**2 + deviation**2, mean**3 + 3 * mean * deviation**2])

    def expected(p, q):
        return (np.array([1, 3, 3, 1]) * p * q).sum()

    p, q = moments(0, 1), moments(0.5, 0.7)
    exact = expected(p, p) + expected(q, q) - 2 * expected(p, q)
    found = [kernel_distance(rng.standard_normal((5, 1)), 0.5 + 0.7 * rng.standard_normal((9, 1))) for _ in range(6000)]
    assert abs(np.mean(found) - exact) < 4 * np.std(found) / np.sqrt(6000) < 0.3 * exact


def test_a_kernel_distance_needs_two_of_each():
    two = np.array([[0.0], [2.0]])
    for a, b in ((two[:1], two), (two, two[:1])):
        with pytest.raises(ValueError, match="pairs need two features or more"):
            kernel_distance(a, b)


# --- precision and recall --------------------------------------------------------------------------------------------


def share_within(features, others, k):
    """arXiv 1904.06991, equation 1, by sorting all distances to the others."""
    found = 0
    for x in features:
        for i, centre in enumerate(others):
            others_of_it = sorted(np.linalg.norm(centre - y) for j, y in enumerate(others) if j != i)
            if np.linalg.norm(x - centre) <= others_of_it[k - 1]:
                found += 1
                break
    return found / len(features)


@pytest.mark.parametrize("n, m, k", [(12, 9, 3), (4, 30, 3), (25, 25, 1), (8, 8, 7)])
@pytest.mark.parametrize("pairs", [1, 40, 2**23])
def test_precision_and_recall_are_their_definitions(rng, monkeypatch, n, m, k, pairs):
    monkeypatch.setattr(distances, "PAIRS", pairs)
    real, samples = rng.standard_normal((n, 4)), 1.5 * rng.standard_normal((m, 4)) + 0.5
    assert precision_recall(real, samples, k) == (share_within(samples, real, k), share_within(real, samples, k))


def test_precision_and_recall_of_known_sets(rng):
    """Of one mode of two: all samples are good, half of the data is missed. Of noise besides: the other way round."""
    left, right = rng.standard_normal((2, 200, 3)) + np.array([-50, 50])[:, None, None]
    both = np.concatenate([left, right])
    precision, recall = precision_recall(both, left[:100] + 0.01)
    assert precision == 1 and 0.4 < recall <= 0.5
    precision, recall = precision_recall(left, np.concatenate([left + 0.01, right]))
    assert precision == 0.5 and recall == 1
    assert precision_recall(left, right) == (0, 0)
    assert precision_recall(both, both[::-1]) == (1, 1)
    same = rng.standard_normal((2, 500, 2))
    assert min(precision_recall(*same)) > 0.9


def test_no_more_pairs_are_compared_at_once_than_memory_holds(monkeypatch):
    """Rows of up to PAIRS pairs, at least one."""
    monkeypatch.setattr(distances, "PAIRS", 100)
    for rows, columns, each in ((10, 30, 3), (7, 100, 1), (5, 1000, 1), (4, 1, 100)):
        blocks = list(distances._blocks(rows, columns))
        assert [range(rows)[block] for block in blocks] == [range(i, min(i + each, rows)) for i in range(0, rows, each)]


def test_equal_features_are_equal_far_from_the_origin(rng):
    """Balls of radius 0, of copies, hold copies alone, whatever rounding does to far features."""
    point = rng.standard_normal(64).astype(np.float32) * 100
    copies = np.repeat(point[None], 10, axis=0)
    far = np.concatenate([copies, copies[:5] + 1000])
    assert precision_recall(far, copies) == (1, pytest.approx(10 / 15))
    assert precision_recall(copies, copies + 1) == (0, 0)


def test_sets_without_a_third_neighbour(rng):
    few, many = rng.standard_normal((3, 2)), rng.standard_normal((4, 2))
    assert precision_recall(few, many) is None and precision_recall(many, few) is None
    assert precision_recall(many, many) == (1, 1)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e200])
def test_features_that_have_no_distance_are_refused(rng, bad):
    good, other = rng.standard_normal((2, 9, 3))
    other[4, 1] = bad
    for distance in (frechet_distance, kernel_distance, precision_recall):
        for pair in ((good, other), (other, good)):
            with pytest.raises(ValueError, match="features hold numbers that are not finite"):
                distance(*pair)
