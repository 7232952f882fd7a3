"""The demo's page and command, from files as calibration leaves them."""

import json
import shutil
import subprocess
import sys

import pytest

from herald_pipeline import catalogue, hardware_io
from herald_pipeline.errors import ConfigError
from herald_pipeline.pipeline import build as build_pipeline
from herald_pipeline.workload import Workload
from herald_sim.simulate import simulate
from reports.demo import Inputs, build
from reports.page import render

CONTEXT, BATCH = 4096, 1
HARDWARE = hardware_io.profile_dir() / "h100-sxm-80g_xeon-8481c.toml"


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traces")
    profile = hardware_io.resolve(HARDWARE)
    for method in ("dense", "herald"):
        workload = Workload.uniform(CONTEXT, BATCH, gen_tokens=96, steps=4)
        out = folder / f"{method}_{CONTEXT}x{BATCH}.simulated.trace.json.gz"
        simulate(build_pipeline(catalogue.get("tiny"), method), profile, workload, trace_out=out)
        (folder / out.name.replace("simulated", "measured")).write_bytes(out.read_bytes())
    return folder


@pytest.fixture
def runs(tmp_path, document, traces):
    (tmp_path / "reconcile.json").write_text(json.dumps(document), encoding="utf-8")
    shutil.copytree(traces, tmp_path / "traces")
    return tmp_path


def inputs(runs):
    return Inputs(runs, HARDWARE, catalogue.get("tiny"), CONTEXT, BATCH)


def test_the_page_leads_with_what_was_found_on_held_out_points(runs):
    title, lead, sections = build(inputs(runs))
    assert title == "HERALD on h100-sxm-80g_xeon-8481c"
    assert "within 15% on 2 of 2 held-out points (median error +5.0%, worst +10.0%)" in lead
    assert [section.title for section in sections] == [
        "Throughput",
        "Timeline of dense",
        "Timeline of herald",
        "Where prediction and measurement differ",
        "Ceilings",
        "Memory",
        "Every number of the profile",
    ]


def test_errors_beyond_the_bar_are_marked_and_not_hidden(runs):
    _, _, sections = build(inputs(runs))
    rows = {row[0].text: row for row in sections[3].table.rows}
    assert rows["select"][4].kind == "number bad"
    assert rows["denoise"][4].kind == "number good"


def test_a_missing_trace_is_named(runs):
    (runs / "traces" / f"herald_{CONTEXT}x{BATCH}.simulated.trace.json.gz").unlink()
    with pytest.raises(ConfigError, match=r"no trace of herald at 4096 x 1: .*simulated\.trace\.json\.gz is missing"):
        build(inputs(runs))


def test_the_command_writes_one_page_and_the_charts(runs, tmp_path):
    out, png = tmp_path / "out" / "page.html", tmp_path / "png"
    arguments = [
        "--runs",
        runs,
        "--hardware",
        HARDWARE,
        "--model",
        "tiny",
        "--context",
        CONTEXT,
        "--out",
        out,
        "--png",
        png,
    ]
    command = [sys.executable, "-m", "reports", "build", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "a note &lt;with&gt; signs &amp; all" in out.read_text(encoding="utf-8")
    assert len(list(png.glob("*.png"))) == 6


def test_the_command_without_runs_ends_with_a_message(tmp_path):
    command = [sys.executable, "-m", "reports", "build", "--runs", str(tmp_path), "--hardware", str(HARDWARE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert "calibration reconcile --out" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_point_that_was_not_judged_is_neither_good_nor_bad(runs, document):
    document["points"][1]["refused"] = "the machine ran 1.50 times slower than when it was calibrated: not judged"
    (runs / "reconcile.json").write_text(json.dumps(document), encoding="utf-8")
    _, _, sections = build(inputs(runs))
    row = sections[0].table.rows[1]
    assert (row[1].text, row[5].kind) == ("not judged", "number")
    assert any("1.50 times slower" in note for note in sections[0].notes)
    assert "1 of 1 held-out ones" in sections[0].chart.to_dict()["description"]


def test_a_page_of_which_no_held_out_point_was_judged_is_written_and_says_so(runs, document):
    for point in document["points"]:
        point["refused"] = "the machine ran 1.50 times slower than when it was calibrated: not judged"
    document["summary"] = {"held-out": {"refused": 3}, "stages": {}}
    (runs / "reconcile.json").write_text(json.dumps(document), encoding="utf-8")
    title, lead, sections = build(inputs(runs))
    found = {section.title: section for section in sections}["Where prediction and measurement differ"]
    assert found.chart is None
    assert found.texts == ("No held-out point was judged, so there is no error of a stage to show.",)
    assert "nothing is judged" in lead
    assert found.texts[0] in render(title, lead, sections)
