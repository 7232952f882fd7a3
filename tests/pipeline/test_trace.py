"""The trace: valid lanes, Chrome export that reads back, refusal of what a viewer would draw wrongly (U20)."""

import json
from pathlib import Path

import pytest

from herald_pipeline import trace as tracing
from herald_pipeline.errors import RunError
from herald_pipeline.trace import Counter, Span, Trace


def span(launch: int, start: int, end: int, *, stream: str = "main", after: tuple[int, ...] = ()) -> Span:
    return Span("denoise", stream, "gpu", 0, 0, None, 2, start, end, 0, 10.0, 20.0, 10.0, 20.0, launch, after)


def trace(*spans: Span) -> Trace:
    return Trace("simulated", {"model": "small"}, list(spans), [Counter("sparse bytes", 1500, 3.0)])


def test_chrome_times_are_microseconds() -> None:
    document = tracing.to_chrome(trace(span(0, 1_500, 4_000)))
    (event,) = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert (event["ts"], event["dur"]) == (1.5, 2.5)


def test_every_lane_has_a_name() -> None:
    document = tracing.to_chrome(trace(span(0, 0, 1), span(1, 0, 1, stream="retrieval")))
    named = {e["tid"]: e["args"]["name"] for e in document["traceEvents"] if e["name"] == "thread_name"}
    used = {e["tid"] for e in document["traceEvents"] if e["ph"] == "X"}
    assert named == {1: "main", 2: "retrieval"}
    assert used == set(named)


def test_every_flow_that_starts_ends() -> None:
    spans = [span(0, 0, 5), span(1, 5, 9, stream="d2h", after=(0,)), span(2, 9, 10, after=(1,))]
    events = tracing.to_chrome(trace(*spans))["traceEvents"]
    starts = sorted(e["id"] for e in events if e["ph"] == "s")
    ends = sorted(e["id"] for e in events if e["ph"] == "f")
    assert starts == ends == ["0-1", "1-2"]


def test_crossing_spans_on_one_stream_are_refused_with_both() -> None:
    with pytest.raises(RunError, match=r"overlap: denoise block 0 \[0, 10\) ns on main and .*\[5, 15\)"):
        tracing.validate(trace(span(0, 0, 10), span(1, 5, 15)))


def test_a_start_before_its_dependency_ended_is_refused() -> None:
    with pytest.raises(RunError, match="started before one that it waits for had ended"):
        tracing.validate(trace(span(0, 0, 10), span(1, 9, 12, stream="d2h", after=(0,))))


def test_a_span_that_ends_before_it_starts_is_refused() -> None:
    with pytest.raises(RunError, match="ends before it starts"):
        tracing.validate(trace(span(0, 10, 9)))


@pytest.mark.parametrize("name", ["run.json", "run.json.gz"])
def test_a_written_trace_reads_back_equal(tmp_path: Path, name: str) -> None:
    original = trace(span(0, 0, 5), span(1, 5, 9, stream="d2h", after=(0,)))
    tracing.write_chrome(original, tmp_path / name)
    assert tracing.read_chrome(tmp_path / name) == original


def test_the_same_trace_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.json.gz", "b.json.gz"):
        tracing.write_chrome(trace(span(0, 0, 5)), tmp_path / name)
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()


@pytest.mark.parametrize("text", ["", "{}", "[]", json.dumps({"traceEvents": [], "otherData": {"schema": "x"}})])
def test_a_file_that_is_not_a_trace_is_refused_with_the_remedy(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(RunError, match="write one with --trace-out"):
        tracing.read_chrome(path)


def test_the_frame_has_one_row_a_launch() -> None:
    frame = trace(span(0, 0, 5), span(1, 5, 9)).to_frame()
    assert list(frame["end_ns"]) == [5, 9]
    assert set(frame["source"]) == {"simulated"}
