"""What the host gives right before and right after a run: a rate that moved meanwhile is no error of a prediction.

Virtual CPUs share cores, matrix units and memory with neighbours. Between machines of one kind the matrix units' rate
was seen to differ by 1.4 times, which is what many queries a scan are bound by.
"""

from collections.abc import Sequence
from typing import Any

from herald_exec import kernels
from herald_pipeline.pipeline import Pipeline

_READ_BYTES = 1 << 30
_UNITS = ("amx", "bf16_dot", "fma")


def host_rates(pipeline: Pipeline, threads: int | None) -> dict[str, float]:
    """DRAM's read rate and the kernels' fastest arithmetic with so many threads; nothing where no CPU selects."""
    if not any(stage.action == "select" for stage in pipeline.template.stages()):
        return {}
    found = {"dram_read_gb_s": kernels.read_bandwidth_gb_s(_READ_BYTES, threads)}
    for unit in _UNITS:
        peak = kernels.peak_gflops(unit, threads)
        if peak is not None:
            return {**found, f"{unit}_tflop_s": peak / 1e3}
    return found


def around(before: dict[str, float], after: dict[str, float]) -> dict[str, Any]:
    """``host_rates`` of a cell: name -> [before, after]."""
    pairs: dict[str, Sequence[float]] = {name: [before[name], after[name]] for name in before if name in after}
    return {"host_rates": pairs} if pairs else {}
