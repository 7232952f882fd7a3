"""dKV-Cache: a token's KV is kept one round after it was committed, when it was first computed as a token."""

from dataclasses import dataclass
from typing import ClassVar

from herald_pipeline.decoding.arrays import Array, array_namespace
from herald_pipeline.decoding.caches.base import (
    REGISTRY,
    CacheRule,
    CacheState,
    between,
    block_changed,
    not_opened,
)
from herald_pipeline.decoding.schedulers.base import BlockState, Scheduler
from herald_pipeline.errors import check_number, raise_problems


def _every_few_rounds(
    cache_steps: int, counted: CacheState, before: BlockState, after: BlockState, scheduler: Scheduler
) -> Array:
    """``[rows]`` bool: refresh by rounds; the end of a block that does not slide clears the cache."""
    due = (counted.rounds >= cache_steps) | not_opened(after)
    return due if scheduler.slides else due | block_changed(before, after)


@dataclass(frozen=True, slots=True)
class DkvDecode(CacheRule):
    """Computes all masks and the last round's commits; everything every ``cache_steps`` rounds and at block starts.

    ``cache_steps``: 8 for LLaDA, 4 to 16 for Dream in the released code.
    """

    cache_steps: int = 8

    def __post_init__(self) -> None:
        raise_problems([check_number(self.cache_steps, "cache_steps", minimum=1, integer=True)])

    def wanted(self, cache: CacheState, state: BlockState, masked: Array, upcoming: Array) -> Array:
        """Masks of the whole sequence, and last round's commits."""
        return masked | cache.pending

    def due(self, counted: CacheState, before: BlockState, after: BlockState, scheduler: Scheduler) -> Array:
        """Every ``cache_steps`` rounds, and at block starts."""
        return _every_few_rounds(self.cache_steps, counted, before, after, scheduler)


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

    def wanted(self, cache: CacheState, state: BlockState, masked: Array, upcoming: Array) -> Array:
        """Commits of last round and of this one, and a window of masks."""
        xp = array_namespace(masked)
        near = upcoming
        outside = masked[:, :1] & False
        for _ in range(self.window_size // 2):
            left = xp.concat([near[:, 1:], outside], axis=-1)
            right = xp.concat([outside, near[:, :-1]], axis=-1)
            near = near | left | right
        return upcoming | cache.pending | (near & masked)

    def due(self, counted: CacheState, before: BlockState, after: BlockState, scheduler: Scheduler) -> Array:
        """Every ``cache_steps`` rounds, and at block starts."""
        return _every_few_rounds(self.cache_steps, counted, before, after, scheduler)


@dataclass(frozen=True, slots=True)
class DkvPrefill(CacheRule):
    """Only the prompt's KV is kept, from the first forward on, and never refreshed."""

    def wanted(self, cache: CacheState, state: BlockState, masked: Array, upcoming: Array) -> Array:
        """The response."""
        return between(masked, state.prompt, state.end)

    def due(self, counted: CacheState, before: BlockState, after: BlockState, scheduler: Scheduler) -> Array:
        """Never again: the response, a new block included, is computed each round anyway."""
        return counted.due & False


REGISTRY.add("dkv", DkvDecode, "dKV-Cache decode (LLaDA: every 8 rounds)")
REGISTRY.add("dkv-greedy", DkvGreedy, "dKV-Cache greedy (random order only)")
REGISTRY.add("dkv-prefill", DkvPrefill, "dKV-Cache prefill")
