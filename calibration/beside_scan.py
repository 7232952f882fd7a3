"""How many times as long gathers and copies take while a selection runs, by their bytes.

Workers of a gather share the cores with those of the scan and wait for their turns; a turn is as long for a small
gather as for a large one, so the factor falls with the bytes. What the device moves by itself is timed on its clock.
What a scan loses in turn is in :mod:`calibration.parts.contention`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from calibration.bench import Bench, Beside, Part, Value, row_of, widest
from calibration.other_gathers import SELECTED, selected_rows
from calibration.timing import Timing, Work
from herald_exec import kernels


def batches(rows: int) -> tuple[int, ...]:
    """Requests of the selections and of what runs beside them, up to ``rows``."""
    return tuple(sorted({max(1, rows // parts) for parts in (40, 5, 2, 1)}))


def measure(bench: Bench, part: Part, pool: kernels.PagedKV, rows: int, context: int) -> None:
    """Time each kind alone and beside selections of as many requests; the factors go to ``part``."""
    if not bench.on_cuda:
        return  # cores that play the GPU take turns, copies included: nothing runs beside
    from calibration.gpu import row_fetch

    # What disturbs is the question here, so nothing is refused.
    bench = replace(bench, plan=replace(bench.plan, repeats=max(12, bench.plan.repeats), max_spread=1e9, more=0))
    factors: dict[str, dict[float, float]] = {}
    timings: list[Timing] = []
    with row_fetch.page_locked(pool):
        for count in batches(rows):
            selecting = _selection(bench, pool, count, context)
            on_host, on_device, sizes = _moves(bench, pool, count, context)
            alone = {**bench.time_host(on_host), **bench.time(on_device)}
            with Beside(bench.retrieval_cores, selecting):
                beside = {**bench.time_host(on_host), **bench.time(on_device)}
            for kind, timing in beside.items():
                factor = max(1.0, timing.seconds / alone[kind].seconds)
                factors.setdefault(kind, {})[sizes[kind]] = factor
                columns = {"rows": count, "bytes": sizes[kind], "times_as_long": round(factor, 3)}
                part.rows.append(row_of(timing, case=kind, beside="selection of as many", **columns))
            timings += beside.values()
    part.values += values(factors, widest(timings))


def values(factors: Mapping[str, Mapping[float, float]], spread: float) -> list[Value]:
    """The engine's numbers: kind -> (bytes -> times as long)."""
    note = "beside selections of as many requests, which run all the time"
    found = []
    for kind, by_bytes in factors.items():
        at = tuple(sorted(by_bytes))
        y = tuple(by_bytes[x] for x in at)
        found.append(Value(f"engine.{kind}_beside_scan", "x", y, at, "B", spread, note))
    return found


def _selection(bench: Bench, pool: kernels.PagedKV, rows: int, context: int) -> Work:
    queries = np.ones((rows, 1, bench.shape.num_heads, bench.shape.head_dim), np.float32)
    slots, lengths, budget = np.arange(rows), np.full(rows, context), np.full(rows, max(1, context // SELECTED))
    return lambda: kernels.select(pool, 0, slots, lengths, queries, budget, threads=bench.retrieval_threads)


def _moves(
    bench: Bench, pool: kernels.PagedKV, rows: int, context: int
) -> tuple[dict[str, Work], dict[str, Work], dict[str, float]]:
    """What the host does, what the device does, and the bytes by which the description prices each."""
    from calibration.gpu import row_fetch

    found = selected_rows(bench, pool, rows, context)
    heads, k = found.indices.shape[1:]
    counts, status = np.full((rows, heads), k, np.int32), np.zeros((rows, heads), np.uint8)
    picked = kernels.Selection(np.zeros(0, np.float32), found.indices, counts, status)
    threads, slots, ring = bench.retrieval_threads, found.slots, found.buffers
    targets = [torch.empty_like(one, device=bench.device) for one in ring]

    def gather() -> None:
        kernels.gather(pool, 0, slots, picked, ring[0], ring[1], threads=threads)

    def copy() -> None:
        for target, source in zip(targets, ring, strict=True):
            target.copy_(source, non_blocking=True)

    size = found.num_bytes
    on_device = {"copy": copy, "row_fetch": row_fetch.case(bench, found)}
    return {"gather": gather}, on_device, {"gather": 2 * size, "copy": size, "row_fetch": size}


def appends(alone: Mapping[float, Timing], beside: Sequence[tuple[float, Timing]]) -> Value:
    """Times as long of the launches that bring blocks to the host, by their bytes."""
    at = tuple(sorted(size for size, _ in beside))
    times = dict(beside)
    y = tuple(max(1.0, times[size].seconds / alone[size].seconds) for size in at)
    note = "append of short runs, beside selections that run all the time"
    return Value("engine.down_beside_scan", "x", y, at, "B", widest(times.values()), note)
