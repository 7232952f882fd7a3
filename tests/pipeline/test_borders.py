"""What a newcomer types by mistake: numbers too large for anything, files of the wrong shape, places without a file."""

import json

import pytest

from herald_pipeline import methods, steps, trace
from herald_pipeline.errors import ConfigError, check_number, did_you_mean
from herald_pipeline.settings import Settings
from herald_pipeline.workload import MAX_BATCH, Workload, read_requests


def test_a_number_too_long_for_a_float_is_refused_without_printing_it():
    problem = check_number(10**400, "context", integer=True)
    assert problem == "context must be below 2^64, got a number of 1329 bits"


def test_a_name_in_other_case_is_found():
    assert did_you_mean("BF16", ["bf16", "fp16"]) == "; did you mean 'bf16'?"


@pytest.mark.parametrize("budget", [1, 3, 1e308])
def test_a_budget_above_everything_is_everything_and_says_so(budget):
    settings = Settings(budget=budget)
    assert settings.budget == 1.0
    assert settings.selected_tokens(249) == 249


def test_a_ring_of_a_million_places_is_refused_before_the_validator_goes_round_it():
    with pytest.raises(ConfigError, match="staging_buffers must be <= 16, got 1000000"):
        methods.get("herald").defaults.replace(staging_buffers=1_000_000)


def test_a_batch_that_no_machine_holds_is_refused_before_its_requests_are_listed():
    with pytest.raises(ConfigError, match=f"batch must be <= {MAX_BATCH}, got 1000000000"):
        Workload.uniform(4096, 10**9)


@pytest.mark.parametrize("text", ["[[20], 10]", "[10, [20]]"])
def test_a_steps_file_that_mixes_lists_and_numbers_is_refused(tmp_path, text):
    path = tmp_path / "steps.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="it mixes both"):
        steps.read_steps(path)


def test_a_steps_file_nested_without_end_is_refused(tmp_path):
    path = tmp_path / "steps.json"
    path.write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="is not valid JSON"):
        steps.read_steps(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prompt_tokens,new_tokens\n100,64,9\n", "line 2 has 3 cells, the header 2"),
        ("prompt_tokens,prompt_tokens,new_tokens\n1,2,3\n", "column 'prompt_tokens' stands twice"),
        ("prompt_tokens,new_tokens\n1e300,64\n", "line 2: prompt_tokens must be <= 1099511627776"),
        ("arrival_s,prompt_tokens,new_tokens\n1e30,1,1\n", "line 2: arrival_s must be <= 1000000000"),
    ],
)
def test_requests_that_would_be_misread_are_refused(tmp_path, text, message):
    path = tmp_path / "requests.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_requests(path)


def test_a_trace_goes_to_no_folder_and_into_no_missing_one(tmp_path):
    with pytest.raises(ConfigError, match="it is a folder"):
        trace.check_writable(tmp_path, "trace")
    with pytest.raises(ConfigError, match="there is no folder"):
        trace.write_chrome(trace.Trace("simulated"), tmp_path / "missing" / "trace.json")


def test_a_trace_that_can_be_written_is(tmp_path):
    path = tmp_path / "trace.json"
    trace.write_chrome(trace.Trace("simulated"), path)
    assert json.loads(path.read_text())["otherData"]["source"] == "simulated"
