"""Looks shared by all charts: one colour per method and per stage, sizes, fonts. Nothing here computes."""

from typing import Any

import altair as alt

WIDTH = 720
FONT = "system-ui, sans-serif"
PRINTED = "#111111"
"""Colour of everything that a paper prints; ours is in the method's colour."""

METHOD_COLORS = {
    "dense": "#7f7f7f",
    "herald": "#d1495b",
    "infinigen": "#edae49",
    "mage-offload": "#66a182",
    "mage-cpu": "#2e4057",
    "mage-cpu-representative": "#8d96a3",
    "herald-no-draft": "#f4978e",
    "herald-32q": "#a4133c",
    "herald-sliding": "#ff758f",
    "shadowkv": "#00798c",
    "specontext": "#9c89b8",
    "cpu-exact": "#5e503f",
    "layer-prefetch": "#bc8034",
    "step-fetch": "#d4b483",
    "ideal": "#4c78a8",
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
    "step_project": "#4c78a8",
    "step_attend": "#e45756",
    "step_finish": "#ffbf79",
    "step_layer": "#4c78a8",
    "select_step": "#e45756",
    "proxy": "#ff9da6",
    "fetch": "#88d27a",
    "extend": "#c9a227",
    "read_prompt": "#bab0ac",
}
RESOURCE_COLORS = {"selection": "#54a24b", "link": "#f58518", "cpu": "#e45756", "dram": "#b279a2", "gpu": "#4c78a8"}
"""By a word of the resource's name."""
TASK_COLORS = {"GSM8K": "#4c78a8", "MATH": "#f58518", "HumanEval": "#54a24b", "MBPP": "#b279a2", "BBH": "#e45756"}


def scale(colors: dict[str, str], names: list[str]) -> alt.Scale:
    """Colours of ``names``, the rest in grey, so that a name looks alike in every chart."""
    return alt.Scale(domain=names, range=[colors.get(name, "#999999") for name in names])


def resource_color(resource: str) -> str:
    """Colour of a resource by the word that its name contains."""
    return next((color for name, color in RESOURCE_COLORS.items() if name in resource), "#999999")


def finished(chart: Any, title: str, subtitle: str | list[str], description: str) -> Any:
    """A chart with its title, what it rests on, and its text for those who do not see it."""
    titled = chart.properties(
        title=alt.TitleParams(title, subtitle=subtitle, anchor="start", subtitleColor="#555"),
        description=description,
    )
    # A legend takes the opacity of its faintest mark, otherwise, and its colours pale.
    return titled.configure(font=FONT).configure_legend(symbolOpacity=1)
