"""Decoding schedules on the reference model: accuracy against speed, sweeps of one factor, late and premature rounds.

Frames come from the JSON of ``python -m herald_exec.evaluation decoding-show FILES --json`` (:func:`cells_frame`).
"""

from collections.abc import Mapping
from typing import Any

import altair as alt
import pandas as pd

from herald_pipeline.errors import ConfigError
from reports.theme import WIDTH, finished, scale

SCHEDULER_COLORS = {"fixed": "#7f7f7f", "adablock": "#edae49", "dsb-const": "#4c78a8", "dsb-greedy": "#d1495b"}
CACHES = ("none", "prefix", "dual", "dkv", "dsb")
RATIOS = ("late", "premature")


def cells_frame(summary: Mapping[str, Any]) -> pd.DataFrame:
    """A row a cell: its choices, ``accuracy``, ``nfe`` with ``_low`` and ``_high``, speed, ratios, ``marks``.

    :class:`ConfigError` when it is no summary of a decoding run.
    """
    try:
        rows = [_row(cell) for cell in summary["cells"]]
        if rows:
            return pd.DataFrame(rows)
    except (KeyError, TypeError):
        pass
    message = "no summary of a decoding run; write it with: python -m herald_exec.evaluation decoding-show FILES --json"
    raise ConfigError(message)


def _row(cell: Mapping[str, Any]) -> dict[str, Any]:
    against, shares = cell["against_base"], dict[str, float | None]()
    for kind in RATIOS:
        shares |= _interval(kind, cell[f"{kind}_ratio_before_eos"])
    return {
        **cell["cell"],
        "name": cell["name"],
        "groups": tuple(cell["groups"]),
        "system": f"{cell['cell']['scheduler']}, {cell['cell']['cache']}",
        "samples": cell["samples"],
        "answers": cell["answers"],
        **_interval("accuracy", cell["accuracy"]),
        **_interval("nfe", cell["nfe"]),
        "nfe_before_eos": cell["nfe_before_eos"]["value"],
        "tokens_per_forward": cell["tokens_per_forward_before_eos"],
        "positions_per_forward": cell["positions_per_forward"],
        "tok_s": cell["throughput_tok_s"],
        "speed_of_base": against["speed_of_base"],
        "samples_lost": against["samples_lost"],
        "samples_gained": against["samples_gained"],
        "marks": ", ".join(against["marks"]),
        **shares,
    }


def _interval(name: str, interval: Mapping[str, float | None] | None) -> dict[str, float | None]:
    known = interval or {}
    return {name: known.get("value"), f"{name}_low": known.get("low"), f"{name}_high": known.get("high")}


def _tips() -> list[Any]:
    return [
        alt.Tooltip("name:N", title="cell"),
        *(alt.Tooltip(f"accuracy{end}:Q", format=".1%") for end in ("", "_low", "_high")),
        alt.Tooltip("nfe:Q", format=".1f", title="forwards"),
        alt.Tooltip("tok_s:Q", format=",.0f", title="tokens/s"),
        alt.Tooltip("marks:N", title="worse than base in"),
    ]


def _accuracy(name: str = "accuracy") -> alt.Y:
    return alt.Y(f"{name}:Q", scale=alt.Scale(zero=False), axis=alt.Axis(format="%"), title="answers right")


def accuracy_by_speed(frame: pd.DataFrame, title: str, subtitle: str) -> Any:
    """Rows of :func:`cells_frame` with a speed: a panel a task and decoder, caches by shape, schedulers by colour."""
    schedulers = [name for name in SCHEDULER_COLORS if name in set(frame["scheduler"])]
    caches = [name for name in CACHES if name in set(frame["cache"])]
    x = alt.X(
        "tok_s:Q",
        scale=alt.Scale(type="log", nice=False, padding=20),
        axis=alt.Axis(format=",.3~r", labelOverlap="greedy", labelSeparation=6),
        title="tokens/s (log scale)",
    )
    base = alt.Chart(frame).encode(
        color=alt.Color("scheduler:N", scale=scale(SCHEDULER_COLORS, schedulers)),
    )
    rule = base.mark_rule(opacity=0.5).encode(x=x, y=_accuracy("accuracy_low"), y2=alt.Y2("accuracy_high:Q"))
    dots = base.mark_point(filled=True, size=80, opacity=1).encode(
        x=x, y=_accuracy(), shape=alt.Shape("cache:N", scale=alt.Scale(domain=caches)), tooltip=_tips()
    )
    panel = alt.layer(rule, dots).properties(width=WIDTH * 2 // 5, height=220)
    chart = panel.facet(
        row=alt.Row("decoder:N", title=None, sort=list(dict.fromkeys(frame["decoder"]))),
        column=alt.Column("task:N", title=None, sort=list(dict.fromkeys(frame["task"]))),
    ).resolve_scale(x="independent")
    fastest = frame.sort_values("tok_s").groupby(["task", "decoder"], sort=False).tail(1).to_dict("records")
    words = "; ".join(
        f"{row['task']}, {row['decoder']}: {row['system']} {row['tok_s']:,.0f} tokens/s, {row['accuracy']:.0%} right"
        for row in fastest
    )
    return finished(chart, title, subtitle, f"{title}. Fastest of each panel: {words}.")


def sweep(frame: pd.DataFrame, factor: str, words: str, title: str, subtitle: str) -> Any:
    """Rows of :func:`cells_frame` over one ``factor``: answers right, forwards and tokens a second, a column a task.

    ``words`` name the factor on its axis; its values are taken as steps, so that an unbounded one has a place.
    """
    shown = frame.assign(at=[_step(value) for value in frame[factor]])
    order = [_step(value) for value in sorted(set(frame[factor].fillna(float("inf"))))]
    systems = list(dict.fromkeys(frame["system"]))
    x = alt.X("at:N", sort=order, title=words, axis=alt.Axis(labelAngle=0))
    color = alt.Color("scheduler:N", scale=scale(SCHEDULER_COLORS, list(dict.fromkeys(frame["scheduler"]))))
    dash = alt.StrokeDash("cache:N", sort=list(CACHES))
    tasks = list(dict.fromkeys(frame["task"]))
    panels = []
    for task in tasks:
        base = alt.Chart(shown[shown["task"] == task]).encode(color=color, detail="system:N")
        rule = base.mark_rule(opacity=0.4).encode(x=x, y=_accuracy("accuracy_low"), y2=alt.Y2("accuracy_high:Q"))
        right = base.mark_line(point=True).encode(x=x, y=_accuracy(), strokeDash=dash, tooltip=_tips())
        others = [
            base.mark_line(point=True).encode(x=x, y=alt.Y(f"{name}:Q", title=label), strokeDash=dash, tooltip=_tips())
            for name, label in (("nfe", "forwards an answer"), ("tok_s", "tokens/s"))
        ]
        size = {"width": WIDTH * 2 // 5, "height": 130}
        column = [(rule + right).properties(title=task, **size), *(part.properties(**size) for part in others)]
        panels.append(alt.vconcat(*column))
    ends = shown.sort_values("tok_s").groupby("task", sort=False).tail(1).to_dict("records")
    fast = "; ".join(f"{row['task']}: {row['name']} {row['tok_s']:,.0f} tokens/s" for row in ends)
    return finished(
        alt.hconcat(*panels), title, subtitle, f"{title}. {len(systems)} systems, {len(shown)} cells. Fastest: {fast}."
    )


def _step(value: Any) -> str:
    return "unbounded" if pd.isna(value) or value == float("inf") else f"{value:g}"


def ratios(frame: pd.DataFrame, title: str, subtitle: str) -> Any:
    """Rows of diagnosed cells: shares of late and of premature rounds with intervals, a panel a task."""
    parts = [
        frame[["task", "system"]].assign(
            kind=kind, share=frame[kind], low=frame[f"{kind}_low"], high=frame[f"{kind}_high"]
        )
        for kind in RATIOS
    ]
    table = pd.concat(parts, ignore_index=True)
    order = list(dict.fromkeys(frame["system"]))
    y = alt.Y("system:N", sort=order, title=None, axis=alt.Axis(labelLimit=200))
    share = alt.X(
        "share:Q", axis=alt.Axis(format="%"), scale=alt.Scale(domain=[0, 1]), title="of the rounds before EOS"
    )
    color = alt.Color("kind:N", scale=alt.Scale(domain=list(RATIOS), range=["#4c78a8", "#e45756"]), title=None)
    base = alt.Chart(table).encode(y=y, color=color)
    rule = base.mark_rule(opacity=0.6).encode(x=alt.X("low:Q", title=""), x2="high:Q")
    dots = base.mark_point(filled=True, size=90, opacity=1).encode(x=share)
    panel = alt.layer(rule, dots).properties(width=WIDTH * 2 // 5, height=28 * len(order))
    words = "; ".join(
        f"{row['task']}, {row['system']}: late {row['late']:.0%}, premature {row['premature']:.0%}"
        for row in frame.to_dict("records")
    )
    chart = panel.facet(column=alt.Column("task:N", title=None, sort=list(dict.fromkeys(frame["task"]))))
    return finished(chart, title, subtitle, f"{title}. {words}.")
