"""dKV-Cache: a token's KV is kept one round after it was committed, when it was first computed as a token."""

from dataclasses import dataclass, replace
from typing import ClassVar

from herald_pipeline.decoding.arrays import Array, array_namespace
from herald_pipeline.decoding.caches.base import (
    REGISTRY,
    CacheRule,
    CacheState,
    ForwardPlan,
    between,
    block_changed,
    count_round,
    make_plan,
    not_opened,
)
from herald_pipeline.decoding.schedulers.base import BlockState, Scheduler
from herald_pipeline.errors import ConfigError, check_number, raise_problems


@dataclass(frozen=True, slots=True)
class DkvDecode(CacheRule):
    """Computes all masks and the last round's commits; everything every ``cache_steps`` rounds and at block starts.

    ``cache_steps``: 8 for LLaDA, 4 to 16 for Dream in the released code.
    """

    cache_steps: int = 8

    def __post_init__(self) -> None:
        raise_problems([check_number(self.cache_steps, "cache_steps", minimum=1, integer=True)])

    def plan(
        self,
        cache: CacheState,
        state: BlockState,
        masked: Array,
        *,
        upcoming: Array | None = None,
        predecessor: bool = False,
    ) -> ForwardPlan:
        """Masks of the whole sequence, and last round's commits."""
        return make_plan(cache, state, masked | cache.pending, masked & state.active(masked), predecessor)

    def observe(
        self,
        cache: CacheState,
        plan: ForwardPlan,
        before: BlockState,
        after: BlockState,
        accepted: Array,
        scheduler: Scheduler,
    ) -> CacheState:
        """Refresh by rounds; a fixed block's end clears the cache."""
        counted = count_round(cache, plan, before, after, accepted)
        due = counted.rounds >= self.cache_steps
        if not scheduler.slides:
            due = due | block_changed(before, after)
        return replace(counted, due=due | not_opened(after))


@dataclass(frozen=True, slots=True)
class DkvGreedy(CacheRule):
    """Computes last round's commits, this round's (their order is drawn beforehand) and the masks around those.

    ``window_size``: masks within ``window_size // 2`` positions of this round's commits (the paper's local window is
    centred on them). ``cache_steps``: rounds between full forwards, 2 in the released code.
    """

    cache_steps: int = 2
    window_size: int = 4

    needs_upcoming: ClassVar[bool] = True

    def __post_init__(self) -> None:
        raise_problems(
            [
                check_number(self.cache_steps, "cache_steps", minimum=1, integer=True),
                check_number(self.window_size, "window_size", minimum=0, integer=True),
            ]
        )

    def plan(
        self,
        cache: CacheState,
        state: BlockState,
        masked: Array,
        *,
        upcoming: Array | None = None,
        predecessor: bool = False,
    ) -> ForwardPlan:
        """Commits of last round and of this one, and a window of masks."""
        if upcoming is None:
            message = "cache 'dkv-greedy' must know this round's commits before the forward; use decoder 'random'"
            raise ConfigError(message)
        xp = array_namespace(masked)
        near = upcoming
        outside = masked[:, :1] & False
        for _ in range(self.window_size // 2):
            left = xp.concat([near[:, 1:], outside], axis=-1)
            right = xp.concat([outside, near[:, :-1]], axis=-1)
            near = near | left | right
        wanted = upcoming | cache.pending | (near & masked)
        return make_plan(cache, state, wanted, upcoming, predecessor)

    def observe(
        self,
        cache: CacheState,
        plan: ForwardPlan,
        before: BlockState,
        after: BlockState,
        accepted: Array,
        scheduler: Scheduler,
    ) -> CacheState:
        """Refresh by rounds."""
        counted = count_round(cache, plan, before, after, accepted)
        due = counted.rounds >= self.cache_steps
        if not scheduler.slides:
            due = due | block_changed(before, after)
        return replace(counted, due=due | not_opened(after))


@dataclass(frozen=True, slots=True)
class DkvPrefill(CacheRule):
    """Only the prompt's KV is kept, from the first forward on, and never refreshed."""

    def plan(
        self,
        cache: CacheState,
        state: BlockState,
        masked: Array,
        *,
        upcoming: Array | None = None,
        predecessor: bool = False,
    ) -> ForwardPlan:
        """The response."""
        wanted = between(masked, state.prompt, state.end)
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
        """Never again: the response, a new block included, is computed each round anyway."""
        counted = count_round(cache, plan, before, after, accepted)
        return replace(counted, due=cache.due & False)


REGISTRY.add("dkv", DkvDecode, "dKV-Cache decode (LLaDA: every 8 rounds)")
REGISTRY.add("dkv-greedy", DkvGreedy, "dKV-Cache greedy (random order only)")
REGISTRY.add("dkv-prefill", DkvPrefill, "dKV-Cache prefill")
