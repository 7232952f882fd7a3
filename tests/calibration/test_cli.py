"""Commands end in an answer or a message, never in a traceback."""

import json
import subprocess
import sys

import pytest

TIMEOUT_S = 100


def calibration(*arguments):
    command = [sys.executable, "-m", "calibration", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "my.csv"
    lines = ["method,context,batch,kv_dtype,throughput_tok_s", "dense,4096,4,bf16,2500", "dense,4096,4,bf16,2550"]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


HARDWARE = "hw_profiles/h100-sxm-80g_xeon-8481c.toml"


def test_runs_that_somebody_brings_are_compared_and_the_json_is_one_object(table):
    done = calibration("reconcile", "--hardware", HARDWARE, "--model", "sdar-8b", "--measured", table, "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["points"][0]["figures"]["throughput_tok_s"]["measured"] == 2525.0


def test_own_runs_on_a_profile_of_another_machine_are_refused(tmp_path):
    done = calibration("reconcile", "--hardware", HARDWARE, "--out", tmp_path)
    assert done.returncode == 1
    assert "is of another machine" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_column_ends_with_a_message(tmp_path):
    path = tmp_path / "bad.csv"
    path.write_text("method,context\ndense,1\n", encoding="utf-8")
    done = calibration("reconcile", "--hardware", HARDWARE, "--measured", path)
    assert done.returncode == 2
    assert "column 'batch' is missing" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("measure", ()),
        ("transfer", ("--hardware", HARDWARE)),
        ("fit", ("--hardware", HARDWARE, "--measured", "runs.csv")),
    ],
)
def test_a_profile_is_not_written_under_another_formats_name(tmp_path, command, options):
    done = calibration(command, *options, "--out", tmp_path / "mine.json")
    assert done.returncode == 2
    assert "a profile is written there, .json says otherwise; end its name in .toml" in done.stderr


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--threads", "0", "--threads must be >= 1, got 0"),
        ("--threads", "9999", "the cores that this process may use, got 9999"),
        ("--kv-dtype", "fp4", "unknown --kv-dtype 'fp4'; did you mean 'fp8'?"),
        ("--pcie", "5x16", "goes with --device cuda"),
    ],
)
def test_measure_refuses_before_it_measures(tmp_path, option, value, message):
    done = calibration("measure", option, value, "--out", tmp_path / "mine.toml")
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
