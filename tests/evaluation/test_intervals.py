"""Resampled means and rank correlation on values whose answer is known."""

import numpy as np
import pytest

from blockskip.evaluation.intervals import interval, rank_correlation, resampled_means


def test_means_of_equal_values_have_no_spread_and_others_keep_theirs() -> None:
    means = resampled_means(np.full((3, 4, 2), 0.5))
    assert means.shape == (2000, 2)
    assert (means == 0.5).all()
    generator = np.random.default_rng(1)
    values = generator.normal(3.0, 1.0, (8, 50, 1))
    low, high = interval(resampled_means(values))
    assert low[0] < values.mean() < high[0]
    assert high[0] - low[0] == pytest.approx(4 / np.sqrt(400), rel=0.5)  # 2 * 1.96 standard errors of 400 values


def test_pictures_of_one_subject_are_no_independent_evidence() -> None:
    """Subjects that differ make a wide interval, however many pictures there are of each."""
    values = np.repeat(np.asarray([0.0, 1.0])[:, None, None], 500, axis=1)
    low, high = interval(resampled_means(values))
    assert low[0] == 0 and high[0] == 1


def test_the_same_every_time_and_another_with_another_seed() -> None:
    values = np.random.default_rng(2).random((3, 5, 4))
    assert np.array_equal(resampled_means(values), resampled_means(values))
    assert not np.array_equal(resampled_means(values), resampled_means(values, seed=1))


def test_bad_values() -> None:
    for values in (np.zeros(3), np.zeros((0, 2)), np.zeros((2, 0, 3))):
        with pytest.raises(ValueError, match="shape"):
            resampled_means(values)
    with pytest.raises(ValueError, match="not a number"):
        resampled_means(np.asarray([[np.nan, 1.0]]))


def test_rank_correlation() -> None:
    rising = np.asarray([1.0, 2.0, 3.0, 4.0])
    assert rank_correlation(rising, rising**3) == pytest.approx(1)
    assert rank_correlation(rising, -rising) == pytest.approx(-1)
    # ranks 1 2.5 2.5 4 against 1 3 2 4: cov 4.5 / sqrt(4.5 * 5)
    assert rank_correlation(np.asarray([0.0, 5.0, 5.0, 7.0]), np.asarray([1.0, 3.0, 2.0, 4.0])) == pytest.approx(
        4.5 / np.sqrt(4.5 * 5)
    )
    assert np.isnan(rank_correlation(rising, np.ones(4)))
    with pytest.raises(ValueError, match="one length"):
        rank_correlation(rising, rising[:3])
