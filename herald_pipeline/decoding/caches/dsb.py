"""DSB Cache: the block and a window left of it are computed each round, everything every S_init committed tokens.

Round t computes [s - w, e + suffix) with w = max(prefix_window, s - previous s): what has just slid out of the block
was computed as masks, so it is computed at least once more as tokens (DSB article, sections 5 and 14).
"""

from dataclasses import dataclass

from herald_pipeline.decoding.arrays import Array, array_namespace
from herald_pipeline.decoding.caches.base import REGISTRY, CacheRule, CacheState, between, refresh_at_blocks
from herald_pipeline.decoding.schedulers.base import BlockState, Scheduler
from herald_pipeline.errors import check_number, raise_problems

LLADA_PREFIX_WINDOW = 24
DREAM_PREFIX_WINDOW = 4


@dataclass(frozen=True, slots=True)
class DsbCache(CacheRule):
    """DSB Cache.

    Parameters
    ----------
    prefix_window
        Least number of positions computed left of s (p_min): 24 for LLaDA, 4 for Dream. Cut at position 0.
    suffix_window
        Positions computed right of e; 0 in the method, an ablation otherwise. Cut at the sequence's end.
    refresh_every
        Committed tokens between full forwards; the scheduler's S_init (or B) when not given.
    refresh_commits_count
        Whether the commits of a refreshing forward count towards the next period: false is our reading of the article
        (its counter runs from the refresh on), true is the released code. A request's first round counts either way.
    refresh_accepts_leftmost_only
        The released Dream code: a refreshing forward commits position s alone, whatever its confidence.
    """

    prefix_window: int = LLADA_PREFIX_WINDOW
    suffix_window: int = 0
    refresh_every: int | None = None
    refresh_commits_count: bool = False
    refresh_accepts_leftmost_only: bool = False

    def __post_init__(self) -> None:
        raise_problems(
            [
                check_number(self.prefix_window, "prefix_window", minimum=0, integer=True),
                check_number(self.suffix_window, "suffix_window", minimum=0, integer=True),
                None
                if self.refresh_every is None
                else check_number(self.refresh_every, "refresh_every", minimum=1, integer=True),
            ]
        )

    def wanted(self, cache: CacheState, state: BlockState, masked: Array, upcoming: Array) -> Array:
        """[s - max(prefix_window, shift), e + suffix_window)."""
        xp = array_namespace(masked)
        width = xp.where(cache.shift > self.prefix_window, cache.shift, self.prefix_window)
        return between(masked, state.s - width, state.e + self.suffix_window)

    def due(self, counted: CacheState, before: BlockState, after: BlockState, scheduler: Scheduler) -> Array:
        """When the tokens committed since the last refresh reach the period."""
        return refresh_at_blocks(counted, before, after, scheduler, self.refresh_every or scheduler.block_length)


REGISTRY.add("dsb", DsbCache, "DSB article section 5, p_min of LLaDA")
REGISTRY.add("dsb-dream", DsbCache, "DSB article section 5, p_min of Dream", prefix_window=DREAM_PREFIX_WINDOW)
REGISTRY.add("dsb-released", DsbCache, "DSB's released LLaDA code", refresh_commits_count=True)
REGISTRY.add(
    "dsb-released-dream",
    DsbCache,
    "DSB's released Dream code",
    prefix_window=DREAM_PREFIX_WINDOW,
    refresh_commits_count=True,
    refresh_accepts_leftmost_only=True,
)
