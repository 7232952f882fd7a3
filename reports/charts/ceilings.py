"""Ceilings of a machine by scheme, as in the HERALD paper's Fig. 5: the ring marks what a scheme cannot pass."""

from typing import Any

import altair as alt
import pandas as pd

from reports.theme import WIDTH, finished, resource_color


def ceilings(frame: pd.DataFrame, title: str, subtitle: str) -> Any:
    """Rows ``scheme, ceiling, resource, tok_s, binding, formula, provenance``."""
    schemes = list(dict.fromkeys(frame["scheme"]))
    resources = list(dict.fromkeys(frame["resource"]))
    colors = alt.Scale(domain=resources, range=[resource_color(name) for name in resources])
    y = alt.Y("scheme:N", sort=schemes, title=None, axis=alt.Axis(labelLimit=300))
    domain = [float(frame["tok_s"].min()) / 2, float(frame["tok_s"].max()) * 2]
    logarithmic = alt.Scale(type="log", domain=domain, nice=False)
    x = alt.X("tok_s:Q", scale=logarithmic, title="ceiling (tokens/s, log scale)")
    base = alt.Chart(frame)
    dots = base.mark_point(filled=True, size=110).encode(
        x=x,
        y=y,
        color=alt.Color("resource:N", title="resource", scale=colors),
        tooltip=[
            alt.Tooltip("ceiling:N"),
            alt.Tooltip("tok_s:Q", format=",.0f", title="tokens/s"),
            alt.Tooltip("formula:N"),
            alt.Tooltip("provenance:N"),
        ],
    )
    binding = alt.Chart(frame[frame["binding"]])
    ring = binding.mark_point(size=380, strokeWidth=2, color="#222").encode(x=x, y=y)
    value = binding.mark_text(dy=-17, fontWeight="bold").encode(x=x, y=y, text=alt.Text("tok_s:Q", format=",.0f"))
    chart = (dots + ring + value).properties(width=WIDTH * 2 // 3, height=46 * len(schemes))
    lowest = [
        f"{row['scheme']}: {row['tok_s']:,.0f} tokens/s by {row['resource']}"
        for row in frame[frame["binding"]].to_dict("records")
    ]
    return finished(chart, title, subtitle, f"{title}. Lowest ceiling of each scheme: {'; '.join(lowest)}.")
