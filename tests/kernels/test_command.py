"""``herald-exec kernels``: one JSON object, sensible numbers, exit codes."""

import json

import pytest
from typer.testing import CliRunner

from herald_exec.kernels import checking
from herald_exec.kernels.benchmark import bench_kernels
from herald_exec.kernels.command import app
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
