"""Statistics against counts made by hand."""

from dataclasses import fields

import numpy as np
import pytest

from herald_pipeline.decoding.policy import make_policy
from herald_pipeline.decoding.statistics import RoundRecord, first_eos, record_round, summarise, summarise_each


def run(array, policy, prompt, response, rounds):
    """Records of rounds given as (commits, confidences of all positions or None), one row."""
    masked = np.zeros((1, prompt + response), dtype=bool)
    masked[:, prompt:] = True
    state = policy.blocks.start(array([prompt]), array([response]))
    cache = policy.cached.start(state, array(masked))
    records = []
    for positions, confidence in rounds:
        accepted = np.zeros_like(masked)
        accepted[0, positions] = True
        plan = policy.cached.plan(cache, state, array(masked))
        scores = None if confidence is None else array([confidence])
        records.append(record_round(plan, state, array(masked), array(accepted), confidence=scores))
        state, cache = policy.advance(cache, plan, state, array(masked), array(accepted))
        masked &= ~accepted
    return records, state


def test_counters_equal_hand_counts_for_dsb_with_its_cache(array):
    # Prompt 10, response 8, S_init 4 (const), window 2: 18 positions.
    policy = make_policy(
        "confidence", "dsb-const", "dsb", scheduler_params={"s_init": 4}, cache_params={"prefix_window": 2}
    )
    rounds = [([10, 11], None), ([13], None), ([12, 14], None), ([15, 16], None), ([17], None)]
    records, _ = run(array, policy, 10, 8, rounds)
    # round  s   e   active  window  refresh  reused   committed since refresh
    # 0      10  14  4       0       14       0        2
    # 1      12  16  4       2       0        12       3   (s moved 2)
    # 2      12  16  4       2       0        12       5   -> refresh
    # 3      15  18  3       0       15       0        0   (the refresh's own two do not count)
    # 4      17  18  1       2       0        15
    summary = summarise(records)
    assert summary["nfe"] == summary["forwards"] == 5
    assert summary["tokens"] == 8
    assert summary["tokens_per_forward"] == pytest.approx(8 / 5)
    assert summary["mean_active_length"] == pytest.approx((4 + 4 + 4 + 3 + 1) / 5)
    assert summary["commits_per_round"] == [[2, 1, 2, 2, 1]]
    assert summary["active_positions"] == 16
    assert summary["window_positions"] == 6
    assert summary["refresh_positions"] == 29
    assert summary["forwarded_positions"] == 51
    assert summary["reused_positions"] == 39
    assert summary["refreshes"] == 2


def test_finished_rows_count_no_forward(array):
    policy = make_policy("top1", "fixed", "none", scheduler_params={"block": 2})
    masked = np.ones((2, 2), dtype=bool)
    masked[0, 1] = False
    state = policy.blocks.start(array([0, 0]), array([1, 2]))
    cache = policy.cached.start(state, array(masked))
    records = []
    for commits in ([[True, False], [True, False]], [[False, False], [False, True]]):
        plan = policy.cached.plan(cache, state, array(masked))
        records.append(record_round(plan, state, array(masked), array(commits)))
        state, cache = policy.advance(cache, plan, state, array(masked), array(commits))
        masked &= ~np.asarray(commits)
    summary = summarise(records)
    assert (summary["nfe"], summary["forwards"]) == (3, 2)
    assert summary["commits_per_round"] == [[1], [1, 1]]


def test_late_and_premature_rounds_by_hand(array):
    # Blocks of 2 in a response of 6, threshold 0.9. EOS at position 3: only [0, 3) is the answer.
    policy = make_policy("confidence", "fixed", "none", scheduler_params={"block": 2})
    rounds = [
        ([0], [0.5, 0.4, 0.95, 0.1, 0.1, 0.1]),  # premature (0), late at 2
        ([1], [0.0, 0.95, 0.1, 0.1, 0.95, 0.1]),  # late at 4: past the EOS
        ([2], [0.0, 0.0, 0.95, 0.2, 0.1, 0.1]),  # neither
        ([3], [0.0, 0.0, 0.0, 0.3, 0.1, 0.1]),  # premature at 3 = the EOS itself; leftmost mask 3: not before it
        ([4, 5], [0.0, 0.0, 0.0, 0.0, 0.95, 0.3]),  # premature (5)
    ]
    records, _ = run(array, policy, 0, 6, rounds)
    summary = summarise(records, eos_position=array([3]), prompt=array([0]))
    assert summary["late_ratio"] == pytest.approx(2 / 5)
    assert summary["premature_ratio"] == pytest.approx(3 / 5)
    # Before the EOS: rounds 0, 1, 2; late in round 0, premature in round 0.
    assert summary["late_ratio_before_eos"] == pytest.approx(1 / 3)
    assert summary["premature_ratio_before_eos"] == pytest.approx(1 / 3)
    assert summary["delivered_tokens"] == 4
    assert summary["delivered_tokens_per_forward"] == pytest.approx(4 / 5)


def test_rounds_before_the_eos_are_those_until_it_is_final_by_hand(array):
    # Prompt 2, response 6, one block of 6. EOS at 4. Commits: 4 and 7, then 3, 2 (now 2..4 are final), then 5, 6.
    policy = make_policy("confidence", "fixed", "none", scheduler_params={"block": 6})
    rounds = [([4, 7], None), ([3], None), ([2], None), ([5], None), ([6], None)]
    records, state = run(array, policy, 2, 6, rounds)
    summary = summarise(records, eos_position=array([4]), prompt=state.prompt)
    assert (summary["nfe"], summary["nfe_before_eos"]) == (5, 3)
    assert summary["delivered_tokens"] == 3
    assert summary["tokens_per_forward_before_eos"] == 1
    assert (summary["forwarded_positions"], summary["forwarded_positions_before_eos"]) == (5 * 8, 3 * 8)
    assert summary["mean_active_length_before_eos"] == 6


def test_without_an_eos_every_round_lies_before_it(array):
    policy = make_policy("confidence", "dsb-const", "dsb", scheduler_params={"s_init": 2})
    records, state = run(array, policy, 2, 4, [([2], None), ([3, 4], None), ([5], None)])
    summary = summarise(records, eos_position=state.end, prompt=state.prompt)
    for name in ("nfe", "tokens_per_forward", "mean_active_length", "forwarded_positions", "reused_positions"):
        assert summary[f"{name}_before_eos"] == summary[name]
    assert summarise(records)["nfe_before_eos"] is None


def test_ratios_are_absent_without_diagnosis(array):
    policy = make_policy("confidence", "fixed", "none", scheduler_params={"block": 2})
    records, _ = run(array, policy, 0, 2, [([0, 1], None)])
    summary = summarise(records)
    assert summary["late_ratio"] is None
    assert summary["premature_ratio_before_eos"] is None


def test_the_first_eos_counts_in_the_response_only(array):
    policy = make_policy("top1", "fixed", "none")
    state = policy.blocks.start(array([2, 2, 1]), array([3, 3, 2]))
    tokens = array([[9, 9, 1, 9, 8], [9, 1, 1, 1, 1], [1, 1, 1, 9, 9]])
    # Row 0: EOS of the prompt does not count. Row 1: none: its end. Row 2: its end is 3; what follows is padding.
    assert np.asarray(first_eos(tokens, state, (8, 9))).tolist() == [3, 5, 3]


def test_rows_summed_up_together_equal_each_row_alone(array):
    # Both rows commit two of four tokens first; the second then takes one round, the first two.
    policy = make_policy("confidence", "fixed", "dual", scheduler_params={"block": 4})
    first = [([3, 4], [0.95] * 7), ([5], [0.5] * 7), ([6], [0.95] * 7)]
    second = [([3, 5], [0.5] * 7), ([4, 6], [0.95] * 7), ([], [0.95] * 7)]
    alone = [run(array, policy, 3, 4, rounds)[0] for rounds in (first, second)]

    def joined(pair):
        values = {part.name: [getattr(record, part.name) for record in pair] for part in fields(RoundRecord)}
        return RoundRecord(**{name: np.concatenate([np.asarray(v) for v in both]) for name, both in values.items()})

    each = summarise_each(
        [joined(pair) for pair in zip(*alone, strict=True)], eos_position=np.array([5, 7]), prompt=np.array([3, 3])
    )
    rounds = (3, 2)
    expected = [
        summarise(records[:number], eos_position=np.array([eos]), prompt=np.array([3]))
        for records, number, eos in zip(alone, rounds, (5, 7), strict=True)
    ]
    assert each == expected
    assert [row["nfe"] for row in each] == list(rounds)
