"""Cache rules: which positions a round computes, counted by hand, and when everything is computed anew."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from herald_pipeline.decoding import caches
from herald_pipeline.decoding.policy import combination_problem, make_policy
from herald_pipeline.errors import ConfigError

PROMPT, RESPONSE = 30, 64


def follow(array, policy, commits, prompt=PROMPT, response=RESPONSE):
    """Per round: the plan's positions and whether it refreshes, when ``commits`` (lists of positions) happen."""
    masked = np.zeros((1, prompt + response), dtype=bool)
    masked[:, prompt:] = True
    state = policy.blocks.start(array([prompt]), array([response]))
    cache = policy.cached.start(state, array(masked))
    plans = []
    for positions in commits:
        accepted = np.zeros_like(masked)
        accepted[0, positions] = True
        plan = policy.cached.plan(cache, state, array(masked), upcoming=array(accepted))
        forwarded = np.flatnonzero(np.asarray(plan.forwarded)[0]).tolist()
        plans.append((forwarded, bool(plan.refresh[0])))
        state, cache = policy.advance(cache, plan, state, array(masked), array(accepted))
        masked &= ~accepted
    return plans


def span(*bounds):
    return [position for left, right in bounds for position in range(left, right)]


EVERYTHING = span((0, PROMPT + RESPONSE))


def test_dsb_cache_refreshes_after_8_10_9_and_5_commits(array):
    # S_init 32: 8, 18, 27, 32 committed; the fifth round computes everything, and the sixth does not.
    policy = make_policy("confidence", "dsb-greedy", "dsb")
    p = PROMPT
    rounds = [span((p, p + 8)), span((p + 8, p + 18)), span((p + 18, p + 27)), span((p + 27, p + 32))]
    plans = follow(array, policy, [*rounds, [p + 32], [p + 33]])
    assert [refresh for _, refresh in plans] == [True, False, False, False, True, False]
    assert plans[4][0] == EVERYTHING


def test_dsb_cache_refreshes_by_tokens_and_not_by_rounds(array):
    policy = make_policy("confidence", "dsb-const", "dsb", scheduler_params={"s_init": 4})
    plans = follow(array, policy, [[PROMPT + i] for i in range(9)])
    # One token a round: everything is computed in round 0 and after four commits. The commit of the refreshing round 4
    # does not count, so that the next one follows rounds 5 to 8.
    assert [refresh for _, refresh in plans] == [True, False, False, False, True, False, False, False, False]


def test_released_dsb_counts_the_commits_of_the_refreshing_round(array):
    policy = make_policy("confidence", "dsb-const", "dsb-released", scheduler_params={"s_init": 4})
    plans = follow(array, policy, [[PROMPT + i] for i in range(9)])
    assert [refresh for _, refresh in plans] == [True, False, False, False] * 2 + [True]


def test_dsb_window_is_at_least_p_min_and_at_least_what_slid_out(array):
    policy = make_policy(
        "confidence", "dsb-const", "dsb", scheduler_params={"s_init": 16}, cache_params={"prefix_window": 4}
    )
    p = PROMPT
    plans = follow(array, policy, [[p], span((p + 1, p + 8)), [p + 8]])
    # Round 1: s moved by 1, so 4 left of s = p + 1. Round 2: s moved by 7, so 7 left of s = p + 8.
    assert plans[1] == (span((p - 3, p + 17)), False)
    assert plans[2] == (span((p + 1, p + 24)), False)


def test_dsb_window_stops_at_position_zero(array):
    policy = make_policy("confidence", "dsb-const", "dsb", scheduler_params={"s_init": 8})
    plans = follow(array, policy, [[3], [4]], prompt=3, response=20)
    assert plans[1] == (span((0, 12)), False)


def test_dsb_suffix_window_reaches_right_of_e_and_stops_at_the_end(array):
    policy = make_policy(
        "confidence",
        "dsb-const",
        "dsb",
        scheduler_params={"s_init": 4},
        cache_params={"prefix_window": 0, "suffix_window": 3},
    )
    plans = follow(array, policy, [[2], [3], span((4, 6))], prompt=2, response=8)
    # s 3, e 7: one position slid out, and [7, 10) is cut at 10. s 4, e 8: [8, 11) is cut at 10.
    assert [forwarded for forwarded, _ in plans[1:]] == [span((2, 10)), span((3, 10))]


def test_released_dream_refresh_commits_the_leftmost_position_alone(array):
    policy = make_policy("confidence", "dsb-greedy", "dsb-released-dream", scheduler_params={"s_init": 4})
    masked = array(np.asarray([[False, False, True, True, True, True]]))
    state = policy.blocks.start(array([2]), array([4]))
    cache = policy.cached.start(state, masked)
    plan = policy.cached.plan(cache, state, masked)
    # Position 2 is the least confident, and everything passes the threshold.
    _, accepted = policy.accept(state, plan, masked, array([[0.0, 0.0, 0.1, 0.99, 0.99, 0.99]]))
    assert np.flatnonzero(np.asarray(accepted)[0]).tolist() == [2]


def test_dual_computes_the_block_and_everything_at_block_starts(array):
    policy = make_policy("confidence", "fixed", "dual", scheduler_params={"block": 4})
    p = PROMPT
    plans = follow(array, policy, [[p], span((p + 1, p + 3)), [p + 3], [p + 4], [p + 5]])
    block = (span((p, p + 4)), False)
    assert plans == [(EVERYTHING, True), block, block, (EVERYTHING, True), (span((p + 4, p + 8)), False)]


def test_prefix_computes_the_block_and_all_right_of_it(array):
    policy = make_policy("confidence", "fixed", "prefix", scheduler_params={"block": 4})
    plans = follow(array, policy, [[PROMPT], [PROMPT + 1]])
    assert plans == [(EVERYTHING, True), (span((PROMPT, PROMPT + RESPONSE)), False)]


def test_dual_under_a_sliding_block_refreshes_every_s_init_commits(array):
    policy = make_policy("confidence", "dsb-const", "dual", scheduler_params={"s_init": 4})
    p = PROMPT
    plans = follow(array, policy, [[p], span((p + 1, p + 4)), [p + 4]])
    assert plans == [(EVERYTHING, True), (span((p + 1, p + 5)), False), (EVERYTHING, True)]


def test_dkv_keeps_a_token_one_round_after_it_was_committed(array):
    policy = make_policy("confidence", "fixed", "dkv", scheduler_params={"block": 8})
    p, end = PROMPT, PROMPT + RESPONSE
    plans = follow(array, policy, [[p, p + 1], [p + 2], [p + 3]])
    # Round 1 still computes p, p + 1 (as tokens for the first time); round 2 keeps them and computes p + 2.
    assert plans == [(EVERYTHING, True), (span((p, end)), False), (span((p + 2, end)), False)]


def test_dkv_refreshes_every_cache_steps_rounds_and_at_block_starts(array):
    policy = make_policy("confidence", "fixed", "dkv", scheduler_params={"block": 4}, cache_params={"cache_steps": 3})
    p = PROMPT
    plans = follow(array, policy, [[p], [p + 1], [p + 2], [p + 3], [p + 4]])
    assert [refresh for _, refresh in plans] == [True, False, False, True, True]


def test_dkv_greedy_computes_last_and_next_commits_and_near_masks(array):
    policy = make_policy(
        "random", "fixed", "dkv-greedy", scheduler_params={"block": 32}, cache_params={"cache_steps": 9}
    )
    p = PROMPT
    plans = follow(array, policy, [[p], [p + 10], [p + 11]])
    # Round 1: p (last), p + 10 (next) and two masks on each side. Round 2: p + 10, p + 11, masks 9, 12, 13.
    assert plans[1][0] == [p, *range(p + 8, p + 13)]
    assert plans[2][0] == [p + 9, p + 10, p + 11, p + 12, p + 13]


def test_dkv_prefill_computes_the_response_and_never_the_prompt_again(array):
    policy = make_policy("confidence", "fixed", "dkv-prefill", scheduler_params={"block": 1})
    plans = follow(array, policy, [[PROMPT + i] for i in range(4)])
    assert plans[0] == (EVERYTHING, True)
    assert plans[1:] == [(span((PROMPT, PROMPT + RESPONSE)), False)] * 3


def test_shifted_logits_compute_the_position_before_the_block_too(array):
    policy = make_policy("confidence", "fixed", "dual", scheduler_params={"block": 4})
    masked = np.zeros((1, 12), dtype=bool)
    masked[:, 4:] = True
    state = policy.blocks.start(array([4]), array([8]))
    cache = policy.cached.start(state, array(masked))
    first = policy.cached.plan(cache, state, array(masked), predecessor=True)
    accepted = array(np.eye(1, 12, 4, dtype=bool))
    state, cache = policy.advance(cache, first, state, array(masked), accepted)
    plan = policy.cached.plan(cache, state, array(masked) & ~accepted, predecessor=True)
    # Masks 5 6 7 of block [4, 8): their logits come from 4 5 6, all in the block. Without position 4 committed: 3.
    assert np.flatnonzero(np.asarray(plan.forwarded)[0]).tolist() == [4, 5, 6, 7]
    plan = policy.cached.plan(cache, state, array(masked), predecessor=True)
    assert np.flatnonzero(np.asarray(plan.forwarded)[0]).tolist() == [3, 4, 5, 6, 7]


def test_a_finished_row_computes_and_reuses_nothing(array):
    policy = make_policy("confidence", "fixed", "none", scheduler_params={"block": 4})
    masked = array(np.asarray([[True, True, False, False], [True] * 4]))
    state = policy.blocks.start(array([0, 0]), array([2, 4]))
    cache = policy.cached.start(state, masked)
    plan = policy.cached.plan(cache, state, masked)
    accepted = array(np.asarray([[True, True, False, False], [True, False, False, False]]))
    state, cache = policy.advance(cache, plan, state, masked, accepted)
    plan = policy.cached.plan(cache, state, masked & ~accepted)
    assert np.asarray(plan.forwarded).sum(axis=1).tolist() == [0, 4]
    assert np.asarray(plan.reused).sum(axis=1).tolist() == [0, 0]


COMBINATIONS = [
    (decoder, scheduler, cache)
    for decoder in ("top1", "confidence", "static", "entropy", "random")
    for scheduler in ("fixed", "adablock", "dsb-const", "dsb-greedy")
    for cache in caches.names()
    if combination_problem(decoder, scheduler, cache, bidirectional=True) is None
]


@pytest.mark.parametrize(("decoder", "scheduler", "cache"), COMBINATIONS)
@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 99))
def test_every_combination_ends_and_accounts_for_every_position(play, decoder, scheduler, cache, seed):
    size = {"block": 5} if scheduler in ("fixed", "adablock") else {"s_init": 5}
    policy = make_policy(decoder, scheduler, cache, steps=3, scheduler_params=size)
    prompt, response = np.asarray([4, 0, 7]), np.asarray([22, 13, 1])
    for r in play(policy, prompt, response, seed=seed):
        parts = [np.asarray(part) for part in r.plan.split(r.opened.active(r.masked))]
        parts.append(np.asarray(r.plan.reused))
        valid = np.arange(r.masked.shape[1]) < (prompt + response)[:, None]
        # Active, window, refresh and reused: each valid position of a live row is exactly one of them.
        assert (sum(part.astype(int) for part in parts) == (valid & ~r.done[:, None])).all()
        assert (r.next_U > r.U)[~r.done].all()
        # What is committed was computed in this round.
        assert not (r.accepted & ~np.asarray(r.plan.forwarded)).any()


def test_both_libraries_plan_the_same(play):
    for name in caches.names():
        decoder = "random" if name == "dkv-greedy" else "confidence"
        policy = make_policy(decoder, "dsb-greedy", name, scheduler_params={"s_init": 5})
        args = ([4, 0, 9], [20, 33, 1])
        ours, theirs = play(policy, *args), play(policy, *args, library="torch")
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            assert (np.asarray(a.plan.forwarded) == np.asarray(b.plan.forwarded)).all()


def test_a_window_over_everything_computes_everything(play):
    wide = {"prefix_window": 10**6, "suffix_window": 10**6}
    policy = make_policy("confidence", "dsb-greedy", "dsb", scheduler_params={"s_init": 5}, cache_params=wide)
    for r in play(policy, [4, 0], [20, 33]):
        assert not np.asarray(r.plan.reused).any()


def test_choices_that_do_not_go_together_are_refused_with_the_table():
    with pytest.raises(ConfigError, match=r"(?s)use decoder 'random'.*what goes together"):
        make_policy("confidence", "fixed", "dkv-greedy")
    with pytest.raises(ConfigError, match=r"(?s)needs a bidirectional model.*what goes together"):
        make_policy("confidence", "dsb-greedy", "none", bidirectional=False)
    with pytest.raises(ConfigError, match=r"cache 'dual' needs a bidirectional model"):
        make_policy("confidence", "fixed", "dual", bidirectional=False)
    with pytest.raises(ConfigError, match=r"scheduler 'adablock' reads the forward"):
        make_policy("random", "adablock", "dkv-greedy")


def test_a_negative_window_is_refused():
    with pytest.raises(ConfigError, match="prefix_window must be >= 0, got -1"):
        caches.get("dsb", prefix_window=-1)
