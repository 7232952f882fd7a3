"""Simulated output tokens per wall second, beside simpy's raw event rate on the same machine at the same moment.

    python benchmarks/bench_simulator.py
    python benchmarks/bench_simulator.py --blocks 2000 --json

llada2-mini at 32K, batch 80, T = 20, HERALD: retrieval stages per layer, contention on. Wall time includes everything
from the description to the result. Run it on an idle machine; the best of some rounds is printed.
"""

import argparse
import json
import resource
import time

import simpy

from herald_pipeline import catalogue, hardware_io
from herald_pipeline.pipeline import build
from herald_pipeline.workload import Workload
from herald_sim.simulate import simulate

CONTEXT, BATCH, STEPS = 32768, 80, 20
HARDWARE = "h100-sxm-80g_xeon-8481c"


def raw_events_per_s(count: int = 200_000) -> float:
    """simpy's rate of timeouts with one plain callback each."""
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
    """One run of ``blocks`` blocks."""
    pipeline = build(catalogue.get("llada2-mini"), "herald")
    profile = hardware_io.resolve(HARDWARE)
    workload = Workload.uniform(CONTEXT, BATCH, gen_tokens=32 * blocks, steps=STEPS)
    start = time.perf_counter()
    result = simulate(pipeline, profile, workload, beyond_memory=True)
    wall_s = time.perf_counter() - start
    return {
        "blocks": blocks,
        "wall_s": wall_s,
        "ms_per_block": 1e3 * wall_s / blocks,
        "tokens_per_wall_s": result.delivered_tokens / wall_s,
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    for blocks in (options.blocks // 4, options.blocks):
        runs = [event_mode(blocks) for _ in range(options.rounds)]
        rows.append(max(runs, key=lambda run: run["tokens_per_wall_s"]))
    found = {"raw_events_per_s": raw_events_per_s(), "event_mode": rows}
    if options.json:
        print(json.dumps(found))
        return
    print(f"simpy timeouts with a callback: {found['raw_events_per_s'] / 1e6:.2f} M/s")
    for row in rows:
        print(
            f"event mode, {row['blocks']:.0f} blocks: {row['tokens_per_wall_s'] / 1e6:.2f} M tokens/s, "
            f"{row['ms_per_block']:.3f} ms a block, peak {row['peak_rss_mb']:.0f} MB"
        )


if __name__ == "__main__":
    main()
