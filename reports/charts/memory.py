"""What lies where: memory of each method, device and host, by item."""

from typing import Any

import altair as alt
import pandas as pd

from reports.theme import WIDTH, finished


def memory(frame: pd.DataFrame, title: str, subtitle: str) -> Any:
    """Rows ``method, home, item, gb, what, stays``: one bar a method and home, items stacked."""
    small = bool(frame.groupby(["method", "home"])["gb"].sum().max() < 1)
    unit, factor = ("MB = 10^6 bytes", 1000) if small else ("GB = 10^9 bytes", 1)
    chart = (
        alt.Chart(frame)
        .transform_calculate(size=f"datum.gb * {factor}")
        .mark_bar()
        .encode(
            x=alt.X("sum(size):Q", title=f"memory ({unit})"),
            y=alt.Y("method:N", title=None),
            color=alt.Color("item:N", title="item", scale=alt.Scale(scheme="tableau20")),
            tooltip=[
                alt.Tooltip("item:N"),
                alt.Tooltip("size:Q", format=",.3f", title=unit[:2]),
                alt.Tooltip("what:N"),
                alt.Tooltip("stays:N"),
            ],
        )
        .properties(width=WIDTH * 2 // 3, height=32 * frame["method"].nunique())
        .facet(row=alt.Row("home:N", title=None, header=alt.Header(labelFontWeight="bold")))
    )
    totals = frame.groupby(["method", "home"])["gb"].sum().reset_index().to_dict("records")
    words = "; ".join(f"{row['method']} on the {row['home']} {row['gb']:.3f} GB" for row in totals)
    return finished(chart, title, subtitle, f"{title}. {words}.")
