"""The comparison itself: it lets only what is allowed pass."""

import numpy as np

from herald_exec.kernels.comparison import index_problems

IMPORTANCE = np.array([0.5, 0.2, 0.2 * (1 + 5e-6), 0.1, 0.3])


def test_equal_sets_pass():
    assert index_problems(np.array([0, 2, 4]), np.array([0, 2, 4]), IMPORTANCE, 0.0) == []


def test_a_swap_within_the_tolerance_of_the_kth_passes():
    assert index_problems(np.array([0, 1, 4]), np.array([0, 2, 4]), IMPORTANCE, 1e-5) == []


def test_the_same_swap_fails_a_tighter_tolerance():
    assert index_problems(np.array([0, 1, 4]), np.array([0, 2, 4]), IMPORTANCE, 1e-6)


def test_a_clearly_less_important_position_fails():
    problems = index_problems(np.array([0, 3, 4]), np.array([0, 2, 4]), IMPORTANCE, 1e-5)
    assert problems == ["position 3 has importance 0.1, the k-th has 0.200001"]


def test_a_clearly_more_important_position_left_out_fails():
    assert index_problems(np.array([1, 2, 4]), np.array([0, 2, 4]), IMPORTANCE, 1e-5)


def test_order_duplicates_and_range_are_checked():
    for wrong in ([2, 0, 4], [0, 0, 4], [0, 2, 5], [-1, 2, 4]):
        assert index_problems(np.array(wrong), np.array([0, 2, 4]), IMPORTANCE, 1.0), wrong


def test_a_missing_index_fails():
    assert index_problems(np.array([0, 2]), np.array([0, 2, 4]), IMPORTANCE, 1.0) == ["2 indices instead of 3"]


def test_an_undecided_position_may_differ_with_one_that_makes_up_for_it():
    undecided = np.array([False, False, False, True, False])
    assert index_problems(np.array([0, 3, 4]), np.array([0, 2, 4]), IMPORTANCE, 1e-5, undecided) == []
    assert index_problems(np.array([0, 1, 3]), np.array([2, 3, 4]), IMPORTANCE, 1e-5, undecided)


def test_nan_importance_allows_no_difference():
    nan = np.full(5, np.nan)
    assert index_problems(np.array([0, 1, 2]), np.array([0, 1, 2]), nan, 1.0) == []
    assert index_problems(np.array([0, 1, 3]), np.array([0, 1, 2]), nan, 1.0)
