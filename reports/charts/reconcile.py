"""Prediction against measurement: throughput by point, and signed errors of every kind of stage."""

from typing import Any

import altair as alt
import pandas as pd

from reports.theme import METHOD_COLORS, WIDTH, finished, scale

BAR = 0.15
STAGE_BAR = 0.25


def throughput_scatter(frame: pd.DataFrame, title: str, subtitle: str) -> Any:
    """Rows ``point, method, set, measured, predicted, error, spread, drift``; the band is plus or minus 15%."""
    low = 0.85 * float(min(frame["measured"].min(), frame["predicted"].min()))
    high = 1.15 * float(max(frame["measured"].max(), frame["predicted"].max()))
    axis = alt.Scale(type="log", domain=[low, high], nice=False)
    line = pd.DataFrame(
        {"x": [low, high], "even": [low, high], "less": [low * (1 - BAR), high * (1 - BAR)]}
        | {"more": [low * (1 + BAR), high * (1 + BAR)]}
    )
    band = (
        alt.Chart(line)
        .mark_area(opacity=0.15, color="#4c78a8", clip=True)
        .encode(x=alt.X("x:Q", scale=axis), y=alt.Y("less:Q", scale=axis), y2="more:Q")
    )
    even = alt.Chart(line).mark_line(color="#555", strokeDash=[4, 3], clip=True).encode(x="x:Q", y="even:Q")
    methods = list(dict.fromkeys(frame["method"]))
    points = (
        alt.Chart(frame)
        .mark_point(filled=True, size=90, opacity=0.85)
        .encode(
            x=alt.X("measured:Q", scale=axis, title="measured throughput (tokens/s)"),
            y=alt.Y("predicted:Q", scale=axis, title="predicted throughput (tokens/s)"),
            color=alt.Color("method:N", title="method", scale=scale(METHOD_COLORS, methods)),
            shape=alt.Shape(
                "set:N",
                title="set",
                scale=alt.Scale(domain=["held-out", "fit", "not judged"], range=["circle", "cross", "triangle-up"]),
            ),
            tooltip=[
                alt.Tooltip("point:N"),
                alt.Tooltip("measured:Q", format=".1f"),
                alt.Tooltip("predicted:Q", format=".1f"),
                alt.Tooltip("error:Q", format="+.1%"),
                alt.Tooltip("spread:Q", format=".1%"),
                alt.Tooltip("drift:Q", format=".2f"),
            ],
        )
    )
    chart = (band + even + points).properties(width=WIDTH // 2, height=WIDTH // 2)
    held = frame[frame["set"] == "held-out"]
    inside = int((held["error"].abs() <= BAR).sum())
    description = (
        f"{title}. Predicted against measured throughput of {len(frame)} points; {inside} of {len(held)} held-out ones "
        f"lie within {BAR:.0%}."
    )
    return finished(chart, title, subtitle, description)


def stage_errors(frame: pd.DataFrame, title: str, subtitle: str) -> Any:
    """Rows ``stage, point, method, measured_ms, predicted_ms, error, share``: a dot a point, a line a stage kind."""
    order = list(frame.groupby("stage")["share"].median().sort_values(ascending=False).index)
    methods = list(dict.fromkeys(frame["method"]))
    border = pd.DataFrame({"error": [-STAGE_BAR, STAGE_BAR]})
    bars = alt.Chart(border).mark_rule(color="#999", strokeDash=[4, 3]).encode(x="error:Q")
    zero = alt.Chart(pd.DataFrame({"error": [0.0]})).mark_rule(color="#555").encode(x="error:Q")
    dots = (
        alt.Chart(frame)
        .mark_circle(size=70, opacity=0.7)
        .encode(
            x=alt.X("error:Q", title="signed error of the time per launch (predicted / measured - 1)").axis(
                format="+.0%"
            ),
            y=alt.Y("stage:N", sort=order, title="stage kind"),
            color=alt.Color("method:N", title="method", scale=scale(METHOD_COLORS, methods)),
            tooltip=[
                alt.Tooltip("point:N"),
                alt.Tooltip("stage:N"),
                alt.Tooltip("measured_ms:Q", format=".3f", title="measured (ms)"),
                alt.Tooltip("predicted_ms:Q", format=".3f", title="predicted (ms)"),
                alt.Tooltip("error:Q", format="+.1%"),
                alt.Tooltip("share:Q", format=".2%", title="share of busy time"),
            ],
        )
    )
    chart = (bars + zero + dots).properties(width=WIDTH, height=max(120, 26 * len(order)))
    medians = frame.groupby("stage")["error"].median()
    words = ", ".join(f"{stage} {medians[stage]:+.0%}" for stage in order)
    return finished(chart, title, subtitle, f"{title}. Median signed errors: {words}.")
