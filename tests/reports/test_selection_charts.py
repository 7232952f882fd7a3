"""Charts of a selection study: every point is in them, units on axes, and a text that names the numbers."""

import json

import pytest

from herald_pipeline.errors import ConfigError
from reports.charts.selection import accuracy_by_budget, cost_front, steps_histogram, study_frames


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
