"""Speed of the kernels beside the ceilings of the same run.

Reported are medians over interleaved repetitions (:mod:`.measuring`), ratios against the ceiling of the same
repetition, and where time went. GB/s counts K and V once, whatever is really read (key-only and 8-bit keys read less,
so they may exceed the ceiling); GFLOP/s counts 4 x rows x head_dim per key (scores and PV).
"""

import os
import statistics
import time
from dataclasses import asdict
from typing import Any

import numpy as np

from herald_pipeline.environment import threads_problem
from herald_pipeline.errors import check_number, raise_problems

from . import _core
from .bandwidth import peak_gflops
from .dispatch import active_tier, capabilities, set_tier, tier_index, tier_names, usable_tiers
from .measuring import (
    BUDGET,
    GROUP,
    HEAD_DIM,
    KV_HEADS,
    QUERIES,
    KernelBench,
    Say,
    Variant,
    cpu_model,
    plan,
    silent,
)
from .options import PHASES
from .reference import HEAVY_SHARE
from .selection import gather, kernel_kind, topk
from .store import PagedKV
from .tuning import Tuning, default_tuning


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
    pv = "f32" if variant.options.paper_like else variant.options.pv
    kind = "few" if variant.keys8 else kernel_kind(variant.x, GROUP, "bf16", HEAD_DIM, pv)
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
        "keys8": variant.keys8,
        "tuning": asdict(variant.options.tuning or default_tuning(variant.use)),
        "gb_s": gb_s,
        "gb_s_samples": [round(value, 3) for value in variant.gb_s],
        "of_read_ceiling": statistics.median(variant.of_ceiling),
        "flop_per_byte": 4 * variant.x * GROUP * HEAD_DIM / (4 * HEAD_DIM),
        "gflops": gflops,
        "roof": roof,
        "of_roof": gflops / roofs[variant.tier][roof],
        "phase_shares": {name: float(share) for name, share in zip(PHASES, phases, strict=True)},
    }


def bytes_read(variant: Variant, budget: float) -> float:
    """Of K and V, the share that a selection must read: what it scans, V that it selected, K that it scores again."""
    options = variant.options
    if not variant.keys8:
        return (1 + budget) / 2 if options.key_only else 1.0
    scanned = (HEAD_DIM + 4) / (4 * HEAD_DIM)
    sure = 0.0 if options.rescore_all else 1 / options.candidates * (1 - 1 / HEAVY_SHARE)
    return scanned + budget / 2 + budget * (options.candidates - sure) / 2


def limits(variants: list[Variant], budget: float) -> list[dict[str, Any]]:
    """How much faster one query on the best tier is than the paper-like kernel, and options are than one query.

    ``limit`` is the ratio at which the faster side would read what it must at the round's read ceiling and do nothing
    else: single rows as if they were one stream, which they are not.
    """
    named = {variant.name: variant for variant in variants}
    best = max((v.tier for v in variants), key=tier_names().index)
    found = []
    for variant in variants:
        options = variant.options
        alone = ", one thread" if variant.threads == 1 and f"{best} x=1, one thread" in named else ""
        ours = named.get(f"{best} x=1{alone}")
        if variant.x != 1 or ours is None or not (options.paper_like or options.key_only or variant.keys8):
            continue
        faster, slower = (ours, variant) if options.paper_like else (variant, ours)
        pairs = list(zip(faster.of_ceiling, slower.of_ceiling, strict=True))
        most = 1 / bytes_read(faster, budget)
        found.append(
            {
                "name": f"{faster.name} over {slower.name}",
                "ratio": statistics.median(a / b for a, b in pairs),
                "limit": statistics.median(most / b for _a, b in pairs),
                "of_read_ceiling": statistics.median(a / most for a, _b in pairs),
            }
        )
    return found


def bench_gather(bench: KernelBench, threads: int, repeats: int) -> dict[str, Any]:
    """Gather of one selection against copies of as many bytes of the same pool, as cold, into the same buffers.

    Two copies, alternating with it: memcpy, and the tier's stores past the cache.
    """
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
    gathered: list[float] = []
    copied: list[float] = []
    streamed: list[float] = []
    for repeat in range(repeats + 1):
        shifted = (slots + repeat * rows) % bench.rows  # rows that are not in a cache
        start = time.perf_counter()
        gather(bench.pool, 0, shifted, found, out_k, out_v, threads=threads)
        gathered.append(payload / (time.perf_counter() - start) / 1e9)
        for tier, rates in ((-1, copied), (tier_index(), streamed)):
            seconds = 0.0
            for each in (out_k, out_v):
                bench.copied_bytes += each.nbytes
                source = bench.copied_bytes % max(1, bench.pool.nbytes - each.nbytes) // 4096 * 4096
                address = bench.pool.address + source
                seconds += _core.copy_seconds(each.ctypes.data, address, each.nbytes, threads, tier)
            rates.append(payload / seconds / 1e9)
    faster = [max(pair) for pair in zip(copied, streamed, strict=True)]
    result = {
        "threads": threads,
        "payload_bytes": payload,
        "gb_s": statistics.median(gathered[1:]),
        "memcpy_gb_s": statistics.median(copied[1:]),
        "streaming_copy_gb_s": statistics.median(streamed[1:]),
        "of_memcpy": statistics.median(g / c for g, c in zip(gathered[1:], copied[1:], strict=True)),
        "of_faster_copy": statistics.median(g / c for g, c in zip(gathered[1:], faster[1:], strict=True)),
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
    seconds: float = 0.0,
    tunings: dict[str, Tuning] | None = None,
    say: Say = silent,
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
    seconds
        With a positive number, repetitions end when it is spent, after three at least.
    tunings
        By use of a scan (:data:`.tuning.USES`), in place of the defaults; the result says which it was.
    say
        Told what is measured next.
    """
    raise_problems(
        [
            check_number(context, "context", minimum=64, maximum=2**24, integer=True),
            check_number(repeats, "repeats", minimum=1, maximum=1000, integer=True),
            check_number(pool_gib, "pool_gib", above=0, maximum=4096),
            check_number(seconds, "seconds", minimum=0, maximum=86400),
            threads_problem(threads),
        ]
    )
    used = threads or _core.default_threads()
    before = active_tier()
    names = tiers or usable_tiers()
    say(f"filling {pool_gib:g} GiB of KV")
    bench = KernelBench(context, used, pool_gib)
    try:
        variants = plan(used, names, queries, tunings)
        ceilings = bench.measure(variants, repeats, seconds, say)
        say("peaks of arithmetic, top-k, gather" + (", torch's attention" if with_torch else ""))
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
            "repeats": len(variants[0].gb_s),
            "read_gb_s": {str(t): {"median": statistics.median(v), "samples": v} for t, v in ceilings.items()},
            "roofs_gflops": roofs,
            "kernels": rows,
            "limits": limits(variants, bench.k / context),
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
