"""Cells, resuming and the table of a sliding run."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from herald_exec.evaluation.__main__ import app
from herald_exec.evaluation.sliding import Slide
from herald_exec.evaluation.sliding_plan import (
    PLAN,
    REDUCED,
    Group,
    SlidingPlan,
    parse_slide,
    read_sliding,
    run_sliding,
    sliding_facts,
    sliding_key,
)
from herald_exec.evaluation.sliding_report import read_cells, shared_tasks, table, text
from herald_exec.models import random_model, tiny_shape
from herald_exec.reference import read_shipped_material
from herald_pipeline.errors import ConfigError

SMALL = SlidingPlan(
    (
        Group((Slide(32, 32), Slide(8, 32)), (("dense", (1.0,)), ("herald", (0.1,))), ("log",)),
        Group((Slide(32, 32),), (("dense", (1.0,)),), ("kv",)),
    ),
    contexts=(256,),
    samples=2,
    threshold=0.002,
)


@pytest.fixture(scope="module")
def model():
    # No end token, so that random weights decode every block.
    return random_model(tiny_shape(vocab_size=4096, num_layers=3, eos_token_ids=(4095,)), seed=3)


@pytest.fixture(scope="module")
def rows(model):
    return list(run_sliding(model, read_shipped_material(), SMALL))


def test_every_cell_of_a_plan_is_there_once(rows):
    assert [sliding_key(row) for row in rows] == [
        (slide.name, rule, budget, task, context) for slide, rule, budget, task, context in SMALL.cells()
    ]
    for plan in (PLAN, REDUCED):
        cells = list(plan.cells())
        assert len(cells) == len(set(cells))


def test_the_plan_asks_what_the_issue_asks():
    cells = set(PLAN.cells())
    for task in ("kv", "multi", "hop", "code", "log", "rec"):
        for slide in (Slide(32, 32), Slide(8, 32)):
            assert (slide, "dense", 1.0, task, 4096) in cells
            for rule in ("herald", "herald-32q"):
                assert {(slide, rule, budget, task, 4096) for budget in (0.05, 0.1, 0.2)} <= cells
    assert PLAN.samples == 200


def test_costs_a_token_are_counts_of_the_raw_answers(rows):
    row = next(row for row in rows if row["slide"] == "8/32" and row["rule"] == "herald")
    tokens = [raw["tokens"] for raw in row["raw"]]
    forwards = [sum(raw["steps"]) + len(raw["steps"]) for raw in row["raw"]]
    assert tokens == [8 * len(raw["steps"]) for raw in row["raw"]]
    assert row["forwards_per_token"]["value"] == pytest.approx(
        sum(f / t for f, t in zip(forwards, tokens, strict=True)) / 2
    )
    assert row["positions_per_token"] == pytest.approx(32 * sum(forwards) / sum(tokens))
    assert row["selections_per_token"] == pytest.approx(sum(len(raw["steps"]) - 1 for raw in row["raw"]) / sum(tokens))
    assert row["scan_bytes_per_token"] > 0


def test_a_run_goes_on_from_its_file(model, rows, tmp_path):
    out = tmp_path / "s.jsonl"
    out.write_text("".join(json.dumps(row) + "\n" for row in rows[:2]) + '{"cut', encoding="utf-8")
    done = read_sliding(out, sliding_facts(model, SMALL))
    assert list(done) == [sliding_key(row) for row in rows[:2]]
    rest = list(run_sliding(model, read_shipped_material(), SMALL, done=done))
    assert [row["raw"] for row in rest] == [row["raw"] for row in rows[2:]]
    with pytest.raises(ConfigError, match="another run"):
        read_sliding(out, sliding_facts(model, replace(SMALL, samples=3)))


def test_parts_share_the_cells(model, rows):
    material = read_shipped_material()
    found = [sliding_key(row) for i in (1, 2) for row in run_sliding(model, material, SMALL, part=(i, 2))]
    assert sorted(found) == sorted(map(sliding_key, rows))


def test_the_table_compares_over_tasks_that_all_ran(rows):
    assert shared_tasks(rows) == [("log", 256)]
    entries = {(entry["slide"], entry["rule"]): entry for entry in table(rows)}
    assert set(entries["32/32", "dense"]["tasks"]) == {"log@256", "kv@256"}
    assert entries["32/32", "dense"]["samples"] == 2
    assert entries["32/32", "dense"]["minus_fixed"] is entries["32/32", "dense"]["minus_dense"] is None
    assert entries["8/32", "herald"]["minus_fixed"]["value"] == 0.0
    assert "not run" in text(rows)


def test_the_bound_leaves_out_both_forwards_of_periods_that_were_complete(rows):
    (entry,) = [e for e in table(rows) if (e["slide"], e["rule"]) == ("8/32", "herald")]
    row = next(row for row in rows if row["slide"] == "8/32" and row["rule"] == "herald")
    tokens, periods = sum(raw["tokens"] for raw in row["raw"]), sum(len(raw["steps"]) for raw in row["raw"])
    assert 0 < entry["ahead"] < 1
    assert entry["forwards_without_ahead"] == pytest.approx(
        entry["forwards_per_token"] - 2 * entry["ahead"] * periods / tokens
    )


def test_cells_of_nothing_in_common_are_not_compared(rows):
    with pytest.raises(ConfigError, match="no task was run by every"):
        table([row for row in rows if (row["task"] == "kv") == (row["rule"] == "dense" and row["slide"] == "32/32")])


def test_a_file_of_something_else_is_refused(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"rule": "dense"}\n', encoding="utf-8")
    with pytest.raises(ConfigError, match="no cells of a sliding run"):
        read_cells(path)


def test_a_slide_is_named_as_it_is_given():
    for slide in (Slide(8, 32), Slide(32, 64, clean="window"), Slide(8, 32, sight="stride")):
        assert parse_slide(slide.name) == slide


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--slide", "8"), "give stride/window"),
        (("--slide", "8/12"), "window must be a multiple of the stride"),
        (("--slide", "8/32 cleen=window"), "give stride/window"),
        (("--task", "lgo"), "unknown task 'lgo'; did you mean 'log'"),
        (("--rule", "herlad"), "did you mean 'herald'"),
        (("--budget", "0"), "budget must be > 0"),
        (("--samples", "0"), "samples must be >= 1"),
        (("--part", "3/2"), "--part '3/2'"),
        (("--model", "herald-ref-bidirectional"), "unknown reference model 'herald-ref-bidirectional'"),
    ],
)
def test_mistakes_are_answered_before_anything_runs(args, message):
    result = CliRunner().invoke(app, ["sliding", "--reduced", *args])
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)
