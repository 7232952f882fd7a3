"""Looks shared by all charts: one colour per method and per stage, sizes, fonts. Nothing here computes."""

from typing import Any

import altair as alt

WIDTH = 720
FONT = "system-ui, sans-serif"

METHOD_COLORS = {
    "dense": "#7f7f7f",
    "herald": "#d1495b",
    "infinigen": "#edae49",
    "mage-offload": "#66a182",
    "mage-cpu": "#2e4057",
    "mage-cpu-representative": "#8d96a3",
    "herald-no-draft": "#f4978e",
    "herald-32q": "#a4133c",
    "shadowkv": "#00798c",
    "specontext": "#9c89b8",
}
STAGE_COLORS = {
    "prefill": "#c7c7c7",
    "denoise": "#4c78a8",
    "decide": "#72b7b2",
    "project": "#f58518",
    "select": "#e45756",
    "finish": "#ffbf79",
    "gather": "#54a24b",
    "upload": "#88d27a",
    "draft_down": "#b279a2",
    "append": "#d6a5c9",
    "swap": "#222222",
    "offload": "#9d755d",
    "score": "#eeca3b",
    "rebuild": "#c9a227",
    "fold": "#7f6000",
    "retrieve": "#ff9da6",
}


def scale(colors: dict[str, str], names: list[str]) -> alt.Scale:
    """Colours of ``names``, the rest in grey, so that a name looks alike in every chart."""
    return alt.Scale(domain=names, range=[colors.get(name, "#999999") for name in names])


def finished(chart: Any, title: str, subtitle: str, description: str) -> Any:
    """A chart with its title, what it rests on, and its text for those who do not see it."""
    return chart.properties(
        title=alt.TitleParams(title, subtitle=subtitle, anchor="start", subtitleColor="#555"),
        description=description,
    ).configure(font=FONT)
