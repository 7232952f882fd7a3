"""Charts of a selection study: every point is in them, units on axes, and a text that names the numbers."""

import json

import pytest

from herald_pipeline.errors import ConfigError
from reports.charts.selection import (
    accuracy_by_budget,
    cost_front,
    recall_by_bucket,
    recall_by_factor,
    recall_frames,
    steps_histogram,
    study_frames,
)
from reports.page import render
from reports.selection import build


def entry(rule, budget, value, scan, queries=1, *, best=False):
    exact = {"value": value, "low": value - 0.05, "high": min(1.0, value + 0.05)}
    tasks = {"kv@512": exact, "log@512": exact}
    return {"rule": rule, "budget": budget, "queries": queries, "scan_bytes": scan, "exact": exact} | {
        "tasks": tasks,
        "best": best,
    }


@pytest.fixture
def frames():
    rows = [
        entry("dense", 1.0, 0.95, 0.0, 32),
        entry("herald", 0.05, 0.9, 2e6, best=True),
        entry("herald", 0.1, 0.93, 2.2e6),
        entry("herald-int8", 0.05, 0.88, 7e5, best=True),
    ]
    steps = [{"rule": "herald", "budget": 0.05, "histogram": {"3": 5, "9": 5}}]
    return study_frames({"table": rows, "front": rows[1:], "steps": steps})


def spec_of(chart):
    spec = json.loads(json.dumps(chart.to_dict(), allow_nan=False))
    assert spec["title"]["subtitle"] == "measured here"
    return spec


def data_of(spec):
    (rows,) = spec["datasets"].values()
    return rows


def test_accuracy_has_a_point_for_every_rule_budget_and_task(frames):
    spec = spec_of(accuracy_by_budget(frames["accuracy"], "Accuracy", "measured here"))
    assert len(data_of(spec)) == 4 * 2
    assert "kv@512: herald at 10.0% 93%" in spec["description"]


def test_the_front_shows_bytes_in_megabytes_and_names_what_nothing_beats(frames):
    spec = spec_of(cost_front(frames["cost"], "Front", "measured here"))
    assert sorted(row["mb"] for row in data_of(spec)) == [0.7, 2.0, 2.2]
    assert "herald-int8 at 5.0%: 0.70 MB, 88%" in spec["description"]
    assert "herald at 10.0%" not in spec["description"]


def test_the_histogram_says_the_mean_steps(frames):
    spec = spec_of(steps_histogram(frames["steps"], "T", "measured here"))
    assert "herald 5.0% 6.0" in spec["description"]
    assert sum(row["blocks"] for row in data_of(spec)) == 10


def test_something_else_than_a_summary_is_refused():
    with pytest.raises(ConfigError, match="show FILE --json"):
        study_frames({"table": []})


@pytest.fixture
def recall_summary():
    means = [
        {"rule": rule, "factor": factor, "value": value, "low": value - 0.1, "high": value + 0.1}
        for rule, factor, value in (
            ("mage", 1.0, 0.8),
            ("mage", 2.0, 0.85),
            ("herald", 1.0, 0.6),
            ("herald", 2.0, 0.82),
        )
    ]
    buckets = [{"from": 0.0, "to": 0.5, "pairs": 3, "omit": 0.3, "draft": 0.5, "mage": 0.7}, {"from": 0.5, "to": 0.6}]
    buckets[1] |= {"pairs": 0}
    regained = [{"rule": "herald", "first_step": 0, "samples": 2, "value": 1.9, "low": 1.5, "high": None}]
    facts = {"tasks": ["log"], "contexts": [512], "samples": 2, "pairs": 3, "budget": 0.05}
    return facts | {
        "means": means,
        "later_means": means,
        "buckets": buckets,
        "regained": regained,
        "later_regained": regained,
    }


def test_recall_has_a_point_for_every_rule_factor_and_range_of_steps(recall_summary):
    spec = spec_of(recall_by_factor(recall_frames(recall_summary)["means"], "Recall", "measured here"))
    assert len(data_of(spec)) == 4 * 2
    assert "herald, without step 0: 0.60" in spec["description"]


def test_buckets_say_how_many_steps_they_hold_and_empty_ones_are_left_out(recall_summary):
    spec = spec_of(recall_by_bucket(recall_frames(recall_summary)["buckets"], "Buckets", "measured here"))
    assert {row["label"] for row in data_of(spec)} == {"0.0-0.5 (3)"}


def test_a_recall_summary_that_lacks_something_is_refused(recall_summary):
    del recall_summary["regained"]
    with pytest.raises(ConfigError, match=r"lacks regained.*recall --summary"):
        recall_frames(recall_summary)


def test_the_page_tells_a_significant_loss_and_an_end_beyond_what_was_measured(tmp_path, recall_summary):
    worse = entry("random", 0.05, 0.2, 0.0) | {"samples": 24, "steps_per_block": 9.0, "partial": 0.31}
    worse["minus_dense"] = {"value": -0.7, "low": -0.9, "high": -0.5}
    dense = entry("dense", 1.0, 0.9, 0.0) | {
        "samples": 24,
        "steps_per_block": 6.0,
        "minus_dense": None,
        "partial": 0.95,
    }
    steps = [{"rule": "random", "budget": 0.05, "histogram": {"3": 5}}]
    study, recall = tmp_path / "study.json", tmp_path / "recall.json"
    study.write_text(json.dumps({"table": [dense, worse], "front": [], "steps": steps}))
    recall.write_text(json.dumps(recall_summary))
    title, _, sections = build(study, recall)
    accuracy = sections[0].table
    assert accuracy is not None
    assert accuracy.rows[1][3].text == "-70.0 (-90.0 to -50.0)"
    assert accuracy.rows[1][3].kind == "number bad"
    assert accuracy.rows[1][4].text == "31.0"
    factors = sections[-2].table
    assert factors is not None
    assert [cell.text for cell in factors.rows[0]][2:] == ["1.90 (1.50 to beyond)", "1.75"]
    assert "accuracy" in render(title, "", sections)


def test_the_page_names_the_smallest_budget_near_dense_and_that_none_was(tmp_path):
    gap = {"value": -0.005, "low": -0.02, "high": 0.01}
    herald = entry("herald", 0.2, 0.94, 2e6) | {"samples": 24, "steps_per_block": 9.0, "partial": 0.97}
    random = herald | {"rule": "random", "minus_dense": gap | {"value": -0.9}}
    dense = entry("dense", 1.0, 0.95, 0.0) | {"samples": 24, "steps_per_block": 6.0, "partial": 0.98}
    needed = [{"tasks": "all", "rule": "herald", "largest": 0.4, "budget": 0.2, "surely": None}]
    summary = {"table": [dense | {"minus_dense": None}, herald | {"minus_dense": gap}, random], "front": []}
    summary |= {"needed": needed, "steps": [{"rule": "herald", "budget": 0.2, "histogram": {"3": 5}}]}
    path = tmp_path / "study.json"
    path.write_text(json.dumps(summary))
    _, _, sections = build(path, None)
    assert sections[1].table is not None
    assert [cell.text for cell in sections[1].table.rows[0]] == ["all", "herald", "20.0%", "above 40.0%"]
    spec = json.loads(json.dumps(sections[1].chart.to_dict(), allow_nan=False))
    assert "herald at 20.0% -0.5 points" in spec["description"]
    assert "random" not in spec["description"]


def test_a_page_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="--study FILE, --recall FILE"):
        build(None, None)


def test_a_file_that_is_no_object_is_refused(tmp_path):
    path = tmp_path / "list.json"
    path.write_text("[]")
    with pytest.raises(ConfigError, match="holds no JSON object"):
        build(path, None)
