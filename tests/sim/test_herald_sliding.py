"""What the sliding window costs on a machine: the same as HERALD for one period, more per forward otherwise."""

import json

import pytest
from typer.testing import CliRunner

from herald_sim.cli import app

RUN = ("run", "--model", "llada2-mini", "--hardware", "h100-sxm-80g_xeon-8481c", "--context", "8192", "--batch", "8")


def run(method, steps, *sets):
    changes = [part for text in sets for part in ("--set", text)]
    result = CliRunner().invoke(app, [*RUN, "--method", method, "--steps", str(steps), *changes, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_window_of_one_period_takes_heralds_time():
    sliding, herald = run("herald-sliding", 8, "settings.window_blocks=1"), run("herald", 8)
    for name in ("throughput_tok_s", "block_time_s", "main_time_s", "retrieval_time_s", "stall_s"):
        assert sliding[name] == herald[name], name


def test_a_wider_window_costs_more_for_the_same_steps():
    times = [run("herald-sliding", 8, f"settings.window_blocks={n}")["main_time_s"] for n in (1, 2, 4)]
    assert times == sorted(times)
    assert times[2] > times[0]


@pytest.mark.parametrize("steps", [6, 12])
def test_fewer_steps_a_period_are_faster(steps):
    assert run("herald-sliding", steps)["throughput_tok_s"] > run("herald-sliding", 2 * steps)["throughput_tok_s"]


def test_commits_of_a_window_are_replayed_step_for_step(tmp_path):
    """As herald-exec writes them: tokens of the whole window, in more steps than a period has tokens, or in none."""
    recorded = tmp_path / "commits.json"
    recorded.write_text(json.dumps([[[1] * 40, [24], [0], [8] * 5]] * 8))
    options = (*RUN, "--method", "herald-sliding", "--gen-tokens", "128", "--commits", str(recorded), "--json")
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 0, result.output
    # After the first block: T + 1 forwards each, of T = 1, 1 and 5.
    assert json.loads(result.stdout)["forwards_per_block"] == pytest.approx((2 + 2 + 6) / 3)
    refused = CliRunner().invoke(app, (*options, "--set", "settings.window_blocks=1"))
    assert "must be <= block length 32" in str(refused.exception)
