"""Timelines of runs, one above the other on one axis: what ran when, on which stream."""

from typing import Any

import altair as alt
import pandas as pd

from reports.theme import STAGE_COLORS, WIDTH, finished, scale

_ORDER = ["main", "retrieval", "gather", "h2d", "d2h"]

_NARROW = 120
"""Part of the chart's width, about six pixels, below which a mark at a launch's start would hide the launch."""

_LEAST_HEIGHT = 64
"""Of a run's part, in pixels: its name stands upright beside it."""


def timeline(frame: pd.DataFrame, title: str, subtitle: str) -> Any:
    """Spans (``source, stream, stage, start_ms, end_ms, duration_ms, layer, step, block``) of one block or a few."""
    streams = [name for name in _ORDER if name in set(frame["stream"])]
    stages = [name for name in STAGE_COLORS if name in set(frame["stage"])]
    stages += sorted(set(frame["stage"]) - set(stages))
    end = float(frame["end_ms"].max())
    height = max(26 * len(streams), _LEAST_HEIGHT)
    colors = scale(STAGE_COLORS, stages)
    apart = alt.Axis(labelOverlap="greedy", labelSeparation=6)
    x = alt.X("start_ms:Q", title="time since the block began (ms)", scale=alt.Scale(domain=[0, end]), axis=apart)
    y = alt.Y("stream:N", sort=streams, title=None)
    # A stroke in the stage's own colour: launches shorter than a pixel stay visible.
    bars = (
        alt.Chart()
        .mark_bar(height={"band": 0.8}, strokeWidth=1)
        .encode(
            x=x,
            x2="end_ms:Q",
            y=y,
            color=alt.Color("stage:N", title="stage", scale=colors),
            stroke=alt.Stroke("stage:N", title="stage", scale=colors),
            tooltip=[
                alt.Tooltip("stage:N"),
                alt.Tooltip("block:Q"),
                alt.Tooltip("step:Q"),
                alt.Tooltip("layer:N"),
                alt.Tooltip("duration_ms:Q", title="duration (ms)", format=".3f"),
            ],
        )
    )
    steps = (
        alt.Chart()
        .transform_filter(f"datum.stream == 'main' && datum.duration_ms > {end / _NARROW:.6g}")
        .mark_tick(color="white", thickness=1.5, height=0.78 * height / len(streams))
        .encode(x=x, y=y)
    )
    spans = (
        alt.layer(bars, steps, data=frame)
        .properties(width=WIDTH, height=height)
        .facet(
            row=alt.Row(
                "source:N",
                title=None,
                sort=list(dict.fromkeys(frame["source"])),
                header=alt.Header(labelFontWeight="bold"),
            )
        )
    )
    return finished(spans, title, subtitle, _description(frame, title))


def _description(frame: pd.DataFrame, title: str) -> str:
    """The lengths of the runs and the busiest stage of each, in words."""
    parts = []
    for source, own in frame.groupby("source"):
        busiest = own.groupby("stage")["duration_ms"].sum().idxmax()
        parts.append(f"{source}: {own['end_ms'].max():.1f} ms, most of it {busiest}")
    return f"{title}. Timeline by stream. {'; '.join(parts)}."
