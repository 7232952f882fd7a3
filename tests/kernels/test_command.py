"""``herald-exec kernels``: one JSON object, sensible numbers, exit codes."""

import json

import pytest
from typer.testing import CliRunner

from herald_exec.kernels import checking
from herald_exec.kernels.benchmark import bench_kernels
from herald_exec.kernels.command import app
from herald_pipeline.environment import usable_cores
from herald_pipeline.errors import ConfigError

runner = CliRunner()


def test_one_of_check_and_bench_must_be_asked_for():
    found = runner.invoke(app, [])
    assert found.exit_code == 2
    assert "pass one of --check and --bench" in found.stderr


def test_a_wrong_tier_ends_with_exit_code_one(monkeypatch):
    wrong = [{"tier": "portable", "cases": 1, "swaps": 0, "worst_error": {}, "problems": ["row 0 head 0: differs"]}]
    monkeypatch.setattr(checking, "check_tiers", lambda: wrong)
    found = runner.invoke(app, ["--check", "--json"])
    assert found.exit_code == 1
    assert json.loads(found.stdout)["tiers"] == wrong
    assert "differs" in found.stderr


def test_more_threads_than_cores_are_refused_with_the_number_of_cores():
    found = runner.invoke(app, ["--bench", "--threads", str(usable_cores() + 1)])
    assert found.exit_code == 2
    assert f"threads must be <= {usable_cores()}" in " ".join(found.stderr.split())


def test_a_bench_says_on_the_way_what_it_measures():
    said = []
    bench_kernels(context=1024, threads=1, pool_gib=0.01, repeats=2, queries=(1,), with_torch=False, say=said.append)
    assert said[0] == "filling 0.01 GiB of KV"
    assert said[2:4] == ["repetition 1 of 2", "repetition 2 of 2"]


def test_progress_of_a_bench_goes_to_stderr_and_one_object_to_stdout():
    found = runner.invoke(app, ["--bench", "--context", "256", "--pool-gib", "0.005", "--repeats", "1", "--json"])
    assert "repetition 1 of 1" in found.stderr
    assert json.loads(found.stdout)["repeats"] == 1


def test_a_small_bench_measures_what_it_says():
    result = bench_kernels(context=1024, threads=1, pool_gib=0.01, repeats=2, queries=(1, 4), with_torch=False)
    assert json.loads(json.dumps(result)) == result
    assert {row["x"] for row in result["kernels"]} == {1, 4}
    assert all(row["gb_s"] > 0 and len(row["gb_s_samples"]) == 2 for row in result["kernels"])
    assert all(abs(sum(row["phase_shares"].values()) - 1) < 1e-6 for row in result["kernels"])
    assert result["gather"]["gb_s"] > 0


@pytest.mark.parametrize("change", [{"context": 1}, {"repeats": 0}, {"pool_gib": 0.0}, {"threads": 0}])
def test_a_bench_that_cannot_be_is_refused(change):
    with pytest.raises(ConfigError):
        bench_kernels(**change)
