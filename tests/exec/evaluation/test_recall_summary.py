"""The recall study's summary: means over steps, intervals over samples."""

import pytest

from herald_exec.evaluation.recall_summary import mean_intervals, summarise


def row(sample, step, rule, recall, factor=1.0):
    place = {"task": "log", "context": 512, "sample": sample, "block": 1, "step": step}
    return {**place, "rule": rule, "factor": factor, "recall": recall}


ROWS = [
    *(row(sample, step, "mage", 1.0 if step == 0 else 0.8) for sample in range(4) for step in range(3)),
    *(row(sample, step, "omit", 0.4) for sample in range(4) for step in range(3)),
    *(row(sample, step, "draft", 0.6) for sample in range(4) for step in range(3)),
]


def test_a_mean_counts_every_step_alike():
    # One sample with three steps of 0.2, one with a single step of 1: (3 * 0.2 + 1) / 4.
    rows = [*(row(0, step, "mage", 0.2) for step in range(3)), row(1, 0, "mage", 1.0)]
    (found,) = mean_intervals(rows)
    assert found["value"] == pytest.approx(0.4)
    assert found["low"] == pytest.approx(0.2)
    assert found["high"] == pytest.approx(1.0)


def test_samples_that_are_all_alike_have_an_interval_of_no_width():
    found = {entry["rule"]: entry for entry in mean_intervals(ROWS)}
    assert [found["draft"][name] for name in ("low", "value", "high")] == pytest.approx([0.6, 0.6, 0.6])


def test_later_means_leave_step_0_out():
    found = summarise(ROWS, budget=0.05)
    assert {e["rule"]: e["value"] for e in found["later_means"]}["mage"] == pytest.approx(0.8)
    assert {e["rule"]: e["value"] for e in found["means"]}["mage"] == pytest.approx(2.6 / 3)


def test_the_summary_counts_samples_and_steps():
    found = summarise(ROWS, budget=0.05)
    assert (found["samples"], found["pairs"], found["tasks"], found["budget"]) == (4, 12, ["log"], 0.05)
    assert sum(bucket["pairs"] for bucket in found["buckets"]) == 12
