"""Recall of selection rules: against importances written out with loops, and what must be 1 by construction."""

from dataclasses import replace

import pytest
import torch

from herald_exec.evaluation.recall import (
    FACTORS,
    RecallStudy,
    budget_factors,
    by_bucket,
    importance,
    mean_recall,
    overlap,
)
from herald_exec.models import random_model, tiny_shape
from herald_exec.reference import read_shipped_material
from herald_exec.reference.tasks import draw_sample
from herald_pipeline.errors import ConfigError
from herald_pipeline.model import Attention


@pytest.fixture(scope="module")
def model():
    # No end token, so that random weights decode every block.
    return random_model(tiny_shape(vocab_size=4096, eos_token_ids=(4095,)), seed=3)


@pytest.fixture(scope="module")
def samples():
    material = read_shipped_material()
    return [draw_sample(material, "log", 256, seed) for seed in (1, 2)]


@pytest.fixture(scope="module")
def rows(model, samples):
    return list(RecallStudy(model, samples, threshold=0.5, budget=0.1).run(3))


def test_importance_is_attention_summed_over_queries_and_group():
    generator = torch.Generator().manual_seed(0)
    q, keys = torch.randn(1, 3, 4, 8, generator=generator), torch.randn(1, 2, 6, 8, generator=generator)
    seen = torch.tensor([True, True, False, True, True, True])
    found = importance(q, keys, seen)
    for kv_head in range(2):
        expected = torch.zeros(6)
        for query in range(3):
            for head in (2 * kv_head, 2 * kv_head + 1):
                scores = torch.stack([q[0, query, head] @ keys[0, kv_head, j] / 8**0.5 for j in range(6)])
                weights = torch.where(seen, scores.exp(), torch.zeros(6))
                expected += weights / weights.sum()
        torch.testing.assert_close(found[0, kv_head], expected)


def test_overlap_counts_the_oracles_entries_that_were_taken():
    oracle = torch.tensor([[5.0, 4.0, 3.0, 2.0, 1.0]])
    rule = torch.tensor([[5.0, 1.0, 4.0, 3.0, 2.0]])
    assert overlap(rule, oracle, budgets=(2, 4, 5), k=2).tolist() == [[0.5, 0.5, 1.0]]


def test_mage_is_the_oracle_of_an_all_masked_first_step(rows):
    """At step 0 the block's queries are the rule's own: any fault in positions, masks or KV shows here."""
    mage = [row for row in rows if row["rule"] == "mage" and row["factor"] == 1.0]
    first = [row["recall"] for row in mage if row["step"] == 0]
    assert len(first) == 2 * 2
    assert first == [1.0] * len(first)


def test_every_rule_and_factor_is_measured_on_the_same_steps(rows):
    steps = {}
    for row in rows:
        steps.setdefault((row["rule"], row["factor"]), []).append((row["sample"], row["block"], row["step"]))
    assert len(steps) == 6 * len(FACTORS)
    assert len({tuple(sorted(found)) for found in steps.values()}) == 1


def test_more_budget_never_finds_less_and_chance_finds_its_share(rows):
    means = mean_recall(rows)
    for rule in ("mage", "draft", "omit", "representative", "herald", "random"):
        found = [means[rule, factor] for factor in FACTORS]
        assert found == sorted(found)
    assert means["random", 1.0] == pytest.approx(0.1, abs=0.04)
    assert means["random", 2.5] == pytest.approx(0.25, abs=0.05)


def test_exact_layers_are_not_counted(model, rows):
    assert all(len(row["by_layer"]) == model.shape.num_layers - 2 for row in rows)


def test_buckets_hold_every_pair_once(rows):
    pairs = {(row["sample"], row["block"], row["step"]) for row in rows}
    buckets = by_bucket(rows)
    assert sum(bucket["pairs"] for bucket in buckets) == len(pairs)
    for bucket in buckets:
        assert not bucket["pairs"] or bucket["from"] <= bucket["omit"] <= bucket["to"]


def test_what_recall_cannot_be_measured_on_is_refused(model, samples):
    other = replace(samples[0], context=512)
    with pytest.raises(ConfigError, match="one context"):
        RecallStudy(model, [samples[0], other])
    full = random_model(tiny_shape(attention=Attention.BIDIRECTIONAL))
    with pytest.raises(ConfigError, match="bidirectional"):
        RecallStudy(full, samples)
    with pytest.raises(ConfigError, match="budget"):
        RecallStudy(model, samples, budget=0.9)


def made_rows(recalls, samples=8):
    """Rows of made-up recalls by rule and factor, alike in all samples but for a little."""
    return [
        {"task": "log", "context": 256, "sample": sample, "block": 1, "step": 0, "rule": rule, "factor": factor}
        | {"recall": value + 0.001 * sample}
        for sample in range(samples)
        for rule, values in recalls.items()
        for factor, value in zip((1.0, 2.0), values, strict=True)
    ]


def test_the_factor_that_regains_mages_recall_is_where_the_lines_cross():
    rows = made_rows({"mage": (0.7, 0.9), "draft": (0.6, 0.8), "representative": (0.5, 0.6), "herald": (0.8, 0.9)})
    found = {entry["rule"]: entry for entry in budget_factors(rows)}
    assert found["draft"]["value"] == pytest.approx(1.5)
    assert found["draft"]["low"] == pytest.approx(1.5)
    assert found["representative"]["value"] is None
    assert found["herald"]["value"] == 1.0


def test_the_factors_interval_widens_with_disagreement():
    """Half of the samples cross at 1.2, half at 1.8: the mean lies between, and so do the ends."""
    early, late = {"mage": (0.7, 0.9), "draft": (0.68, 0.78)}, {"mage": (0.7, 0.9), "draft": (0.62, 0.72)}
    rows = made_rows(early, 6) + [row | {"sample": row["sample"] + 10} for row in made_rows(late, 6)]
    (found,) = budget_factors(rows, rules=("draft",))
    assert found["low"] < found["value"] < found["high"]
    assert found["value"] == pytest.approx(1.5, abs=0.02)
    assert found["high"] - found["low"] > 0.1


def test_step_0_can_be_left_out_of_the_factors():
    """There MAGE is the oracle; from step 1 on both are alike, and nothing has to be regained."""
    later = made_rows({"mage": (0.7, 0.9), "draft": (0.7, 0.9)})
    first = made_rows({"mage": (1.0, 1.0), "draft": (0.7, 0.9)})
    rows = [row | {"step": 1} for row in later] + first
    everything, from_one = (budget_factors(rows, rules=("draft",), first_step=step)[0]["value"] for step in (0, 1))
    assert everything > from_one == 1.0
    assert budget_factors(first, first_step=1) == []
