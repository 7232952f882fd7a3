"""The three commands, end to end on small checkpoints written to disk."""

import json

import pytest
import typer
from typer.testing import CliRunner

from herald_exec import decoding_commands
from herald_exec.bidirectional.loading import load_model
from herald_exec.checkpoints.writing import write_checkpoint
from herald_pipeline.errors import CapacityError, ConfigError


@pytest.fixture(scope="module")
def folder(llada, tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("llada"), llada.shape, llada.weights)


@pytest.fixture
def prompt_file(tmp_path, prompts):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"tokens": prompt, "answer": [1]}) for prompt in prompts * 2))
    return path


def call(*args):
    app = typer.Typer()
    decoding_commands.register(app)
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


def test_diff_cache_prints_one_object_with_every_round(folder, prompt_file):
    result = call(
        *("diff-cache", "--model", folder, "--prompts", prompt_file, "--gen-tokens", 12, "--block", 4, "--json")
    )
    printed = json.loads(result.stdout)
    assert printed["cache"] == "dsb"
    assert printed["rounds"] == len(printed["rows"])
    assert {row["row"] for row in printed["rows"]} == set(range(6))
    assert all(row["max_logit_error"] == 0 for row in printed["rows"] if row["refresh_range"])
    assert printed["provenance"] == "measured"


def test_diff_cache_says_in_words_what_it_found(folder, prompt_file):
    out = call("diff-cache", "--model", folder, "--prompts", prompt_file, "--gen-tokens", 8, "--block", 4).stdout
    assert "dsb against none" in out
    assert "refreshes leave 0" in out


def test_bench_decoding_runs_the_views_by_default(folder, prompt_file):
    args = ("bench-decoding", "--model", folder, "--prompts", prompt_file, "--gen-tokens", 8, "--block", 4)
    printed = json.loads(call(*args, "--json", "--check").stdout)
    assert len(printed["combinations"]) == 12
    assert len(printed["rows"]) == 12 * 6
    assert all(row["accuracy"] is not None for row in printed["combinations"])
    out = call(*args).stdout
    assert "schedule: varies scheduler" in out
    assert "cache-system" in out


def test_bench_decoding_on_a_given_grid_leaves_out_what_makes_no_sense(folder):
    args = ("bench-decoding", "--model", folder, "--random-prompts", 2, "--prompt-tokens", 5, "--gen-tokens", 8)
    grid = ("--decoder", "confidence", "--decoder", "random", "--scheduler", "fixed", "--cache", "dkv-greedy")
    result = call(*args, *grid, "--block", 4, "--diagnose", "--json")
    printed = json.loads(result.stdout)
    choices = [(row["decoder"], row["scheduler"], row["cache"]) for row in printed["combinations"]]
    assert choices == [("top1", "fixed", "none"), ("random", "fixed", "dkv-greedy")]
    assert "left out confidence + fixed + dkv-greedy" in result.stderr
    assert printed["combinations"][0]["late_ratio"] is not None


def test_tune_decoding_recommends_a_rung(folder, prompt_file):
    args = ("tune-decoding", "--model", folder, "--prompts", prompt_file, "--gen-tokens", 8, "--block", 4)
    printed = json.loads(call(*args, "--s-max", "6", "--json").stdout)
    # No answer is right in any run, so nothing is lost anywhere and the whole ladder is climbed.
    assert [rung["rung"] for rung in printed["rungs"]] == ["const", "s_max 6", "greedy", "greedy + dsb cache"]
    assert printed["stopped_at"] is None
    assert "recommended:" in call(*args, "--s-max", "6").stdout


def test_random_weights_stand_for_a_model_by_name():
    args = ("bench-decoding", "--model", "llada-8b", "--gen-tokens", 8)
    with pytest.raises(ConfigError, match="'llada-8b' is no checkpoint folder; pass one, or --weights random"):
        call(*args)


def test_stopping_at_the_eos_is_said_and_counted(folder, prompt_file):
    args = ("bench-decoding", "--model", folder, "--prompts", prompt_file, "--gen-tokens", 8, "--block", 4, "--json")
    whole, stopped = (json.loads(call(*args, *more).stdout) for more in ((), ("--stop-at-eos",)))
    assert (whole["stop_at_eos"], stopped["stop_at_eos"]) == (False, True)
    assert "until an answer's EOS is final" in stopped["counted"]
    for a, b in zip(whole["combinations"], stopped["combinations"], strict=True):
        assert b["nfe"] == a["nfe_before_eos"] == b["nfe_before_eos"]
        assert b["delivered_tokens"] == a["delivered_tokens"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--device", "gpu"), "unknown device 'gpu'"),
        (("--dtype", "float23"), "unknown dtype 'float23'; use fp32, bf16, fp16"),
        (("--weights", "rnd"), "unknown weights 'rnd'; did you mean 'random'"),
        (("--gen-tokens", "0"), "--gen-tokens must be >= 1"),
        (("--batch", "0"), "--batch must be >= 1"),
        (("--scheduler", "dsb-gredy"), "unknown scheduler 'dsb-gredy'; did you mean 'dsb-greedy'"),
        (("--threshold", "1.5"), "threshold must be <= 1"),
        (("--delimiter", "96"), "--delimiter must be <= 95, got 96"),
        (("--random-prompts", "0"), "prompts must be >= 1"),
    ],
)
def test_mistakes_are_answered_with_the_rule(folder, args, message):
    with pytest.raises(ConfigError, match=message):
        call("bench-decoding", "--model", folder, *args)


def test_random_weights_that_cannot_fit_are_refused_before_they_are_drawn(monkeypatch):
    monkeypatch.setattr("herald_exec.bidirectional.loading.available_bytes", lambda device: 10**9)
    with pytest.raises(CapacityError, match=r"do not fit on cpu: 32\.06 GB needed, 1\.00 GB free"):
        call("bench-decoding", "--model", "llada-8b", "--weights", "random", "--gen-tokens", 8)


def test_a_block_causal_model_is_refused_with_the_way_out():
    with pytest.raises(ConfigError, match=r"'tiny' is block-causal.*use a bidirectional model"):
        call("diff-cache", "--model", "tiny", "--weights", "random", "--gen-tokens", 8)


def test_mismatching_caps_are_refused(folder, prompt_file):
    with pytest.raises(ConfigError, match="--s-max must be whole numbers with commas, got 'a,b'"):
        call("tune-decoding", "--model", folder, "--prompts", prompt_file, "--s-max", "a,b")


def test_the_reference_model_that_ships_is_known_by_its_name():
    _, tokenizer = load_model("herald-ref-bidirectional", "checkpoint", "cpu", "fp32", 0)
    assert tokenizer is not None
    with pytest.raises(ConfigError, match="'herald-reff' is no checkpoint folder"):
        load_model("herald-reff", "checkpoint", "cpu", "fp32", 0)
