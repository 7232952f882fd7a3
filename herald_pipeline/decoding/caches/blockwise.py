"""Caches that live for a block: ``none``, ``prefix``, ``dual`` (Fast-dLLM).

Where the block slides there are no block starts: ``prefix`` and ``dual`` then refresh every S_init committed tokens.
That is our reading of Table 3 of the DSB article, which pairs sliding blocks with the Dual cache and does not say when
it refreshes.
"""

from dataclasses import dataclass, replace

from herald_pipeline.decoding.arrays import Array
from herald_pipeline.decoding.caches.base import (
    REGISTRY,
    CacheRule,
    CacheState,
    ForwardPlan,
    between,
    count_round,
    let_through,
    make_plan,
    refresh_at_blocks,
)
from herald_pipeline.decoding.schedulers.base import BlockState, Scheduler


@dataclass(frozen=True, slots=True)
class NoCache(CacheRule):
    """Every round computes every position."""

    def plan(
        self,
        cache: CacheState,
        state: BlockState,
        masked: Array,
        *,
        upcoming: Array | None = None,
        predecessor: bool = False,
    ) -> ForwardPlan:
        """All positions."""
        return make_plan(cache, state, state.valid(masked), masked, False)

    def observe(
        self,
        cache: CacheState,
        plan: ForwardPlan,
        before: BlockState,
        after: BlockState,
        accepted: Array,
        scheduler: Scheduler,
    ) -> CacheState:
        """A full forward is always due."""
        counted = count_round(cache, plan, before, after, accepted)
        return replace(counted, due=cache.due | True)


@dataclass(frozen=True, slots=True)
class Prefix(CacheRule):
    """KV left of the block is reused; the block and everything right of it is computed each round."""

    def plan(
        self,
        cache: CacheState,
        state: BlockState,
        masked: Array,
        *,
        upcoming: Array | None = None,
        predecessor: bool = False,
    ) -> ForwardPlan:
        """[s, end)."""
        wanted = between(masked, state.s, state.end)
        return make_plan(cache, state, wanted, masked & state.active(masked), predecessor)

    def observe(
        self,
        cache: CacheState,
        plan: ForwardPlan,
        before: BlockState,
        after: BlockState,
        accepted: Array,
        scheduler: Scheduler,
    ) -> CacheState:
        """Refresh at block starts."""
        counted = count_round(cache, plan, before, after, accepted)
        return replace(counted, due=refresh_at_blocks(counted, before, after, scheduler))


@dataclass(frozen=True, slots=True)
class Dual(CacheRule):
    """KV on both sides of the block is reused; only the block is computed, its KV written over the cached one.

    ``refresh_accepts_leftmost_only``: the released Dream path, whose refreshes commit position s alone.
    """

    refresh_accepts_leftmost_only: bool = False

    def plan(
        self,
        cache: CacheState,
        state: BlockState,
        masked: Array,
        *,
        upcoming: Array | None = None,
        predecessor: bool = False,
    ) -> ForwardPlan:
        """[s, e)."""
        active = state.active(masked)
        return make_plan(cache, state, active, masked & active, predecessor)

    def restrict(self, plan: ForwardPlan, state: BlockState, masked: Array, accepted: Array) -> Array:
        """All commits, or the leftmost in refreshing rows."""
        return let_through(plan, state, masked, accepted, self.refresh_accepts_leftmost_only)

    def observe(
        self,
        cache: CacheState,
        plan: ForwardPlan,
        before: BlockState,
        after: BlockState,
        accepted: Array,
        scheduler: Scheduler,
    ) -> CacheState:
        """Refresh at block starts."""
        counted = count_round(cache, plan, before, after, accepted)
        return replace(counted, due=refresh_at_blocks(counted, before, after, scheduler))


REGISTRY.add("none", NoCache, "LLaDA and Dream reference")
REGISTRY.add("prefix", Prefix, "Fast-dLLM v1 prefix cache")
REGISTRY.add("dual", Dual, "Fast-dLLM v1 dual cache")
REGISTRY.add(
    "dual-fast-dllm-dream",
    Dual,
    "Fast-dLLM v1's Dream code: a block's first forward commits its first position only",
    refresh_accepts_leftmost_only=True,
)
