"""Fixed costs of stages: what medians of a short run exceed the rates by."""

import pytest

from calibration import profile_file
from calibration.bench import Bench, Part, Value
from calibration.overheads import down_per_request, fixed_costs, without_overheads
from calibration.points import Point
from calibration.runs import Sample
from calibration.timing import Plan, Timing
from herald_pipeline import catalogue
from herald_pipeline.model import KVDtype

POINT = Point("herald-no-draft", 64, 1)


def timings(**seconds):
    return {name: Timing(name, (value,) * 5, 1) for name, value in seconds.items()}


def expected(**seconds):
    return Sample(POINT, {}, seconds)


def test_what_the_rates_foretell_is_taken_off_before_it_is_called_fixed():
    """One request: 0.5 ms of which 0.2 are the rate; four: 0.9 of which 0.8 are. Fixed: the mean of 0.3 and 0.1."""
    few = timings(select=0.0005, gather=0.0002, upload=0.0003, project=0.002, finish=0.004)
    many = timings(select=0.0009, gather=0.0002, upload=0.0003, project=0.002, finish=0.004)
    foretold = {1: expected(select=0.0002), 4: expected(select=0.0008)}
    values = {value.path: value.y for value in fixed_costs({1: few, 4: many}, foretold, "")}
    assert values["engine.select_overhead_us"] == pytest.approx(200.0)
    assert values["engine.gather_overhead_us"] == pytest.approx(200.0)
    assert values["engine.retrieval_layer_overhead_us"] == pytest.approx(6000.0)


def test_a_stage_faster_than_its_rates_has_no_fixed_cost_and_none_below_zero():
    own = timings(select=0.0001, gather=0.0001, upload=0.0001, project=0.001, finish=0.001)
    foretold = expected(select=0.0002, gather=0.0002, upload=0.0002, project=0.002, finish=0.002)
    values = fixed_costs({1: own, 4: own}, {1: foretold, 4: foretold}, "")
    assert {value.y for value in values} == {0.0}


def test_a_request_more_is_what_a_copy_costs():
    assert down_per_request(0.0012, 0.0039) == pytest.approx(0.0009)


def test_where_four_took_no_longer_than_one_the_copy_costs_its_share():
    assert down_per_request(0.004, 0.0032) == pytest.approx(0.0008)


def test_the_profile_so_far_can_be_read_and_has_no_fixed_cost():
    shape = catalogue.get("demo")
    import torch

    found = Part("all", [Value(path, unit, 1.0) for path, unit in RATES])
    bench = Bench(shape, torch.device("cpu"), torch.float32, Plan(), KVDtype.FP32, KVDtype.FP32)
    bench.base = profile_file.template() | {"name": "here"}
    bench.done = [found]
    profile = without_overheads(bench)
    assert profile.engine.select_overhead_us.value == 0.0
    assert profile.machine.dram.read_gb_s.value == 1.0


RATES = [("machine.dram.read_gb_s", "GB/s"), ("machine.gpu.bandwidth_gb_s", "GB/s")]
