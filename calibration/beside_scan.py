"""How many times as long gathers and copies take while a selection runs, by their bytes.

Workers of a gather share the cores with those of the scan and wait for their turns, so it matters when it begins. As in
a run that is where its layer's selection ends, and the next layer's begins when the device has gone from one to the
other. Beside scans that never rest gathers took 1.7 to 4 times their time alone, by the moment, and by such factors
those of runs were predicted to take 1.1 to 1.75 times what they did. Beside scans and alone they read what a scan has
just read, so that caches hold as much of it.

What the device moves by itself is timed on its clock, beside scans that run all the time. What a scan loses in turn is
in :mod:`calibration.parts.contention`.
"""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch

from calibration.bench import Bench, Beside, Part, Value, pinned, row_of, widest
from calibration.other_gathers import SELECTED, selected_rows
from calibration.timing import Timing, Work
from herald_exec import kernels

_BETWEEN_S = 0.0008
"""From the end of a layer's selection to the begin of the next one's: 0.6 to 1.2 ms in runs of 13 to 80 requests."""


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
            gather, on_device, sizes = _moves(bench, pool, count, context)
            alone = {"gather": behind(bench, gather, selecting, beside=False), **bench.time(on_device)}
            with Beside(bench.retrieval_cores, selecting):
                beside = bench.time(on_device)
            beside["gather"] = behind(bench, gather, selecting, beside=True)
            for kind, timing in beside.items():
                factor = max(1.0, timing.seconds / alone[kind].seconds)
                factors.setdefault(kind, {})[sizes[kind]] = factor
                columns = {"rows": count, "bytes": sizes[kind], "times_as_long": round(factor, 3)}
                part.rows.append(row_of(timing, case=kind, beside="selection of as many", **columns))
            timings += beside.values()
    part.values += values(factors, widest(timings))


def behind(bench: Bench, gather: Work, selecting: Work, *, beside: bool) -> Timing:
    """Gathers that each begin where a selection ends: alone, or ``beside`` the next selection."""
    samples: list[float] = []
    cores, plan = bench.retrieval_cores, bench.plan

    def timed() -> float:
        with pinned(cores):
            begun = time.perf_counter()
            gather()
            return time.perf_counter() - begun

    with pinned(cores), torch.inference_mode(), ThreadPoolExecutor(1) as other:
        selecting()
        for _ in range(plan.warmup + plan.repeats):
            gathering = other.submit(timed)
            if not beside:
                gathering.result()
            time.sleep(_BETWEEN_S)
            selecting()
            samples.append(gathering.result())
    return Timing("gather", tuple(samples[plan.warmup :]), plan.warmup)


def values(factors: Mapping[str, Mapping[float, float]], spread: float) -> list[Value]:
    """The engine's numbers: kind -> (bytes -> times as long)."""
    found = []
    for kind, by_bytes in factors.items():
        when = "each from one's end to the next" if kind == "gather" else "which run all the time"
        note = f"beside selections of as many requests, {when}"
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
) -> tuple[Work, dict[str, Work], dict[str, float]]:
    """The host's gather, what the device does, and the bytes by which the description prices each."""
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
    return gather, on_device, {"gather": 2 * size, "copy": size, "row_fetch": size}


def appends(alone: Mapping[float, Timing], beside: Sequence[tuple[float, Timing]]) -> Value:
    """Times as long of the launches that bring blocks to the host, by their bytes."""
    at = tuple(sorted(size for size, _ in beside))
    times = dict(beside)
    y = tuple(max(1.0, times[size].seconds / alone[size].seconds) for size in at)
    note = "append of short runs, beside selections that run all the time"
    return Value("engine.down_beside_scan", "x", y, at, "B", widest(times.values()), note)
