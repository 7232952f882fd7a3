"""The selection kernel as measured: Fig. 6 and Fig. 8 from a file that ``benchmarks/bench_kernels.py`` wrote."""

from collections.abc import Mapping
from typing import Any

import altair as alt
import pandas as pd

from herald_pipeline.errors import ConfigError
from reports.theme import PRINTED, WIDTH, finished

SERIES = {"portable": "#b8b8b8", "avx2": "#8d96a3", "avx512": "#4c78a8", "amx": "#d1495b"}
"""Instruction sets that are measured with one query and with all of them, and their colours."""
_PAPER_LIKE = "avx512, ranking by a heap"
_COLORS = SERIES | {_PAPER_LIKE: "#b279a2"}


def kernel_frame(bench: Mapping[str, Any]) -> pd.DataFrame:
    """Rows of the default kernels on all threads and of the paper-like one: how fast, under which roof, which gain.

    ``gain`` is throughput over that with most queries: the median of the ratios within a round.
    """
    missing = [name for name in ("kernels", "roofs_gflops", "read_gb_s", "shape", "cpu") if name not in bench]
    if missing:
        message = (
            f"a file of kernel speeds needs kernels, roofs_gflops, read_gb_s, shape and cpu, this one has no "
            f"{', '.join(missing)}; write it with: python benchmarks/bench_kernels.py --out FOLDER"
        )
        raise ConfigError(message)
    plain = {f"{tier} x={x}": tier for tier in SERIES for x in (1, 2, 4, 8, 16, 32)}
    plain |= {f"avx512 x={x}, paper-like": _PAPER_LIKE for x in (1, 32)}
    rows = [{**row, "series": plain[row["name"]]} for row in bench["kernels"] if row["name"] in plain]
    frame = pd.DataFrame(rows).rename(columns={"x": "queries", "flop_per_byte": "intensity"})
    samples = {(row["series"], row["x"]): row["gb_s_samples"] for row in rows}
    most = {series: max(x for name, x in samples if name == series) for series in frame["series"].unique()}
    frame["gain"] = [
        _median_ratio(samples[series, x], samples[series, most[series]])
        for series, x in zip(frame["series"], frame["queries"], strict=True)
    ]
    columns = ["series", "queries", "intensity", "gb_s", "of_read_ceiling", "gflops", "gain"]
    return frame[columns].sort_values(["series", "queries"], ignore_index=True)


def _median_ratio(first: list[float], second: list[float]) -> float:
    return float((pd.Series(first) / pd.Series(second)).median())


def measured_roofs(bench: Mapping[str, Any]) -> dict[str, float]:
    """Name of a roof -> GFLOP/s; the first that exists is what Fig. 6 draws: bf16 dots and FP32 FMA in equal parts."""
    roofs = bench["roofs_gflops"]
    wanted = {
        "bf16 dots and FMA (paper)": ("avx512bf16", "harmonic_bf16_dot_fma"),
        "FP32 FMA": ("avx512", "fma"),
        "AMX": ("amx", "amx"),
    }
    return {name: roofs[tier][unit] for name, (tier, unit) in wanted.items() if unit in roofs.get(tier, {})}


def read_ceiling(bench: Mapping[str, Any]) -> float:
    """What all threads read, GB/s: the ceiling of the same run."""
    return float(max(bench["read_gb_s"].items(), key=lambda entry: int(entry[0]))[1]["median"])


def measured_roofline(bench: Mapping[str, Any], ridge: tuple[float, float], title: str, subtitle: str) -> Any:
    """Measured roofs and kernels under them; ``ridge`` is the printed range: Fig. 6."""
    frame, roofs, rate = kernel_frame(bench), measured_roofs(bench), read_ceiling(bench)
    lines = pd.DataFrame(
        {"roof": name, "intensity": at, "rate": min(peak, rate * at)}
        for name, peak in roofs.items()
        for at in sorted({1.0, peak / rate, 256.0})
    )
    log = alt.Scale(type="log", nice=False)
    x = alt.X("intensity:Q", scale=alt.Scale(type="log", domain=[1, 256], nice=False), title="FLOP per byte of KV")
    roof = (
        alt.Chart(lines)
        .mark_line()
        .encode(
            x=x,
            y=alt.Y("rate:Q", scale=log, title="rate (GFLOP/s, log scale)"),
            strokeDash=alt.StrokeDash("roof:N", title="roof"),
            color=alt.value("#555"),
        )
    )
    dots = (
        alt.Chart(frame.rename(columns={"gflops": "rate"}))
        .mark_point(filled=True, size=80)
        .encode(
            x=x,
            y=alt.Y("rate:Q", scale=log),
            color=_color(frame),
            tooltip=[
                "series:N",
                "queries:Q",
                alt.Tooltip("rate:Q", format=",.0f"),
                alt.Tooltip("gb_s:Q", format=".1f"),
            ],
        )
    )
    band = (
        alt.Chart(pd.DataFrame({"from": [ridge[0]], "to": [ridge[1]], "what": ["printed: ridges of three CPUs"]}))
        .mark_rect(opacity=0.18, color=PRINTED)
        .encode(x=alt.X("from:Q"), x2="to:Q", tooltip="what:N")
    )
    chart = (band + roof + dots).properties(width=WIDTH - 160, height=280)
    words = ", ".join(f"{name} {peak:,.0f} GFLOP/s, ridge {peak / rate:.0f}" for name, peak in roofs.items())
    return finished(chart, title, subtitle, f"{title}. Roofs: {words}. Printed ridges {ridge[0]:g} to {ridge[1]:g}.")


def measured_gain(bench: Mapping[str, Any], printed: float, title: str, subtitle: str) -> Any:
    """Throughput by queries over that with 32, an instruction set a line; the printed gain of one query: Fig. 8."""
    frame = kernel_frame(bench)
    x = alt.X(
        "queries:O", title="queries of a block (32 = the whole block)", sort="descending", axis=alt.Axis(labelAngle=0)
    )
    y = alt.Y("gain:Q", title="kernel throughput (times that of 32 queries)")
    tooltip = ["series:N", "queries:O", alt.Tooltip("gain:Q", format=".2f")]
    dots = alt.Chart(frame).mark_point(filled=True, size=60).encode(x=x, y=y, color=_color(frame), tooltip=tooltip)
    steps = frame.groupby("series")["queries"].transform("count")  # two ends alone say nothing of what is between
    lines = alt.Chart(frame[steps > 2]).mark_line().encode(x=x, y=y, color=_color(frame))
    mark = (
        alt.Chart(pd.DataFrame({"queries": [1], "gain": [printed], "what": ["printed"]}))
        .mark_point(shape="diamond", size=130, color=PRINTED, strokeWidth=2, opacity=1)
        .encode(x=x, y="gain:Q", tooltip=["what:N", "gain:Q"])
    )
    chart = (lines + dots + mark).properties(width=WIDTH // 2, height=260)
    one = frame[frame["queries"] == 1]
    words = ", ".join(f"{row['series']} {row['gain']:.1f}" for row in one.to_dict("records"))
    return finished(chart, title, subtitle, f"{title}. One query against 32: {words}; printed {printed:g}.")


def _color(frame: pd.DataFrame) -> alt.Color:
    names = [name for name in _COLORS if name in set(frame["series"])]
    return alt.Color("series:N", title="kernel", scale=alt.Scale(domain=names, range=[_COLORS[name] for name in names]))
