"""Tunings chosen by measuring, for a processor whose defaults nobody has measured or a machine that is shared.

Each use of a scan has a handful of candidates; all run in turn, in rounds of a random order, and the best median of
fractions of the round's read ceiling wins.
"""

import statistics
import time

import numpy as np

from .bandwidth import pool_read_gb_s
from .dispatch import usable_tiers
from .measuring import GROUP, KV_HEADS, KernelBench, Variant
from .options import SelectOptions
from .tuning import Tuning

T = Tuning
#: By use of a scan; without matrix tiles those that differ only in `tiles` are one.
WAYS: dict[str, tuple[Tuning, ...]] = {
    "scan": (
        T(),
        T(distance=2, streams=4),
        T(distance=2, streams=4, even=True),
        T(distance=4, turned=True),
        T(distance=2, tiles=True, even=True),
        T(bulk=True),
    ),
    "wide_scan": (
        T(),
        T(distance=2),
        T(distance=2, tiles=True, turned=True),
        T(distance=2, tiles=True, turned=True, even=True),
    ),
    "matrix": (T(), T(distance=4), T(bulk=True)),
    "keys": (
        T(),
        T(distance=4, streams=4),
        T(distance=4, streams=4, even=True),
        T(distance=4, streams=4, even=True, pairs=True),
        T(distance=4, tiles=True, even=True),
        T(distance=4, tiles=True, streams=4, even=True, rows_ahead=64),
    ),
    "keys8": (
        T(),
        T(distance=4, streams=4),
        T(distance=4, streams=4, tiles=True),
        T(distance=4, streams=4, tiles=True, even=True),
        T(distance=4, streams=4, tiles=True, even=True, pairs=True),
        T(distance=8, streams=4, tiles=True, even=True, rows_ahead=64),
    ),
}
_QUERIES = {"scan": 1, "wide_scan": 2, "matrix": 8, "keys": 1, "keys8": 1}


def measure_tunings(bench: KernelBench, threads: int, seconds: float) -> dict[str, Tuning]:
    """The fastest tuning of each use on the best tier, found in ``seconds`` altogether (three rounds at least)."""
    best = usable_tiers()[-1]
    rows = min(bench.rows, max(1, 8 * threads // KV_HEADS))
    rng = np.random.default_rng(0)
    chosen = {}
    for use, ways in WAYS.items():
        variants = [
            Variant("", best, _QUERIES[use], threads, SelectOptions(key_only=use == "keys", tuning=way), use == "keys8")
            for way in dict.fromkeys(ways)
        ]
        if any(variant.use != use for variant in variants):
            message = f"the benchmark's group of {GROUP} does not make {use!r} of x={_QUERIES[use]}"
            raise ValueError(message)
        end = time.monotonic() + seconds / len(WAYS)
        ratios: list[list[float]] = [[] for _ in variants]
        while time.monotonic() < end or len(ratios[0]) < 3:
            ceiling = pool_read_gb_s(bench.pool, threads)
            for i in rng.permutation(len(variants)):
                taken, _found = bench.run(variants[i], rows)
                ratios[i].append(rows * bench.row_bytes / taken / 1e9 / ceiling)
        winner = max(range(len(variants)), key=lambda i: statistics.median(ratios[i]))
        chosen[use] = variants[winner].options.tuning or Tuning()
    return chosen
