"""What the parts of a GPU read off tables of one another: no device needed."""

import pytest

from calibration.gpu.steps import interpolated, routed


def test_tokens_that_all_route_alike_count_as_one_token_of_many():
    assert routed({64: 2.0}, 8, 2) == pytest.approx(1 / 64)


def test_tokens_that_reach_every_expert_say_nothing_of_how_alike_they_are():
    assert routed({64: 8.0}, 8, 2) == 1.0


def test_tables_are_read_in_the_logarithm_and_grow_in_proportion_beyond_their_end():
    table = {1.0: 1.0, 100.0: 3.0}
    assert interpolated(table, 10) == pytest.approx(2.0)
    assert interpolated(table, 200) == pytest.approx(6.0)
