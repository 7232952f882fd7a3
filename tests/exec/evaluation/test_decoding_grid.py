"""DSB's half of the evaluation: the plan, its figures, and going on from a file."""

import gzip
import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from herald_exec.evaluation import decoding_grid
from herald_exec.evaluation.__main__ import app
from herald_exec.evaluation.decoding_grid import compare, draw_task, mean_interval, newline_tokens, run_plan
from herald_exec.evaluation.decoding_plan import PLAN, REDUCED, Cell, Plan, check_plan
from herald_exec.evaluation.decoding_report import read_parts, read_results, summary, text
from herald_exec.models import random_model
from herald_exec.reference import open_reference, read_shipped_material
from herald_pipeline.errors import ConfigError

SMALL = {"response": 96, "fits": 96}
TINY = Plan(
    name="tiny",
    groups=(
        ("grid", (Cell(**SMALL), Cell(scheduler="dsb-const", cache="dsb", **SMALL))),
        ("p_min", (Cell(scheduler="dsb-const", cache="dsb", **SMALL),)),
        ("ratios", (Cell(diagnose=True, **SMALL),)),
    ),
    tasks=("few",),
    samples=1,
    ratio_samples=1,
    threshold=0.5,
)


@pytest.fixture(scope="module")
def material():
    return read_shipped_material()


@pytest.fixture(scope="module")
def model():
    """Small and untrained, with the reference model's vocabulary: what is tested here is the bookkeeping."""
    shape = replace(
        open_reference("herald-ref-bidirectional").shape,
        num_layers=2,
        hidden_size=32,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        intermediate_size=48,
    )
    small = random_model(shape, seed=5)
    small.weights.head.mul_(6.0)
    return small


@pytest.fixture(scope="module")
def finished(model, material, tmp_path_factory):
    path = tmp_path_factory.mktemp("decoding") / "out.jsonl"
    return list(run_plan(model, material, TINY, batch=1, out=path)), path


def test_a_cell_runs_once_for_all_its_groups_and_bases_come_first():
    cells = list(TINY.cells())
    assert [groups for _, groups in cells] == [("grid",), ("grid", "p_min"), ("ratios",)]
    for plan in (PLAN, REDUCED):
        order = [cell for cell, _ in plan.cells()]
        assert len(set(order)) == len(order)
        assert all(order.index(cell.base) <= order.index(cell) for cell in order)


def test_the_full_plan_holds_the_sweeps_that_were_promised():
    groups = {name: [cell for cell, names in PLAN.cells() if name in names] for name, _ in PLAN.groups}
    assert {c.decoder for c in groups["grid"]} >= {"top1", "confidence"}
    assert {c.s_init for c in groups["s_init"]} == {16, 32, 48, 64}
    assert {c.response for c in groups["length"]} == {128, 256, 512, 1024}
    assert {c.s_max for c in groups["s_max"]} == {32, 48, 64, 80, 96, None}
    assert {c.p_min for c in groups["p_min"]} == {0, 4, 8, 16, 24, 32}
    assert {c.suffix for c in groups["suffix"]} == {0, 4, 8, 16, 24, 32}
    assert {(c.scheduler, c.cache) for c in groups["cache-under-dsb"]} == {
        (scheduler, cache) for scheduler in ("dsb-const", "dsb-greedy") for cache in ("dual", "dsb")
    }
    assert PLAN.ratio_samples == 50
    assert len({c.task for c in groups["ratios"]}) == 2
    assert PLAN.samples >= 200


def test_every_cell_of_both_plans_can_be_run():
    check_plan(PLAN)
    check_plan(REDUCED)


def test_a_plan_that_differs_has_another_fingerprint():
    assert replace(REDUCED, samples=5).fingerprint != REDUCED.fingerprint == replace(REDUCED).fingerprint


def test_lists_have_the_tasks_number_of_questions_and_come_from_the_seeds(material):
    drawn = {task: draw_task(material, PLAN, task, 128, 5) for task in ("few", "many")}
    assert all(len(sample.questions) <= 2 for sample in drawn["few"])
    assert all(len(sample.questions) >= 3 for sample in drawn["many"])
    assert draw_task(material, PLAN, "few", 128, 3) == drawn["few"][:3]


def test_adablocks_delimiters_end_a_line(material):
    tokens = newline_tokens(material, 4096)
    assert material.encoder("\n")[-1] in tokens
    assert all(material.encoder.decode([token]).endswith("\n") for token in tokens)


def test_means_have_normal_intervals_by_hand():
    # Mean 2, variance 1, three values: 1.96 / sqrt(3).
    found = mean_interval([1, 2, 3])
    assert found["value"] == 2
    assert found["high"] - 2 == pytest.approx(1.96 / 3**0.5)
    assert mean_interval([7])["low"] is None


def row_of(rights, nfe, speed):
    raw = [{"right": right, "nfe": nfe} for right in rights]
    return {"raw": raw, "throughput_tok_s": speed}


def test_losses_are_marked_and_only_losses():
    # Five of five samples lose an answer: 1/32. Four of four would be 1/16, no loss at 5%.
    base = row_of([[1, 1]] * 5, 10, 100.0)
    worse = compare(row_of([[1, 0]] * 5, 12, 90.0), base)
    assert worse["marks"] == ["accuracy", "nfe", "tok/s"]
    assert worse["p_loss"] == 1 / 32
    assert compare(row_of([[1, 0]] * 4 + [[1, 1]], 10, 100.0), base)["marks"] == []
    assert compare(row_of([[1, 1]] * 5, 5, None), base)["speed_of_base"] is None


def test_rows_hold_figures_intervals_and_raw_answers(finished):
    rows, _ = finished
    base, cached, diagnosed = rows
    assert base["accuracy"]["low"] <= base["accuracy"]["value"] <= base["accuracy"]["high"]
    assert base["against_base"]["marks"] == []
    assert cached["reused_positions"] > 0 == base["reused_positions"]
    assert base["late_ratio"] is None
    assert diagnosed["late_ratio"] is not None
    assert diagnosed["throughput_tok_s"] is None
    assert diagnosed["nfe"] == base["nfe"]
    assert [len(row["raw"]) for row in rows] == [1, 1, 1]


def test_a_run_goes_on_from_its_file_and_refuses_anothers(finished, model, material, monkeypatch):
    rows, path = finished
    lines = path.read_text().splitlines()
    cut = path.with_name("cut.jsonl")
    cut.write_text("\n".join(lines[:2]) + "\n" + lines[2][:40])
    again = list(run_plan(model, material, TINY, batch=1, out=cut))
    assert again[:2] == rows[:2]
    assert len(read_results(cut)) == 3
    assert again[2]["nfe"] == rows[2]["nfe"]
    monkeypatch.setattr(decoding_grid.Bench, "run", lambda *args: pytest.fail("a finished cell was run again"))
    assert list(run_plan(model, material, TINY, batch=1, out=path)) == rows
    with pytest.raises(ConfigError, match=r"is of another run \(batch 1 instead of 2\); give another --out"):
        list(run_plan(model, material, TINY, batch=2, out=path))


def test_a_file_of_something_else_is_left_alone(model, material, tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("mine\n")
    with pytest.raises(ConfigError, match="line 1 is no cell of a decoding run"):
        list(run_plan(model, material, TINY, batch=1, out=path))
    assert path.read_text() == "mine\n"


def test_the_report_prints_every_cell_in_each_of_its_groups(finished):
    rows, path = finished
    printed = text(read_results(path))
    assert printed == text(rows)
    assert printed.count("confidence+dsb-const+dsb B32 L96 p24") == 2
    assert "ratios, few (1 to 1 samples a cell)" in printed


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--group", "p-min"), "unknown group 'p-min'; did you mean 'p_min'"),
        (("--task", "lots"), "unknown task 'lots'"),
        (("--samples", "0"), "samples must be >= 1"),
        (("--batch", "0"), "--batch must be >= 1"),
        (("--model", "herald-ref"), "unknown reference model 'herald-ref'"),
    ],
)
def test_mistakes_are_answered_before_anything_runs(args, message):
    result = CliRunner().invoke(app, ["decoding", "--reduced", *args])
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)


def test_a_file_without_results_is_refused(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"a": 1}))
    with pytest.raises(ConfigError, match="holds no results"):
        read_results(path)


def test_parts_of_a_plan_share_its_work_and_each_holds_what_it_compares_with():
    whole = [cell for cell, _ in PLAN.cells()]
    assert [cell for cell, _ in PLAN.part(1, 1)] == whole
    parts = [[cell for cell, _ in PLAN.part(number, 3)] for number in (1, 2, 3)]
    assert set().union(*parts) == set(whole)
    for part in parts:
        assert part == [cell for cell in whole if cell in set(part)]
        assert all(cell.base in part for cell in part)
    loads = [sum(cell.work(PLAN.prompt_tokens) for cell in part) for part in parts]
    assert max(loads) < 1.1 * min(loads)


def test_what_the_articles_tables_show_comes_before_what_is_ours():
    groups = [groups for cell, groups in PLAN.cells() if cell.decoder == "entropy"]
    cells = [cell for cell, _ in PLAN.cells()]
    assert groups
    assert all(cell.decoder == "entropy" for cell in cells[-len(groups) :])


def test_parts_are_read_as_one_run_compressed_or_not(finished, model, material, tmp_path):
    rows, _ = finished
    paths = [tmp_path / f"part-{number}.jsonl" for number in (1, 2)]
    for number, path in enumerate(paths, start=1):
        list(run_plan(model, material, TINY, batch=1, part=(number, 2), out=path))
    packed = paths[1].with_suffix(".jsonl.gz")
    packed.write_bytes(gzip.compress(paths[1].read_bytes()))
    together = read_parts([paths[0], packed])
    assert {json.dumps(row["cell"]) for row in together} == {json.dumps(row["cell"]) for row in rows}
    assert len(together) == len(rows)
    found = summary(together)
    assert found["weights"] == rows[0]["weights"]
    assert len(found["cells"]) == len(rows)
    assert not any("raw" in cell for cell in found["cells"])


def test_parts_of_different_runs_are_refused(finished, tmp_path):
    rows, path = finished
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps(rows[0] | {"batch": 7}) + "\n")
    with pytest.raises(ConfigError, match=r"of another run than .*batch 7 instead of 1"):
        read_parts([path, other])
