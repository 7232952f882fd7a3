"""The words for a stage's errors follow from numbers alone."""

from calibration.stage_causes import Evidence, cause

BAR = 0.25


def test_points_within_the_bar_need_no_cause():
    assert cause(Evidence((0.1, -0.2), (1e-3, 2e-3)), BAR) == "every point within 25%"


def test_runs_that_differ_more_than_both_sides_do_are_the_cause():
    assert cause(Evidence((0.3, 0.2), (1e-3, 2e-3), spread=0.4), BAR).startswith("runs of one point differ by 40%")


def test_the_same_factor_everywhere_is_a_rate():
    found = cause(Evidence((0.5, 0.52, 0.48), (1e-3, 4e-3, 16e-3), spread=0.02), BAR)
    assert "factor of about 1.50 everywhere: a rate" in found


def test_the_same_time_everywhere_is_a_fixed_cost():
    """0.4 ms too much on launches of 0.5 to 4 ms."""
    found = cause(Evidence((0.8, 0.4, 0.1), (0.5e-3, 1e-3, 4e-3), spread=0.02), BAR)
    assert "+400 us a launch everywhere: a fixed cost" in found


def test_neither_is_said_as_well():
    found = cause(Evidence((0.8, -0.5, 0.4), (0.5e-3, 1e-3, 4e-3), spread=0.02), BAR)
    assert "no one rate or fixed cost" in found


def test_launches_that_wait_are_named_beside_the_cause():
    assert "mean 2.1 times the median" in cause(Evidence((0.1,), (1e-3,), tail=2.1), BAR)
