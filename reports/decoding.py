"""The page of DSB's half: decoders, schedulers and caches as measured, what the article prints beside them.

It reads what ``python -m herald_exec.evaluation decoding-show FILES --json`` writes. The article's models and tasks are
others, so what is put beside each other are changes against the same base (confidence, fixed blocks, no cache): factors
of speed, and points of accuracy.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd

from herald_pipeline import published
from herald_pipeline.published import Paper
from reports.charts import decoding as charts
from reports.files import read_object
from reports.page import Cell, Section, Table

ARTICLE = {
    "top1": "Top-1",
    "confidence": "Confidence",
    "fixed": "Naive",
    "adablock": "AdaBlock",
    "dsb-const": "DSB(const)",
    "dsb-greedy": "DSB(greedy)",
    "none": "None",
    "dual": "Dual",
    "dsb": "DSB Cache",
}
"""Our names and the article's."""
BASE = ("Confidence", "Naive", "None")
SWEEPS = (
    ("s_init", "s_init", "S_init, or B of fixed blocks (tokens)", "S_init (Fig. 4's counterpart)"),
    ("length", "response", "response (tokens)", "Length of the response (Fig. 5's counterpart)"),
    ("s_max", "s_max", "S_max (tokens)", "S_max (Fig. 6's counterpart)"),
    ("p_min", "p_min", "least prefix window (tokens)", "Prefix window (Fig. 7's counterpart)"),
    ("suffix", "suffix", "suffix window (tokens)", "Suffix window (the appendix's counterpart)"),
)
"""Group, factor, its words, title."""

Key = tuple[str, str, str]


def build(path: Path) -> tuple[str, str, list[Section]]:
    """Title, lead and sections of the page, of the groups that the run holds."""
    summary = read_object(path, "it has to be what decoding-show FILES --json wrote", ("cells",))
    frame = charts.cells_frame(summary)
    where = f"{summary['model']} on {summary['device_name']}, {summary['dtype']}, batch {summary['batch']}"
    origin = f"ours: measured, {path.name}: {where}"
    sections = [*_grid(frame, origin), *_cache_under_dsb(frame, origin)]
    for group, factor, words, title in SWEEPS:
        sections += _sweep(_of(frame, group), factor, words, (title, origin))
    sections += _ratios(_of(frame, "ratios"), origin)
    counts = sorted(set(frame.loc[~frame["diagnose"].astype(bool), "samples"]))
    samples = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    lead = (
        f"Every cell that was run, {samples} samples each, on the same samples as its base: "
        "confidence decoding in fixed blocks of 32 without a cache. Intervals are 95%. A cell is marked worse in "
        "accuracy by a one-sided sign test over samples at 5% (one cell in twenty by chance), in forwards and speed if "
        "it is worse at all. The article's models and tasks are others: only changes against the same base are put "
        "beside ours."
    )
    return "Sliding blocks and their caches, measured on the model that ships", lead, sections


def _of(frame: pd.DataFrame, group: str) -> pd.DataFrame:
    return frame[[group in groups for groups in frame["groups"]]]


# What the article prints ----------------------------------------------------------------------------------------------


def printed(metric: str) -> dict[tuple[str, str], dict[Key, float]]:
    """Printed values by (model, task), then by decoder, scheduler and cache."""
    found: dict[tuple[str, str], dict[Key, float]] = {}
    for point in published.find(Paper.DSB, metric=metric):
        if point.number is not None and point.exhibit in ("main", "Table 3"):
            found.setdefault((point.model, point.task), {})[point.decoder, point.scheduler, point.cache] = point.number
    return found


def printed_changes(key: Key, base: Key = BASE) -> tuple[list[float], list[float]]:
    """Factors of throughput and points of accuracy of ``key`` over ``base``: of each model and task with both rows."""
    speed, accuracy = printed("throughput"), printed("accuracy")
    factors = [rows[key] / rows[base] for rows in speed.values() if key in rows and base in rows]
    points = [rows[key] - rows[base] for rows in accuracy.values() if key in rows and base in rows]
    return factors, points


def _range(values: Sequence[float], style: str) -> str:
    if not values:
        return ""
    middle, low, high = (format(v, style) for v in (median(values), min(values), max(values)))
    return middle if len(values) == 1 else f"{middle} ({low} to {high}; {len(values)})"


def _printed_cells(row: Mapping[str, Any]) -> list[Cell]:
    names = [ARTICLE.get(row[name], "") for name in ("decoder", "scheduler", "cache")]
    usual = row["s_init"] == 32 and row["response"] == row["fits"] == 256 and row["s_max"] is None
    usual = usual and row["suffix"] == 0 and row["p_min"] == 24
    if not usual or "" in names:
        return [Cell(""), Cell("")]
    factors, points = printed_changes((names[0], names[1], names[2]))
    return [Cell(_range(factors, ".2f"), "number"), Cell(_range(points, "+.1f"), "number")]


# Sections -------------------------------------------------------------------------------------------------------------

_HEADER = (
    *("cell", "right, %", "forwards", "to EOS", "tokens a forward", "positions a forward", "tokens/s"),
    *("speed, x base", "samples lost, gained", "worse than base in"),
)
_PRINTED = ("printed: speed, x base", "printed: accuracy, points")


def _span(row: Mapping[str, Any], name: str, size: float, style: str) -> str:
    ends = [row[f"{name}{end}"] for end in ("", "_low", "_high")]
    if any(pd.isna(value) for value in ends):
        return "" if pd.isna(ends[0]) else format(size * ends[0], style)
    middle, low, high = (format(size * value, style) for value in ends)
    return f"{middle} ({low} to {high})"


def _cells(row: Mapping[str, Any]) -> list[Cell]:
    speed, factor = row["tok_s"], row["speed_of_base"]
    numbers = (
        _span(row, "accuracy", 100, ".1f"),
        _span(row, "nfe", 1, ".1f"),
        f"{row['nfe_before_eos']:.1f}",
        f"{row['tokens_per_forward']:.2f}",
        f"{row['positions_per_forward']:.0f}",
        "" if pd.isna(speed) else f"{speed:,.0f}",
        "" if pd.isna(factor) else f"{factor:.2f}",
        f"{row['samples_lost']}, {row['samples_gained']}",
    )
    bad = "number bad" if "accuracy" in row["marks"] else "number"
    return [Cell(row["name"]), *(Cell(text, "number") for text in numbers), Cell(row["marks"], bad)]


def _table(frame: pd.DataFrame, *, with_printed: bool = False) -> Table:
    records = _records(frame)
    header = [*_HEADER, *(_PRINTED if with_printed else ())]
    return Table(header, [[*_cells(row), *(_printed_cells(row) if with_printed else [])] for row in records])


def _records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    # A column of whole numbers and nothing becomes floats and NaN in a frame; here it is None again.
    return [{str(k): None if v is None or v != v else v for k, v in row.items()} for row in frame.to_dict("records")]


def _by_task(frame: pd.DataFrame) -> list[pd.DataFrame]:
    return [frame[frame["task"] == task] for task in dict.fromkeys(frame["task"])]


def _grid(frame: pd.DataFrame, origin: str) -> list[Section]:
    grid = _of(frame, "grid")
    if grid.empty:
        return []
    title = "Decoders, schedulers and caches (the main table's counterpart)"
    chart = charts.accuracy_by_speed(grid, "Accuracy against speed", origin)
    caption = "Up is more accurate, right is faster; lines are 95% intervals."
    printed = (
        "Printed: median over the models and tasks that the article prints both rows of (lowest to highest; how many)."
    )
    tables = [
        Section(f"The grid, {_words(part)}", (printed,), None, "", _table(part, with_printed=True))
        for part in _by_task(grid)
    ]
    return [Section(title, (), chart, caption), *tables]


def _words(part: pd.DataFrame) -> str:
    task = part["task"].iloc[0]
    return f"task {task} ({part['samples'].max():g} samples, {part['answers'].max():g} answers a cell)"


def _cache_under_dsb(frame: pd.DataFrame, origin: str) -> list[Section]:
    own = _of(frame, "cache-under-dsb")
    rows = []
    for (task, scheduler), part in own.groupby(["task", "scheduler"], sort=False):
        by_cache = {row["cache"]: row for row in _records(part)}
        if set(by_cache) >= {"dual", "dsb"}:
            rows.append(_change(str(task), str(scheduler), by_cache["dual"], by_cache["dsb"]))
    if not rows:
        return []
    header = (
        *("task", "schedule", "right, %: Dual", "right, %: DSB Cache", "forwards: Dual", "forwards: DSB Cache"),
        *("speed of DSB Cache, x Dual", "printed: speed, x Dual", "printed: accuracy, points"),
    )
    caption = f"The same schedule, only the cache differs; {origin}. Printed: LLaDA-8B on GSM8K and HumanEval."
    return [
        Section("Which cache a sliding block needs (Table 3's counterpart)", (), None, caption, Table(header, rows))
    ]


def _change(task: str, scheduler: str, dual: Mapping[str, Any], dsb: Mapping[str, Any]) -> list[Cell]:
    name = ARTICLE[scheduler]
    factors, points = printed_changes(("Confidence", name, "DSB Cache"), ("Confidence", name, "Dual"))
    numbers = (
        *(_span(row, "accuracy", 100, ".1f") for row in (dual, dsb)),
        *(_span(row, "nfe", 1, ".1f") for row in (dual, dsb)),
        f"{dsb['tok_s'] / dual['tok_s']:.2f}",
        _range(factors, ".2f"),
        _range(points, "+.1f"),
    )
    return [Cell(task), Cell(scheduler), *(Cell(text, "number") for text in numbers)]


def _sweep(frame: pd.DataFrame, factor: str, words: str, names: tuple[str, str]) -> list[Section]:
    if frame.empty or frame[factor].fillna(-1).nunique() < 2:
        return []
    title, origin = names
    chart = charts.sweep(frame, factor, words, title, origin)
    said = {
        "s_init": "The article draws this sweep and prints no value of it: it says that accuracy falls at "
        f"{published.number(Paper.DSB, metric='S_init_sweep_max'):g}, and that speed stays above fixed blocks'.",
        "response": "The article draws this sweep and prints no value of it: it says that speed falls with length.",
        "s_max": "The article draws this sweep and prints no value of it: on LLaDA it says that speed rises with the "
        "bound and that accuracy may fall.",
        "p_min": "The article draws this sweep and prints no value of it: on LLaDA it says that both rise, then fall, "
        f"and turn at {published.number(Paper.DSB, metric='l_pmin_turning_point'):g}.",
        "suffix": "The article prints no value of it: it says that no suffix window beats none on LLaDA-1.5.",
    }
    return [Section(title, (), chart, said[factor], _table(frame.sort_values(["task", "system"], kind="stable")))]


def _ratios(frame: pd.DataFrame, origin: str) -> list[Section]:
    if frame.empty:
        return []
    values = {
        name: published.number(Paper.DSB, metric=name)
        for name in ("late_ratio_lower_bound", "late_ratio_max", "premature_ratio_min", "premature_ratio_max")
    }
    low, high, least, most = values.values()
    chart = charts.ratios(frame, "Late and premature rounds (Fig. 8's counterpart)", origin)
    caption = (
        "Late: something outside the block was sure enough and was held back. Premature: something was committed "
        f"that was not. Printed for fixed blocks: late above {low:g}%, at most {high:g}%; premature {least:g}% to "
        f"{most:g}%. Rounds after the answer's end are left out of ours."
    )
    header = ("task", "schedule, cache", "samples", "late, %", "premature, %")
    rows = [
        [
            Cell(row["task"]),
            Cell(row["system"]),
            Cell(f"{row['samples']}", "number"),
            *(Cell(_span(row, kind, 100, ".1f"), "number") for kind in charts.RATIOS),
        ]
        for row in _records(frame)
    ]
    return [Section("Late and premature rounds (Fig. 8's counterpart)", (), chart, caption, Table(header, rows))]
