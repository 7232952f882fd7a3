"""Options that a run with a cache or scheduler cannot use are refused, not ignored (U05)."""

import subprocess
import sys

import pytest

BASE = ["run", "--model", "llada-8b", "--method", "dense", "--hardware", "h100-sxm-80g_xeon-8481c", "--cache", "dsb"]


def herald_sim(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "herald_sim.cli", *BASE, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "option", [("--steps", "8"), ("--requests", "x.csv"), ("--check",), ("--set", "settings.queries=2"), ("--fast",)]
)
def test_an_option_without_effect_is_named(option: tuple[str, ...]) -> None:
    done = herald_sim(*option)
    assert done.returncode == 2
    assert option[0] in done.stderr
    assert "changes nothing with --cache or --scheduler" in done.stderr


@pytest.mark.parametrize("option", [("--block", "0"), ("--batch", "0")])
def test_zero_is_not_taken_for_the_default(option: tuple[str, ...]) -> None:
    done = herald_sim(*option)
    assert done.returncode == 2
    assert "must be >= 1" in done.stderr
