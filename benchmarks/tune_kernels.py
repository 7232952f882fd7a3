"""Which way of scanning and gathering is fastest here: every variant in turn, many rounds, medians of ratios.

    python benchmarks/tune_kernels.py --out tuning.json
    python benchmarks/tune_kernels.py --context 16384 --pool-gib 2 --seconds 30

Each round measures the read ceiling, then every variant once in an order of its own, so that neither a machine that
slows down nor what ran before favours one. Printed: the fraction of the ceiling of the same round with its quartiles,
and GB/s, best first. The defaults of ``herald_exec/kernels/tuning.py`` are read from this table.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from herald_exec import kernels
from herald_exec.kernels import GatherTuning, SelectOptions, Tuning, _core
from herald_exec.kernels.dispatch import tier_index
from herald_exec.kernels.measuring import KV_HEADS, KernelBench, Variant, cpu_model

T = Tuning
Way = Callable[[], float]

#: name -> tuning; each change alone, then together
SCANS: dict[str, Tuning] = {
    "no prefetch": T(),
    "V during K, K during V": T(distance=1),
    "V during K, near": T(distance=1, near=True),
    "1 page": T(distance=2),
    "2 pages": T(distance=4),
    "2 pages, 4 streams": T(distance=4, streams=4),
    "1 page, 4 streams": T(distance=2, streams=4),
    "2 pages, turned": T(distance=4, turned=True),
    "2 pages, warm 256": T(distance=4, warm=256),
    "4 pages": T(distance=8),
}
#: tiers with matrix tiles besides
TILED: dict[str, Tuning] = {
    "tiles, no prefetch": T(tiles=True),
    "tiles, V during K": T(distance=1, tiles=True),
    "tiles, V during K, near": T(distance=1, tiles=True, near=True),
    "tiles, 1 page": T(distance=2, tiles=True),
    "tiles, 2 pages": T(distance=4, tiles=True),
    "tiles, 1 page, late": T(distance=2, late=True, tiles=True),
    "tiles, 2 pages, late": T(distance=4, late=True, tiles=True),
    "tiles, 1 page, late, near": T(distance=2, late=True, tiles=True, near=True),
    "tiles, 1 page, late, turned": T(distance=2, late=True, turned=True, tiles=True),
    "tiles, 1 page, late, 4 streams": T(distance=2, late=True, streams=4, tiles=True),
    "tiles, 1 page, late, turned, warm": T(distance=2, late=True, turned=True, tiles=True, warm=256),
    "tiles, 1 page, late, turned, warm, 4 streams": T(
        distance=2, late=True, turned=True, tiles=True, warm=256, streams=4
    ),
}
#: options beyond the paper, by name of the scan they run with
OPTIONS = ("no prefetch", "1 page", "2 pages", "2 pages, 4 streams", "tiles, 1 page", "tiles, 2 pages")
GATHERS: dict[str, GatherTuning] = {
    f"ahead {ahead}, {level}{', scattered' * scattered}{'' if streaming else ', through the cache'}": GatherTuning(
        ahead, level, scattered, streaming
    )
    for ahead, level, scattered, streaming in (
        (0, "first", False, True),
        (4, "first", False, True),
        (8, "first", False, True),
        (16, "first", False, True),
        (32, "first", False, True),
        (16, "second", False, True),
        (32, "second", False, True),
        (64, "second", False, True),
        (16, "once", False, True),
        (8, "first", True, True),
        (16, "first", True, True),
        (32, "second", True, True),
        (16, "first", False, False),
        (32, "second", False, False),
    )
}


def huge_kib(address: int) -> int:
    """KiB of huge pages in the mapping that holds an address; -1 where the system does not tell."""
    path = Path("/proc/self/smaps")
    inside = False
    if not path.exists():
        return -1
    for line in path.read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            low, high = (int(part, 16) for part in first.split("-"))
            inside = low <= address < high
        elif inside and first == "AnonHugePages:":
            return int(line.split()[1])
    return -1


def rounds(ways: dict[str, Way], ceiling: Way, seconds: float) -> dict[str, list[float]]:
    """GB/s of each way and the ceiling (``""``) in rounds of a random order until the time is spent; three at least."""
    rng = np.random.default_rng(0)
    found: dict[str, list[float]] = {name: [] for name in ("", *ways)}
    for way in ways.values():
        way()
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(found[""]) < 3:
        before = ceiling()
        for name in rng.permutation(list(ways)):
            found[name].append(ways[name]())
        found[""].append((before + ceiling()) / 2)
    return found


def read_gb_s(bench: KernelBench, threads: int) -> float:
    """The read ceiling on the pool's own memory: 1 GiB of it, less with few threads."""
    nbytes = min(bench.pool.nbytes, (1 << 30) // max(1, 8 // threads))
    return nbytes / _core.read_seconds(tier_index(), bench.pool.address, nbytes, threads) / 1e9


def table(title: str, found: dict[str, list[float]]) -> list[dict[str, object]]:
    """Print and return one part's rows, best first."""
    ceilings = found.pop("")
    print(f"\n{title}: ceiling {statistics.median(ceilings):.1f} GB/s, {len(ceilings)} rounds")
    rows = []
    for name, rates in found.items():
        ratios = [rate / most for rate, most in zip(rates, ceilings, strict=True)]
        quarter = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
        rows.append(
            {
                "variant": name,
                "gb_s": round(statistics.median(rates), 2),
                "of_ceiling": round(quarter[1], 4),
                "quartiles": [round(quarter[0], 4), round(quarter[2], 4)],
            }
        )
    rows.sort(key=lambda row: -float(str(row["of_ceiling"])))
    for row in rows:
        low, high = row["quartiles"]
        print(f"  {row['of_ceiling']:.3f} [{low:.3f} {high:.3f}] {row['gb_s']:7.1f}  {row['variant']}")
    return [{"part": title, **row} for row in rows]


def scan_ways(
    bench: KernelBench, threads: int, x: int, *, key_only: bool = False, keys8: bool = False
) -> dict[str, Way]:
    """One call a variant: GB/s over enough heads for every thread, always of K and V, whatever is really read."""
    best = kernels.usable_tiers()[-1]
    wide = [tier for tier in kernels.usable_tiers() if tier.startswith("avx512")]
    plain = wide[0] if wide else best
    rows = min(bench.rows, 1 if threads == 1 else max(1, 8 * threads // KV_HEADS))
    chosen = {f"{plain}: {name}": (plain, tuning) for name, tuning in SCANS.items()}
    if best == "amx":
        chosen |= {f"{best}: {name}": (best, tuning) for name, tuning in TILED.items()}
    if key_only or keys8 or x > 1:
        chosen = {name: way for name, way in chosen.items() if name.partition(": ")[2] in OPTIONS}

    def way(tier: str, tuning: Tuning) -> Way:
        variant = Variant("", tier, x, threads, SelectOptions(key_only=key_only, tuning=tuning), keys8)

        def measure() -> float:
            seconds, _found = bench.run(variant, rows)
            return rows * bench.row_bytes / seconds / 1e9

        return measure

    return {name: way(*each) for name, each in chosen.items()}


def gather_ways(bench: KernelBench, threads: int) -> tuple[dict[str, Way], Way, kernels.PagedKV]:
    """GB/s of payload of each gather, of a copy of as many bytes, and the buffers' owner."""
    rows = min(bench.rows // 2 or 1, max(1, 8 * threads // KV_HEADS))
    _seconds, found = bench.run(Variant("", kernels.usable_tiers()[-1], 1, threads), rows)
    shape = (*found.indices.shape, bench.pool.head_dim)
    pool = kernels.PagedKV(1, 1, 2, int(np.prod(shape[:-1])) + 64, bench.pool.head_dim)
    pool.pages[:] = 0
    out = [part.reshape(-1)[: np.prod(shape)].reshape(shape) for part in pool.pages[0, 0]]
    payload = 2 * out[0].nbytes
    place = [0]

    def way(tuning: GatherTuning) -> Way:
        def measure() -> float:
            slots = (np.arange(rows) + place[0]) % bench.rows
            place[0] += rows
            start = time.perf_counter()
            kernels.gather(bench.pool, 0, slots, found, *out, threads=threads, tuning=tuning)
            return payload / (time.perf_counter() - start) / 1e9

        return measure

    return (
        {name: way(tuning) for name, tuning in GATHERS.items()},
        lambda: kernels.memcpy_gb_s(payload, threads, repeats=1),
        pool,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--pool-gib", type=float, default=4.0)
    parser.add_argument("--seconds", type=float, default=60.0, help="of measuring, shared by all parts")
    options = parser.parse_args()
    threads = options.threads or kernels.capabilities()["threads"]
    bench = KernelBench(options.context, threads, options.pool_gib)
    huge = huge_kib(bench.pool.address)
    size = f"{bench.pool.nbytes / 2**30:.1f} GiB, {huge / 2**20:.1f} GiB of it in huge pages"
    print(f"{cpu_model()}; {threads} threads; pool {size}")
    rows: list[dict[str, object]] = []
    parts: list[tuple[float, str, int, int, dict[str, Any]]] = [
        (0.36, f"scan, x = 1, {threads} threads", threads, 1, {}),
        (0.2, "scan, x = 1, one thread", 1, 1, {}),
        (0.1, f"key-only, x = 1, {threads} threads", threads, 1, {"key_only": True}),
        (0.1, f"8-bit keys, x = 1, {threads} threads", threads, 1, {"keys8": True}),
        (0.1, f"scan, x = 2, {threads} threads", threads, 2, {}),
    ]
    for share, title, count, x, more in parts:
        kernels.set_tier(kernels.usable_tiers()[-1])
        ways = scan_ways(bench, count, x, **more)
        found = rounds(ways, lambda count=count: read_gb_s(bench, count), share * options.seconds)
        rows += table(title, found)
    kernels.set_tier(None)
    ways, copy, _keep = gather_ways(bench, threads)
    rows += table(f"gather, {threads} threads", rounds(ways, copy, 0.14 * options.seconds))
    if options.out:
        result = {
            "schema": "herald.kernel-tuning/1",
            "cpu": cpu_model(),
            "cpus": os.cpu_count(),
            "threads": threads,
            "context": options.context,
            "pool_bytes": bench.pool.nbytes,
            "huge_page_kib": huge,
            "rows": rows,
        }
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
