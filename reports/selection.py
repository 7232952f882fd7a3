"""The page of the selection studies: accuracy by rule and budget, its cost front, T, and recall against the oracle.

It reads what ``python -m herald_exec.evaluation show FILE --json`` and ``recall --summary FILE`` write.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from herald_pipeline import published
from herald_pipeline.errors import ConfigError
from reports.charts import selection as charts
from reports.files import read_object
from reports.page import Cell, Section, Table


def build(study: Path | None, recall: Path | None) -> tuple[str, str, list[Section]]:
    """Title, lead and sections of the page; one of the two files suffices."""
    if study is None and recall is None:
        message = "nothing to show: give --study FILE, --recall FILE or both"
        raise ConfigError(message)
    sections: list[Section] = []
    if study is not None:
        sections += _study(read_object(study, "it has to be what show --json wrote"), study)
    if recall is not None:
        sections += _recall(read_object(recall, "it has to be what recall --summary wrote"), recall)
    lead = "Measured on the model that ships. Intervals are 95%; where they are wide, the samples were few."
    return "What selection costs in accuracy", lead, sections


def _span(score: Mapping[str, float | None], scale: float = 100.0, sign: str = "", digits: int = 1) -> str:
    ends = [score[name] for name in ("value", "low", "high")]
    value, low, high = ("beyond" if end is None else f"{scale * end:{sign}.{digits}f}" for end in ends)
    return f"{value} ({low} to {high})"


def _study(summary: Mapping[str, Any], path: Path) -> list[Section]:
    frames = charts.study_frames(summary)
    tasks = list(dict.fromkeys(frames["accuracy"]["task"]))
    counted = max(entry["samples"] for entry in summary["table"])
    origin = f"measured, {path.name}: {', '.join(tasks)}; {counted} samples a rule and budget in all"
    header = ("rule", "budget", "exact match, %", "minus Dense, points", "partial, %", "T", "MB a selection", *tasks)
    rows = [_study_row(entry, tasks) for entry in summary["table"]]
    sections = [
        Section(
            "Accuracy by rule and budget (Table I's counterpart)",
            ("Every rule answers the same questions; differences from Dense are paired.",),
            charts.accuracy_by_budget(frames["accuracy"], "Exact match by budget", origin),
            "The dashed line is Dense. Random and recency are controls.",
            Table(header, rows),
        )
    ]
    if summary.get("needed"):
        lead = (
            "The smallest budget run whose mean difference from Dense is within a point, and whose whole interval is."
        )
        header = ("tasks", "rule", "budget", "whole interval")
        chart = charts.loss_by_budget(frames["loss"], "Exact match minus Dense's", origin)
        caption = "The dashed line is one point below Dense. Random and recency lie far below and are left out."
        table = Table(header, [_needed_row(entry) for entry in summary["needed"]])
        sections.append(Section("Near-lossless budgets", (lead,), chart, caption, table))
    if not frames["cost"].empty:
        chart = charts.cost_front(frames["cost"], "Accuracy against what a selection reads", origin)
        caption = "Full colour: no other rule reads less, asks fewer queries, keeps fewer entries and is as accurate."
        sections.append(Section("The cost front", (), chart, caption))
    chart = charts.steps_histogram(frames["steps"], "Denoising steps a block", origin)
    sections.append(Section("T", (), chart, "herald-sim run --steps-file takes these: herald_exec.evaluation steps."))
    return sections


def _study_row(entry: Mapping[str, Any], tasks: list[str]) -> list[Cell]:
    gap = entry["minus_dense"]
    worse = gap is not None and gap["high"] < 0
    return [
        Cell(entry["rule"]),
        Cell(f"{entry['budget']:.1%}", "number"),
        Cell(_span(entry["exact"]), "number"),
        Cell("" if gap is None else _span(gap, sign="+"), "number bad" if worse else "number"),
        Cell(f"{100 * entry['partial']:.1f}", "number"),
        Cell(f"{entry['steps_per_block']:.1f}", "number"),
        Cell(f"{entry['scan_bytes'] / 1e6:.3f}", "number"),
        *(Cell(_span(entry["tasks"][task]) if task in entry["tasks"] else "", "number") for task in tasks),
    ]


def _needed_row(entry: Mapping[str, Any]) -> list[Cell]:
    budgets = (entry["budget"], entry["surely"])
    shown = [f"above {entry['largest']:.1%}" if budget is None else f"{budget:.1%}" for budget in budgets]
    return [Cell(entry["tasks"]), Cell(entry["rule"]), *(Cell(text, "number") for text in shown)]


def _published_factor(rule: str) -> str:
    """What the paper found for the same rule; it prints one number for draft alone and representative alone."""
    method = "HERALD" if rule == "herald" else "draft only / representative only"
    factor = published.number(exhibit="Fig 9", method=method, metric="budget_factor_matching_MAGE")
    return f"{factor:.2f}"


def _recall(summary: Mapping[str, Any], path: Path) -> list[Section]:
    frames = charts.recall_frames(summary)
    origin = (
        f"measured, {path.name}: {', '.join(summary['tasks'])} at {', '.join(map(str, summary['contexts']))} tokens, "
        f"{summary['samples']} samples, {summary['pairs']} steps, k = {summary['budget']:.1%} of the prefix"
    )
    rows = [
        [
            Cell(row["rule"]),
            Cell(label),
            Cell(_span(row, 1.0, digits=2), "number"),
            Cell(_published_factor(row["rule"]), "number"),
        ]
        for label, name in (("all", "regained"), ("without step 0", "later_regained"))
        for row in summary[name]
    ]
    caption = "At step 0 MAGE's queries are the oracle's, so its recall there is 1 by construction."
    first = Section(
        "Recall by budget (Fig. 9's counterpart)",
        (),
        charts.recall_by_factor(frames["means"], "Recall of the oracle's entries", origin),
        caption,
        Table(("rule", "steps", "budget factor that regains MAGE's recall", "published"), rows),
    )
    chart = charts.recall_by_bucket(frames["buckets"], "Recall where block n is missing, drafted, complete", origin)
    return [first, Section("What the draft regains (Fig. 7's counterpart)", (), chart)]
