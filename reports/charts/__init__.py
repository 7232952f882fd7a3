"""Charts, one function each: a table in, an altair chart out. Units stand on axes, provenance in the subtitle."""

from reports.charts.ceilings import ceilings
from reports.charts.memory import memory
from reports.charts.reconcile import stage_errors, throughput_scatter
from reports.charts.timeline import timeline

__all__ = ["ceilings", "memory", "stage_errors", "throughput_scatter", "timeline"]
