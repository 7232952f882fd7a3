"""Every chart: valid JSON, units on its axes, provenance under its title, a text for those who do not see it."""

import json

import pandas as pd
import pytest

from herald_pipeline import catalogue, hardware_io
from herald_pipeline.errors import ConfigError
from herald_pipeline.trace import Span, Trace, write_chrome
from reports import charts, frames

SPEC_TEXT = "measured here"


def titles(spec):
    """Axis and legend titles anywhere in a specification."""
    found = []

    def walk(node):
        if isinstance(node, dict):
            for name, channel in node.get("encoding", {}).items():
                if name in ("x", "y", "color") and isinstance(channel, dict) and channel.get("title"):
                    found.append(channel["title"])
            for value in node.values():
                walk(value)
        elif isinstance(node, list):
            for value in node:
                walk(value)

    walk(spec)
    return found


def checked(chart):
    spec = json.loads(json.dumps(chart.to_dict(), allow_nan=False))
    assert spec["description"]
    assert spec["title"]["subtitle"] == SPEC_TEXT
    return spec


def trace_files(tmp_path):
    def span(launch, stage, stream, start, end, block):
        return Span(stage, stream, "gpu", block, 0, None, 1, start, end, 0, 0.0, 0.0, 0.0, 0.0, launch, ())

    paths = []
    for source, scale in (("measured", 1), ("simulated", 2)):
        spans = [
            span(0, "denoise", "main", 0, 1_000_000 * scale, 0),
            span(1, "denoise", "main", 1_000_000 * scale, 3_000_000 * scale, 1),
            span(2, "select", "retrieval", 1_500_000 * scale, 2_000_000 * scale, 2),
            span(3, "denoise", "main", 3_000_000 * scale, 4_000_000 * scale, 2),
        ]
        path = tmp_path / f"{source}.json.gz"
        write_chrome(Trace(source, {}, spans), path)
        paths.append(path)
    return paths


def test_a_timeline_shows_what_runs_during_the_block_whichever_block_it_serves(tmp_path):
    frame = frames.timeline(trace_files(tmp_path))
    measured = frame[frame["source"] == "measured"]
    assert list(measured["stage"]) == ["denoise", "select"]
    assert measured["start_ms"].tolist() == [0.0, 0.5]
    assert frame.groupby("source")["end_ms"].max().to_dict() == {"measured": 2.0, "simulated": 4.0}


def test_a_timeline_of_a_block_that_was_not_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds no block 7"):
        frames.timeline(trace_files(tmp_path), first_block=7)


def test_too_many_spans_are_refused_and_not_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(frames, "MAX_SPANS", 3)
    with pytest.raises(ConfigError, match=r"more than a timeline shows \(3\)"):
        frames.timeline(trace_files(tmp_path))


def test_the_timeline_has_one_row_a_source_and_milliseconds(tmp_path):
    spec = checked(charts.timeline(frames.timeline(trace_files(tmp_path)), "t", SPEC_TEXT))
    assert "time since the block began (ms)" in titles(spec)
    assert spec["facet"]["row"]["sort"] == ["measured", "simulated"]
    assert "measured: 2.0 ms, most of it denoise" in spec["description"]


def test_a_run_of_one_stream_leaves_room_for_its_name(tmp_path):
    frame = frames.timeline(trace_files(tmp_path))
    of_one = charts.timeline(frame[frame["stream"] == "main"], "t", SPEC_TEXT).to_dict()
    assert of_one["spec"]["height"] >= 60


def test_the_scatter_has_units_and_counts_held_out_points(document):
    spec = checked(charts.throughput_scatter(frames.throughputs(document), "t", SPEC_TEXT))
    assert {"measured throughput (tokens/s)", "predicted throughput (tokens/s)"} <= set(titles(spec))
    assert "2 of 2 held-out ones lie within 15%" in spec["description"]


def test_points_without_a_throughput_are_left_out_of_the_scatter(document):
    del document["points"][1]["figures"]["throughput_tok_s"]
    assert list(frames.throughputs(document)["point"]) == ["dense 1024 x 1", "herald 4096 x 1"]


def test_stage_errors_are_of_held_out_points_and_keep_their_sign(document):
    frame = frames.stage_errors(document)
    assert set(frame["point"]) == {"dense 4096 x 1", "herald 4096 x 1"}
    assert frame[frame["stage"] == "select"]["error"].tolist() == pytest.approx([-0.5, -0.5])
    spec = checked(charts.stage_errors(frame, "t", SPEC_TEXT))
    assert any("predicted / measured - 1" in title for title in titles(spec))


def test_the_ring_marks_the_lowest_ceiling_of_each_scheme():
    profile = hardware_io.resolve("h100-sxm-80g_xeon-8481c")
    frame = frames.ceiling_rows(catalogue.get("llada2-mini"), profile, 32768, 20, 80)
    lowest = frame.loc[frame.groupby("scheme")["tok_s"].idxmin()]
    assert set(map(tuple, frame[frame["binding"]][["scheme", "ceiling"]].to_numpy())) == set(
        map(tuple, lowest[["scheme", "ceiling"]].to_numpy())
    )
    spec = checked(charts.ceilings(frame, "t", SPEC_TEXT))
    assert "ceiling (tokens/s, log scale)" in titles(spec)


@pytest.mark.parametrize(("model", "unit"), [("tiny", "MB"), ("llada2-mini", "GB")])
def test_memory_is_shown_in_a_unit_that_fits(model, unit):
    profile = hardware_io.resolve("h100-sxm-80g_xeon-8481c")
    frame = frames.memory_rows(catalogue.get(model), profile, ("dense", "herald"), 4096, 2, "bf16")
    assert set(frame["home"]) == {"device", "host"}
    spec = checked(charts.memory(frame, "t", SPEC_TEXT))
    assert any(title.startswith(f"memory ({unit} =") for title in titles(spec))


def test_every_number_of_a_profile_is_listed_with_its_provenance():
    profile = hardware_io.resolve("h100-sxm-80g_xeon-8481c")
    frame = frames.profile_rows(profile)
    assert len(frame) == sum(quantity is not None for _, _, quantity in profile.quantities())
    stated = {str(quantity.origin.provenance) for _, _, quantity in profile.quantities() if quantity is not None}
    assert set(frame["provenance"]) == stated >= {"published", "fitted", "datasheet"}
    assert (frame["unit"] != "").all()


def test_a_nan_never_reaches_a_chart_silently(document):
    frame = frames.throughputs(document)
    frame.loc[0, "spread"] = float("nan")
    spec = charts.throughput_scatter(frame, "t", SPEC_TEXT).to_dict()
    # altair writes a pandas NaN as null, which JSON has.
    assert json.loads(json.dumps(spec, allow_nan=False))
    assert isinstance(frame, pd.DataFrame)
