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
