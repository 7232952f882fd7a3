import pytest

from calibration.points import FIT, HELD_OUT, Point, check_held_out, default_points, from_row, names
from herald_pipeline.errors import ConfigError


def test_the_default_comparison_holds_out_at_least_eight_points_and_one_whole_method():
    points = default_points()
    check_held_out(points)
    held = [point for point in points if point.set == HELD_OUT]
    assert len(held) >= 8
    assert {point.method for point in held} - {point.method for point in points if point.set == FIT} == {"herald"}


def test_a_held_out_point_near_a_fitted_one_is_refused():
    points = [Point("dense", 1024, 1, set=FIT), Point("dense", 1536, 1), Point("herald", 1024, 1)]
    with pytest.raises(ConfigError) as refused:
        check_held_out(points)
    assert "dense 1536 x 1 is held out, but within a factor of 2 of the fitted dense 1024 x 1" in str(refused.value)


@pytest.mark.parametrize("point", [Point("dense", 2048, 1), Point("dense", 512, 1), Point("dense", 1024, 2)])
def test_a_factor_of_two_in_context_or_batch_is_enough(point):
    check_held_out([Point("dense", 1024, 1, set=FIT), point, Point("herald", 1024, 1)])


def test_fitting_every_method_is_refused():
    with pytest.raises(ConfigError, match="every method is fitted"):
        check_held_out([Point("dense", 1024, 1, set=FIT), Point("dense", 4096, 1)])


def test_without_a_training_set_nothing_is_too_near():
    check_held_out([Point("dense", 1024, 1), Point("dense", 1025, 1)])


def test_a_line_that_leaves_things_open_has_the_defaults():
    assert from_row({"method": "dense", "context": "64", "batch": "2", "steps": ""}) == Point("dense", 64, 2)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"batch": 0}, "batch must be >= 1"),
        ({"context": -1}, "context must be >= 0"),
        ({"set": "train"}, "set must be"),
    ],
)
def test_a_point_that_cannot_be_is_refused(change, problem):
    with pytest.raises(ConfigError, match=problem):
        Point(**{"method": "dense", "context": 64, "batch": 1} | change)


def test_a_method_with_all_queries_takes_them_from_the_block_length(shape):
    pipeline = Point("mage-cpu", 256, 1, block_length=16).pipeline(shape)
    assert pipeline.settings.queries == 16


def test_points_of_one_name_are_told_apart_by_what_differs_and_others_keep_theirs():
    named = names([Point("dense", 64, 2, steps=8), Point("dense", 64, 2, steps=20), Point("herald", 64, 2, steps=20)])
    assert named == ["dense 64 x 2, T 8", "dense 64 x 2, T 20", "herald 64 x 2"]


def test_the_methods_own_budget_is_told_apart_from_a_given_one():
    named = names([Point("herald", 64, 2), Point("herald", 64, 2, budget=0.1)])
    assert named == ["herald 64 x 2, budget of the method", "herald 64 x 2, budget 0.1"]
