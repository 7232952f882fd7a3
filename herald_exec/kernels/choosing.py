"""Tunings chosen by measuring, for a processor whose defaults nobody has measured or a machine that is shared.

Each use of a scan has a handful of candidates; all run in turn, in rounds of a random order, and the best median of
fractions of the round's read ceiling wins.
"""

import math
import statistics
import time
from dataclasses import replace

import numpy as np

from .bandwidth import pool_read_gb_s
from .dispatch import usable_tiers
from .measuring import GROUP, KV_HEADS, KernelBench, Variant
from .options import SelectOptions
from .tuning import Tuning

T = Tuning
#: By use of a scan; those that a tier's kernel does not tell apart are one (:func:`told_apart`).
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
    "matrix": (T(), T(distance=2), T(distance=4)),
    "keys": (
        T(),
        T(distance=4, streams=4),
        T(distance=4, streams=4, even=True),
        T(distance=4, streams=4, tiles=True, even=True),
    ),
    "keys8": (
        T(),
        T(distance=4, streams=4),
        T(distance=4, streams=4, tiles=True),
        T(distance=4, streams=4, tiles=True, even=True),
    ),
}
#: Queries at which a use is measured; of several the product of the rates counts.
_QUERIES = {"scan": (1,), "wide_scan": (2,), "matrix": (4, 8, 32), "keys": (1,), "keys8": (1,)}
#: Two queries take AMX's matrix tiles, one of as many rows does not: ``wide_scan`` is measured as that one runs.
_OPTIONS = {"wide_scan": SelectOptions(pv="f32"), "keys": SelectOptions(key_only=True)}


def told_apart(use: str, tier: str) -> list[Tuning]:
    """Of :data:`WAYS` those that differ in what the tier's kernel looks at: noise would choose among the others.

    ``tiles`` needs matrix tiles; many queries on these ask four pages ahead whatever ``distance`` is, if it is not 0.
    """
    found: dict[Tuning, Tuning] = {}
    for way in WAYS[use]:
        seen = way
        if tier != "amx":
            seen = replace(way, tiles=False)
        elif use == "matrix":
            seen = replace(way, distance=min(way.distance, 1))
        found.setdefault(seen, way)
    return list(found.values())


def measure_tunings(bench: KernelBench, threads: int, seconds: float) -> dict[str, Tuning]:
    """The fastest tuning of each use on the best tier, found in ``seconds`` altogether (three rounds at least)."""
    best = usable_tiers()[-1]
    rows = min(bench.rows, max(1, 8 * threads // KV_HEADS))
    rng = np.random.default_rng(0)
    chosen = {}
    for use in WAYS:
        found = told_apart(use, best)
        options = [replace(_OPTIONS.get(use, SelectOptions()), tuning=way) for way in found]
        variants = [[Variant("", best, x, threads, each, use == "keys8") for x in _QUERIES[use]] for each in options]
        if any(variant.use != use for of_way in variants for variant in of_way):
            message = f"the benchmark's group of {GROUP} does not make {use!r} of x={_QUERIES[use]}"
            raise ValueError(message)
        end = time.monotonic() + seconds / len(WAYS)
        ratios: list[list[float]] = [[] for _ in variants]
        while time.monotonic() < end or len(ratios[0]) < 3:
            ceiling = pool_read_gb_s(bench.pool, threads)
            for i in rng.permutation(len(variants)):
                rates = [rows * bench.row_bytes / bench.run(variant, rows)[0] / 1e9 for variant in variants[i]]
                ratios[i].append(math.prod(rate / ceiling for rate in rates))
        chosen[use] = found[max(range(len(found)), key=lambda i: statistics.median(ratios[i]))]
    return chosen
