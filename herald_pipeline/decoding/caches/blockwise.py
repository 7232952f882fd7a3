"""Caches that live for a block: ``none``, ``prefix``, ``dual`` (Fast-dLLM).

Where the block slides there are no block starts: ``prefix`` and ``dual`` then refresh every S_init committed tokens.
That is our reading of Table 3 of the DSB article, which pairs sliding blocks with the Dual cache and does not say when
it refreshes.
"""

from dataclasses import dataclass

from herald_pipeline.decoding.arrays import Array
from herald_pipeline.decoding.caches.base import REGISTRY, CacheRule, CacheState, between, refresh_at_blocks
from herald_pipeline.decoding.schedulers.base import BlockState, Scheduler


@dataclass(frozen=True, slots=True)
class NoCache(CacheRule):
    """Every round computes every position."""

    def wanted(self, cache: CacheState, state: BlockState, masked: Array, upcoming: Array) -> Array:
        """All positions."""
        return masked | True

    def due(self, counted: CacheState, before: BlockState, after: BlockState, scheduler: Scheduler) -> Array:
        """Always."""
        return counted.due | True


@dataclass(frozen=True, slots=True)
class Prefix(CacheRule):
    """KV left of the block is reused; the block and everything right of it is computed each round."""

    def wanted(self, cache: CacheState, state: BlockState, masked: Array, upcoming: Array) -> Array:
        """[s, end)."""
        return between(masked, state.s, state.end)

    def due(self, counted: CacheState, before: BlockState, after: BlockState, scheduler: Scheduler) -> Array:
        """At block starts."""
        return refresh_at_blocks(counted, before, after, scheduler)


@dataclass(frozen=True, slots=True)
class Dual(CacheRule):
    """KV on both sides of the block is reused; only the block is computed, its KV written over the cached one.

    ``refresh_accepts_leftmost_only``: the released Dream path, whose refreshes commit position s alone.
    """

    refresh_accepts_leftmost_only: bool = False

    def wanted(self, cache: CacheState, state: BlockState, masked: Array, upcoming: Array) -> Array:
        """[s, e)."""
        return state.active(masked)

    def due(self, counted: CacheState, before: BlockState, after: BlockState, scheduler: Scheduler) -> Array:
        """At block starts."""
        return refresh_at_blocks(counted, before, after, scheduler)


REGISTRY.add("none", NoCache, "LLaDA and Dream reference")
REGISTRY.add("prefix", Prefix, "Fast-dLLM v1 prefix cache")
REGISTRY.add("dual", Dual, "Fast-dLLM v1 dual cache")
REGISTRY.add(
    "dual-fast-dllm-dream",
    Dual,
    "Fast-dLLM v1's Dream code: a block's first forward commits its first position only",
    refresh_accepts_leftmost_only=True,
)
