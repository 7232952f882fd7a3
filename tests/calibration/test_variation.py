"""Spreads from few runs, against a generator whose spread is known."""

import math

import numpy as np
import pytest

from calibration.variation import deviation, geometric_mean, pooled, uncertainty


@pytest.mark.parametrize("runs", [2, 3, 5, 10, 40])
def test_on_average_the_deviation_of_few_runs_is_that_of_many(runs):
    generator = np.random.default_rng(0)
    found = [deviation(np.exp(generator.normal(0.0, 0.1, runs))) for _ in range(4000)]
    assert np.mean(found) == pytest.approx(0.1, rel=0.03)


def test_one_outlier_of_three_is_not_hidden():
    assert deviation([100.0, 100.0, 50.0]) == pytest.approx(math.log(2) / 1.693)


def test_a_single_run_has_no_deviation():
    assert deviation([3.0]) is None
    assert pooled([None, None]) is None


def test_pooling_takes_what_is_known():
    assert pooled([0.3, None, 0.4]) == pytest.approx(math.sqrt(0.125))


def test_an_interval_covers_what_repetition_brings():
    """Of 2,000 procedures of three runs and two calibrations each, about 95% hold the truth."""
    generator = np.random.default_rng(1)
    inside = 0
    half = uncertainty(0.1, 3, 0.05, 2)
    for _ in range(2000):
        runs, predictions = generator.normal(0.0, 0.1, 3), generator.normal(0.0, 0.05, 2)
        inside += abs(predictions.mean() - runs.mean()) <= half
    assert 0.93 < inside / 2000 < 0.97


def test_without_repeated_runs_nothing_is_known():
    assert uncertainty(None, 1, 0.05, 2) is None


def test_factors_average_by_their_logarithms():
    assert geometric_mean([0.5, 2.0]) == pytest.approx(1.0)
