"""Speed of the kernels beside the ceilings of the same run.

Everything alternates: each repetition measures the read ceiling, then every variant once, so that a machine that slows
down slows all of them. Reported are medians, ratios against the ceiling of the same repetition, and where time went.

GB/s counts K and V once (`key_only`: K only, `bytes_read`); GFLOP/s counts 4 x rows x head_dim per key (scores and PV).
"""

import os
import platform
import statistics
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from herald_pipeline.errors import ConfigError, check_number, raise_problems

from . import _core
from .bandwidth import memcpy_gb_s, peak_gflops, pool_read_gb_s
from .dispatch import active_tier, capabilities, set_tier, usable_tiers
from .selection import Selection, SelectOptions, gather, kernel_kind, select, topk
from .store import PagedKV
from .tuning import Tuning, default_tuning

GROUP, KV_HEADS, HEAD_DIM, BUDGET = 4, 4, 128, 0.05
QUERIES = (1, 2, 4, 8, 16, 32)
SAMPLE_SECONDS = 0.15  # a slow variant measures fewer rows


@dataclass
class Variant:
    """One measured kernel: a tier, x, threads and options, with its samples."""

    name: str
    tier: str
    x: int
    threads: int
    options: SelectOptions = field(default_factory=SelectOptions)
    rows: int = 0
    gb_s: list[float] = field(default_factory=list)
    of_ceiling: list[float] = field(default_factory=list)
    phases: list[Any] = field(default_factory=list)


def cpu_model() -> str:
    """The processor's own name, where the system tells."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


class KernelBench:
    """A filled pool and its queries, measured by interleaved repetitions."""

    def __init__(self, context: int, threads: int, pool_gib: float, seed: int = 0) -> None:
        per_row = context * KV_HEADS * HEAD_DIM * 4
        self.rows = max(1, round(pool_gib * 2**30 / per_row))
        self.context, self.threads = context, threads
        self.pool = PagedKV(1, self.rows, KV_HEADS, context, HEAD_DIM)
        self.pool.fill_normal(seed, threads)
        self.row_bytes = per_row
        rng = np.random.default_rng(seed)
        self.queries = rng.standard_normal((self.rows, max(QUERIES), GROUP * KV_HEADS, HEAD_DIM)).astype(np.float32)
        self.k = max(1, int(BUDGET * context))
        self._first = 0

    def run(self, variant: Variant, rows: int) -> tuple[float, Selection]:
        """Seconds of one selection over ``rows`` requests, taken in turn so that none is in a cache."""
        set_tier(variant.tier)
        slots = (np.arange(rows) + self._first) % self.rows
        self._first = int(slots[-1]) + 1
        queries = np.ascontiguousarray(self.queries[:rows, : variant.x])
        lengths, budget = np.full(rows, self.context), np.full(rows, self.k)
        start = time.perf_counter()
        found = select(
            self.pool,
            0,
            slots,
            lengths,
            queries,
            budget,
            options=variant.options,
            threads=variant.threads,
            measure=True,
        )
        return time.perf_counter() - start, found

    def size(self, variant: Variant) -> None:
        """Rows per sample: all of the pool, or what fits in the time of a sample; warms up as it goes."""
        self.run(variant, 1)
        seconds, _ = self.run(variant, 1)
        units = 8 * variant.threads // KV_HEADS + 1  # below this the tail of the queue shows
        variant.rows = max(1, min(self.rows, max(units if variant.threads > 1 else 1, int(SAMPLE_SECONDS / seconds))))
        if seconds * variant.rows > 4 * SAMPLE_SECONDS * variant.threads:
            variant.rows = max(1, min(variant.rows, variant.threads // KV_HEADS))

    def measure(self, variants: list[Variant], repeats: int) -> dict[int, list[float]]:
        """Fill the variants' samples; returns the read ceilings per thread count, GB/s."""
        for variant in variants:
            self.size(variant)
        ceilings: dict[int, list[float]] = {}
        best = usable_tiers()[-1]
        for _ in range(repeats):
            set_tier(best)
            now = {}
            for threads in sorted({variant.threads for variant in variants}):
                now[threads] = pool_read_gb_s(self.pool, threads)
                ceilings.setdefault(threads, []).append(now[threads])
            for variant in variants:
                seconds, found = self.run(variant, variant.rows)
                gb_s = variant.rows * self.row_bytes / seconds / 1e9
                variant.gb_s.append(gb_s)
                variant.of_ceiling.append(gb_s / now[variant.threads])
                variant.phases.append(found.phase_seconds / found.phase_seconds.sum())
        return ceilings


def plan(threads: int, tiers: list[str], queries: tuple[int, ...] = QUERIES) -> list[Variant]:
    """Variants of one run: every tier at each x, and the options on the best tier."""
    best = tiers[-1]
    wide = [tier for tier in tiers if tier.startswith("avx512")] or [best]
    found = [Variant(f"{tier} x={x}", tier, x, threads) for tier in tiers for x in queries if _worth(tier, tiers, x)]
    if threads > 1:
        found.append(Variant(f"{best} x=1, one thread", best, 1, 1))
    paper = SelectOptions(paper_like=True)
    found += [Variant(f"{wide[0]} x={x}, paper-like", wide[0], x, threads, paper) for x in (1, max(queries))]
    found.append(Variant(f"{best} x=1, key-only", best, 1, threads, SelectOptions(key_only=True)))
    found.append(
        Variant(f"{best} x={max(queries)}, key-only", best, max(queries), threads, SelectOptions(key_only=True))
    )
    if "avx512bf16" in tiers:
        found.append(Variant("avx512bf16 x=1, bf16 PV", "avx512bf16", 1, threads, SelectOptions(pv="bf16")))
    found += [
        Variant(f"{best} x=1, prefetch {pages}", best, 1, threads, SelectOptions(tuning=Tuning(distance=2 * pages)))
        for pages in (0, 1, 2, 4)
    ]
    return found


def _worth(tier: str, tiers: list[str], x: int) -> bool:
    """Slow tiers beside fast ones only at the ends of the curve; tiers that share a kernel once."""
    if tier == "avx512bf16" and x > 1:
        return False
    return tier in tiers[-2:] or tier == "avx512" or x in (1, 32)


def _roofs(tiers: list[str], threads: int) -> dict[str, dict[str, float]]:
    """GFLOP/s roofs per tier; for bf16 dots the harmonic mean with FP32 FMA, as Fig. 6 has it."""
    roofs: dict[str, dict[str, float]] = {}
    for tier in tiers:
        set_tier(tier)
        peaks = {unit: peak_gflops(unit, threads) for unit in ("fma", "bf16_dot", "amx")}
        known = {unit: value for unit, value in peaks.items() if value is not None}
        if "bf16_dot" in known:
            known["harmonic_bf16_dot_fma"] = 2 / (1 / known["bf16_dot"] + 1 / known["fma"])
        roofs[tier] = known
    return roofs


def _row(variant: Variant, context: int, roofs: dict[str, dict[str, float]]) -> dict[str, Any]:
    set_tier(variant.tier)
    kind = kernel_kind(variant.x * GROUP, "bf16", HEAD_DIM, "f32" if variant.options.paper_like else variant.options.pv)
    gb_s = statistics.median(variant.gb_s)
    gflops = gb_s / (4 * HEAD_DIM) * (4 * variant.x * GROUP * HEAD_DIM)
    roof = "amx" if kind == "amx" else "fma"
    phases = np.median(np.array(variant.phases), axis=0)
    return {
        "name": variant.name,
        "tier": variant.tier,
        "kernel": kind,
        "x": variant.x,
        "threads": variant.threads,
        "context": context,
        "rows": variant.rows,
        "paper_like": variant.options.paper_like,
        "key_only": variant.options.key_only,
        "tuning": asdict(variant.options.tuning or default_tuning()),
        "gb_s": gb_s,
        "gb_s_samples": [round(value, 3) for value in variant.gb_s],
        "of_read_ceiling": statistics.median(variant.of_ceiling),
        "flop_per_byte": 4 * variant.x * GROUP * HEAD_DIM / (4 * HEAD_DIM),
        "gflops": gflops,
        "roof": roof,
        "of_roof": gflops / roofs[variant.tier][roof],
        "phase_shares": {name: float(share) for name, share in zip(_PHASES, phases, strict=True)},
    }


_PHASES = ("attention", "importance", "topk")


def bench_gather(bench: KernelBench, threads: int, repeats: int) -> dict[str, Any]:
    """Gather of one selection against a copy of as many bytes, alternating."""
    rows = min(bench.rows, max(1, 8 * threads // KV_HEADS))
    variant = Variant("gather", active_tier(), 1, threads)
    _seconds, found = bench.run(variant, rows)
    slots = (np.arange(rows) + bench._first - rows) % bench.rows
    shape = (rows, KV_HEADS, bench.k, HEAD_DIM)
    out = PagedKV(1, 1, 1, int(np.prod(shape[:-1])) + 64, HEAD_DIM)  # aligned memory on huge pages
    flat = out.pages.reshape(-1)
    out_k = flat[: flat.size // 2][: np.prod(shape)].reshape(shape)
    out_v = flat[flat.size // 2 :][: np.prod(shape)].reshape(shape)
    payload = 2 * out_k.nbytes
    gathered, copied = [], []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        gather(bench.pool, 0, slots, found, out_k, out_v, threads=threads)
        gathered.append(payload / (time.perf_counter() - start) / 1e9)
        copied.append(memcpy_gb_s(payload, threads, repeats=1))
    result = {
        "threads": threads,
        "payload_bytes": payload,
        "gb_s": statistics.median(gathered[1:]),
        "memcpy_gb_s": statistics.median(copied[1:]),
        "of_memcpy": statistics.median(g / c for g, c in zip(gathered[1:], copied[1:], strict=True)),
    }
    del out_k, out_v, flat
    out.close()
    return result


def bench_topk(context: int, repeats: int) -> list[dict[str, Any]]:
    """Microseconds of one top-k row: ours and the paper's min-heap, on random and on ascending values."""
    rng = np.random.default_rng(3)
    rows = []
    for order in ("random", "ascending"):
        values = rng.random(context).astype(np.float32)
        if order == "ascending":
            values.sort()
        samples: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(3 * repeats):
            for heap in samples:
                start = time.perf_counter()
                topk(values, max(1, int(BUDGET * context)), heap=heap)
                samples[heap].append(1e6 * (time.perf_counter() - start))
        ours, heap_us = statistics.median(samples[False]), statistics.median(samples[True])
        rows.append({"order": order, "context": context, "us": ours, "heap_us": heap_us, "speedup": heap_us / ours})
    return rows


def bench_kernels(
    *,
    context: int = 32768,
    threads: int | None = None,
    pool_gib: float = 1.0,
    repeats: int = 7,
    queries: tuple[int, ...] = QUERIES,
    tiers: list[str] | None = None,
    with_torch: bool = True,
) -> dict[str, Any]:
    """Measure every usable tier; the result is what ``herald-exec kernels --bench --json`` prints.

    Parameters
    ----------
    context
        Tokens per request.
    threads
        Threads; ``None`` is all that affinity and quota allow.
    pool_gib
        KV pool in GiB: it must exceed the last-level cache, and it is filled (that memory is needed).
    repeats
        Interleaved repetitions.
    """
    raise_problems(
        [
            check_number(context, "context", minimum=64, maximum=2**24, integer=True),
            check_number(repeats, "repeats", minimum=1, maximum=1000, integer=True),
            check_number(pool_gib, "pool_gib", above=0, maximum=4096),
        ]
    )
    if threads is not None and check_number(threads, "threads", minimum=1, integer=True):
        raise ConfigError(str(check_number(threads, "threads", minimum=1, integer=True)))
    used = threads or _core.default_threads()
    before = active_tier()
    names = tiers or usable_tiers()
    bench = KernelBench(context, used, pool_gib)
    try:
        variants = plan(used, names, queries)
        ceilings = bench.measure(variants, repeats)
        roofs = _roofs(names, used)
        rows = [_row(variant, context, roofs) for variant in variants]
        set_tier(names[-1])
        result: dict[str, Any] = {
            "schema": "herald.kernels/1",
            "cpu": cpu_model(),
            "cpus": os.cpu_count(),
            "capabilities": capabilities(),
            "shape": {
                "group": GROUP,
                "kv_heads": KV_HEADS,
                "head_dim": HEAD_DIM,
                "dtype": "bf16",
                "context": context,
                "budget": BUDGET,
                "pool_bytes": bench.pool.nbytes,
            },
            "repeats": repeats,
            "read_gb_s": {str(t): {"median": statistics.median(v), "samples": v} for t, v in ceilings.items()},
            "roofs_gflops": roofs,
            "kernels": rows,
            "topk": bench_topk(context, repeats),
            "gather": bench_gather(bench, used, repeats),
        }
        if with_torch:
            from .torch_baseline import bench_torch

            result["torch"] = bench_torch(bench, used, repeats)
    finally:
        set_tier(before)
        bench.pool.close()
    return result


def show_bench(result: dict[str, Any], text: Console) -> None:
    """The measured table for a person."""
    ceilings = ", ".join(f"{t} threads {v['median']:.1f}" for t, v in result["read_gb_s"].items())
    text.print(f"{result['cpu']}; DRAM read GB/s: {ceilings}")
    table = Table("kernel", "rows", "GB/s", "of read ceiling", "GFLOP/s", "of roof", "importance", "top-k")
    for row in result["kernels"]:
        shares = row["phase_shares"]
        table.add_row(
            row["name"],
            str(row["rows"]),
            f"{row['gb_s']:.2f}",
            f"{row['of_read_ceiling']:.3f}",
            f"{row['gflops']:.0f}",
            f"{row['of_roof']:.2f} {row['roof']}",
            f"{shares['importance']:.1%}",
            f"{shares['topk']:.1%}",
        )
    text.print(table)
    for row in result["topk"]:
        text.print(f"top-k, {row['order']}: {row['us']:.1f} us; heap {row['heap_us']:.1f} us ({row['speedup']:.1f}x)")
    got = result["gather"]
    text.print(f"gather {got['gb_s']:.2f} GB/s = {got['of_memcpy']:.2f} of memcpy ({got['memcpy_gb_s']:.2f})")
    for row in result.get("torch", []):
        text.print(f"torch {row['name']}: {row['gb_s']:.2f} GB/s; ours is {row['ours_over_it']:.2f}x")
