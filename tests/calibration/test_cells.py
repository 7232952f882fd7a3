"""Runs of the GPU benchmark as samples: what is kept, what is left to others, what is refused."""

import json
import re

import pytest

from calibration.cells import read_cells
from herald_pipeline.errors import ConfigError


def cell(folder, name, **changes):
    result = {
        "model": "tiny", "method": "herald", "context": 64, "batch": 2, "steps": 4, "blocks": 3, "block_length": 32,
        "kv_dtype": "bf16", "options": {}, "throughput_tok_s": 50.0, "block_time_s": 1.28, "stall_s": 0.0,
        "stages": {"denoise": {"count": 8, "busy_s": 2.0}, "select": {"count": 4, "busy_s": 2.0}},
    } | changes  # fmt: skip
    document = {"cell": name, "result": result}
    (folder / f"{name.replace(':', '-')}.json").write_text(json.dumps(document), encoding="utf-8")


def test_a_run_becomes_a_sample_with_mean_stage_times_and_shares(tmp_path):
    cell(tmp_path, "run:herald:64:2")
    (sample,) = read_cells(tmp_path, "tiny", lambda _: None)
    assert sample.figures == {"throughput_tok_s": 50.0, "block_time_s": 1.28}
    assert sample.stages == {"denoise": 0.25, "select": 0.5}
    assert sample.shares == {"denoise": 0.5, "select": 0.5}
    assert (sample.point.method, sample.point.context, sample.point.steps) == ("herald", 64, 4)


def test_what_a_run_changes_of_the_machine_is_a_condition_of_its_point(tmp_path):
    cell(tmp_path, "run:herald:64:2")
    cell(tmp_path, "run:herald:64:2:link=14", options={"link": 14.0})
    plain, paced = sorted(read_cells(tmp_path, "tiny", lambda _: None), key=lambda s: s.point.name)
    assert plain.point.conditions == ()
    assert paced.point.conditions == (("link", 14.0),)
    assert plain.point.key != paced.point.key


def test_the_first_runs_whose_configuration_stood_in_name_and_document_are_read(tmp_path):
    result = {"model": "tiny", "method": "herald", "batch": 2, "throughput_tok_s": 50.0}
    document = {"cell": "run:herald:2:exact_layers_on=gpu:key_only", "context": 64, "steps": 4, "blocks": 3}
    text = json.dumps({**document, "result": result})
    (tmp_path / "old.json").write_text(text, encoding="utf-8")
    (sample,) = read_cells(tmp_path, "tiny", lambda _: None)
    assert (sample.point.context, sample.point.steps) == (64, 4)
    assert sample.point.conditions == (("exact", "gpu"), ("keys", "only"))


def test_another_budget_is_another_point(tmp_path):
    cell(tmp_path, "run:herald:64:2:budget=0.1", options={"budget": 0.1})
    (sample,) = read_cells(tmp_path, "tiny", lambda _: None)
    assert sample.point.budget == 0.1


def test_a_failed_cell_is_named_with_its_error_and_a_folder_without_runs_is_refused(tmp_path):
    (tmp_path / "x.json").write_text(json.dumps({"cell": "run:dense:1:1", "error": "out of memory"}), encoding="utf-8")
    (tmp_path / "rates.json").write_text(json.dumps({"cell": "rates", "result": {}}), encoding="utf-8")
    said = []
    with pytest.raises(ConfigError, match="holds no run that ended well"):
        read_cells(tmp_path, "tiny", said.append)
    assert said == ["run:dense:1:1: left out, it failed: out of memory"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"throughput_tok_s": float("nan")}, "throughput_tok_s must be finite"),
        ({"block_time_s": -1.0}, "block_time_s must be >= 0"),
        ({"stages": {"select": {"count": -4, "busy_s": 2.0}}}, "stages.select.count must be >= 0"),
        ({"stage_ms_median": {"select": float("nan")}}, "stages.select.median must be"),
        ({"stages": {"select": {"count": 4}}}, "no result of python -m benchmarks.gpu: it lacks 'busy_s'"),
        ({"context": "far"}, "no result of python -m benchmarks.gpu: invalid literal"),
        ({"options": ["link"]}, "no result of python -m benchmarks.gpu"),
        ({"batch": 0}, "batch must be >= 1"),
    ],
)
def test_a_run_with_a_figure_that_cannot_be_is_refused(tmp_path, changes, said):
    cell(tmp_path, "run:herald:64:2", **changes)
    with pytest.raises(ConfigError, match=re.escape(said)):
        read_cells(tmp_path, "tiny", lambda _: None)


@pytest.mark.parametrize("lost", ["method", "model"])
def test_a_run_without_its_method_or_model_is_refused_with_its_file(tmp_path, lost):
    cell(tmp_path, "run:herald:64:2")
    (path,) = tmp_path.glob("*.json")
    document = json.loads(path.read_text(encoding="utf-8"))
    del document["result"][lost]
    path.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(ConfigError, match=f"{path.name} is no result .*: it lacks '{lost}'"):
        read_cells(tmp_path, "tiny", lambda _: None)


def test_a_file_cut_in_half_is_named_with_what_to_do(tmp_path):
    cell(tmp_path, "run:herald:64:2")
    (path,) = tmp_path.glob("*.json")
    path.write_text(path.read_text(encoding="utf-8")[:100], encoding="utf-8")
    with pytest.raises(ConfigError, match=f"{path.name} is no JSON .*take it away"):
        read_cells(tmp_path, "tiny", lambda _: None)


def test_a_failed_cell_without_a_message_is_left_out(tmp_path):
    cell(tmp_path, "run:herald:64:2")
    (tmp_path / "x.json").write_text(json.dumps({"cell": "run:dense:1:1", "error": None}), encoding="utf-8")
    assert len(read_cells(tmp_path, "tiny", lambda _: None)) == 1


def test_the_read_rate_around_a_run_is_the_mean_of_before_and_after(tmp_path):
    cell(tmp_path, "run:herald:64:2", host_rates={"pool_read_gb_s": [150.0, 130.0], "amx_tflop_s": [20.0, 21.0]})
    cell(tmp_path, "run:dense:64:2", method="dense")
    found = {sample.point.method: sample.dram_gb_s for sample in read_cells(tmp_path, "tiny", lambda _: None)}
    assert found == {"herald": 140.0, "dense": None}


def test_arithmetic_around_a_run_and_how_unsteady_both_rates_were_are_read(tmp_path):
    cell(tmp_path, "run:herald:64:2", host_rates={"pool_read_gb_s": [156.0, 130.0], "amx_tflop_s": [20.0, 24.0]})
    cell(tmp_path, "run:mage-cpu:64:2", method="mage-cpu", host_rates={"pool_read_gb_s": [99.0], "fma_tflop_s": [2.0]})
    one, other = read_cells(tmp_path, "tiny", lambda _: None)
    assert (one.unsteady, one.peak_tflop_s, one.unsteady_arithmetic) == (pytest.approx(0.2), 22.0, pytest.approx(0.2))
    # What could be read once alone says nothing of how it moved.
    assert (other.unsteady, other.peak_tflop_s, other.unsteady_arithmetic) == (None, 2.0, None)


def test_what_many_queries_reached_around_a_run_says_how_unsteady_arithmetic_was(tmp_path):
    rates = {"amx_tflop_s": [20.0, 40.0], "many_queries_gb_s": [44.0, 40.0]}
    cell(tmp_path, "run:mage-cpu:64:2", method="mage-cpu", host_rates=rates)
    (found,) = read_cells(tmp_path, "tiny", lambda _: None)
    assert (found.peak_tflop_s, found.many_queries_gb_s) == (30.0, 42.0)
    assert found.unsteady_arithmetic == pytest.approx(0.1)


@pytest.mark.parametrize("rates", [[0.0, 20.0], ["fast"], [float("nan"), 20.0]])
def test_a_rate_of_arithmetic_that_no_machine_has_is_refused_with_its_file(tmp_path, rates):
    cell(tmp_path, "run:herald:64:2", host_rates={"amx_tflop_s": rates})
    with pytest.raises(ConfigError, match=r"run-herald-64-2\.json: rate of arithmetic beside the run must be"):
        read_cells(tmp_path, "tiny", lambda _: None)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"link": "fast"}, "condition link must be a number, got 'fast'"),
        ({"link": -3}, "condition link must be > 0, got -3"),
        ({"threads": 1.5}, r"condition threads must be a whole number, got 1\.5"),
        ({"policy": "lockstop"}, "condition policy must be one of lockstep, .*got 'lockstop'"),
        ({"treads": 2}, "condition 'treads' is not known; did you mean 'threads'"),
    ],
)
def test_an_option_that_cannot_be_is_refused_with_its_file(tmp_path, options, said):
    cell(tmp_path, "run:herald:64:2", options=options)
    with pytest.raises(ConfigError, match=rf"run-herald-64-2\.json: {said}"):
        read_cells(tmp_path, "tiny", lambda _: None)


@pytest.mark.parametrize("rates", [[0.0, 130.0], [-1.0, 1.0], ["fast", 1.0], [float("nan"), 1.0]])
def test_a_read_rate_that_no_memory_has_is_refused_with_its_file(tmp_path, rates):
    cell(tmp_path, "run:herald:64:2", host_rates={"pool_read_gb_s": rates})
    with pytest.raises(ConfigError, match=r"run-herald-64-2\.json: read rate beside the run must be"):
        read_cells(tmp_path, "tiny", lambda _: None)


@pytest.mark.parametrize("rates", [[140.0], {"pool_read_gb_s": 140.0}])
def test_rates_in_another_form_are_refused_as_no_result(tmp_path, rates):
    cell(tmp_path, "run:herald:64:2", host_rates=rates)
    with pytest.raises(ConfigError, match=r"is no result of python -m benchmarks\.gpu"):
        read_cells(tmp_path, "tiny", lambda _: None)


def test_the_read_rate_of_other_memory_than_the_pool_s_is_no_reference(tmp_path):
    cell(tmp_path, "run:herald:64:2", host_rates={"dram_read_gb_s": [150.0, 130.0]})
    (sample,) = read_cells(tmp_path, "tiny", lambda _: None)
    assert sample.dram_gb_s is None


def test_a_stage_s_time_is_the_median_of_its_launches_where_the_cell_states_it(tmp_path):
    """As of runs that reconcile makes itself; the mean says beside it how far a few launches wait."""
    stages = {"denoise": {"count": 8, "busy_s": 2.4}, "select": {"count": 4, "busy_s": 2.0}}
    cell(tmp_path, "run:herald:64:2", stages=stages, stage_ms_median={"denoise": 200.0, "swap": 1.0})
    (sample,) = read_cells(tmp_path, "tiny", lambda _: None)
    assert sample.stages == {"denoise": 0.2, "select": 0.5}
    assert sample.tails == {"denoise": pytest.approx(1.5)}
