"""The HERALD paper's tables and figures: ours in the method's colour, what the paper prints as a black diamond.

Rows come from ``herald_sim.exhibits`` and :mod:`reports.paper_frames`. A point without a diamond is one that the paper
only draws; nothing is read off a plot.
"""

from typing import Any

import altair as alt
import pandas as pd

from reports.theme import METHOD_COLORS, PRINTED, WIDTH, finished, resource_color, scale

_PANEL = WIDTH // 2 - 60


def by_method(frame: pd.DataFrame, title: str, subtitle: str) -> Any:
    """Rows ``panel, method, batch, value, published, error, set``: Table II and Fig. 13, by model or context."""
    names = list(dict.fromkeys(frame["method"]))
    y = alt.Y("method:N", sort=names, title=None, axis=alt.Axis(labelLimit=200))
    bars = (
        alt.Chart()
        .mark_bar(height={"band": 0.7})
        .encode(
            x=alt.X("value:Q", title="throughput (tokens/s)"),
            y=y,
            color=alt.Color("method:N", title="ours", scale=scale(METHOD_COLORS, names), legend=None),
            tooltip=_tooltip("method:N", "batch:Q"),
        )
    )
    chart = (
        alt.layer(bars, _printed("published:Q", y), data=frame)
        .properties(width=_PANEL, height=26 * len(names))
        .facet(
            facet=alt.Facet(
                "panel:N",
                title=None,
                sort=list(dict.fromkeys(frame["panel"])),
                header=alt.Header(labelFontWeight="bold"),
            ),
            columns=2,
        )
        .resolve_scale(x="independent")
    )
    return finished(chart, title, subtitle, f"{title}. {_errors(frame)}.")


def by_batch(frame: pd.DataFrame, title: str, subtitle: str) -> Any:
    """Rows ``series, method, batch, value, published, fits`` and lines without a batch: Fig. 4 and Fig. 12.

    What does not fit into memory is dashed; a row without a batch is a line across.
    """
    curves, lines = frame[frame["batch"].notna()], frame[frame["batch"].isna()]
    names = list(dict.fromkeys(curves["method"]))
    colors = scale(METHOD_COLORS, names)
    x = alt.X("batch:Q", title="batch (requests decoded together)")
    y = alt.Y("value:Q", title="throughput (tokens/s)")
    base = alt.Chart(curves)
    # Each series is a line of its own: solid where it fits, dashed where it would need more memory.
    color = alt.Color("method:N", title="ours", scale=colors)
    dash = alt.StrokeDash(
        "fits:N",
        title="memory",
        scale=alt.Scale(domain=["fits", "beyond memory"], range=[[1, 0], [5, 4]]),
        legend=alt.Legend(symbolStrokeColor="#333", symbolStrokeWidth=2),
    )
    line = base.mark_line().encode(x=x, y=y, color=color, strokeDash=dash, detail="series:N")
    dots = base.mark_circle(size=40, opacity=1).encode(x=x, y=y, color=color, tooltip=_tooltip("series:N", "batch:Q"))
    marks = (
        base.transform_filter("isValid(datum.published)")
        .mark_point(shape="diamond", size=130, color=PRINTED, strokeWidth=2, opacity=1)
        .encode(x=x, y=alt.Y("published:Q"), tooltip=_tooltip("series:N", "batch:Q"))
    )
    layers = [line, dots, marks]
    if len(lines):
        rule = alt.Chart(lines).mark_rule(color="#555", strokeDash=[2, 3]).encode(y="value:Q")
        text = (
            alt.Chart(lines)
            .mark_text(align="right", baseline="bottom", dy=-3, color="#333")
            .encode(y="value:Q", x=alt.value(WIDTH - 164), text="label:N")
        )
        layers += [rule, text]
    chart = alt.layer(*layers).properties(width=WIDTH - 160, height=300)
    return finished(chart, title, subtitle, f"{title}. {_errors(frame)}.")


def ceiling_comparison(frame: pd.DataFrame, title: str, subtitle: str) -> Any:
    """Rows ``ceiling, resource, value, published, error, set``: Fig. 5, on a logarithmic axis."""
    order = list(frame.sort_values("value")["ceiling"])
    names = list(dict.fromkeys(frame["resource"]))
    low, high = float(frame["value"].min()) / 2, float(frame["value"].max()) * 3
    axis = alt.Scale(type="log", domain=[low, high], nice=False)
    y = alt.Y("ceiling:N", sort=order, title=None, axis=alt.Axis(labelLimit=260))
    x = alt.X("value:Q", scale=axis, title="ceiling (tokens/s, log scale)")
    base = alt.Chart(frame)
    dots = base.mark_point(filled=True, size=150).encode(
        x=x,
        y=y,
        color=alt.Color(
            "resource:N",
            title="ours, by resource",
            scale=alt.Scale(domain=names, range=[resource_color(n) for n in names]),
        ),
        tooltip=_tooltip("ceiling:N"),
    )
    text = base.mark_text(align="left", dx=14).encode(x=x, y=y, text=alt.Text("value:Q", format=",.0f"))
    marks = _printed("published:Q", y, axis, frame)
    chart = (dots + marks + text).properties(width=WIDTH - 240, height=34 * len(frame))
    return finished(chart, title, subtitle, f"{title}. {_errors(frame)}.")


def roofline(frame: pd.DataFrame, ridge: tuple[float, float], title: str, subtitle: str) -> Any:
    """Rows ``queries, intensity, roof, value`` in FLOP/byte and GFLOP/s; ``ridge`` is the printed range: Fig. 6."""
    intensity = alt.Scale(type="log", domain=[1, 256], nice=False)
    x = alt.X("intensity:Q", scale=intensity, title="operational intensity (FLOP per byte of KV, log scale)")
    y = alt.Y("rate:Q", scale=alt.Scale(type="log", nice=False), title="rate (GFLOP/s, log scale)")
    known = frame[frame["queries"].notna()]
    roof = (
        alt.Chart(frame).mark_line(color="#555").encode(x=x, y=alt.Y("roof:Q", scale=alt.Scale(type="log", nice=False)))
    )
    dots = (
        alt.Chart(known.rename(columns={"value": "rate"}))
        .mark_point(filled=True, size=90, color=METHOD_COLORS["herald"])
        .encode(x=x, y=y, tooltip=["queries:Q", "intensity:Q", alt.Tooltip("rate:Q", format=",.0f")])
    )
    names = (
        alt.Chart(known.rename(columns={"value": "rate"}))
        .mark_text(align="left", dx=8, dy=10)
        .encode(x=x, y=y, text="label:N")
    )
    band = (
        alt.Chart(pd.DataFrame({"from": [ridge[0]], "to": [ridge[1]], "what": ["printed: ridges of three CPUs"]}))
        .mark_rect(opacity=0.18, color=PRINTED)
        .encode(x=alt.X("from:Q", scale=intensity), x2="to:Q", tooltip="what:N")
    )
    label = (
        alt.Chart(pd.DataFrame({"at": [ridge[1]], "what": ["printed ridges"]}))
        .mark_text(align="left", dx=4, baseline="top", color=PRINTED)
        .encode(x=alt.X("at:Q", scale=intensity), y=alt.value(6), text="what:N")
    )
    chart = (band + roof + dots + names + label).properties(width=WIDTH - 160, height=280)
    words = ", ".join(f"{row['label']} {row['value']:,.0f} GFLOP/s" for row in known.to_dict("records"))
    return finished(chart, title, subtitle, f"{title}. {words}. Printed ridges {ridge[0]:g} to {ridge[1]:g} FLOP/byte.")


def query_gain(frame: pd.DataFrame, title: str, subtitle: str) -> Any:
    """Rows ``queries, gain, published``: throughput of the selection kernel against all queries: Fig. 8."""
    x = alt.X(
        "queries:O", title="queries of a block (32 = the whole block)", sort="descending", axis=alt.Axis(labelAngle=0)
    )
    base = alt.Chart(frame)
    bars = base.mark_bar(color=METHOD_COLORS["herald"], width={"band": 0.6}).encode(
        x=x,
        y=alt.Y("gain:Q", title="kernel throughput (times that of 32 queries)"),
        tooltip=["queries:O", alt.Tooltip("gain:Q", format=".2f"), "published:Q"],
    )
    # At the foot: a printed value lies near the top, and its diamond would cover the number.
    text = base.mark_text(dy=-9, color="white").encode(x=x, y=alt.datum(0), text=alt.Text("gain:Q", format=".1f"))
    marks = (
        base.transform_filter("isValid(datum.published)")
        .mark_point(shape="diamond", size=130, color=PRINTED, strokeWidth=2, opacity=1)
        .encode(x=x, y="published:Q")
    )
    chart = (bars + text + marks).properties(width=WIDTH // 2, height=260)
    words = ", ".join(f"{row['queries']:g} queries {row['gain']:.1f}" for row in frame.to_dict("records"))
    return finished(chart, title, subtitle, f"{title}. Times as fast: {words}.")


def crossover(frame: pd.DataFrame, title: str, subtitle: str) -> Any:
    """Rows ``panel, T, method, tok_s, stream, latency_s``: throughput and both streams' latencies over T: Fig. 14."""
    panels = list(dict.fromkeys(frame["panel"]))
    rows = [
        alt.hconcat(*(draw(frame[frame["panel"] == panel], panel) for panel in panels)) for draw in (_rates, _latencies)
    ]
    chart = alt.vconcat(*rows).resolve_scale(color="independent")
    words = "; ".join(
        f"{panel}: HERALD passes Dense from T = {own['first'].iloc[0]:g}" for panel, own in frame.groupby("panel")
    )
    return finished(chart, title, subtitle, f"{title}. {words}.")


_STEPS = alt.X("T:Q", title="denoising steps a block, T", scale=alt.Scale(domain=[4, 32]))


def _rates(frame: pd.DataFrame, panel: str) -> Any:
    """Throughput over T; a diamond where the paper prints parity."""
    rates = frame[frame["tok_s"].notna()]
    names = list(dict.fromkeys(rates["method"]))
    lines = (
        alt.Chart(rates)
        .mark_line(point={"size": 35})
        .encode(
            x=_STEPS,
            y=alt.Y("tok_s:Q", title="throughput (tokens/s)"),
            color=alt.Color("method:N", title="method, ours", scale=scale(METHOD_COLORS, names)),
            tooltip=["T:Q", "method:N", alt.Tooltip("tok_s:Q", format=",.0f")],
        )
    )
    parity = (
        alt.Chart(rates[rates["published"].notna()])
        .mark_point(shape="diamond", size=150, color=PRINTED, strokeWidth=2, opacity=1)
        .encode(x=_STEPS, y="tok_s:Q", tooltip=["T:Q", alt.Tooltip("published:N", title="printed: HERALD / Dense")])
    )
    return (lines + parity).properties(width=_PANEL, height=200, title=panel)


def _latencies(frame: pd.DataFrame, _: str) -> Any:
    """Latencies of both streams over T."""
    colors = alt.Scale(domain=["main", "retrieval"], range=["#4c78a8", "#e45756"])
    return (
        alt.Chart(frame[frame["latency_s"].notna()])
        .mark_line(point={"size": 35})
        .encode(
            x=_STEPS,
            y=alt.Y("latency_s:Q", title="latency a block (s)"),
            color=alt.Color("stream:N", title="stream, ours", scale=colors),
            tooltip=["T:Q", "stream:N", alt.Tooltip("latency_s:Q", format=".3f")],
        )
        .properties(width=_PANEL, height=140)
    )


def fit_errors(frame: pd.DataFrame, title: str, subtitle: str) -> Any:
    """Rows ``fit, set, name, error``: errors of values that a fit saw, and of values that it did not."""
    fits = list(dict.fromkeys(frame["fit"]))
    colors = alt.Scale(domain=["fit", "held-out"], range=["#8d96a3", METHOD_COLORS["herald"]])
    zero = alt.Chart(pd.DataFrame({"error": [0.0]})).mark_rule(color="#555").encode(x="error:Q")
    dots = (
        alt.Chart(frame)
        .mark_circle(size=60, opacity=0.75)
        .encode(
            x=alt.X("error:Q", title="signed error (ours / printed - 1)", axis=alt.Axis(format="+.0%")),
            y=alt.Y("fit:N", sort=fits, title="values fitted to"),
            yOffset=alt.YOffset("set:N", sort=["fit", "held-out"]),
            color=alt.Color("set:N", title="value was", scale=colors),
            tooltip=["name:N", "set:N", *_tooltip()[:3]],
        )
    )
    chart = (dots + zero).properties(width=WIDTH - 240, height=50 * len(fits))
    means = frame.assign(size=frame["error"].abs()).groupby(["fit", "set"])["size"].mean().reset_index()
    words = ", ".join(f"{row['fit']}, {row['set']} {row['size']:.1%}" for row in means.to_dict("records"))
    return finished(chart, title, subtitle, f"{title}. Mean size of the error: {words}.")


def _printed(field: str, y: alt.Y, axis: alt.Scale | None = None, data: pd.DataFrame | None = None) -> Any:
    """What the paper prints: a black diamond with a legend of its own."""
    x = alt.X(field) if axis is None else alt.X(field, scale=axis)
    base = alt.Chart() if data is None else alt.Chart(data)
    return (
        base.transform_filter("isValid(datum.published)")
        .transform_calculate(mark="'printed in the paper'")
        .mark_point(size=130, color=PRINTED, strokeWidth=2, opacity=1)
        .encode(
            x=x,
            y=y,
            shape=alt.Shape("mark:N", title=None, scale=alt.Scale(domain=["printed in the paper"], range=["diamond"])),
            tooltip=_tooltip(),
        )
    )


def _tooltip(*first: str) -> list[alt.Tooltip]:
    return [
        *(alt.Tooltip(field) for field in first),
        alt.Tooltip("value:Q", format=",.1f", title="ours"),
        alt.Tooltip("published:Q", format=",.1f", title="printed"),
        alt.Tooltip("error:Q", format="+.1%", title="error"),
        alt.Tooltip("set:N", title="set"),
    ]


def _errors(frame: pd.DataFrame) -> str:
    """The errors of what is printed, in words."""
    known = frame[frame["published"].notna() & frame["error"].notna()]
    if not len(known):
        return "The paper prints no number here"
    worst = max(known.to_dict("records"), key=lambda row: abs(row["error"]))
    return (
        f"{len(known)} printed numbers; mean error {known['error'].abs().mean():.1%}, "
        f"worst {worst['error']:+.1%} (printed {worst['published']:,g}, ours {worst['value']:,.0f})"
    )
