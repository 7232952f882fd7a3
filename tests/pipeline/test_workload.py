"""Workloads at the border: padded lengths, requests from files, plans of denoising steps."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from herald_pipeline import steps
from herald_pipeline.errors import ConfigError
from herald_pipeline.scheduling.lengths import blocks_needed, check_length, padded_tokens
from herald_pipeline.scheduling.program import BatchPolicy
from herald_pipeline.workload import RequestSpec, Workload, read_requests

LENGTHS = st.integers(0, 10_000)
NEW = st.integers(1, 5_000)
BLOCKS = st.integers(1, 64)


def highest_positions(prompt, new, block):
    """Written out: the last position of each block that holds an answer token, for both ways to lay out blocks."""
    for start in (0, prompt):
        last = prompt + new - 1
        while (last - start + 1) % block:
            last += 1
        yield last


@given(LENGTHS, NEW, BLOCKS, st.integers(1, 20_000))
def test_what_is_admitted_writes_below_the_limit(prompt, new, block, limit):
    if check_length(prompt, new, block, limit) is None:
        assert max(highest_positions(prompt, new, block)) < limit


@given(LENGTHS, NEW, BLOCKS)
def test_the_smallest_limit_that_admits_is_the_padded_length(prompt, new, block):
    padded = padded_tokens(prompt, new, block)
    assert check_length(prompt, new, block, padded) is None
    assert check_length(prompt, new, block, padded - 1) is not None
    assert padded == max(highest_positions(prompt, new, block)) + 1


def test_a_limit_that_forgets_rounding_is_not_ours():
    problem = check_length(8170, 20, 32, 8192)
    assert problem == (
        "request: prompt 8170 + new 20 = 8190 tokens take 8202 positions in blocks of 32, the limit is 8192; "
        "shorten the prompt"
    )


def test_the_remedy_of_a_length_problem_fits():
    problem = check_length(8000, 500, 32, 8192)
    assert "ask for at most 192 new tokens" in problem
    assert check_length(8000, 192, 32, 8192) is None


@pytest.mark.parametrize(
    ("prompt", "new", "context", "blocks"),
    [
        (1, 1, 0, 1),
        (31, 1, 0, 1),
        (31, 2, 0, 2),
        (32, 32, 32, 1),
        (33, 31, 32, 1),
        (33, 32, 32, 2),
        (70, 100, 64, 4),
        (0, 1, 0, 1),
    ],
)
def test_a_prompt_tail_shares_the_first_block(prompt, new, context, blocks):
    request = RequestSpec(0, prompt, new).blocked(32)
    assert (request.context, request.blocks) == (context, blocks)
    assert blocks_needed(prompt, new, 32) == blocks


@given(LENGTHS, NEW, BLOCKS)
def test_blocks_cover_the_answer_and_no_more(prompt, new, block):
    request = RequestSpec(0, prompt, new).blocked(block)
    end = request.context + request.blocks * block
    assert prompt + new <= end < prompt + new + block
    assert end <= padded_tokens(prompt, new, block)


def test_a_uniform_workload_deals_out_its_contexts():
    load = Workload.uniform([100, 200], 3, gen_tokens=10)
    assert [request.prompt_tokens for request in load.requests] == [100, 200, 100]
    assert load.largest_request_tokens == 232
    assert load.steps.steps(0, 0) == 20
    assert load.policy is BatchPolicy.LOCKSTEP


def test_short_blocks_take_as_many_steps_as_they_have_tokens_by_default():
    assert Workload.uniform(64, 1, block_length=8).steps.steps(0, 0) == 8


@pytest.mark.parametrize("bad", [0, -1, float("nan"), float("inf"), 1.5, "8", True])
@pytest.mark.parametrize("field", ["batch", "gen_tokens", "block_length"])
def test_a_number_that_cannot_be_is_refused_with_its_name(field, bad):
    arguments = {"context": 64, "batch": 2} | {field: bad}
    with pytest.raises(ConfigError, match=field):
        Workload.uniform(**arguments)


def test_every_problem_is_reported_at_once():
    with pytest.raises(ConfigError) as error:
        Workload.uniform(-1, 0, gen_tokens=float("inf"))
    assert len(error.value.problems) == 3


def test_an_unknown_batch_policy_gets_the_closest():
    with pytest.raises(ConfigError, match="did you mean 'lockstep'"):
        Workload.uniform(64, 1, policy="lockstp")


def test_an_empty_workload_or_repeated_ids_are_refused():
    with pytest.raises(ConfigError, match="the workload is empty"):
        Workload((), 1)
    with pytest.raises(ConfigError, match="ids must be unique"):
        Workload((RequestSpec(1, 5, 5), RequestSpec(1, 6, 6)), 1)


def write(tmp_path, text, name="requests.csv"):
    path = tmp_path / name
    path.write_text(text)
    return path


def test_requests_come_from_a_csv_in_any_column_order(tmp_path):
    path = write(tmp_path, "new_tokens, prompt_tokens, arrival_s\n20,100,0\n33,50,1.5\n")
    assert read_requests(path) == (RequestSpec(0, 100, 20, 0), RequestSpec(1, 50, 33, 1_500_000_000))
    assert Workload.from_csv(path, 2).largest_request_tokens == 132


def test_a_misspelled_or_missing_column_is_named(tmp_path):
    with pytest.raises(ConfigError) as error:
        read_requests(write(tmp_path, "promt_tokens,new_tokens\n1,2\n"))
    assert "unknown column 'promt_tokens'; did you mean 'prompt_tokens'?" in error.value.problems[0]
    assert "column 'prompt_tokens' is missing" in error.value.problems[1]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("1,x,0", "line 2: new_tokens must be a number, got 'x'"),
        ("1,0,0", "line 2: new_tokens must be >= 1, got 0"),
        ("1.5,2,0", "line 2: prompt_tokens must be a whole number"),
        ("1,2,nan", "line 2: arrival_s must be finite"),
        ("1,2,-3", "line 2: arrival_s must be >= 0"),
        ("1,2", "line 2: arrival_s must be a number, got None"),
    ],
)
def test_a_bad_cell_is_named_with_its_line(tmp_path, row, message):
    with pytest.raises(ConfigError, match=message):
        read_requests(write(tmp_path, f"prompt_tokens,new_tokens,arrival_s\n{row}\n"))


def test_a_file_without_requests_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no requests"):
        read_requests(write(tmp_path, "prompt_tokens,new_tokens\n"))
    with pytest.raises(ConfigError, match="cannot read requests"):
        read_requests(tmp_path / "none.csv")


@given(st.integers(1, 64), st.data())
def test_even_commits_fill_the_block_with_no_idle_step(block, data):
    count = data.draw(st.integers(1, block))
    commits = steps.even_commits(count, block)
    assert len(commits) == count
    assert sum(commits) == block
    assert max(commits) - min(commits) <= 1
    assert list(commits) == sorted(commits, reverse=True)


def test_twenty_steps_of_a_block_of_32_commit_two_twelve_times():
    assert steps.FixedSteps(20, 32).commits(0, 0) == (2,) * 12 + (1,) * 8


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("7", [7, 7, 7]),
        ("3,5", [3, 5, 3]),
        ("uniform:4,4", [4, 4, 4]),
        ("normal:6,0", [6, 6, 6]),
        ("geometric:1", [1, 1, 1]),
    ],
)
def test_a_plan_is_read_from_an_option(text, expected):
    plan = steps.parse(text, 32)
    assert [plan.steps(0, block) for block in range(3)] == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0", "steps must be >= 1"),
        ("33", "steps must be <= block length 32"),
        ("2.5", "whole number"),
        ("nan", "finite"),
        ("many", "'many' is not a number"),
        ("unifrom:1,2", "did you mean 'uniform'"),
        ("uniform:5", "takes 2 number"),
        ("uniform:9,3", "high must be 9..32"),
        ("normal:6,-1", "standard deviation must be >= 0"),
        ("5,40", "request 0, block 1 must be <= block length 32"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        steps.parse(text, 32)


@given(st.sampled_from(["uniform:2,30", "normal:20,9", "geometric:6"]), st.integers(0, 99), st.integers(0, 99))
def test_drawn_steps_depend_on_seed_request_and_block_only(text, request_id, block):
    first, second = steps.parse(text, 32, seed=5), steps.parse(text, 32, seed=5)
    # The second plan is asked for something else in between.
    second.steps(request_id + 1, block)
    assert first.steps(request_id, block) == second.steps(request_id, block)
    assert 1 <= first.steps(request_id, block) <= 32


def test_drawn_steps_have_the_mean_asked_for():
    uniform = steps.parse("uniform:8,24", 32)
    drawn = [uniform.steps(request, block) for request in range(100) for block in range(20)]
    # 2,000 draws with a standard deviation of 4.9: five standard errors are 0.55.
    assert sum(drawn) / len(drawn) == pytest.approx(16, abs=0.55)
    assert (min(drawn), max(drawn)) == (8, 24)
    other = steps.parse("uniform:8,24", 32, seed=1)
    assert drawn != [other.steps(request, block) for request in range(100) for block in range(20)]


@pytest.mark.parametrize("text", ["3,5\n7\n", "# T by block\n3,5\n\n7\n", "[[3, 5], [7]]"])
def test_steps_come_from_a_file_by_request_and_block(tmp_path, text):
    plan = steps.read_steps(write(tmp_path, text, "steps.txt"), 32)
    assert [plan.steps(0, 0), plan.steps(0, 1), plan.steps(1, 0), plan.steps(1, 9), plan.steps(2, 0)] == [3, 5, 7, 7, 3]


def test_recorded_commits_give_the_steps_they_took(tmp_path):
    path = write(tmp_path, json.dumps([[[10, 20, 2], [32]], [[1] * 32]]), "commits.json")
    plan = steps.read_commits(path, 32)
    assert [plan.steps(0, 0), plan.steps(0, 1), plan.steps(1, 5)] == [3, 1, 32]
    assert plan.commits(0, 0) == (10, 20, 2)


def test_a_period_of_a_window_that_slides_may_have_been_committed_ahead(tmp_path):
    path = write(tmp_path, json.dumps([[[1] * 40, [0]], [[40], [24]]]), "commits.json")
    plan = steps.read_commits(path, 32, window=64)
    assert [plan.steps(0, 0), plan.steps(0, 1), plan.steps(1, 0), plan.steps(1, 1)] == [40, 1, 1, 1]
    for refused in (32, 0):
        with pytest.raises(ConfigError, match="block length 32"):
            steps.read_commits(path, 32, window=refused)
    with pytest.raises(ConfigError, match=r"must sum to 0\.\.64 tokens, got 65"):
        steps.read_commits(write(tmp_path, "[[[65]]]", "commits.json"), 32, window=64)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[[[33]]]", "must sum to 1..32 tokens, got 33"),
        ("[[[-1, 5]]]", "must be >= 0"),
        ("[[[]]]", "must be >= 1"),
        ("[]", "recording is empty"),
        ("[3]", "lists of requests of blocks"),
        ("{}", "must hold a JSON list"),
        ("[", "not valid JSON"),
        ('[[["two"]]]', "must be a number"),
    ],
)
def test_a_recording_that_cannot_be_is_refused(tmp_path, content, message):
    with pytest.raises(ConfigError, match=message):
        steps.read_commits(write(tmp_path, content, "commits.json"), 32)
