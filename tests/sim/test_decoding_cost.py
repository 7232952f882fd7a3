"""Recorded commits replayed through schedules and caches, and what they cost."""

import json

import pytest

from herald_pipeline import catalogue, hardware_io
from herald_pipeline.decoding import caches, schedulers
from herald_pipeline.errors import ConfigError
from herald_sim.decoding_cost import DecodingChoice, DecodingCost, run_decoding, simulate_decoding
from herald_sim.recordings import Recording, read_recordings, replay

MODEL = catalogue.get("llada-8b")
PROFILE = hardware_io.resolve("h100-sxm-80g_xeon-8481c")


def four_a_round(prompt=1000, response=256):
    return Recording(prompt, tuple(tuple(range(i, i + 4)) for i in range(0, response, 4)), scheduler="fixed")


def simulate(cache, scheduler="fixed", recordings=None, model=MODEL, **cache_params):
    return simulate_decoding(
        model, PROFILE, recordings or [four_a_round()], schedulers.get(scheduler), caches.get(cache, **cache_params)
    )


def test_rounds_and_positions_follow_the_rule_by_hand():
    # 256 tokens, four a round: 64 rounds; Dual refreshes at each of 8 blocks: 8 x 1256 + 56 x 32 positions.
    found = simulate("dual")
    assert (found["nfe"], found["refreshes"]) == (64, 8)
    assert found["forwarded_positions"] == 8 * 1256 + 56 * 32
    assert found["reused_positions"] == 56 * (1256 - 32)
    assert found["tokens"] == 256


def test_a_window_over_everything_costs_what_no_cache_costs():
    wide = simulate("dsb", prefix_window=10**6, suffix_window=10**6)
    assert wide["decode_s"] == simulate("none")["decode_s"]


def test_caches_that_compute_less_cost_less():
    none, prefix, dual = (simulate(cache)["decode_s"] for cache in ("none", "prefix", "dual"))
    assert dual <= prefix < none


def test_a_refresh_costs_what_a_round_without_a_cache_costs():
    none, dual = simulate("none"), simulate("dual")
    assert dual["full_forward_ms"] == pytest.approx(none["full_forward_ms"], rel=1e-2)
    assert dual["short_step_ms"] < dual["full_forward_ms"] / 2
    assert none["short_step_ms"] is None


def test_two_equal_requests_share_a_forwards_weights():
    # Weights are read once for both: less than twice the time of one, and more than once.
    one, two = simulate("dual"), simulate("dual", recordings=[four_a_round()] * 2)
    assert two["forwarded_positions"] == 2 * one["forwarded_positions"]
    assert one["decode_s"] < two["decode_s"] < 2 * one["decode_s"]


def test_dream_computes_the_position_before_the_block_too():
    # From the second round of a block on, its first position is committed: only the block itself is computed. A block
    # whose first position stays masked longer needs the one before it.
    late_first = Recording(8, ((1, 2, 3), (0,)))
    blocks, dual = schedulers.get("fixed", block=4), caches.get("dual")
    plain, shifted = (replay([late_first], blocks, dual, shifted_logits=shift) for shift in (False, True))
    assert int(shifted[1].window[0]) - int(plain[1].window[0]) == 1


def test_time_grows_with_positions_keys_and_head():
    cost = DecodingCost(MODEL, PROFILE)
    base = cost.forward_ns(512, 1000, 512 * 1512, 32)
    assert cost.forward_ns(2048, 1000, 2048 * 3048, 32) > base
    assert cost.forward_ns(512, 500_000, 512 * 500_512, 32) > base
    assert cost.forward_ns(512, 1000, 512 * 1512, 512) > base
    assert cost.forward_ns(0, 1000, 0, 0) == 0


def test_commits_outside_the_block_are_refused_with_the_round():
    skipping = Recording(10, ((40,), tuple(range(40)), tuple(range(41, 64))), scheduler="dsb-greedy")
    with pytest.raises(ConfigError, match=r"round 0 of recording 0 commits position 50, outside the block \[10, 42\)"):
        replay([skipping], schedulers.get("fixed"), caches.get("none"))


def test_adablock_without_recorded_ends_is_refused_with_what_to_do():
    with pytest.raises(ConfigError, match=r"recording 0 does not say where its blocks ended.*record again"):
        replay([four_a_round()], schedulers.get("adablock"), caches.get("none"))


def test_adablock_ends_its_blocks_where_they_were_recorded():
    # Blocks [0, 3), [3, 8): lengths 3, 3, 5, 5, 5 in the five rounds; Dual refreshes at both block starts.
    commits = ((0, 2), (1,), (3,), (4, 6), (5, 7))
    recording = Recording(10, commits, ends=(3, 3, 8, 8, 8))
    rounds = replay([recording], schedulers.get("adablock"), caches.get("dual"))
    assert [(int(r.s[0]), int(r.e[0])) for r in rounds] == [(10, 13), (10, 13), (13, 18), (13, 18), (13, 18)]
    assert [bool(r.refreshed[0]) for r in rounds] == [True, False, True, False, False]
    assert [int(r.active[0]) for r in rounds] == [3, 3, 5, 5, 5]


def test_a_recording_that_stopped_at_its_eos_ends_with_its_last_round():
    # Two rounds of four positions out of a response of 64; the other request runs on alone.
    stopped = Recording(10, ((0, 1), (2, 3)), length=64)
    whole = Recording(10, tuple((i,) for i in range(8)))
    rounds = replay([stopped, whole], schedulers.get("fixed"), caches.get("none"))
    assert [r.live.tolist() for r in rounds] == [[True, True]] * 2 + [[False, True]] * 6
    assert [int(r.active[0] + r.refresh[0]) for r in rounds] == [74, 74] + [0] * 6


def write(tmp_path, content):
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(content))
    return path


def test_recordings_are_read_from_a_bench_and_chosen_by_what_they_ran_under(tmp_path):
    rows = [
        {"prompt_tokens": 3, "commits": [[0, 1], [2]], "scheduler": "fixed", "cache": "none", "decoder": "confidence"},
        {"prompt_tokens": 4, "commits": [[1], [0]], "scheduler": "dsb-const", "cache": "dsb", "decoder": "top1"},
    ]
    path = write(tmp_path, {"rows": rows})
    assert [r.prompt_tokens for r in read_recordings(path)] == [3, 4]
    assert read_recordings(path, scheduler="dsb-const")[0].commits == ((1,), (0,))
    with pytest.raises(ConfigError, match=r"holds no recording under .*it holds confidence \+ fixed \+ none; top1"):
        read_recordings(path, scheduler="adablock")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, 'must hold a list of rows, or an object with "rows"'),
        ([{"commits": [[0]]}], 'row 0 must hold "prompt_tokens" and "commits"'),
        ([{"prompt_tokens": 1, "commits": [[0], [0]]}], "every position of the response from 0 on exactly once"),
        ([{"prompt_tokens": 1, "commits": []}], "exactly once"),
        ([{"prompt_tokens": -1, "commits": [[0]]}], "prompt_tokens must be >= 0"),
        ([{"prompt_tokens": 1, "commits": [0]}], "lists of positions, one list a round"),
        ([{"prompt_tokens": 1, "commits": [["0"]]}], "lists of positions, one list a round"),
        ([{"prompt_tokens": 1, "commits": [[0], [2]], "response_tokens": 2}], r"exactly once"),
        ([{"prompt_tokens": 1, "commits": [[0], [3]], "response_tokens": 3}], r"from 0 to 2 \(response_tokens - 1\)"),
        ([{"prompt_tokens": 1, "commits": [[1], [1]], "response_tokens": 3}], "none of them twice"),
        ([{"prompt_tokens": 1, "commits": [[0], [1]], "ends": [2]}], "1 ends for 2 rounds"),
        ([{"prompt_tokens": 1, "commits": [[0], [1]], "ends": [1, 1]}], "block of round 1 ends at 1"),
        ([{"prompt_tokens": 1, "commits": [[0], [1]], "ends": [1, 3]}], "at most at the response's end, 2"),
        ([{"prompt_tokens": 1, "commits": [[0], [1]], "ends": ["1", "2"]}], "ends one position a round"),
    ],
)
def test_a_file_that_is_no_recording_is_refused(tmp_path, content, message):
    with pytest.raises(ConfigError, match=message):
        read_recordings(write(tmp_path, content))


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"commits file .* cannot be read: no such file or directory$"):
        read_recordings(tmp_path / "none.json")


@pytest.fixture
def bench(tmp_path):
    commits = [list(range(i, i + 4)) for i in range(0, 64, 4)]
    row = {"decoder": "confidence", "scheduler": "fixed", "commits": commits}
    return write(tmp_path, [{**row, "prompt_tokens": n, "cache": c} for n in (100, 200) for c in ("none", "dual")])


def test_a_run_takes_recordings_of_its_own_cache_and_else_those_without_one(bench):
    def recorded(cache):
        return run_decoding(MODEL, PROFILE, DecodingChoice(cache=cache), bench)["recorded_cache"]

    assert [recorded("none"), recorded("dual"), recorded("prefix")] == ["none", "dual", "none"]


def test_a_run_adds_up_its_requests_and_context_replaces_their_prompts(bench):
    found = run_decoding(MODEL, PROFILE, DecodingChoice(), bench)
    assert (found["requests"], found["batch"], found["tokens"]) == (2, 1, 128)
    assert found["forwarded_positions"] == 16 * (164 + 264)
    at_4k = run_decoding(MODEL, PROFILE, DecodingChoice(), bench, context=4096)
    assert at_4k["forwarded_positions"] == 2 * 16 * (4096 + 64)


def test_requests_decoded_together_take_less_time_than_one_after_another(bench):
    alone, together = (run_decoding(MODEL, PROFILE, DecodingChoice(), bench, batch=n) for n in (1, 2))
    assert together["nfe"] == alone["nfe"]
    assert together["decode_s"] < alone["decode_s"]


def test_a_run_without_recordings_or_on_a_block_causal_model_is_refused(bench):
    with pytest.raises(ConfigError, match="need --commits: the JSON that herald-exec bench-decoding prints"):
        run_decoding(MODEL, PROFILE, DecodingChoice(), None)
    with pytest.raises(ConfigError, match=r"(?s)cache 'dual' needs a bidirectional model.*what goes together"):
        run_decoding(catalogue.get("llada2-mini"), PROFILE, DecodingChoice(cache="dual"), bench)
    with pytest.raises(ConfigError, match=r"holds no recording under .*dsb-greedy"):
        run_decoding(MODEL, PROFILE, DecodingChoice(scheduler="dsb-greedy"), bench)
