"""The page of decoding schedules: all cells stand on it, changes are put beside the article's, nothing is averaged."""

import json
import re

import pytest
from typer.testing import CliRunner

from herald_pipeline.errors import ConfigError
from reports.charts.decoding import accuracy_by_speed, cells_frame, ratios, sweep
from reports.cli import app
from reports.decoding import build, printed_changes

CELL = {
    "decoder": "confidence",
    "scheduler": "fixed",
    "cache": "none",
    "s_init": 32,
    "s_max": None,
    "p_min": 24,
    "suffix": 0,
    "response": 256,
    "fits": 256,
    "diagnose": False,
    "task": "few",
}


def span(value):
    return {"value": value, "low": value * 0.9, "high": min(value * 1.1, 1.0) if value <= 1 else value * 1.1}


def entry(groups, right, speed, nfe=20.0, *, marks=(), late=None, **choices):
    cell = CELL | choices
    return {
        "name": "+".join(str(cell[name]) for name in ("decoder", "scheduler", "cache")),
        "groups": list(groups),
        "cell": cell,
        "samples": 200,
        "answers": 310,
        "accuracy": span(right),
        "nfe": span(nfe),
        "nfe_before_eos": span(nfe / 2),
        "tokens_per_forward_before_eos": 4.0,
        "positions_per_forward": 640.0,
        "throughput_tok_s": speed,
        "late_ratio_before_eos": late and span(late),
        "premature_ratio_before_eos": late and span(late / 2),
        "against_base": {
            "samples_lost": 3,
            "samples_gained": 1,
            "speed_of_base": None if speed is None else speed / 100.0,
            "marks": list(marks),
        },
    }


SUMMARY = {
    "model": "herald-ref-bidirectional",
    "device_name": "NVIDIA H200",
    "dtype": "bfloat16",
    "batch": 256,
    "cells": [
        entry(["grid", "s_max"], 0.9, 100.0),
        entry(["grid", "cache-under-dsb"], 0.8, 150.0, scheduler="dsb-greedy", cache="dual", marks=["accuracy", "nfe"]),
        entry(["grid", "cache-under-dsb", "s_max"], 0.85, 300.0, scheduler="dsb-greedy", cache="dsb"),
        entry(["grid"], 0.91, 20.0, 256.0, decoder="top1"),
        entry(["s_max"], 0.86, 250.0, scheduler="dsb-greedy", cache="dsb", s_max=48),
        entry(["ratios"], 0.9, None, late=0.6, diagnose=True),
    ],
}


@pytest.fixture
def frame():
    return cells_frame(SUMMARY)


@pytest.fixture
def summary_file(tmp_path):
    path = tmp_path / "decoding.json"
    path.write_text(json.dumps(SUMMARY))
    return path


def spec_of(chart):
    return json.loads(json.dumps(chart.to_dict(), allow_nan=False))


def points_of(spec):
    return [row for rows in spec["datasets"].values() for row in rows]


def test_every_timed_cell_is_a_point_with_its_interval(frame):
    grid = frame[[("grid" in groups) for groups in frame["groups"]]]
    spec = spec_of(accuracy_by_speed(grid, "Grid", "measured here"))
    assert sorted(row["tok_s"] for row in points_of(spec)) == [20.0, 100.0, 150.0, 300.0]
    assert all(row["accuracy_low"] < row["accuracy"] < row["accuracy_high"] for row in points_of(spec))
    assert "few, confidence: dsb-greedy, dsb 300 tokens/s, 85% right" in spec["description"]


def test_an_unbounded_step_has_a_place_on_the_axis(frame):
    part = frame[[("s_max" in groups) for groups in frame["groups"]]]
    spec = spec_of(sweep(part, "s_max", "S_max (tokens)", "S_max", "measured here"))
    assert {row["at"] for row in points_of(spec)} == {"48", "unbounded"}
    assert "S_max (tokens)" in json.dumps(spec)


def test_ratios_show_both_kinds(frame):
    spec = spec_of(ratios(frame[frame["diagnose"].astype(bool)], "Ratios", "measured here"))
    assert [(row["kind"], row["share"]) for row in points_of(spec)] == [("late", 0.6), ("premature", 0.3)]


def test_printed_changes_are_those_of_the_articles_rows():
    # Table 3, LLaDA-8B, DSB(greedy), accuracy at tokens/s: GSM8K 76.35 at 81.85 to 80.29 at 99.61, HumanEval 28.05 at
    # 87.97 to 39.63 at 107.7.
    factors, points = printed_changes(("Confidence", "DSB(greedy)", "DSB Cache"), ("Confidence", "DSB(greedy)", "Dual"))
    assert sorted(factors) == pytest.approx(sorted([99.61 / 81.85, 107.7 / 87.97]))
    assert sorted(points) == pytest.approx(sorted([80.29 - 76.35, 39.63 - 28.05]))


def test_the_page_holds_every_cell_and_marks_losses(summary_file):
    _, lead, sections = build(summary_file)
    titles = [section.title for section in sections]
    assert [re.sub(r" \(.*", "", title) for title in titles] == [
        "Decoders, schedulers and caches",
        "The grid, task few",
        "Which cache a sliding block needs",
        "S_max",
        "Late and premature rounds",
    ]
    grid = sections[1].table
    assert [row[0].text for row in grid.rows] == [c["name"] for c in SUMMARY["cells"][:4]]
    assert all(len(row) == len(grid.header) for row in grid.rows)
    loss = grid.rows[1][grid.header.index("worse than base in")]
    assert (loss.text, loss.kind) == ("accuracy, nfe", "number bad")
    # The article prints Top-1 without a cache for some models; 14.94 over 48.70 on LLaDA-8B's GSM8K.
    assert grid.rows[3][-2].text.startswith("0.")
    assert "run, 200 samples each" in lead


def test_dsb_cache_is_compared_with_dual_under_one_schedule(summary_file):
    table = build(summary_file)[2][2].table
    (row,) = table.rows
    assert [cell.text for cell in row][:2] == ["few", "dsb-greedy"]
    assert row[table.header.index("speed of DSB Cache, x Dual")].text == "2.00"


def test_the_command_writes_the_page(summary_file, tmp_path):
    out = tmp_path / "page.html"
    result = CliRunner().invoke(app, ["build", "--decoding", str(summary_file), "--out", str(out)])
    assert result.exception is None
    assert "Late and premature rounds" in out.read_text()


@pytest.mark.parametrize("content", ["{", "[]", '{"table": []}', '{"cells": []}', '{"cells": [{"cell": {}}]}'])
def test_something_else_than_a_summary_is_refused(tmp_path, content):
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"decoding-show FILES --json|cannot be read as JSON"):
        build(path)
