"""Block schedulers by hand from DSB's Algorithm 1, and the invariants of every scheduler."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from herald_pipeline.decoding import schedulers
from herald_pipeline.decoding.policy import make_policy
from herald_pipeline.errors import ConfigError


def walk(array, scheduler, prompt, response, commits):
    """[s, e) and U after each set of committed positions (one row)."""
    masked = np.zeros((1, prompt + response), dtype=bool)
    masked[:, prompt:] = True
    state = scheduler.start(array([prompt]), array([response]))
    seen = [(int(state.s[0]), int(state.e[0]), int(state.U[0]))]
    for positions in commits:
        accepted = np.zeros_like(masked)
        accepted[0, positions] = True
        state = scheduler.advance(state, array(masked), array(accepted))
        masked &= ~accepted
        seen.append((int(state.s[0]), int(state.e[0]), int(state.U[0])))
    return seen


def test_dsb_by_hand_on_twelve_positions(array):
    # Zero-based, no prompt, S_init 4, S_max 6 (the article counts from one and drops an offset: its right edges are
    # one short). Start [0, 4).
    # Commit 0 1 3:  U 3, leftmost mask 2,                    e = min(0+4+3, 2+6) = 7   -> [2, 7)
    # Commit 2 4 5:  U 6, leftmost mask 6 (opened, not done), e = min(0+4+6, 6+6) = 10  -> [6, 10)
    # Commit 6 8:    U 8, leftmost mask 7,                    e = min(0+4+8, 7+6) = 12  -> [7, 12)
    scheduler = schedulers.get("dsb-greedy", s_init=4, s_max=6)
    assert walk(array, scheduler, 0, 12, [[0, 1, 3], [2, 4, 5], [6, 8]]) == [
        (0, 4, 0),
        (2, 7, 3),
        (6, 10, 6),
        (7, 12, 8),
    ]


def test_dsb_by_hand_behind_a_prompt_of_twenty(array):
    # Absolute positions, prompt 20, response 12, S_init 4, S_max 6. Start [20, 24).
    # Commit 20 21 23: U 3, s 22, e = min(20+4+3, 22+6) = 27.
    # Commit 24 25 26: U 6, s 22, e = min(20+4+6, 22+6) = 28: the span binds.
    # Commit 22:       U 7, s 27 (23 to 26 are done), e = min(20+4+7, 27+6) = 31; the article prints 30, with U still 6.
    scheduler = schedulers.get("dsb-greedy", s_init=4, s_max=6)
    assert walk(array, scheduler, 20, 12, [[20, 21, 23], [24, 25, 26], [22]]) == [
        (20, 24, 0),
        (22, 27, 3),
        (22, 28, 6),
        (27, 31, 7),
    ]


def test_dsb_moves_s_to_the_old_e_when_the_block_is_clean(array):
    # [0, 4) done at once: s = 4 (old e), e = min(0+4+4, 4+4) = 8.
    assert walk(array, schedulers.get("dsb-const", s_init=4), 0, 12, [[0, 1, 2, 3]])[-1] == (4, 8, 4)


def test_dsb_cuts_e_at_the_end_and_does_not_move_s_back_to_keep_its_length(array):
    # Prompt 2, response 6, S_init 4: [2, 6) -> commit 2 3 4 5 -> s = 6, e = min(2+4+4, 6+4, 8) = 8: two left of four.
    assert walk(array, schedulers.get("dsb-const", s_init=4), 2, 6, [[2, 3, 4, 5]])[-1] == (6, 8, 4)


def test_dsb_starts_no_longer_than_the_response(array):
    assert walk(array, schedulers.get("dsb-greedy", s_init=32), 5, 3, []) == [(5, 8, 0)]


def test_dsb_without_a_confident_candidate_commits_the_best_one_and_moves_on():
    # No confidence reaches 1.0: each round commits one token by fallback, so 12 rounds.
    policy = make_policy("confidence", "dsb-greedy", decoder_params={"threshold": 1.0}, scheduler_params={"s_init": 4})
    masked = np.ones((1, 12), dtype=bool)
    state = policy.blocks.start(np.asarray([0]), np.asarray([12]))
    cache = policy.cached.start(state, masked)
    confidence = np.linspace(0.2, 0.8, 12)[None, :]
    plan = policy.cached.plan(cache, state, masked)
    _, accepted = policy.accept(state, plan, masked, confidence)
    assert np.flatnonzero(accepted[0]).tolist() == [3]


def test_fixed_blocks_stay_until_clean_and_the_last_is_shorter(array):
    scheduler = schedulers.get("fixed", block=4)
    assert walk(array, scheduler, 1, 6, [[1, 2], [4, 3], [5]]) == [(1, 5, 0), (1, 5, 2), (5, 7, 4), (5, 7, 5)]


def test_adablock_ends_at_the_most_probable_delimiter_in_its_window(array):
    # Response 16, window int(0.25 * 16) = 4: positions 0..3. Delimiters at 1 (0.5), 3 (0.6) and 5 (0.9, outside).
    scheduler = schedulers.get("adablock", block=8)
    state = scheduler.start(array([0]), array([16]))
    confidence = np.full((1, 16), 0.1)
    delimiter = np.zeros((1, 16), dtype=bool)
    confidence[0, [1, 3, 5]] = 0.5, 0.6, 0.9
    delimiter[0, [1, 3, 5]] = True
    opened = scheduler.open(state, array(confidence), array(delimiter))
    assert (int(opened.s[0]), int(opened.e[0])) == (0, 4)


def test_adablock_without_a_sure_delimiter_takes_the_default_length(array):
    scheduler = schedulers.get("adablock", block=8, delimiter_threshold=0.7)
    state = scheduler.start(array([0, 0]), array([16, 6]))
    opened = scheduler.open(state, array(np.full((2, 16), 0.6)), array(np.ones((2, 16), dtype=bool)))
    assert np.asarray(opened.e).tolist() == [8, 6]


def test_adablock_fixes_a_block_once(array):
    scheduler = schedulers.get("adablock", block=4)
    state = scheduler.start(array([0]), array([16]))
    none = array(np.zeros((1, 16), dtype=bool))
    opened = scheduler.open(state, array(np.zeros((1, 16))), none)
    again = scheduler.open(opened, array(np.ones((1, 16))), array(np.eye(1, 16, 2, dtype=bool)))
    assert int(again.e[0]) == int(opened.e[0]) == 4


def test_a_finished_row_does_not_move(array):
    scheduler = schedulers.get("dsb-greedy", s_init=4)
    state = scheduler.start(array([0, 0]), array([4, 12]))
    masked = np.zeros((2, 12), dtype=bool)
    masked[0, :4] = masked[1] = True
    first = array(masked & (np.arange(12) < 4))
    after = scheduler.advance(state, array(masked), first)
    again = scheduler.advance(after, array(masked & ~np.asarray(first)), array(np.zeros((2, 12), dtype=bool)))
    assert np.asarray(after.done).tolist() == [True, False]
    assert [int(getattr(again, name)[0]) for name in ("s", "e", "U", "step")] == [
        int(getattr(after, name)[0]) for name in ("s", "e", "U", "step")
    ]


def algorithm_1(prompt, response, s_init, s_max, choose):
    """DSB's Algorithm 1 with sets, one request: the reference for the array form."""
    end = prompt + response
    masks = set(range(prompt, end))
    s, e, decoded, path = prompt, min(prompt + s_init, end), 0, []
    while decoded < response:
        block = sorted(masks & set(range(s, e)))
        committed = choose(block)
        path.append((s, e, decoded, tuple(committed)))
        masks -= set(committed)
        decoded += len(committed)
        left = [position for position in block if position in masks]
        s = min(left) if left else e
        e = min(prompt + s_init + decoded, s + (s_max or response), end)
    return path


@settings(max_examples=60, deadline=None)
@given(
    prompt=st.integers(0, 9),
    response=st.integers(1, 40),
    s_init=st.integers(1, 12),
    extra=st.one_of(st.none(), st.integers(0, 20)),
    seed=st.integers(0, 99),
)
def test_dsb_follows_algorithm_1_written_with_sets(play, prompt, response, s_init, extra, seed):
    s_max = None if extra is None else s_init + extra
    policy = make_policy(
        "confidence",
        "dsb-greedy",
        decoder_params={"threshold": 0.6},
        scheduler_params={"s_init": s_init, "s_max": s_max},
    )
    rounds = play(policy, [prompt], [response], seed=seed)
    scores = iter([r.confidence[0] for r in rounds])

    def choose(block):
        score = next(scores)
        passed = [p for p in block if score[p] >= 0.6]
        return passed or [max(block, key=lambda p: score[p])]

    path = [(int(r.s[0]), int(r.e[0]), int(r.U[0]), tuple(np.flatnonzero(r.accepted[0]))) for r in rounds]
    assert path == algorithm_1(prompt, response, s_init, s_max, choose)


SCHEDULERS = {
    "fixed": {"block": 5},
    "adablock": {"block": 5},
    "dsb-const": {"s_init": 5},
    "dsb-greedy": {"s_init": 5, "s_max": 9},
}


@pytest.mark.parametrize("name", SCHEDULERS)
@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 8), st.integers(1, 30)), min_size=1, max_size=4),
    decoder=st.sampled_from(["top1", "confidence", "static", "entropy", "random"]),
    seed=st.integers(0, 99),
)
def test_invariants_of_every_scheduler(play, name, rows, decoder, seed):
    policy = make_policy(decoder, name, steps=3, scheduler_params=SCHEDULERS[name])
    prompt, response = (np.asarray(column) for column in zip(*rows, strict=True))
    longest = {"fixed": 5, "adablock": 30, "dsb-const": 5, "dsb-greedy": 9}[name]
    for r in play(policy, prompt, response, seed=seed):
        live = ~r.done
        place = np.arange(r.masked.shape[1])
        assert (r.next_s >= r.s).all()
        assert (r.next_U > r.U)[live].all()
        assert (r.e <= prompt + response).all()
        assert (r.e - r.s <= longest).all()
        assert not (r.masked & (place < r.s[:, None])).any()
        assert not (r.accepted & ~((place >= r.s[:, None]) & (place < r.e[:, None]))).any()
        if name.startswith("dsb"):
            at_s = r.masked[np.arange(len(prompt)), np.minimum(r.s, r.masked.shape[1] - 1)]
            assert at_s[live].all()


def edges(rounds):
    return [(r.s.tolist(), r.e.tolist(), r.accepted.tolist()) for r in rounds]


def test_s_max_of_the_response_length_is_the_greedy_form(play):
    bounded = make_policy("confidence", "dsb-greedy", scheduler_params={"s_init": 4, "s_max": 40})
    greedy = make_policy("confidence", "dsb-greedy", scheduler_params={"s_init": 4})
    assert edges(play(bounded, [3, 0], [40, 31])) == edges(play(greedy, [3, 0], [40, 31]))


def test_s_init_and_s_max_of_the_response_length_are_one_block(play):
    dsb = make_policy("confidence", "dsb-const", scheduler_params={"s_init": 24})
    one_block = make_policy("confidence", "fixed", scheduler_params={"block": 24})
    commits = [[r.accepted.tolist() for r in play(p, [7], [24])] for p in (dsb, one_block)]
    assert commits[0] == commits[1]


def test_the_constant_form_is_s_max_equal_to_s_init(play):
    const = make_policy("confidence", "dsb-const", scheduler_params={"s_init": 6})
    given_s_max = make_policy("confidence", "dsb-greedy", scheduler_params={"s_init": 6, "s_max": 6})
    assert edges(play(const, [2], [40])) == edges(play(given_s_max, [2], [40]))


@pytest.mark.parametrize("name", SCHEDULERS)
def test_both_libraries_walk_the_same_path(play, name):
    policy = make_policy("confidence", name, scheduler_params=SCHEDULERS[name])
    args = ([4, 0, 9], [20, 33, 1])
    assert edges(play(policy, *args)) == edges(play(policy, *args, library="torch"))


def test_an_s_max_below_s_init_is_refused():
    with pytest.raises(ConfigError, match=r"s_max must be >= s_init.*got 16 and 32"):
        schedulers.get("dsb-greedy", s_max=16)


@pytest.mark.parametrize("block", [0, -1, 2.5, float("nan"), float("inf")])
def test_a_block_length_that_is_no_count_is_refused(block):
    with pytest.raises(ConfigError, match="block must be"):
        schedulers.get("fixed", block=block)
