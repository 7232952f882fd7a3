"""Groups of decoding combinations in which one axis varies, so that a difference has one cause.

The speed of a whole system against Top-1 mixes three gains: several commits a step, sliding blocks, reused KV. The DSB
article (sections 15 and 18) compares along one axis at a time; these are its groups. ``reference`` stands alone.
"""

from collections.abc import Mapping
from typing import NamedTuple


class Combination(NamedTuple):
    """A decoder, a scheduler and a cache rule, by name."""

    decoder: str
    scheduler: str
    cache: str


VIEWS: Mapping[str, tuple[Combination, ...]] = {
    "schedule": tuple(
        Combination("confidence", scheduler, "none") for scheduler in ("fixed", "adablock", "dsb-const", "dsb-greedy")
    ),
    "cache-system": (
        Combination("confidence", "fixed", "dual"),
        Combination("confidence", "fixed", "dkv"),
        Combination("confidence", "adablock", "dual"),
        Combination("confidence", "dsb-const", "dsb"),
        Combination("confidence", "dsb-greedy", "dsb"),
    ),
    "cache-under-dsb": tuple(
        Combination("confidence", scheduler, cache)
        for scheduler in ("dsb-const", "dsb-greedy")
        for cache in ("dual", "dsb")
    ),
    "reference": (Combination("top1", "fixed", "none"),),
}
"""``schedule``: only the scheduler varies. ``cache-system``: whole systems, each cache with the schedule it was made
for. ``cache-under-dsb``: only the cache varies, within each sliding schedule (Table 3). ``reference``: quality only."""

VARIES: Mapping[str, str] = {
    "schedule": "scheduler",
    "cache-system": "scheduler and cache",
    "cache-under-dsb": "cache",
    "reference": "nothing; a slow reference for quality, not an opponent in speed",
}


def all_combinations() -> list[Combination]:
    """Every combination of the views, once, the reference first."""
    ordered = [*VIEWS["reference"], *(c for group in VIEWS.values() for c in group)]
    return list(dict.fromkeys(ordered))


def views_of(combination: Combination) -> list[str]:
    """Names of the views that a combination belongs to."""
    return [name for name, group in VIEWS.items() if combination in group]
