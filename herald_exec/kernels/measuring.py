"""Kernels measured in turn: a filled pool, variants, interleaved repetitions.

Each repetition measures the read ceiling, then every variant once, so that a machine that slows down slows all of them.
"""

import functools
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from .bandwidth import pool_read_gb_s
from .dispatch import set_tier, usable_tiers
from .int8_keys import Int8Keys
from .options import Selection, SelectOptions
from .selection import select
from .store import PagedKV
from .tuning import Tuning, use_of

GROUP, KV_HEADS, HEAD_DIM, BUDGET = 4, 4, 128, 0.05
QUERIES = (1, 2, 4, 8, 16, 32)
SAMPLE_SECONDS = 0.15  # a slow variant measures fewer rows

Say = Callable[[str], None]


def silent(_: str) -> None:
    """Progress that nobody reads."""


@dataclass
class Variant:
    """One measured kernel: a tier, x, threads and options, with its samples."""

    name: str
    tier: str
    x: int
    threads: int
    options: SelectOptions = field(default_factory=SelectOptions)
    keys8: bool = False
    rows: int = 0
    gb_s: list[float] = field(default_factory=list)
    of_ceiling: list[float] = field(default_factory=list)
    phases: list[Any] = field(default_factory=list)

    @property
    def use(self) -> str:
        """By which its tuning is chosen."""
        return use_of(self.x * GROUP, key_only=self.options.key_only, keys8=self.keys8)


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
        self.copied_bytes = 0  #: of the pool, by copies that a gather is compared with: where the next begins

    @functools.cached_property
    def keys8(self) -> Int8Keys:
        """8-bit keys of the whole pool, made when first asked for."""
        keys = Int8Keys(self.pool)
        for slot in range(self.rows):
            keys.update(0, slot, 0, self.context, self.threads)
        return keys

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
            keys8=self.keys8 if variant.keys8 else None,
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
        if seconds * variant.rows > 4 * SAMPLE_SECONDS:  # few units are split over the threads
            fewest = max(1, variant.threads // KV_HEADS)
            variant.rows = min(variant.rows, max(fewest, int(4 * SAMPLE_SECONDS / seconds)))

    def measure(
        self, variants: list[Variant], repeats: int, seconds: float = 0.0, say: Say = silent
    ) -> dict[int, list[float]]:
        """Fill the variants' samples; returns the read ceilings per thread count, GB/s.

        ``seconds`` above 0 ends the repetitions when they are spent, after three at least. ``say`` is told of each.
        """
        say(f"sizing {len(variants)} kernels")
        for variant in variants:
            self.size(variant)
        ceilings: dict[int, list[float]] = {}
        best = usable_tiers()[-1]
        end = time.monotonic() + seconds
        for repeat in range(repeats):
            if seconds and repeat >= 3 and time.monotonic() > end:
                break
            say(f"repetition {repeat + 1} of {repeats}")
            set_tier(best)
            now = {}
            for threads in sorted({variant.threads for variant in variants}):
                now[threads] = pool_read_gb_s(self.pool, threads)
                ceilings.setdefault(threads, []).append(now[threads])
            for variant in variants:
                taken, found = self.run(variant, variant.rows)
                gb_s = variant.rows * self.row_bytes / taken / 1e9
                variant.gb_s.append(gb_s)
                variant.of_ceiling.append(gb_s / now[variant.threads])
                variant.phases.append(found.phase_seconds / found.phase_seconds.sum())
        return ceilings


def plan(
    threads: int,
    tiers: list[str],
    queries: tuple[int, ...] = QUERIES,
    tunings: dict[str, Tuning] | None = None,
) -> list[Variant]:
    """Variants of one run: every tier at each x, and the options on the best tier, by ``tunings`` where given."""
    best = tiers[-1]
    wide = [tier for tier in tiers if tier.startswith("avx512")] or [best]
    found = [Variant(f"{tier} x={x}", tier, x, threads) for tier in tiers for x in queries if _worth(tier, tiers, x)]
    if threads > 1:
        found.append(Variant(f"{best} x=1, one thread", best, 1, 1))
    paper = SelectOptions(paper_like=True)
    if threads > 1:
        found.append(Variant(f"{wide[0]} x=1, paper-like, one thread", wide[0], 1, 1, paper))
    found += [Variant(f"{wide[0]} x={x}, paper-like", wide[0], x, threads, paper) for x in (1, max(queries))]
    bare = SelectOptions(paper_like=True, tuning=Tuning())  # the paper names no prefetch: its kernel without ours
    found.append(Variant(f"{wide[0]} x=1, paper-like, no prefetch", wide[0], 1, threads, bare))
    found.append(Variant(f"{best} x=1, key-only", best, 1, threads, SelectOptions(key_only=True)))
    found.append(Variant(f"{best} x=1, 8-bit keys", best, 1, threads, keys8=True))
    found.append(
        Variant(f"{best} x={max(queries)}, key-only", best, max(queries), threads, SelectOptions(key_only=True))
    )
    if "avx512bf16" in tiers:
        found.append(Variant("avx512bf16 x=1, bf16 PV", "avx512bf16", 1, threads, SelectOptions(pv="bf16")))
    found += [
        Variant(f"{best} x=1, prefetch {pages}", best, 1, threads, SelectOptions(tuning=Tuning(distance=2 * pages)))
        for pages in (0, 2)
    ]
    every = SelectOptions(rescore_all=True)
    found.append(Variant(f"{best} x=1, 8-bit keys, all candidates again", best, 1, threads, every, keys8=True))
    for variant in found:
        if tunings and variant.options.tuning is None:
            variant.options = replace(variant.options, tuning=tunings.get(variant.use))
    return found


def _worth(tier: str, tiers: list[str], x: int) -> bool:
    """Slow tiers beside fast ones only at the ends of the curve; tiers that share a kernel once."""
    if tier == "avx512bf16" and x > 1:
        return False
    return tier in tiers[-2:] or tier == "avx512" or x in (1, 32)
