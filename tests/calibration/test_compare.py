import json

import pytest

from calibration.compare import diff
from calibration.text import comparison_text
from herald_pipeline.errors import ConfigError
from herald_pipeline.hardware_io import profile_dir
from herald_pipeline.trace import Span, Trace, write_chrome


def result(tmp_path, name, **changes):
    content = {
        "source": "measured",
        "batch": 2,
        "throughput_tok_s": 100.0,
        "block_time_s": 0.64,
        "stages": {"denoise": {"count": 10, "busy_s": 1.0}},
    }
    path = tmp_path / name
    path.write_text(json.dumps(content | changes), encoding="utf-8")
    return path


def trace_file(tmp_path, name, scale=1):
    def span(launch, stage, stream, start, end):
        return Span(stage, stream, "gpu", 0, 0, None, 1, start * scale, end * scale, 0, 8.0, 0.0, 8.0, 0.0, launch, ())

    spans = [span(0, "denoise", "main", 0, 10_000), span(1, "denoise", "main", 20_000, 30_000)]
    path = tmp_path / name
    write_chrome(Trace("measured", {}, [*spans, span(2, "select", "retrieval", 0, 5_000)]), path)
    return path


def value(comparison, name):
    return next(difference for difference in comparison.differences if difference.name == name)


def test_results_are_compared_with_their_sign(tmp_path):
    found = diff(result(tmp_path, "a.json"), result(tmp_path, "b.json", throughput_tok_s=80.0))
    assert value(found, "throughput_tok_s").relative == pytest.approx(-0.2)
    assert value(found, "stage denoise: mean").first == pytest.approx(0.1)
    assert value(found, "throughput_tok_s").unit == "tok/s"


def test_a_pair_without_makespan_is_valid_json_without_a_throughput(tmp_path):
    empty = {"throughput_tok_s": 0.0, "block_time_s": 0.0}
    found = diff(result(tmp_path, "a.json", **empty), result(tmp_path, "b.json", **empty))
    document = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert "throughput_tok_s" not in [row["name"] for row in document["differences"]]
    assert all("no throughput" in note for note in document["notes"])
    assert len(document["notes"]) == 2


def test_traces_are_compared_by_stage_and_by_stream(tmp_path):
    found = diff(trace_file(tmp_path, "a.json"), trace_file(tmp_path, "b.json.gz", scale=2))
    assert value(found, "makespan").relative == pytest.approx(1.0)
    assert value(found, "stream main: idle").first == pytest.approx(10e-6)
    assert value(found, "stage denoise: launches").first == 2
    assert value(found, "stage select: mean").second == pytest.approx(10e-6)


def test_profiles_are_compared_number_by_number(tmp_path):
    shipped = profile_dir() / "h100-sxm-80g_xeon-8481c.toml"
    other = tmp_path / "other.toml"
    text = shipped.read_text(encoding="utf-8")
    assert "value = 936" in text
    other.write_text(text.replace("value = 936", "value = 468"), encoding="utf-8")
    found = diff(shipped, other)
    changed = [difference.name for difference in found.differences if difference.relative]
    assert changed == ["machine.dram.capacity_gb"]
    assert "-50.0%" in comparison_text(found)


def report_file(tmp_path, name, **rates):
    """A reconcile.json with one point; ``rates`` are measured, predicted and uncertainty."""
    points = [{"method": "dense", "context": 64, "batch": 1, "figures": {"throughput_tok_s": rates}}]
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps({"points": points, "summary": {}}), encoding="utf-8")
    return path


def test_two_procedures_whose_errors_differ_less_than_stated_agree(tmp_path):
    """A machine half as fast changes what is measured and what is predicted: the error stays."""
    one = report_file(tmp_path, "a", measured=100.0, predicted=98.0, uncertainty=0.05)
    other = report_file(tmp_path, "b", measured=50.0, predicted=52.0, uncertainty=0.05)
    assert diff(one, other).notes == ("errors agree within the stated spread on 1 of 1 points",)


def test_two_procedures_whose_errors_differ_more_than_stated_are_named(tmp_path):
    one = report_file(tmp_path, "a", measured=100.0, predicted=98.0, uncertainty=0.03)
    other = report_file(tmp_path, "b", measured=100.0, predicted=110.0, uncertainty=0.04)
    (note,) = diff(one, other).notes
    # ln(1.10 / 0.98) against sqrt(0.03^2 + 0.04^2)
    assert note.endswith("on 0 of 1 points; apart: dense 64 x 1 by +11.6% (stated: 5.0%)")


def test_without_a_spread_agreement_cannot_be_said(tmp_path):
    paths = [report_file(tmp_path, name, measured=100.0, predicted=98.0) for name in "ab"]
    assert "cannot be said" in diff(*paths).notes[0]


def test_two_runs_of_the_procedure_are_compared_point_by_point(tmp_path):
    paths = []
    for name, rate in (("a.json", 100.0), ("b.json", 105.0)):
        figures = {"throughput_tok_s": {"measured": rate, "predicted": 98.0}}
        points = [{"method": "dense", "context": 64, "batch": 1, "figures": figures}]
        path = tmp_path / name
        path.write_text(json.dumps({"points": points, "summary": {}}), encoding="utf-8")
        paths.append(path)
    found = diff(*paths)
    assert value(found, "dense 64 x 1: measured").relative == pytest.approx(0.05)
    assert value(found, "dense 64 x 1: predicted").relative == 0.0


def test_files_of_two_kinds_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"is a result and .* is a trace; compare two of one kind"):
        diff(result(tmp_path, "a.json"), trace_file(tmp_path, "b.json"))


def test_a_file_of_no_known_kind_is_refused(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match="neither a trace"):
        diff(path, path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"there is no file .*nowhere\.json"):
        diff(tmp_path / "nowhere.json", tmp_path / "nowhere.json")


def test_points_that_differ_in_their_steps_alone_are_compared_each(tmp_path):
    paths = []
    for name, rates in (("a.json", (100.0, 50.0)), ("b.json", (110.0, 45.0))):
        points = [
            {"method": "dense", "context": 64, "batch": 1, "steps": steps, "conditions": [["threads", 4]],
             "figures": {"throughput_tok_s": {"measured": rate, "predicted": 98.0}}}
            for steps, rate in zip((8, 20), rates, strict=True)
        ]  # fmt: skip
        path = tmp_path / name
        path.write_text(json.dumps({"points": points, "summary": {}}), encoding="utf-8")
        paths.append(path)
    found = diff(*paths)
    assert value(found, "dense 64 x 1, threads 4, T 8: measured").relative == pytest.approx(0.10)
    assert value(found, "dense 64 x 1, threads 4, T 20: measured").relative == pytest.approx(-0.10)
