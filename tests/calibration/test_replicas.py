"""Replicas that ran on one host beside the prediction of them."""

import json
from pathlib import Path

import pytest

from calibration.replicas import compare, predict, text
from herald_pipeline import catalogue, hardware_io
from herald_pipeline.errors import ConfigError

HARDWARE = hardware_io.profile_dir() / "h200-141g_emr-16vcpu.toml"
SHAPE = catalogue.resolve("llada2-mini")


def result(threads=8, replicas=2):
    alone = {
        "method": "herald", "context": 32768, "batch": 8, "steps": 20, "blocks": 6, "block_length": 32,
        "kv_dtype": "bf16", "options": {"threads": threads, "blocks": 6},
    }  # fmt: skip
    return {"alone": alone, "replicas": replicas, "cores": [[0], [1]], "alone_tok_s": 1000.0, "scaling": 1.5}


def write(folder, model="llada2-mini", **changes):
    document = {"cell": "replicas:herald:32768:8", "model": model, "result": {**result(), "throughput_tok_s": 1500.0}}
    (folder / "replicas-herald-32768-8.json").write_text(json.dumps({**document, **changes}), encoding="utf-8")


def test_fewer_threads_a_replica_leave_more_of_the_memory_to_the_others():
    few, many = (predict(HARDWARE, SHAPE, result(threads)) for threads in (4, 15))
    assert few["alone_tok_s"] < many["alone_tok_s"]
    assert many["scaling"] < few["scaling"] <= 2 + 1e-6


def test_each_figure_stands_beside_its_prediction(tmp_path):
    write(tmp_path)
    found = compare(HARDWARE, tmp_path, SHAPE, print)
    figure = found["rows"][0]["throughput_tok_s"]
    assert figure["measured"] == 1500
    assert figure["error"] == pytest.approx(figure["predicted"] / 1500 - 1)
    assert "replicas:herald:32768:8" in text(found)


def test_runs_of_another_model_and_failed_ones_are_named_and_left_out(tmp_path):
    said = []
    write(tmp_path, model="sdar-8b")
    with pytest.raises(ConfigError, match="holds no replicas of llada2-mini"):
        compare(HARDWARE, tmp_path, SHAPE, said.append)
    write(tmp_path, error="RunError: a replica ended early")
    with pytest.raises(ConfigError, match="holds no replicas"):
        compare(HARDWARE, tmp_path, SHAPE, said.append)
    assert said[0].endswith("it ran sdar-8b")
    assert "ended early" in said[1]


def test_the_profile_may_be_named(tmp_path):
    write(tmp_path)
    named = compare(Path("h200-141g_emr-16vcpu"), tmp_path, SHAPE, print)
    assert named == compare(HARDWARE, tmp_path, SHAPE, print)


def test_a_cell_without_what_ran_alone_is_refused_with_its_file(tmp_path):
    write(tmp_path, result={"replicas": 2, "cores": [], "throughput_tok_s": 1.0})
    with pytest.raises(ConfigError, match=r"replicas-herald-32768-8\.json is no result .*: it lacks 'alone'"):
        compare(HARDWARE, tmp_path, SHAPE, print)
