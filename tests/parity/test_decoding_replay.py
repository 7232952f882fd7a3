"""What the executor recorded, replayed by the simulator under the same schedule and cache: the same rounds."""

import json
from dataclasses import replace

import pytest

from herald_exec.bidirectional.bench import Settings, run_combination
from herald_exec.bidirectional.prompts import Item
from herald_exec.models import random_model
from herald_exec.models.base import BlockModel
from herald_pipeline import catalogue
from herald_pipeline.decoding import caches, schedulers
from herald_pipeline.decoding.policy import combination_problem
from herald_pipeline.decoding.statistics import summarise
from herald_pipeline.decoding.views import Combination
from herald_sim.recordings import read_recordings, replay

SMALL = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "vocab_size": 96,
    "mask_token_id": 95,
    "eos_token_ids": (94,),
    "max_positions": 256,
}
# Half of the vocabulary ends blocks, so that AdaBlock's lengths differ.
SETTINGS = Settings(response_length=24, block=8, threshold=0.3, batch_size=3, delimiters=tuple(range(0, 95, 2)))
ITEMS = [Item((1, 2, 3, 4, 5, 6, 7)), Item((9, 8)), Item((7,) * 12)]
COUNTS = (
    *("nfe", "tokens", "mean_active_length", "commits_per_round", "refreshes", "forwarded_positions"),
    *("active_positions", "window_positions", "refresh_positions", "reused_positions"),
)


@pytest.fixture(scope="module", params=["llada-8b", "dream-7b-base"])
def model(request):
    model = random_model(replace(catalogue.get(request.param), **SMALL), seed=3)
    model.weights.head.mul_(10.0)
    # An end token that an answer of these weights does hold in its middle.
    (row,) = run_combination(model, ITEMS[:1], Combination("confidence", "fixed", "none"), SETTINGS)
    end_token = row["response"][SETTINGS.response_length // 2]
    return BlockModel(replace(model.shape, eos_token_ids=(end_token,)), model.weights)


def combinations():
    for scheduler in schedulers.names():
        for cache in caches.names():
            decoder = "random" if caches.REGISTRY.entry(cache).policy.needs_upcoming else "confidence"
            if combination_problem(decoder, scheduler, cache, bidirectional=True) is None:
                yield Combination(decoder, scheduler, cache)


def recorded(model, combination, settings, tmp_path):
    rows = run_combination(model, ITEMS, combination, settings)
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({"rows": rows}))
    return rows, read_recordings(path)


def replayed(model, recordings, combination, settings):
    policy = settings.policy(combination, shifted_logits=model.shape.shifted_logits)
    return replay(recordings, policy.blocks, policy.cached, shifted_logits=model.shape.shifted_logits)


@pytest.mark.parametrize("combination", list(combinations()), ids="+".join)
@pytest.mark.parametrize("stop_at_eos", [False, True])
def test_a_replayed_run_has_the_executors_rounds_lengths_and_positions(model, combination, stop_at_eos, tmp_path):
    settings = replace(SETTINGS, stop_at_eos=stop_at_eos)
    rows, recordings = recorded(model, combination, settings, tmp_path)
    for row, recording in zip(rows, recordings, strict=True):
        found = summarise(replayed(model, [recording], combination, settings))
        for name in COUNTS:
            wanted = [row[name]] if name == "commits_per_round" else row[name]
            assert found[name] == wanted, name


def test_a_batch_replays_as_its_rows_together(model, tmp_path):
    combination = Combination("confidence", "adablock", "dual")
    rows, recordings = recorded(model, combination, SETTINGS, tmp_path)
    found = summarise(replayed(model, recordings, combination, SETTINGS))
    for name in ("nfe", "tokens", "forwarded_positions", "reused_positions"):
        assert found[name] == sum(row[name] for row in rows), name


def test_the_recorded_adablock_blocks_have_different_lengths(model, tmp_path):
    # Otherwise the ends would not be tested: fixed blocks would pass too.
    rows, _ = recorded(model, Combination("confidence", "adablock", "none"), SETTINGS, tmp_path)
    lengths = {end - start for row in rows for start, end in zip([0, *row["ends"]], row["ends"], strict=False)}
    assert len(lengths - {0}) > 2


def test_some_answers_do_end_early(model, tmp_path):
    settings = replace(SETTINGS, stop_at_eos=True)
    rows, _ = recorded(model, Combination("confidence", "fixed", "none"), settings, tmp_path)
    assert any(row["tokens"] < row["response_tokens"] for row in rows)
