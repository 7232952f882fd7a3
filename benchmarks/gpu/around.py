"""What the host gives right before and right after a run: a rate that moved meanwhile is no error of a prediction.

Virtual CPUs share cores, matrix units and memory with neighbours. Between machines of one kind the matrix units' rate
was seen to differ by 1.4 times, which is what many queries a scan are bound by. On 31 threads these went from 47 to
40 GB/s within ten seconds while memory read as before: so selections of as many queries are timed beside their runs.
Where a pool lies in memory counts as well: of one machine's 108 GB the layers were scanned at 82 to 127 GB/s, the same
ones slow in every run of a sweep. So the memory that a sweep keeps for its pools is read itself, by layers.
"""

from collections.abc import Sequence
from statistics import harmonic_mean
from typing import Any

from herald_exec import kernels
from herald_pipeline.model import ModelShape
from herald_pipeline.pipeline import Pipeline

_READ_BYTES, _QUERIES_S = 1 << 30, 0.3


def pool_layers(pipeline: Pipeline, num_bytes: int, threads: int | None) -> list[float]:
    """GB/s of a plain read of each layer's stretch of the pool's memory; none before a sweep's first pool is there."""
    return kernels.kept_read_gb_s(num_bytes, pipeline.model.num_layers, threads) if _selects(pipeline) else []


def _selects(pipeline: Pipeline) -> bool:
    return any(stage.action == "select" for stage in pipeline.template.stages())


def host_rates(pipeline: Pipeline, threads: int | None, layers: Sequence[float] = ()) -> dict[str, float]:
    """DRAM's read rate and that of arithmetic with so many threads; nothing where no CPU selects.

    ``layers`` are of :func:`pool_layers`: ``pool_read_gb_s`` is the rate of reading them all.
    """
    if not _selects(pipeline):
        return {}
    found = {"dram_read_gb_s": kernels.read_bandwidth_gb_s(_READ_BYTES, threads)}
    if layers:
        found["pool_read_gb_s"] = harmonic_mean(layers)
    return found | arithmetic(pipeline.model, pipeline.settings.queries, threads)


def arithmetic(shape: ModelShape, queries: int, threads: int | None) -> dict[str, float]:
    """The rate of the kernels' widest arithmetic, named by its unit; of several queries also what their work allows."""
    fastest = kernels.widest_unit_tflop_s(threads)
    found = {} if fastest is None else {f"{fastest[0]}_tflop_s": fastest[1]}
    if queries > 1:
        heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
        found["many_queries_gb_s"] = kernels.many_queries_gb_s(*heads, queries, threads, _QUERIES_S)
    return found


def around(before: dict[str, float], after: dict[str, float]) -> dict[str, Any]:
    """``host_rates`` of a cell: name -> [before, after], or [after] of what was not there before."""
    pairs: dict[str, Sequence[float]] = {
        name: [*([before[name]] if name in before else []), rate] for name, rate in after.items()
    }
    return {"host_rates": pairs} if pairs else {}
