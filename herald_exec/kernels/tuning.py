"""How the kernels lay a scan over the memory system: software prefetch, its order, and where scores are computed.

Results do not depend on it, with one exception: ``tiles`` sums scores in another order (fp32 either way). What is best
differs between processors by factors and is not to be had from their names, so the defaults below are measured ones
(``benchmarks/tune_kernels.py`` prints the table that they are read from).
"""

import functools
import os
from dataclasses import dataclass, fields, replace
from typing import Any

from herald_pipeline.errors import ConfigError, check_number, raise_problems, unknown_name

from . import _core

_LEVELS = ("first", "second", "once")


def _checked(limits: dict[str, tuple[int, int]], values: object) -> None:
    raise_problems(
        check_number(getattr(values, name), name, minimum=low, maximum=high, integer=True)
        for name, (low, high) in limits.items()
    )


@dataclass(frozen=True)
class Tuning:
    """Of a scan (:func:`.select`).

    Attributes
    ----------
    distance
        Software prefetch, in half pages (a K tile or a V tile); 0 is none. 1 asks for a page's V while its K is scored;
        2 n asks for K during K and V during V, n pages ahead. Several queries on matrix tiles: a block of two or four
        pages ahead, or nothing.
    streams
        1: lines in order. 4: from several places of a tile in turn, so that several hardware prefetchers work.
    turned
        PV passes of more query rows over shorter pieces of V (few rows over long pieces otherwise).
    tiles
        Scores of few query rows on matrix tiles, as three bf16 parts of each query: fp32 accuracy. (From two queries
        and eight rows on, AMX works on matrix tiles anyway, and rounds: :func:`.kernel_kind`.)
    rows_ahead
        Single rows (K of candidates, V of what was selected) asked for ahead of use.
    bulk
        A tile is read in one run just before use, so that the hardware prefetches, in place of software (``distance``
        is then ignored).
    even
        Of few query rows: prefetches go on while scores become probabilities, in place of resting there.
    """

    distance: int = 0
    streams: int = 1
    turned: bool = False
    tiles: bool = False
    rows_ahead: int = 32
    bulk: bool = False
    even: bool = False

    def __post_init__(self) -> None:
        _checked({"distance": (0, 128), "streams": (1, 8), "rows_ahead": (0, 256)}, self)

    def numbers(self) -> tuple[int, ...]:
        """As the extension takes them."""
        return tuple(int(getattr(self, field.name)) for field in fields(self))


@dataclass(frozen=True)
class GatherTuning:
    """Of a gather.

    Attributes
    ----------
    ahead
        Rows prefetched ahead.
    level
        Cache that they go to: ``"first"``, ``"second"``, or ``"once"`` (first, not kept).
    scattered
        Lines of a row asked for out of order, so that hardware prefetchers do not fetch on behind it.
    streaming
        Stores past the cache, where the buffers are 64-byte aligned.
    """

    ahead: int = 16
    level: str = "first"
    scattered: bool = False
    streaming: bool = True

    def __post_init__(self) -> None:
        _checked({"ahead": (0, 256)}, self)
        if self.level not in _LEVELS:
            raise unknown_name("cache level", self.level, _LEVELS)

    def numbers(self) -> tuple[int, ...]:
        """As the extension takes them."""
        return self.ahead, _LEVELS.index(self.level), int(self.scattered), int(self.streaming)


def parse_tuning(text: str, base: Tuning) -> Tuning:
    """``"distance=4,streams=4,even"`` as changes of ``base``; a name alone is 1."""
    known = {field.name: type(getattr(base, field.name)) for field in fields(Tuning)}
    changes: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name not in known:
            raise unknown_name("kernel tuning in HERALD_TUNING", name, known)
        if not (value or "1").isdecimal():
            message = f"HERALD_TUNING: {name} must be a whole number, got {value!r}"
            raise ConfigError(message)
        changes[name] = known[name](int(value or "1"))
    return replace(base, **changes)


#: What a scan does, by which the best way differs: K and V for fewer than 5 query rows of a KV head, for 5 to 15, for
#: 16 and more; K alone; 8-bit keys.
USES = ("scan", "wide_scan", "matrix", "keys", "keys8")

#: Emerald Rapids, 16 virtual CPUs, contexts of 32K: fractions of the read ceiling of the same round, K and V counted
#: even where they are not read, in the latest run that tried the way (58, 100, 114, 26, 42, 21 rounds). scan: 0.845,
#: without `even` 0.822, without prefetch 0.54; eight pages ahead 0.77. keys: 1.38; in an earlier run without `even`
#: 1.27, without `tiles` too 1.33. keys8: 1.91, without `even` 1.85. matrix, four pages ahead on matrix tiles with 4, 8,
#: 32 queries: 0.71, 0.59, 0.23; eight 0.68, 0.57, 0.23; sixteen 0.59, 0.50, 0.21; without 0.54, 0.43, 0.20. Earlier
#: runs: wide_scan 0.63, without tiles 0.59; matrix on AVX-512 and 32 queries one page ahead 0.069, two 0.067.
_INTEL = {
    "scan": Tuning(distance=2, streams=4, even=True),
    "wide_scan": Tuning(distance=2, tiles=True, turned=True),
    "matrix": Tuning(distance=2),
    "keys": Tuning(distance=4, streams=4, tiles=True, even=True),
    "keys8": Tuning(distance=4, streams=4, tiles=True, even=True),
}


def use_of(rows: int, *, key_only: bool = False, keys8: bool = False) -> str:
    """Which of :data:`USES` a selection is, from its query rows per KV head (x times the group)."""
    if keys8:
        return "keys8"
    if rows >= 16:
        return "matrix"
    if key_only:
        return "keys"
    return "wide_scan" if rows > 4 else "scan"


@functools.cache
def default_tuning(use: str = "scan") -> Tuning:
    """The default of one of :data:`USES` on this processor, changed by ``HERALD_TUNING`` (:func:`parse_tuning`).

    Intel: measured, see the table above. AMD (Zen 4): no prefetch, it halves the speed.
    """
    if use not in USES:
        raise unknown_name("use of a scan", use, USES)
    base = _INTEL[use] if _core.is_intel() else Tuning()
    return parse_tuning(os.environ.get("HERALD_TUNING", ""), base)


def default_gather_tuning() -> GatherTuning:
    """The gather's default: 32 rows ahead into the second cache, lines out of order.

    On Emerald Rapids the best of fourteen ways in one run (0.50 of a copy, the others 0.49) and of eleven in another
    (55 GB/s; in order 49, without 38).
    """
    return GatherTuning(ahead=32, level="second", scattered=True)
