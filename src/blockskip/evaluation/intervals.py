"""How sure a mean is: resampling with replacement (bootstrap), and how far two rankings agree."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
RESAMPLES = 2000


def resampled_means(values: Values, seed: int = 0, resamples: int = RESAMPLES) -> Values:
    """Means (resamples, ...) of values (subjects, pictures, ...): subjects are drawn anew, then pictures inside each.

    Pictures of one subject are alike, so drawing all pictures from one pot would make the intervals too narrow.

    Raises:
        ValueError: there is no value, or one is not a number.
    """
    if values.ndim < 2 or 0 in values.shape:
        raise ValueError(f"values have the shape (subjects, pictures, ...), not {values.shape}")
    if not np.isfinite(values).all():
        raise ValueError("a value is not a number")
    generator = np.random.default_rng(seed)
    subjects, pictures = values.shape[:2]
    chosen = generator.integers(subjects, size=(resamples, subjects))
    inside = generator.integers(pictures, size=(resamples, subjects, pictures))
    return np.stack([values[who[:, None], which].mean((0, 1)) for who, which in zip(chosen, inside, strict=True)])


def interval(means: Values, level: float = 0.95) -> tuple[Values, Values]:
    """(lower, upper) ends of the percentile interval over the first dimension of ``resampled_means``."""
    edge = (1 - level) / 2
    low, high = np.quantile(means, [edge, 1 - edge], axis=0)
    return low, high


def rank_correlation(first: Values, second: Values) -> float:
    """Spearman's rho of two lists of the same length, in [-1, 1]; equal values share the mean of their ranks.

    nan where one list is constant.

    Raises:
        ValueError: the lists differ in length, or have fewer than two values.
    """
    if first.shape != second.shape or first.ndim != 1 or len(first) < 2:
        raise ValueError("rank correlation needs two lists of one length, at least 2")
    a, b = _ranks(first), _ranks(second)
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return float("nan")
    return float(np.corrcoef(a, b)[0, 1])


def _ranks(values: Values) -> Values:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    middle: Values = ends - (counts - 1) / 2
    return middle[place]
