"""The decoder grid and the ladder, on small seeded models."""

import pytest

from herald_exec.bidirectional import decode, make_batch
from herald_exec.bidirectional.bench import Settings, bench, run_combination
from herald_exec.bidirectional.prompts import Item
from herald_exec.bidirectional.tune import ladder, loss_probability, needed_losses, tune
from herald_pipeline.decoding.statistics import BEFORE_EOS
from herald_pipeline.decoding.views import VIEWS, Combination, all_combinations
from herald_pipeline.errors import ConfigError

SETTINGS = Settings(response_length=16, block=8, threshold=0.3)
FIXED = Combination("confidence", "fixed", "none")


@pytest.fixture
def items(prompts):
    return [Item(tuple(prompt)) for prompt in prompts]


def test_rows_are_one_for_each_combination_and_prompt_and_add_up(model, items):
    result = bench(model, items, all_combinations(), SETTINGS)
    assert len(result["rows"]) == len(all_combinations()) * len(items)
    for summary in result["combinations"]:
        choice = {name: summary[name] for name in ("decoder", "scheduler", "cache")}
        rows = [row for row in result["rows"] if choice.items() <= row.items()]
        assert summary["nfe"] == sum(row["nfe"] for row in rows)
        assert summary["forwarded_positions"] == (
            summary["active_positions"] + summary["window_positions"] + summary["refresh_positions"]
        )
        assert sum(sum(row["commits_per_round"]) for row in rows) == summary["tokens"] == 16 * len(items)


def test_the_reference_commits_one_token_a_forward(llada, items):
    result = bench(llada, items, [FIXED], SETTINGS)
    assert result["combinations"][0]["decoder"] == "top1"
    assert result["combinations"][0]["tokens_per_forward"] == 1
    assert result["combinations"][0]["same_as_reference"] == 1
    assert result["combinations"][1]["tokens_per_forward"] > 1


def test_views_vary_one_axis(llada, items):
    views = bench(llada, items[:1], all_combinations(), SETTINGS)["views"]
    assert [c[1] for c in views["schedule"]["combinations"]] == ["fixed", "adablock", "dsb-const", "dsb-greedy"]
    assert {(c[0], c[2]) for c in views["schedule"]["combinations"]} == {("confidence", "none")}
    assert views["cache-system"]["combinations"] == [
        ["confidence", "fixed", "dual"],
        ["confidence", "fixed", "dkv"],
        ["confidence", "adablock", "dual"],
        ["confidence", "dsb-const", "dsb"],
        ["confidence", "dsb-greedy", "dsb"],
    ]
    assert views["reference"]["combinations"] == [["top1", "fixed", "none"]]


def test_only_the_cache_varies_under_each_sliding_schedule():
    for scheduler in ("dsb-const", "dsb-greedy"):
        assert {c.cache for c in VIEWS["cache-under-dsb"] if c.scheduler == scheduler} == {"dual", "dsb"}


def test_combinations_without_sense_are_left_out_with_the_reason(llada, items):
    result = bench(llada, items[:1], [Combination("confidence", "fixed", "dkv-greedy")], SETTINGS)
    assert [skipped["cache"] for skipped in result["skipped"]] == ["dkv-greedy"]
    assert "use decoder 'random'" in result["skipped"][0]["reason"]


def test_batching_changes_no_count(llada, items):
    def counts(batch_size):
        settings = Settings(response_length=16, block=8, threshold=0.3, batch_size=batch_size)
        rows = run_combination(llada, items, Combination("confidence", "dsb-greedy", "dsb"), settings)
        return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]

    assert counts(1) == counts(2) == counts(3)


def test_dream_gets_its_own_window_and_delimiter_threshold(llada, dream):
    def policy(model, combination):
        return SETTINGS.policy(combination, shifted_logits=model.shape.shifted_logits)

    dsb, adablock = Combination("confidence", "dsb-const", "dsb"), Combination("confidence", "adablock", "none")
    assert [policy(model, dsb).cached.prefix_window for model in (llada, dream)] == [24, 4]
    assert [policy(model, adablock).blocks.delimiter_threshold for model in (llada, dream)] == [0.3, 0.5]


def answered(model, items, settings):
    """Items whose answer is what fixed blocks without a cache give: the base is always right."""
    policy = settings.policy(FIXED, shifted_logits=model.shape.shifted_logits)
    batch = make_batch(model.shape, [item.prompt for item in items], settings.response_length)
    decoded = decode(model, batch, policy)
    return [Item(item.prompt, tuple(decoded.response(row))) for row, item in enumerate(items)]


@pytest.fixture
def many():
    return [Item((i + 1, 2 * i + 3, 5)) for i in range(8)]


def scripted(wrong):
    """A stand-in for runs: ``wrong(combination, s_max)`` of ten prompts are answered wrongly."""

    def run_combination(model, items, combination, settings, tokenizer=None):
        bad = wrong(combination, settings.s_max)
        counts = dict.fromkeys(("tokens", "delivered_tokens", "refreshes", "forwarded_positions"), 1)
        counts |= dict.fromkeys(("active_positions", "window_positions", "refresh_positions", "reused_positions"), 1)
        counts |= dict.fromkeys((f"{name}_before_eos" for name in BEFORE_EOS), 1)
        ratios = dict.fromkeys(("late_ratio", "late_ratio_before_eos", "premature_ratio", "premature_ratio_before_eos"))
        # The wider the block, the faster.
        seconds = 1.0 / (settings.s_max or (1000 if combination.scheduler == "dsb-greedy" else 10))
        row = {"nfe": 1, "seconds": seconds, "mean_active_length": 1.0, "response": [], **counts, **ratios}
        return [{**row, "correct": index >= bad} for index in range(len(items))]

    return run_combination


def test_the_ladder_stops_at_the_first_significant_loss_and_gives_the_last_good_rung_the_cache(llada, monkeypatch):
    # Four of ten lost is not significant (1/16), five are (1/32): s_max 64 fails, and 48 gets the cache.
    losses = {None: 1, 48: 4, 64: 5}
    monkeypatch.setattr(
        "herald_exec.bidirectional.tune.run_combination",
        scripted(lambda choice, s_max: 0 if choice.scheduler == "fixed" else losses[s_max]),
    )
    result = tune(llada, [Item((1,), (2,))] * 10, Settings())
    names = [rung["rung"] for rung in result["rungs"]]
    assert names == ["const", "s_max 48", "s_max 64", "s_max 48 + dsb cache"]
    assert [rung["losses"] for rung in result["rungs"]] == [1, 4, 5, 4]
    assert result["stopped_at"] == "s_max 64"
    assert result["recommended"]["s_max"] == 48


def test_a_cache_that_loses_is_the_stop_and_not_recommended(llada, monkeypatch):
    monkeypatch.setattr(
        "herald_exec.bidirectional.tune.run_combination",
        scripted(lambda choice, s_max: 6 if choice.cache == "dsb" else 0),
    )
    result = tune(llada, [Item((1,), (2,))] * 10, Settings())
    assert result["stopped_at"] == "greedy + dsb cache"
    assert (result["recommended"]["scheduler"], result["recommended"]["cache"]) == ("dsb-greedy", "none")


def test_the_ladder_climbs_to_the_top_and_adds_the_cache_when_nothing_is_lost(llada, many):
    # One block as long as the response: sliding changes nothing, and a window over everything reuses nothing.
    settings = Settings(response_length=8, block=8, threshold=0.5, prefix_window=1000)
    result = tune(llada, answered(llada, many, settings), settings, s_max=(12, 16))
    names = ["const", "s_max 12", "s_max 16", "greedy", "greedy + dsb cache"]
    assert [rung["rung"] for rung in result["rungs"]] == names
    assert result["stopped_at"] is None
    assert all(rung["losses"] == 0 and rung["p_value"] == 1 for rung in result["rungs"])


def test_the_ladder_is_the_articles():
    assert [(r.scheduler, r.s_max) for r in ladder(32)] == [
        ("dsb-const", None),
        ("dsb-greedy", 48),
        ("dsb-greedy", 64),
        ("dsb-greedy", 80),
        ("dsb-greedy", 96),
        ("dsb-greedy", None),
    ]


def test_loss_probabilities_by_hand():
    # Five losses, no gain: 1/32. Three losses, one gain: (4 + 1) / 16. No difference: certain.
    assert loss_probability(5, 0) == 1 / 32
    assert loss_probability(3, 1) == 5 / 16
    assert loss_probability(0, 0) == 1
    assert needed_losses(0.05) == 5
    assert needed_losses(0.25) == 3


def test_tuning_needs_answers_and_enough_of_them(llada, many):
    with pytest.raises(ConfigError, match="prompt 0 has no answer"):
        tune(llada, many, SETTINGS)
    with pytest.raises(ConfigError, match=r"4 prompts cannot show a loss at alpha 0\.05: at least 5"):
        tune(llada, answered(llada, many[:4], SETTINGS), SETTINGS)
