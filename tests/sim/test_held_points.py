"""A sweep's folder that is used again: what stands there is taken only where it would come out the same."""

import json
import shutil

import pytest

from herald_pipeline import hardware_io
from herald_pipeline.errors import ConfigError
from herald_sim import sweep as sweeping
from herald_sim.held_points import POINTS, read_points
from herald_sim.text import summary_text


@pytest.fixture
def profile(tmp_path):
    path = tmp_path / "mine.toml"
    shutil.copy(hardware_io.find("h100-sxm-80g_xeon-8481c"), path)
    return path


def sweep(profile, out, **options):
    point = {"model": "llada2-mini", "method": "dense", "hardware": str(profile), "context": 4096, "batch": 1}
    return sweeping.sweep([{**point, "gen_tokens": 96}], out, sweeping.local_workers(1), **options)


def test_a_point_of_a_profile_that_was_edited_since_runs_again(profile, tmp_path):
    first = sweep(profile, tmp_path / "out")
    text = profile.read_text(encoding="utf-8")
    edited = text.replace("value = 3350", "value = 1675", 1)
    assert edited != text
    profile.write_text(edited, encoding="utf-8")
    second = sweep(profile, tmp_path / "out")
    assert (first["outdated"], second["outdated"]) == (0, 1)
    assert second["best"]["throughput_tok_s"] < 0.9 * first["best"]["throughput_tok_s"]
    assert "1 stood there of another profile" in summary_text(second)


def test_a_point_of_the_other_mode_runs_again_and_the_newest_line_counts(profile, tmp_path):
    out = tmp_path / "out"
    sweep(profile, out)
    assert sweep(profile, out, fast=True)["outdated"] == 1
    assert sweep(profile, out, fast=True)["outdated"] == 0
    assert ["fast" in line["mode"] for line in read_points(out / POINTS)] == [False, True]


@pytest.mark.parametrize("line", ["garbage", "[]", json.dumps({"id": "x"})])
def test_a_line_that_is_no_point_is_refused_with_its_number(profile, tmp_path, line):
    out = tmp_path / "out"
    sweep(profile, out)
    with (out / POINTS).open("a", encoding="utf-8") as file:
        file.write(line + "\n")
    with pytest.raises(ConfigError, match=r"points\.jsonl, line 2: not a point of a sweep"):
        sweep(profile, out)
