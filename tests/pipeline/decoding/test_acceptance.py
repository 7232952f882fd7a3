"""Acceptance rules against hand counts, the engines' forms against each other, numpy against torch."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from herald_pipeline.decoding import acceptance
from herald_pipeline.errors import ConfigError


def accepted(rule, confidence, masked, **kwargs):
    out = np.asarray(rule(confidence, masked, **kwargs))
    return [np.flatnonzero(row).tolist() for row in out]


def test_top1_takes_the_most_confident_mask_and_not_a_better_committed_position(array):
    rule = acceptance.get("top1")
    assert accepted(rule, array([[0.9, 0.2, 0.7]]), array([[False, True, True]])) == [[2]]


def test_top1_takes_the_leftmost_of_equals(array):
    assert accepted(acceptance.get("top1"), array([[0.5, 0.5]]), array([[True, True]])) == [[0]]


def test_confidence_takes_all_that_reach_the_threshold_and_the_threshold_itself(array):
    rule = acceptance.get("confidence", threshold=0.5)
    assert accepted(rule, array([[0.5, 0.25, 0.75]]), array([[True, True, True]])) == [[0, 2]]


def test_sglang_form_leaves_the_threshold_itself_out(array):
    rule = acceptance.get("confidence-sglang", threshold=0.5)
    assert accepted(rule, array([[0.5, 0.25, 0.75]]), array([[True, True, True]])) == [[2]]


def test_confidence_falls_back_to_the_single_best_when_none_passes(array):
    rule = acceptance.get("confidence", threshold=0.9)
    assert accepted(rule, array([[0.1, 0.3, 0.2]]), array([[True, True, True]])) == [[1]]


def test_schedule_fallback_takes_the_most_confident_of_the_schedule(array):
    # B = 4, T = 2: two a step; only one passes 0.95, so the two most confident go.
    rule = acceptance.get("confidence-llada2")
    confidence, masked = array([[0.3, 0.99, 0.2, 0.4]]), array([[True] * 4])
    assert accepted(rule, confidence, masked, step=0, steps=2) == [[1, 3]]


def test_leftmost_fallback_takes_the_first_masks_and_not_the_most_confident(array):
    rule = acceptance.get("confidence-jetengine")
    confidence, masked = array([[0.1, 0.3, 0.99, 0.4]]), array([[False, True, True, True]])
    assert accepted(rule, confidence, masked, step=0, steps=2) == [[1, 2]]


def test_schedule_fallback_is_not_used_when_enough_pass(array):
    rule = acceptance.get("confidence-sdar")
    confidence, masked = array([[0.9, 0.95, 0.99, 0.4]]), array([[True] * 4])
    assert accepted(rule, confidence, masked, step=0, steps=2) == [[0, 1, 2]]


def test_dinfer_form_takes_near_ties_of_the_best_along(array):
    rule = acceptance.get("confidence-dinfer", margin=0.01)
    assert accepted(rule, array([[0.5, 0.495, 0.4]]), array([[True] * 3])) == [[0, 1]]


def test_factor_takes_the_largest_number_whose_bar_is_met(array):
    # Bars for n = 1, 2, 3 at factor 1: 1/2, 2/3, 3/4. Falling order 0.9, 0.7, 0.6: n = 2.
    rule = acceptance.get("factor-fast-dllm")
    assert accepted(rule, array([[0.6, 0.9, 0.7]]), array([[True] * 3])) == [[1, 2]]


def test_factor_looks_past_a_number_that_fails_to_a_larger_one_that_passes(array):
    # n = 1 fails (0.4 < 0.5) at factor 1; at factor 2 the bars are 0, 1/3, 1/2: 0.4, 0.35 pass, 0.3 does not.
    confidence, masked = array([[0.4, 0.35, 0.3]]), array([[True] * 3])
    assert accepted(acceptance.get("factor-fast-dllm"), confidence, masked) == [[0]]
    assert accepted(acceptance.get("factor-fast-dllm", factor=2.0), confidence, masked) == [[0, 1]]


@pytest.mark.parametrize(("block", "steps"), [(32, 20), (32, 32), (32, 5), (8, 3), (4, 1), (4, 7)])
def test_static_commits_the_fixed_t_counts_and_finishes_within_t_steps(block, steps):
    rule = acceptance.get("static")
    masked = np.ones((1, block), dtype=bool)
    confidence = np.random.default_rng(0).random((1, block))
    counts = []
    for step in range(steps):
        accept = rule(confidence, masked, step=step, steps=steps)
        counts.append(int(accept.sum()))
        masked = masked & ~accept
    expected = [block // steps + (step < block % steps) for step in range(steps)]
    assert counts == expected
    assert not masked.any()


def test_static_steps_may_differ_by_row(array):
    rule = acceptance.get("static")
    out = rule(array([[0.1, 0.2, 0.3]] * 2), array([[True] * 3] * 2), step=array([0, 1]), steps=2)
    assert np.asarray(out).sum(axis=1).tolist() == [2, 1]


def test_sequential_goes_from_the_left(array):
    rule = acceptance.get("sequential")
    masked = array([[False, True, True, True]])
    assert accepted(rule, array([[0.1, 0.2, 0.3, 0.4]]), masked, step=0, steps=2) == [[1, 2]]


def test_entropy_takes_the_lowest_while_the_running_sum_stays_within_gamma(array):
    rule = acceptance.get("entropy", gamma=0.5)
    entropy = array([[0.3, 0.1, 0.2, 0.05]])
    # Rising: 0.05, 0.15, 0.35, 0.65: three fit.
    assert accepted(rule, entropy, array([[True] * 4]), entropy=entropy) == [[1, 2, 3]]


def test_entropy_takes_one_when_even_the_lowest_is_above_gamma(array):
    entropy = array([[3.0, 2.0, 2.5]])
    assert accepted(acceptance.get("entropy"), entropy, array([[True] * 3]), entropy=entropy) == [[1]]


def test_entropy_without_entropies_is_refused():
    with pytest.raises(ConfigError, match="needs the entropy"):
        acceptance.get("entropy")(np.ones((1, 2)), np.ones((1, 2), dtype=bool))


def test_random_order_does_not_read_confidences_and_is_a_matter_of_the_seed():
    masked = np.ones((1, 32), dtype=bool)
    first, second = (acceptance.get("random", seed=seed) for seed in (1, 2))
    none = np.full((1, 32), np.nan)
    assert (first(none, masked, steps=8) == first(np.ones((1, 32)), masked, steps=8)).all()
    assert (first(none, masked, steps=8) != second(none, masked, steps=8)).any()


@pytest.mark.parametrize("name", acceptance.names())
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_every_rule_commits_only_masks_at_least_one_a_row_and_alike_in_both_libraries(name, data):
    torch = pytest.importorskip("torch")
    shape = data.draw(hnp.array_shapes(min_dims=2, max_dims=2, max_side=9))
    # Few distinct values: ties are the interesting case.
    confidence = data.draw(hnp.arrays(np.float64, shape, elements=st.sampled_from([0.1, 0.5, 0.9, 0.95, 1.0])))
    masked = data.draw(hnp.arrays(np.bool_, shape))
    step, steps = data.draw(st.integers(0, 7)), data.draw(st.integers(1, 8))
    rule = acceptance.get(name)
    ours = rule(confidence, masked, step=step, steps=steps, entropy=1 - confidence)
    theirs = rule(
        torch.asarray(confidence),
        torch.asarray(masked),
        step=step,
        steps=steps,
        entropy=torch.asarray(1 - confidence),
    )
    assert not (ours & ~masked).any()
    assert (ours.any(axis=1) == masked.any(axis=1)).all()
    assert (ours == theirs.numpy()).all()


@pytest.mark.parametrize("name", acceptance.names())
def test_a_row_decides_alone(name):
    rng = np.random.default_rng(3)
    confidence, masked = rng.random((6, 16)), rng.random((6, 16)) < 0.6
    rule = acceptance.get(name)
    whole = rule(confidence, masked, step=1, steps=5, entropy=1 - confidence)
    for row in range(6):
        one = slice(row, row + 1)
        alone = rule(confidence[one], masked[one], step=1, steps=5, entropy=1 - confidence[one])
        assert (alone == whole[one]).all()


def test_an_unknown_name_or_parameter_is_answered_with_the_closest():
    with pytest.raises(ConfigError, match="unknown decoder 'confidense'; did you mean 'confidence'"):
        acceptance.get("confidense")
    with pytest.raises(ConfigError, match="no parameter 'treshold'; did you mean 'threshold'"):
        acceptance.get("confidence", treshold=0.9)


@pytest.mark.parametrize("threshold", [0.0, -0.5, 1.5, float("nan"), float("inf"), "high"])
def test_a_threshold_that_is_no_probability_is_refused(threshold):
    with pytest.raises(ConfigError, match="threshold must be"):
        acceptance.get("confidence", threshold=threshold)
