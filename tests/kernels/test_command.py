"""``herald-exec kernels``: one JSON object, sensible numbers, exit codes, tables that can be read."""

import io
import json
import sys

import pytest
from rich.console import Console

from herald_exec import cli
from herald_exec.kernels import checking
from herald_exec.kernels.benchmark import bench_kernels
from herald_exec.kernels.options import PHASES
from herald_exec.kernels.text import show_bench, show_check
from herald_pipeline.environment import usable_cores
from herald_pipeline.errors import ConfigError


@pytest.fixture
def kernels(monkeypatch, capsys):
    """Run ``herald-exec kernels`` as a shell would: exit code, stdout, stderr."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["herald-exec", "kernels", *arguments])
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
        found = capsys.readouterr()
        return code, found.out, found.err

    return call


def printed(show, result, width=80):
    """The lines that a table and what stands below it take in a file."""
    out = io.StringIO()
    show(result, Console(width=width, file=out))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def made_bench():
    """A result of ``--bench`` with the longest names and numbers that it has."""
    name = "avx512bf16 x=32, 8-bit keys, all candidates again"
    kernel = {"name": name, "rows": 1048, "gb_s": 1314.74, "of_read_ceiling": 2.034, "gflops": 16732.0}
    shares = dict.fromkeys(PHASES, 0.123) | {"rescore": 0.0}
    return {
        "cpu": "Processor",
        "read_gb_s": {"16": {"median": 154.7}},
        "kernels": [kernel | {"of_roof": 0.55, "roof": "fma", "phase_shares": shares}],
        "limits": [{"name": f"{name} over {name}", "ratio": 2.22, "limit": 3.97}],
        "topk": [],
        "gather": dict.fromkeys(("gb_s", "of_memcpy", "memcpy_gb_s", "of_faster_copy", "streaming_copy_gb_s"), 1.5),
    }


@pytest.mark.parametrize("arguments", [(), ("--check", "--bench")])
def test_one_of_check_and_bench_must_be_asked_for(kernels, arguments):
    assert kernels(*arguments) == (2, "", "herald-exec: pass one of --check and --bench\n")


def test_a_wrong_tier_ends_with_exit_code_one(kernels, monkeypatch):
    wrong = [{"tier": "portable", "cases": 1, "swaps": 0, "worst_error": {}, "problems": ["row 0 head 0: differs"]}]
    monkeypatch.setattr(checking, "check_tiers", lambda: wrong)
    code, out, err = kernels("--check", "--json")
    assert code == 1
    assert json.loads(out)["tiers"] == wrong
    assert "differs" in err


def test_a_value_out_of_range_is_refused_in_the_words_of_the_other_commands(kernels):
    code, out, err = kernels("--bench", "--context", "5")
    assert (code, out) == (2, "")
    assert err.splitlines()[-1] == "herald-exec: context must be >= 64, got 5"


def test_more_threads_than_cores_are_refused_with_the_number_of_cores(kernels):
    code, _, err = kernels("--bench", "--threads", str(usable_cores() + 1))
    assert code == 2
    assert f"threads must be <= {usable_cores()}" in err


def test_the_help_page_names_no_commands_below_kernels(kernels):
    _, out, _ = kernels("--help")
    assert out.splitlines()[0].endswith("herald-exec kernels [OPTIONS]")


@pytest.mark.parametrize("width", [80, 150])
def test_no_cell_of_a_bench_is_cut(width):
    lines = printed(show_bench, made_bench(), width)
    said = " ".join(" ".join(lines).split())
    assert "…" not in said
    for cell in ("again", "1048", "1314.74", "2.034", "16732", "0.55 fma", "importance", "12.3%"):
        assert cell in said


def test_phases_that_no_kernel_spends_time_in_are_left_out():
    heading = next(line for line in printed(show_bench, made_bench()) if "scan" in line)
    assert heading.split() == ["kernel", *(name for name in PHASES if name != "rescore")]


def test_a_line_below_the_tables_stays_whole_in_a_file():
    result = made_bench()
    assert f"{result['limits'][0]['name']}: 2.22x, limit 3.97x" in printed(show_bench, result)


def test_no_cell_of_a_check_is_cut():
    worst = {f"{what}_{kind}": 1.5e-3 for kind in ("few", "many", "amx") for what in ("output", "importance")}
    row = {"tier": "avx512bf16", "cases": 152, "swaps": 26, "worst_error": worst, "problems": []}
    lines = printed(show_check, [row])
    assert not any("…" in line for line in lines)
    assert [line for line in lines if "e-03" in line][-1].split() == ["importance_amx", "1.5e-03"]


def test_a_bench_says_on_the_way_what_it_measures():
    said = []
    bench_kernels(context=1024, threads=1, pool_gib=0.01, repeats=2, queries=(1,), with_torch=False, say=said.append)
    assert said[0] == "filling 0.01 GiB of KV"
    assert said[2:4] == ["repetition 1 of 2", "repetition 2 of 2"]


def test_progress_of_a_bench_goes_to_stderr_and_one_object_to_stdout(kernels):
    code, out, err = kernels("--bench", "--context", "256", "--pool-gib", "0.005", "--repeats", "1", "--json")
    assert code == 0
    assert "repetition 1 of 1" in err
    assert json.loads(out)["repeats"] == 1


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
