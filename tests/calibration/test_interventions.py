"""Changes predicted before a run, and compared with it afterwards."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from calibration.interventions import Intervention, binding, compare, planned, predict
from calibration.points import Point
from calibration.runs import Sample
from herald_pipeline import catalogue, hardware_io
from herald_pipeline.errors import ConfigError

HARDWARE = hardware_io.profile_dir() / "h100-sxm-80g_xeon-8481c.toml"
BASE = Point("herald", 4096, 4, steps=8, kv_dtype="bf16")
CHANGES = (
    Intervention("T 8 -> 4", BASE, replace(BASE, steps=4)),
    Intervention("link", BASE, replace(BASE, conditions=(("link", 14.0),))),
)


@pytest.fixture
def predicted(tmp_path) -> Path:
    return predict(HARDWARE, catalogue.resolve("llada2-mini"), tmp_path / "p.json", "a test", CHANGES)


def cell(folder, name, throughput, **options):
    steps = options.pop("T", 8)
    result = {
        "model": "llada2-mini", "method": "herald", "context": 4096, "batch": 4, "steps": steps, "blocks": 6,
        "block_length": 32, "kv_dtype": "bf16", "options": options, "throughput_tok_s": throughput,
        "block_time_s": 1.0, "main_time_s": 1.0,
    }  # fmt: skip
    document = {"cell": f"run:herald:4096:4:{name}", "result": result}
    (folder / f"{name}.json").write_text(json.dumps(document), encoding="utf-8")


def test_predictions_state_when_with_what_and_from_which_profile_they_were_made(predicted):
    document = json.loads(predicted.read_text(encoding="utf-8"))
    assert len(document["profile_sha256"]) == 64
    assert document["written"].startswith("20")
    assert document["predictions"][0]["delta"] > 0


def test_predictions_cannot_be_written_again(predicted):
    with pytest.raises(ConfigError, match="none: name another file"):
        predict(HARDWARE, catalogue.resolve("llada2-mini"), predicted, "a test", CHANGES)


def test_changes_stand_side_by_side_and_what_did_not_run_is_named(predicted, tmp_path):
    runs = tmp_path / "cells"
    runs.mkdir()
    cell(runs, "base", 100.0)
    cell(runs, "steps", 150.0, T=4)
    found = compare(predicted, runs, lambda _: None)
    steps, link = found["rows"]
    assert steps["measured_delta"] == pytest.approx(0.5)
    assert steps["measured_binding"] == ["gpu", "gpu"]
    assert link["missing"] == "changed"
    assert found["summary"]["run"] == 1


def test_a_condition_that_a_name_holds_as_text_is_the_same_condition(predicted, tmp_path):
    runs = tmp_path / "cells"
    runs.mkdir()
    cell(runs, "base", 100.0)
    cell(runs, "link", 90.0, link="14")
    row = compare(predicted, runs, lambda _: None)["rows"][1]
    assert row["measured_delta"] == pytest.approx(-0.1)


@pytest.mark.parametrize(
    ("main", "shares", "binds"),
    [
        (0.99, {"select": 0.9}, "gpu"),
        (0.5, {"select": 0.5, "upload": 0.1}, "cpu"),
        (0.5, {"select": 0.2, "upload": 0.6}, "link"),
    ],
)
def test_what_a_block_waits_for_binds(main, shares, binds):
    figures = {"block_time_s": 1.0, "main_time_s": main}
    assert binding(Sample(BASE, figures, shares=shares)) == binds


def test_every_planned_change_changes_one_point_into_another():
    for change in planned():
        assert change.base.key != change.changed.key


def test_a_profile_that_ships_is_found_by_its_name_with_its_raw_tables(tmp_path):
    threads = Intervention("threads", BASE, replace(BASE, conditions=(("threads", 4),)))
    written = predict(Path("h200-141g_emr-16vcpu"), catalogue.resolve("llada2-mini"), tmp_path / "p", "", (threads,))
    document = json.loads(written.read_text(encoding="utf-8"))
    assert document["predictions"][0]["delta"] < 0
    assert len(document["profile_sha256"]) == 64


def test_a_file_that_is_no_prediction_is_refused(tmp_path):
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"model": "tiny", "predictions": []}), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"holds no predictions .it lacks 'written'"):
        compare(path, tmp_path, print)


def test_a_change_without_its_base_is_refused(predicted, tmp_path):
    document = json.loads(predicted.read_text(encoding="utf-8"))
    del document["predictions"][0]["base"]
    path = tmp_path / "x.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(ConfigError, match="it lacks 'base'"):
        compare(path, tmp_path, print)
