"""Simulated output tokens per wall second, beside simpy's raw event rate on the same machine at the same moment.

    python benchmarks/bench_simulator.py
    python benchmarks/bench_simulator.py --blocks 2000 --json
    python benchmarks/bench_simulator.py --sweep 1000
    make bench-simulator

The last runs what a wheel holds, an event loop of machine code; the others what is installed (a checkout's sources).

llada2-mini at 32K, batch 80, T = 20, HERALD: retrieval stages per layer, contention on. Wall time includes everything
from the description to the result. Run it on an idle machine; the best of some rounds is printed. What a block costs is
also given in raw events of simpy, timed right before and after each run (median of the rounds): that number depends
less on a machine that is slow or shared.
"""

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import simpy

from herald_pipeline import catalogue, hardware_io
from herald_pipeline.pipeline import build
from herald_pipeline.workload import Workload
from herald_sim import fast, runner
from herald_sim import sweep as sweeping
from herald_sim.simulate import simulate

CONTEXT, BATCH, STEPS = 32768, 80, 20
_AROUND = 50_000
"""Raw events timed before and after a run."""
HARDWARE = "h100-sxm-80g_xeon-8481c"


def _rate(run: dict[str, float]) -> float:
    return run["tokens_per_wall_s"]


def raw_events_per_s(count: int = 200_000) -> float:
    """Rate of simpy's timeouts with one plain callback each."""
    env = simpy.Environment()

    def again(_event: simpy.Event) -> None:
        nonlocal count
        count -= 1
        if count:
            env.timeout(1).callbacks.append(again)

    total = count
    env.timeout(1).callbacks.append(again)
    start = time.perf_counter()
    env.run()
    return total / (time.perf_counter() - start)


def event_mode(blocks: int) -> dict[str, float]:
    """One run of ``blocks`` blocks, with simpy's raw rate around it."""
    pipeline = build(catalogue.get("llada2-mini"), "herald")
    profile = hardware_io.resolve(HARDWARE)
    workload = Workload.uniform(CONTEXT, BATCH, gen_tokens=32 * blocks, steps=STEPS)
    before = raw_events_per_s(_AROUND)
    start = time.perf_counter()
    result = simulate(pipeline, profile, workload, beyond_memory=True)
    wall_s = time.perf_counter() - start
    raw = (before + raw_events_per_s(_AROUND)) / 2
    return {
        "blocks": blocks,
        "wall_s": wall_s,
        "ms_per_block": 1e3 * wall_s / blocks,
        "raw_events_per_s": raw,
        "event_costs_per_block": raw * wall_s / blocks,
        "tokens_per_wall_s": result.delivered_tokens / wall_s,
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def fast_mode(blocks: int) -> dict[str, float]:
    """The same run as a max-plus recurrence."""
    pipeline = build(catalogue.get("llada2-mini"), "herald")
    profile = hardware_io.resolve(HARDWARE)
    workload = Workload.uniform(CONTEXT, BATCH, gen_tokens=32 * blocks, steps=STEPS)
    start = time.perf_counter()
    result = fast.evaluate(pipeline, profile, workload)
    wall_s = time.perf_counter() - start
    return {"blocks": blocks, "wall_s": wall_s, "tokens_per_wall_s": result.delivered_tokens / wall_s}


def sweep_points(count: int, workers: int) -> float:
    """Seconds for a grid of ``count`` points of 16 blocks each, by events, on local processes."""
    points = [
        {"model": "llada2-mini", "method": "herald", "hardware": HARDWARE, "context": 4096 + 32 * index, "batch": 16}
        for index in range(count)
    ]
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        summary = sweeping.sweep(points, Path(folder), sweeping.local_workers(workers))
        assert summary["ok"] == count
        return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sweep", type=int, default=0, help="also time a sweep of that many points on two processes")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    for blocks in (options.blocks // 4, options.blocks):
        runs = [event_mode(blocks) for _ in range(options.rounds)]
        costs = median(run["event_costs_per_block"] for run in runs)
        rows.append({**max(runs, key=_rate), "event_costs_per_block": costs})
    found: dict[str, Any] = {
        "event_loop": "sources" if runner.__file__.endswith(".py") else "compiled",
        "raw_events_per_s": max(row["raw_events_per_s"] for row in rows),
        "event_mode": rows,
    }
    found["fast_mode"] = max((fast_mode(8 * options.blocks) for _ in range(options.rounds)), key=_rate)
    if options.sweep:
        found["sweep_s"] = sweep_points(options.sweep, workers=2)
    if options.json:
        print(json.dumps(found))
        return
    print(
        f"event loop: {found['event_loop']}; simpy timeouts with a callback: {found['raw_events_per_s'] / 1e6:.2f} M/s"
    )
    for row in rows:
        print(
            f"event mode, {row['blocks']:.0f} blocks: {row['tokens_per_wall_s'] / 1e6:.2f} M tokens/s, "
            f"{row['ms_per_block']:.3f} ms or {row['event_costs_per_block']:.0f} raw events a block, "
            f"peak {row['peak_rss_mb']:.0f} MB"
        )
    quick = found["fast_mode"]
    print(f"fast mode, {quick['blocks']:.0f} blocks: {quick['tokens_per_wall_s'] / 1e6:.1f} M tokens/s")
    if options.sweep:
        print(f"sweep of {options.sweep} points on two processes: {found['sweep_s']:.1f} s")


if __name__ == "__main__":
    main()
