"""The CPU's side of a run, from spans that are easy to add up by hand."""

import pytest

from benchmarks.gpu.host_side import host_side
from herald_pipeline.trace import Span

MS = 1_000_000


def span(stage, layer, start_ms, end_ms, num_bytes=0.0, block=1, step=-1):
    times = {"start_ns": start_ms * MS, "end_ns": end_ms * MS, "queued_ns": start_ms * MS}
    work = {"bytes": num_bytes, "flops": 0.0, "expected_bytes": num_bytes, "expected_flops": 0.0}
    where = {"block": block, "step": step, "layer": layer, "rows": 1, "launch": 0, "after": ()}
    return Span(stage, "retrieval", "cpu", **where, **times, **work)


def test_rates_idle_time_and_overlap_are_sums_of_the_spans():
    found = host_side(
        [
            span("select", 2, 0, 1, 9e9, block=0),  # the first block is left out
            span("denoise", None, 10, 15, step=0),
            span("select", 2, 20, 30, 1e9),  # 100 GB/s
            span("gather", 2, 30, 36, 3e8),  # 50 GB/s, 4 of its 6 ms beside the next selection
            span("select", 3, 32, 42, 5e8),  # 50 GB/s
        ]
    )
    assert found["select_gb_s"] == pytest.approx(75)
    assert found["select_layer_gb_s"] == pytest.approx({2: 100, 3: 50})
    assert found["gather_gb_s"] == pytest.approx(50)
    assert found["gather_beside_selects_share"] == pytest.approx(4 / 20)
    assert found["idle_between_selects_ms"] == pytest.approx({"median": 2, "worst": 2, "sum": 2})
    assert found["before_first_select_ms"] == pytest.approx([10])


def test_a_run_without_selection_on_the_cpu_has_no_host_side():
    assert host_side([span("denoise", None, 0, 5, step=0)]) == {}
