"""How far apart two sets of features lie: Fréchet and kernel distance, precision and recall; NumPy, float64.

A set of features is an array (N, D), a row for each image. All need many images: each docstring says what few do.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

NEIGHBOURS = 3
"""k of `precision_recall`, as in its paper."""
PAIRS = 2**23  # of features compared at once: 64 MiB of float64
SAME = 1e-12  # a squared distance of less than this share of the largest squared norm is rounding


def frechet_distance(features_a: np.ndarray, features_b: np.ndarray) -> float:
    """Fréchet distance of the Gaussians fitted to two sets of features (N, D), (M, D), in float64.

    |μa − μb|² + tr(Ca + Cb − 2 (Ca Cb)^½), Dowson and Landau (1982); with Inception's features, the FID (Heusel et
    al. 2017, equation 6). The trace of (Ca Cb)^½ is the sum of the singular values of Ca^½ Cb^½, which needs no square
    root of an asymmetric matrix and is the same for (b, a). It shrinks as N and M grow: compare equal numbers.
    Raises ValueError for fewer than two features, and as `_wide` does.
    """
    a, b = _wide(features_a, features_b)
    if len(a) < 2 or len(b) < 2:
        raise ValueError(f"a covariance needs two features or more, not {len(a)} and {len(b)}")
    covariance_a, covariance_b = np.atleast_2d(np.cov(a, rowvar=False)), np.atleast_2d(np.cov(b, rowvar=False))
    product = _square_root(covariance_a) @ _square_root(covariance_b)
    difference = a.mean(axis=0) - b.mean(axis=0)
    common = np.linalg.svd(product, compute_uv=False).sum()
    return float(difference @ difference + np.trace(covariance_a) + np.trace(covariance_b) - 2 * common)


def frechet_or_none(features_a: np.ndarray, features_b: np.ndarray) -> float | None:
    """`frechet_distance`, or None where one set (N, D) has no more than D: its covariance is singular then, and the
    distance says how many there are rather than how good they are."""
    if min(len(features_a), len(features_b)) <= features_a.shape[1]:
        return None
    return frechet_distance(features_a, features_b)


def _wide(*sets: np.ndarray) -> list[np.ndarray]:
    """Features in float64. Raises ValueError where they are not finite, or too large to be squared."""
    wide = [np.asarray(features, np.float64) for features in sets]
    if any(features.size and not np.abs(features).max() < 1e150 for features in wide):
        raise ValueError("features hold numbers that are not finite, or of 1e150 and more: return smaller ones")
    return wide


def _square_root(matrix: np.ndarray) -> np.ndarray:
    """The symmetric root of a positive semi-definite matrix; eigenvalues that rounding made negative count as 0."""
    values, vectors = np.linalg.eigh(matrix)
    return vectors * np.sqrt(values.clip(0)) @ vectors.T


def kernel_distance(features_a: np.ndarray, features_b: np.ndarray) -> float:
    """KID, arXiv 1801.01401, section 4: the squared maximum mean discrepancy of two sets (N, D), (M, D) by the kernel
    (x·y / D + 1)³, its unbiased estimate of all pairs (Gretton et al. 2012, equation 3).

    Its expectation does not depend on N and M, so it may be negative; with few it varies much. It grows with the sixth
    power of the features' scale: compare distances in the same features. Raises ValueError for fewer than two features,
    and as `_wide` does.
    """
    a, b = _wide(features_a, features_b)
    n, m = len(a), len(b)
    if n < 2 or m < 2:
        raise ValueError(f"pairs need two features or more, not {n} and {m}")
    within = _kernel_sum(a, a) - _kernel(np.square(a).sum(axis=1), a.shape[1]).sum()
    of_b = _kernel_sum(b, b) - _kernel(np.square(b).sum(axis=1), b.shape[1]).sum()
    return float(within / (n * (n - 1)) + of_b / (m * (m - 1)) - 2 * _kernel_sum(a, b) / (n * m))


def _kernel(products: np.ndarray, dimensions: int) -> np.ndarray:
    base = products / dimensions + 1
    return base * base * base  # 10,000 features of 128 take 2.2 s, with ** 3 they take 9.9


def _kernel_sum(a: np.ndarray, b: np.ndarray) -> float:
    return sum(float(_kernel(a[rows] @ b.T, a.shape[1]).sum()) for rows in _blocks(len(a), len(b)))


def precision_recall(
    real: np.ndarray, samples: np.ndarray, neighbours: int = NEIGHBOURS
) -> tuple[float, float] | None:
    """Improved precision and recall, arXiv 1904.06991, equations 1 and 2: the share of `samples` (M, D) on the manifold
    of `real` (N, D), and of `real` on that of the samples, in [0, 1].

    A set's manifold is the union of balls around its features, each as wide as to its k-th nearest other one. Low
    precision: samples unlike the data. Low recall: data that is never sampled. Both depend on N and M: compare equal
    numbers. None where a set has no k-th neighbour.
    """
    if min(len(real), len(samples)) <= neighbours:
        return None
    a, b = _wide(real, samples)
    centre = a.mean(axis=0)  # less rounding in the differences below
    a, b = a - centre, b - centre
    return _share_within(b, a, neighbours), _share_within(a, b, neighbours)


def _share_within(features: np.ndarray, others: np.ndarray, neighbours: int) -> float:
    """The share of features that lie in a ball around one of the others."""
    radii = np.concatenate([
        np.partition(_squared_distances(others[rows], others), neighbours, axis=1)[:, neighbours]  # the first: itself
        for rows in _blocks(len(others), len(others))
    ])
    # Of copies the radius is 0, and their distances are what rounding makes of it.
    radii = np.maximum(radii, SAME * max(np.square(features).sum(axis=1).max(), np.square(others).sum(axis=1).max()))
    inside = [(_squared_distances(features[rows], others) <= radii).any(axis=1)
              for rows in _blocks(len(features), len(others))]
    return float(np.concatenate(inside).mean())


def _squared_distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """(N, M): |x|² + |y|² − 2 x·y."""
    squared = -2 * a @ b.T
    squared += np.square(a).sum(axis=1)[:, None]
    squared += np.square(b).sum(axis=1)
    return squared


def _blocks(rows: int, columns: int) -> Iterator[slice]:
    each = max(1, PAIRS // columns)
    return (slice(first, first + each) for first in range(0, rows, each))
