"""Fig. 6 and Fig. 8 as measured: sections of the exhibits' page, from a file of ``benchmarks/bench_kernels.py``."""

from pathlib import Path
from typing import Any

import pandas as pd

from herald_pipeline import published
from reports import paper_frames
from reports.charts import kernels as charts
from reports.files import read_object
from reports.page import Cell, Section, Table


def sections(path: Path) -> list[Section]:
    """Both figures; :class:`ConfigError` when the file is not one of kernel speeds."""
    bench = read_object(path, "write it with: python benchmarks/bench_kernels.py --out FOLDER")
    frame = charts.kernel_frame(bench)
    shape, threads = bench["shape"], max(map(int, bench["read_gb_s"]))
    where = f"{bench['cpu']}, {threads} threads, context {shape['context']:,}"
    origin = f"ours: measured, {path.name}: {where}; printed: published"
    return [_fig_6(bench, frame, origin), _fig_8(bench, frame, origin)]


def _fig_6(bench: dict[str, Any], frame: pd.DataFrame, origin: str) -> Section:
    ridge, rate = paper_frames.printed_ridges(), charts.read_ceiling(bench)
    chart = charts.measured_roofline(bench, ridge, "Fig. 6, measured: selection under this CPU's roofs", origin)
    ridges = "; ".join(f"{name}: {peak / rate:.0f}" for name, peak in charts.measured_roofs(bench).items())
    caption = (
        f"Ridges here, FLOP/byte: {ridges}. Printed: {ridge[0]:g} to {ridge[1]:g} on three other CPUs (grey). "
        "Points of 4 and 128 FLOP/byte are one query and 32."
    )
    header = ("kernel", "queries", "FLOP/byte", "GFLOP/s", "GB/s", "of what DRAM gives")
    rows = [
        [
            Cell(row["series"]),
            *_numbers(
                (row["queries"], "d"),
                (row["intensity"], "g"),
                (row["gflops"], ",.0f"),
                (row["gb_s"], ".1f"),
                (row["of_read_ceiling"], ".0%"),
            ),
        ]
        for row in frame.to_dict("records")
    ]
    return Section("Fig. 6, measured: roofline", (), chart, caption, Table(header, rows))


def _fig_8(bench: dict[str, Any], frame: pd.DataFrame, origin: str) -> Section:
    printed = published.number(exhibit="Fig 8", metric="kernel_throughput_gain_32q_to_1q")
    chart = charts.measured_gain(bench, printed, "Fig. 8, measured: fewer queries, faster selection", origin)
    caption = (
        "Median of the ratios within a round. The gain is a property of the instruction set: matrix tiles make many "
        "queries cheap. The paper prints one query over 32 with AVX-512 only."
    )
    header = ("kernel", "queries", "ours", "printed")
    rows = [
        [
            Cell(row["series"]),
            *_numbers((row["queries"], "d"), (row["gain"], ".2f")),
            Cell(f"{printed:g}" if row["queries"] == 1 and row["series"].startswith("avx512") else "", "number"),
        ]
        for row in frame.to_dict("records")
    ]
    return Section("Fig. 8, measured: queries", (), chart, caption, Table(header, rows))


def _numbers(*values: tuple[float, str]) -> list[Cell]:
    return [Cell(format(value, style), "number") for value, style in values]
