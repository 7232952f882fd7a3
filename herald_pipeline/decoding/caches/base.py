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

    ``needs_upcoming``: :meth:`plan` wants the positions that this round will commit, so the acceptance rule must know
    them before the forward.
    """

    needs_upcoming: ClassVar[bool] = False

    def start(self, state: BlockState, masked: Array) -> CacheState:
        """State before the first round, which computes everything; ``masked``: ``[rows, L]`` bool."""
        zero = state.s * 0
        return CacheState(due=zero == 0, since=zero, rounds=zero, shift=zero, pending=masked & False)

    @abstractmethod
    def plan(
        self,
        cache: CacheState,
        state: BlockState,
        masked: Array,
        *,
        upcoming: Array | None = None,
        predecessor: bool = False,
    ) -> ForwardPlan:
        """Positions of this round's forward.

        Parameters
        ----------
        masked
            ``[rows, L]`` bool, before this round's commits.
        upcoming
            ``[rows, L]`` bool, what this round will commit; where ``needs_upcoming``.
        predecessor
            True where logits at i predict position i + 1 (Dream): the position before each candidate is computed too.
        """

    def restrict(self, plan: ForwardPlan, state: BlockState, masked: Array, accepted: Array) -> Array:
        """Commits that the rule lets through: all of them, except in variants of released code."""
        return accepted

    @abstractmethod
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


REGISTRY: Registry[CacheRule] = Registry("cache")


def make_plan(
    cache: CacheState,
    state: BlockState,
    wanted: Array,
    candidates: Array,
    predecessor: bool,
) -> ForwardPlan:
    """Plan that computes ``wanted`` (everything in rows where a refresh is due), and nothing in finished rows.

    ``candidates``: positions whose logits are read, for ``predecessor``.
    """
    xp = array_namespace(wanted)
    if predecessor:
        before = xp.concat([candidates[:, 1:], candidates[:, :1] & False], axis=-1)
        wanted = wanted | before
    live = ~state.done
    refresh = cache.due & live
    valid = state.valid(wanted)
    forwarded = valid & live[:, None] & (wanted | refresh[:, None])
    return ForwardPlan(forwarded=forwarded, refresh=refresh, valid=valid & live[:, None])


def count_round(
    cache: CacheState,
    plan: ForwardPlan,
    before: BlockState,
    after: BlockState,
    accepted: Array,
    *,
    refresh_commits_count: bool = True,
) -> CacheState:
    """Counters after a round, ``due`` not decided yet.

    ``refresh_commits_count``: tokens committed by the forward that refreshes count towards the next refresh. Those of a
    request's first round always do: nothing was refreshed before it.
    """
    xp = array_namespace(accepted)
    committed = count(accepted)
    since = xp.where(plan.refresh, committed * 0, cache.since) + committed
    if not refresh_commits_count:
        first = before.U == 0
        since = xp.where(plan.refresh & ~first, since * 0, since)
    return replace(
        cache,
        since=since,
        rounds=xp.where(plan.refresh, cache.rounds * 0, cache.rounds) + 1,
        shift=after.s - before.s,
        pending=accepted,
    )


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


def let_through(plan: ForwardPlan, state: BlockState, masked: Array, accepted: Array, leftmost_only: bool) -> Array:
    """``accepted``, or in refreshing rows the leftmost candidate alone (the released Dream code)."""
    if not leftmost_only:
        return accepted
    xp = array_namespace(accepted)
    candidates = masked & state.active(masked)
    order = xp.cumulative_sum(xp.astype(candidates, xp.int64), axis=-1)
    leftmost = candidates & (order == 1)
    return xp.where(plan.refresh[:, None], leftmost, accepted)


def between(like: Array, left: Array, right: Array) -> Array:
    """``[rows, L]`` bool: positions of the half-open ranges [left, right)."""
    place = positions(like)
    return (place >= left[:, None]) & (place < right[:, None])
