"""Which way of scanning and gathering is fastest here: every variant in turn, many rounds, medians of ratios.

    python benchmarks/tune_kernels.py --out tuning.json
    python benchmarks/tune_kernels.py --context 16384 --pool-gib 2 --seconds 30
    python benchmarks/tune_kernels.py --seconds 100 --part "many queries" --part "8-bit keys"

Each round measures the read ceiling, then every variant once in an order of its own, so that neither a machine that
slows down nor what ran before favours one. Printed: the fraction of the ceiling of the same round with its quartiles,
GB/s, and the ratio over one query by its default in the same round, best first. The defaults of
``herald_exec/kernels/tuning.py`` are read from this table.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from herald_exec import kernels
from herald_exec.kernels import GatherTuning, SelectOptions, Tuning, _core
from herald_exec.kernels.dispatch import tier_index
from herald_exec.kernels.measuring import KV_HEADS, KernelBench, Variant, cpu_model
from herald_exec.kernels.options import PHASES
from herald_exec.kernels.tuning import default_tuning

T = Tuning
Way = Callable[[], "Sample"]


@dataclass(frozen=True)
class Sample:
    """One call: its rate, and the shares of thread time by phase where the call has phases."""

    gb_s: float
    shares: tuple[float, ...] = ()


@dataclass(frozen=True)
class Scan:
    """One way to select: a tuning, on the best tier or on the widest without matrix tiles, and options."""

    tuning: Tuning
    plain: bool = False
    options: SelectOptions = field(default_factory=SelectOptions)


ONE_QUERY = "one query, default"
#: What is asked for, when, in which order: defaults of ``tuning.py`` first, then what may replace them.
SCANS: dict[str, Scan] = {
    "1 page, 4 streams, even": Scan(T(distance=2, streams=4, even=True), plain=True),
    "1 page, 4 streams": Scan(T(distance=2, streams=4), plain=True),
    "2 pages, 4 streams, even": Scan(T(distance=4, streams=4, even=True), plain=True),
    "tiles, 1 page, even": Scan(T(distance=2, tiles=True, even=True)),
    "no prefetch": Scan(T(), plain=True),
}
KEYS: dict[str, Scan] = {
    "2 pages, 4 streams, even": Scan(T(distance=4, streams=4, tiles=True, even=True)),
    "2 pages, 4 streams": Scan(T(distance=4, streams=4, tiles=True)),
    "2 pages, 4 streams, even, 64 rows": Scan(T(distance=4, streams=4, tiles=True, even=True, rows_ahead=64)),
    "no prefetch": Scan(T(tiles=True)),
}
WIDE: dict[str, Scan] = {
    "tiles, 1 page, turned": Scan(T(distance=2, tiles=True, turned=True)),
    "tiles, 1 page, turned, even": Scan(T(distance=2, tiles=True, turned=True, even=True)),
    "1 page": Scan(T(distance=2)),
}
#: Many queries; on matrix tiles prefetches are a block of four pages ahead.
MANY: dict[str, Scan] = {"prefetch": Scan(T(distance=2)), "no prefetch": Scan(T())}
G = GatherTuning
GATHERS: dict[str, GatherTuning] = {
    "ahead 0": G(0),
    "ahead 8": G(8),
    "ahead 16": G(16),
    "ahead 16, scattered": G(16, scattered=True),
    "ahead 32, second": G(32, "second"),
    "ahead 16, second, scattered": G(16, "second", scattered=True),
    "ahead 32, second, scattered": G(32, "second", scattered=True),
    "ahead 64, second, scattered": G(64, "second", scattered=True),
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


def rounds(ways: dict[str, Way], ceiling: Callable[[], float], seconds: float) -> dict[str, list[Sample]]:
    """GB/s of each way and the ceiling (``""``) in rounds of a random order until the time is spent; three at least."""
    rng = np.random.default_rng(0)
    found: dict[str, list[Sample]] = {name: [] for name in ("", *ways)}
    for way in ways.values():
        way()
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(found[""]) < 3:
        before = ceiling()
        for name in rng.permutation(list(ways)):
            found[name].append(ways[name]())
        found[""].append(Sample((before + ceiling()) / 2))
    return found


def read_gb_s(bench: KernelBench, threads: int) -> float:
    """The read ceiling on the pool's own memory: 1 GiB of it, less with few threads."""
    nbytes = min(bench.pool.nbytes, (1 << 30) // max(1, 8 // threads))
    return nbytes / _core.read_seconds(tier_index(), bench.pool.address, nbytes, threads) / 1e9


def table(title: str, found: dict[str, list[Sample]]) -> list[dict[str, Any]]:
    """Print and return one part's rows, best first."""
    ceilings = [sample.gb_s for sample in found.pop("")]
    one_query = [sample.gb_s for sample in found.get(ONE_QUERY, [])]
    print(f"\n{title}: ceiling {statistics.median(ceilings):.1f} GB/s, {len(ceilings)} rounds")
    rows: list[dict[str, Any]] = []
    for name, samples in found.items():
        rates = [sample.gb_s for sample in samples]
        shares = [
            round(statistics.median(each), 4) for each in zip(*(sample.shares for sample in samples), strict=True)
        ]
        ratios = [rate / most for rate, most in zip(rates, ceilings, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        over = statistics.median(a / b for a, b in zip(rates, one_query, strict=True)) if one_query else None
        rows.append(
            {
                "variant": name,
                "gb_s": round(statistics.median(rates), 2),
                "of_ceiling": round(middle, 4),
                "quartiles": [round(low, 4), round(high, 4)],
                "over_one_query": over and round(over, 4),
                "phase_shares": dict(zip(PHASES, shares, strict=True)) if shares else {},
            }
        )
    rows.sort(key=lambda row: -row["of_ceiling"])
    for row in rows:
        low, high = row["quartiles"]
        ratio = f"{row['over_one_query']:.3f}" if row["over_one_query"] else ""
        split = " ".join(f"{share:6.1%}" for share in row["phase_shares"].values())
        print(
            f"  {row['of_ceiling']:.3f} [{low:.3f} {high:.3f}] {row['gb_s']:7.1f} {ratio:6} {row['variant']:54} {split}"
        )
    return [{"part": title, **row} for row in rows]


def scan_ways(
    bench: KernelBench, threads: int, x: int, scans: dict[str, Scan], *, keys8: bool = False
) -> dict[str, Way]:
    """One call a variant: GB/s over enough heads for every thread, always of K and V, whatever is really read."""
    best = kernels.usable_tiers()[-1]
    wide = [tier for tier in kernels.usable_tiers() if tier.startswith("avx512")]
    rows = min(bench.rows, 1 if threads == 1 else max(1, (12 if x < 16 else 8) * threads // KV_HEADS))

    def way(tier: str, scan: Scan, x: int = x, keys8: bool = keys8) -> Way:
        variant = Variant("", tier, x, threads, replace(scan.options, tuning=scan.tuning), keys8)

        def measure() -> Sample:
            seconds, found = bench.run(variant, rows)
            shares = found.phase_seconds / found.phase_seconds.sum()
            return Sample(rows * bench.row_bytes / seconds / 1e9, tuple(map(float, shares)))

        return measure

    one_query = Scan(default_tuning("scan"))
    ways: dict[str, Way] = {ONE_QUERY: way(best, one_query, x=1, keys8=False)}
    for name, scan in scans.items():
        tier = wide[0] if scan.plain and wide else best
        ways[f"{tier}: {name}"] = way(tier, scan)
    return ways


def with_options(scans: dict[str, Scan], options: SelectOptions) -> dict[str, Scan]:
    """The same ways with other options."""
    return {name: replace(scan, options=options) for name, scan in scans.items()}


def gather_ways(bench: KernelBench, threads: int) -> tuple[dict[str, Way], Callable[[], float], kernels.PagedKV]:
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
        def measure() -> Sample:
            slots = (np.arange(rows) + place[0]) % bench.rows
            place[0] += rows
            start = time.perf_counter()
            kernels.gather(bench.pool, 0, slots, found, *out, threads=threads, tuning=tuning)
            return Sample(payload / (time.perf_counter() - start) / 1e9)

        return measure

    def copy(tier: int = tier_index()) -> float:
        """As many bytes of the same pool, as cold, into the same buffers, by the tier's stores past the cache."""
        start = place[0] * bench.pool.nbytes // bench.rows % (bench.pool.nbytes - payload) // 4096 * 4096
        place[0] += rows
        seconds = 0.0
        for i, each in enumerate(out):
            source = bench.pool.address + start + i * each.nbytes
            seconds += _core.copy_seconds(each.ctypes.data, source, each.nbytes, threads, tier)
        return float(payload / seconds / 1e9)

    def hot_copy() -> Sample:
        return Sample(kernels.memcpy_gb_s(payload, threads, repeats=1))

    ways = {name: way(tuning) for name, tuning in GATHERS.items()}
    ways |= {"copy by memcpy": lambda: Sample(copy(-1)), "memcpy of memory just touched": hot_copy}
    return ways, copy, pool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--pool-gib", type=float, default=4.0)
    parser.add_argument("--seconds", type=float, default=60.0, help="of measuring, shared by the parts")
    parser.add_argument("--part", action="append", help="only parts whose title holds this; may be repeated")
    parser.add_argument("--gather", type=float, default=0.0, help="seconds of measuring gathers as well")
    options = parser.parse_args()
    threads = options.threads or kernels.capabilities()["threads"]
    bench = KernelBench(options.context, threads, options.pool_gib)
    huge = huge_kib(bench.pool.address)
    size = f"{bench.pool.nbytes / 2**30:.1f} GiB, {huge / 2**20:.1f} GiB of it in huge pages"
    print(f"{cpu_model()}; {threads} threads; pool {size}")
    rows: list[dict[str, Any]] = []
    few = {name: SCANS[name] for name in ("1 page, 4 streams, even", "1 page, 4 streams")}
    keys = with_options(KEYS, SelectOptions(key_only=True))
    wide = with_options(WIDE, SelectOptions(pv="f32"))  # not on matrix tiles: as one query of a wide group runs
    parts: list[tuple[float, str, int, int, dict[str, Scan], bool]] = [
        (0.22, "scan, x = 1", threads, 1, SCANS, False),
        (0.06, "scan, x = 1, one thread", 1, 1, few, False),
        (0.16, "key-only, x = 1", threads, 1, keys, False),
        (0.16, "8-bit keys, x = 1", threads, 1, KEYS, True),
        (0.10, "scan, x = 2", threads, 2, wide, False),
        (0.08, "many queries, x = 4", threads, 4, MANY, False),
        (0.10, "many queries, x = 8", threads, 8, MANY, False),
        (0.12, "many queries, x = 32", threads, 32, MANY, False),
    ]
    print("phases: " + ", ".join(PHASES))
    wanted = [part for part in parts if not options.part or any(name in part[1] for name in options.part)]
    scale = options.seconds / sum(share for share, *_rest in wanted) if wanted else 0.0
    for share, title, count, x, scans, keys8 in wanted:
        kernels.set_tier(kernels.usable_tiers()[-1])
        ways = scan_ways(bench, count, x, scans, keys8=keys8)
        found = rounds(ways, partial(read_gb_s, bench, count), share * scale)
        rows += table(f"{title}, {count} threads", found)
    kernels.set_tier(None)
    if options.gather:
        ways, copy, _keep = gather_ways(bench, threads)
        rows += table(f"gather, {threads} threads", rounds(ways, copy, options.gather))
    if options.out:
        result = {
            "schema": "herald.kernel-tuning/3",
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
