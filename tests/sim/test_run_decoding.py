"""``herald-sim run`` of a bidirectional model with a scheduler and a cache rule."""

import json

import pytest
from typer.testing import CliRunner

from herald_pipeline.errors import ConfigError
from herald_sim.cli import app

RUN = ("run", "--model", "llada-8b", "--hardware", "h100-sxm-80g_xeon-8481c")


def call(*args):
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    if isinstance(result.exception, ConfigError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def bench(tmp_path):
    path = tmp_path / "bench.json"
    row = {"decoder": "confidence", "scheduler": "dsb-greedy", "cache": "none", "prompt_tokens": 100}
    path.write_text(json.dumps({"rows": [{**row, "commits": [[i, i + 1] for i in range(0, 64, 2)]}]}))
    return path


def test_it_prints_one_object_that_names_what_was_simulated(bench):
    args = (*RUN, "--method", "dense", "--scheduler", "dsb-greedy", "--cache", "dsb", "--commits", bench)
    found = json.loads(call(*args, "--json"))
    assert (found["scheduler"], found["cache"], found["recorded_cache"]) == ("dsb-greedy", "dsb", "none")
    assert found["nfe"] == 32
    assert found["reused_positions"] > 0
    assert found["throughput_tok_s"] == pytest.approx(64 / found["decode_s"])
    assert "throughput_tok_s" in call(*args)


def test_a_method_that_offloads_is_refused(bench):
    with pytest.raises(ConfigError, match="go with --method dense, got 'herald'"):
        call(*RUN, "--method", "herald", "--cache", "dsb", "--commits", bench)


def test_a_parameter_that_the_choice_does_not_have_is_refused(bench):
    with pytest.raises(ConfigError, match="cache 'none' has no parameter 'prefix_window'"):
        call(*RUN, "--method", "dense", "--scheduler", "dsb-greedy", "--prefix-window", 4, "--commits", bench)
