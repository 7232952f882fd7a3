"""Torch operations by stage: counted for the innermost mark, and nothing of the run changes."""

from dataclasses import dataclass

import pytest

from herald_exec.op_times import OUTSIDE, OpTime, OpTimes, by_stage, text

MARK = "herald stage: "


@dataclass
class Event:
    name: str
    self_cpu_time_total: float
    cpu_parent: "Event | None" = None
    self_device_time_total: float = 0.0


def test_an_operation_counts_for_the_mark_around_it_however_deep():
    mark = Event(MARK + "denoise", 40.0)
    matmul = Event("aten::matmul", 10.0, mark)
    events = [mark, matmul, Event("aten::mm", 250.0, matmul), Event("aten::mm", 150.0, matmul)]
    assert by_stage(events) == [
        OpTime("denoise", "aten::mm", 2, pytest.approx(400e-6), 0.0),
        OpTime("denoise", OUTSIDE, 1, pytest.approx(40e-6), 0.0),
        OpTime("denoise", "aten::matmul", 1, pytest.approx(10e-6), 0.0),
    ]


def test_what_runs_outside_any_stage_is_left_out():
    assert by_stage([Event("aten::randn", 5.0), Event("aten::empty", 5.0, Event("aten::randn", 1.0))]) == []


def test_the_same_operation_in_two_stages_is_two_rows():
    events = [Event("aten::mm", 1.0, Event(MARK + stage, 0.0)) for stage in ("denoise", "project")]
    assert [(row.stage, row.calls) for row in by_stage(events)] == [("denoise", 1), ("project", 1)]


def test_the_table_puts_the_rest_of_a_stage_into_one_line():
    rows = [OpTime("denoise", f"op{i}", 1, 1e-3 * (5 - i), 0.0) for i in range(5)]
    lines = text(rows, per_stage=2).splitlines()
    assert len(lines) == 4
    assert "3 others" in lines[-1]
    assert lines[-1].split()[-2:] == ["6.000", "40.0%"]


def test_device_times_have_a_column_where_there_are_any():
    with_device, without = ([OpTime("denoise", "aten::mm", 1, 1e-3, device)] for device in (2e-3, 0.0))
    assert "device ms" in text(with_device, 8)
    assert "device ms" not in text(without, 8)


@pytest.mark.parametrize("method", ["dense", "herald"])
def test_a_profiled_run_decodes_the_same_and_names_the_products_of_its_steps(method):
    from herald_exec.execution import Options, decode
    from herald_exec.models import tiny
    from herald_exec.policy import PlannedPolicy
    from herald_exec.requests import DecodeRequest
    from herald_pipeline.pipeline import build
    from herald_pipeline.steps import FixedSteps

    # Few steps of few layers: the profiler takes most of a millisecond for each of a run's operations.
    model = tiny(block_length=8, num_layers=3)
    pipeline = build(model.shape, method, block_length=8, kv_dtype="fp32", dram_kv_dtype="fp32")
    requests, policy = [DecodeRequest(0, tuple(range(24)), 16)], PlannedPolicy(FixedSteps(2, 8))
    plain = decode(pipeline, model, requests, policy=policy)
    times = OpTimes()
    profiled = decode(pipeline, model, requests, policy=policy, options=Options(op_times=times))
    assert profiled.answers == plain.answers
    stages = {row.stage for row in times.rows}
    assert {stage.name for stage in pipeline.template.stages()} & stages >= {"denoise"}
    products = next(row for row in times.rows if (row.stage, row.op) == ("denoise", "aten::mm"))
    # Of every forward each layer has at least q, k, v, output and three feed-forward products.
    assert products.calls >= profiled.result.forwards * model.shape.num_layers
    assert all(row.host_s >= 0 for row in times.rows)
