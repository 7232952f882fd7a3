"""Fixed costs of stages: those with which a simulated run has the times of a real one."""

import pytest

from calibration import profile_file
from calibration.bench import Bench, Part, Value
from calibration.overheads import STAGES, down_per_request, fixed_costs, solved, with_costs, without_overheads
from calibration.points import Point
from calibration.runs import Sample
from calibration.timing import Plan, Timing
from herald_pipeline import catalogue
from herald_pipeline.model import KVDtype

POINT = Point("herald-no-draft", 64, 1)


def timings(**seconds):
    return {name: Timing(name, (value,) * 5, 1) for name, value in seconds.items()}


def sample(**seconds):
    return Sample(POINT, {}, seconds)


MEASURED = {"project": 0.002, "finish": 0.004, "select": 0.0005, "gather": 0.0002, "upload": 0.0003}


def test_what_the_rates_predict_is_taken_off_before_it_is_called_fixed():
    """One request: 0.5 ms of which 0.2 are the rate; four: 0.9 of which 0.8 are. Fixed: the mean of 0.3 and 0.1."""
    rates = {1: 0.0002, 4: 0.0008}

    def predicted(costs):
        return {rows: sample(**{**costs, "select": rate + costs["select"]}) for rows, rate in rates.items()}

    medians = {1: timings(**MEASURED), 4: timings(**{**MEASURED, "select": 0.0009})}
    costs = solved(medians, predicted)
    assert costs == pytest.approx({**MEASURED, "select": 0.0002}, abs=3e-6)


def test_a_cost_that_also_delays_a_neighbour_is_not_counted_twice():
    """Gather and upload share a core half of the time: costs of 0.1 and 0.2 ms show as 0.2 and 0.25."""

    def predicted(costs):
        together = costs["gather"] + 0.5 * costs["upload"]
        beside = costs["upload"] + 0.5 * costs["gather"]
        return {1: sample(**{**costs, "gather": together, "upload": beside})}

    medians = {1: timings(**{**MEASURED, "gather": 0.0002, "upload": 0.00025})}
    costs = solved(medians, predicted)
    assert (costs["gather"], costs["upload"]) == (pytest.approx(0.0001, abs=3e-6), pytest.approx(0.0002, abs=3e-6))


def test_a_stage_faster_than_its_rates_has_no_fixed_cost_and_none_below_zero():
    costs = solved({1: timings(**MEASURED)}, lambda found: {1: sample(**{name: 1.0 + found[name] for name in found})})
    assert costs == dict.fromkeys(STAGES, 0.0)
    values = {value.path: value.y for value in fixed_costs(costs, {1: timings(**MEASURED)}, "")}
    assert values.pop("engine.retrieval_project_share") == 0.5
    assert set(values.values()) == {0.0}


def test_projection_and_the_rest_of_a_layer_keep_their_own_costs():
    values = {value.path: value.y for value in fixed_costs(MEASURED, {1: timings(**MEASURED)}, "")}
    assert values["engine.retrieval_layer_overhead_us"] == pytest.approx(6000.0)
    assert values["engine.retrieval_project_share"] == pytest.approx(1 / 3)
    assert values["engine.h2d_overhead_us"] == pytest.approx(300.0)


def test_a_request_more_is_what_a_copy_costs():
    assert down_per_request(0.0012, 0.0039) == pytest.approx(0.0009)


def test_where_four_took_no_longer_than_one_the_copy_costs_its_share():
    assert down_per_request(0.004, 0.0032) == pytest.approx(0.0008)


def test_the_profile_so_far_has_no_fixed_cost_until_one_is_tried():
    shape = catalogue.get("demo")
    import torch

    found = Part("all", [Value(path, unit, 1.0) for path, unit in RATES])
    bench = Bench(shape, torch.device("cpu"), torch.float32, Plan(), KVDtype.FP32, KVDtype.FP32)
    bench.base = profile_file.template() | {"name": "here"}
    bench.done = [found]
    profile = without_overheads(bench)
    assert profile.engine.select_overhead_us.value == 0.0
    assert profile.machine.dram.read_gb_s.value == 1.0
    engine = with_costs(profile, MEASURED).engine
    assert engine.retrieval_layer_overhead_us.value == pytest.approx(6000.0)
    assert engine.retrieval_project_share.value == pytest.approx(1 / 3)
    assert engine.gather_overhead_us.value == pytest.approx(200.0)


RATES = [("machine.dram.read_gb_s", "GB/s"), ("machine.gpu.bandwidth_gb_s", "GB/s")]
