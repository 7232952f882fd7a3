"""What a cache rule is: which positions a round computes anew, and which KV it reuses, under bidirectional attention.

With full attention every cached KV is an approximation: it was computed beside other tokens than are there now. A
rule says when that is forgiven. A position is, each round, exactly one of: *active* (in [s, e), computed), *window*
(computed because it is near), *refresh* (computed because everything is), or *reused*.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

from herald_pipeline.decoding.arrays import Array, array_namespace, count, positions
from herald_pipeline.decoding.registry import Registry
from herald_pipeline.decoding.schedulers.base import BlockState, Scheduler
from herald_pipeline.errors import ConfigError


@dataclass(frozen=True, slots=True)
class CacheState:
    """What a rule remembers between rounds.

    ``due [rows]`` bool: the next round computes every position. ``since [rows]``: tokens committed since the last such
    round. ``rounds [rows]``: rounds since then. ``shift [rows]``: how far s moved in the last round.
    ``pending [rows, L]`` bool: committed in the last round, so their KV is still that of a mask.
    """

    due: Array
    since: Array
    rounds: Array
    shift: Array
    pending: Array


@dataclass(frozen=True, slots=True)
class ForwardPlan:
    """One round's forward: ``forwarded [rows, L]`` bool, ``refresh [rows]`` bool, ``valid [rows, L]`` bool.

    Keys are all valid positions: the forwarded ones as computed now, the others as cached.
    """

    forwarded: Array
    refresh: Array
    valid: Array

    @property
    def reused(self) -> Array:
        """``[rows, L]`` bool: positions whose cached KV is attended to."""
        return self.valid & ~self.forwarded

    def split(self, active: Array) -> tuple[Array, Array, Array]:
        """Forwarded positions as (active, window, refresh), disjoint, ``[rows, L]`` each.

        ``active`` is the block after :meth:`Scheduler.open`, which is when AdaBlock's is known.
        """
        beside = self.forwarded & ~active
        whole = self.refresh[:, None]
        return self.forwarded & active, beside & ~whole, beside & whole


class CacheRule(ABC):
    """A rule for what is computed and what is reused; subclasses are frozen dataclasses of its parameters.

    A rule answers two questions, :meth:`wanted` and :meth:`due`; what follows from the answers is the same for all.
    ``needs_upcoming``: :meth:`wanted` reads the positions that this round will commit, so the acceptance rule must know
    them before the forward.
    """

    needs_upcoming: ClassVar[bool] = False

    @property
    def refresh_commits_count(self) -> bool:
        """Tokens committed by a refreshing forward count towards the next refresh."""
        return True

    @property
    def refresh_accepts_leftmost_only(self) -> bool:
        """A refreshing forward commits the block's leftmost mask alone (released code for Dream)."""
        return False

    @abstractmethod
    def wanted(self, cache: CacheState, state: BlockState, masked: Array, upcoming: Array) -> Array:
        """``[rows, L]`` bool: positions to compute in a round that is no refresh; those past a row's end are dropped.

        ``masked``: before this round's commits. ``upcoming``: what it will commit, all false unless
        ``needs_upcoming``.
        """

    @abstractmethod
    def due(self, counted: CacheState, before: BlockState, after: BlockState, scheduler: Scheduler) -> Array:
        """``[rows]`` bool: the next round is a refresh.

        ``counted`` holds the counters after this round, ``before`` and ``after`` the block around it.
        """

    def start(self, state: BlockState, masked: Array) -> CacheState:
        """State before the first round, which computes everything; ``masked``: ``[rows, L]`` bool."""
        zero = state.s * 0
        return CacheState(due=zero == 0, since=zero, rounds=zero, shift=zero, pending=masked & False)

    def plan(
        self,
        cache: CacheState,
        state: BlockState,
        masked: Array,
        *,
        upcoming: Array | None = None,
        predecessor: bool = False,
    ) -> ForwardPlan:
        """Positions of this round's forward: everything where a refresh is due, nothing in finished rows.

        Parameters
        ----------
        masked
            ``[rows, L]`` bool, before this round's commits.
        upcoming
            ``[rows, L]`` bool, what this round will commit; where ``needs_upcoming``.
        predecessor
            True where logits at i predict position i + 1 (Dream): the position before each candidate is computed too.
        """
        candidates = masked & state.active(masked)
        if self.needs_upcoming:
            if upcoming is None:
                message = "this cache must know a round's commits before its forward; use decoder 'random'"
                raise ConfigError(message)
            candidates = upcoming
        wanted = self.wanted(cache, state, masked, masked & False if upcoming is None else upcoming)
        if predecessor:
            xp = array_namespace(wanted)
            wanted = wanted | xp.concat([candidates[:, 1:], candidates[:, :1] & False], axis=-1)
        live = ~state.done
        refresh = cache.due & live
        valid = state.valid(wanted) & live[:, None]
        return ForwardPlan(forwarded=valid & (wanted | refresh[:, None]), refresh=refresh, valid=valid)

    def restrict(self, plan: ForwardPlan, state: BlockState, masked: Array, accepted: Array) -> Array:
        """Commits that the rule lets through: all of them, except in variants of released code."""
        if not self.refresh_accepts_leftmost_only:
            return accepted
        xp = array_namespace(accepted)
        candidates = masked & state.active(masked) & ~state.done[:, None]
        order = xp.cumulative_sum(xp.astype(candidates, xp.int64), axis=-1)
        return xp.where(plan.refresh[:, None], candidates & (order == 1), accepted)

    def observe(
        self,
        cache: CacheState,
        plan: ForwardPlan,
        before: BlockState,
        after: BlockState,
        accepted: Array,
        scheduler: Scheduler,
    ) -> CacheState:
        """State of the next round, given this round's plan and commits and the block before and after them."""
        xp = array_namespace(accepted)
        committed = count(accepted)
        since = xp.where(plan.refresh, committed * 0, cache.since) + committed
        if not self.refresh_commits_count:
            # A request's first round counts whatever the rule says: nothing was refreshed before it.
            since = xp.where(plan.refresh & (before.U != 0), since * 0, since)
        counted = replace(
            cache,
            since=since,
            rounds=xp.where(plan.refresh, cache.rounds * 0, cache.rounds) + 1,
            shift=after.s - before.s,
            pending=accepted,
        )
        return replace(counted, due=self.due(counted, before, after, scheduler))


REGISTRY: Registry[CacheRule] = Registry("cache")


def block_changed(before: BlockState, after: BlockState) -> Array:
    """``[rows]`` bool: a fixed block ended in this round."""
    return after.s != before.s


def not_opened(after: BlockState) -> Array:
    """``[rows]`` bool: a block whose end its first forward decides (AdaBlock); only a full forward can."""
    return after.e == after.s


def refresh_at_blocks(
    counted: CacheState, before: BlockState, after: BlockState, scheduler: Scheduler, period: int | None = None
) -> Array:
    """``[rows]`` bool: a refresh is due at block starts; every ``period`` (S_init) commits if the block slides."""
    if scheduler.slides or period is not None:
        due = counted.since >= (period or scheduler.block_length)
    else:
        due = block_changed(before, after)
    return due | not_opened(after)


def between(like: Array, left: Array, right: Array) -> Array:
    """``[rows, L]`` bool: positions of the half-open ranges [left, right)."""
    place = positions(like)
    return (place >= left[:, None]) & (place < right[:, None])
