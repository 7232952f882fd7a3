"""What a study's cells say together: averages, paired differences, the front and T, on made-up cells."""

import json

import pytest

from herald_exec.evaluation.summary import (
    front,
    needed_budgets,
    paired_interval,
    read_rows,
    steps_lines,
    summary,
    table,
    text,
)
from herald_pipeline.errors import ConfigError
from herald_pipeline.steps import read_steps


def cell(rule, budget, exact, scan=0.0, queries=1, task="kv", steps=(3,)):
    right = [float(number < exact) for number in range(10)]
    return {
        "rule": rule,
        "budget": budget,
        "queries": queries,
        "task": task,
        "context": 512,
        "exact": {"value": exact / 10, "low": 0.0, "high": 1.0},
        "partial": {"value": exact / 10, "low": 0.0, "high": 1.0},
        "scan_bytes": scan * 10,
        "selections": 10 * bool(scan),
        "raw": [
            {"seed": seed, "answer": "", "exact": score, "partial": score, "steps": list(steps)}
            for seed, score in enumerate(right)
        ],
    }


CELLS = [
    cell("dense", 1.0, 9),
    cell("herald", 0.05, 7, scan=100.0),
    cell("herald-int8", 0.05, 6, scan=30.0),
    cell("herald-smooth", 0.05, 5, scan=100.0),
    cell("herald-32q", 0.05, 9, scan=100.0, queries=32),
    cell("recency", 0.05, 0),
]


def test_the_difference_from_dense_is_paired():
    entries = {entry["rule"]: entry for entry in table(CELLS)}
    assert entries["herald"]["minus_dense"]["value"] == pytest.approx(-0.2)
    assert entries["herald-32q"]["minus_dense"] == {"value": 0.0, "low": 0.0, "high": 0.0}
    assert entries["dense"]["minus_dense"] is None


def test_an_interval_of_paired_differences_covers_the_mean_and_shrinks_with_samples():
    few, many = paired_interval([1.0, 0.0, 0.0, -1.0] * 5), paired_interval([1.0, 0.0, 0.0, -1.0] * 80)
    assert few["low"] < 0 < few["high"]
    assert many["high"] - many["low"] < (few["high"] - few["low"]) / 3


def test_the_front_keeps_what_nothing_beats_in_bytes_queries_and_accuracy():
    best = {point["rule"]: point["best"] for point in front(CELLS)}
    assert best == {"herald": True, "herald-int8": True, "herald-smooth": False, "herald-32q": True}


def test_a_steps_file_is_read_by_the_simulators_reader(tmp_path):
    rows = [cell("herald", 0.05, 5, steps=(4, 7)), cell("herald", 0.05, 5, task="log", steps=(2,))]
    lines = steps_lines(rows, "herald", None)
    path = tmp_path / "steps.csv"
    path.write_text("".join(",".join(map(str, line)) + "\n" for line in lines))
    plan = read_steps(path)
    assert [len(plan.commits(0, block)) for block in (0, 1)] == [4, 7]
    assert len(plan.commits(10, 0)) == 2
    assert steps_lines(rows, "herald", 0.05, ["log"]) == [[2]] * 10


def test_the_last_of_two_equal_cells_counts(tmp_path):
    path = tmp_path / "study.jsonl"
    rows = [cell("herald", 0.05, 1), cell("dense", 1.0, 9), cell("herald", 0.05, 8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert {row["rule"]: row["exact"]["value"] for row in read_rows(path)} == {"herald": 0.8, "dense": 0.9}


def test_the_text_has_every_rule_task_and_difference():
    shown = text(summary(CELLS))
    assert all(row["rule"] in shown for row in CELLS)
    assert "kv@512" in shown
    assert "-20.0" in shown


def test_the_front_leaves_out_tasks_where_an_overlapped_rule_selects_nothing():
    """An answer of one block: MAGE selects in step 0, HERALD has been selected for in prefill."""
    single = [cell("mage-offload", 0.05, 9, scan=5.0, task="hop"), cell("herald", 0.05, 9, task="hop")]
    assert {tuple(point["tasks"]) for point in front([*CELLS, *single])} == {("kv@512",)}
    assert front(single) == []
    assert "no front" in text(summary(single))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("heralt", None), "did you mean"),
        (("herald", 0.2), "0.05"),
        (("herald", None, ["kw"]), "did you mean"),
    ],
)
def test_what_the_results_do_not_hold_is_named(arguments, words):
    with pytest.raises(ConfigError, match=words):
        steps_lines(CELLS, *arguments)


def test_a_rule_with_several_budgets_needs_one_named():
    with pytest.raises(ConfigError, match=r"0.05, 0.1"):
        steps_lines([*CELLS, cell("herald", 0.1, 8)], "herald", None)


@pytest.mark.parametrize("content", ["", "{", '{"rule": "herald"}\n'])
def test_a_file_without_cells_is_refused(tmp_path, content):
    path = tmp_path / "study.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match="study"):
        read_rows(path)


def test_the_smallest_budget_within_a_point_of_dense_is_named():
    rows = [cell("dense", 1.0, 9), cell("herald", 0.05, 7, scan=1.0), cell("herald", 0.1, 9, scan=1.0)]
    rows += [cell("herald", 0.2, 9, scan=1.0), cell("infinigen", 0.05, 3, scan=1.0)]
    found = {(entry["tasks"], entry["rule"]): entry for entry in needed_budgets(rows)}
    assert found["all", "herald"]["budget"] == found["all", "herald"]["surely"] == 0.1
    assert found["all", "infinigen"]["budget"] is None
    assert found["several blocks", "herald"]["budget"] == 0.1
    shown = text(summary(rows))
    assert "infinigen         above 0.050 (above 0.050)" in shown


def test_a_mean_within_a_point_whose_interval_is_not_is_told_apart():
    """One answer lost and one gained of ten: no difference, but an interval of tens of points."""
    dense, other = cell("dense", 1.0, 5), cell("herald", 0.05, 5, scan=1.0)
    other["raw"][0]["exact"], other["raw"][9]["exact"] = 0.0, 1.0
    (found, _) = needed_budgets([dense, other])
    assert (found["budget"], found["surely"]) == (0.05, None)
