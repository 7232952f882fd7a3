"""Charts, one function each: a table in, an altair chart out. Units stand on axes, provenance in the subtitle."""

from reports.charts.ceilings import ceilings
from reports.charts.dsb_exhibits import forwards as dsb_forwards
from reports.charts.dsb_exhibits import sliding_example
from reports.charts.dsb_exhibits import throughputs as dsb_throughputs
from reports.charts.herald_exhibits import (
    by_batch,
    by_method,
    ceiling_comparison,
    crossover,
    fit_errors,
    query_gain,
    roofline,
)
from reports.charts.memory import memory
from reports.charts.reconcile import stage_errors, throughput_scatter
from reports.charts.timeline import timeline
from reports.charts.what_if import throughput_bars

__all__ = [
    "by_batch",
    "by_method",
    "ceiling_comparison",
    "ceilings",
    "crossover",
    "dsb_forwards",
    "dsb_throughputs",
    "fit_errors",
    "memory",
    "query_gain",
    "roofline",
    "sliding_example",
    "stage_errors",
    "throughput_bars",
    "throughput_scatter",
    "timeline",
]
