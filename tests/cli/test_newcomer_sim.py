"""What a newcomer meets in `herald-sim`: nothing that was said is ignored, and nothing ends in a traceback."""

import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from unittest import mock

import pytest

from herald_pipeline import hardware_io
from herald_sim import cli

HARDWARE = "h100-sxm-80g_xeon-8481c"
WHAT = ("--model", "llada2-mini", "--method", "herald", "--hardware", HARDWARE)
RUN = ("run", *WHAT, "--context", "4096", "--batch", "4")
CEILINGS = ("ceilings", "--model", "llada2-mini", "--hardware", HARDWARE, "--context", "4096")
EXPLAIN = ("explain", *RUN[1:])
DESCRIBE = ("describe", "--model", "tiny", "--method", "herald")


def herald_sim(*arguments):
    """The command in this process: its exit code, stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), mock.patch.object(sys, "argv", ["herald-sim", *arguments]):
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
    return code, out.getvalue(), err.getvalue()


def refused(*arguments, code=2):
    found, out, err = herald_sim(*arguments)
    assert (found, out) == (code, ""), err
    return err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*RUN[:8], "1" + "0" * 400, *RUN[9:]), "context must be below 2^64"),
        ((*RUN, "--s-max", "64"), "--s-max goes with --cache or --scheduler"),
        ((*RUN, "--trace-out", "/"), "it is a folder"),
        ((*RUN, "--trace-out", "t.csv"), "a Chrome trace is written there, .csv says otherwise"),
        ((*DESCRIBE, "--svg", "x.png"), "end its name in .svg"),
        ((*CEILINGS, "--block", "0"), "block must be >= 1, got 0"),
        ((*CEILINGS, "--steps", "33"), "steps must be <= 32, got 33"),
        ((*CEILINGS, "--batch", "999999999"), "batch must be <= 1048576"),
        ((*CEILINGS, "--set", "settings.budget=0.5"), "changes no ceiling"),
        ((*EXPLAIN, "--gen-tokens", "32"), "pass --gen-tokens 64 or above"),
        ((*DESCRIBE, "--set", "machine.link.h2d_gb_s=12500"), "says nothing of a description"),
        ((*DESCRIBE, "--svg", "/"), "it is a folder"),
        (("exhibit", "fig-8", "--set", "settings.queries=4"), "changes no exhibit: its settings are the paper's"),
        (
            (*RUN, "--set", "settings.exact_layers=999"),
            "settings.exact_layers must be < 20, the layers of llada2-mini",
        ),
        (
            (*RUN, "--set", "settings.exact_layers=20"),
            "settings.exact_layers must be < 20, the layers of llada2-mini, got 20: no layer is left to select for",
        ),
        ((*RUN, "--set", "settings.window_blocks=4"), "a setting of herald-sliding and changes nothing with herald"),
        ((*RUN, "--set", "settings.proxy_fraction=0.5"), "a setting of infinigen and changes nothing with herald"),
    ],
)
def test_what_would_be_ignored_or_crash_is_refused(arguments, message):
    assert message in refused(*arguments)


@pytest.mark.parametrize("method", ["herald", "dense"])
def test_a_bidirectional_model_without_a_cache_rule_is_refused(method):
    arguments = [*RUN]
    arguments[2], arguments[4] = "llada-8b", method
    assert "attends in both directions" in refused(*arguments)


def test_step_fetch_with_one_place_in_its_ring_would_wait_for_ever():
    arguments = [*RUN, "--set", "settings.staging_buffers=1"]
    arguments[4] = "step-fetch"
    assert "give the ring more places" in refused(*arguments, code=1)


@pytest.mark.parametrize("command", [CEILINGS, ("peak", *RUN[1:9])])
def test_json_names_a_profile_read_from_a_path_without_the_path(tmp_path, command):
    source = hardware_io.profile_dir() / f"{HARDWARE}.toml"
    copy = tmp_path / "mine.toml"
    copy.write_text(source.read_text())
    arguments = [str(copy) if argument == HARDWARE else argument for argument in command]
    code, out, err = herald_sim(*arguments, "--json")
    assert code == 0, err
    assert str(tmp_path) not in out
    assert json.loads(out)["hardware"] == HARDWARE


def test_a_sweep_grid_without_tables_and_a_folder_that_is_a_file_are_refused(tmp_path):
    grid = tmp_path / "grid.toml"
    grid.write_text("base = 3\n")
    assert "must be tables" in refused("sweep", "--grid", str(grid), "--out", str(tmp_path / "out"))
    options = f'model = "tiny"\nmethod = "dense"\nhardware = "{HARDWARE}"\ncontext = 64\nbatch = 1\n'
    grid.write_text(f"[base]\n{options}")
    assert "--out names a folder" in refused("sweep", "--grid", str(grid), "--out", str(grid))


def test_a_profile_nested_without_end_is_refused(tmp_path):
    path = tmp_path / "deep.toml"
    path.write_text("x = " + "[" * 5000)
    arguments = [str(path) if argument == HARDWARE else argument for argument in RUN]
    assert "is not a readable TOML profile" in refused(*arguments)


def test_a_sweep_whose_points_all_failed_says_why_and_exits_1(tmp_path):
    axes = ("--model", "tiny", "--hardware", HARDWARE, "--method", "dense", "--context", "-5", "--batch", "1,2")
    code, out, _ = herald_sim("sweep", *axes, "--workers", "1", "--out", str(tmp_path / "out"))
    assert code == 1
    assert "failed: context must be >= 0, got -5 (2 points), the first: " in out


def test_a_budget_given_by_its_option_and_by_set_is_refused():
    assert "budget is given twice" in refused(*RUN, "--budget", "0.2", "--set", "settings.budget=0.1")


def test_an_empty_profile_is_told_what_it_needs(tmp_path):
    path = tmp_path / "empty.toml"
    path.write_text("")
    arguments = [str(path) if argument == HARDWARE else argument for argument in RUN]
    assert "states none: it needs a table [engines.NAME]" in refused(*arguments, code=1)


def test_exhibits_offer_no_setting_that_they_refuse():
    assert "settings." not in herald_sim("exhibit", "--help")[1]


def test_an_unknown_path_is_refused_in_a_line_that_can_be_read():
    said = refused(*RUN, "--set", "zzzqqq=3")
    assert "unknown path; write machine.SECTION.NAME or engine.NAME" in said
    assert len(said) < 200


def test_a_sliding_block_shorter_than_the_one_it_begins_with_names_both_options():
    dsb = ("run", "--model", "llada-8b", "--method", "dense", "--hardware", HARDWARE, "--scheduler", "dsb-const")
    said = refused(*dsb, "--s-max", "8")
    assert "got 8 and 32; raise --s-max or lower --block" in said


def test_explain_says_beyond_memory_in_its_result():
    dense = ("explain", "--model", "llada2-mini", "--method", "dense", *RUN[5:7], "--context", "32768", "--batch", "60")
    _, text, _ = herald_sim(*dense)
    assert "beyond memory: gpu kv, short by" in text
    found = json.loads(herald_sim(*dense, "--json")[1])
    assert found["beyond_memory"].startswith("gpu kv, short by")
    fits = json.loads(herald_sim(*dense[:-1], "8", "--json")[1])
    assert "beyond_memory" not in fits


def test_what_a_sweep_is_given_twice_runs_once_and_is_counted(tmp_path):
    out = tmp_path / "out"
    grid = ("sweep", "--model", "tiny", "--method", "dense", "--hardware", HARDWARE, "--context", "64")
    code, text, _ = herald_sim(*grid, "--batch", "2,2,4", "--out", str(out), "--workers", "1")
    assert code == 0
    assert "2 points: 2 ok" in text
    assert "1 more were given twice" in text
    assert len((out / "points.jsonl").read_text().splitlines()) == 2
    assert json.loads((out / "summary.json").read_text())["repeated"] == 1


def test_a_budget_of_5_is_all_of_the_kv_and_5_percent_is_named():
    code, out, err = herald_sim(*RUN, "--budget", "5", "--json")
    assert code == 0
    assert json.loads(out)["budget"] == 1.0
    assert "all of it is selected; 5% is 0.05" in err


def test_a_profile_that_holds_no_text_is_said_to_in_words(tmp_path):
    file = tmp_path / "profile.toml"
    file.write_bytes(b"\x94\x00\xff")
    assert "it holds no UTF-8 text" in refused("hardware", str(file))
