"""Accuracy of selection rules: against budget, against what a selection reads, and T; from a study's summary.

Frames come from the JSON of ``python -m herald_exec.evaluation show FILE --json`` (:func:`study_frames`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import pandas as pd

from herald_pipeline.errors import ConfigError
from reports.theme import METHOD_COLORS, WIDTH, finished, scale

CONTROLS = ("random", "recency")


def study_frames(summary: Mapping[str, Any]) -> dict[str, pd.DataFrame]:
    """``accuracy``, ``cost``, ``loss`` and ``steps`` of a study's summary; :class:`ConfigError` when it is none."""
    missing = [name for name in ("table", "front", "steps") if name not in summary]
    if missing:
        message = (
            f"a study's summary needs table, front and steps, this one has no {', '.join(missing)}; "
            "write it with: python -m herald_exec.evaluation show FILE --json"
        )
        raise ConfigError(message)
    accuracy = [
        {"rule": row["rule"], "budget": row["budget"], "task": task, **score}
        for row in summary["table"]
        for task, score in row["tasks"].items()
    ]
    cost = [
        {
            "rule": row["rule"],
            "budget": row["budget"],
            "queries": row["queries"],
            "mb": row["scan_bytes"] / 1e6,
            "best": row["best"],
            **row["exact"],
        }
        for row in summary["front"]
    ]
    loss = [
        {"rule": row["rule"], "budget": row["budget"], **row["minus_dense"]}
        for row in summary["table"]
        if row.get("minus_dense") and row["rule"] not in CONTROLS
    ]
    steps = [
        {"rule": row["rule"], "budget": row["budget"], "steps": int(taken), "blocks": blocks}
        for row in summary["steps"]
        for taken, blocks in row["histogram"].items()
    ]
    found = {"accuracy": accuracy, "cost": cost, "loss": loss, "steps": steps}
    return {name: pd.DataFrame(rows) for name, rows in found.items()}


_OTHERS = (
    "#4e79a7",
    "#f28e2b",
    "#59a14f",
    "#b07aa1",
    "#9c755f",
    "#2a9d9d",
    "#ff9da7",
    "#8cd17d",
    "#1d3557",
    "#000000",
    "#c9b400",
    "#a0cbe8",
)
"""For rules that are no method of the product; used again when there are more."""


def _colors(rules: Sequence[str]) -> dict[str, str]:
    """A method's own colour, and one of the others for each rule beyond them."""
    others = [rule for rule in rules if rule not in METHOD_COLORS]
    return METHOD_COLORS | {rule: _OTHERS[at % len(_OTHERS)] for at, rule in enumerate(others)}


def _interval(base: Any, x: Any) -> Any:
    return base.mark_rule(opacity=0.6).encode(x=x, y=alt.Y("low:Q"), y2=alt.Y2("high:Q"))


def accuracy_by_budget(frame: pd.DataFrame, title: str, subtitle: str) -> Any:
    """Rows ``rule, budget, task, value, low, high``: a panel a task, Dense as a dashed line with its own colour."""
    rules = list(dict.fromkeys(frame["rule"]))
    color = alt.Color("rule:N", title="rule", scale=scale(_colors(rules), rules))
    budgeted = frame[frame["rule"] != "dense"]
    x = alt.X(
        "budget:Q",
        scale=alt.Scale(type="log", nice=False, padding=10),
        axis=alt.Axis(format=".3~%", values=sorted(set(budgeted["budget"]))),
        title="budget (share of the prefix)",
    )
    y = alt.Y("value:Q", scale=alt.Scale(domain=[0, 1]), axis=alt.Axis(format="%"), title="exact match")
    base = alt.Chart(frame).encode(color=color)
    chosen = base.transform_filter("datum.rule != 'dense'")
    tips = [
        alt.Tooltip("rule:N"),
        *(alt.Tooltip(f"{name}:Q", format=".1%") for name in ("budget", "value", "low", "high")),
    ]
    line = chosen.mark_line(point=True).encode(x=x, y=y, tooltip=tips)
    dense = base.transform_filter("datum.rule == 'dense'").mark_rule(strokeDash=[5, 4]).encode(y=y)
    chart = alt.layer(_interval(chosen, x), line, dense).properties(width=WIDTH // 3, height=180)
    best = budgeted.sort_values("value").groupby("task").tail(1).to_dict("records")
    words = "; ".join(f"{row['task']}: {row['rule']} at {row['budget']:.1%} {row['value']:.0%}" for row in best)
    facet = chart.facet(facet=alt.Facet("task:N", title=None), columns=2)
    return finished(facet, title, subtitle, f"{title}. Highest of each task: {words}.")


def loss_by_budget(frame: pd.DataFrame, title: str, subtitle: str) -> Any:
    """Rows ``rule, budget, value, low, high``: paired difference from Dense over all tasks, with its 95% interval."""
    rules = list(dict.fromkeys(frame["rule"]))
    axis = alt.Axis(format=".3~%", values=sorted(set(frame["budget"])))
    x = alt.X(
        "budget:Q",
        scale=alt.Scale(type="log", nice=False, padding=10),
        axis=axis,
        title="budget (share of the prefix)",
    )
    base = alt.Chart(frame).encode(color=alt.Color("rule:N", title="rule", scale=scale(_colors(rules), rules)))
    y = alt.Y("value:Q", axis=alt.Axis(format="+%"), title="exact match minus Dense's")
    tips = [alt.Tooltip("rule:N"), *(alt.Tooltip(f"{n}:Q", format="+.1%") for n in ("budget", "value", "low", "high"))]
    line = base.mark_line(point=True).encode(x=x, y=y, tooltip=tips)
    near = alt.Chart(pd.DataFrame({"near": [-0.01]})).mark_rule(strokeDash=[5, 4]).encode(y="near:Q")
    chart = alt.layer(_interval(base, x), line, near).properties(width=WIDTH * 2 // 3, height=320)
    best = frame.sort_values("value").groupby("rule").tail(1).to_dict("records")
    words = "; ".join(f"{row['rule']} at {row['budget']:.1%} {100 * row['value']:+.1f} points" for row in best)
    return finished(chart, title, subtitle, f"{title}. Best of each rule: {words}.")


def cost_front(frame: pd.DataFrame, title: str, subtitle: str) -> Any:
    """Rows ``rule, budget, queries, mb, value, low, high, best``: bytes that a selection reads against exact match."""
    rules = list(dict.fromkeys(frame["rule"]))
    x = alt.X(
        "mb:Q",
        scale=alt.Scale(type="log", nice=False, padding=20),
        title="read by a block's selection (MB = 10^6 bytes, log scale)",
    )
    y = alt.Y(
        "value:Q",
        scale=alt.Scale(zero=False),
        axis=alt.Axis(format="%"),
        title="exact match (answers of several blocks)",
    )
    base = alt.Chart(frame).encode(
        color=alt.Color("rule:N", title="rule", scale=scale(_colors(rules), rules)),
    )
    dots = base.mark_point(filled=True, size=90).encode(
        x=x,
        y=y,
        shape=alt.Shape("queries:N", title="queries"),
        opacity=alt.condition("datum.best", alt.value(1.0), alt.value(0.35)),
        tooltip=[
            alt.Tooltip("rule:N"),
            alt.Tooltip("budget:Q", format=".1%"),
            alt.Tooltip("queries:Q"),
            alt.Tooltip("mb:Q", format=",.3f", title="MB a block"),
            alt.Tooltip("value:Q", format=".1%"),
        ],
    )
    chart = alt.layer(_interval(base, x), dots).properties(width=WIDTH * 2 // 3, height=320)
    kept = frame[frame["best"]].to_dict("records")
    words = "; ".join(f"{row['rule']} at {row['budget']:.1%}: {row['mb']:.2f} MB, {row['value']:.0%}" for row in kept)
    return finished(chart, title, subtitle, f"{title}. Where nothing reads less and is as accurate: {words}.")


def steps_histogram(frame: pd.DataFrame, title: str, subtitle: str) -> Any:
    """Rows ``rule, budget, steps, blocks``: share of a rule's and budget's blocks by T, one line of squares each."""
    shown = frame.assign(
        label=[f"{row.rule} {row.budget:.1%}" for row in frame.itertuples()],
        share=frame["blocks"] / frame.groupby(["rule", "budget"])["blocks"].transform("sum"),
    )
    labels = list(dict.fromkeys(shown["label"]))
    chart = (
        alt.Chart(shown)
        .mark_rect()
        .encode(
            x=alt.X("steps:O", title="T (denoising steps of a block)", axis=alt.Axis(labelAngle=0)),
            y=alt.Y("label:N", title=None, sort=labels),
            # The root, because a few lengths hold most blocks and the tails are what differs.
            color=alt.Color(
                "share:Q",
                title="share of blocks",
                scale=alt.Scale(scheme="blues", type="sqrt"),
                legend=alt.Legend(format=".0%"),
            ),
            tooltip=[
                alt.Tooltip("label:N"),
                alt.Tooltip("steps:O"),
                alt.Tooltip("blocks:Q"),
                alt.Tooltip("share:Q", format=".1%"),
            ],
        )
        .properties(width=WIDTH * 2 // 3, height=alt.Step(14))
    )
    total = shown.assign(all=shown["steps"] * shown["blocks"]).groupby("label", sort=False)[["all", "blocks"]].sum()
    words = "; ".join(f"{label} {row['all'] / row['blocks']:.1f}" for label, row in total.iterrows())
    return finished(chart, title, subtitle, f"{title}. Mean T: {words}.")


def recall_frames(summary: Mapping[str, Any]) -> dict[str, pd.DataFrame]:
    """``means`` and ``buckets`` of a recall study's summary; :class:`ConfigError` when it is none."""
    missing = [name for name in ("means", "later_means", "buckets", "regained", "samples") if name not in summary]
    if missing:
        message = (
            f"a recall study's summary lacks {', '.join(missing)}; "
            "write it with: python -m herald_exec.evaluation recall --summary FILE"
        )
        raise ConfigError(message)
    steps = (("all steps", "means"), ("without step 0", "later_means"))
    means = [{"steps": label, **row} for label, name in steps for row in summary[name]]
    buckets = [
        {"bucket": f"{bucket['from']:.1f}-{bucket['to']:.1f}", "pairs": bucket["pairs"], "rule": rule}
        | {"recall": bucket[rule]}
        for bucket in summary["buckets"]
        for rule in ("omit", "draft", "mage")
        if rule in bucket
    ]
    return {"means": pd.DataFrame(means), "buckets": pd.DataFrame(buckets)}


def recall_by_factor(frame: pd.DataFrame, title: str, subtitle: str) -> Any:
    """Rows ``steps, rule, factor, value, low, high``: Fig. 9's counterpart; the dashed line is MAGE at factor 1."""
    rules = list(dict.fromkeys(frame["rule"]))
    x = alt.X("factor:Q", scale=alt.Scale(zero=False, padding=10), title="budget (times the oracle's k)")
    y = alt.Y("value:Q", scale=alt.Scale(domain=[0, 1]), axis=alt.Axis(format="%"), title="recall of the oracle's k")
    base = alt.Chart(frame).encode(color=alt.Color("rule:N", title="scored by", scale=scale(_colors(rules), rules)))
    tips = [alt.Tooltip("rule:N"), *(alt.Tooltip(f"{n}:Q", format=".3f") for n in ("factor", "value", "low", "high"))]
    line = base.mark_line(point=True).encode(x=x, y=y, tooltip=tips)
    mage = base.transform_filter("datum.rule == 'mage' && datum.factor == 1").mark_rule(strokeDash=[5, 4]).encode(y=y)
    chart = alt.layer(_interval(base, x), line, mage).properties(width=WIDTH // 3, height=260)
    at_one = frame[frame["factor"] == 1.0].to_dict("records")
    words = "; ".join(f"{row['rule']}, {row['steps']}: {row['value']:.2f}" for row in at_one)
    facet = chart.facet(facet=alt.Facet("steps:N", title=None), columns=2)
    return finished(facet, title, subtitle, f"{title}. At factor 1: {words}.")


def recall_by_bucket(frame: pd.DataFrame, title: str, subtitle: str) -> Any:
    """Rows ``bucket, pairs, rule, recall``: Fig. 7's counterpart, block n left out, drafted, completed."""
    rules = ["omit", "draft", "mage"]
    counts = {row["bucket"]: row["pairs"] for row in frame.to_dict("records")}
    shown = frame.assign(label=[f"{name} ({counts[name]})" for name in frame["bucket"]])
    chart = (
        alt.Chart(shown)
        .mark_bar()
        .encode(
            x=alt.X("label:O", title="recall without block n (steps in the bucket)", axis=alt.Axis(labelAngle=0)),
            xOffset=alt.XOffset("rule:N", sort=rules),
            y=alt.Y("recall:Q", scale=alt.Scale(domain=[0, 1]), axis=alt.Axis(format="%"), title="recall"),
            color=alt.Color("rule:N", title="block n", scale=scale(_colors(rules), rules), sort=rules),
            tooltip=[alt.Tooltip("rule:N"), alt.Tooltip("recall:Q", format=".3f"), alt.Tooltip("pairs:Q")],
        )
        .properties(width=WIDTH * 2 // 3, height=260)
    )
    words = "; ".join(f"{row['bucket']} {row['rule']} {row['recall']:.2f}" for row in frame.to_dict("records"))
    return finished(chart, title, subtitle, f"{title}. {words}.")
