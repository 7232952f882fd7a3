"""The page of the papers' exhibits: every table and figure that is recomputed, with what is printed beside ours.

One function a section, in :data:`SECTIONS`; a section takes a profile, asks :mod:`reports.paper_frames` for its table
and a function of :mod:`reports.charts` for its chart.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from herald_pipeline.hardware import Profile
from herald_sim.exhibits.targets import HARDWARE
from reports import charts, paper_frames
from reports.kernels import sections as kernel_sections
from reports.page import Cell, Section, Table

__all__ = ["HARDWARE", "SECTIONS", "build"]

Make = Callable[[Profile], Section]
_GOOD = 0.10
"""Errors of printed values up to this size are green."""


def build(profile: Profile, kernels: Path | None = None) -> tuple[str, str, list[Section]]:
    """Title, lead and sections of the page; ``kernels``, a file of kernel speeds, adds Fig. 6 and 8 as measured."""
    measured = kernel_sections(kernels) if kernels is not None else []
    sections = [make(profile) for make in SECTIONS]
    for at, section in enumerate(measured, SECTIONS.index(fig_8) + 1):
        sections.insert(at, section)
    return f"The papers' exhibits, recomputed on {profile.name}", _lead(profile), sections


def _lead(profile: Profile) -> str:
    fitted = profile.fitted()
    words = "Ours in colour, what the papers print as black diamonds; where a figure prints no number, none is shown. "
    if fitted:
        return words + (
            f"{len(fitted)} numbers of this profile are fitted to the HERALD paper's own results, so that agreement "
            "with them is reproduction, not prediction: each row says whether it was fitted to, held out, or derived."
        )
    return words + "No number of this profile is fitted to the papers: what agrees was predicted."


def _provenance(profile: Profile) -> str:
    kinds = sorted({str(q.origin.provenance) for _, _, q in profile.quantities() if q is not None})
    return f"ours: simulated on {profile.name} ({', '.join(kinds)}); printed: published"


# The HERALD paper ----------------------------------------------------------------------------------------------------


def table_2(profile: Profile) -> Section:
    """Table II."""
    frame = paper_frames.table_2(profile)
    chart = charts.by_method(frame, "Table II: throughput at the paper's batch", _provenance(profile))
    columns = ["model", "context", "method", "batch", *_COMPARED, "our_largest_batch", "limit"]
    return Section(
        "Table II: throughput",
        (),
        chart,
        "T = 20, B = 32. Each panel has an axis of its own. The last two columns are our capacity rule's.",
        _table(frame, columns),
    )


def fig_4(profile: Profile) -> Section:
    """Fig. 4."""
    frame = paper_frames.fig_4(profile)
    chart = charts.by_batch(frame, "Fig. 4: Dense stops where device memory ends", _provenance(profile))
    return _beside("Fig. 4: Dense by batch", frame, chart, "LLaDA2.0-mini at 32K.", ["batch", "fits"])


def fig_5(profile: Profile) -> Section:
    """Fig. 5."""
    frame = paper_frames.fig_5(profile)
    chart = charts.ceiling_comparison(frame, "Fig. 5: what each resource allows", _provenance(profile))
    caption = "LLaDA2.0-mini at 32K, T = 20. The three link ceilings rest on one solved number: derived, no test."
    return _beside("Fig. 5: ceilings", frame, chart, caption, ["ceiling"])


def fig_6(profile: Profile) -> Section:
    """Fig. 6."""
    frame = paper_frames.cpu_roofline(profile)
    ridge = paper_frames.printed_ridges()
    chart = charts.roofline(frame, ridge, "Fig. 6: selection under the CPU's roof", _provenance(profile))
    caption = (
        "One query lies on the slope, where memory binds; 32 queries lie beyond the ridge, where arithmetic does. "
        "The paper prints the ridges of three CPUs (grey) and the intensities 4 and 128; our roof is this profile's "
        "attention rate (of the paper's machine: solved from Fig. 5), which is lower than those CPUs' peak."
    )
    header = ["label", "intensity", "value", "roof"]
    return Section("Fig. 6: roofline", (), chart, caption, _table(frame[frame["queries"].notna()], header))


def fig_8(profile: Profile) -> Section:
    """Fig. 8."""
    frame = paper_frames.selection_by_queries(profile)
    chart = charts.query_gain(frame, "Fig. 8: fewer queries, faster selection", _provenance(profile))
    caption = "One layer of LLaDA2.0-mini at 32K. The paper prints the gain of one query over 32 only (about 8)."
    return Section("Fig. 8: queries", (), chart, caption, _table(frame, ["queries", "gain", "published"]))


def fig_12(profile: Profile) -> Section:
    """Fig. 12."""
    frame = paper_frames.fig_12(profile)
    chart = charts.by_batch(frame, "Fig. 12: throughput by batch", _provenance(profile))
    caption = "LLaDA2.0-mini at 32K. Ideal: sparse forwards alone, selection and fetch hidden."
    return _beside("Fig. 12: throughput by batch", frame, chart, caption, ["series", "batch"])


def fig_13(profile: Profile) -> Section:
    """Fig. 13."""
    frame = paper_frames.fig_13(profile)
    chart = charts.by_method(frame, "Fig. 13: what each part brings", _provenance(profile))
    caption = (
        "LLaDA2.0-mini, each bar at its own best feasible batch. herald-32q, draft without representative, is ours."
    )
    columns = ["panel", "method", "batch", "selection", "queries", *_COMPARED]
    return Section("Fig. 13: ablation", (), chart, caption, _table(frame, columns))


def fig_14(profile: Profile) -> Section:
    """Fig. 14."""
    frame = paper_frames.fig_14(profile)
    chart = charts.crossover(frame, "Fig. 14: where retrieval hides behind the steps", _provenance(profile))
    rows = paper_frames.exhibit("fig-14", profile)
    caption = "LLaDA2.0-mini at the batches of Table II. The diamond is the printed parity with Dense at T = 8."
    columns = [
        "context",
        "T",
        "dense_tok_s",
        "herald_tok_s",
        "main_latency_s",
        "retrieval_latency_s",
        "ratio_published",
        "ratio",
    ]
    rows = rows.rename(columns={"published": "ratio_published", "value": "ratio"})
    return Section("Fig. 14: steps", (), chart, caption, _table(rows, columns))


def fit(profile: Profile) -> Section:
    """How far the fits carry."""
    frame = paper_frames.exhibit("fit", profile)
    title = "How honest the fit is"
    if not len(frame):
        return Section(title, ("No fit to the papers belongs to this profile.",))
    chart = charts.fit_errors(
        frame, "Errors of values that a fit saw, and of values that it did not", _provenance(profile)
    )
    caption = "Each line is a fit to a part of the printed values; held-out values were not shown to it."
    means = frame.assign(size=frame["error"].abs()).groupby(["fit", "set"])["size"].agg(["count", "mean", "max"])
    return Section(title, (), chart, caption, _table(means.reset_index(), ["fit", "set", "count", "mean", "max"]))


# The DSB article -----------------------------------------------------------------------------------------------------


def dsb_main(profile: Profile) -> Section:
    """The DSB article's main table."""
    frame = paper_frames.dsb("dsb-main", profile)
    chart = charts.dsb_throughputs(frame, "DSB, main table: throughput by decoder, scheduler and cache", _DSB_FROM)
    notes = (
        "The article prints neither forwards nor step times: nothing here is a prediction. Where rows give both times, "
        "a row's throughput is put together from the times of other rows; that the two agree is what can be checked.",
    )
    return Section("DSB: main table", (), chart, _DSB_CAPTION, _dsb_table(frame), notes)


def dsb_forwards(profile: Profile) -> Section:
    """What the DSB article's throughputs imply."""
    frame = paper_frames.dsb("dsb-main", profile)
    chart = charts.dsb_forwards(frame[frame["forwards"].notna()], "DSB: forwards that the throughputs imply", _DSB_FROM)
    caption = "Implied by printed throughput and the time of a full forward; 256 means one token a forward."
    return Section("DSB: forwards", (), chart, caption)


def dsb_table_3(profile: Profile) -> Section:
    """The DSB article's Table 3."""
    frame = paper_frames.dsb("dsb-table-3", profile)
    chart = charts.dsb_throughputs(frame, "DSB, Table 3: which cache a sliding block needs", _DSB_FROM)
    return Section("DSB: Table 3", (), chart, _DSB_CAPTION, _dsb_table(frame))


def dsb_example(profile: Profile) -> Section:
    """The DSB article's worked example."""
    frame = paper_frames.dsb_example(profile)
    chart = charts.sliding_example(frame, "DSB: the worked example, round by round", "ours: run; printed: published")
    notes = [f"{row['quantity']}: {row['note']}" for row in frame.to_dict("records") if row["note"]]
    caption = "Bars: our scheduler's block. Diamonds: the printed edges."
    return Section("DSB: worked example", (), chart, caption, _table(frame, ["quantity", "published", "value"]), notes)


SECTIONS: tuple[Make, ...] = (
    table_2,
    fig_4,
    fig_5,
    fig_6,
    fig_8,
    fig_12,
    fig_13,
    fig_14,
    fit,
    dsb_main,
    dsb_forwards,
    dsb_table_3,
    dsb_example,
)
"""The page's sections in order."""


# Tables --------------------------------------------------------------------------------------------------------------

_COMPARED = ["published", "value", "error", "set"]
_DSB_FROM = "printed: published; ours: derived from other rows of the table"
_DSB_CAPTION = "Hollow diamonds are printed; filled circles are ours, where other rows give the two step times."
_HEADERS = {
    "ratio_published": "HERALD / Dense, printed",
    "ratio": "ours",
    "published": "printed",
    "value": "ours",
    "our_largest_batch": "our largest batch",
    "limit": "limited by",
    "dense_tok_s": "dense tok/s",
    "herald_tok_s": "herald tok/s",
    "main_latency_s": "main (s)",
    "retrieval_latency_s": "retrieval (s)",
    "full_forward_ms": "full forward (ms)",
    "short_step_ms": "short step (ms)",
    "intensity": "FLOP/byte",
    "roof": "roof (GFLOP/s)",
    "label": "",
}
_SHARES = {"error", "mean", "max"}


def _beside(title: str, frame: pd.DataFrame, chart: Any, caption: str, keys: Sequence[str]) -> Section:
    """A section whose table holds the printed values only: the curve is in the chart."""
    return Section(title, (), chart, caption, _table(frame[frame["published"].notna()], [*keys, *_COMPARED]))


def _dsb_table(frame: pd.DataFrame) -> Table:
    columns = [
        "model",
        "task",
        "setting",
        "published",
        "value",
        "error",
        "forwards",
        "full_forward_ms",
        "short_step_ms",
    ]
    return _table(frame, [*columns, "note"])


def _table(frame: pd.DataFrame, columns: Sequence[str]) -> Table:
    header = [_HEADERS.get(name, name) for name in columns]
    records = frame[list(columns)].to_dict("records")
    return Table(header, [[_cell(name, row[name]) for name in columns] for row in records])


def _cell(name: str, value: Any) -> Cell:
    if value is None or (isinstance(value, float) and pd.isna(value)):
        return Cell("")
    if name in _SHARES:
        kind = "number" if name != "error" else f"number {'good' if abs(value) <= _GOOD else 'bad'}"
        return Cell(f"{value:+.1%}" if name == "error" else f"{value:.1%}", kind)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return Cell(_number(float(value)), "number")
    return Cell(str(value))


def _number(value: float) -> str:
    if value == int(value) and abs(value) >= 1:
        return f"{value:,.0f}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 100 else f"{value:.1f}"
