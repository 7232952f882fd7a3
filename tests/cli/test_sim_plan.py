"""`herald-sim ceilings, explain, sweep, exhibit, claims` at the command line."""

import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from unittest import mock

import pytest

from herald_sim import cli

HARDWARE = "h100-sxm-80g_xeon-8481c"
POINT = ("--model", "llada2-mini", "--method", "herald", "--hardware", HARDWARE, "--context", "32768", "--batch", "80")


def herald_sim(*arguments):
    """Exit code, stdout and stderr of the command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), mock.patch.object(sys, "argv", ["herald-sim", *arguments]):
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
    return code, out.getvalue(), err.getvalue()


def answer(*arguments):
    code, out, err = herald_sim(*arguments, "--json")
    assert code == 0, err
    assert out.count("\n") == 1
    return json.loads(out)


def test_ceilings_name_all_eight_and_one_ring_a_scheme():
    rows = answer("ceilings", "--model", "llada2-mini", "--hardware", HARDWARE, "--context", "32768")["rows"]
    assert {row["name"] for row in rows} == {
        "full_kv_fetch_per_step",
        "sparse_fetch_per_step",
        "sparse_fetch_per_block",
        "cpu_32q_attention",
        "cpu_32q_kernel",
        "cpu_1q_kernel",
        "gpu_full_kv_forward",
        "gpu_sparse_forward",
    }
    schemes = {row["scheme"] for row in rows}
    assert sum(row["binding"] for row in rows) == len(schemes)


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--context", "0", "context must be >= 1"),
        ("--budget", "nan", "budget must be finite"),
        ("--steps", "0", "steps"),
    ],
)
def test_ceilings_refuse_what_cannot_be(option, value, said):
    arguments = {"--model": "llada2-mini", "--hardware": HARDWARE, "--context": "32768", option: value}
    code, out, err = herald_sim("ceilings", *(text for pair in arguments.items() for text in pair))
    assert (code, out) == (2, "")
    assert said in err


def test_explain_says_where_time_goes_and_what_would_help():
    found = answer("explain", *POINT)
    assert sum(found["critical_path_s"].values()) == pytest.approx(found["block_time_s"])
    assert {"T 20 -> 22", "KV bf16 -> fp8", "+10% host memory bandwidth"} <= set(found["changes"])
    text = herald_sim("explain", *POINT)[1]
    assert "critical path" in text


def test_fp8_kv_halves_what_crosses_and_what_is_kept():
    whole, half = (answer("run", *POINT, "--kv-dtype", kind, "--no-interval") for kind in ("bf16", "fp8"))
    assert half["kv_bytes_per_request"] == pytest.approx(whole["kv_bytes_per_request"] / 2, rel=0.01)
    each = [run["stages"]["upload"]["bytes"] / run["stages"]["upload"]["count"] for run in (whole, half)]
    assert each[1] == pytest.approx(each[0] / 2, rel=1e-3)


def test_run_states_an_interval_that_holds_its_value():
    found = answer("run", *POINT)
    low, high = found["interval"]
    assert low < found["throughput_tok_s"] < high
    assert "interval" not in answer("run", *POINT, "--no-interval")


def test_fast_says_what_it_leaves_out():
    found = answer("run", *POINT, "--fast")
    assert found["mode"].startswith("fast")
    assert 0 < found["contention_error"] < 0.35


def test_sweep_writes_points_and_names_the_best(tmp_path):
    grid = tmp_path / "grid.toml"
    grid.write_text(
        f'[base]\nmodel = "llada2-mini"\nhardware = "{HARDWARE}"\ncontext = 32768\ngen_tokens = 96\n'
        '[grid]\nmethod = ["dense"]\nbatch = [16, 18]\n'
    )
    found = answer("sweep", "--grid", str(grid), "--out", str(tmp_path / "out"), "--workers", "1")
    assert (found["points"], found["ok"], found["infeasible"]) == (2, 1, 1)
    assert found["best"]["parameters"]["batch"] == 16
    assert len((tmp_path / "out" / "points.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--on", "cluster"), "--on must be 'local' or 'dask=ADDRESS'"),
        (("--workers", "0"), "workers must be >= 1"),
    ],
)
def test_sweep_refuses_places_that_do_not_exist(tmp_path, arguments, said):
    grid = tmp_path / "grid.toml"
    grid.write_text("[grid]\n")
    code, _, err = herald_sim("sweep", "--grid", str(grid), "--out", str(tmp_path / "out"), *arguments)
    assert code == 2
    assert said in err


def test_exhibits_are_named_and_unknown_ones_get_the_closest():
    assert answer("exhibit", "fig-8")["rows"][0]["published"] > 0
    code, _, err = herald_sim("exhibit", "fig-88")
    assert code == 2
    assert "did you mean 'fig-8'" in err


def test_claims_have_a_verdict_each_and_can_be_picked_by_it():
    rows = answer("claims")["claims"]
    assert len(rows) > 100
    picked = answer("claims", "--verdict", rows[0]["verdict"])["claims"]
    assert {row["verdict"] for row in picked} == {rows[0]["verdict"]}
    assert herald_sim("claims", "--verdict", "maybe")[0] == 2
