"""Throughput of several methods at one point."""

from typing import Any

import altair as alt
import pandas as pd

from reports.theme import METHOD_COLORS, WIDTH, finished, scale


def throughput_bars(frame: pd.DataFrame, title: str, subtitle: str) -> Any:
    """Rows ``method, throughput_tok_s, status``: a bar a method."""
    names = list(frame["method"])
    y = alt.Y("method:N", sort=names, title=None, axis=alt.Axis(labelLimit=200))
    base = alt.Chart(frame[["method", "throughput_tok_s", "status"]])
    bars = base.mark_bar(height={"band": 0.7}).encode(
        x=alt.X("throughput_tok_s:Q", title="throughput (tokens/s)", axis=alt.Axis(tickCount=6)),
        y=y,
        color=alt.Color("method:N", scale=scale(METHOD_COLORS, names), legend=None),
        tooltip=["method:N", alt.Tooltip("throughput_tok_s:Q", format=",.0f"), "status:N"],
    )
    text = base.mark_text(align="left", dx=4).encode(
        x="throughput_tok_s:Q", y=y, text=alt.Text("throughput_tok_s:Q", format=",.0f")
    )
    chart = (bars + text).properties(width=WIDTH - 220, height=28 * len(names))
    words = ", ".join(f"{row['method']} {row['throughput_tok_s']:,.0f}" for row in frame.to_dict("records"))
    return finished(chart, title, subtitle, f"{title}. Tokens per second: {words}.")
