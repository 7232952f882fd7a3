"""A recall study as one JSON object: means with intervals (Fig. 9), buckets (Fig. 7), budgets that regain MAGE's.

Steps of one answer are alike, so intervals resample whole samples, 1,000 times with a fixed seed.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from herald_exec.evaluation.recall import budget_factors, by_bucket

RESAMPLES = 1000


def mean_intervals(rows: Sequence[dict[str, Any]], first_step: int = 0, seed: int = 0) -> list[dict[str, Any]]:
    """Mean recall over (block, step) of each rule and factor with its 95% interval; steps from ``first_step`` on."""
    groups: dict[tuple[str, float], dict[tuple[Any, ...], list[float]]] = {}
    for row in rows:
        if row["step"] >= first_step:
            samples = groups.setdefault((row["rule"], row["factor"]), {})
            samples.setdefault((row["task"], row["context"], row["sample"]), []).append(row["recall"])
    found = []
    for (rule, factor), samples in groups.items():
        sums = np.array([sum(values) for values in samples.values()])
        counts = np.array([len(values) for values in samples.values()])
        picks = np.random.default_rng(seed).integers(0, len(sums), (RESAMPLES, len(sums)))
        means = sums[picks].sum(axis=1) / counts[picks].sum(axis=1)
        low, high = np.quantile(means, (0.025, 0.975))
        value = float(sums.sum() / counts.sum())
        found.append({"rule": rule, "factor": factor, "value": value, "low": float(low), "high": float(high)})
    return found


def summarise(rows: Sequence[dict[str, Any]], **facts: Any) -> dict[str, Any]:
    """Everything of a run; ``facts`` (model, budget, device) go in as they are.

    ``means`` and ``regained`` are over all steps, ``later_means`` and ``later_regained`` leave step 0 out, where MAGE's
    recall is 1 by construction.
    """
    return {
        **facts,
        "samples": len({(row["task"], row["context"], row["sample"]) for row in rows}),
        "pairs": len({(row["task"], row["context"], row["sample"], row["block"], row["step"]) for row in rows}),
        "tasks": sorted({row["task"] for row in rows}),
        "contexts": sorted({row["context"] for row in rows}),
        "means": mean_intervals(rows),
        "later_means": mean_intervals(rows, first_step=1),
        "buckets": by_bucket(rows),
        "regained": budget_factors(rows),
        "later_regained": budget_factors(rows, first_step=1),
    }
