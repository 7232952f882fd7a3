"""What people stumble over in tools of this kind, as command lines of `herald-sim`: cases U01-U06, U12 and U20."""

import io
import json
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from herald_pipeline import hardware_io
from herald_pipeline.errors import RunError
from herald_pipeline.scheduling.admission import Admission
from herald_pipeline.scheduling.lengths import check_length, padded_tokens
from herald_pipeline.trace import read_chrome, validate, write_chrome
from herald_pipeline.workload import RequestSpec
from herald_sim import cli

HARDWARE = "h100-sxm-80g_xeon-8481c"
RUN = ("run", "--model", "llada2-mini", "--method", "herald", "--context", "32768", "--batch", "80")


def herald_sim(*arguments):
    """The command in this process: its exit code and what it printed."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), mock.patch.object(sys, "argv", ["herald-sim", *arguments]):
        try:
            cli.main()
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
    return code, out.getvalue(), err.getvalue()


@pytest.fixture
def profile_with(tmp_path):
    """A copy of the paper's profile with one text replaced by another."""

    def make(before, after):
        text = (hardware_io.profile_dir() / f"{HARDWARE}.toml").read_text(encoding="utf-8")
        assert before in text
        # A profile is read once a process: each copy has its own name.
        path = tmp_path / f"copied{len(list(tmp_path.iterdir()))}.toml"
        path.write_text(text.replace(before, after), encoding="utf-8")
        return str(path)

    return make


def test_u01_a_link_above_what_its_generation_can_do_is_refused(profile_with):
    code, out, err = herald_sim(
        *RUN, "--hardware", profile_with("h2d_gb_s = { value = 27.68", "h2d_gb_s = { value = 12500")
    )
    assert (code, out) == (2, "")
    assert "machine.link.h2d_gb_s = 12500 GB/s" in err
    assert "31.5 GB/s" in err


@pytest.mark.parametrize("command", ["run", "peak"])
def test_u02_weights_that_do_not_fit_stop_the_command_with_numbers_that_add_up(profile_with, tmp_path, command):
    small = profile_with("memory_gb = { value = 80", "memory_gb = { value = 24")
    out_file = tmp_path / "trace.json"
    given_ = (*RUN, "--trace-out", str(out_file)) if command == "run" else ("peak", *RUN[1:-2])
    code, out, err = herald_sim(*given_, "--hardware", small)
    assert (code, out) == (1, "")
    assert not out_file.exists()
    units = {"GB": 1.0, "MB": 1e-3, "kB": 1e-6}
    rows = [line.split() for line in err.splitlines() if line.startswith("  hbm ")]
    lasting = {row[1]: float(row[2]) * units[row[3]] for row in rows if row[4:5] != ["peak"]}
    (total,) = [line for line in err.splitlines() if line.startswith("  gpu weights:")]
    assert lasting["weights"] == pytest.approx(32.5, abs=0.1)
    assert float(total.split()[2]) == pytest.approx(sum(lasting.values()), abs=0.03)
    assert "kv per request 1.64 GB" in err
    assert "SHORT" in total
    (nearest,) = [line for line in err.splitlines() if line.startswith("nearest that fits: ")]
    assert f"hardware {HARDWARE}" in nearest


def test_u02_where_no_machine_of_the_catalogue_holds_the_weights_the_memory_needed_is_named():
    code, out, err = herald_sim("peak", "--model", "llada2-flash", *RUN[3:-2], "--hardware", HARDWARE)
    assert (code, out) == (1, "")
    assert err.splitlines()[-1].startswith("nearest that fits: a machine with 29")
    assert err.splitlines()[-1].endswith("GB of device memory")


def test_u03_a_sweep_marks_the_batch_that_would_queue_and_never_recommends_it(tmp_path):
    axes = ("--method", "dense", "--context", "32768", "--batch", "15,16,17")
    folder = tmp_path / "out"
    code, out, _ = herald_sim(
        "sweep",
        *axes,
        "--model",
        "llada2-mini",
        "--hardware",
        HARDWARE,
        "--out",
        str(folder),
        "--json",
        "--workers",
        "1",
    )
    assert code == 0
    points = [json.loads(line) for line in (folder / "points.jsonl").read_text().splitlines()]
    found = {point["parameters"]["batch"]: (point["state"], point.get("reason", "")) for point in points}
    assert {batch: state for batch, (state, _) in found.items()} == {15: "ok", 16: "ok", 17: "infeasible"}
    assert found[17][1].startswith("gpu kv, short by ")
    assert json.loads(out)["best"]["parameters"]["batch"] == 16


def test_u03_lists_of_a_sweep_are_checked_and_do_not_go_with_a_grid(tmp_path):
    code, _, err = herald_sim("sweep", "--method", "dense", "--batch", "15,many", "--out", str(tmp_path))
    assert code == 2
    assert "--model is missing" in err
    assert "--batch must be whole numbers with commas between them, got 'many'" in err
    code, _, err = herald_sim("sweep", "--grid", "grid.toml", "--batch", "15", "--out", str(tmp_path))
    assert code == 2
    assert "--batch goes without --grid" in err


def test_u04_a_request_larger_than_the_pool_is_rejected_once_and_the_others_finish(tmp_path):
    table = tmp_path / "requests.csv"
    table.write_text("prompt_tokens,new_tokens\n" + "64,32\n" * 9 + "880,32\n")
    tiny = ("run", "--model", "tiny", "--method", "herald", "--hardware", HARDWARE, "--batch", "2", "--json")
    # Pools in host memory for two requests of 400 tokens each.
    start = time.monotonic()
    code, out, _ = herald_sim(*tiny, "--requests", str(table), "--host-limit-gb", "0.0005", "--check")
    assert time.monotonic() - start < 10
    result = json.loads(out)
    assert code == 0
    assert (result["finished"], list(result["rejected"])) == (9, ["9"])
    assert "take 928 positions in blocks of 32" in result["rejected"]["9"]


def test_u05_misspelled_keys_are_all_named_with_the_closest(tmp_path, monkeypatch):
    grid = tmp_path / "grid.toml"
    grid.write_text(
        f'[base]\nmodel = "llada2-mini"\nmethod = "dense"\nhardware = "{HARDWARE}"\ncontext = 4096\nkv_buget = 0.05\n'
        "[grid]\nbatch = [1]\nbatchsize = [80]\n"
    )
    code, _, err = herald_sim("sweep", "--grid", str(grid), "--out", str(tmp_path / "out"))
    assert code == 2
    assert "'kv_buget' is no option; did you mean 'budget'?" in err
    assert "'batchsize' is no option; did you mean 'batch'?" in err
    both = ("--set", "settings.kv_buget=0.05", "--set", "machine.link.h2d=3")
    code, _, err = herald_sim(*RUN, "--hardware", HARDWARE, *both)
    assert code == 2
    assert "did you mean 'settings.budget'?" in err
    assert "did you mean 'machine.link.h2d_gb_s'?" in err
    monkeypatch.setenv("HERALD_CPUU", "avx2")
    code, _, err = herald_sim("methods")
    assert code == 2
    assert "HERALD_CPUU is not known; did you mean 'HERALD_CPU'?" in err


def test_u06_a_profile_without_a_table_fails_before_simulating_and_says_what_measures_it(profile_with):
    text = (hardware_io.profile_dir() / f"{HARDWARE}.toml").read_text(encoding="utf-8")
    start = text.index('[fitted."engines.sglang-paper.gemm_efficiency"]')
    table = text[start : text.index("\n[", start) + 1]
    code, out, err = herald_sim(*RUN, "--hardware", profile_with(table, ""))
    assert (code, out) == (1, "")
    assert "engines.sglang-paper.gemm_efficiency: `python -m calibration measure --only gemm` measures it" in err
    assert f"complete profiles: {HARDWARE}" in err
    code, out, err = herald_sim(*RUN, "--hardware", profile_with(table, table.replace("\nvalue = ", "\namount = ")))
    assert (code, out) == (2, "")
    assert "gemm_efficiency.value is missing" in err
    assert "gemm_efficiency.amount: unknown key" in err


@given(st.integers(1, 9000), st.integers(1, 200), st.sampled_from([8, 32, 64]), st.integers(64, 9000))
def test_u12_what_is_admitted_writes_no_position_beyond_the_limit(prompt, new, block, limit):
    admission = Admission([RequestSpec(0, prompt, new).blocked(block)], slots=1, block_length=block, kv_tokens=limit)
    admission.admit(0)
    padded = padded_tokens(prompt, new, block)
    assert bool(admission.running) == (padded <= limit)
    if admission.rejected:
        assert admission.rejected[0] == check_length(prompt, new, block, limit, "request 0")
        assert f"take {padded} positions in blocks of {block}, the limit is {limit}" in admission.rejected[0]


U12 = (
    "request 0: prompt 8170 + new 20 = 8190 tokens take 8202 positions in blocks of 32, the limit is 8192; "
    "shorten the prompt"
)
"""8170 + 20 = 8190 positions are within the limit; a block of 32 from position 8170 on ends at 8202."""


def test_u12_a_request_that_fits_only_without_rounding_up_is_rejected():
    admission = Admission([RequestSpec(0, 8170, 20).blocked(32)], slots=1, block_length=32, kv_tokens=8192)
    assert admission.admit(0) == []
    assert admission.rejected[0] == U12


def test_u20_a_simulated_runs_trace_has_named_lanes_without_crossings_and_arrows_with_ends(tmp_path):
    path = tmp_path / "run.json"
    two_blocks = (*RUN[:-4], "--context", "4096", "--batch", "4", "--gen-tokens", "64", "--steps", "3")
    code, _, _ = herald_sim(*two_blocks, "--hardware", HARDWARE, "--trace-out", str(path))
    assert code == 0
    events = json.loads(path.read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    named = {event["tid"] for event in events if event["name"] == "thread_name"}
    assert {event["tid"] for event in spans} <= named
    for lane in named:
        ends = 0.0
        for event in sorted((e for e in spans if e["tid"] == lane), key=lambda e: (e["ts"], e["dur"])):
            assert event["ts"] >= ends - 1e-6
            ends = max(ends, event["ts"] + event["dur"])
    starts, finishes = ([event["id"] for event in events if event["ph"] == kind] for kind in "sf")
    assert starts
    assert sorted(starts) == sorted(finishes)
    trace = read_chrome(path)
    validate(trace)
    first, second = [span for span in trace.spans if span.stream == "main"][:2]
    crossing = [span for span in trace.spans if span is not second]
    crossing.append(second._replace(start_ns=first.start_ns + 1, end_ns=first.end_ns + 1))
    trace.spans[:] = crossing
    with pytest.raises(RunError):
        write_chrome(trace, tmp_path / "crossing.json")
