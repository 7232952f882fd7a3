"""The DSB article's tables: printed throughput, and what it is made of; ours is put together from *other* rows."""

from collections.abc import Callable
from typing import Any

import altair as alt
import pandas as pd

from reports.theme import PRINTED, TASK_COLORS, WIDTH, finished, scale


def throughputs(frame: pd.DataFrame, title: str, subtitle: str) -> Any:
    """Rows ``model, task, setting, published, value, error, note``: printed diamonds, ours filled, by task."""

    def panel(own: pd.DataFrame, x: alt.Scale, y: alt.Y, color: alt.Color) -> Any:
        tooltip = [
            "task:N",
            "setting:N",
            alt.Tooltip("published:Q", title="printed"),
            alt.Tooltip("value:Q", format=".1f", title="ours, from other rows"),
            alt.Tooltip("error:Q", format="+.1%"),
            "note:N",
        ]
        printed, ours = own.assign(mark="printed"), own[own["value"].notna()].assign(mark="ours")
        marks = (
            alt.Chart(printed)
            .mark_point(size=90, strokeWidth=2, opacity=1)
            .encode(
                x=alt.X("published:Q", scale=x, title="throughput (tokens/s)"),
                y=y,
                color=color,
                shape=_shape(),
                tooltip=tooltip,
            )
        )
        filled = (
            alt.Chart(ours)
            .mark_point(size=70, filled=True, opacity=1)
            .encode(x=alt.X("value:Q", scale=x), y=y, color=color, shape=_shape(), tooltip=tooltip)
        )
        return marks + filled

    chart = _by_model(frame, "published", panel)
    known = frame[frame["value"].notna()]
    words = f"{len(frame)} printed throughputs, {len(known)} of them put together from other rows"
    if len(known):
        worst = max(known["error"], key=abs)
        words += f"; mean error {known['error'].abs().mean():.1%}, worst {worst:+.1%}"
    return finished(chart, title, subtitle, f"{title}. {words}.")


def forwards(frame: pd.DataFrame, title: str, subtitle: str) -> Any:
    """Rows ``model, task, setting, forwards``: how many forwards a printed throughput implies."""

    def panel(own: pd.DataFrame, x: alt.Scale, y: alt.Y, color: alt.Color) -> Any:
        return (
            alt.Chart(own)
            .mark_point(filled=True, size=80, opacity=1)
            .encode(
                x=alt.X("forwards:Q", scale=x, title="forwards of a 256-token answer, implied"),
                y=y,
                color=color,
                tooltip=["task:N", "setting:N", alt.Tooltip("forwards:Q", format=".1f"), "basis:N", "note:N"],
            )
        )

    chart = _by_model(frame, "forwards", panel)
    least = frame.groupby("setting")["forwards"].median()
    words = "; ".join(f"{name}: {value:.0f}" for name, value in least.items())
    return finished(chart, title, subtitle, f"{title}. Median number of forwards: {words}.")


def _by_model(frame: pd.DataFrame, field: str, panel: Callable[..., Any]) -> Any:
    """A panel a model, one above the other on one axis; settings as rows, tasks as colours."""
    tasks = [name for name in TASK_COLORS if name in set(frame["task"])]
    color = alt.Color("task:N", title="task", scale=scale(TASK_COLORS, tasks))
    x = alt.Scale(domain=[0, 1.05 * float(frame[field].max())], nice=False)
    panels = []
    for model in dict.fromkeys(frame["model"]):
        own = frame[frame["model"] == model]
        settings = list(dict.fromkeys(own["setting"]))
        y = alt.Y("setting:N", sort=settings, title=None, axis=alt.Axis(labelLimit=280, minExtent=230))
        drawn = panel(own, x, y, color)
        title = alt.TitleParams(model, anchor="start", fontSize=12)
        panels.append(drawn.properties(width=WIDTH - 330, height=22 * len(settings), title=title))
    return alt.vconcat(*panels)


def sliding_example(frame: pd.DataFrame, title: str, subtitle: str) -> Any:
    """Rows ``round, edge, value, published``: where the sliding block begins and ends in each round."""
    wide = frame.pivot_table(index="round", columns="edge", values=["value", "published"]).reset_index()
    table = pd.DataFrame(
        {
            "round": wide["round"].astype(int),
            "start": wide[("value", "s")],
            "end": wide[("value", "e")],
            "printed_end": wide[("published", "e")],
            "printed_start": wide[("published", "s")],
        }
    )
    y = alt.Y("round:O", title="round")
    bars = (
        alt.Chart(table)
        .mark_bar(color="#4c78a8", height={"band": 0.5})
        .encode(
            x=alt.X("start:Q", title="position in the answer", scale=alt.Scale(zero=False)),
            x2="end:Q",
            y=y,
            tooltip=list(table.columns),
        )
    )
    edges = table.melt("round", ["printed_start", "printed_end"], value_name="position").dropna()
    marks = (
        alt.Chart(edges)
        .mark_point(shape="diamond", size=120, color=PRINTED, strokeWidth=2, opacity=1)
        .encode(x="position:Q", y=y)
    )
    chart = (bars + marks).properties(width=WIDTH - 200, height=40 * len(table))
    words = ", ".join(f"round {row['round']}: {row['start']:g} to {row['end']:g}" for row in table.to_dict("records"))
    return finished(chart, title, subtitle, f"{title}. {words}.")


def _shape() -> alt.Shape:
    return alt.Shape("mark:N", title=None, scale=alt.Scale(domain=["printed", "ours"], range=["diamond", "circle"]))
